"""patch(fused_loss=True) on nanoGPT's shape: the loss of its own forward, without logits."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from test_patched import Nano, another_thread_that_draws, random_weights
from torch import nn

import fastpar
from fastpar.foreign import fused


class GPT(Nano):
    """nanoGPT's forward."""

    def hidden(self, idx):
        t = self.transformer
        x = t.drop(t.wte(idx) + t.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for layer in t.h:
            x = layer(x)
        return t.ln_f(x)

    def loss(self, logits, targets):
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
        )

    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, self.loss(logits, targets)


class AllLogits(GPT):
    def forward(self, idx, targets=None):
        logits = self.lm_head(self.hidden(idx))
        return logits, None if targets is None else self.loss(logits, targets)


class Ignoring(GPT):
    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())


class Smoothed(GPT):
    def loss(self, logits, targets):
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=0.01
        )


class Drawing(GPT):
    """Draws and does not use what it drew."""

    def loss(self, logits, targets):
        torch.rand(1)
        return super().loss(logits, targets)


class Capped(GPT):
    def loss(self, logits, targets):
        return super().loss(3e4 * torch.tanh(logits / 3e4), targets)


class WithPenalty(GPT):
    def loss(self, logits, targets):
        return super().loss(logits, targets) + 1e-3 * logits.logsumexp(-1).square().mean()


class LateLoss(GPT):
    """Another loss in long rows."""

    def loss(self, logits, targets):
        return super().loss(logits, targets) * (1.0 if targets.shape[1] < 40 else 0.5)


class NoGradient(GPT):
    def loss(self, logits, targets):
        return super().loss(logits, targets) + 0.0 * logits.sum().detach() + logits[0, 0, 0] * 1e-3


class Experts(GPT):
    """A loss of its blocks besides."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits, loss if loss is None else loss + self.transformer.h[0].attn.n_head


class Dict(GPT):
    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return {"logits": logits, "loss": loss}


REFUSED = {
    AllLogits: "computes logits of all tokens when it is given no targets",
    Ignoring: "returns another loss than the mean cross-entropy without -1",
    Smoothed: "returns another loss than",
    Capped: "returns another loss than",
    WithPenalty: "returns another loss than",
    LateLoss: "returns another loss than",
    NoGradient: "returns another loss than",
    Experts: "could not be checked: AttributeError",
    Dict: "returns something else than (logits, loss)",
}


def batch():
    generator = torch.Generator().manual_seed(3)
    idx, targets = torch.randint(67, (2, 3, 50), generator=generator)
    targets[0, 7:20] = -1
    return idx, targets


def pair(**options):
    theirs = random_weights(GPT(**options)).train()
    ours = copy.deepcopy(theirs)
    report = fastpar.patch(ours, fused_loss=True)
    assert report.replaced["GPT"] == ["model"]
    return theirs, ours, report


def test_the_proof_of_the_loss_draws_no_numbers_of_the_run():
    """The batches that a script draws after patching are those that it drew without."""
    model = GPT()
    before = torch.get_rng_state()
    fastpar.patch(model, fused_loss=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_and_its_gradients_match():
    idx, targets = batch()
    for options in ({}, {"flash": False, "bias": False}):
        theirs, ours, report = pair(**options)
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
    theirs, ours, _ = pair()
    for training in (True, False):
        theirs.train(training)
        ours.train(training)
        torch.testing.assert_close(ours(idx)[0], theirs(idx)[0])
        assert ours(idx)[1] is None
    for got, want in zip(ours(idx, targets), theirs(idx, targets)):
        torch.testing.assert_close(got, want)
    fastpar.unpatch(ours)
    assert type(ours) is GPT


def test_numbers_that_another_thread_draws_do_not_count():
    with another_thread_that_draws():
        assert fastpar.patch(GPT(), fused_loss=True).replaced["GPT"] == ["model"]
        with pytest.raises(ValueError, match="draws random numbers that are not dropout's"):
            fastpar.patch(Drawing(), fused_loss=True)


def test_another_loss_is_refused_before_anything_is_swapped():
    for kind, why in REFUSED.items():
        model = kind()
        words = re.escape(f"for fused_loss=True, got model={kind.__name__}, which {why}")
        with pytest.raises(ValueError, match=words + r".*; use fastpar\.LinearCrossEntropyLoss"):
            fastpar.patch(model, fused_loss=True)
        assert type(model.transformer.wte) is nn.Embedding


def test_what_falls_back():
    idx, targets = batch()
    theirs, ours, report = pair()
    theirs.double()
    ours.double()
    with pytest.warns(UserWarning, match="GPT falls back .* torch.compile, fp64, hooks on or an"):
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
    sizes = []
    twin_of = fused.proof.twin_of

    def counted(*args):
        twin = twin_of(*args)
        sizes.append(sum(p.numel() for p in twin.parameters()))
        return twin

    monkeypatch.setattr(fused.proof, "twin_of", counted)
    model = GPT(width=48)
    model.transformer.wte = nn.Embedding(5000, 48)
    model.lm_head = nn.Linear(48, 5000, bias=False)
    model.lm_head.weight = model.transformer.wte.weight
    fastpar.patch(model, fused_loss=True)
    assert sizes[0] < 5000 * 4
