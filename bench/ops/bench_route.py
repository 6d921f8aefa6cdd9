"""route at a model's numbers of experts, beside torch.topk and softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness import Bench, Case
from fastpar.kernels import route
from fastpar.kernels.reference import route_ref

TIME_LIMIT_S = {"cpu": 120, "cuda": 30}


def case(rows: int, n_expert: int, k: int, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        n = min(rows, 256) if small else rows
        logits = torch.randn(n, n_expert, generator=generator, device=device)
        return (logits.requires_grad_(),)

    def eager(logits: Tensor) -> Tensor:
        values, _ = logits.topk(k, -1)
        return values.softmax(-1)

    nbytes = 4.0 * rows * n_expert
    return Case(
        f"route N={rows} E={n_expert} K={k}",
        make_inputs,
        {"eager": eager, "fastpar": lambda logits: route(logits, k)[0]},
        lambda logits: route_ref(logits, k)[0],
        torch.float32,
        bytes_moved={"forward": 3 * nbytes, "forward+backward": 6 * nbytes},
    )


def run(bench: Bench) -> None:
    rows = 256 if bench.quick else 16384 if bench.device == "cuda" else 2048
    bench.run([case(rows, n_expert, 2, bench.device) for n_expert in (8, 64)])
