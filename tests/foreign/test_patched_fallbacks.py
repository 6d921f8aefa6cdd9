"""Calls of a patched model that the kernels do not serve, and parts that are not as they were."""

import copy
import warnings

import pytest
import torch
from test_patched import MODELS, Nano, gpt2, ids_for, logits_of, random_weights
from torch import nn
from torch.nn.utils import parametrize

import fastpar


def fallback_pair(**options):
    theirs = gpt2(**options).eval()
    ours = copy.deepcopy(theirs)
    return theirs, ours, fastpar.patch(ours)


@pytest.mark.parametrize("p", [1.0, 1e-4])
def test_rates_that_masks_do_not_have_fall_back(p):
    model = gpt2(attn_pdrop=p)
    report = fastpar.patch(model)
    with pytest.warns(UserWarning, match="GPT2Attention falls back .*: a dropout rate of 1, or"):
        logits_of(model, ids_for(model))
    assert report.fallbacks == {"GPT2Attention: a dropout rate of 1, or of 1/512 and less": 2}


@pytest.mark.slow
def test_compiled_calls_warn_when_they_fall_back():
    model = gpt2()
    report = fastpar.patch(model)
    idx = ids_for(model)
    mask = torch.ones_like(idx)
    mask[0, :3] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="GPT2Attention falls back .* this call: attention_mask"):
        y = logits_of(compiled, idx, attention_mask=mask, use_cache=False)
    assert not report.fallbacks
    with pytest.warns(UserWarning, match="attention_mask"):
        torch.testing.assert_close(y, logits_of(model, idx, attention_mask=mask))


def test_padding_falls_back():
    theirs, ours, report = fallback_pair()
    idx = ids_for(theirs)
    mask = torch.ones_like(idx)
    mask[0, :5] = 0
    with pytest.warns(UserWarning, match="attention_mask"):
        y = logits_of(ours, idx, attention_mask=mask)
    torch.testing.assert_close(y, logits_of(theirs, idx, attention_mask=mask))
    assert report.fallbacks == {"GPT2Attention: attention_mask": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once for each reason
        logits_of(ours, idx, attention_mask=mask)
    assert report.fallbacks == {"GPT2Attention: attention_mask": 4}
    assert "4 GPT2Attention: attention_mask" in str(report)
    # A mask without padding is none: transformers itself leaves it out.
    torch.testing.assert_close(
        logits_of(ours, idx, attention_mask=torch.ones_like(idx)), logits_of(theirs, idx)
    )
    assert report.fallbacks == {"GPT2Attention: attention_mask": 4}


@pytest.mark.filterwarnings("ignore:fastpar.patch")
def test_output_attentions_falls_back():
    theirs, ours, report = fallback_pair(attn="eager")
    idx = ids_for(theirs)
    with pytest.warns(UserWarning, match="output_attentions=True"):
        got = ours(idx, output_attentions=True)
    want = theirs(idx, output_attentions=True)
    assert len(got.attentions) == 2
    for a, b in zip(got.attentions, want.attentions):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(got.logits, want.logits)
    assert report.fallbacks["GPT2Attention: output_attentions=True"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fastpar.patch")
@pytest.mark.parametrize("attn", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_output_hidden_states(attn):
    """transformers leaves hooks on attn behind; they cost nothing while they record nothing."""
    theirs, ours, report = fallback_pair(attn=attn)
    idx = ids_for(theirs)
    got, want = (m(idx, output_hidden_states=True).hidden_states for m in (ours, theirs))
    assert len(got) == 3
    for a, b in zip(got, want):
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


def test_packed_documents_fall_back():
    theirs, ours, report = fallback_pair()
    idx = ids_for(theirs, B=1)
    positions = torch.cat((torch.arange(9), torch.arange(14)))[None]
    with pytest.warns(UserWarning, match="attention_mask"):
        got = logits_of(ours, idx, position_ids=positions, use_cache=False)
    want = logits_of(theirs, idx, position_ids=positions, use_cache=False)
    torch.testing.assert_close(got, want)
    assert report.fallbacks


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_generation_falls_back_after_its_first_step(attn):
    theirs, ours, report = fallback_pair(attn=attn)
    idx = ids_for(theirs, T=6)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match="a cache with tokens|attention_mask"):
        got = ours.generate(idx, **options)
    assert torch.equal(got, theirs.generate(idx, **options))
    assert got.shape == (2, 15)
    assert sum(report.fallbacks.values()) in ((2 * 8,) if attn == "sdpa" else (2 * 9,))


def test_the_cache_of_the_first_step_is_theirs():
    theirs, ours, report = fallback_pair()
    idx = ids_for(theirs)
    got, want = (m(idx, use_cache=True).past_key_values for m in (ours, theirs))
    assert got.get_seq_length() == want.get_seq_length() == 23
    for layer in range(2):
        for name in ("keys", "values"):
            torch.testing.assert_close(
                getattr(got.layers[layer], name), getattr(want.layers[layer], name)
            )
    assert not report.fallbacks


def test_a_cache_may_have_any_name():
    """Releases of transformers call it past_key_value, past_key_values and cache."""
    _, ours, report = fallback_pair()
    cache_utils = pytest.importorskip("transformers.cache_utils")
    x = torch.randn(2, 5, 80)
    for name in ("past_key_value", "past_key_values", "cache"):
        cache = cache_utils.DynamicCache()
        ours.transformer.h[0].attn(x, **{name: cache})
        assert cache.get_seq_length() == 5
        assert not report.fallbacks


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ({"is_causal": False}, "is_causal=False"),
        ({"implementation": "fastpar_test"}, "attn_implementation=fastpar_test"),
    ],
)
def test_settings_of_the_module_fall_back(settings, reason):
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*args, **kwargs):
        assert not [name for name in kwargs if "fastpar" in name]
        return sdpa_attention_forward(*args, **kwargs)

    transformers.AttentionInterface.register("fastpar_test", attend)
    theirs, ours, report = fallback_pair()
    for model in (theirs, ours):
        for layer in model.transformer.h:
            vars(layer.attn).update(settings)
        if "implementation" in settings:
            model.config._attn_implementation = settings["implementation"]
    idx = ids_for(theirs)
    with pytest.warns(UserWarning, match=reason):
        got = logits_of(ours, idx, use_cache=False)
    torch.testing.assert_close(got, logits_of(theirs, idx, use_cache=False))
    assert report.fallbacks == {f"GPT2Attention: {reason}": 2}


