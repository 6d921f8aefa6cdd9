"""The Triton mask: the published words, the oracle's bits, and the two ops of philox.py on it."""

import math

import pytest
import torch
from cells import slow

pytest.importorskip("triton", reason="needs triton")
import triton
import triton.language as tl
from test_philox import KNOWN

from fastpar.kernels import Rng, dropout, make_key, quantize_p
from fastpar.kernels.philox import MaskBlock
from fastpar.kernels.philox_triton import keep_mask_fwd, keep_tile, philox_words
from fastpar.kernels.reference import keep_mask_ref

SHAPES = [(3, 5), (2, 7, 33), (1, 2, 3, 16), (2, 3, 2, 5, 63), (1, 1), (2, 70, 48), (2, 3, 1000)]
# Seed and sample beyond 32 bits, the sample crossing 2**33 within the batch.
RNGS = [Rng(make_key(5, 3), 9), Rng(make_key(2**62 + 12345, 2**33 - 1), 2**15 - 1)]


@triton.jit
def words_kernel(key_ptr, counter_ptr, out_ptr):
    group, row = tl.load(counter_ptr), tl.load(counter_ptr + 1)
    w0, w1, w2, w3 = philox_words(key_ptr, 0, tl.load(counter_ptr + 2), row, group)
    tl.store(out_ptr, w0)
    tl.store(out_ptr + 1, w1)
    tl.store(out_ptr + 2, w2)
    tl.store(out_ptr + 3, w3)


@triton.jit
def tile_kernel(
    key_ptr, out_ptr, site_head, threshold, T, C, R: tl.constexpr, BLOCK_C: tl.constexpr
):
    n = tl.program_id(0) * R + tl.arange(0, R)
    first = tl.program_id(1) * BLOCK_C
    keep = keep_tile(key_ptr, (n // T)[:, None], site_head, n % T, first // 16, threshold, BLOCK_C)
    cols = first + tl.arange(0, BLOCK_C)
    tl.store(out_ptr + n[:, None] * C + cols[None, :], keep, mask=cols[None, :] < C)


def signed(value: int, bits: int) -> int:
    return value - (value >> (bits - 1) << bits)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(triton_device, counter, key, expected):
    """The low half of the sample is the last counter word; its high half is 0 here."""
    seed = signed(key[1] << 32 | key[0], 64)
    keys = torch.tensor([seed, counter[3]], dtype=torch.int64, device=triton_device)
    counters = torch.tensor([signed(c, 32) for c in counter], dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int32, device=triton_device)
    words_kernel[(1,)](keys, counters.to(triton_device), out)
    assert tuple(w % 2**32 for w in out.tolist()) == expected


@pytest.mark.parametrize(("rows", "block_c"), [slow(1, 16), (4, 32), (8, 64), slow(2, 128)])
def test_tiles_of_any_shape_hold_the_same_bits(triton_device, rows, block_c):
    B, T, C = 2, 8, 100
    for key, site, *_ in RNGS:
        out = torch.zeros(B * T, C, dtype=torch.bool, device=triton_device)
        tile_kernel[(B * T // rows, triton.cdiv(C, block_c))](
            key.to(triton_device), out, site << 16, 77, T, C, R=rows, BLOCK_C=block_c
        )
        expected = keep_mask_ref(Rng(key, site), 77 / 256, (B, T, C))
        assert torch.equal(out.cpu().view(B, T, C), expected)


def test_every_element_is_written(triton_device, monkeypatch):
    def poisoned(x):
        return torch.full_like(x, math.nan)

    monkeypatch.setattr(torch, "empty_like", poisoned)
    for shape in SHAPES:
        assert dropout(torch.ones(shape, device=triton_device), 0.3, RNGS[0]).isfinite().all()


def test_blocks_of_the_mask_alone(triton_device):
    key, site, *_ = RNGS[1]
    whole = keep_mask_ref(RNGS[1], 0.4, (3, 4, 9, 40))
    at = MaskBlock(2, 2, 5, 40, 1, 2, 3)
    got = keep_mask_fwd(key, site, quantize_p(0.4), at, torch.device(triton_device))
    assert torch.equal(got.cpu(), whole[1:3, 2:4, 3:8])


def test_backward_with_a_key_on_either_device(triton_device):
    r = Rng(make_key(3, 4), 5)
    for key in (r.key, r.key.to(triton_device)):
        x = torch.randn(2, 3, 50, device=triton_device, requires_grad=True)
        dropout(x, 0.3, r._replace(key=key)).sum().backward()
        assert torch.equal(x.grad.cpu() != 0, keep_mask_ref(r, 0.3, (2, 3, 50)))
    assert dropout(torch.empty(0, 5, device=triton_device), 0.5, r).shape == (0, 5)
