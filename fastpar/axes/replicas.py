"""Replicas, which train apart and meet every few steps; the optimizer that meets is optim/outer.py.

What it is    M copies of a run, each on world_size / M ranks with its own batches. Every
              outer_every steps they average what they learned (local SGD, DiLoCo).
Bytes         one all-reduce of fp32 weights, 8 (M - 1) / M bytes a parameter of a rank, every
              outer_every steps; outer_wire has fewer. The outer optimizer keeps 8 bytes a
              parameter: the weight of the last meeting, and a momentum.
Pays          below the link speed between replicas that `fastpar plan` prints. The loss curve is
              another one than with a mean of every step: compare it before you rely on it.
Not with      tp_grid, CUDA graphs; outer_wire not with deterministic.
Source: Douillard et al. 2023 (DiLoCo), arXiv 2311.08105; Lin et al. 2018 (local SGD),
arXiv 1808.07217
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastpar.axes import Axis
from fastpar.settings.config import GPTConfig


class Replicas(Axis):
    """Copies of a run that exchange their progress."""

    name = "replicas"
    order = 10

    def header(self, known: Mapping[str, Any], shape: GPTConfig) -> Iterator[str]:
        if known["outer_every"] is not None:
            yield f"replicas {known['replicas']}, which meet every {known['outer_every']} steps"


AXIS = Replicas()
