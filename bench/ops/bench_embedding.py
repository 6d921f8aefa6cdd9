"""embedding (token plus position) at GPT-2's widths, against F.embedding."""

from __future__ import annotations

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels.cases import embedding_case

TIME_LIMIT_S = {"cpu": 300, "cuda": 60}


def run(bench: Bench) -> None:
    on_gpu = [(16, 1024, C, 50304) for C in (768, 1600)]
    on_cpu = [(8, 256, 384, V) for V in (50304, 4096)]
    for B, T, C, V in of_device(bench, on_gpu, on_cpu, [(2, 32, 64, 512)]):
        whole, few = (embedding_case(b, T, C, V, 0.0, bench.device) for b in (B, min(B, 2)))
        bench.run([timed(bench, whole, few)])
