"""fastpar.AdamW.

The step is one kernel call per group: the clip factor goes in as a tensor, so clipping costs no
pass over the gradients beyond the norm.

[Note: the norm]
The global norm is built from norms of pieces of at most 2**14 elements of one parameter, in the
order of the groups, summed in fp64: its bits do not depend on buckets. On CPU the pieces are needed
for accuracy too: one fp32 norm over the 38.6 M elements of GPT-2's embedding is off by 2.7e-3 (more
for equal values), because torch keeps few partial sums there; with pieces it is 2.5e-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastpar.engine import Engine, engine_of_parameter
from fastpar.kernels.adamw import Hyper, adamw_step_

_PIECE = 1 << 14
_STATES = ("exp_avg", "exp_avg_sq", "master_weight")
# Options of torch.optim.AdamW that are fixed here; the others of its groups only choose code.
_FIXED = {"amsgrad": False, "decoupled_weight_decay": True}
_TORCH_ONLY = (*_FIXED, "capturable", "differentiable", "foreach", "fused")


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method without torch's decorator, whose first call imports torch._dynamo.

    That import takes 1.4 s and over 100 MB, and only a process that compiles has a use for it
    (test_a_step_does_not_import_the_compiler).
    """
    return getattr(method, "__wrapped__", method)


