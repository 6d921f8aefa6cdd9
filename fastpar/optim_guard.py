"""Stock torch optimizers step whole parameters; those of a sharded engine are not there to step."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastpar.engine import engine_of_parameter

_lock = threading.Lock()
_installed = False


def guard_stock_optimizers() -> None:
    """From now on, step() of an optimizer that does not know engines refuses sharded parameters.

    Called when an engine with zero_stage >= 1 or tp > 1 is made; installed once in a process.
    """
    global _installed
    with _lock:
        if not _installed:
            register_optimizer_step_pre_hook(_refuse_sharded)
            _installed = True


def _refuse_sharded(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "steps_engines", False):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            engine = engine_of_parameter(p)
            if engine is not None and engine.partials is not None:
                engine.partials.check()
            if engine is not None and engine.zero_stage:
                name = type(optimizer).__name__
                raise RuntimeError(
                    f"{name}.step: expected fastpar.AdamW for parameters of an engine with "
                    f"zero_stage >= 1, got {name} with zero_stage={engine.zero_stage}; their "
                    "gradients exist only as shards: use fastpar.AdamW, or zero_stage=0"
                )
