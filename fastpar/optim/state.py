"""How AdamW keeps its state: master weights, moments of few bits, and state dicts.

The entries of one parameter's state, by the optimizer's options:

    step                                  fp32 [], counts from 1, as in torch.optim.AdamW (fp64
                                          under an fp64 default, fp32 on the parameter's device)
    exp_avg, exp_avg_sq                   moments in fp32 or bf16 (fp64 of fp64 parameters), and
    max_exp_avg_sq                        with amsgrad, as in torch.optim.AdamW too
    exp_avg_codes, exp_avg_scale          moments in 8 bits: uint8, and fp32 for each 256 elements
    exp_avg_sq_codes, exp_avg_sq_scale    (never under torch's names, which hold values)
    master_weight                         fp32, of a 16-bit parameter
    master_remainder                      int16, the low half of the master of a bf16 parameter

Parameters of a sharded engine have the same entries of this rank's piece alone, in one dimension;
pieces begin at multiples of 256 elements. state_dict() puts the pieces together (whole_entry) and
load_state_dict() cuts them (cut_entry), so a saved state knows neither stage nor world size, nor tp
(with tp > 1 not in 8 bits, whose blocks are those of a rank's slice).

A state saved in one form loads in any other (convert_state), and torch_state has torch's form.
Entries of another dtype than above have been through an optimizer that casts its state to that of
the parameter and does not know master weights: those are stale then, and are made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels.adamw import (
    MOMENT_BLOCK,
    decode_moment,
    encode_moment,
    master_join,
    master_split,
    new_moment,
)
from fastpar.parallel.engine import Engine, engine_of_parameter

MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Storage:
    """The options of an AdamW that say how its state is stored.

    Raises:
        ValueError: options that contradict each other; in check(), a parameter that does not fit.
    """

    master_weights: bool | str
    stochastic_rounding: bool
    moment_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.master_weights not in (False, True, "remainder"):
            raise ValueError(
                "AdamW: expected master_weights to be False, True or 'remainder', got "
                f"master_weights={self.master_weights!r}; True keeps 32 bits more, 'remainder' 16"
            )
        if self.moment_dtype not in MOMENT_DTYPES:
            raise ValueError(
                "AdamW: expected moment_dtype torch.float32, torch.bfloat16 or torch.uint8, got "
                f"moment_dtype={self.moment_dtype}; torch.uint8 is 8 bits with a scale per block"
            )
        if self.stochastic_rounding and self.master_weights:
            raise ValueError(
                "AdamW: expected stochastic_rounding=True without master weights, got "
                f"master_weights={self.master_weights!r}; rounding stochastically is what trains "
                "bf16 parameters without them: choose one"
            )

    @property
    def random(self) -> bool:
        """Whether a step draws random bits."""
        return self.stochastic_rounding or self.moment_dtype != torch.float32

    def check(self, p: Tensor, *, amsgrad: bool) -> None:
        """Refuse a parameter that these options cannot train."""
        got = f"got a parameter of dtype={p.dtype}"
        if p.dtype not in (torch.float32, torch.float64, *_HALF):
            raise ValueError(
                f"AdamW: expected fp32, bf16, fp16 or fp64 parameters, {got}; convert the model"
            )
        if p.dtype == torch.float64 and self.moment_dtype != torch.float32:
            raise ValueError(
                f"AdamW: expected moment_dtype=torch.float32 with fp64 parameters, {got} with "
                f"moment_dtype={self.moment_dtype}; their moments are fp64: leave it out"
            )
        if p.dtype in _HALF and not (self.master_weights or self.stochastic_rounding):
            raise ValueError(
                "AdamW: expected fp32 parameters, or bf16 and fp16 with master_weights=True, "
                f"{got} with master_weights=False and stochastic_rounding=False; pass "
                "master_weights=True (or 'remainder' or stochastic_rounding=True for bf16), or "
                "convert the model"
            )
        if p.dtype == torch.float16 and self.master_weights is not True:
            what = "stochastic_rounding=True" if self.stochastic_rounding else "'remainder'"
            raise ValueError(
                f"AdamW: expected fp16 parameters with master_weights=True, {got} with {what}, "
                "which is made of bf16's bits; pass master_weights=True"
            )
        if amsgrad and self.moment_dtype == torch.uint8:
            raise ValueError(
                "AdamW: expected amsgrad=False with moment_dtype=torch.uint8, got amsgrad=True; "
                "a running maximum of rounded values drifts: use torch.bfloat16 or torch.float32"
            )

    def master_entry(self, dtype: torch.dtype) -> str | None:
        """The name under which the master of parameters of this dtype is kept."""
        if dtype not in _HALF or self.stochastic_rounding:
            return None
        return "master_remainder" if self.master_weights == "remainder" else "master_weight"

    def new_state(self, p: Tensor, *, amsgrad: bool) -> dict[str, Tensor]:
        """State before the first step."""
        state = {"step": new_step()}
        for name in moment_names(amsgrad):
            if p.dtype == torch.float64:
                state[name] = torch.zeros_like(p, requires_grad=False)
            else:
                state.update(self._entries(name, *new_moment(p, self.moment_dtype)))
        self.add_master(state, p)
        return state

    def add_master(self, state: dict[str, Tensor], p: Tensor) -> None:
        """The master of a parameter as it is now, where the state lacks it."""
        entry = self.master_entry(p.dtype)
        if entry is not None and entry not in state:
            exact = entry == "master_weight"
            state[entry] = p.detach().float() if exact else torch.zeros_like(p, dtype=torch.int16)

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of each entry that a parameter's state may have."""
        names = ["step", *moment_names(True)]
        if self.moment_dtype == torch.uint8:
            moments = moment_names(False)
            names = ["step", *(f"{m}_{part}" for m in moments for part in ("codes", "scale"))]
        master = self.master_entry(p.dtype)
        shape = whole_shape(p)
        return {name: _shape(name, shape) for name in ([*names, master] if master else names)}

    def moment_entry(self, name: str) -> str:
        """Under which name the kernel's exp_avg, exp_avg_sq or max_exp_avg_sq is kept."""
        return f"{name}_codes" if self.moment_dtype == torch.uint8 else name

    def _entries(self, name: str, values: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
        return (
            {name: values} if scale is None else {f"{name}_codes": values, f"{name}_scale": scale}
        )

    def convert_state(
        self, saved: dict[str, Any], p: Tensor, *, amsgrad: bool, where: str, copy: bool = True
    ) -> dict[str, Any]:
        """A copy of a saved state in the form of these options, on the parameter's device.

        Args:
            saved: of an AdamW of this package or of torch, in any form.
            where: names the parameter in errors.
            copy: False: moments that have this form already may be returned as they are.
        Raises:
            ValueError: an entry is missing or not of the parameter's shape.
        """
        check_entries(saved, p, amsgrad=amsgrad, where=where)
        state: dict[str, Any] = {
            "step": load_step(saved["step"]),
        }
        for name in moment_names(amsgrad):
            state.update(self._convert_moment(saved, name, p, copy=copy))
        entry = self.master_entry(p.dtype)
        if entry is not None:
            master = _master(saved, p)
            if entry in saved and saved[entry] is master:
                state[entry] = _like(master, p, master.dtype)
            elif master is not None and entry == "master_weight":
                state[entry] = _like(master_join(p, _like(master, p, torch.int16)), p)
            elif master is not None:
                rounded, remainder = master_split(_like(master, p))
                if not torch.equal(rounded, p):
                    raise ValueError(
                        f"AdamW.load_state_dict: expected {where} to be the rounding of its saved "
                        "master_weight, got other values; load the model's weights first"
                    )
                state[entry] = remainder
            else:
                self.add_master(state, p)
        known = {*_ENTRIES, "step"}
        state.update({key: value for key, value in saved.items() if key not in known})
        return state

    def _convert_moment(
        self, saved: dict[str, Any], name: str, p: Tensor, *, copy: bool
    ) -> dict[str, Tensor]:
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
            return self._entries(
                name, values if same and not copy else _like(values, p, dtype), None
            )
        return self._entries(name, *encode_moment(_like(values, p), signed=name == "exp_avg"))


def new_step() -> Tensor:
    """The count of steps before the first, on the host, of torch's dtype."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32)


def load_step(saved: Any) -> Tensor:
    """A copy of a saved count on the host, at least fp32; a number gets the dtype of a new one."""
    if not isinstance(saved, Tensor):
        return new_step() + saved
    dtype = torch.promote_types(saved.dtype, torch.float32)
    return saved.detach().to("cpu", dtype, copy=True)


def moment_names(amsgrad: bool) -> tuple[str, ...]:
    """torch's names of the moments."""
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")


_ENTRIES = (
    *moment_names(True),
    "exp_avg_codes",
    "exp_avg_scale",
    "exp_avg_sq_codes",
    "exp_avg_sq_scale",
    "master_weight",
    "master_remainder",
)


def whole_shape(p: Tensor) -> torch.Size:
    """Of a parameter, whatever ranks share out of it; of other tensors their own."""
    engine = engine_of_parameter(p)
    return p.shape if engine is None else engine.whole_shape(p)


def _shape(entry: str, of: torch.Size) -> torch.Size:
    """Of an entry for a tensor of shape `of`."""
    if entry == "step":
        return torch.Size()
    return torch.Size([-(-of.numel() // MOMENT_BLOCK)]) if entry.endswith("_scale") else of


def check_entries(saved: dict[str, Any], p: Tensor, *, amsgrad: bool, where: str) -> None:
    """Refuse a state that is not of this parameter, by the name of its first wrong entry."""
    advice = "load the state that was saved with this model, in the order of its parameters"
    if "step" not in saved:
        raise ValueError(f"AdamW.load_state_dict: expected step for {where}, got none; {advice}")
    for name in moment_names(amsgrad):
        if name not in saved and not {f"{name}_codes", f"{name}_scale"} <= saved.keys():
            raise ValueError(
                f"AdamW.load_state_dict: expected {name} for {where}, got entries="
                f"{sorted(saved)}; {advice}"
            )
    for name in _ENTRIES:
        shape = _shape(name, whole_shape(p))
        if name in saved and saved[name].shape != shape:
            raise ValueError(
                f"AdamW.load_state_dict: expected {name} of shape {list(shape)} for {where}, got "
                f"shape={list(saved[name].shape)}; {advice}"
            )


def whole_entry(
    name: str,
    value: Any,
    p: Tensor,
    engine: Engine,
    *,
    along_tp: bool = True,
) -> Any:
    """An entry for all elements of a parameter that ranks share out.

    Args:
        along_tp: False: of this rank's slice along tp.
    Ranks: all.
    """
    if name not in _ENTRIES:  # a count, or what others put there: every rank has it
        return value
    if not along_tp:
        return engine.slice_of_pieces(value, p, block=entry_block(name))
    return engine.full(value, p, block=entry_block(name))


def cut_entry(name: str, whole: Any, p: Tensor, engine: Engine, *, along_tp: bool = True) -> Any:
    """This rank's part of a whole entry, a copy; the inverse of whole_entry()."""
    if name not in _ENTRIES:
        return whole
    cut = engine.shard_of if along_tp else engine.piece_of_slice
    return cut(whole, p, block=entry_block(name))


def entry_block(name: str) -> int:
    """Elements of the parameter for each element of an entry; 0 if every rank has all of it."""
    return 0 if name not in _ENTRIES else MOMENT_BLOCK if name.endswith("_scale") else 1


def torch_state(state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """A parameter's state with torch's entries alone: moments as fp32 values, no master weight."""
    result: dict[str, Any] = {"step": state["step"]}
    for name in moment_names(True):
        if f"{name}_codes" in state:
            codes, scale = state[f"{name}_codes"], state[f"{name}_scale"]
            result[name] = decode_moment(codes, scale, signed=name == "exp_avg")
        elif name in state:
            result[name] = state[name] if p.dtype == torch.float64 else state[name].float()
    return result


def _master(saved: dict[str, Any], p: Tensor) -> Tensor | None:
    """The saved master, either form, unless it is stale (see above)."""
    for name, dtype in (("master_weight", torch.float32), ("master_remainder", torch.int16)):
        if name in saved and saved[name].dtype == dtype and p.dtype in _HALF:
            return saved[name]
    return None


def _like(values: Tensor, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A copy with the parameter's device and strides."""
    return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(values)
