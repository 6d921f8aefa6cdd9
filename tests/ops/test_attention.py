"""attention against fp64: compiled and composed, packed and strided, with the mask of philox.py."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from cells import covering, sweep
from torch._subclasses.fake_tensor import FakeTensorMode

from fastpar.kernels import Rng, attention, attention_qkvpacked, backend, make_key
from fastpar.kernels.reference import attention_ref
from fastpar.testing import assert_matches_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = Rng(make_key(3, 2**32 - 1), 4)


@pytest.fixture(params=["cpp", "torch"])
def form(request, monkeypatch):
    """The compiled kernel, and what runs without it."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "choice", "torch")
    return request.param


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


def torch_attention(q, k, v, *, causal=True, softmax_scale=None, dropout_p=0.0, rng=None):
    """torch's own kernel with an explicit mask."""
    T, Tk = q.shape[1], k.shape[1]
    seen = torch.ones(T, Tk, dtype=torch.bool, device=q.device)
    o = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=seen.tril(Tk - T) if causal else None,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def check(form, inputs, **settings):
    """The 2x rule. Yardstick: the oracle in the inputs' dtype; torch's kernel where that runs."""

    def call(op):
        return lambda q, k, v: op(q, k, v, **settings)

    yardstick = attention_ref if form == "cpp" or settings.get("dropout_p") else torch_attention
    fn, ref, eager = (call(op) for op in (attention, attention_ref, yardstick))
    return assert_matches_oracle(fn, ref, inputs, eager=eager)


@covering(
    2,
    (("T", "D"), [(1, 1), (2, 8), (7, 40), (63, 64), (65, 16), (127, 33), (96, 128)]),
    ("p", [0.0, 0.3]),
    ("causal", [True, False]),
    ("dtype", DTYPES),
)
def test_matches_oracle(form, T, D, p, causal, dtype):
    B = 2 if T > 60 else 16  # enough elements for a steady largest error
    inputs = [draw(B, T, 3, D, dtype=dtype) for _ in range(3)]
    report = check(form, inputs, causal=causal, dropout_p=p, rng=RNG)
    assert len(report) == 4


@sweep("causal", [True, False])
@sweep(("T", "Tk"), [(1, 50), (5, 50), (50, 1), (70, 33)])
@sweep("p", [0.0, 0.3])
def test_other_lengths(form, T, Tk, p, causal):
    """Aligned to the last query and the last key; queries that see nothing give 0."""
    inputs = [draw(8, T, 3, 16), draw(8, Tk, 3, 16), draw(8, Tk, 3, 16)]
    check(form, inputs, causal=causal, dropout_p=p, rng=RNG)
    if causal and Tk < T:
        q, k, v = inputs
        o = attention(q, k, v)
        assert (o[:, : T - Tk] == 0).all()
        (dq,) = torch.autograd.grad(o.sum(), q)
        assert (dq[:, : T - Tk] == 0).all()


def test_last_queries_of_a_sequence_equal_the_whole(form):
    """What a key/value cache relies on."""
    q, k, v = (draw(2, 40, 3, 16) for _ in range(3))
    whole = attention(q, k, v)
    for n in (1, 2, 17, 40):
        torch.testing.assert_close(attention(q[:, -n:], k, v), whole[:, -n:])


@sweep("Hkv", [1, 2, 3, 6])
@sweep("p", [0.0, 0.3])
def test_fewer_key_heads(form, Hkv, p):
    inputs = [draw(2, 20, 6, 24), draw(2, 20, Hkv, 24), draw(2, 20, Hkv, 24)]
    check(form, inputs, dropout_p=p, rng=RNG)


def test_long_sequence(form):
    """Several blocks of queries and panels of keys, sums over 1000 terms."""
    inputs = [draw(1, 1000, 2, 64) for _ in range(3)]
    check(form, inputs)


@sweep("softmax_scale", [0.02, 3.0])
def test_softmax_scale(form, softmax_scale):
    inputs = [draw(2, 30, 2, 32) for _ in range(3)]
    for p in (0.0, 0.3):
        check(form, inputs, softmax_scale=softmax_scale, dropout_p=p, rng=RNG)


def test_huge_scores(form):
    """Scores of 1e4: exp overflows unless the maximum is taken off first."""
    inputs = [draw(1, 33, 2, 16, scale=50.0), draw(1, 33, 2, 16, scale=50.0), draw(1, 33, 2, 16)]
    check(form, inputs)


@sweep("p", [0.0, 0.3])
def test_packed_is_the_same_attention(form, p):
    qkv = draw(2, 50, 3, 4, 24)
    settings = {"dropout_p": p, "rng": RNG, "softmax_scale": 0.3}
    for causal in (True, False):
        o = attention_qkvpacked(qkv, causal=causal, **settings)
        q, k, v = (x.detach().contiguous().requires_grad_() for x in qkv.unbind(2))
        want = attention(q, k, v, causal=causal, **settings)
        assert torch.equal(o, want)
        assert o.is_contiguous()
        do = torch.randn_like(o)
        (dqkv,) = torch.autograd.grad(o, qkv, do)
        assert dqkv.is_contiguous()
        for got, grad in zip(dqkv.unbind(2), torch.autograd.grad(want, (q, k, v), do)):
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


@sweep("shape", [(0, 4, 2, 8), (2, 0, 2, 8)])
@sweep("p", [0.0, 0.3])
def test_nothing_to_attend(form, shape, p):
    q, k, v = draw(*shape), draw(shape[0], 4, 2, 8), draw(shape[0], 4, 2, 8)
    o = attention(q, k, v, dropout_p=p, rng=RNG)
    assert o.shape == shape
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert all((g == 0).all() for g in grads)


def test_float64():
    q, k, v = (draw(1, 5, 2, 4, dtype=torch.float64) for _ in range(3))
    for p in (0.0, 0.3):
        fn = lambda q, k, v, p=p: attention(q, k, v, dropout_p=p, rng=RNG)  # noqa: E731
        torch.autograd.gradcheck(fn, (q, k, v))


def test_equals_torch():
    q, k, v = (draw(2, 70, 3, 32) for _ in range(3))
    heads = (x.transpose(1, 2) for x in (q, k, v))
    want = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attention(q, k, v), want)


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
    from fastpar.kernels import attention_bwd_triton, attention_triton

    calls = []
    for module, name in (
        (attention_triton, "attention_fwd"),
        (attention_bwd_triton, "attention_bwd"),
    ):
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


@pytest.mark.gpu
@sweep("dtype", DTYPES)
@sweep("p", [0.0, 0.3])
@sweep("choice", ["auto", "torch"])
def test_on_a_gpu(monkeypatch, choice, p, dtype):
    monkeypatch.setattr(backend, "choice", choice)
    for T, Tk, Hkv in ((65, 65, 4), (1, 40, 2), (33, 40, 1), (40, 33, 4)):
        inputs = [draw(2, n, H, 64, dtype=dtype) for n, H in ((T, 4), (Tk, Hkv), (Tk, Hkv))]
        check("torch", on("cuda", inputs), dropout_p=p, rng=RNG)
