"""fastpar.patch and unpatch: what is swapped, what is left and why, what stays as it was."""

import copy
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from test_patched import FeedForward, Layer, Nano, Norm, SelfAttention, gpt2, ids_for, logits_of
from torch import nn
from torch.nn.utils import parametrize

import fastpar
from fastpar import nn as modules
from fastpar.foreign import fused, recognize
from fastpar.kernels import backend
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

MODELS = {"transformers": gpt2, "nanoGPT": Nano}


def state_of(model):
    """Keys in order, identities of parameters, bytes."""
    state = model.state_dict(keep_vars=True)
    return [(k, id(v), v.detach().clone()) for k, v in state.items()]


def assert_same_state(model, before):
    after = state_of(model)
    assert [row[:2] for row in after] == [row[:2] for row in before]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(after, before))


@pytest.mark.parametrize("name", MODELS)
def test_state_is_untouched_and_unpatch_restores_every_bit(name):
    model = MODELS[name]()
    state, classes = state_of(model), [type(m) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    text, idx = repr(model), ids_for(model)
    expected = logits_of(model, idx)
    attributes_of_a_run = [sorted(vars(m)) for m in model.modules()]

    report = fastpar.patch(model)
    assert_same_state(model, state)
    assert [type(m).__name__ for m in model.modules()] == [c.__name__ for c in classes]
    for old, new in zip(classes, map(type, model.modules())):
        if not old.__module__.startswith("torch."):
            assert (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    assert all(isinstance(m, c) for m, c in zip(model.modules(), classes))
    assert not torch.equal(logits_of(model, idx), expected)

    assert fastpar.unpatch(model) == sum(map(len, report.replaced.values()))
    assert_same_state(model, state)
    assert [type(m) for m in model.modules()] == classes
    assert [sorted(vars(m)) for m in model.modules()] in (attributes, attributes_of_a_run)
    assert repr(model) == text
    assert torch.equal(logits_of(model, idx), expected)
    assert fastpar.unpatch(model) == 0


@pytest.mark.parametrize("name", MODELS)
def test_patching_twice_changes_nothing(name):
    model = MODELS[name]()
    first = fastpar.patch(model)
    classes = [type(m) for m in model.modules()]
    second = fastpar.patch(model)
    n = sum(map(len, first.replaced.values()))
    assert [type(m) for m in model.modules()] == classes
    assert not second.replaced
    assert second.already == n
    assert f"0 modules replaced, {n} were before" in str(second)
    assert second.fallbacks is first.fallbacks


def test_fused_loss_can_be_added_later():
    model = gpt2()
    fastpar.patch(model)
    report = fastpar.patch(model, fused_loss=True)
    assert report.replaced == {"GPT2LMHeadModel": ["model"]}
    idx = ids_for(model)
    assert model(idx, labels=idx).logits is None


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_model_can_be_patched(name):
    model = MODELS[name]().eval()
    idx = ids_for(model)
    expected = logits_of(model, idx)
    fastpar.patch(model.transformer.h[0].attn)
    assert isinstance(model.transformer.h[0].attn, fused.Attention)
    assert not isinstance(model.transformer.h[1].attn, fused.Attention)
    torch.testing.assert_close(logits_of(model, idx), expected)


def test_signatures_stay():
    model = gpt2()
    before = [inspect.signature(m.forward) for m in model.modules()]
    fastpar.patch(model, fused_loss=True)
    for module, signature in zip(model.modules(), before):
        if not isinstance(module, nn.LayerNorm | nn.Embedding):
            assert inspect.signature(module.forward) == signature, type(module)


@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        pytest.param("GPT2Model", marks=pytest.mark.slow),
        pytest.param("GPT2ForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_saved_and_loaded(name, tmp_path):
    import transformers

    model = gpt2(kind=name, pad_token_id=0).eval()
    idx = ids_for(model)
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


def test_any_other_model():
    """Exactly torch's classes are swapped; the rest is left and named."""

    class MyNorm(nn.LayerNorm):
        pass

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.gate

    class Cut(nn.Module):
        def forward(self, x):
            return x[:, :2]

    model = nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.GELU(), nn.Linear(8, 8), MyNorm(8),
        Gate(), nn.Embedding(11, 8, padding_idx=0), Cut(), nn.LayerNorm(20_000),
    )  # fmt: skip
    report = fastpar.patch(model)
    assert [type(m) for m in model[:4]] == [
        modules.Embedding, modules.LayerNorm, modules.RMSNorm, modules.GELU,
    ]  # fmt: skip
    assert report.replaced == {
        "Embedding": ["0"], "LayerNorm": ["1"], "RMSNorm": ["2"], "GELU": ["3"],
    }  # fmt: skip
    assert report.left == {
        ("Linear", "torch's, no faster one here"): ["4"],
        ("MyNorm", "not known"): ["5"],
        ("Gate", "not known"): ["6"],
        ("Embedding", "padding_idx=0 has no kernel"): ["7"],
        ("LayerNorm", "20000 elements a row, the kernel takes 1 to 16384"): ["9"],
    }
    assert fastpar.unpatch(model) == 4
    assert type(model[1]) is nn.LayerNorm


def test_own_modules_are_not_taken_for_swapped_ones():
    model = nn.Sequential(fastpar.LayerNorm(8), nn.LayerNorm(8))
    assert fastpar.patch(model).replaced == {"LayerNorm": ["1"]}
    assert fastpar.unpatch(model) == 1
    assert [type(m) for m in model] == [fastpar.LayerNorm, nn.LayerNorm]
    own = fastpar.GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32))
    assert str(fastpar.patch(own)) == "fastpar.patch(GPT): 0 modules replaced"


