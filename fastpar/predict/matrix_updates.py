"""What Muon's update of the blocks' matrices takes: who computes which and sends what, room for it.

The runtime's own assign() gives each matrix its home, the buckets say which rank has which elements
of it. What optim/muon.py does is counted here step by step.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import NamedTuple

from fastpar.axes.data import BucketKind, GPTBuckets
from fastpar.axes.step import Setup
from fastpar.kernels.orthogonalize import POLAR_EXPRESS
from fastpar.optim.muon import Home, assign
from fastpar.settings.block import block_parts, widths
from fastpar.settings.config import GPTConfig

STEPS = len(POLAR_EXPRESS)
_WIDE = 4  # bytes of an element of the momentum's arithmetic
_MOST_RANKS = 8  # of whom room is counted, those with most matrices


class Sent(NamedTuple):
    """Of an update, along each axis: elements that a rank sends to others, or messages."""

    dp: int
    tp: int


def product_flops(short: int, long: int) -> float:
    """Of one step of Newton-Schulz on a matrix with these sides."""
    return 4.0 * short * short * long + 2.0 * short**3


class MatrixUpdates:
    """The homes of the matrices of a rank's layers.

    Attributes:
        elements: of the matrices on a rank along dp x tp, tp innermost; the most.
        sent: by every rank, in this order.
        messages: all_to_alls of a step.
        jobs: how many matrices [short, long] the rank with most flops makes.
    """

    def __init__(
        self, shape: GPTConfig, buckets: GPTBuckets, *, dp: int, tp: int, n_shards: int
    ) -> None:
        slots = {slot.registered: slot for slot in buckets.layout.slots}
        self.sharded, self.n_tp = n_shards > 1, tp
        self.n_dp = n_shards if self.sharded else dp
        n_others = len(buckets.matrices) - len(buckets.hidden)
        hidden = [i for i, s in enumerate(buckets.shapes) if len(s) == 2][n_others:]
        sizes, kinds = widths(shape), []  # how many matrices a parameter is, and their sides
        for part in block_parts():
            if part.op == "matmul":
                many = 3 if part.out == "3A" else 1
                kinds.append((many, *sorted((sizes[part.into], sizes[part.out] // many))))
        self.what = {i: kinds[k % len(kinds)] for k, i in enumerate(hidden)}
        order = sorted(hidden, key=lambda i: self.what[i][0] == 1)  # the groups of muon_groups()
        costs = [n * product_flops(*sides) for n, *sides in map(self.what.__getitem__, order)]
        places = assign(costs, self.n_dp * tp)
        self.home = {i: Home(*divmod(place, tp)) for i, place in zip(order, places)}
        self.numel = {i: math.prod(buckets.shapes[i]) for i in order}
        self.pieces: dict[int, dict[int, int]] = {}  # of each matrix, by rank along dp
        by_bucket: dict[int, list[int]] = {}
        for i in sorted(order, key=lambda i: (slots[i].bucket, slots[i].start)):
            slot = slots[i]
            by_bucket.setdefault(slot.bucket, []).append(i)
            kind = BucketKind(buckets.layout.buckets[slot.bucket].numel, False, False, False)
            self.pieces[i] = self._pieces(slot.start, slot.stop, kind.padded(n_shards) // n_shards)
        self.batches = list(by_bucket.values())
        loads: dict[int, float] = dict.fromkeys(places, 0.0)
        for place, cost in zip(places, costs):
            loads[place] += cost
        busiest = max(loads, key=loads.__getitem__, default=0)
        self.jobs = Counter[tuple[int, int]]()
        for i, place in zip(order, places):
            if place == busiest:
                count, short, long = self.what[i]
                self.jobs[short, long] += count
        self.sent, n = self._sent(), len(self.batches)
        self.messages = Sent(n * (1 + self.sharded) * (self.n_dp > 1), 2 * n * (tp > 1))
        held = Counter[int]()
        for pieces in self.pieces.values():
            held.update(pieces)
        self.elements = max(held.values(), default=0)

    def _pieces(self, start: int, stop: int, shard: int) -> dict[int, int]:
        if not self.sharded:
            return dict.fromkeys(range(self.n_dp), stop - start)
        ranks = range(start // shard, (stop - 1) // shard + 1)
        return {r: min(stop, (r + 1) * shard) - max(start, r * shard) for r in ranks}

    def _sent(self) -> list[Sent]:
        along, column, own = Counter[int](), Counter[int](), Counter[Home]()
        for i, home in self.home.items():
            everywhere = self.pieces[i]
            for rank, size in everywhere.items() if self.sharded else ():
                along[rank] += size * (rank != home.dp)
            along[home.dp] += sum(everywhere.values()) - everywhere.get(home.dp, 0)
            column[home.dp] += self.numel[i]
            own[home] += self.numel[i]
        ranks = (Home(r, t) for r in range(self.n_dp) for t in range(self.n_tp))
        # Slices of others' matrices to their homes, slices of its results to all.
        return [
            Sent(along[at.dp], (column[at.dp] + (self.n_tp - 2) * own[at]) * (self.n_tp > 1))
            for at in ranks
        ]

    def room(self, item: int) -> int:
        """Bytes that an update has for a while on the rank that needs most.

        Args:
            item: bytes of an element of the products.
        """
        own = Counter[Home](self.home.values())
        ranks = {home for home, _ in own.most_common(_MOST_RANKS)} | {Home(0, 0)}
        return max(self._room(rank, item) for rank in ranks)

    def _room(self, at: Home, item: int) -> int:
        """Bytes alive in Homes.run(), which takes the same steps."""
        mine = {i: self.pieces[i].get(at.dp, 0) for i in self.home}
        alive, tp = item * sum(mine.values()), self.n_tp
        # The pieces, while the last one is moved: gradient, product and sum beside it.
        most = alive + 3 * _WIDE * max(mine.values(), default=0)

        def column(batch: list[int]) -> int:
            return item * sum(self.numel[i] for i in batch if self.home[i].dp == at.dp)

        def given(batch: list[int]) -> int:
            return item * sum(mine[i] for i in batch)

        for batch in self.batches if self.sharded else ():  # sent: copies of pieces, then freed
            most = max(most, alive + given(batch) + column(batch))
            alive += column(batch)
        back = 0
        for batch in self.batches:
            arrived, own = column(batch), [i for i in batch if self.home[i] == at]
            whole = {i: item * self.numel[i] * tp for i in own}
            most = max(most, alive + arrived * self.sharded)
            alive += (arrived if self.sharded else 0) - given(batch) - arrived * self.sharded
            alive += 0 if self.sharded else arrived
            if tp > 1:
                most = max(most, alive + arrived + 2 * sum(whole.values()))
                alive += sum(whole.values()) - arrived
            for i in own:
                most = max(most, alive + self._products(i, item))
            sliced = sum(whole.values()) + (arrived if tp > 1 else 0)
            most = max(most, alive + sliced)
            alive += sliced - sum(whole.values())
            copies = arrived * (1 if self.sharded else self.n_dp)
            returned = copies + given(batch) * (self.n_dp > 1)
            if tp > 1:
                back += returned
            else:
                most = max(most, alive + returned)
                alive += returned - sliced
        return max(most, alive + back)

    def _products(self, i: int, item: int) -> int:
        """Beside a whole parameter: parts that are done, and what orthogonalize() has."""
        count, short, long = self.what[i]
        part = short * long
        running = 2 * part + 2 * short * short
        return item * max((count - 1) * part + running, 2 * count * part * (count > 1))


@functools.lru_cache(1024)
def _updates(
    shape: GPTConfig, buckets: GPTBuckets, dp: int, tp: int, n_shards: int
) -> MatrixUpdates:
    return MatrixUpdates(shape, buckets, dp=dp, tp=tp, n_shards=n_shards)


def updates_of(shape: GPTConfig, buckets: GPTBuckets, setup: Setup) -> MatrixUpdates:
    """The matrices of a rank with these buckets."""
    n_shards = setup.n_shards if setup.stage else 1
    return _updates(shape, buckets, setup.data, setup.tp, n_shards)


def updates_text(shape: GPTConfig, buckets: GPTBuckets, setup: Setup) -> str:
    """The largest share of the work, and what travels, in a line."""
    found, item = updates_of(shape, buckets, setup), product_bytes(setup)
    flops = sum(STEPS * product_flops(*sides) * n for sides, n in found.jobs.items())
    text = f"orthogonalizes {sum(found.jobs.values())} of "
    text += (
        f"{sum(n for n, *_ in found.what.values())} matrices on a rank, {flops / 1e12:,.3g} TFLOP"
    )
    for axis in Sent._fields:
        messages = getattr(found.messages, axis)
        most = item * max(getattr(sent, axis) for sent in found.sent) / 1e6
        text += f"; sends {most:,.3g} MB along {axis} in {messages} all-to-alls" if messages else ""
    return text


def product_bytes(setup: Setup) -> int:
    """Of an element of the products, which is what travels."""
    return 2 if setup.device_type == "cuda" else 4
