"""Data parallelism: gradients, optimizer state and weights shared out (ZeRO, HSDP), in buckets."""

from __future__ import annotations

from fastpar.axes import Axis


class Data(Axis):
    """Sequences over ranks of dp, which share out what the stage says."""

    name = "data"
    order = 60


AXIS = Data()
