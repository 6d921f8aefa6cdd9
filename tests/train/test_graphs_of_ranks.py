"""Graphs of several ranks without a GPU: replays have the bits of usual steps; what a step uses
stays where it is; a capture, with stand-ins for NCCL and streams, has no times, entries, waits."""

import contextlib
import gc
import sys
import time
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cells import slow
from pretend_cuda import pretend_cuda
from recorded import Recorded, Synchronous
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastpar import GPT, AdamW, GPTConfig, Mesh, Parallel, engine_of, graphed, parallelize
from fastpar.comm import transports, watchdog
from fastpar.comm.transports import TorchCollectives
from fastpar.engine import control
from fastpar.engine import parallelize as parallelize_module
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
    step = graphed(lambda x, k: model(x, x, rng_key=k), model, optimizer, cuda_graphs=cuda_graphs)
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
    report = engine_of(model).report
    assert (report.comm_ms is None) == cuda_graphs
    found.append(report.wire_bytes)
    with engine_of(model).gathered():
        return found, [p.detach().clone() for p in model.parameters()]


LAYOUTS = [
    slow(2, 0, 1, torch.float32, {}), (2, 0, 2, torch.bfloat16, {}),
    slow(2, 1, 2, torch.float32, {}), (2, 1, 1, torch.bfloat16, {}),
    slow(2, 2, 1, torch.float32, {}),
    (2, 2, 2, torch.bfloat16, {"accumulate": "full", "grad_accum_steps": 2}),
    (2, 3, 2, torch.float32, {}), slow(2, 3, 1, torch.bfloat16, {}),
    (4, 2, 1, torch.float32, {"shard_size": 2}), slow(4, 3, 2, torch.float32, {"shard_size": 2}),
]  # fmt: skip


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
        deadline = time.monotonic() + 5  # gloo's thread frees what it sent a moment later
        while time.monotonic() < deadline and any(not x.expired() for x, _ in self._made.values()):
            gc.collect()
            time.sleep(0.01)
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
            with torch.no_grad():  # gathers, too
                model(torch.ones(2, 8))
            if i >= 2:
                step._graph._steps = 2  # the next one is checked, too
    second, *others = Seen.regions[-2:]
    assert states[2] == states[3] == states[4]
    assert others == [second]
    assert len(second) > 50
    return [name.split(".")[1] for name, _ in second if name.startswith("c10d")]


REDUCED = {0: "allreduce_", 1: "alltoall_base_", 2: "alltoall_base_", 3: "alltoall_base_"}


@pytest.mark.parametrize(("stage", "parts"), [(0, 1), slow(1, 1), slow(2, 2), (3, 1)])
def test_a_step_uses_the_same_memory_again_and_can_be_captured(stage, parts):
    """Of a replay, all memory is at the addresses of the capture: what was there before it, and
    what it allocates, in the graph's pool. What the host knows is the same before and after."""
    one, two = run_ranks(checked, 2, stage, parts, backend="gloo")
    assert one == two
    assert set(one) == {REDUCED[stage], "_allgather_base_"}


class Device:
    """Stand-ins for streams and events that know what follows what, and whether it is captured."""

    def __init__(self):
        self.capturing, self.work, self.seen = False, 0, []
        outer = self

        class Event:
            def __init__(self, enable_timing=False):
                assert not (enable_timing and outer.capturing), "an event with a time"
                self.after = set()

            def record(self, stream=None):
                self.after = set((stream or outer.current).after)

            def host(self, *others):
                assert not outer.capturing, "the host waits for a captured event"
                return True

            query = synchronize = host

            def elapsed_time(self, end):
                return float(self.host())

        class Stream:
            device = torch.device("cuda", 0)

            def __init__(self, *args, **options):
                self.after = set()

            def record_event(self):
                event = Event()
                event.record(self)
                return event

            def wait_event(self, event):
                self.after |= event.after

            def wait_stream(self, other):
                self.wait_event(other.record_event())

        self.current, self.Event, self.Stream = Stream(), Event, Stream

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, name):
        self.work += 1
        self.current.after.add(self.work)
        self.seen.append((name, self.capturing))


