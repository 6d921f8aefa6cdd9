"""Ranks as threads, forked and fresh processes: who fails is named, and nobody is left."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import ranks
from fastpar.comm.ranks import RankFailed, Ranks, is_rank, launched_here, lost_peer
from fastpar.testing import run_ranks

BACKENDS = ["threads", "gloo"]
needs_proc = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="needs /proc to look for processes"
)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# run_ranks: threads and forked processes


def add_ranks(offset):
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_by_rank(backend, world_size):
    results = run_ranks(add_ranks, world_size, 0.5, backend=backend)
    expected = sum(range(world_size)) + 0.5 * world_size
    assert results == [(r, torch.tensor([expected])) for r in range(world_size)]
    assert not dist.is_initialized()


class StrangeError(Exception):
    """Pickles, and cannot be made again from what was pickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def fail(*error):
    if dist.get_rank() == 1:
        raise error[0](*error[1:])
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_failure_that_others_follow_is_raised_with_its_rank(backend):
    """A time-out would be longer than a test may take."""
    with pytest.raises(KeyError, match="no luck") as caught:
        run_ranks(fail, 2, KeyError, "no luck", backend=backend, timeout_s=3600)
    assert "rank 1 failed:" in str(caught.value.__cause__)
    assert "in fail" in str(caught.value.__cause__)
    both = run_ranks(fail, 2, KeyError, backend=backend, return_exceptions=True)
    assert isinstance(both[0], RuntimeError | SystemExit)
    assert isinstance(both[1], KeyError)
    assert len(run_ranks(add_ranks, 2, 0.0, backend=backend)) == 2


def test_an_exception_that_does_not_travel_becomes_a_runtime_error():
    with pytest.raises(RuntimeError, match="StrangeError: no luck"):
        run_ranks(fail, 2, StrangeError, "no", "luck", backend="gloo")


def leave():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def test_a_process_that_dies_is_named():
    with pytest.raises(RuntimeError, match=r"^rank 1: exit status 7$"):
        run_ranks(leave, 2, backend="gloo")


def sleep_on_rank_1(seconds):
    if dist.get_rank() == 1:
        time.sleep(seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "timeout_s", "hangs_s"), [("threads", 1, 2), ("gloo", 4, 600)])
def test_a_rank_that_hangs_is_named(backend, timeout_s, hangs_s):
    """Threads cannot be killed: that one ends by itself."""
    with pytest.raises(TimeoutError, match=f"^rank 1: gave no answer for {timeout_s} s; a coll"):
        run_ranks(sleep_on_rank_1, 2, hangs_s, backend=backend, timeout_s=timeout_s)


def test_every_thread_has_the_callers_number_of_cores():
    """Also one that starts while another computes with fewer, as fastpar.patch does."""
    fewer, done = threading.Event(), threading.Event()

    def rank():
        if dist.get_rank() == 0:
            before = torch.get_num_threads()
            torch.set_num_threads(before + 1)
            fewer.set()
            done.wait(20)
            torch.set_num_threads(before)
            return before
        fewer.wait(20)
        found = torch.get_num_threads()
        done.set()
        return found

    expected = torch.get_num_threads()
    assert run_ranks(rank, 2) == [expected] * 2


def environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    return dist.is_initialized(), [os.environ[name] for name in names]


def test_without_init_only_the_environment_is_set():
    results = run_ranks(environment, 2, backend="gloo", init=False)
    assert results == [(False, [str(r), str(r), "2", "127.0.0.1"]) for r in range(2)]


@pytest.mark.parametrize(
    ("world_size", "backend", "message"),
    [
        (0, "threads", r"expected world_size >= 1, got world_size=0"),
        (2, "mpi", r"expected backend threads or gloo, got backend=mpi"),
    ],
)
def test_bad_calls(world_size, backend, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(environment, world_size, backend=backend)


def forever():
    os.write(1, b"pid %d\n" % os.getpid())
    time.sleep(600)


@needs_proc
def test_a_killed_parent_takes_its_forked_ranks_along(tmp_path):
    """Fresh ones are killed by the kernel: tests/files/test_packages.py."""
    (tmp_path / "killed_parent.py").write_text(
        textwrap.dedent(
            """
            from test_ranks import forever
            from fastpar.testing import run_ranks
            if __name__ == "__main__":
                run_ranks(forever, 2, backend="gloo", timeout_s=600)
            """
        )
    )
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "killed_parent.py")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
        assert all(map(is_running, pids))
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


# Ranks: processes that stay


