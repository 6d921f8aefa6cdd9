"""fastpar.Adafactor: second moments of matrices kept as one mean for each row and each column.

For a gradient G of a matrix, t counting steps from 1, with the options of torch.optim.Adafactor:

    R = lerp(R, mean of G^2 over columns, t^beta2_decay)     C likewise, over rows
    V = R C / mean(R)                                        (a vector keeps all of V)
    U = G / sqrt(V);  U = U / max(1, rms(U) / d)
    p = p - lr weight_decay p - max(eps[1], rms(p)) min(lr, 1 / sqrt(t)) U

torch keeps V away from 0 with max(eps[0], .); the paper adds eps[0] to G^2: option add_eps.

Batches: most parameters of a model are short, and each operation above is one call per tensor; so
they are updated in batches of up to 2**20 elements with torch._foreach; a larger one is its own
batch. Temporary memory (predict/memory.py counts it): 4 bytes per element of a batch, and if bf16
is rounded 6 per element of its largest tensor; with "remainder" 8 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastpar.engine.engine import engine_of_parameter
from fastpar.kernels.adamw import store_values, values_of
from fastpar.optim.base import EngineOptimizer, Row, Rows, check_ranges, pair
from fastpar.optim.state import (
    OF_WEIGHTS,
    Storage,
    add_master,
    check_master_weights,
    new_step,
)

BATCH = 1 << 20  # elements
_PAPER_EPS = 1e-30
_ONE = torch.ones((), dtype=torch.float32, device="cpu")
_Pair = tuple[Tensor, Tensor]  # a parameter and its gradient


class Adafactor(EngineOptimizer):
    """Adafactor: torch.optim.Adafactor's signature, plus options of the paper.

    Works on parallelized models as it is, at stage 0. Parameters without a gradient are skipped.

    Args:
        params: parameters, named parameters, or groups; options up to add_eps may differ per group.
        lr: largest relative step size; a tensor on a GPU is read on the host.
        beta2_decay: 1 - beta2 of step t is t ** beta2_decay.
        eps: the first keeps the second moment away from 0, see add_eps; None: the resolution of
            fp32, or 1e-30 with add_eps. The second is the smallest assumed rms of a parameter.
        d: updates are scaled down to this rms.
        weight_decay: decoupled, times lr.
        foreach: as in torch; it changes nothing here, see "Batches" above.
        maximize: ascend instead of descend.
        relative_step: limit the step size to 1 / sqrt(t); False: lr alone.
        scale_parameter: steps are relative to the rms of the parameter; False: absolute.
        add_eps: add eps[0] to squared gradients, as the paper does.
        master_weights: True keeps an fp32 copy of bf16 and fp16 parameters; "remainder" only the
            16 bits that bf16 parameters lack, with the same results.
        max_grad_norm: as in fastpar.AdamW.
    Attributes:
        grad_norm, grad_scale, found_inf, skipped: as in fastpar.AdamW; with a loss scale, step()
            waits on the host to know whether it overflowed.
    Ranks: all ranks of the model's mesh call step().
    State: step, and row_var, col_var or variance as in torch.optim.Adafactor, but always fp32;
        master_weight or master_remainder. State dicts load both ways. Load the model before its
        state and before the first step, as master weights are made then.
    Raises:
        ValueError: options outside their range; 16-bit parameters without master weights;
            parameters of an engine with zero_stage >= 1; the state of another model.
        RuntimeError: sparse gradients.
    Source: Shazeer, Stern 2018, arXiv 1804.04235; the paper uses eps=(1e-30, 1e-3) and
        add_eps=True.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        relative_step: bool = True,
        scale_parameter: bool = True,
        add_eps: bool = False,
        master_weights: bool | str = False,
        max_grad_norm: float | None = None,
    ) -> None:
        check_master_weights("Adafactor", master_weights)
        self.master_weights = master_weights
        self.set_max_grad_norm(max_grad_norm)
        defaults = {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay,
            "foreach": foreach, "maximize": maximize, "add_eps": add_eps,
            "relative_step": relative_step, "scale_parameter": scale_parameter,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_options(self, group: dict[str, Any], caller: str) -> None:
        eps = pair(caller, "eps", group["eps"])
        ranges = {
            "lr": (group["lr"], 0.0, math.inf),
            "beta2_decay": (group["beta2_decay"], -math.inf, 0.0),
            "eps[0]": (0.0 if eps[0] is None else eps[0], 0.0, math.inf),
            "eps[1]": (eps[1], 0.0, math.inf),
            "d": (group["d"], 1.0, math.inf),
            "weight_decay": (group["weight_decay"], 0.0, math.inf),
        }
        check_ranges(caller, ranges)

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        engine = engine_of_parameter(p)
        if engine is not None and engine.shares:
            raise ValueError(
                f"Adafactor: does not work with {engine.sharing}, as its row and column means need "
                "whole matrices; use fastpar.AdamW, or zero_stage=0 and tp=1"
            )
        if p.dtype == torch.float64:
            raise ValueError("Adafactor: does not work in fp64; use fastpar.AdamW, or fp32")
        Storage(self.master_weights, False, torch.float32).check(p, "Adafactor")

    # The step

    def _update(
        self, rows: Rows | list[Row], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if found_inf is not None and found_inf.item():
            return
        for i, group in enumerate(self.param_groups):
            pairs = [(row.param, row.grad) for row in rows if row.group == i]
            for batch in _batches(pairs):
                self._update_batch(group, batch, factor)

    def _update_batch(
        self, group: dict[str, Any], batch: list[_Pair], factor: Tensor | None
    ) -> None:
        """Update parameters of one device, all vectors or none, by the formulas above."""
        grads = [grad for _, grad in batch]
        states = [self._state(p, group) for p, _ in batch]
        values = [values_of(p, s) for (p, _), s in zip(batch, states)]
        if factor is not None:
            factor = factor.to(grads[0].device)
        torch._foreach_add_([s["step"] for s in states], _ONE, alpha=1.0)
        counts = [s["step"].item() for s in states]
        lr, (floor, least_rms) = float(group["lr"]), group["eps"]
        if floor is None:
            floor = _PAPER_EPS if group["add_eps"] else torch.finfo(torch.float32).eps

        sizes: list[Any] = [min(lr, t**-0.5) if group["relative_step"] else lr for t in counts]
        if group["scale_parameter"]:
            sizes = [_rms(x).clamp_(min=least_rms) * size for x, size in zip(values, sizes)]
        if group["weight_decay"]:
            torch._foreach_mul_(values, 1.0 - lr * group["weight_decay"])

        weights = [t ** group["beta2_decay"] for t in counts]
        added, clamped = (floor, 0.0) if group["add_eps"] else (0.0, floor)
        updates = _estimates(states, grads, weights, factor, added, clamped)
        torch._foreach_rsqrt_(updates)
        torch._foreach_mul_(updates, grads)
        if factor is not None:
            torch._foreach_mul_(updates, factor)
        sign = 1.0 if group["maximize"] else -1.0
        clips = [(_rms(u) / group["d"]).clamp_(min=1.0) for u in updates]
        torch._foreach_mul_(updates, [sign * size / clip for size, clip in zip(sizes, clips)])
        torch._foreach_add_(values, updates)
        for (p, _), state, x in zip(batch, states, values):
            store_values(p, state, x)

    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter, made or completed as needed."""
        state = self.state[p]
        if not state:
            state["step"] = new_step()  # on the host, as in torch
        for name in _moments(p):
            if name not in state:
                state[name] = torch.zeros(_shape(name, p), dtype=torch.float32, device=p.device)
        add_master(state, p, self.master_weights)
        return state

    # State

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of every entry that a parameter's state may have."""
        masters = ("master_weight", "master_remainder")
        names = ("step", *_moments(p), *masters, *OF_WEIGHTS)
        return {name: _shape(name, p) for name in names}

    def _required(self, p: Tensor, group: dict[str, Any]) -> list[list[tuple[str, ...]]]:
        return [[(name,)] for name in ("step", *_moments(p))]

    def _convert_moments(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        names = _moments(p)
        return {name: saved[name].to(p.device, torch.float32, copy=True) for name in names}


def _moments(p: Tensor) -> tuple[str, ...]:
    return ("row_var", "col_var") if p.dim() > 1 else ("variance",)


def _batches(pairs: list[_Pair]) -> list[list[_Pair]]:
    """Batches of pairs: of one device, all vectors or none, with a limited number of elements."""
    batches: list[list[_Pair]] = []
    growing: dict[Any, tuple[list[_Pair], int]] = {}
    for p, grad in pairs:
        if p.numel() == 0:
            continue
        key = (p.device, p.dim() > 1)
        batch, size = growing.get(key, ([], 0))
        if not batch or size + p.numel() > BATCH:
            batch, size = [], 0
            batches.append(batch)
        batch.append((p, grad))
        growing[key] = batch, size + p.numel()
    return batches


def _estimates(
    states: list[dict[str, Tensor]],
    grads: list[Tensor],
    weights: list[float],
    factor: Tensor | None,
    added: float,
    clamped: float,
) -> list[Tensor]:
    """Update the second moments; returns the estimate of each element, as new tensors."""

    def update(name: str, squares: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
        if added:
            torch._foreach_add_(squares, added)
        moments = [s[name] for s in states]
        for moment, square, weight in zip(moments, squares, weights):
            moment.lerp_(square, weight)
        return moments

    if "variance" in states[0]:
        scaled = [g.float() for g in grads]
        if factor is not None:
            scaled = list(torch._foreach_mul(scaled, factor))
        found = [v.clone() for v in update("variance", torch._foreach_mul(scaled, scaled))]
    else:
        rows = update("row_var", [_mean_of_squares(g, -1, factor) for g in grads])
        columns = update("col_var", [_mean_of_squares(g, -2, factor) for g in grads])
        means = [r.mean(dim=-2, keepdim=True) for r in rows]
        if clamped:
            torch._foreach_clamp_min_(means, clamped)
        found = list(torch._foreach_mul(torch._foreach_div(rows, means), columns))
    if clamped:
        torch._foreach_clamp_min_(found, clamped * clamped)
    return found


def _mean_of_squares(grad: Tensor, dim: int, factor: Tensor | None) -> Tensor:
    norm = torch.linalg.vector_norm(grad, dim=dim, keepdim=True, dtype=torch.float32)
    if factor is not None:
        norm.mul_(factor)
    return norm.square_().div_(grad.size(dim))


def _rms(x: Tensor) -> Tensor:
    """Root of the mean square, fp64 []; in fp32 along the last dimension only, for accuracy."""
    norms = torch.linalg.vector_norm(x, dim=-1) if x.dim() > 1 else torch.linalg.vector_norm(x)
    return norms.double().square_().sum().div_(x.numel()).sqrt_()


def _shape(entry: str, p: Tensor) -> torch.Size:
    if entry == "step":
        return torch.Size()
    if entry == "row_var":
        return torch.Size((*p.shape[:-1], 1))
    if entry == "col_var":
        return torch.Size((*p.shape[:-2], 1, p.shape[-1]))
    return p.shape
