"""--cuda-graphs: the same run, bit for bit; what it refuses. A GPU's graphs, and stand-ins."""

import contextlib
import json
import sys
from unittest.mock import Mock

import pytest
import torch
from train_runs import TINY, curve, make_text

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.cli import parse_train
from fastpar.kernels import make_key
from fastpar.settings.config import TrainConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train import cuda_graphs
from fastpar.train.cuda_graphs import MicroBatchGraphs, StepGraph, why_micro_batches
from fastpar.train.trainer import Trainer


class Again:
    """In place of a CUDA graph: a replay runs the region once more, without the engine's hooks."""

    def __init__(self, region, warm_up, pool):
        self.replay = region

    def pool(self):
        return None


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    captured = []

    def capture(*args):
        captured.append(args)
        return Again(*args)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: True)
    # A CPU's model looks at token ids; test_capture_check.py has the check, on a GPU's way.
    monkeypatch.setattr(cuda_graphs, "CaptureCheck", contextlib.nullcontext)
    return captured


def rank(out, changes, graphs, met=None):
    changes = {**TINY, **changes, "device": "auto", "out": out, "cuda_graphs": graphs}
    changes |= {"max_steps": 5, "eval_every": 2, "save_every": 0}
    trainer = Trainer(TrainConfig().replace(changes), Mesh(device="cpu"))
    if met is not None:
        met(trainer)
    assert trainer.run() == 0
    return [p.detach().clone() for p in trainer.model.parameters()]


CELLS = [  # ranks, settings, graphs of a rank: one rank alone captures whole steps
    (1, {}, 1),
    (1, {"micro_batch_size": 2}, 1),
    (1, {"micro_batch_size": 2, "ema": 0.9}, 1),
    (1, {"micro_batch_size": 2, "dtype": "bf16", "on_nonfinite": "skip"}, 1),
    (1, {"micro_batch_size": 2, "dtype": "bf16", "stochastic_rounding": True}, 1),
    (1, {"max_grad_norm": 0.0}, 1),
    (1, {"micro_batch_size": 2, "deterministic": True}, 1),
    (1, {"micro_batch_size": 2, "optimizer": "muon"}, 2),
    (2, {"micro_batch_size": 2}, 2),
    (2, {"micro_batch_size": 2, "accumulate": "shard"}, 2),
    (2, {"micro_batch_size": 2, "zero_stage": 1}, 2),
    (2, {"micro_batch_size": 1, "zero_stage": 1, "accumulate": "shard"}, 1),
    (2, {"micro_batch_size": 2, "zero_stage": 1, "dtype": "bf16"}, 2),
    (2, {"micro_batch_size": 1, "zero_stage": 1, "deterministic": True}, 1),
]


FEW = (2, 3, 10)


@pytest.mark.parametrize(
    ("ranks", "changes", "graphs"),
    [
        cell if i in FEW else pytest.param(*cell, marks=pytest.mark.slow)
        for i, cell in enumerate(CELLS)
    ],
)
def test_a_replayed_run_has_the_same_bits(
    tmp_path, monkeypatch, graphs_on_cpu, ranks, changes, graphs
):
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path)
    expected = run_ranks(rank, ranks, "plain", changes, False)
    assert not graphs_on_cpu
    found = run_ranks(rank, ranks, "graphs", changes, True)
    assert len(graphs_on_cpu) == ranks * graphs
    assert curve("graphs") == curve("plain")
    for got, wanted in zip(found, expected):
        assert all(map(torch.equal, got, wanted))


SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.1)


def graphed(model, **options):
    engine = engine_of(parallelize(model.train(), Mesh(), Parallel.of(**options)))

    def compute(ids, key, scale):
        loss = model(ids, ids, rng_key=key)
        (loss * scale).backward()
        return loss.detach()

    return compute, MicroBatchGraphs(compute, model, engine)


def ids(rows, length=16):
    return torch.arange(rows * length).view(rows, length) % 64


