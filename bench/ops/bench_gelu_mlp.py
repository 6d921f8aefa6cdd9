"""gelu_mlp at GPT-2's widths, against F.linear, F.gelu and F.linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import gelu_mlp
from fastpar.kernels.reference import gelu_mlp_ref

TIME_LIMIT_S = {"cpu": 400, "cuda": 60}


def eager(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)


def case(rows: int, C: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        x = randn(min(rows, 256) if small else rows, C)
        weights = randn(4 * C, C) * C**-0.5, randn(4 * C), randn(C, 4 * C) * C**-0.5, randn(C)
        return tuple(t.requires_grad_() for t in (x, *weights))

    product = 16.0 * rows * C * C  # both layers
    return Case(
        f"gelu_mlp N={rows} C={C}",
        make_inputs,
        {"eager": eager, "fastpar": gelu_mlp},
        gelu_mlp_ref,
        dtype,
        flops={"forward": product, "forward+backward": 3 * product},
    )


def run(bench: Bench) -> None:
    rows, widths = (16384, (768, 1600)) if bench.device == "cuda" else (2048, (384,))
    if bench.quick:
        rows, widths = 256, (128,)
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(rows, C, dtype, bench.device) for C in widths])
