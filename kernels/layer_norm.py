"""LayerNorm over the last dimension, alone and after the residual add of a pre-norm block.

    y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(var + eps)
    n = (x - mean) * rstd,  g = dy * weight
    dx = rstd * (g - mean(g) - n * mean(g * n)),  dweight = sum of dy * n,  dbias = sum of dy

residual_layer_norm is the unit between two matmuls of a transformer: the bias of the linear before,
dropout, residual add, norm. Its backward adds the residual stream's own gradient to the norm's:
    dresidual = dresidual_out + dnorm,  dx = dropout'(dresidual),  dx_bias = sum of dx

On CPU a compiled kernel makes one pass over the rows each way. The variance is computed in a second
pass over the row in cache, corrected for the rounding of the mean, so a mean far from 0 costs no
accuracy. Sums over rows add fixed blocks of rows in order: their bits do not depend on the threads
(those of torch's kernel do). Elsewhere it is composed from torch ops, which torch.compile fuses.
Saved for backward: the normalized rows (x or residual_out), mean and rstd ([N] fp32).
Source: Ba, Kiros, Hinton 2016, arXiv 1607.06450.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import (
    DTYPE_CODES,
    define_autograd,
    define_op,
    refuse_double_backward,
    use_cpp,
)
from fastpar.kernels.philox import (
    Rng,
    check_rng,
    draw_key,
    dropout,
    mask_shape,
    quantize_p,
)

MAX_COLUMNS = 16384


def _check(name: str, x: Tensor, **vectors: Tensor | None) -> None:
    """x is [..., C] with 1 <= C <= MAX_COLUMNS; each vector is [C], of x's dtype or fp32."""
    c = x.shape[-1] if x.dim() else 0
    if not 1 <= c <= MAX_COLUMNS:
        raise ValueError(
            f"{name}: expected x of shape [..., C] with 1 <= C <= {MAX_COLUMNS}, got "
            f"x={list(x.shape)}; normalize narrower rows"
        )
    if not x.is_floating_point():
        raise ValueError(f"{name}: expected a floating dtype, got x={x.dtype}; cast it first")
    for key, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != (c,):
            raise ValueError(
                f"{name}: expected {key} of shape [C]=[{c}], got {key}={list(vector.shape)}; "
                "it goes with x's last dimension"
            )
        if vector.dtype != x.dtype and vector.dtype != torch.float32:
            raise ValueError(
                f"{name}: expected {key} of x's dtype {x.dtype} or float32, got "
                f"{key}={vector.dtype}; cast one of them"
            )
        if vector.device != x.device:
            raise ValueError(
                f"{name}: expected {key} on x's device {x.device}, got {key} on {vector.device}; "
                "move one of them"
            )


def _float(vector: Tensor | None, like: Tensor) -> Tensor:
    """[C] in fp32; zeros for None."""
    if vector is None:
        return like.new_zeros(like.shape[-1], dtype=torch.float32)
    return vector.float().contiguous()


def _mask(x: Tensor, key: Tensor | None, site: int, threshold: int) -> tuple[int, ...]:
    """The mask of x's rows, as _C takes it."""
    if key is None:
        return 0, 0, 0, 0, 1, 1, max(1, x.numel() // x.shape[-1])
    seed, first_sample = key.tolist()
    at = mask_shape(x.shape)
    return seed, first_sample, site, threshold, at.samples, at.heads, at.rows


def layer_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    key: Tensor | None,
    site: int,
    threshold: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, residual_out, mean, rstd) by the compiled kernel; residual None: residual_out is [0]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x.new_empty(0)
    n = x.numel() // x.shape[-1]
    mean, rstd = (x.new_empty(n, dtype=torch.float32) for _ in range(2))
    if n:
        # Named, so that the copies live until the call returns.
        r = None if residual is None else residual.contiguous()
        w, b, xb = _float(weight, x), _float(bias, x), _float(x_bias, x)
        _C.layer_norm_fwd(
            x.data_ptr(),
            0 if r is None else r.data_ptr(),
            xb.data_ptr(),
            w.data_ptr(),
            b.data_ptr(),
            total.data_ptr(),
            y.data_ptr(),
            mean.data_ptr(),
            rstd.data_ptr(),
            DTYPE_CODES[x.dtype],
            n,
            x.shape[-1],
            eps,
            *_mask(x, key, site, threshold),
            torch.get_num_threads(),
        )
    return y, total, mean, rstd


