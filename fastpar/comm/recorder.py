"""The timeline of a step, what a rank sends and how long it waits, and the cost of a step.

A Recorder notes phases, collectives and waits by each rank's clock; a WireMeter counts bytes and
time. torch's collectives (DDP, FSDP2, DeepSpeed) are counted by torch's dispatcher, also those that
C++ starts; fastpar's are observed through their interface, collectives.Collectives.

Sent bytes: a collective of b bytes over W ranks counts as what each rank sends in a ring: (W - 1) /
W * b for reduce-scatter, all-gather, all-to-all and (as the mean over ranks) broadcast; twice that
for an all-reduce; b for a send. Any algorithm must send at least as much in all; some send more.

Bars in a timeline: an operation's bar is as long as its transport says; it begins when the engine
starts it, or when the one before it in its row ends (in_turn). While the main thread waits for an
operation, the compute row is red: exposed communication.

The engine's own account of a step is its CollectiveLog: a StepReport, and hashes of the order.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.collectives import Collectives, Handle, started
from fastpar.comm.watchdog import in_place

_NAMESPACES = ("c10d", "_c10d_functional")  # of torch's collectives
COMPUTE, REDUCE, GATHER, TP, WAIT = "compute", "reduce", "gather", "tp", "wait"
PP = "pp"  # messages between the stages of a pipeline
CONTROL = "control"  # exchanges of a few numbers
# Phases of a step, as engine.on_phase names them.
INPUT, FORWARD, BACKWARD, OPTIMIZER = PHASES = ("input", "forward", "backward", "optimizer")
HOST = "host"  # on a GPU: the CPU's work while it enqueues
PREFIX = "fastpar "  # of our own ranges in a trace


@dataclass
class Span:
    """A range from begin_ms to end_ms of this rank's clock."""

    row: str  # "compute", "reduce", "gather", "wait"
    name: str  # "forward", "all_gather", ...; of a wait: the row it waits for
    begin_ms: float
    end_ms: float
    size_bytes: int = 0
    ranks: int = 1  # in the group of an exchange


def now_ms() -> float:
    """Milliseconds of a clock that all processes of a host share."""
    return time.perf_counter() * 1e3


class Recorder:
    """Notes phases, collectives and waits while it is on. One per rank.

    Attributes:
        in_trace: also mark phases and waits in the profiler's trace.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.on = self.in_trace = False
        self._phase = contextlib.ExitStack()

    def watch(self, collectives: Collectives, row: str) -> None:
        """Note operations of collectives from now on, while the recorder is on."""

        def note(group: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]) -> Handle:
            if not self.on:
                return begin()
            span = Span(row, op, now_ms(), 0.0, n_bytes, group.world_size)
            return _RecordedHandle(begin(), span, self)

        collectives.observers += (note,)

    @contextlib.contextmanager
    def span(self, row: str, name: str, size_bytes: int = 0) -> Iterator[None]:
        label = PREFIX + (WAIT if row == WAIT else name)
        with record_function(label) if self.in_trace else contextlib.nullcontext():
            begin = now_ms()
            try:
                yield
            finally:
                if self.on:
                    self.spans.append(Span(row, name, begin, now_ms(), size_bytes))

    def phase(self, name: str) -> None:
        """Begin a phase, after ending the last one; "" only ends it."""
        self._phase.close()
        if name:
            self._phase.enter_context(self.span(COMPUTE, name))


class _ObservedHandle(Handle):
    """A handle whose waits run inside a context."""

    def __init__(
        self, inner: Handle, around: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.inner, self._around = inner, around

    @property
    def ms(self) -> float | None:
        return self.inner.ms

    def wait(self, timeout_s: float | None = None) -> None:
        with self._around():
            self.inner.wait(timeout_s)

    def is_completed(self) -> bool:
        return self.inner.is_completed()


class _RecordedHandle(_ObservedHandle):
    def __init__(self, inner: Handle, span: Span, recorder: Recorder) -> None:
        super().__init__(inner, lambda: recorder.span(WAIT, span.row, span.size_bytes))
        self._span: Span | None = span
        self._spans = recorder.spans

    def wait(self, timeout_s: float | None = None) -> None:
        super().wait(timeout_s)
        span, self._span = self._span, None
        if span is not None:
            span.end_ms = now_ms() if self.ms is None else span.begin_ms + self.ms
            self._spans.append(span)


def in_turn(spans: Sequence[Span]) -> list[Span]:
    """Moves operations that were queued behind others of their row to their turn."""
    placed, free = [], dict.fromkeys((REDUCE, GATHER, TP, PP), 0.0)
    for span in sorted(spans, key=lambda s: s.begin_ms):
        late = max(0.0, free.get(span.row, 0.0) - span.begin_ms)
        placed.append(replace(span, begin_ms=span.begin_ms + late, end_ms=span.end_ms + late))
        if span.row in free:
            free[span.row] = span.end_ms + late
    return placed


def window(spans: Sequence[Span], begin_ms: float, end_ms: float) -> list[Span]:
    """The spans between two times, cut there, with times relative to the first."""
    inside = []
    for span in spans:
        begin, end = max(span.begin_ms, begin_ms), min(span.end_ms, end_ms)
        if begin < end:
            part = (begin - begin_ms, end - begin_ms)
            inside.append(Span(span.row, span.name, *part, span.size_bytes, span.ranks))
    return sorted(inside, key=lambda s: s.begin_ms)


def busy_ms(spans: Sequence[Span], rows: Sequence[str]) -> float:
    """Time in which at least one span of these rows was running."""
    total, until = 0.0, float("-inf")
    for span in sorted((s for s in spans if s.row in rows), key=lambda s: s.begin_ms):
        total += max(0.0, span.end_ms - max(span.begin_ms, until))
        until = max(until, span.end_ms)
    return total


# Bytes sent


def ring_bytes(operation: str, whole_bytes: int, world_size: int) -> int:
    """Bytes that one rank sends with a ring algorithm.

    Args:
        operation: torch's or fastpar's name of it.
        whole_bytes: of the tensor that all ranks reduce, gather or receive.
    """
    name = operation.replace("_", "")
    if name == "send":
        return whole_bytes
    if not any(word in name for word in ("reduce", "gather", "broadcast", "alltoall")):
        return 0
    ways = 2 if "allreduce" in name else 1
    return ways * whole_bytes * (world_size - 1) // world_size


class WireMeter:
    """Counts one rank's collectives inside its contexts.

    Attributes:
        sent_bytes: see "Sent bytes" above; of all groups together.
        waited_s: on a CPU: time inside calls and waits of fastpar's collectives.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.waited_s = 0.0

    def of_torch(self, world_size: int) -> contextlib.AbstractContextManager[Any]:
        """Count collectives of torch's groups of that size."""
        return _Dispatched(self, world_size)

    @contextlib.contextmanager
    def of_fastpar(self) -> Iterator[None]:
        """Count collectives of fastpar's transports, and the time in them."""
        Collectives.observers += (self._count,)
        try:
            yield
        finally:
            Collectives.observers = tuple(o for o in Collectives.observers if o != self._count)

    def _count(
        self, group: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]
    ) -> Handle:
        self.sent_bytes += ring_bytes(op, n_bytes, group.world_size)
        with self._waiting():
            return _ObservedHandle(begin(), self._waiting)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start


