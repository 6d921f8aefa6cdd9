"""Optimizer state, gradients and weights in the host's memory."""

from __future__ import annotations

from fastpar.axes import Axis


class Offloaded(Axis):
    """What a rank keeps on its host."""

    name = "offload"
    order = 80


AXIS = Offloaded()
