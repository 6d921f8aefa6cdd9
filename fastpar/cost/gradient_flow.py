"""How many bytes of whole gradients are on their way while backward goes through a GPT: the rules
of engine.py and buffers.py, played without a model.

A bucket has memory from the first gradient that is brought into it until its reduction is waited
for; the engine waits for the oldest when those under way are more than three caps of a bucket and
more than two. At stages 0 and 1 gradients have their place, but a wire of another format needs a
copy until the end of backward.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastpar.parallel.engine import IN_FLIGHT
from fastpar.sharding.layout import ALIGN, Bucket, ParamSpec, build_layout

# Of a block's backward: when it begins; while the gradients of c_proj, then those of c_fc are
# brought into their buckets; the rest.
MOMENTS = ("start", "c_proj", "c_fc", "rest")
_ARRIVAL = (1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3)  # a block's parameters, as their gradients arrive
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, eq=False)  # one for each model and way to cut it: see sizes_of
class Sizes:
    """A GPT's buckets on one rank of tp.

    unit: elements of the largest of the units that stage 3 gathers one after another, n_units of
    them; root: of those that stay. matrices: elements of each, as registered; factors: rows and
    columns of all of them.
    """

    buckets: tuple[Bucket, ...]
    order: tuple[int, ...]  # bucket of each parameter as gradients arrive
    layers: int
    elements: int  # without padding
    grad_bytes: int
    root: int
    unit: int
    n_units: int
    matrices: tuple[int, ...]
    factors: int

    def padded(self, n_shards: int) -> int:
        """Elements of all buckets, cut into so many shards."""
        return _padded(self, n_shards)


class Flow(NamedTuple):
    """Bytes alive at a time.

    at_loss: before backward.
    in_blocks: for each of MOMENTS, (blocks whose activations are still there, the most bytes then)
        without those that another pair exceeds in both.
    at_embedding: before its gradients are there; at_table: when they are brought into their bucket;
        at_end: when that is sent.
    """

    at_loss: int
    in_blocks: tuple[tuple[tuple[int, int], ...], ...]
    at_embedding: int
    at_table: int
    at_end: int


@functools.lru_cache(maxsize=4096)
def _padded(sizes: Sizes, n_shards: int) -> int:
    multiple = n_shards * ALIGN
    return sum(-(-bucket.numel // multiple) * multiple for bucket in sizes.buckets)


def _parameters(
    layers: int, width: int, tokens: int, rows: int, tp: int
) -> list[tuple[int, tuple[int, ...]]]:
    """(block, shape) on a rank of tp, in the order of registration; block -1 is the root."""
    hidden = 4 * width // tp
    block: list[tuple[int, ...]] = [
        (width,),
        (width,),
        (3 * width // tp, width),
        (3 * width // tp,),
        (width, width // tp),
        (width,),
        (width,),
        (width,),
        (hidden, width),
        (hidden,),
        (width, hidden),
        (width,),
    ]
    return [
        (-1, (rows, width)),
        (-1, (tokens, width)),
        *((i, shape) for i in range(layers) for shape in block),
        (-1, (width,)),
        (-1, (width,)),
    ]


@functools.lru_cache(maxsize=1024)
def sizes_of(
    *,
    layers: int,
    width: int,
    tokens: int,
    rows: int,
    tp: int,
    weight_bytes: int,
    grad_bytes: int,
    by_unit: bool,
    bucket_mb: float,
    first_bucket_mb: float,
) -> Sizes:
    """The buckets that parallelize() makes of a GPT."""
    parameters = _parameters(layers, width, tokens, rows, tp)
    block = sum(math.prod(shape) for i, shape in parameters if i == 0)
    # find_units merges neighbours up to the cap of the first bucket.
    merged = max(1, int(first_bucket_mb * 2**20) // (block * weight_bytes))
    units = [0 if i < 0 else 1 + i // merged for i, _ in parameters]
    layout = build_layout(
        [
            ParamSpec((str(i),), shape, _DTYPES[weight_bytes])
            for i, (_, shape) in enumerate(parameters)
        ],
        bucket_bytes=bucket_mb * 2**20,
        first_bucket_bytes=first_bucket_mb * 2**20,
        grad_dtype=_DTYPES[grad_bytes],
        unit_of=units if by_unit else None,
        flags=not by_unit,
    )
    bucket_of = {slot.registered: slot.bucket for slot in layout.slots}
    arrival = list(reversed(range(len(parameters))))
    by = [0] * (max(units) + 1)
    for bucket in layout.buckets:
        by[max(bucket.unit, 0)] += bucket.numel
    return Sizes(
        layout.buckets,
        tuple(bucket_of[i] for i in arrival),
        layers,
        sum(math.prod(shape) for _, shape in parameters),
        grad_bytes,
        root=by[0],
        unit=max(by[1:], default=0),
        n_units=len(by) - 1,
        matrices=tuple(math.prod(shape) for _, shape in parameters if len(shape) == 2),
        factors=sum(sum(shape) for _, shape in parameters if len(shape) == 2),
    )


@functools.lru_cache(maxsize=4096)
def flow_of(
    sizes: Sizes,
    *,
    stage: int,
    reduces: bool,
    bucket_mb: float,
    wire_bytes: int,
    sum_bytes: float,
    copies: bool,
    whole: bool,
) -> Flow:
    """One backward that reduces.

    Args:
        wire_bytes: of an element on the wire where it is another format, else 0.
        sum_bytes: of an element of a bucket, for the shard of its sum where that is added to an
            earlier one; with copies (of shards, in other groups) it stays to the end of backward.
            At stage 1 the earlier sum is put aside, from the first gradient on.
        whole: earlier micro-batches have left all of this there.
    """
    play = _Play(sizes, stage, reduces, IN_FLIGHT * bucket_mb * 2**20)
    play.place_bytes = sizes.grad_bytes if stage >= 2 else sum_bytes
    if stage < 2:
        sum_bytes = 0.0
    play.launch_bytes = wire_bytes + sum_bytes
    play.finish_bytes = wire_bytes + (0 if copies else sum_bytes)
    if whole:
        for index in range(len(sizes.buckets)):
            play.allocate(index)
    at_loss = play.now
    found: tuple[list[tuple[int, int]], ...] = tuple([] for _ in MOMENTS)
    first = sizes.order[: -2 - sizes.layers * len(_ARRIVAL)]
    for index in first:
        play.take(index)
    blocks = iter(sizes.order[len(first) : -2])
    for left in range(sizes.layers, 0, -1):
        tops = [play.now, 0, 0, 0]
        for moment in _ARRIVAL:
            play.top = play.now
            play.take(next(blocks))
            tops[moment] = max(tops[moment], play.top)
        for pairs, top in zip(found, tops):
            if not pairs or top > pairs[-1][1]:
                pairs.append((left, top))
    positions, table = sizes.order[-2:]
    at_embedding = play.now
    play.take(positions)
    play.allocate(table)
    at_table = play.now
    play.ready(table)
    return Flow(at_loss, tuple(map(tuple, found)), at_embedding, at_table, play.top)


class _Play:
    """Buckets under way, as Engine._launch_ready and _limit_pending treat them."""

    def __init__(self, sizes: Sizes, stage: int, reduces: bool, room: float) -> None:
        self.sizes, self.stage, self.reduces, self.room = sizes, stage, reduces, room
        self.place_bytes = self.launch_bytes = self.finish_bytes = 0.0  # of an element
        self.waiting = [len(bucket.slots) for bucket in sizes.buckets]
        self.alive: set[int] = set()
        self.pending: deque[int] = deque()
        self.order = deque(range(len(sizes.buckets)))  # in which they are launched
        self.now = self.top = 0

    def _bytes(self, index: int) -> int:
        return self.sizes.buckets[index].numel * self.sizes.grad_bytes

    def _elements(self, index: int) -> int:
        return self.sizes.buckets[index].numel

    def allocate(self, index: int) -> None:
        if index not in self.alive:
            self.alive.add(index)
            self._add(round(self._elements(index) * self.place_bytes))

    def _add(self, size: int) -> None:
        self.now += size
        self.top = max(self.top, self.now)

    def take(self, index: int) -> None:
        """A gradient is brought into its bucket."""
        self.allocate(index)
        self.waiting[index] -= 1
        self._launch_ready()

    def ready(self, index: int) -> None:
        self.waiting[index] = 0
        self._launch_ready()

    def _launch_ready(self) -> None:
        while self.reduces and self.order and not self.waiting[self.order[0]]:
            index = self.order.popleft()
            self._add(round(self._elements(index) * self.launch_bytes))
            self.pending.append(index)
            while self.stage >= 2 and len(self.pending) > 2:
                if sum(map(self._bytes, self.pending)) <= self.room:
                    break
                self._finish(self.pending.popleft())

    def _finish(self, index: int) -> None:
        self.alive.discard(index)
        self.now -= round(self._elements(index) * self.place_bytes)
        self.now -= round(self._elements(index) * self.finish_bytes)