class _Dispatched(TorchDispatchMode):
    """Sees torch's operations, also in autograd's threads."""

    def __init__(self, meter: WireMeter, world_size: int) -> None:
        super().__init__()
        self._meter, self._world_size = meter, world_size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            name = func._schema.name.partition("::")[2]
            whole = max((_bytes(arg) for arg in args), default=0)
            self._meter.sent_bytes += ring_bytes(name, whole, self._world_size)
        return func(*args, **(kwargs or {}))


def _bytes(arg: Any) -> int:
    """Bytes of the tensors in an argument; gathers take lists of lists of tensors."""
    if isinstance(arg, torch.Tensor):
        return arg.nbytes
    if isinstance(arg, Iterable) and not isinstance(arg, str):
        return sum(_bytes(item) for item in arg)
    return 0


_HASH = (1 << 61) - 1
_KEPT = 8  # steps on a GPU whose events may not have been reached yet


@dataclass(frozen=True)
class StepReport:
    """The cost of one step on one rank; times in ms, None while unknown.

    Attributes:
        step_ms: from the step's first forward or backward to the end of optimizer.step().
        compute_ms: step_ms - exposed_ms - offload_ms.
        comm_ms: sum of the durations of all collectives, waiting for peers included; None where
            they are parts of a CUDA graph, as exposed_ms and compute_ms are then.
        exposed_ms: time in which this rank (on a GPU its compute stream) only waited for them.
        wire_bytes: sent by this rank.
        offload_ms: time in which it waited for the host's optimizer step and its copies.
    """

    step_ms: float | None
    compute_ms: float | None
    comm_ms: float | None
    exposed_ms: float | None
    wire_bytes: int
    offload_ms: float | None = 0.0


class _Clock:
    """A time of the host, with the interface of a CUDA event."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Clock) -> float:
        return (end._at - self._at) * 1e3


def _event() -> torch.cuda.Event:
    """An event in the compute stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class _Step:
    """The times of one step; each is a _Clock or an event."""

    start: _Clock | torch.cuda.Event
    end: _Clock | torch.cuda.Event | None = None
    waits: list = field(default_factory=list)
    offloads: list = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    wire_bytes: int = 0
    in_graph: bool = False  # its collectives have no times

    def is_over(self) -> bool:
        """Whether all its events were reached; does not wait."""
        marks = [self.end, *(end for _, end in (*self.waits, *self.offloads))]
        return all(mark is not None and mark.query() for mark in marks)

    def report(self) -> StepReport:
        step_ms = self.start.elapsed_time(self.end)  # type: ignore[arg-type]
        if self.in_graph:
            return StepReport(step_ms, None, None, None, self.wire_bytes)
        exposed_ms = sum(start.elapsed_time(end) for start, end in self.waits)
        offload_ms = sum(start.elapsed_time(end) for start, end in self.offloads)
        comm_ms = sum(ms for handle in self.handles if (ms := handle.ms) is not None)
        compute_ms = step_ms - exposed_ms - offload_ms
        return StepReport(step_ms, compute_ms, comm_ms, exposed_ms, self.wire_bytes, offload_ms)


