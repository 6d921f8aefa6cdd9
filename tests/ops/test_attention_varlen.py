"""attention over documents one after another (cu_seqlens): compiled, composed and in Triton."""

import pytest
import torch
from cells import cells, covering, sweep

from fastpar.kernels import Rng, attention, attention_qkvpacked, backend, make_key
from fastpar.kernels.reference import attention_ref
from fastpar.testing import assert_matches_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = Rng(make_key(3, 2**32 - 2), 4)  # the sample index crosses 2**32 at the third document
LENGTHS = {
    "mixed": [1, 40, 7, 65, 2],
    "one": [50],
    "many": [1, 2, 3, 1, 5] * 12,
    "ones": [1] * 9,
    "long then short": [200, 3],
}


@pytest.fixture(params=["cpp", "torch"])
def form(request, monkeypatch):
    """The compiled kernel, and what runs without it."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "choice", "torch")
    return request.param


def cumulate(lengths, device=None):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def draw_qkv(total, H=4, Hkv=2, D=16, dtype=torch.float32):
    return [draw(total, heads, D, dtype=dtype) for heads in (H, Hkv, Hkv)]


def check(inputs, **settings):
    """The 2x rule; the yardstick is the oracle in the inputs' dtype."""

    def call(op):
        return lambda q, k, v: op(q, k, v, **settings)

    return assert_matches_oracle(call(attention), call(attention_ref), inputs)


def grads_of(o, inputs):
    generator = torch.Generator().manual_seed(7)
    do = torch.randn(o.shape, generator=generator).to(o)
    return torch.autograd.grad(o, inputs, do)


@pytest.mark.parametrize(
    ("lengths", "p", "causal", "dtype"), cells(list(LENGTHS), [0.0, 0.3], [True, False], DTYPES)
)
def test_matches_oracle(form, lengths, p, causal, dtype):
    cu_seqlens = cumulate(LENGTHS[lengths])
    inputs = draw_qkv(sum(LENGTHS[lengths]), dtype=dtype)
    report = check(inputs, causal=causal, dropout_p=p, rng=RNG, cu_seqlens=cu_seqlens)
    assert len(report) == 4


@sweep(("H", "Hkv", "D"), [(6, 1, 33), (6, 3, 8), (2, 2, 128), (3, 3, 12)])
@sweep("p", [0.0, 0.3])
def test_heads(form, H, Hkv, D, p):
    lengths = [5, 64, 3] * (8 if H * D < 50 else 1)  # enough elements for a steady largest error
    inputs, cu_seqlens = draw_qkv(sum(lengths), H, Hkv, D), cumulate(lengths)
    check(inputs, dropout_p=p, rng=RNG, softmax_scale=0.4, cu_seqlens=cu_seqlens)


@sweep("p", [0.0, 0.3])
@sweep("causal", [True, False])
def test_a_document_is_a_sample(form, causal, p):
    """Each alone, with the sample index it has here: the same bits."""
    lengths = [70, 1, 33, 8]
    cu_seqlens, inputs = cumulate(lengths), draw_qkv(sum(lengths))
    o = attention(*inputs, causal=causal, dropout_p=p, rng=RNG, cu_seqlens=cu_seqlens)
    grads = grads_of(o, inputs)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(7))
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        alone = [x[None, start:end].detach().requires_grad_() for x in inputs]
        rng = Rng(RNG.key + torch.tensor([0, i]), RNG.site)
        document = torch.tensor([0, end - start], dtype=torch.int32)
        want = attention(*alone, causal=causal, dropout_p=p, rng=rng)
        part = [x[0].detach().requires_grad_() for x in alone]
        got = attention(*part, causal=causal, dropout_p=p, rng=rng, cu_seqlens=document)
        assert torch.equal(o[start:end], got)
        for grad, one in zip(grads, torch.autograd.grad(got, part, do[start:end])):
            assert torch.equal(grad[start:end], one)
        torch.testing.assert_close(got, want[0])  # torch's own kernel may have served this one
        if form == "cpp":
            assert torch.equal(got, want[0])


