"""The optimizer of a run: its kind, its groups of parameters, the learning rate of each step.

Also the loss scale for fp16, and a running average of the weights, an entry of the optimizer's
state. As in muon.py ("Single roundings"), an average has the same bits however it is cut.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.engine.engine import engine_of_parameter
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels.adamw import values_of
from fastpar.optim.adafactor import Adafactor
from fastpar.optim.adamw import AdamW
from fastpar.optim.base import EngineOptimizer
from fastpar.optim.muon import Muon, muon_groups
from fastpar.settings.config import TrainConfig
from fastpar.settings.options import OptimSettings
from fastpar.sharding.layout import parameter_names


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weight decay for trained tensors of two and more dims, none for the others."""
    trained = [p for p in parameter_names(model) if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module, settings: OptimSettings, *, dtype: torch.dtype, seed: int
) -> AdamW | Adafactor:
    """Make the optimizer that the settings of a run describe.

    Args:
        settings: with a learning rate, TrainConfig.lr.
        dtype: of the model's weights.
        seed: of stochastic rounding.
    """
    assert settings.lr is not None
    masters = _masters(settings, dtype)
    limit = settings.max_grad_norm or math.inf  # infinity: only measure
    if settings.optimizer == "muon":
        return Muon(
            muon_groups(model),
            lr=settings.muon_lr,
            weight_decay=settings.weight_decay,
            adamw={n: getattr(settings, n) for n in ("lr", "betas", "weight_decay")},
            master_weights=masters,
            max_grad_norm=limit,
        )
    groups = param_groups(model, settings.weight_decay)
    if settings.optimizer == "adafactor":
        # As in the paper: max(mean, eps) instead would affect gradients as small as those of a
        # clipped model.
        return Adafactor(
            groups,
            lr=settings.lr,
            eps=(1e-30, 1e-3),
            add_eps=True,
            master_weights=masters,
            max_grad_norm=limit,
        )
    return AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        master_weights=masters,
        stochastic_rounding=settings.stochastic_rounding,
        seed=seed,
        moment_dtype=DTYPES[settings.moment_dtype],
        max_grad_norm=limit,
    )


def describe_storage(settings: OptimSettings, dtype: torch.dtype) -> str:
    """Text: the optimizer and how it stores its state."""
    kept = _masters(settings, dtype)
    masters = kept if isinstance(kept, str) else "full" if kept else "none"
    if settings.stochastic_rounding:
        masters = "none, rounded stochastically"
    rows = settings.optimizer == "adafactor"
    moments = "rows and columns" if rows else str(settings.moment_dtype)
    moments += " (matrices: one)" if settings.optimizer == "muon" else ""
    return f"{settings.optimizer}, master weights {masters}, moments {moments}"


def _masters(settings: OptimSettings, dtype: torch.dtype) -> bool | str:
    masters = dtype != torch.float32 and not settings.stochastic_rounding
    return "remainder" if masters and settings.master_weights == "remainder" else masters


