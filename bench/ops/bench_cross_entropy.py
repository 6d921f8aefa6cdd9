"""cross_entropy on stored logits of GPT-2's vocabulary, against F.cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from bench.peers import packages
from fastpar.kernels import cross_entropy
from fastpar.kernels.cases import loss_of_logits

TIME_LIMIT_S = {"cpu": 300, "cuda": 80}
IN_PLACE = "fastpar in place"


def in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Leaves are refused; a view is none, and copies nothing."""
    return cross_entropy(logits.view(logits.shape), targets, inplace=True)


def run(bench: Bench) -> None:
    others: dict[str, Callable[..., Any]] = {IN_PLACE: in_place}
    others |= packages.cross_entropies() if bench.device == "cuda" else {}
    for N, V in of_device(bench, [(16384, 50304)], [(512, 50304), (2048, 4096)], [(64, 640)]):
        whole, few = (loss_of_logits(n, V, how="every row") for n in (N, min(N, 256)))
        how: dict[str, Any] = {"track_peak": True, "in_place": (IN_PLACE, "liger")}
        bench.run([timed(bench, whole, few, others, name=f"cross_entropy N={N} V={V}", **how)])
