"""Calls that the kernels do not serve, parts that are not as they were, library code that was
replaced: the numbers are the model's own."""

import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from cells import slow, sweep
from foreign_models import (
    BOTH,
    MODELS,
    assert_same_logits,
    gpt2,
    ids_for,
    logits_of,
    nano,
    pair,
    quiet,
)
from torch import nn
from torch.nn.utils import parametrize

transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
both = pytest.mark.parametrize("name", BOTH)


def evaluated(**options):
    return pair(lambda: gpt2(**options).eval())


def padding(dropped=5):
    mask = torch.ones_like(ids_for())
    mask[0, :dropped] = 0
    return mask


def having(**settings):
    """Settings of every attention, and of the model."""

    def edit(model):
        for layer in model.transformer.h:
            vars(layer.attn).update(settings)
        model.config._attn_implementation = settings.get("implementation", "sdpa")

    return edit


def with_silu(model):
    mlp = model.transformer.h[1].mlp
    setattr(mlp, "gelu" if hasattr(mlp, "gelu") else "act", nn.SiLU())


def loss_of(logits, labels, vocab_size, factor=3.0, **_):
    return factor * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Loss:
    def __call__(self, *args, **kwargs):
        return loss_of(*args, factor=0.1, **kwargs)


def named_as_theirs(*args, **kwargs):
    return loss_of(*args, **kwargs)


named_as_theirs.__name__ = "ForCausalLMLoss"
FORWARD, LABELS = {"use_cache": False}, {"labels": ids_for()}
RATES = "a dropout rate of 1, or of 1/512 and less"
ACTIVATION = "hooks on the activation, or a replaced"
DOCUMENTS = torch.cat((torch.arange(9), torch.arange(14))).expand(2, -1)
# the model, what is done to both, the call, whose calls and why, how many of them
CALLS = [
    (gpt2, None, {"attention_mask": padding()}, "GPT2Attention: attention_mask", 2),
    (gpt2, None, {"position_ids": DOCUMENTS, **FORWARD}, "GPT2Attention: attention_mask", 2),
    (lambda: gpt2(add_cross_attention=True), None,
     {"encoder_hidden_states": torch.ones(2, 5, 80), **FORWARD},
     "GPT2Block: encoder_hidden_states", 2),
    (lambda: gpt2(attn="eager"), None, {"output_attentions": True},
     "GPT2Attention: output_attentions=True", 2),
    (lambda: gpt2(attn_pdrop=1.0), None, {}, f"GPT2Attention: {RATES}", 2),
    (lambda: gpt2(attn_pdrop=1e-4), None, {}, f"GPT2Attention: {RATES}", 2),
    (gpt2, having(reorder_and_upcast_attn=True), FORWARD,
     "GPT2Attention: reorder_and_upcast_attn", 2),
    (gpt2, having(is_causal=False), FORWARD, "GPT2Attention: is_causal=False", 2),
    (gpt2, having(implementation="fastpar_test"), FORWARD,
     "GPT2Attention: attn_implementation=fastpar_test", 2),
    (gpt2, with_silu, {}, f"GPT2MLP: {ACTIVATION}", 1),
    (nano, with_silu, {}, f"MLP: {ACTIVATION}", 1),
    *(
        (gpt2, lambda model, loss=loss: setattr(model, "loss_function", loss), LABELS,
         "GPT2LMHeadModel: another loss_function", 1)
        for loss in (functools.partial(loss_of, factor=0.5), Loss(), named_as_theirs)
    ),
    (gpt2, lambda model: model.lm_head.register_forward_hook(lambda *_: None) and None, LABELS,
     "GPT2LMHeadModel: hooks on or a replaced lm_h", 1),
]  # fmt: skip


def tensors_of(output):
    """Logits, loss and attentions."""
    if isinstance(output, torch.Tensor):
        return [output]
    found = [output.logits, getattr(output, "loss", None), *(output.attentions or ())]
    return [x for x in found if x is not None]


