"""What is noted, counted and timed of collectives: spans, bytes on the wire, a step's report."""

import threading
from types import SimpleNamespace

import pytest
import torch
from cells import slow, sweep

from fastpar.comm import recorder as module
from fastpar.comm.collectives import Collectives, Handle
from fastpar.comm.recorder import (
    COMPUTE,
    GATHER,
    REDUCE,
    TP,
    WAIT,
    CollectiveLog,
    Recorder,
    Span,
    StepReport,
    StepTimer,
    WireMeter,
    busy_ms,
    in_turn,
    now_ms,
    ring_bytes,
    window,
)
from fastpar.models.gpt import GPT
from fastpar.observe.strategies import STRATEGIES, Settings, build
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks


class Operation(Handle):
    """Complete when the test says so; it takes `ms`."""

    def __init__(self, ms=None, over=False):
        self.over, self.waited = (threading.Event() for _ in range(2))
        self._ms = ms
        if over:
            self.over.set()

    def wait(self, timeout_s=None):
        self.waited.set()
        assert self.over.wait(10)

    def is_completed(self):
        return self.over.is_set()

    @property
    def ms(self):
        return self._ms if self.over.is_set() else None


class Inner(Collectives):
    """A transport whose operations the test completes."""

    transport = why = "fake"
    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self):
        self.operations = []

    def _begin(self, *args):
        self.operations.append(Operation())
        return self.operations[-1]

    barrier = _all_reduce = _reduce_scatter = _all_gather = _broadcast = _begin
    _all_to_all = _send = _recv = _begin


def test_an_operation_is_as_long_as_its_transport_says_and_begins_in_its_turn():
    recorder, inner = Recorder(), Inner()
    recorder.watch(inner, REDUCE)
    recorder.on = True
    handles = [inner.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    for operation, ms in zip(inner.operations, (500.0, 300.0)):
        operation._ms = ms
        operation.over.set()
    for handle in (*handles, handles[0]):
        handle.wait()
    first, second = (s for s in in_turn(recorder.spans) if s.row == REDUCE)
    assert (first.name, first.size_bytes) == ("all_reduce", 12)
    assert (first.end_ms - first.begin_ms, second.end_ms - second.begin_ms) == (500, 300)
    assert second.begin_ms == first.end_ms
    assert sum(s.row == WAIT for s in recorder.spans) == 3
    recorder.spans.clear()  # one that is waited for in the call
    thread = threading.Thread(target=lambda: inner.all_reduce(torch.ones(3)))
    thread.start()
    while len(inner.operations) < 3:
        pass
    assert inner.operations[2].waited.wait(10)
    middle = now_ms()
    inner.operations[2].over.set()
    thread.join(10)
    assert sorted(s.row for s in recorder.spans) == [REDUCE, WAIT]
    assert all(s.begin_ms <= middle <= s.end_ms for s in recorder.spans)


def test_what_is_in_use_can_be_watched_and_no_longer():
    recorder, inner = Recorder(), Inner()
    recorder.watch(inner, TP)
    for on in (False, True, False):
        recorder.on = on
        handle = inner.all_reduce(torch.ones(3), async_op=True)
        assert (handle is inner.operations[-1]) == (not on)
        with recorder.span(COMPUTE, "forward"):
            pass
        inner.operations[-1].over.set()
        handle.wait()
    assert sorted((s.row, s.name, s.size_bytes) for s in recorder.spans) == sorted(
        [(COMPUTE, "forward", 0), (WAIT, TP, 12), (TP, "all_reduce", 12)]
    )


def test_a_window_cuts_and_counts_from_its_begin_and_overlaps_count_once():
    spans = [
        Span(REDUCE, "late", 25, 40),
        Span(COMPUTE, "before", 0, 10),
        Span(COMPUTE, "across", 5, 15),
        Span(GATHER, "inside", 12, 13, 7),
    ]
    assert window(spans, 10, 30) == [
        Span(COMPUTE, "across", 0, 5),
        Span(GATHER, "inside", 2, 3, 7),
        Span(REDUCE, "late", 15, 20),
    ]
    spans = [Span(REDUCE, "", 0, 10), Span(REDUCE, "", 5, 8), Span(GATHER, "", 9, 12)]
    found = [busy_ms(spans, rows) for rows in ([REDUCE], [REDUCE, GATHER], [WAIT])]
    assert found == [10, 12, 0]


TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)
NUMEL = sum(p.numel() for p in GPT(TINY).parameters())


