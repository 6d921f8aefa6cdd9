"""patch(fused_loss=True) on nanoGPT's shape: the loss of its own forward, without logits."""

import re

import pytest
import torch
from foreign_models import GPT, pair, random_weights
from torch import nn

import fastpar


class Named(GPT):
    """Of another name."""


def two_arguments(self, idx, targets):
    return GPT.forward(self, idx, targets)


def headed(bias):
    model = GPT()
    model.lm_head = nn.Linear(24, 67, bias=bias)
    return model


def with_more():
    model = GPT()
    model.balance = 0.1
    return model


REFUSED = [
    (Named, "Named"),
    (type("GPT", (GPT,), {"forward": two_arguments}), "GPT, which has another forward or lm_head"),
    (lambda: headed(True), "GPT, which has another forward or lm_head"),
    (with_more, "GPT, which has balance, which nanoGPT's has not"),
]


def batch():
    generator = torch.Generator().manual_seed(3)
    idx, targets = torch.randint(67, (2, 3, 50), generator=generator)
    targets[0, 7:20] = -1
    return idx, targets


def both(**options):
    theirs, ours, report = pair(
        lambda: random_weights(GPT(**options)).train(), patched={"fused_loss": True}
    )
    assert report.replaced["GPT"] == ["model"]
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
    assert type(ours) is GPT


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_another_model_is_refused_before_anything_is_swapped(make, words):
    model, words = make(), re.escape(f"for fused_loss=True, got model={words}; use fastpar.nn.Li")
    with pytest.raises(ValueError, match=words):
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
