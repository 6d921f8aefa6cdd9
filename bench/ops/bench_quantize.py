"""Blockwise 8-bit codes of a gradient bucket, and back.

"eager" is the same arithmetic in plain torch, rounded to nearest: it has no stochastic rounding to
compare with, so that "fastpar seeded" and "fastpar error feedback" stand beside it with more work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Case, short
from fastpar.kernels import dequantize_blockwise, quantize_blockwise
from fastpar.kernels.reference import dequantize_blockwise_ref

TIME_LIMIT_S = {"cpu": 120, "cuda": 40}
BLOCK = 256


def eager_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = x.view(-1, BLOCK).float()
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = blocks.abs().amax(1) / top
    codes = blocks / scales[:, None]
    codes = codes.round() if dtype == torch.int8 else codes
    return codes.to(dtype).view(x.shape), scales


def eager_values(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.view(-1, BLOCK).float() * scales[:, None]).view(codes.shape)


def quantize_case(n: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        size = 16 * BLOCK if small else n
        x, error = (torch.randn(size, generator=generator, device=device) for _ in range(2))
        return x, error * 1e-3

    return Case(
        f"quantize {str(dtype).removeprefix('torch.')} {short(n)}",
        make_inputs,
        {
            "eager": lambda x, error: eager_codes(x, dtype),
            "fastpar": lambda x, error: quantize_blockwise(x, dtype=dtype, block=BLOCK),
            "fastpar seeded": lambda x, error: quantize_blockwise(
                x, dtype=dtype, block=BLOCK, seed=1
            ),
            "fastpar error feedback": lambda x, error: quantize_blockwise(
                x, dtype=dtype, block=BLOCK, seed=1, error=error
            ),
        },
        None,
        torch.float32,
        bytes_moved={"call": n * (5 + 4 / BLOCK)},
        own_bytes={"fastpar error feedback": n * (13 + 4 / BLOCK)},
        directions=("call",),
        check=lambda variant: check(variant, dtype, device),
    )


def check(variant: str, dtype: torch.dtype, device: str) -> None:
    """The values of the codes are within one level of x (half a level to nearest)."""
    if not variant.startswith("fastpar"):
        return
    generator = torch.Generator(device).manual_seed(5)
    x = torch.randn(64 * BLOCK, generator=generator, device=device)
    error = torch.zeros_like(x)
    how: dict[str, Any] = {} if variant == "fastpar" else {"seed": 1}
    if variant.endswith("feedback"):
        how["error"] = error
    codes, scales = quantize_blockwise(x, dtype=dtype, block=BLOCK, **how)
    values = eager_values(codes, scales)
    level = level_of(codes.float(), dtype).view(-1, BLOCK) * scales[:, None]
    share = 0.5 if variant == "fastpar" else 1.0
    # A tie may be off by the rounding of x / scale.
    bound = level.view(-1) * (share + 64 * torch.finfo(torch.float32).eps)
    off = (values - x).abs()
    assert (off <= bound).all(), f"codes: expected errors within {share} level, got {off.max()}"
    if "error" in how:
        torch.testing.assert_close(values + error, x, rtol=0, atol=2 * torch.finfo(x.dtype).eps * 8)


def level_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of a code to the next one away from zero."""
    if dtype == torch.int8:
        return torch.ones_like(codes)
    info = torch.finfo(dtype)
    exponent = torch.frexp(codes.abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(codes, info.eps), exponent)


def dequantize_case(n: int, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        size = 16 * BLOCK if small else n
        codes = torch.randint(
            -127, 128, (size,), generator=generator, device=device, dtype=torch.int8
        )
        return codes, torch.rand(size // BLOCK, generator=generator, device=device)

    return Case(
        f"dequantize int8 {short(n)}",
        make_inputs,
        {
            "eager": eager_values,
            "fastpar": lambda codes, scales: dequantize_blockwise(codes, scales, block=BLOCK),
        },
        lambda codes, scales: dequantize_blockwise_ref(codes, scales, block=BLOCK),
        torch.float32,
        bytes_moved={"call": n * (5 + 4 / BLOCK)},
        directions=("call",),
    )


def run(bench: Bench) -> None:
    n = BLOCK * (100 if bench.quick else 100_000)  # a bucket of 100 MB
    dtypes = (torch.int8, torch.float8_e4m3fn)
    cases = [quantize_case(n, dtype, bench.device) for dtype in dtypes]
    bench.run([*cases, dequantize_case(n, bench.device)])
