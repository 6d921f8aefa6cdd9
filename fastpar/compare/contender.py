"""What all contenders of a comparison share: their settings, and how one makes a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastpar.optim.muon import Muon, muon_groups

ModelFactory = Callable[[], nn.Module]
Batch = tuple[Tensor, Tensor, Tensor | None]  # x, y, the key of dropout


@dataclass(frozen=True)
class Settings:
    """What all contenders share, and what fastpar alone is given.

    bucket_mb: of DDP, of DeepSpeed's stages 1 and 2, and of fastpar; None leaves each its own.
    optimizer: adamw or muon; muon_lr: of its matrices, where lr is that of all else.
    max_grad_norm: the gradient's norm is clipped to it and known; None: neither.
    exact_norm: torch's norm is summed in fp64: its sum in fp32 is off by some 1e-6 of it on a CPU.
    grad_accum_steps: micro-batches of a step of train_step().
    micro_rows: of a pipeline's micro-batch. fastpar, deepspeed: further arguments of each.
    """

    optimizer: str = "adamw"
    lr: float = 6e-4
    muon_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3  # see [Note: comparable updates]
    weight_decay: float = 0.1
    device: str = "cpu"
    bucket_mb: float | None = None
    max_grad_norm: float | None = None
    exact_norm: bool = False
    grad_accum_steps: int = 1
    micro_rows: int = 1
    fastpar: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adamw(self) -> dict[str, Any]:
        """The arguments that every AdamW takes."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay on matrices only, as nanoGPT configures it."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw_of(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """torch's fused AdamW over the model's parameters as they are now."""
    groups = decay_groups(model, settings.weight_decay)
    return torch.optim.AdamW(groups, fused=True, **settings.adamw)


def muon_of(model: nn.Module, settings: Settings, max_grad_norm: float | None = None) -> Muon:
    """Muon over the model's matrices and AdamW over the rest."""
    return Muon(
        muon_groups(model),
        lr=settings.muon_lr,
        weight_decay=settings.weight_decay,
        adamw={**settings.adamw, "weight_decay": settings.weight_decay},
        max_grad_norm=max_grad_norm,
    )


class Contender:
    """One rank of one way to train. Ranks: all call the same methods together.

    Attributes:
        dp_rank, dp_size: whose rows this rank computes, of how many such ranks.
        grad_norm: of the last train_step(), over all ranks, before clipping; None: not known.
        no_sync: makes a context in which backward sends nothing; None: there is none.
        quiet: makes a context in which steps do all but communicate; None: it cannot be had.
    """

    dp_rank, dp_size = 0, 1
    grad_norm: Tensor | None = None
    no_sync: Callable[[], AbstractContextManager] | None = None
    quiet: Callable[[], AbstractContextManager] | None = None

    def __init__(
        self, name: str, model: nn.Module, optimizer: Any = None, settings: Settings | None = None
    ):
        self.name, self.model, self.optimizer = name, model, optimizer
        self.settings = settings or Settings()
        if dist.is_initialized():
            self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update, gradients dropped; this rank's loss before the update."""
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train_step(self, batches: Sequence[Batch], lr: float) -> Tensor:
        """A step of several micro-batches with clipping; the mean of this rank's losses."""
        of_muon = self.settings.muon_lr / self.settings.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr if group.get("adamw", True) else lr * of_muon
        loss = self._gradients(batches)
        self._update()
        return loss

    def _gradients(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of the micro-batches; the mean of their losses."""
        losses = []
        for j, (x, y, rng_key) in enumerate(batches):
            is_last = self.no_sync is None or j == len(batches) - 1
            with contextlib.nullcontext() if is_last else self.no_sync():  # type: ignore[misc]
                loss = self.model(x, y, rng_key=rng_key)
                self._backward(loss, len(batches))
            losses.append(loss.detach())
        return torch.stack(losses).double().mean()

    def _backward(self, loss: Tensor, n: int) -> None:
        (loss / n).backward()

    def _update(self) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None:
            params = [p for p in self.model.parameters() if p.grad is not None]
            grads = [p.grad for p in params if p.grad is not None]
            if self.settings.exact_norm:
                grads = [grad.double() for grad in grads]
            norm: Any = nn.utils.get_total_norm(grads)
            nn.utils.clip_grads_with_norm_(params, limit, norm)  # as clip_grad_norm_ does
            self.grad_norm = whole(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole under the module's own name, one after another."""
        for name, p in self.model.named_parameters():
            yield name.removeprefix("module."), whole(p.detach())  # of DDP; of FSDP2

    def report(self) -> dict[str, float]:
        """fastpar alone: exposed_ms, wire_bytes, ... of the last step; live_bytes now."""
        return {}

    def close(self) -> None:
        self.model = self.optimizer = self.no_sync = self.quiet = None  # type: ignore[assignment]


def whole(x: Any) -> Any:
    """A tensor that FSDP2 has split, put together."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