def rank_and_sum(rank, x):
    rank.barrier()
    total = torch.tensor([x + rank.rank])
    dist.all_reduce(total)
    rank.kept["calls"] = rank.kept.get("calls", 0) + 1
    rank.say(f"word of {rank.rank}")
    threads = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    return rank.rank, total.item(), rank.of_first(rank.rank), rank.kept["calls"], threads


@pytest.mark.parametrize("fork", [False, True])
def test_calls_run_on_all_ranks_and_processes_stay(fork):
    before, said = dict(os.environ), []
    with Ranks(2, threads=1, device="cpu", fork=fork) as pool:
        processes = [one.process for one in pool._ranks]
        found = pool.call(rank_and_sum, 10, heard=said.append)
        assert found == [(0, 21, 0, 1, (1, "1")), (1, 21, 0, 1, (1, "1"))]
        assert sorted(said) == ["word of 0", "word of 1"]
        found = pool.call(rank_and_sum, 20)
        assert found == [(0, 41, 0, 2, (1, "1")), (1, 41, 0, 2, (1, "1"))]
    assert dict(os.environ) == before
    assert [process.wait(0) for process in processes] == [0, 0]


def meet(rank, ways):
    """Each rank ends in its own way."""
    way = ways[rank.rank]
    if way == "fails":
        time.sleep(0.2)  # its peer is heard first
        raise ValueError("no room in /some/where/deep")
    if way == "loses":
        raise RuntimeError("Connection closed by peer")
    if way == "waits":
        time.sleep(60)
    if way == "dies":
        os.kill(os.getpid(), 9)
    if way == "leaves":
        os._exit(7)
    if way == "says":
        print("last words", file=sys.stderr, flush=True)
        os._exit(1)


NO_ROOM = "ValueError: no room in <path>"


@pytest.mark.parametrize(
    ("ways", "rank", "reason", "fork"),
    [
        (("waits", "fails"), 1, NO_ROOM, False),
        (("loses", "fails"), 1, NO_ROOM, True),
        (("dies",), 0, "died of SIGKILL (out of memory?)", True),
        (("leaves",), 0, "exit status 7", True),
        pytest.param(("says",), 0, "last words", False, marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_failed_is_named_and_nobody_is_left(
    ways, rank, reason, fork, monkeypatch, capfd
):
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    pool = Ranks(len(ways), quiet=True, fork=fork)
    processes, began = [one.process for one in pool._ranks], time.monotonic()
    with pytest.raises(RankFailed, match=f"^rank {rank}: ") as caught:
        pool.call(meet, ways)
    assert time.monotonic() - began < 30
    assert (caught.value.rank, caught.value.reason) == (rank, reason)
    assert all(process.wait(0) is not None for process in processes)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RankFailed, match="the processes are gone"):
        pool.call(meet, ways)


def test_a_silent_rank_is_stopped():
    with (
        Ranks(1, fork=True) as pool,
        pytest.raises(RankFailed, match=r"rank 0: gave no answer for 0\.2 s"),
    ):
        pool.call(meet, ("waits",), timeout_s=0.2)


@pytest.mark.slow
def test_no_rank_outlives_an_interrupt():
    def interrupt(said):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Ranks(2, device="cpu") as pool:  # noqa: PT012
        processes = [one.process for one in pool._ranks]
        pool.call(rank_and_sum, 10, heard=interrupt)
    assert [process.wait(0) for process in processes] == [-9, -9]


# Who is a rank, and who has lost one


def test_who_is_a_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "FASTPAR_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    assert not is_rank()
    assert not launched_here()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank()
    assert not launched_here()


def test_lost_peers_are_told_from_other_errors():
    gloo = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
    assert lost_peer(RuntimeError(f"Engine: expected every rank to take part, got ... ({gloo})"))
    shm = "all_reduce: expected every rank to live, got the end of rank 1; restart the run"
    assert lost_peer(RuntimeError(shm))
    assert not lost_peer(RuntimeError("out of memory"))


def test_shared_memory_still_says_what_is_looked_for():
    source = (Path(__file__).parents[2] / "csrc/shm_cpu.cpp").read_text()
    assert len([text for text in ranks._LOST_PEER_TEXTS if text in source]) == 4


def test_a_reason_is_one_line_without_paths():
    assert ranks.without_paths("no /a/b.py\n  here, a/b stays") == "no <path> here, a/b stays"
    assert len(ranks.reason(RuntimeError("x" * 1000))) == 300
    assert ranks.reason(RuntimeError("caf\u00e9")) == "RuntimeError: caf?"
