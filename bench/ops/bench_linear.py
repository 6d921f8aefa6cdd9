"""linear at GPT-2's projections, against F.linear."""

from __future__ import annotations

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels.cases import linear_case

TIME_LIMIT_S = {"cpu": 400, "cuda": 50}


def run(bench: Bench) -> None:
    N, C = of_device(bench, (16384, 768), (2048, 384), (256, 128))
    shapes = {"c_attn": (C, 3 * C), "attn.c_proj": (C, C), "c_fc": (C, 4 * C)}
    for layer, shape in (shapes | {"mlp.c_proj": (4 * C, C)}).items():
        whole, few = (linear_case(n, *shape) for n in (N, min(N, 256)))
        # a product is a library call under torch.compile too
        bench.run([timed(bench, whole, few, name=f"linear {layer} {whole.shape}", compiled=False)])
