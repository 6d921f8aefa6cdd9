"""fastpar.Adafactor: second moments of matrices kept as one mean for each row and each column.

For a gradient G of a matrix, t counting steps from 1, with the options of torch.optim.Adafactor:

    R = lerp(R, mean of G^2 over columns, t^beta2_decay)     C likewise, over rows
    V = R C / mean(R)                                        (a vector keeps all of V)
    U = G / sqrt(V);  U = U / max(1, rms(U) / d)
    p = p - lr weight_decay p - max(eps[1], rms(p)) min(lr, 1 / sqrt(t)) U

torch keeps V away from 0 with max(eps[0], .), the paper adds eps[0] to G^2: option add_eps.

[Note: batches]
Most parameters of a model are short, and each operation above is one call per tensor; so they are
updated in batches of up to 2**20 elements through torch._foreach; a larger one is its own batch.
Temporary memory (memory_model.py counts it): 4 bytes for each element of a batch, and where bf16 is
rounded 6 for each element of its largest tensor; with "remainder" 8 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels.adamw_storage import master_join, master_split, round_to_bf16
from fastpar.optim.base import EngineOptimizer, plain, uncompiled
from fastpar.optim.checks import number, pair
from fastpar.optim.state import load_step, new_step
from fastpar.parallel.engine import engine_of_parameter

BATCH = 1 << 20  # elements
_HALF = (torch.bfloat16, torch.float16)
_PAPER_EPS = 1e-30
_MOMENTS = ("row_var", "col_var", "variance", "exp_avg")
_ONE = torch.ones(())
_Pair = tuple[Tensor, Tensor]  # a parameter and its gradient


class Adafactor(EngineOptimizer):
    """Adafactor: torch.optim.Adafactor's signature, and the options of the paper that it lacks.

    Parameters of a parallelized model need nothing more, as with fastpar.AdamW. Parameters without
    a gradient are skipped.

    Args:
        params: parameters, named parameters, or groups; options up to add_eps may differ per group.
        lr: largest relative step size; a tensor on a GPU is read on the host.
        beta2_decay: 1 - beta2 of step t is t ** beta2_decay.
        eps: the first keeps the second moment away from 0, see add_eps; None: the resolution of
            fp32, or 1e-30 with add_eps. The second is the least rms that a parameter is taken for.
        d: updates are scaled down to this rms.
        weight_decay: decoupled, times lr.
        foreach: True batches all parameters, False none; None: see [Note: batches].
        maximize: ascend instead of descend.
        beta1: keep a running mean of updates (exp_avg) and apply that; None: no such memory.
        relative_step: at most 1 / sqrt(t); False: lr alone.
        scale_parameter: steps are relative to the rms of the parameter; False: absolute.
        add_eps: add eps[0] to squared gradients, as the paper does.
        master_weights: True keeps an fp32 copy of bf16 and fp16 parameters; "remainder" only the
            16 bits that bf16 parameters lack, with the same bits as True.
        max_grad_norm: as in fastpar.AdamW.
    Attributes:
        grad_norm, grad_scale, found_inf, skipped: as in fastpar.AdamW; with a loss scale, step()
            reads on the host whether it overflowed.
    Ranks: step() is called by all ranks of the model's mesh.
    State: step, and row_var, col_var or variance as in torch.optim.Adafactor, but always fp32;
        exp_avg; master_weight or master_remainder. State dicts load both ways. Load the model
        before its state and before the first step: master weights are made there.
    Raises:
        ValueError: options outside their range; 16-bit parameters without master weights;
            parameters of an engine with zero_stage >= 1; the state of another model.
        RuntimeError: sparse gradients.
    Source: Shazeer, Stern 2018, arXiv 1804.04235; the paper's own are eps=(1e-30, 1e-3) and
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
        beta1: float | None = None,
        relative_step: bool = True,
        scale_parameter: bool = True,
        add_eps: bool = False,
        master_weights: bool | str = False,
        max_grad_norm: float | None = None,
    ) -> None:
        if master_weights not in (False, True, "remainder"):
            raise ValueError(
                "Adafactor: expected master_weights to be False, True or 'remainder', got "
                f"master_weights={master_weights!r}; True keeps 32 bits more, 'remainder' 16"
            )
        self.master_weights = master_weights
        self.set_max_grad_norm(max_grad_norm)
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
            "beta1": beta1,
            "relative_step": relative_step,
            "scale_parameter": scale_parameter,
            "add_eps": add_eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options and parameters are checked here, the constructor's too."""
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1], "Adafactor")
            for p in self.param_groups[-1]["params"]:
                self._check_parameter(p)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_parameter(self, p: Tensor) -> None:
        engine = engine_of_parameter(p)
        if engine is not None and engine.shares:
            raise ValueError(
                "Adafactor: expected parameters of an engine with zero_stage=0 and tp=1, got "
                f"zero_stage={engine.zero_stage}, tp={engine.mesh.tp_size}; its row and column "
                "means need whole matrices: use fastpar.AdamW, or parallelize without sharing"
            )
        got = f"got a parameter of dtype={p.dtype} with master_weights={self.master_weights!r}"
        if p.dtype != torch.float32 and not (p.dtype in _HALF and self.master_weights):
            raise ValueError(
                "Adafactor: expected fp32 parameters, or bf16 and fp16 with master_weights=True, "
                f"{got}; pass master_weights=True or convert the model"
            )
        if p.dtype == torch.float16 and self.master_weights == "remainder":
            raise ValueError(
                f"Adafactor: expected fp16 parameters with master_weights=True, {got}, which are "
                "bf16's bits; pass master_weights=True"
            )

    # The step

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all groups; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engines, taken, factor, found = self.begin_step()
        rows: list[list[_Pair]] = [[] for _ in self.param_groups]
        for row in taken:
            rows[row.group].append((row.param, row.grad))
        if found is None or not found.item():
            for group, pairs in zip(self.param_groups, rows):
                for batch in _batches(pairs, group["foreach"]):
                    self._update(group, batch, factor)
        for engine in engines:
            engine.after_step()
        return loss

    def _update(self, group: dict[str, Any], batch: list[_Pair], factor: Tensor | None) -> None:
        """Parameters of one device, all vectors or none; see the formulas above."""
        grads = [grad for _, grad in batch]
        states = [self._state(p, group) for p, _ in batch]
        values = [self._master(p, s) for (p, _), s in zip(batch, states)]
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
        if group["beta1"] is not None:
            means = [s["exp_avg"] for s in states]
            torch._foreach_lerp_(means, updates, 1.0 - group["beta1"])
            updates = means
        torch._foreach_add_(values, updates)
        for (p, _), state, x in zip(batch, states, values):
            _store(p, state, x)

    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter, made or completed where needed."""
        state = self.state[p]
        if not state:
            state["step"] = new_step()  # on the host, as in torch
        wanted = ["row_var", "col_var"] if p.dim() > 1 else ["variance"]
        for name in wanted + ["exp_avg"] * (group["beta1"] is not None):
            if name not in state:
                state[name] = torch.zeros(_shape(name, p), dtype=torch.float32, device=p.device)
        entry = self._master_entry(p)
        if entry == "master_weight" and entry not in state:
            state[entry] = p.detach().float()
        elif entry == "master_remainder" and entry not in state:
            state[entry] = torch.zeros_like(p, dtype=torch.int16, requires_grad=False)
        return state

    def _master_entry(self, p: Tensor) -> str | None:
        if p.dtype == torch.float32:
            return None
        return "master_remainder" if self.master_weights == "remainder" else "master_weight"

    def _master(self, p: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The fp32 values of a parameter; to be written in place, or split again afterwards."""
        if "master_remainder" in state:
            return master_join(p, state["master_remainder"])
        return state.get("master_weight", p)

    # State

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The entries that a parameter's state may have with these options, for checkpoints."""
        names = ["step", "exp_avg", *(("row_var", "col_var") if p.dim() > 1 else ("variance",))]
        entry = self._master_entry(p)
        return {name: _shape(name, p) for name in ([*names, entry] if entry else names)}

    def check_saved(self, p: Tensor, saved: dict[str, Tensor], *, where: str) -> None:
        """See EngineOptimizer."""
        _check_state(saved, p)

    @torch.no_grad()
    def load_piece(
        self, p: Tensor, target: Tensor, saved: dict[str, Tensor], *, where: str
    ) -> None:
        """See EngineOptimizer."""
        self._replace_state(p, self._loaded(saved, p))

    def state_dict(self) -> dict[str, Any]:
        """As in torch."""
        return plain(torch.optim.Optimizer.state_dict)(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer or of torch's; nothing changes if it is refused."""
        state_dict = state_dict.copy()
        state_dict["param_groups"] = [
            {**{k: v for k, v in self.defaults.items() if k not in g}, **g}
            for g in state_dict["param_groups"]
        ]
        for group in state_dict["param_groups"]:
            _check_options(group, "Adafactor.load_state_dict")
        params = [p for g in self.param_groups for p in g["params"]]
        keys = [key for g in state_dict["param_groups"] for key in g["params"]]
        pairs = [
            (p, state_dict["state"][key])
            for p, key in zip(params, keys)
            if state_dict["state"].get(key)
        ]
        for p, saved in pairs:
            _check_state(saved, p)
        plain(torch.optim.Optimizer.load_state_dict)(self, state_dict)
        for p, saved in pairs:
            # torch has cast these to the dtype of the parameter: bf16 moments would not do.
            self.state[p] = self._loaded(saved, p)

    def _loaded(self, saved: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """A copy of a saved state in the form of this optimizer."""
        state: dict[str, Any] = {"step": load_step(saved["step"])}
        for name in _MOMENTS:
            if name in saved:
                state[name] = saved[name].to(p.device, torch.float32, copy=True)
        return {**state, **self._load_master(saved, p)}

    def _load_master(self, saved: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The saved master, if any, in the form of this optimizer."""
        entry = self._master_entry(p)
        dtype = torch.float32 if entry == "master_weight" else torch.int16
        if entry is not None and entry in saved:
            return {entry: saved[entry].to(p.device, dtype, copy=True)}
        if entry == "master_weight" and "master_remainder" in saved:
            return {entry: master_join(p.detach(), saved["master_remainder"].to(p.device))}
        if entry == "master_remainder" and "master_weight" in saved:
            return {entry: master_split(saved["master_weight"].to(p.device, torch.float32))[1]}
        return {}

    def __getstate__(self) -> dict[str, Any]:
        names = ("master_weights", "max_grad_norm", "grad_norm", "grad_scale", "_found")
        own = {name: self.__dict__[name] for name in names if name in self.__dict__}
        return {**super().__getstate__(), **own}


def _batches(pairs: list[_Pair], foreach: bool | None) -> list[list[_Pair]]:
    """Pairs of one device, all of vectors or none, and not too many elements together."""
    limit = {None: BATCH, True: math.inf, False: 0}[foreach]
    batches: list[list[_Pair]] = []
    open_batches: dict[Any, tuple[list[_Pair], int]] = {}
    for of in pairs:
        p = of[0]
        if p.numel() == 0:
            continue
        key = (p.device, p.dim() > 1)
        batch, size = open_batches.get(key, ([], 0))
        if not batch or size + p.numel() > limit:
            batch, size = [], 0
            batches.append(batch)
        batch.append(of)
        open_batches[key] = (batch, size + p.numel())
    return batches


def _estimates(
    states: list[dict[str, Tensor]],
    grads: list[Tensor],
    weights: list[float],
    factor: Tensor | None,
    added: float,
    clamped: float,
) -> list[Tensor]:
    """Moves the second moments on; the estimate of each element, as new tensors."""

    def move(name: str, squares: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
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
        found = [v.clone() for v in move("variance", torch._foreach_mul(scaled, scaled))]
    else:
        rows = move("row_var", [_mean_of_squares(g, -1, factor) for g in grads])
        columns = move("col_var", [_mean_of_squares(g, -2, factor) for g in grads])
        means = [r.mean(dim=-2, keepdim=True) for r in rows]
        if clamped:
            torch._foreach_clamp_min_(means, clamped)
        found = list(torch._foreach_mul(torch._foreach_div(rows, means), columns))
    if clamped:
        torch._foreach_clamp_min_(found, clamped * clamped)
    return found


def _store(p: Tensor, state: dict[str, Tensor], values: Tensor) -> None:
    """Rounds the fp32 values into a 16-bit parameter, and what that loses into its state."""
    if "master_remainder" in state:
        rounded, remainder = master_split(values)
        p.copy_(rounded)
        state["master_remainder"].copy_(remainder)
    elif "master_weight" in state:
        p.copy_(values if p.dtype == torch.float16 else round_to_bf16(values))


def _mean_of_squares(grad: Tensor, dim: int, factor: Tensor | None) -> Tensor:
    norm = torch.linalg.vector_norm(grad, dim=dim, keepdim=True, dtype=torch.float32)
    if factor is not None:
        norm.mul_(factor)
    return norm.square_().div_(grad.size(dim))


def _rms(x: Tensor) -> Tensor:
    """Root of the mean square, fp64 []; in fp32 along the last dimension only, for accuracy."""
    norms = torch.linalg.vector_norm(x, dim=-1) if x.dim() > 1 else torch.linalg.vector_norm(x)
    return norms.double().square_().sum().div_(x.numel()).sqrt_()


def _shapes(p: Tensor) -> dict[str, torch.Size]:
    """Every entry that a state of this parameter may have."""
    moments = ("row_var", "col_var") if p.dim() > 1 else ("variance",)
    names = ("step", *moments, "exp_avg", "master_weight", "master_remainder")
    return {name: _shape(name, p) for name in names}


def _shape(entry: str, p: Tensor) -> torch.Size:
    if entry == "step":
        return torch.Size()
    if entry == "row_var":
        return torch.Size((*p.shape[:-1], 1))
    if entry == "col_var":
        return torch.Size((*p.shape[:-2], 1, p.shape[-1]))
    return p.shape


def _check_options(group: dict[str, Any], caller: str) -> None:
    """Refuse options outside their range."""
    eps, beta1 = pair(caller, "eps", group["eps"]), group["beta1"]
    if group["foreach"] not in (None, True, False):
        raise ValueError(
            f"{caller}: expected foreach to be None, True or False, got foreach="
            f"{group['foreach']!r}; None lets it be chosen"
        )
    ranges = {
        "lr": (group["lr"], 0.0, math.inf),
        "beta2_decay": (group["beta2_decay"], -math.inf, 0.0),
        "eps[0]": (0.0 if eps[0] is None else eps[0], 0.0, math.inf),
        "eps[1]": (eps[1], 0.0, math.inf),
        "d": (group["d"], 1.0, math.inf),
        "weight_decay": (group["weight_decay"], 0.0, math.inf),
        "beta1": (0.0 if beta1 is None else beta1, 0.0, 1.0),
    }
    for name, (given, low, high) in ranges.items():
        value = number(caller, name, given)
        if not (low <= value < high or value == high == 0.0):
            relation = "<=" if high == 0.0 else "<"
            raise ValueError(
                f"{caller}: expected {low} <= {name} {relation} {high}, got {name}={value}; "
                "correct the option of this group"
            )


def _check_state(saved: dict[str, Any], p: Tensor) -> None:
    """Refuse a state that is not of this parameter, by the name of its first wrong entry."""
    needed = ("step", "row_var", "col_var") if p.dim() > 1 else ("step", "variance")
    for name, shape in _shapes(p).items():
        entry = saved.get(name)
        got = None if entry is None else list(entry.shape) if isinstance(entry, Tensor) else []
        if (got is None and name in needed) or (got is not None and got != list(shape)):
            raise ValueError(
                f"Adafactor.load_state_dict: expected {name} of shape {list(shape)} for a "
                f"parameter of shape {list(p.shape)}, got shape={got}; load the state that was "
                "saved with this model, in the order of its parameters"
            )
