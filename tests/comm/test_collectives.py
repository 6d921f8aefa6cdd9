"""Every transport: the same operations, sums and refusals; how operations overlap."""

import functools
import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cells import slow
from torch.overrides import TorchFunctionMode

from fastpar.comm import transports
from fastpar.comm.collectives import SUMMABLE, Begun, TaskThread
from fastpar.comm.transports import ShmCollectives, TorchCollectives, make_collectives
from fastpar.testing import run_ranks

TRANSPORTS = {
    "shm": functools.partial(ShmCollectives, timeout_s=30.0, chunk_kb=16, heap_gb=0.05),
    "torch": functools.partial(TorchCollectives, in_rank_order=True),
    "own order": TorchCollectives,
}


def values(rank, n, dtype, *, whole=False):
    """whole: small numbers, of which every order has the same sum."""
    generator = torch.Generator().manual_seed(100 + rank)
    if whole or dtype == torch.int64:
        most = 50 if whole else 2**40
        return torch.randint(-most, most, (n,), generator=generator).to(dtype)
    # Sums of what has 24 bits would be exact in fp64.
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return (torch.randn(n, generator=generator, dtype=drawn) * 10.0 ** (rank % 3)).to(dtype)


def tree(x):
    """Neighbours are added, then the sums' neighbours."""
    while len(x) > 1:
        x = [a + b for a, b in zip(x[::2], x[1::2])] + x[len(x) // 2 * 2 :]
    return x[0]


def wrong_operations(c, n, dtype, async_op):
    """Names of the operations whose results are not, to the bit, the tree's over the ranks: 16-bit
    types summed in fp32, rounded once. Tensors of the heap and others, in place and apart."""
    w, me, mean, wrong = c.world_size, c.rank, dtype != torch.int64, []
    of = functools.partial(values, dtype=dtype, whole=not getattr(c, "in_rank_order", True))
    acc = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    everyone = [of(r, n * w) for r in range(w)]
    total = tree([x.to(acc) for x in everyone])
    total = total / w if mean else total
    whole, part = total.to(dtype), total.to(dtype).view(w, -1)[me]

    def check(name, found, expected, *calls):
        for op, *args in calls:
            options = args.pop() if isinstance(args[-1], dict) else {}
            handle = getattr(c, op)(*args, async_op=async_op, **options)
            assert (handle is not None) == async_op
            if async_op:
                handle.wait()
                assert handle.is_completed()
        if not torch.equal(found, expected):
            wrong.append(f"{name} {async_op=} {dtype} {n}")

    outside = lambda n, d: torch.empty(n, dtype=d)  # noqa: E731
    some = lambda n, d: [c.empty(n, d), outside(n, d)][me % 2]  # noqa: E731
    for where, make in {"": outside, " of empty()": c.empty, " of empty() of some": some}.items():
        x, averaged = make(n * w, dtype).copy_(everyone[me]), {"mean": mean}
        check(f"all_reduce{where}", x, whole, ("all_reduce", x, averaged))
        for to in {dtype, acc}:
            x, out = make(n * w, dtype).copy_(everyone[me]), make(n, to)
            call = "reduce_scatter", out, x, averaged
            check(f"reduce_scatter{where}", out, total.view(w, -1)[me].to(to), call)
        x = make(n * w, dtype).copy_(everyone[me])
        own = x.view(w, -1)[me]
        check(f"reduce_scatter in place{where}", own, part, ("reduce_scatter", own, x, averaged))
        check(f"all_gather in place{where}", x, whole, ("all_gather", x, own))
        # Ranks may differ in being in place, even where the places are the same numbers.
        full, shard = make(n * w, dtype), make(n, dtype).copy_(part)
        mine = full.view(w, -1)[me].copy_(part) if me else shard
        check(f"all_gather, some in place{where}", full, whole, ("all_gather", full, mine))
        for src in {0, w - 1}:
            x = make(n * w, dtype).copy_(everyone[me])
            check(f"broadcast{where}", x, everyone[src], ("broadcast", x, src))
    out = torch.empty(n * w, dtype=dtype)
    sent = torch.cat([x.view(w, -1)[me] for x in everyone])
    check("all_to_all", out, sent, ("all_to_all", out, everyone[me]))
    sizes = [[(src + 2 * to) % 3 * n for to in range(w)] for src in range(w)]
    given = [of(r, sum(sizes[r])).split(sizes[r]) for r in range(w)]
    sent = [parts[me] for parts in given]
    out = torch.empty(sum(map(len, sent)), dtype=dtype)
    call = "all_to_all", out, torch.cat(given[me]), list(map(len, sent)), sizes[me]
    check("unequal all_to_all", out, torch.cat(sent), call)
    return wrong


def around(c):
    """Each rank's message to the next one, begun in either order."""
    n, wrong = c.world_size, []
    for async_op in (False, True):
        x, out = torch.full((4,), float(c.rank)), torch.empty(4)
        messages = [("send", x, (c.rank + 1) % n), ("recv", out, (c.rank - 1) % n)]
        messages = messages[:: 1 if async_op or not c.rank else -1]
        for handle in [getattr(c, op)(*to, tag=5, async_op=async_op) for op, *to in messages]:
            if async_op:
                handle.wait()
        wrong += [] if bool((out == (c.rank - 1) % n).all()) else [f"send and recv {async_op=}"]
    return wrong


def every_operation(kind, cells):
    c = TRANSPORTS[kind]()
    wrong = []
    for dtype, n in cells:
        for async_op in (False, True):
            wrong += wrong_operations(c, n, dtype, async_op)
    wrong += around(c) if c.world_size > 1 else []
    x = torch.ones(5, requires_grad=True)
    with torch.no_grad():
        c.all_reduce(x, mean=True)
    with torch.inference_mode():
        y = torch.ones(5)
        c.all_reduce(y, mean=True)
    wrong += [] if x.tolist() == y.tolist() == [1.0] * 5 else ["of autograd, of inference"]
    c.barrier()
    c.close()
    return wrong


SIZES = (0, 1, 127, 10_007)
ALL = [(dtype, n) for dtype in SUMMABLE for n in SIZES]
SOME = [(torch.bfloat16, n) for n in SIZES]
SOME += [(torch.float32, 1), (torch.int64, 127), (torch.float64, 127)]


@pytest.mark.parametrize(
    ("kind", "backend", "ranks", "cells"),
    [
        *(("shm", "threads", ranks, SOME) for ranks in (1, 2, 4, 7)),
        ("shm", "threads", 3, ALL),
        *(slow("shm", "threads", ranks, ALL) for ranks in (2, 4, 7)),
        *(("torch", "threads", ranks, SOME) for ranks in (2, 5, 8)),
        ("torch", "gloo", 3, [(dtype, 1001) for dtype in SUMMABLE]),
        ("own order", "gloo", 3, [(torch.float32, 1001)]),
        slow("shm", "gloo", 4, [(torch.float32, 60_000)]),  # many chunks
        slow("torch", "gloo", 4, [(torch.float32, 60_000)]),
    ],
    ids=lambda x: "all" if x is ALL else "some" if isinstance(x, list) else None,
)
def test_every_operation(kind, backend, ranks, cells):
    found = run_ranks(every_operation, ranks, kind, cells, backend=backend, timeout_s=90)
    assert found == [[]] * ranks


def test_ranks_that_hold_trees_of_their_own():
    """1, 2, 4 and 8 ranks give the same bits where each holds as many values."""

    def rank():
        c = TRANSPORTS["shm"]()
        share = 8 // c.world_size
        x = tree([values(c.rank * share + i, 5003, torch.float32) for i in range(share)])
        c.all_reduce(x)
        return x

    sums = [x for world_size in (1, 2, 4, 8) for x in run_ranks(rank, world_size)]
    assert all(torch.equal(x, sums[0]) for x in sums)
    in_turn = sum(values(r, 5003, torch.float32) for r in range(8))
    assert not torch.equal(in_turn, sums[0])  # the order shows in these values


X, E = torch.ones(6), torch.empty
REFUSED = [  # (call, the start of what is said)
    (lambda c: c.all_reduce(X.view(2, 3).T), "all_reduce: expected contiguous tensors on cpu, got"),
    (lambda c: c.all_reduce(X.bool()), "all_reduce: expected one dtype of torch.float32"),
    (lambda c: c.all_reduce(X.long(), mean=True), "all_reduce: expected a floating-point dtype"),
    (lambda c: c.reduce_scatter(E(2), X), "reduce_scatter: expected 2 slices of 2 elements, got 6"),
    (lambda c: c.all_gather(E(5), X), "all_gather: expected 2 slices of 6 elements, got 5"),
    (lambda c: c.reduce_scatter(E(3), X.double()), "reduce_scatter: expected one dtype"),
    (lambda c: c.reduce_scatter(E(3).bfloat16(), X), "reduce_scatter: expected one dtype"),
    (
        lambda c: c.reduce_scatter(X[:3], X.view(torch.bfloat16)[:6]),
        "reduce_scatter: expected out and x in different memory if it is wider",
    ),
    (lambda c: c.broadcast(X, 2), "broadcast: expected 0 <= src < 2, got src=2"),
    (lambda c: c.all_to_all(E(6), E(7)), "all_to_all: expected sizes of 2 slices that add up to 7"),
    (lambda c: c.all_to_all(E(6), X, [3, 3], [1, 2]), "all_to_all: expected sizes of 2 slices"),
    (lambda c: c.all_to_all(E(6), X, [2, 4], [4, 2]), "all_to_all: expected equal out_sizes and"),
    (lambda c: c.all_to_all(E(6), X.double()), "all_to_all: expected one dtype"),
    (lambda c: c.all_to_all(X, X), "all_to_all: expected out and x in diff"),
    (lambda c: c.send(X, c.rank), "send: expected 0 <= dst < 2, got dst="),
    (lambda c: c.recv(X, -1), "recv: expected 0 <= src < 2, got src=-1"),
    (lambda c: c.send(X.view(2, 3).T, 1 - c.rank), "send: expected contiguous tensors on cpu"),
]


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_bad_calls(kind):
    def rank():
        c = TRANSPORTS[kind]()
        for call, words in REFUSED:
            with pytest.raises((ValueError, RuntimeError), match="^" + re.escape(words)):
                call(c)
        c.barrier()  # none of these reached the other rank

    run_ranks(rank, 2)


def chosen(cells):
    """Of cells (transport, in_rank_order, apart): what was taken, why, what was warned of; an
    error's words. apart: each rank believes that it is on a host of its own."""
    found, place = [], transports._place()
    for transport, ordered, apart in cells:
        here = (f"host {dist.get_rank()}", *place[1:]) if apart else place
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if apart:
                patch.setattr(transports, "_place", lambda here=here: here)
            try:
                c = make_collectives(transport=transport, timeout_s=30.0, in_rank_order=ordered)
            except RuntimeError as error:
                found.append(str(error))
                continue
        x = torch.ones(4)
        c.all_reduce(x)
        assert x.tolist() == [2.0] * 4
        assert ordered == getattr(c, "in_rank_order", ordered)
        found.append((c.transport, c.why, "; ".join(str(w.message) for w in seen)))
    return found


def test_the_choice_of_a_transport_is_visible():
    cells = [("auto", False, False), ("torch", False, False), ("torch", True, False)]
    cells += [("auto", True, True), ("shm", False, True)]
    for shared, *asked, alone, forced in run_ranks(chosen, 2, cells, backend="gloo"):
        assert shared == ("shm", "all ranks are on this host", "")
        assert asked == [("gloo", "requested", "")] * 2
        assert alone[0] == "gloo"
        assert "rank 1 is on another host" in alone[1]
        assert "using gloo, not shared memory: rank 1 is on another host" in alone[2]
        assert "the ranks cannot share memory: rank 1 is" in forced
    with pytest.raises(ValueError, match="expected auto, shm or torch, got transport=tcp"):
        make_collectives(transport="tcp")
    with pytest.raises(ValueError, match="expected CPU tensors for transport=shm, got device=cuda"):
        make_collectives(transport="shm", device="cuda")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "world_size"), [("all_reduce", 2), slow("reduce_scatter", 3), slow("all_gather", 3)]
)
def test_a_rank_that_skips_is_an_error_on_every_other(op, world_size):
    options = {"timeout_s": 60, "return_exceptions": True}
    outcomes = run_ranks(skips, world_size, op, 2, backend="gloo", **options)
    for rank, (first, later, seconds) in enumerate(outcomes[:-1]):
        assert f"TorchCollectives.{op}: failed on rank {rank} of {world_size} (" in first
        assert f"TorchCollectives.all_gather: this group failed before on rank {rank} (" in later
        assert seconds < 30


