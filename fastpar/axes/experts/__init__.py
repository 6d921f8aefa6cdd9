"""Mixtures of experts: the router, its losses and counts, and tokens sent to where experts are."""

from __future__ import annotations

from fastpar.axes import Axis


class Experts(Axis):
    """Experts shared out over ranks of ep."""

    name = "experts"
    order = 50


AXIS = Experts()
