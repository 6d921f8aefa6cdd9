"""Sums in a fixed tree: the same bits whoever adds, and in however many parts."""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.kernels import sum_shards


class PairwiseSum:
    """A sum of tensors in a fixed tree: ((0 + 1) + (2 + 3)) + ..., the rest from the right."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[Tensor] = []

    def push(self, x: Tensor) -> None:
        """Add the next tensor; it belongs to the sum from now on."""
        order = self.count
        while order & 1:
            x = self._parts.pop().add_(x)
            order >>= 1
        self._parts.append(x)
        self.count += 1

    @property
    def nbytes(self) -> int:
        """Size of the partial sums."""
        return sum(x.nbytes for x in self._parts)

    def zero_(self, place: slice) -> None:
        """Forget what was added to these elements."""
        for x in self._parts:
            x[..., place].zero_()

    def total(self) -> Tensor:
        """A new tensor; the sum can go on."""
        x = self._parts[-1].clone()
        for left in reversed(self._parts[:-1]):
            x = left + x
        return x


def sum_rows_in_tree(parts: Tensor, out: Tensor, mean: bool) -> None:
    """out[S] = the tree over the rows of parts[W, S] (which is overwritten), or the mean."""
    world_size = parts.shape[0]
    if parts.dtype in (torch.float64, torch.int64):
        step = 1
        while step < world_size:  # each row adds its right neighbour of those still there
            for left in range(0, world_size - step, 2 * step):
                parts[left].add_(parts[left + step])
            step *= 2
        torch.div(parts[0], world_size, out=out) if mean else out.copy_(parts[0])
    elif not mean or world_size & (world_size - 1) == 0:  # a power of two: the product is exact
        sum_shards(parts, out, scale=1.0 / world_size if mean else None)
    else:  # divided before the one rounding
        wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        sum_shards(parts, wide)
        torch.div(wide, world_size, out=wide)
        if wide is not out:
            out.copy_(wide)
