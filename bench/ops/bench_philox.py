"""Counter-based dropout, against F.dropout (whose mask depends on the device's generator)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import Rng, dropout, keep_mask, make_key, quantize_p
from fastpar.kernels.reference import dropout_ref

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}
P = 0.1


def case(B: int, T: int, C: int, dtype: torch.dtype, device: str) -> Case:
    rng = Rng(make_key(1, 0, device), 0)
    scale = 256 / (256 - quantize_p(P))

    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        # The oracle draws its mask in Python, one Philox call after another.
        shape = (2, min(T, 32), C) if small else (B, T, C)
        x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return (x.requires_grad_(),)

    def eager(x: Tensor) -> Tensor:
        """The same mask, applied by torch."""
        return x * keep_mask(rng, P, x.shape).to(x.dtype) * scale

    one = B * T * C * dtype.itemsize
    return Case(
        f"dropout p={P} B={B} T={T} C={C}",
        make_inputs,
        {
            "eager": eager,
            "fastpar": lambda x: dropout(x, P, rng),
            "F.dropout": lambda x: F.dropout(x, P),
        },
        lambda x: dropout_ref(x, P, rng),
        dtype,
        # forward reads x and writes y; backward reads dy and writes dx, and draws the mask again.
        bytes_moved={"forward": 2 * one, "forward+backward": 4 * one},
        compiled=False,
        baseline="F.dropout",
        unjudged=("F.dropout",),
    )


def run(bench: Bench) -> None:
    shapes = [(16, 1024, 768)] if bench.device == "cuda" else [(8, 256, 384)]
    if bench.quick:
        shapes = [(2, 32, 64)]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(*shape, dtype, bench.device) for shape in shapes])
