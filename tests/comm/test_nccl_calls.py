"""What is asked of NCCL: the calls of torch.distributed, noted by a stand-in for it."""

import contextlib
import runpy
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastpar.axes.tensor.functional import TensorParallel, column_linear_fwd, row_linear_fwd
from fastpar.comm import mesh, transports, watchdog
from fastpar.comm.mesh import initialize
from fastpar.comm.transports import TorchCollectives

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


EVENTS = mock.Mock(name="torch.cuda.Event")


def stream(*_, priority=0):
    return mock.Mock(device="cuda", priority=priority)


@pytest.fixture
def nccl(monkeypatch):
    """(makes collectives of rank 1 of 4, the list of calls: name, options, tensors)."""
    calls = []

    def note(name):
        def call(*tensors, group=None, **options):
            calls.append((name, options, tensors))
            return mock.Mock() if name in ("isend", "irecv") else None

        return call

    for name in ("all_reduce", "all_to_all_single", "broadcast", "isend", "irecv"):
        monkeypatch.setattr(dist, name, note(name))
    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(transports, name, note(name))
    for name, value in {"Stream": stream, "Event": EVENTS, "current_stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dist.init_process_group("fake", rank=1, world_size=4)

    def make(backend="cuda:nccl", **options):
        monkeypatch.setattr(dist, "get_backend_config", lambda _: backend)
        c = TorchCollectives(device="cuda", **options)
        c.device = torch.device("cpu")  # where the test's tensors are
        EVENTS.reset_mock()
        return c

    yield make, calls
    dist.destroy_process_group()


def test_each_operation_is_one_call_without_handle_events_or_copy(nccl):
    make, calls = nccl
    c, x = make(), torch.ones(8)
    out, whole, parts = torch.zeros(2), torch.zeros(32), torch.zeros(8)
    for call, name, options, tensors in [
        (lambda: c.all_reduce(x), "all_reduce", {"op": SUM, "async_op": False}, [x]),
        (lambda: c.all_reduce(x, mean=True), "all_reduce", {"op": AVG, "async_op": False}, [x]),
        (lambda: c.reduce_scatter(out, x), "reduce_scatter", {"op": SUM}, [out, x]),
        (lambda: c.reduce_scatter(out, x, mean=True), "reduce_scatter", {"op": AVG}, [out, x]),
        (lambda: c.reduce_scatter(x[2:4], x), "reduce_scatter", {"op": SUM}, [x[2:4], x]),
        (lambda: c.all_gather(whole, x), "all_gather", {"async_op": False}, [whole, x]),
        (lambda: c.broadcast(x, 2), "broadcast", {"group_src": 2, "async_op": False}, [x]),
        (lambda: c.send(x, 3, tag=7), "isend", {"group_dst": 3, "tag": 7}, [x]),
        (lambda: c.recv(x, 0, tag=7), "irecv", {"group_src": 0, "tag": 7}, [x]),
        (lambda: c.all_to_all(parts, x), "all_to_all_single", {"async_op": False}, [parts, x]),
    ]:
        assert call() is None
        ((asked, given, used),) = calls
        assert (asked, given) == (name, options)
        assert [t.data_ptr() for t in used if torch.is_tensor(t)] == [t.data_ptr() for t in tensors]
        calls.clear()
    assert EVENTS.call_count == 0
    assert torch.equal(x, torch.ones(8))  # nothing is divided: the mean is NCCL's


def test_a_handle_has_two_events_and_a_stream_of_high_priority(nccl, monkeypatch):
    make, calls = nccl
    streams = []

    @contextlib.contextmanager
    def within(stream):
        streams.append((stream.priority, len(calls)))
        yield
        streams.append((stream.priority, len(calls)))

    monkeypatch.setattr(torch.cuda, "stream", within)
    make().reduce_scatter(torch.zeros(2), torch.ones(8), mean=True, async_op=True).wait()
    assert [(name, options) for name, options, _ in calls] == [("reduce_scatter", {"op": AVG})]
    assert streams == [(-1, 0), (-1, 1)]  # the call is made inside
    assert EVENTS.call_count == 2


def test_the_default_group_has_gloo_for_objects_and_those_beside_it_nccl_alone(nccl, monkeypatch):
    """gloo would connect all ranks of each group once more, and torch hands it NCCL's options."""
    made = []

    def new_groups(ranks, **options):
        made.append((ranks, options.pop("backend")))
        assert list(options) == ["timeout"]
        return dist.group.WORLD, []

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", new_groups)
    for config, device, expected in [
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("gloo", "cuda", None),  # two ranks on one GPU
        ("gloo", "cpu", None),
    ]:
        monkeypatch.setattr(dist, "get_backend_config", lambda _=None, config=config: config)
        monkeypatch.setattr(mesh.Mesh, "_connect", lambda self, group, axes: group)
        m = mesh.Mesh(tp=2, device="cpu")
        vars(m)["device"] = torch.device(device)
        made.clear()
        m.new_group("tp")
        assert made == [([[0, 1], [2, 3]], expected)]
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: made.append((*a, k)))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    gpu, cpu = torch.device("cuda", 3), torch.device("cpu")
    for device, backend, bound in [(gpu, "cpu:gloo,cuda:nccl", gpu), (cpu, "gloo", None)]:
        initialize(0, 2, device, 30.0)
        named, options = made.pop()
        assert (named, options["device_id"]) == (backend, bound)