@pytest.mark.parametrize(("make", "edit", "given", "reason", "times"), CALLS)
def test_calls_that_fall_back(make, edit, given, reason, times):
    """They give the stock result, warn once per reason and are counted."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*args, **kwargs):
        assert not [name for name in kwargs if "fastpar" in name]
        return sdpa_attention_forward(*args, **kwargs)

    transformers.AttentionInterface.register("fastpar_test", attend)
    theirs, ours, report = pair(make, patched={"fused_loss": "labels" in given})
    for model in (theirs, ours) if edit else ():
        edit(model)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=reason.replace(": ", " falls back .*", 1)):
        got = tensors_of(ours(ids_for(), **given))
    torch.manual_seed(0)
    for a, b in zip(got, tensors_of(theirs(ids_for(), **given)), strict=True):
        torch.testing.assert_close(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(ids_for(), **given)
    (why,) = report.fallbacks
    assert re.match(reason.replace(": ", ": .*"), why)
    assert report.fallbacks[why] == 2 * times
    assert f"{2 * times} {why}" in str(report)


def test_a_mask_without_padding_is_none_and_a_second_derivative_is_refused():
    theirs, ours, report = evaluated()
    got = logits_of(ours, ids_for(), attention_mask=padding(0))
    torch.testing.assert_close(got, logits_of(theirs, ids_for()))
    assert not report.fallbacks
    with pytest.raises(RuntimeError, match="expected one backward, got create_graph=True"):
        torch.autograd.grad(got.sum(), list(ours.parameters()), create_graph=True)


@pytest.mark.slow
def test_compiled_calls_warn_when_they_fall_back():
    _, model, report = pair(gpt2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given = {"attention_mask": padding(3)}
    with pytest.warns(UserWarning, match="GPT2Attention falls back .* this call: attention_mask"):
        y = logits_of(compiled, ids_for(), **given, use_cache=False)
    assert not report.fallbacks
    with pytest.warns(UserWarning, match="attention_mask"):
        torch.testing.assert_close(y, logits_of(model, ids_for(), **given))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fastpar.patch")
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_output_hidden_states(attn):
    """transformers leaves hooks on attn behind; they cost nothing while they record nothing."""
    theirs, ours, report = evaluated(attn=attn)
    idx = ids_for()
    got, want = (m(idx, output_hidden_states=True).hidden_states for m in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert ours.transformer.h[0].attn._forward_hooks
    logits_of(ours, idx)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    logits_of(compiled, idx, use_cache=False)
    assert not report.fallbacks
    seen = []
    ours.transformer.h[0].attn.register_forward_hook(lambda m, i, o: seen.append(o[1]))
    with pytest.warns(UserWarning, match="hooks on attn"):
        logits_of(ours, idx)
    assert len(seen) == 1
    assert (seen[0] is None) == (attn == "sdpa")


@sweep("attn", ["sdpa", "eager"])
def test_generation_falls_back_after_its_first_step(attn):
    theirs, ours, report = evaluated(attn=attn)
    idx = ids_for(T=6)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match="a cache with tokens|attention_mask"):
        got = ours.generate(idx, **options)
    assert torch.equal(got, theirs.generate(idx, **options))
    assert got.shape == (2, 15)
    assert sum(report.fallbacks.values()) in ((2 * 8,) if attn == "sdpa" else (2 * 9,))


def test_the_cache_of_the_first_step_is_theirs():
    """By any name: releases of transformers call it past_key_value, past_key_values and cache."""
    theirs, ours, report = evaluated()
    got, want = (m(ids_for(), use_cache=True).past_key_values for m in (ours, theirs))
    assert got.get_seq_length() == want.get_seq_length() == 23
    for a, b in zip(got.layers[:2], want.layers[:2], strict=True):
        torch.testing.assert_close((a.keys, a.values), (b.keys, b.values))
    cache_utils = pytest.importorskip("transformers.cache_utils")
    for name in ("past_key_value", "past_key_values", "cache"):
        cache = cache_utils.DynamicCache()
        ours.transformer.h[0].attn(torch.randn(2, 5, 80), **{name: cache})
        assert cache.get_seq_length() == 5
    assert not report.fallbacks


def test_eager_attention_called_alone():
    """Without a mask it is not causal in newer versions; the model hands it one."""
    theirs, ours, report = pair(lambda: gpt2("D8", attn="eager").double().eval())
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    attn = ours.transformer.h[0].attn
    with quiet():
        torch.testing.assert_close(attn(x)[0], theirs.transformer.h[0].attn(x)[0])
    counted = "GPT2Attention: eager attention without a mask, which is not causal"
    assert report.fallbacks[counted] == ("bias" not in attn._buffers)
    report.fallbacks.clear()
    assert_same_logits(ours, theirs, use_cache=False)
    assert not report.fallbacks


@both
def test_hooks_run_in_a_patched_model(name):
    theirs, ours, _ = pair(MODELS[name])
    seen = []
    for part, _ in theirs.transformer.h.named_modules():
        if not part or part.endswith("attn_dropout"):  # sdpa does not call it either
            continue
        seen.clear()
        for model in (theirs, ours):
            module = model.transformer.h.get_submodule(part)
            handle = module.register_forward_hook(lambda *called: seen.append(called[-1]))
            with quiet():
                logits_of(model, ids_for())
            handle.remove()
        assert len(seen) == 2, part
        want, got = (x[0] if isinstance(x, tuple) else x for x in seen)
        torch.testing.assert_close(got, want)


class Adapter(nn.Module):
    """What LoRA does: c_attn becomes c_attn plus something."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) * 1.5


