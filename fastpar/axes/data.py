"""Data parallelism: ranks compute different sequences; ZeRO shards what its stage says.

What it does  Gradients are averaged over the ranks, bucket by bucket, during backward. Stage 1
              shards the optimizer's state, 2 also gradients, 3 also weights, which are gathered one
              block ahead of their use. shard_size: replicas of the model, each sharded over so many
              neighbours (HSDP).
Bytes         P elements of gradients and of weights, n ranks: stages 0 to 2 send 2 (n - 1) / n P a
              step, stage 3 3 (n - 1) / n P a micro-batch. A rank keeps weights, gradients and
              state of P; from stage 1 on 1 / n of the state, from 2 on of the gradients, at 3 of
              the weights, plus two gathered blocks.
Use it        always first. A higher stage if memory is short; shard_size if the links between nodes
              are slow.
Not with      Adafactor above stage 0.
Source: Rajbhandari et al. 2020, arXiv 1910.02054

Ranks exchange buckets: buckets_of() computes those of parallelize() for a GPT on one rank of tp,
without the model: the parameters' shapes go through the same build_layout() in the same units.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastpar.axes import Axis, Making
from fastpar.axes.pipeline import RankParts, parts_of
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.wires import FORMATS
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import DelayedScales
from fastpar.settings.model import (
    GPTConfig,
    block_parts,
    first_parts,
    last_parts,
    parameters_of,
    products,
    shapes_of,
    widths,
)
from fastpar.settings.parallel import Parallel
from fastpar.sharding.layout import ALIGN, Layout, ParamSpec, build_layout

ROOT = 0  # the unit of parameters outside blocks


class BucketKind(NamedTuple):
    """Buckets that take equally long to send, at the same time in a step.

    root, last_unit: of the root unit, or the last one: at stage 3 both stay gathered from forward
        to backward.
    complete_last: completed at the end of backward, so nothing hides it.
    ep: number of ranks over which these experts are distributed; 1: not experts.
    """

    numel: int
    root: bool
    last_unit: bool
    complete_last: bool
    ep: int = 1

    def shards(self, n_shards: int) -> int:
        """Number of shards if that many ranks shard a replica."""
        return max(1, n_shards // self.ep)

    def padded(self, n_shards: int) -> int:
        """Elements, padded for these shards."""
        multiple = self.shards(n_shards) * ALIGN
        return -(-self.numel // multiple) * multiple


@dataclass(frozen=True, eq=False)  # one object per model and split: compared by id
class GPTBuckets:
    """The buckets of one rank.

    Attributes:
        shapes: of the parameters, in registration order; names: of those in blocks, else "".
        layout: with one shard; BucketKind.padded() computes others.
        blocks: elements of a block, and of one with experts.
    """

    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    layout: Layout
    ep: int
    grad_bytes: int
    blocks: tuple[int, int]

    @functools.cached_property
    def elements(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(map(math.prod, self.shapes))

    @functools.cached_property
    def matrices(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters with two dimensions."""
        return tuple(shape for shape in self.shapes if len(shape) == 2)

    @property
    def hidden(self) -> tuple[int, ...]:
        """Indices of the blocks' matrices and stacks, as muon_groups() finds them."""
        own = {f"{name}.weight" for name in products()}
        return tuple(i for i, name in enumerate(self.names) if name in own)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Elements of the first buckets, without padding: those of one, of two, ... of all."""
        slots = [bucket.slots for bucket in self.layout.buckets]
        sizes = (sum(self.layout.slots[i].spec.numel for i in of) for of in slots)
        return tuple(itertools.accumulate(sizes))

    @functools.cached_property
    def units(self) -> tuple[int, ...]:
        """Elements of the root, then of each unit that stage 3 gathers."""
        sizes = Counter[int]()
        for bucket in self.layout.buckets:
            sizes[bucket.unit] += bucket.numel
        return tuple(sizes[unit] for unit in range(max(sizes) + 1))

    @functools.cached_property
    def kinds(self) -> Counter[BucketKind]:
        """Number of buckets of each kind."""
        buckets, last_unit = self.layout.buckets, len(self.units) - 1
        return Counter(
            BucketKind(
                *(b.numel, b.unit == ROOT, b.unit == last_unit, b is buckets[-1]),
                self.ep if b.key else 1,
            )
            for b in buckets
        )

    @functools.cached_property
    def of_experts(self) -> int:
        """Elements of parameters that are distributed over ep."""
        of = [b.slots for b in self.layout.buckets if b.key]
        return sum(self.layout.slots[i].spec.numel for slots in of for i in slots)

    def padded(self, n_shards: int) -> int:
        """Elements of all buckets, padded for so many shards."""
        return sum(kind.padded(n_shards) * count for kind, count in self.kinds.items())

    def shard(self, n_shards: int) -> int:
        """Elements of a rank's shards of them."""
        return sum(
            kind.padded(n_shards) // kind.shards(n_shards) * count
            for kind, count in self.kinds.items()
        )

    def share(self, n_shards: int) -> float:
        """Elements of a rank's shards, without padding."""
        return (self.elements - self.of_experts) / n_shards + self.of_experts / max(
            1, n_shards // self.ep
        )


