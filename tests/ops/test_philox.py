"""One mask, everywhere: against the published generator, between implementations, for any cut.

Statistical tests draw from fixed seeds, so they are either always green or always red. Bounds are
stated as the chance that a correct generator would fail one of them for a random seed.
"""

import math

import pytest
import torch
from cells import sweep

from fastpar.kernels import (
    _C,
    Rng,
    attention,
    backend,
    draw_key,
    dropout,
    embedding,
    keep_mask,
    make_key,
    quantize_p,
    residual_layer_norm,
)
from fastpar.kernels.philox import MaskBlock, dropout_block, philox_4x32
from fastpar.kernels.reference import keep_mask_ref, philox_ref

# Known answers of Philox4x32-10, from the Random123 library's own test.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
SHAPES = [(3, 5), (2, 7, 33), (1, 2, 3, 16), (2, 3, 2, 5, 63), (1, 1, 1, 1), (2, 2, 1000),
          (2, 70, 48)]  # fmt: skip
BACKENDS = ["torch", "triton", "baseline", "avx2", "avx512"]


@pytest.fixture(params=BACKENDS)
def device(request, monkeypatch):
    """torch ops, Triton's kernels, or the compiled one on each instruction set of this machine."""
    if request.param in ("torch", "triton"):
        monkeypatch.setattr(backend, "choice", "torch")
        yield request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"
        return
    if not _C.isa_supported(request.param):
        pytest.skip(f"this machine has no {request.param}")
    before = _C.isa()
    _C.set_isa(request.param)
    yield "cpu"
    _C.set_isa(before)


def rng(seed=1, first_sample=0, site=0):
    return Rng(make_key(seed, first_sample), site)


@sweep(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter, key, expected):
    assert philox_ref(counter, key) == expected
    words = philox_4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(int(w) for w in words) == expected


@sweep("shape", SHAPES)
def test_mask_equals_the_oracle(device, shape):
    # Seed and sample beyond 32 bits, the sample crossing 2**33 within the batch.
    for r in (rng(5, 3, 9), rng(2**62 + 12345, 2**33 - 1, 2**15 - 1)):
        got = keep_mask(r, 0.3, shape, device=device)
        assert got.dtype == torch.bool
        assert torch.equal(got.cpu(), keep_mask_ref(r, 0.3, shape))


