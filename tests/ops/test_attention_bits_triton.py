"""The dropout mask of attention kept as bits: the same mask, and the same results, as drawn."""

import math

import pytest
import torch
from cells import covering

pytest.importorskip("triton", reason="needs triton")

from test_attention_triton import RNG, draw

from fastpar.kernels import Rng, attention, attention_qkvpacked, keep_mask, make_key
from fastpar.kernels.attention import BITS, Mask, _attention_bits, bits_shape
from fastpar.kernels.attention import bits_triton as kernels
from fastpar.kernels.attention import triton as host
from fastpar.kernels.attention.plans import Config
from fastpar.kernels.reference import attention_ref
from fastpar.testing import assert_matches_oracle


@pytest.fixture
def kept():
    with BITS.trying((), Mask(1)):
        yield


def unpacked(bits, T, Tk):
    """bool [B, H, T, Tk] of [Note: kept bits], with the note's numbers."""
    key = torch.arange(64)
    place = 16 * (key // 2 % 4) + 8 * (key % 2) + 7 - key // 8
    keep = (bits.cpu().view(torch.int64)[..., None] >> place) & 1  # [B, H, blocks, rows, 64]
    return keep.bool().transpose(2, 3).flatten(3)[:, :, :T, :Tk]


@covering(1, ("causal", [False, True]), ("p", [1 / 256, 0.1, 0.5, 0.9]))
def test_kept_bits_are_the_mask(triton_device, causal, p):
    B, H, T, Tk = 2, 3, 70, 300
    rng = Rng(make_key(3, 2**32 - 1, triton_device), 4)
    threshold = round(256 * p)
    bits = torch.zeros(bits_shape(B, H, T, Tk), dtype=torch.int64, device=triton_device)
    settings = rng.key, rng.site_head, threshold, causal, bits.view(torch.uint64)
    kernels.attention_bits_fwd(*settings, (B, H, T, Tk))
    got, want = unpacked(bits, T, Tk), keep_mask(rng, p, (B, H, T, Tk)).cpu()
    if causal:
        seen = torch.ones(T, Tk, dtype=torch.bool).tril(Tk - T)
        got, want = got & seen, want & seen
    assert torch.equal(got, want)


@pytest.mark.usefixtures("kept", "poisoned")
@covering(
    1,
    ("sizes", [(1, 9, 16), (63, 63, 40), (130, 140, 64), (70, 5, 24)]),
    ("dtype", [torch.float16, torch.float32]),
    ("Hkv", [1, 2]),
    ("causal", [True, False]),
)
def test_attention_with_kept_bits_matches_the_oracle(triton_device, sizes, dtype, Hkv, causal):
    T, Tk, D = sizes
    B = 1 if T > 1 else 8
    inputs = [
        draw(triton_device, B, n, h, D, dtype=dtype) for n, h in ((T, 2), (Tk, Hkv), (Tk, Hkv))
    ]
    settings = {"causal": causal, "dropout_p": 0.3, "rng": RNG}
    assert_matches_oracle(
        lambda q, k, v: attention(q, k, v, **settings),
        lambda q, k, v: attention_ref(q, k, v, **settings),
        inputs,
    )


@pytest.mark.parametrize(
    ("block_q", "block_k"),
    [
        (64, 128),
        *(pytest.param(*b, marks=pytest.mark.slow) for b in ((32, 16), (16, 64), (128, 32))),
    ],
)
def test_kept_bits_serve_every_tile(triton_device, monkeypatch, block_q, block_k):
    """The results differ from those of a drawn mask by the order of sums alone."""
    config = Config(block_q, block_k, 4, 1, "tma")
    monkeypatch.setattr(host, "get_config", lambda *_: config)
    qkv = torch.randn(1, 140, 3, 1, 16).to(triton_device).requires_grad_()
    found = []
    for mask in (Mask(0), Mask(1)):
        with BITS.trying((), mask):
            o = attention_qkvpacked(qkv, dropout_p=0.4, rng=RNG)
            found.append((o, *torch.autograd.grad(o.cos().sum(), qkv)))
    for drawn, kept in zip(*found):
        torch.testing.assert_close(kept, drawn, rtol=2e-5, atol=2e-5)


def test_bits_are_drawn_once_for_three_kernels(triton_device, monkeypatch, kept):
    calls = []
    original = kernels.attention_bits_fwd
    monkeypatch.setattr(
        kernels, "attention_bits_fwd", lambda *args: (calls.append(args), original(*args))
    )
    q, k, v = (draw(triton_device, 1, 20, 1, 16) for _ in range(3))
    first = attention(q, k, v, dropout_p=0.3, rng=RNG)
    grads = torch.autograd.grad(first.sum(), (q, k, v), retain_graph=True)
    assert len(calls) == 1
    again = torch.autograd.grad(first.sum(), (q, k, v))
    assert all(map(torch.equal, grads, again))
    assert all(x.isfinite().all() for x in (first, *grads))
    attention(q, k, v)  # no mask
    flat = [x[0] for x in (q, k, v)]
    cu = torch.tensor([0, 20], dtype=torch.int32, device=triton_device)
    documents = attention(*flat, dropout_p=0.3, rng=RNG, cu_seqlens=cu)  # drawn
    assert len(calls) == 1
    torch.testing.assert_close(documents, first[0], rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("kept")
def test_the_op_with_bits_passes_torchs_checks(triton_device):
    bits = _attention_bits
    shape = [1, 2, 20, 30]
    args = (make_key(3, 0, triton_device), 4, 77, True, shape, torch.device(triton_device))
    torch.library.opcheck(bits.overload, args, test_utils=("test_schema", "test_faketensor"))
    q, k, v = (draw(triton_device, 1, 20, 1, 16) for _ in range(3))
    call = torch.compile(
        lambda q, k, v: attention(q, k, v, dropout_p=0.3, rng=RNG),
        backend="aot_eager",
        fullgraph=True,
    )
    want, got = attention(q, k, v, dropout_p=0.3, rng=RNG), call(q, k, v)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), q), torch.autograd.grad(want.sum(), q)):
        assert torch.equal(a, b)


def test_bits_take_an_eighth_of_a_byte_an_element_and_are_kept_on_hopper():
    assert 8 * math.prod(bits_shape(8, 12, 1024, 1024)) == 8 * 12 * 1024 * 1024 // 8
    assert [BITS.get(arch).kept for arch in (80, 90, 120)] == [0, 1, 0]
    with pytest.raises(ValueError, match="attention_bits: expected 0 or 1, got kept=2"):
        BITS.write(90, (), Mask(2))