def buckets_of(workload: Workload, setup: Setup, parts: RankParts | None = None) -> GPTBuckets:
    """The buckets of a rank with these parts. Default: of the rank with most parameters."""
    if parts is None:
        sizes = widths(workload.shape, ep=setup.mesh.ep)
        layer = 12 * sizes["C"]
        table, experts = sizes["V"] / layer, 2 * sizes["S"] * sizes["H"] / layer - 2 / 3

        def weights(p: RankParts) -> float:
            n_units = sum(map(len, p.layers)) + table * (p.first or p.last)
            return n_units + experts * sum(map(sum, p.layers))

        several = parts_of(workload, setup)
        parts = max(several, key=weights) if len(several) > 1 else several[0]
    return _buckets(
        workload.shape,
        sum(parts.layers, ()),
        parts.first,
        parts.last,
        (setup.tp, setup.rows if setup.mesh.tp_grid is not None else 0, setup.mesh.ep),
        setup.dtype,
        setup.grad_dtype,
        setup.stage > 0,
        setup.bucket_bytes,
    )


@functools.lru_cache(maxsize=1024)
def _buckets(
    shape: GPTConfig,
    layers: tuple[bool, ...],
    first: bool,
    last: bool,
    split: tuple[int, int, int],
    dtype: str,
    grad_dtype: str,
    by_unit: bool,
    bucket_bytes: float,
) -> GPTBuckets:
    dtypes = DTYPES[dtype], DTYPES[grad_dtype]
    table, *more = shapes_of(first_parts(shape), shape, *split)
    both = [block_parts(shape), block_parts(shape, experts=True)]
    blocks = [shapes_of(b, shape, *split) for b in both]
    end = shapes_of(last_parts(shape), shape, *split)
    named = [[*parameters_of(b)] for b in both]
    dense, sparse = (sum(map(math.prod, b)) for b in blocks)
    # parallelize() merges neighbouring units up to the cap of the first bucket.
    unit, free = int(not by_unit), 0.0
    before = [table] * (first or (last and shape.tied)) + more * first
    shapes, units, names = [*before], [ROOT] * len(before), [""] * len(before)
    experts, shared = [], split[-1] > 1
    for layer in layers:
        size = (sparse if layer else dense) * dtypes[0].itemsize
        if by_unit and size > free:
            unit, free = unit + 1, Parallel.first_bucket_mb * 2**20
        free -= size
        for sizes, (name, dims) in zip(blocks[layer], named[layer]):
            experts += [len(shapes)] * (shared and "S" in dims)
            shapes.append(sizes)
            units.append(unit)
            names.append(name)
    shapes, names = [*shapes, *end * last], [*names, *[""] * len(end * last)]
    layout = build_layout(
        [ParamSpec((str(i),), s, dtypes[0]) for i, s in enumerate(shapes)],
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=Parallel.first_bucket_mb * 2**20,
        grad_dtype=dtypes[1],
        unit_of=[*units, *[ROOT] * len(end * last)],
        keys=dict.fromkeys(experts, "ep"),
        flags=not by_unit,
    )
    item, elements = dtypes[1].itemsize, (dense, sparse)
    return GPTBuckets(tuple(shapes), tuple(names), layout, split[-1], item, elements)


def elements_of(workload: Workload, setup: Setup) -> tuple[int, float]:
    """Parameters on a rank: (all elements, elements whose state it has)."""
    buckets = buckets_of(workload, setup)
    return buckets.elements, buckets.share(setup.n_shards if setup.stage else 1)


def gathered_bytes(setup: Setup) -> float:
    """Bytes per element of a gathered weight."""
    form = FORMATS.get(setup.parallel.wires.weights or "") if setup.stage else None
    return setup.weight_bytes if form is None else min(form.bytes_per_element, setup.weight_bytes)


