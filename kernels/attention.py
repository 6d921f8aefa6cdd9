"""Softmax attention per head: o = (P * M) v, P = softmax(softmax_scale * q k^T).

    dv = (P * M)^T do,  dp = M * (do v^T),  ds = P * (dp - rowsum(dp * P)),
    dq = softmax_scale * ds k,  dk = softmax_scale * ds^T q

M is 1 without dropout, else 0 or 1 / (1 - p) by kernels/philox.py. All [B, H, T, Tk] scores are
never alive at once. Kept for backward: q, k, v, the key of the mask and, per row, the largest score
and the inverse sum of exponentials; P and M are computed again, with the same bits. (One number,
their logarithm, would do, but rounds P by its own size.) Statistics and accumulators are fp32.

On CPU a compiled kernel reads strided q, k, v (or the packed projection) and writes their gradients
in place. A head belongs to one thread, so every sum has one order for any number of threads. On
CUDA this is torch's scaled_dot_product_attention without dropout, and with dropout a composition of
torch ops by blocks of heads and queries (attention_composed.py), which keeps no statistics.

[Note: causal] The mask is aligned to the last query and the last key: query i sees keys
j <= i + Tk - T, as in FlashAttention since 2.1 (torch's is_causal aligns to the first). With
T < Tk the queries are the last T of Tk positions, which is what a key/value cache needs; with
T > Tk the first T - Tk queries see nothing and their output is 0.

Source: Vaswani et al. 2017, arXiv 1706.03762; Dao et al. 2022, arXiv 2205.14135.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.attention_composed import Dropout, Triple, composed_bwd, composed_fwd, sdpa
from fastpar.kernels.backend import (
    DTYPE_CODES,
    define_autograd,
    define_op,
    refuse_double_backward,
    use_cpp,
)
from fastpar.kernels.philox import Rng, check_rng, draw_key, quantize_p

MAX_HEAD_DIM = 256


class _Shape(NamedTuple):
    B: int
    T: int
    Tk: int
    H: int
    Hkv: int
    D: int


def _split(q: Tensor, k: Tensor | None, v: Tensor | None) -> Triple:
    """q, k, v; without k and v, q holds the three packed, [B, T, 3, H, D]."""
    if k is None or v is None:
        q, k, v = q.unbind(2)
    return q, k, v


def _shape(q: Tensor, k: Tensor) -> _Shape:
    B, T, H, D = q.shape
    return _Shape(B, T, k.shape[1], H, k.shape[2], D)


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    """(address, batch, row and head strides) of [B, T, H, D], as _C takes it."""
    return x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)


def _arguments(q: Tensor, k: Tensor, causal: bool, scale: float, drop: Dropout) -> tuple:
    """What the two compiled functions take after the tensors."""
    seed, first_sample = (0, 0) if drop.key is None else drop.key.tolist()
    s = _shape(q, k)
    sizes = (s.B, s.T, s.Tk, s.H, s.Hkv, s.D)
    threads = torch.get_num_threads()
    return sizes, causal, scale, seed, first_sample, drop.site, drop.threshold, threads


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, drop: Dropout
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D] and the statistics of rows [B, H, T, 2] by the compiled kernel."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    stats = q.new_empty(q.shape[0], q.shape[2], q.shape[1], 2, dtype=torch.float32)
    _C.attention_fwd(
        *(_layout(x) for x in (q, k, v, o)),
        stats.data_ptr(),
        DTYPE_CODES[q.dtype],
        *_arguments(q, k, causal, scale, drop),
    )
    return o, stats


def attention_bwd(
    do: Tensor,
    inputs: Triple,
    stats: Tensor,
    grads: Triple,
    causal: bool,
    scale: float,
    drop: Dropout,
) -> None:
    """Writes the gradients, which may be parts of one packed tensor, by the compiled kernel."""
    q, k, _ = inputs
    if do.stride(-1) != 1:
        do = do.contiguous()
    _C.attention_bwd(
        *(_layout(x) for x in (do, *inputs)),
        stats.data_ptr(),
        *(_layout(x) for x in grads),
        DTYPE_CODES[q.dtype],
        *_arguments(q, k, causal, scale, drop),
    )


def _attention_run(
    q: Tensor, k: Tensor | None, v: Tensor | None, causal: bool, scale: float, *mask: Any
) -> tuple[Tensor, Tensor]:
    if not q.numel():
        return _fake(q, k, v)
    q, k, v = _split(q, k, v)
    drop = Dropout(*mask)
    if use_cpp("attention", q):
        return attention_fwd(q, k, v, causal, scale, drop)
    return composed_fwd((q, k, v), None, causal, scale, drop), q.new_empty(0, dtype=torch.float32)


def _attention_bwd_run(
    do: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    stats: Tensor,
    causal: bool,
    scale: float,
    *mask: Any,
) -> Triple:
    dq, dk, dv = _bwd_fake(do, q, k, v)
    inputs, grads = _split(q, k, v), _split(dq, *((None, None) if k is None else (dk, dv)))
    if not do.numel():
        for grad in grads:
            grad.zero_()
    elif use_cpp("attention", do):
        attention_bwd(do, inputs, stats, grads, causal, scale, Dropout(*mask))
    else:
        composed_bwd(do, inputs, grads, None, causal, scale, Dropout(*mask))
    return dq, dk, dv


def _fake(q, k, v, *_):
    q, _k, _v = _split(q, k, v)
    B, T, H, _D = q.shape
    stats = q.new_empty((B, H, T, 2) if use_cpp("attention", q) else (0,), dtype=torch.float32)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), stats


def _bwd_fake(do, q, k, v, *_):
    """Gradients of q, k and v, or of the packed q and twice [0]."""
    dq, dk, dv = (
        q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (q, k, v)
    )
    return dq, dk, dv


_attention = define_op(
    "attention(Tensor q, Tensor? k, Tensor? v, bool causal, float scale, Tensor? key, int site, "
    "int threshold) -> (Tensor, Tensor)",
    _attention_run,
    _fake,
    ("CPU", "CUDA"),
)
_attention_bwd = define_op(
    "attention_bwd(Tensor do, Tensor q, Tensor? k, Tensor? v, Tensor stats, bool causal, "
    "float scale, Tensor? key, int site, int threshold) -> (Tensor, Tensor, Tensor)",
    _attention_bwd_run,
    _bwd_fake,
    ("CPU", "CUDA"),
)


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale, key, ctx.site, ctx.threshold = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, output[1], key)


def _backward(ctx, do, _dstats):
    refuse_double_backward("attention")
    q, k, v, stats, key = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(_split(q, k, v)[0])
    settings = (ctx.causal, ctx.scale, key, ctx.site, ctx.threshold)
    dq, dk, dv = _attention_bwd(do, q, k, v, stats, *settings)
    packed = k is None
    return dq, None if packed else dk, None if packed else dv, None, None, None, None, None


define_autograd(_attention, _setup_context, _backward)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses what attention does not compute, naming the dimension and both sizes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"attention: expected {name} of shape [B, T, H, D], got {name}={list(x.shape)}; "
                "unflatten the heads"
            )
        if x.device != q.device or x.dtype != q.dtype:
            raise ValueError(
                f"attention: expected q, k and v of one device and dtype, got q={q.device} "
                f"{q.dtype}, {name}={x.device} {x.dtype}; convert them first"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"attention: expected {name} with a contiguous last dimension, got "
                f"{name}.stride={x.stride()}; call {name}.contiguous()"
            )
    if not q.is_floating_point():
        raise ValueError(
            f"attention: expected a floating dtype, got q={q.dtype}; use fp32, bf16 or fp16"
        )
    if k.shape != v.shape:
        raise ValueError(
            f"attention: expected k and v of one shape, got k={list(k.shape)} v={list(v.shape)}; "
            "one value goes with one key"
        )
    B, _, H, D = q.shape
    for name, size, other in (("B", B, k.shape[0]), ("D", D, k.shape[3])):
        if size != other:
            raise ValueError(
                f"attention: expected equal {name} of q and k, got q={size} k={other}; "
                "both are [B, T, H, D]"
            )
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(
            f"attention: expected head dim in [1, {MAX_HEAD_DIM}], got D={D}; use more heads"
        )
    if k.shape[1] == 0 or k.shape[2] == 0 or H % k.shape[2]:
        raise ValueError(
            f"attention: expected at least one key, and H divisible by the heads of k, got H={H} "
            f"k={list(k.shape)}; each key head serves H / Hkv query heads"
        )


def _run(
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    causal: bool,
    softmax_scale: float | None,
    p: float,
    rng: Rng | None,
) -> Tensor:
    q, k, v = _split(*inputs)
    _check(q, k, v)
    threshold = quantize_p(p)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not scale > 0.0:
        raise ValueError(
            f"attention: expected softmax_scale > 0, got softmax_scale={softmax_scale}; "
            "change the sign of q instead"
        )
    compiled = use_cpp("attention", q)
    if not threshold:
        if not compiled:
            return sdpa(q, k, v, causal, scale)
        return _attention(*inputs, causal, scale, None, 0, 0)[0]
    if rng is None:
        rng = Rng(draw_key(q.device), 0)
    check_rng(rng, q.shape[2], q.device)
    return _attention(*inputs, causal, scale, rng.key, rng.site, threshold)[0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Tensor:
    """Scaled dot-product attention, o = dropout(softmax(q k^T * softmax_scale)) v per head.

    Args:
        q: [B, T, H, D], fp32 | bf16 | fp16, any strides with a contiguous last dimension, D <= 256.
        k, v: [B, Tk, Hkv, D], dtype and device of q; head h reads h // (H / Hkv).
        causal: query i sees keys j <= i + Tk - T; see [Note: causal].
        softmax_scale: > 0; D**-0.5 when None.
        dropout_p: of the probabilities; rounded to a multiple of 1/256.
        rng: key and site of the mask; None draws a key from torch's default generator.
    Returns:
        o: [B, T, H, D], contiguous.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above; no key; dropout_p outside
            [0, 1); a key, site or number of heads that the mask cannot hold.
        RuntimeError: a second derivative is asked for (on CPU, or with dropout).
    Traffic: (2 * q.numel() + k.numel() + v.numel()) * q.element_size() bytes forward.
    Deterministic: on CPU bitwise, for any number of threads; on CUDA bitwise with dropout, else as
        torch's backend.
    Oracle: fastpar.kernels.reference.attention_ref
    Source: Vaswani et al. 2017, arXiv 1706.03762
    """
    return _run((q, k, v), causal, softmax_scale, dropout_p, rng)


def attention_qkvpacked(
    qkv: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Tensor:
    """attention() on the output of one projection, read in place; its gradient is one tensor.

    Args:
        qkv: [B, T, 3, H, D]: q, k and v of each position. The rest as in attention().
    Returns:
        o: [B, T, H, D], contiguous.
    Raises:
        ValueError, RuntimeError: as attention().
    Traffic: 4/3 * qkv.numel() * qkv.element_size() bytes forward.
    Deterministic: as attention().
    Oracle: fastpar.kernels.reference.attention_ref
    Source: Vaswani et al. 2017, arXiv 1706.03762
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(
            f"attention_qkvpacked: expected qkv of shape [B, T, 3, H, D], got "
            f"qkv={list(qkv.shape)}; unflatten the projection's last dimension to (3, H, D)"
        )
    return _run((qkv, None, None), causal, softmax_scale, dropout_p, rng)
