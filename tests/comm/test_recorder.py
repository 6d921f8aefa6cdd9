"""What is noted and counted of collectives: the recorder's spans, the meter's bytes."""

import threading

import pytest
import torch
import torch.distributed as dist
from cells import slow

from fastpar.comm.collectives import Collectives, Handle
from fastpar.comm.recorder import (
    COMPUTE,
    GATHER,
    REDUCE,
    TP,
    WAIT,
    Recorder,
    Span,
    WireMeter,
    busy_ms,
    now_ms,
    ring_bytes,
    window,
)
from fastpar.comm.transports import make_collectives
from fastpar.models.gpt import GPT
from fastpar.observe.strategies import STRATEGIES, Settings, build
from fastpar.settings.model import GPTConfig
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


def test_what_is_in_use_can_be_watched_and_no_longer():
    recorder, inner = recorded(TP)
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


# Bytes, beside what they must be

TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)
NUMEL = sum(p.numel() for p in GPT(TINY).parameters())


def steps_on_rank(names):
    """Each strategy's third step: bytes, seconds in communication, what the engine says."""
    found = {}
    for name in names:
        made = build(name, lambda: GPT(TINY, seed=1), Settings(max_grad_norm=1.0))
        x = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))
        batch = (x, x)
        for _ in range(2):
            made.train_step([batch], 1e-3)
        meter = WireMeter()
        ours = STRATEGIES[name].package == "fastpar"
        with meter.of_fastpar() if ours else meter.of_torch(2):
            made.train_step([batch], 1e-3)
        counted = meter.sent_bytes
        made.train_step([batch], 1e-3)
        assert meter.sent_bytes == counted, "it counts after its end"
        found[name] = (counted, meter.waited_s, made.report())
        made.close()
    return found


@pytest.mark.parametrize(
    "names",
    [["ddp", "fsdp2", "zero2", "zero3", "tp"], slow(["fsdp2-no-reshard", "dp", "zero1"])],
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
