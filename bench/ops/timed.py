"""How a case of kernels/cases.py becomes one of a bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.harness import Bench, Case
from fastpar.kernels.cases import OpCase


def of_device(bench: Bench, on_gpu: Any, on_cpu: Any, quick: Any) -> Any:
    """What a bench runs: sizes or rows."""
    return quick if bench.quick else on_gpu if bench.device == "cuda" else on_cpu


def dtype_of(bench: Bench) -> torch.dtype:
    """Of what is timed: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if bench.device == "cuda" else torch.float32


def timed(
    bench: Bench,
    whole: OpCase,
    few: OpCase,
    others: Mapping[str, Callable[..., Any]] | None = None,
    *,
    name: str = "",
    dtype: torch.dtype | None = None,
    **how: Any,
) -> Case:
    """whole is timed, beside stock PyTorch and others; few, the same op at fewer rows, is judged.

    Args:
        others: further variants, by name.
        name: by default that of whole.
        how: other fields of Case.
    """
    dtype = dtype or dtype_of(bench)

    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Any, ...]:
        return tuple((few if small else whole).inputs(dtype, bench.device, generator).values())

    def both(forward: float, backward: float) -> dict[str, float]:
        found = {"call": forward, "forward": forward, "backward": backward}
        return found | {"forward+backward": forward + backward}

    variants = {"eager": whole.stock or whole.eager, "fastpar": whole.fn, **(others or {})}
    fields: dict[str, Any] = {
        "bytes_moved": both(*(n * dtype.itemsize for n in whole.elements)),
        "flops": both(*whole.flops) if any(whole.flops) else {},
        "yardstick": few.eager if whole.stock else None,
    }
    return Case(
        name or f"{whole.op} {whole.shape}", make_inputs, variants, few.ref, dtype,
        **{**fields, **how},
    )  # fmt: skip
