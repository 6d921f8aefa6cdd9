"""fastpar.patch and unpatch: what is swapped, what is left and why, what stays as it was."""

import copy
import inspect
import re

import foreign_models
import pytest
import torch
import torch.distributed as dist
from cells import slow
from nanogpt_cells import MLP, CausalSelfAttention, NanoGPT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import fastpar
from fastpar.foreign import fused
from fastpar.kernels import backend
from fastpar.nn import modules
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

both = pytest.mark.parametrize("name", foreign_models.BOTH)


@both
def test_state_and_names_are_untouched_and_unpatch_restores_every_bit(name):
    """Also names that others look up, and signatures; a second patch changes nothing."""
    model = foreign_models.MODELS[name]()
    state, classes = foreign_models.state_of(model), [type(m) for m in model.modules()]
    names = [(m._get_name(), type(m).__name__, repr(m)) for m in model.modules()]
    signatures = [inspect.signature(m.forward) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    idx = foreign_models.ids_for()
    expected = foreign_models.logits_of(model, idx)
    attributes_of_a_run = [sorted(vars(m)) for m in model.modules()]

    report = fastpar.patch(model)
    n = sum(map(len, report.replaced.values()))
    if name != "nanoGPT":
        fastpar.patch(model, fused_loss=True)
        n += 1
    patched = [type(m) for m in model.modules()]
    again = fastpar.patch(model)
    assert [type(m) for m in model.modules()] == patched
    assert (again.replaced, again.already) == ({}, n)
    assert f"0 modules replaced, {n} were replaced before" in str(again)
    assert again.fallbacks is report.fallbacks
    foreign_models.assert_same_state(model, state)
    assert [(m._get_name(), type(m).__name__, repr(m)) for m in model.modules()] == names
    for old, new in zip(classes, patched):
        assert issubclass(new, old)
        if not old.__module__.startswith("torch."):
            assert (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    for module, signature in zip(model.modules(), signatures):
        if not isinstance(module, nn.LayerNorm | nn.Embedding | nn.GELU):
            assert inspect.signature(module.forward) == signature, type(module)
    assert not torch.equal(foreign_models.logits_of(model, idx), expected)

    assert fastpar.unpatch(model) == n
    foreign_models.assert_same_state(model, state)
    assert [type(m) for m in model.modules()] == classes
    assert [sorted(vars(m)) for m in model.modules()] in (attributes, attributes_of_a_run)
    assert [(m._get_name(), type(m).__name__, repr(m)) for m in model.modules()] == names
    assert torch.equal(foreign_models.logits_of(model, idx), expected)
    assert fastpar.unpatch(model) == 0


@both
def test_a_part_of_a_model_can_be_patched(name):
    model = foreign_models.MODELS[name]().eval()
    theirs = copy.deepcopy(model)
    fastpar.patch(model.transformer.h[0].attn)
    found = [isinstance(layer.attn, fused.Attention) for layer in model.transformer.h]
    assert found == [True, False]
    foreign_models.assert_same_logits(model, theirs)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", slow("GPT2ForSequenceClassification")])
def test_saved_and_loaded(name, tmp_path):
    import transformers

    model = foreign_models.gpt2(kind=name, pad_token_id=0).eval()
    idx = foreign_models.ids_for()
    expected = model(idx)[0]
    fastpar.patch(model)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, name).from_pretrained(tmp_path).eval()
    assert again.config.architectures == [name]
    assert torch.equal(again(idx)[0], expected)
    fastpar.patch(again)
    torch.testing.assert_close(again(idx)[0], expected)
    kind = type(model).from_pretrained(tmp_path)  # by the class that patch made
    torch.testing.assert_close(kind.eval()(idx)[0], expected)


def counts_of(report):
    return {kind: len(names) for kind, names in report.replaced.items()}


def test_reports():
    model = foreign_models.gpt2()
    with torch.device("meta"):  # torch's default device changes nothing
        report = fastpar.patch(model)
    assert counts_of(report) == {
        "GPT2Model": 1, "Embedding": 2, "GPT2Block": 2, "GPT2Attention": 2, "GPT2MLP": 2,
        "LayerNorm": 5,
    }  # fmt: skip
    assert report.replaced["GPT2Attention"] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    left = {kind: names for (kind, _), names in report.left.items()}
    assert left == {"GPT2LMHeadModel": ["model"], "Dropout": ["transformer.drop"],
                    "Linear": ["lm_head"]}  # fmt: skip
    assert "fallback calls so far: none" in str(report)
    report = fastpar.patch(NanoGPT())
    assert counts_of(report) == {
        "Embedding": 2, "Block": 2, "CausalSelfAttention": 2, "MLP": 2, "GELU": 2, "LayerNorm": 5,
    }  # fmt: skip
    line = "attention, MLPs and blocks are replaced in models of known classes only"
    assert line not in str(report)
    assert line in str(fastpar.patch(nn.Sequential(nn.LayerNorm(8))))


def test_any_other_model():
    """Exactly torch's classes are swapped; the rest is left and named."""

    class MyNorm(nn.LayerNorm):
        pass

    model = nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.GELU(), nn.Linear(8, 8), MyNorm(8),
        nn.PReLU(8), nn.Embedding(11, 8, padding_idx=0), nn.Flatten(), nn.LayerNorm(20_000),
    )  # fmt: skip
    report = fastpar.patch(model)
    swapped = [modules.Embedding, modules.LayerNorm, modules.RMSNorm, modules.GELU]
    assert [type(m) for m in model[:4]] == swapped
    assert report.replaced == {kind.__name__: [str(i)] for i, kind in enumerate(swapped)}
    assert report.left == {
        ("Linear", "torch's, fastpar has no faster one"): ["4"],
        ("MyNorm", "unknown class"): ["5"],
        ("PReLU", "unknown class"): ["6"],
        ("Embedding", "no kernel supports padding_idx=0"): ["7"],
        ("LayerNorm", "20000 elements per row, the kernel supports 1 to 16384"): ["9"],
    }
    assert fastpar.unpatch(model) == 4
    assert type(model[1]) is nn.LayerNorm


