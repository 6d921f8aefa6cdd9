"""Known by its library's own code: whatever of transformers or torch was replaced is left."""

import copy
import functools
import warnings

import pytest
import torch
from test_patched import gpt2, ids_for, logits_of
from torch import nn

import fastpar
from fastpar.foreign.recognize import is_own, replaced_code, torch_forward
from fastpar.foreign.swap import replaced_in

transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")


def pair(**options):
    theirs = gpt2("D8", **options).double().eval()
    return theirs, copy.deepcopy(theirs)


def assert_equal(ours, theirs):
    idx = ids_for(theirs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fastpar.patch")
        torch.testing.assert_close(
            logits_of(ours, idx, use_cache=False), logits_of(theirs, idx, use_cache=False)
        )


def doubled(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        if isinstance(result, tuple):
            return (2 * result[0], *result[1:])
        return 2 * result

    return run


def test_nothing_is_replaced_in_the_libraries_themselves():
    model = gpt2("D8")
    for part in (model, model.transformer, *model.transformer.h, model.transformer.h[0].attn):
        assert replaced_code(type(part)) is None
        assert replaced_in(part) is None
    assert torch_forward(nn.LayerNorm) is None
    assert not is_own(doubled(nn.LayerNorm.forward), torch.__path__[0])


def test_forwards_replaced_in_classes_are_left(monkeypatch):
    from transformers.models.gpt2 import modeling_gpt2 as source

    cases = {
        (source.GPT2Attention, "forward"): ("GPT2Attention", "GPT2Attention.forward"),
        (source.GPT2MLP, "forward"): ("GPT2MLP", "GPT2MLP.forward"),
        (source.Conv1D, "forward"): ("GPT2Attention", "Conv1D.forward"),
        (nn.LayerNorm, "forward"): ("LayerNorm", "LayerNorm.forward"),
        (source, "eager_attention_forward"): ("GPT2Attention", "eager_attention_forward"),
    }
    for (holder, name), (kind, words) in cases.items():
        theirs, ours = pair(attn="eager")
        with monkeypatch.context() as patching:
            patching.setattr(holder, name, doubled(getattr(holder, name)))
            report = fastpar.patch(ours)
            assert (kind, f"{words} was replaced by someone else's") in report.left
            assert kind not in report.replaced
            assert_equal(ours, theirs)


def test_a_function_registered_for_sdpa():
    """Before the patch the attention is left, after it the calls fall back."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for first in (True, False):
        theirs, ours = pair()
        own = doubled(sdpa_attention_forward)
        try:
            if first:
                transformers.AttentionInterface.register("sdpa", own)
            report = fastpar.patch(ours)
            transformers.AttentionInterface.register("sdpa", own)
            assert ("GPT2Attention" in report.replaced) is not first
            assert_equal(ours, theirs)
            assert bool(report.fallbacks) is not first
        finally:
            transformers.AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert_equal(ours, theirs)


def test_methods_replaced_in_an_instance_are_left():
    theirs, ours = pair()
    for model in (theirs, ours):
        mlp = model.transformer.h[0].mlp
        mlp.forward = doubled(mlp.forward)
        act = model.transformer.h[1].mlp.act
        act.forward = doubled(act.forward)
    report = fastpar.patch(ours)
    reason = "{} was replaced by someone else's"
    assert ("GPT2MLP", reason.format("its forward")) in report.left
    assert ("GPT2MLP", reason.format("forward")) in report.left
    assert_equal(ours, theirs)


def test_activations_that_differ_far_out_are_left():
    for name, swapped in {
        "gelu_10": False, "quick_gelu": False, "gelu_new": True, "gelu": True, "gelu_fast": True,
    }.items():  # fmt: skip
        theirs, ours = pair(activation_function=name)
        with torch.no_grad():
            for model in (theirs, ours):
                for layer in model.transformer.h:
                    layer.mlp.c_fc.weight.mul_(100)
        assert ("GPT2MLP" in fastpar.patch(ours).replaced) is swapped, name
        assert_equal(ours, theirs)


def test_eager_attention_called_alone():
    """Without a mask it is not causal in newer versions; the model hands it one."""
    theirs, ours = pair(attn="eager")
    report = fastpar.patch(ours)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    attn = ours.transformer.h[0].attn
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fastpar.patch")
        torch.testing.assert_close(attn(x)[0], theirs.transformer.h[0].attn(x)[0])
    counted = "GPT2Attention: eager attention without a mask, which is not causal"
    assert report.fallbacks[counted] == ("bias" not in attn._buffers)
    report.fallbacks.clear()
    assert_equal(ours, theirs)
    assert not report.fallbacks


def test_scales_of_attention_in_full_and_cached_forwards():
    for setting in ({"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}):
        for attn in ("sdpa", "eager"):
            theirs, ours = pair(attn=attn, **setting)
            fastpar.patch(ours)
            assert_equal(ours, theirs)
            idx, found = ids_for(theirs, T=9), []
            for model in (theirs, ours):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "fastpar.patch")
                    cache = model(idx[:, :5], use_cache=True).past_key_values
                    found.append(model(idx[:, 5:], past_key_values=cache).logits)
            torch.testing.assert_close(found[1], found[0])
