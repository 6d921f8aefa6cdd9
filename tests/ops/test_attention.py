"""attention beyond test_cases.py: documents (cu_seqlens), composed in blocks, who runs on a GPU,
refusals."""

import importlib

import pytest
import torch
from cells import sweep
from test_cases import check
from torch._subclasses.fake_tensor import FakeTensorMode

from fastpar.kernels import Rng, attention, attention_qkvpacked, backend, make_key
from fastpar.kernels.attention import (
    BLOCK_BYTES,
    BLOCK_QUERIES,
    Dropout,
    composed_bwd,
    composed_fwd,
)
from fastpar.kernels.cases import attention_case
from fastpar.predict.measure import StepMemory

RNG = Rng(make_key(3, 2**32 - 2), 4)  # the sample index crosses 2**32 at the third sample


def draw(*shape, device="cpu"):
    return torch.randn(shape).to(device).requires_grad_()


def grads_of(o, inputs):
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(7)).to(o)
    return torch.autograd.grad(o, inputs, do)


def cumulate(lengths, device="cpu"):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def test_triton_reads_and_writes_the_packed_tensor_in_place(triton_device, recorded):
    from fastpar.kernels.attention import triton as module

    fwd, bwd = (recorded(module, name) for name in ("attention_fwd", "attention_bwd"))
    qkv = draw(1, 20, 3, 1, 16, device=triton_device)
    o = attention_qkvpacked(qkv)
    (dqkv,) = torch.autograd.grad(o, qkv, torch.ones_like(o))
    ((q, k, v, *_),), ((_, q2, k2, v2, _, _, dq, dk, dv, *_),) = fwd, bwd
    assert dqkv.is_contiguous()
    for whole, parts in ((qkv, (q, k, v)), (qkv, (q2, k2, v2)), (dqkv, (dq, dk, dv))):
        for part, x in zip(parts, whole.unbind(2), strict=True):
            assert (part.data_ptr(), part.stride()) == (x.data_ptr(), x.stride())


@pytest.mark.slow
@sweep(("causal", "p"), [(True, 0.3), (False, 0.0)])
def test_a_document_is_a_sample(form, causal, p):
    """Each alone, with the sample index it has here: the same bits."""
    lengths, n_head = ([70, 1, 33], 2) if backend.choice != "triton" else ([1, 65][: 1 + causal], 1)
    cu_seqlens = cumulate(lengths, form)
    inputs = [draw(sum(lengths), heads, 16, device=form) for heads in (n_head, 1, 1)]
    o = attention(*inputs, causal=causal, dropout_p=p, rng=RNG, cu_seqlens=cu_seqlens)
    grads = grads_of(o, inputs)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(7)).to(o)
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        rng = Rng(RNG.key + torch.tensor([0, i]), RNG.site)
        part = [x[start:end].detach().requires_grad_() for x in inputs]
        settings = {"causal": causal, "dropout_p": p, "rng": rng}
        got = attention(*part, **settings, cu_seqlens=cumulate([end - start], form))
        assert torch.equal(o[start:end], got)
        for grad, one in zip(grads, torch.autograd.grad(got, part, do[start:end])):
            assert torch.equal(grad[start:end], one)
        alone = attention(*(x[None] for x in part), **settings)[0]
        torch.testing.assert_close(got, alone)  # torch's own kernel may have served this one
        assert backend.choice == "torch" or torch.equal(got, alone)