def set_lr(optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> float:
    """Set the learning rate and weight decay of a step in every group; returns --lr's rate.

    The values are rounded to fp32, so that a kernel that reads them from GPU memory, as in a
    captured step, makes the same step.
    """
    settings, peak = config.optim, config.lr
    lr = scheduled_lr(step, config)
    for group in optimizer.param_groups:
        is_muon = not group.get("adamw", True)
        group["lr"] = _fp32(settings.muon_lr * (lr / peak) if is_muon else lr)
        # Not the group's: a checkpoint has that of an earlier run.
        decays = group["params"][0].dim() >= 2
        group["weight_decay"] = _fp32(settings.weight_decay) if decays else 0.0
    return lr


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


def scheduled_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of a step by the settings of a run; from max_steps on it is min_lr."""
    settings, max_steps, warmup = config.optim, config.run.max_steps, config.warmup_steps
    lr, low = config.lr, config.min_lr
    if settings.lr_schedule == "cosine" or step < warmup:
        return cosine_lr(step, lr=lr, min_lr=low, warmup_steps=warmup, max_steps=max_steps)
    falls = max_steps - warmup
    if settings.lr_schedule == "wsd":
        falls = min(falls, round(settings.lr_decay_fraction * max_steps))
    return low + (lr - low) * min(1.0, max(0, max_steps - step) / max(1, falls))


def cosine_lr(step: int, *, lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """Learning rate of a step: linear up to lr over warmup_steps, then half a cosine to min_lr.

    Args:
        step: 0 in the first step, which gets lr / warmup_steps; from max_steps on it is min_lr.
        min_lr, warmup_steps, max_steps: as checked by TrainConfig.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step >= max_steps:
        return min_lr
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (lr - min_lr)


class DynamicLossScale:
    """A loss scale that keeps small fp16 gradients from underflow.

    Multiply the loss by scale, set the optimizer's grad_scale to scale, step, then call
    update(optimizer.skipped). All ranks skip a step or none does, also with sharded gradients, so
    their scales stay equal without communication.

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
        """Set the scale of the next step, after a step with or without overflow."""
        if overflow:
            if self.scale <= self.min_scale:
                raise RuntimeError(
                    f"DynamicLossScale.update: gradients overflow at the smallest scale, "
                    f"{self.scale}; the run diverges: lower lr or use bf16"
                )
            self.scale = max(self.scale / 2, self.min_scale)
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps == self.growth_interval:
            self.scale = min(self.scale * 2, self.max_scale)
            self._finite_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"scale": self.scale, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state_dict()."""
        self.scale, self._finite_steps = float(state["scale"]), int(state["finite_steps"])


AVERAGE = "average"


class AveragedWeights:
    """The exponential moving average of an optimizer's weights, in fp32.

    Args:
        factor: weight of the old average in a step; smaller in the first steps:
            (1 + step) / (10 + step).
    Memory: 4 bytes per element that this rank steps.
    """

    def __init__(self, optimizer: EngineOptimizer, factor: float) -> None:
        self.optimizer, self.factor = optimizer, factor

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after so many steps."""
        factor = min(self.factor, (1 + step) / (10 + step))
        for _, piece, state in self._pieces():
            values = values_of(piece, state)
            if AVERAGE not in state:
                wide = torch.promote_types(values.dtype, torch.float32)
                state[AVERAGE] = values.detach().to(wide, copy=True)
            else:
                state[AVERAGE].mul_(factor).add_(values * (1.0 - factor))

    @contextlib.contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Replace the model's weights by the averages inside. Ranks: all.

        Memory: a copy of this rank's pieces, and one whole parameter.
        """
        kept = {p: piece.detach().clone() for p, piece, _ in self._pieces()}
        _write_pieces(self.optimizer, {p: state[AVERAGE] for p, _, state in self._pieces()})
        try:
            yield
        finally:
            _write_pieces(self.optimizer, kept)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """(parameter, this rank's piece, state) of each parameter that was stepped."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                engine, state = engine_of_parameter(p), self.optimizer.state.get(p)
                if state:
                    yield p, p if engine is None else engine.shards.piece(p).param, state


@torch.no_grad()
def _write_pieces(optimizer: torch.optim.Optimizer, values: dict[Tensor, Tensor]) -> None:
    """Replace parameters; each rank passes the values of its pieces. Ranks: all.

    Memory: one whole parameter.
    """
    owners = {p: engine_of_parameter(p) for p in values}
    for engine in {id(e): e for e in owners.values() if e is not None}.values():
        engine.shards.begin_writes()
    for p, of in owners.items():
        if of is None:
            p.copy_(values[p])
            continue
        whole = of.shards.full(values[p], p)
        if of.shards.declared is not None:
            whole = of.shards.declared.cut(whole, p)
        of.shards.write(p, whole)


def forget_average(optimizer: EngineOptimizer) -> None:
    """Drop the averages of a checkpoint in a run without averaging."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
