"""layer_norm, rms_norm and what precedes them in a block (Linear's bias, dropout, residual sum), at
GPT-2's widths, against torch's norms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case
from bench.peers import packages
from bench.targets import Target, faster
from fastpar.kernels import (
    Rng,
    layer_norm,
    make_key,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from fastpar.kernels.reference import (
    layer_norm_ref,
    residual_layer_norm_ref,
    residual_rms_norm_ref,
    rms_norm_ref,
)

TIME_LIMIT_S = {"cpu": 900, "cuda": 150}
P = 0.1
COMPILED = (768, 1600)  # compilations take most of a GPU run
STOCK = ("eager", "torch.compile")


def layer_eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def rms_eager(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def plain_case(rows: int, C: int, dtype: torch.dtype, device: str, *, rms: bool) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        N = min(rows, 512) if small else rows
        x, *vectors = _draw(generator, device, dtype, (N, C), *[(C,)] * (1 if rms else 2))
        return tuple(t.requires_grad_() for t in (x, *_affine(vectors)))

    variants: dict[str, Callable[..., Any]] = {
        "eager": rms_eager if rms else layer_eager,
        "fastpar": rms_norm if rms else layer_norm,
    }
    wanted: dict[str, list[Target]] = {}
    if device == "cuda":
        variants |= packages.rms_norms() if rms else packages.layer_norms()
        if C in COMPILED and not rms:
            stock = faster(1.0, *STOCK)
            wanted = {
                "forward": [Target("ceiling", 90.0), stock],
                "backward": [Target("ceiling", 75.0), stock],
            }
    one = rows * C * dtype.itemsize  # one pass over a stream
    return Case(
        f"{'rms_norm' if rms else 'layer_norm'} N={rows} C={C}",
        make_inputs,
        variants,
        rms_norm_ref if rms else layer_norm_ref,
        dtype,
        # Read x, write y; then read x and dy, write dx.
        bytes_moved=_both(2.0 * one, 3.0 * one),
        directions=_directions(device),
        compiled=device == "cpu" or C in COMPILED,
        targets=wanted,
    )


def residual_case(
    rows: int, C: int, dtype: torch.dtype, device: str, *, p: float, rms: bool = False
) -> Case:
    """With p: Linear's bias, dropout, residual sum and norm; else residual sum and norm."""
    names = ["x", "residual", "weight"] + ([] if rms else ["bias"]) + (["x_bias"] if p else [])

    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        N = min(rows, 192 if p else 512) if small else rows
        shapes = [(N, C)] * 2 + [(C,)] * (len(names) - 2)
        x, residual, *vectors = _draw(generator, device, dtype, *shapes)
        return tuple(t.requires_grad_() for t in (x, residual, *_affine(vectors)))

    drop: dict[str, Any] = {"dropout_p": p, "rng": Rng(make_key(1, 0, device), 0)} if p else {}

    def by_name(op: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        return lambda *values: op(**dict(zip(names, values)), **settings)

    def eager(x, residual, weight, bias=None, x_bias=None):
        x = x if x_bias is None else F.dropout(x + x_bias, p)
        total = residual + x
        norm = rms_eager(total, weight) if rms else layer_eager(total, weight, bias)
        return norm, total

    oracle = by_name(residual_rms_norm_ref if rms else residual_layer_norm_ref, **drop)
    op = residual_rms_norm if rms else residual_layer_norm
    # Read x and residual, write y and the sum; then read the sum, dy and the sum's own gradient,
    # write the gradient of both inputs: one stream, or with dropout two.
    one = rows * C * dtype.itemsize
    wanted: dict[str, list[Target]] = {}
    if device == "cuda" and p and C in COMPILED:
        bound = [faster(1.5, "eager"), faster(1.1, "torch.compile")]
        wanted = {"forward": bound, "backward": bound}
    return Case(
        f"{'bias + dropout + ' if p else ''}{op.__name__} N={rows} C={C}",
        make_inputs,
        {"eager": by_name(eager), "fastpar": by_name(op, **drop)},
        oracle,
        dtype,
        bytes_moved=_both(4.0 * one, (5.0 if p else 4.0) * one),
        directions=_directions(device),
        compiled=device == "cpu" or C in COMPILED,
        yardstick=oracle if p else None,  # F.dropout draws another mask
        unjudged=("torch.compile",) if p else (),
        targets=wanted,
    )


def _draw(
    generator: torch.Generator, device: str, dtype: torch.dtype, *shapes: tuple[int, ...]
) -> list[Tensor]:
    draw = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
    return [draw(shape) for shape in shapes]


def _affine(vectors: list[Tensor]) -> list[Tensor]:
    """The weight near 1, the others near 0."""
    return [(i == 0) + 0.1 * v for i, v in enumerate(vectors)]


def _both(forward: float, backward: float) -> dict[str, float]:
    return {
        "forward": forward,
        "backward": backward,
        "forward+backward": forward + backward,
    }


def _directions(device: str) -> tuple[str, ...]:
    return ("forward", "backward") if device == "cuda" else ("forward", "forward+backward")


def run(bench: Bench) -> None:
    rows = {"cuda": 32768, "cpu": 2048}[bench.device]
    widths = {"cuda": (768, 1600, 1024, 1280), "cpu": (384, 768)}[bench.device]
    if bench.quick:
        rows, widths = 64, (128,)
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    kind = (dtype, bench.device)
    cases = []
    for C in widths:
        cases += [
            residual_case(rows, C, *kind, p=P),
            plain_case(rows, C, *kind, rms=False),
            residual_case(rows, C, *kind, p=0.0),
        ]
    cases += [
        plain_case(rows, widths[0], *kind, rms=True),
        residual_case(rows, widths[0], *kind, p=0.0, rms=True),
    ]
    bench.run(cases)
