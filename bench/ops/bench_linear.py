"""linear at GPT-2's projections, against F.linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import linear
from fastpar.kernels.reference import linear_ref

TIME_LIMIT_S = {"cpu": 400, "cuda": 50}


def case(name: str, rows: int, C: int, out: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        x, weight = randn(min(rows, 256) if small else rows, C), randn(out, C) * C**-0.5
        return x.requires_grad_(), weight.requires_grad_(), randn(out).requires_grad_()

    product = 2.0 * rows * C * out
    return Case(
        f"linear {name} N={rows} {C}->{out}",
        make_inputs,
        {"eager": F.linear, "fastpar": linear},
        linear_ref,
        dtype,
        flops={"forward": product, "forward+backward": 3 * product},
        compiled=False,  # a product is a library call there too
    )


def run(bench: Bench) -> None:
    rows, C = (16384, 768) if bench.device == "cuda" else (2048, 384)
    if bench.quick:
        rows, C = 256, 128
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    shapes = [("c_attn", C, 3 * C), ("attn.c_proj", C, C), ("c_fc", C, 4 * C)]
    shapes.append(("mlp.c_proj", 4 * C, C))
    bench.run([case(n, rows, c, out, dtype, bench.device) for n, c, out in shapes])
