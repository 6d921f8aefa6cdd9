"""patch(fused_loss=True) on nanoGPT's shape: the loss of its own forward, without logits."""

import re

import pytest
import torch
import torch.nn.functional as F
from foreign_models import LossGPT, another_thread_that_draws, pair, random_weights
from torch import nn

import fastpar
from fastpar.foreign import fused


class Experts(LossGPT):
    """A loss of its blocks besides, of a part that has none in a copy."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits, loss if loss is None else loss + self.transformer.h[0].attn.n_head


class AllLogits(LossGPT):
    def forward(self, idx, targets=None):
        logits = self.lm_head(self.hidden(idx))
        return logits, None if targets is None else self.loss(logits, targets)


class Dict(LossGPT):
    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return {"logits": logits, "loss": loss}


def with_loss(name, loss):
    """loss(own, logits, targets), of the model's own loss."""

    def method(self, logits, targets):
        return loss(lambda x: LossGPT.loss(self, x, targets), logits, targets)

    return type(name, (LossGPT,), {"loss": method})


def smoothed(own, logits, targets):
    options = {"ignore_index": -1, "label_smoothing": 0.01}
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def ignoring(own, logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())


def drawing(own, logits, targets):
    torch.rand(1)  # and does not use what it drew
    return own(logits)


ANOTHER = "returns another loss than the mean cross-entropy without -1"
Drawing = with_loss("Drawing", drawing)
REFUSED = {
    AllLogits: "computes logits of all tokens when called without targets",
    Experts: "could not be checked: AttributeError",
    Dict: "returns something else than (logits, loss)",
    Drawing: "draws random numbers other than dropout's",
    with_loss("Ignoring", ignoring): ANOTHER,
    with_loss("Smoothed", smoothed): ANOTHER,
    with_loss("Capped", lambda own, x, t: own(3e4 * torch.tanh(x / 3e4))): ANOTHER,
    with_loss("WithPenalty", lambda own, x, t: own(x) + 1e-3 * x.logsumexp(-1).square().mean()):
        ANOTHER,
    with_loss("LateLoss", lambda own, x, t: own(x) * (1.0 if t.shape[1] < 40 else 0.5)): ANOTHER,
    with_loss("NoGradient", lambda own, x, t: own(x) + x[0, 0, 0] * 1e-3): ANOTHER,
}  # fmt: skip


def batch():
    generator = torch.Generator().manual_seed(3)
    idx, targets = torch.randint(67, (2, 3, 50), generator=generator)
    targets[0, 7:20] = -1
    return idx, targets


def both(**options):
    theirs, ours, report = pair(
        lambda: random_weights(LossGPT(**options)).train(), patched={"fused_loss": True}
    )
    assert report.replaced["LossGPT"] == ["model"]
    return theirs, ours, report


@pytest.mark.parametrize("options", [{}, {"flash": False, "bias": False}], ids=str)
def test_the_loss_and_its_gradients_match(options):
    idx, targets = batch()
    theirs, ours, report = both(**options)
    logits, loss = ours(idx, targets)
    want = theirs(idx, targets)[1]
    assert logits is None
    torch.testing.assert_close(loss, want)
    for value in (loss, want):
        (2 * value).backward()
    for got, expected in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-5)
    assert not report.fallbacks
    assert not ours.transformer.ln_f._forward_hooks
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(idx, targets=targets)[1].dtype == theirs(idx, targets)[1].dtype
    assert ours.bfloat16()(idx, targets)[1].dtype == theirs.bfloat16()(idx, targets)[1].dtype


def test_evaluation_and_calls_without_targets_stay():
    idx, targets = batch()
    theirs, ours, _ = both()
    for training in (True, False):
        theirs.train(training)
        ours.train(training)
        torch.testing.assert_close(ours(idx)[0], theirs(idx)[0])
        assert ours(idx)[1] is None
    for got, want in zip(ours(idx, targets), theirs(idx, targets)):
        torch.testing.assert_close(got, want)
    fastpar.unpatch(ours)
    assert type(ours) is LossGPT


@pytest.mark.slow
def test_numbers_of_the_run_and_of_another_thread_do_not_count():
    """The batches that a script draws after patching are those that it drew without."""
    model = LossGPT()
    before = torch.get_rng_state()
    fastpar.patch(model, fused_loss=True)
    assert torch.equal(torch.get_rng_state(), before)
    alone = fastpar.patch(LossGPT(), fused_loss=True)
    with another_thread_that_draws():
        assert fastpar.patch(LossGPT(), fused_loss=True).replaced == alone.replaced
        with pytest.raises(ValueError, match="draws random numbers other than dropout's"):
            fastpar.patch(Drawing(), fused_loss=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_another_loss_is_refused_before_anything_is_swapped(kind):
    model = kind()
    words = re.escape(f"for fused_loss=True, got model={kind.__name__}, which {REFUSED[kind]}")
    with pytest.raises(ValueError, match=words + r".*; use fastpar\.nn\.LinearCrossEntropyLoss"):
        fastpar.patch(model, fused_loss=True)
    assert type(model.transformer.wte) is nn.Embedding


def test_what_falls_back():
    idx, targets = batch()
    theirs, ours, report = both()
    theirs.double()
    ours.double()
    with pytest.warns(UserWarning, match="GPT falls back .* torch.compile, fp64, hooks on or a "):
        logits, loss = ours(idx, targets)
    torch.testing.assert_close(loss, theirs(idx, targets)[1])
    assert logits.shape == (3, 50, 67)
    ours.float().lm_head.register_forward_hook(lambda m, args, y: 2 * y)
    assert ours(idx, targets)[0] is not None
    assert list(report.fallbacks.values()) == [2]
    again = fastpar.patch(ours, fused_loss=True)
    assert again.already


def test_the_copy_is_small(monkeypatch):
    """Neither the vocabulary nor the blocks are copied."""
    made, twin_of = [], fused.proof.twin_of
    monkeypatch.setattr(fused.proof, "twin_of", lambda *a: made.append(twin_of(*a)) or made[-1])
    fastpar.patch(LossGPT(vocab_size=5000, n_embd=48), fused_loss=True)
    assert sum(p.numel() for p in made[0].parameters()) < 5000 * 4
