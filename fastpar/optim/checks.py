"""What the optimizers refuse: options out of range, parameters without memory of their own."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpar.engine.engine import engine_of_parameter
from fastpar.kernels.adamw_storage import is_dense


def number(caller: str, name: str, value: Any) -> float:
    """The value of an option that is a number or a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{caller}: expected a number or a tensor of one element, got {name} of "
                f"shape={list(value.shape)}; use a group for each value"
            )
        return float(value)
    if not isinstance(value, numbers.Real):
        raise ValueError(
            f"{caller}: expected {name} to be a number, got {name}={value!r}; convert it, or leave "
            "it out for the default"
        )
    return float(value)


def pair(caller: str, name: str, value: Any) -> tuple[Any, Any]:
    """The two numbers of an option such as betas."""
    entries = tuple(value) if isinstance(value, Iterable) else ()
    if isinstance(value, str) or len(entries) != 2:
        raise ValueError(
            f"{caller}: expected {name} to be two numbers, got {name}={value!r}; pass a tuple of "
            "two, or leave it out for the default"
        )
    return entries


def check_seed(caller: str, seed: int) -> None:
    """Refuse what is no 63-bit number."""
    if not isinstance(seed, numbers.Integral) or not 0 <= seed < 1 << 63:
        raise ValueError(f"{caller}: expected 0 <= seed < 2**63, got seed={seed!r}; 0 will do")


def check_ranges(caller: str, options: dict[str, tuple[Any, float, float]]) -> None:
    """Refuse a value outside low <= value < high, of name -> (value, low, high); 0 may be high."""
    for name, (given, low, high) in options.items():
        value = number(caller, name, given)
        if not (low <= value < high or value == high == 0.0):
            relation = "<=" if high == 0.0 else "<"
            raise ValueError(
                f"{caller}: expected {low} <= {name} {relation} {high}, got {name}={value}; "
                "correct the option of this group"
            )


def check_plain(caller: str, group: dict[str, Any], i: int, *, pieces: bool) -> None:
    """Refuse parameters whose elements are not their own memory: DTensors, sparse tensors; and
    without pieces those of FSDP, of which each rank has one."""
    for position, p in enumerate(group["params"]):
        if is_traceable_wrapper_subclass(p):
            raise ValueError(
                f"{caller}: expected plain tensors, got {where(group, i, position)} of "
                f"type={type(p).__name__}; for FSDP2's DTensors use fastpar.parallelize(model, "
                "mesh, zero_stage=3) in place of fully_shard, or torch.optim with it"
            )
        if not pieces and (hasattr(p, "_is_flat_param") or getattr(p, "_fsdp_flattened", False)):
            clips = ", or clip with the FSDP model's clip_grad_norm_()" if caller == "AdamW" else ""
            raise ValueError(
                f"{caller}: expected whole parameters{' with max_grad_norm' if clips else ''}, got "
                f"{where(group, i, position)}, of which FSDP gives each rank a piece; use "
                f"fastpar.parallelize(model, mesh, zero_stage=3) in place of FSDP{clips}"
            )
        if p.layout is not torch.strided:
            raise ValueError(
                f"{caller}: expected dense parameters, got {where(group, i, position)} of layout="
                f"{p.layout}; pass a parameter made of its to_dense()"
            )


def check_memory(group: dict[str, Any], i: int) -> None:
    """Refuse views with gaps, which are no flat memory. Engines look at their parameters."""
    for position, p in enumerate(group["params"]):
        if engine_of_parameter(p) is None and (p.is_neg() or not is_dense(p)):
            what = "negated lazily" if p.is_neg() else f"with strides {p.stride()}"
            raise ValueError(
                f"AdamW: expected parameters that fill memory of their own, got "
                f"{where(group, i, position)}, {list(p.shape)}, a view {what}; make the tensor that"
                " it is a view of the parameter, or a copy: torch.nn.Parameter("
                "p.detach().clone(memory_format=torch.contiguous_format))"
            )


def check_overlap(groups: list[dict[str, Any]]) -> None:
    """Refuse parameters that share memory: both would be updated there, in any order.

    Engines check their own; parameters that are gathered later share one element until then.
    """
    spans = []
    for i, group in enumerate(groups):
        for position, p in enumerate(group["params"]):
            if engine_of_parameter(p) is not None:
                continue
            if p.numel() and p.layout is torch.strided and p.device.type != "meta":
                last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride()))
                start, size = p.data_ptr(), (last + 1) * p.element_size()
                spans.append((str(p.device), start, start + size, where(group, i, position)))
    spans.sort()
    for (device, _, stop, name), (other, start, _, other_name) in itertools.pairwise(spans):
        if device == other and start < stop:
            raise ValueError(
                f"AdamW: expected parameters in memory of their own, got {other_name} overlapping "
                f"{name}; pass a tied weight once, and views as one parameter"
            )


def check_same_groups(
    caller: str, groups: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> None:
    """Refuse saved groups of other lengths."""
    differs = []
    if len(groups) != len(saved):
        differs = [f"{len(groups)} parameter groups, got {len(saved)}"]
    for i, (group, other) in enumerate(zip(groups, saved)):
        mine, theirs = len(group["params"]), len(other["params"])
        if mine != theirs:
            differs.append(f"{mine} parameters in group {i}, got {theirs}")
    if differs:
        raise ValueError(
            f"{caller}: expected {differs[0]}; load the state that was saved with this model and "
            "these groups"
        )


def where(group: dict[str, Any], i: int, position: int) -> str:
    """The name of a parameter in errors."""
    names = group.get("param_names")
    name = f" ('{names[position]}')" if names else ""
    return f"parameter {position} of group {i}{name}"


def scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A number, or an fp32 tensor [] on the device for a kernel to read."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.device.type == "cpu" and (device.type != "cpu" or value.dtype != torch.float32):
        return value.item()
    if device.type == "cpu":  # for a kernel that is called later, while a schedule changes it
        return value.reshape(()).clone()
    return value.to(device, torch.float32).reshape(())


def check_host(optimizer: Any, engine: Any) -> None:
    """Refuse an optimizer that cannot step where the engine keeps what it steps."""
    if engine is not None and engine.shards.offload is not None and not optimizer.steps_on_host:
        name = type(optimizer).__name__
        raise ValueError(
            f"{name}: expected an optimizer that steps on the host with offload="
            f"{engine.settings.offload!r}, got {name}, which computes on whole matrices; use "
            "fastpar.AdamW, or leave offload out"
        )