def test_a_block_of_fastpars_own_modules_is_fused():
    theirs = Nano()
    ours = copy.deepcopy(theirs)
    for layer in ours.transformer.h:
        attn = fastpar.CausalSelfAttention(24, 3)
        attn.load_state_dict(layer.attn.state_dict())
        layer.attn, layer.ln_2 = attn, fastpar.LayerNorm(24)
    report = fastpar.patch(ours)
    assert len(report.replaced["Layer"]) == len(report.replaced["CausalSelfAttention"]) == 2
    torch.testing.assert_close(logits_of(ours, ids_for(ours)), logits_of(theirs, ids_for(ours)))


def test_nothing_to_replace():
    model = nn.Linear(3, 3)
    report = fastpar.patch(model)
    assert str(report) == (
        "fastpar.patch(Linear): 0 modules replaced\n"
        "left as they are:\n"
        "     1 Linear (model): torch's, no faster one here"
    )
    assert str(fastpar.patch(nn.Sequential())) == "fastpar.patch(Sequential): 0 modules replaced"


def test_another_model_is_told_that_only_gpt2_is_served():
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        vocab_size=50, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    report = fastpar.patch(transformers.LlamaForCausalLM(config))
    assert report.replaced.keys() <= {"Embedding", "LayerNorm"}
    line = "attention, MLPs and blocks are replaced in models of GPT-2's shape only"
    assert line in str(report)
    assert line not in str(fastpar.patch(Nano()))


class Rotated(SelfAttention):
    """Everything as in SelfAttention by its names; but the keys are rolled."""

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k.roll(1, -1), v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Bidirectional(SelfAttention):
    def forward(self, x):
        y = F.scaled_dot_product_attention(
            *self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        )
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Interleaved(SelfAttention):
    """q, k and v of a head stand together in c_attn's output."""

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (self.n_head, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Failing(SelfAttention):
    def forward(self, x):
        raise RuntimeError("not today")


class Squared(FeedForward):
    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)) ** 2)


class OtherEps(Norm):
    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-6)


class PostNorm(Layer):
    def forward(self, x):
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


OTHER = "computes something else than its parts' names say"
IMPOSTORS = {
    "rotated": ("attn", lambda: Rotated(24, 3, 0.0, True, True), OTHER),
    "bidirectional": ("attn", lambda: Bidirectional(24, 3, 0.0, True, True), OTHER),
    "interleaved": ("attn", lambda: Interleaved(24, 3, 0.0, True, True), OTHER),
    "failing": ("attn", lambda: Failing(24, 3, 0.0, True, True),
                "could not be checked: RuntimeError: not today"),
    "squared": ("mlp", lambda: Squared(24, 0.0, True, "none"),
                f"its gelu (GELU) is not GELU, or {OTHER}"),
    "eps": ("ln_2", lambda: OtherEps(24, True), OTHER),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSTORS)
def test_parts_that_only_look_like_nanogpts_are_left(name):
    part, make, reason = IMPOSTORS[name]
    model = Nano().double()
    impostor = make().double()
    with torch.no_grad():  # as models start: the output does not show what it computes
        if hasattr(impostor, "c_proj"):
            impostor.c_proj.weight.zero_()
    setattr(model.transformer.h[1], part, impostor)
    if name != "failing":
        expected = logits_of(model, ids_for(model))
    report = fastpar.patch(model)
    assert report.left[type(impostor).__name__, reason] == [f"transformer.h.1.{part}"]
    assert type(impostor).__name__ not in report.replaced
    assert isinstance(model.transformer.h[0], fused.Block)
    if part != "mlp":
        assert report.left["Layer", f"its {'attention' if part == 'attn' else part} was left"]
    if name != "failing":
        torch.testing.assert_close(logits_of(model, ids_for(model)), expected)


def test_a_block_of_another_order_is_left():
    model = Nano()
    model.transformer.h[0] = PostNorm(24, 3, 0.0, True, True, "none")
    report = fastpar.patch(model)
    assert report.left["PostNorm", OTHER] == ["transformer.h.0"]
    assert "transformer.h.0.attn" in report.replaced["SelfAttention"]


