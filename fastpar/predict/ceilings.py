"""What this machine does at best: a copy and a matrix product."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastpar.doctor.trial import clock_for, interleave
from fastpar.kernels import linear


class Ceilings(NamedTuple):
    """What this machine does at best, measured by this process."""

    copy_gb_per_s: float  # bytes read plus bytes written
    matmul_tflop_per_s: float
    matmul: str  # "bf16 8192^3"


def measure_ceilings(device: str, quick: bool = False) -> Ceilings:
    """A copy of GBs and a square product, with the threads that torch uses now.

    Args:
        device: "cpu" or "cuda".
        quick: sizes that take a blink and are no ceilings: does the code run?
    """
    clock = clock_for(device)
    on_cuda = device == "cuda"
    numel = (1 << 28) if on_cuda else (1 << 20 if quick else 1 << 25)
    size = 8192 if on_cuda else (256 if quick else 1536)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    source, target = (
        torch.randn(numel, device=device, dtype=torch.float32),
        torch.empty(numel, device=device, dtype=torch.float32),
    )
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timings = interleave(
        {
            "copy": [lambda: target.copy_(source)],
            # torch's fp32 product is not the fastest on every CPU (kernels/linear.py).
            "torch": [lambda: a @ b],
            "linear": [lambda: linear(a, b)],
        },
        clock,
        budget_s=0.2 if quick else 1.5,
    )
    matmul_ms = min(timings["torch"].median_ms, timings["linear"].median_ms)
    return Ceilings(
        8 * numel / timings["copy"].median_ms / 1e6,
        2 * size**3 / matmul_ms / 1e9,
        f"{'bf16' if on_cuda else 'fp32'} {size}^3",
    )