class Double(nn.Module):
    def forward(self, w):
        return 2 * w


@both
def test_adapters_and_parametrized_weights_are_used(name):
    """Adapters leave the rest fused."""
    theirs, ours, report = pair(lambda: MODELS[name]().double())
    for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        holder, inner = part.split(".")
        for model in (theirs, ours):
            whole = model.transformer.h[0].get_submodule(holder)
            setattr(whole, inner, Adapter(getattr(whole, inner)))
        assert_same_logits(ours, theirs)
    assert not report.fallbacks or name == "nanoGPT"
    theirs, ours, report = pair(lambda: MODELS[name]().double())
    for model in (theirs, ours):
        for part in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc"):
            layer = model.transformer.h[0].get_submodule(part)
            parametrize.register_parametrization(layer, "weight", Double())
    assert_same_logits(ours, theirs)


# Known by its library's own code: whatever of transformers or torch was replaced is left
def doubled(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        if isinstance(result, tuple):
            return (2 * result[0], *result[1:])
        return 2 * result

    return run


def holder_of(name):
    from transformers.models.gpt2 import modeling_gpt2 as source

    return nn.LayerNorm if name == "LayerNorm" else getattr(source, name, source)


@pytest.mark.parametrize(
    ("holder", "name", "kind"),
    [
        ("GPT2Attention", "forward", "GPT2Attention"),
        slow("GPT2MLP", "forward", "GPT2MLP"),
        ("Conv1D", "forward", "GPT2Attention"),
        ("LayerNorm", "forward", "LayerNorm"),
        ("", "eager_attention_forward", "GPT2Attention"),
    ],
)
def test_forwards_replaced_in_classes_are_left(holder, name, kind, monkeypatch):
    theirs, _, _ = pair(lambda: gpt2("D8", attn="eager").double().eval())
    monkeypatch.setattr(holder_of(holder), name, doubled(getattr(holder_of(holder), name)))
    _, ours, report = pair(lambda: theirs)
    words = f"{holder}.{name}".removeprefix(".")
    assert (kind, f"{words} was replaced") in report.left
    assert kind not in report.replaced
    assert_same_logits(ours, theirs, use_cache=False)


@sweep("first", [True, False])
def test_a_function_registered_for_sdpa(first):
    """Before the patch or after it: calls fall back."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    own = doubled(sdpa_attention_forward)
    try:
        if first:
            transformers.AttentionInterface.register("sdpa", own)
        theirs, ours, report = pair(lambda: gpt2("D8").double().eval())
        transformers.AttentionInterface.register("sdpa", own)
        assert_same_logits(ours, theirs, use_cache=False)
        assert report.fallbacks
    finally:
        transformers.AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert_same_logits(ours, theirs, use_cache=False)
