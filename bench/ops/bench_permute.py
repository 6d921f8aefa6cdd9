"""permute and combine at GPT-2's widths, beside index_select and index_add_.

index_add_ of equal indices has no promised order on a GPU; "eager" is what others use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import combine, permute
from fastpar.kernels.reference import combine_ref, permute_ref

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}
E, K = 8, 2


def cases(rows: int, C: int, dtype: torch.dtype, device: str) -> list[Case]:
    def choices(generator: torch.Generator, n: int) -> Tensor:
        scores = torch.rand(n, E, generator=generator, device=device)
        return scores.argsort(-1)[:, :K].contiguous()

    def of_permute(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        n = min(rows, 256) if small else rows
        x = torch.randn(n, C, generator=generator, device=device, dtype=dtype)
        return x.requires_grad_(), choices(generator, n)

    def of_combine(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        n = min(rows, 256) if small else rows
        x = torch.randn(n, C, generator=generator, device=device, dtype=dtype)
        sorted_rows, order, _ = permute(x, choices(generator, n), E)
        weights = torch.rand(n, K, generator=generator, device=device)
        return sorted_rows.requires_grad_(), weights.requires_grad_(), order

    def eager_permute(x: Tensor, experts: Tensor) -> Tensor:
        return x.index_select(0, experts.flatten().argsort(stable=True) // K)

    def eager_combine(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        scaled = x * weights.flatten()[order, None].to(x.dtype)
        return x.new_zeros(len(weights), C).index_add_(0, order // K, scaled)

    nbytes = float((1 + K) * rows * C * dtype.itemsize)
    moved = {"forward": nbytes, "forward+backward": 2 * nbytes}
    return [
        Case(
            f"permute N={rows} C={C} K={K}",
            of_permute,
            {"eager": eager_permute, "fastpar": lambda x, experts: permute(x, experts, E)[0]},
            lambda x, experts: permute_ref(x, experts, E)[0],
            dtype,
            bytes_moved=moved,
        ),
        Case(
            f"combine N={rows} C={C} K={K}",
            of_combine,
            {"eager": eager_combine, "fastpar": combine},
            combine_ref,
            dtype,
            bytes_moved=moved,
        ),
    ]


def run(bench: Bench) -> None:
    rows, C = (16384, 768) if bench.device == "cuda" else (2048, 384)
    if bench.quick:
        rows, C = 256, 128
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run(cases(rows, C, dtype, bench.device))
