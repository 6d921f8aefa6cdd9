"""Counter-based dropout, against F.dropout (whose mask depends on the device's generator)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench
from bench.ops.timed import of_device, timed
from fastpar.kernels import Rng, keep_mask, make_key, quantize_p
from fastpar.kernels.cases import P, dropout_case

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}


def run(bench: Bench) -> None:
    B, T, C = of_device(bench, (16, 1024, 768), (8, 256, 384), (2, 32, 64))
    rng, scale = Rng(make_key(1, 0, bench.device), 5), 256 / (256 - quantize_p(P))

    def eager(x: Tensor) -> Tensor:
        """The same mask, applied by torch."""
        return x * keep_mask(rng, P, x.shape).to(x.dtype) * scale

    # The oracle draws its mask in Python, one Philox call after another.
    whole, few = (dropout_case(s, bench.device) for s in ((B, T, C), (2, min(T, 32), C)))
    others: dict[str, Any] = {"eager": eager, "F.dropout": lambda x: F.dropout(x, P)}
    how: dict[str, Any] = {"baseline": "F.dropout", "unjudged": ("F.dropout",), "compiled": False}
    name = f"dropout p={P} B={B} T={T} C={C}"
    bench.run([timed(bench, whole, few, others, name=name, yardstick=eager, **how)])
