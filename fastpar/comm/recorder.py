"""What a step's timeline is made of: phases, collectives and waits, noted by each rank's clock.

[Note: what a bar is] A Recorder is an observer of the engine's collectives. An operation's bar
begins when the engine starts it, pale while operations of the same kind are before it, and ends
when a thread that looks every millisecond finds it complete. Where the main thread waits for an
operation, the compute row is red: that is exposed communication. gloo may move two operations of
one kind at a time; then the pale part of the second is too long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle
from fastpar.comm.transport import make_collectives

COMPUTE, REDUCE, GATHER, TP, WAIT = "compute", "reduce", "gather", "tp", "wait"
CONTROL = "control"  # exchanges of a few numbers
HOST = "host"  # of a GPU: what the CPU is at while it enqueues
LOOK_S = 0.001


@dataclass
class Span:
    """Something that took from begin_ms to end_ms of this rank's clock."""

    row: str  # "compute", "reduce", "gather", "wait"
    name: str  # "forward", "all_gather", ...; of a wait the row of what it is for
    begin_ms: float
    end_ms: float
    size_bytes: int = 0


def now_ms() -> float:
    """Milliseconds of the clock that all processes of a host share."""
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
        made = make_collectives(dist.new_group(members), transport="torch")
        self.watch(made, GATHER if role == "gather" else REDUCE)
        return made

    def watch(self, collectives: Collectives, row: str) -> None:
        """Note from now on what is done with collectives, as long as the recorder is on."""

        def note(_: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]) -> Handle:
            if not self.on:
                return begin()
            span = Span(row, op, now_ms(), 0.0, n_bytes)
            handle = _RecordedHandle(begin(), span, self)
            self._follow(handle)
            return handle

        collectives.observers += (note,)

    @contextlib.contextmanager
    def span(self, row: str, name: str, size_bytes: int = 0) -> Iterator[None]:
        begin = now_ms()
        try:
            yield
        finally:
            if self.on:
                self.spans.append(Span(row, name, begin, now_ms(), size_bytes))

    def _follow(self, handle: _RecordedHandle) -> None:
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
        with self._recorder.span(WAIT, self._span.row, self._span.size_bytes):
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
