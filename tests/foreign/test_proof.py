"""Attention, blocks and norms that only look like nanoGPT's: the patch leaves them or is equal.

Each case is a small edit of test_patched's layers that shows outside of a few tokens in evaluation:
in long rows, in training, in large values, in one layer's own buffers, or later on.
"""

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from test_patched import (
    FeedForward,
    Layer,
    Nano,
    Norm,
    SelfAttention,
    another_thread_that_draws,
    gpt2,
    ids_for,
    logits_of,
)
from torch import nn

import fastpar
from fastpar.foreign import fused, recognize

WIDTH, HEADS = 24, 3


class Attention(SelfAttention):
    """Manual attention with places to edit."""

    window = None
    extra = False

    def __init__(self, p=0.0):
        super().__init__(WIDTH, HEADS, p, True, True)
        self.register_buffer("mask", torch.ones(64, 64).tril()[None, None].bool())

    def scores(self, s):
        return s

    def rate(self, probs):
        return self.attn_dropout(probs)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            t.reshape(B, T, HEADS, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2)
        )
        s = self.scores(q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5)
        s = s.masked_fill(~self.mask[:, :, :T, :T], float("-inf"))
        if self.window is not None:
            near = torch.ones(T, T, dtype=torch.bool).triu(1 - self.window)
            s = s.masked_fill(~near, float("-inf"))
        y = self.rate(s.softmax(-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class Window(Attention):
    window = 12


class WideWindow(Attention):
    window = 60


class Clamped(Attention):
    def scores(self, s):
        return s.clamp(-30, 30)


class Capped(Attention):
    def scores(self, s):
        return 1e4 * torch.tanh(s / 1e4)


class Tempered(Attention):
    def __init__(self, p=0.0):
        super().__init__(p)
        self.register_buffer("temperature", torch.ones(()))

    def scores(self, s):
        return s / self.temperature


class Trained(Attention):
    """Another temperature while training."""

    def scores(self, s):
        return s * 0.5 if self.training else s


class LongTrained(Attention):
    def scores(self, s):
        return s * 0.5 if self.training and s.shape[-1] > 40 else s


class Detached(Attention):
    def scores(self, s):
        return s.detach()


class Noisy(Attention):
    def scores(self, s):
        return s + 0.1 * torch.randn_like(s) if self.training else s


class UnusualRate(Attention):
    """Dropout of the probabilities by an attribute of another name."""

    def __init__(self, p=0.0):
        super().__init__(p)
        self.drop_of_probs = p

    def rate(self, probs):
        return F.dropout(probs, self.drop_of_probs, self.training)


class LiteralRate(Attention):
    def rate(self, probs):
        return F.dropout(probs, 0.3, self.training)


class AlwaysDropped(Attention):
    def rate(self, probs):
        return F.dropout(probs, 0.3, True)


class OutputRate(Attention):
    """The number `dropout` is the output's; the probabilities have none."""

    def rate(self, probs):
        return probs


class Counting(Attention):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 1000 else 2.0)


class DropPath(Layer):
    def forward(self, x):
        def keep(y):
            if not self.training:
                return y
            return y * torch.empty(len(y), 1, 1).bernoulli_(0.8) / 0.8

        x = x + keep(self.attn(self.ln_1(x)))
        return x + keep(self.mlp(self.ln_2(x)))


class LayerDrop(Layer):
    def forward(self, x):
        if self.training and random.random() < 0.01:
            return x
        return super().forward(x)


class MoreDropout(Layer):
    def __init__(self, *args):
        super().__init__(*args)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))


class ClampedResidual(Layer):
    def forward(self, x):
        return super().forward(x).clamp(-1e4, 1e4)


class ClippedNorm(Norm):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class ClippedGelu(FeedForward):
    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)).clamp(-10, 10))


class Swapped(Layer):
    """The MLP first."""

    def forward(self, x):
        x = x + self.mlp(self.ln_1(x))
        return x + self.attn(self.ln_2(x))


class Halved(Layer):
    def forward(self, x):
        x = x + 2 * self.attn(self.ln_1(x) / 2)
        return x + self.mlp(self.ln_2(x))


class Reaching(Layer):
    """Looks into its attention."""

    def forward(self, x):
        return super().forward(x) * (1 if self.attn.n_head == HEADS else 2)


ATTENTIONS = (
    Window, WideWindow, Clamped, Capped, Trained, LongTrained, Detached, Noisy, LiteralRate,
    AlwaysDropped, Counting,
)  # fmt: skip
BLOCKS = (DropPath, LayerDrop, MoreDropout, ClampedResidual, Swapped, Halved, Reaching)


