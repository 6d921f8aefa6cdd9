"""The buckets that parallelize() makes of a GPT on one rank of tp, without making the model.

The parameters' shapes go through the same build_layout() as a real model's, in the same units.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastpar.axes.pipeline.schedules import stage_of
from fastpar.axes.pipeline.split import cut
from fastpar.axes.step import Setup, Workload
from fastpar.files.dtypes import DTYPES
from fastpar.settings.block import (
    FIRST,
    LAST,
    block_parts,
    parameters_of,
    part_flops,
    products,
    shapes_of,
    widths,
)
from fastpar.settings.config import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.sharding.layout import (
    ALIGN,
    Layout,
    ParamSpec,
    build_layout,
    default_bucket_mb,
)

ROOT = 0  # the unit of what is in no block


class BucketKind(NamedTuple):
    """What buckets have in common that take as long to send, at the same time.

    root, last_unit: its unit is the root, or the last one: at stage 3 both stay from forward to
        backward.
    complete_last: nothing is left of backward to hide it.
    rounded: of weights that are gathered as the codes of 8-bit products.
    """

    numel: int
    root: bool
    last_unit: bool
    complete_last: bool
    rounded: bool = False

    def padded(self, n_shards: int) -> int:
        """Elements, cut into so many shards."""
        return -(-self.numel // (n_shards * ALIGN)) * n_shards * ALIGN


@dataclass(frozen=True, eq=False)  # one object for each model and way to cut it: compared by id
class GPTBuckets:
    """The buckets of one rank.

    Attributes:
        shapes: of the parameters, in registration order.
        layout: with one shard; BucketKind.padded() knows others.
        first, last: whether the embedding, the head are among them.
        block: elements of a block.
    """

    shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    n_layers: int
    first: bool
    last: bool
    grad_bytes: int
    block: int

    @functools.cached_property
    def elements(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(map(math.prod, self.shapes))

    @functools.cached_property
    def matrices(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters with two dimensions."""
        return tuple(shape for shape in self.shapes if len(shape) == 2)

    @property
    def hidden(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the blocks' matrices, which muon_groups() finds."""
        return self.matrices[(self.first or self.last) + self.first :]

    @functools.cached_property
    def arrival(self) -> tuple[int, ...]:
        """The bucket of each parameter, in the order in which backward makes the gradients."""
        bucket_of = {slot.registered: slot.bucket for slot in self.layout.slots}
        return tuple(bucket_of[i] for i in reversed(range(len(self.shapes))))

    @functools.cached_property
    def units(self) -> tuple[int, ...]:
        """Elements of the root, then of each unit that stage 3 gathers by itself."""
        sizes = Counter[int]()
        for bucket in self.layout.buckets:
            sizes[bucket.unit] += bucket.numel
        return tuple(sizes[unit] for unit in range(max(sizes) + 1))

    @functools.cached_property
    def kinds(self) -> Counter[BucketKind]:
        """How many buckets there are of each kind."""
        buckets, last_unit = self.layout.buckets, len(self.units) - 1
        return Counter(
            BucketKind(b.numel, b.unit == ROOT, b.unit == last_unit, b is buckets[-1], b.rounded)
            for b in buckets
        )

    @property
    def coded_share(self) -> float:
        """Of the elements: those that are gathered as codes of products, all where none is."""
        rounded = sum(kind.numel * count for kind, count in self.kinds.items() if kind.rounded)
        return rounded / sum(self.units) if rounded else 1.0

    def padded(self, n_shards: int) -> int:
        """Elements of all buckets, cut into so many shards."""
        return sum(kind.padded(n_shards) * count for kind, count in self.kinds.items())


def bucket_mb_of(setup: Setup) -> float:
    """The cap of a bucket."""
    if setup.bucket_mb is not None:
        return setup.bucket_mb
    return default_bucket_mb(setup.data, setup.transport if setup.data > 1 else "none")


class RankParts(NamedTuple):
    """Layers on each chunk of a pipeline's rank; whether the embedding, the head are there too."""

    layers: tuple[int, ...]
    first: bool
    last: bool


def stage_layers(shape: GPTConfig, setup: Setup) -> Sequence[int]:
    """Layers on each of the stages: as asked for, or by flops of a token's forward."""
    return setup.pp_split or _cut(shape, setup.pp * setup.chunks)


@functools.lru_cache(4096)
def _cut(shape: GPTConfig, n_stages: int) -> tuple[int, ...]:
    return tuple(cut(part_flops(shape), n_stages))


def parts_of(workload: Workload, setup: Setup) -> tuple[RankParts, ...]:
    """What each rank of a pipeline has."""
    if setup.pp == 1:
        return (RankParts((workload.shape.n_layer,), True, True),)
    split = tuple(stage_layers(workload.shape, setup))
    return _rank_parts(setup.schedule, setup.pp, setup.chunks, split)


@functools.lru_cache(4096)
def _rank_parts(
    schedule: str, pp: int, chunks: int, split: tuple[int, ...]
) -> tuple[RankParts, ...]:
    stages = [[stage_of(schedule, pp, rank, c) for c in range(chunks)] for rank in range(pp)]
    return tuple(
        RankParts(tuple(split[s] for s in mine), 0 in mine, pp * chunks - 1 in mine)
        for mine in stages
    )


def buckets_of(workload: Workload, setup: Setup, parts: RankParts | None = None) -> GPTBuckets:
    """The buckets of a rank with these parts; None: of the one with most parameters."""
    if parts is None:
        sizes = widths(workload.shape)
        table = sizes["V"] / (12 * sizes["C"])
        parts = max(
            parts_of(workload, setup), key=lambda p: sum(p.layers) + table * (p.first or p.last)
        )
    return _buckets(
        workload.shape,
        sum(parts.layers),
        parts.first,
        parts.last,
        (setup.tp, setup.rows if setup.tp_grid is not None else 0),
        setup.dtype,
        setup.grad_dtype,
        setup.stage > 0,
        bucket_mb_of(setup),
        setup.fp8 if setup.gathers_codes else "none",
    )


@functools.lru_cache(maxsize=1024)
def _buckets(
    shape: GPTConfig,
    n_layers: int,
    first: bool,
    last: bool,
    split: tuple[int, int],
    dtype: str,
    grad_dtype: str,
    by_unit: bool,
    bucket_mb: float,
    rounded: str,
) -> GPTBuckets:
    dtypes = DTYPES[dtype], DTYPES[grad_dtype]
    table, positions = shapes_of(FIRST, shape, *split)
    block, end = shapes_of(block_parts(), shape, *split), shapes_of(LAST, shape, *split)
    # parallelize() merges neighbouring units up to the cap of the first bucket.
    numel = sum(map(math.prod, block))
    merged = max(1, int(Parallel.first_bucket_mb * 2**20) // (numel * dtypes[0].itemsize))
    before = [table] * (first or last) + [positions] * first
    shapes = (*before, *block * n_layers, *end * last)
    units = [1 + by_unit * (layer // merged) for layer in range(n_layers) for _ in block]
    names = [name for name, _ in parameters_of(block_parts())] * n_layers
    coded = {f"{product}.weight" for product in products(rounded)}
    layout = build_layout(
        [ParamSpec((str(i),), s, dtypes[0]) for i, s in enumerate(shapes)],
        bucket_bytes=bucket_mb * 2**20,
        first_bucket_bytes=Parallel.first_bucket_mb * 2**20,
        grad_dtype=dtypes[1],
        rounded=[i for i, name in enumerate(names, len(before)) if name in coded],
        unit_of=[*[ROOT] * len(before), *units, *[ROOT] * (len(end) * last)],
        flags=not by_unit,
    )
    return GPTBuckets(shapes, layout, n_layers, first, last, dtypes[1].itemsize, numel)
