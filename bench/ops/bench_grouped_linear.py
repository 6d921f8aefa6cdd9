"""grouped_linear at the layers of 8 experts, beside F.linear expert by expert and one dense product
of as many rows, which is what sparsity has to beat."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import grouped_linear, linear
from fastpar.kernels.reference import grouped_linear_ref

TIME_LIMIT_S = {"cpu": 400, "cuda": 60}
E = 8


def eager(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    parts = zip(x.split(counts.tolist()), weight, bias)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in parts])


def dense(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return linear(x, weight[0], bias[0])


def case(name: str, rows: int, C: int, out: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        def randn(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            return drawn.requires_grad_()

        n = min(rows, 256) if small else rows
        experts = torch.randint(0, E, (n,), generator=generator, device=device)
        counts = torch.bincount(experts, minlength=E)
        return (
            randn(n, C),
            (randn(E, out, C) * C**-0.5).detach().requires_grad_(),
            randn(E, out),
            counts,
        )

    product = 2.0 * rows * C * out
    return Case(
        f"grouped_linear {name} M={rows} E={E} {C}->{out}",
        make_inputs,
        {"eager": eager, "fastpar": grouped_linear, "one dense product": dense},
        grouped_linear_ref,
        dtype,
        flops={"forward": product, "forward+backward": 3 * product},
        compiled=False,  # counts are numbers of the host
        unjudged=("one dense product",),
    )


def run(bench: Bench) -> None:
    rows, C = (32768, 768) if bench.device == "cuda" else (4096, 384)
    if bench.quick:
        rows, C = 256, 128
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    shapes = [("c_fc", C, 2 * C), ("c_proj", 2 * C, C)]
    bench.run([case(n, rows, c, out, dtype, bench.device) for n, c, out in shapes])
