import os
import sys
import time

import pytest

from fastpar.measure import rank_pool
from fastpar.measure.rank_pool import RankFailed, RankPool


def rank_and_sum(rank, x):
    import torch
    import torch.distributed as dist

    rank.barrier()
    total = torch.tensor([x + rank.rank])
    dist.all_reduce(total)
    rank.kept["calls"] = rank.kept.get("calls", 0) + 1
    rank.say(f"word of {rank.rank}")
    return rank.rank, total.item(), rank.kept["calls"], torch.get_num_threads()


def threads_in_environment(rank):
    return os.environ["OMP_NUM_THREADS"]


def meet(rank, ways):
    """Each rank ends in its own way."""
    way = ways[rank.rank]
    if way == "fails":
        raise ValueError("no room in /some/where/deep")
    if way == "loses":
        time.sleep(0.2)
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


def test_calls_run_on_all_ranks_and_processes_stay():
    before, said = dict(os.environ), []
    with RankPool(2, threads=1) as pool:
        found = pool.call(rank_and_sum, 10, heard=said.append)
        assert found == [(0, 21, 1, 1), (1, 21, 1, 1)]
        assert sorted(said) == ["word of 0", "word of 1"]
        assert pool.call(rank_and_sum, 20) == [(0, 41, 2, 1), (1, 41, 2, 1)]
        assert pool.call(threads_in_environment) == ["1", "1"]
    assert dict(os.environ) == before


NO_ROOM = "ValueError: no room in <path>"


@pytest.mark.parametrize(
    ("ways", "rank", "reason"),
    [
        (("waits", "fails"), 1, NO_ROOM),
        pytest.param(("fails", "loses"), 0, NO_ROOM, marks=pytest.mark.slow),
        pytest.param(("loses", "fails"), 1, NO_ROOM, marks=pytest.mark.slow),
        pytest.param(("dies",), 0, "died of SIGKILL (out of memory?)", marks=pytest.mark.slow),
        pytest.param(("leaves",), 0, "exit status 7", marks=pytest.mark.slow),
        pytest.param(("says",), 0, "last words", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_failed_is_named_and_nobody_is_left(ways, rank, reason, monkeypatch):
    monkeypatch.setattr(rank_pool, "GRACE_S", 0.5)
    pool = RankPool(len(ways), threads=1, quiet=True)
    processes = [one.process for one in pool._ranks]
    with pytest.raises(RankFailed, match=rf"got rank {rank} in meet: ") as caught:
        pool.call(meet, ways)
    assert (caught.value.rank, caught.value.reason) == (rank, reason)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_a_silent_rank_is_stopped():
    with (
        RankPool(1) as pool,
        pytest.raises(RankFailed, match=r"rank 0 in meet: gave no answer for 0\.2 s"),
    ):
        pool.call(meet, ("waits",), timeout_s=0.2)


@pytest.mark.slow
def test_no_rank_outlives_an_interrupt():
    def interrupt(said):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), RankPool(2) as pool:  # noqa: PT012
        processes = [one.process for one in pool._ranks]
        pool.call(rank_and_sum, 10, heard=interrupt)
    assert [process.poll() for process in processes] == [-9, -9]
