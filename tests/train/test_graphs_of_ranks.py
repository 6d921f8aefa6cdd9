"""Graphs of several ranks without a GPU: replays have the bits of usual steps; what a step uses
stays where it is; a capture, with stand-ins for NCCL and streams, has no times, entries, waits."""

import contextlib

import pytest
import torch
from recorded import Recorded, Synchronous

from fastpar import GPT, AdamW, GPTConfig, Mesh, Parallel, engine_of, graphed, parallelize
from fastpar.engine.debug import Debug
from fastpar.kernels import make_key
from fastpar.optim import graphs
from fastpar.testing import run_ranks

SMALL = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.1)


SEVERAL_BUCKETS = {"bucket_mb": 0.01, "first_bucket_mb": 0.01}


@pytest.fixture
def captured(monkeypatch):
    """CPUs have graphs; below is the capture check. Memory of stage 3 is freed by no one, as that
    of a graph's pool."""
    resize = torch.UntypedStorage.resize_
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda x, n: x if n == 0 else resize(x, n))
    monkeypatch.setattr(graphs, "capture", Recorded)
    monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(graphs, "CaptureCheck", contextlib.nullcontext)


def train(stage, cuda_graphs, parts, dtype, settings):
    """Losses and norms of seven steps on this rank, and its parameters."""
    torch.manual_seed(0)
    mesh, debug = Mesh(), Debug(collectives=Synchronous)
    model = GPT(SMALL).to(dtype).train()
    layout = Parallel.of(zero_stage=stage, **SEVERAL_BUCKETS, **settings)
    parallelize(model, mesh, layout, grad_dtype=torch.float32, debug=debug)
    masters = dtype != torch.float32
    optimizer = AdamW(model.parameters(), lr=2.0**-7, master_weights=masters, max_grad_norm=1.0)
    step = graphed(
        lambda x, key: model(x, x, rng_key=key), model, optimizer, cuda_graphs=cuda_graphs
    )
    assert step.why == ("" if cuda_graphs else "cuda_graphs=False")
    found = []
    for i in range(7):
        optimizer.param_groups[0]["lr"] = 2.0**-7 / (1 + i % 2)
        batches = []
        for j in range(parts):
            first = 2 * ((i * parts + j) * mesh.world_size + mesh.rank)
            x = (torch.arange(32).view(2, 16) * 7 + first) % 64
            batches.append((x, make_key(1, first)))
        found += [step(*batches).item(), optimizer.grad_norm.item()]
        if i in (2, 4):  # between steps: a forward, and whole parameters
            with torch.no_grad():
                found.append(model.eval()(batches[0][0], batches[0][0]).item())
            model.train()
            with engine_of(model).gathered():
                found.append(sum(p.float().abs().sum().item() for p in model.parameters()))
    with engine_of(model).gathered():
        return found, [p.detach().clone() for p in model.parameters()]


LAYOUTS = [
    (2, 0, 1, torch.float32, {}),
    (2, 0, 2, torch.bfloat16, {}),
    (2, 1, 2, torch.float32, {}),
    (2, 1, 1, torch.bfloat16, {}),
    (2, 2, 1, torch.float32, {}),
    (2, 2, 2, torch.bfloat16, {"accumulate": "full", "grad_accum_steps": 2}),
    (2, 3, 2, torch.float32, {}),
    (2, 3, 1, torch.bfloat16, {}),
    (4, 2, 1, torch.float32, {"shard_size": 2}),
    (4, 3, 2, torch.float32, {"shard_size": 2}),
]


@pytest.mark.parametrize(("ranks", "stage", "parts", "dtype", "settings"), LAYOUTS)
def test_replays_have_the_bits_of_usual_steps(captured, ranks, stage, parts, dtype, settings):
    plain = run_ranks(train, ranks, stage, False, parts, dtype, settings)
    again = run_ranks(train, ranks, stage, True, parts, dtype, settings)
    for (expected, values), (found, got) in zip(plain, again):
        assert found == expected
        assert all(map(torch.equal, got, values))