def test_a_run_goes_on_with_and_without_graphs(tmp_path, monkeypatch, graphs_on_cpu):
    """Counters, rates and masters that a graph reads on the device are saved as ever."""
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path)
    settings = {**TINY, "device": "auto", "dtype": "bf16", "max_steps": 6, "save_every": 6}
    settings |= {"min_lr": TINY["lr"], "warmup_steps": 0}  # the same rates whatever max_steps is

    def go(out, graphs, **changes):
        config = TrainConfig().replace({**settings, "out": out, "cuda_graphs": graphs, **changes})
        trainer = Trainer(config, Mesh(device="cpu"))
        assert trainer.run() == 0
        return [p.detach().clone() for p in trainer.model.parameters()]

    for out, graphs in (("plain", False), ("graphs", True)):
        go(out, graphs)
    expected = go("plain", False, resume=True, max_steps=12)
    again = go("graphs", True, resume=True, max_steps=11)
    assert not all(map(torch.equal, again, expected))
    found = go("graphs", False, resume=True, max_steps=12)
    assert all(map(torch.equal, found, expected))
    assert len(graphs_on_cpu) == 2


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (1, {}, "of a whole step"),
        (1, {"deterministic": True}, "of a micro-batch, as the host adds micro-batches up in a"),
        (1, {"optimizer": "adafactor"}, "of a micro-batch, as Adafactor reads its numbers on the"),
        (2, {"zero_stage": 1}, "of a micro-batch, as the host starts what ranks send"),
    ],
)
def test_a_run_says_what_is_captured(tmp_path, monkeypatch, capfd, ranks, changes, said):
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path)
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: True)

    def start():
        settings = {**TINY, **changes, "device": "auto", "out": "run", "cuda_graphs": True}
        trainer = Trainer(TrainConfig().replace(settings), Mesh(device="cpu"))
        trainer.journal.open(model=trainer.model, data=trainer.data, step=0, facts=trainer._facts)

    run_ranks(start, ranks)
    assert f"\ngraphs   {said}" in "".join(capfd.readouterr())


def test_each_shape_is_captured_once_and_too_many_are_refused(graphs_on_cpu):
    _, graphs = graphed(GPT(SMALL))
    for _ in range(2):
        for length in (4, 8, 12, 16):
            graphs(ids(1, length), make_key(1, 0), 2.0)
    assert len(graphs_on_cpu) == 5  # the first has nothing to add to
    with pytest.raises(ValueError, match=r"expected at most 4 shapes .* pad them to one shape"):
        graphs(ids(2), make_key(1, 0), 2.0)


@pytest.mark.parametrize("where", ["module", "parameter", "gradient"])
def test_a_hook_of_the_users_is_refused(graphs_on_cpu, where):
    model = GPT(SMALL)
    _, graphs = graphed(model)
    graphs(ids(2), make_key(1, 0), 1.0)
    weight = model.h[1].mlp.c_fc.weight
    if where == "module":
        handle = model.h[1].register_forward_hook(lambda *args: None)
    elif where == "parameter":
        handle = weight.register_hook(lambda grad: None)
    else:
        handle = weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"expected no hooks .* of 'h\.1.* remove it, or leave"):
        graphs(ids(2), make_key(1, 0), 1.0)
    handle.remove()
    graphs(ids(2), make_key(1, 0), 1.0)


def test_gradients_of_some_parameters_are_refused(graphs_on_cpu):
    model = GPT(SMALL)
    _, graphs = graphed(model)
    graphs(ids(2), make_key(1, 0), 1.0)
    model.wpe.weight.grad = None
    with pytest.raises(RuntimeError, match=r"of all parameters or of none, got none of 'wpe"):
        graphs(ids(2), make_key(1, 0), 1.0)


def test_no_gpu_is_refused():
    with pytest.raises(ValueError, match=r"expected a GPU with cuda_graphs, got device=cpu"):
        graphed(GPT(SMALL))


def test_the_setting_has_three_values(tmp_path):
    for flags, value in (([], None), (["--cuda-graphs"], True), (["--no-cuda-graphs"], False)):
        assert parse_train(flags).system.cuda_graphs is value
    file = tmp_path / "config.json"
    for value in (None, True, False):  # runs before there were three have the last two
        file.write_text(json.dumps({"settings": {"cuda_graphs": value}}))
        assert parse_train(["--config", str(file)]).system.cuda_graphs is value
        assert parse_train(["--config", str(file), "--unset", "cuda-graphs"]) == TrainConfig()


