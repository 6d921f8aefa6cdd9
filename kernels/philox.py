"""Counter-based random bits and the dropout drawn from them: the same mask on every device, for any cut of the work.

An element's bit depends on (seed, global sample index, dropout site, head, row, column) and on nothing
else, so a mask does not depend on tiling, threads, device, ranks or gradient accumulation, and backward
draws it again instead of storing it.

[Note: the mask]
x is seen as [B, H, R, C] (a missing H or R is 1; dimensions beyond four fold into R). With
Philox-4x32-10 (Salmon et al. 2011, doi 10.1145/2063384.2063405):
    sample  = key[1] + b
    counter = (c // 16, r, site << 16 | h, sample & 0xffffffff)
    key     = (seed & 0xffffffff, (seed >> 32) ^ (sample >> 32))
Element c takes byte c % 16 of the 16 output bytes (little-endian: word c % 16 // 4). It is kept iff
byte >= threshold, threshold = round(256 * p), and then scaled by 256 / (256 - threshold). Eight bits an
element let one Philox call serve 16 elements; p is therefore a multiple of 1/256.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_SITES = 1 << 15
MAX_HEADS = 1 << 16
_MASK32 = 0xFFFFFFFF
_MUL_0, _MUL_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


class Rng(NamedTuple):
    """Where a dropout's bits come from.

    key: int64 [2] on the CPU or on x's device: (seed, global index of the first sample of this batch).
        Sample b of the batch has index key[1] + b.
    site: which dropout of the model; 0 <= site < 2**15.
    """

    key: Tensor
    site: int


def make_key(seed: int, first_sample: int, device: Any = None) -> Tensor:
    """The key of a batch whose first sample has the global index `first_sample`: int64 [2]."""
    for name, value in (("seed", seed), ("first_sample", first_sample)):
        if not 0 <= value < 1 << 63:
            raise ValueError(
                f"make_key: expected 0 <= {name} < 2**63, got {name}={value}; "
                "take it modulo 2**63 first"
            )
    return torch.tensor((seed, first_sample), dtype=torch.int64, device=device)


def draw_key(device: Any = None) -> Tensor:
    """A fresh key from torch's default generator of `device`: torch.manual_seed rules it."""
    return torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=device)


def quantize_p(p: float) -> int:
    """The threshold of probability p in units of 1/256: 0 for p == 0, else 1..255."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: expected 0 <= p < 1, got p={p}; use p=0 to switch it off")
    threshold = min(255, int(p * 256 + 0.5))
    if p > 0 and threshold == 0:
        raise ValueError(
            f"dropout: expected p = 0 or p >= 1/512, got p={p}; p is rounded to a multiple of 1/256 "
            "and would be 0"
        )
    return threshold


def philox_4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words; everything broadcasts."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A 64-bit product wraps in int64; its bits are right, and `& _MASK32` undoes the sign of >>.
        product_0, product_1 = c0 * _MUL_0, c2 * _MUL_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK32) ^ c1 ^ k0,
            product_1 & _MASK32,
            ((product_0 >> 32) & _MASK32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def fold_shape(shape: Any) -> tuple[int, int, int, int]:
    """[B, ..., C] as the (B, H, R, C) of [Note: the mask]."""
    if len(shape) < 2:
        raise ValueError(
            f"dropout: expected [B, ..., C], got shape={tuple(shape)}; add the missing dimensions"
        )
    if len(shape) == 2:
        return shape[0], 1, 1, shape[1]
    if len(shape) == 3:
        return shape[0], 1, shape[1], shape[2]
    rows = 1
    for size in shape[2:-1]:
        rows *= size
    return shape[0], shape[1], rows, shape[-1]


def check_rng(rng: Rng, heads: int) -> None:
    """Refuses a site, a key or a number of heads that the counter cannot hold."""
    if not 0 <= rng.site < MAX_SITES:
        raise ValueError(
            f"dropout: expected 0 <= site < {MAX_SITES}, got site={rng.site}; number the dropouts "
            "of a model from 0"
        )
    if rng.key.dtype != torch.int64 or rng.key.shape != (2,):
        raise ValueError(
            f"dropout: expected key int64 [2], got key={rng.key.dtype} {list(rng.key.shape)}; "
            "build it with make_key or draw_key"
        )
    if heads >= MAX_HEADS:
        raise ValueError(
            f"dropout: expected fewer than {MAX_HEADS} heads (dim 1 of four), got H={heads}; "
            "fold them into rows"
        )


def _keep_block(rng: Rng, threshold: int, sizes: Any, head: int, row: int, device: Any) -> Tensor:
    """bool [B, H, R, C]: the part of the mask that starts at `head` and `row`."""
    B, H, R, C = sizes
    i64 = {"dtype": torch.int64, "device": device}
    seed, first_sample = rng.key[0], rng.key[1]
    sample = (first_sample + torch.arange(B, **i64)).view(B, 1, 1, 1)
    heads = torch.arange(head, head + H, **i64).view(1, H, 1, 1) | (rng.site << 16)
    rows = torch.arange(row, row + R, **i64).view(1, 1, R, 1)
    groups = torch.arange((C + 15) // 16, **i64).view(1, 1, 1, -1)
    words = philox_4x32(
        (groups, rows, heads, sample & _MASK32),
        (seed & _MASK32, ((seed >> 32) ^ (sample >> 32)) & _MASK32),
    )
    shifts = torch.arange(0, 32, 8, **i64)
    drawn = (torch.stack(words, dim=-1).unsqueeze(-1) >> shifts) & 255
    return drawn.view(B, H, R, -1)[..., :C] >= threshold


def keep_mask(rng: Rng, p: float, shape: Any, device: Any = None) -> Tensor:
    """The mask that dropout(x, p, rng) applies to an x of this shape: bool, True where kept.

    Args:
        shape: [B, ..., C]; see [Note: the mask].
        device: where the mask is made; the key's device by default.
    """
    sizes = fold_shape(shape)
    check_rng(rng, sizes[1])
    threshold = quantize_p(p)
    device = rng.key.device if device is None else device
    return _keep_block(rng, threshold, sizes, 0, 0, device).view(shape)


def _apply(x: Tensor, threshold: int, key: Tensor, site: int) -> Tensor:
    keep = _keep_block(Rng(key, site), threshold, fold_shape(x.shape), 0, 0, x.device)
    return torch.where(keep.view(x.shape), x * (256.0 / (256 - threshold)), 0.0)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, threshold, key, site):
        ctx.save_for_backward(key)
        ctx.threshold, ctx.site = threshold, site
        return _apply(x, threshold, key, site)

    @staticmethod
    def backward(ctx, dy):
        (key,) = ctx.saved_tensors
        return _apply(dy, ctx.threshold, key, ctx.site), None, None, None


def dropout(x: Tensor, p: float, rng: Rng | None = None) -> Tensor:
    """Sets elements of x to 0 with probability p and scales the others by 1 / (1 - p)."""
    threshold = quantize_p(p)
    if threshold == 0:
        return x
    if rng is None:
        rng = Rng(draw_key(x.device), 0)
    check_rng(rng, fold_shape(x.shape)[1])
    return _Dropout.apply(x, threshold, rng.key, rng.site)