class Data(Axis):
    """Data parallelism over dp, with ZeRO."""

    name = "data"
    order = 60
    place = 1

    def header(self, setup: Setup, shape: GPTConfig) -> dict[str, str]:
        how = f"transport {setup.transport}, accumulate {setup.accumulate}"
        return {"ranks": f"ZeRO {setup.parallel.zero_stage}, shards {setup.n_shards}, {how}"}

    def attach(self, making: Making, engine: Any) -> None:
        """Exchange a model's delayed fp8 scales in each step."""
        scales = getattr(making.model, "fp8_scales", None)
        if engine.control.tally is None and isinstance(scales, DelayedScales):
            engine.control.tally = scales
            scales.averaged = making.mesh.size("replicas", "dp", "cp")

    def states(self, setup: Setup, buckets: GPTBuckets, sizes: dict[str, float]) -> None:
        """Shards of the stage; a node's secondary shards."""
        n, stage = setup.n_shards, setup.stage
        whole, shard = buckets.padded(n), buckets.shard(n)
        sizes["parameters"] = setup.weight_bytes * (shard if stage == 3 else whole)
        wires = setup.parallel.wires
        if wires.secondary_shards and wires.node_size and n > wires.node_size:
            sizes["parameters"] += setup.weight_bytes * whole / wires.node_size
        sizes["gradients"] = setup.grad_bytes * (shard if stage >= 2 else whole)

    def ops(self, workload: Workload, setup: Setup) -> Iterator[Op]:
        """Copies of gradients into their buckets."""
        (local, _), n_micro = elements_of(workload, setup), setup.grad_accum_steps
        n_first = n_micro if setup.accumulate == "shard" else 1
        copied = local * (setup.weight_bytes + setup.grad_bytes)
        yield Op("copy", (copied,), "backward", 0.0, float(copied), n_first)
        if n_first < n_micro:
            added = copied + local * setup.grad_bytes
            yield Op("copy", (added,), "backward", 0.0, float(added), n_micro - n_first)

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """Gradients of each kind of bucket during backward, weights before their use."""
        if setup.data == 1:
            return
        n_micro, stage, shards = setup.grad_accum_steps, setup.stage, setup.n_shards
        tp = setup.tp * setup.rows  # distance of neighbours, in ranks
        reductions = n_micro if setup.accumulate == "shard" else 1
        reduced = Counter[tuple[int, str, int]]()
        gathered, again = Counter[tuple[float, str, int]](), Counter[tuple[float, str, int]]()
        node = setup.parallel.wires.node_size or 1
        for kind, count in buckets_of(workload, setup).kinds.items():
            numel, ep = kind.padded(shards), kind.ep
            passes = count * (n_micro if stage == 3 else 1)
            reduced[numel, "" if kind.complete_last else "backward", ep] += reductions * count
            inside = setup.parallel.wires.secondary_shards
            sent = float(numel * gathered_bytes(setup))
            kept = numel * setup.weight_bytes
            gathered[sent, "" if kind.root else "forward", ep] += count if inside else passes
            if inside:
                again[kept, "" if kind.root else "forward", ep] += passes - count
            if stage == 3 and not (kind.root or kind.last_unit):
                (again if inside else gathered)[kept if inside else sent, "backward", ep] += passes
        for (numel, under, ep), count in reduced.items():
            n_bytes, n, stride = float(numel * setup.wire_bytes), max(1, shards // ep), tp * ep
            if stage:
                compressed = setup.parallel.wires.gradients in FORMATS
                scatter = "all_to_all" if compressed else "reduce_scatter"
                yield CommOp(scatter, "shard", n_bytes, n, stride, count, under)
                part, copies = n_bytes / n, setup.data // ep // n
                yield from _sums(setup, "copies", part, copies, stride * n, count, under)
            else:
                yield from _sums(setup, "dp", n_bytes, setup.data // ep, stride, count, under)
        for (n_bytes, under, ep), count in gathered.items() if stage else ():
            n = max(1, shards // ep)
            yield CommOp("all_gather", "shard", n_bytes, n, tp * ep, count, under)
        for (n_bytes, under, _), count in again.items():
            yield CommOp("all_gather", "shard", float(n_bytes), node, tp, count, under)

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        """Stages that work with offload, 0 of a single rank; shards within a node, or eight.

        Pipelines and grids have one replica only.
        """
        data, stages = setup.data, {None: range(4), "optimizer": range(2, 4)}
        in_node = per_node // setup.tp
        shards = {n for n in (in_node, 8 * in_node) if 1 < n < data and data % n == 0}
        if setup.mesh.pp > 1 or setup.mesh.tp_grid is not None:
            shards = set()
        for stage in stages.get(setup.parallel.offload.what, range(3, 4)):
            if data > 1 or stage == 0 or setup.parallel.offload.what is not None:
                for shard_size in (None, *sorted(shards)) if stage else (None,):
                    yield setup.change(zero_stage=stage, shard_size=shard_size)

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        return setup.parallel.zero_stage, setup.parallel.shard_size

    def text(self, setup: Setup) -> str:
        return f"dp {setup.dp}" * (setup.dp > 1)

    def note(self, setup: Setup) -> str:
        if not setup.stage and setup.data == 1:
            return ""
        stage, n = setup.parallel.zero_stage, setup.parallel.shard_size
        return f"ZeRO-{stage}" + f" in groups of {n}" * (n is not None)


def _sums(setup: Setup, axis: str, *of: Any) -> Iterator[CommOp]:
    """An all-reduce of gradients; with compression, its two halves."""
    compressed = setup.parallel.wires.gradients in FORMATS
    for kind in ("all_to_all", "all_gather") if compressed else ("all_reduce",):
        yield CommOp(kind, axis, *of)


AXIS = Data()