def asynchronous(kind):
    """Rank 1 begins when rank 0 has all its calls behind it."""
    store = dist.distributed_c10d._get_default_store()
    c = TRANSPORTS[kind]()
    if c.rank:
        store.wait(["called"])
    dropped = torch.ones(50_000)
    alive, first = weakref.ref(dropped), c.all_reduce(dropped, async_op=True)
    xs = [torch.full((1001,), float(c.rank + i)) for i in range(5)]
    part, whole = torch.empty(1000), torch.ones(1000 * c.world_size)
    handles = [first, *(c.all_reduce(x, mean=True, async_op=True) for x in xs)]
    handles.append(c.reduce_scatter(part, whole, async_op=True))
    handles.append(c.all_gather(whole, part, async_op=True))  # of what the one before it made
    del dropped
    if c.rank == 0:
        assert not any(handle.is_completed() for handle in handles)
        with pytest.raises(TimeoutError, match=r"all_reduce: not finished within timeout_s=0.01"):
            first.wait(0.01)
        assert first.ms is None
        gc.collect()
        assert alive() is not None  # the operation under way writes to it
        store.set("called", "")
    for handle in (*reversed(handles), first):  # one of them again
        handle.wait()
    assert all(handle.is_completed() and handle.ms > 0 for handle in handles)
    assert [x.unique().tolist() for x in xs] == [[i + 0.5] for i in range(5)]
    assert (whole == 2).all()
    c.close()
    with pytest.raises(RuntimeError, match=r"all_reduce: the group was closed; make"):
        c.all_reduce(whole)


