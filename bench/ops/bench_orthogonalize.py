"""The orthogonal factor of GPT-2's matrices, beside torch.optim.Muon's function.

fastpar divides by an exact norm. torch's function rounds to bf16 on every device; "eager" is the
same products in the dtype of fastpar's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import _muon

from bench.harness import Bench, Case
from fastpar.kernels.orthogonalize import QUINTIC, orthogonalize
from fastpar.kernels.reference import orthogonalize_ref

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}


def eager(x: Tensor) -> Tensor:
    y = x / x.norm()
    y = y.t() if x.shape[0] > x.shape[1] else y
    for a, b, c in QUINTIC:
        gram = y @ y.t()
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.t() if x.shape[0] > x.shape[1] else y


def case(m: int, n: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        shape = (64, 64 * n // m) if small else (m, n)
        return (torch.randn(shape, generator=generator, device=device, dtype=dtype),)

    return Case(
        f"orthogonalize {'fp32' if dtype == torch.float32 else 'bf16'} {m}x{n}",
        make_inputs,
        {
            "eager": eager,
            "torch.optim.Muon": lambda x: _muon._zeropower_via_newtonschulz(x, QUINTIC[0], 5, 1e-7),
            "fastpar": lambda x: orthogonalize(x, coefficients=QUINTIC, dtype=dtype),
        },
        lambda x: orthogonalize_ref(x, coefficients=QUINTIC),
        dtype,
        bytes_moved={"call": 15.0 * (m * n + m * m) * dtype.itemsize},
        directions=("call",),
        compiled=False,  # five times three products: nothing to fuse
        unjudged=("torch.optim.Muon",) if dtype == torch.float32 else (),
    )


def run(bench: Bench) -> None:
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    sizes = ((64, 64), (64, 256)) if bench.quick else ((768, 768), (768, 3072), (1600, 6400))
    sizes = sizes[:2] if bench.device == "cpu" else sizes
    bench.run([case(m, n, dtype, bench.device) for m, n in sizes])
