"""The mask of kernels/philox.py in Triton: the same bits, [Note: the mask] there.

keep_tile() is what other kernels call; _dropout_kernel and _keep_mask_kernel are the ops of
philox.py on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.philox import MaskBlock
from fastpar.kernels.triton_launch import cdiv, device_key, launch


@triton.jit
def philox_words(key_ptr, sample, site_head, rows, groups):
    """The four 32-bit words of these rows and groups of 16 columns, which broadcast.

    sample: index in the batch (added to key[1]); site_head: site << 16 | head, 32 bits.
    """
    seed = tl.load(key_ptr).to(tl.int64)
    sample = tl.load(key_ptr + 1).to(tl.int64) + sample
    seed = seed ^ ((sample >> 32) << 32)
    zero = rows * 0 + groups * 0
    return tl.philox(
        seed,
        (groups + zero).to(tl.uint32),
        (rows + zero).to(tl.uint32),
        (zero + site_head).to(tl.uint32),
        (zero + sample).to(tl.uint32),
        10,
    )


@triton.jit
def keep_tile(key_ptr, sample, site_head, rows, first_group, threshold, BLOCK_C: tl.constexpr):
    """bool [R, BLOCK_C]: which elements of these rows and of the columns from 16 * first_group on
    are kept. rows: int32 [R]; BLOCK_C: a power of 2, at least 16."""
    R: tl.constexpr = rows.shape[0]
    G: tl.constexpr = BLOCK_C // 16
    groups = first_group + tl.arange(0, G)
    w0, w1, w2, w3 = philox_words(key_ptr, sample, site_head, rows[:, None], groups[None, :])
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, G, 2, 2], word 2 * i + j at [i, j]
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    drawn = (words.reshape(R, G, 4)[:, :, :, None] >> shifts[None, None, None, :]) & 0xFF
    return drawn.reshape(R, BLOCK_C) >= threshold