def test_cross_attention_is_left_and_its_blocks_fall_back():
    theirs = gpt2(add_cross_attention=True).eval()
    ours = copy.deepcopy(theirs)
    report = fastpar.patch(ours)
    assert ("GPT2Attention", "cross-attention has no kernel") in report.left
    idx, context = ids_for(theirs), torch.randn(2, 5, 80)
    with pytest.warns(UserWarning, match="encoder_hidden_states"):
        got = logits_of(ours, idx, encoder_hidden_states=context, use_cache=False)
    want = logits_of(theirs, idx, encoder_hidden_states=context, use_cache=False)
    torch.testing.assert_close(got, want)
    assert report.fallbacks == {"GPT2Block: encoder_hidden_states": 2}


@pytest.mark.parametrize("name", ["transformers D40", "nanoGPT"])
def test_hooks_run_in_a_patched_model(name):
    """Each part's hook runs as often as without the patch and sees the same values."""
    theirs = MODELS[name]()
    ours = copy.deepcopy(theirs)
    fastpar.patch(ours)
    idx = ids_for(theirs)
    base = theirs.transformer.h
    for part, _ in base.named_modules():
        if not part or part.endswith("attn_dropout"):  # sdpa does not call it either
            continue
        seen = []
        for model in (theirs, ours):
            module, outputs = model.transformer.h.get_submodule(part), []

            def keep(_module, _args, output, outputs=outputs):
                outputs.append(output[0] if isinstance(output, tuple) else output)

            handle = module.register_forward_hook(keep)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fastpar.patch")
                logits_of(model, idx)
            handle.remove()
            seen.append(outputs)
        assert len(seen[0]) == len(seen[1]) == 1, part
        torch.testing.assert_close(seen[1][0], seen[0][0])


def test_adapters_are_used_and_leave_the_rest_fused():
    """What LoRA does: c_attn becomes c_attn plus something."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) * 1.5

    for name in ("transformers D40", "nanoGPT"):
        theirs = MODELS[name]()
        ours = copy.deepcopy(theirs)
        report = fastpar.patch(ours)
        idx = ids_for(theirs)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            for model in (theirs.double(), ours.double()):
                holder = model.transformer.h[0].get_submodule(part.split(".")[0])
                setattr(holder, part.split(".")[1], Adapter(getattr(holder, part.split(".")[1])))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fastpar.patch")
                torch.testing.assert_close(logits_of(ours, idx), logits_of(theirs, idx))
        assert not report.fallbacks or name == "nanoGPT"


@pytest.mark.parametrize("name", ["transformers D40", "nanoGPT"])
def test_another_activation_falls_back(name):
    theirs = MODELS[name]()
    ours = copy.deepcopy(theirs)
    report = fastpar.patch(ours)
    idx = ids_for(theirs)
    for model in (theirs, ours):
        setattr(model.transformer.h[1].mlp, "act" if "trans" in name else "gelu", nn.SiLU())
    with pytest.warns(UserWarning, match="falls back .* hooks on the activation, or another one"):
        torch.testing.assert_close(logits_of(ours, idx), logits_of(theirs, idx))
    assert sum(report.fallbacks.values()) == 1


def test_parametrized_weights_are_used():
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    for name in ("transformers D40", "nanoGPT"):
        theirs = MODELS[name]()
        ours = copy.deepcopy(theirs)
        fastpar.patch(ours)
        idx = ids_for(theirs)
        for model in (theirs.double(), ours.double()):
            for part in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc"):
                layer = model.transformer.h[0].get_submodule(part)
                parametrize.register_parametrization(layer, "weight", Double())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fastpar.patch")
            torch.testing.assert_close(logits_of(ours, idx), logits_of(theirs, idx))


def test_fused_loss_falls_back():
    theirs = gpt2()
    ours = copy.deepcopy(theirs)
    report = fastpar.patch(ours, fused_loss=True)
    idx = ids_for(theirs)
    ours.lm_head.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="GPT2LMHeadModel falls back .* hooks on or another lm_h"):
        got = ours(idx, labels=idx)
    want = theirs(idx, labels=idx)
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.loss, want.loss)
    assert sum(report.fallbacks.values()) == 1


def test_a_second_derivative_is_refused():
    model = random_weights(Nano())
    fastpar.patch(model)
    loss = logits_of(model, ids_for(model)).square().sum()
    with pytest.raises(RuntimeError, match="expected one backward, got create_graph=True"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