@sweep("p", [0.0, 0.3])
def test_packed_is_the_same_attention(form, p):
    lengths = [30, 1, 20]
    qkv = draw(51, 3, 4, 24)
    settings = {"dropout_p": p, "rng": RNG, "cu_seqlens": cumulate(lengths)}
    o = attention_qkvpacked(qkv, **settings)
    inputs = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(1)]
    want = attention(*inputs, **settings)
    assert o.is_contiguous()
    assert torch.equal(o, want)
    (dqkv,) = grads_of(o, [qkv])
    assert dqkv.is_contiguous()
    for got, grad in zip(dqkv.unbind(1), grads_of(want, inputs)):
        assert torch.equal(got, grad)


@sweep("causal", [True, False])
def test_a_document_sees_nothing_of_another(form, causal):
    """NaN and infinity in some documents stay there, though buffers serve one after another."""
    lengths = [100, 9, 70, 33]
    inputs, cu_seqlens = draw_qkv(sum(lengths)), cumulate(lengths)
    o = attention(*inputs, causal=causal, cu_seqlens=cu_seqlens)
    want = (o, *grads_of(o, inputs))
    spoilt = [x.detach().clone() for x in inputs]
    for x, value in zip(spoilt, (1.0, float("nan"), float("inf"))):
        for start, end in ((0, 100), (109, 179)):
            x[start:end] = value
    spoilt = [x.requires_grad_() for x in spoilt]
    o = attention(*spoilt, causal=causal, cu_seqlens=cu_seqlens)
    for got, expected in zip((o, *grads_of(o, spoilt)), want):
        assert got[0:100].isnan().any()
        for part in (slice(100, 109), slice(179, 212)):
            assert torch.equal(got[part], expected[part])


def test_float64():
    inputs = draw_qkv(6, 2, 1, D=4, dtype=torch.float64)
    for p in (0.0, 0.3):
        settings = {"dropout_p": p, "rng": RNG, "cu_seqlens": cumulate([4, 2])}
        torch.autograd.gradcheck(lambda q, k, v, s=settings: attention(q, k, v, **s), inputs)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@sweep(
    ("cu_seqlens", "message"),
    [
        (int32(0, 3, 8).long(), r"cu_seqlens int32 of shape \[n \+ 1\], n >= 1, got .*int64 \[3\]"),
        (int32(0, 3, 5, 8).view(2, 2), r"int32 of shape .*got cu_seqlens=torch.int32 \[2, 2\]"),
        (int32(0), r"cu_seqlens int32 of shape .*got cu_seqlens=torch.int32 \[1\]"),
        (int32(), r"cu_seqlens int32 of shape .*got cu_seqlens=torch.int32 \[0\]"),
        (int32(0, 8).to("meta"), r"cu_seqlens on q's device, got cu_seqlens=meta q=cpu"),
        (int32(1, 8), r"cu_seqlens to start at 0, got cu_seqlens\[0\]=1;"),
        (int32(-1, 8), r"cu_seqlens to start at 0, got cu_seqlens\[0\]=-1;"),
        (int32(0, 5, 3, 8), r"to increase, got cu_seqlens\[1\]=5 cu_seqlens\[2\]=3; leave out"),
        (int32(0, 3, 3, 8), r"to increase, got cu_seqlens\[1\]=3 cu_seqlens\[2\]=3; leave out"),
        (int32(0, 0, 8), r"to increase, got cu_seqlens\[0\]=0 cu_seqlens\[1\]=0; leave out"),
        (int32(0, 9, 8), r"to increase, got cu_seqlens\[1\]=9 cu_seqlens\[2\]=8; leave out"),
        (int32(0, 3, 7), r"to end at q's total, got cu_seqlens\[2\]=7 total=8;"),
        (int32(0, 9), r"to end at q's total, got cu_seqlens\[1\]=9 total=8;"),
    ],
)
def test_bad_cu_seqlens_are_refused(form, cu_seqlens, message):
    inputs = draw_qkv(8)
    with pytest.raises(ValueError, match="attention: expected .*" + message):
        attention(*inputs, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="attention: expected .*" + message):
        attention_qkvpacked(draw(8, 3, 2, 16), cu_seqlens=cu_seqlens)


