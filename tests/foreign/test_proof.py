"""Parts that only look like nanoGPT's: the patch leaves them, or computes what they do.

Each is a small edit of nanoGPT's layers that shows outside of a few tokens in evaluation: in long
rows, in training, in large values, in one layer's own buffers, or later on.
"""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from cells import sweep
from foreign_models import gpt2, ids_for, logits_of, pair, quiet
from nanogpt_cells import FeedForward, Layer, NanoGPT, Norm, SelfAttention

import fastpar
from fastpar.foreign import fused
from fastpar.foreign.proof import run

WIDTH, HEADS = 24, 3


class Attention(SelfAttention):
    """Manual attention with places to edit."""

    window = None

    def __init__(self, p=0.0):
        super().__init__(WIDTH, HEADS, p)
        self.drop_of_probs = p
        self.register_buffer("mask", torch.ones(64, 64).tril()[None, None].bool())
        self.register_buffer("temperature", torch.ones(()))

    def scores(self, s):
        return s

    def rate(self, probs):
        return self.attn_dropout(probs)

    def attend(self, q, k, v):
        T = q.shape[-2]
        s = self.scores(q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5)
        s = s.masked_fill(~self.mask[:, :, :T, :T], float("-inf"))
        if self.window is not None:
            near = torch.ones(T, T, dtype=torch.bool).triu(1 - self.window)
            s = s.masked_fill(~near, float("-inf"))
        return self.rate(s.softmax(-1)) @ v


def like(base, name, **methods):
    return type(name, (base,), methods)


Tempered = like(Attention, "Tempered", scores=lambda self, s: s / self.temperature)
UnusualRate = like(  # dropout of the probabilities by an attribute of another name
    Attention, "UnusualRate", rate=lambda self, y: F.dropout(y, self.drop_of_probs, self.training)
)
# The number `dropout` is the output's; the probabilities have none.
OutputRate = like(Attention, "OutputRate", rate=lambda self, y: y)


def interleaved(self, x):
    """q, k and v of a head stand together in c_attn's output."""
    return self.c_attn(x).unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)


