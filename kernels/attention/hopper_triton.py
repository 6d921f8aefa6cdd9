"""Causal attention's forward for Hopper GPUs, in Gluon, with warp-specialized roles.

The formula, o and lse are those of triton.py, without dropout and documents. A program has 12
warps: two consumers, groups of four warps that own HALF queries each, and a producer, whose first
warp issues all copies from global memory (TMA) while the consumers compute.

[Note: barriers] Q, K and V are rings of slots in shared memory; ring() gives slot and phase of the
n-th use. The producer fills a slot once both consumers have arrived at its `empty` barrier (at once
in the first phase), the consumers read it once the bytes announced at its `full` barrier have
arrived. tests/ops/test_attention_hopper.py runs this file's roles as Python, with numbers, and
proves every order of their barriers, copies and products safe.

[Note: overlap] A consumer issues QK(j), then PV(j - 1), and computes the softmax of QK(j) while
PV(j - 1) is in flight. Nothing visible to the assembler orders that softmax before the wait for
PV(j - 1), and it moves the wait in front of it. So the code waits once more for an already
completed barrier in between: the loop of such a wait ends a basic block, and the assembler does not
move the wait for the product out of its block. Probabilities are rounded to 16 bits after that
wait, into the registers that PV(j - 1) reads until then. `make aot` counts the exponentials with a
product in flight, and refuses writes to its registers.

[Note: pairs] Query tiles have BLOCK rows, as many as key blocks have keys: only the diagonal block
needs a mask, which hides keys beyond the end from the queries before it. Blocks go from the
diagonal to the first, so every query has seen a key from the first block on. A program takes pairs
of tiles of one head, a long one and a short one, so that all pairs are of equal length; with an odd
number of tiles the longest is alone.

Source: Shah et al. 2024, arXiv 2407.08608.
"""

import functools
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastpar.kernels.attention.triton import LOG2_E, aot_inputs
from fastpar.kernels.triton_launch import Boxed, cdiv, launch, sm_count

# Triton 3.6's names, which later versions refuse.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
HALF = gl.constexpr(64)  # queries of a consumer
BLOCK = gl.constexpr(128)  # queries of a tile, keys of a block
AOT_ARCHS = (90,)
KV_SLOTS = 2
Q_SLOTS = 2  # the next tile's queries arrive before this tile's are finished


@gluon.jit
def ring(n, SLOTS: gl.constexpr):
    """(slot, phase) of the n-th use of a ring."""
    return n % SLOTS, n // SLOTS % 2


