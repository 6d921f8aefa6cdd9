"""bias_gelu at GPT-2's widths, against F.gelu(x + bias)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import bias_gelu
from fastpar.kernels.reference import bias_gelu_ref

TIME_LIMIT_S = {"cpu": 400, "cuda": 80}
WIDTHS = {"cuda": (768, 1600, 1024, 1280), "cpu": (384, 768)}


def eager(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def case(rows: int, hidden: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        N = min(rows, 512) if small else rows
        x = torch.randn(N, hidden, generator=generator, device=device, dtype=dtype)
        bias = torch.randn(hidden, generator=generator, device=device, dtype=dtype)
        return x.requires_grad_(), bias.requires_grad_()

    one = rows * hidden * dtype.itemsize
    return Case(
        f"bias_gelu N={rows} F={hidden}",
        make_inputs,
        {"eager": eager, "fastpar": bias_gelu},
        bias_gelu_ref,
        dtype,
        # forward reads x and writes y; backward reads x and dy and writes dx.
        bytes_moved={"forward": 2 * one, "forward+backward": 5 * one},
        compiled=device == "cpu" or hidden in (3072, 6400),  # they take most of a GPU run
    )


def run(bench: Bench) -> None:
    rows = {"cuda": 16384, "cpu": 2048}[bench.device]
    widths = WIDTHS[bench.device]
    if bench.quick:
        rows, widths = 64, widths[:1]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(rows, 4 * C, dtype, bench.device) for C in widths])
