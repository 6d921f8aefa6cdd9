import os

import pytest

from fastpar.measure.rank_pool import RankPool


def rank_and_sum(rank, x):
    import torch
    import torch.distributed as dist

    rank.barrier()
    total = torch.tensor([x + rank.rank])
    dist.all_reduce(total)
    rank.kept["calls"] = rank.kept.get("calls", 0) + 1
    return rank.rank, total.item(), rank.kept["calls"], torch.get_num_threads()


def threads_in_environment(rank):
    return os.environ["OMP_NUM_THREADS"]


def fail_on_the_second(rank):
    if rank.rank == 1:
        raise ValueError("no such thing")


def leave(rank):
    os._exit(7)


def sleep(rank):
    import time

    time.sleep(60)


def test_calls_run_on_all_ranks_and_processes_stay():
    before = dict(os.environ)
    with RankPool(2, threads=1) as pool:
        assert pool.call(rank_and_sum, 10) == [(0, 21, 1, 1), (1, 21, 1, 1)]
        assert pool.call(rank_and_sum, 20) == [(0, 41, 2, 1), (1, 41, 2, 1)]
        assert pool.call(threads_in_environment) == ["1", "1"]
    assert dict(os.environ) == before


def test_a_rank_that_fails_ends_all():
    pool = RankPool(2, threads=1)
    processes = list(pool._processes)
    with pytest.raises(RuntimeError, match=r"got rank 1 in fail_on_the_second: ValueError: no su"):
        pool.call(fail_on_the_second)
    assert not any(p.is_alive() for p in processes)


@pytest.mark.parametrize(
    ("function", "match"),
    [(leave, "rank 0 left with exit code 7 in leave"), (sleep, "sleep took more than 1 s on rank")],
)
def test_a_rank_that_is_gone_or_late_is_named(function, match):
    with RankPool(1) as pool, pytest.raises(RuntimeError, match=match):
        pool.call(function, timeout_s=1)
