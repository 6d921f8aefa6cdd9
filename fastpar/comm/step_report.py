"""What a step cost (time, communication, waiting for it), and the log of what was sent for it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle, started
from fastpar.comm.watchdog import in_place

_HASH = (1 << 61) - 1
_KEPT = 8  # steps on a GPU whose events may still be ahead of the host


@dataclass(frozen=True)
class StepReport:
    """The cost of one step on one rank; times in ms, None where they are not known (yet).

    Attributes:
        step_ms: from the step's first forward or backward to the end of optimizer.step().
        compute_ms: step_ms without exposed_ms.
        comm_ms: the sum over the collectives of how long each took, its peers included.
        exposed_ms: in which this rank (on a GPU its compute stream) did nothing but wait for them.
        wire_bytes: sent by this rank.
        offload_ms: in which it waited for the host's optimizer step and its copies; in compute_ms
            neither.
    """

    step_ms: float | None
    compute_ms: float | None
    comm_ms: float | None
    exposed_ms: float | None
    wire_bytes: int
    offload_ms: float | None = 0.0


class _Clock:
    """A time of the host."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Clock) -> float:
        return (end._at - self._at) * 1e3


def _event() -> torch.cuda.Event:
    """When the compute stream comes here."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class _Step:
    """What is known of a step; a mark is a _Clock or an event."""

    start: _Clock | torch.cuda.Event
    end: _Clock | torch.cuda.Event | None = None
    waits: list = field(default_factory=list)
    offloads: list = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    wire_bytes: int = 0

    def is_over(self) -> bool:
        """Whether every mark has been passed; never waits for one."""
        marks = [self.end, *(end for _, end in (*self.waits, *self.offloads))]
        return all(mark is not None and mark.query() for mark in marks)

    def report(self) -> StepReport:
        step_ms = self.start.elapsed_time(self.end)  # type: ignore[arg-type]
        exposed_ms = sum(start.elapsed_time(end) for start, end in self.waits)
        offload_ms = sum(start.elapsed_time(end) for start, end in self.offloads)
        comm_ms = sum(ms for handle in self.handles if (ms := handle.ms) is not None)
        compute_ms = step_ms - exposed_ms - offload_ms
        return StepReport(step_ms, compute_ms, comm_ms, exposed_ms, self.wire_bytes, offload_ms)


class StepTimer:
    """Collects a step's times: on a CPU by the clock, on a GPU by events on the current stream.

    The host never waits: on a GPU a report is that of the newest step whose events are over.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], _Clock | torch.cuda.Event]
        self._mark = _event if device.type == "cuda" else _Clock
        self._step: _Step | None = None
        self._steps: deque[_Step] = deque(maxlen=_KEPT)  # ended, not reported
        self._known: StepReport | None = None
        self._early: list[Handle] = []  # not over when the last step ended: the next one's
        self._early_bytes = 0  # started between two steps

    def begin(self) -> None:
        """A step begins, if none has."""
        if self._step is None:
            self._step = _Step(self._mark(), handles=self._early, wire_bytes=self._early_bytes)
            self._early, self._early_bytes = [], 0

    @contextlib.contextmanager
    def waiting(self, *, offload: bool = False) -> Iterator[None]:
        """Around a wait for communication, or offload; between two steps it counts for neither."""
        start = self._mark()
        try:
            yield
        finally:
            if self._step is not None:
                kind = self._step.offloads if offload else self._step.waits
                kind.append((start, self._mark()))

    def add(self, handle: Handle, wire_bytes: int) -> None:
        """A collective that was started for this step, or for the next one between two."""
        if self._step is None:
            self._early.append(handle)
            self._early_bytes += wire_bytes
        else:
            self._step.handles.append(handle)
            self._step.wire_bytes += wire_bytes

    def end_step(self) -> StepReport:
        """The step that has begun is over. What still runs counts its time for the next one."""
        step, self._step = self._step, None
        assert step is not None
        step.end = self._mark()
        if isinstance(step.end, _Clock):
            self._early = [h for h in step.handles if not h.is_completed()]
            step.handles = [h for h in step.handles if h.is_completed()]
        self._steps.append(step)
        while self._steps and self._steps[0].is_over():
            self._known = self._steps.popleft().report()
        return self._known or StepReport(None, None, None, None, step.wire_bytes)


def extended_hash(digest: int, number: int) -> int:
    """The hash of a list of numbers with one more at its end."""
    return (digest * 1000003 + number + 1) % _HASH


class CollectiveLog:
    """The collectives of one engine: timed, hashed in their order, and named in errors.

    Attributes:
        timer: of the steps.
        hashes: of the reductions and of the gathers that were launched since the last step.
        n_reductions: of all buckets together, since the beginning; names the step in errors.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.timer, self._rank = StepTimer(device), rank
        self.hashes, self.n_reductions = [0, 0], 0

    def note(self, kind: int, bucket: int) -> None:
        """The reduction (0) or gather (1) of a bucket is launched."""
        self.hashes[kind] = extended_hash(self.hashes[kind], bucket)

    def add(self, handle: Handle, x: Tensor, group: Collectives, *, both_ways: bool) -> None:
        """A collective of x is under way; both_ways: an all-reduce."""
        op = "all_reduce" if both_ways else "reduce_scatter"
        self.timer.add(handle, group.sent_bytes(op, x.numel() * x.element_size(), x.numel()))

    def wait(
        self, handle: Handle, action: str, bucket: int, timeout_s: float | None = None
    ) -> None:
        """Wait for a collective."""
        with self.naming(action, bucket), self.timer.waiting():
            handle.wait(timeout_s)

    def all_reduce(self, group: Collectives, x: Tensor, action: str, bucket: int) -> None:
        """Replace x by its sum over a group, as a part of the step."""
        with self.naming(action, bucket):
            handle = started(group.all_reduce(x, async_op=True))
            self.add(handle, x, group, both_ways=True)
            with self.timer.waiting():
                handle.wait()

    @contextlib.contextmanager
    def naming(self, action: str, bucket: int) -> Iterator[None]:
        """Errors inside, and the watchdog, say what this rank was doing to which bucket."""
        try:
            with in_place(f"{action} bucket", bucket):
                yield
        except RuntimeError as error:
            if str(error).startswith("Engine:"):
                raise
            raise RuntimeError(
                f"Engine: expected every rank to take part, got an error on rank {self._rank} "
                f"while {action} bucket {bucket} of step {self.n_reductions} ({error}); "
                "another rank stopped or skipped a collective: its own message says why"
            ) from error