def test_own_modules_are_not_taken_for_swapped_ones():
    model = nn.Sequential(fastpar.nn.LayerNorm(8), nn.LayerNorm(8))
    assert fastpar.patch(model).replaced == {"LayerNorm": ["1"]}
    assert fastpar.unpatch(model) == 1
    assert [type(m) for m in model] == [fastpar.nn.LayerNorm, nn.LayerNorm]
    own = fastpar.GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32))
    assert str(fastpar.patch(own)) == "fastpar.patch(GPT): 0 modules replaced"
    # But a block of them is fused.
    theirs = NanoGPT()
    ours = copy.deepcopy(theirs)
    for layer in ours.transformer.h:
        attn = fastpar.nn.CausalSelfAttention(24, 3)
        attn.load_state_dict(layer.attn.state_dict())
        layer.attn, layer.ln_2 = attn, fastpar.nn.LayerNorm(24)
    report = fastpar.patch(ours)
    assert len(report.replaced["Block"]) == len(report.replaced["CausalSelfAttention"]) == 2
    foreign_models.assert_same_logits(ours, theirs)


def test_a_part_that_is_shared_stays_so():
    model, shared = nn.Module(), nn.LayerNorm(24)
    model.first, model.second = shared, shared
    assert fastpar.patch(model).replaced["LayerNorm"] == ["first"]
    assert model.first is model.second


def with_part(make, **parts):
    made = make()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def replaced_forward(part):
    model = foreign_models.gpt2()
    module = model.transformer.get_submodule(part)
    own = module.forward
    module.forward = lambda *args: 2 * own(*args)
    return model


