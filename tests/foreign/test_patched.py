"""What a patched model computes: GPT-2 of transformers and of nanoGPT's shape, call by call."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from foreign_models import BOTH, MODELS, gpt2, ids_for, logits_of, nano, pair
from nanogpt_cells import NanoGPT
from programs import STAGES, Case, check
from test_modules import cast

import fastpar
from fastpar.foreign import fused
from fastpar.foreign.swap import swap_of
from fastpar.testing import assert_matches_oracle

THREE = ("transformers D40", "transformers eager", "nanoGPT")


def functional(model, idx, call=logits_of):
    """call(model, idx) as a function of the parameters."""
    names = [name for name, _ in model.named_parameters()]

    def run(*parameters):
        given = dict(zip(names, parameters))
        return call(lambda *a, **k: torch.func.functional_call(model, given, a, k), idx)

    return run


def fused_calls(monkeypatch):
    """Counts of what ran in patched modules, by name."""
    calls = dict.fromkeys(("attention_qkvpacked", "residual_norm", "linear_gelu"), 0)

    def counting(name, run):
        def call(*args, **kwargs):
            calls[name] += 1
            return run(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(fused, name, counting(name, getattr(fused, name)))
    return calls


def run_of(model, idx):
    """Logits and gradients of one step."""
    torch.manual_seed(3)
    model.zero_grad()
    logits = logits_of(model, idx)
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("error:fastpar.patch")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient_match(name, monkeypatch):
    calls = fused_calls(monkeypatch)
    theirs, ours, _ = pair(MODELS[name])
    idx = ids_for()
    inputs = list(theirs.parameters())
    got, want = functional(ours, idx), functional(theirs, idx)
    assert len(assert_matches_oracle(got, want, inputs)) == 1 + len(inputs)
    assert set(calls.values()) == {2}


@pytest.mark.parametrize("way", ["16 bits", "autocast"])
@pytest.mark.parametrize("name", BOTH)
def test_bf16_matches(name, way):
    theirs, ours, _ = pair(MODELS[name])
    idx = ids_for()
    exact = functional(copy.deepcopy(theirs).double(), idx)
    if way == "autocast":
        got, eager = cast(functional(ours, idx)), cast(functional(theirs, idx))
    else:
        got, eager = functional(ours.bfloat16(), idx), functional(theirs.bfloat16(), idx)
    assert_matches_oracle(got, exact, list(theirs.parameters()), eager=eager)


@pytest.mark.parametrize("name", THREE)
def test_dropout_follows_training_and_the_seed(name):
    model = MODELS[name]()
    with_dropout = MODELS[name](dropout=0.4)
    with_dropout.load_state_dict(model.state_dict())
    fastpar.patch(with_dropout)
    idx = ids_for()
    torch.testing.assert_close(logits_of(with_dropout.eval(), idx), logits_of(model.eval(), idx))
    with_dropout.train()
    first, second = run_of(with_dropout, idx), run_of(with_dropout, idx)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(logits_of(with_dropout, idx), first[0])
    assert not torch.allclose(first[0], logits_of(model, idx), atol=0.1)


@pytest.mark.parametrize("rates", [{"attn_pdrop": 0.5}, {"resid_pdrop": 0.5}])
def test_dropout_is_where_theirs_is(rates):
    """Logits spread over masks as theirs do, for each kind of dropout alone."""
    theirs, ours, _ = pair(gpt2, "D8", **rates)
    idx = ids_for(T=9)
    with torch.no_grad():
        spread = [
            torch.stack([logits_of(m, idx) for _ in range(200)]).std(0).mean()
            for m in (ours, theirs)
        ]
    # Two estimates of one standard deviation from 200 runs, averaged over thousands of logits;
    # without one of the two dropouts of a layer it is 30 % less.
    assert abs(spread[0] / spread[1] - 1) < 0.1


def test_modes_of_parts_are_theirs():
    """Evaluation of a model whose rate is a number; one dropout in another mode than the rest."""
    theirs, ours, _ = pair(nano, dropout=0.3)
    idx = ids_for()
    torch.testing.assert_close(ours.eval()(idx), theirs.eval()(idx))
    for model in (theirs, ours):
        model.train().transformer.drop.eval()
        for layer in model.transformer.h:
            layer.mlp.dropout.eval()
            layer.attn.dropout = 0.0
            layer.attn.resid_dropout.eval()
    torch.testing.assert_close(ours(idx), theirs(idx))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", BOTH)
def test_gradient_checkpointing_changes_nothing(name, reentrant, monkeypatch):
    model = MODELS[name](dropout=0.2)
    report = fastpar.patch(model)
    plain = run_of(model, ids_for())
    if name == "nanoGPT":
        model.checkpointing = reentrant
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = fused_calls(monkeypatch)
    again = run_of(model, ids_for())
    assert calls["residual_norm"] == 4  # 2 layers, twice
    assert not report.fallbacks
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


@pytest.mark.slow
@pytest.mark.parametrize("name", THREE)
def test_compiles(name, monkeypatch):
    model = MODELS[name]()
    fastpar.patch(model)
    idx = ids_for()
    expected, *grads = run_of(model, idx)
    model.zero_grad()
    calls = fused_calls(monkeypatch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fastpar.patch")
        y = logits_of(compiled, idx, **({} if name == "nanoGPT" else {"use_cache": False}))
    y.square().sum().backward()
    torch.testing.assert_close(y, expected)
    for p, grad in zip(model.parameters(), grads):
        torch.testing.assert_close(p.grad, grad, atol=1e-4, rtol=1e-4)
    assert all(calls.values())


@pytest.mark.parametrize("name", BOTH)
def test_traces(name):
    """By torch.jit.trace, with its own check."""
    model, idx = MODELS[name]().eval().requires_grad_(False), ids_for()
    fastpar.patch(model)
    options = {} if name == "nanoGPT" else {"use_cache": False}
    call = functools.partial(logits_of, model, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        recording = torch.jit.trace(lambda idx: call(idx), (idx,))
        torch.testing.assert_close(recording(idx.flip(1)), call(idx.flip(1)))


@pytest.mark.parametrize("name", BOTH)
def test_copies_and_pickles_are_patched(name):
    model = MODELS[name]()
    report = fastpar.patch(model)
    idx = ids_for()
    expected = logits_of(model, idx)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(other, idx), expected)
        assert fastpar.patch(other).already == sum(map(len, report.replaced.values()))
        part, own = other.transformer.h[0].attn, model.transformer.h[0].attn
        assert type(part) is type(own)
        assert swap_of(part).fallbacks is not report.fallbacks
        assert swap_of(other.transformer.h[1].attn).fallbacks is (swap_of(part).fallbacks)


@pytest.mark.parametrize("items", [None, 11, torch.tensor(11)])
def test_fused_loss_and_its_gradients_match(items):
    theirs, ours, _ = pair(gpt2, patched={"fused_loss": True})
    idx = ids_for()
    labels = idx.clone()
    labels[0, 3:7] = -100
    options = {} if items is None else {"num_items_in_batch": items}

    def fused_loss(model, idx):
        return model(idx, labels=labels, **options).loss

    def plain_loss(model, idx):
        reduction = "mean" if items is None else "sum"
        logits = model(idx).logits[:, :-1].flatten(0, 1)
        value = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction=reduction)
        return value if items is None else value / 11

    # transformers rounds logits to fp32 even in fp64: the oracle has a loss of its own.
    assert_matches_oracle(
        functional(ours, idx, fused_loss),
        functional(theirs, idx, plain_loss),
        list(theirs.parameters()),
        eager=functional(theirs, idx, fused_loss),
    )


def test_fused_loss_has_no_logits():
    model = gpt2()
    fastpar.patch(model)
    assert fastpar.patch(model, fused_loss=True).replaced == {"GPT2LMHeadModel": ["model"]}
    idx = ids_for()
    output = model(idx, labels=idx)
    assert output.logits is None
    assert output.past_key_values.get_seq_length() == 23
    as_tuple = model(idx, labels=idx, return_dict=False)
    assert type(as_tuple) is tuple
    assert torch.equal(as_tuple[0], output.loss)
    assert torch.equal(model(idx, None, None, None, None, None, None, None, idx)[0], output.loss)
    assert model(idx).logits.shape == (2, 23, 101)
    assert model.eval()(idx, labels=idx).logits.shape == (2, 23, 101)
    another = type(model)(model.config).train()  # was not patched itself
    assert another(idx, labels=idx).logits.shape == (2, 23, 101)


@pytest.mark.slow
def test_matches_through_triton(triton_device):
    """The same classes run Triton's kernels: on a GPU, or in Triton's interpreter."""
    theirs, ours, _ = pair(lambda: nano(n_embd=32, n_head=2, approximate="tanh").to(triton_device))
    idx = ids_for(T=5, B=1).to(triton_device)
    inputs = list(theirs.parameters())
    assert_matches_oracle(functional(ours, idx), functional(theirs, idx), inputs)


SHARDED = ("transformers", "transformers, fused loss", "nanoGPT")


def patched(name):
    model = nano() if name == "nanoGPT" else gpt2("D8")
    fastpar.patch(model, fused_loss="loss" in name)
    return model


def loss_of(model, seed):
    ids = torch.randint(67, (2, 11), generator=torch.Generator().manual_seed(seed))
    if isinstance(model, NanoGPT):
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return model(ids, labels=ids, use_cache=False).loss


@torch.no_grad()
def evaluate(model, step):
    loss_of(model.eval(), step)
    model.train()


@pytest.mark.filterwarnings("error:fastpar.patch")  # no call falls back
@pytest.mark.parametrize("name", SHARDED)
def test_a_patched_model_stays_fused_at_every_stage(name):
    """With the bits of one process."""
    case = Case(functools.partial(patched, name), loss_of, between=evaluate)
    for stage in STAGES:
        check(case, 2, stage)
