"""The dropout mask of attention's Triton kernels: drawn where it is used, or drawn once and kept.

A kernel that draws pays for Philox, 4 to 6 instructions per element, and the forward and both
backward kernels each draw the whole mask. Alternatively _attention_bits_kernel draws it once before
the forward and keeps a bit per element (__init__.py decides); the three kernels then read 8 bytes
for 64 elements of a row. The masks are the same.

[Note: kept bits] uint64 [B, H, ceil(Tk / 64), T], both counts rounded up so that no tile extends
beyond the memory. A word has the bits of one query and 64 keys: that of key 8 j + 2 c + e is bit
16 c + 8 e + 7 - j. A thread with c = lane % 4 holds the scores of keys 2 c, 2 c + 1, 2 c + 8, ...,
so a shift of the word by 16 c leaves what it needs in the low half, for all j and e. Keys are then
read in their own order, also by descriptors, unlike in [Note: key order] of triton.py.
Drawing needs no shuffle: reached() has a flag in the highest bit of each byte of a Philox word, and
with r[g] the four words of the block's 16-key group g, half h of the kept word is the sum over
j = 2 g + i of (r[g][2 i + h] & 0x80808080) >> j.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from fastpar.kernels.philox_triton import philox_words
from fastpar.kernels.triton_launch import device_key, launch, meta

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter has no assembly
_ROUNDED = tl.constexpr(256)  # T and Tk, up to multiples: of every tile
_ROWS, _BLOCKS = 128, 4  # of a program: queries, and blocks of 64 keys


@triton.jit
def unknown_zero(threshold):
    """A 0 that the compiler does not know, as thresholds are below 256. Indices that it is added to
    are computed again where a kernel ends, not kept in registers, or spilled, from its start on."""
    return threshold >> 8


@triton.jit
def reached(words, threshold):
    """The highest bit of each of four bytes: whether the byte is at least the threshold."""
    limit = threshold.to(tl.uint32) * 0x01010101
    low = (words | 0x80808080) - (limit & 0x7F7F7F7F)
    other = limit ^ 0xFFFFFFFF  # ~ of unsigned numbers fails in Triton 3.8's interpreter
    return (words & other) | ((words ^ other) & low)


@triton.jit
def tile_order(BLOCK: tl.constexpr, DROPOUT: tl.constexpr, mask_ptr, zero=0):
    """Key at each place of a tile; see [Note: key order] of triton.py."""
    place = tl.arange(0, BLOCK) + zero
    if DROPOUT and BLOCK >= 64:  # noqa: SIM102  without dropout there is no pointer
        if mask_ptr.dtype.element_ty != tl.uint64:
            place = place // 64 * 64 + place // 2 % 4 * 16 + place // 8 % 8 * 2 + place % 2
    return place


@triton.jit
def mask_of_head(mask_ptr, site_head, batch, head, H, T, Tk):
    """What drop() takes as its source and site_head, for one head."""
    site_head += head
    if mask_ptr.dtype.element_ty == tl.uint64:
        step = tl.cdiv(T, _ROUNDED) * _ROUNDED
        words = tl.cdiv(Tk, _ROUNDED) * (_ROUNDED // 64) * step.to(tl.int64)
        mask_ptr += (batch.to(tl.int64) * H + head) * words
        site_head = step
    return mask_ptr, site_head


@triton.jit
def _drawn(key_ptr, sample, site_head, rows, start, threshold, BLOCK: tl.constexpr):
    """bool [R, BLOCK]: which elements of these queries and the keys start + tile_order() are kept,
    by philox_triton.keep_tile's rule."""
    R: tl.constexpr = rows.shape[0]
    G: tl.constexpr = BLOCK // 16
    groups = start // 16 + tl.arange(0, G)
    w0, w1, w2, w3 = philox_words(key_ptr, sample, site_head, rows[:, None], groups[None, :])
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(R, G, 4)
    signs = tl.full([4], 0x80, tl.uint32) << (tl.arange(0, 4) * 8).to(tl.uint32)
    keep = (reached(words, threshold)[:, :, :, None] & signs[None, None, None, :]) != 0
    if BLOCK >= 64:  # [block, c, j, e] -> [block, j, c, e]
        keep = keep.reshape(R, BLOCK // 64, 4, 8, 2).permute(0, 1, 3, 2, 4)
    return keep.reshape(R, BLOCK)


@triton.jit
def _and(a, b):
    """a & b, int32. LLVM would make a vector of all tests and then take it apart bit by bit,
    66 of 412 instructions of the dq kernel's loop. It does not see into the assembly."""
    if _INTERPRETED:
        return a & b
    else:
        return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _kept(bits_ptr, step, rows, start, BLOCK: tl.constexpr):
    """The same from [Note: kept bits], of at most 64 keys; bits_ptr: those of the head."""
    R: tl.constexpr = rows.shape[0]
    J: tl.constexpr = BLOCK // 8
    words = tl.load(bits_ptr + (start // 64).to(tl.int64) * step + rows)
    c = tl.arange(0, 4).to(tl.uint64)
    part = (words[:, None] >> (16 * c)[None, :]).to(tl.int32)
    if BLOCK < 64:
        part = part << (start // 8 % 8)
    signs = (0x80 << (8 * tl.arange(0, 2)))[None, :] >> tl.arange(0, J)[:, None]
    keep = _and(part[:, None, :, None], signs[None, :, None, :]) != 0
    return keep.reshape(R, BLOCK)


@triton.jit
def drop(p, mask, rows, start):
    """p [R, BLOCK] of these queries and the keys start + tile_order(), with 0 where the mask of
    philox_triton.keep_tile drops. start: a multiple of 16; mask: (mask_ptr, sample, site_head,
    threshold, first_row), the first and third of mask_of_head(); first_row: row of a drawn mask
    that query 0 has."""
    mask_ptr, sample, site_head, threshold, first_row = mask
    R: tl.constexpr = p.shape[0]
    BLOCK: tl.constexpr = p.shape[1]
    tl.static_assert(BLOCK <= 128)
    if mask_ptr.dtype.element_ty == tl.uint64:
        if BLOCK == 128:
            low = _kept(mask_ptr, site_head, rows, start, 64)
            high = _kept(mask_ptr, site_head, rows, start + 64, 64)
            keep = tl.join(low, high).permute(0, 2, 1).reshape(R, BLOCK)
        else:
            keep = _kept(mask_ptr, site_head, rows, start, BLOCK)
    else:
        if first_row is not None:
            rows += first_row
        keep = _drawn(mask_ptr, sample, site_head, rows, start, threshold, BLOCK)
    # Given a constant, the compiler selects after rounding p to 16 bits, which takes two more
    # instructions to part and join each pair.
    zero = unknown_zero(threshold).to(tl.float32)
    return tl.where(keep, p, zero)


@triton.jit(do_not_specialize=["T", "Tk", "H", "site_head", "threshold"])
def _attention_bits_kernel(
    bits_ptr, key_ptr, T, Tk, H, site_head, threshold,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """[Note: kept bits] of ROWS queries and 64 * BLOCKS keys; nothing if none of these sees one."""
    step = tl.cdiv(T, _ROUNDED) * _ROUNDED
    blocks = tl.cdiv(Tk, _ROUNDED) * (_ROUNDED // 64)
    across, down = blocks // BLOCKS, step // ROWS
    pid = tl.program_id(0)
    first_block = pid % across * BLOCKS
    row = pid // across % down * ROWS
    sample_head = pid // (across * down)
    if CAUSAL:  # noqa: SIM102  a condition of both kinds is computed at run time
        if first_block * 64 >= row + ROWS + Tk - T:
            return
    head = sample_head % H
    rows = (row + tl.arange(0, ROWS))[None, :]
    block = (first_block + tl.arange(0, BLOCKS))[:, None]
    low = tl.zeros([BLOCKS, ROWS], tl.uint32)
    high = tl.zeros([BLOCKS, ROWS], tl.uint32)
    for g in range(4):
        w0, w1, w2, w3 = philox_words(
            key_ptr, sample_head // H, site_head + head, rows, block * 4 + g
        )
        j = (unknown_zero(threshold) + 2 * g).to(tl.uint32)
        low |= (reached(w0, threshold) & 0x80808080) >> j
        low |= (reached(w2, threshold) & 0x80808080) >> (j + 1)
        high |= (reached(w1, threshold) & 0x80808080) >> j
        high |= (reached(w3, threshold) & 0x80808080) >> (j + 1)
    words = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    at = (sample_head.to(tl.int64) * blocks + block) * step + rows
    tl.store(bits_ptr + at, words)


def attention_bits_fwd(
    key: Tensor, site_head: int, threshold: int, causal: bool, bits: Tensor, sizes: tuple[int, ...]
) -> None:
    """Writes bits, of shape bits_shape(*sizes)."""
    B, H, T, Tk = sizes
    blocks, step = bits.shape[2:]
    launch(
        _attention_bits_kernel, (B * H * (blocks // _BLOCKS) * (step // _ROWS),),
        bits, device_key(key, bits.device), T, Tk, H, site_head, threshold,
        CAUSAL=causal, ROWS=_ROWS, BLOCKS=_BLOCKS, num_warps=2,
    )  # fmt: skip


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """The calls that `make aot` compiles."""
    key, bits = meta(2, dtype=torch.int64), meta(8, 12, 16, 1024, dtype=torch.uint64)
    sizes = (8, 12, 1024, 1024)
    return [
        ("causal", lambda: attention_bits_fwd(key, 1, 26, True, bits, sizes)),
        ("full", lambda: attention_bits_fwd(key, 1, 26, False, bits, sizes)),
    ]
