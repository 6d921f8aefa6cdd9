"""Ranks as threads, forked and fresh processes: who fails is named, and nobody is left."""

import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cells import slow
from fault_runs import state_of, wait_for
from sockets import of_processes

from fastpar.comm import ranks
from fastpar.comm.host import memory_mb
from fastpar.testing import run_ranks

BACKENDS = ["threads", "gloo"]


def environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    return dist.is_initialized(), [os.environ[name] for name in names]


def test_ranks_without_a_group_and_bad_numbers():
    results = run_ranks(environment, 2, backend="gloo", init=False)
    assert results == [(False, [str(r), str(r), "2", "127.0.0.1"]) for r in range(2)]
    with pytest.raises(ValueError, match=r"expected world_size >= 1, got world_size=0"):
        run_ranks(environment, 0)
    with pytest.raises(ValueError, match=r"expected backend threads or gloo, got backend=mpi"):
        run_ranks(environment, 2, backend="mpi")


def listens(rank):
    rank.barrier()
    dist.all_reduce(torch.ones(1))
    return of_processes(os.getpid())


def test_ranks_and_their_store_listen_on_the_loopback_interface_alone():
    """Whoever reaches the store can read and change all that ranks exchange."""
    with ranks.Ranks(2, device="cpu", fork=True) as pool:
        port = pool._store.port
        found = [of_processes(os.getpid()), *pool.call(listens)]
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
    assert ("127.0.0.1", port) in found[0]
    assert all({host for host, _ in one} == {"127.0.0.1"} for one in found[1:]), found


class StrangeError(Exception):
    """Pickles, and cannot be made again from what was pickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def fail(*error):
    if dist.get_rank() == 1:
        if not error:
            os._exit(7)
        raise error[0](*error[1:])
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_failure_that_others_follow_is_raised_with_its_rank(backend):
    """A time-out would be longer than a test may take."""
    with pytest.raises(KeyError, match="no luck") as caught:
        run_ranks(fail, 2, KeyError, "no luck", backend=backend, timeout_s=3600)
    assert "rank 1 failed:" in str(caught.value.__cause__)
    assert "in fail" in str(caught.value.__cause__)
    if backend == "threads":
        both = run_ranks(fail, 2, KeyError, return_exceptions=True)
        assert isinstance(both[0], RuntimeError | SystemExit)
        assert isinstance(both[1], KeyError)
        assert run_ranks(dist.get_rank, 2) == [0, 1]
    else:  # one that does not travel, and a death without words
        with pytest.raises(RuntimeError, match="StrangeError: no luck"):
            run_ranks(fail, 2, StrangeError, "no", "luck", backend="gloo")
        with pytest.raises(RuntimeError, match=r"^rank 1: exit status 7$"):
            run_ranks(fail, 2, backend="gloo")


@pytest.mark.slow
def test_a_thread_that_hangs_is_named():
    """It cannot be killed and ends by itself; of processes see test_a_silent_rank_is_stopped."""

    def hangs():
        time.sleep(2.0 * dist.get_rank())

    with pytest.raises(TimeoutError, match=r"^rank 1: gave no answer for 1 s; a coll"):
        run_ranks(hangs, 2, timeout_s=1)


def test_threads_sleep_where_ranks_share_cores(monkeypatch):
    monkeypatch.setattr(ranks, "available_cores", lambda: 4)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    policy = [ranks.rank_environment(0, 2, 1, n).get("OMP_WAIT_POLICY") for n in (1, 2, 3)]
    assert policy == [None, None, "passive"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert ranks.rank_environment(0, 2, 1, 3)["OMP_WAIT_POLICY"] == "active"


def rank_and_sum(rank, x):
    rank.barrier()
    total = torch.tensor([x + rank.rank])
    dist.all_reduce(total)
    rank.calls = getattr(rank, "calls", 0) + 1
    rank.say(f"word of {rank.rank}")
    threads = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    return rank.rank, total.item(), rank.calls, threads


@pytest.mark.slow
@pytest.mark.parametrize("fork", [False, True])
def test_calls_run_on_all_ranks_and_processes_stay(fork):
    before, said = dict(os.environ), []
    with ranks.Ranks(2, threads=1, device="cpu", fork=fork) as pool:
        processes = [one.process for one in pool._ranks]
        found = pool.call(rank_and_sum, 10, on_value=said.append)
        assert found == [(0, 21, 1, (1, "1")), (1, 21, 1, (1, "1"))]
        assert sorted(said) == ["word of 0", "word of 1"]
        found = pool.call(rank_and_sum, 20)
        assert found == [(0, 41, 2, (1, "1")), (1, 41, 2, (1, "1"))]
    assert dict(os.environ) == before
    assert [process.wait(0) for process in processes] == [0, 0]


NAPS = """
import os, time
from fastpar.comm.ranks import Ranks

def nap(rank):
    rank.say(os.getpid())
    for _ in range(30):
        time.sleep(0.1)

def main():
    with Ranks(2, device="cpu") as ranks:
        ranks.call(nap, timeout_s=10, on_value=lambda pid: print(pid, flush=True))
