"""A parameter's state along each axis of a mesh, and index ranges of its slices. Arithmetic only.

    state        values on a rank of the axis      gradient on a rank
    Shard        its slice                         of its slice, complete
    Replicate    all, the same on every rank       the same on every rank, complete
    Partial      all, the same on every rank       a part: the whole is the sum over the ranks

Everything else follows (Placement): along which axes a gradient is summed, along which slices are
joined, which rank counts it in the global norm, which part of a checkpoint a rank writes. There is
no default state, because a wrong guess trains, but trains wrongly.

Index ranges: a piece of a whole tensor is a list of runs. A run (start, length, stride, count) is
the elements

    start + i * stride + j        i = 0 .. count - 1, j = 0 .. length - 1

in this order, of the whole tensor flattened row by row. Runs are in the order of the piece's
memory: a rank's part of a bucket is one run; a slice of columns is one run with as many rows; q, k
and v of a slice of heads are three. start = HOLE stands for padding, which is in no whole tensor:
of a vocabulary's last slice, or of attention's heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A slice of dimension dim.

    Args:
        dim: of the whole tensor, from the front.
        groups: equal parts of dim that are each split alike: 3 for GPT-2's fused q, k and v.
        pad_to: a group's slices are padded with 0 to multiples of this (a vocabulary, attention
            heads). Default: dim must be divisible.
    """

    dim: int = 0
    groups: int = 1
    pad_to: int | None = None

    def local_size(self, whole: int, ranks: int) -> int:
        """Elements along dim on each rank.

        Raises:
            ValueError: dim is not divisible.
        """
        if self.pad_to is not None and whole % self.groups == 0:
            group = self.groups * self.pad_to
            return -(-whole // (ranks * group)) * group
        if whole % (self.groups * ranks):
            parts = f"{self.groups} groups of {ranks}" if self.groups > 1 else str(ranks)
            raise ValueError(f"dimension {self.dim} of size {whole} does not divide by {parts}")
        return whole // ranks

    def local_shape(self, whole: Sequence[int], ranks: int) -> torch.Size:
        """The shape of the slice; raises as local_size()."""
        if self.dim >= len(whole):
            raise ValueError(f"there is no dimension {self.dim} in {list(whole)}")
        size = self.local_size(whole[self.dim], ranks)
        return torch.Size([*whole[: self.dim], size, *whole[self.dim + 1 :]])

    def cut(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The slice of one rank, a contiguous copy."""
        local = whole.new_zeros(self.local_shape(whole.shape, ranks))
        source, target = self._by_group(whole), self._by_group(local)
        first, n = self.range_of(whole.shape[self.dim], rank, ranks)
        target.narrow(self.dim + 1, 0, n).copy_(source.narrow(self.dim + 1, first, n))
        return local

    def join(self, slices: Sequence[Tensor], whole: Sequence[int]) -> Tensor:
        """The whole tensor, of this shape, from the slices of all ranks."""
        padded = torch.cat([self._by_group(x) for x in slices], self.dim + 1)
        size = whole[self.dim] // self.groups
        return padded.narrow(self.dim + 1, 0, size).reshape(tuple(whole))

    def range_of(self, whole: int, rank: int, ranks: int) -> tuple[int, int]:
        """(first element, number of elements) of a rank in each group, without padding."""
        each, size = self.local_size(whole, ranks) // self.groups, whole // self.groups
        first = min(rank * each, size)
        return first, min(each, size - first)

    def _by_group(self, x: Tensor) -> Tensor:
        return x.unflatten(self.dim, (self.groups, x.shape[self.dim] // self.groups))


@dataclass(frozen=True)
class Replicate:
    """All ranks hold and compute the same."""


@dataclass(frozen=True)
class Partial:
    """All ranks hold the same; each computes a part of the gradient."""


State = Shard | Replicate | Partial


@dataclass(frozen=True)
class Placement:
    """A parameter's state along every axis of a mesh.

    A tensor that several axes shard is cut along them in the order of the mesh: the slices of the
    first axis are cut by the second. `coordinates`: a rank's number along each axis (Mesh.place).

    Args:
        states: by axis; along the other axes every rank holds the same.
        sizes: ranks along each axis, outermost first.
    """

    states: Mapping[str, State]
    sizes: Mapping[str, int]

    def _axes(self, kind: type) -> tuple[str, ...]:
        return tuple(a for a in self.sizes if isinstance(self.states.get(a, Replicate()), kind))

    @cached_property
    def reduce_axes(self) -> tuple[str, ...]:
        """Axes along which gradients are summed."""
        return self._axes(Partial)

    @cached_property
    def gather_axes(self) -> tuple[str, ...]:
        """Axes along which slices are joined to the whole tensor."""
        return self._axes(Shard)

    def copy_of(self, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """(this rank's number among those with the same slice, number of such ranks)."""
        number, count = 0, 1
        for axis, size in self.sizes.items():
            if axis not in self.gather_axes:
                number, count = number * size + coordinates[axis], count * size
        return number, count

    def counts(self, coordinates: Mapping[str, int]) -> bool:
        """Whether this rank's slice counts in sums over all elements; one of each copy does."""
        return self.copy_of(coordinates)[0] == 0

    def shard_steps(self) -> list[tuple[Shard, str, int]]:
        """(state, axis, ranks) of each cut, in order."""
        states = [self.states[axis] for axis in self.gather_axes]
        return [(s, a, self.sizes[a]) for s, a in zip(states, self.gather_axes)]  # type: ignore

    def local_shapes(self, whole: Sequence[int]) -> list[torch.Size]:
        """Shapes of the whole and after each cut; raises ValueError as Shard.local_size()."""
        shapes = [torch.Size(whole)]
        for state, _, ranks in self.shard_steps():
            shapes.append(state.local_shape(shapes[-1], ranks))
        return shapes

    def cut(self, whole: Tensor, coordinates: Mapping[str, int]) -> Tensor:
        """A rank's slice, a contiguous copy."""
        local = whole
        for state, axis, ranks in self.shard_steps():
            local = state.cut(local, coordinates[axis], ranks)
        return whole.clone() if local is whole else local

    def join(self, slices: Sequence[Tensor], whole: Sequence[int]) -> Tensor:
        """The whole tensor, of this shape, from the slices of all ranks along gather_axes.

        Args:
            slices: in the order of the ranks in the group along gather_axes.
        """
        parts = list(slices)
        steps = zip(self.shard_steps(), self.local_shapes(whole))
        for (state, _, ranks), shape in reversed(list(steps)):
            rows = range(0, len(parts), ranks)
            parts = [state.join(parts[first : first + ranks], shape) for first in rows]
        return parts[0]


# Index ranges

HOLE = -1


class Run(NamedTuple):
    """A repeated range of elements; see the top of the file."""

    start: int
    length: int
    stride: int = 0
    count: int = 1  # type: ignore[assignment] # hides tuple.count

    @property
    def numel(self) -> int:
        return self.length * self.count

    @property
    def stop(self) -> int:
        """The index behind the last element."""
        return self.start + (self.count - 1) * self.stride + self.length


def whole_run(numel: int) -> list[Run]:
    """The piece that is the whole tensor."""
    return [Run(0, numel)] if numel else []


def runs_of_slice(state: Shard, shape: Sequence[int], rank: int, ranks: int) -> list[Run]:
    """A rank's slice of a tensor of this shape, in the slice's own order."""
    outer = math.prod(shape[: state.dim])
    inner = math.prod(shape[state.dim + 1 :])
    size, each = shape[state.dim], state.local_size(shape[state.dim], ranks) // state.groups
    first, n = state.range_of(size, rank, ranks)
    if state.groups == 1 and n == each:
        runs = [Run(first * inner, n * inner, size * inner, outer)]
    else:
        starts = [k * (size // state.groups) + first for k in range(state.groups)]
        padding = Run(HOLE, (each - n) * inner)
        here = [(i * size + start) * inner for i in range(outer) for start in starts]
        runs = [run for start in here for run in (Run(start, n * inner), padding)]
    return [run._replace(stride=0) if run.count == 1 else run for run in runs if run.numel]


def runs_of_placement(
    placement: Placement, shape: Sequence[int], coordinates: Mapping[str, int]
) -> list[Run]:
    """The slice of a tensor of this shape on the rank at these coordinates, in its own order."""
    runs = whole_run(math.prod(shape))
    shapes = placement.local_shapes(shape)
    for i, (state, axis, ranks) in enumerate(placement.shard_steps()):
        inner = runs_of_slice(state, shapes[i], coordinates[axis], ranks)
        runs = inner if i == 0 else _compose(runs, inner)
    return runs


def _compose(outer: Sequence[Run], inner: Iterable[Run]) -> list[Run]:
    """Compose: `inner` indexes positions of the piece `outer`."""
    result: list[Run] = []
    for run in inner:
        if run.start == HOLE:
            result.append(run)
            continue
        for start in range(run.start, run.stop, run.stride or run.length):
            result += cut_runs(outer, start, start + run.length)
    return result


def cut_runs(runs: Iterable[Run], start: int, stop: int) -> list[Run]:
    """Elements [start, stop) of a piece, counted in its own order."""
    result: list[Run] = []
    offset = 0
    for run in runs:
        a, b = max(start - offset, 0), min(stop - offset, run.numel)
        offset += run.numel
        if a < b:
            result += _cut(run, a, b)
    return result


def _cut(run: Run, a: int, b: int) -> list[Run]:
    if run.start == HOLE:
        return [Run(HOLE, b - a)]
    first, skip = divmod(a, run.length)
    last, rest = divmod(b, run.length)

    def row(i: int, from_: int, to: int) -> list[Run]:
        return [Run(run.start + i * run.stride + from_, to - from_)] if from_ < to else []

    if first == last:
        return row(first, skip, rest)
    head = row(first, skip, run.length) if skip else []
    first += bool(skip)
    n = last - first
    body = run._replace(
        start=run.start + first * run.stride, count=n, stride=run.stride if n > 1 else 0
    )
    return [*head, *([body] if n else []), *row(last, 0, rest)]


def numel_of(runs: Iterable[Run]) -> int:
    """Number of elements of a piece, holes included."""
    return sum(run.numel for run in runs)


def intervals(runs: Iterable[Run]) -> np.ndarray:
    """int64 [n, 3]: (first index in the whole, length, first position in the piece), no holes."""
    rows, offset = [], 0
    for run in runs:
        if run.start != HOLE:
            i = np.arange(run.count, dtype=np.int64)
            starts, places = run.start + i * run.stride, offset + i * run.length
            rows.append(np.stack((starts, np.full_like(i, run.length), places), 1))
        offset += run.numel
    return np.concatenate(rows) if rows else np.empty((0, 3), np.int64)


def overlaps(wanted: np.ndarray, held: np.ndarray) -> np.ndarray:
    """int64 [n, 3]: (position in mine, position in theirs, length) of common elements.

    Args:
        mine, theirs: intervals() of two pieces of one tensor.
    """
    held = held[np.argsort(held[:, 0], kind="stable")]
    stops = held[:, 0] + held[:, 1]
    first = np.searchsorted(stops, wanted[:, 0], side="right")
    last = np.searchsorted(held[:, 0], wanted[:, 0] + wanted[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    a = np.repeat(np.arange(len(wanted)), counts)
    b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    b += np.repeat(first, counts)
    start = np.maximum(wanted[a, 0], held[b, 0])
    stop = np.minimum(wanted[a, 0] + wanted[a, 1], stops[b])
    places = (wanted[a, 2] + start - wanted[a, 0], held[b, 2] + start - held[b, 0], stop - start)
    return np.stack(places, 1)


def check_cover(pieces: Iterable[Iterable[Run]], numel: int) -> str | None:
    """None if the pieces hold each of a tensor's elements once; else the first mistake."""
    rows = np.concatenate([intervals(()), *map(intervals, pieces)])
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    starts, due = np.append(rows[:, 0], numel), np.append(0, rows[:, 0] + rows[:, 1])
    wrong = np.flatnonzero(starts != due)
    if not len(wrong):
        return None
    start, at = int(starts[wrong[0]]), int(due[wrong[0]])
    if start > at:
        return f"no element {at}"
    return f"element {start} twice" if wrong[0] < len(rows) else f"element {numel} of {numel}"


def share_of(numel: int, copy: int, n_copies: int, index: int, align: int = 256) -> tuple[int, int]:
    """Elements [start, stop) that one of several ranks with the same piece writes.

    Large pieces are cut at multiples of `align`; small ones are written whole, by one rank after
    another.

    Args:
        index: of the piece among all of a checkpoint, the same on every rank.
    """
    if n_copies == 1 or numel < _SMALL * n_copies:
        return (0, numel) if index % n_copies == copy else (0, 0)
    each = -(-numel // (n_copies * align)) * align
    return min(copy * each, numel), min((copy + 1) * each, numel)


_SMALL = 4096  # elements per rank below which a piece is not cut
