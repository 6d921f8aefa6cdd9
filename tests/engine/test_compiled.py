"""torch.compile and the engine: compiled parts, blocks and models train like plain ones."""

import functools
import sys
import types
from typing import NamedTuple

import pytest
import torch
from programs import Block
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize, patch
from fastpar.kernels import make_key
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STEPS, T, V = 3, 8, 41


class Net(nn.Module):
    """Somebody's model; outside: it uses parts of its blocks outside of these, too."""

    def __init__(self, outside=False):
        super().__init__()
        self.outside, self.wte = outside, nn.Embedding(V, 16)
        self.h = nn.ModuleList(Block(16) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, V)

    def forward(self, idx, targets, rng_key=None):
        x = self.wte(idx)
        x = self.h[1].norm(x) if self.outside else x
        for block in self.h:
            x = block(x)
        x = self.norm(x) + self.h[0].down(self.h[0].up(x)) if self.outside else self.norm(x)
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def gpt(**changes):
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": T, "vocab_size": V}
    return GPT(GPTConfig(**{**sizes, "dropout": 0.1, **changes}), seed=3)


def patched_gpt2():
    """transformers', whose blocks hold numbers of their own."""
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=12, n_head=2, n_embd=16, n_positions=T, vocab_size=V,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    patch(model)
    forward = model.forward
    model.forward = lambda idx, targets, rng_key: forward(idx, labels=idx, use_cache=False).loss
    return model


class Case(NamedTuple):
    what: str  # is compiled: model | block | forward of each block | part of each block
    backend: str
    ranks: int
    axes: dict
    options: dict  # of parallelize
    build: functools.partial
    eager_steps: int = 0  # before it is compiled
    mode: str = "none"  # of recomputation
    graphs: int = 8  # at most; dynamo gives up after 8


def compiled_as(model, case, counter):
    for block in model.h if case.what != "model" else ():
        if case.what == "forward":
            block.forward = torch.compile(block.forward, backend=counter)
        else:
            (block if case.what == "block" else next(block.children())).compile(backend=counter)
    if case.what != "model":
        return model
    whole = isinstance(model, GPT) and case.graphs == 1
    return torch.compile(model, backend=counter, fullgraph=whole)


