"""layer_norm and residual_layer_norm at GPT-2's widths, against F.layer_norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import layer_norm, residual_layer_norm
from fastpar.kernels.reference import layer_norm_ref, residual_layer_norm_ref

TIME_LIMIT_S = {"cpu": 600, "cuda": 110}
WIDTHS = {"cuda": (768, 1600, 1024, 1280), "cpu": (384, 768)}


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def residual_eager(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    residual_out = residual + x
    return F.layer_norm(residual_out, weight.shape, weight, bias), residual_out


def case(rows: int, C: int, dtype: torch.dtype, device: str, *, residual: bool) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        N = min(rows, 512) if small else rows

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        streams = [randn(N, C) for _ in range(1 + residual)]
        return tuple(t.requires_grad_() for t in (*streams, 1 + 0.1 * randn(C), 0.1 * randn(C)))

    one = rows * C * dtype.itemsize  # one pass over a stream
    # Plain: read x, write y; then read x, dy, write dx. Residual: read x and residual, write y and
    # the sum; then read the sum, dy and its own gradient, write the one gradient of both inputs.
    forward, backward = (4 * one, 4 * one) if residual else (2 * one, 3 * one)
    name = "residual_layer_norm" if residual else "layer_norm"
    return Case(
        f"{name} N={rows} C={C}",
        make_inputs,
        {"eager": residual_eager, "fastpar": residual_layer_norm}
        if residual
        else {"eager": eager, "fastpar": layer_norm},
        residual_layer_norm_ref if residual else layer_norm_ref,
        dtype,
        bytes_moved={"forward": forward, "forward+backward": forward + backward},
        compiled=device == "cpu" or C in (768, 1600),  # compilations take most of a GPU run
    )


def run(bench: Bench) -> None:
    rows = {"cuda": 16384, "cpu": 2048}[bench.device]
    widths = WIDTHS[bench.device]
    if bench.quick:
        rows, widths = 64, widths[:1]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run(
        [
            case(rows, C, dtype, bench.device, residual=residual)
            for C in widths
            for residual in (True, False)
        ]
    )
