"""The pieces of a vocabulary-parallel loss: against their oracles, and put together again."""

import itertools

import pytest
import torch
from cells import sweep

from fastpar.kernels import backend, cross_entropy_shard, cross_entropy_shard_grad
from fastpar.kernels.reference import (
    cross_entropy_ref,
)
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["auto", "torch"])
def choice(request, monkeypatch):
    monkeypatch.setattr(backend, "choice", request.param)
    return request.param


def make(n, v, *, dtype=torch.float32, vocabulary=None):
    logits = (torch.randn(n, v) * 3).to(dtype)
    targets = torch.randint(0, vocabulary or v, (n,))
    targets[::5] = -100
    return logits, targets


def combine(logits, targets, cuts, scale, *, z_loss=0.0, vocab_size=None):
    """(losses [N], dlogits) as the ranks that own the columns between the cuts find them."""
    edges = [0, *cuts, logits.shape[1]]
    shards = [(a, logits[:, a:b]) for a, b in itertools.pairwise(edges)]
    options = {"vocab_size": vocab_size}
    parts = [cross_entropy_shard(x, targets, first=a, **options) for a, x in shards]
    tops, sums, target_logits = (torch.stack(p) for p in zip(*parts))
    top = tops.amax(0)
    lse = top + (sums * (tops - top).exp()).sum(0).log()
    losses = lse - target_logits.sum(0) + z_loss * lse**2
    grads = [
        cross_entropy_shard_grad(x, targets, lse, scale, first=a, z_loss=z_loss, **options)
        for a, x in shards
    ]
    return torch.where(targets == -100, 0.0, losses), torch.cat(grads, 1)


def float32(x):
    return x.float()


@pytest.mark.usefixtures("choice")
@sweep("dtype", DTYPES)
@sweep("z_loss", [0.0, 0.01])
@sweep("cuts", [(500,), (333, 700), (1, 999)])
def test_shards_make_the_whole_loss(cuts, z_loss, dtype):
    """Two and three shards, the last with padding, against the oracle of the whole."""
    logits, targets = make(9, 1000, dtype=dtype, vocabulary=990)
    targets[1] = 989

    def shards(x, t):
        return combine(x, t, cuts, torch.tensor(1.0), z_loss=z_loss, vocab_size=990)

    def whole(x, t):
        leaf = x.detach().requires_grad_()
        losses = cross_entropy_ref(leaf, t, vocab_size=990, reduction="none", z_loss=z_loss)
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

    def eager(x, t):
        losses, grad = whole(x.float(), t)
        return losses, grad.to(x.dtype)

    assert_matches_oracle(shards, whole, (logits, targets), eager=eager)


@pytest.mark.usefixtures("choice")
def test_a_shard_of_padding_has_no_share():
    logits, targets = make(4, 20, vocabulary=30)
    logits[:, :] = torch.nan  # whatever padding holds
    top, total, hit = cross_entropy_shard(logits, targets, first=32, vocab_size=30)
    valid = targets != -100
    assert torch.equal(top, torch.where(valid, -torch.inf, 0.0))
    assert torch.equal(total, torch.where(valid, 0.0, 1.0))
    assert not hit.any()
    grad = cross_entropy_shard_grad(
        logits, targets, torch.ones(4), torch.tensor(1.0), first=32, vocab_size=30
    )
    assert torch.equal(grad, torch.zeros(4, 20))


@pytest.mark.usefixtures("choice")
def test_hostile_logits():
    """-inf in a whole shard, 1e4, nan, and ignored rows of anything."""
    logits, targets = make(5, 12)
    targets[:] = torch.tensor([0, 7, 3, 2, -100])
    logits[0, 6:] = -torch.inf
    logits[1] = 1e4
    logits[1, 6] = 1e4 - 1
    logits[2, 8] = torch.nan
    logits[4] = torch.nan
    losses, grad = combine(logits, targets, (6,), torch.tensor(1.0))
    leaf = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    (expected,) = torch.autograd.grad(want.sum(), leaf)
    assert losses[2].isnan()
    assert grad[2].isnan().all()
    assert losses[4] == 0
    assert not grad[4].any()
    keep = [0, 1, 3]
    torch.testing.assert_close(losses[keep].double(), want[keep].detach(), rtol=1e-6, atol=2e-3)
    # lse itself is rounded at 1e4, 2^-11 apart
    torch.testing.assert_close(grad[keep].double(), expected[keep], rtol=2.0**-10, atol=1e-7)


