"""permute and combine at GPT-2's widths, beside index_select and index_add.

index_add of equal indices has no promised order on a GPU; "eager" is what others use.
"""

from __future__ import annotations

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels.cases import combine_case, permute_case

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}


def run(bench: Bench) -> None:
    N, C = of_device(bench, (16384, 768), (2048, 384), (256, 128))
    for case in (permute_case, combine_case):
        whole, few = (case(n, C, 8, 2) for n in (N, min(N, 256)))
        bench.run([timed(bench, whole, few)])