def test_parts_of_unknown_dropout_or_width_are_left():
    attention = SelfAttention(24, 3, 0.1, True, True)
    attention.other_dropout = nn.Dropout(0.2)
    assert fastpar.patch(attention).replaced  # it is not used, as was seen
    attention = SelfAttention(24, 3, 0.1, True, True)
    attention.other = nn.Linear(24, 24)
    assert fastpar.patch(attention).left["SelfAttention", "a part of unknown use: other"]
    mlp = FeedForward(24, 0.1, True, "none")
    mlp.other = nn.Dropout(0.2)
    reason = "dropouts of unknown places: dropout, other"
    assert fastpar.patch(mlp).left["FeedForward", reason] == ["model"]
    narrow = SelfAttention(24, 3, 0.1, True, True)
    narrow.c_attn = nn.Linear(24, 40)
    reason = "c_attn maps 24 to 40, not to q, k and v of 24 each"
    assert fastpar.patch(narrow).left["SelfAttention", reason] == ["model"]


def test_an_activation_that_is_not_gelu_is_left():
    model = gpt2(activation_function="relu")
    report = fastpar.patch(model)
    reason = "its act (ReLU) is not GELU, or computes something else than its parts' names say"
    assert len(report.left["GPT2MLP", reason]) == 2
    idx = ids_for(model)
    patched_logits = logits_of(model, idx)
    fastpar.unpatch(model)
    torch.testing.assert_close(patched_logits, logits_of(model, idx))


def test_looking_leaves_no_trace():
    """Neither hooks nor random numbers nor buffers notice that a part is looked at."""
    model, seen = Nano(p=0.3), []
    for part in model.modules():
        part.register_forward_hook(lambda *_: seen.append(1))
    state = state_of(model)
    generator = torch.get_rng_state()
    report = fastpar.patch(model)
    assert len(report.replaced["Layer"]) == 2
    assert not seen
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same_state(model, state)
    assert all(m.training for m in model.modules())


def test_looking_uses_no_kernel(monkeypatch):
    """A forced backend that does not take fp64 is no reason to leave a part."""
    monkeypatch.setattr(backend, "choice", "cpp")
    assert len(fastpar.patch(Nano()).replaced["Layer"]) == 2


def test_equal_parts_are_looked_at_once(monkeypatch):
    looks = []
    checked = recognize._checked
    monkeypatch.setattr(recognize, "_checked", lambda *a, **k: looks.append(a) or checked(*a, **k))
    fastpar.patch(Nano())
    # SelfAttention, Layer, Norm once, FeedForward for both forms of GELU
    assert len(looks) == 5


def test_on_the_meta_device():
    with torch.device("meta"):
        model = Nano()
    report = fastpar.patch(model)
    assert len(report.left["SelfAttention", "on the meta device: load its weights first"]) == 2
    with torch.device("meta"):
        assert fastpar.patch(nn.LayerNorm(8)).replaced


def test_another_forward_is_left():
    model = gpt2()
    own = model.transformer.h[0].attn.forward
    model.transformer.h[0].attn.forward = lambda *args, **kwargs: own(*args, **kwargs)
    report = fastpar.patch(model)
    assert report.left["GPT2Attention", "its forward was replaced by someone else's"] == [
        "transformer.h.0.attn"
    ]
    assert report.left["GPT2Block", "its attention was left"] == ["transformer.h.0"]


def test_weights_that_are_tied_or_shared_stay_so():
    model = Nano()
    shared = nn.LayerNorm(24)
    model.first, model.second = shared, shared
    report = fastpar.patch(model)
    assert model.first is model.second
    assert report.replaced["LayerNorm"] == ["first"]
    assert model.lm_head.weight is model.transformer.wte.weight


def test_training_goes_the_same_way():
    """Ten steps of AdamW: the losses agree to what fp32 allows after so many."""
    theirs = Nano()
    ours = copy.deepcopy(theirs)
    fastpar.patch(ours)
    idx = ids_for(theirs)
    losses = []
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(10):
            loss = F.cross_entropy(model(idx)[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1][-1] < losses[1][0] - 0.1
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=0)


def test_errors():
    with pytest.raises(
        ValueError, match=r"patch: expected a torch.nn.Module, got model=dict; pass"
    ):
        fastpar.patch({})
    with pytest.raises(ValueError, match=r"unpatch: expected a torch.nn.Module, got model=type; "):
        fastpar.unpatch(nn.Linear)
    message = re.escape(
        "patch: expected transformers' GPT2LMHeadModel or nanoGPT's forward(idx, targets=None) for "
        "fused_loss=True, got model=Nano; use fastpar.LinearCrossEntropyLoss"
    )
    model = Nano()
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
    base = Nano().double()

    def run():
        model = copy.deepcopy(base)
        fastpar.patch(model)
        fastpar.parallelize(model, fastpar.Mesh(tp=3))
        fastpar.patch(model)

    message = (
        r"patch: expected a model before parallelize\(\), got 'transformer\.wte' split over ranks "
        r"of tp; call fastpar\.patch\(model\) first"
    )
    with pytest.raises(ValueError, match=message):
        run_ranks(run, 3)
