"""Causal attention on GPT-2's packed c_attn output, against SDPA with each backend pinned.

TFLOP/s count half of the T x T square, which is what a causal mask leaves: 2 products forward, 5
backward (Dao 2023, arXiv 2307.08691). On a GPU every case has 16384 tokens.

Dropout masks of different libraries differ, so only fastpar's is judged there; its rows stand
beside the same call without dropout, which the case without dropout judges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import Bench, Case
from bench.ops.timed import of_device, timed
from bench.peers import packages
from bench.targets import Target, faster
from fastpar.kernels import attention_qkvpacked
from fastpar.kernels.cases import P, attention_case

TIME_LIMIT_S = {"cpu": 600, "cuda": 160}
BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
FASTEST = ("sdpa-flash", "sdpa-cudnn")  # what the targets name
WITHOUT = "fastpar without dropout"


def pinned(backend: SDPBackend, stock: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def function(qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return stock(qkv)

    return function


def targets(T: int, D: int, p: float, device: str) -> dict[str, list[Target]]:
    if device != "cuda" or (T, D) == (1024, 128):
        return {}
    if p:
        return {"backward": [faster(1 / 1.08, WITHOUT)]} if (T, D) == (1024, 64) else {}
    forward, backward = (1.15, 1.10) if (T, D) == (1024, 64) else (0.95, 0.95)
    return {"forward": [faster(forward, *FASTEST)], "backward": [faster(backward, *FASTEST)]}


def case(bench: Bench, B: int, H: int, T: int, D: int, p: float) -> Case:
    on_gpu = bench.device == "cuda"
    # The fp64 oracle holds T x T scores, and draws its mask one Philox call after another.
    sizes = (B, T, H), (1, min(T, 384 if p else 4096), 1 if p else 2)
    whole, few = (attention_case(b, t, D, h, bench.device, p=p, packed=True) for b, t, h in sizes)
    assert whole.stock is not None
    # math stores all scores: up to T = 1024
    able = ["sdpa-flash", *["sdpa-cudnn", "sdpa-efficient"] * on_gpu, *["sdpa-math"] * (T <= 1024)]
    stock: dict[str, Callable[..., Any]] = {n: pinned(BACKENDS[n], whole.stock) for n in able}
    stock |= packages.attentions(p) if on_gpu else {}
    # forward+backward adds nothing to its parts, and a GPU's minutes are few.
    both = () if on_gpu and T > 1024 else ("forward+backward",)
    return timed(
        bench,
        whole,
        few,
        {**stock, **({WITHOUT: attention_qkvpacked} if p else {})},
        name=f"attention B={B} H={H} T={T} D={D}" + (f" dropout {p}" if p else ""),
        directions=("forward", "backward", *both),
        compiled=False,  # SDPA is one kernel already
        track_peak=True,
        unjudged=(*stock, WITHOUT) if p else (),
        targets=targets(T, D, p, bench.device),
    )


def run(bench: Bench) -> None:
    shapes = [(12, 1024, 64, 0.0), (12, 1024, 64, P), (25, 1024, 64, 0.0)]
    shapes += [(768 // D, T, D, 0.0) for T in (4096, 16384) for D in (64, 128)]
    shapes += [(6, 1024, 128, 0.0), (12, 4096, 64, P), (12, 16384, 64, P), (6, 1024, 128, P)]
    on_gpu = [(16384 // T, H, T, D, p) for H, T, D, p in shapes]
    on_cpu = [(8, 6, 256, 64, 0.0), (8, 6, 256, 64, P), (2, 12, 1024, 64, 0.0)]
    on_cpu += [(2, 6, 1024, 128, 0.0), (1, 2, 4096, 64, 0.0)]
    quick = [(1, 2, 64, 64, 0.0), (1, 2, 64, 64, P)]
    for sizes in of_device(bench, on_gpu, on_cpu, quick):
        bench.run([case(bench, *sizes)])
