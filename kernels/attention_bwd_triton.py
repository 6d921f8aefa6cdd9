"""Attention backward in Triton: two kernels, each the owner of what it writes.

    delta = rowsum(do * o),  dp = keep / (1 - dropout) * (do v^T),  ds = p * (dp - delta),
    dq = scale * ds k,  dk = scale * ds^T q,  dv = (p * keep / (1 - dropout))^T do

p is computed again from q, k and lse. _attention_bwd_dq_kernel owns BLOCK_Q queries, also computes
their delta, and walks over keys like the forward. _attention_bwd_dkdv_kernel runs after it, owns
BLOCK_K keys of one key head and walks over the queries that see them, of each query head of the
group in turn. So every sum has one order, without atomics: gradients are the same bits in every
run. The price is that scores and dp are computed twice (seven matrix products instead of five).

_attention_bwd_dkdv_kernel holds scores transposed, [BLOCK_K, BLOCK_Q]: p^T and ds^T are then the
left operands of their products and stay in registers.

Notes referred to here are in attention_triton.py. Source: Dao 2023, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.attention_configs import get_config, variant_for
from fastpar.kernels.attention_triton import (
    LOG2_E,
    aot_inputs,
    descriptor,
    document_tile,
    heads_per_section,
    keep_in_order,
    load_tile,
    program_tile,
    store_tile,
    tile_order,
    tma_reads,
)
from fastpar.kernels.philox_triton import keep_tile
from fastpar.kernels.triton_launch import cdiv, device_key, gpu_arch, launch


@triton.jit
def _dq_tiles(
    dq,
    q,
    do,
    lse,
    delta,
    k_source,
    v_source,
    batch,
    kv_head,
    first,
    low,
    high,
    n_keys,
    limit,
    rows,
    stride_k_t,
    stride_v_t,
    scale_log2,
    key_ptr,
    sample,
    site_head,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """One loop of [Note: phases]: dq / scale of keys [low, high)."""
    order = tile_order(BLOCK_K, DROPOUT)
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
        p = tl.math.exp2(s * scale_log2 - lse[:, None])
        if MASKED:
            p = tl.where((start + order)[None, :] < limit[:, None], p, 0.0)
        dp = tl.dot(do, v.T, input_precision="ieee")
        if DROPOUT:
            keep = keep_in_order(key_ptr, sample, site_head, rows, start, threshold, BLOCK_K)
            dp = tl.where(keep, dp * (256.0 / (256 - threshold)), 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["n", "T", "Tk", "H", "group", "section", "site", "threshold"])
def _attention_bwd_dq_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    key_ptr,
    cu_ptr,
    stride_do_b,
    stride_do_t,
    stride_do_h,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    stride_dq_b,
    stride_dq_t,
    stride_dq_h,
    n,  # samples; documents with cu_seqlens
    T,  # queries of a sample; of all documents
    Tk,
    H,
    group,
    section,
    scale,
    scale_log2,
    site,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    VARLEN: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TMA: tl.constexpr,
):
    if VARLEN:
        number, head = tl.program_id(0) // H, tl.program_id(0) % H
        sample, first, n_rows, tile = document_tile(cu_ptr, n, T, number, SEARCH_STEPS, BLOCK_Q)
        batch = head * 0
        n_keys = n_rows
        tile = tl.cdiv(n_rows, BLOCK_Q) - 1 - tile
        if (tile < 0) | (tile * BLOCK_Q >= n_rows):
            return
    else:
        n_tiles = tl.cdiv(T, BLOCK_Q)
        tile, at = program_tile(n_tiles, n * H, section)
        tile = n_tiles - 1 - tile
        sample, head = at // H, at % H
        batch = sample
        first = head * 0
        n_rows, n_keys = T, Tk
    kv_head = head // group
    row = tile * BLOCK_Q
    rows = row + tl.arange(0, BLOCK_Q)
    behind = n_keys - n_rows
    if CAUSAL:
        limit = tl.minimum(rows + behind + 1, n_keys)
        full = tl.minimum(tl.maximum(row + behind + 1, 0), n_keys) // BLOCK_K * BLOCK_K
        end = tl.minimum(row + behind + BLOCK_Q, n_keys)
    else:
        limit = rows * 0 + n_keys
        full = n_keys // BLOCK_K * BLOCK_K
        end = n_keys

    wide, wide_first, wide_head = batch.to(tl.int64), first.to(tl.int64), head.to(tl.int64)
    q_head = q_ptr + wide * stride_q_b + wide_first * stride_q_t + wide_head * stride_q_h
    do_head = do_ptr + wide * stride_do_b + wide_first * stride_do_t + wide_head * stride_do_h
    dq_head = dq_ptr + wide * stride_dq_b + wide_first * stride_dq_t + wide_head * stride_dq_h
    o_head = o_ptr + ((wide * T + wide_first) * H + head) * D
    if TMA:
        k_source, v_source = k_ptr, v_ptr
    else:
        at_head = kv_head.to(tl.int64)
        k_source = k_ptr + wide * stride_k_b + wide_first * stride_k_t + at_head * stride_k_h
        v_source = v_ptr + wide * stride_v_b + wide_first * stride_v_t + at_head * stride_v_h
    within = tl.arange(0, BLOCK_Q)
    q = load_tile(
        q_head, batch, head, first, row, n_rows, stride_q_t, within,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    do = load_tile(
        do_head, batch, head, first, row, n_rows, stride_do_t, within,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    o = load_tile(
        o_head, batch, head, first, row, n_rows, H * D, within,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    statistics = (wide * H + head) * T + wide_first + rows
    tl.store(delta_ptr + statistics, delta, mask=rows < n_rows)
    lse = tl.load(lse_ptr + statistics, mask=rows < n_rows, other=float("inf"))

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    site_head = (site << 16) | head
    dq = _dq_tiles(
        dq, q, do, lse, delta, k_source, v_source, batch, kv_head, first, 0, full, n_keys, limit,
        rows, stride_k_t, stride_v_t, scale_log2, key_ptr, sample, site_head, threshold,
        D, BLOCK_D, BLOCK_K, TMA, DROPOUT, False, VARLEN,
    )  # fmt: skip
    dq = _dq_tiles(
        dq, q, do, lse, delta, k_source, v_source, batch, kv_head, first, full, end, n_keys, limit,
        rows, stride_k_t, stride_v_t, scale_log2, key_ptr, sample, site_head, threshold,
        D, BLOCK_D, BLOCK_K, TMA, DROPOUT, True, VARLEN,
    )  # fmt: skip
    store_tile(dq * scale, dq_head, row, n_rows, stride_dq_t, D, BLOCK_D)


@triton.jit
def _dkdv_tiles(
    dk,
    dv,
    k,
    v,
    keys,
    q_source,
    do_source,
    lse_head,
    delta_head,
    batch,
    head,
    first,
    low,
    high,
    n_rows,
    behind,
    stride_q_t,
    stride_do_t,
    scale_log2,
    key_ptr,
    sample,
    site_head,
    first_key,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    DROPOUT: tl.constexpr,
    CUT: tl.constexpr,
    TAIL: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """dk / scale and dv (without dropout's scale) of queries [low, high). CUT: the diagonal may
    pass through; TAIL: the last tile may reach beyond n_rows, where lse = inf makes p = 0."""
    within = tl.arange(0, BLOCK_Q)
    for start in tl.range(low, high, BLOCK_Q):
        start = tl.multiple_of(start, BLOCK_Q)
        rows = start + within
        q = load_tile(
            q_source, batch, head, first, start, n_rows, stride_q_t, within,
            D, BLOCK_D, TMA, TAIL, VARLEN,
        )  # fmt: skip
        if TAIL:
            lse = tl.load(lse_head + rows, mask=rows < n_rows, other=float("inf"))
            delta = tl.load(delta_head + rows, mask=rows < n_rows, other=0.0)
        else:
            lse = tl.load(lse_head + rows)
            delta = tl.load(delta_head + rows)
        s = tl.dot(k, q.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
        p = tl.math.exp2(s * scale_log2 - lse[None, :])
        if CUT:
            p = tl.where(keys[:, None] <= (rows + behind)[None, :], p, 0.0)
        do = load_tile(
            do_source, batch, head, first, start, n_rows, stride_do_t, within,
            D, BLOCK_D, TMA, TAIL, VARLEN,
        )  # fmt: skip
        kept = p
        if DROPOUT:
            keep = keep_tile(
                key_ptr, sample, site_head, rows, first_key // 16, threshold, BLOCK_K
            ).T
            kept = tl.where(keep, p, 0.0)
        dv = tl.dot(kept.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, do.T, input_precision="ieee")
        if DROPOUT:
            dp = tl.where(keep, dp * (256.0 / (256 - threshold)), 0.0)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["n", "T", "Tk", "H", "group", "section", "site", "threshold"])
def _attention_bwd_dkdv_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    key_ptr,
    cu_ptr,
    stride_do_b,
    stride_do_t,
    stride_do_h,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    stride_dk_b,
    stride_dk_t,
    stride_dk_h,
    stride_dv_b,
    stride_dv_t,
    stride_dv_h,
    n,
    T,
    Tk,
    H,
    group,
    section,
    scale,
    scale_log2,
    site,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    VARLEN: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,  # T is a multiple of BLOCK_Q
):
    n_kv_heads = H // group
    if VARLEN:
        number, kv_head = tl.program_id(0) // n_kv_heads, tl.program_id(0) % n_kv_heads
        sample, first, n_keys, tile = document_tile(cu_ptr, n, Tk, number, SEARCH_STEPS, BLOCK_K)
        batch = kv_head * 0
        n_rows = n_keys
        if (tile < 0) | (tile * BLOCK_K >= n_keys):
            return
    else:
        tile, at = program_tile(tl.cdiv(Tk, BLOCK_K), n * n_kv_heads, section)
        sample, kv_head = at // n_kv_heads, at % n_kv_heads
        batch = sample
        first = kv_head * 0
        n_rows, n_keys = T, Tk
    first_key = tile * BLOCK_K
    order = tile_order(BLOCK_K, False)
    keys = first_key + order
    behind = n_keys - n_rows
    low = n_rows * 0
    cut_end = low
    if CAUSAL:
        low = tl.maximum(first_key - behind, 0) // BLOCK_Q * BLOCK_Q
        cut_end = tl.cdiv(tl.maximum(first_key + BLOCK_K - 1 - behind, 0), BLOCK_Q) * BLOCK_Q

    wide, wide_first, wide_head = batch.to(tl.int64), first.to(tl.int64), kv_head.to(tl.int64)
    k_head = k_ptr + wide * stride_k_b + wide_first * stride_k_t + wide_head * stride_k_h
    v_head = v_ptr + wide * stride_v_b + wide_first * stride_v_t + wide_head * stride_v_h
    k = load_tile(
        k_head, batch, kv_head, first, first_key, n_keys, stride_k_t, order,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    v = load_tile(
        v_head, batch, kv_head, first, first_key, n_keys, stride_v_t, order,
        D, BLOCK_D, False, True, VARLEN,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for i in range(group):
        head = kv_head * group + i
        at_head = head.to(tl.int64)
        if TMA:
            q_source, do_source = q_ptr, do_ptr
        else:
            q_source = q_ptr + wide * stride_q_b + wide_first * stride_q_t + at_head * stride_q_h
            do_source = (
                do_ptr + wide * stride_do_b + wide_first * stride_do_t + at_head * stride_do_h
            )
        statistics = (wide * H + head) * T + wide_first
        site_head = (site << 16) | head
        if CAUSAL:
            dk, dv = _dkdv_tiles(
                dk, dv, k, v, keys, q_source, do_source, lse_ptr + statistics,
                delta_ptr + statistics, batch, head, first, low, tl.minimum(cut_end, n_rows),
                n_rows, behind, stride_q_t, stride_do_t, scale_log2, key_ptr, sample, site_head,
                first_key, threshold, D, BLOCK_D, BLOCK_Q, BLOCK_K, TMA, DROPOUT, True, not EVEN,
                VARLEN,
            )  # fmt: skip
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, keys, q_source, do_source, lse_ptr + statistics,
            delta_ptr + statistics, batch, head, first, tl.maximum(low, cut_end), n_rows,
            n_rows, behind, stride_q_t, stride_do_t, scale_log2, key_ptr, sample, site_head,
            first_key, threshold, D, BLOCK_D, BLOCK_Q, BLOCK_K, TMA, DROPOUT, False, not EVEN,
            VARLEN,
        )  # fmt: skip
    if DROPOUT:
        dv *= 256.0 / (256 - threshold)
    dk_head = dk_ptr + wide * stride_dk_b + wide_first * stride_dk_t + wide_head * stride_dk_h
    dv_head = dv_ptr + wide * stride_dv_b + wide_first * stride_dv_t + wide_head * stride_dv_h
    store_tile(dk * scale, dk_head, first_key, n_keys, stride_dk_t, D, BLOCK_D)
    store_tile(dv, dv_head, first_key, n_keys, stride_dv_t, D, BLOCK_D)


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
    site: int,
    threshold: int,
    cu_seqlens: Tensor | None,
) -> None:
    """Writes dq, dk and dv, maybe parts of one packed tensor; o and lse are the forward's."""
    arch, D = gpu_arch(q.device), q.shape[-1]
    varlen, variant = cu_seqlens is not None, variant_for(threshold > 0, q.dtype == torch.float32)
    block_d = max(16, triton.next_power_of_2(D))
    if do.stride(-1) != 1:
        do = do.contiguous()
    if varlen:
        do, q, k, v, o, dq, dk, dv = (x[None] for x in (do, q, k, v, o, dq, dk, dv))
    B, T, H, _ = q.shape
    Tk, Hkv = k.shape[1], k.shape[2]
    n = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    delta = torch.empty_like(lse)
    if key is not None:
        key = device_key(key, q.device)
    section = heads_per_section(k, 1, arch)
    constants = {
        "D": D,
        "BLOCK_D": block_d,
        "CAUSAL": causal,
        "DROPOUT": threshold > 0,
        "VARLEN": varlen,
        "SEARCH_STEPS": n.bit_length() if varlen else 0,
    }

    config = get_config(arch, "bwd_dq", block_d, variant)
    tma = config.load == "tma" and tma_reads(k) and tma_reads(v)
    tiles = T // config.block_q + n if varlen else cdiv(T, config.block_q) * n
    launch(
        _attention_bwd_dq_kernel,
        (tiles * H,),
        do,
        q,
        descriptor(k, config.block_k, block_d) if tma else k,
        descriptor(v, config.block_k, block_d) if tma else v,
        o,
        lse,
        delta,
        dq,
        key,
        cu_seqlens,
        *do.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dq.stride()[:3],
        n,
        T,
        Tk,
        H,
        H // Hkv,
        section * (H // Hkv),
        scale,
        scale * LOG2_E,
        site,
        threshold,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        TMA=tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )

    config = get_config(arch, "bwd_dkdv", block_d, variant)
    tma = config.load == "tma" and tma_reads(q) and tma_reads(do)
    tiles = Tk // config.block_k + n if varlen else cdiv(Tk, config.block_k) * n
    launch(
        _attention_bwd_dkdv_kernel,
        (tiles * Hkv,),
        descriptor(do, config.block_q, block_d) if tma else do,
        descriptor(q, config.block_q, block_d) if tma else q,
        k,
        v,
        lse,
        delta,
        dk,
        dv,
        key,
        cu_seqlens,
        *do.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        n,
        T,
        Tk,
        H,
        H // Hkv,
        section,
        scale,
        scale * LOG2_E,
        site,
        threshold,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        TMA=tma,
        EVEN=not varlen and T % config.block_q == 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """What `make aot` compiles of the backward."""
    key = torch.empty(2, dtype=torch.int64, device="meta")
    cu = torch.empty(5, dtype=torch.int32, device="meta")

    def call(dropout: bool = False, causal: bool = True, varlen: bool = False, **shape: Any) -> Any:
        q, k, v = aot_inputs(**shape)
        if varlen:
            q, k, v = q[0], k[0], v[0]
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        rows = (o.shape[-2], o.shape[0]) if varlen else (o.shape[0], o.shape[2], o.shape[1])
        lse = torch.empty(rows, device="meta")
        mask = (key, 1, 26) if dropout else (None, 0, 0)
        tensors = (o, q, k, v, o, lse, q, k, v)
        return lambda: attention_bwd(*tensors, causal, 0.125, *mask, cu if varlen else None)

    return [
        ("D=64 bf16 causal", call()),
        ("D=64 bf16 causal dropout", call(dropout=True)),
        ("D=64 bf16 full", call(causal=False)),
        ("D=64 fp16 causal", call(dtype=torch.float16)),
        ("D=64 fp32 causal", call(dtype=torch.float32)),
        ("D=64 bf16 causal varlen", call(varlen=True)),
        ("D=64 bf16 causal varlen dropout", call(varlen=True, dropout=True)),
        ("D=128 bf16 causal", call(D=128)),
        ("D=128 bf16 causal dropout", call(D=128, dropout=True)),
        ("D=80 bf16 causal", call(D=80)),
        ("D=32 bf16 causal, 4 key heads", call(D=32, kv_heads=4)),
    ]
