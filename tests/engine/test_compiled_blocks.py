"""torch.compile and the engine: compiled blocks, forwards and models train like plain ones."""

import functools
import sys
import types

import pytest
import torch
from test_zero_awkward import SMALL, Net, backward, fill, gradients, loss_of, set_mean
from torch._dynamo.testing import CompileCounterWithBackend

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize, patch
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STEPS = 2


class Outside(Net):
    """Uses parts of its blocks outside of these, too."""

    def forward(self, idx):
        x = self.blocks[1].norm(self.wte(idx))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + self.blocks[0].down(self.blocks[0].up(x)))


def two_batches(model, i):
    """Batches of two shapes, then a validation of a third one."""
    backward(model, i)
    loss_of(model, i, n=5).backward()
    with torch.no_grad():
        loss_of(model, i, n=2)


def train(how, backend, stage, eager_steps):
    """In processes: dynamo's state belongs to a process."""
    torch._dynamo.reset()
    mesh = Mesh()
    build = Outside if how == "outside" else Net
    called = model = parallelize(fill(build()), mesh, Parallel.of(zero_stage=stage, **SMALL))
    optimizer = AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        if step == eager_steps:
            for block in model.blocks:
                if how == "block":
                    block.compile(backend=backend)
                elif how == "part":
                    next(block.children()).compile(backend=backend)
                elif how == "forward":
                    block.forward = torch.compile(block.forward, backend=backend)
            if how in ("model", "outside"):
                called = torch.compile(model, backend=backend)
        two_batches(called, step * mesh.dp_size + mesh.dp_rank)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def plain(world_size, build):
    model = fill(build())
    optimizer = AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        parts = []
        for rank in range(world_size):
            model.zero_grad()
            two_batches(model, step * world_size + rank)
            parts.append(gradients(model))
        set_mean(model, parts)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("how", "backend", "stage", "eager_steps"),
    [
        pytest.param("block", "aot_eager", 2, 0, marks=pytest.mark.slow),
        ("block", "eager", 3, 0),
        pytest.param("forward", "aot_eager", 3, 0, marks=pytest.mark.slow),
        pytest.param("model", "aot_eager", 3, 0, marks=pytest.mark.slow),
        ("model", "eager", 1, 1),
        ("outside", "eager", 3, 0),
        pytest.param("outside", "eager", 1, 1, marks=pytest.mark.slow),
        # A forward has learned which modules it calls.
        pytest.param("part", "eager", 1, 1, marks=pytest.mark.slow),
        pytest.param("forward", "eager", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_compiled_models_match_one_process(how, backend, stage, eager_steps):
    results = run_ranks(train, 2, how, backend, stage, eager_steps, backend="gloo", timeout_s=180)
    expected = plain(2, Outside if how == "outside" else Net)
    for result in results:
        for name, value in results[0].items():
            assert torch.equal(result[name], value), name
        for name, value in expected.items():
            # Compiled graphs may decompose a norm: a few roundings, which AdamW's first steps
            # (of about lr each, whatever the gradient's size) leave as a small part of lr.
            assert torch.allclose(result[name], value, rtol=1e-4, atol=1e-5), name


def tiny_gpt(dropout, n_layer=12):
    config = GPTConfig(n_layer, n_head=2, n_embd=16, block_size=8, vocab_size=32, dropout=dropout)
    return GPT(config)


def patched_gpt2(dropout):
    """transformers', whose blocks hold numbers of their own."""
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    config = transformers.GPT2Config(
        n_layer=12, n_head=2, n_embd=16, n_positions=8, vocab_size=32,
        resid_pdrop=dropout, attn_pdrop=dropout, embd_pdrop=dropout,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    patch(model)
    return model


def count_graphs(build, dropout, stage, *, tp=1, recomputed="none", backend="aot_eager"):
    """(graphs after each step, losses of the steps, those of the same steps without a compiler)"""
    counter = CompileCounterWithBackend(backend)
    ids = torch.arange(16).view(2, 8)
    losses = {}
    counts = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = recompute(build(dropout).train(), recomputed)
        called = model = parallelize(
            model, Mesh(tp=tp), Parallel.of(zero_stage=stage, first_bucket_mb=1e-4)
        )
        optimizer = AdamW(model.parameters(), lr=0.05)
        if compiled:
            called = torch.compile(model, backend=counter)
        losses[compiled] = []
        torch.manual_seed(1)
        for _ in range(3):
            if isinstance(model, GPT):
                loss = called(ids, ids)
            else:
                loss = called(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[compiled].append(loss.item())
            counts += [counter.frame_count] * compiled
    return counts, losses[True], losses[False]


def count_all(cases):
    return [count_graphs(*case, **options) for *case, options in cases]


@pytest.mark.slow
def test_one_compiled_block_serves_all_layers():
    """Of twelve; the first of ours differs, it has nothing to add. dynamo gives up after 8."""
    cases = [
        (tiny_gpt, 0.0, 3, {}),
        (tiny_gpt, 0.1, 1, {"tp": 2}),
        (tiny_gpt, 0.1, 2, {"recomputed": "full"}),
        (patched_gpt2, 0.1, 1, {}),
    ]
    for found in run_ranks(count_all, 2, cases, backend="gloo", timeout_s=300):
        for case, (counts, compiled, eager) in zip(cases, found):
            assert counts[0] == counts[-1] <= 8, (case, counts)
            assert compiled == pytest.approx(eager, rel=1e-4), case


@pytest.mark.slow
def test_nothing_is_compiled_after_the_second_block():
    """24 layers take as many graphs as 2, at every stage, and no step after the first takes one."""
    sizes = {n: functools.partial(tiny_gpt, n_layer=n) for n in (2, 24)}
    cases = [(sizes[n], 0.1, stage, {"backend": "eager"}) for stage in range(4) for n in sizes]
    for found in run_ranks(count_all, 2, cases, backend="gloo", timeout_s=600):
        for stage in range(4):
            (few, *_), (many, compiled, eager) = found[2 * stage :][:2]
            assert few[0] == few[-1] == many[0] == many[-1], (stage, few, many)
            assert compiled == pytest.approx(eager, rel=1e-4), stage


def while_it_is_imported():
    model = parallelize(fill(Net()), Mesh(), Parallel.of(zero_stage=3, **SMALL))
    backward(model, 0)


def test_another_thread_may_be_importing_the_compiler(monkeypatch):
    """Its modules are there, and have nothing in them yet."""
    name = "torch._dynamo.eval_frame"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    run_ranks(while_it_is_imported, 2)