@pytest.mark.usefixtures("choice")
def test_no_rows_and_any_strides():
    empty = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    assert [t.shape for t in cross_entropy_shard(*empty)] == [(0,)] * 3
    grad = cross_entropy_shard_grad(*empty, torch.empty(0), torch.tensor(1.0))
    assert grad.shape == (0, 8)
    logits, targets = make(6, 50)
    want = cross_entropy_shard(logits, targets)
    lse, scale = torch.full((6,), 5.0), torch.arange(6.0)
    expected = cross_entropy_shard_grad(logits, targets, lse, scale)
    views = (logits.t().contiguous().t(), torch.stack([logits, logits], 1)[:, 1])
    for view in views:
        for got, exact in zip(cross_entropy_shard(view, targets), want):
            assert torch.equal(got, exact)
        strided = torch.stack([scale, scale], 1)[:, 0]
        got = cross_entropy_shard_grad(view, targets, lse[:1].expand(6), strided)
        assert torch.equal(got, expected)
    shaped = cross_entropy_shard_grad(logits.view(2, 3, 50), targets.view(2, 3), lse, scale)
    assert torch.equal(shaped, expected.view(2, 3, 50))


@pytest.mark.usefixtures("choice")
@sweep("dtype", DTYPES)
@sweep("v", [1, 63, 1000])
def test_gradient_written_where_the_caller_says(v, dtype):
    """Into the logits, other memory, or rows of a wider workspace: the same bits."""
    logits, targets = make(9, v, dtype=dtype)
    targets[1], targets[2], targets[3] = v - 1, 0, v + 5
    lse, scale = logits.float().logsumexp(-1), torch.randn(9)
    options = {"vocab_size": max(1, v - 3), "z_loss": 0.01}
    want = cross_entropy_shard_grad(logits, targets, lse, scale, **options)
    wide = torch.full((9, v + 7), torch.nan, dtype=dtype)
    columns_first = logits.t().clone(memory_format=torch.contiguous_format).t()
    for x, out in (
        (logits, torch.full_like(logits, torch.nan)),
        (columns_first, wide[:, 3 : v + 3]),
        (columns_first, columns_first.clone(memory_format=torch.contiguous_format)),
        (logits, logits),
    ):
        version = out._version
        got = cross_entropy_shard_grad(x, targets, lse, scale, **options, out=out)
        assert got is out
        assert out._version > version
        assert torch.equal(out, want)
    assert wide[:, :3].isnan().all()
    assert wide[:, v + 3 :].isnan().all()
    shaped = wide[:, :v].unflatten(0, (3, 3))
    cross_entropy_shard_grad(
        columns_first.unflatten(0, (3, 3)),
        targets.view(3, 3),
        lse,
        scale,
        **options,
        out=shaped,
    )
    assert torch.equal(shaped.flatten(0, 1), want)


def test_errors():
    logits, targets = make(6, 20)
    lse, scale = torch.ones(6), torch.tensor(1.0)

    def refuses(match, logits, targets, lse=lse, scale=scale, **kwargs):
        with pytest.raises(ValueError, match="cross_entropy_shard_grad: " + match):
            cross_entropy_shard_grad(logits, targets, lse, scale, **kwargs)

    def both_refuse(match, *args, **kwargs):
        refuses(match, *args, **kwargs)
        with pytest.raises(ValueError, match="cross_entropy_shard: " + match):
            cross_entropy_shard(*args, **kwargs)

    both_refuse(r"expected logits \[..., V\] .* torch.int32", logits.int(), targets)
    both_refuse(r"expected int64 targets of shape \[6\], got targets=\[5\]", logits, targets[:5])
    both_refuse(r"expected int64 .* torch.int32", logits, targets.int())
    both_refuse("expected targets on cpu, got targets.device=meta", logits, targets.to("meta"))
    both_refuse("expected first >= 0, got first=-1", logits, targets, first=-1)
    refuses(r"expected torch.float32 lse \[6\] .* got lse=\[5\]", logits, targets, lse=lse[:5])
    refuses(r"expected torch.float32 lse .* torch.float64", logits, targets, lse=lse.double())
    refuses(r"expected torch.float64 lse .* torch.float32", logits.double(), targets)
    refuses(r"expected torch.float32 lse .* scale=\[3\]", logits, targets, scale=lse[:3])
    refuses(
        "expected lse and scale on cpu, .* scale.device=meta",
        logits,
        targets,
        scale=scale.to("meta"),
    )
    message = r"expected out like logits \(\[6, 20\], torch.float32, cpu\), got out="
    for out in (logits[1:], logits.half(), logits.to("meta")):
        refuses(message, logits, targets, out=out)
    for out in (torch.empty(20, 6).t(), torch.empty(20).expand(6, 20)):
        refuses("expected out with contiguous rows evenly apart", logits, targets, out=out)
    uneven = torch.empty(2, 4, 20)[:, :3]
    refuses(".*rows evenly", logits.view(2, 3, 20), targets.view(2, 3), out=uneven)
