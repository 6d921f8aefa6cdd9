"""The optimizer of a run: which one, its groups of parameters, the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fastpar.files.dtypes import DTYPES
from fastpar.optim.adafactor import Adafactor
from fastpar.optim.adamw import AdamW
from fastpar.optim.muon import Muon, muon_groups
from fastpar.settings.config import TrainConfig
from fastpar.settings.options import OptimSettings
from fastpar.sharding.layout import parameter_names


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: decay for trained tensors of two dims and more, none for the rest."""
    trained = [p for p in parameter_names(model) if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module, settings: OptimSettings, *, dtype: torch.dtype, seed: int
) -> AdamW | Adafactor:
    """The optimizer that the settings of a run describe.

    Args:
        dtype: of the model's weights.
        seed: of stochastic rounding.
    """
    masters = _masters(settings, dtype)
    limit = settings.max_grad_norm or math.inf  # infinity measures
    if settings.optimizer == "muon":
        return Muon(
            muon_groups(model),
            lr=settings.muon_lr,
            weight_decay=settings.weight_decay,
            adamw={
                "lr": settings.lr,
                "betas": settings.betas,
                "weight_decay": settings.weight_decay,
            },
            master_weights=masters,
            max_grad_norm=limit,
        )
    groups = param_groups(model, settings.weight_decay)
    if settings.optimizer == "adafactor":
        # As in the paper: max(mean, eps) instead would act on gradients as small as a clipped
        # model's are.
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
    """The optimizer and how it stores its numbers, in a few words."""
    kept = _masters(settings, dtype)
    masters = kept if isinstance(kept, str) else "full" if kept else "none"
    if settings.stochastic_rounding:
        masters = "none, rounded stochastically"
    rows = settings.optimizer == "adafactor"
    moments = "rows and columns" if rows else str(settings.moment_dtype)
    moments += ", of matrices one" if settings.optimizer == "muon" else ""
    return f"{settings.optimizer}, master weights {masters}, moments {moments}"


def _masters(settings: OptimSettings, dtype: torch.dtype) -> bool | str:
    masters = dtype != torch.float32 and not settings.stochastic_rounding
    return "remainder" if masters and settings.master_weights == "remainder" else masters


def set_lr(optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> float:
    """Gives every group its learning rate and weight decay of a step; returns --lr's rate.

    Groups get fp32 numbers, so that a kernel which reads them from a GPU's memory, as a captured
    step does, makes the same step.
    """
    settings, peak = config.optim, config.optim.lr
    lr = scheduled_lr(step, config)
    for group in optimizer.param_groups:
        is_muon = not group.get("adamw", True)
        group["lr"] = _fp32(settings.muon_lr * (lr / peak) if is_muon else lr)
        # Not from the group: a checkpoint has that of the run before.
        decays = group["params"][0].dim() >= 2
        group["weight_decay"] = _fp32(settings.weight_decay) if decays else 0.0
    return lr


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


def scheduled_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of a step as the settings of a run say; from max_steps on it is min_lr."""
    settings, max_steps, warmup = config.optim, config.run.max_steps, config.warmup_steps
    lr, low = settings.lr, config.min_lr
    if settings.lr_schedule == "cosine" or step < warmup:
        return cosine_lr(step, lr=lr, min_lr=low, warmup_steps=warmup, max_steps=max_steps)
    falls = max_steps - warmup
    if settings.lr_schedule == "wsd":
        falls = min(falls, round(settings.lr_decay_fraction * max_steps))
    return low + (lr - low) * min(1.0, max(0, max_steps - step) / max(1, falls))


def cosine_lr(step: int, *, lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """Learning rate of a step: a line up to lr over warmup_steps, then half a cosine to min_lr.

    Args:
        step: 0 in the first step, which gets lr / warmup_steps; from max_steps on it is min_lr.
        min_lr, warmup_steps, max_steps: as TrainConfig lets them through.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step >= max_steps:
        return min_lr
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (lr - min_lr)