def test_graphs_run_by_default_where_they_can(tmp_path, monkeypatch, graphs_on_cpu):
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path)

    def graphs(changes):
        settings = {**TINY, "device": "auto", "out": "none", **changes}
        trainer = Trainer(TrainConfig().replace(settings), Mesh(device="cpu"))
        return trainer.step_graph is not None, "graphs" in trainer._facts

    for ranks, changes, found in (
        (1, {}, True),
        (1, {"cuda_graphs": False}, False),
        (1, {"device": "cpu"}, False),
        (1, {"optimizer": "muon"}, False),
        (1, {"activation_checkpointing": "full"}, False),
        (2, {}, False),
    ):
        assert run_ranks(graphs, ranks, changes)[0] == (found, found), changes
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert graphs({}) == (False, False)  # no GPU


def before_third_step(what):
    """Has a trainer call what(trainer) then."""

    def met(trainer):
        step = trainer.train_step

        def train_step():
            if trainer.step == 2:
                what(trainer)
            return step()

        trainer.train_step = train_step

    return met


@pytest.mark.parametrize("case", ["nothing", "hook", "shape", "check"])
def test_a_run_goes_on_without_graphs_that_nobody_asked_for(
    tmp_path, monkeypatch, capfd, graphs_on_cpu, case
):
    """From the step that they cannot do, with the same bits."""
    monkeypatch.chdir(tmp_path)
    make_text(tmp_path)

    @contextlib.contextmanager
    def finds(known):
        raise RuntimeError("CaptureCheck: expected what a CUDA graph can hold, got x; keep it out")
        yield

    def hook(trainer):
        trainer.model.wte.weight.register_hook(lambda grad: None)

    def shape(trainer):
        trainer.micro_batch_size //= 2

    def check(trainer):
        monkeypatch.setattr(cuda_graphs, "CaptureCheck", finds)

    what, settings, said = {
        "nothing": (id, {"dtype": "bf16", "moment_dtype": "int8"}, "of a whole step"),
        "hook": (hook, {"dtype": "bf16", "on_nonfinite": "skip"}, "expected no hooks"),
        "shape": (shape, {"ema": 0.9}, "expected every step like the first one"),
        "check": (check, {}, "CaptureCheck: expected what a CUDA graph can hold"),
    }[case]
    settings = {"micro_batch_size": 2, **settings}
    expected = rank("plain", settings, False, before_third_step(what))
    assert "graphs  " not in capfd.readouterr().out
    found = rank("graphs", settings, None, before_third_step(what))
    out = capfd.readouterr().out
    assert said in out
    assert ("graphs   none from step 3 on: " in out) == (case != "nothing")
    assert len(graphs_on_cpu) == (case == "nothing")
    assert curve("graphs") == curve("plain")
    assert all(map(torch.equal, found, expected))


def train(device, graphs, dtype=torch.float32):
    """Parameters and losses of three steps of two micro-batches each."""
    torch.manual_seed(0)
    model = GPT(SMALL).to(device, dtype).train()
    mesh = Mesh(device=device)
    engine = engine_of(parallelize(model, mesh, grad_dtype=torch.float32))
    optimizer = AdamW(model.parameters(), lr=0.01, master_weights=dtype != torch.float32)

    def compute(x, key, scale):
        loss = model(x, x, rng_key=key)
        (loss * scale).backward()
        return loss.detach()

    call = MicroBatchGraphs(compute, model, engine) if graphs else compute
    losses = []
    for step in range(6):
        losses.append(call(ids(2).to(device), make_key(1, 2 * step, device), 0.5).item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach().cpu() for p in model.parameters()]


def train_steps(device, graphed, dtype=torch.float32, scaled=False):
    """Parameters, losses and norms of seven steps of two micro-batches each, one an overflow."""
    torch.manual_seed(0)
    model = GPT(SMALL).to(device, dtype).train()
    engine = engine_of(parallelize(model, Mesh(device=device), grad_dtype=torch.float32))
    masters = dtype != torch.float32
    optimizer = AdamW(model.parameters(), lr=0.01, master_weights=masters, max_grad_norm=1.0)

    def compute(x, key, scale):
        loss = model(x, x, rng_key=key)
        (loss if scale is None else loss * scale).backward()
        return loss.detach()

    graph = StepGraph(compute, model, engine, optimizer) if graphed else None
    found = []
    for step in range(7):
        scale = None if not scaled else 2.0**127 if step == 4 else 2.0 ** (step % 3)
        batches = [(ids(2), make_key(1, 4 * step + 2 * j)) for j in range(2)]
        batches = [tuple(x.to(device) for x in batch) for batch in batches]
        optimizer.param_groups[0]["lr"] = 2.0**-step
        if graph is None:
            loss = torch.zeros((), dtype=torch.float64, device=device)
            for batch in batches:
                loss += compute(*batch, scale)
            if scaled:
                optimizer.grad_scale = scale
            optimizer.step()
        else:
            loss = graph(batches, scale)
        optimizer.zero_grad()
        found += [loss.item(), str(optimizer.grad_norm.item()), optimizer.skipped]
    counters = {float(s["step"]) for s in optimizer.state.values()}
    return [*found, counters], [p.detach().cpu() for p in model.parameters()]


