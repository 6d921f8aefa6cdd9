"""Attention in Triton, forward and backward: each program owns the output that it writes.

    s = scale * q k^T,  lse = log2(sum_j 2**(s_j log2 e)),  p = 2**(s log2 e - lse),
    o = (p * keep / (1 - dropout)) v

One program owns BLOCK_Q queries of one head and walks over the keys they see, BLOCK_K at a time,
with the running maximum and sum of FlashAttention-2; scores never leave registers. Statistics and
accumulators are fp32. Saved for backward besides the inputs and o: lse (base 2, fp32; +inf for a
query that sees nothing, so that its probabilities are computed again as 0).

[Note: phases] Keys come in two loops: tiles that every query of the program sees, without any
mask, then (`cut`) those that the diagonal or the end of the keys crosses. A mask costs as many
instructions as a quarter of the softmax, and at T = 1024 seven tiles of eight need none.

[Note: order] Programs start in the order of their index. Under a causal mask the longest come
first, so that the last to end are short, and go through `section` heads at a time, whose keys and
values fit in L2 together.

[Note: documents] With cu_seqlens, document d has at most cu[d+1] // BLOCK - cu[d] // BLOCK + 1
tiles, so its first tile gets the number cu[d] // BLOCK + d: the grid of total // BLOCK + n programs
is known without reading cu_seqlens on the host, and a program finds its document by bisection.
Bounds are clamped to [0, total], so that no cu_seqlens gives an address outside the tensors.

[Note: key order] A Philox call gives the bits of 16 neighbouring keys, but a thread holds keys
2c, 2c + 1, 2c + 8, ... of a row of scores (c = lane % 4: the fragment of the matrix instruction).
With dropout the 64 keys of a tile are therefore loaded in an order that gives a thread 16
neighbours: position 8 j + 2 c + e holds key 16 c + 2 j + e. So no bit is exchanged between threads
or computed twice. K and V are then read by pointers: a descriptor's box has the order of memory.

Backward:

    delta = rowsum(do * o),  dp = keep / (1 - dropout) * (do v^T),  ds = p * (dp - delta),
    dq = scale * ds k,  dk = scale * ds^T q,  dv = (p * keep / (1 - dropout))^T do

p is computed again from q, k and lse. _attention_bwd_dq_kernel owns BLOCK_Q queries, also computes
their delta, and walks over keys like the forward. _attention_bwd_dkdv_kernel runs after it, owns
BLOCK_K keys of one key head and walks over the queries that see them, for each query head of the
group in turn. So every sum has one order, without atomics, at the price of scores and dp that are
computed twice (seven matrix products instead of five).

With dropout, kept = p * keep: ds * (1 - dropout) = kept * (do v^T) - p * delta * (1 - dropout), and
dq, dk and dv are scaled once by 1 / (1 - dropout).

[Note: fp32] In fp32 the statistics themselves dominate the rounding: lse by its own size, delta and
dp by two different sums. So for fp32 inputs _attention_bwd_dq_kernel first walks over the keys once
more for delta = sum(p * keep * dp) and for sum(p), whose inverse it writes as `norm` and by which
both kernels correct p. That is valid only for exactly these scores: both multiply q k^T.

[Note: transposed] _attention_bwd_dkdv_kernel holds scores as [BLOCK_K, BLOCK_Q]: p^T and ds^T are
then left operands and stay in registers. With dropout, because of [Note: key order], and in fp32 it
holds them as [BLOCK_Q, BLOCK_K] and passes p and ds through shared memory instead.

Source: Dao 2023, arXiv 2307.08691.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.attention.bits_triton import drop, mask_of_head, tile_order, unknown_zero
from fastpar.kernels.attention.plans import (
    SECTIONS,
    aligned,
    bwd_plan,
    fwd_plan,
    get_config,
    padded,
    variant_for,
)
from fastpar.kernels.triton_launch import Boxed, device_key, gpu_arch, launch, meta

LOG2_E = tl.constexpr(1.4426950408889634)
UNSPECIALIZED = ("n", "T", "Tk", "H", "group", "section")  # sizes that change from call to call


@triton.jit
def _program_tile(n_tiles, n_heads, section):
    """(tile, head) of this program; see [Note: order]."""
    pid = tl.program_id(0)
    first = pid // (section * n_tiles) * section
    inside = pid - first * n_tiles
    size = tl.minimum(section, n_heads - first)
    return inside // size, first + inside % size


@triton.jit
def _document_tile(cu_ptr, n_docs, total, number, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """(document, its first row, its length, tile of it) of a tile's number; [Note: documents]."""
    low = number * 0
    high = low + n_docs
    for _ in range(STEPS):
        middle = (low + high) // 2
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + middle), 0), total)
        before = start // BLOCK + middle <= number
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.minimum(tl.maximum(tl.load(cu_ptr + low), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_ptr + low + 1), start), total)
    return low, start, end - start, number - start // BLOCK - low