def layer_norm_bwd(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    key: Tensor | None,
    site: int,
    threshold: int,
    need_dx_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dtotal, dx, dweight, dbias, dx_bias) of the rows x that were normalized; sums in fp32.

    dx is [0] without a mask (it equals dtotal then), dx_bias is [0] when not needed.
    """
    dy, x = dy.contiguous(), x.contiguous()
    C = x.shape[-1]
    n = x.numel() // C
    dsum = torch.empty_like(x)
    dx = torch.empty_like(x) if key is not None else x.new_empty(0)
    dweight, dbias, dx_bias = (
        x.new_zeros(c, dtype=torch.float32) for c in (C, C, C if need_dx_bias else 0)
    )
    if n:
        given, w = None if dtotal is None else dtotal.contiguous(), _float(weight, x)
        _C.layer_norm_bwd(
            dy.data_ptr(),
            0 if given is None else given.data_ptr(),
            x.data_ptr(),
            w.data_ptr(),
            mean.data_ptr(),
            rstd.data_ptr(),
            dsum.data_ptr(),
            dx.data_ptr() if key is not None else 0,
            dweight.data_ptr(),
            dbias.data_ptr(),
            dx_bias.data_ptr() if need_dx_bias else 0,
            DTYPE_CODES[x.dtype],
            n,
            C,
            *_mask(x, key, site, threshold),
            torch.get_num_threads(),
        )
    return dsum, dx, dweight, dbias, dx_bias


def _rows_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake(x, residual, weight, bias, x_bias, key, site, threshold, eps):
    mean, rstd = (x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for _ in range(2))
    return _rows_like(x), x.new_empty(0) if residual is None else _rows_like(x), mean, rstd


def _bwd_fake(dy, dtotal, x, weight, mean, rstd, key, site, threshold, need_dx_bias):
    C = x.shape[-1]
    dweight, dbias, dx_bias = (
        x.new_empty(c, dtype=torch.float32) for c in (C, C, C if need_dx_bias else 0)
    )
    return _rows_like(x), x.new_empty(0) if key is None else _rows_like(x), dweight, dbias, dx_bias


_layer_norm = define_op(
    "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? x_bias, "
    "Tensor? key, int site, int threshold, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    layer_norm_fwd,
    _fake,
    ("CPU",),
)
_layer_norm_bwd = define_op(
    "layer_norm_bwd(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "Tensor? key, int site, int threshold, bool need_dx_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    layer_norm_bwd,
    _bwd_fake,
    ("CPU",),
)


def _setup_context(ctx, inputs, output):
    x, residual, weight, bias, x_bias, key, ctx.site, ctx.threshold, _ = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.plain = residual is None
    ctx.save_for_backward(x if ctx.plain else total, weight, mean, rstd, key)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.x_bias_dtype = None if x_bias is None else x_bias.dtype


def _backward(ctx, dy, dtotal, _dmean, _drstd):
    refuse_double_backward("layer_norm")
    rows, weight, mean, rstd, key = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(rows)
    dsum, dx, dweight, dbias, dx_bias = _layer_norm_bwd(
        dy,
        None if ctx.plain else dtotal,
        rows,
        weight,
        mean,
        rstd,
        key,
        ctx.site,
        ctx.threshold,
        ctx.x_bias_dtype is not None,
    )
    return (
        dsum if key is None else dx,
        None if ctx.plain else dsum,
        dweight.to(weight.dtype),
        None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype),
        None if ctx.x_bias_dtype is None else dx_bias.to(ctx.x_bias_dtype),
        None,
        None,
        None,
        None,
    )


define_autograd(_layer_norm, _setup_context, _backward)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    # torch's CUDA kernel wants one dtype.
    wide = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension: y = (x - mean) * rstd * weight + bias.

    Args:
        x: [..., C], bf16 | fp16 | fp32, C <= 16384.
        weight: [C], dtype of x or fp32.
        bias: [C], dtype of x or fp32, or None.
    Returns:
        y: [..., C], dtype and device of x. x, mean and rstd ([N], fp32) are kept for backward.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above.
        RuntimeError: a second derivative is asked for (on CPU).
    Traffic: 2 * x.numel() * x.element_size() bytes forward, 3 * ... backward.
    Deterministic: yes, bitwise, forward and backward, for any number of threads on CPU.
    Oracle: fastpar.kernels.reference.layer_norm_ref
    Source: Ba, Kiros, Hinton 2016, arXiv 1607.06450
    """
    _check("layer_norm", x, weight=weight, bias=bias)
    if use_cpp("layer_norm", x):
        return _layer_norm(x, None, weight, bias, None, None, 0, 0, eps)[0]
    return _norm(x, weight, bias, eps)


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Residual add and LayerNorm: residual_out = residual + dropout(x + x_bias), y = its norm.

    Args:
        x: [B, ..., C], dtype of residual, or 16 bits with a fp32 residual.
        residual: [B, ..., C], the residual stream.
        weight, bias: [C], dtype of residual or fp32; bias may be None.
        x_bias: [C], dtype of x or fp32: the bias of the linear that made x; None is 0.
        dropout_p: rounded to a multiple of 1/256.
        rng: key and site of the mask; None draws a key from torch's default generator.
    Returns:
        (y, residual_out), both [B, ..., C], dtype of residual. residual_out, mean and rstd ([N],
        fp32) are kept for backward.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above; dropout_p outside [0, 1);
            a key or site that the mask cannot hold.
        RuntimeError: a second derivative is asked for (on CPU).
    Traffic: 4 * x.numel() * x.element_size() bytes forward, 4 * ... backward (5 with dropout).
    Deterministic: yes, bitwise, forward and backward, for any number of threads on CPU.
    Oracle: fastpar.kernels.reference.residual_layer_norm_ref
    Source: Ba, Kiros, Hinton 2016, arXiv 1607.06450
    """
    name = "residual_layer_norm"
    _check(name, residual, weight=weight, bias=bias)
    if x.shape != residual.shape:
        raise ValueError(
            f"{name}: expected x and residual of one shape, got x={list(x.shape)} "
            f"residual={list(residual.shape)}; they are added element by element"
        )
    if x.dtype != residual.dtype and residual.dtype != torch.float32:
        raise ValueError(
            f"{name}: expected x of residual's dtype {residual.dtype}, or a float32 residual, got "
            f"x={x.dtype}; cast one of them"
        )
    if x.device != residual.device:
        raise ValueError(
            f"{name}: expected x on residual's device {residual.device}, got x on {x.device}; "
            "move one of them"
        )
    if x_bias is not None:
        _check(name, x, x_bias=x_bias)
    threshold = quantize_p(dropout_p)
    if threshold and rng is None:
        rng = Rng(draw_key(x.device), 0)
    if use_cpp(name, residual):
        key, site = None, 0
        if threshold and rng is not None:
            check_rng(rng, mask_shape(x.shape).heads, x.device)
            key, site = rng
        x = x.to(residual.dtype)
        y, residual_out, *_ = _layer_norm(
            x, residual, weight, bias, x_bias, key, site, threshold, eps
        )
        return y, residual_out
    if x_bias is not None:
        x = (x + x_bias).to(x.dtype)
    residual_out = residual + dropout(x, dropout_p, rng)
    return _norm(residual_out, weight, bias, eps), residual_out
