"""Tensor parallelism: conjugate operators, the split vocabulary, declared placements."""

from __future__ import annotations

from fastpar.axes import Axis


class Tensor(Axis):
    """Each layer split over ranks of tp."""

    name = "tensor"
    order = 30


AXIS = Tensor()
