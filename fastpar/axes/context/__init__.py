"""Context parallelism; see README.md."""

from __future__ import annotations

from fastpar.axes import Axis


class Context(Axis):
    """Each sequence split over ranks of cp."""

    name = "context"
    order = 40


AXIS = Context()
