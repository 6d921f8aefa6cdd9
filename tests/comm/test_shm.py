"""Shared memory: order, failures, dead ranks, and that nothing is left behind."""

import gc
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

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
        wrong += not torch.equal(
            full.view(c.world_size, -1)[:, 0], torch.arange(c.world_size) * 1.0
        )
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_rounds(world_size):
    assert run_ranks(rounds, world_size, 5) == [0] * world_size


def asynchronous():
    c, other = make(), make()
    xs = [torch.full((20_000,), float(i + c.rank)) for i in range(12)]
    handles = [(c if i % 2 else other).all_reduce(x, async_op=True) for i, x in enumerate(xs)]
    for handle in reversed(handles):
        handle.wait()
    assert all(handle.is_completed() for handle in handles)
    handles[0].wait()  # again
    return [x[-1].item() for x in xs]


def test_many_in_flight_and_two_groups_at_once():
    assert run_ranks(asynchronous, 3) == [[3.0 * i + 3 for i in range(12)]] * 3


def unlike(kind):
    c = make()
    try:
        if kind == "sizes":
            c.all_reduce(torch.ones(10 + c.rank))
        elif kind == "dtypes":
            c.all_reduce(torch.ones(10, dtype=torch.float64 if c.rank else torch.float32))
        elif kind == "moved dtypes":  # of one size
            x = torch.ones(10, dtype=torch.int32 if c.rank else torch.float32)
            c.broadcast(x, 0)
        elif kind == "tags":
            c.all_gather(torch.empty(20), torch.ones(10), tag=7 + c.rank)
        elif kind == "tags of barriers":
            c.barrier(tag=-c.rank)
        else:
            c.all_reduce(torch.ones(10)) if c.rank else c.barrier()
    except RuntimeError as error:
        first = str(error)
    try:
        c.barrier()
    except RuntimeError as error:
        return first, str(error)


@pytest.mark.parametrize(
    "kind", ["sizes", "dtypes", "moved dtypes", "calls", "tags", "tags of barriers"]
)
def test_unlike_calls_are_errors_on_every_rank(kind):
    outcomes = run_ranks(unlike, 2, kind)
    for first, later in outcomes:
        assert "expected the same call on every rank, got " in first or "its own message" in first
        assert "barrier: expected a working group, got one that failed before" in later
    named = {
        "sizes": "all_reduce of 11 elements",
        "dtypes": "(float64, option 0, tag 0) on rank 1",
        "moved dtypes": "(int32, option 0, tag 0) on rank 1",
        "calls": "barrier of 0",
        "tags": "all_gather of 10 elements (float32, option 0, tag 8) on rank 1",
        "tags of barriers": "tag -1) on rank 1",
    }
    assert any(named[kind] in first for first, _ in outcomes)


def measured(asked):
    c = make()
    if c.rank == 1:
        asked.wait(30)
    handle = c.all_reduce(torch.ones(10), async_op=True)
    if c.rank == 0:
        assert handle.ms is None
        asked.set()
    handle.wait()
    slow = c._submit("sleep", time.sleep, 0.02)
    slow.wait()
    return handle.ms, slow.ms


def test_a_handle_knows_how_long_its_operation_took():
    for reduction, slow in run_ranks(measured, 2, threading.Event()):
        assert reduction > 0
        assert 20 <= slow < 20_000


def silent():
    c = make(timeout_s=0.3)
    if c.rank == 0:
        with pytest.raises(
            RuntimeError, match=r"expected rank 1 within timeout_s=0.3, got .* s of"
        ):
            c.barrier()
    else:
        time.sleep(0.8)


def test_a_silent_rank():
    run_ranks(silent, 2)


def waits_briefly(gave_up):
    c = make()
    if c.rank == 0:
        handle = c.all_reduce(torch.ones(3), async_op=True)
        assert not handle.is_completed()
        with pytest.raises(
            TimeoutError, match=r"all_reduce: expected to end within timeout_s=0.05"
        ):
            handle.wait(0.05)
        gave_up.set()
        handle.wait()
    else:
        assert gave_up.wait(30)
        c.all_reduce(torch.ones(3))


def test_a_wait_that_ends_before_the_operation():
    run_ranks(waits_briefly, 2, threading.Event())


def dies(victim, large):
    c = make(chunk_kb=16)
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
        return str(error), time.monotonic() - start


def shared_memory_kib():
    (line,) = [x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("Shmem:")]
    return int(line.split()[1])


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_an_error_on_the_others(victim):
    """Also in the middle of an operation of many rounds, and well within the time-out of 20 s."""
    outcomes = run_ranks(
        dies, 3, victim, 4_000_000, backend="gloo", timeout_s=60, return_exceptions=True
    )
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, Exception)
        else:
            message, seconds = outcome
            assert f"expected every rank to live, got the end of rank {victim};" in message
            assert seconds < 10


def test_kill_leaves_nothing_behind():
    before, memory = set(os.listdir("/dev/shm")), shared_memory_kib()
    run_ranks(dies, 2, 0, 4_000_000, backend="gloo", timeout_s=60, return_exceptions=True)
    assert set(os.listdir("/dev/shm")) <= before
    # The block held over 1 MiB a rank. That of other programs and tests comes and goes meanwhile.
    end = time.monotonic() + 20
    while shared_memory_kib() - memory >= 1024 and time.monotonic() < end:
        time.sleep(0.05)
    assert shared_memory_kib() - memory < 1024


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


