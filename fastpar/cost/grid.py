"""What a rank of a grid sends inside of layers, and needs for a moment: of fastpar/tensor/grid.py.

[Note: joined] Along the row what is gathered or summed is put together, or apart, in a copy; a
weight and its gradient, which are cut by rows, along their columns, too. Such a copy and what it is
made from are there at once. With one row or one column there is nothing to join.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastpar.cost.peak_moments import Moment, Peak
from fastpar.cost.workload import Setup, Workload
from fastpar.kernels.linear_cross_entropy import default_chunk_rows
from fastpar.models.block import FIRST, LAST, block_parts, shapes_of, split_products, widths

Comm = tuple[str, str, float, int, int, int, str]  # the fields of operations.CommOp


def along_grid(workload: Workload, setup: Setup) -> Iterator[Comm]:
    """Of one optimizer step: activations along the row, weights along the column."""
    shape, c, r, n_micro = workload.shape, setup.tp, setup.rows, setup.grad_accum_steps
    n, width, item = setup.tokens_of_rank(workload), shape.n_embd, setup.weight_bytes
    layers, full = shape.n_layer, setup.activation_checkpointing == "full"
    passes, forwards = n_micro * layers, 2 if full else 1
    parts, sizes, split = block_parts(), widths(shape, c), split_products()
    columns, steps = sum(by_columns for _, by_columns in split), 2 * n_micro
    wide = 8.0 if item == 8 else 4.0

    def row(kind: str, count: int, n_bytes: float = float(n * width * item)) -> Comm:
        return (kind, "tp", n_bytes, c, 1, count, "")

    def column(kind: str, count: int, n_bytes: float) -> Comm:
        return (kind, "tp", float(n_bytes), r, c, count, "")

    # Forward, dy of row layers, x of column layers once more; embedding and head.
    yield row("all_gather", passes * (len(split) + columns * forwards) + steps)
    yield row(
        "reduce_scatter", passes * ((len(split) - columns) * forwards + columns) + 2 * n_micro
    )
    norms = forwards + 1 + (setup.activation_checkpointing == "selective")
    many = sum(part.op == "layer_norm" for part in parts)
    yield row("all_gather", many * passes * norms + 2 * n_micro, 2 * wide * n * c)
    chunks = -(-n // default_chunk_rows(n, width, sizes["V"], setup.device_type))
    yield row("all_gather", n_micro * chunks, 3 * wide * n * c / chunks)
    for letter, many in Counter(letter for letter, _ in split).items():
        yield column("all_gather", many * passes * (forwards + 1), sizes[letter] * width * item)
        yield column("reduce_scatter", many * passes, sizes[letter] * width * item)
    table = sizes["V"] * width * item
    yield column("all_gather", 2 * n_micro, table)
    yield column("reduce_scatter", 2 * n_micro, table)
    # Positions, norms and biases, whose gradients the rows have parts of.
    vectors, ends, (positions,) = (
        [math.prod(s) for s in shapes_of(some, shape, c, r) if len(s) == n]
        for some, n in ((parts, 1), (LAST, 1), (FIRST[1:], 2))
    )
    partial = positions + sum(ends) + layers * sum(vectors)
    mine = partial * setup.grad_bytes / setup.n_shards
    yield column("all_reduce", n_micro if setup.stage == 0 else 1, mine)
    yield ("all_reduce", "tp", wide, r * setup.depth, c, n_micro, "")  # the loss


class GridPeak(Peak):
    """The moments of a grid's rank; see [Note: joined]."""

    def __init__(self, workload: Workload, setup: Setup, *which: Any) -> None:
        super().__init__(workload, setup, *which)
        self.sp, self.a, self.statistics = True, self.split, 8 * self.n
        self.res = self.a * (2 if workload.shape.dropout else 1)
        self.batch *= setup.rows * setup.depth  # of which each has its samples
        self.weight = 4 * self.width**2 / setup.tp * self.item
        several = setup.rows > 1
        self.joined = self.whole * (setup.tp > 1)
        # Of a matrix whose columns are cut by rows: gathered; joined beside it; its part.
        self.gathered, self.share = float(several), 1 / setup.rows
        # Of the gradient's own size: the copy in which it is cut, and the part.
        self.cut = several * (1 + self.share)

    def _loss(self) -> Moment:
        found = super()._loss()
        return found._replace(loss=found.loss + self.gathered * self.item * self.table)

    def _dweight(self) -> Moment:
        """dx is scaled, cut and summed; dweight cast; cut and summed."""
        found, table = super()._dweight(), self.item * self.table
        kept = found.loss - self._standing - self.whole - (table if self.item == 2 else 0)
        sums = self._standing + kept + self.whole + self.joined + self.a
        cuts = self._standing + table * (1 + self.cut) + self.a
        scaled = found._replace(loss=max(found.loss - self.whole + self.a, sums))
        ahead = self.at_loss + self._gathered(2)  # backward has begun
        return max(scaled, found._replace(loss=cuts, buckets=ahead), key=sum)

    def _waiting(self) -> float:
        return self.item * self.table * self.share + self._standing

    def _block(self) -> tuple[float, float]:
        a, whole, split = self.a, self.whole, self.split
        joined, weight = self.joined, self.weight
        again, last = self._again, 0.0
        if self.mode == "full":
            last = self.res + again + a + whole + max(self.gathered * weight, joined + a)
        elif self.mode == "selective":
            last = self.res + again
            again -= 2 * a
        part = self.gathered * self.share * weight
        start = max(last, self.res + again + joined + 4 * split + weight + part)
        c_proj = again + a + max(4 * split, weight * self.share)
        # c_fc's: dx on its way, w joined, dweight cut.
        dx = joined + max(whole + joined + a, 2 * self.gathered * weight)
        dx = max(dx, joined + self.gathered * weight + whole)
        c_fc = again - 4 * split + a + max(dx, joined + a + weight * (1 + self.cut))
        return start, max(c_proj, c_fc)

    def _embedding(self) -> Iterator[Moment]:
        table, gathered = self.item * self.table, self._gathered(0)
        made = self._alive(self.blocks, self.waiting, self.opened) + gathered
        sums = 0.0
        if self.item == 2 and not self.on_gpu:
            sums = 6 * min(self.n, self.rows) * self.width
        yield Moment(self.batch + self.whole, self._waiting(), made + sums + table)
        yield Moment(self.batch, self._waiting(), made + table * (1 + self.cut))
        part = table * self.share
        yield Moment(self.batch, self._standing, self._at_table + part + gathered)
        yield Moment(self.batch, self._standing, self._at_table + self._sent + gathered)
