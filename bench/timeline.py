"""Training steps as a picture: compute and communication side by side, a panel for each ZeRO stage.

    python -m bench.timeline     draws bench/results/overlap/timeline.png again, from its JSON

[Note: what a bar is] A Recorder stands between the engine and its collectives. An operation's bar
begins when the engine starts it, pale while operations of the same kind are before it, and ends
when a thread that looks every millisecond finds it complete. Where the main thread waits for an
operation, the compute row is red: that is exposed communication. gloo may move two operations of
one kind at a time; then the pale part of the second is too long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.records import RESULTS, machine_line
from fastpar.collectives import Collectives
from fastpar.tasks import Handle
from fastpar.transport import make_collectives

FOLDER = RESULTS / "overlap"
COMPUTE, REDUCE, GATHER, WAIT = "compute", "reduce", "gather", "wait"
COLOURS = {  # Okabe and Ito
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    REDUCE: "#E69F00",
    GATHER: "#CC79A7",
    WAIT: "#D55E00",
}
LOOK_S = 0.001
LINE_LENGTH = 170  # that fits below the picture


@dataclass
class Span:
    """Something that took from begin_ms to end_ms of this rank's clock."""

    row: str  # "compute", "reduce", "gather", "wait"
    name: str  # "forward", "all_gather", ...
    begin_ms: float
    end_ms: float
    size_bytes: int = 0


def now_ms() -> float:
    return time.perf_counter() * 1e3


class Recorder:
    """Notes what happens while it is on. One for each rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.on = False
        self._open: list[_RecordedHandle] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, daemon=True).start()

    def factory(self, group: dist.ProcessGroup | None, role: str) -> Collectives:
        """For parallelize(collectives=...): torch's, each role with a group of its own. Ranks: all.

        One group would queue gathers behind reductions.
        """
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        inner = make_collectives(dist.new_group(members), transport="torch")
        return _Recorded(inner, GATHER if role == "gather" else REDUCE, self)  # type: ignore

    @contextlib.contextmanager
    def span(self, row: str, name: str, size_bytes: int = 0) -> Iterator[None]:
        begin = now_ms()
        try:
            yield
        finally:
            if self.on:
                self.spans.append(Span(row, name, begin, now_ms(), size_bytes))

    def follow(self, handle: _RecordedHandle) -> None:
        """Note when this operation is complete."""
        with self._changed:
            self._open.append(handle)
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._open))
                self._open = [h for h in self._open if not h.note_if_complete()]
            time.sleep(LOOK_S)


class _RecordedHandle(Handle):
    def __init__(self, inner: Handle, span: Span, recorder: Recorder) -> None:
        self._inner, self._span, self._recorder = inner, span, recorder
        self._waited_for = self._noted = False
        self._lock = threading.Lock()  # inner is looked at by one thread at a time

    @property
    def ms(self) -> float | None:
        return self._inner.ms

    def wait(self, timeout_s: float | None = None) -> None:
        with self._lock:
            self._waited_for = True
        with self._recorder.span(WAIT, self._span.name):
            self._inner.wait(timeout_s)
        self._note()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def note_if_complete(self) -> bool:
        """Whether nobody needs to look again."""
        with self._lock:
            if not self._waited_for and self._inner.is_completed():
                self._note()
            return self._noted or self._waited_for

    def _note(self) -> None:
        if not self._noted:
            self._noted = True
            self._span.end_ms = now_ms()
            self._recorder.spans.append(self._span)


class _Recorded:
    """Collectives whose operations are noted; everything else is the inner one's."""

    def __init__(self, inner: Collectives, row: str, recorder: Recorder) -> None:
        self._inner, self._row, self._recorder = inner, row, recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            return found

        def call(*tensors: Any, async_op: bool = False, **options: Any) -> Handle | None:
            if not self._recorder.on:
                return found(*tensors, async_op=async_op, **options)
            size = max(t.nbytes for t in tensors if hasattr(t, "nbytes"))
            span = Span(self._row, name, now_ms(), 0.0, size)
            handle = _RecordedHandle(
                found(*tensors, async_op=True, **options), span, self._recorder
            )
            if async_op:
                self._recorder.follow(handle)
                return handle
            handle.wait()
            return None

        return call


def window(spans: Sequence[Span], begin_ms: float, end_ms: float) -> list[Span]:
    """What lies between two times, cut there and counted from the first."""
    found = []
    for span in spans:
        begin, end = max(span.begin_ms, begin_ms), min(span.end_ms, end_ms)
        if begin < end:
            part = (begin - begin_ms, end - begin_ms)
            found.append(Span(span.row, span.name, *part, span.size_bytes))
    return sorted(found, key=lambda s: s.begin_ms)


