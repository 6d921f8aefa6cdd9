"""Pipelines: schedules as data, their simulator, the cut of a model into stages."""

from __future__ import annotations

from fastpar.axes import Axis


class Pipelined(Axis):
    """Layers in stages on ranks of pp."""

    name = "pipeline"
    order = 20


AXIS = Pipelined()
