"""Where a parameter lives on a mesh: its state along each axis. Arithmetic only.

    state        values on a rank of the axis      gradient on a rank
    Shard        its slice                         of its slice, complete
    Replicate    all, the same on every rank       the same on every rank, complete
    Partial      all, the same on every rank       a part: the whole is the sum over the ranks

Everything else follows (Placement): along which axes its gradient is summed, along which its slices
are joined, which rank counts it in the global norm, which part of a checkpoint a rank writes. A
parameter without a state has no default, because a wrong guess trains, and trains wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A slice of dimension dim.

    Args:
        dim: of the whole tensor, from the front.
        groups: equal parts of dim that are each split alike: 3 for GPT-2's fused q, k and v.
        pad_to: a group's slices are multiples of this, what they have beyond the whole is 0 (a
            vocabulary, attention heads); None: dim must divide.
    """

    dim: int = 0
    groups: int = 1
    pad_to: int | None = None

    def local_size(self, whole: int, ranks: int) -> int:
        """Elements along dim on each rank.

        Raises:
            ValueError: they cannot be split so.
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
        theirs, mine = self._by_group(whole), self._by_group(local)
        first, n = self.range_of(whole.shape[self.dim], rank, ranks)
        mine.narrow(self.dim + 1, 0, n).copy_(theirs.narrow(self.dim + 1, first, n))
        return local

    def join(self, slices: Sequence[Tensor], whole: Sequence[int]) -> Tensor:
        """The whole tensor, of this shape, from the slices of all ranks."""
        padded = torch.cat([self._by_group(x) for x in slices], self.dim + 1)
        size = whole[self.dim] // self.groups
        return padded.narrow(self.dim + 1, 0, size).reshape(tuple(whole))

    def range_of(self, whole: int, rank: int, ranks: int) -> tuple[int, int]:
        """(first element, how many) that a rank has of each group, padding not counted."""
        each, size = self.local_size(whole, ranks) // self.groups, whole // self.groups
        first = min(rank * each, size)
        return first, min(each, size - first)

    def _by_group(self, x: Tensor) -> Tensor:
        return x.unflatten(self.dim, (self.groups, x.shape[self.dim] // self.groups))


@dataclass(frozen=True)
class Replicate:
    """All ranks have and compute the same."""


@dataclass(frozen=True)
class Partial:
    """All ranks have the same; each computes a part of the gradient."""


State = Shard | Replicate | Partial


@dataclass(frozen=True)
class Placement:
    """A parameter's state along every axis of a mesh.

    A tensor that several axes shard is cut along them in the order of the mesh: the slices of the
    first are cut by the second. `at` is the place of a rank, its number along each axis
    (Mesh.place).

    Args:
        states: by axis; along the other axes every rank has the same.
        sizes: ranks along each axis, outermost first.
    """

    states: Mapping[str, State]
    sizes: Mapping[str, int]

    def _axes(self, kind: type) -> tuple[str, ...]:
        return tuple(a for a in self.sizes if isinstance(self.states.get(a, Replicate()), kind))

    @cached_property
    def reduce_axes(self) -> tuple[str, ...]:
        """Along which gradients are summed."""
        return self._axes(Partial)

    @cached_property
    def gather_axes(self) -> tuple[str, ...]:
        """Along which slices are joined to the whole tensor."""
        return self._axes(Shard)

    def copy_of(self, at: Mapping[str, int]) -> tuple[int, int]:
        """(number of this rank among those that have the same slice, how many these are)."""
        number, count = 0, 1
        for axis, size in self.sizes.items():
            if axis not in self.gather_axes:
                number, count = number * size + at[axis], count * size
        return number, count

    def counts(self, at: Mapping[str, int]) -> bool:
        """Whether this rank's slice counts in sums over all elements, of each copy one does."""
        return self.copy_of(at)[0] == 0

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

    def cut(self, whole: Tensor, at: Mapping[str, int]) -> Tensor:
        """A rank's slice, a contiguous copy."""
        local = whole
        for state, axis, ranks in self.shard_steps():
            local = state.cut(local, at[axis], ranks)
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
