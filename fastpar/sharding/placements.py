"""What a rank has of a parameter along a mesh axis, and of its gradient: arithmetic only.

    state        values on a rank of the axis      gradient on a rank
    Shard        its slice                         of its slice, complete
    Replicate    all, the same on every rank       the same on every rank, complete
    Partial      all, the same on every rank       a part: the whole is the sum over the ranks

Everything else follows: Partial gradients are summed before a step, of Replicate and Partial ones
one rank counts in the global norm, checkpoints put Shards together. A parameter without a state has
no default, because a wrong guess trains, and trains wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A slice of dimension dim.

    Args:
        dim: of the whole tensor, from the front.
        groups: equal parts of dim that are each split alike: 3 for GPT-2's fused q, k and v.
        pad_to: slices are multiples of this, what they have beyond the whole is 0 (a vocabulary);
            None: dim must divide.
    """

    dim: int = 0
    groups: int = 1
    pad_to: int | None = None

    def local_size(self, whole: int, ranks: int) -> int:
        """Elements along dim on each rank.

        Raises:
            ValueError: they cannot be split so.
        """
        if self.pad_to is not None:
            return -(-whole // (ranks * self.pad_to)) * self.pad_to
        if whole % (self.groups * ranks):
            parts = f"{self.groups} groups of {ranks}" if self.groups > 1 else str(ranks)
            raise ValueError(f"dimension {self.dim} of size {whole} does not divide by {parts}")
        return whole // ranks

    def local_shape(self, whole: Sequence[int], ranks: int) -> torch.Size:
        """Of the slice; raises as local_size()."""
        if self.dim >= len(whole):
            raise ValueError(f"there is no dimension {self.dim} in {list(whole)}")
        size = self.local_size(whole[self.dim], ranks)
        return torch.Size([*whole[: self.dim], size, *whole[self.dim + 1 :]])

    def cut(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The slice of one rank, a contiguous copy."""
        shape = self.local_shape(whole.shape, ranks)
        if self.pad_to is None:
            each = shape[self.dim] // self.groups
            parts = whole.unflatten(self.dim, (self.groups, ranks, each)).select(self.dim + 1, rank)
            return parts.clone(memory_format=torch.contiguous_format).view(shape)
        size = shape[self.dim]
        local = whole.new_zeros(shape)
        first = min(rank * size, whole.shape[self.dim])
        n = min(size, whole.shape[self.dim] - first)
        local.narrow(self.dim, 0, n).copy_(whole.narrow(self.dim, first, n))
        return local

    def put(self, part: Tensor, rank: int, ranks: int, whole: Tensor) -> None:
        """Copy the slice of one rank to its place in a whole tensor."""
        if self.pad_to is None:
            each = part.shape[self.dim] // self.groups
            place = whole.unflatten(self.dim, (self.groups, ranks, each)).select(self.dim + 1, rank)
            place.copy_(part.unflatten(self.dim, (self.groups, each)))
            return
        size = part.shape[self.dim]
        first = min(rank * size, whole.shape[self.dim])
        n = min(size, whole.shape[self.dim] - first)
        whole.narrow(self.dim, first, n).copy_(part.narrow(self.dim, 0, n))

    def join(self, slices: Sequence[Tensor], whole: Sequence[int]) -> Tensor:
        """The whole tensor, of this shape, from the slices of all ranks."""
        if self.groups > 1:
            each = slices[0].shape[self.dim] // self.groups
            grouped = [x.unflatten(self.dim, (self.groups, each)) for x in slices]
            return torch.stack(grouped, self.dim + 1).reshape(tuple(whole))
        return torch.cat(list(slices), self.dim).narrow(self.dim, 0, whole[self.dim])


@dataclass(frozen=True)
class Replicate:
    """All ranks have and compute the same."""


@dataclass(frozen=True)
class Partial:
    """All ranks have the same; each computes a part of the gradient."""


State = Shard | Replicate | Partial
