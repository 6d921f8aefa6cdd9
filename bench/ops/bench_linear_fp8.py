"""linear(fp8=) at GPT-2's MLP, against F.linear; on a CPU emulated, for its numbers alone."""

from __future__ import annotations

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels.cases import linear_fp8_case

TIME_LIMIT_S = {"cpu": 200, "cuda": 60}


def run(bench: Bench) -> None:
    N, C = of_device(bench, (16384, 1600), (2048, 384), (256, 128))
    for layer, c, out in (("c_fc", C, 4 * C), ("mlp.c_proj", 4 * C, C)):
        whole, few = (linear_fp8_case(n, c, out, "row") for n in (N, min(N, 256)))
        name = f"linear_fp8 {layer} row N={N} {c}->{out}"
        bench.run([timed(bench, whole, few, name=name, compiled=False)])
