"""Dynamic loss scale for fp16: doubled while gradients stay finite, halved when they overflow."""

from __future__ import annotations

import math
from typing import Any


class DynamicLossScale:
    """The factor that keeps small fp16 gradients from vanishing.

    Multiply the loss by scale, set the optimizer's grad_scale to scale, step, then call
    update(optimizer.skipped). All ranks skip a step or none does, also where each sees only its
    shards of the gradients, so their scales stay the same without communication.

    Args:
        init: first scale; growth_interval: finite steps in a row after which it is doubled.
        min_scale, max_scale: its limits.
    Raises:
        ValueError: limits that contradict each other; growth_interval below 1.
        RuntimeError: in update(), an overflow at min_scale.
    """

    def __init__(
        self,
        init: float = 2.0**16,
        growth_interval: int = 2000,
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        if not 0 < min_scale <= init <= max_scale or init == math.inf:
            raise ValueError(
                f"DynamicLossScale: expected 0 < min_scale={min_scale} <= init <= "
                f"max_scale={max_scale}, init finite, got init={init}; 2**16 suits most models"
            )
        if not isinstance(growth_interval, int) or growth_interval < 1:
            raise ValueError(
                "DynamicLossScale: expected an integer growth_interval >= 1, got "
                f"growth_interval={growth_interval}; 2000 steps is usual"
            )
        self.scale = float(init)
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self._finite_steps = 0

    def update(self, overflow: bool) -> None:
        """Tell it how the step went; scale is that of the next step."""
        if overflow:
            if self.scale <= self.min_scale:
                raise RuntimeError(
                    "DynamicLossScale.update: expected finite gradients at the smallest scale, got "
                    f"an overflow at scale={self.scale}; the run diverges: lower lr or use bf16"
                )
            self.scale = max(self.scale / 2, self.min_scale)
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps == self.growth_interval:
            self.scale = min(self.scale * 2, self.max_scale)
            self._finite_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to continue."""
        return {"scale": self.scale, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict()."""
        scale = float(state["scale"])
        if not self.min_scale <= scale <= self.max_scale:
            raise ValueError(
                f"DynamicLossScale.load_state_dict: expected a scale in [{self.min_scale}, "
                f"{self.max_scale}], got scale={scale}; the checkpoint is not of this run"
            )
        self.scale, self._finite_steps = scale, int(state["finite_steps"])
