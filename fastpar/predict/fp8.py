"""What products in 8-bit floats would make of a layout: time and memory, and where they pay."""

from __future__ import annotations

from dataclasses import replace

from fastpar.axes import size_text
from fastpar.axes.step import Setup, Workload
from fastpar.predict.machine import DatasheetRates
from fastpar.predict.memory import predict_memory
from fastpar.predict.search import refused
from fastpar.predict.time import Rates, ops_of, predict_step

LEAST_GAIN = 0.03  # of a step: below it no published run of such a model was faster
_WIDTHS = range(256, 16385, 256)


def saved_s(workload: Workload, setup: Setup, rates: DatasheetRates, layers: str) -> float:
    """Seconds of a step that the products of "mlp" or "all" layers save, less their casts."""
    hidden, total = 4 * workload.shape.n_embd // setup.tp, 0.0
    for op in ops_of(workload, setup):
        if op.name != "matmul" or op.direction != "forward":
            continue
        m, k, n = op.shape
        if layers == "all" or hidden in (k, n):
            total += op.count * rates.fp8_saves_s(m, k, n)
    return total


def pays_from(workload: Workload, setup: Setup, rates: DatasheetRates, layers: str) -> int | None:
    """The least width of a model with as many layers and tokens that gains enough."""
    for width in _WIDTHS:
        shape = replace(workload.shape, n_embd=width, n_head=width // 64)
        wider = replace(workload, shape=shape)
        if (
            saved_s(wider, setup, rates, layers)
            >= LEAST_GAIN * predict_step(wider, setup, rates).step_s
        ):
            return width
    return None


def fp8_text(workload: Workload, setup: Setup, rates: Rates) -> list[str]:
    """A line for MLPs and one for all layers; none for a device without such products."""
    if not isinstance(rates, DatasheetRates) or not rates.has_fp8:
        return []
    if setup.fp8 == "none" and refused(workload, setup.change(fp8="mlp")):
        return []
    lines, plain = [], setup.change(fp8="none")
    step_s, whole = predict_step(workload, plain, rates).step_s, predict_memory(workload, plain)
    for layers in ("mlp", "all"):
        gain = saved_s(workload, plain, rates, layers) / step_s
        less = whole.total - predict_memory(workload, setup.change(fp8=layers)).total
        verdict = "pays" if gain >= LEAST_GAIN else f"does not pay: less than {LEAST_GAIN:.0%}"
        lines.append(
            f"  --fp8 {layers}: products less casts save {gain:.1%} of the step, memory "
            f"{size_text(abs(less))} {'less' if less >= 0 else 'more'} a rank; {verdict}"
        )
    return lines


def check_fp8(workload: Workload, setup: Setup, rates: Rates, device: str) -> None:
    """Refuse fp8 where it cannot pay, with the figures.

    Raises:
        ValueError: a device without such products, or whose rates for them are not known; a layout
            that gains less than LEAST_GAIN.
    """
    if setup.fp8 == "none":
        return
    if not isinstance(rates, DatasheetRates) or not rates.has_fp8:
        raise ValueError(
            "plan: expected a data sheet of a GPU with products in 8-bit floats (l40s, h100, b200) "
            f"and bf16 with fp8={setup.fp8}, got gpu={device} dtype={setup.dtype}; leave --fp8 and "
            "--measure out, or choose another --gpu"
        )
    plain = setup.change(fp8="none")
    step_s, gain_s = (
        predict_step(workload, plain, rates).step_s,
        saved_s(workload, plain, rates, setup.fp8),
    )
    if gain_s < LEAST_GAIN * step_s:
        width = pays_from(workload, plain, rates, setup.fp8)
        way = f"it would pay from n_embd={width} on" if width else "no width would gain it"
        raise ValueError(
            f"plan: expected fp8 to save at least {LEAST_GAIN:.0%} of a step, got fp8={setup.fp8} "
            f"with n_embd={workload.shape.n_embd}: {gain_s * 1e3:.3g} of {step_s * 1e3:.4g} ms, "
            f"{gain_s / step_s:.1%}, products less casts; leave --fp8 out, {way}"
        )
