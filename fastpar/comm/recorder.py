"""What a step's timeline is made of, what a rank sends and waits, and what a step cost.

A Recorder notes phases, collectives and waits by each rank's clock; a WireMeter counts bytes and
time. torch's collectives (DDP, FSDP2, DeepSpeed) are counted by torch's dispatcher, those that C++
starts included; fastpar's are seen by their one interface, collectives.Collectives.

[Note: sent bytes] A collective over W ranks of b bytes counts as what each rank sends in a ring:
(W - 1) / W * b for reduce-scatter, all-gather, all-to-all and, in the mean over the ranks, a
broadcast; twice that for an all-reduce; b for a send. Any algorithm must send as much in all; some
send more.

[Note: what a bar is] A Recorder is an observer of the engine's collectives. An operation's bar
begins when the engine starts it, pale while operations of the same kind are before it, and ends
when a thread that looks every millisecond finds it complete. Where the main thread waits for an
operation, the compute row is red: that is exposed communication. gloo may move two operations of
one kind at a time; then the pale part of the second is too long.

The engine's own account of a step is its CollectiveLog: a StepReport for each, hashes of the order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.collectives import Collectives, Handle, started
from fastpar.comm.watchdog import in_place, on_this_gpu

_NAMESPACES = ("c10d", "_c10d_functional")  # of torch's collectives
COMPUTE, REDUCE, GATHER, TP, WAIT = "compute", "reduce", "gather", "tp", "wait"
PP = "pp"  # messages between the stages of a pipeline
CONTROL = "control"  # exchanges of a few numbers
# Phases of a step, as engine.on_phase names them.
INPUT, FORWARD, BACKWARD, OPTIMIZER = PHASES = ("input", "forward", "backward", "optimizer")
HOST = "host"  # of a GPU: what the CPU is at while it enqueues
PREFIX = "fastpar "  # of our own ranges in a trace
LOOK_S = 0.001


@dataclass
class Span:
    """Something that took from begin_ms to end_ms of this rank's clock."""

    row: str  # "compute", "reduce", "gather", "wait"
    name: str  # "forward", "all_gather", ...; of a wait the row of what it is for
    begin_ms: float
    end_ms: float
    size_bytes: int = 0
    ranks: int = 1  # of the group of an exchange


def now_ms() -> float:
    """Milliseconds of the clock that all processes of a host share."""
    return time.perf_counter() * 1e3


class Recorder:
    """Notes what happens while it is on. One for each rank.

    Attributes:
        in_trace: whether phases and waits are marked in the profiler's trace, too.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.on = self.in_trace = False
        self._phase = contextlib.ExitStack()
        self._open: list[_RecordedHandle] = []
        self._changed = threading.Condition()
        threading.Thread(target=on_this_gpu(self._watch), daemon=True).start()

    def watch(self, collectives: Collectives, row: str) -> None:
        """Note from now on what is done with collectives, as long as the recorder is on."""

        def note(group: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]) -> Handle:
            if not self.on:
                return begin()
            span = Span(row, op, now_ms(), 0.0, n_bytes, group.world_size)
            handle = _RecordedHandle(begin(), span, self)
            with self._changed:  # the thread notes when it is complete
                self._open.append(handle)
                self._changed.notify()
            return handle

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
        """From here on it is this phase; "" ends the last one."""
        self._phase.close()
        if name:
            self._phase.enter_context(self.span(COMPUTE, name))

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._open))
                self._open = [h for h in self._open if not h.note_if_complete()]
            time.sleep(LOOK_S)


class _ObservedHandle(Handle):
    """Another handle, whose waits are inside of a context."""

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
        self._span, self._recorder = span, recorder
        self._waited_for = self._noted = False
        self._lock = threading.Lock()  # inner is looked at by one thread at a time

    def wait(self, timeout_s: float | None = None) -> None:
        with self._lock:
            self._waited_for = True
        super().wait(timeout_s)
        self._note()

    def note_if_complete(self) -> bool:
        """Whether nobody needs to look again."""
        with self._lock:
            if not self._waited_for and self.inner.is_completed():
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
            found.append(Span(span.row, span.name, *part, span.size_bytes, span.ranks))
    return sorted(found, key=lambda s: s.begin_ms)


def busy_ms(spans: Sequence[Span], rows: Sequence[str]) -> float:
    """Time in which at least one span of these rows was under way."""
    total, until = 0.0, float("-inf")
    for span in sorted((s for s in spans if s.row in rows), key=lambda s: s.begin_ms):
        total += max(0.0, span.end_ms - max(span.begin_ms, until))
        until = max(until, span.end_ms)
    return total


# Bytes on the wire


def ring_bytes(operation: str, whole_bytes: int, world_size: int) -> int:
    """Bytes that one rank sends by a ring algorithm: [Note: sent bytes].

    Args:
        operation: its name, as torch or fastpar have it.
        whole_bytes: of the tensor that all ranks reduce, gather or get.
    """
    name = operation.replace("_", "")
    if name == "send":
        return whole_bytes
    if not any(word in name for word in ("reduce", "gather", "broadcast", "alltoall")):
        return 0
    ways = 2 if "allreduce" in name else 1
    return ways * whole_bytes * (world_size - 1) // world_size


class WireMeter:
    """Counts one rank's collectives while a counting context is open.

    Attributes:
        sent_bytes: see [Note: sent bytes]; of all groups together.
        waited_s: on a CPU, of fastpar's: in calls and in waits, where nothing else was done.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.waited_s = 0.0

    def of_torch(self, world_size: int) -> contextlib.AbstractContextManager[Any]:
        """Counts collectives of torch's groups of that size."""
        return _Dispatched(self, world_size)

    @contextlib.contextmanager
    def of_fastpar(self) -> Iterator[None]:
        """Counts those of fastpar's transports, and the time in them."""
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
    """Sees torch's operations; autograd's threads take it along."""

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
    """Bytes of the tensors in an argument; gathers fill lists of lists of tensors."""
    if isinstance(arg, torch.Tensor):
        return arg.nbytes
    if isinstance(arg, Iterable) and not isinstance(arg, str):
        return sum(_bytes(item) for item in arg)
    return 0


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
