"""linear_cross_entropy at GPT-2's head, against full logits and the chunked ops of others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from bench.peers import packages
from bench.targets import Target, faster
from fastpar.kernels.cases import loss_of_products

TIME_LIMIT_S = {"cpu": 600, "cuda": 140}
FEW_ROWS = 16384  # the forward alone is measured up to here
EAGER = ("eager", "torch.compile")


def run(bench: Bench) -> None:
    on_gpu = [(N, C, 50304) for N in (16384, 32768) for C in (768, 1600)]
    on_cpu = [(2048, 384, 50304), (2048, 256, 4096)]
    others: dict[str, Callable[..., Any]] = {}
    wanted: list[Target] = []
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch >= 2.13
        options = torch.nn.LinearCrossEntropyOptions()  # without them it makes full logits
        others["torch chunked"] = functools.partial(F.linear_cross_entropy, options=options)
    if bench.device == "cuda":
        others |= packages.linear_cross_entropies()
        wanted = [*(faster(1.0, name) for name in EAGER), Target("memory", 0.15, ("eager",))]
    for N, C, V in of_device(bench, on_gpu, on_cpu, [(128, 64, 640)]):
        whole, few = (loss_of_products(n, C, V, how="every row") for n in (N, min(N, 64)))
        how: dict[str, Any] = {"track_peak": True, "targets": {"forward+backward": wanted}}
        how["directions"] = ("forward",) * (N <= FEW_ROWS) + ("forward+backward",)
        name = f"linear_cross_entropy N={N} C={C} V={V}"
        bench.run([timed(bench, whole, few, others, name=name, **how)])
