"""Experts and the engine: who sums their counts, and over which ranks their weights travel."""

from __future__ import annotations

from torch import nn

from fastpar.experts.balance import Losses
from fastpar.parallel.engine import Engine


def attach_experts(engine: Engine, model: nn.Module) -> None:
    """The counts of a model's experts are summed in each step's exchange."""
    losses = getattr(model, "experts", None)
    if isinstance(losses, Losses):
        losses.attached, engine.control.tally = True, losses
