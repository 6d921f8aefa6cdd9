"""Times of a step: what is counted, and for which step."""

from typing import ClassVar

import pytest
import torch

from fastpar.comm import recorder
from fastpar.comm.collectives import Handle
from fastpar.comm.recorder import StepReport, StepTimer


class Clock:
    """The host's clock, moved by hand; in seconds."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    return clock


class Operation(Handle):
    def __init__(self, ms, over=True):
        self._ms, self.over = ms, over

    def wait(self, timeout_s=None):
        self.over = True

    def is_completed(self):
        return self.over

    @property
    def ms(self):
        return self._ms if self.over else None


def test_a_step_on_a_cpu(clock):
    timer = StepTimer(torch.device("cpu"))

    def fails():
        with timer.waiting():
            clock.now += 0.001
            raise RuntimeError("gone")

    for _ in range(2):
        timer.begin()
        clock.now += 0.010
        timer.begin()  # nothing: it has begun
        timer.add(Operation(3.0), 100)
        with timer.waiting():
            clock.now += 0.002
        timer.add(Operation(4.0), 20)
        timer.add(Operation(None), 3)  # a transport that does not measure
        with pytest.raises(RuntimeError, match="gone"):  # a wait that fails was one
            fails()
        report = timer.end_step()
        clock.now += 5.0  # between two steps
        with timer.waiting():
            clock.now += 1.0
        assert report.step_ms == pytest.approx(13)
        assert report.compute_ms == pytest.approx(10)
        assert report.comm_ms == 7.0
        assert report.exposed_ms == pytest.approx(3)
        assert report.wire_bytes == 123


def test_what_still_runs_counts_for_the_next_step(clock):
    timer = StepTimer(torch.device("cpu"))
    timer.begin()
    long = Operation(5.0, over=False)
    timer.add(long, 10)
    timer.add(Operation(1.0), 10)
    first = timer.end_step()
    timer.add(Operation(2.0), 7)  # a gather that was started ahead
    long.wait()
    timer.begin()
    second = timer.end_step()
    timer.begin()
    third = timer.end_step()
    assert [(r.comm_ms, r.wire_bytes) for r in (first, second, third)] == [(1, 20), (7, 7), (0, 0)]


class Event:
    """An event that is over when the test says so."""

    made: ClassVar[list] = []

    def __init__(self, enable_timing):
        assert enable_timing
        self.at, self.over = len(Event.made), False
        Event.made.append(self)

    def record(self):
        self.recorded = True

    def query(self):
        return self.over

    def elapsed_time(self, end):
        assert self.over
        assert end.over
        return float(end.at - self.at)


def test_a_gpu_is_never_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", [])
    timer = StepTimer(torch.device("cuda"))

    def step(wire_bytes):
        timer.begin()
        timer.add(Operation(9.0), wire_bytes)
        with timer.waiting():
            pass
        return timer.end_step()

    assert step(1) == StepReport(None, None, None, None, 1)
    assert step(2) == StepReport(None, None, None, None, 2)
    for event in Event.made[:7]:  # all of the first step, and the second but for its end
        event.over = True
    assert step(3) == StepReport(3.0, 2.0, 9.0, 1.0, 1)
    for event in Event.made:
        event.over = True
    assert step(4).wire_bytes == 3  # the newest that is known
    for _ in range(50):  # a GPU far behind
        step(5)
    assert len(timer._steps) <= 8
    assert all(event.recorded for event in Event.made)


@pytest.mark.gpu
def test_events_on_a_gpu():
    timer = StepTimer(torch.device("cuda"))
    timer.begin()
    with timer.waiting():
        torch.cuda._sleep(10_000_000)
    timer.end_step()
    torch.cuda.synchronize()
    timer.begin()
    torch.cuda._sleep(100_000_000)  # this step is not over when it is asked
    report = timer.end_step()
    torch.cuda.synchronize()
    assert 1.0 < report.exposed_ms <= report.step_ms
