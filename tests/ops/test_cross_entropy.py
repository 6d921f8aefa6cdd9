"""cross_entropy against its oracle: values, gradients, memory, hostile inputs."""

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import backend, cross_entropy
from fastpar.kernels.reference import cross_entropy_ref
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 1.0, "z_loss": 0.1})
REDUCTIONS = ("mean", "sum", "none")


def eager(logits, targets, *, vocab_size=None, z_loss=0.0, reduction="mean", **kwargs):
    """F.cross_entropy in fp32, which the op promises for 16 bits too, and z-loss as one adds it."""
    wide = logits[..., :vocab_size].flatten(0, -2).float()
    flat = targets.flatten()
    losses = F.cross_entropy(wide, flat, reduction="none", **kwargs)
    if z_loss:
        valid = flat != kwargs.get("ignore_index", -100)
        losses = losses + torch.where(valid, z_loss * wide.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    valid = (flat != kwargs.get("ignore_index", -100)).sum()
    return losses.sum() / valid if reduction == "mean" else losses.sum()


def make(n, v, *, pad=0, dtype=torch.float32, ignored=True, scale=3.0):
    logits = (torch.randn(n, v + pad) * scale).to(dtype)
    targets = torch.randint(0, v, (n,))
    if ignored:
        targets[::5] = -100
    return logits.requires_grad_(), targets


def gradients(logits, targets, dloss=1.0, **kwargs):
    """(loss, dlogits) with the incoming gradient dloss, a number or a tensor."""
    leaf = logits.detach().requires_grad_()
    loss = cross_entropy(leaf * 1.0 if kwargs.get("inplace") else leaf, targets, **kwargs)
    loss.backward(torch.as_tensor(dloss, dtype=loss.dtype).expand(loss.shape))
    return loss.detach(), leaf.grad


def check(inputs, **kwargs):
    return assert_matches_oracle(
        lambda *a: cross_entropy(*a, **kwargs),
        lambda *a: cross_entropy_ref(*a, **kwargs),
        inputs,
        eager=lambda *a: eager(*a, **kwargs),
    )


@pytest.fixture(params=["auto", "torch"])
def choice(request, monkeypatch):
    monkeypatch.setattr(backend, "choice", request.param)
    return request.param


@pytest.mark.usefixtures("choice")
@sweep("dtype", DTYPES)
@sweep("pad", [0, 47])
def test_gpt2_vocabulary(pad, dtype):
    inputs = make(6, 50257, pad=pad, dtype=dtype)
    check(inputs, vocab_size=50257, label_smoothing=0.1, z_loss=1e-4)


@pytest.mark.usefixtures("choice")
def test_padding_is_left_out():
    """Whatever the padding columns hold; their gradient is exactly 0."""
    logits, targets = make(30, 100, pad=28)
    logits = logits.detach()
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    expected = gradients(logits[:, :100], targets, **options)
    for value in (1e4, -torch.inf, torch.inf, torch.nan):
        logits[:, 100:] = value
        loss, dlogits = gradients(logits, targets, vocab_size=100, **options)
        assert torch.equal(loss, expected[0])
        assert torch.equal(dlogits[:, :100], expected[1])
        assert torch.equal(dlogits[:, 100:], torch.zeros(30, 28))


def test_shapes():
    logits, targets = make(24, 50)
    expected = gradients(logits, targets, reduction="none")
    got = gradients(logits.view(2, 3, 4, 50), targets.view(2, 3, 4), reduction="none")
    assert torch.equal(got[0], expected[0].view(2, 3, 4))
    assert torch.equal(got[1], expected[1].view(2, 3, 4, 50))
    one = gradients(logits[1], targets[1])
    assert one[0].shape == ()
    torch.testing.assert_close(one[1], expected[1][1])


@pytest.mark.usefixtures("choice")
def test_incoming_gradient():
    logits, targets = make(20, 70)
    _, dlogits = gradients(logits, targets, reduction="none")
    dloss = torch.randn(20)
    want = dlogits * dloss[:, None]
    torch.testing.assert_close(gradients(logits, targets, dloss, reduction="none")[1], want)
    strided = torch.stack([dloss, dloss], 1)[:, 0]
    assert torch.equal(gradients(logits, targets, strided, reduction="none")[1], want)
    _, dsum = gradients(logits, targets, 4.0, reduction="sum")
    assert torch.equal(dsum, dlogits * 4.0)


@pytest.mark.usefixtures("choice")
@sweep("reduction", REDUCTIONS)
@sweep("options", OPTIONS)
def test_all_targets_ignored(options, reduction):
    logits, targets = make(6, 10)
    targets = torch.full_like(targets, -100)
    loss, dlogits = gradients(logits, targets, reduction=reduction, **options)
    want = eager(logits, targets, reduction=reduction, **options).detach()
    assert torch.equal(loss.nan_to_num(7.0), want.nan_to_num(7.0))
    assert not dlogits.any()


@pytest.mark.usefixtures("choice")
@sweep("label_smoothing", [0.0, 0.1])
def test_classes_at_minus_infinity(label_smoothing):
    """Such a class has probability 0; smoothed over, its loss is infinite, as torch has it."""
    logits, targets = make(6, 70, ignored=False)
    logits = logits.detach()
    logits[:, ::3] = -torch.inf
    targets = targets // 3 * 3 + 1
    targets[5] = 0
    leaf = logits.requires_grad_()
    want = F.cross_entropy(leaf, targets, reduction="none", label_smoothing=label_smoothing)
    (expected,) = torch.autograd.grad(want, leaf, torch.ones(6))
    options = {"label_smoothing": label_smoothing, "reduction": "none"}
    loss, dlogits = gradients(leaf, targets, **options)
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(dlogits, expected)
    assert loss[5] == torch.inf


@pytest.mark.usefixtures("choice")
@sweep("value", [torch.nan, torch.inf])
def test_non_finite_rows_say_so(value):
    logits, targets = make(4, 70, ignored=False)
    logits = logits.detach()
    logits[2, 3] = value
    loss, dlogits = gradients(logits, targets, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False]
    assert dlogits[2].isnan().any()
    assert dlogits[[0, 1, 3]].isfinite().all()
    targets[2] = -100  # what an ignored row holds does not matter
    loss, dlogits = gradients(logits, targets, reduction="none")
    assert loss[2] == 0
    assert not dlogits[2].any()


def test_fp16_gradients_survive_a_loss_scale():
    """Gradients below fp16's range / 65536 are there once a loss scale is applied."""
    logits, targets = make(8192, 300, dtype=torch.float16, ignored=False, scale=0.02)
    exact = logits.detach().double().requires_grad_()
    cross_entropy_ref(exact, targets).backward()
    _, dlogits = gradients(logits, targets, dloss=65536.0)
    error = (dlogits.double() / 65536 - exact.grad).norm() / exact.grad.norm()
    assert error < 2.0**-10  # two roundings of fp16, 2^-11 each


@pytest.mark.usefixtures("choice")
@sweep("dtype", (*DTYPES, torch.float64))
@sweep("reduction", REDUCTIONS)
def test_inplace(reduction, dtype):
    """The same bits, and the gradient lies where the logits were."""
    logits, targets = make(20, 70, pad=3, dtype=dtype)
    options = {"reduction": reduction, "vocab_size": 70, "label_smoothing": 0.1}
    expected = gradients(logits, targets, 2.0, **options)
    leaf = logits.detach().requires_grad_()
    hidden = leaf * 1.0
    loss = cross_entropy(hidden, targets, inplace=True, **options)
    version, address = hidden._version, hidden.data_ptr()
    seen = []
    hidden.register_hook(lambda g: seen.append(g.data_ptr()))
    loss.backward(torch.tensor(2.0, dtype=loss.dtype).expand(loss.shape))
    assert torch.equal(loss, expected[0])
    assert torch.equal(leaf.grad, expected[1])
    assert version > 0
    assert seen == [address]


def test_inplace_leaves_the_logits_without_gradients():
    logits, targets = make(20, 70)
    before = logits.detach().clone()
    with torch.no_grad():
        cross_entropy(logits, targets, inplace=True)
    cross_entropy(before, targets, inplace=True)
    assert torch.equal(before, logits)


def test_inplace_is_noticed_by_whoever_needs_the_logits():
    logits, targets = make(20, 70)
    hidden = logits.tanh()  # keeps its result for backward
    loss = cross_entropy(hidden, targets, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    hidden = logits * 1.0
    loss = cross_entropy(hidden, targets, inplace=True)
    hidden.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradient_work_without_gradients():
    logits, targets = make(20, 70)
    with torch.no_grad():
        loss = cross_entropy(logits, targets)
    assert not loss.requires_grad
    assert torch.equal(loss, cross_entropy(logits, targets))
    op = torch.ops.fastpar.cross_entropy.default
    outputs = op(logits.detach(), targets, 70, -100, "mean", 0.0, 0.0, False)
    assert [t.numel() for t in outputs] == [1, 0, 1]


@sweep("inplace", [False, True])
def test_backward_twice_with_retained_graph(inplace):
    logits, targets = make(20, 70)
    loss = cross_entropy(logits * 1.0, targets, inplace=inplace)
    (plain,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (third,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    (again,) = torch.autograd.grad(loss, logits)
    assert torch.equal(plain, gradients(logits, targets)[1])
    assert torch.equal(plain, again)
    torch.testing.assert_close(third, 3 * plain)


def test_errors():
    logits, targets = make(6, 20)

    def refuses(match, *args, **kwargs):
        with pytest.raises(ValueError, match=r"cross_entropy: " + match):
            cross_entropy(*args, **kwargs)

    refuses("expected mean, sum or none, got reduction=max", logits, targets, reduction="max")
    refuses(r"expected logits \[..., V\] .* torch.int32", logits.int(), targets)
    refuses(r"expected logits .* got logits=\[\]", torch.tensor(1.0), targets)
    refuses(r"expected int64 targets of shape \[6\], got targets=\[5\]", logits, targets[:5])
    refuses(r"expected int64 .* got targets=\[6\] torch.int32", logits, targets.int())
    refuses("expected targets on cpu, got targets.device=meta", logits, targets.to("meta"))
    refuses("expected vocab_size in 1..20 .* got vocab_size=21", logits, targets, vocab_size=21)
    refuses("expected vocab_size in 1..20 .* got vocab_size=0", logits, targets, vocab_size=0)
    refuses(r"expected label_smoothing in \[0, 1\]", logits, targets, label_smoothing=1.5)
    refuses("expected a finite z_loss >= 0, got z_loss=-1.0", logits, targets, z_loss=-1.0)
    refuses("expected a finite z_loss >= 0, got z_loss=nan", logits, targets, z_loss=torch.nan)
    refuses("expected logits that were computed .* leaf", logits, targets, inplace=True)
    wide = (logits * 1.0)[:1].expand(6, 20)
    refuses("expected logits whose rows are evenly apart", wide, targets, inplace=True)
    turned = (logits * 1.0).t().contiguous().t()
    refuses(r"expected logits whose rows .* strides=\[1, 6\]", turned, targets, inplace=True)
    targets[4] = 19
    refuses(r"expected targets in \[0, 19\) .* got targets\[4\]=19", logits, targets, vocab_size=19)
    targets[2] = -1
    refuses(r"expected targets .* got targets\[2\]=-1", logits, targets)
