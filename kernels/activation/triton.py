"""Bias and activation in Triton; formulas, what is saved and what is recomputed: __init__.py.

With u = x + bias in fp32, clamped where y and y' have reached their limits (|u| > 20), so that
infinities need no special case and NaN passes:
    tanh form  y = u * s,  y' = s + u * z'(u) * s * (1 - s)
               s = 1 / (1 + 2^-z),  z = log2(e) * 2k * (u + 0.044715 u^3), z' without log2(e)
               backward takes s and 1 - s from 2^-|z|: neither is a difference of nearby numbers
    erf form   y = u * P(u),  y' = P(u) + u * 2^(-log2(e) u^2 / 2) / sqrt(2 pi)
               P(u) = (1 + erf(u / sqrt(2))) / 2
swiglu takes the sigmoids of the gate and of its negative from 2^-|z|, too, z = log2(e) * gate.

Both passes move each element once and are limited by that, so tiles only have to keep enough
16-byte accesses in flight: ROWS x BLOCK_C with 16 elements per thread. Forward has a program per
tile. Backward walks down a column of tiles, copies the next two to shared memory while it works on
one (in fp32 the next one: swiglu's copies of two would take the registers of a third program on a
multiprocessor), and keeps the bias's gradient, the sum of dx, in registers: each program writes one
row of partials, and a second kernel adds these in a fixed order. The number of row ranges follows
the number of multiprocessors, so dbias has the same bits on the same GPU.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.activation import GELU, GELU_ERF, RELU2, SWIGLU, TABLE
from fastpar.kernels.triton_launch import cdiv, gpu_arch, launch, meta, next_power_of_2, sm_count

_TWO_K = 2 * math.sqrt(2 / math.pi)
_DA, _DB = tl.constexpr(_TWO_K), tl.constexpr(_TWO_K * 3 * 0.044715)  # z' = _DA + _DB u^2
_A = tl.constexpr(_TWO_K * math.log2(math.e))  # z = u (_A + _B u^2)
_B = tl.constexpr(_TWO_K * math.log2(math.e) * 0.044715)
_LOG2_E = tl.constexpr(math.log2(math.e))
_EXPONENT = tl.constexpr(-math.log2(math.e) / 2)  # 2^(u^2 _EXPONENT) = exp(-u^2 / 2)
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_PDF_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))


_GELU, _RELU2, _SWIGLU = (tl.constexpr(kind) for kind in (GELU, RELU2, SWIGLU))


@triton.jit
def _value(u, KIND: tl.constexpr):
    """y of single elements."""
    if KIND == _RELU2:
        u = tl.where(u < 0.0, 0.0, u)
        y = u * u
    else:
        u = tl.where(u < -20.0, -20.0, u)
        if KIND == _GELU:
            y = u / (1.0 + tl.exp2(-u * (u * u * _B + _A)))
        else:
            y = 0.5 * u * (1.0 + tl.erf(u * _SQRT_HALF))
    return y


@triton.jit
def _slope(u, KIND: tl.constexpr):
    """y' of single elements."""
    if KIND == _RELU2:
        slope = 2.0 * tl.where(u < 0.0, 0.0, u)
    else:
        u = tl.where(u < -20.0, -20.0, u)
        u = tl.where(u > 20.0, 20.0, u)
        if KIND == _GELU:
            e = tl.exp2(-tl.abs(u) * (u * u * _B + _A))
            near = 1.0 / (1.0 + e)  # sigmoid of |z|
            far = e * near  # and of -|z|
            more = u * (u * u * _DB + _DA) * near * far
            slope = tl.where(u > 0.0, near, far) + more
        else:
            pdf = tl.exp2(u * u * _EXPONENT) * _PDF_0
            slope = 0.5 * (1.0 + tl.erf(u * _SQRT_HALF)) + u * pdf
    return slope


@triton.jit
def _sigmoids(gate):
    e = tl.exp2(-tl.abs(gate) * _LOG2_E)
    one = 1.0 / (1.0 + e)
    return tl.where(gate > 0.0, one, e * one), tl.where(gate > 0.0, e * one, one)


@triton.jit
def _row(ptr, cols, C):
    return tl.load(ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]


# C columns of y; x has as many, with swiglu twice.


@triton.jit(do_not_specialize=["N"])
def _activation_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, N, C, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < N)[:, None] & (cols < C)[None, :]
    offset = rows[:, None] * C + cols[None, :]
    at = x_ptr + offset
    if KIND == _SWIGLU:
        at += rows[:, None] * C
    u = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += _row(bias_ptr, cols, C)
    if KIND == _SWIGLU:
        up = tl.load(at + C, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += _row(bias_ptr + C, cols, C)
        y = u * _sigmoids(u)[0] * up
    else:
        y = _value(u, KIND)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "rows_per_program"])
