"""bias_gelu at GPT-2's widths, against F.gelu(x + bias)."""

from __future__ import annotations

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels.cases import gelu

TIME_LIMIT_S = {"cpu": 400, "cuda": 80}


def run(bench: Bench) -> None:
    rows = of_device(bench, 16384, 2048, 64)
    for C in of_device(bench, (768, 1600, 1024, 1280), (384, 768), (384,)):
        width = 4 * C
        whole, few = (gelu(n, width) for n in (rows, min(rows, 512)))
        compiled = bench.device == "cpu" or width in (3072, 6400)  # they take most of a GPU run
        name = f"bias_gelu N={rows} F={width}"
        bench.run([timed(bench, whole, few, name=name, compiled=compiled)])
