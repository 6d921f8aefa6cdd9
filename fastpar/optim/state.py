"""The state of optimizers: master weights, compact moments, and state dicts.

Entries of one parameter's state, by the optimizer's options:

    step                                  fp32 [], counts from 1, as in torch.optim.AdamW (fp64
                                          under an fp64 default, fp32 on the parameter's device)
    exp_avg, exp_avg_sq                   moments in fp32 or bf16 (fp64 of fp64 parameters);
    max_exp_avg_sq                        the last with amsgrad; as in torch.optim.AdamW
    exp_avg_codes, exp_avg_scale          moments in 8 bits: uint8, and fp32 for each 256 elements
    exp_avg_sq_codes, exp_avg_sq_scale    (never under torch's names, which hold values)
    master_weight                         fp32, of a 16-bit parameter
    master_remainder                      int16, the low half of the master of a bf16 parameter
    momentum_buffer                       of Muon
    average                               fp32, of the weights; AveragedWeights
    outer_weight, outer_momentum          fp32, of the outer optimizer; outer_steps: a count; see
                                          axes/replicas.py

With a sharded engine entries cover this rank's piece of the parameter, in one dimension; pieces
begin at multiples of 256 elements. state_dict() joins the pieces (Shards.full) and
load_state_dict() cuts them (shard_of), so a saved state depends neither on stage nor on world size
nor on tp (8-bit moments do with tp > 1: their blocks are those of a rank's slice).

A state saved in one form loads in any other (convert_moment, add_master); torch_state makes
torch's. Entries of another dtype come from an optimizer that casts its state to the parameter's
dtype and ignores master weights: masters are stale then, and are made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.engine.engine import engine_of_parameter
from fastpar.engine.optimizers import OF_WEIGHTS
from fastpar.kernels.adamw import (
    MOMENT_BLOCK,
    decode_moment,
    encode_moment,
    master_join,
    master_split,
    new_moment,
)

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Storage:
    """The options of AdamW that determine how its state is stored.

    Raises:
        ValueError: options that contradict each other; in check(), an unsupported parameter.
    """

    master_weights: bool | str
    stochastic_rounding: bool
    moment_dtype: torch.dtype

    def __post_init__(self) -> None:
        check_master_weights("AdamW", self.master_weights)
        if self.moment_dtype not in (torch.float32, torch.bfloat16, torch.uint8):
            raise ValueError(
                "AdamW: expected moment_dtype torch.float32, torch.bfloat16 or torch.uint8, got "
                f"moment_dtype={self.moment_dtype}; torch.uint8 is 8 bits with a scale per block"
            )
        if self.stochastic_rounding and self.master_weights:
            raise ValueError(
                "AdamW: expected stochastic_rounding=True without master weights, got "
                f"master_weights={self.master_weights!r}; stochastic rounding replaces master "
                "weights: drop one of them"
            )

    @property
    def random(self) -> bool:
        """Whether a step draws random bits."""
        return self.stochastic_rounding or self.moment_dtype != torch.float32

    def check(self, p: Tensor, caller: str = "AdamW", *, amsgrad: bool = False) -> None:
        """Refuse a parameter that these options cannot train."""
        got = f"got a parameter of dtype={p.dtype}"
        stored = self.master_weights or self.stochastic_rounding
        how = "stochastic_rounding=True" if self.stochastic_rounding else "'remainder'"
        refused = (
            (
                p.dtype not in (torch.float32, torch.float64, *HALF),
                f"expected fp32, bf16, fp16 or fp64 parameters, {got}; convert the model",
            ),
            (
                p.dtype == torch.float64 and self.moment_dtype != torch.float32,
                f"expected moment_dtype=torch.float32 with fp64 parameters, {got} with "
                f"moment_dtype={self.moment_dtype}; drop it: moments of fp64 parameters are fp64",
            ),
            (
                p.dtype in HALF and not stored,
                f"expected fp32 parameters, or bf16 and fp16 with master_weights=True, {got} with "
                "master_weights=False; pass master_weights=True (for bf16 also 'remainder', or "
                "AdamW's stochastic_rounding=True), or convert the model",
            ),
            (
                p.dtype == torch.float16 and self.master_weights is not True,
                f"expected fp16 parameters with master_weights=True, {got} with {how}, which works "
                "for bf16 only; pass master_weights=True",
            ),
            (
                amsgrad and self.moment_dtype == torch.uint8,
                "moment_dtype=torch.uint8 does not support amsgrad=True, as a running maximum of "
                "rounded values drifts; use torch.bfloat16 or torch.float32",
            ),
        )
        for applies, text in refused:
            if applies:
                raise ValueError(f"{caller}: {text}")

    def new_state(self, p: Tensor, *, amsgrad: bool) -> dict[str, Tensor]:
        """The state before the first step."""
        state = {"step": new_step()}
        for name in moment_names(amsgrad):
            if p.dtype == torch.float64:
                state[name] = torch.zeros_like(p, requires_grad=False)
            else:
                state.update(self._entries(name, *new_moment(p, self.moment_dtype)))
        add_master(state, p, self.master_weights)
        return state

    def moment_entry(self, name: str) -> str:
        """The entry of the kernel's exp_avg, exp_avg_sq or max_exp_avg_sq."""
        return f"{name}_codes" if self.moment_dtype == torch.uint8 else name

    def _entries(self, name: str, values: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
        if scale is None:
            return {name: values}
        return {f"{name}_codes": values, f"{name}_scale": scale}

    def convert_moment(
        self, saved: dict[str, Any], name: str, p: Tensor, *, copy: bool
    ) -> dict[str, Tensor]:
        """A moment of a saved state, in the form of these options, on the parameter's device.

        Args:
            saved: of an AdamW of this package or of torch, in any form; its entries were checked.
            copy: False: a moment that has this form already may be returned as it is.
        """
        if f"{name}_codes" in saved:
            codes = _like(saved[f"{name}_codes"], p, torch.uint8)
            scale = saved[f"{name}_scale"].to(p.device, torch.float32, copy=True)
            if self.moment_dtype == torch.uint8:
                return self._entries(name, codes, scale)
            values = decode_moment(codes, scale, signed=name == "exp_avg")
        else:
            values = saved[name]
        if self.moment_dtype != torch.uint8:
            dtype = torch.float64 if p.dtype == torch.float64 else self.moment_dtype
            same = (values.dtype, values.device, values.stride()) == (dtype, p.device, p.stride())
            return {name: values if same and not copy else _like(values, p, dtype)}
        return self._entries(name, *encode_moment(_like(values, p), signed=name == "exp_avg"))


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Wait for parts of the state that still change, as before state_dict()."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def new_step() -> Tensor:
    """The step count before the first step, on the host, of torch's dtype."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")


def load_step(saved: Any) -> Tensor:
    """A copy of a saved count on the host, [], at least fp32; a number gets a new one's dtype."""
    if not isinstance(saved, Tensor):
        return new_step() + saved
    dtype = torch.promote_types(saved.dtype, torch.float32)
    return saved.detach().reshape(()).to("cpu", dtype, copy=True)


def kept_entries(saved: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
    """Copies of saved entries that need no conversion: counts, and entries in OF_WEIGHTS."""
    counts = {name: load_step(saved[name]) for name in COUNTS if name in saved}
    wide = torch.promote_types(p.dtype, torch.float32)
    return counts | {name: _like(saved[name], p, wide) for name in OF_WEIGHTS if name in saved}


def moment_names(amsgrad: bool) -> tuple[str, ...]:
    """torch's names of the moments."""
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")


COUNTS = ("step", "outer_steps")
ENTRIES = (
    *moment_names(True),
    *(f"{name}_{part}" for name in moment_names(False) for part in ("codes", "scale")),
    *("master_weight", "master_remainder", "momentum_buffer", *OF_WEIGHTS),
)


def whole_shape(p: Tensor) -> torch.Size:
    """The shape of the whole parameter, over all ranks that split it."""
    engine = engine_of_parameter(p)
    return p.shape if engine is None else engine.shards.whole_shape(p)


def entry_block(name: str) -> int:
    """Elements of the parameter per element of an entry; 0: every rank has all of it."""
    return 0 if name not in ENTRIES else MOMENT_BLOCK if name.endswith("_scale") else 1


def torch_state(state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """A parameter's state with torch's entries only: moments as fp32 values, no master weight."""
    result: dict[str, Any] = {"step": state["step"]}
    for name in moment_names(True):
        if f"{name}_codes" in state:
            codes, scale = state[f"{name}_codes"], state[f"{name}_scale"]
            result[name] = decode_moment(codes, scale, signed=name == "exp_avg")
        elif name in state:
            result[name] = state[name] if p.dtype == torch.float64 else state[name].float()
    return result


def check_master_weights(caller: str, master_weights: bool | str) -> None:
    """Refuse other values of this option."""
    if master_weights not in (False, True, "remainder"):
        raise ValueError(
            f"{caller}: expected master_weights to be False, True or 'remainder', got "
            f"master_weights={master_weights!r}; True keeps 32 more bits, 'remainder' 16"
        )


def master_entry(dtype: torch.dtype, master_weights: bool | str) -> str | None:
    """The entry of the master of parameters of this dtype; None: they have none."""
    if dtype not in HALF or not master_weights:
        return None
    return "master_remainder" if master_weights == "remainder" else "master_weight"


def add_master(
    state: dict[str, Any],
    p: Tensor,
    master_weights: bool | str,
    saved: dict[str, Any] | None = None,
    *,
    caller: str = "",
    where: str = "",
) -> None:
    """Add a parameter's master if its state lacks it: a copy of a saved one, or a new one.

    Args:
        saved: a state that may have a master in either form (stale ones are ignored, see above).
        caller, where: for errors.
    Raises:
        ValueError: the parameter is not the rounding of its saved master.
    """
    entry = master_entry(p.dtype, master_weights)
    if entry is None or entry in state:
        return
    forms = {"master_weight": torch.float32, "master_remainder": torch.int16}
    usable = {n: x for n, x in (saved or {}).items() if n in forms and x.dtype == forms[n]}
    if entry in usable:
        state[entry] = _like(usable[entry], p, forms[entry])
    elif entry == "master_weight" and "master_remainder" in usable:
        low = _like(usable["master_remainder"], p, torch.int16)
        state[entry] = _like(master_join(p.detach(), low), p)
    elif entry == "master_weight":
        state[entry] = p.detach().float()
    elif "master_weight" not in usable:
        state[entry] = torch.zeros_like(p, dtype=torch.int16, requires_grad=False)
    else:
        rounded, state[entry] = master_split(_like(usable["master_weight"], p))
        if not torch.equal(rounded, p):
            raise ValueError(
                f"{caller}: {where} is not the rounding of its saved master_weight; load the "
                "model's weights first"
            )


def _like(values: Tensor, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A copy with the parameter's device and strides."""
    return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(values)