class AdamW(torch.optim.Optimizer):
    """AdamW with torch.optim.AdamW's signature, fp32 moments, master weights and built-in clipping.

    Parameters of a parallelized model need nothing more: step() first finishes the engine's
    reduction, so the gradients it uses are the mean over the ranks, and main gradients
    (parallelize(grad_dtype=...)) are found. Parameters without a gradient are skipped.

    Args:
        params: parameters or groups; lr, betas, eps, weight_decay may differ per group.
        master_weights: keep an fp32 copy of bf16 and fp16 parameters; needed to train those.
        max_grad_norm: scale gradients so that their norm over all groups is at most this; infinity
            only measures. The factor is min(1, max_grad_norm / (norm + 1e-6)), as in
            torch.nn.utils.clip_grad_norm_; gradients themselves are not changed.
    Attributes:
        grad_norm: fp32 tensor [], of the last step, before clipping, after grad_scale; None
            without max_grad_norm and grad_scale.
        grad_scale: factor for every gradient, 1 by default; 1 / loss scale in fp16 training.
        skipped: whether the last step changed nothing because its gradients were not finite. That
            happens only once grad_scale has been set, and reads the norm on the host. Without a
            loss scale, non-finite gradients go into the parameters, as in torch.
    Ranks: step() is called by all ranks of the model's mesh.
    State: step, exp_avg, exp_avg_sq as in torch.optim.AdamW (state dicts load both ways), and
        master_weight. Load the model before the first step: master weights are made there.
    Raises:
        ValueError: options outside their range; 16-bit parameters without master_weights; the
            state dict of Adam or of amsgrad.
        RuntimeError: sparse gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"AdamW: expected max_grad_norm > 0 or None, got max_grad_norm={max_grad_norm}; "
                "None switches clipping off"
            )
        self.master_weights = master_weights
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self.skipped = False
        self._grad_scale: float | Tensor | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked here, the constructor's too."""
        _plain(torch.optim.Optimizer.add_param_group)(self, param_group)
        group = self.param_groups[-1]
        ranges = {
            "lr": (float(group["lr"]), 0.0, math.inf),
            "betas[0]": (group["betas"][0], 0.0, 1.0),
            "betas[1]": (group["betas"][1], 0.0, 1.0),
            "eps": (group["eps"], 0.0, math.inf),
            "weight_decay": (group["weight_decay"], 0.0, math.inf),
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value < high:
                self.param_groups.pop()
                raise ValueError(
                    f"AdamW: expected {low} <= {name} < {high}, got {name}={value}; "
                    "correct the option of this group"
                )
        for p in group["params"]:
            half = p.dtype in (torch.bfloat16, torch.float16)
            if p.dtype != torch.float32 and not (half and self.master_weights):
                self.param_groups.pop()
                raise ValueError(
                    "AdamW: expected fp32 parameters, or bf16 and fp16 with master_weights=True, "
                    f"got dtype={p.dtype} with master_weights={self.master_weights}; "
                    "pass master_weights=True or convert the model"
                )

    @property
    def grad_scale(self) -> float | Tensor:
        """Factor for every gradient; setting it makes step() skip non-finite gradients."""
        return 1.0 if self._grad_scale is None else self._grad_scale

    @grad_scale.setter
    def grad_scale(self, value: float | Tensor) -> None:
        self._grad_scale = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also clears the main gradients of an engine."""
        _plain(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        for engine in self._engines():
            engine.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all groups; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engines = self._engines()
        for engine in engines:
            engine.before_step()
        rows = [self._collect(group) for group in self.param_groups]
        factor = self._factor([grad for pairs in rows for _, grad in pairs])
        if not self.skipped:
            for group, pairs in zip(self.param_groups, rows):
                self._update(group, pairs, factor)
        for engine in engines:
            engine.after_step()
        return loss

    def _engines(self) -> list[Engine]:
        found = (engine_of_parameter(p) for g in self.param_groups for p in g["params"])
        return list({id(e): e for e in found if e is not None}.values())

    def _collect(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for p in group["params"]:
            engine = engine_of_parameter(p)
            grad = p.grad if engine is None else engine.grad_of(p)
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"AdamW.step: expected dense gradients, got layout={grad.layout}; "
                    "build the embedding with sparse=False"
                )
            pairs.append((p, grad))
        return pairs

    def _factor(self, grads: list[Tensor]) -> Tensor | None:
        """What the kernel multiplies gradients by; sets grad_norm and skipped."""
        self.skipped, self.grad_norm = False, None
        if not grads or (self.max_grad_norm is None and self._grad_scale is None):
            return None
        device = grads[0].device
        factor = torch.as_tensor(self.grad_scale, dtype=torch.float32, device=device)
        self.grad_norm = global_norm(grads).mul_(factor)
        if self._grad_scale is not None:
            self.skipped = not bool(self.grad_norm.isfinite())
        if self.max_grad_norm is None:
            return factor
        return factor * (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp_(max=1.0)

    def _update(
        self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], factor: Tensor | None
    ) -> None:
        by_step: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for p, grad in pairs:
            state = self.state[p]
            if not state:
                # On the host, as in torch: the bias corrections never wait for the device.
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
            if p.dtype != torch.float32 and "master_weight" not in state:
                state["master_weight"] = p.detach().float()
            state["step"] += 1
            by_step.setdefault(int(state["step"].item()), []).append((p, grad))
        beta1, beta2 = group["betas"]
        for step, rows in by_step.items():
            states = [self.state[p] for p, _ in rows]
            adamw_step_(
                [p for p, _ in rows],
                [grad for _, grad in rows],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                Hyper(
                    float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step
                ),
                master_weights=[s.get("master_weight") for s in states],
                grad_scale=factor,
                maximize=group["maximize"],
            )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this optimizer's state or that of torch.optim.AdamW (without amsgrad)."""
        for group in state_dict["param_groups"]:
            for name, value in _FIXED.items():
                if group.get(name, value) != value:
                    raise ValueError(
                        f"AdamW.load_state_dict: expected {name}={value}, got "
                        f"{name}={group[name]}; continue that run with its own optimizer"
                    )
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name in _TORCH_ONLY:
                group.pop(name, None)
        saved_ids = (i for g in state_dict["param_groups"] for i in g["params"])
        params = (p for g in self.param_groups for p in g["params"])
        for i, p in zip(saved_ids, params):
            saved = state_dict["state"].get(i)
            if not saved:
                continue
            state = self.state[p]
            # torch has cast these to the dtype of the parameter: fp32 moments of bf16 parameters
            # would lose half of their bits (test_state_of_half_parameters_stays_fp32).
            for name in _STATES:
                if name in saved:
                    state[name] = saved[name].to(p.device, torch.float32, copy=True)
            if p.dtype == torch.float32:
                state.pop("master_weight", None)
            state["step"] = torch.tensor(float(saved["step"]), dtype=torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        names = ("master_weights", "max_grad_norm", "grad_norm", "skipped", "_grad_scale")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}


def global_norm(grads: list[Tensor]) -> Tensor:
    """2-norm over all gradients, fp32 []; the same bits for any buckets. See [Note: the norm].

    Traffic: one read of the gradients. No host synchronization.
    """
    pieces = grads
    if grads[0].device.type == "cpu":
        pieces = [piece for g in grads for piece in g.reshape(-1).split(_PIECE)]
    norms = torch._foreach_norm(pieces, 2.0, dtype=torch.float32)
    return torch.stack(norms).double().norm().float()
