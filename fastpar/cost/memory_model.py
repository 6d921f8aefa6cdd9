"""The peak of a training step's memory on the fullest rank, predicted: closed form, nothing is run.

A step's memory is what stays (parameters, gradients, the optimizer's numbers) and what comes and
goes. Of the latter the peak is in one of six places, and the largest of them is predicted:

    loss        all activations; the head's input, dx and dweight (in fp32), a chunk's logits
    dweight     as loss without the logits, while dx and dweight are scaled and cast; or while the
                head's gradient is brought into a bucket of its own
    block       backward of a block: activations up to it, the gradients that its ops hand on, one
                weight's gradient; the head's gradient waits for the embedding's; at stages 2 and 3
                whole gradients on their way, at stage 3 two gathered units
    embedding   backward of the embedding, whose gradient is as large as the head's
    update      Adafactor's: the updates of a batch of matrices, copies of what is rounded (AdamW's
                kernel needs nothing)
    between     nothing: what stays

Which block it is depends on what shrinks faster towards the first one: activations, or the room for
gradients on their way (gradient_flow.py plays the engine's rules).

[Note: units] a: the features of this rank's tokens between blocks, [N, C] ([N/tp, C] under sequence
parallelism); whole: of all tokens; split: [N, C/tp]. All in bytes of the weights' format.

[Note: what a layer keeps] tests/contracts/test_tp_memory.py has it exactly:

    none        4 a + 12 split: both norms' x and y; qkv, o, fc, gelu
    selective   3 a + 8 split: both inputs' sum, outputs of c_proj; qkv, o, fc
    full        2 a: x and delta (the first block has no delta)

and mean and rstd of each norm and attention's row statistics (lse), in fp32.

On a GPU the same holds, but a chunk's logits go, dx and dweight are always scaled, and attention
keeps one number of a row instead of two. Not predicted: what StepMemory does not measure either
(transports' own buffers), and scratch of oneDNN's products (bf16 on a CPU).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fastpar.config.config import VOCAB_MULTIPLE
from fastpar.cost.gradient_flow import Flow, Sizes, flow_of, sizes_of
from fastpar.cost.workload import Job, Setup
from fastpar.kernels.linear_cross_entropy import default_chunk_rows
from fastpar.optim.adafactor import BATCH
from fastpar.sharding.layout import default_bucket_mb

FIRST_BUCKET_MB = 1.0  # parallelize's default
_RNG_STATE = 5056  # torch's generator on the CPU, saved with each recomputed block
# cuBLAS's workspace on Hopper, from torch's allocator (a quarter on older GPUs), which the threads
# of forward and of backward have one each of.
_CUBLAS = 2 * 32 * 2**20
_MOMENT_BLOCK = 256  # 8-bit moments have an fp32 scale for each block of so many


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at the peak of a step, by kind.

    activations: what forward keeps, and the gradients that one op of backward hands to the next.
    loss: logits, dx and dweight of the head, and the head's gradient until it is used.
    buckets: whole gradients on their way, gathered parameters, copies in the format of the wire,
        one weight's gradient, on a GPU also cuBLAS's workspace.
    update: what the optimizer needs for a moment.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    loss: int = 0
    buckets: int = 0
    update: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def states(self) -> int:
        """What stays between steps."""
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        kinds = ((field.name, getattr(self, field.name)) for field in fields(self))
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds if size)
        return f"{format_bytes(self.total)} ({parts})"


def format_bytes(size: float) -> str:
    """In GB, or in MB below a tenth of one."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def predict_states(job: Job, setup: Setup) -> Memory:
    """What surely stays between steps; no activations, nothing on its way."""
    sizes = _sizes(job, setup)
    stage, n = _stage(setup), setup.n_shards
    whole, shard = sizes.padded(n), sizes.padded(n) / n
    return Memory(
        parameters=round(setup.weight_bytes * (shard if stage == 3 else whole)),
        gradients=round(setup.grad_bytes * (shard if stage >= 2 else whole)),
        # Padding has no state. A rank can have a little more than its share of what has.
        optimizer=round(_optimizer(setup, sizes, sizes.elements / (n if stage else 1))),
    )


