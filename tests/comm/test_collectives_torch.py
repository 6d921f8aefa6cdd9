"""torch.distributed as a transport: its thread, errors that reach every rank, the end of a process.

Sums and sizes are in test_collectives.py.
"""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from fastpar.comm.transports import TorchCollectives
from fastpar.testing import run_ranks


def said(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)


def skips(op, timeout_s):
    """The last rank leaves out one operation; all meet again before they end."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    c = TorchCollectives(group, in_rank_order=True)
    c.barrier()
    x, part = torch.ones(6 * c.world_size), torch.ones(6)
    calls = {
        "all_reduce": lambda: c.all_reduce(x, async_op=True),
        "reduce_scatter": lambda: c.reduce_scatter(part, x, async_op=True),
        "all_gather": lambda: c.all_gather(x, part, async_op=True),
    }
    first = later = None
    start = time.monotonic()
    if c.rank != c.world_size - 1:
        handles = [calls[op](), c.all_gather(x, part, async_op=True)]
        first, later = said(handles[0].wait), said(handles[1].wait)
    seconds = time.monotonic() - start
    dist.barrier()
    return first, later, seconds


@pytest.mark.parametrize(
    ("op", "world_size"),
    [
        ("all_reduce", 2),
        *(
            pytest.param(op, world_size, marks=pytest.mark.slow)
            for op, world_size in [
                ("all_reduce", 3),
                ("reduce_scatter", 2),
                ("reduce_scatter", 3),
                ("all_gather", 2),
                ("all_gather", 3),
            ]
        ),
    ],
)
def test_a_rank_that_skips_is_an_error_on_every_other(op, world_size):
    outcomes = run_ranks(
        skips, world_size, op, 2, backend="gloo", timeout_s=60, return_exceptions=True
    )
    for rank, (first, later, seconds) in enumerate(outcomes[:-1]):
        got = f"got an error on rank {rank} of {world_size} ("
        assert f"TorchCollectives.{op}: expected every rank to take part, {got}" in first
        assert "TorchCollectives.all_gather: expected a working group, got one that failed" in later
        assert seconds < 30


def asynchronous():
    store = dist.distributed_c10d._get_default_store()
    c = TorchCollectives(in_rank_order=True)
    n, results = 1000 * c.world_size + 1, []
    if c.rank:  # until the other has all its calls behind it
        store.wait(["called"])
    xs = [torch.full((n,), float(c.rank + i)) for i in range(5)]
    part, whole = torch.empty(1000), torch.ones(1000 * c.world_size)
    handles = [c.all_reduce(x, mean=True, async_op=True) for x in xs]
    handles.append(c.reduce_scatter(part, whole, async_op=True))
    handles.append(c.all_gather(whole, part, async_op=True))  # of what the one before it made
    if c.rank == 0:
        results.append(any(handle.is_completed() for handle in handles))
        with pytest.raises(
            TimeoutError, match=r"all_reduce: expected to end within timeout_s=0.01"
        ):
            handles[0].wait(0.01)
        store.set("called", "")
    for handle in reversed(handles):
        handle.wait()
    results += [handle.ms > 0 for handle in handles]
    results += [torch.equal(x, torch.full((n,), i + 0.5)) for i, x in enumerate(xs)]
    results.append(bool((whole == 2).all()))
    c.close()
    with pytest.raises(RuntimeError, match=r"all_reduce: expected an open group, got one after cl"):
        c.all_reduce(whole)
    return results


def test_the_caller_never_waits():
    assert run_ranks(asynchronous, 2, backend="gloo") == [[False] + [True] * 13, [True] * 13]


def without_gradients():
    c = TorchCollectives(in_rank_order=True)
    x = torch.ones(5, requires_grad=True)
    with torch.no_grad():
        c.all_reduce(x, mean=True)
    with torch.inference_mode():
        inside = torch.ones(5)
        c.all_reduce(inside, mean=True)
    return x.sum().item() + inside.sum().item()


def test_tensors_of_inference_and_of_autograd():
    assert run_ranks(without_gradients, 2, backend="gloo") == [10.0, 10.0]


def in_the_caller():
    before = threading.active_count()
    c = TorchCollectives(in_rank_order=True)
    x = torch.full((8,), 1.0 + c.rank)
    handle = c.all_reduce(x, async_op=True)
    return x.tolist(), handle.is_completed(), threading.active_count() - before


def test_groups_that_are_bound_to_threads_run_in_the_caller():
    for x, completed, _ in run_ranks(in_the_caller, 2):
        assert (x, completed) == ([3.0] * 8, True)


def of_a_fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    return in_the_caller()[1:]


def test_a_fake_group_needs_no_thread():
    assert run_ranks(of_a_fake_group, 1, backend="gloo", init=False) == [(True, 0)]


EXITS = """
import sys, torch, torch.distributed as dist
from fastpar.comm.transports import ShmCollectives
from fastpar.comm.transports import TorchCollectives
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
c = eval(sys.argv[3])
c.barrier()
if rank == 0:
    c.all_reduce(torch.ones(10), async_op=True)
    sys.exit(3)
