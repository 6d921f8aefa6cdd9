"""The peak memory of a training step: predicted for the fullest rank, measured on this one.

The prediction is closed-form; nothing runs.

A step's memory is what stays (parameters, gradients, the optimizer's state) and what is temporary.
The temporary part peaks at one of six moments, and the largest of them is predicted:

    loss        all activations; the head's input, dx and dweight (in fp32), a chunk's logits
    dweight     as loss without the logits, while dweight is cast
    block       backward of a block: activations up to it, the gradients between its ops, one
                weight's gradient; the head's gradient waits for the embedding's; at stages 2 and 3
                full gradients in flight, at stage 3 two gathered units
    embedding   backward of the embedding, whose gradient is as large as the head's
    update      Adafactor's: the updates of a batch of matrices, copies of rounded weights; Muon's:
                matrices in flight and the products of one (AdamW's kernel needs nothing)
    between     nothing: what stays

On a GPU the same applies, except that a chunk's logits are freed, and attention keeps one number
per row instead of two. Not predicted: what StepMemory does not measure either (transports' own
buffers), the random state of recomputed blocks, and oneDNN's packed operands of 16-bit products on
a CPU.

[Note: gradients under way] At stages 2 and 3 a bucket has memory from the first gradient copied
into it until its reduction is complete; the engine waits for the oldest reduction when
reducer.too_many_in_flight() says so. So the full gradients that are alive grow with the blocks
that backward has passed, bucket by bucket, up to those in flight and the one being filled; the
bucket that the last norm opens stays. At stages 0 and 1 gradients have their own memory, but
messages in another format are copies until the end of backward. At stage 3 the parameters of two
units are gathered.

[Note: units] a: the features of this rank's tokens between blocks, [N, C] ([N/tp, C] under sequence
parallelism); whole: of all tokens; split: [N, C/tp]; heads: [N, H*D] of this rank's heads, equal to
split if tp divides them. All in bytes of the weights' format. What a block keeps of them is in
settings/model.py; under "selective" recomputation it is its inputs and the outputs of products and
attention, under "full" its inputs: x and delta (the first block has no delta).

[Note: joined] Along the row of a grid, tensors are concatenated after a gather, or cut before a
sum, in a copy; so are a weight and its gradient (cut by rows) along their columns. Such a copy and
its source are alive at once. With one row or one column there is nothing to concatenate.

[Note: a pipeline's rank] keeps what its schedule holds: of each micro-batch and chunk the blocks'
activations, what was received and what was sent, and on the last stage the gradient of the head's
input, the norm's output and dweight; also the gradient that the running backward was given, and the
message that is received ahead. A backward in two halves fills no bucket in the first half, which
sets aside the gradients of norms, biases and tables; in the second half bucket after bucket is
filled while the rest shrinks.

It is measured with StepMemory:

    with StepMemory(device) as memory:
        step()
    print(memory.peak_bytes)

On a GPU it is the peak of torch's allocator. The CPU's allocator records no peak, but reports every
allocation and release to a profiler: the peak is the highest sum of these, on top of what was alive
before. Alive are the storages of all tensors that Python knows, and this rank's share of memory
that ranks share (comm/transports.py), which does not come from torch's allocators.

Not counted: a transport's own memory (NCCL's buffers; up to 8 MiB per group of the shared memory),
the heaps of the interpreter and of libraries, and on the CPU allocations by other threads.

[Note: what Python does not know] Buckets of torch's DDP belong to C++ alone. For such strategies
enter with alive_bytes=0 before the model is built, and call begin_step() before the step.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fastpar.axes import every
from fastpar.axes.context import attended_heads
from fastpar.axes.data import ROOT, GPTBuckets, buckets_of
from fastpar.axes.offload import going_down
from fastpar.axes.pipeline import RankParts, parts_of
from fastpar.axes.pipeline.schedules import SPLIT, Held, held_of
from fastpar.axes.step import Setup, Workload
from fastpar.axes.wires import message_bytes
from fastpar.comm.transports import shared_bytes, shared_ranges
from fastpar.engine.engine import Engine
from fastpar.engine.gradients import IN_FLIGHT as IN_REDUCTION
from fastpar.kernels.linear.fp8 import BLOCK
from fastpar.kernels.loss.linear_cross_entropy import default_chunk_rows, workspace_bytes
from fastpar.optim.adafactor import BATCH
from fastpar.predict.time import product_bytes, updates_of
from fastpar.settings.model import Part, block_parts, products, widths

# cuBLAS's workspace on Hopper, from torch's allocator (a quarter on older GPUs): one each for the
# threads of forward and of backward.
_CUBLAS = 2 * 32 * 2**20
_MOMENT_BLOCK = 256  # 8-bit moments have an fp32 scale per block of this size


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at the peak of a step, by kind.

    Attributes:
        activations: what forward keeps, and the gradients passed between ops of backward.
        loss: logits, dx and dweight of the head, and the head's gradient until it is used.
        buckets: full gradients in flight, gathered parameters, copies in the wire format, one
            weight's gradient, on a GPU also cuBLAS's workspace.
        update: temporary memory of the optimizer.
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
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in vars(self).items() if size
        )
        return f"{format_bytes(self.total)} ({parts})"


def format_bytes(size: float) -> str:
    """A size in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def predict_states(workload: Workload, setup: Setup, parts: RankParts | None = None) -> Memory:
    """What certainly stays between steps; no activations, nothing in flight; see buckets_of()."""
    buckets, n = buckets_of(workload, setup, parts), setup.n_shards if setup.stage else 1
    # Padding has no state. A rank can have slightly more than its share of the state.
    elements = buckets.share(n)
    state = setup.state_bytes * elements
    if setup.optimizer == "adamw" and setup.moment_dtype == "int8":
        state += 2 * 4 / _MOMENT_BLOCK * elements
    if setup.optimizer == "adafactor":  # means of rows and columns
        state += 4 * sum(map(sum, buckets.matrices)) * elements / buckets.elements
    if setup.optimizer == "muon":  # one momentum, not two moments
        for found in updates_of(workload.shape, buckets, setup):
            state -= 4 * sum(found.numel.values()) / found.n_shards
    sizes: dict[str, float] = {"optimizer": state}
    for axis in every():
        axis.states(setup, buckets, sizes)
    return Memory(**{name: round(size) for name, size in sizes.items()})