def test_backward_checks_cu_seqlens_too(form):
    """Called as an op of its own it must not read outside the tensors either."""
    q = torch.randn(8, 2, 16)
    settings = (True, 0.5, None, 0, 0)
    _, stats = torch.ops.fastpar.attention(q, q, q, *settings, int32(0, 8))
    with pytest.raises(ValueError, match=r"to end at q's total, got cu_seqlens\[1\]=9 total=8"):
        torch.ops.fastpar.attention_bwd(q, q, q, q, None, stats, *settings, int32(0, 9))


X = torch.ones(8, 6, 16)


@sweep(
    ("q", "k", "v", "message"),
    [
        (X[None], X, X, r"expected q of shape \[total, H, D\], got q=\[1, 8, 6, 16\]"),
        (X, X[0], X, r"expected k of shape \[total, H, D\], got k=\[6, 16\]"),
        (X, X[:7], X[:7], r"expected equal total of q and k, got q=8 k=7"),
        (X, X, X[:, :3], r"expected k and v of one shape, got k=\[8, 6, 16\] v=\[8, 3, 16\]"),
        (X, X[..., :8], X[..., :8], r"expected equal D of q and k, got q=16 k=8"),
        (X, X[:, :4], X[:, :4], r"H divisible by the heads of k, got H=6 k=\[8, 4, 16\]"),
        (X, X.half(), X, r"expected q, k and v of one device and dtype, got .*k=cpu torch.float16"),
        (X, X, X.to("meta"), r"expected q, k and v of one device and dtype, got .*v=meta"),
        (X, X, X.mT.contiguous().mT, r"expected v with a contiguous last dimension, got v.stride"),
        (*[X[..., :1].expand(8, 6, 257).contiguous()] * 3, r"head dim in \[1, 256\], got D=257"),
    ],
)
def test_bad_input_is_refused(q, k, v, message):
    with pytest.raises(ValueError, match="attention: .*" + message):
        attention(q, k, v, cu_seqlens=int32(0, 3, 8))


def test_bad_packed_input_is_refused():
    for qkv in (X, X[:, None], X[:, :, None]):
        with pytest.raises(ValueError, match=r"qkv of shape \[total, 3, H, D\], got qkv=\[8, "):
            attention_qkvpacked(qkv, cu_seqlens=int32(0, 8))
    with pytest.raises(ValueError, match=r"expected qkv of shape \[B, T, 3, H, D\], got qkv=\[8, "):
        attention_qkvpacked(torch.ones(8, 3, 2, 16))
    with pytest.raises(ValueError, match=r"expected q of shape \[B, T, H, D\], got q=\[8, 6, 16\]"):
        attention(X, X, X)


def on(device, tensors):
    return [x.detach().to(device).requires_grad_() for x in tensors]


@covering(1, ("causal", [True, False]), ("p", [0.0, 0.3]))
def test_triton(triton_device, causal, p):
    lengths = [9, 1, 30]
    inputs = on(triton_device, draw_qkv(40, dtype=torch.float16))
    cu_seqlens = cumulate(lengths, triton_device)
    check(inputs, causal=causal, dropout_p=p, rng=RNG, cu_seqlens=cu_seqlens)


def test_triton_packed(triton_device):
    (qkv,) = on(triton_device, [draw(20, 3, 2, 16)])
    settings = {"dropout_p": 0.3, "rng": RNG, "cu_seqlens": cumulate([13, 7], triton_device)}
    o = attention_qkvpacked(qkv, **settings)
    inputs = on(triton_device, qkv.unbind(1))
    want = attention(*inputs, **settings)
    torch.testing.assert_close(o, want)
    (dqkv,) = torch.autograd.grad(o.sum(), qkv)
    for got, grad in zip(dqkv.unbind(1), torch.autograd.grad(want.sum(), inputs)):
        torch.testing.assert_close(got, grad)
