"""The orthogonal factor of GPT-2's matrices, beside torch.optim.Muon's function.

fastpar divides by an exact norm. torch's function rounds to bf16 on every device; "eager" is the
same products in the dtype of fastpar's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

from bench.harness import Bench
from bench.ops.timed import dtype_of, of_device, timed
from fastpar.kernels.cases import orthogonal_case
from fastpar.kernels.orthogonalize import QUINTIC

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}
MUON = "torch.optim.Muon"


def muon(x: Tensor) -> Tensor:
    return _muon._zeropower_via_newtonschulz(x, QUINTIC[0], 5, 1e-7)


def eager(x: Tensor) -> Tensor:
    y = x / x.norm()
    y = y.t() if x.shape[0] > x.shape[1] else y
    for a, b, c in QUINTIC:
        gram = y @ y.t()
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.t() if x.shape[0] > x.shape[1] else y


def run(bench: Bench) -> None:
    on_cpu = [(768, 768), (768, 3072)]
    wide = dtype_of(bench) == torch.float32
    for m, n in of_device(bench, [*on_cpu, (1600, 6400)], on_cpu, [(64, 64), (64, 256)]):
        shapes = (m, n), (64, 64 * n // m)
        whole, few = (orthogonal_case(a, b, QUINTIC) for a, b in shapes)
        how: dict[str, Any] = {
            "directions": ("call",),
            "compiled": False,
            "unjudged": (MUON,) * wide,
        }
        name = f"orthogonalize {'fp32' if wide else 'bf16'} {m}x{n}"
        bench.run([timed(bench, whole, few, {"eager": eager, MUON: muon}, name=name, **how)])