@gluon.jit
def n_steps(program, programs, n_heads, n_tiles):
    """Two for each pair of tiles that a program takes."""
    pairs = n_heads * ((n_tiles + 1) // 2)
    return (pairs - program + programs - 1) // programs * 2


@gluon.jit
def tile_at(step, program, programs, n_tiles):
    """(head, tile) of a step; tile -1: the long tile before has no partner."""
    pairs = (n_tiles + 1) // 2
    at = program + step // 2 * programs
    short = step % 2
    tile = (n_tiles - 1 - at % pairs) * (1 - short) + (at % pairs - n_tiles % 2) * short
    return at // pairs, tile


@gluon.jit
def _fill(desc, sample, head, first, buffers, full, slot):
    """Copies BLOCK rows of one head to a slot; rows beyond the end become zeros."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    PARTS: gl.constexpr = BLOCK // ROWS
    mbarrier.expect(full.index(slot), PARTS * desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        box = buffers.index(slot * PARTS + part)
        _load(desc, [sample, head, first + part * ROWS, 0], full.index(slot), box)


@gluon.jit
def _produce(sources, buffers, barriers, sizes):
    q_desc, k_desc, v_desc = sources
    n_heads, H, group, _, n_tiles = sizes
    q_buffers, k_buffers, v_buffers = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    Q_SLOTS: gl.constexpr = q_buffers.shape[0] // 2
    KV_SLOTS: gl.constexpr = k_buffers.shape[0]
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles = 0
    blocks = 0
    for step in range(n_steps(program, programs, n_heads, n_tiles)):
        at, tile = tile_at(step, program, programs, n_tiles)
        if tile >= 0:
            sample, head = at // H, at % H
            slot, phase = ring(tiles, Q_SLOTS)
            mbarrier.wait(q_empty.index(slot), 1 - phase)
            _fill(q_desc, sample, head, tile * BLOCK, q_buffers, q_full, slot)
            for back in range(tile + 1):
                first = (tile - back) * BLOCK
                kv_head = head // group
                slot, phase = ring(blocks, KV_SLOTS)
                mbarrier.wait(k_empty.index(slot), 1 - phase)
                _fill(k_desc, sample, kv_head, first, k_buffers, k_full, slot)
                mbarrier.wait(v_empty.index(slot), 1 - phase)
                _fill(v_desc, sample, kv_head, first, v_buffers, v_full, slot)
                blocks += 1
            tiles += 1


@gluon.jit
def _consume(WHICH: gl.constexpr, outputs, buffers, barriers, sizes, scale):
    """Queries [WHICH * HALF, WHICH * HALF + HALF) of every tile. scale: with log2(e)."""
    o_desc, lse_ptr, o_buffers = outputs
    n_heads, H, _, T, n_tiles = sizes
    q_buffers, k_buffers, v_buffers = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    Q_SLOTS: gl.constexpr = q_buffers.shape[0] // 2
    KV_SLOTS: gl.constexpr = k_buffers.shape[0]
    D: gl.constexpr = o_desc.block_type.shape[3]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    program, programs = gl.program_id(0), gl.num_programs(0)
    rows = WHICH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT))
    keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S_LAYOUT))
    no_scores = gl.zeros([HALF, BLOCK], gl.float32, S_LAYOUT)
    o_buffer = o_buffers.index(WHICH)
    tiles = 0
    blocks = 0
    for step in range(n_steps(program, programs, n_heads, n_tiles)):
        at, tile = tile_at(step, program, programs, n_tiles)
        if tile >= 0:
            q_slot, q_phase = ring(tiles, Q_SLOTS)
            mbarrier.wait(q_full.index(q_slot), q_phase)
            q = q_buffers.index(2 * q_slot + WHICH).reshape([HALF, D])
            slot, phase = ring(blocks, KV_SLOTS)
            mbarrier.wait(k_full.index(slot), phase)
            k = k_buffers.index(slot).reshape([BLOCK, D]).permute((1, 0))
            s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(slot))
            s = gl.where(keys[None, :] <= rows[:, None], s, -float("inf"))
            m = gl.max(s, 1) * scale
            p = gl.exp2(s * scale - m[:, None])
            sums = gl.sum(p, 1)
            p16 = gl.convert_layout(p.to(o_desc.dtype), P_LAYOUT)
            acc = gl.zeros([HALF, D], gl.float32, O_LAYOUT)

            for _ in range(tile):
                v_slot, v_phase = slot, phase
                blocks += 1
                slot, phase = ring(blocks, KV_SLOTS)
                mbarrier.wait(k_full.index(slot), phase)
                k = k_buffers.index(slot).reshape([BLOCK, D]).permute((1, 0))
                s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_slot), v_phase)
                v = v_buffers.index(v_slot).reshape([BLOCK, D])
                acc = warpgroup_mma(p16, v, acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(k_empty.index(slot))
                m_new = gl.maximum(m, gl.max(s, 1) * scale)
                p = gl.exp2(s * scale - m_new[:, None])
                alpha = gl.exp2(m - m_new)
                sums = sums * alpha + gl.sum(p, 1)
                mbarrier.wait(v_full.index(v_slot), v_phase)  # see [Note: overlap]
                acc, p16 = warpgroup_mma_wait(0, deps=(acc, p16))
                mbarrier.arrive(v_empty.index(v_slot))
                acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
                p16 = gl.convert_layout(p.to(o_desc.dtype), P_LAYOUT)
                m = m_new

            mbarrier.arrive(q_empty.index(q_slot))
            mbarrier.wait(v_full.index(slot), phase)
            v = v_buffers.index(slot).reshape([BLOCK, D])
            acc = warpgroup_mma(p16, v, acc, is_async=True)
            row = tile * BLOCK + rows
            lse_head = lse_ptr + gl.cast(at, gl.int64) * T
            gl.store(lse_head + row, m + gl.log2(sums), mask=row < T)
            acc, p16 = warpgroup_mma_wait(0, deps=(acc, p16))
            mbarrier.arrive(v_empty.index(slot))
            o = acc * gl.convert_layout(1.0 / sums, O_ROWS)[:, None]
            tma.store_wait(0)  # of the tile before
            o_buffer.reshape([HALF, D]).store(o.to(o_desc.dtype))
            fence_async_shared()
            _store(o_desc, [at // H, at % H, tile * BLOCK + WHICH * HALF, 0], o_buffer)
            blocks += 1
            tiles += 1
    tma.store_wait(0)


@gluon.jit
def _ring_barriers(SLOTS: gl.constexpr):
    """(full, empty): one arrival for the producer's copies, two for the consumers."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return full, empty


@gluon.jit
def boxes(desc, n: gl.constexpr):
    """Shared memory for n boxes of the descriptor."""
    box: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [n, 1, 1, box[2], box[3]], desc.layout)