def test_16_bits_other_backends_and_deterministic_sums(nccl):
    """16 bits into fp32 are summed in place; without averages a sum is divided; else the tree."""
    make, calls = nccl
    x, out = torch.full((8,), 3.0, dtype=torch.bfloat16), torch.zeros(2)
    make().reduce_scatter(out, x, mean=True)
    ((name, options, (part, whole)),) = calls
    assert (name, options, part.dtype) == ("reduce_scatter", {"op": AVG}, torch.bfloat16)
    assert (part.data_ptr(), whole.data_ptr()) == (x[2:4].data_ptr(), x.data_ptr())
    assert out.tolist() == [3.0, 3.0]
    calls.clear()
    c, x, out = make("cuda:other"), torch.full((8,), 4.0), torch.full((2,), 8.0)
    c.all_reduce(x, mean=True)
    c.reduce_scatter(out, x, mean=True)
    assert [options["op"] for _, options, _ in calls] == [SUM, SUM]
    assert (x.unique().tolist(), out.tolist()) == ([1.0], [2.0, 2.0])
    calls.clear()
    c, x = make(in_rank_order=True), torch.ones(8)
    c.reduce_scatter(torch.zeros(2), x)
    c.all_reduce(x)
    names = [name for name, _, _ in calls]
    assert names == ["all_to_all_single", "all_to_all_single", "all_gather"]


def test_a_watchdog_sees_what_is_synchronous(nccl, monkeypatch):
    make, _ = nccl
    monkeypatch.setattr(watchdog, "_streams", {})
    make().all_reduce(torch.ones(3))
    ((entry,),) = watchdog._streams.values()
    assert entry[1] == "all_reduce"
    assert EVENTS.call_count == 2


@pytest.mark.parametrize("has", ["new", "old"])
def test_both_names_of_torch(has, monkeypatch):
    """torch 2.13 warns about the older name; older versions have no other."""
    for home, name, new, old in (
        (transports, "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
        (mesh, "all_gather", "all_gather_single", "all_gather_into_tensor"),
    ):
        monkeypatch.setattr(dist, old, "old", raising=False)
        monkeypatch.setattr(dist, new, "new", raising=False)
        if has == "old":
            monkeypatch.delattr(dist, new)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = runpy.run_path(home.__file__)
        assert again[name] == has


def test_tensor_parallel_waits_for_nothing_by_handle(nccl):
    """Layers call about ten collectives each: a handle, two events and two stream hops cost."""
    make, calls = nccl
    tp, x = TensorParallel(make()), torch.ones(8, 3)
    tp.all_reduce(x)
    tp.all_gather(x, 0)
    tp.reduce_scatter(x, 0)
    column_linear_fwd(tp, x, torch.ones(2, 3), None)
    row_linear_fwd(tp, x, torch.ones(2, 3), None)
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    assert [name for name, _, _ in calls] == names
    assert EVENTS.call_count == 0