def train(case, compiled):
    """Losses, weights, and the graphs that there are after each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh, counter = Mesh(**case.axes), CompileCounterWithBackend(case.backend)
    model = recompute(case.build().train(), case.mode)
    small = {"bucket_mb": 0.01, "first_bucket_mb": 1e-4}
    parallelize(model, mesh, Parallel.of(**small, **case.options))
    optimizer = AdamW(model.parameters(), lr=0.05, eps=1e-3, max_grad_norm=1.0)
    called, losses, graphs = model, [], []
    torch.manual_seed(1)
    for step in range(STEPS):
        if compiled and step == case.eager_steps:
            called = compiled_as(model, case, counter)
        for part in range(2):
            seed = torch.Generator().manual_seed(100 * step + 10 * part + mesh.dp_rank)
            time = T - part if isinstance(model, Net) else T  # of two lengths
            idx = torch.randint(0, V, (4, time), generator=seed)
            loss = called(idx, idx, rng_key=make_key(1, 2 * step + part))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, Net):
            with torch.no_grad():
                losses.append(called(idx, idx).item())
        graphs.append(counter.frame_count)
    return losses, dict(model.state_dict()), graphs


def both(cases):
    """In processes: what dynamo has seen belongs to one."""
    return [(train(case, False), train(case, True)) for case in cases]


def compare(ranks, cases):
    found = run_ranks(both, ranks, cases, backend="gloo", timeout_s=600)
    for results in found:
        for case, (eager, compiled) in zip(cases, results):
            # Compiled graphs may decompose a norm: a few roundings, which AdamW's first steps (of
            # about lr each, whatever the gradient's size) leave as a small part of lr.
            assert compiled[0] == pytest.approx(eager[0], rel=1e-4), case
            for name, value in eager[1].items():
                assert torch.allclose(compiled[1][name], value, rtol=1e-4, atol=1e-5), (case, name)
            assert compiled[2][case.eager_steps] <= case.graphs, (case, compiled[2])
            if not isinstance(case.build(), Net):  # no later step compiles anything
                assert compiled[2][case.eager_steps] == compiled[2][-1], (case, compiled[2])
    return found


NET, OUTSIDE, GPT2 = Net, functools.partial(Net, True), gpt
EXPERTS = functools.partial(
    gpt, n_expert=4, balance_loss=0.5, router_z_loss=0.02, balance_rate=0.05
)
CAPACITY = functools.partial(EXPERTS, expert_capacity=1.0)
SWITCH = functools.partial(EXPERTS, top_k=1)
DEEP, WIRES = functools.partial(gpt, n_layer=12), {"wire_gradients": "int8", "wire_weights": "int8"}
STAGE = [{"zero_stage": stage} for stage in range(4)]
QUICK = [
    Case("block", "eager", 2, {}, STAGE[3], NET, graphs=99),
    Case("model", "eager", 2, {}, STAGE[1], NET, eager_steps=1, graphs=99),
]
SLOW = [
    Case("block", "aot_eager", 2, {}, STAGE[2], NET, graphs=99),
    Case("forward", "aot_eager", 2, {}, STAGE[3], NET, graphs=99),
    Case("model", "aot_eager", 2, {}, STAGE[3], NET, graphs=99),
    # A forward has learned which modules it calls.
    *(Case(what, "eager", 2, {}, STAGE[1], NET, 1, graphs=99) for what in ("part", "forward")),
    *(Case("block", "aot_eager", 2, {}, {**STAGE[n], **WIRES}, GPT2) for n in (1, 3)),
    # One compiled block serves all layers; the first differs, it has nothing to add.
    Case("model", "aot_eager", 2, {}, STAGE[3], DEEP),
    Case("model", "aot_eager", 2, {}, STAGE[2], DEEP, 0, "full"),
    Case("model", "aot_eager", 2, {"tp": 2}, STAGE[1], DEEP),
    Case("model", "aot_eager", 2, {}, STAGE[1], patched_gpt2),
    *(
        Case("model", "aot_eager", 2, {"tp": 2}, {"sequence_parallel": on}, GPT2, graphs=1)
        for on in (True, False)
    ),
    *(Case("model", "aot_eager", 2, {"tp_grid": g}, {}, GPT2, graphs=1) for g in ((1, 2), (2, 1))),
    *(
        Case("model", "aot_eager", 2, {"cp": 2}, {**STAGE[n], "cp_method": how}, GPT2)
        for n, how in ((0, "heads"), (0, "keys"), (3, "heads"), (3, "keys"))
    ),
    Case("model", "aot_eager", 2, {"ep": 2}, STAGE[3], CAPACITY, graphs=99),
    Case("model", "aot_eager", 2, {"ep": 2}, STAGE[1], SWITCH, 0, "selective", 99),
    Case("model", "aot_eager", 4, {"tp": 2}, STAGE[3], GPT2),
    Case("model", "aot_eager", 4, {"tp_grid": (2, 1)}, STAGE[3], GPT2),
    Case("model", "aot_eager", 4, {"tp_grid": (2, 2)}, {}, GPT2, graphs=1),
]  # fmt: skip


OUT = [Case("model", "eager", 2, {}, STAGE[3], OUTSIDE, graphs=99)]
GROUPS = [QUICK, OUT + SLOW[:6], SLOW[6:14], SLOW[14:21], SLOW[21:]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", GROUPS)
def test_what_is_compiled_trains_like_what_is_not(cases):
    compare(cases[0].ranks, cases)


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_nothing_is_compiled_after_the_second_block():
    """12 layers take as many graphs as 2, at every stage."""
    builds = [functools.partial(gpt, n_layer=n) for n in (2, 12)]
    cases = [Case("model", "eager", 2, {}, stage, build) for stage in STAGE for build in builds]
    graphs = [compiled[2][-1] for _, compiled in compare(2, cases)[0]]
    assert graphs[::2] == graphs[1::2]


def while_it_is_imported():
    model = parallelize(Net(), Mesh(), Parallel.of(zero_stage=3, first_bucket_mb=1e-4))
    idx = torch.zeros(2, T, dtype=torch.int64)
    model(idx, idx).backward()


def test_another_thread_may_be_importing_the_compiler(monkeypatch):
    """Its modules are there, and have nothing in them yet."""
    name = "torch._dynamo.eval_frame"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    run_ranks(while_it_is_imported, 2)