@sweep("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@sweep("shape", SHAPES)
def test_dropout_is_the_mask_times_the_scale(device, shape, dtype):
    if backend.choice == "triton" and dtype == torch.float64:
        return  # torch's
    x = torch.randn(shape).to(dtype)
    r = rng(7, 11, 3)
    y = dropout(x.to(device), 0.3, r)
    assert y.dtype == dtype
    expected = torch.where(keep_mask_ref(r, 0.3, shape), x * (256 / (256 - 77)), 0.0)
    assert torch.equal(y.cpu(), expected)
    x[x > 1], x[x < -1] = math.inf, math.nan  # are dropped like others
    expected = torch.where(keep_mask_ref(r, 0.3, shape), x, 0.0) * (256 / (256 - 77))
    assert torch.equal(dropout(x.to(device), 0.3, r).cpu().nan_to_num(7), expected.nan_to_num(7))


def test_blocks_are_slices_of_the_mask(device):
    x = torch.randn(3, 4, 20, 40, device=device)
    whole = dropout(x, 0.4, rng(3, 5, 2))
    for b, h, r, (n, m, k) in [(1, 0, 0, (2, 4, 20)), (0, 2, 7, (1, 2, 5)), (2, 3, 19, (1, 1, 1))]:
        part = x[b : b + n, h : h + m, r : r + k].clone(memory_format=torch.contiguous_format)
        at = MaskBlock(n, m, k, 40, b, h, r)
        expected = whole[b : b + n, h : h + m, r : r + k]
        key = make_key(3, 5)
        assert torch.equal(dropout_block(part, key, 2, quantize_p(0.4), at), expected)
        assert dropout_block(part, key, 2, quantize_p(0.4), at, out=part) is part
        assert torch.equal(part, expected)


def test_masks_are_independent():
    """Rates of keeping, and agreement of masks that differ in one coordinate: |z| < 6 for each.

    A correct generator fails once in 2e7 seeds. (n = 2^18, p = 1/2: independent bits agree half of
    the time.)
    """
    for p in (1 / 256, 0.1, 0.5, 0.9, 255 / 256):
        n, q = 1 << 20, 1 - quantize_p(p) / 256
        kept = keep_mask(rng(123), p, (4, 512, 512)).sum().item()
        assert abs(kept - n * q) < 6 * math.sqrt(n * q * (1 - q)), p

    def drawn(*at):
        return keep_mask(rng(*at), 0.5, (4, 4, 128, 128))

    base = drawn(17, 40, 6)
    pairs = {
        "site": (base, drawn(17, 40, 7)),
        "far site": (base, drawn(17, 40, 6 + 2**14)),
        "seed": (base, drawn(18, 40, 6)),
        "high seed": (base, drawn(17 + 2**32, 40, 6)),
        "sample": (base, drawn(17, 41, 6)),
        "high sample": (base, drawn(17, 40 + 2**32, 6)),
        "head": (base[:, 1:], base[:, :-1]),
        "row": (base[:, :, 1:], base[:, :, :-1]),
        "far row": (base[:, :, 64:], base[:, :, :-64]),
        "column": (base[..., 1:], base[..., :-1]),
        "column of the next word": (base[..., 4:], base[..., :-4]),
        "column of the next call": (base[..., 16:], base[..., :-16]),
        "row and column": (base, base.mT),
        "head and sample": (base, base.transpose(0, 1)),
    }
    for name, (a, b) in pairs.items():
        same = a == b
        if name == "row and column":
            same = same[..., torch.ones(128, 128, dtype=torch.bool).triu(1)]
        if name == "head and sample":
            same = same[torch.ones(4, 4, dtype=torch.bool).triu(1)]
        z = (same.sum().item() - same.numel() / 2) / (math.sqrt(same.numel()) / 2)
        assert abs(z) < 6, (name, z)


def test_backward_draws_the_same_mask(device):
    """Also of strided and expanded gradients, with a key on either device; and twice."""
    x, r = torch.randn(2, 3, 50, device=device, requires_grad=True), rng(3, 4, 5)
    for key in (r.key, r.key.to(device))[: 1 if device == "cpu" else 2]:
        y = dropout(x, 0.3, r._replace(key=key))
        for dy in (torch.randn(2, 50, 3).mT, torch.randn(50).expand(2, 3, 50), torch.ones(2, 3, 1)):
            dy = dy.to(device).expand(2, 3, 50)
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            assert torch.equal(dx, dropout(dy.contiguous(), 0.3, r))
    if backend.choice != "triton":  # fp64 is of the other two
        x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradgradcheck(lambda x: dropout(x, 0.3, r), x)


@sweep("op", [
    dropout,
    lambda x, p: attention(*[x.view(1, 20, 2, 5)] * 3, dropout_p=p),
    lambda x, p: residual_layer_norm(x, x, torch.ones(100), dropout_p=p)[1],
    lambda x, p: embedding(torch.tensor([[0, 1]]), x, dropout_p=p),
])  # fmt: skip
def test_without_rng_torch_decides(op):
    x = torch.ones(2, 100)
    torch.manual_seed(5)
    first = op(x, 0.5)
    assert not torch.equal(op(x, 0.5), first)
    torch.manual_seed(5)
    assert torch.equal(op(x, 0.5), first)
    assert draw_key().shape == (2,)


def test_no_dropout_and_p_in_units_of_a_256th():
    x = torch.randn(3)
    assert dropout(x, 0.0) is x
    assert dropout(torch.empty(0, 5), 0.5).shape == (0, 5)
    assert keep_mask(rng(), 0.5, (2, 0, 7)).shape == (2, 0, 7)
    for p, threshold in ((0.0, 0), (0.1, 26), (0.5, 128), (0.002, 1), (0.999, 255)):
        assert quantize_p(p) == threshold


KEY = make_key(0, 0)
OF_RNG = [  # of dropout and of keep_mask
    ((2, 3), Rng(KEY, 2**15), r"expected 0 <= site < 32768, got site=32768"),
    ((2, 3), Rng(KEY.float(), 0), r"expected an int64 key of shape \[2\], got key=torch.flo"),
    ((2, 3), Rng(KEY[:1], 0), r"expected an int64 key of shape \[2\], got key=.* \[1\]"),
    ((2, 3), Rng(KEY.to("meta"), 0), r"expected a key on the CPU or on cpu, got key on meta"),
    ((1, 2**16, 1, 1), Rng(KEY, 0), r"expected fewer than 65536 heads .*got H=65536"),
    ((3,), Rng(KEY, 0), r"expected x of shape \[B, ..., C\], got x=\[3\]"),
]
REFUSALS = [
    *((words, dropout, (torch.empty(x), 0.1, r)) for x, r, words in OF_RNG),
    *((words, keep_mask, (r, 0.1, x, "cpu")) for x, r, words in OF_RNG),
    *((r"expected 0 <= p < 1, got p=", dropout, (torch.ones(2, 3), p))
      for p in (-0.1, 1.0, 1.5, math.nan)),
    (r"expected p = 0 or p > 1/512, got p=0.001", quantize_p, (0.001,)),
    (r"make_key: expected 0 <= seed < 2\*\*63, got seed=-1", make_key, (-1, 0)),
    (r"make_key: expected 0 <= first_sample < 2\*\*63, got", make_key, (0, 2**63)),
    (r"expected 0 <= threshold <= 255, got thresh", _C.keep_mask,
     (torch.empty(1, dtype=torch.bool), 0, 0, 0, 256, 1, 1, 1, 1, 0, 0, 1)),
]  # fmt: skip


@sweep(("words", "call", "args"), REFUSALS)
def test_what_is_refused(words, call, args):
    with pytest.raises(ValueError, match=words):
        call(*args)