class StepTimer:
    """Collects a step's times: on a CPU by the clock, on a GPU by events in the current stream.

    The host never waits: on a GPU a report is that of the newest step whose events were reached.

    Attributes:
        off: a step is captured in a CUDA graph: only the bytes of its collectives are added.
        graph_bytes: those of the last such step.
    """

    off = False
    graph_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], _Clock | torch.cuda.Event]
        self._mark = _event if device.type == "cuda" else _Clock
        self._step: _Step | None = None
        self._steps: deque[_Step] = deque(maxlen=_KEPT)  # ended, not reported
        self._known: StepReport | None = None
        self._early: list[Handle] = []  # still running when the last step ended: the next step's
        self._early_bytes = 0  # of collectives started between two steps

    def begin(self) -> None:
        """Begin a step, if none has begun."""
        if self._step is None and not self.off:
            self._step = _Step(self._mark(), handles=self._early, wire_bytes=self._early_bytes)
            self._early, self._early_bytes = [], 0

    @contextlib.contextmanager
    def waiting(self, *, offload: bool = False) -> Iterator[None]:
        """Around a wait for communication, or offload; between two steps it counts for neither."""
        if self.off:
            yield
            return
        start = self._mark()
        try:
            yield
        finally:
            if self._step is not None:
                kind = self._step.offloads if offload else self._step.waits
                kind.append((start, self._mark()))

    def add(self, handle: Handle, wire_bytes: int) -> None:
        """Add a collective of this step, or between two steps of the next one."""
        if self.off:
            self.graph_bytes += wire_bytes
        elif self._step is None:
            self._early.append(handle)
            self._early_bytes += wire_bytes
        else:
            self._step.handles.append(handle)
            self._step.wire_bytes += wire_bytes

    def end_step(self, *, in_graph: bool = False) -> StepReport:
        """End the step. Operations that still run count for the next one.

        in_graph: its collectives are those of the last captured step.
        """
        step, self._step = self._step, None
        assert step is not None
        step.end = self._mark()
        if in_graph:
            step.in_graph, step.wire_bytes = True, self.graph_bytes
        if isinstance(step.end, _Clock):
            self._early = [h for h in step.handles if not h.is_completed()]
            step.handles = [h for h in step.handles if h.is_completed()]
        self._steps.append(step)
        while self._steps and self._steps[0].is_over():
            self._known = self._steps.popleft().report()
        return self._known or StepReport(None, None, None, None, step.wire_bytes)


def extended_hash(digest: int, number: int) -> int:
    """The hash of a list of numbers, extended by one number."""
    return (digest * 1000003 + number + 1) % _HASH


class CollectiveLog:
    """The collectives of one engine: their times, a hash of their order, and their names in errors.

    Attributes:
        timer: of the steps.
        hashes: of the reductions and of the gathers launched since the last step.
        n_reductions: number of reductions of all buckets; names the step in errors.
        n_steps: number of steps that ended.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.timer, self._rank = StepTimer(device), rank
        self.hashes, self.n_reductions, self.n_steps = [0, 0], 0, 0

    def note(self, kind: int, bucket: int) -> None:
        """Hash the launch of a bucket's reduction (0) or gather (1)."""
        self.hashes[kind] = extended_hash(self.hashes[kind], bucket)

    def add(self, handle: Handle, x: Tensor, group: Collectives, *, both_ways: bool) -> None:
        """Add a running collective of x; both_ways: an all-reduce."""
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
        """Name the action and the bucket in errors inside, and for the watchdog."""
        try:
            with in_place(f"{action} bucket", bucket):
                yield
        except RuntimeError as error:
            if str(error).startswith("Engine:"):
                raise
            advice = "if another rank stopped or skipped a collective, its own message says why"
            if gone := _gone(str(error)):
                advice = (
                    f"{gone} has ended after step {self.n_steps}; unless its own message says why, "
                    "give every rank the same number of batches, and save on every rank"
                )
            raise RuntimeError(
                f"Engine: rank {self._rank} failed while {action} bucket {bucket} of step "
                f"{self.n_reductions} ({error}); {advice}"
            ) from error


def _gone(error: str) -> str | None:
    """The rank that has left the run, by the error of a collective; None: nothing says so.

    All ranks of an engine end the same steps, as each has an exchange between them.
    """
    if match := re.search(r"(rank \d+) closed its group|the process of (rank \d+) ended", error):
        return match[1] or match[2]
    if not any(words in error for words in ("closed by peer", "reset by peer", "Broken pipe")):
        return None
    of_two = re.search(r"failed on rank ([01]) of 2 ", error)
    return "another rank" if of_two is None else f"rank {1 - int(of_two[1])}"