@pytest.fixture
def device(monkeypatch):
    """A GPU with NCCL, as far as the host sees them; this is rank 0 of 2 that do the same."""
    made = Device()
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.on)

    def all_gather(out, x, **options):
        made.launch("all_gather")
        out.view(2, -1).copy_(x.expand(2, -1))

    def reduce_scatter(out, x, **options):
        made.launch("reduce_scatter")

    monkeypatch.setattr(transports, "all_gather", all_gather)
    monkeypatch.setattr(transports, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **options: made.launch("all_reduce"))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(Mesh, "check_same", lambda *args: None)
    monkeypatch.setattr(Mesh, "broadcast_", lambda *args: None)
    monkeypatch.setattr(parallelize_module, "prove_together", lambda mesh: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(control, "_copied", lambda heads: (heads.clone(), made.Event()))
    losses = sys.modules["fastpar.kernels.loss.linear_cross_entropy"]  # torch has it on CUDA alone
    monkeypatch.setattr(losses, "wide_product", lambda a, b, *_: a.float() @ b.float())
    monkeypatch.setattr(losses, "workspace", lambda name, m, n, like: like.new_empty(m, n))
    monkeypatch.setattr(watchdog, "_streams", {})
    dist.init_process_group("fake", rank=0, world_size=2)
    yield made
    dist.destroy_process_group()


def nccl(group, role):
    made = TorchCollectives(group, device="cuda")
    made.device = torch.device("cuda", 0)
    return made


@pytest.mark.parametrize("stage", range(4))
def test_a_capture_has_no_times_entries_and_waits_and_joins_its_streams(device, monkeypatch, stage):
    class Graph:
        def __init__(self, region, warm_up):
            warm_up()
            watchdog._streams.clear()
            device.capturing, before = True, device.work
            region()
            device.capturing = False
            assert set(range(before + 1, device.work + 1)) <= device.current.after
            assert watchdog._streams == {}

        def replay(self):
            device.launch("graph")

    monkeypatch.setattr(graphs, "capture", Graph)
    with pretend_cuda():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
        mesh = Mesh()
        vars(mesh)["device"] = torch.device("cuda", 0)
        layout = Parallel.of(zero_stage=stage, **SEVERAL_BUCKETS)
        model = parallelize(GPT(SMALL).train(), mesh, layout, debug=Debug(collectives=nccl))
        optimizer = AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0)
        loss_of = lambda x, key: model(x, x, rng_key=key)  # noqa: E731
        assert graphed(loss_of, model, optimizer).why.startswith("several ranks need cuda_graphs=T")
        step = graphed(loss_of, model, optimizer, cuda_graphs=True)
        assert step.why == ""
        for i in range(5):
            watchdog._streams.clear()
            device.seen.clear()
            step(torch.arange(32).view(2, 16) % 64, make_key(1, i))
    assert device.seen == [("graph", False)]
    ((entry,),) = watchdog._streams.values()
    assert entry[1] == "replay of a step's graph"


def refuses(stage):
    """What the third step says if a parameter has no gradient, and if weights are kept whole."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    mesh, debug = Mesh(), Debug(collectives=Synchronous)
    parallelize(model, mesh, zero_stage=stage, debug=debug)
    used = [0, 1]
    step = graphed(
        lambda x: sum(model[i](x) for i in used).sum(),
        model,
        AdamW(model.parameters()),
        cuda_graphs=True,
    )
    for _ in range(2):
        step(torch.ones(2, 4))
    with engine_of(model).gathered(), pytest.raises(RuntimeError, match="outside of gathered"):
        step(torch.ones(2, 4))
    used.pop()
    with pytest.raises(RuntimeError, match=r"of every parameter, got none of '1\.(weight|bias)'"):
        step(torch.ones(2, 4))
    with pytest.raises(ValueError, match="expected every step like the first one"):
        step(torch.ones(3, 4))
    return True


@pytest.mark.parametrize("stage", [0, 1])
def test_what_ranks_refuse(captured, stage):
    assert run_ranks(refuses, 2, stage) == [True, True]
