"""linear(fp8=) at GPT-2's MLP, against F.linear; on a CPU emulated, for its numbers alone."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import Fp8, linear

TIME_LIMIT_S = {"cpu": 200, "cuda": 60}


def case(name: str, rows: int, C: int, out: int, device: str) -> Case:
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        x, weight = randn(min(rows, 256) if small else rows, C), randn(out, C) * C**-0.5
        return x.requires_grad_(), weight.requires_grad_(), randn(out).requires_grad_()

    emulated = functools.partial(linear, fp8=Fp8("row", emulate=True))
    product = 2.0 * rows * C * out
    return Case(
        f"linear_fp8 {name} row N={rows} {C}->{out}",
        make_inputs,
        {
            "eager": F.linear,
            "fastpar": functools.partial(linear, fp8=Fp8("row", emulate=not on_gpu)),
        },
        emulated,
        dtype,
        flops={"forward": product, "forward+backward": 3 * product},
        compiled=False,
        yardstick=emulated,
    )


def run(bench: Bench) -> None:
    rows, C = (16384, 1600) if bench.device == "cuda" else (2048, 384)
    if bench.quick:
        rows, C = 256, 128
    bench.run(
        [
            case("c_fc", rows, C, 4 * C, bench.device),
            case("mlp.c_proj", rows, 4 * C, C, bench.device),
        ]
    )