HEADS = "heads of 257 elements, the kernels support 1 to 256"
LEFT = [  # the model, the class that is left, why, where
    (lambda: with_part(CausalSelfAttention, other=nn.Linear(24, 24)),
     "CausalSelfAttention", "has other, which nanoGPT's has not", "model"),
    (lambda: with_part(MLP, other=nn.Dropout(0.2)),
     "MLP", "has other, which nanoGPT's has not", "model"),
    (lambda: with_part(CausalSelfAttention, window=7),
     "CausalSelfAttention", "has window, which nanoGPT's has not", "model"),
    (lambda: with_part(lambda: CausalSelfAttention(flash=False), bias=torch.ones(1, 1, 64, 64)),
     "CausalSelfAttention", "has a mask of its own", "model"),
    (lambda: with_part(MLP, c_proj=nn.Linear(24, 24)),
     "MLP", "c_proj does not take what c_fc gives", "model"),
    (lambda: with_part(MLP, gelu=nn.SiLU()), "MLP", "its gelu (SiLU) is not GELU", "model"),
    (lambda: with_part(CausalSelfAttention, c_attn=nn.Linear(24, 40)),
     "CausalSelfAttention", "c_attn maps 24 to 40, not to q, k and v of 24 each", "model"),
    (lambda: foreign_models.gpt2(activation_function="relu"),
     "GPT2MLP", "its act (ReLU) is not GELU", "h.0.mlp h.1.mlp"),
    (lambda: CausalSelfAttention(257, 1), "CausalSelfAttention", HEADS, "model"),
    (lambda: foreign_models.gpt2(n_embd=514, n_head=2), "GPT2Attention", HEADS,
     "h.0.attn h.1.attn"),
    (lambda: replaced_forward("h.0.mlp"), "GPT2MLP", "its forward was replaced", "h.0.mlp"),
    (lambda: replaced_forward("h.1.mlp.act"), "GPT2MLP", "forward was replaced", "h.1.mlp"),
    (lambda: foreign_models.gpt2(add_cross_attention=True),
     "GPT2Attention", "cross-attention has no kernel", "h.0.crossattention h.1.crossattention"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "reason", "where"), LEFT)
def test_what_is_left(make, kind, reason, where):
    model = make()
    theirs = copy.deepcopy(model)
    names = [name if name == "model" else f"transformer.{name}" for name in where.split()]
    assert fastpar.patch(model).left[kind, reason] == names
    if hasattr(model, "transformer"):
        foreign_models.assert_same_logits(model, theirs)
    elif reason == HEADS:
        x = torch.randn(1, 3, 257)
        torch.testing.assert_close(model(x), theirs(x))


def test_what_is_not_used_is_no_reason():
    with torch.device("meta"):
        assert fastpar.patch(nn.LayerNorm(8)).replaced


def test_heads_that_kernels_take(monkeypatch):
    x = torch.randn(1)
    assert fused.head_dim_fits(x, 12)
    assert not fused.head_dim_fits(x, 257)
    monkeypatch.setattr(backend, "choice", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "has_triton", True)
    fits = [D for D in (8, 12, 16, 64, 128, 136) if fused.head_dim_fits(x, D)]
    assert fits == [16, 64, 128]


def test_what_fully_shard_had_before():
    """It gives modules classes of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = foreign_models.gpt2()
        fully_shard(model.transformer.h[0], mesh=init_device_mesh("cpu", (1,)))
        words = "FSDPGPT2Block (transformer.h.0): fully_shard has changed its class: call patch bef"
        assert words in str(fastpar.patch(model))
    finally:
        dist.destroy_process_group()


def test_errors():
    with pytest.raises(ValueError, match=r"patch: expected a torch.nn.Module, got model=dict;"):
        fastpar.patch({})
    with pytest.raises(ValueError, match=r"unpatch: expected a torch.nn.Module, got model=type; "):
        fastpar.unpatch(nn.Linear)
    message = re.escape(
        "patch: expected transformers' GPT2LMHeadModel or nanoGPT's GPT with forward(idx, "
        "targets=None) for fused_loss=True, got model=NanoGPT; use fastpar.nn.LinearCross"
    )
    model = NanoGPT()
    with pytest.raises(ValueError, match=message):
        fastpar.patch(model, fused_loss=True)
    assert type(model.transformer.wte) is nn.Embedding
    fastpar.patch(model)
    classes = [type(m) for m in model.modules()]
    parametrize.register_parametrization(model.transformer.h[0].ln_1, "weight", nn.Identity())
    message = re.escape("unpatch: expected the classes that patch set, got transformer.h.0.ln_1=")
    with pytest.raises(ValueError, match=message):
        fastpar.unpatch(model)
    parametrize.remove_parametrizations(model.transformer.h[0].ln_1, "weight")
    assert [type(m) for m in model.modules()] == classes
    fastpar.unpatch(model)


def test_a_split_model_is_refused():
    base = NanoGPT().double()

    def run():
        model = copy.deepcopy(base)
        fastpar.patch(model)
        fastpar.parallelize(model, fastpar.Mesh(tp=3))
        fastpar.patch(model)

    message = r"patch: expected a model before parallelize\(\), got 'transformer\.wte' split "
    with pytest.raises(ValueError, match=message):
        run_ranks(run, 3)