@pytest.mark.slow
@sweep("causal", [True, False])
def test_a_document_sees_nothing_of_another(form, causal):
    """NaN and infinity in some documents stay there, though buffers serve one after another."""
    lengths, n_head = ([40, 9, 70, 33], 2) if backend.choice != "triton" else ([9, 30, 12, 8], 1)
    inputs = [draw(sum(lengths), heads, 16, device=form) for heads in (n_head, 1, 1)]
    cu_seqlens = cumulate(lengths, form)
    ends = cu_seqlens.tolist()
    o = attention(*inputs, causal=causal, cu_seqlens=cu_seqlens)
    want = (o, *grads_of(o, inputs))
    for x, value in zip(inputs, (1.0, float("nan"), float("inf"))):
        x.data[: ends[1]] = x.data[ends[2] : ends[3]] = value
    o = attention(*inputs, causal=causal, cu_seqlens=cu_seqlens)
    for got, expected in zip((o, *grads_of(o, inputs)), want):
        assert got[: ends[1]].isnan().any()
        for part in (slice(*ends[1:3]), slice(*ends[3:5])):
            assert torch.equal(got[part], expected[part])


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


X, ROWS = torch.ones(2, 4, 6, 8), torch.ones(8, 6, 16)
PACKED = r"expected qkv of shape \[B, T, 3, H, D\], got qkv="
OF_DOCUMENTS = r"expected qkv of shape \[total, 3, H, D\], got qkv=\[8, "
REFUSALS = [  # words, q, k, v, settings; one tensor is a packed one
    (r"expected q of shape \[B, T, H, D\], got q=\[4, 6, 8\]", X[0], X, X, {}),
    (r"expected k of shape \[B, T, H, D\], got k=\[4, 6, 8\]", X, X[0], X, {}),
    (r"expected q, k and v of one device and dtype, got .*k=cpu torch.float16", X, X.half(), X, {}),
    (r"expected q, k and v of one device and dtype, got .*v=meta", X, X, X.to("meta"), {}),
    (r"expected v with a contiguous last dimension, got v.stride",
     X, X, X.mT.contiguous().mT, {}),
    (r"expected a floating dtype, got q=torch.int64", X.long(), X.long(), X.long(), {}),
    (r"expected k and v of one shape, got k=\[2, 4, 6, 8\] v=\[2, 3, 6, 8\]", X, X, X[:, :3], {}),
    (r"expected equal B of q and k, got q=2 k=1", X, X[:1], X[:1], {}),
    (r"expected equal D of q and k, got q=8 k=4", X, X[..., :4], X[..., :4], {}),
    (r"expected head dim in \[1, 256\], got D=257", *[torch.ones(1, 2, 1, 257)] * 3, {}),
    (r"expected head dim in \[1, 256\], got D=0", *[torch.ones(1, 2, 1, 0)] * 3, {}),
    (r"H divisible by the heads of k, got H=6 k=\[2, 4, 4, 8\]", X, X[:, :, :4], X[:, :, :4], {}),
    (r"expected at least one key, .*got H=6 k=\[2, 0, 6, 8\]", X, X[:, :0], X[:, :0], {}),
    (r"a finite softmax_scale > 0, got softmax_scale=-0.5", X, X, X, {"softmax_scale": -0.5}),
    (r"expected q of shape \[B, T, H, D\], got q=\[8, 6, 16\]", ROWS, ROWS, ROWS, {}),
    (PACKED + r"\[2, 4, 6, 8\]", X, {}),
    (PACKED + r"\[1, 2, 4, 6, 8\]", X[None], {}),
    (PACKED + r"\[8, ", torch.ones(8, 3, 2, 16), {}),
    *((OF_DOCUMENTS, qkv, {"cu_seqlens": int32(0, 8)})
      for qkv in (ROWS, ROWS[:, None], ROWS[:, :, None])),
    (r"expected q of shape \[total, H, D\], got q=\[1, 8, 6, 16\]",
     ROWS[None], ROWS, ROWS, {"cu_seqlens": int32(0, 3, 8)}),
    (r"expected equal total of q and k, got q=8 k=7",
     ROWS, ROWS[:7], ROWS[:7], {"cu_seqlens": int32(0, 3, 8)}),
    *((f"expected .*{words}", *tensors, {"cu_seqlens": cu_seqlens})
      for tensors in ((ROWS, ROWS, ROWS), (torch.ones(8, 3, 2, 16),))
      for words, cu_seqlens in (
        (r"cu_seqlens int32 of shape \[n \+ 1\], n >= 1, got .*int64 \[3\]", int32(0, 3, 8).long()),
        (r"int32 of shape .*got cu_seqlens=torch.int32 \[2, 2\]", int32(0, 3, 5, 8).view(2, 2)),
        (r"cu_seqlens int32 of shape .*got cu_seqlens=torch.int32 \[1\]", int32(0)),
        (r"cu_seqlens int32 of shape .*got cu_seqlens=torch.int32 \[0\]", int32()),
        (r"cu_seqlens on q's device, got cu_seqlens=meta q=cpu", int32(0, 8).to("meta")),
        (r"cu_seqlens to start at 0, got cu_seqlens\[0\]=1;", int32(1, 8)),
        (r"cu_seqlens to start at 0, got cu_seqlens\[0\]=-1;", int32(-1, 8)),
        (r"to increase, got cu_seqlens\[1\]=5 cu_seqlens\[2\]=3; leave out", int32(0, 5, 3, 8)),
        (r"to increase, got cu_seqlens\[0\]=0 cu_seqlens\[1\]=0; leave out", int32(0, 0, 8)),
        (r"to increase, got cu_seqlens\[1\]=9 cu_seqlens\[2\]=8; leave out", int32(0, 9, 8)),
        (r"to end at q's total, got cu_seqlens\[2\]=7 total=8;", int32(0, 3, 7)),
        (r"to end at q's total, got cu_seqlens\[1\]=9 total=8;", int32(0, 9)),
      )),
]  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_what_is_refused(choice, monkeypatch):
    monkeypatch.setattr(backend, "choice", choice)
    for words, *tensors, settings in REFUSALS:
        op = attention if len(tensors) == 3 else attention_qkvpacked
        with pytest.raises(ValueError, match=f"attention.*: .*{words}"):
            op(*tensors, **settings)
    for p, site, words in ((1.5, 0, "0 <= p < 1, got p=1.5"), (0.5, -1, "0 <= site < 32768, got")):
        with pytest.raises(ValueError, match=f"dropout: expected {words}"):
            attention(X, X, X, dropout_p=p, rng=Rng(make_key(0, 0), site))
    # The backward op, called as one, must not read outside the tensors either.
    q, settings = torch.randn(8, 2, 16), (True, 0.5, None, 0, 0)
    _, stats = torch.ops.fastpar.attention(q, q, q, *settings, int32(0, 8))
    with pytest.raises(ValueError, match=r"to end at q's total, got cu_seqlens\[1\]=9 total=8"):
        torch.ops.fastpar.attention_bwd(q, q, q, q, None, stats, *settings, int32(0, 9))


