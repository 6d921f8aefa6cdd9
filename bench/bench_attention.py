"""Causal attention on GPT-2's packed c_attn output, against SDPA with each backend pinned.

TFLOP/s count half of the T x T square, which is what a causal mask leaves, and 3.5 times the
forward's work for forward+backward (Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import Bench, Case
from fastpar.kernels import attention_qkvpacked
from fastpar.kernels.reference import attention_ref

TIME_LIMIT_S = {"cpu": 600, "cuda": 100}
BACKENDS = {
    "cuda": {
        "sdpa flash": SDPBackend.FLASH_ATTENTION,
        "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
        "sdpa math": SDPBackend.MATH,
    },
    "cpu": {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa math": SDPBackend.MATH},
}


def eager(qkv: Tensor) -> Tensor:
    """What nanoGPT does: SDPA, which picks its backend by itself."""
    q, k, v = qkv.transpose(1, 3).unbind(2)  # [B, H, T, D] each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def pinned(backend: SDPBackend) -> Callable[[Tensor], Tensor]:
    def function(qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return eager(qkv)

    return function


def oracle(qkv: Tensor) -> Tensor:
    q, k, v = qkv.unbind(2)
    return attention_ref(q, k, v, causal=True)


def case(B: int, H: int, T: int, D: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        # One sample and two heads: the fp64 oracle holds T x T scores.
        batch, heads = (1, 2) if small else (B, H)
        shape = (batch, T, 3, heads, D)
        qkv = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return (qkv.requires_grad_(),)

    variants: dict[str, Callable[..., Any]] = {"eager": eager, "fastpar": attention_qkvpacked}
    variants |= {name: pinned(backend) for name, backend in BACKENDS[device].items()}
    forward = 4.0 * B * H * T * T * D / 2
    return Case(
        f"attention B={B} H={H} T={T} D={D}",
        make_inputs,
        variants,
        oracle,
        dtype,
        flops={"forward": forward, "forward+backward": 3.5 * forward},
        compiled=False,  # SDPA is one kernel already
        yardstick=oracle,  # in the row's dtype, as in the op's tests
        track_peak=True,
    )


def run(bench: Bench) -> None:
    if bench.device == "cuda":
        shapes = [(16, 12, 1024, 64), (16, 25, 1024, 64), (4, 12, 4096, 64)]
        shapes += [(16, 6, 1024, 128), (4, 6, 4096, 128)]
    else:
        shapes = [(8, 6, 256, 64), (4, 12, 256, 64), (2, 12, 1024, 64)]
    if bench.quick:
        shapes = [(1, 2, 64, 64)]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(*shape, dtype, bench.device) for shape in shapes])
