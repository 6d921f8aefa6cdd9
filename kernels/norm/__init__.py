"""LayerNorm and RMSNorm over the last dimension, alone or after the residual add of a block.

    y = n * weight + bias,  n = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps),  g = dy * weight
    dx = rstd * (g - mean(g) - n * mean(g * n)),  dweight = sum of dy * n,  dbias = sum of dy

RMSNorm takes the mean as 0 and has no bias: n = x * rstd, rstd = 1 / sqrt(mean(x * x) + eps), and
dx has no mean(g). residual_layer_norm and residual_rms_norm fuse what is between two matmuls of a
transformer: the bias of the linear before, dropout, residual add, norm. Their backward adds the
residual stream's own gradient to the norm's:
    dresidual = dresidual_out + dnorm,  dx = dropout'(dresidual),  dx_bias = sum of dx

One pass over the rows each way. The variance is computed in a second pass over the row in cache
(CPU) or registers (Triton), corrected for the rounding of the mean, so a mean far from 0 costs no
accuracy. Sums over rows add fixed blocks of rows in order: their bits do not depend on threads or
run (those of torch's kernel do). fp64 and FASTPAR_BACKEND=torch are composed from torch ops.
Saved for backward: the normalized rows (x or residual_out) and their statistics, fp32 [2, N]: rstd
and mean; RMSNorm has only rstd, [1, N].

Tiles of the Triton kernels per GPU: layer_norm_configs.json is arch -> Config; see config_table.py.
The bits of a result may differ between configs, by the order of sums.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import _C, philox
from fastpar.kernels.backend import FLOATS, runs_triton, triton_module, use_cpp, use_triton, wide
from fastpar.kernels.config_table import ConfigTable
from fastpar.kernels.op import (
    check_dense,
    check_eps,
    check_float,
    check_vector,
    define_autograd,
    define_op,
    refuse_double_backward,
)
from fastpar.kernels.philox import Rng


class Config(NamedTuple):
    """The tile of one architecture; see [Note: tile] of triton.py."""

    fwd_values: int  # most elements of a row in a thread: forward
    bwd_values: int  # backward, with more live values per element: more than 24 spill
    num_warps: int  # least warps of a program, which then has several rows


_SIZES = itertools.product((16, 32, 64), (16, 24), (2, 4, 8))
_CANDIDATES = list(itertools.starmap(Config, _SIZES))
TABLE = ConfigTable("layer_norm_configs", Config, lambda arch: _CANDIDATES)

MAX_COLUMNS = 16384


def check(name: str, x: Tensor, **vectors: Tensor | None) -> None:
    """x is [..., C] with 1 <= C <= MAX_COLUMNS; each vector is [C], of x's dtype or fp32."""
    check_float(name, "x", x)
    c = x.shape[-1] if x.dim() else 0
    if not 1 <= c <= MAX_COLUMNS:
        raise ValueError(
            f"{name}: expected x of shape [..., C] with 1 <= C <= {MAX_COLUMNS}, got "
            f"x={list(x.shape)}; normalize narrower rows"
        )
    for key, vector in vectors.items():
        if vector is not None:
            check_vector(name, key, vector, x)


