"""Operations under way: handles, and the thread that ends them."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.watchdog import on_stream, on_this_gpu, waiting, watched


class Handle(ABC):
    """An operation under way; its tensors must stay as they are until wait() has returned."""

    @property
    def ms(self) -> float | None:
        """How long the operation itself took, peers included; None while it is not known."""
        return None

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result is there; raise what the operation raised."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether wait() would return at once."""


class ObservedHandle(Handle):
    """Another handle, for an observer that looks at waits."""

    def __init__(self, inner: Handle) -> None:
        self.inner = inner

    @property
    def ms(self) -> float | None:
        return self.inner.ms

    def wait(self, timeout_s: float | None = None) -> None:
        self.inner.wait(timeout_s)

    def is_completed(self) -> bool:
        return self.inner.is_completed()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes


class FutureHandle(Handle):
    """A call that runs in the thread of a group; `hurry` is set while somebody waits for it."""

    def __init__(
        self, op: str, future: Future, owner: object, hurry: threading.Event | None = None
    ) -> None:
        self._op, self._future = op, future
        self._owner = owner  # a group that nothing refers to stops
        self._hurry = hurry

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            if self._future.done():
                self._future.result()
                return
            if self._hurry is not None:
                self._hurry.set()
            with waiting(self._op):
                self._future.result(timeout_s)
        except FutureTimeout:
            raise TimeoutError(
                f"{self._op}: expected to end within timeout_s={timeout_s}, got an operation still "
                "under way; wait again, or look for a rank that did not call it"
            ) from None
        finally:
            if self._hurry is not None:
                self._hurry.clear()

    def is_completed(self) -> bool:
        return self._future.done()

    @property
    def ms(self) -> float | None:
        over = self._future.done() and self._future.exception() is None
        return self._future.result() if over else None


# A call that returns a callable has only begun: the operation is over when that returns None.
Rest = Any
Call = Callable[[], Rest]
# (where the result goes, call, its arguments, what the call needs to live)
Task = tuple[Future, Callable[..., Any], tuple, Sequence[Tensor]]


class TaskThread:
    """A daemon thread that ends operations, and begins those that are not begun yet, in order.

    It ends after stop() and when it is collected. `hurry`: somebody waits for an operation.
    """

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=on_this_gpu(_work), args=(self._tasks,), daemon=True)
        self.thread.start()
        self.stop = weakref.finalize(self, self._tasks.put, None)

    def put(self, task: Task | Begun | None) -> None:
        self._tasks.put(task)

    def end_with(self, owner: object) -> None:
        """End what it was given when the owner is collected, or the process ends.

        For tasks that wait for no other rank: a process that ends while a thread is in a kernel
        aborts.
        """
        weakref.finalize(owner, _end, self)


def _end(thread: TaskThread) -> None:
    thread.put(None)
    if threading.current_thread() is not thread.thread:
        thread.thread.join()


def _work(tasks: queue.SimpleQueue) -> None:
    over_at = 0.0
    while (task := tasks.get()) is not None:
        begun = task if isinstance(task, Begun) else Begun(task)
        del task  # it holds its tensors: nobody else may
        over_at = begun.end(over_at)
        del begun


def run_task(task: Task) -> None:
    """The call, with its time or its error for the future."""
    Begun(task).end(0.0)


class Begun:
    """A task whose call has returned."""

    def __init__(self, task: Task) -> None:
        self.future, call, args, self._tensors = task
        self._start = time.perf_counter()
        self._error: BaseException | None = None
        self._rest: Any = None
        try:
            self._rest = call(*args)
        except BaseException as error:
            self._error = error

    def shares(self, tensors: Sequence[Tensor]) -> bool:
        """Whether some of these tensors are in memory that this operation uses."""
        return any(overlap(a, b) for a in self._tensors for b in tensors)

    def end(self, earlier: float) -> float:
        """Wait for it and tell the future; when it was over. Its time counts from `earlier` on."""
        error = self._error
        if error is None and callable(self._rest):
            try:
                through(self._rest)
            except BaseException as failed:
                error = failed
        over_at = time.perf_counter()
        # Before anybody goes on: who made a tensor frees it, and sees that (StepMemory).
        self._tensors, self._rest = (), None
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result((over_at - max(self._start, earlier)) * 1e3)
        return over_at


class StreamHandle(Handle):
    """Work on a stream of its own: behind what the current stream has been given by now."""

    def __init__(
        self, stream: torch.cuda.Stream, call: Callable[[], None], of: tuple, op: str = "delay"
    ) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._device = stream.device
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            self._start.record(stream)
            call()
            self._end.record(stream)
        on_stream(stream, op, self._start, self._end)
        self._tensors = of  # their memory belongs to the current stream: not to be reused before

    def wait(self, timeout_s: float | None = None) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)
        self._tensors = ()

    def is_completed(self) -> bool:
        return self._end.query()

    @property
    def ms(self) -> float | None:
        return self._start.elapsed_time(self._end) if self._end.query() else None


class _Done(Handle):
    """For an operation that ended in its call, or is a part of the current stream."""

    def wait(self, timeout_s: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True


DONE = _Done()


def started(handle: Handle | None) -> Handle:
    """The handle of an operation that was called with async_op=True."""
    assert handle is not None
    return handle


def enqueue(device: torch.device, op: str, call: Callable[[], None]) -> None:
    """Call what enqueues an operation in the current stream; a watchdog sees it if there is one."""
    if not watched():
        call()
        return
    stream = torch.cuda.current_stream(device)
    start, end = torch.cuda.Event(), torch.cuda.Event()
    start.record(stream)
    call()
    end.record(stream)
    on_stream(stream, op, start, end)


def through(rest: Rest) -> None:
    """An operation from its begin to its end."""
    while rest is not None:
        rest = rest()
