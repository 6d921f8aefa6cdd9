"""The mask of kernels/philox.py in Triton: the same bits, [Note: the mask] there.

keep_tile() is for other kernels; _dropout_fwd_kernel and _keep_mask_fwd_kernel are the ops of
philox.py on a GPU.

These two divide the mask, seen as rows of ceil(C / 16) groups of 16 columns, into runs of GROUPS
groups, regardless of rows: every Philox call has one group, and if C is a multiple of 16 a run is
contiguous in memory, so that it is accessed in 16-byte units at any width. Their backward is
dropout itself.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.philox import MaskBlock, mask_shape
from fastpar.kernels.triton_launch import cdiv, device_key, launch, meta


@triton.jit
def philox_words(key_ptr, sample, site_head, rows, groups):
    """The four 32-bit words of these rows and groups of 16 columns, which broadcast. sample: index
    in the batch (added to key[1]); site_head: site << 16 | head. With 64-bit products, each of
    which is one instruction; tl.philox takes two for a product's halves."""
    seed = tl.load(key_ptr).to(tl.uint64)
    sample = (tl.load(key_ptr + 1) + sample).to(tl.uint64)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32) ^ (sample >> 32).to(tl.uint32)
    zero = rows * 0 + groups * 0
    c0 = (groups + zero).to(tl.uint32)
    c1 = (rows + zero).to(tl.uint32)
    c2 = (zero + site_head).to(tl.uint32)
    c3 = (zero.to(tl.int64) + sample.to(tl.int64)).to(tl.uint32)
    for _ in tl.static_range(10):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product_0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def keep_tile(key_ptr, sample, site_head, rows, first_group, threshold, BLOCK_C: tl.constexpr):
    """bool [R, BLOCK_C]: which elements of these rows and of the columns from 16 * first_group on
    are kept. rows: int32 [R]; BLOCK_C: a power of 2, at least 16."""
    R: tl.constexpr = rows.shape[0]
    G: tl.constexpr = BLOCK_C // 16
    groups = first_group + tl.arange(0, G)
    w0, w1, w2, w3 = philox_words(key_ptr, sample, site_head, rows[:, None], groups[None, :])
    return _keep_words(w0, w1, w2, w3, threshold, R, G)


@triton.jit
def _keep_words(w0, w1, w2, w3, threshold, R: tl.constexpr, G: tl.constexpr):
    """[R, G] calls' words -> bool [R, 16 * G]: which of their bytes are at least the threshold."""
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, G, 2, 2], word 2 * i + j at [i, j]
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    drawn = (words.reshape(R, G, 4)[:, :, :, None] >> shifts[None, None, None, :]) & 0xFF
    return drawn.reshape(R, 16 * G) >= threshold


