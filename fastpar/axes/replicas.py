"""Replicas that train independently and average every few steps, with optim/outer.py.

What it does  M replicas of a run, each on world_size / M ranks with its own batches. Every
              outer_every steps they average their weights (local SGD, DiLoCo).
Bytes         one all-reduce of fp32 weights, 8 (M - 1) / M bytes per parameter of a rank, every
              outer_every steps; less with outer_wire. The outer optimizer keeps 8 bytes per
              parameter: the last common weight, and a momentum.
Use it        over links too slow for gradients. The loss curve differs from that of data
              parallelism: compare it first.
Not with      tp_grid, CUDA graphs; outer_wire not with deterministic.
Source: Douillard et al. 2023 (DiLoCo), arXiv 2311.08105; Lin et al. 2018 (local SGD),
arXiv 1808.07217
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastpar.axes import Axis
from fastpar.settings.model import GPTConfig


class Replicas(Axis):
    """Replicas that exchange weights every few steps."""

    name = "replicas"
    order = 10

    def header(self, known: Mapping[str, Any], shape: GPTConfig) -> dict[str, str]:
        replicas, steps = known["replicas"], known["outer_every"]
        return {"ranks": f"replicas {replicas}, averaged every {steps} steps"} if steps else {}


AXIS = Replicas()