def wrong_block(kind):
    """Rank 1 finds another file than rank 0 meant, or none."""
    attach = transports._attach

    def other(rank, fd, first, size):
        place, pid, theirs, token, reason = first
        if kind == "token":
            token = bytes(16)
        elif rank:
            theirs = 999
        return attach(rank, fd, (place, pid, theirs, token, reason), size)

    transports._attach = other
    try:
        make()
    except transports.ShmUnavailable as error:
        return str(error)
    finally:
        transports._attach = attach


@pytest.mark.parametrize(
    ("kind", "message"),
    [("token", "is another one than rank 0"), ("file", "rank 1 cannot open the memory of rank 0")],
)
def test_a_block_that_is_not_rank_0s(kind, message):
    for said in run_ranks(wrong_block, 2, kind, backend="gloo"):
        assert message in said


def no_memory():
    real = os.memfd_create

    def refuse(*args):
        raise OSError("no such call")

    os.memfd_create = refuse
    try:
        make()
    except transports.ShmUnavailable as error:
        return str(error)
    finally:
        os.memfd_create = real


def test_a_system_without_memfd():
    assert run_ranks(no_memory, 1) == ["rank 0 cannot make shared memory (no such call)"]


def no_pidfd():
    real = os.pidfd_open

    def refuse(pid):
        raise OSError("no such call")

    os.pidfd_open = refuse
    try:
        make()
    except transports.ShmUnavailable as error:
        return str(error)
    finally:
        os.pidfd_open = real


def test_a_system_that_cannot_watch_a_process():
    for said in run_ranks(no_pidfd, 2, backend="gloo"):
        assert "cannot watch process" in said


def closes_early(closed):
    c = make()
    c.barrier()
    if c.rank == 1:
        assert closed.wait(30)
        with pytest.raises(RuntimeError, match=r"got rank 0 that closed its group"):
            c.all_reduce(torch.ones(3_000_000))
        return
    handle = c.all_reduce(torch.ones(3_000_000), async_op=True)
    start = time.monotonic()
    c.close()
    c.close()
    closed.set()
    # Under way, or not begun yet.
    with pytest.raises(
        RuntimeError, match=r"got close\(\) before the operation|got one after clos"
    ):
        handle.wait()
    with pytest.raises(RuntimeError, match=r"barrier: expected an open group, got one after clos"):
        c.barrier()
    assert time.monotonic() - start < 5


def test_close_with_an_operation_under_way():
    run_ranks(closes_early, 2, threading.Event())


def drops(looked):
    c = make()
    if c.rank == 0:
        x = torch.ones(50_000)
        alive = weakref.ref(x)
        c.all_reduce(x, async_op=True)
        del x
        gc.collect()
        kept = alive() is not None  # the operation under way writes to it
        looked.set()
        assert kept
    else:
        assert looked.wait(30)
        c.all_reduce(torch.ones(50_000))
    c.barrier()


def test_an_operation_keeps_its_tensors():
    run_ranks(drops, 2, threading.Event())


def forks():
    c = make()
    c.barrier()
    child = os.fork() if c.rank == 0 else None
    if child == 0:
        try:
            c.barrier()
        except RuntimeError as error:
            c.close()  # the parent's group stays as it was
            os._exit(5 if "got its fork" in str(error) else 6)
        os._exit(7)
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    x = torch.ones(10)
    c.all_reduce(x)
    return x[0].item()


def test_a_fork_is_refused_and_harms_nobody():
    assert run_ranks(forks, 2, backend="gloo") == [2.0, 2.0]


def mixed_places():
    """Tensors of the heap on some ranks only, and at unlike places."""
    c = make()
    expected = torch.arange(3.0).repeat_interleave(4000)
    results = []
    for inside in range(4):
        full = c.empty(12_000, torch.float32)  # on every rank, in the same order
        if inside != 3 and inside != c.rank:
            full = torch.empty(12_000)
        own = full.view(3, -1)[c.rank].fill_(float(c.rank))
        c.all_gather(full, own if inside != 1 or c.rank else own.clone())
        results.append(torch.equal(full, expected))
        x = full if inside != 2 or c.rank else c.empty(12_000, torch.float32)
        x.fill_(float(c.rank))
        c.broadcast(x, 2)
        results.append(bool((x == 2.0).all()))
        x.fill_(float(c.rank))
        c.all_reduce(x)
        results.append(bool((x == 3.0).all()))
        c.barrier()
    return all(results)


def test_tensors_of_the_heap_on_some_ranks_only():
    assert run_ranks(mixed_places, 3) == [True] * 3


@pytest.mark.slow
def test_no_data_race(tmp_path):
    """ThreadSanitizer over ranks as threads; plain memory is ordered by the counters alone."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    root = Path(__file__).parents[2]
    program = tmp_path / "shm_threads"
    sources = [
        root / "tests/support/shm_threads.cpp",
        root / "csrc/shm_cpu.cpp",
        root / "csrc/simd.cpp",
    ]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address randomization")
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr[-4000:]


def outlives():
    c = make()
    x = c.empty(1000, torch.float32).fill_(float(c.rank))
    c.barrier()
    c.close()
    del c
    return x.sum().item()


def test_a_tensor_outlives_its_group():
    assert run_ranks(outlives, 2) == [0.0, 1000.0]


def test_bad_codes():
    from fastpar.kernels import _C

    with pytest.raises(ValueError, match=r"expected whole pages of 4096 bytes, got chunk_bytes=5"):
        _C.ShmGroup(0, 0, 1, 5, 0, [-1], 1.0)
    with pytest.raises(ValueError, match=r"expected 2 descriptors, got 1"):
        _C.ShmGroup(0, 0, 2, 4096, 0, [-1], 1.0)
