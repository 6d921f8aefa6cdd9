"""dk and dv of causal attention for Hopper GPUs, in Gluon, with warp-specialized roles.

The formula is that of triton.py, whose dq kernel runs before and computes delta; dropout and
documents are not supported. Roles, rings, pairs of tiles and the order of products are those of
hopper_triton.py, whose notes explain them, the other way round: a consumer owns HALF keys, and
blocks of ROWS queries arrive with their do, lse and delta.

[Note: products in flight] For a block of queries a consumer issues s = k q^T and dp = v do^T. p is
computed while dp is in flight. Both are rounded to 16 bits once nothing is in flight, then
dv += p do and dk += ds q are issued and waited for. The assembler (ptxas 12.8 to 13.4) waits for
every single product of a kernel that rounds an operand while another product is in flight (its
warning C7513), or whose sums stay in flight into the next block (C7512: too few registers); `make
aot` refuses both. The other consumer's products run meanwhile.

Rows beyond the end are zeros in q and do as in lse and delta: p is 1 there, and adds 0 to dv and
dk. Only for heads of 64: with 128 the sums take 128 of a thread's 240 registers, and 48 (Triton
3.6) or 128 bytes (3.9) per thread are spilled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastpar.kernels.attention.hopper_triton import (
    BLOCK,
    HALF,
    _load,
    _ring_barriers,
    _store,
    boxed,
    boxes,
    layout_of,
    n_steps,
    ring,
    tile_at,
)
from fastpar.kernels.attention.triton import LOG2_E, aot_inputs
from fastpar.kernels.triton_launch import Boxed, cdiv, launch, meta, sm_count

ROWS = gl.constexpr(64)  # queries of a block
AOT_ARCHS = (90,)
SLOTS = 3  # of queries
KV_SLOTS = 2  # the next tile's keys arrive before this tile's are finished


@gluon.jit
def _produce(sources, buffers, barriers, sizes):
    q_desc, do_desc, lse_desc, delta_desc, k_desc, v_desc = sources
    q_buffers, do_buffers, lse_buffers, delta_buffers, k_buffers, v_buffers = buffers
    full, empty, kv_full, kv_empty = barriers
    n_heads, H, group, n_tiles, n_blocks = sizes
    SLOTS: gl.constexpr = q_buffers.shape[0]
    KV_SLOTS: gl.constexpr = k_buffers.shape[0] // 2
    PARTS: gl.constexpr = BLOCK // ROWS
    BYTES: gl.constexpr = 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles = 0
    blocks = 0
    for step in range(n_steps(program, programs, n_heads, n_tiles)):
        at, back = tile_at(step, program, programs, n_tiles)
        if back >= 0:
            tile = n_tiles - 1 - back
            sample, kv_head = at // H, at % H
            slot, phase = ring(tiles, KV_SLOTS)
            ready = kv_full.index(slot)
            mbarrier.wait(kv_empty.index(slot), 1 - phase)
            mbarrier.expect(ready, 4 * k_desc.block_type.nbytes)
            for half in gl.static_range(2):
                place = [sample, kv_head, tile * BLOCK + half * HALF, 0]
                _load(k_desc, place, ready, k_buffers.index(2 * slot + half))
                _load(v_desc, place, ready, v_buffers.index(2 * slot + half))
            for member in range(group):
                head = kv_head * group + member
                for block in range(tile * PARTS, n_blocks):
                    slot, phase = ring(blocks, SLOTS)
                    ready = full.index(slot)
                    mbarrier.wait(empty.index(slot), 1 - phase)
                    mbarrier.expect(ready, BYTES)
                    row = block * ROWS
                    line = [sample * H * group + head, row]
                    _load(q_desc, [sample, head, row, 0], ready, q_buffers.index(slot))
                    _load(lse_desc, line, ready, lse_buffers.index(slot))
                    _load(do_desc, [sample, head, row, 0], ready, do_buffers.index(slot))
                    _load(delta_desc, line, ready, delta_buffers.index(slot))
                    blocks += 1
            tiles += 1


@gluon.jit
def _add_blocks(state, operands, low, high, keys, buffers, barriers, scale, CUT: gl.constexpr):
    """Adds the blocks [low, high) of the queries from the tile's first key on. CUT: keys behind a
    query are hidden."""
    dk, dv, blocks = state
    k, v = operands
    q_buffers, do_buffers, lse_buffers, delta_buffers, _, _ = buffers
    full, empty, _, _ = barriers
    SLOTS: gl.constexpr = q_buffers.shape[0]
    D: gl.constexpr = q_buffers.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    queries = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT))
    no_scores = gl.zeros([HALF, ROWS], gl.float32, S_LAYOUT)
    for i in range(low, high):
        slot, phase = ring(blocks, SLOTS)
        mbarrier.wait(full.index(slot), phase)
        q = q_buffers.index(slot).reshape([ROWS, D])
        do = do_buffers.index(slot).reshape([ROWS, D])
        s = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * scale - lse_buffers.index(slot).load(S_LAYOUT))
        if CUT:
            p = gl.where(keys[:, None] <= (i * ROWS + queries)[None, :], p, 0.0)
        delta = delta_buffers.index(slot).load(S_LAYOUT)
        mbarrier.wait(full.index(slot), phase)  # see [Note: overlap] of the forward
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = p * (dp - delta)
        p16 = gl.convert_layout(p.to(q_buffers.dtype), P_LAYOUT)
        ds16 = gl.convert_layout(ds.to(q_buffers.dtype), P_LAYOUT)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dk, dv, p16, ds16 = warpgroup_mma_wait(0, deps=(dk, dv, p16, ds16))
        mbarrier.arrive(empty.index(slot))
        blocks += 1
    return dk, dv, blocks


@gluon.jit
def _consume(WHICH: gl.constexpr, outputs, buffers, barriers, sizes, scale, scale_log2):
    """Keys [WHICH * HALF, WHICH * HALF + HALF) of every tile. scale_log2: with log2(e)."""
    dk_desc, dv_desc, dk_buffers, dv_buffers = outputs
    n_heads, H, group, n_tiles, n_blocks = sizes
    q_buffers, _, _, _, k_buffers, v_buffers = buffers
    _, _, kv_full, kv_empty = barriers
    KV_SLOTS: gl.constexpr = k_buffers.shape[0] // 2
    D: gl.constexpr = q_buffers.shape[4]
    PARTS: gl.constexpr = BLOCK // ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    program, programs = gl.program_id(0), gl.num_programs(0)
    keys = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT))
    dk_buffer, dv_buffer = dk_buffers.index(WHICH), dv_buffers.index(WHICH)
    tiles = 0
    blocks = 0
    for step in range(n_steps(program, programs, n_heads, n_tiles)):
        at, back = tile_at(step, program, programs, n_tiles)
        if back >= 0:
            tile = n_tiles - 1 - back
            slot, phase = ring(tiles, KV_SLOTS)
            mbarrier.wait(kv_full.index(slot), phase)
            k = k_buffers.index(2 * slot + WHICH).reshape([HALF, D])
            v = v_buffers.index(2 * slot + WHICH).reshape([HALF, D])
            dk = gl.zeros([HALF, D], gl.float32, D_LAYOUT)
            dv = gl.zeros([HALF, D], gl.float32, D_LAYOUT)
            n = n_blocks - tile * PARTS
            for _member in range(group):
                dk, dv, blocks = _add_blocks(
                    (dk, dv, blocks), (k, v), 0, min(PARTS, n), keys, buffers, barriers,
                    scale_log2, True,
                )  # fmt: skip
                dk, dv, blocks = _add_blocks(
                    (dk, dv, blocks), (k, v), PARTS, n, keys, buffers, barriers, scale_log2, False
                )
            mbarrier.arrive(kv_empty.index(slot))
            tma.store_wait(0)  # of the tile before
            dk_buffer.reshape([HALF, D]).store((dk * scale).to(q_buffers.dtype))
            dv_buffer.reshape([HALF, D]).store(dv.to(q_buffers.dtype))
            fence_async_shared()
            place = [at // H, at % H, tile * BLOCK + WHICH * HALF, 0]
            _store(dk_desc, place, dk_buffer)
            _store(dv_desc, place, dv_buffer)
            tiles += 1
    tma.store_wait(0)


@gluon.jit
def _lines(desc, SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, 1, ROWS], desc.layout)


@gluon.jit(do_not_specialize=["n_heads", "H", "group", "n_tiles", "n_blocks"])
def _attention_hopper_bwd_dkdv_kernel(
    q_desc, do_desc, lse_desc, delta_desc, k_desc, v_desc, dk_desc, dv_desc,
    n_heads, H, group, n_tiles, n_blocks, scale, scale_log2,
    SLOTS: gl.constexpr, KV_SLOTS: gl.constexpr,
):  # fmt: skip
    """n_heads: key heads of all samples together, H: of one, group: query heads of each."""
    q_buffers, do_buffers = boxes(q_desc, SLOTS), boxes(do_desc, SLOTS)
    lse_buffers, delta_buffers = _lines(lse_desc, SLOTS), _lines(delta_desc, SLOTS)
    k_buffers, v_buffers = boxes(k_desc, 2 * KV_SLOTS), boxes(v_desc, 2 * KV_SLOTS)
    buffers = q_buffers, do_buffers, lse_buffers, delta_buffers, k_buffers, v_buffers
    full, empty = _ring_barriers(SLOTS)
    kv_full, kv_empty = _ring_barriers(KV_SLOTS)
    barriers = full, empty, kv_full, kv_empty
    fence_async_shared()  # TMA sees the barriers' initial state
    sources = q_desc, do_desc, lse_desc, delta_desc, k_desc, v_desc
    outputs = dk_desc, dv_desc, boxes(dk_desc, 2), boxes(dv_desc, 2)
    sizes = n_heads, H, group, n_tiles, n_blocks
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), outputs, buffers, barriers, sizes, scale, scale_log2)),
            (_consume, (gl.constexpr(1), outputs, buffers, barriers, sizes, scale, scale_log2)),
            (_produce, (sources, buffers, barriers, sizes)),
        ],
        [4, 1],  # as in the forward
        [240, 24],
    )


def _lines_of(x: Tensor) -> Boxed:
    """x [B, H, T], fp32, viewed as [B * H, T] in boxes of [1, ROWS]."""
    B, H, T = x.shape
    return Boxed(x, layout_of((B * H, T), (T, 1), (1, ROWS.value), x.dtype))


def attention_hopper_dkdv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    scale: float,
) -> None:  # fmt: skip
    """Writes dk and dv of a call that peers.refusal_of_backward() does not refuse."""
    B, T, H, _ = q.shape
    kv_heads, n_tiles = k.shape[2], cdiv(T, BLOCK.value)
    pairs = B * kv_heads * cdiv(n_tiles, 2)
    launch(
        _attention_hopper_bwd_dkdv_kernel, (min(pairs, sm_count(q.device)),),
        boxed(q, ROWS.value), boxed(do, ROWS.value), _lines_of(lse), _lines_of(delta),
        *(boxed(x, HALF.value) for x in (k, v, dk, dv)), B * kv_heads, kv_heads, H // kv_heads,
        n_tiles, cdiv(T, ROWS.value), scale, scale * LOG2_E.value,
        SLOTS=SLOTS, KV_SLOTS=KV_SLOTS, num_warps=4,
    )  # fmt: skip


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """The calls that `make aot` compiles."""

    def call(dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
        q, k, v = aot_inputs(dtype=dtype)
        o, lse = meta(*q.shape, dtype=dtype), meta(8, 12, 1024, dtype=torch.float32)
        return lambda: attention_hopper_dkdv(o, q, k, v, lse, lse, q, k, 0.125)

    return [("D=64 bf16 causal", call()), ("D=64 fp16 causal", call(torch.float16))]
