"""Sums in a fixed order, for deterministic runs."""

from __future__ import annotations

from torch import Tensor


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
            x[place].zero_()

    def total(self) -> Tensor:
        """A new tensor; the sum can go on."""
        x = self._parts[-1].clone()
        for left in reversed(self._parts[:-1]):
            x = left + x
        return x