def on_fake_gpu(*shape, dtype=torch.bfloat16):
    """What a program that is compiled for a GPU sees, on any machine. No autograd: its graph asks
    for the device's streams."""
    return torch.empty(shape, dtype=dtype, device="cuda")


@sweep("p", [0.0, 0.3])
def test_a_gpu_takes_triton(p):
    pytest.importorskip("triton", reason="needs triton")
    with FakeTensorMode():
        qkv, packed = on_fake_gpu(2, 5, 3, 4, 16), on_fake_gpu(10, 3, 4, 16)
        o = attention_qkvpacked(qkv, dropout_p=p)
        assert (o.shape, o.dtype, o.device.type) == ((2, 5, 4, 16), torch.bfloat16, "cuda")
        cu_seqlens = on_fake_gpu(3, dtype=torch.int32)
        for x, lse, c in ((qkv, (2, 4, 5), None), (packed, (4, 10), cu_seqlens)):
            settings = (True, 0.5, None, 0, 0, c)
            o, stats = torch.ops.fastpar.attention(x, None, None, *settings)
            assert stats.shape == lse
            dqkv, *_ = torch.ops.fastpar.attention_bwd(o, x, None, None, o, stats, *settings)
            assert dqkv.shape == x.shape


@sweep(("dtype", "choice"), [(torch.float64, "auto"), (torch.float16, "torch")])
def test_a_gpu_without_triton_kernels_takes_torch(monkeypatch, dtype, choice):
    monkeypatch.setattr(backend, "choice", choice)
    monkeypatch.setattr(backend, "has_triton", False)
    module = importlib.import_module("fastpar.kernels.attention")
    monkeypatch.setattr(module, "sdpa", lambda *_: "torch's own kernel")
    with FakeTensorMode():
        q, k, v = (on_fake_gpu(2, 5, 4, 12, dtype=dtype) for _ in range(3))
        assert attention(q, k, v) == "torch's own kernel"
        assert attention(q, k, v, dropout_p=0.3).shape == q.shape
        q, k, v = (on_fake_gpu(5, 4, 12, dtype=dtype) for _ in range(3))
        assert attention(q, k, v, cu_seqlens=on_fake_gpu(3, dtype=torch.int32)).shape == q.shape


