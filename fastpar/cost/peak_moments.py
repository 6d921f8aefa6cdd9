"""The moments of a training step where its memory can be at its peak; see memory_model.py.

Which block it is depends on what shrinks faster towards the first one: activations, or the room for
gradients on their way (gradient_flow.py).

[Note: units] a: the features of this rank's tokens between blocks, [N, C] ([N/tp, C] under sequence
parallelism); whole: of all tokens; split: [N, C/tp]; heads: [N, H*D] of this rank's heads, which is
split where tp divides them. All in bytes of the weights' format.

[Note: what a layer keeps] tests/contracts/test_tp_memory.py has it exactly:

    none        4 a + 4 heads + 8 split: both norms' x and y; qkv, o; fc, gelu
    selective   3 a + 4 heads + 4 split: both inputs' sum, outputs of c_proj; qkv, o; fc
    full        2 a: x and delta (the first block has no delta)

fp8: what linear layers get (none: y of both norms and gelu, or of the second norm and gelu for the
MLP) is kept as a byte an element and its scales, of all tokens; o as it is. Backward then makes a
layer's values again, and codes of its gradient.

and mean and rstd of each norm and attention's row statistics (lse), in fp32.

[Note: a pipeline's rank] keeps what its schedule holds: of each micro-batch and chunk the blocks'
activations, what was received and what was sent on, and where the head is its input's gradient,
the norm's output and dweight; besides the gradient that the running backward was given, and the
message that is received ahead. A backward in two halves brings nothing into the buckets in the
first, whose gradients of norms, biases and tables are set aside; in the second bucket after bucket
is filled while what waits becomes less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from fastpar.cost.buckets import GPTBuckets, RankParts, bucket_mb_of, buckets_of
from fastpar.cost.gradient_flow import GradientFlow, gradient_flow
from fastpar.cost.matrix_updates import product_bytes, updates_of
from fastpar.cost.workload import Setup, Workload, vocabulary_rows
from fastpar.kernels.linear_cross_entropy import default_chunk_rows
from fastpar.kernels.linear_fp8 import BLOCK
from fastpar.optim.adafactor import BATCH
from fastpar.parallel.offload import IN_FLIGHT
from fastpar.pipeline.schedules import SPLIT
from fastpar.pipeline.simulator import Held

_RNG_STATE = 5056  # torch's generator on the CPU, saved with each recomputed block


def _adafactor_scratch(setup: Setup, buckets: GPTBuckets) -> float:
    """The most that a batch of matrices needs; see [Note: batches] in adafactor.py."""
    each, rounded = 4, 0  # bytes of an element of the batch, and of its largest matrix
    if setup.dtype == "bf16" and setup.master_weights != "none":
        each, rounded = (8, 8) if setup.master_weights == "remainder" else (4, 6)
    most = batch = largest = 0
    for n in map(math.prod, buckets.matrices):
        if batch + n > BATCH:
            batch = largest = 0
        batch, largest = batch + n, max(largest, n)
        most = max(most, each * batch + rounded * largest)
    return float(most)


@functools.lru_cache(4096)
def product_scratch(rows: int, columns: int, summed: int, *, transposed: bool = False) -> int:
    """Bytes that oneDNN takes for a bf16 product [rows, summed] @ [summed, columns]; of a thread.

    With AVX-512: 64 columns of the right factor are packed at a time, in blocks of up to 512 rows
    (1,024 of longer ones), and added up in fp32 for up to 256 rows of the result. A left factor
    that is transposed, as in a weight's gradient, is packed too, for up to 16 such groups of
    columns; the sums of all are there between its blocks.
    """
    block = max((n for n in range(32, 257) if rows % n == 0), default=min(rows, 256))
    width, blocks = min(columns, 64), -(-columns // 64)
    depth = min(-(-summed // 32) * 32, 1024 if summed > 1024 and not transposed else 512)
    taken = 2 * depth * 64
    if not transposed:
        return taken + 4 * block * width
    side_by_side = max(n for n in range(1, 17) if blocks % n == 0) if summed > depth else 1
    pitch = depth + 32 * (depth == 512)  # off a power of two
    return taken + 4 * block * width * side_by_side + 2 * block * pitch


class Moment(NamedTuple):
    """Bytes of what comes and goes, at one moment."""

    activations: float
    loss: float
    buckets: float
    update: float = 0.0


class Peak:
    """The moments where the peak can be; see the top of the file.

    Args:
        parts: of the rank; held: micro-batches that each of its chunks keeps.
    """

    def __init__(self, workload: Workload, setup: Setup, parts: RankParts, held: Held) -> None:
        shape, tp = workload.shape, setup.tp
        self.workload, self.setup, self.parts = workload, setup, parts
        self.head, self.buckets = parts.last, buckets_of(workload, setup, parts)
        self.layers, self.mode = self.buckets.n_layers, setup.activation_checkpointing
        self.on_gpu, self.item = setup.device_type == "cuda", setup.weight_bytes
        self.sp = tp > 1 and setup.sequence_parallel
        self.width, self.n = shape.n_embd, setup.tokens_of_rank(workload)
        self.whole = self.n * self.width * self.item
        self.split = self.whole / tp
        n_heads = shape.heads_of_rank(tp)
        self.heads = self.n * n_heads * shape.head_dim * self.item
        # What ranks of cp attend, and on a GPU its o, which c_proj keeps as this rank's tokens.
        attended = setup.attended_heads(shape)
        self.padding = self.n * (attended - n_heads) * shape.head_dim * self.item
        exchanged = self.on_gpu and setup.cp > 1 and not setup.by_keys
        self.again = self.heads + self.padding if exchanged else 0.0
        self.a = self.split if self.sp else self.whole
        # Mean and rstd of a norm.
        self.statistics = 8 * (self.n / tp if self.sp else self.n)
        # Of a row and head of attention: lse; on the CPU two numbers.
        self.lse = (4 if self.on_gpu else 8) * self.n * attended
        self.res = self.a * (2 if shape.dropout else 1)  # gradients of x and delta: one or two
        # The gradient of a block's largest weight; a linear layer's own backward on a CPU computes
        # it in its bucket (parallel/split_backward.py).
        in_bucket = not self.on_gpu and tp == 1 and setup.grad_bytes == setup.weight_bytes
        in_bucket = in_bucket and setup.fp8 == "none"
        self.weight = 0.0 if in_bucket else 4 * self.width**2 / tp * self.item
        self.rows = vocabulary_rows(shape, tp)
        self.table = self.rows * self.width
        # Beside the buckets: none on a GPU where they keep gradients of 16-bit weights in fp32. The
        # loss writes it into its bucket, which is open all the time at stages 2 and 3.
        wide = self.on_gpu and self.item == 2 and setup.grad_bytes == 4 and tp == setup.pp == 1
        self.table_made = 0.0 if wide else self.item * self.table
        self.table_waits = 4.0 * self.table * (setup.stage >= 2) if wide else self.table_made
        self.batch = 16 * self.n * setup.cp  # idx and targets
        self.chunk, self.splits = held.chunk, setup.schedule in SPLIT and setup.pp > 1
        self.flow = self._gradient_flow()
        # What the other micro-batches of a pipeline keep meanwhile.
        self.others = self._others(held)

    def _others(self, now: Held) -> float:
        """Kept by a pipeline beside the blocks in backward; see [Note: a pipeline's rank]."""
        if self.setup.pp == 1:
            return 0.0
        parts, held, last = self.parts, now.held, len(now.held) - 1
        kept = 0.0
        for n, waiting, layers in zip(held, now.waiting, parts.layers):
            kept += (n - waiting) * self.kept(layers) + waiting * self._waits(layers)
        for chunk, (n, waiting) in enumerate(zip(held, now.waiting)):
            ends = 2 - (parts.first and chunk == 0) - (parts.last and chunk == last)
            kept += (n - waiting) * ends * self.a
        ends = self.head and now.chunk == last  # the loss has no gradient to be given
        kept += self.a * (2 - ends)
        forward = held[-1] - max(now.waiting[-1], ends)
        kept += (forward * 2 * self.a + (held[-1] - ends) * 4 * self.table) * self.head
        layers = parts.layers[now.chunk]
        return kept - (self._waits(layers) if self.splits else self.kept(layers))

    def _gradient_flow(self) -> GradientFlow:
        setup, stage = self.setup, self.setup.stage
        again = setup.accumulate == "shard" and setup.grad_accum_steps > 1  # adds to a shard
        whole = stage < 2 and setup.grad_accum_steps > 2 if again else setup.grad_accum_steps > 1
        buckets, parts = self.buckets, self.parts
        if not whole and len(parts.layers) > 1:  # a backward is one chunk's
            first, last = self.chunk == 0, self.chunk == len(parts.layers) - 1
            one = (parts.layers[self.chunk],), first and parts.first, last and parts.last
            buckets = buckets_of(self.workload, setup, RankParts(*one))
        return gradient_flow(
            buckets,
            stage=stage,
            reduces=setup.data > 1 or setup.offload != "none",
            bucket_mb=bucket_mb_of(setup),
            wire_bytes=self._message_bytes,
            sum_bytes=setup.grad_bytes / setup.n_shards if again and stage else 0.0,
            copies=setup.n_shards < setup.data,
            whole=whole,
            gathered_bytes=self.item if stage == 3 else 0,
        )

    @property
    def _message_bytes(self) -> float:
        """Of an element of a bucket on its way, beside the gradient: messages, decoded ones."""
        setup = self.setup
        if setup.code_bytes[0]:
            return 2 * setup.wire_bytes + 4
        return setup.wire_bytes if setup.wire_bytes != setup.grad_bytes else 0

    @property
    def going_down(self) -> float:
        """Reduced gradients on their way to the host; those of earlier micro-batches stay."""
        setup = self.setup
        if setup.offload == "none":
            return 0.0
        whole = self.buckets.grad_bytes * self.buckets.elements / setup.n_shards
        if setup.grad_accum_steps > 1 and setup.accumulate == "shard":
            return whole
        return min(whole, (IN_FLIGHT + 1) * bucket_mb_of(setup) * 2**20 / setup.n_shards)

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
            matrices = updates_of(self.workload.shape, self.buckets, self.setup)
            yield Moment(0.0, self._standing, 0.0, matrices.room(product_bytes(self.setup)))

    def _eight_bits(self) -> float:
        """What a block keeps less with fp8."""
        setup, c = self.setup, self.width
        if setup.fp8 == "none":
            return 0.0
        per_row = {"row": lambda k: 4, "block": lambda k: 4 * -(-k // BLOCK), "tensor": lambda k: 0}
        scale, hidden = per_row[setup.fp8_scaling], 4 * c // setup.tp
        norms = 2 if setup.fp8 == "all" else 1
        codes = norms * self.n * (c + scale(c)) + self.n * (hidden + scale(hidden))
        return norms * self.a + 4 * self.split - codes

    def kept(self, layers: int) -> float:
        """Kept by so many blocks; see [Note: what a layer keeps]."""
        one = {
            "none": 4 * (self.a + self.heads)
            + 8 * self.split
            + 2 * self.statistics
            + self.lse
            + 3 * self.padding
            + self.again,
            "selective": 3 * self.a + 4 * (self.heads + self.split) + self.lse,
            "full": 2 * self.a,
        }[self.mode]
        one -= self._eight_bits() if self.mode == "none" else 0.0
        if self.mode != "none" and not self.on_gpu:
            one += _RNG_STATE
        if self.setup.offload_activations:  # the block in backward, the one before it, the last
            layers = min(layers, 3)
        return one * layers - (self.a if self.mode == "full" else 0)

    def _waits(self, layers: int) -> float:
        """Of so many blocks: inputs of products and gradients of outputs; see split_backward.py."""
        return (4 * self.a + 4 * self.heads + 8 * self.split) * layers

    @property
    def _workspace(self) -> float:
        """The head's: a chunk's logits; on a CPU they stay, and a 16-bit product of dweight."""
        kind = "cuda" if self.on_gpu else "cpu"
        rows = min(self.n, default_chunk_rows(self.n, self.width, self.rows, kind))
        product = self.item * self.table if self.item == 2 and not self.on_gpu else 0
        return rows * self.rows * self.item + product

    def _product(self, rows: float, columns: float, summed: float, **how: bool) -> int:
        """What a product needs beside its factors and its result."""
        if self.on_gpu or self.setup.dtype != "bf16":
            return 0
        return product_scratch(round(rows), round(columns), round(summed), **how)

    @property
    def _standing(self) -> float:
        """What of the head's workspace is there all the time."""
        return 0.0 if self.on_gpu or not self.head else self._workspace

    def _gathered(self, units: int) -> float:
        """Parameters at stage 3: the root's, and those of so many last units."""
        if self.setup.stage < 3:
            return 0.0
        root, *others = self.buckets.units
        return self.item * (root + sum(others[max(0, len(others) - units) :]))

    def _loss(self) -> Moment:
        # The last norm's sum and output and statistics.
        kept = self.kept(self.parts.layers[-1]) + 2 * self.a + self.statistics + self.batch
        dweight = widened = 4 * self.table
        rows = min(self.n, default_chunk_rows(self.n, self.width, self.rows, "cpu"))
        product = self._product(self.rows, self.width, rows, transposed=True)
        if rows < self.n:  # the next one is added
            widened = max(product, dweight if self.item == 2 and not self.on_gpu else 0)
            widened += dweight
        loss = self._workspace + self.whole + max(product, widened) + 4 * self.n
        if self.sp:
            loss += self.whole  # x of all tokens
        return Moment(kept + self.others, loss, self.flow.at_loss + self._gathered(1))

    def _dweight(self) -> Moment:
        kept = self.kept(self.parts.layers[-1]) + self.a + self.statistics + self.batch
        loss = self._standing + self.whole + 4 * self.table
        if self.setup.tp > 1:
            loss += self.whole  # the sum of dx; both are scaled where they are
        if self.item == 2:
            loss += self.table_waits
        return Moment(kept + self.others, loss, self.flow.at_loss + self._gathered(1))

    def _waiting(self) -> float:
        """The head's gradient and workspace, until the embedding's gradient is there."""
        waits = self.parts.first and self.parts.last
        return self.table_waits * waits + self._standing

    def _block(self) -> tuple[float, ...]:
        """The most that a block's backward has on top of what is kept up to it, at each moment."""
        a, whole, split, weight = self.a, self.whole, self.split, self.weight
        heads = self.heads
        tokens = whole if self.sp else 0.0  # gathered
        arriving = whole + a if self.sp else 0.0  # and scattered
        n, width, wide = self.n, self.width, 4 * self.width // self.setup.tp  # of the MLP
        again = last = 0.0
        if self.mode == "full":  # the block's forward; its last product is thrown away
            again = 4 * (a + heads) + 8 * split + 2 * self.statistics + self.lse
            again -= self._eight_bits()
            product = self._product(n, width, wide)
            last = self.res + again + a + whole + max(product, a if self.sp else 0.0)
        elif self.mode == "selective":
            again = 4 * a + 4 * split + 2 * self.statistics
            last = self.res + again
            again -= 2 * a  # what was kept of c_proj has been used
        product = self._product(width, wide, n, transposed=True)
        start = max(last, self.res + again + 4 * split + weight + tokens + product)
        # gelu's output is gone. Its backward, or c_proj's gradient on its way into the bucket.
        c_proj = again + a + max(4 * split, weight)
        # As c_fc's backward runs, and when its input and gelu's are gone.
        c_fc = again - 4 * split + a + whole + weight + arriving
        c_fc += self._product(wide, width, n, transposed=True)
        if self.setup.by_keys:  # attention's backward, in units of heads: see context/keys.py
            sums = 2 if self.item == 2 else 1  # in fp32
            gathered = 2 + 2 * sums + 2  # k and v; the sums of their gradients; those of a piece
            attention = again - 8 * split - a + (1 + 3 + gathered) * heads
            c_fc = max(c_fc, attention)
        # Backward of c_attn: the second norm, the MLP and attention's output are gone.
        c_attn = 3 / 4 * weight * heads / split
        rest = again - 8 * split - heads - a + whole + c_attn + arriving
        rest += self._product(3 * heads / (n * self.item), width, n, transposed=True)
        if self.setup.fp8 != "none":  # values of gelu's output; codes of c_fc's gradient
            codes = self.width * (self.n + 4 * self.width // self.setup.tp)  # dy's and w's
            start, c_proj = start + 4 * split + codes, c_proj + 4 * split
            c_fc += whole + 4 * split / self.item
        return start, c_proj, c_fc, rest, rest

    def _halves(self) -> Iterator[Moment]:
        """A backward in two halves: gradients reach the buckets in the second one only."""
        mine, a = self.parts.layers[self.chunk], self.a
        again = 4 * (a + self.heads) + 8 * self.split + 2 * self.statistics + self.lse
        again = {"none": 0.0, "selective": 2 * a + 4 * self.split, "full": again}[self.mode]
        waits = self.head and (self.chunk == len(self.parts.layers) - 1 or self.parts.first)
        set_aside = self.item * self.table * waits + self._standing
        for layers in {1, mine}:  # as gelu's backward runs: both sides of it, and their gradients
            kept = self.kept(layers) + self._waits(mine - layers) + self.others + self.batch
            kept += again + self.res + 8 * self.split + (self.whole if self.sp else 0.0)
            yield Moment(kept, set_aside, self.flow.at_loss + self._gathered(2))
        first = self.item * self.table * (self.parts.first and self.chunk == 0)
        for layers, alive in self.flow.in_blocks[0]:
            kept = self._waits(min(layers, mine)) + self.others + self.batch
            yield Moment(kept, max(set_aside, first), self.weight + alive)
        table = first + self.flow.at_table
        yield Moment(self.others + self.batch, self._standing, table)

    def _blocks(self) -> Iterator[Moment]:
        if self.splits:
            yield from self._halves()
            return
        for backward, pairs in zip(self._block(), self.flow.in_blocks):
            for layers, alive in pairs:
                layers = min(layers, self.parts.layers[self.chunk])
                kept = self.kept(layers) + backward - self.weight + self.batch
                kept += self.others
                buckets = self.weight + alive + self._gathered(0)
                yield Moment(kept, self._waiting(), buckets)

    def _embedding(self) -> Iterator[Moment]:
        """Its backward; its gradient is copied into the bucket; the bucket is sent."""
        table, gathered = self.table_made, self._gathered(0)
        activations = self.res + self.batch + (self.whole if self.sp else 0.0)
        activations += self.others
        made, sums = self.flow.at_embedding + gathered, 0.0
        if self.splits:  # the weights' gradients are still to come
            activations += self._waits(self.parts.layers[0])
            made = self.flow.at_loss + gathered
        if self.item == 2 and not self.on_gpu:  # rows that occur are added up in fp32
            sums = 4 * min(self.n, self.rows) * self.width
            yield Moment(activations + 4 * self.n * self.width, self._waiting(), made + sums)
            sums += sums / 2
        yield Moment(activations, self._waiting(), made + sums + table)
        yield Moment(self.batch, self._standing, self.flow.at_table + table + gathered)
        yield Moment(self.batch, self._standing, self.flow.at_end + gathered)
