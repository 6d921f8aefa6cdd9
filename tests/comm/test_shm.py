"""Shared memory: order, failures, dead ranks, and that nothing is left behind."""

import contextlib
import functools
import importlib
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from cells import slow, sweep

from fastpar.comm import transports
from fastpar.comm.transports import ShmCollectives
from fastpar.testing import run_ranks


def make(**options):
    return ShmCollectives(**{"timeout_s": 20.0, "chunk_kb": 16, "heap_gb": 0.01, **options})


def rounds(seed):
    c = make()
    generator = torch.Generator().manual_seed(seed)
    wrong = 0
    for _ in range(60):
        n = int(torch.randint(1, 60_000, (1,), generator=generator)) * c.world_size
        if torch.rand((), generator=generator) < 0.3 * c.rank:
            time.sleep(0.002)  # ranks drift apart
        x = torch.full((n,), float(c.rank + 1))
        c.all_reduce(x)
        wrong += not bool((x == sum(range(1, c.world_size + 1))).all())
        full = torch.empty(n)
        c.all_gather(full, torch.full((n // c.world_size,), float(c.rank)))
        wrong += not torch.equal(full.view(c.world_size, -1).T[0], torch.arange(c.world_size) * 1.0)
    return wrong


def test_many_rounds():
    assert run_ranks(rounds, 3, 5) == [0] * 3


UNLIKE = [  # the call of each rank, and what is named
    (lambda c: c.all_reduce(torch.ones(10 + c.rank)), "all_reduce of 11 elements"),
    (lambda c: c.all_reduce(torch.ones(10, dtype=(torch.float32, torch.float64)[c.rank])),
     "(float64, option 0, tag 0) on rank 1"),
    (lambda c: c.broadcast(torch.ones(10, dtype=(torch.float32, torch.int32)[c.rank]), 0),
     "(int32, option 0, tag 0) on rank 1"),
    (lambda c: c.all_gather(torch.empty(20), torch.ones(10), tag=7 + c.rank),
     "all_gather of 10 elements (float32, option 0, tag 8) on rank 1"),
    (lambda c: c.barrier(tag=-c.rank), "tag -1) on rank 1"),
    (lambda c: c.all_reduce(torch.ones(10)) if c.rank else c.barrier(), "barrier of 0"),
]  # fmt: skip


@sweep(["call", "named"], UNLIKE)
def test_unlike_calls_are_errors_on_every_rank(call, named):
    def rank():
        c, said = make(), []
        for act in (call, lambda c: c.barrier()):
            with pytest.raises(RuntimeError) as error:
                act(c)
            said.append(str(error.value))
        return said

    outcomes = run_ranks(rank, 2)
    for first, later in outcomes:
        assert "the same call on every rank, got " in first or "its own message" in first
        assert "barrier: the group has failed before (" in later
    assert any(named in first for first, _ in outcomes)


def silent():
    c = make(timeout_s=0.3)
    words = r"barrier: rank 1 did not arrive within timeout_s=0.3; restart the run"
    if c.rank == 0:
        with pytest.raises(RuntimeError, match=words):
            c.barrier()
    else:
        time.sleep(0.8)


def test_a_silent_rank():
    run_ranks(silent, 2)


def blocks(process="self"):
    """Inodes of the shared memory that a process has mapped."""
    with contextlib.suppress(OSError):  # it is gone, or another user's
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:fastpar" in line}
    return set()


def dies(victim, large):
    before, c = blocks(), make(chunk_kb=16)
    c.barrier()
    c.empty(1 << 18, torch.float32).fill_(1.0)
    x = torch.ones(large)
    if c.rank == victim:
        handle = c.all_reduce(x, async_op=True)
        time.sleep(0.02)
        del handle
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            c.all_reduce(x)
    except RuntimeError as error:
        return str(error), time.monotonic() - start, blocks() - before


@pytest.mark.parametrize("victim", [0, slow(1)])
def test_a_killed_rank_is_an_error_on_the_others(victim):
    """Also in the middle of an operation of many rounds, and well within the time-out of 20 s.
    Of their memory, which has no name, nothing stays."""
    options = {"backend": "gloo", "timeout_s": 60, "return_exceptions": True}
    outcomes = run_ranks(dies, 3, victim, 4_000_000, **options)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, Exception)
            continue
        message, seconds, mapped = outcome
        assert f": the process of rank {victim} ended; restart the run" in message
        assert seconds < 10
        assert mapped
        assert not any(blocks(p) & mapped for p in os.listdir("/proc") if p.isdigit())


def who_may_open_it():
    made = []
    real = os.memfd_create
    os.memfd_create = lambda *args: made.append(real(*args)) or os.dup(made[0])
    try:
        make()
    finally:
        os.memfd_create = real
    link = os.readlink(f"/proc/self/fd/{made[0]}")
    mode = stat.S_IMODE(os.fstat(made[0]).st_mode)
    with pytest.raises(PermissionError):
        os.ftruncate(made[0], 0)
    return link, mode


def test_the_block_has_no_name_and_belongs_to_its_user():
    assert run_ranks(who_may_open_it, 1) == [("/memfd:fastpar (deleted)", 0o600)]


def attach_another(rank, fd, first, size, *, token, attach=transports._attach):
    """Rank 1 finds another file than rank 0 meant, or none."""
    place, pid, theirs, right, reason = first
    theirs = 999 if rank and not token else theirs
    return attach(rank, fd, (place, pid, theirs, bytes(16).hex() if token else right, reason), size)


def refuse(*args):
    raise OSError("no such call")


def without(cells):
    """What a rank says where one part of the system does something else."""
    said = []
    for module, name, value in cells:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.import_module(module), name, value)
            with pytest.raises(transports.ShmUnavailable) as error:
                make()
            said.append(str(error.value))
    return said


def test_systems_that_cannot_share_memory():
    assert run_ranks(without, 1, [("os", "memfd_create", refuse)]) == [
        ["rank 0 cannot make shared memory (no such call)"]
    ]
    name, of = transports.__name__, functools.partial
    cells = {
        "is not rank 0": (name, "_attach", of(attach_another, token=True)),
        "rank 1 cannot open the memory of": (name, "_attach", of(attach_another, token=False)),
        "cannot watch process": ("os", "pidfd_open", refuse),
    }
    for said in run_ranks(without, 2, list(cells.values()), backend="gloo"):
        assert all(words in one for words, one in zip(cells, said, strict=True)), said


def closes_early(closed):
    c = make()
    c.barrier()
    if c.rank == 1:
        assert closed.wait(30)
        with pytest.raises(RuntimeError, match=r"all_reduce: rank 0 closed its group;"):
            c.all_reduce(torch.ones(3_000_000))
        return
    handle = c.all_reduce(torch.ones(3_000_000), async_op=True)
    start = time.monotonic()
    c.close()
    c.close()
    closed.set()
    # Under way, or not begun yet.
    with pytest.raises(RuntimeError, match=r"the group was closed( during the operation)?; "):
        handle.wait()
    with pytest.raises(RuntimeError, match=r"barrier: the group was closed; make"):
        c.barrier()
    assert time.monotonic() - start < 5


def test_close_with_an_operation_under_way():
    run_ranks(closes_early, 2, threading.Event())


def forks():
    c = make()
    c.barrier()
    child = os.fork() if c.rank == 0 else None
    if child == 0:
        try:
            c.barrier()
        except RuntimeError as error:
            c.close()  # the parent's group stays as it was
            os._exit(5 if "is a fork of" in str(error) else 6)
        os._exit(7)
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    x = torch.ones(10)
    c.all_reduce(x)
    return x[0].item()


def test_a_fork_is_refused_and_harms_nobody():
    assert run_ranks(forks, 2, backend="gloo") == [2.0, 2.0]


def outlives():
    c = make()
    x = c.empty(1000, torch.float32).fill_(float(c.rank))
    c.barrier()
    c.close()
    del c
    return x.sum().item()


def test_a_tensor_outlives_its_group():
    assert run_ranks(outlives, 2) == [0.0, 1000.0]


def test_bad_input():
    from fastpar.kernels import _C

    with pytest.raises(ValueError, match=r"expected whole pages of 4096 bytes, got chunk_bytes=5"):
        _C.ShmGroup(0, 0, 1, 5, 0, [-1], 1.0)
    with pytest.raises(ValueError, match=r"expected 2 descriptors, got 1"):
        _C.ShmGroup(0, 0, 2, 4096, 0, [-1], 1.0)
    sizes = [2, 1], [2, 1]  # rank 0 sends 1 and rank 1 expects 2
    act = lambda: make().all_to_all(torch.empty(3), torch.ones(3), *sizes)  # noqa: E731
    for error in run_ranks(act, 2, return_exceptions=True):
        assert "rank 1 sends 2 elements to rank 0, whose out_sizes says 1; make" in str(error)
    message = r"ShmCollectives.empty: 4194304 bytes in all exceed the heap of 1073152;"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(lambda: make(heap_gb=0.001).empty(1 << 20, torch.float32), 2)