def is_usual(x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> bool:
    """Whether all are of one dtype and device and of the right shapes, so that check and
    check_residual need not be called."""
    dtype, device, shape = x.dtype, x.device, x.shape
    if residual is not None and (
        residual.dtype != dtype or residual.shape != shape or residual.device != device
    ):
        return False
    row = shape[-1:]
    for v in vectors:
        if v is not None and (v.shape != row or v.dtype != dtype or v.device != device):
            return False
    return dtype in FLOATS and len(row) == 1 and 1 <= row[0] <= MAX_COLUMNS and not x.is_sparse


def check_residual(
    name: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None,
    x_bias: Tensor | None,
) -> None:  # fmt: skip
    """Checks x against residual; vectors as in check()."""
    check(name, residual, weight=weight, bias=bias)
    if x.shape != residual.shape:
        raise ValueError(
            f"{name}: expected x and residual of one shape, got x={list(x.shape)} "
            f"residual={list(residual.shape)}; they are added element by element"
        )
    narrow = residual.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    if x.dtype != residual.dtype and not narrow:
        raise ValueError(
            f"{name}: expected x of residual's dtype {residual.dtype}, or 16 bits with a float32 "
            f"residual, got x={x.dtype}; cast one of them"
        )
    if x.device != residual.device:
        raise ValueError(
            f"{name}: expected x on residual's device {residual.device}, got x on {x.device}; "
            "move one of them"
        )
    if x_bias is not None:
        check(name, x, x_bias=x_bias)


def _mask(
    x: Tensor, key: Tensor | None, site: int, threshold: int, rows: int | None, place: Sequence[int]
) -> tuple:
    """The mask of x's rows, in the form of _C."""
    n = x.numel() // x.shape[-1]
    if key is None:
        return 0, 0, 0, 0, 1, 1, max(1, n), place
    seed, first_sample = key.tolist()
    if rows is not None:
        return seed, first_sample, site, threshold, n, 1, rows, place
    at = philox.mask_shape(x.shape)
    return seed, first_sample, site, threshold, at.samples, at.heads, at.rows, place


def layer_norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, x_bias: Tensor | None,
    key: Tensor | None, site: int, threshold: int, rows: int | None, place: Sequence[int],
    eps: float, rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(y, residual_out, stats); residual_out only with a residual."""
    if runs_triton(x):
        return triton_module("norm.triton").layer_norm_fwd(
            x, residual, weight, bias, x_bias, key, site, threshold, rows, place, eps, rms
        )
    x = x.contiguous() if residual is None else x.to(residual.dtype).contiguous()
    y = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    n = x.numel() // x.shape[-1]
    stats = x.new_empty((1 if rms else 2, n), dtype=torch.float32)
    if n:
        _C.layer_norm_fwd(
            x, None if residual is None else residual.contiguous(),
            None if x_bias is None else x_bias.contiguous(), weight.contiguous(),
            None if bias is None else bias.contiguous(), total, y, stats, eps, rms,
            *_mask(x, key, site, threshold, rows, place), torch.get_num_threads(),
        )  # fmt: skip
    return y, total, stats


def layer_norm_bwd(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, stats: Tensor, key: Tensor | None,
    site: int, threshold: int, rows: int | None, place: Sequence[int], x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None, x_bias_dtype: torch.dtype | None, rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dtotal, dx, dweight, dbias, dx_bias) of the rows x that were normalized. dx is None if it
    would equal dtotal (no mask, x_dtype is x's), dbias and dx_bias if their dtype is None."""
    if runs_triton(x):
        return triton_module("norm.triton").layer_norm_bwd(
            dy, dtotal, x, weight, stats, key, site, threshold, rows, place, x_dtype, bias_dtype,
            x_bias_dtype, rms,
        )  # fmt: skip
    dy, x = dy.contiguous(), x.contiguous()
    dsum = torch.empty_like(x)
    dx = torch.empty_like(x) if key is not None else None
    like = torch.empty_like if x.numel() else torch.zeros_like
    dweight, dtypes = like(weight), (bias_dtype, x_bias_dtype)
    dbias, dx_bias = (None if d is None else like(weight, dtype=d) for d in dtypes)
    if x.numel():
        _C.layer_norm_bwd(
            dy, None if dtotal is None else dtotal.contiguous(), x, weight.contiguous(),
            *(stats, dsum, dx, dweight, dbias, dx_bias), rms,
            *_mask(x, key, site, threshold, rows, place), torch.get_num_threads(),
        )  # fmt: skip
    if x_dtype != x.dtype:
        dx = (dsum if dx is None else dx).to(x_dtype)
    return dsum, dx, dweight, dbias, dx_bias


def _rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake(x, residual, weight, bias, x_bias, key, site, threshold, rows, place, eps, rms):
    n = x.numel() // x.shape[-1]
    stats = x.new_empty((1 if rms else 2, n), dtype=torch.float32)
    dtype = x.dtype if residual is None else residual.dtype
    total = x.new_empty(0) if residual is None else _rows_like(x, dtype)
    return _rows_like(x, dtype), total, stats


def _bwd_fake(dy, dtotal, x, weight, stats, key, *options):
    *_, x_dtype, bias_dtype, x_bias_dtype, _rms = options
    writes_dx = key is not None or x_dtype != x.dtype
    dx = _rows_like(x, x_dtype) if writes_dx else x.new_empty(0, dtype=x_dtype)
    sums = (
        x.new_empty(0 if dtype is None else x.shape[-1], dtype=dtype or torch.float32)
        for dtype in (weight.dtype, bias_dtype, x_bias_dtype)
    )
    return _rows_like(x, x.dtype), dx, *sums


_MASK = "Tensor? key, SymInt site, int threshold, SymInt? rows, SymInt[] place"
_layer_norm = define_op(
    "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? x_bias, "
    f"{_MASK}, float eps, bool rms) -> (Tensor, Tensor, Tensor)",
    layer_norm_fwd,
    _fake,
)
_layer_norm_bwd = define_op(
    f"layer_norm_bwd(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor stats, {_MASK}, "
    "ScalarType x_dtype, ScalarType? bias_dtype, ScalarType? x_bias_dtype, bool rms)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    layer_norm_bwd,
    _bwd_fake,
)


def _setup_context(ctx, inputs, output):
    x, residual, weight, bias, x_bias, key, *ctx.mask, _, ctx.rms = inputs
    _, total, stats = output
    ctx.plain = residual is None
    ctx.save_for_backward(x if ctx.plain else total, weight, stats, key)
    ctx.x_dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.x_bias_dtype = None if x_bias is None else x_bias.dtype


def _backward(ctx, dy, dtotal, *_):
    refuse_double_backward("rms_norm" if ctx.rms else "layer_norm")
    rows, weight, stats, key = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(rows)
    dsum, dx, dweight, dbias, dx_bias = _layer_norm_bwd.after(dy, dtotal)(
        dy, None if ctx.plain else dtotal, rows, weight, stats, key, *ctx.mask, ctx.x_dtype,
        ctx.bias_dtype, ctx.x_bias_dtype, ctx.rms,
    )  # fmt: skip
    dx = dx if key is not None or ctx.x_dtype != rows.dtype else dsum
    dbias = None if ctx.bias_dtype is None else dbias
    dx_bias = None if ctx.x_bias_dtype is None else dx_bias
    return dx, None if ctx.plain else dsum, dweight, dbias, dx_bias, *[None] * 7


define_autograd(_layer_norm, _setup_context, _backward, by_products=1)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    """Composed from torch ops. torch's CUDA kernels want one dtype."""
    given = [t for t in (x, weight, bias) if t is not None]
    for t in given:
        check_dense("rms_norm" if rms else "layer_norm", "a tensor", t)
    same = all(t.dtype == x.dtype for t in given)
    u, w, *b = given if same else (t.to(wide(x.dtype)) for t in given)
    function: Any = F.rms_norm if rms else F.layer_norm
    return function(u, weight.shape, w, *b, eps=eps).to(x.dtype)


def _or_ones(name: str, weight: Tensor | None, x: Tensor) -> Tensor:
    """weight, or ones in its place: they change no bit, and no kernel needs a second form."""
    if weight is not None:
        return weight
    check(name, x)
    return x.new_ones(x.shape[-1:])


def _plain(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    weight = _or_ones(name, weight, x)
    if not is_usual(x, None, weight, bias):
        check(name, x, weight=weight, bias=bias)
    check_eps(name, eps)
    if use_triton(name, x) or use_cpp(name, x):
        return _layer_norm(x, None, weight, bias, None, None, 0, 0, None, (0, 0, 0), eps, rms)[0]
    return _norm(x, weight, bias, eps, rms)


def _after_residual(
    name: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None, dropout_p: float, rng: Rng | None, eps: float, rms: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, residual_out)"""
    weight = _or_ones(name, weight, residual)
    if not is_usual(x, residual, weight, bias, x_bias):
        check_residual(name, x, residual, weight, bias, x_bias)
    check_eps(name, eps)
    mask: tuple[Any, ...] = (None, 0, 0, None, (0, 0, 0))
    if dropout_p:
        threshold = philox.quantize_p(dropout_p)
        rng = Rng(philox.draw_key(x.device), 0) if rng is None else rng
        if not rng.is_whole:
            philox.refuse_parts(name, rng, "rows", "first_row", "moved")
            philox.check_rows(name, rng, x.numel() // x.shape[-1])
        philox.check_rng(rng, 1 if x.dim() == 3 else philox.mask_shape(x.shape).heads, x.device)
        mask = rng.key, rng.site, threshold, rng.rows, rng.place
    if use_triton(name, residual) or use_cpp(name, residual):
        y, residual_out, *_ = _layer_norm(x, residual, weight, bias, x_bias, *mask, eps, rms)
        return y, residual_out
    if x_bias is not None:
        x = (x + x_bias).to(x.dtype)
    residual_out = residual + philox.dropout(x, dropout_p, rng)
    return _norm(residual_out, weight, bias, eps, rms), residual_out


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last dimension: y = (x - mean) * rstd * weight + bias.

    Args:
        x: [..., C], bf16 | fp16 | fp32 | fp64 (by torch ops), C <= 16384. Rows may have any stride;
            non-contiguous elements of a row cost a copy.
        weight: [C], dtype of x or fp32; None is 1.
        bias: [C], dtype of x or fp32; None is 0.
    Returns:
        y: [..., C], dtype and device of x. x, mean and rstd ([N], fp32) are kept for backward.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above.
        RuntimeError: a second derivative is requested; a GPU without Triton.
    Traffic: 2 * x.numel() * x.element_size() bytes forward, 3 * ... backward (5 for C > 4096 with
        Triton).
    Deterministic: yes, bitwise, forward and backward; on a CPU for any number of threads.
    Oracle: fastpar.kernels.reference.layer_norm_ref
    Source: Ba, Kiros, Hinton 2016, arXiv 1607.06450
    """
    return _plain("layer_norm", x, weight, bias, eps, False)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension: y = x * rstd * weight, rstd = 1 / sqrt(mean(x * x) + eps).

    Args:
        x, weight: as in layer_norm.
    Returns:
        y: [..., C], dtype and device of x. x and rstd ([N], fp32) are kept for backward.
    Raises, Traffic, Deterministic: as layer_norm.
    Oracle: fastpar.kernels.reference.rms_norm_ref
    Source: Zhang, Sennrich 2019, arXiv 1910.07467
    """
    return _plain("rms_norm", x, weight, None, eps, True)


def residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
    x_bias: Tensor | None = None, dropout_p: float = 0.0, rng: Rng | None = None, eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Residual add and LayerNorm: residual_out = residual + dropout(x + x_bias), y = its norm.

    Args:
        x: [B, ..., C], dtype of residual, or 16 bits with a fp32 residual.
        residual: [B, ..., C], the residual stream.
        weight, bias: [C], dtype of residual or fp32; None is 1, or 0 for bias.
        x_bias: [C], dtype of x or fp32: the bias of the linear that made x; None is 0.
        dropout_p: rounded to a multiple of 1/256.
        rng: key and site of the mask, and which rows of a batch x holds (rows, first_row,
            moved); None draws a key from torch's default generator.
    Returns:
        (y, residual_out), both [B, ..., C], dtype of residual. residual_out, mean and rstd ([N],
        fp32) are kept for backward.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above; dropout_p outside [0, 1);
            a key, site or rows that the mask cannot hold; an rng with first_head.
        RuntimeError: a second derivative is requested; a GPU without Triton.
    Traffic: 4 * x.numel() * x.element_size() bytes forward, 4 * ... backward (5 with dropout).
    Deterministic: yes, bitwise, forward and backward; on a CPU for any number of threads.
    Oracle: fastpar.kernels.reference.residual_layer_norm_ref
    Source: Ba, Kiros, Hinton 2016, arXiv 1607.06450
    """
    return _after_residual(
        "residual_layer_norm", x, residual, weight, bias, x_bias, dropout_p, rng, eps, False
    )


def residual_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, x_bias: Tensor | None = None,
    dropout_p: float = 0.0, rng: Rng | None = None, eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Residual add and RMSNorm: residual_out = residual + dropout(x + x_bias), y = its norm.

    Args, Returns, Raises, Traffic, Deterministic: as residual_layer_norm; no mean is kept.
    Oracle: fastpar.kernels.reference.residual_rms_norm_ref
    Source: Zhang, Sennrich 2019, arXiv 1910.07467
    """
    return _after_residual(
        "residual_rms_norm", x, residual, weight, None, x_bias, dropout_p, rng, eps, True
    )