def steps_on_rank(names):
    """Each strategy's third step: bytes, seconds in communication, what the engine says."""
    found = {}
    for name in names:
        made = build(name, lambda: GPT(TINY, seed=1), Settings(max_grad_norm=1.0))
        x = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            made.train_step([(x, x)], 1e-3)
        meter = WireMeter()
        ours = STRATEGIES[name].package == "fastpar"
        with meter.of_fastpar() if ours else meter.of_torch(2):
            made.train_step([(x, x)], 1e-3)
        counted = meter.sent_bytes
        made.train_step([(x, x)], 1e-3)
        assert meter.sent_bytes == counted, "it counts after its end"
        found[name] = (counted, meter.waited_s, made.report())
        made.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["ddp", "zero3", "tp"], slow(["fsdp2", "fsdp2-no-reshard", "dp", "zero1", "zero2"])],
    ids=["some", "others"],
)
def test_a_step_sends_what_its_strategy_must(names):
    for found in run_ranks(steps_on_rank, 2, names, backend="gloo", timeout_s=120):
        once = 4 * NUMEL  # of 2 ranks an all-reduce sends each byte once, a gather half of them
        of_torch = {"ddp": once, "fsdp2-no-reshard": once, "fsdp2": once * 3 // 2}  # gathered twice
        for name in names:
            sent, waited, report = found[name]
            if name in of_torch:
                assert sent == of_torch[name], name
                continue
            assert waited > 0
            if name == "tp":
                assert sent > report["wire_bytes"] + 4 * 2 * 32 * 32  # activations of two layers
            else:  # the engine leaves out its small exchanges: norm and control
                assert report["wire_bytes"] <= sent <= report["wire_bytes"] + 2000, name


def test_ring_bytes_and_a_meter_that_ends():
    assert ring_bytes("allreduce_", 1000, 4) == 1500
    assert ring_bytes("all_reduce", 1000, 2) == 1000
    for name in ("_allgather_base_", "reduce_scatter", "_reduce_scatter_base_", "broadcast_"):
        assert ring_bytes(name, 1000, 4) == 750, name
    assert ring_bytes("wait_tensor", 1000, 4) == ring_bytes("all_reduce", 1000, 1) == 0
    with pytest.raises(RuntimeError, match="stop"), WireMeter().of_fastpar():
        raise RuntimeError("stop")
    assert Collectives.observers == ()


def test_a_step_on_a_cpu(monkeypatch):
    """The host's clock is moved by hand; what still runs at a step's end counts for the next."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    timer = StepTimer(torch.device("cpu"))

    def fails():
        with timer.waiting():
            clock.now += 0.001
            raise RuntimeError("gone")

    for _ in range(2):
        timer.begin()
        clock.now += 0.010
        timer.begin()  # nothing: it has begun
        timer.add(Operation(3.0, over=True), 100)
        with timer.waiting():
            clock.now += 0.002
        timer.add(Operation(4.0, over=True), 20)
        timer.add(Operation(None, over=True), 3)  # a transport that does not measure
        with pytest.raises(RuntimeError, match="gone"):  # a wait that fails was one
            fails()
        report = timer.end_step()
        clock.now += 5.0  # between two steps
        with timer.waiting():
            clock.now += 1.0
        assert report.step_ms == pytest.approx(13)
        assert report.compute_ms == pytest.approx(10)
        assert report.exposed_ms == pytest.approx(3)
        assert (report.comm_ms, report.wire_bytes) == (7.0, 123)
    timer.begin()
    long = Operation(5.0)
    timer.add(long, 10)
    timer.add(Operation(1.0, over=True), 10)
    reports = [timer.end_step()]
    timer.add(Operation(2.0, over=True), 7)  # a gather that was started ahead
    long.over.set()
    for _ in range(2):
        timer.begin()
        reports.append(timer.end_step())
    assert [(r.comm_ms, r.wire_bytes) for r in reports] == [(1, 20), (7, 7), (0, 0)]


def test_a_gpu_is_never_waited_for(monkeypatch):
    made = []

    class Event:
        """An event that is over when the test says so."""

        def __init__(self, enable_timing):
            assert enable_timing
            self.at, self.over, self.recorded = len(made), False, False
            made.append(self)

        def record(self):
            self.recorded = True

        def query(self):
            return self.over

        def elapsed_time(self, end):
            assert self.over
            assert end.over
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))

    def step(wire_bytes):
        timer.begin()
        timer.add(Operation(9.0, over=True), wire_bytes)
        with timer.waiting():
            pass
        return timer.end_step()

    assert step(1) == StepReport(None, None, None, None, 1)
    assert step(2) == StepReport(None, None, None, None, 2)
    for event in made[:7]:  # all of the first step, and the second but for its end
        event.over = True
    assert step(3) == StepReport(3.0, 2.0, 9.0, 1.0, 1)
    for event in made:
        event.over = True
    assert step(4).wire_bytes == 3  # the newest that is known
    for _ in range(50):  # a GPU far behind
        step(5)
    assert len(timer._steps) <= 8
    assert all(event.recorded for event in made)


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


@sweep(
    "words",
    ["Connection closed by peer [a]:1", "Read error [a]:1: Connection reset by peer",
     "writev [a]:1: Broken pipe"],
)  # fmt: skip
def test_a_rank_that_is_gone_is_named(words):
    """However gloo notices it: by a read, or by a write before any read."""
    log = CollectiveLog(torch.device("cpu"), 0)
    with (
        pytest.raises(RuntimeError, match=r"while waiting for bucket 2 of .*; rank 1 has ended"),
        log.naming("waiting for", 2),
    ):
        raise RuntimeError(f"TorchCollectives.all_reduce: failed on rank 0 of 2 ({words})")
