"""Late collectives: the same results in the same order, and races that show."""

import functools
import random
import threading
import time

import pytest
import torch

from fastpar import debug
from fastpar.collectives import TorchCollectives
from fastpar.debug import Debug, DelayedCollectives
from fastpar.shm import ShmCollectives
from fastpar.testing import run_ranks

make_shm = functools.partial(ShmCollectives, timeout_s=20.0, heap_gb=0.01)


def everything(kind):
    inner = make_shm() if kind == "shm" else TorchCollectives(in_rank_order=True)
    c = Debug(delay_ms=4.0, seed=7).delayed(inner)
    draws = random.Random(f"7 {c.rank}")
    seconds = sum(draws.uniform(0.0, 4.0) for _ in range(7)) / 1e3
    start = time.perf_counter()
    x = c.empty(6, torch.float32).fill_(1.0 + c.rank)
    part, whole = torch.empty(3), torch.empty(6)
    handles = [
        c.all_reduce(x, async_op=True, tag=1),  # 3
        c.reduce_scatter(part, x, mean=True, async_op=True, tag=2),  # 3, of what was made above
        c.all_gather(whole, part, async_op=True, tag=3),
        c.broadcast(whole, 1, async_op=True, tag=4),
        c.all_reduce(whole, async_op=True, tag=5),  # 6
    ]
    c.barrier(tag=6)
    with torch.inference_mode():
        inside = torch.full((2,), 5.0)
        c.all_reduce(inside, mean=True)
    for handle in handles:
        handle.wait()
    took = time.perf_counter() - start
    measured = all(handle.ms > 0 for handle in handles)
    c.close()
    assert c.transport == inner.transport
    assert c.why == f"{inner.why}; delayed by up to 4.0 ms"
    return whole.tolist(), inside.tolist(), measured, took >= seconds


@pytest.mark.parametrize(
    ("kind", "backend"), [("shm", "threads"), ("torch", "threads"), ("torch", "gloo")]
)
def test_the_same_results_in_the_same_order(kind, backend):
    for outcome in run_ranks(everything, 2, kind, backend=backend):
        assert outcome == ([6.0] * 6, [5.0] * 2, True, True)


def writes_too_early(gate):
    """A step that does not wait before it reuses a buffer."""
    x = torch.ones(10)
    c = DelayedCollectives(make_shm(), 1.0)
    handle = c.all_reduce(x, async_op=True)
    before = handle.is_completed()
    x.fill_(5.0)
    gate.wait(20)  # both have
    handle.wait()
    return before, x.tolist()


def test_a_race_shows(monkeypatch):
    gate = threading.Barrier(4)  # two ranks and their threads

    class Late:
        @staticmethod
        def sleep(seconds):
            assert 0 <= seconds <= 0.001
            gate.wait(20)

    monkeypatch.setattr(debug, "time", Late)
    assert run_ranks(writes_too_early, 2, gate) == [(False, [10.0] * 10)] * 2


def fails():
    c = DelayedCollectives(make_shm(), 1.0)
    handle = c.all_reduce(torch.ones(3 + c.rank), async_op=True)
    with pytest.raises(RuntimeError, match="expected the same call on every rank"):
        handle.wait()
    with pytest.raises(RuntimeError, match="expected a working group"):
        c.barrier()


def test_errors_come_out_of_wait():
    run_ranks(fails, 2)


def plain():
    inner = make_shm()
    return Debug(check_replicas=True, poison=True).delayed(inner) is inner


def test_nothing_is_delayed_unless_asked():
    assert run_ranks(plain, 1) == [True]
    assert Debug() == Debug(False, False, 0.0, 0)


@pytest.mark.parametrize("delay_ms", [-1.0, float("inf"), float("nan")])
def test_bad_delay(delay_ms):
    with pytest.raises(ValueError, match=r"Debug: expected 0 <= delay_ms, got delay_ms="):
        Debug(delay_ms=delay_ms)