sys.stdin.read()  # lives until the test lets go
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "collectives", ["ShmCollectives(timeout_s=100.0, heap_gb=0.01)", "TorchCollectives()"]
)
def test_exit_with_an_operation_under_way(tmp_path, collectives):
    """The interpreter must not join a thread that waits for a peer which will never come; one that
    is inside of torch at its end would abort the process."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXITS, str(rank), str(tmp_path / "store"), collectives],
            env=environment,
            stdin=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].wait(60) == 3
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def begun_and_ended(monkeypatch, same_memory):
    """Three operations of one rank: the order in which they are sent and over."""
    order, over = [], threading.Event()
    group = TorchCollectives(dist.group.WORLD)
    send = dist.broadcast

    def sent(x, **kwargs):
        order.append(f"send {x.numel()}")
        return send(x, **kwargs)

    def finish(work, kind):
        assert over.wait(10)
        work.wait()

    monkeypatch.setattr(dist, "broadcast", sent)
    monkeypatch.setattr(group, "_finish", finish)
    x = torch.ones(3)
    xs = [x, x[:2], x[:1]] if same_memory else [torch.ones(n) for n in (3, 2, 1)]
    if same_memory:
        over.set()
    handles = []
    for t in xs:
        handles.append(group.broadcast(t, 0, async_op=True))
        order.append(f"returned {t.numel()}")
    done_early = handles[-1].is_completed()
    over.set()
    for handle in handles:
        handle.wait()
    monkeypatch.undo()
    return order, done_early


def later_operations():
    with pytest.MonkeyPatch.context() as monkeypatch:
        order, done = begun_and_ended(monkeypatch, same_memory=False)
        assert order == [f"{what} {n}" for n in (3, 2, 1) for what in ("send", "returned")]
        assert not done
    with pytest.MonkeyPatch.context() as monkeypatch:
        order, _ = begun_and_ended(monkeypatch, same_memory=True)
        assert order == [f"{what} {n}" for n in (3, 2, 1) for what in ("send", "returned")]


def test_operations_are_sent_while_earlier_ones_are_under_way():
    """Without, a link is idle while one is added up. Those in the same memory wait for it."""
    run_ranks(later_operations, 2, backend="gloo")


class PassesOn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def profiled(mode):
    """Operations begun under a profiler and what a caller may have switched on in Python."""
    c = TorchCollectives()
    whole, part = torch.ones(64 * c.world_size), torch.ones(64)
    modes = {
        "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
        "function": PassesOn,
    }
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities), modes[mode]():
        for _ in range(200):
            handles = [
                c.all_gather(whole, part, async_op=True),
                c.reduce_scatter(part, whole, mean=True, async_op=True),
                c.all_reduce(whole, mean=True, async_op=True),
            ]
            for handle in handles:
                handle.wait()
    return whole.sum().item() + part.sum().item()


@pytest.mark.parametrize(
    "mode",
    ["hooks", *(pytest.param(m, marks=pytest.mark.slow) for m in ("save_on_cpu", "function"))],
)
def test_a_profiler_and_hooks_of_the_caller(mode):
    """gloo's thread takes Python's lock then, while it holds the lock of the operation."""
    assert run_ranks(profiled, 1, mode, backend="gloo", timeout_s=60) == [128.0]