def layer(kind=Layer):
    return kind(WIDTH, HEADS, 0.0, True, True, "none")


def with_attention(*kinds, p=0.0):
    model = Nano(WIDTH, HEADS, p)
    for block, kind in zip(model.transformer.h, kinds):
        block.attn = kind(p)
    return model


def assert_equal_calls(ours, theirs, T=60):
    """Logits and gradients in both modes; fp64, with large weights."""
    idx = ids_for(None, T=T)
    results = []
    for model in (theirs, ours):
        results.append([])
        for training in (False, True):
            model.train(training).zero_grad()
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fastpar.patch")
                logits = logits_of(model, idx)
            logits.square().mean().backward()
            results[-1] += [logits.detach(), *(p.grad.clone() for p in model.parameters())]
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def large(model):
    with torch.no_grad():
        for name, p in model.double().named_parameters():
            if name.endswith(("c_attn.weight", "c_fc.weight")):
                p.mul_(60)
    return model


def test_attention_that_does_more_is_left():
    for kind in ATTENTIONS:
        theirs = large(with_attention(kind, Attention))
        ours = copy.deepcopy(theirs)
        report = fastpar.patch(ours)
        assert report.replaced["Attention"] == ["transformer.h.1.attn"], kind
        assert [k for k, _ in report.left if k == kind.__name__], kind
        if kind not in (Noisy, LiteralRate, AlwaysDropped):
            assert_equal_calls(ours, theirs)


class Drawing(Norm):
    """Draws and does not use what it drew: another model's dropout would differ after it."""

    def forward(self, x):
        torch.rand(1)
        return super().forward(x)


def test_numbers_that_another_thread_draws_do_not_count():
    alone = fastpar.patch(Nano(WIDTH, HEADS))
    with another_thread_that_draws():
        assert fastpar.patch(Nano(WIDTH, HEADS)).replaced == alone.replaced
    for kind in (Noisy, Drawing):
        model = with_attention(kind, Attention) if kind is Noisy else Nano(WIDTH, HEADS)
        if kind is Drawing:
            model.transformer.h[0].ln_1 = Drawing(WIDTH, True)
        with another_thread_that_draws():
            report = fastpar.patch(model)
        assert (kind.__name__, "draws random numbers that are not dropout's") in [
            (name, why.split(": ", 1)[-1]) for name, why in report.left
        ], report


def test_blocks_norms_and_layers_that_do_more_are_left():
    for kind in BLOCKS:
        model = Nano(WIDTH, HEADS)
        model.transformer.h[1] = layer(kind)
        report = fastpar.patch(model)
        assert report.replaced["Layer"] == ["transformer.h.0"], kind
        assert [k for k, _ in report.left if k == kind.__name__], kind
    model = Nano(WIDTH, HEADS)
    model.transformer.h[0].ln_2 = ClippedNorm(WIDTH, True)
    model.transformer.h[1].mlp = ClippedGelu(WIDTH, 0.0, True, "none")
    report = fastpar.patch(model)
    assert {"ClippedNorm", "ClippedGelu"} <= {kind for kind, _ in report.left}


def test_each_layer_is_looked_at_with_its_own_buffers():
    """The first layer is what it looks like, the second has a temperature or a mask of its own."""
    for name in ("temperature", "mask"):
        theirs = with_attention(Tempered, Tempered).double()
        attn = theirs.transformer.h[1].attn
        if name == "mask":
            attn.mask = attn.mask & torch.ones(64, 64).triu(-7).bool()
        else:
            attn.temperature.fill_(2.0)
        ours = copy.deepcopy(theirs)
        report = fastpar.patch(ours)
        assert report.replaced["Tempered"] == ["transformer.h.0.attn"]
        assert_equal_calls(ours, theirs)


def test_equal_modules_are_proven_once(monkeypatch):
    """So that many layers take no longer than two; those with numbers of their own do."""
    proven = []
    prove = recognize.proof.prove

    def counted(module, *args, **options):
        proven.append(type(module).__name__)
        return prove(module, *args, **options)

    monkeypatch.setattr(recognize.proof, "prove", counted)
    threads = torch.get_num_threads()
    fastpar.patch(gpt2(n_layer=5))
    assert torch.get_num_threads() == threads
    assert sorted(proven) == ["GPT2Attention", "GPT2MLP"]
    for own_numbers, attentions in ((False, 1), (True, 3)):
        proven.clear()
        model = Nano(WIDTH, HEADS)
        model.transformer.h = nn.ModuleList(layer() for _ in range(3))
        for i, block in enumerate(model.transformer.h):
            block.attn.layer_idx = i if own_numbers else 0
        fastpar.patch(model)
        counts = {kind: proven.count(kind) for kind in ("SelfAttention", "Layer")}
        assert counts == {"SelfAttention": attentions, "Layer": 1}


