"""The recorder: what it notes, cutting, sums."""

import threading

import torch
import torch.distributed as dist

from fastpar.comm.collectives import Collectives, Handle
from fastpar.comm.recorder import (
    COMPUTE,
    GATHER,
    REDUCE,
    TP,
    WAIT,
    Recorder,
    Span,
    busy_ms,
    now_ms,
    window,
)
from fastpar.comm.transports import make_collectives
from fastpar.testing import run_ranks


class Operation(Handle):
    """Complete when the test says so."""

    def __init__(self):
        self.over, self.looked_at, self.waited = (threading.Event() for _ in range(3))

    def wait(self, timeout_s=None):
        self.waited.set()
        assert self.over.wait(10)

    def is_completed(self):
        done = self.over.is_set()
        if done:
            self.looked_at.set()
        return done


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


def recorded(row):
    recorder, inner = Recorder(), Inner()
    recorder.watch(inner, row)
    return recorder, inner


def test_an_operation_ends_when_it_is_complete_not_when_it_is_waited_for():
    recorder, inner = recorded(REDUCE)
    recorder.on = True
    handle = inner.all_reduce(torch.ones(3), async_op=True)
    before = now_ms()
    inner.operations[0].over.set()
    assert inner.operations[0].looked_at.wait(10)
    assert handle.is_completed()
    handle._lock.acquire()  # the watcher has noted it
    handle._lock.release()
    after = now_ms()
    handle.wait()
    moved, waited = sorted(recorder.spans, key=lambda s: s.row)
    assert (moved.row, moved.name, moved.size_bytes) == (REDUCE, "all_reduce", 12)
    assert moved.begin_ms <= before <= moved.end_ms <= after
    assert waited.row == WAIT
    assert waited.begin_ms >= after


def test_a_wait_is_noted_with_the_operation_it_is_for():
    recorder, inner = recorded(GATHER)
    recorder.on = True
    thread = threading.Thread(target=lambda: inner.all_reduce(torch.ones(3)))
    thread.start()
    while not inner.operations:
        pass
    assert inner.operations[0].waited.wait(10)
    middle = now_ms()
    inner.operations[0].over.set()
    thread.join(10)
    assert sorted(s.row for s in recorder.spans) == [GATHER, WAIT]
    assert all(s.begin_ms <= middle <= s.end_ms for s in recorder.spans)


def test_nothing_is_noted_while_it_is_off():
    recorder, inner = recorded(REDUCE)
    handle = inner.all_reduce(torch.ones(3), async_op=True)
    assert handle is inner.operations[0]
    with recorder.span(COMPUTE, "forward"):
        pass
    assert recorder.spans == []


def with_recorder():
    recorder, x = Recorder(), torch.ones(4)
    kinds = [make_collectives(dist.new_group([0, 1]), transport="torch") for _ in range(2)]
    for collectives, row in zip(kinds, (REDUCE, GATHER)):
        recorder.watch(collectives, row)
    recorder.on = True
    kinds[0].all_reduce(x)
    out = torch.empty(8)
    kinds[1].all_gather(out, x, async_op=True).wait()
    names = [(s.row, s.name, s.size_bytes) for s in recorder.spans if s.row != WAIT]
    return x.tolist(), out.tolist(), names, all(s.end_ms >= s.begin_ms for s in recorder.spans)


def test_recorded_collectives_compute_the_same():
    names = [(REDUCE, "all_reduce", 16), (GATHER, "all_gather", 32)]
    for answer in run_ranks(with_recorder, 2, backend="gloo"):
        assert answer == ([2.0] * 4, [2.0] * 8, names, True)


def test_a_window_cuts_and_counts_from_its_begin():
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


def test_overlapping_spans_count_once():
    spans = [Span(REDUCE, "", 0, 10), Span(REDUCE, "", 5, 8), Span(GATHER, "", 9, 12)]
    assert busy_ms(spans, [REDUCE]) == 10
    assert busy_ms(spans, [REDUCE, GATHER]) == 12
    assert busy_ms(spans, [WAIT]) == 0


def test_what_is_in_use_can_be_watched():
    recorder, inner = recorded(TP)
    recorder.on = True
    handle = inner.all_reduce(torch.ones(3), async_op=True)
    assert recorder.spans == []
    (operation,) = inner.operations
    operation.over.set()
    handle.wait()
    assert [(s.row, s.name, s.size_bytes) for s in recorder.spans] == [
        (WAIT, TP, 12),
        (TP, "all_reduce", 12),
    ]
    recorder.on = False
    inner.all_reduce(torch.ones(3), async_op=True)
    assert len(recorder.spans) == 2
