"""Causal attention on GPT-2's packed c_attn output, against SDPA with each backend pinned.

TFLOP/s count half of the T x T square, which is what a causal mask leaves: 2 products forward, 5
backward (Dao 2023, arXiv 2307.08691). On a GPU every case has 16384 tokens.

Dropout masks of different libraries differ, so only fastpar's is judged there; its rows stand
beside the same call without dropout, which the case without dropout judges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import Bench, Case
from bench.peers import packages
from bench.targets import Target, faster
from fastpar.kernels import Rng, attention_qkvpacked, make_key
from fastpar.kernels.reference import attention_ref

TIME_LIMIT_S = {"cpu": 600, "cuda": 160}
P = 0.1
BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
FASTEST = ("sdpa-flash", "sdpa-cudnn")  # what the targets name
WITHOUT = "fastpar without dropout"


def eager(qkv: Tensor, dropout_p: float = 0.0) -> Tensor:
    """What nanoGPT does: SDPA, which picks its backend by itself."""
    q, k, v = qkv.transpose(1, 3).unbind(2)  # [B, H, T, D] each
    o = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return o.transpose(1, 2)


def pinned(backend: SDPBackend, dropout_p: float) -> Callable[[Tensor], Tensor]:
    def function(qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return eager(qkv, dropout_p)

    return function


def backends(device: str, T: int) -> list[str]:
    """Those that this device has; math, which stores all scores, up to T = 1024."""
    found = ["sdpa-flash"] + (["sdpa-cudnn", "sdpa-efficient"] if device == "cuda" else [])
    return found + (["sdpa-math"] if T <= 1024 else [])


def targets(T: int, H: int, D: int, p: float, device: str) -> dict[str, list[Target]]:
    if device != "cuda":
        return {}
    if p:
        return {"backward": [faster(1 / 1.08, WITHOUT)]} if (T, D) == (1024, 64) else {}
    forward, backward = (1.15, 1.10) if (T, D) == (1024, 64) else (0.95, 0.95)
    if (T, D) == (1024, 128):
        return {}
    return {"forward": [faster(forward, *FASTEST)], "backward": [faster(backward, *FASTEST)]}


def case(B: int, H: int, T: int, D: int, p: float, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        # The fp64 oracle holds T x T scores, and draws its mask one Philox call after another.
        batch, heads = (1, 1 if p else 2) if small else (B, H)
        length = min(T, 384 if p else 4096) if small else T
        shape = (batch, length, 3, heads, D)
        qkv = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return (qkv.requires_grad_(),)

    drop: dict[str, Any] = {"dropout_p": p, "rng": Rng(make_key(1, 0, device), 0)} if p else {}

    def oracle(qkv: Tensor) -> Tensor:
        return attention_ref(*qkv.unbind(2), causal=True, **drop)

    stock: dict[str, Callable[..., Any]] = {"eager": functools.partial(eager, dropout_p=p)}
    stock |= {name: pinned(BACKENDS[name], p) for name in backends(device, T)}
    if device == "cuda":
        stock |= packages.attentions(p)
    ours: dict[str, Callable[..., Any]] = {
        "fastpar": functools.partial(attention_qkvpacked, **drop)
    }
    if p:
        ours[WITHOUT] = attention_qkvpacked
    forward = 4.0 * B * H * T * T * D / 2
    # forward+backward adds nothing to its parts, and a GPU's minutes are few.
    both = () if device == "cuda" and T > 1024 else ("forward+backward",)
    return Case(
        f"attention B={B} H={H} T={T} D={D}" + (f" dropout {p}" if p else ""),
        make_inputs,
        stock | ours,
        oracle,
        dtype,
        flops={
            "forward": forward,
            "backward": 2.5 * forward,
            "forward+backward": 3.5 * forward,
        },
        directions=("forward", "backward", *both),
        compiled=False,  # SDPA is one kernel already
        yardstick=oracle,  # in the row's dtype, as in the op's tests
        track_peak=True,
        unjudged=(*stock, WITHOUT) if p else (),
        targets=targets(T, H, D, p, device),
    )


def run(bench: Bench) -> None:
    if bench.device == "cuda":
        shapes = [(12, 1024, 64, 0.0), (12, 1024, 64, P), (25, 1024, 64, 0.0)]
        shapes += [(768 // D, T, D, 0.0) for T in (4096, 16384) for D in (64, 128)]
        shapes += [(6, 1024, 128, 0.0), (12, 4096, 64, P), (12, 16384, 64, P), (6, 1024, 128, P)]
        sizes = [(16384 // T, H, T, D, p) for H, T, D, p in shapes]
    else:
        sizes = [(8, 6, 256, 64, 0.0), (8, 6, 256, 64, P), (2, 12, 1024, 64, 0.0)]
        sizes += [(2, 6, 1024, 128, 0.0), (1, 2, 4096, 64, 0.0)]
    if bench.quick:
        sizes = [(1, 2, 64, 64, 0.0), (1, 2, 64, 64, P)]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    bench.run([case(*size, dtype, bench.device) for size in sizes])
