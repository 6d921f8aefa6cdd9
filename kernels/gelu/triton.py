"""Bias + GELU in Triton; formulas, what is saved and what is recomputed: __init__.py.

With u = x + bias in fp32, clamped where y and y' have reached their limits (|u| > 20), so that
infinities need no special case and NaN passes:
    tanh form  y = u * s,  y' = s + u * z'(u) * s * (1 - s)
               s = 1 / (1 + 2^-z),  z = log2(e) * 2k * (u + 0.044715 u^3), z' without log2(e)
               backward takes s and 1 - s from 2^-|z|: neither is a difference of nearby numbers
    erf form   y = u * P(u),  y' = P(u) + u * 2^(-log2(e) u^2 / 2) / sqrt(2 pi)
               P(u) = (1 + erf(u / sqrt(2))) / 2

Both passes move each element once and are limited by that, so tiles only have to keep enough
16-byte accesses in flight: ROWS x BLOCK_C with 16 elements per thread. Forward has a program per
tile. Backward walks down a column of tiles and keeps the bias's gradient, the sum of dx, in
registers: each program writes one row of partials, and a second kernel adds these in a fixed order.
The number of row ranges follows the number of multiprocessors, so dbias has the same bits on the
same GPU.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.gelu import TABLE
from fastpar.kernels.triton_launch import cdiv, gpu_arch, launch, meta, next_power_of_2, sm_count

_TWO_K = 2 * math.sqrt(2 / math.pi)
_DA, _DB = tl.constexpr(_TWO_K), tl.constexpr(_TWO_K * 3 * 0.044715)  # z' = _DA + _DB u^2
_A = tl.constexpr(_TWO_K * math.log2(math.e))  # z = u (_A + _B u^2)
_B = tl.constexpr(_TWO_K * math.log2(math.e) * 0.044715)
_EXPONENT = tl.constexpr(-math.log2(math.e) / 2)  # 2^(u^2 _EXPONENT) = exp(-u^2 / 2)
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_PDF_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))


@triton.jit
def _gelu(u, TANH: tl.constexpr):
    u = tl.where(u < -20.0, -20.0, u)
    if TANH:
        return u / (1.0 + tl.exp2(-u * (u * u * _B + _A)))
    else:
        return 0.5 * u * (1.0 + tl.erf(u * _SQRT_HALF))


@triton.jit
def _gelu_grad(u, TANH: tl.constexpr):
    u = tl.where(u < -20.0, -20.0, u)
    u = tl.where(u > 20.0, 20.0, u)
    if TANH:
        e = tl.exp2(-tl.abs(u) * (u * u * _B + _A))
        near = 1.0 / (1.0 + e)  # sigmoid of |z|
        far = e * near  # and of -|z|
        slope = u * (u * u * _DB + _DA) * near * far
        return tl.where(u > 0.0, near, far) + slope
    else:
        pdf = tl.exp2(u * u * _EXPONENT) * _PDF_0
        return 0.5 * (1.0 + tl.erf(u * _SQRT_HALF)) + u * pdf


@triton.jit(do_not_specialize=["N"])
def _bias_gelu_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, N, C, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, TANH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < N)[:, None] & (cols < C)[None, :]
    offset = rows[:, None] * C + cols[None, :]
    u = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offset, _gelu(u, TANH).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "rows_per_program"])
def _bias_gelu_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, N, C, rows_per_program, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, TANH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    part = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    first = part.to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
        total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & (cols < C)[None, :]
        offset = rows[:, None] * C + cols[None, :]
        u = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            u += bias[None, :]
        dx = dy * _gelu_grad(u, TANH)
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_BIAS:
            total += dx
    if HAS_BIAS:
        at = partial_ptr + part.to(tl.int64) * C + cols
        tl.store(at, tl.sum(total, 0), mask=cols < C)


@triton.jit(do_not_specialize=["parts"])
def _bias_gelu_bwd_dbias_kernel(
    partial_ptr, dbias_ptr, parts, C, ROWS: tl.constexpr, BLOCK_C: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(0, parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < parts)[:, None] & (cols < C)[None, :]
        offset = rows[:, None].to(tl.int64) * C + cols[None, :]
        total += tl.load(partial_ptr + offset, mask=inside, other=0.0)
    tl.store(dbias_ptr + cols, tl.sum(total, 0).to(dbias_ptr.dtype.element_ty), mask=cols < C)


@functools.cache
def block_columns(C: int) -> int:
    """Columns of a tile: the widest that divides C, else that leaves at most 1/16 of it unused."""
    for spare in (0, C // 16):
        for width in (512, 256, 128):
            if cdiv(C, width) * width <= C + spare:
                return width
    return min(128, max(16, next_power_of_2(C)))


def _rows_and_columns(x: Tensor) -> tuple[int, int]:
    C = x.shape[-1] if x.dim() else 1
    return x.numel() // max(1, C), C


def bias_gelu_fwd(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """y = gelu(x + bias)."""
    x = x.contiguous()
    y = torch.empty_like(x)
    N, C = _rows_and_columns(x)
    how, width = TABLE.get(gpu_arch(x.device)), block_columns(C)
    rows = how.tile // width
    launch(
        _bias_gelu_fwd_kernel, (cdiv(N, rows) * cdiv(C, width),),
        x, x if bias is None else bias.contiguous(), y, N, C,
        ROWS=rows, BLOCK_C=width, TANH=tanh, HAS_BIAS=bias is not None, num_warps=how.num_warps,
    )  # fmt: skip
    return y


def bias_gelu_bwd(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """dx and dbias ([0] fp32 without a bias)."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    N, C = _rows_and_columns(x)
    how, width = TABLE.get(gpu_arch(x.device)), block_columns(C)
    rows, blocks = how.tile // width, cdiv(C, width)
    # Equal ranges of whole tiles, as many as are resident at once.
    parts = max(1, how.programs_per_sm * sm_count(x.device) // max(1, blocks))
    rows_per_program = cdiv(cdiv(N, rows), parts) * rows
    parts = cdiv(N, rows_per_program) if N else 0
    partial = x.new_empty((parts, C) if bias is not None else (0,), dtype=torch.float32)
    launch(
        _bias_gelu_bwd_kernel, (parts * blocks,),
        dy, x, x if bias is None else bias.contiguous(), dx, partial, N, C, rows_per_program,
        ROWS=rows, BLOCK_C=width, TANH=tanh, HAS_BIAS=bias is not None, num_warps=how.num_warps,
    )  # fmt: skip
    if bias is None:
        return dx, partial
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    launch(
        _bias_gelu_bwd_dbias_kernel, (cdiv(C, 32),),
        partial, dbias, parts, C,
        ROWS=32, BLOCK_C=32, num_warps=4,
    )  # fmt: skip
    return dx, dbias


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """(label, call on meta tensors) of the variants that GPT-2 uses, for ahead-of-time checks."""

    def calls(
        label: str, C: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, tanh: bool
    ) -> list[tuple[str, Callable[[], Any]]]:
        x = meta(16384, C, dtype=dtype)
        bias = None if bias_dtype is None else meta(C, dtype=bias_dtype)
        return [
            (f"fwd {label}", lambda: bias_gelu_fwd(x, bias, tanh)),
            (f"bwd {label}", lambda: bias_gelu_bwd(x, x, bias, tanh)),
        ]

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        *calls("tanh bfloat16 C=3072", 3072, bf16, bf16, True),
        *calls("tanh bfloat16 C=6400", 6400, bf16, bf16, True),
        *calls("erf bfloat16 C=3072 fp32 bias", 3072, bf16, fp32, False),
        *calls("tanh float16 C=3072", 3072, fp16, fp16, True),
        *calls("tanh float32 C=3072", 3072, fp32, fp32, True),
        *calls("tanh bfloat16 C=6400 no bias", 6400, bf16, None, True),
    ]
