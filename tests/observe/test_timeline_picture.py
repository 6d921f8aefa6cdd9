"""The picture of a timeline: titles, rows, legend."""

import pytest

from fastpar.comm.recorder import COMPUTE, GATHER, HOST, REDUCE, WAIT, Span
from fastpar.observe import pictures

PANELS = {
    "fastpar ZeRO-0": [
        Span(COMPUTE, "forward", 0, 10),
        Span(COMPUTE, "backward", 10, 30),
        Span(REDUCE, "all_reduce", 15, 28, 4096),
        Span(WAIT, "all_reduce", 26, 28),
    ],
    "fastpar ZeRO-3": [Span(COMPUTE, "optimizer", 0, 3), Span(GATHER, "all_gather", 0, 2)],
}


def watched(monkeypatch):
    """The figures that will be written."""
    figures = pytest.importorskip("matplotlib.figure")
    shown, save = [], figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, path: shown.append(self) or save(self, path)
    )
    return shown


def test_titles_say_what_a_panel_shows(monkeypatch, tmp_path):
    shown = watched(monkeypatch)
    pictures.draw_timeline(PANELS, ["a line", "long " * 60], tmp_path / "x.png")
    (figure,) = shown
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == ("fastpar ZeRO-0: step 30 ms; collectives under way 13 ms, waited for 2 ms")
    assert titles[1].startswith("fastpar ZeRO-3: step 3 ms")
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["compute", "reduce", "gather"]
    lines = figure.get_supxlabel().split("\n")
    assert lines[0] == "a line"
    assert len(lines) == 3
    assert max(map(len, lines)) <= pictures.LINE_LENGTH


def test_only_rows_with_something_are_shown():
    panels = [[Span(COMPUTE, "forward", 0, 1), Span(WAIT, "nccl", 0, 1)], [Span(GATHER, "", 0, 1)]]
    assert pictures.rows_of(panels) == [COMPUTE, GATHER]
    assert pictures.rows_of([[Span(HOST, "forward", 0, 1)]]) == [HOST]
