"""route at a model's numbers of experts, beside torch.topk and softmax."""

from __future__ import annotations

import torch

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels.cases import route_case

TIME_LIMIT_S = {"cpu": 120, "cuda": 30}


def run(bench: Bench) -> None:
    N = of_device(bench, 16384, 2048, 256)
    for E in (8, 64):
        whole, few = (route_case(n, E, 2) for n in (N, min(N, 256)))
        bench.run([timed(bench, whole, few, dtype=torch.float32)])