def predict_memory(job: Job, setup: Setup) -> Memory:
    """The peak of a step, after the first ones (which make the optimizer's state)."""
    if setup.pp > 1:
        return _pipeline(job, setup)
    return _peak(job, setup, job.shape.n_layer, 1, head=True)


def _pipeline(job: Job, setup: Setup) -> Memory:
    """One forward, one backward in turn: the first stage keeps pp micro-batches, the last has the
    head. Rough: for figures that others published."""
    layers = math.ceil(job.shape.n_layer / setup.pp)
    kept = min(setup.pp, setup.grad_accum_steps)
    ends = (
        _peak(job, setup, layers, kept, head=False),
        _peak(job, setup, layers, 1, head=True),
    )
    return max(ends, key=lambda memory: memory.total)


def _stage(setup: Setup) -> int:
    """That is run: with nobody to share with it is 0."""
    return setup.zero_stage if setup.n_shards > 1 else 0


def bucket_mb_of(setup: Setup) -> float:
    """The cap of a bucket."""
    if setup.bucket_mb is not None:
        return setup.bucket_mb
    return default_bucket_mb(setup.dp, setup.transport if setup.dp > 1 else "none")


def _sizes(job: Job, setup: Setup) -> Sizes:
    tp = setup.tp
    return sizes_of(
        layers=math.ceil(job.shape.n_layer / setup.pp),
        width=job.shape.n_embd,
        tokens=job.shape.block_size,
        rows=vocabulary_rows(job, tp),
        tp=tp,
        weight_bytes=setup.weight_bytes,
        grad_bytes=setup.grad_bytes,
        by_unit=_stage(setup) > 0,
        bucket_mb=bucket_mb_of(setup),
        first_bucket_mb=FIRST_BUCKET_MB,
    )


def vocabulary_rows(job: Job, tp: int) -> int:
    """Of the embedding, on a rank of tp: the padding of each rank's slice counts."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-job.shape.padded_vocab_size // multiple) * multiple // tp


def _optimizer(setup: Setup, sizes: Sizes, elements: float) -> float:
    """Bytes of its numbers for so many of a rank's elements."""
    size = setup.state_bytes * elements
    if setup.optimizer == "adamw" and setup.moment_dtype == "int8":
        size += 2 * 4 / _MOMENT_BLOCK * elements
    if setup.optimizer == "adafactor":  # means of rows and columns
        size += 4 * sizes.factors * elements / sizes.elements
    return size


def _adafactor_scratch(setup: Setup, sizes: Sizes) -> float:
    """The most that a batch of matrices needs; see [Note: batches] in adafactor.py."""
    each, rounded = 4, 0  # bytes of an element of the batch, and of its largest matrix
    if setup.dtype == "bf16" and setup.master_weights != "none":
        each, rounded = (8, 8) if setup.master_weights == "remainder" else (4, 6)
    most = batch = largest = 0
    for n in sizes.matrices:
        if batch + n > BATCH:
            batch = largest = 0
        batch, largest = batch + n, max(largest, n)
        most = max(most, each * batch + rounded * largest)
    return float(most)


@dataclass(frozen=True)
class _Phase:
    """What comes and goes, at one moment."""

    activations: float
    loss: float
    buckets: float
    update: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.loss + self.buckets + self.update


def _peak(job: Job, setup: Setup, layers: int, kept_batches: int, *, head: bool) -> Memory:
    stays = predict_states(job, setup)
    phases = _Phases(job, setup, layers, kept_batches, head)
    top = max(phases.all(), key=lambda phase: phase.total)
    return Memory(
        stays.parameters,
        stays.gradients,
        stays.optimizer,
        round(top.activations),
        round(top.loss),
        round(top.buckets) + (_CUBLAS if setup.device_type == "cuda" else 0),
        round(top.update),
    )


