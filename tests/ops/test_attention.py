"""attention beyond test_cases.py: packed, composed in blocks, documents (cu_seqlens), refusals."""

import importlib
import math

import pytest
import torch
from cells import sweep
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.kernels import Rng, attention, attention_qkvpacked, backend, make_key
from fastpar.kernels.attention.composed import (
    BLOCK_BYTES,
    BLOCK_QUERIES,
    Dropout,
    composed_bwd,
    composed_fwd,
)
from fastpar.kernels.reference import attention_ref
from fastpar.testing import assert_matches_oracle

RNG = Rng(make_key(3, 2**32 - 2), 4)  # the sample index crosses 2**32 at the third sample


@pytest.fixture(params=["cpp", "torch"])
def form(request, monkeypatch):
    """The compiled kernel, and what runs without it."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "choice", "torch")
    return request.param


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


@sweep(("T", "Tk"), [(50, 1), (70, 33)])
@sweep("p", [0.0, 0.3])
def test_queries_that_see_nothing_give_0(form, T, Tk, p):
    """Aligned to the last query and the last key."""
    q, k, v = draw(2, T, 3, 16), draw(2, Tk, 3, 16), draw(2, Tk, 3, 16)
    o = attention(q, k, v, dropout_p=p, rng=RNG)
    assert (o[:, : T - Tk] == 0).all()
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert (dq[:, : T - Tk] == 0).all()


def test_last_queries_of_a_sequence_equal_the_whole(form):
    """What a key/value cache relies on."""
    q, k, v = (draw(2, 40, 3, 16) for _ in range(3))
    whole = attention(q, k, v)
    for n in (1, 2, 17, 40):
        torch.testing.assert_close(attention(q[:, -n:], k, v), whole[:, -n:])


@sweep("documents", [None, [30, 1, 20]])
@sweep("causal", [True, False])
@sweep("p", [0.0, 0.3])
def test_packed_is_the_same_attention(form, documents, p, causal):
    settings = {"dropout_p": p, "rng": RNG, "causal": causal, "softmax_scale": 0.3}
    if documents:
        settings["cu_seqlens"] = cumulate(documents)
    qkv = draw(51, 3, 4, 24) if documents else draw(2, 50, 3, 4, 24)
    o = attention_qkvpacked(qkv, **settings)
    inputs = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(-3)]
    want = attention(*inputs, **settings)
    assert torch.equal(o, want)
    assert o.is_contiguous()
    (dqkv,) = grads_of(o, [qkv])
    assert dqkv.is_contiguous()
    for got, grad in zip(dqkv.unbind(-3), grads_of(want, inputs)):
        assert torch.equal(got, grad)


def test_a_batch_is_its_samples(form):
    q, k, v = (draw(4, 20, 2, 16) for _ in range(3))
    whole = attention(q, k, v, dropout_p=0.3, rng=Rng(make_key(1, 10), 2))
    for cut in ((0, 2), (2, 4), (1, 2)):
        part = slice(*cut)
        rng = Rng(make_key(1, 10 + cut[0]), 2)
        o = attention(q[part], k[part], v[part], dropout_p=0.3, rng=rng)
        torch.testing.assert_close(o, whole[part])


def test_dropout_without_rng_follows_torch():
    q, k, v = (draw(1, 20, 2, 16) for _ in range(3))
    torch.manual_seed(1)
    first = attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(attention(q, k, v, dropout_p=0.5), first)
    torch.manual_seed(1)
    assert torch.equal(attention(q, k, v, dropout_p=0.5), first)


def test_mean_over_masks_is_attention_without():
    """400 masks: within 6 standard errors of each element, of which 40 are tested (2e-9 each)."""
    q, k, v = (torch.randn(1, 10, 1, 4) for _ in range(3))
    runs = torch.stack(
        [attention(q, k, v, dropout_p=0.25, rng=Rng(make_key(9, i), 0)) for i in range(400)]
    )
    error = (runs.mean(0) - attention(q, k, v)).abs()
    assert (error <= 6 * runs.std(0) / math.sqrt(400) + 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_compiles_for_any_length(form, p):
    def f(qkv):
        return attention_qkvpacked(qkv, dropout_p=p, rng=RNG)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for B, T in ((2, 6), (3, 9), (2, 11)):
        qkv = draw(B, T, 3, 2, 4)
        o, want = compiled(qkv), f(qkv)
        torch.testing.assert_close(o, want)
        grads = [torch.autograd.grad(x.square().sum(), qkv)[0] for x in (o, want)]
        torch.testing.assert_close(*grads)


def ones(*shape, **kwargs):
    return torch.ones(shape, **kwargs)


X = ones(2, 4, 6, 8)


@sweep(
    ("q", "k", "v", "message"),
    [
        (X[0], X, X, r"expected q of shape \[B, T, H, D\], got q=\[4, 6, 8\]"),
        (X, X[0], X, r"expected k of shape \[B, T, H, D\], got k=\[4, 6, 8\]"),
        (X, X.half(), X, r"expected q, k and v of one device and dtype, got .*k=cpu torch.float16"),
        (X, X, X.to("meta"), r"expected q, k and v of one device and dtype, got .*v=meta"),
        (X, X, X.mT.contiguous().mT, r"expected v with a contiguous last dimension, got v.stride"),
        (X.long(), X.long(), X.long(), r"expected a floating dtype, got q=torch.int64"),
        (X, X, X[:, :3], r"expected k and v of one shape, got k=\[2, 4, 6, 8\] v=\[2, 3, 6, 8\]"),
        (X, X[:1], X[:1], r"expected equal B of q and k, got q=2 k=1"),
        (X, X[..., :4], X[..., :4], r"expected equal D of q and k, got q=8 k=4"),
        (*[ones(1, 2, 1, 257)] * 3, r"expected head dim in \[1, 256\], got D=257"),
        (*[ones(1, 2, 1, 0)] * 3, r"expected head dim in \[1, 256\], got D=0"),
        (X, X[:, :, :4], X[:, :, :4], r"H divisible by the heads of k, got H=6 k=\[2, 4, 4, 8\]"),
        (X, X[:, :0], X[:, :0], r"expected at least one key, .*got H=6 k=\[2, 0, 6, 8\]"),
    ],
)
def test_bad_input_is_refused(q, k, v, message):
    with pytest.raises(ValueError, match="attention: .*" + message):
        attention(q, k, v)


def test_bad_packed_input_and_dropout_are_refused():
    with pytest.raises(ValueError, match=r"expected qkv of shape \[B, T, 3, H, D\], got qkv="):
        attention_qkvpacked(X)
    with pytest.raises(ValueError, match=r"expected qkv of shape .*got qkv=\[1, 2, 4, 6, 8\]"):
        attention_qkvpacked(X[None])
    with pytest.raises(ValueError, match=r"dropout: expected 0 <= p < 1, got p=1.5"):
        attention(X, X, X, dropout_p=1.5)
    with pytest.raises(ValueError, match=r"dropout: expected 0 <= site < 32768, got site=-1"):
        attention(X, X, X, dropout_p=0.5, rng=Rng(make_key(0, 0), -1))
    with pytest.raises(ValueError, match=r"a finite softmax_scale > 0, got softmax_scale=-0.5"):
        attention(X, X, X, softmax_scale=-0.5)


def on_fake_gpu(*shape, dtype=torch.bfloat16):
    """What a program that is compiled for a GPU sees, on any machine. No autograd: its graph asks
    for the device's streams."""
    return torch.empty(shape, dtype=dtype, device="cuda")


