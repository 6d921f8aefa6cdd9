"""Observers of collectives: what a step's timeline is made of, and what a rank sends and waits.

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
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle, ObservedHandle
from fastpar.comm.watchdog import on_this_gpu

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
            self._follow(handle)
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


class _RecordedHandle(ObservedHandle):
    def __init__(self, inner: Handle, span: Span, recorder: Recorder) -> None:
        super().__init__(inner)
        self._span, self._recorder = span, recorder
        self._waited_for = self._noted = False
        self._lock = threading.Lock()  # inner is looked at by one thread at a time

    def wait(self, timeout_s: float | None = None) -> None:
        with self._lock:
            self._waited_for = True
        with self._recorder.span(WAIT, self._span.row, self._span.size_bytes):
            self.inner.wait(timeout_s)
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

    @contextlib.contextmanager
    def of_torch(self, world_size: int) -> Iterator[None]:
        """Counts collectives of torch's groups of that size."""
        with _Dispatched(self, world_size):
            yield

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
            return _Waited(begin(), self)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start


class _Waited(ObservedHandle):
    """A handle whose waits are counted."""

    def __init__(self, inner: Handle, meter: WireMeter) -> None:
        super().__init__(inner)
        self._meter = meter

    def wait(self, timeout_s: float | None = None) -> None:
        with self._meter._waiting():
            self.inner.wait(timeout_s)


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
