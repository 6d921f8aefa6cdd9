"""Graphs of several ranks without a GPU: replays have the bits of usual steps; what a step uses
stays where it is; a capture, with stand-ins for NCCL and streams, has no times, entries, waits."""

import contextlib
from typing import ClassVar
from unittest import mock

import pytest
import torch
from recorded import Recorded, Synchronous
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
        if i in (0, 2, 4):  # between steps: a forward, and whole parameters
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


class Seen(graphs.CaptureCheck):
    """The capture check, which also notes the memory that each operation of the region uses."""

    regions: ClassVar = []  # the notes of each region

    def __init__(self, static):
        super().__init__(static)
        self._number, self._used = {}, []
        self._empty = [s._cdata for s in self._storages if not s.data_ptr()]

    def place(self, x):
        """An address; in memory that the region allocates, its number there."""
        key = x.untyped_storage()._cdata
        if self._static.get(key):
            return x.data_ptr()
        where = self._empty.index(key) if key in self._empty else self._number[key]
        return key in self._empty, where, x.storage_offset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._used.append((str(func), [self.place(x) for x in given if x.numel()]))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        known = {x.untyped_storage()._cdata for x in given}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:
                self._number[x.untyped_storage()._cdata] = len(self._used)
        return out

    def __exit__(self, *error):
        super().__exit__(*error)
        self.regions.append(self._used)


def state_of(engine):
    """What the host knows of a step between two steps."""
    micro, buckets = engine.micro_batches, engine.buckets
    of_step = engine.phase, micro.begun, micro.last, engine.log.hashes, engine.graph_task
    return of_step, [
        (b.phase, b.live, b.shown, b.hides, b.gathering, b.kept, b.has, b.seen, b.reduced, b.zeroed)
        for b in buckets
    ]


def checked(stage, parts):
    """Three steps on this rank under the capture check; the collectives of one."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
    model = nn.Sequential(nn.Linear(8, 8), blocks[0], *list(blocks)[1:])
    layout = Parallel.of(zero_stage=stage, **SEVERAL_BUCKETS)
    parallelize(model, Mesh(), layout, debug=Debug(collectives=Synchronous))
    optimizer = AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0)
    with mock.patch.object(graphs, "has_graphs", return_value=True):
        step = graphed(lambda x: model(x).square().mean(), model, optimizer, cuda_graphs=True)
    assert not step.why
    states = []
    with mock.patch.object(graphs, "CaptureCheck", Seen):
        for i in range(5):
            step(*[(torch.full((2, 8), float(i + j)),) for j in range(parts)])
            states.append(state_of(engine_of(model)))
            if i >= 2:
                step._graph._steps = 2  # the next one is checked, too
    second, *others = Seen.regions[-2:]
    assert states[2] == states[3] == states[4]
    assert others == [second]
    assert len(second) > 50
    return [name.split(".")[1] for name, _ in second if name.startswith("c10d")]


REDUCED = {0: "allreduce_", 1: "alltoall_base_", 2: "alltoall_base_", 3: "alltoall_base_"}


@pytest.mark.parametrize(("stage", "parts"), [(0, 1), (1, 1), (2, 2), (3, 1)])
def test_a_step_uses_the_same_memory_again_and_can_be_captured(stage, parts):
    """Of a replay, all memory is at the addresses of the capture: what was there before it, and
    what it allocates, in the graph's pool. What the host knows is the same before and after."""
    one, two = run_ranks(checked, 2, stage, parts, backend="gloo")
    assert one == two
    assert set(one) == {REDUCED[stage], "_allgather_base_"}