@sweep("p", [0.0, 0.3])
def test_a_gpu_takes_triton(p):
    pytest.importorskip("triton", reason="needs triton")
    with FakeTensorMode():
        qkv = on_fake_gpu(2, 5, 3, 4, 16)
        o = attention_qkvpacked(qkv, dropout_p=p)
        assert (o.shape, o.dtype, o.device.type) == ((2, 5, 4, 16), torch.bfloat16, "cuda")
        packed, cu_seqlens = on_fake_gpu(10, 3, 4, 16), torch.empty(3, device="cuda").int()
        for x, lse, c in ((qkv, (2, 4, 5), None), (packed, (4, 10), cu_seqlens)):
            settings = (True, 0.5, None, 0, 0, c)
            o, stats = torch.ops.fastpar.attention(x, None, None, *settings)
            assert stats.shape == lse
            dqkv, *_ = torch.ops.fastpar.attention_bwd(o, x, None, None, o, stats, *settings)
            assert dqkv.shape == x.shape


@sweep(("dtype", "choice"), [(torch.float64, "auto"), (torch.float16, "torch")])
def test_a_gpu_without_triton_kernels_takes_torch(monkeypatch, dtype, choice):
    monkeypatch.setattr(backend, "choice", choice)
    monkeypatch.setattr(backend, "_triton_found", lambda: False)
    module = importlib.import_module("fastpar.kernels.attention")
    monkeypatch.setattr(module, "sdpa", lambda *_: "torch's own kernel")
    with FakeTensorMode():
        q, k, v = (on_fake_gpu(2, 5, 4, 12, dtype=dtype) for _ in range(3))
        assert attention(q, k, v) == "torch's own kernel"
        assert attention(q, k, v, dropout_p=0.3).shape == q.shape
        q, k, v = (on_fake_gpu(5, 4, 12, dtype=dtype) for _ in range(3))
        assert attention(q, k, v, cu_seqlens=on_fake_gpu(3, dtype=torch.int32)).shape == q.shape


