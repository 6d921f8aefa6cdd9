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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import philox
from fastpar.kernels.backend import triton_module, use_cpp, use_triton, wide
from fastpar.kernels.config_table import ConfigTable
from fastpar.kernels.op import (
    check_dense,
    check_eps,
    check_float,
    check_vector,
    define_kernels,
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


def check_residual(
    name: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None,
) -> None:  # fmt: skip
    """Checks x against residual; vectors as in check()."""
    check_dense(name, "x", x)
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


def _check_call(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None, eps: float, rms: bool,
) -> None:  # fmt: skip
    """The checks of a call of the op. csrc/torch/norm.cpp is_usual() allows the same."""
    name = "rms_norm" if rms else "layer_norm"
    if residual is None:
        check(name, x, weight=weight, bias=bias)
    else:
        name = f"residual_{name}"
        check_residual(name, x, residual, weight, bias, x_bias)
    check_eps(name, eps)


# Triton's kernels; kernels/op.py define_kernels says for which calls.


def _run(x, weight, bias, eps, rms):
    _check_call(x, None, weight, bias, None, eps, rms)
    y, _, stats = triton_module("norm.triton").layer_norm_fwd(
        x, None, weight, bias, None, *_NO_MASK, eps, rms
    )
    return y, stats


def _run_residual(x, residual, weight, bias, x_bias, eps, rms, *mask):
    _check_call(x, residual, weight, bias, x_bias, eps, rms)
    return triton_module("norm.triton").layer_norm_fwd(
        x, residual, weight, bias, x_bias, *_all(mask), eps, rms
    )


def _run_bwd(
    dy, dtotal, x, weight, stats, x_dtype, bias_dtype, x_bias_dtype, rms, *mask
):  # fmt: skip
    """dx is empty if it would equal dtotal, dweight without a weight, dbias and dx_bias if their
    dtype is None."""
    dsum, dx, dweight, dbias, dx_bias = triton_module("norm.triton").layer_norm_bwd(
        dy, dtotal, x, weight, stats, *_all(mask), x_dtype, bias_dtype, x_bias_dtype, rms
    )
    dx = x.new_empty(0, dtype=x_dtype) if dx is None else dx
    sums = dweight, dbias, dx_bias
    return dsum, dx, *(x.new_empty(0, dtype=torch.float32) if d is None else d for d in sums)


_NO_MASK: tuple[Any, ...] = (None, 0, 0, None, (0, 0, 0))


def _all(mask: tuple) -> tuple:
    """The last arguments of a call, with those that the dispatcher leaves out."""
    *first, place = (*mask, *_NO_MASK[len(mask) :])
    return *first, place or (0, 0, 0)


def _rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _stats_like(x: Tensor, rms: bool) -> Tensor:
    return x.new_empty((1 if rms else 2, x.numel() // x.shape[-1]), dtype=torch.float32)


def _fake(x, weight, bias, eps, rms):
    _check_call(x, None, weight, bias, None, eps, rms)
    return _rows_like(x, x.dtype), _stats_like(x, rms)


def _residual_fake(x, residual, weight, bias, x_bias, eps, rms, *mask):
    _check_call(x, residual, weight, bias, x_bias, eps, rms)
    total = _rows_like(x, residual.dtype)
    return torch.empty_like(total), total, _stats_like(x, rms)


def _bwd_fake(
    dy, dtotal, x, weight, stats, x_dtype, bias_dtype, x_bias_dtype, rms, key=None, *mask
):  # fmt: skip
    writes_dx = key is not None or x_dtype != x.dtype
    dx = _rows_like(x, x_dtype) if writes_dx else x.new_empty(0, dtype=x_dtype)
    sums = (
        x.new_empty(0 if dtype is None else x.shape[-1], dtype=dtype or torch.float32)
        for dtype in (None if weight is None else weight.dtype, bias_dtype, x_bias_dtype)
    )
    return _rows_like(x, x.dtype), dx, *sums


_layer_norm = define_kernels("layer_norm", _run, _fake)
_residual_layer_norm = define_kernels("residual_layer_norm", _run_residual, _residual_fake)
define_kernels("layer_norm_bwd", _run_bwd, _bwd_fake)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    """Composed from torch ops. torch's CUDA kernels want one dtype."""
    given = [t for t in (x, weight, bias) if t is not None]
    for t in given:
        check_dense("rms_norm" if rms else "layer_norm", "a tensor", t)
    same = all(t.dtype == x.dtype for t in given)
    dtype = x.dtype if same else wide(x.dtype)
    u, w, b = (None if t is None else t.to(dtype) for t in (x, weight, bias))
    options = {"weight": w, "eps": eps, **({} if rms else {"bias": b})}
    function: Any = F.rms_norm if rms else F.layer_norm
    return function(u, x.shape[-1:], **options).to(x.dtype)


def _plain(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    if use_cpp(name, x) or use_triton(name, x):
        return _layer_norm(x, weight, bias, eps, rms)[0]
    _check_call(x, None, weight, bias, None, eps, rms)
    return _norm(x, weight, bias, eps, rms)


def _after_residual(
    name: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None, dropout_p: float, rng: Rng | None, eps: float, rms: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, residual_out)"""
    mask: tuple[Any, ...] = ()
    if dropout_p:
        _check_call(x, residual, weight, bias, x_bias, eps, rms)
        threshold = philox.quantize_p(dropout_p)
        rng = Rng(philox.draw_key(x.device), 0) if rng is None else rng
        if not rng.is_whole:
            philox.refuse_parts(name, rng, "rows", "first_row", "moved")
            philox.check_rows(name, rng, x.numel() // x.shape[-1])
        philox.check_rng(rng, 1 if x.dim() == 3 else philox.mask_shape(x.shape).heads, x.device)
        mask = rng.key, rng.site, threshold, rng.rows, rng.place
    if use_cpp(name, residual) or use_triton(name, residual):
        return _residual_layer_norm(x, residual, weight, bias, x_bias, eps, rms, *mask)[:2]
    _check_call(x, residual, weight, bias, x_bias, eps, rms)
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
