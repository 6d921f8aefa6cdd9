"""Late collectives: the same results in the same order, and races that show."""

import functools
import random
import threading
import time

import pytest
import torch

from fastpar import AdamW, Mesh, debug, engine_of, parallelize
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


def trains(zero_stage, debug, backend_is_threads):
    """Parameters after some steps of two ranks; a race would change their bits."""
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(3)  # torch's own is shared by the threads
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    transport = "auto" if backend_is_threads else "torch"
    parallelize(
        model,
        Mesh(),
        zero_stage=zero_stage,
        bucket_mb=0.0005,
        first_bucket_mb=0.0001,
        deterministic=True,
        transport=transport,
        debug=debug,
    )
    optimizer = AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(engine_of(model).mesh.rank)
    for _ in range(4):
        for _ in range(2):
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with engine_of(model).gathered():
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@pytest.fixture(scope="module")
def on_time():
    return {stage: run_ranks(trains, 2, stage, None, True) for stage in range(4)}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_training_has_the_same_bits_with_late_collectives(zero_stage, on_time):
    late = Debug(check_replicas=True, poison=True, delay_ms=3.0, seed=zero_stage)
    for expected, got in zip(
        on_time[zero_stage], run_ranks(trains, 2, zero_stage, late, True), strict=True
    ):
        assert expected.isfinite().all()
        assert torch.equal(got, expected)


def test_training_over_gloo_with_late_collectives(on_time):
    late = Debug(poison=True, delay_ms=3.0)
    for expected, got in zip(
        on_time[3], run_ranks(trains, 2, 3, late, False, backend="gloo"), strict=True
    ):
        assert torch.equal(got, expected)