def test_missing_triton_on_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "_triton_found", lambda: False)
    message = r"attention: expected Triton for tensors on cuda.*, got no triton package; `pip inst"
    with FakeTensorMode(), pytest.raises(RuntimeError, match=message):
        attention_qkvpacked(on_fake_gpu(2, 5, 3, 4, 16))


@sweep("D", [8, 20, 136, 257])
def test_head_dims_that_triton_lacks_are_refused(monkeypatch, D):
    monkeypatch.setattr(backend, "_triton_found", lambda: True)
    message = rf"attention: expected head dim 16 to 128 in steps of 8 .*got D={D}; pad the heads"
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        attention_qkvpacked(on_fake_gpu(2, 5, 3, 4, D))


def on(device, tensors):
    return [x.detach().to(device).requires_grad_() for x in tensors]


def test_triton_draws_the_mask_of_the_cpu(triton_device, monkeypatch):
    inputs = on(triton_device, [draw(2, 20, 2, 16) for _ in range(3)])
    o = attention(*inputs, dropout_p=0.5, rng=RNG)
    monkeypatch.setattr(backend, "choice", "auto")
    want = attention(*(x.cpu() for x in inputs), dropout_p=0.5, rng=RNG)
    torch.testing.assert_close(o.cpu(), want)


def test_triton_reads_and_writes_the_packed_tensor_in_place(triton_device, monkeypatch):
    from fastpar.kernels.attention import triton as module

    calls = []
    for name in ("attention_fwd", "attention_bwd"):
        host = getattr(module, name)
        record = lambda *args, host=host: (calls.append(args), host(*args))[1]  # noqa: E731
        monkeypatch.setattr(module, name, record)
    (qkv,) = on(triton_device, [draw(2, 20, 3, 2, 16)])
    o = attention_qkvpacked(qkv, dropout_p=0.3, rng=RNG)
    (dqkv,) = torch.autograd.grad(o, qkv, torch.ones_like(o))
    (q, k, v, *_), (_, q2, k2, v2, o2, lse, dq, dk, dv, *_) = calls

    def where(x):
        return x.data_ptr(), x.stride(), x.shape

    for whole, parts in ((qkv, (q, k, v)), (qkv, (q2, k2, v2)), (dqkv, (dq, dk, dv))):
        assert [where(x) for x in parts] == [where(x) for x in whole.unbind(2)]
    assert where(o2) == where(o)
    assert lse.shape == (2, 2, 20)
    separate = on(triton_device, qkv.unbind(2))
    want = attention(*separate, dropout_p=0.3, rng=RNG)
    torch.testing.assert_close(o, want)
    for got, grad in zip(dqkv.unbind(2), torch.autograd.grad(want.sum(), separate)):
        torch.testing.assert_close(got, grad)


