"""linear_cross_entropy at GPT-2's head, against full logits and the chunked ops of others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from bench.peers import packages
from bench.targets import Target, faster
from fastpar.kernels import linear_cross_entropy
from fastpar.kernels.reference import linear_cross_entropy_ref

TIME_LIMIT_S = {"cpu": 600, "cuda": 140}
FEW_ROWS = 16384  # the forward alone is measured up to here


def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def case(rows: int, C: int, V: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        N = min(rows, 64) if small else rows
        x = torch.randn(N, C, generator=generator, device=device, dtype=dtype)
        weight = torch.randn(V, C, generator=generator, device=device, dtype=dtype) * C**-0.5
        targets = torch.randint(V, (N,), generator=generator, device=device)
        return x.requires_grad_(), weight.requires_grad_(), targets

    variants: dict[str, Callable[..., Any]] = {"eager": eager, "fastpar": linear_cross_entropy}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch >= 2.13
        options = torch.nn.LinearCrossEntropyOptions()  # without them it makes full logits
        variants["torch chunked"] = functools.partial(F.linear_cross_entropy, options=options)
    wanted: list[Target] = []
    if device == "cuda":
        variants |= packages.linear_cross_entropies()
        wanted = [faster(1.0, "eager"), faster(1.0, "torch.compile")]
        wanted.append(Target("memory", 0.15, ("eager",)))
    product = 2.0 * rows * C * V
    return Case(
        f"linear_cross_entropy N={rows} C={C} V={V}",
        make_inputs,
        variants,
        linear_cross_entropy_ref,
        dtype,
        flops={"forward": product, "forward+backward": 3 * product},
        directions=(("forward",) if rows <= FEW_ROWS else ()) + ("forward+backward",),
        track_peak=True,
        targets={"forward+backward": wanted},
    )


def run(bench: Bench) -> None:
    if bench.device == "cuda":
        shapes = [(N, C, 50304) for N in (16384, 32768) for C in (768, 1600)]
    else:
        shapes = [(2048, 384, 50304), (2048, 256, 4096)]
    if bench.quick:
        shapes = [(128, 64, 640)]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(*shape, dtype, bench.device) for shape in shapes])