class _Phases:
    """The places where the peak can be; see the top of the file."""

    def __init__(self, job: Job, setup: Setup, layers: int, kept_batches: int, head: bool) -> None:
        shape, tp = job.shape, setup.tp
        self.setup, self.layers, self.head = setup, layers, head
        self.stage = _stage(setup)
        self.mode, self.on_gpu = setup.activation_checkpointing, setup.device_type == "cuda"
        self.sp = tp > 1 and setup.sequence_parallel
        width, self.item = shape.n_embd, setup.weight_bytes
        self.width = width
        self.n = setup.micro_batch_size * job.seq_len
        self.whole = self.n * width * self.item
        self.split = self.whole / tp
        self.a = self.split if self.sp else self.whole
        self.own_tokens = self.n / tp if self.sp else self.n
        self.statistics = 8 * self.own_tokens  # mean and rstd of a norm
        # Of a row and head of attention: lse; on the CPU two numbers.
        self.lse = (4 if self.on_gpu else 8) * self.n * shape.n_head / tp
        self.res = self.a * (2 if shape.dropout else 1)  # gradients of x and delta: one or two
        self.weight = 4 * width * width / tp * self.item  # the gradient of the largest of a block
        self.rows = vocabulary_rows(job, tp)
        self.table = self.rows * width
        self.batch = 16 * self.n  # idx and targets
        self.sizes = _sizes(job, setup)
        self.flow = self._flow(job)
        # What the other micro-batches of a pipeline keep meanwhile.
        self.others = (kept_batches - 1) * self._kept(layers)

    def _flow(self, job: Job) -> Flow:
        setup, stage = self.setup, self.stage
        again = setup.accumulate == "shard" and setup.grad_accum_steps > 1  # adds to a shard
        return flow_of(
            self.sizes,
            stage=stage,
            reduces=setup.dp > 1,
            bucket_mb=bucket_mb_of(setup),
            wire_bytes=setup.wire_bytes if setup.wire_bytes != setup.grad_bytes else 0,
            sum_bytes=setup.grad_bytes / setup.n_shards if again and stage else 0.0,
            copies=setup.n_shards < setup.dp,
            whole=stage < 2 and setup.grad_accum_steps > 2 if again else setup.grad_accum_steps > 1,
        )

    def all(self) -> list[_Phase]:
        found = [*self._blocks(), *self._embedding()]
        if self.head:
            found += [self._loss(), self._dweight()]
        if self.setup.optimizer == "adafactor":
            found.append(
                _Phase(0.0, self._standing, 0.0, _adafactor_scratch(self.setup, self.sizes))
            )
        return found

    def _kept(self, layers: int) -> float:
        """By so many blocks, see [Note: what a layer keeps]."""
        if layers <= 0:
            return 0.0
        if self.mode == "full":
            saved = 2 * self.a * layers - self.a
        elif self.mode == "selective":
            saved = (3 * self.a + 8 * self.split + self.lse) * layers
        else:
            one = 4 * self.a + 12 * self.split + 2 * self.statistics + self.lse
            saved = one * layers
        if self.mode != "none" and not self.on_gpu:
            saved += _RNG_STATE * layers
        return saved

    @property
    def _workspace(self) -> float:
        """Of the head: a chunk's logits; on a CPU they stay, and a 16-bit product of dweight."""
        kind = "cuda" if self.on_gpu else "cpu"
        rows = min(self.n, default_chunk_rows(self.n, self.width, self.rows, kind))
        product = self.item * self.table if self.item == 2 and not self.on_gpu else 0
        return rows * self.rows * self.item + product

    @property
    def _standing(self) -> float:
        """What of the head's workspace is there all the time."""
        return 0.0 if self.on_gpu or not self.head else self._workspace

    def _gathered(self, units: int) -> float:
        """Parameters at stage 3: the root's, and so many of the largest unit's."""
        if self.stage < 3:
            return 0.0
        units = min(units, self.sizes.n_units)
        return self.item * (self.sizes.root + units * self.sizes.unit)

    def _loss(self) -> _Phase:
        # ln_f's sum and output and statistics
        kept = self._kept(self.layers) + 2 * self.a + self.statistics + self.batch
        dweight = 4 * self.table
        loss = self._workspace + self.whole + dweight + 4 * self.n
        if self.sp:
            loss += self.whole  # x of all tokens
        chunked = self.n > default_chunk_rows(self.n, self.width, self.rows, "cpu")
        if self.item == 2 and not self.on_gpu and chunked:
            loss += dweight  # a 16-bit product is widened to be added
        start = self.flow.at_loss
        return _Phase(kept + self.others, loss, start + self._gathered(1))

    def _dweight(self) -> _Phase:
        kept = self._kept(self.layers) + self.a + self.statistics + self.batch
        scales = self.on_gpu or self.setup.grad_accum_steps > 1
        loss = self._standing + self.whole + 4 * self.table
        summed = self.whole if self.setup.tp > 1 else 0.0
        if scales:
            loss += max(self.whole, summed) + 4 * self.table
        else:
            loss += summed
        if self.item == 2:
            loss += self.item * self.table
        return _Phase(kept + self.others, loss, self.flow.at_loss + self._gathered(1))

    def _waiting(self) -> float:
        """The head's gradient, until the embedding's is there."""
        return self.item * self.table if self.head else 0.0

    def _block(self) -> tuple[float, ...]:
        """The most that a block's backward has on top of what is kept up to it, at each moment."""
        a, whole, split, weight = self.a, self.whole, self.split, self.weight
        tokens = whole if self.sp else 0.0  # gathered
        arriving = whole + a if self.sp else 0.0  # and scattered
        again = last = 0.0
        if self.mode == "full":  # the block's forward; its last product is thrown away
            again = 4 * a + 12 * split + 2 * self.statistics + self.lse
            last = self.res + again + a + whole + (a if self.sp else 0.0)
        elif self.mode == "selective":
            again = 4 * a + 4 * split + 2 * self.statistics
            last = self.res + again
            again -= 2 * a  # what was kept of c_proj has been used
        start = max(last, self.res + again + 4 * split + weight + tokens)
        # gelu's output is gone. Its backward, or c_proj's gradient on its way into the bucket.
        c_proj = again + a + max(4 * split, weight)
        # As c_fc's backward runs, and when its input and gelu's are gone.
        c_fc = again - 4 * split + a + whole + weight + arriving
        # Backward of c_attn: the second norm, the MLP and attention's output are gone.
        rest = again - 9 * split - a + whole + 3 / 4 * weight + arriving
        return start, c_proj, c_fc, rest

    def _blocks(self) -> list[_Phase]:
        loss = self._waiting() + self._standing
        found = []
        for backward, pairs in zip(self._block(), self.flow.in_blocks):
            for layers, alive in pairs:
                ahead = min(2, math.ceil(layers * self.sizes.n_units / self.sizes.layers))
                kept = self._kept(layers) + backward - self.weight + self.batch + self.others
                found.append(_Phase(kept, loss, self.weight + alive + self._gathered(ahead)))
        return found

    def _embedding(self) -> list[_Phase]:
        """Its backward; its gradient is brought into the bucket; the bucket is sent."""
        table, waiting, gathered = self.item * self.table, self._waiting(), self._gathered(0)
        loss = waiting + self._standing
        activations = self.res + self.batch + (self.whole if self.sp else 0.0)
        made, sums = self.flow.at_embedding + gathered, 0.0
        found = []
        if self.item == 2 and not self.on_gpu:  # rows that occur are added up in fp32
            sums = 4 * min(self.n, self.rows) * self.width
            wide = 4 * self.n * self.width
            found.append(_Phase(activations + wide, loss, made + sums))
            sums += sums / 2
        return [
            *found,
            _Phase(activations, loss, made + sums + table),
            _Phase(self.batch, self._standing, self.flow.at_table + table + gathered),
            _Phase(self.batch, self._standing, self.flow.at_end + gathered),
        ]
