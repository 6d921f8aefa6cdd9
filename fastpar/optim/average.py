"""A running average of the weights, an entry of the optimizer's state: shared out and saved so.

[Note: single roundings] As in muon.py: an average has the same bits however it is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.optim.base import EngineOptimizer
from fastpar.optim.state import values_of

AVERAGE = "average"


class AveragedWeights:
    """The exponential moving average of an optimizer's weights, in fp32.

    Args:
        factor: what the average keeps of itself in a step; less at first, when it is young:
            (1 + step) / (10 + step).
    Memory: 4 bytes for each element that this rank steps.
    """

    def __init__(self, optimizer: EngineOptimizer, factor: float) -> None:
        self.optimizer, self.factor = optimizer, factor

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After so many steps."""
        factor = min(self.factor, (1 + step) / (10 + step))
        for _, piece, state, _ in self._pieces():
            values = values_of(piece, state)
            if AVERAGE not in state:
                wide = torch.promote_types(values.dtype, torch.float32)
                state[AVERAGE] = values.detach().to(wide, copy=True)
            else:
                state[AVERAGE].mul_(factor).add_(values * (1.0 - factor))

    @contextlib.contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Within, the model has the averages as weights. Ranks: all.

        Memory: a copy of what this rank steps, and one whole parameter.
        """
        kept = {p: piece.detach().clone() for p, piece, _, _ in self._pieces()}
        _write_pieces(self.optimizer, {p: state[AVERAGE] for p, _, state, _ in self._pieces()})
        try:
            yield
        finally:
            _write_pieces(self.optimizer, kept)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], Engine | None]]:
        """Each parameter that has been stepped, and this rank's elements of it."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                engine, state = engine_of_parameter(p), self.optimizer.state.get(p)
                if state:
                    yield p, p if engine is None else engine.shards.piece(p).param, state, engine


@torch.no_grad()
def _write_pieces(optimizer: torch.optim.Optimizer, values: dict[Tensor, Tensor]) -> None:
    """Replace parameters by what the ranks have of them, each its piece. Ranks: all.

    Memory: one whole parameter.
    """
    found = {p: engine_of_parameter(p) for p in values}
    for engine in {id(e): e for e in found.values() if e is not None}.values():
        engine.shards.begin_writes()
    for p, of in found.items():
        if of is None:
            p.copy_(values[p])
            continue
        whole = of.shards.full(values[p], p)
        if of.shards.declared is not None:
            whole = of.shards.declared.cut(whole, p)
        of.shards.write(p, whole)  # type: ignore[arg-type]


def forget_average(optimizer: EngineOptimizer) -> None:
    """Drop the averages that a checkpoint had, where nobody moves them on."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
