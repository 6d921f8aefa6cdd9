"""Replicas, which train apart and meet every few steps: see optim/outer.py."""

from __future__ import annotations

from fastpar.axes import Axis


class Replicas(Axis):
    """Copies of a run that exchange their progress."""

    name = "replicas"
    order = 10


AXIS = Replicas()