def _adafactor_scratch(setup: Setup, buckets: GPTBuckets) -> float:
    """The most memory that a batch of matrices needs; see adafactor.py, "Batches"."""
    each, rounded = 4, 0  # bytes of an element of the batch, and of its largest matrix
    if setup.dtype == "bf16" and setup.master_weights != "none":
        each, rounded = (8, 8) if setup.master_weights == "remainder" else (4, 6)
    sizes = [math.prod(shape) for shape in buckets.matrices]
    return float(each * max(*sizes, min(sum(sizes), BATCH)) + rounded * max(sizes))


class Moment(NamedTuple):
    """Bytes of temporary memory at one moment."""

    activations: float
    loss: float
    buckets: float
    update: float = 0.0


class Peak:
    """The moments that can be the peak; see the top of the file.

    Args:
        parts: the rank's parts of the model; held: micro-batches that each of its chunks keeps.
    """

    def __init__(self, workload: Workload, setup: Setup, parts: RankParts, held: Held) -> None:
        shape, tp = workload.shape, setup.tp
        self.shape, self.setup, self.parts = shape, setup, parts
        self.head, self.buckets = parts.last, buckets_of(workload, setup, parts)
        self.mode = setup.activation_checkpointing
        self._more = sum(axis.keeps(workload, setup) for axis in every())
        self.on_gpu, self.item = setup.device_type == "cuda", setup.weight_bytes
        self.grid = setup.tp_grid is not None
        self.sp = self.grid or (tp > 1 and setup.sequence_parallel)
        self.width, self.n = shape.n_embd, setup.tokens_of_rank(workload)
        self.whole = self.n * self.width * self.item
        self.split = self.whole / tp
        n_heads = shape.heads_of_rank(tp)
        self.heads = self.n * n_heads * shape.head_size * self.item
        # Heads that ranks of cp attend, and on a GPU their o, which c_proj keeps for its tokens.
        attended = attended_heads(shape, setup)
        self.padding = self.n * (attended - n_heads) * shape.head_size * self.item
        exchanged = self.on_gpu and setup.cp > 1 and not setup.by_keys
        self.again = self.heads + self.padding if exchanged else 0.0
        self.a = self.split if self.sp else self.whole
        # Mean and rstd of a norm.
        self.statistics = 8 * (self.n / tp if self.sp and not self.grid else self.n)
        # Per row and head of attention: lse; on the CPU two numbers.
        self.lse = (4 if self.on_gpu else 8) * self.n * attended
        self.res = self.a * (2 if shape.dropout else 1)  # gradients of x and delta: one or two
        self.weight = 4 * self.width**2 / tp * self.item  # the gradient of a block's largest weight
        self.letters = widths(shape, tp, setup.ep)
        # The same for a block with experts: each stack has one gradient.
        self.stack = self.letters["S"] * self.width * self.letters["H"] * self.item
        self.rows = self.letters["V"]
        self.table = self.rows * self.width
        # Outside the buckets; none on a GPU whose buckets keep fp32 gradients of 16-bit weights:
        # there the loss writes it into its bucket, which is open all the time at stages 2 and 3.
        wide = self.on_gpu and self.item == 2 and setup.grad_bytes == 4
        wide &= tp == setup.pp == 1 and not self.grid
        self.table_made = 0.0 if wide else self.item * self.table
        self.table_waits = 4.0 * self.table * (setup.stage >= 2) if wide else self.table_made
        # idx and targets; each rank of a grid has those of the full batch.
        self.batch = 16 * self.n * setup.cp * setup.rows * setup.depth
        # For a grid, see [Note: joined]: activations that are concatenated; for a matrix whose
        # columns are cut by rows: whether it is gathered, and its share; relative to the gradient's
        # size, the copy in which it is cut, plus the share.
        self.joined = self.whole * (self.grid and tp > 1)
        self.several, self.share = setup.rows > 1, 1 / setup.rows
        self.cut = self.several * (1 + self.share)
        self.chunk, self.splits = held.chunk, setup.schedule in SPLIT and setup.pp > 1
        # In elements, see [Note: gradients under way]: of all; of a block; of a bucket; of buckets
        # in flight.
        self.everything = self.buckets.padded(1)
        first = parts.first and held.chunk == 0
        last = parts.last and held.chunk == len(parts.layers) - 1
        buckets = self.buckets.layout.buckets
        self.bucket = max([b.numel for b in buckets if b.unit != ROOT], default=1)
        cap = setup.bucket_bytes / setup.grad_bytes
        self.waiting = max(2, IN_REDUCTION * cap // self.bucket) * self.bucket
        self.mine = parts.layers[held.chunk]
        self.blocks = self._of(self.buckets.blocks, self.mine)
        # The embedding's and positions' bucket, the bucket that the last norm opens, and the head's
        # table if it waits for no embedding.
        self.root = self.table + shape.block_size * self.width if first else 0
        self.opened = buckets[self.buckets.arrival[0]].numel if last else 0
        self.early = self.table if last and not first else 0
        # Bytes per element: of its messages, of the shard that its sum is added to.
        self.messages = message_bytes(setup)
        again = setup.accumulate == "shard" and setup.grad_accum_steps > 1 and setup.stage > 0
        shards = setup.n_shards
        if self.buckets.of_experts:
            shards = self.buckets.elements / self.buckets.share(shards)
        self.sums = setup.grad_bytes / shards if again else 0.0
        self.at_loss = self._alive(0.0, 0.0)
        # What the other micro-batches of a pipeline keep meanwhile.
        self.others = self._others(held)

    @staticmethod
    def _of(blocks: Sequence[float], layers: Sequence[bool]) -> float:
        """The sum over these layers; blocks: of a dense block, of one with experts."""
        experts = sum(layers)
        return blocks[0] * (len(layers) - experts) + (blocks[1] * experts if experts else 0)

    def _others(self, now: Held) -> float:
        """What a pipeline keeps besides the blocks in backward; see [Note: a pipeline's rank]."""
        if self.setup.pp == 1:
            return 0.0
        parts, held, last = self.parts, now.held, len(now.held) - 1
        kept = 0.0
        for n, waiting, layers in zip(held, now.waiting, parts.layers):
            kept += (n - waiting) * self.kept(layers) + waiting * self._of(self._sides, layers)
        for chunk, (n, waiting) in enumerate(zip(held, now.waiting)):
            ends = 2 - (parts.first and chunk == 0) - (parts.last and chunk == last)
            kept += (n - waiting) * ends * self.a
        ends = self.head and now.chunk == last  # the loss receives no gradient
        kept += self.a * (2 - ends)
        forward = held[-1] - max(now.waiting[-1], ends)
        kept += (forward * 2 * self.a + (held[-1] - ends) * 4 * self.table) * self.head
        layers = parts.layers[now.chunk]
        return kept - (self._of(self._sides, layers) if self.splits else self.kept(layers))

    def _alive(self, made: float, limit: float, opened: float = 0.0) -> float:
        """Bytes of full gradients and their messages once backward has made `made` elements.

        Args:
            limit: of elements in flight; opened: elements of a bucket that stays.
        """
        setup = self.setup
        if setup.stage < 2:
            sums = self.everything if setup.grad_accum_steps > 2 else made
            return self.messages * (made + self.early) + self.sums * sums
        some = min(math.ceil(made / self.bucket) * self.bucket, limit, self.blocks)
        whole = setup.grad_accum_steps > 1 and not self.sums  # of earlier micro-batches
        added = made if setup.n_shards < setup.data else some
        grads = self.everything if whole else some + opened
        return setup.grad_bytes * grads + self.messages * some + self.sums * added

    def _lefts(self) -> Iterator[tuple[tuple[bool, ...], float]]:
        """Blocks still before backward where the peak can be, and the elements made so far: all
        blocks; when the last bucket in flight is filled; three, whose inputs are on the device with
        offload_activations; one. With experts it can be at any block."""
        mine, filled = len(self.mine), int(self.waiting // self.buckets.blocks[0])
        some = {mine, mine - filled, mine - filled - 1, 3, 1}
        for left in range(1, mine + 1) if any(self.mine) else some:
            if 0 < left <= mine:
                yield self.mine[:left], self._of(self.buckets.blocks, self.mine[left:])

    @property
    def _at_table(self) -> float:
        """Memory when the embedding's gradient is copied into its bucket."""
        return self._alive(self.blocks, self.waiting, self.root)

    @property
    def _sent(self) -> float:
        """Messages of that bucket, and its sum."""
        return (self.messages + self.sums) * self.root

    def moments(self) -> Iterator[Moment]:
        yield from self._blocks()
        if self.parts.first and self.chunk == 0:
            yield from self._embedding()
        if self.head and self.chunk == len(self.parts.layers) - 1:
            yield self._loss()
            yield self._dweight()
        if self.setup.optimizer == "adafactor":
            scratch = _adafactor_scratch(self.setup, self.buckets)
            yield Moment(0.0, self._standing, 0.0, scratch)
        if self.setup.optimizer == "muon":
            for matrices in updates_of(self.shape, self.buckets, self.setup):
                yield Moment(0.0, self._standing, 0.0, matrices.room(product_bytes(self.setup)))

    @functools.cached_property
    def _sizes(self) -> dict[str, float]:
        """Bytes on this rank of each kind of tensor that a Part may keep."""
        n, shape, choices = self.n, self.shape, self.n * self.shape.top_k
        of_choice = self.item * choices
        return {
            **{"C": self.a, "A": self.heads, "QKV": 3 * self.heads, "F": 4 * self.split},
            **{"stats": self.statistics, "lse": self.lse, "choices": (4 + 2 * 8) * choices},
            **{"X": 4 * n * self.width, "E": 4 * n * shape.n_expert, "R": of_choice * self.width},
            "H": of_choice * (shape.hidden / self.setup.tp),
        }

    def _kept(self, parts: Iterable[Part]) -> float:
        """Kept by parts without recomputation."""
        kept, coded = 0.0, products(self.setup.fp8)
        for part in parts:
            if part.name in coded and part.keeps:  # as 8-bit codes of all tokens, and their scales
                k = self.letters[part.into]
                scales = {"row": 1, "block": -(-k // BLOCK), "tensor": 0}[self.setup.fp8_scaling]
                kept += self.n * (k + 4 * scales)
            else:
                kept += sum(self._sizes[what] for what in part.keeps)
        return kept

    def _one(self, *, experts: bool = False) -> float:
        """Kept by a block."""
        parts, sizes = block_parts(self.shape, experts=experts), self._sizes
        if self.mode == "none":
            return self._kept(parts) + 3 * self.padding + self.again
        kept = 2 * self.a + 8 * self.n * self.shape.top_k * experts
        if self.mode == "selective":
            kept += self.lse + sum(sizes[p.out] for p in parts[:-1] if not p.cheap)
            kept += 2 * sizes["R"] * (experts and self.setup.ep > 1)  # what was received
        return kept

    def _cheap(self, experts: bool) -> float:
        """Outputs of the ops that "selective" recomputes in a block."""
        parts = block_parts(self.shape, experts=experts)[:-1]  # the last one's output is not needed
        return sum(self._sizes[part.out] for part in parts if part.cheap)

    @functools.cached_property
    def _ones(self) -> tuple[float, float]:
        return self._one(), self._one(experts=True)

    def kept(self, layers: Sequence[bool]) -> float:
        """Kept by these blocks."""
        if self.setup.offload_activations:  # the block in backward, the one before it, the last
            layers = layers[-3:]
        kept = self._of(self._ones, layers) - (self.a if self.mode == "full" else 0)
        return kept + len(layers) * self._more

    @functools.cached_property
    def _sides(self) -> tuple[float, float]:
        """Per block: inputs of products and gradients of outputs; see engine/pipeline_step.py."""
        dense, experts = (
            sum(self._sizes[p.into] + self._sizes[p.out] for p in parts if p.op == "matmul")
            for parts in (block_parts(self.shape), block_parts(self.shape, experts=True))
        )
        return dense, experts

    def _again(self, experts: bool) -> float:
        """What backward recomputes before it begins with a block."""
        if self.mode == "none":
            return 0.0
        parts = block_parts(self.shape, experts=experts)
        norms = sum(part.op == "layer_norm" for part in parts)
        sums = norms * (self.a + self.statistics)
        return self._kept(parts) if self.mode == "full" else self._cheap(experts) + sums

    @property
    def _workspace(self) -> float:
        """The head's: a chunk's logits; on a CPU they stay, with a 16-bit product of dweight."""
        kind = "cuda" if self.on_gpu else "cpu"
        rows = min(self.n, default_chunk_rows(self.n, self.width, self.rows, kind))
        product = self.item * self.table if self.item == 2 and not self.on_gpu else 0
        return rows * self.rows * self.item + product

    @property
    def _standing(self) -> float:
        """The permanent part of the head's workspace."""
        return 0.0 if self.on_gpu or not self.head else self._workspace

    def _gathered(self, units: int) -> float:
        """Parameters at stage 3: the root's, and those of the last `units` units."""
        if self.setup.stage < 3:
            return 0.0
        root, *others = self.buckets.units
        return self.item * (root + sum(others[max(0, len(others) - units) :]))

    def _loss(self) -> Moment:
        # The last norm's sum and output and statistics.
        kept = self.kept(self.parts.layers[-1]) + 2 * self.a + self.statistics + self.batch
        dweight = 4 * self.table
        rows = min(self.n, default_chunk_rows(self.n, self.width, self.rows, "cpu"))
        if rows < self.n and self.item == 2 and not self.on_gpu:  # the next chunk's is added
            dweight *= 2
        loss = self._workspace + self.whole + dweight + 4 * self.n
        if self.sp:
            loss += self.whole  # x of all tokens
        loss += self.several * self.item * self.table
        return Moment(kept + self.others, loss, self.at_loss + self._gathered(1))

    def _dweight(self) -> Moment:
        kept = self.kept(self.parts.layers[-1]) + self.a + self.statistics + self.batch
        loss = self._standing + self.whole + 4 * self.table
        if self.setup.tp > 1:
            loss += self.whole  # the sum of dx; both are scaled in place
        if self.item == 2:
            loss += self.table_waits
        if self.grid:  # dx is scaled, cut and summed; dweight cast; cut and summed
            table, standing = self.item * self.table, self._standing
            summed = loss - (table if self.item == 2 else 0) + self.joined + self.a
            cuts = standing + table * (1 + self.cut) + self.a
            scaled = max(loss - self.whole + self.a, summed)
            ahead = self.at_loss + self._gathered(2)  # backward has begun
            found = [(scaled, self.at_loss + self._gathered(1)), (cuts, ahead)]
            return max((Moment(kept + self.others, *each) for each in found), key=sum)
        return Moment(kept + self.others, loss, self.at_loss + self._gathered(1))

    def _waiting(self) -> float:
        """The head's gradient and workspace, until the embedding's gradient exists."""
        waits = self.parts.first and self.parts.last
        return self.table_waits * self.share * waits + self._standing

    def _mixture(self) -> tuple[float, float]:
        """Like _block() for experts: gradients of rows, also in flight, and of a stack."""
        a, rows, hidden = self.a, self._sizes["R"], self._sizes["H"]
        again, travel, last = self._again(True), self.setup.ep > 1, 0.0
        tokens = self.whole if self.sp else 0.0
        if self.mode != "none":  # the part of the block's forward that runs again
            last = self.res + again + (a + self.whole + rows * (1 + travel)) * (self.mode == "full")
        if self.mode == "selective":  # of rows that travel, what was sent is made or kept in vain
            again -= 2 * rows * travel
        wide = max(4, self.item) / self.item  # kernels/permute.py sums in fp32
        combine = 2 * wide * rows + (wide > 1) * wide * self.whole
        start = self.res + again + tokens + max(hidden + self.stack, rows * (1 + travel), combine)
        # gelu's backward; a stack's gradient into its bucket; c_fc's; rows back; permute's.
        rest = [hidden - rows, self.stack - rows, self.stack - hidden, rows * travel - 2 * hidden]
        rest.append(2 * wide * self.whole - rows - 2 * hidden)
        start = max(last, start)
        return start, again + a + tokens + max(rest)

    def _block(self) -> tuple[float, float]:
        """The most that a block's backward needs on top of what is kept up to it: when it begins,
        and while it fills the next bucket."""
        a, whole, split, weight = self.a, self.whole, self.split, self.weight
        joined, gathered = self.joined, self.several * weight
        tokens = whole if self.sp else 0.0  # gathered
        # The last product of a forward; c_fc's gradients, and their scattered parts.
        output = whole + (a if self.sp else 0.0)
        c_fc = whole + weight + (whole + a if self.sp else 0.0)
        if self.grid:  # dx in flight, w concatenated, dweight cut
            tokens = joined + self.share * gathered
            output = whole + max(gathered, joined + a)
            dx = joined + max(whole + joined + a, 2 * gathered, gathered + whole)
            c_fc = max(dx, joined + a + weight * (1 + self.cut))
        again, last = self._again(False), 0.0
        if self.mode == "full":  # the block's forward; its last product is discarded
            last = self.res + again + a + output
        elif self.mode == "selective":
            last = self.res + again
            again -= 2 * a  # what was kept of c_proj has been used
        start = max(last, self.res + again + 4 * split + weight + tokens)
        # gelu's output is freed. Its backward, or c_proj's gradient on its way into the bucket.
        c_proj = again + a + max(4 * split, weight * self.share)
        # While c_fc's backward runs, after its input and gelu's are freed.
        c_fc += again - 4 * split + a
        if self.setup.by_keys:  # attention's backward, in units of heads: see axes/context/keys.py
            sums = 2 if self.item == 2 else 1  # in fp32
            pieces = 2 + 2 * sums + 2  # k and v; the sums of their gradients; those of a piece
            attention = again - 8 * split - a + (1 + 3 + pieces) * self.heads
            c_fc = max(c_fc, attention)
        if self.setup.fp8 != "none":  # values of gelu's output; codes of c_fc's gradient
            codes = self.width * (self.n + 4 * self.width // self.setup.tp)  # dy's and w's
            start, c_proj = start + 4 * split + codes, c_proj + 4 * split
            c_fc += whole + 4 * split / self.item
        return start, max(c_proj, c_fc)

    def _halves(self) -> Iterator[Moment]:
        """A backward in two halves: gradients reach the buckets in the second one only."""
        experts = any(self.mine)
        again = self._cheap(experts) if self.mode == "selective" else self._again(experts)
        waits = self.head and (self.chunk == len(self.parts.layers) - 1 or self.parts.first)
        set_aside = self.item * self.table * waits + self._standing
        gelu = 2 * (self._sizes["H"] if experts else 4 * self.split)
        for left in {1, len(self.mine)}:  # while gelu's backward runs: both sides and gradients
            kept = self.kept(self.mine[:left]) + self._of(self._sides, self.mine[left:])
            kept += self.others + self.batch
            kept += again + self.res + gelu + (self.whole if self.sp else 0.0)
            yield Moment(kept, set_aside, self.at_loss + self._gathered(2))
        first = self.item * self.table * (self.parts.first and self.chunk == 0)
        for layers, made in self._lefts():
            kept = self._of(self._sides, layers) + self.others + self.batch
            alive = self.weight + self._alive(made, self.waiting, self.opened)
            yield Moment(kept, max(set_aside, first), alive + self._gathered(2))
        table = first + self._at_table
        yield Moment(self.others + self.batch, self._standing, table)

    def _blocks(self) -> Iterator[Moment]:
        if self.splits:
            yield from self._halves()
            return
        tops = self._block(), self._mixture()
        for layers, made in self._lefts():
            (start, rest), block = tops[layers[-1]], self.buckets.blocks[layers[-1]]
            kept = self.kept(layers) + self.batch + self.others - self.weight
            gathered = self.weight + self._gathered(min(2, len(layers)))
            alive = self._alive(made, self.waiting, self.opened * (made > 0))
            yield Moment(kept + start, self._waiting(), gathered + alive)
            alive = self._alive(made + block / 2, self.waiting + self.bucket, self.opened)
            yield Moment(kept + rest, self._waiting(), gathered + alive)

    def _embedding(self) -> Iterator[Moment]:
        """The embedding's backward; its gradient copied into the bucket; the bucket sent."""
        table, gathered = self.table_made, self._gathered(0)
        activations = self.res + self.batch + (self.whole if self.sp else 0.0)
        activations += self.others
        made = self._alive(self.blocks, self.waiting, self.opened) + gathered
        sums = 0.0
        if self.splits:  # the weights' gradients are not made yet
            activations += self._of(self._sides, self.parts.layers[0])
            made = self.at_loss + gathered
        if self.item == 2 and not self.on_gpu:  # occurring rows are summed in fp32
            sums = 6 * min(self.n, self.rows) * self.width
        if self.grid:
            activations = self.batch + self.whole
        yield Moment(activations, self._waiting(), made + sums + table)
        if self.grid:
            yield Moment(self.batch, self._waiting(), made + table * (1 + self.cut))
        table *= self.share
        yield Moment(self.batch, self._standing, self._at_table + table + gathered)
        yield Moment(self.batch, self._standing, self._at_table + self._sent + gathered)


def predict_memory(workload: Workload, setup: Setup) -> Memory:
    """The peak of a step, after the first ones (which create the optimizer's state).

    For a pipeline, on the rank that needs most: each has the parameters of its stages, a table
    shared by the first and last stage counts on both ranks, and each keeps the micro-batches that
    its schedule holds.
    """
    cases = {(parts, held) for parts, several in _stages(workload, setup) for held in several}
    fullest = [
        (parts, a)
        for parts, a in cases
        if not any(other == parts and a.within(b) for other, b in cases)
    ]
    found = (_memory_of(workload, setup, parts, held) for parts, held in fullest)
    return max(found, key=lambda memory: memory.total)


def _stages(workload: Workload, setup: Setup) -> Iterator[tuple[RankParts, list[Held]]]:
    """Each pipeline rank's parts, and what it holds."""
    what = setup.schedule, setup.pp, setup.grad_accum_steps, setup.chunks
    moments = held_of(*what) if setup.pp > 1 else [[Held(0, (1,), (0,))]]
    yield from zip(parts_of(workload, setup), moments)


def predict_ranks(workload: Workload, setup: Setup) -> list[Memory]:
    """predict_memory() of each rank of a pipeline; with pp=1 a single one."""
    return [
        max(
            (_memory_of(workload, setup, parts, held) for held in several),
            key=lambda memory: memory.total,
        )
        for parts, several in _stages(workload, setup)
    ]


def activations_on_host(workload: Workload, setup: Setup) -> int:
    """Bytes of blocks' inputs that are pinned on a rank's host; 0 without offload.

    A block has two inputs, x and delta, a stage's first block has one; the last input of all stays
    on the device (nn/recompute.py).
    """
    most = 0.0
    for parts, several in _stages(workload, setup) if setup.offload_activations else ():
        for held in several:
            layers = zip(held.held, parts.layers)
            inputs = sum(n * (2 * len(blocks) - 1) for n, blocks in layers if blocks) - 1
            most = max(most, inputs * Peak(workload, setup, parts, held).a)
    return round(most)


def host_bytes(workload: Workload, setup: Setup) -> int:
    """A rank's bytes on its host: of axes, and inputs of blocks."""
    kept = sum(axis.host_bytes(workload, setup) for axis in every())
    return round(kept) + activations_on_host(workload, setup)


def _memory_of(workload: Workload, setup: Setup, parts: RankParts, held: Held) -> Memory:
    """What stays, and the largest moment."""
    peak = Peak(workload, setup, parts, held)
    top = max(peak.moments(), key=sum)
    return replace(
        predict_states(workload, setup, parts),
        activations=round(top.activations),
        loss=round(top.loss),
        buckets=round(top.buckets + going_down(setup, peak.buckets)) + _CUBLAS * peak.on_gpu,
        update=round(top.update),
    )


_MARK = "fastpar: a step begins"


class StepMemory:
    """Measures the peak between entering, or the last begin_step(), and leaving.

    Args:
        device: where the step computes.
        alive_bytes: this rank's memory on entering; None: this process's. Ranks that are threads of
            one process must pass it.
    Attributes:
        alive_bytes: before the step; peak_bytes: during it, alive_bytes included; left_bytes: after
            it. Known after leaving.
    Ranks: each on its own; nothing is sent.
    """

    def __init__(self, device: torch.device, *, alive_bytes: int | None = None) -> None:
        self.device = device
        self._given = alive_bytes
        self.alive_bytes = self.peak_bytes = self.left_bytes = 0

    def __enter__(self) -> StepMemory:
        if self.device.type == "cuda":
            self.begin_step()
        else:
            self.alive_bytes = alive_bytes() if self._given is None else self._given
            self._shared = shared_bytes()
            _use_up_warning()
            _start_profiler()
        return self

    def begin_step(self) -> None:
        """Resets the peak."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.alive_bytes = torch.cuda.memory_allocated(self.device)
        else:
            with torch.autograd.profiler.record_function(_MARK):
                pass

    def __exit__(self, *exc_info: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            self.left_bytes = torch.cuda.memory_allocated(self.device)
            return
        now = peak = self.alive_bytes + shared_bytes() - self._shared
        for kind, name, size in _stop_profiler():
            if kind == "memory_alloc":
                now += size
                peak = max(peak, now)
            elif name == _MARK and kind == "push":
                self.alive_bytes = peak = now
        self.peak_bytes, self.left_bytes = peak, now


def held_bytes(engine: Engine, optimizer: torch.optim.Optimizer) -> int:
    """What a rank holds between two steps: the engine's tensors, the optimizer's, workspaces.

    Do not use alive_bytes() in a process with other threads: it briefly references every object,
    and a tuple that a thread is building then fails to grow (SystemError).
    """
    found = {}
    for state in optimizer.state.values():
        for x in state.values():
            if isinstance(x, torch.Tensor):
                found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(engine.memory().values()) + sum(found.values()) + workspace_bytes()


def alive_bytes() -> int:
    """Bytes of all tensors in this process's CPU memory, each storage once; see held_bytes()."""
    shared = shared_ranges()
    found: dict[int, int] = {}
    for x in gc.get_objects():
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
            continue
        if x.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(x):
            continue
        storage = x.untyped_storage()
        start = storage.data_ptr()
        if storage.nbytes() and not any(a <= start < b for a, b in shared):
            found[start] = storage.nbytes()
    return sum(found.values()) + shared_bytes()


# torch's older profiler: unlike the newer one it is local to a thread, so that ranks may be
# threads, and it prints nothing.


@functools.cache
def _use_up_warning() -> None:
    """Triggers and hides torch's message on stderr about freed memory that was allocated before
    the profile (printed the first time and every 1000th), which is expected here."""
    x = torch.empty(1, dtype=torch.float32, device="cpu")
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        _start_profiler()
        del x
        _stop_profiler()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _start_profiler() -> None:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig, ProfilerState, _enable_profiler_legacy

    record_shapes, memory, stack, flops, modules = False, True, False, False, False
    options = (record_shapes, memory, stack, flops, modules, _ExperimentalConfig())
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *options))


def _stop_profiler() -> list[tuple[str, str, int]]:
    """(kind, name, bytes) of this thread's events, in order."""
    from torch.autograd import _disable_profiler_legacy

    events: list[Any] = [event for thread in _disable_profiler_legacy() for event in thread]
    return [(e.kind(), e.name(), e.cpu_memory_usage()) for e in events]
