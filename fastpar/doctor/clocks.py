"""The only timer of the project: samples of calls on a CPU and on a GPU, taken in turn.

[Note: timing on a GPU] Each sample is: flush the L2 cache, let the device sleep longer than the
host needs to enqueue the call, record an event, call, record an event. Without the sleep a call
whose kernels are shorter than their launches is timed as host time, because the stream starves
between the two events (test_cuda_sample_hides_the_host). Host time is measured apart, on an idle
device, as the time until the call returns. Inputs are random: zeros run up to a third faster.

[Note: timing on a CPU] Variants run in turn, A B A B ..., so that a neighbour's noise hits all
alike; medians of one run are compared with each other and with nothing else. The number of threads
is a column of every row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

Call = Callable[[], Any]
CYCLES_PER_US = 2000.0  # of a GPU at 2 GHz: the sleep is at least as long as meant on slower ones


class Timing(NamedTuple):
    """Median and spread of samples."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        p20, median, p80 = np.quantile(np.asarray(samples_ms, dtype=np.float64), (0.2, 0.5, 0.8))
        return cls(float(median), float(p20), float(p80), len(samples_ms))


class CpuClock:
    """Wall time of one call."""

    def sample(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def host_us(self, call: Call) -> float | None:
        return None


class CudaClock:
    """Device time of one call between two events; see [Note: timing on a GPU].

    Args:
        cuda: torch.cuda, or a double of it.
        flush: overwrites the L2 cache; by default zeroes a buffer of four times its size.
    """

    def __init__(self, cuda: Any = None, flush: Call | None = None):
        self.cuda = torch.cuda if cuda is None else cuda
        if flush is None:
            l2_bytes = getattr(self.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
            flush = torch.empty(max(4 * l2_bytes, 64 << 20), dtype=torch.int8, device="cuda").zero_
        self.flush = flush
        self._ahead_us: WeakKeyDictionary[Call, float] = WeakKeyDictionary()

    def host_us(self, call: Call, runs: int = 15) -> float:
        times = []
        for _ in range(runs):
            self.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        self.cuda.synchronize()
        return float(np.median(times))

    def sample(self, call: Call) -> float:
        if call not in self._ahead_us:
            self._ahead_us[call] = min(2 * self.host_us(call, runs=3) + 20, 50_000)
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush()
        self.cuda._sleep(int(self._ahead_us[call] * CYCLES_PER_US))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def clock_for(device: str) -> CpuClock | CudaClock:
    """That of "cpu" or "cuda"."""
    return CudaClock() if device == "cuda" else CpuClock()


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def stopwatch(call: Call, device: str) -> tuple[float, Any]:
    """(wall ms, result) of one call, the device's work included: for whole training steps."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3, result


def steady_ms(step: Call, count: int) -> float:
    """ms of a step in a row of count + 1 on the CPU, start to start; the first is not counted.

    Nothing waits between steps: work that a step leaves to the next one is hidden as in training.
    """
    step()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) * 1e3 / count


def interleave(
    variants: Mapping[str, Sequence[Call]],
    clock: Any,
    *,
    budget_s: float,
    min_runs: int = 7,
    max_runs: int = 200,
) -> dict[str, Timing]:
    """Time the variants in turn, round after round.

    Args:
        variants: name -> the same call on several input sets, used in rotation.
        budget_s: wall time for all of them; rounds stay within [min_runs, max_runs], and none
            begins after twice that time.
    """
    start = time.perf_counter()
    for calls in variants.values():
        for call in (calls[0], calls[-1]):
            clock.sample(call)
    spent = time.perf_counter() - start
    rounds = int(min(max_runs, max(min_runs, budget_s * 2 / max(spent, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds):
        if index >= min_runs and time.perf_counter() - start > spent + 2 * budget_s:
            break
        for name, calls in variants.items():
            samples[name].append(clock.sample(calls[index % len(calls)]))
    return {name: Timing.of(times) for name, times in samples.items()}