@triton.jit
def _run_of_groups(
    key_ptr, cols, heads, rows, first_sample, first_head, first_row, n_groups, site, threshold,
    GROUPS: tl.constexpr, BY_16: tl.constexpr,
):  # fmt: skip
    """(offset, inside, keep), each [GROUPS, 16], of this program's groups."""
    per_row = tl.cdiv(cols, 16)
    # As wide as the number of groups: 64 bits only where 32 do not hold it.
    first = tl.program_id(0).to(n_groups.dtype) * GROUPS
    n0 = first // per_row
    local = (first % per_row).to(tl.int32) + tl.arange(0, GROUPS)
    row = (n0 % rows).to(tl.int32) + local // per_row
    group = local % per_row
    n0 = n0 // rows
    head = (n0 % heads).to(tl.int32) + row // rows
    sample = first_sample + n0 // heads + head // heads
    site_head = site * 65536 + head % heads + first_head
    row = (row % rows + first_row)[:, None]
    w0, w1, w2, w3 = philox_words(key_ptr, sample[:, None], site_head[:, None], row, group[:, None])
    keep = _keep_words(w0, w1, w2, w3, threshold, GROUPS, 1)
    column = tl.arange(0, 16)[None, :]
    if BY_16:  # a run of groups is a run of memory
        offset = first.to(tl.int64) * 16 + (tl.arange(0, GROUPS)[:, None] * 16 + column)
        inside = (first + tl.arange(0, GROUPS) < n_groups)[:, None] & (column >= 0)
    else:
        line = (first // per_row).to(tl.int64) + local // per_row
        column = group[:, None] * 16 + column
        offset = line[:, None] * cols + column
        inside = (first + tl.arange(0, GROUPS) < n_groups)[:, None] & (column < cols)
    return offset, inside, keep


@triton.jit(do_not_specialize=[3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
def _dropout_fwd_kernel(
    x_ptr, y_ptr, key_ptr, heads, rows, first_sample, first_head, first_row, n_groups, site,
    threshold, scale, cols, GROUPS: tl.constexpr, BY_16: tl.constexpr,
):  # fmt: skip
    offset, inside, keep = _run_of_groups(
        key_ptr, cols, heads, rows, first_sample, first_head, first_row, n_groups, site, threshold,
        GROUPS, BY_16,
    )  # fmt: skip
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(keep, x * scale, 0.0)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[2, 3, 4, 5, 6, 7, 8, 9, 10])
def _keep_mask_fwd_kernel(
    keep_ptr, key_ptr, heads, rows, first_sample, first_head, first_row, n_groups, site, threshold,
    cols, GROUPS: tl.constexpr, BY_16: tl.constexpr,
):  # fmt: skip
    offset, inside, keep = _run_of_groups(
        key_ptr, cols, heads, rows, first_sample, first_head, first_row, n_groups, site, threshold,
        GROUPS, BY_16,
    )  # fmt: skip
    tl.store(keep_ptr + offset, keep, mask=inside)


_GROUPS = 128  # of a program: 16 elements per thread


def _grid_and_shape(at: MaskBlock) -> tuple[tuple[int], tuple[int, ...], int]:
    """(grid, heads .. first_row, number of groups) of a block of the mask."""
    groups = at.samples * at.heads * at.rows * cdiv(at.cols, 16)
    shape = (at.heads, at.rows, at.first_sample, at.first_head, at.first_row)
    return (cdiv(groups, _GROUPS),), shape, groups


def dropout_fwd(
    x: Tensor, key: Tensor, site: int, threshold: int, at: MaskBlock, out: Tensor | None = None
) -> Tensor:
    """A block of x, contiguous, with its slice of the mask applied; out may be x."""
    y = torch.empty_like(x) if out is None else out
    grid, shape, groups = _grid_and_shape(at)
    launch(
        _dropout_fwd_kernel, grid,
        x, y, device_key(key, x.device), *shape, groups, site, threshold, 256.0 / (256 - threshold),
        at.cols,
        GROUPS=_GROUPS, BY_16=at.cols % 16 == 0, num_warps=4,
    )  # fmt: skip
    return y


def keep_mask_fwd(
    key: Tensor, site: int, threshold: int, at: MaskBlock, device: torch.device
) -> Tensor:
    """bool [samples, heads, rows, cols]."""
    keep = torch.empty(tuple(at[:4]), dtype=torch.bool, device=device)
    grid, shape, groups = _grid_and_shape(at)
    launch(
        _keep_mask_fwd_kernel, grid,
        keep, device_key(key, device), *shape, groups, site, threshold, at.cols,
        GROUPS=_GROUPS, BY_16=at.cols % 16 == 0, num_warps=4,
    )  # fmt: skip
    return keep


AOT_EXEMPT = {
    "_dropout_fwd_kernel dropout bf16 C=1001": dict.fromkeys(
        ("16-byte loads", "16-byte stores"),
        "rows of an odd number of elements do not begin at multiples of 16 bytes",
    )
}


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """(label, call on meta tensors) of the variants that GPT-2 uses, for ahead-of-time checks."""
    at, key = MaskBlock(16, 12, 1024, 1024), meta(2, dtype=torch.int64)

    def drop(dtype: torch.dtype, *shape: int) -> Callable[[], Any]:
        x = meta(*shape, dtype=dtype)
        return lambda: dropout_fwd(x, key, 1, 26, mask_shape(shape))

    return [
        ("dropout bf16 C=768", drop(torch.bfloat16, 16, 1024, 768)),
        ("dropout fp16 C=1600", drop(torch.float16, 16, 1024, 1600)),
        ("dropout fp32 C=768", drop(torch.float32, 16, 1024, 768)),
        ("dropout bf16 C=1001", drop(torch.bfloat16, 16, 1024, 1001)),
        ("keep_mask C=1024", lambda: keep_mask_fwd(key, 1, 26, at, key.device)),
    ]
