"""Products of a GPT's blocks in 8-bit floats: which layers, and what is told of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpar.axes.experts import balance
from fastpar.kernels import DelayedScales, Fp8
from fastpar.models.gpt import GPT
from fastpar.settings.block import products

LAYERS = ("none", "mlp", "all")


def use_fp8(
    model: GPT,
    layers: str,
    *,
    scaling: str = "row",
    weight_gradient: str = "bf16",
    emulate: bool = False,
) -> None:
    """Rounds the operands of linear layers of all blocks to 8 bits from now on.

    Args:
        model: before parallelize(), whose engine then adds up what delayed scales are made of;
            without one call model.fp8_scales.update() after each step.
        layers: "mlp", "all" of a block, or "none": as before.
        scaling, weight_gradient, emulate: as kernels.Fp8.
    Raises:
        ValueError: other layers; experts; what Fp8 refuses.
    """
    if layers not in LAYERS:
        raise ValueError(
            f"use_fp8: expected one of {', '.join(LAYERS)}, got layers={layers}; choose one"
        )
    if layers != "none" and model.config.n_expert:
        raise ValueError(
            f"use_fp8: expected a model without experts, got n_expert={model.config.n_expert}; "
            "their products are grouped: leave fp8 out"
        )
    names, kinds = products(), products(layers)
    delayed = scaling == "tensor" and bool(kinds)
    model.fp8_scales = DelayedScales(len(names) * model.config.n_layer) if delayed else None
    for i, block in enumerate(model.h):
        for j, name in enumerate(names):
            how: dict[str, Any] = {"scaling": scaling, "weight_gradient": weight_gradient}
            how |= {"emulate": emulate, "scales": model.fp8_scales, "layer": len(names) * i + j}
            keeps = name != "attn.c_proj"  # attention keeps what it gets
            part: Any = block.get_submodule(name)
            part.fp8 = Fp8(**how, keeps=keeps) if name in kinds else None


def numbers_of(model: Any, like: Tensor) -> Tensor:
    """What a model itself counted in the last step, flat: its experts, or overflows of fp8."""
    scales: DelayedScales | None = model.fp8_scales
    if scales is None:
        return balance.sums_of(model, like)
    return scales.overflows.sum().reshape(1).to(like)


def report_of(model: Any, numbers: Tensor) -> dict[str, Any]:
    """What numbers_of() a step says, for people: columns of a row of metrics."""
    if model.fp8_scales is None:
        return balance.report_of(model, numbers)
    return {"fp8_overflows": int(numbers.sum())}


def saved_scales(model: Any) -> dict[str, Any] | None:
    """For a checkpoint's state of the run."""
    return None if model.fp8_scales is None else model.fp8_scales.state_dict()


def restore_scales(model: Any, state: dict[str, Any]) -> None:
    """Of a run's state; one without them begins with a step that notes values."""
    if model.fp8_scales is not None and state.get("fp8") is not None:
        model.fp8_scales.load_state_dict(state["fp8"])