def places_of(kind, p=0.3):
    """Sizes and rates of what torch drops in one call."""
    from fastpar.foreign.proof import run

    attn = kind(p).double()
    return sorted(run(attn.train(), torch.randn(2, 7, WIDTH, dtype=torch.float64))[2].seen)


def test_dropout_stays_where_it_is():
    """The rates that a patched attention uses are those that its own forward applies."""
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


def changed_window(attn):
    attn.window = 4


def changed_mask(attn):
    attn.mask &= torch.ones(64, 64).triu(-4).bool()


def another_mask(attn):
    attn.mask = attn.mask & torch.ones(64, 64).triu(-4).bool()


def test_what_is_changed_after_the_patch_counts():
    for change in (changed_window, changed_mask, another_mask):
        theirs = with_attention(Attention, Attention).double()
        ours = copy.deepcopy(theirs)
        report = fastpar.patch(ours)
        assert_equal_calls(ours, theirs)
        assert not report.fallbacks
        for model in (theirs, ours):
            change(model.transformer.h[1].attn)
        assert_equal_calls(ours, theirs)
        assert report.fallbacks, change
    ours = with_attention(Attention, Attention)
    report = fastpar.patch(ours)
    ours.double().float()  # a mask that was moved is the same mask
    copy.deepcopy(ours)(ids_for(None))
    ours(ids_for(None))
    assert not report.fallbacks


def test_longer_rows_than_were_looked_at_fall_back():
    model = Nano(WIDTH, HEADS)
    model.transformer.wpe = nn.Embedding(40, WIDTH)
    report = fastpar.patch(model)
    x = torch.randn(1, 41, WIDTH)
    with pytest.warns(UserWarning, match="more than 40 tokens, the most that were looked at"):
        model.transformer.h[0].attn(x)
    assert sum(report.fallbacks.values()) == 1


def test_a_class_that_gets_another_forward_later():
    class Own(Attention):
        pass

    theirs = with_attention(Own, Own).double()
    ours = copy.deepcopy(theirs)
    report = fastpar.patch(ours)
    forward = Attention.forward
    Own.forward = lambda self, x: 2 * forward(self, x)
    assert_equal_calls(ours, theirs)
    assert report.fallbacks["Own: its class got another forward"]
    Own.forward = lambda self, x: forward(self, x)
    again = with_attention(Own, Own)
    reason = "its class got another forward since it was patched first"
    assert len(fastpar.patch(again).left["Own", reason]) == 2


def test_options_of_an_embedding_set_later():
    theirs = Nano(WIDTH, HEADS).double()
    ours = copy.deepcopy(theirs)
    fastpar.patch(ours)
    for name, value in (("padding_idx", 3), ("max_norm", 0.5)):
        for model in (theirs, ours):
            setattr(model.transformer.wpe, name, value)
        assert_equal_calls(ours, theirs, T=9)


def test_a_forward_that_raises_without_a_word():
    class Refusing(Attention):
        def forward(self, x):
            raise AssertionError

    report = fastpar.patch(with_attention(Refusing, Attention))
    assert report.left["Refusing", "could not be checked: AssertionError"]


def test_heads_that_no_kernel_takes():
    wide = SelfAttention(257, 1, 0.0, True, True)
    reason = "heads of 257 elements, the kernels take 1 to 256"
    assert fastpar.patch(wide).left["SelfAttention", reason] == ["model"]
    assert wide(torch.randn(1, 3, 257)).shape == (1, 3, 257)
    model = gpt2(n_embd=514, n_head=2)
    assert len(fastpar.patch(model).left["GPT2Attention", reason]) == 2
    logits_of(model, ids_for(None))
    x = torch.randn(1)
    assert fused.head_dim_fits(x, 12)
    assert not fused.head_dim_fits(x, 257)


def test_heads_that_triton_does_not_take(monkeypatch):
    from fastpar.kernels import backend

    monkeypatch.setattr(backend, "choice", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "_triton_found", lambda: True)
    fits = [D for D in (8, 12, 16, 64, 128, 136) if fused.head_dim_fits(torch.ones(1), D)]
    assert fits == [16, 64, 128]