@gluon.jit(do_not_specialize=["n_heads", "H", "group", "T", "n_tiles"])
def _attention_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, n_heads, H, group, T, n_tiles, scale,
    KV_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
):  # fmt: skip
    """n_heads: of all samples together, H: of one."""
    buffers = boxes(q_desc, 2 * Q_SLOTS), boxes(k_desc, KV_SLOTS), boxes(v_desc, KV_SLOTS)
    o_buffers = boxes(o_desc, 2)
    q_full, q_empty = _ring_barriers(Q_SLOTS)
    k_full, k_empty = _ring_barriers(KV_SLOTS)
    v_full, v_empty = _ring_barriers(KV_SLOTS)
    barriers = q_full, q_empty, k_full, k_empty, v_full, v_empty
    fence_async_shared()  # TMA sees the barriers' initial state
    outputs = o_desc, lse_ptr, o_buffers
    sizes = n_heads, H, group, T, n_tiles
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), outputs, buffers, barriers, sizes, scale)),
            (_consume, (gl.constexpr(1), outputs, buffers, barriers, sizes, scale)),
            (_produce, ((q_desc, k_desc, v_desc), buffers, barriers, sizes)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # their registers; the first consumer has those that are left: 240
    )


@functools.lru_cache(4096)
def layout_of(
    shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], dtype: torch.dtype
) -> TensorDescriptor:
    """A descriptor without memory, made once per layout: Triton's checks of it are slow."""
    base = torch.empty(0, dtype=dtype, device="meta")
    kind = gl.float32 if dtype == torch.float32 else gl.bfloat16  # or any other 16 bits
    layout = gl.NVMMASharedLayout.get_default_for(list(box), kind)
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)


def boxed(x: Tensor, rows: int) -> Boxed:
    """x [B, T, H, D] viewed as [B, H, T, D] in boxes of [1, 1, rows, D]."""
    B, T, H, D = x.shape
    b, t, h, _ = x.stride()
    return Boxed(x, layout_of((B, H, T, D), (b, h, t, 1), (1, 1, rows, D), x.dtype))


def attention_hopper_fwd(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o, contiguous, and lse [B, H, T] of a call that peers.refusal_of_hopper() does not refuse."""
    B, T, H, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    n_tiles = cdiv(T, BLOCK.value)
    pairs = B * H * cdiv(n_tiles, 2)
    launch(
        _attention_hopper_fwd_kernel, (min(pairs, sm_count(q.device)),),
        boxed(q, HALF.value), boxed(k, BLOCK.value), boxed(v, BLOCK.value), boxed(o, HALF.value),
        lse, B * H, H, H // k.shape[2], T, n_tiles, scale * LOG2_E.value,
        KV_SLOTS=KV_SLOTS, Q_SLOTS=Q_SLOTS, num_warps=4,
    )  # fmt: skip
    return o, lse


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """The calls that `make aot` compiles."""

    def call(**shape: Any) -> Callable[[], Any]:
        q, k, v = aot_inputs(**shape)
        return lambda: attention_hopper_fwd(q, k, v, 0.125)

    return [
        ("D=64 bf16 causal", call()),
        ("D=64 fp16 causal", call(dtype=torch.float16)),
        ("D=128 bf16 causal", call(D=128)),
        ("D=128 fp16 causal", call(D=128, dtype=torch.float16)),
    ]