KINDS = [(torch.float32, False), (torch.bfloat16, True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "scaled"), KINDS)
def test_a_step_of_a_gpu_has_the_same_bits(dtype, scaled):
    plain, values = train_steps("cuda", False, dtype, scaled)
    again, found = train_steps("cuda", True, dtype, scaled)
    assert again == plain
    assert all(map(torch.equal, found, values))


@pytest.mark.parametrize(("dtype", "scaled"), KINDS)
def test_a_step_of_a_stand_in_has_the_same_bits(graphs_on_cpu, monkeypatch, dtype, scaled):
    """In 16 bits with weights' gradients that come out of their products in fp32, as on a GPU."""
    module = sys.modules["fastpar.kernels.linear"]  # the function hides it
    products = Mock(side_effect=module.wide_product)
    monkeypatch.setattr(module, "use_wide", lambda x: x.dtype != torch.float32)
    monkeypatch.setattr(module, "wide_product", products)
    plain, values = train_steps("cpu", False, dtype, scaled)
    again, found = train_steps("cpu", True, dtype, scaled)
    assert plain[-1] == {6.0 if scaled else 7.0}
    assert again == plain
    assert all(map(torch.equal, found, values))
    assert len(graphs_on_cpu) == 1
    weights = 4 * SMALL.n_layer if dtype == torch.bfloat16 else 0
    assert products.call_count == 2 * 7 * 2 * weights  # runs, steps, micro-batches


def test_experts_have_graphs_of_micro_batches():
    model = GPT(GPTConfig(**{**vars(SMALL), "n_expert": 2}))
    engine, optimizer = Mock(), AdamW(model.parameters())
    assert why_micro_batches(model, engine, optimizer).startswith("the counts of experts")


def step_graph_of(model):
    engine = engine_of(parallelize(model.train(), Mesh()))

    def compute(x, key, scale):
        loss = model(x, x, rng_key=key)
        loss.backward()
        return loss.detach()

    return StepGraph(compute, model, engine, AdamW(model.parameters()))


def test_what_a_step_graph_refuses(graphs_on_cpu, monkeypatch):
    model = GPT(SMALL)
    graph, key = step_graph_of(model), make_key(1, 0)
    graph([(ids(2), key)], None)
    for batches, scale in (
        ([(ids(1), key)], None),
        ([(ids(2), key)] * 2, None),
        ([(ids(2), key)], 1.0),
    ):
        with pytest.raises(ValueError, match=r"expected every step like the first one .* pad them"):
            graph(batches, scale)
    handle = model.h[1].register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"expected no hooks .* of 'h\.1', which"):
        graph([(ids(2), key)], None)
    handle.remove()
    graph._compute = lambda x, key, scale: torch.zeros(())
    with pytest.raises(RuntimeError, match=r"expected a gradient of every parameter, got none of"):
        graph([(ids(2), key)], None)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"expected a GPU with cuda_graphs, got device=cpu"):
        step_graph_of(GPT(SMALL))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_a_gpu_has_the_same_bits(dtype):
    losses, values = train("cuda", False, dtype)
    again, found = train("cuda", True, dtype)
    assert again == losses
    assert all(map(torch.equal, found, values))


def test_a_stand_in_has_the_same_bits(graphs_on_cpu):
    """As above, so that the test of the GPU is known to run."""
    losses, values = train("cpu", False)
    again, found = train("cpu", True)
    assert again == losses
    assert all(map(torch.equal, found, values))
    assert len(graphs_on_cpu) == 2
