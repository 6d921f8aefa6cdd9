"""Copies of gradients into a bucket that wait until several can be made by one launch.

On a GPU the copy of a bias's gradient takes as long as its launch. So the gradients that a bucket
takes stay as autograd made them until it is complete, or WAIT_BYTES wait, or the backward ends, and
are then copied by one kernel: the same bits. Larger gradients do not wait. On a CPU none does.
"""

from __future__ import annotations

import torch
from torch import Tensor

# By type of device. Of 124M in bf16 these are the gradients of two blocks.
WAIT_BYTES = {"cuda": 32 << 20, "cpu": 0}


class WaitingCopies:
    """See the top of the file."""

    def __init__(self, device: torch.device) -> None:
        self._most = WAIT_BYTES.get(device.type, 0)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0

    def take(self, value: Tensor, place: Tensor, *, add: bool) -> None:
        """Copy value, which nobody changes any more, to place, at the latest in make().

        add: to what place holds, at once.
        """
        if add:
            self.make()
            place.add_(value)
            return
        if self._bytes + value.nbytes > self._most:
            self.make()
        if value.nbytes > self._most:
            place.copy_(value)
            return
        self._waiting.append((place, value))
        self._bytes += value.nbytes

    def make(self) -> None:
        """Make all copies that wait."""
        if self._waiting:
            places, values = zip(*self._waiting)
            torch._foreach_copy_(places, values)
            self._waiting, self._bytes = [], 0