@pytest.mark.parametrize(("kind", "backend"), [("shm", "threads"), ("torch", "gloo")])
def test_the_caller_never_waits(kind, backend):
    run_ranks(asynchronous, 2, kind, backend=backend)


EXITS = """
import sys, torch, torch.distributed as dist
from fastpar.comm.transports import ShmCollectives, TorchCollectives
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
    "made", ["ShmCollectives(timeout_s=100.0, heap_gb=0.01)", "TorchCollectives()"]
)
def test_exit_with_an_operation_under_way(tmp_path, made):
    """The interpreter must not join a thread that waits for a peer which will never come; one that
    is inside of torch at its end would abort the process."""
    how = {"env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, "stdin": subprocess.PIPE}
    command = [sys.executable, "-c", EXITS]
    args = [[*command, str(rank), str(tmp_path / "store"), made] for rank in range(2)]
    first, other = (subprocess.Popen(each, **how) for each in args)
    try:
        assert first.wait(60) == 3
        assert other.poll() is None
    finally:
        for rank in (first, other):
            rank.kill()
            rank.communicate()


def sent_meanwhile():
    """Three operations of one rank: each is sent while none before it is over."""
    order, over = [], threading.Event()
    group, send = TorchCollectives(dist.group.WORLD), dist.broadcast

    def sent(x, **kwargs):
        order.append(f"send {x.numel()}")
        return send(x, **kwargs)

    def finish(work, kind):
        assert over.wait(10)
        work.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", sent)
        patch.setattr(group, "_finish", finish)
        handles = []
        for n in (3, 2, 1):
            handles.append(group.broadcast(torch.ones(n), 0, async_op=True))
            order.append(f"returned {n}")
        assert not handles[-1].is_completed()
        over.set()
        for handle in handles:
            handle.wait()
    return order


@pytest.mark.slow
def test_operations_are_sent_while_earlier_ones_are_under_way():
    """Without, a link is idle while one is added up."""
    expected = [f"{what} {n}" for n in (3, 2, 1) for what in ("send", "returned")]
    assert run_ranks(sent_meanwhile, 2, backend="gloo") == [expected] * 2


class PassesOn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def profiled():
    """Operations begun under a profiler and what a caller may have switched on in Python."""
    c = TorchCollectives()
    whole, part = torch.ones(64 * c.world_size), torch.ones(64)
    activities = [torch.profiler.ProfilerActivity.CPU]
    for mode in (torch.autograd.graph.save_on_cpu(), PassesOn()):
        with torch.profiler.profile(activities=activities), mode:
            for _ in range(100):
                handles = [
                    c.all_gather(whole, part, async_op=True),
                    c.reduce_scatter(part, whole, mean=True, async_op=True),
                    c.all_reduce(whole, mean=True, async_op=True),
                ]
                for handle in handles:
                    handle.wait()
    return whole.sum().item() + part.sum().item()


@pytest.mark.slow
def test_a_profiler_and_hooks_of_the_caller():
    """gloo's thread takes Python's lock then, while it holds the lock of the operation."""
    assert run_ranks(profiled, 1, backend="gloo", timeout_s=60) == [128.0]


def test_an_operation_lets_go_of_its_tensors_before_anybody_goes_on():
    """Who made them frees them then: frees in another thread are not seen by StepMemory. Both of
    what it is given to keep and of what its first half is called with."""
    kept, given = torch.zeros(3), torch.zeros(3)
    alive, found, future = [weakref.ref(kept), weakref.ref(given)], [], Future()
    future.add_done_callback(lambda _: found.extend(ref() is None for ref in alive))
    begun = Begun((future, lambda x: lambda: x.numel() and None, (given,), (kept,)))
    del kept, given
    begun.end(0.0)
    assert found == [True, True]


def test_the_thread_runs_on_the_callers_gpu(monkeypatch):
    """Otherwise a look at an event opens a context on GPU 0 in every rank."""
    chosen, future = [], Future()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda i: chosen.append((i, threading.get_ident()))
    )
    thread = TaskThread()
    thread.put((future, lambda: None, (), ()))
    future.result(10)
    assert chosen == [(5, thread.thread.ident)]
    thread.stop()