@triton.jit
def find_tile(
    cu_ptr, n, length, n_heads, section,
    BLOCK: tl.constexpr, VARLEN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """What this program owns: (sample or document, index in the batch dimension, head, first row,
    rows from there on, tile of BLOCK of them). The tile of a surplus program is outside."""
    if VARLEN:
        number, head = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads
        sample, first, rows, tile = _document_tile(cu_ptr, n, length, number, BLOCK, STEPS)
        batch = head * 0
    else:
        tile, at = _program_tile(tl.cdiv(length, BLOCK), n * n_heads, section)
        sample, head = at // n_heads, at % n_heads
        batch = sample
        first = head * 0
        rows = first + length
    return sample, batch, head, first, rows, tile


@triton.jit
def key_range(
    row, n_rows, n_keys, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr
):
    """(keys below which each query sees, end of the tiles that need no mask, end of all)."""
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
    return limit, full, end


@triton.jit
def head_of(ptr, strides, batch, first, head, TMA: tl.constexpr):
    """One head as load_tile() and store_tile() take it, from row `first` on: (pointer or
    descriptor, batch, head, first, stride of rows)."""
    if not TMA:
        ptr = ptr + batch.to(tl.int64) * strides[0] + first.to(tl.int64) * strides[1]
        ptr += head.to(tl.int64) * strides[2]
    return ptr, batch, head, first, strides[1]


@triton.jit
def load_tile(
    of_head, start, n, order, D: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Rows start + order of one head, [BLOCK, BLOCK_D]; zeros from row n on if MASKED."""
    source, batch, head, first, stride = of_head
    if TMA:
        x = source.load([batch, head, first + start, 0]).reshape(order.shape[0], BLOCK_D)
        if MASKED and VARLEN:  # beyond the end of the document is the next one
            x = tl.where((start + order < n)[:, None], x, 0.0)
    else:
        dims = tl.arange(0, BLOCK_D)
        tile = source + start.to(tl.int64) * stride
        at = tile + order.to(tl.int64)[:, None] * stride + dims[None, :]
        if MASKED and BLOCK_D != D:
            x = tl.load(at, mask=(start + order < n)[:, None] & (dims < D)[None, :], other=0.0)
        elif MASKED:
            x = tl.load(at, mask=(start + order < n)[:, None], other=0.0)
        elif BLOCK_D != D:
            x = tl.load(at, mask=(dims < D)[None, :], other=0.0)
        else:
            x = tl.load(at)
    return x


@triton.jit
def store_tile(x, of_head, start, n, order, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows start + order of one head, those below n."""
    to, _, _, _, stride = of_head
    dims = tl.arange(0, BLOCK_D)
    at = to + (start + order).to(tl.int64)[:, None] * stride + dims[None, :]
    inside = (start + order < n)[:, None]
    if BLOCK_D != D:
        inside = inside & (dims < D)[None, :]
    tl.store(at, x.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _fwd_tiles(
    acc, m, sums, q, k_head, v_head, low, high, n_keys, limit, rows, scale, mask,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One of the two loops of [Note: phases]: keys [low, high); row i sees keys below limit[i].
    scale: with log2(e)."""
    order = tile_order(BLOCK_K, DROPOUT, mask[0])
    for start in tl.range(low, high, BLOCK_K):
        start = tl.multiple_of(start, BLOCK_K)
        k = load_tile(k_head, start, n_keys, order, D, BLOCK_D, TMA, MASKED, VARLEN)
        s = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            s = tl.where((start + order)[None, :] < limit[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing seen yet: no -inf - -inf
        p = tl.math.exp2(s * scale - shift[:, None])
        alpha = tl.math.exp2(m - shift)
        sums = sums * alpha + tl.sum(p, 1)
        if DROPOUT:
            p = drop(p, mask, rows, start)
        v = load_tile(v_head, start, n_keys, order, D, BLOCK_D, TMA, MASKED, VARLEN)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, sums


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "site_head", "threshold", "first_row"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, mask_ptr, cu_ptr,
    stride_q_b, stride_q_t, stride_q_h,
    stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    n,  # samples; documents with cu_seqlens
    T,  # queries of a sample; of all documents
    Tk, H, group, section, scale, site_head, threshold,
    first_row,  # of the mask, that of the first query; None: 0
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, STEPS: tl.constexpr,
    TMA: tl.constexpr,
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
    k_head = head_of(k_ptr, (stride_k_b, stride_k_t, stride_k_h), batch, first, kv_head, TMA)
    v_head = head_of(v_ptr, (stride_v_b, stride_v_t, stride_v_h), batch, first, kv_head, TMA)
    q_head = head_of(q_ptr, (stride_q_b, stride_q_t, stride_q_h), batch, first, head, False)
    q = load_tile(q_head, row, n_rows, within, D, BLOCK_D, False, True, VARLEN)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK_Q], tl.float32)
    if DROPOUT:
        mask_ptr, site_head = mask_of_head(mask_ptr, site_head, batch, head, H, T, Tk)
    mask = mask_ptr, sample, site_head, threshold, first_row
    for cut in tl.static_range(2):
        acc, m, sums = _fwd_tiles(
            acc, m, sums, q, k_head, v_head, full if cut else 0, end if cut else full, n_keys,
            limit, rows, scale * LOG2_E, mask, D, BLOCK_D, BLOCK_K, TMA, DROPOUT, cut == 1, VARLEN,
        )  # fmt: skip

    seen = sums != 0.0  # also true for NaN
    sums = tl.where(seen, sums, 1.0)
    inverse = 1.0 / sums
    if DROPOUT:
        inverse *= 256.0 / (256 - threshold)
    lse = tl.where(seen, m + tl.math.log2(sums), float("inf"))
    row_0 = batch.to(tl.int64) * T + first
    if DROPOUT or VARLEN:
        within += unknown_zero(threshold)
    o = acc * inverse[:, None]
    o_head = o_ptr + (row_0 * H + head) * D, batch, head, first, H * D
    store_tile(o, o_head, row, n_rows, within, D, BLOCK_D)
    lse_head = lse_ptr + (batch.to(tl.int64) * H + head) * T + first
    tl.store(lse_head + row + within, lse, mask=row + within < n_rows)


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, key: Tensor | None, site_head: int,
    threshold: int, cu_seqlens: Tensor | None, bits: Tensor | None = None,
    first_row: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, contiguous, and lse: [B, H, T] for q [B, T, H, D], [H, total] for q [total, H, D]. bits:
    the mask, if __init__.py keeps it; else it is drawn, with its rows from first_row on."""
    arch, dtype = gpu_arch(q.device), q.dtype
    varlen, fp32, dropout = cu_seqlens is not None, dtype == torch.float32, threshold > 0
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    if varlen:
        q, k, v = q[None], k[None], v[None]
    shape, k_shape = q.shape, k.shape
    B, T, H, D = shape
    config = get_config(arch, "fwd", padded(D), variant_for(dropout, fp32, bits))
    lse = q.new_empty((H, T) if varlen else (B, H, T), dtype=torch.float32)
    n = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    plan = fwd_plan(
        shape, q.stride(), k_shape, k.stride(), v.stride(), dtype, causal, dropout,
        dropout and bits is None, n, varlen, config, SECTIONS.get(arch).megabytes,
    )  # fmt: skip
    tma = plan.k is not None and plan.v is not None and aligned(k, v)
    launch(
        _attention_fwd_kernel, plan.grid,
        q, Boxed(k, plan.k) if tma else k, Boxed(v, plan.v) if tma else v, o, lse,
        device_key(key, q.device) if bits is None else bits, cu_seqlens, *plan.numbers, scale,
        site_head, threshold, first_row, TMA=tma, **plan.constants,
    )  # fmt: skip
    return o, lse


@triton.jit
def _dq_tiles(
    dq, sum_p, sum_dp, q, do, lse, norm, delta, k_head, v_head, low, high, n_keys, limit, rows,
    scale, mask,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, VARLEN: tl.constexpr, FP32: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """One loop of [Note: phases] over keys [low, high): adds ds k to dq or, if SUMS, p and
    p * keep * dp to the sums of [Note: fp32]. scale: with log2(e)."""
    order = tile_order(BLOCK_K, DROPOUT, mask[0])
    for start in tl.range(low, high, BLOCK_K):
        start = tl.multiple_of(start, BLOCK_K)
        k = load_tile(k_head, start, n_keys, order, D, BLOCK_D, TMA, MASKED, VARLEN)
        v = load_tile(v_head, start, n_keys, order, D, BLOCK_D, TMA, MASKED, VARLEN)
        s = tl.dot(q, k.T, input_precision="ieee")
        p = tl.math.exp2(s * scale - lse[:, None])
        if FP32:
            p *= norm[:, None]
        if MASKED:
            p = tl.where((start + order)[None, :] < limit[:, None], p, 0.0)
        dp = tl.dot(do, v.T, input_precision="ieee")
        kept = p
        if DROPOUT:
            kept = drop(p, mask, rows, start)
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
    n, T, Tk, H, group, section, scale, site_head, threshold, first_row,
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
    k_head = head_of(k_ptr, (stride_k_b, stride_k_t, stride_k_h), batch, first, kv_head, TMA)
    v_head = head_of(v_ptr, (stride_v_b, stride_v_t, stride_v_h), batch, first, kv_head, TMA)
    q_head = head_of(q_ptr, (stride_q_b, stride_q_t, stride_q_h), batch, first, head, False)
    do_head = head_of(do_ptr, (stride_do_b, stride_do_t, stride_do_h), batch, first, head, False)
    q = load_tile(q_head, row, n_rows, within, D, BLOCK_D, False, True, VARLEN)
    do = load_tile(do_head, row, n_rows, within, D, BLOCK_D, False, True, VARLEN)
    statistics = (batch.to(tl.int64) * H + head) * T + first + rows
    lse = tl.load(lse_ptr + statistics, mask=rows < n_rows, other=float("inf"))
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    norm = tl.full([BLOCK_Q], 1.0, tl.float32)
    sum_p = tl.zeros([BLOCK_Q], tl.float32)
    delta = tl.zeros([BLOCK_Q], tl.float32)
    if DROPOUT:
        mask_ptr, site_head = mask_of_head(mask_ptr, site_head, batch, head, H, T, Tk)
    mask = mask_ptr, sample, site_head, threshold, first_row
    if FP32:
        for cut in tl.static_range(2):
            dq, sum_p, delta = _dq_tiles(
                dq, sum_p, delta, q, do, lse, norm, delta, k_head, v_head, full if cut else 0,
                end if cut else full, n_keys, limit, rows, scale * LOG2_E, mask,
                D, BLOCK_D, BLOCK_K, TMA, DROPOUT, cut == 1, VARLEN, False, True,
            )  # fmt: skip
        norm = 1.0 / tl.where(lse < float("inf"), sum_p, 1.0)
        delta *= norm
        tl.store(norm_ptr + statistics, norm, mask=rows < n_rows)
    else:
        o_source = o_ptr + ((batch.to(tl.int64) * T + first) * H + head) * D
        o_head = o_source, batch, head, first, H * D
        o = load_tile(o_head, row, n_rows, within, D, BLOCK_D, False, True, VARLEN)
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        if DROPOUT:
            delta *= (256 - threshold) / 256.0
    tl.store(delta_ptr + statistics, delta, mask=rows < n_rows)

    for cut in tl.static_range(2):
        dq, sum_p, _ = _dq_tiles(
            dq, sum_p, delta, q, do, lse, norm, delta, k_head, v_head, full if cut else 0,
            end if cut else full, n_keys, limit, rows, scale * LOG2_E, mask,
            D, BLOCK_D, BLOCK_K, TMA, DROPOUT, cut == 1, VARLEN, FP32, False,
        )  # fmt: skip
    if DROPOUT:
        scale *= 256.0 / (256 - threshold)
    dq_head = head_of(dq_ptr, (stride_dq_b, stride_dq_t, stride_dq_h), batch, first, head, False)
    within = tl.arange(0, BLOCK_Q) + unknown_zero(threshold)
    store_tile(dq * scale, dq_head, row, n_rows, within, D, BLOCK_D)


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
    dk, dv, k, v, keys, q_head, do_head, lse_head, delta_head, norm_head, low, high, n_rows,
    behind, scale, first_key, mask,
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
        q = load_tile(q_head, start, n_rows, within, D, BLOCK_D, TMA, TAIL, VARLEN)
        lse, delta = _statistics(lse_head, delta_head, rows, n_rows, TAIL, TOGETHER)
        do = load_tile(do_head, start, n_rows, within, D, BLOCK_D, TMA, TAIL, VARLEN)
        if DROPOUT or FP32:
            s = tl.dot(q, k.T, input_precision="ieee")
            p = tl.math.exp2(s * scale - lse[:, None])
            if FP32:
                p *= tl.load(norm_head + rows, mask=rows < n_rows, other=1.0)[:, None]
            if CUT:
                p = tl.where(keys[None, :] <= (rows + behind)[:, None], p, 0.0)
            kept = p
            if DROPOUT:
                kept = drop(p, mask, rows, first_key)
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
    dk, dv, k, v, keys, pointers, strides, batch, head, first, n_rows, behind,
    first_key, T, Tk, H, scale, mask,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """_dkdv_tiles of the queries of one head that see these keys: first those on the diagonal."""
    do_ptr, q_ptr, lse_ptr, delta_ptr, norm_ptr = pointers
    q_head = head_of(q_ptr, strides[1], batch, first, head, TMA)
    do_head = head_of(do_ptr, strides[0], batch, first, head, TMA)
    statistics = (batch.to(tl.int64) * H + head) * T + first
    mask_ptr, sample, site_head, threshold, first_row = mask
    if DROPOUT:
        mask_ptr, site_head = mask_of_head(mask_ptr, site_head, batch, head, H, T, Tk)
    mask = mask_ptr, sample, site_head, threshold, first_row
    full = n_rows * 0
    low = full
    if CAUSAL:
        low = tl.maximum(first_key - behind, 0) // BLOCK_Q * BLOCK_Q
        cut = tl.maximum(first_key - behind + BLOCK_K - 1, 0)
        full = tl.cdiv(cut, BLOCK_Q) * BLOCK_Q
    for beyond in tl.static_range(0 if CAUSAL else 1, 2):
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, keys, q_head, do_head, lse_ptr + statistics, delta_ptr + statistics,
            norm_ptr + statistics, full if beyond else low,
            n_rows if beyond else tl.minimum(full, n_rows), n_rows, behind, scale, first_key, mask,
            D, BLOCK_D, BLOCK_Q, TMA, DROPOUT, beyond == 0, not EVEN, VARLEN, FP32,
        )  # fmt: skip
    return dk, dv


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
    k_head = head_of(k_ptr, (stride_k_b, stride_k_t, stride_k_h), batch, first, kv_head, False)
    v_head = head_of(v_ptr, (stride_v_b, stride_v_t, stride_v_h), batch, first, kv_head, False)
    k = load_tile(k_head, first_key, n_keys, order, D, BLOCK_D, False, True, VARLEN)
    v = load_tile(v_head, first_key, n_keys, order, D, BLOCK_D, False, True, VARLEN)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    pointers = do_ptr, q_ptr, lse_ptr, delta_ptr, norm_ptr
    strides = (stride_do_b, stride_do_t, stride_do_h), (stride_q_b, stride_q_t, stride_q_h)
    mask = mask_ptr, sample, site_head, threshold, first_row
    if GROUPED:
        for i in range(group):
            dk, dv = _dkdv_head(
                dk, dv, k, v, keys, pointers, strides, batch, kv_head * group + i,
                first, n_rows, behind, first_key, T, Tk, H, scale * LOG2_E, mask,
                D, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, DROPOUT, VARLEN, TMA, EVEN, FP32,
            )  # fmt: skip
    else:
        dk, dv = _dkdv_head(
            dk, dv, k, v, keys, pointers, strides, batch, kv_head, first, n_rows,
            behind, first_key, T, Tk, H, scale * LOG2_E, mask,
            D, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, DROPOUT, VARLEN, TMA, EVEN, FP32,
        )  # fmt: skip
    if DROPOUT:
        dk *= 256.0 / (256 - threshold)
        dv *= 256.0 / (256 - threshold)
    dk_head = head_of(dk_ptr, (stride_dk_b, stride_dk_t, stride_dk_h), batch, first, kv_head, False)
    dv_head = head_of(dv_ptr, (stride_dv_b, stride_dv_t, stride_dv_h), batch, first, kv_head, False)
    order = tile_order(BLOCK_K, DROPOUT, mask_ptr, unknown_zero(threshold))
    store_tile(dk * scale, dk_head, first_key, n_keys, order, D, BLOCK_D)
    store_tile(dv, dv_head, first_key, n_keys, order, D, BLOCK_D)


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, causal: bool, scale: float, key: Tensor | None, site_head: int, threshold: int,
    cu_seqlens: Tensor | None, bits: Tensor | None = None, first_row: int | None = None,
    hopper: bool = False,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, possibly slices of one packed tensor; the rest is as in the forward.
    hopper: dk and dv by the kernel of hopper_bwd_triton.py, if it supports the call."""
    arch, dtype = gpu_arch(q.device), q.dtype
    varlen, fp32, dropout = cu_seqlens is not None, dtype == torch.float32, threshold > 0
    do = do if do.stride(-1) == 1 else do.contiguous()
    if varlen:
        do, q, k, v, o, dq, dk, dv = (x[None] for x in (do, q, k, v, o, dq, dk, dv))
    shape, k_shape = q.shape, k.shape
    n = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    place = padded(shape[3]), variant_for(dropout, fp32, bits)
    plan = bwd_plan(
        shape, k_shape, (do.stride(), q.stride(), k.stride(), v.stride(), dq.stride(),
        dk.stride(), dv.stride()), dtype, causal, dropout, dropout and bits is None, n, varlen,
        get_config(arch, "bwd_dq", *place), get_config(arch, "bwd_dkdv", *place),
        SECTIONS.get(arch).megabytes,
    )  # fmt: skip
    delta = torch.empty_like(lse)
    norm = torch.empty_like(lse) if fp32 else delta  # not used otherwise
    mask = device_key(key, q.device) if bits is None else bits

    k_box, v_box, do_box, q_box = plan.boxes
    tma = k_box is not None and v_box is not None and aligned(k, v)
    launch(
        _attention_bwd_dq_kernel, plan.grids[0],
        do, q, Boxed(k, k_box) if tma else k, Boxed(v, v_box) if tma else v, o, lse, delta, norm,
        dq, mask, cu_seqlens, *plan.numbers[0], scale, site_head, threshold, first_row,
        TMA=tma, **plan.constants[0],
    )  # fmt: skip

    if hopper:
        from fastpar.kernels.attention.hopper_bwd_triton import attention_hopper_dkdv

        attention_hopper_dkdv(do, q, k, v, lse, delta, dk, dv, scale)
        return
    tma = do_box is not None and q_box is not None and aligned(do, q)
    launch(
        _attention_bwd_dkdv_kernel, plan.grids[1],
        Boxed(do, do_box) if tma else do, Boxed(q, q_box) if tma else q, k, v, lse, delta, norm, dk,
        dv, mask, cu_seqlens, *plan.numbers[1], scale, site_head, threshold, first_row,
        TMA=tma, **plan.constants[1],
    )  # fmt: skip


_SPILLS = {
    "spills": "at most 16 bytes that only prologue and epilogue use, none inside the loops; "
    "the tiles that spill nothing take up to 1.8 times the instructions"
}
AOT_EXEMPT = {
    "_attention_bwd_dkdv_kernel *dropout": _SPILLS,
    "_attention_bwd_dkdv_kernel *dropout of later rows": _SPILLS,
    "_attention_bwd_dkdv_kernel D=128 bf16 causal, 4 key heads": {
        "spills": "at most 72 bytes once a head, none inside the loops; the tile that spills "
        "nothing takes 1.3 times the instructions"
    },
}


def aot_inputs(
    D: int = 64, dtype: torch.dtype = torch.bfloat16, kv_heads: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of GPT-2's shape on the meta device; packed when there are 12 key heads."""
    if kv_heads == 12:
        q, k, v = meta(8, 1024, 3, 12, D, dtype=dtype).unbind(2)
        return q, k, v
    q, k, v = (meta(8, 1024, heads, D, dtype=dtype) for heads in (12, kv_heads, kv_heads))
    return q, k, v


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """The calls that `make aot` compiles, each forward and backward."""
    key, cu = meta(2, dtype=torch.int64), meta(5, dtype=torch.int32)
    bits = meta(8, 12, 16, 1024, dtype=torch.uint64)

    def call(
        dropout: bool = False, causal: bool = True, varlen: bool = False, kept: bool = False,
        first_row: int | None = None, **shape: Any,
    ) -> Any:  # fmt: skip
        q, k, v = (x[0] if varlen else x for x in aot_inputs(**shape))
        mask: tuple[Tensor | None, int, int] = (key, 1, 26) if dropout else (None, 0, 0)
        settings = causal, 0.125, *mask, cu if varlen else None, bits if kept else None, first_row
        *B, T, H, _ = q.shape
        o, lse = meta(*q.shape, dtype=q.dtype), meta(*B, H, T, dtype=torch.float32)

        def run() -> None:
            attention_fwd(q, k, v, *settings)
            attention_bwd(o, q, k, v, o, lse, q, k, v, *settings)

        return run

    return [
        ("D=64 bf16 causal", call()),
        ("D=64 bf16 causal dropout", call(dropout=True)),
        ("D=64 bf16 causal dropout of later rows", call(dropout=True, first_row=1024)),
        ("D=64 bf16 causal dropout bits", call(dropout=True, kept=True)),
        ("D=128 bf16 causal dropout bits", call(dropout=True, kept=True, D=128)),
        ("D=64 bf16 full", call(causal=False)),
        ("D=64 fp16 causal", call(dtype=torch.float16)),
        ("D=64 fp32 causal", call(dtype=torch.float32)),
        ("D=64 bf16 causal varlen", call(varlen=True)),
        ("D=64 bf16 causal varlen dropout", call(varlen=True, dropout=True)),
        ("D=128 bf16 causal", call(D=128)),
        ("D=128 bf16 causal dropout", call(D=128, dropout=True)),
        ("D=128 bf16 causal, 4 key heads", call(D=128, kv_heads=4)),
        ("D=80 bf16 causal", call(D=80)),
        ("D=32 bf16 causal, 4 key heads", call(D=32, kv_heads=4)),
    ]