def busy_ms(spans: Sequence[Span], rows: Sequence[str]) -> float:
    """Time in which at least one span of these rows was under way."""
    total, until = 0.0, float("-inf")
    for span in sorted((s for s in spans if s.row in rows), key=lambda s: s.begin_ms):
        total += max(0.0, span.end_ms - max(span.begin_ms, until))
        until = max(until, span.end_ms)
    return total


def _bars(axes: Any, y: int, spans: Sequence[Span], colour: str) -> None:
    """Pale while queued behind others of the row."""
    free = float("-inf")
    for span in sorted(spans, key=lambda s: (s.begin_ms, s.end_ms)):
        start = min(max(span.begin_ms, free), span.end_ms)
        free = max(free, span.end_ms)
        if start > span.begin_ms:
            width = start - span.begin_ms
            axes.barh(y, width, 0.8, span.begin_ms, color=colour, alpha=0.25, linewidth=0)
        if span.end_ms > start:
            width = span.end_ms - start
            axes.barh(y, width, 0.8, start, color=colour, edgecolor="white", linewidth=0.4)


def draw(panels: Mapping[str, Sequence[Span]], lines: Sequence[str], path: Path) -> None:
    """A panel for each variant: its compute row, then a row for each kind of collective.

    Args:
        panels: variant -> the spans of one step, from window().
        lines: below the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, all_axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(11, 0.9 + 1.45 * len(panels)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    rows = [COMPUTE, REDUCE, GATHER]
    for (variant, spans), axes in zip(panels.items(), all_axes[:, 0]):
        for span in spans:
            if span.row in (COMPUTE, WAIT):
                name, height = (WAIT, 0.45) if span.row == WAIT else (span.name, 0.8)
                width = span.end_ms - span.begin_ms
                axes.barh(0, width, height, span.begin_ms, color=COLOURS[name], linewidth=0)
        for y, row in enumerate(rows[1:], 1):
            _bars(axes, y, [s for s in spans if s.row == row], COLOURS[row])
        end = max((s.end_ms for s in spans if s.row == COMPUTE), default=0.0)
        waits, moving = busy_ms(spans, [WAIT]), busy_ms(spans, [REDUCE, GATHER])
        axes.set_title(
            f"{variant}: step {end:.0f} ms; collectives under way {moving:.0f} ms, "
            f"waited for {waits:.0f} ms",
            fontsize=9,
            loc="left",
        )
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="x", labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    all_axes[-1, 0].set_xlabel("ms since the step began", fontsize=8)
    all_axes[-1, 0].set_xlim(left=0)
    names = {WAIT: "waits for communication", REDUCE: "reduce", GATHER: "gather"}
    keys = [Patch(color=c, label=names.get(n, n)) for n, c in COLOURS.items()]
    keys.append(Patch(color="#999999", alpha=0.4, label="queued (pale)"))
    figure.legend(
        handles=keys, loc="outside upper center", ncols=len(keys), fontsize=8, frameon=False
    )
    wrapped = [part for line in lines for part in textwrap.wrap(line, LINE_LENGTH)]
    figure.supxlabel("\n".join(wrapped), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def save(
    panels: Mapping[str, Sequence[Span]], about: dict[str, Any], line: str, folder: Path
) -> None:
    """timeline.json in folder, and the picture of it.

    Args:
        line: what was run, on which link.
    """
    steps = {
        variant: [[v if isinstance(v, str) else round(v, 2) for v in asdict(s).values()] for s in p]
        for variant, p in panels.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for variant, spans in steps.items():
        lines = ",\n".join(map(json.dumps, spans))
        parts.append(f"{json.dumps(variant)}: [\n{lines}]")
    body = ",\n".join(parts)
    head = json.dumps({"machine": about, "line": line})[:-1]
    (folder / "timeline.json").write_text(f'{head}, "steps": {{\n{body}\n}}}}\n')
    redraw(folder)


def redraw(folder: Path) -> Path:
    """The picture of what save() wrote."""
    stored = json.loads((folder / "timeline.json").read_text())
    panels = {variant: [Span(*s) for s in spans] for variant, spans in stored["steps"].items()}
    path = folder / "timeline.png"
    draw(panels, [stored["line"], machine_line(stored["machine"])], path)
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args(argv).folder
    try:
        print(f"{redraw(folder).name}: drawn")
    except OSError as error:
        print(
            f"timeline: expected timeline.json in {folder.name}, got {error.strerror}; run "
            "`python -m bench overlap` first",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
