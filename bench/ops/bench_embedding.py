"""embedding (token plus position) at GPT-2's widths, against F.embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import embedding
from fastpar.kernels.reference import embedding_ref

TIME_LIMIT_S = {"cpu": 300, "cuda": 60}


def eager(idx: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
    return F.embedding(idx, wte) + wpe[: idx.shape[1]]


def case(B: int, T: int, C: int, V: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        batch = min(B, 2) if small else B
        # Squares of uniform numbers: frequent and rare ids, as in a text.
        uniform = torch.rand(batch, T, generator=generator, device=device)
        idx = (uniform.square() * V).long().clamp_(max=V - 1)
        wte = torch.randn(V, C, generator=generator, device=device, dtype=dtype)
        wpe = torch.randn(T, C, generator=generator, device=device, dtype=dtype)
        return idx, wte.requires_grad_(), wpe.requires_grad_()

    rows, table = B * T * C * dtype.itemsize, V * C * dtype.itemsize
    return Case(
        f"embedding B={B} T={T} C={C} V={V}",
        make_inputs,
        {"eager": eager, "fastpar": embedding},
        embedding_ref,
        dtype,
        # forward reads a row and writes it; backward reads dy and writes the dense gradient.
        bytes_moved={"forward": 2 * rows, "forward+backward": 3 * rows + table},
    )


def run(bench: Bench) -> None:
    if bench.device == "cuda":
        shapes = [(16, 1024, 768, 50304), (16, 1024, 1600, 50304)]
    else:
        shapes = [(8, 256, 384, 50304), (8, 256, 384, 4096)]
    if bench.quick:
        shapes = [(2, 32, 64, 512)]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(*shape, dtype, bench.device) for shape in shapes])
