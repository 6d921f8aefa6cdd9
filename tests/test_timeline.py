"""Timelines: what a recorder notes, cutting, sums, and the picture."""

import json
import threading

import pytest
import torch
from test_records import ABOUT

from bench import timeline
from bench.timeline import COMPUTE, GATHER, REDUCE, WAIT, Recorder, Span, busy_ms, window
from fastpar.collectives import TorchCollectives
from fastpar.tasks import Handle
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


class Inner:
    """A transport whose operations the test completes."""

    transport = "fake"

    def __init__(self):
        self.operations = []

    def all_reduce(self, x, *, mean=False, async_op=False, tag=0):
        self.operations.append(Operation())
        return self.operations[-1]


def test_an_operation_ends_when_it_is_complete_not_when_it_is_waited_for():
    recorder, inner = Recorder(), Inner()
    by = timeline._Recorded(inner, REDUCE, recorder)
    assert by.transport == "fake"
    recorder.on = True
    handle = by.all_reduce(torch.ones(3), async_op=True)
    before = timeline.now_ms()
    inner.operations[0].over.set()
    assert inner.operations[0].looked_at.wait(10)
    assert handle.is_completed()
    handle._lock.acquire()  # the watcher has noted it
    handle._lock.release()
    after = timeline.now_ms()
    handle.wait()
    moved, waited = sorted(recorder.spans, key=lambda s: s.row)
    assert (moved.row, moved.name, moved.size_bytes) == (REDUCE, "all_reduce", 12)
    assert moved.begin_ms <= before <= moved.end_ms <= after
    assert waited.row == WAIT
    assert waited.begin_ms >= after


def test_a_wait_is_noted_with_the_operation_it_is_for():
    recorder, inner = Recorder(), Inner()
    by = timeline._Recorded(inner, GATHER, recorder)
    recorder.on = True
    thread = threading.Thread(target=lambda: by.all_reduce(torch.ones(3)))
    thread.start()
    while not inner.operations:
        pass
    assert inner.operations[0].waited.wait(10)
    middle = timeline.now_ms()
    inner.operations[0].over.set()
    thread.join(10)
    assert sorted(s.row for s in recorder.spans) == [GATHER, WAIT]
    assert all(s.begin_ms <= middle <= s.end_ms for s in recorder.spans)


def test_nothing_is_noted_while_it_is_off():
    recorder, inner = Recorder(), Inner()
    by = timeline._Recorded(inner, REDUCE, recorder)
    handle = by.all_reduce(torch.ones(3), async_op=True)
    assert handle is inner.operations[0]
    with recorder.span(COMPUTE, "forward"):
        pass
    assert recorder.spans == []


def with_recorder():
    recorder = Recorder()
    kinds = [recorder.factory(None, role) for role in ("reduce", "gather")]
    assert kinds[0].group != kinds[1].group
    assert isinstance(kinds[0]._inner, TorchCollectives)
    recorder.on = True
    x = torch.ones(4)
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


PANELS = {
    "fastpar ZeRO-0": [
        Span(COMPUTE, "forward", 0, 10),
        Span(COMPUTE, "backward", 10, 30),
        Span(REDUCE, "all_reduce", 15, 28, 4096),
        Span(WAIT, "all_reduce", 26, 28),
    ],
    "fastpar ZeRO-3": [Span(COMPUTE, "optimizer", 0, 3), Span(GATHER, "all_gather", 0, 2)],
}


def test_the_picture_comes_from_the_file_beside_it(tmp_path, capsys):
    timeline.save(PANELS, ABOUT, "two ranks", tmp_path)
    stored = json.loads((tmp_path / "timeline.json").read_text())
    assert stored["line"] == "two ranks"
    assert [Span(*s) for s in stored["steps"]["fastpar ZeRO-0"]] == PANELS["fastpar ZeRO-0"]
    first = (tmp_path / "timeline.png").read_bytes()
    (tmp_path / "timeline.png").unlink()
    assert timeline.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "timeline.png: drawn\n"
    assert (tmp_path / "timeline.png").read_bytes() == first


def test_a_picture_needs_its_file(tmp_path, capsys):
    assert timeline.main([str(tmp_path)]) == 2
    wanted = f"timeline: expected timeline.json in {tmp_path.name}, got No such file or directory"
    assert wanted in capsys.readouterr().err


def test_titles_say_what_a_panel_shows(monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)
    timeline.draw(PANELS, ["a line", "long " * 60], tmp_path / "x.png")
    (figure,) = shown
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == ("fastpar ZeRO-0: step 30 ms; collectives under way 13 ms, waited for 2 ms")
    assert titles[1].startswith("fastpar ZeRO-3: step 3 ms")
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["compute", "reduce", "gather"]
    lines = figure.get_supxlabel().split("\n")
    assert lines[0] == "a line"
    assert len(lines) == 3
    assert max(map(len, lines)) <= timeline.LINE_LENGTH
    pyplot.close("all")
