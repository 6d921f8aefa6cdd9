"""What step() of any optimizer refuses: shards it does not know, parameters no engine reduces.

[Note: strangers]
A parameter that was added to the model or unfrozen after parallelize() has no engine, so every rank
would train its own. The engine sees it when it reduces gradients; if all of the others have been
frozen there are none to reduce, and only the optimizer that steps it knows of it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastpar.parallel.engine import Engine, engine_of_parameter

_lock = threading.Lock()
_installed = False


class _Here(threading.local):
    """Ranks may be threads: each looks at its own models."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()


_here = _Here()


def guard_optimizers(engine: Engine) -> None:
    """From now on, step() of any optimizer in this thread refuses what it cannot step right.

    Called when an engine is made; installed once in a process.
    """
    global _installed
    _here.engines.add(engine)
    with _lock:
        if not _installed:
            register_optimizer_step_pre_hook(_before_step)
            _installed = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(optimizer, "steps_engines", False):
        _refuse_sharded(optimizer)
    strangers = {
        p
        for group in (optimizer.param_groups if _here.engines else ())
        for p in group["params"]
        if p.requires_grad and engine_of_parameter(p) is None
    }
    for engine in list(_here.engines) if strangers else ():
        model = engine.model()
        if model is not None and not strangers.isdisjoint(model.parameters()):
            engine.check()  # says which, see [Note: strangers]


def _refuse_sharded(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    params = (p for group in optimizer.param_groups for p in group["params"])
    for engine in map(engine_of_parameter, params):
        if engine is None:
            continue
        if engine.partials is not None:
            engine.partials.check()
        if engine.has_main_grads:
            what, got = "with main gradients", f"grad_dtype={engine.settings.grad_dtype}"
            advice = "it reads p.grad only: use fastpar.AdamW, or parallelize without grad_dtype"
        elif engine.zero_stage:
            what, got = "of an engine with zero_stage >= 1", f"zero_stage={engine.zero_stage}"
            advice = "their gradients exist only as shards: use fastpar.AdamW, or zero_stage=0"
        else:
            continue
        raise RuntimeError(
            f"{name}.step: expected fastpar.AdamW for parameters {what}, got {name} "
            f"with {got}; {advice}"
        )