"""


@pytest.mark.slow
def test_ranks_are_stopped_with_their_starter_and_not_late_for_it(tmp_path):
    (tmp_path / "naps.py").write_text(NAPS)
    command = [sys.executable, "-c", "import naps; naps.main()"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=os.setpgrp
    )
    try:
        everyone = [job.pid, *(int(job.stdout.readline()) for _ in range(2))]
        job.send_signal(signal.SIGTSTP)
        wait_for(30, lambda: all(state_of(pid) == "T" for pid in everyone))
        time.sleep(11)
        job.send_signal(signal.SIGCONT)
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.communicate()


def meet(rank, ways):
    """Each rank ends in its own way."""
    match ways[rank.rank]:
        case "fails":
            time.sleep(0.2)  # its peer is heard first
            raise ValueError("no room in /some/where/deep")
        case "loses":
            raise RuntimeError("Connection closed by peer")
        case "waits":
            time.sleep(60)
        case "dies":
            os.kill(os.getpid(), 9)
        case "leaves":
            os._exit(7)
        case "says":
            print("last words", file=sys.stderr, flush=True)
            os._exit(1)


NO_ROOM = "ValueError: no room in <path>"


@pytest.mark.parametrize(
    ("ways", "rank", "reason", "fork"),
    [
        (("waits", "fails"), 1, NO_ROOM, True),
        slow(("loses", "fails"), 1, NO_ROOM, False),
        (("dies",), 0, "died of SIGKILL (out of memory?)", True),
        (("leaves",), 0, "exit status 7", True),
        slow(("says",), 0, "last words", False),
    ],
)
def test_the_failed_rank_is_named_and_nobody_is_left(ways, rank, reason, fork, monkeypatch, capfd):
    monkeypatch.setattr(ranks, "GRACE_S", 0.5 if "waits" in ways else 20.0)
    pool = ranks.Ranks(len(ways), quiet=True, fork=fork)
    processes, began = [one.process for one in pool._ranks], time.monotonic()
    with pytest.raises(ranks.RankFailed, match=f"^rank {rank}: ") as caught:
        pool.call(meet, ways)
    assert time.monotonic() - began < 60, "a rank that waits was waited for"
    assert (caught.value.rank, caught.value.reason) == (rank, reason)
    assert all(process.wait(0) is not None for process in processes)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ranks.RankFailed, match="the rank processes have ended"):
        pool.call(meet, ways)


def test_a_silent_rank_is_stopped():
    words = pytest.raises(ranks.RankFailed, match=r"rank 0: gave no answer for 0\.2 s")
    with ranks.Ranks(1, fork=True) as pool, words:
        pool.call(meet, ("waits",), timeout_s=0.2)


@pytest.mark.slow
def test_no_rank_outlives_an_interrupt():
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), ranks.Ranks(2, device="cpu") as pool:  # noqa: PT012
        processes = [one.process for one in pool._ranks]
        pool.call(rank_and_sum, 10, on_value=interrupt)
    assert [process.wait(0) for process in processes] == [-9, -9]


def test_who_is_a_rank_and_who_has_lost_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "FASTPAR_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    assert (ranks.is_rank(), ranks.launched_here()) == (False, False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (ranks.is_rank(), ranks.launched_here()) == (True, False)
    gloo = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
    assert ranks.lost_peer(RuntimeError(f"Engine: rank 0 failed while ... ({gloo})"))
    shm = "all_reduce: the process of rank 1 ended; restart the run from its last checkpoint"
    assert ranks.lost_peer(RuntimeError(shm))
    assert not ranks.lost_peer(RuntimeError("out of memory"))
    source = (Path(__file__).parents[2] / "csrc/shm_cpu.cpp").read_text()
    assert len([text for text in ranks._LOST_PEER_TEXTS if text in source]) == 4
    assert ranks.without_paths("no /a/b.py\n  here, a/b stays") == "no <path> here, a/b stays"
    assert len(ranks.reason(RuntimeError("x" * 1000))) == 300
    assert ranks.reason(RuntimeError("caf\u00e9")) == "RuntimeError: caf?"


def grows():
    before, _ = memory_mb()
    with mmap.mmap(-1, 64_000_000) as held:  # new pages, whatever the heap has kept
        held.write(b"x" * 64_000_000)
        now, peak = memory_mb()
    return now - before, peak - now


def test_cores_and_memory():
    """In a process of its own: threads that other tests have left take memory too."""
    ((grown, above),) = run_ranks(grows, 1, backend="gloo", init=False)
    assert 50 < grown < 80
    assert above >= -1
    assert 1 <= ranks.available_cores() <= os.cpu_count()
    assert ranks.threads_per_rank(3, 100) == 3
    assert ranks.threads_per_rank(None, 1) == ranks.available_cores()
    assert ranks.threads_per_rank(None, 10_000) == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000"}, 2.5),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ({}, math.inf),
    ],
)
def test_a_container_s_quota_of_either_kind_counts(tmp_path, monkeypatch, files, cores):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert ranks.quota_cores(tmp_path) == cores
    monkeypatch.setattr(ranks, "quota_cores", lambda: 0.5)
    assert ranks.available_cores() == 1
