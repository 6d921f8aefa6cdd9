"""The timer: medians, turns, and a GPU's clock on a double of it."""

import time

from fastpar.doctor.trial import (
    CYCLES_PER_US,
    CpuClock,
    CudaClock,
    Timing,
    interleave,
    stopwatch,
)


def test_timing_is_median_and_quantiles():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert timing.median_ms == 3.5
    assert timing.p20_ms == 2.0
    assert timing.p80_ms == 5.0
    assert timing.runs == 6


class ScriptedClock:
    """Returns what the call returns, and keeps the order of calls."""

    def __init__(self):
        self.order = []

    def sample(self, call):
        name, ms = call()
        self.order.append(name)
        return ms


def test_interleave_takes_turns_and_rotates_inputs():
    clock = ScriptedClock()
    variants = {
        "a": [lambda: ("a0", 1.0), lambda: ("a1", 3.0)],
        "b": [lambda: ("b0", 10.0), lambda: ("b1", 30.0)],
    }
    timings = interleave(variants, clock, budget_s=0.0, min_runs=4, max_runs=9)
    assert clock.order[:4] == ["a0", "a1", "b0", "b1"]  # warm-up, not counted
    assert clock.order[4:] == ["a0", "b0", "a1", "b1"] * 2
    assert timings["a"].median_ms == 2.0
    assert timings["b"].median_ms == 20.0
    assert timings["a"].runs == 4


def test_interleave_stays_within_its_budget():
    calls = {"a": [lambda: time.sleep(0.005)]}
    assert 2 <= interleave(calls, CpuClock(), budget_s=0.05, min_runs=2)["a"].runs <= 11


class FakeCuda:
    """A stream and its clock: an operation starts when the host enqueues it, or after the last."""

    def __init__(self):
        self.free_at, self.log = 0.0, []

    def enqueue(self, name, seconds):
        self.free_at = max(self.free_at, time.perf_counter()) + seconds
        self.log.append(name)
        return self.free_at

    def synchronize(self):
        time.sleep(max(0.0, self.free_at - time.perf_counter()))

    def _sleep(self, cycles):
        self.enqueue("sleep", cycles / CYCLES_PER_US / 1e6)

    def Event(self, enable_timing):  # noqa: N802
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.at = self.cuda.enqueue("event", 0.0)

    def synchronize(self):
        self.cuda.synchronize()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def test_cuda_sample_hides_the_host():
    """Two kernels of 1 ms whose launches take 4 ms each are timed as 2 ms."""
    cuda = FakeCuda()
    clock = CudaClock(cuda, flush=lambda: cuda.enqueue("flush", 0.0))

    def call():
        for _ in range(2):
            time.sleep(0.004)
            cuda.enqueue("kernel", 0.001)

    ms = min(clock.sample(call) for _ in range(5))  # a stalled host may starve one of them
    assert 1.99 < ms < 2.5
    assert cuda.log[-6:] == ["flush", "sleep", "event", "kernel", "kernel", "event"]


def test_cuda_host_time_is_the_enqueueing_alone():
    cuda = FakeCuda()
    clock = CudaClock(cuda, flush=lambda: None)

    def call():
        time.sleep(0.002)
        cuda.enqueue("kernel", 0.05)

    assert 1900 < clock.host_us(call, runs=3) < 40_000


def test_stopwatch_returns_time_and_result():
    ms, result = stopwatch(lambda: time.sleep(0.01) or 7, "cpu")
    assert result == 7
    assert 9 < ms < 500