@sweep(
    ("kilobytes", "queries", "causal"),
    [
        (1, 7, True),
        (1, 64, False),
        (40, 7, False),
        (40, 64, True),
        (100, 7, True),
        (100, 64, False),
    ],
)
def test_many_blocks(monkeypatch, kilobytes, queries, causal):
    """One key head a block, some heads, all heads: the same attention and mask."""
    monkeypatch.setattr(backend, "choice", "torch")
    monkeypatch.setitem(BLOCK_BYTES, "cpu", kilobytes << 10)
    monkeypatch.setitem(BLOCK_QUERIES, "cpu", queries)
    inputs = [torch.randn(3, 70, n, 16).requires_grad_() for n in (4, 2, 2)]

    def call(op):
        return lambda q, k, v: op(q, k, v, causal=causal, dropout_p=0.3, rng=RNG)

    assert_matches_oracle(call(attention), call(attention_ref), inputs)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an op returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@sweep("bounds", [None, [0, 500, 512]])
def test_scores_are_never_all_alive(bounds):
    T, H, D = 512, 8, 16
    qkv = torch.randn(*([T] if bounds else [2, T]), 3, H, D)
    drop = Dropout(make_key(1, 2), 3, 26)
    inputs, grads = qkv.unbind(-3), torch.empty_like(qkv).unbind(-3)
    with LargestTensor() as mode:
        o = composed_fwd(inputs, bounds, True, 0.25, drop)
        composed_bwd(o, inputs, grads, bounds, True, 0.25, drop)
    assert 0 < mode.numel <= max(3 * BLOCK_BYTES["cpu"] // 4, qkv.numel())
    assert mode.numel < H * T * T / 4


def cumulate(lengths, device=None):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def draw_qkv(total, H=4, Hkv=2, D=16, dtype=torch.float32):
    return [draw(total, heads, D, dtype=dtype) for heads in (H, Hkv, Hkv)]


def grads_of(o, inputs):
    generator = torch.Generator().manual_seed(7)
    do = torch.randn(o.shape, generator=generator).to(o)
    return torch.autograd.grad(o, inputs, do)


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


ROWS = torch.ones(8, 6, 16)


@sweep(
    ("q", "k", "v", "message"),
    [
        (ROWS[None], ROWS, ROWS, r"expected q of shape \[total, H, D\], got q=\[1, 8, 6, 16\]"),
        (ROWS, ROWS[0], ROWS, r"expected k of shape \[total, H, D\], got k=\[6, 16\]"),
        (ROWS, ROWS[:7], ROWS[:7], r"expected equal total of q and k, got q=8 k=7"),
        (
            ROWS,
            ROWS,
            ROWS[:, :3],
            r"expected k and v of one shape, got k=\[8, 6, 16\] v=\[8, 3, 16\]",
        ),
        (ROWS, ROWS[..., :8], ROWS[..., :8], r"expected equal D of q and k, got q=16 k=8"),
        (ROWS, ROWS[:, :4], ROWS[:, :4], r"H divisible by the heads of k, got H=6 k=\[8, 4, 16\]"),
        (
            ROWS,
            ROWS.half(),
            ROWS,
            r"expected q, k and v of one device and dtype, got .*k=cpu torch.float16",
        ),
        (ROWS, ROWS, ROWS.to("meta"), r"expected q, k and v of one device and dtype, got .*v=meta"),
        (
            ROWS,
            ROWS,
            ROWS.mT.contiguous().mT,
            r"expected v with a contiguous last dimension, got v.stride",
        ),
        (*[ROWS[..., :1].expand(8, 6, 257).contiguous()] * 3, r"head dim in \[1, 256\], got D=257"),
    ],
)
def test_bad_documents_are_refused(q, k, v, message):
    with pytest.raises(ValueError, match="attention: .*" + message):
        attention(q, k, v, cu_seqlens=int32(0, 3, 8))


def test_bad_packed_documents_are_refused():
    for qkv in (ROWS, ROWS[:, None], ROWS[:, :, None]):
        with pytest.raises(ValueError, match=r"qkv of shape \[total, 3, H, D\], got qkv=\[8, "):
            attention_qkvpacked(qkv, cu_seqlens=int32(0, 8))
    with pytest.raises(ValueError, match=r"expected qkv of shape \[B, T, 3, H, D\], got qkv=\[8, "):
        attention_qkvpacked(torch.ones(8, 3, 2, 16))
    with pytest.raises(ValueError, match=r"expected q of shape \[B, T, H, D\], got q=\[8, 6, 16\]"):
        attention(ROWS, ROWS, ROWS)
