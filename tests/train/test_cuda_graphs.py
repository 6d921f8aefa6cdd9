"""--cuda-graphs: the same run, bit for bit; what it refuses. A GPU's graphs, and stand-ins."""

import pytest
import torch
from train_runs import TINY, curve, make_text

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.config.config import TrainConfig
from fastpar.kernels import make_key
from fastpar.testing import run_ranks
from fastpar.train import cuda_graphs
from fastpar.train.cuda_graphs import MicroBatchGraphs
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
    monkeypatch.setattr(cuda_graphs, "_check_device", lambda device: None)
    return captured


def rank(out, changes, graphs):
    changes = {**TINY, **changes, "device": "auto", "out": out, "cuda_graphs": graphs}
    changes |= {"max_steps": 3, "eval_every": 2, "save_every": 0}
    trainer = Trainer(TrainConfig().replace(changes), Mesh(device="cpu"))
    assert trainer.run() == 0
    return [p.detach().clone() for p in trainer.model.parameters()]


CELLS = [  # ranks, settings, graphs of a rank
    (1, {}, 1),
    (1, {"micro_batch_size": 2}, 2),
    (1, {"micro_batch_size": 2, "deterministic": True}, 1),
    (1, {"micro_batch_size": 2, "dtype": "bf16", "on_nonfinite": "skip"}, 2),
    (2, {"micro_batch_size": 2}, 2),
    (2, {"micro_batch_size": 2, "accumulate": "shard"}, 2),
    (2, {"micro_batch_size": 2, "zero_stage": 1}, 2),
    (2, {"micro_batch_size": 1, "zero_stage": 1, "accumulate": "shard"}, 1),
    (2, {"micro_batch_size": 2, "zero_stage": 1, "dtype": "bf16"}, 2),
    (2, {"micro_batch_size": 1, "zero_stage": 1, "deterministic": True}, 1),
]


FEW = (3, 6)


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
    engine = engine_of(parallelize(model.train(), Mesh(), **options))

    def compute(ids, key, scale):
        loss = model(ids, ids, rng_key=key)
        (loss * scale).backward()
        return loss.detach()

    return compute, MicroBatchGraphs(compute, model, engine)


def ids(rows, length=16):
    return torch.arange(rows * length).view(rows, length) % 64


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


def test_no_gpu_and_freed_memory_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"expected a GPU with cuda_graphs, got device=cpu"):
        graphed(GPT(SMALL))
    monkeypatch.setattr(cuda_graphs, "_check_device", lambda device: None)
    run_ranks(refuse_stage, 2)


def refuse_stage():
    for stage in (2, 3):
        with pytest.raises(ValueError, match=f"expected zero_stage 0 or 1, got .*={stage}"):
            graphed(GPT(SMALL), zero_stage=stage)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, r"device auto or cuda with cuda_graphs: .* change --device"),
        ({"zero_stage": 3}, r"zero_stage 0 or 1 with cuda_graphs: .* change --zero"),
        ({"tp": 2}, "tp 1 with cuda_graphs"),
        ({"compile": True}, r"compile False .* leave --cuda-graphs out"),
        ({"activation_checkpointing": "full"}, "activation_checkpointing none with cuda_graphs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, why):
    with pytest.raises(ValueError, match=f"train: expected {why}"):
        TrainConfig().replace({"cuda_graphs": True, **changes})


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
