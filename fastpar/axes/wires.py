"""Formats of gradients and weights on their way between ranks."""

from __future__ import annotations

from fastpar.axes import Axis


class Wires(Axis):
    """Messages in fewer bits than what they are made from."""

    name = "wires"
    order = 70


AXIS = Wires()