def counting(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return Attention.forward(self, x) * (1.0 if self.calls < 1000 else 2.0)


def failing(self, x):
    raise RuntimeError("not today")


def keep(self, y):
    if not self.training:
        return y
    return y * torch.empty(len(y), 1, 1).bernoulli_(0.8) / 0.8


def block(step):
    """A block by its two residual steps."""

    def forward(self, x):
        return step(self, step(self, x, self.attn, self.ln_1), self.mlp, self.ln_2)

    return forward


def layer_drop(self, x):
    if self.training and random.random() < 0.01:
        return x
    return Layer.forward(self, x)


def drawing(self, x):
    """Draws and does not use what it drew: another model's dropout would differ after it."""
    torch.rand(1)
    return Norm.forward(self, x)


OTHER = "computes something else than its parts' names suggest"
DRAWS = "draws random numbers other than dropout's"
BASES = {"attn": SelfAttention, "edited": Attention, "mlp": FeedForward, "ln_2": Norm,
         "block": Layer}  # fmt: skip
# in place of what, which of its methods, what that does
IMPOSTORS = {
    "Bidirectional": ("attn", "attend", lambda self, *qkv: F.scaled_dot_product_attention(*qkv)),
    "Interleaved": ("attn", "heads", interleaved),
    "Failing": ("attn", "forward", failing),
    "WideWindow": ("edited", "window", 60),
    "Capped": ("edited", "scores", lambda self, s: 1e4 * torch.tanh(s / 1e4)),
    "LongTrained": (
        "edited", "scores",
        lambda self, s: s * 0.5 if self.training and s.shape[-1] > 40 else s,
    ),
    "Detached": ("edited", "scores", lambda self, s: s.detach()),
    "Noisy": (
        "edited", "scores", lambda self, s: s + 0.1 * torch.randn_like(s) if self.training else s,
    ),
    "LiteralRate": ("edited", "rate", lambda self, y: F.dropout(y, 0.3, self.training)),
    "Counting": ("edited", "forward", counting),
    "Squared": ("mlp", "forward", lambda self, x: self.c_proj(self.gelu(self.c_fc(x)) ** 2)),
    "ClippedGelu": (
        "mlp", "forward", lambda self, x: self.c_proj(self.gelu(self.c_fc(x)).clamp(-10, 10)),
    ),
    "OtherEps": (
        "ln_2", "forward", lambda self, x: F.layer_norm(x, [WIDTH], self.weight, self.bias, 1e-6),
    ),
    "ClippedNorm": ("ln_2", "forward", lambda self, x: Norm.forward(self, x.clamp(-100, 100))),
    "Drawing": ("ln_2", "forward", drawing),
    "PostNorm": ("block", "forward", block(lambda self, x, part, norm: norm(x + part(x)))),
    "DropPath": (
        "block", "forward", block(lambda self, x, part, norm: x + keep(self, part(norm(x)))),
    ),
    "LayerDrop": ("block", "forward", layer_drop),
    "ClampedResidual": (
        "block", "forward", lambda self, x: Layer.forward(self, x).clamp(-1e4, 1e4),
    ),
    "Reaching": (
        "block", "forward",
        lambda self, x: Layer.forward(self, x) * (1 if self.attn.n_head == HEADS else 2),
    ),
}  # fmt: skip
REASONS = {  # of others it is one of the numbers at hand
    **dict.fromkeys(("Bidirectional", "Interleaved", "OtherEps", "PostNorm"), OTHER),
    **dict.fromkeys(("Noisy", "Drawing"), DRAWS),
    "Squared": f"its gelu (GELU) is not GELU, or {OTHER}",
    "Failing": "could not be checked: RuntimeError: not today",
}
AS_MODELS_START = ("Bidirectional", "Interleaved", "Squared")
DRAWN = ("Noisy", "LiteralRate", "DropPath", "LayerDrop", "Drawing")


def with_attention(*kinds, p=0.0):
    model = NanoGPT(dropout=p)
    for layer, kind in zip(model.transformer.h, kinds):
        layer.attn = kind(p)
    return model


def assert_equal_calls(ours, theirs, T=60):
    """Logits and gradients in both modes, in fp64."""
    idx = ids_for(T=T)
    results = []
    for model in (theirs, ours):
        results.append([])
        for training in (False, True):
            model.train(training).zero_grad()
            torch.manual_seed(0)
            with quiet():
                logits = logits_of(model, idx)
            logits.square().mean().backward()
            results[-1] += [logits.detach(), *(p.grad.clone() for p in model.parameters())]
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def impostor(name):
    """A model whose second block is one, or has one; with large weights."""
    part, method, instead = IMPOSTORS[name]
    base = BASES[part]
    part = "attn" if part == "edited" else part
    model, made = NanoGPT(), like(base, name, **{method: instead})()
    if part == "block":
        model.transformer.h[1] = made
    else:
        setattr(model.transformer.h[1], part, made)
    with torch.no_grad():
        for parameter, p in model.double().named_parameters():
            if parameter.endswith(("c_attn.weight", "c_fc.weight")) and base is Attention:
                p.mul_(60)
        if name in AS_MODELS_START:  # the output does not show what it computes
            made.c_proj.weight.zero_()
    return model, part


@pytest.mark.parametrize("name", IMPOSTORS)
def test_what_does_something_else_is_left(name):
    theirs, part = impostor(name)
    reason = REASONS.get(name)
    _, ours, report = pair(lambda: theirs)
    where = "transformer.h.1" + ("" if part == "block" else f".{part}")
    found = {why.split(": ", 1)[-1] if reason == DRAWS else why: names
             for (kind, why), names in report.left.items() if kind == name}  # fmt: skip
    assert [where] in found.values() if reason is None else found[reason] == [where], report
    assert name not in report.replaced
    assert isinstance(ours.transformer.h[0], fused.Block)
    assert "transformer.h.1.attn" in report.replaced["SelfAttention"] or part == "attn"
    if part in ("attn", "ln_2"):
        part = "attention" if part == "attn" else part
        assert report.left["Layer", f"its {part} was left unchanged"]
    if (name not in DRAWN and not reason) or reason == OTHER:
        assert_equal_calls(ours, theirs)


@sweep("name", ["temperature", "mask"])
def test_each_layer_is_looked_at_with_its_own_buffers(name):
    theirs = with_attention(Tempered, Tempered).double()
    attn = theirs.transformer.h[1].attn
    if name == "mask":
        attn.mask = attn.mask & torch.ones(64, 64).triu(-7).bool()
    else:
        attn.temperature.fill_(2.0)
    _, ours, report = pair(lambda: theirs)
    assert report.replaced["Tempered"] == ["transformer.h.0.attn"]
    assert_equal_calls(ours, theirs)


def places_of(kind):
    """Sizes and rates of what torch drops in one call."""
    attn = kind(0.3).double().train()
    return sorted(run(attn, torch.randn(2, 7, WIDTH, dtype=torch.float64))[2].seen)


def test_dropout_stays_where_it_is():
    probs, resid = 2 * HEADS * 7 * 7, 2 * 7 * WIDTH
    assert places_of(Attention) == [(probs, 0.3), (resid, 0.3)]
    for kind in (Attention, UnusualRate, OutputRate):
        model = with_attention(kind, kind, p=0.3).train()
        fastpar.patch(model)
        attn = model.transformer.h[0].attn
        assert isinstance(attn, fused.Attention), kind
        found = [(probs, fused.probs_rate(attn, attn.option("probs")))]
        found += [(resid, fused.resid_rate(attn, attn.option("resid")))]
        assert sorted(f for f in found if f[1]) == places_of(kind), kind
    attn.dropout = 0.5  # of nothing
    assert fused.probs_rate(attn, attn.option("probs")) == 0.0


# What is changed after the patch counts

NEAR = torch.ones(64, 64).triu(-4).bool()
CHANGES = {
    "window": lambda attn: setattr(attn, "window", 4),
    "in the mask": lambda attn: attn.mask.logical_and_(NEAR),
    "another mask": lambda attn: setattr(attn, "mask", attn.mask & NEAR),
}


@sweep("change", CHANGES)
def test_what_is_changed_after_the_patch_counts(change):
    theirs, ours, report = pair(lambda: with_attention(Attention, Attention).double())
    if change == "window":
        assert_equal_calls(ours, theirs)
        copy.deepcopy(ours.float().double())(ids_for())  # a mask that was moved is the same mask
        ours(ids_for())
        assert not report.fallbacks
    for model in (theirs, ours):
        CHANGES[change](model.transformer.h[1].attn)
    assert_equal_calls(ours, theirs)
    assert report.fallbacks


def test_a_class_that_gets_another_forward_later():
    class Own(Attention):
        pass

    theirs, ours, report = pair(lambda: with_attention(Own, Own).double())
    forward = Attention.forward
    Own.forward = lambda self, x: 2 * forward(self, x)
    assert_equal_calls(ours, theirs)
    assert report.fallbacks["Own: its class's forward was replaced"]
    Own.forward = lambda self, x: forward(self, x)
    again = with_attention(Own, Own)
    reason = "its class's forward was replaced after it was first patched"
    assert len(fastpar.patch(again).left["Own", reason]) == 2


def test_options_of_an_embedding_set_later_and_longer_rows_than_were_looked_at():
    model = NanoGPT(block_size=40)
    report = fastpar.patch(model)
    with pytest.warns(UserWarning, match="more than 40 tokens, the most that were compared"):
        model.transformer.h[0].attn(torch.randn(1, 41, WIDTH))
    assert sum(report.fallbacks.values()) == 1
    theirs, ours, _ = pair(lambda: NanoGPT().double())
    for name, value in (("padding_idx", 3), ("max_norm", 0.5)):
        for model in (theirs, ours):
            setattr(model.transformer.wpe, name, value)
        assert_equal_calls(ours, theirs, T=9)


@pytest.mark.slow
@sweep("name", ["gelu_10", "quick_gelu", "gelu_new", "gelu", "gelu_fast"])
def test_activations_that_differ_far_out_are_left(name):
    theirs = gpt2("D8", activation_function=name).double().eval()
    with torch.no_grad():
        for layer in theirs.transformer.h:
            layer.mlp.c_fc.weight.mul_(100)
    _, ours, report = pair(lambda: theirs)
    assert ("GPT2MLP" in report.replaced) is (name not in ("gelu_10", "quick_gelu"))
    torch.testing.assert_close(logits_of(ours, ids_for()), logits_of(theirs, ids_for()))