def _activation_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, N, C, rows_per_program, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    part = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    first = part.to(tl.int64) * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    if HAS_BIAS:
        bias = _row(bias_ptr, cols, C)
        total = tl.zeros([ROWS, BLOCK_C], tl.float32)
        if KIND == _SWIGLU:
            up_bias = _row(bias_ptr + C, cols, C)
            up_total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    STAGES: tl.constexpr = 2 if x_ptr.dtype.element_ty == tl.float32 else 3
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & (cols < C)[None, :]
        offset = rows[:, None] * C + cols[None, :]
        in_x = offset
        if KIND == _SWIGLU:
            in_x += rows[:, None] * C
        u = tl.load(x_ptr + in_x, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            u += bias
        if KIND == _SWIGLU:
            up = tl.load(x_ptr + C + in_x, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                up += up_bias
            near, far = _sigmoids(u)
            dup = dy * (u * near)
            dx = dy * up * (near * (1.0 + u * far))
            tl.store(dx_ptr + C + in_x, dup.to(dx_ptr.dtype.element_ty), mask=inside)
            if HAS_BIAS:
                up_total += dup
        else:
            dx = dy * _slope(u, KIND)
        tl.store(dx_ptr + in_x, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_BIAS:
            total += dx
    if HAS_BIAS:
        at = partial_ptr + part.to(tl.int64) * C + cols
        if KIND == _SWIGLU:
            at += part.to(tl.int64) * C
            tl.store(at + C, tl.sum(up_total, 0), mask=cols < C)
        tl.store(at, tl.sum(total, 0), mask=cols < C)


@triton.jit(do_not_specialize=["parts"])
def _activation_bwd_dbias_kernel(
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


def _rows_and_columns(x: Tensor, kind: int) -> tuple[int, int]:
    """Of y."""
    C = x.shape[-1] if x.dim() else 1
    return x.numel() // max(1, C), C // 2 if kind == SWIGLU else C


def activation_fwd(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """y of x + bias."""
    x = x.contiguous()
    N, C = _rows_and_columns(x, kind)
    y = x.new_empty((*x.shape[:-1], C)) if kind == SWIGLU else torch.empty_like(x)
    how, width = TABLE.get(gpu_arch(x.device)), block_columns(C)
    rows = how.tile // width
    launch(
        _activation_fwd_kernel, (cdiv(N, rows) * cdiv(C, width),),
        x, x if bias is None else bias.contiguous(), y, N, C,
        ROWS=rows, BLOCK_C=width, KIND=kind, HAS_BIAS=bias is not None, num_warps=how.num_warps,
    )  # fmt: skip
    return y


def activation_bwd(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """dx and dbias ([0] fp32 without a bias)."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    N, C = _rows_and_columns(x, kind)
    how, width = TABLE.get(gpu_arch(x.device)), block_columns(C)
    rows, blocks = how.tile // width, cdiv(C, width)
    # Equal ranges of whole tiles, as many as are resident at once.
    parts = max(1, how.programs_per_sm * sm_count(x.device) // max(1, blocks))
    rows_per_program = cdiv(cdiv(N, rows), parts) * rows
    parts = cdiv(N, rows_per_program) if N else 0
    wide = x.shape[-1] if bias is not None else 0
    partial = x.new_empty((parts, wide) if wide else (0,), dtype=torch.float32)
    launch(
        _activation_bwd_kernel, (parts * blocks,),
        dy, x, x if bias is None else bias.contiguous(), dx, partial, N, C, rows_per_program,
        ROWS=rows, BLOCK_C=width, KIND=kind, HAS_BIAS=bias is not None, num_warps=how.num_warps,
    )  # fmt: skip
    if bias is None:
        return dx, partial
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    launch(
        _activation_bwd_dbias_kernel, (cdiv(wide, 32),),
        partial, dbias, parts, wide,
        ROWS=32, BLOCK_C=32, num_warps=4,
    )  # fmt: skip
    return dx, dbias


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """(label, call on meta tensors) of the variants that models use, for ahead-of-time checks."""

    def calls(
        label: str, C: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, kind: int
    ) -> list[tuple[str, Callable[[], Any]]]:
        x = meta(16384, C, dtype=dtype)
        dy = meta(16384, C // 2, dtype=dtype) if kind == SWIGLU else x
        bias = None if bias_dtype is None else meta(C, dtype=bias_dtype)
        return [
            (f"fwd {label}", lambda: activation_fwd(x, bias, kind)),
            (f"bwd {label}", lambda: activation_bwd(dy, x, bias, kind)),
        ]

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        *calls("tanh bfloat16 C=3072", 3072, bf16, bf16, GELU),
        *calls("tanh bfloat16 C=6400", 6400, bf16, bf16, GELU),
        *calls("erf bfloat16 C=3072 fp32 bias", 3072, bf16, fp32, GELU_ERF),
        *calls("tanh float16 C=3072", 3072, fp16, fp16, GELU),
        *calls("tanh float32 C=3072", 3072, fp32, fp32, GELU),
        *calls("tanh bfloat16 C=6400 no bias", 6400, bf16, None, GELU),
        *calls("relu2 bfloat16 C=3072 no bias", 3072, bf16, None, RELU2),
        *calls("relu2 float32 C=3072", 3072, fp32, fp32, RELU2),
        *calls("swiglu bfloat16 C=2*8192 no bias", 16384, bf16, None, SWIGLU),
        *calls("swiglu float32 C=2*3072", 6144, fp32, fp32, SWIGLU),
    ]
