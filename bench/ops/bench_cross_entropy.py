"""cross_entropy on stored logits of GPT-2's vocabulary, against F.cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from bench.peers import packages
from fastpar.kernels import cross_entropy
from fastpar.kernels.reference import cross_entropy_ref

TIME_LIMIT_S = {"cpu": 300, "cuda": 80}
IN_PLACE = "fastpar in place"


def eager(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Leaves are refused; a view is none, and copies nothing."""
    return cross_entropy(logits.view(logits.shape), targets, inplace=True)


def case(rows: int, V: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        N = min(rows, 256) if small else rows
        logits = torch.randn(N, V, generator=generator, device=device, dtype=dtype)
        targets = torch.randint(V, (N,), generator=generator, device=device)
        return logits.requires_grad_(), targets

    variants: dict[str, Callable[..., Any]] = {
        "eager": eager,
        "fastpar": cross_entropy,
        IN_PLACE: in_place,
    }
    if device == "cuda":
        variants |= packages.cross_entropies()
    one = float(rows * V * dtype.itemsize)
    return Case(
        f"cross_entropy N={rows} V={V}",
        make_inputs,
        variants,
        cross_entropy_ref,
        dtype,
        # Logits are read once, and their gradient written once.
        bytes_moved={"forward": one, "forward+backward": 2 * one},
        track_peak=True,
        in_place=(IN_PLACE, "liger"),
    )


def run(bench: Bench) -> None:
    shapes = [(16384, 50304)] if bench.device == "cuda" else [(512, 50304), (2048, 4096)]
    if bench.quick:
        shapes = [(64, 640)]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(*shape, dtype, bench.device) for shape in shapes])
