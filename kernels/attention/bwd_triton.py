"""Attention backward in Triton: two kernels, each the owner of what it writes.

    delta = rowsum(do * o),  dp = keep / (1 - dropout) * (do v^T),  ds = p * (dp - delta),
    dq = scale * ds k,  dk = scale * ds^T q,  dv = (p * keep / (1 - dropout))^T do

p is computed again from q, k and lse. _attention_bwd_dq_kernel owns BLOCK_Q queries, also computes
their delta, and walks over keys like the forward. _attention_bwd_dkdv_kernel runs after it, owns
BLOCK_K keys of one key head and walks over the queries that see them, of each query head of the
group in turn. So every sum has one order, without atomics: gradients are the same bits in every
run. The price is that scores and dp are computed twice (seven matrix products instead of five).

With dropout, kept = p * keep: ds * (1 - dropout) = kept * (do v^T) - p * delta * (1 - dropout), and
dq, dk and dv are scaled once by 1 / (1 - dropout).

[Note: fp32] In fp32 the statistics themselves are what is rounded: lse by its own size, and delta
and dp by two different sums, which shows where few keys share a row. So for fp32 inputs
_attention_bwd_dq_kernel first walks over the keys once more for sum(p), whose inverse it writes
beside delta as `norm` and by which both kernels correct p, and for delta = sum(p * keep * dp). The
correction holds for the very scores it was made for, so both kernels multiply q k^T.

[Note: transposed] _attention_bwd_dkdv_kernel holds scores as [BLOCK_K, BLOCK_Q]: p^T and ds^T are
then left operands and stay in registers. With dropout, for [Note: key order], and in fp32 it holds
them as [BLOCK_Q, BLOCK_K] and passes p and ds through shared memory instead.

Notes that are not here are in attention_triton.py. Source: Dao 2023, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.attention_bits_triton import drop, mask_of_head, tile_order, unknown_zero
from fastpar.kernels.attention_configs import SECTIONS, get_config, variant_for
from fastpar.kernels.attention_plans import aligned, bwd_plan
from fastpar.kernels.attention_triton import (
    LOG2_E,
    UNSPECIALIZED,
    aot_variants,
    find_tile,
    head_ptr,
    key_range,
    load_tile,
    mask_source,
    store_tile,
)
from fastpar.kernels.triton_launch import Boxed, gpu_arch, launch, next_power_of_2


@triton.jit
def _dq_tiles(
    dq, sum_p, sum_dp, q, do, lse, norm, delta, k_source, v_source, batch, kv_head, first, low,
    high, n_keys, limit, rows, stride_k_t, stride_v_t, scale, mask_ptr, sample, site_head,
    threshold, first_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, VARLEN: tl.constexpr, FP32: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """One loop of [Note: phases] over keys [low, high): adds ds k to dq or, if SUMS, p and
    p * keep * dp to the sums of [Note: fp32]. scale: with log2(e)."""
    order = tile_order(BLOCK_K, DROPOUT, mask_ptr)
    for start in tl.range(low, high, BLOCK_K):
        start = tl.multiple_of(start, BLOCK_K)
        k = load_tile(
            k_source, batch, kv_head, first, start, n_keys, stride_k_t, order,
            D, BLOCK_D, TMA, MASKED, VARLEN,
        )  # fmt: skip
        v = load_tile(
            v_source, batch, kv_head, first, start, n_keys, stride_v_t, order,
            D, BLOCK_D, TMA, MASKED, VARLEN,
        )  # fmt: skip
        s = tl.dot(q, k.T, input_precision="ieee")
        p = tl.math.exp2(s * scale - lse[:, None])
        if FP32:
            p *= norm[:, None]
        if MASKED:
            p = tl.where((start + order)[None, :] < limit[:, None], p, 0.0)
        dp = tl.dot(do, v.T, input_precision="ieee")
        kept = p
        if DROPOUT:
            kept = drop(p, mask_ptr, sample, site_head, rows, start, threshold, first_row)
        if SUMS:
            sum_p += tl.sum(p, 1)
            sum_dp += tl.sum(kept * dp, 1)
        else:
            if DROPOUT:
                ds = kept * dp - p * delta[:, None]
            else:
                ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq, sum_p, sum_dp


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "site_head", "threshold", "first_row"])
def _attention_bwd_dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, delta_ptr, norm_ptr, dq_ptr, mask_ptr, cu_ptr,
    stride_do_b, stride_do_t, stride_do_h,
    stride_q_b, stride_q_t, stride_q_h,
    stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_dq_b, stride_dq_t, stride_dq_h,
    n,  # samples; documents with cu_seqlens
    T,  # queries of a sample; of all documents
    Tk, H, group, section, scale, site_head, threshold, first_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, STEPS: tl.constexpr,
    TMA: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    sample, batch, head, first, n_rows, tile = find_tile(
        cu_ptr, n, T, H, section, BLOCK_Q, VARLEN, STEPS
    )
    tile = tl.cdiv(n_rows, BLOCK_Q) - 1 - tile
    if (tile < 0) | (tile * BLOCK_Q >= n_rows):
        return
    n_keys = n_rows if VARLEN else Tk
    kv_head = head // group
    row = tile * BLOCK_Q
    within = tl.arange(0, BLOCK_Q)
    rows = row + within
    limit, full, end = key_range(row, n_rows, n_keys, BLOCK_Q, BLOCK_K, CAUSAL)
    if TMA:
        k_source, v_source = k_ptr, v_ptr
    else:
        k_source = head_ptr(k_ptr, batch, first, kv_head, stride_k_b, stride_k_t, stride_k_h)
        v_source = head_ptr(v_ptr, batch, first, kv_head, stride_v_b, stride_v_t, stride_v_h)
    q_source = head_ptr(q_ptr, batch, first, head, stride_q_b, stride_q_t, stride_q_h)
    do_source = head_ptr(do_ptr, batch, first, head, stride_do_b, stride_do_t, stride_do_h)
    q = load_tile(
        q_source, batch, head, first, row, n_rows, stride_q_t, within,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    do = load_tile(
        do_source, batch, head, first, row, n_rows, stride_do_t, within,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    statistics = (batch.to(tl.int64) * H + head) * T + first + rows
    lse = tl.load(lse_ptr + statistics, mask=rows < n_rows, other=float("inf"))
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    norm = tl.full([BLOCK_Q], 1.0, tl.float32)
    sum_p = tl.zeros([BLOCK_Q], tl.float32)
    delta = tl.zeros([BLOCK_Q], tl.float32)
    if DROPOUT:
        mask_ptr, site_head = mask_of_head(mask_ptr, site_head, batch, head, H, T, Tk)
    if FP32:
        dq, sum_p, delta = _dq_tiles(
            dq, sum_p, delta, q, do, lse, norm, delta, k_source, v_source, batch, kv_head, first,
            0, full, n_keys, limit, rows, stride_k_t, stride_v_t, scale * LOG2_E, mask_ptr,
            sample, site_head, threshold, first_row,
            D, BLOCK_D, BLOCK_K, TMA, DROPOUT, False, VARLEN, False, True,
        )  # fmt: skip
        dq, sum_p, delta = _dq_tiles(
            dq, sum_p, delta, q, do, lse, norm, delta, k_source, v_source, batch, kv_head, first,
            full, end, n_keys, limit, rows, stride_k_t, stride_v_t, scale * LOG2_E, mask_ptr,
            sample, site_head, threshold, first_row,
            D, BLOCK_D, BLOCK_K, TMA, DROPOUT, True, VARLEN, False, True,
        )  # fmt: skip
        norm = 1.0 / tl.where(lse < float("inf"), sum_p, 1.0)
        delta *= norm
        tl.store(norm_ptr + statistics, norm, mask=rows < n_rows)
    else:
        o_source = o_ptr + ((batch.to(tl.int64) * T + first) * H + head) * D
        o = load_tile(
            o_source, batch, head, first, row, n_rows, H * D, within,
            D, BLOCK_D, False, True, VARLEN,
        )  # fmt: skip
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        if DROPOUT:
            delta *= (256 - threshold) / 256.0
    tl.store(delta_ptr + statistics, delta, mask=rows < n_rows)

    dq, sum_p, _ = _dq_tiles(
        dq, sum_p, delta, q, do, lse, norm, delta, k_source, v_source, batch, kv_head, first,
        0, full, n_keys, limit, rows, stride_k_t, stride_v_t, scale * LOG2_E, mask_ptr, sample,
        site_head, threshold, first_row, D, BLOCK_D, BLOCK_K, TMA, DROPOUT, False, VARLEN, FP32,
        False,
    )  # fmt: skip
    dq, sum_p, _ = _dq_tiles(
        dq, sum_p, delta, q, do, lse, norm, delta, k_source, v_source, batch, kv_head, first,
        full, end, n_keys, limit, rows, stride_k_t, stride_v_t, scale * LOG2_E, mask_ptr, sample,
        site_head, threshold, first_row, D, BLOCK_D, BLOCK_K, TMA, DROPOUT, True, VARLEN, FP32,
        False,
    )  # fmt: skip
    if DROPOUT:
        scale *= 256.0 / (256 - threshold)
    dq_head = head_ptr(dq_ptr, batch, first, head, stride_dq_b, stride_dq_t, stride_dq_h)
    within = tl.arange(0, BLOCK_Q) + unknown_zero(threshold)
    store_tile(dq * scale, dq_head, row, n_rows, stride_dq_t, within, D, BLOCK_D)


@triton.jit
def _statistics(lse_head, delta_head, rows, n_rows, TAIL: tl.constexpr, TOGETHER: tl.constexpr):
    """lse and delta of these rows. TOGETHER: in one load, of as many elements as a program has
    threads. One of fewer is made in the layout of the scores, where a thread copies 32 times 4
    bytes a tile (Triton 3.6)."""
    if TOGETHER:
        first = (tl.arange(0, 2) == 0)[None, :]
        at = tl.where(first, lse_head, delta_head) + rows[:, None]
        if TAIL:
            nothing = tl.where(first, float("inf"), 0.0)
            both = tl.load(at, mask=(rows < n_rows)[:, None], other=nothing)
        else:
            both = tl.load(at)
        lse, delta = tl.split(both)
    elif TAIL:
        lse = tl.load(lse_head + rows, mask=rows < n_rows, other=float("inf"))
        delta = tl.load(delta_head + rows, mask=rows < n_rows, other=0.0)
    else:
        lse = tl.load(lse_head + rows)
        delta = tl.load(delta_head + rows)
    return lse, delta


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, keys, q_source, do_source, lse_head, delta_head, norm_head, batch, head, first,
    low, high, n_rows, behind, stride_q_t, stride_do_t, scale, mask_ptr, sample, site_head,
    first_key, threshold, first_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, TMA: tl.constexpr,
    DROPOUT: tl.constexpr, CUT: tl.constexpr, TAIL: tl.constexpr, VARLEN: tl.constexpr,
    FP32: tl.constexpr,
):  # fmt: skip
    """Adds ds^T q and (p * keep)^T do of queries [low, high). CUT: the diagonal may pass through;
    TAIL: the last tile may reach beyond n_rows, where lse = inf makes p = 0."""
    within = tl.arange(0, BLOCK_Q)
    TOGETHER: tl.constexpr = BLOCK_Q >= 64 and not DROPOUT and not FP32
    for start in tl.range(low, high, BLOCK_Q):
        start = tl.multiple_of(start, BLOCK_Q)
        rows = start + within
        q = load_tile(
            q_source, batch, head, first, start, n_rows, stride_q_t, within,
            D, BLOCK_D, TMA, TAIL, VARLEN,
        )  # fmt: skip
        lse, delta = _statistics(lse_head, delta_head, rows, n_rows, TAIL, TOGETHER)
        do = load_tile(
            do_source, batch, head, first, start, n_rows, stride_do_t, within,
            D, BLOCK_D, TMA, TAIL, VARLEN,
        )  # fmt: skip
        if DROPOUT or FP32:
            s = tl.dot(q, k.T, input_precision="ieee")
            p = tl.math.exp2(s * scale - lse[:, None])
            if FP32:
                p *= tl.load(norm_head + rows, mask=rows < n_rows, other=1.0)[:, None]
            if CUT:
                p = tl.where(keys[None, :] <= (rows + behind)[:, None], p, 0.0)
            kept = p
            if DROPOUT:
                kept = drop(p, mask_ptr, sample, site_head, rows, first_key, threshold, first_row)
            dv = tl.dot(kept.to(do.dtype).T, do, dv, input_precision="ieee")
            dp = tl.dot(do, v.T, input_precision="ieee")
            ds = kept * dp - p * delta[:, None]
            dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision="ieee")
        else:
            s = tl.dot(k, q.T, input_precision="ieee")
            p = tl.math.exp2(s * scale - lse[None, :])
            if CUT:
                p = tl.where(keys[:, None] <= (rows + behind)[None, :], p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dp = tl.dot(v, do.T, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _dkdv_head(
    dk, dv, k, v, keys, do_ptr, q_ptr, lse_ptr, delta_ptr, norm_ptr, mask_ptr,
    stride_do_b, stride_do_t, stride_do_h, stride_q_b, stride_q_t, stride_q_h,
    sample, batch, head, first, n_rows, behind, first_key, T, Tk, H, scale, site_head, threshold,
    first_row, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """_dkdv_tiles of the queries of one head that see these keys: first those on the diagonal."""
    if TMA:
        q_source, do_source = q_ptr, do_ptr
    else:
        q_source = head_ptr(q_ptr, batch, first, head, stride_q_b, stride_q_t, stride_q_h)
        do_source = head_ptr(do_ptr, batch, first, head, stride_do_b, stride_do_t, stride_do_h)
    statistics = (batch.to(tl.int64) * H + head) * T + first
    if DROPOUT:
        mask_ptr, site_head = mask_of_head(mask_ptr, site_head, batch, head, H, T, Tk)
    full = n_rows * 0
    if CAUSAL:
        low = tl.maximum(first_key - behind, 0) // BLOCK_Q * BLOCK_Q
        cut = tl.maximum(first_key - behind + BLOCK_K - 1, 0)
        full = tl.cdiv(cut, BLOCK_Q) * BLOCK_Q
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, keys, q_source, do_source, lse_ptr + statistics, delta_ptr + statistics,
            norm_ptr + statistics, batch, head, first, low, tl.minimum(full, n_rows), n_rows,
            behind, stride_q_t, stride_do_t, scale, mask_ptr, sample, site_head, first_key,
            threshold, first_row, D, BLOCK_D, BLOCK_Q, TMA, DROPOUT, True, not EVEN, VARLEN, FP32,
        )  # fmt: skip
    return _dkdv_tiles(
        dk, dv, k, v, keys, q_source, do_source, lse_ptr + statistics, delta_ptr + statistics,
        norm_ptr + statistics, batch, head, first, full, n_rows, n_rows, behind, stride_q_t,
        stride_do_t, scale, mask_ptr, sample, site_head, first_key, threshold, first_row,
        D, BLOCK_D, BLOCK_Q, TMA, DROPOUT, False, not EVEN, VARLEN, FP32,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "site_head", "threshold", "first_row"])
def _attention_bwd_dkdv_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, norm_ptr, dk_ptr, dv_ptr, mask_ptr, cu_ptr,
    stride_do_b, stride_do_t, stride_do_h,
    stride_q_b, stride_q_t, stride_q_h,
    stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_dk_b, stride_dk_t, stride_dk_h,
    stride_dv_b, stride_dv_t, stride_dv_h,
    n, T, Tk, H, group, section, scale, site_head, threshold, first_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, STEPS: tl.constexpr,
    TMA: tl.constexpr, FP32: tl.constexpr,
    EVEN: tl.constexpr,  # T is a multiple of BLOCK_Q
    GROUPED: tl.constexpr,  # group > 1; a loop over one head costs registers
):  # fmt: skip
    sample, batch, kv_head, first, n_keys, tile = find_tile(
        cu_ptr, n, Tk, H // group, section, BLOCK_K, VARLEN, STEPS
    )
    if (tile < 0) | (tile * BLOCK_K >= n_keys):
        return
    n_rows = n_keys if VARLEN else T
    behind = n_keys - n_rows
    first_key = tile * BLOCK_K
    order = tile_order(BLOCK_K, DROPOUT, mask_ptr)
    keys = first_key + order
    k_source = head_ptr(k_ptr, batch, first, kv_head, stride_k_b, stride_k_t, stride_k_h)
    v_source = head_ptr(v_ptr, batch, first, kv_head, stride_v_b, stride_v_t, stride_v_h)
    k = load_tile(
        k_source, batch, kv_head, first, first_key, n_keys, stride_k_t, order,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    v = load_tile(
        v_source, batch, kv_head, first, first_key, n_keys, stride_v_t, order,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    if GROUPED:
        for i in range(group):
            dk, dv = _dkdv_head(
                dk, dv, k, v, keys, do_ptr, q_ptr, lse_ptr, delta_ptr, norm_ptr, mask_ptr,
                stride_do_b, stride_do_t, stride_do_h, stride_q_b, stride_q_t, stride_q_h,
                sample, batch, kv_head * group + i, first, n_rows, behind, first_key, T, Tk, H,
                scale * LOG2_E, site_head, threshold, first_row,
                D, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, DROPOUT, VARLEN, TMA, EVEN, FP32,
            )  # fmt: skip
    else:
        dk, dv = _dkdv_head(
            dk, dv, k, v, keys, do_ptr, q_ptr, lse_ptr, delta_ptr, norm_ptr, mask_ptr,
            stride_do_b, stride_do_t, stride_do_h, stride_q_b, stride_q_t, stride_q_h,
            sample, batch, kv_head, first, n_rows, behind, first_key, T, Tk, H,
            scale * LOG2_E, site_head, threshold, first_row,
            D, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, DROPOUT, VARLEN, TMA, EVEN, FP32,
        )  # fmt: skip
    if DROPOUT:
        dk *= 256.0 / (256 - threshold)
        dv *= 256.0 / (256 - threshold)
    dk_head = head_ptr(dk_ptr, batch, first, kv_head, stride_dk_b, stride_dk_t, stride_dk_h)
    dv_head = head_ptr(dv_ptr, batch, first, kv_head, stride_dv_b, stride_dv_t, stride_dv_h)
    order = tile_order(BLOCK_K, DROPOUT, mask_ptr, unknown_zero(threshold))
    store_tile(dk * scale, dk_head, first_key, n_keys, stride_dk_t, order, D, BLOCK_D)
    store_tile(dv, dv_head, first_key, n_keys, stride_dv_t, order, D, BLOCK_D)


def attention_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    causal: bool,
    scale: float,
    key: Tensor | None,
    site_head: int,
    threshold: int,
    cu_seqlens: Tensor | None,
    bits: Tensor | None = None,
    first_row: int | None = None,
    hopper: bool = False,
) -> None:
    """Writes dq, dk and dv, maybe parts of one packed tensor; the rest is as in the forward.

    hopper: dk and dv by the kernel of attention_hopper_bwd_triton.py, where that can serve.
    """
    arch, dtype = gpu_arch(q.device), q.dtype
    varlen, fp32, dropout = cu_seqlens is not None, dtype == torch.float32, threshold > 0
    do = do if do.stride(-1) == 1 else do.contiguous()
    if varlen:
        do, q, k, v, o, dq, dk, dv = (x[None] for x in (do, q, k, v, o, dq, dk, dv))
    shape, k_shape = q.shape, k.shape
    n = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    place = max(16, next_power_of_2(shape[3])), variant_for(dropout, fp32, bits)
    plan = bwd_plan(
        shape, k_shape, (do.stride(), q.stride(), k.stride(), v.stride(), dq.stride(),
        dk.stride(), dv.stride()), dtype, causal, dropout, dropout and bits is None, n, varlen,
        get_config(arch, "bwd_dq", *place), get_config(arch, "bwd_dkdv", *place),
        SECTIONS.get(arch).megabytes,
    )  # fmt: skip
    delta = torch.empty_like(lse)
    norm = torch.empty_like(lse) if fp32 else delta  # not touched otherwise
    mask = mask_source(key, bits, q.device)

    k_box, v_box, do_box, q_box = plan.boxes
    tma = k_box is not None and v_box is not None and aligned(k, v)
    launch(
        _attention_bwd_dq_kernel,
        plan.grids[0],
        do,
        q,
        Boxed(k, k_box) if tma else k,
        Boxed(v, v_box) if tma else v,
        o,
        lse,
        delta,
        norm,
        dq,
        mask,
        cu_seqlens,
        *plan.numbers[0],
        scale,
        site_head,
        threshold,
        first_row,
        TMA=tma,
        **plan.constants[0],
    )

    if hopper:
        from fastpar.kernels.attention_hopper_bwd_triton import attention_hopper_dkdv

        attention_hopper_dkdv(do, q, k, v, lse, delta, dk, dv, scale)
        return
    tma = do_box is not None and q_box is not None and aligned(do, q)
    launch(
        _attention_bwd_dkdv_kernel,
        plan.grids[1],
        Boxed(do, do_box) if tma else do,
        Boxed(q, q_box) if tma else q,
        k,
        v,
        lse,
        delta,
        norm,
        dk,
        dv,
        mask,
        cu_seqlens,
        *plan.numbers[1],
        scale,
        site_head,
        threshold,
        first_row,
        TMA=tma,
        **plan.constants[1],
    )


_SPILLS = {
    "spills": "at most 16 bytes that only prologue and epilogue use, none inside the loops; "
    "the tiles that spill nothing take up to 1.8 times the instructions"
}
AOT_EXEMPT = {
    "_attention_bwd_dkdv_kernel *dropout": _SPILLS,
    "_attention_bwd_dkdv_kernel *dropout of later rows": _SPILLS,
}


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """The calls of the backward that `make aot` compiles."""

    def run(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> None:
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        lse = torch.empty(
            (*q.shape[:-3], q.shape[-2], q.shape[-3]), device="meta", dtype=torch.float32
        )
        attention_bwd(o, q, k, v, o, lse, q, k, v, *settings)

    return aot_variants(run)
