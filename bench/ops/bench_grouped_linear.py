"""grouped_linear at the layers of 8 experts, beside F.linear expert by expert and one dense product
of as many rows, which is what sparsity has to beat."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels import linear
from fastpar.kernels.cases import grouped_linear_case

TIME_LIMIT_S = {"cpu": 400, "cuda": 60}
E, K = 8, 2
DENSE = "one dense product"


def dense(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return linear(x, weight[0], bias[0])


def run(bench: Bench) -> None:
    rows, C = of_device(bench, (32768, 768), (4096, 384), (256, 128))
    for layer, c, out in (("c_fc", C, 2 * C), ("c_proj", 2 * C, C)):
        whole, few = (grouped_linear_case(n // K, c, out, E, K) for n in (rows, min(rows, 256)))
        how: dict[str, Any] = {
            "name": f"grouped_linear {layer} {whole.shape}",
            "unjudged": (DENSE,),
        }
        # counts are numbers of the host: nothing to compile
        bench.run([timed(bench, whole, few, {DENSE: dense}, compiled=False, **how)])