def test_what_a_gpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "has_triton", False)
    message = r"attention: expected Triton for tensors on cuda.*, got no triton package; `pip inst"
    with FakeTensorMode(), pytest.raises(RuntimeError, match=message):
        attention_qkvpacked(on_fake_gpu(2, 5, 3, 4, 16))
    monkeypatch.setattr(backend, "has_triton", True)
    for D in (8, 20, 136, 257):
        message = rf"attention: expected head dim 16 to 128 in steps of 8 .*got D={D}; pad the head"
        with FakeTensorMode(), pytest.raises(ValueError, match=message):
            attention_qkvpacked(on_fake_gpu(2, 5, 3, 4, D))


def test_products_are_rounded_once(isas):
    """By way of double without care the score would be 1 + 2**-22."""
    q, k = [1 + 2**-23, 2**-24 * (1 + 2**-20)], [1.0, 1 - 2**-20]
    q, k = (torch.tensor(x, dtype=torch.float32, device="cpu").view(1, 1, 1, 2) for x in (q, k))
    for name in isas():
        _, stats = torch.ops.fastpar.attention(q, k, k, True, 1.0, None, 0, 0, None)
        assert not backend.has_fma or stats.flatten()[0] == 1 + 2**-23, name


@sweep(("kilobytes", "queries", "causal"), [(1, 7, True), (20, 64, False), (50, 7, True)])
def test_many_blocks(monkeypatch, kilobytes, queries, causal):
    """Composed, as on a CPU without FMA: one key head a block, some heads, all heads."""
    module = importlib.import_module("fastpar.kernels.attention")
    monkeypatch.setattr(module, "has_fma", False)
    monkeypatch.setitem(BLOCK_BYTES, "cpu", kilobytes << 10)
    monkeypatch.setitem(BLOCK_QUERIES, "cpu", queries)
    check(attention_case(3, 50, 16, 4, "cpu", Hkv=2, p=0.3, causal=causal), torch.float32, "cpu")


@sweep("bounds", [None, [0, 500, 512]])
def test_scores_are_never_all_alive(bounds):
    T, H, D = 512, 8, 16
    qkv = torch.randn(*([T] if bounds else [2, T]), 3, H, D)
    drop = Dropout(make_key(1, 2), 3, 26)
    inputs, grads = qkv.unbind(-3), torch.empty_like(qkv).unbind(-3)
    with StepMemory(qkv.device, alive_bytes=0) as memory:
        o = composed_fwd(inputs, bounds, True, 0.25, drop)
        composed_bwd(o, inputs, grads, bounds, True, 0.25, drop)
    assert 0 < memory.peak_bytes < 8 * BLOCK_BYTES["cpu"] + 2 * qkv.nbytes < 4 * H * T * T
