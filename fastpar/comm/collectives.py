"""The interface of every transport: the collectives of one group of ranks.

A transport moves bytes and adds them; transports.py chooses one for a group. Except for send and
recv every operation is collective: all ranks of the group call the same ones in the same order. A
tag names a call, so that a transport that compares tags (shared memory) detects ranks that are out
of step. A running operation is a Handle, in a thread or on a stream.

[Note: order of a sum]
If a class promises it, a sum is a fixed pairwise tree over the ranks (csrc/sum_tree.h), 16-bit
types are added in fp32 and rounded once, and a mean is that sum divided by the number of ranks.
Then every rank, every chunking, every such transport and both ways to reduce (all_reduce, or
reduce_scatter and all_gather) give the same bits. Otherwise the backend chooses the order.

Streams: on a GPU an asynchronous operation is enqueued after the present work of the current
stream, runs concurrently with later work, and Handle.wait() makes the current stream wait for it; a
synchronous one runs in the current stream. The host never waits. On a CPU the operation runs in
another thread and wait() blocks.

[Note: captured operations] While the current stream is captured in a CUDA graph, an operation over
NCCL becomes a part of the graph: its stream forks from the current one and wait() joins it, both by
events that are in the graph. It has no times, and no entry for a watchdog: the host can query
neither. A watchdog sees a replay as one operation (optim/graphs.py). NCCL inside graphs never ran
here: this is by CUDA's and NCCL's documents.
"""

from __future__ import annotations

import functools
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

from fastpar.comm.watchdog import count_call, on_stream, on_this_gpu, waiting, watched
from fastpar.kernels import sum_shards


class Handle(ABC):
    """A running operation; its tensors must not change until wait() has returned."""

    @property
    def ms(self) -> float | None:
        """Duration of the operation, waiting for peers included; None while unknown."""
        return None

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result is there; raise what the operation raised."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether wait() would return at once."""


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes


class FutureHandle(Handle):
    """A call that runs in the thread of a group; `hurry` is set while wait() waits for it."""

    def __init__(
        self, op: str, future: Future, owner: object, hurry: threading.Event | None = None
    ) -> None:
        self._op, self._future = op, future
        self._owner = owner  # keeps the group alive, which would stop otherwise
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
                f"{self._op}: not finished within timeout_s={timeout_s}; wait again, or look for "
                "a rank that did not call it"
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


# If a call returns a callable, the operation goes on with it; it is over when that returns None.
Rest = Any
Call = Callable[[], Rest]
# (future of the result, call, its arguments, tensors that must stay alive)
Task = tuple[Future, Callable[..., Any], tuple, Sequence[Tensor]]


class TaskThread:
    """A daemon thread that finishes operations in order, and begins those not begun yet.

    It ends after stop() and when it is collected. `hurry` is set while a thread waits for an
    operation.
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
        """Finish its tasks when the owner is collected or the process ends.

        Only for tasks that wait for no other rank: a process that ends while a thread is in a
        kernel aborts.
        """
        weakref.finalize(owner, self.end)

    def end(self) -> None:
        """Stop after the present tasks, and wait for them."""
        self.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join()


def _work(tasks: queue.SimpleQueue) -> None:
    over_at = 0.0
    while (task := tasks.get()) is not None:
        begun = task if isinstance(task, Begun) else Begun(task)
        del task  # it holds tensors that must be freed in time
        over_at = begun.end(over_at)
        del begun


def run_task(task: Task) -> None:
    """Run the call; the future gets its time or its error."""
    Begun(task).end(0.0)


class Begun:
    """A task that was begun: its call has returned."""

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
        """Whether this operation uses memory of any of these tensors."""
        return any(overlap(a, b) for a in self._tensors for b in tensors)

    def end(self, earlier: float) -> float:
        """Wait for it and set the future; returns the time of its end. earlier: earliest start."""
        try:
            if callable(self._rest):
                through(self._rest)
        except BaseException as error:
            self._error = error
        over_at = time.perf_counter()
        # Before the waiting thread continues, which may check that the memory is free (StepMemory).
        self._tensors, self._rest = (), None
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result((over_at - max(self._start, earlier)) * 1e3)
        return over_at


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class StreamHandle(Handle):
    """Work on its own stream, after the present work of the current stream."""

    def __init__(
        self, stream: torch.cuda.Stream, call: Callable[[], None], of: tuple, op: str = "delay"
    ) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._device, self._start = stream.device, None
        self._tensors = of  # their memory belongs to the current stream: no reuse before wait()
        if torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(stream):
                call()
            self._end = stream.record_event()
            return
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            self._start.record(stream)
            call()
            self._end.record(stream)
        on_stream(stream, op, self._start, self._end)

    def wait(self, timeout_s: float | None = None) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)
        self._tensors = ()

    def is_completed(self) -> bool:
        return self._end.query()

    @property
    def ms(self) -> float | None:
        if self._start is None or not self._end.query():
            return None
        return self._start.elapsed_time(self._end)


class _Done(Handle):
    """An operation that ended in its call, or that runs in the current stream."""

    def wait(self, timeout_s: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True


DONE = _Done()


def started(handle: Handle | None) -> Handle:
    """Assert that a call with async_op=True returned a handle."""
    assert handle is not None
    return handle


def enqueue(device: torch.device, op: str, call: Callable[[], None]) -> None:
    """Run a call that enqueues an operation in the current stream, visibly for a watchdog."""
    if not watched() or torch.cuda.is_current_stream_capturing():
        call()
        return
    stream = torch.cuda.current_stream(device)
    start, end = torch.cuda.Event(), torch.cuda.Event()
    start.record(stream)
    call()
    end.record(stream)
    on_stream(stream, op, start, end)


def through(rest: Rest) -> None:
    """Run an operation to its end."""
    while rest is not None:
        rest = rest()


SUMMABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
# Called with (collectives, operation, bytes of its largest tensor, begin); must call begin.
Observer = Callable[["Collectives", str, int, Callable[[], Handle]], Handle]


class Collectives(ABC):
    """The operations of one rank in a group.

    Every operation returns a Handle if async_op, else None when the result is there.

    Attributes:
        rank, world_size: in the group.
        device: of the tensors.
        transport: "shm" | "gloo" | "nccl" ...; why: the reason for it, as text.
        in_caller: operations run in the calling thread, before the call returns.
        captures: operations can be parts of a CUDA graph: [Note: captured operations].
        observers: each begins the operations instead of the transport, and may wrap their handles.
        calls: number of earlier operations; see wires.py.
        rounds: all_gather gives rounded values, the same on all ranks; see wires.py.
    """

    rank: int
    world_size: int
    device: torch.device
    transport: str
    why: str
    in_caller: bool = False
    captures: bool = False
    rounds: bool = False
    calls: int = 0
    observers: tuple[Observer, ...] = ()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new [numel] tensor in memory that this transport reads and writes without a copy.

        Ranks: all, in the same order with the same sizes.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    @property
    def exact(self) -> Collectives:
        """The same ranks without rounding."""
        return self

    def sent_bytes(self, op: str, n_bytes: int, numel: int) -> int:
        """Bytes that a rank sends at least, for an operation on n_bytes in all."""
        part = n_bytes // self.world_size
        return part * (self.world_size - 1) * (2 if op == "all_reduce" else 1)

    def all_reduce(
        self, x: Tensor, *, mean: bool = False, async_op: bool = False, tag: int = 0
    ) -> Handle | None:
        """Replace x[P] by its sum (or mean) over the ranks."""
        self._check("all_reduce", x, summed=True, mean=mean)
        return self._run("all_reduce", x, async_op, lambda: self._all_reduce(x, mean, tag))

    def reduce_scatter(
        self, out: Tensor, x: Tensor, *, mean: bool = False, async_op: bool = False, tag: int = 0
    ) -> Handle | None:
        """out[P / W] = this rank's slice of the sum (or mean) of x[P]; x is overwritten.

        out may be that slice of x itself. An fp32 out of a 16-bit x must not overlap x; it gets the
        sum without rounding to 16 bits (NCCL rounds it).
        """
        widened = out.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
        self._check("reduce_scatter", x, *[out] * (not widened), summed=True, mean=mean)
        self._check("reduce_scatter", out)
        if widened:
            self._check_disjoint("reduce_scatter", x, out, " if it is wider")
        self._check_sizes("reduce_scatter", x, out)
        return self._run(
            "reduce_scatter", x, async_op, lambda: self._reduce_scatter(out, x, mean, tag)
        )

    def all_gather(
        self, out: Tensor, x: Tensor, *, async_op: bool = False, tag: int = 0
    ) -> Handle | None:
        """out[W * S] = the x[S] of every rank; x may be its slice of out."""
        self._check("all_gather", out, x)
        self._check_sizes("all_gather", out, x)
        return self._run("all_gather", out, async_op, lambda: self._all_gather(out, x, tag))

    def broadcast(
        self, x: Tensor, src: int, *, async_op: bool = False, tag: int = 0
    ) -> Handle | None:
        """Replace x by that of rank src of the group."""
        self._check("broadcast", x)
        self._check_rank("broadcast", "src", src)
        return self._run("broadcast", x, async_op, lambda: self._broadcast(x, src, tag))

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_sizes: Sequence[int] | None = None,
        x_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        tag: int = 0,
    ) -> Handle | None:
        """Send slice r of x to rank r; slice r of out comes from rank r. out must not overlap x.

        Args:
            out_sizes, x_sizes: elements from and to each rank. Default: equal slices.
        """
        self._check("all_to_all", out, x)
        self._check_disjoint("all_to_all", x, out)
        sizes = self._check_slices(out, out_sizes), self._check_slices(x, x_sizes)
        if sizes[0][self.rank] != sizes[1][self.rank]:
            raise ValueError(
                "all_to_all: expected equal out_sizes and x_sizes of the rank itself, got out_sizes"
                f"={sizes[0]} x_sizes={sizes[1]} on rank {self.rank}; make entry {self.rank} equal"
            )
        return self._run("all_to_all", x, async_op, lambda: self._all_to_all(out, x, *sizes, tag))

    def send(self, x: Tensor, dst: int, *, async_op: bool = False, tag: int = 0) -> Handle | None:
        """Send x to the rank dst of the group, which receives it with the same tag.

        On NCCL it may block until the other receives: two ranks that send to each other at once
        wait forever. One of them must receive first, or both use all_to_all.
        """
        self._check("send", x)
        self._check_rank("send", "dst", dst, other=True)
        return self._run("send", x, async_op, lambda: self._send(x, dst, tag))

    def recv(self, out: Tensor, src: int, *, async_op: bool = False, tag: int = 0) -> Handle | None:
        """Fill out with the x that rank src of the group sends with the same tag."""
        self._check("recv", out)
        self._check_rank("recv", "src", src, other=True)
        return self._run("recv", out, async_op, lambda: self._recv(out, src, tag))

    def gathered(self, x: Tensor) -> Tensor:
        """[W, *x.shape]: the x of every rank, of any strides. Ranks: all."""
        rows = x.new_empty((self.world_size, *x.shape))
        self.all_gather(rows.view(-1), x.contiguous().view(-1))
        return rows

    def barrier(self, *, tag: int = 0) -> None:
        """Return when every rank has called it."""
        x = torch.zeros(1, device=self.device, dtype=torch.float32)
        self._run("barrier", x, False, lambda: self._barrier(x, tag))

    def close(self) -> None:
        """Free the group's resources. Not collective; no operation may be running."""
        return

    def _barrier(self, x: Tensor, tag: int) -> Handle:
        return self._all_reduce(x, False, tag)

    @abstractmethod
    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle: ...

    @abstractmethod
    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], tag: int
    ) -> Handle: ...

    @abstractmethod
    def _send(self, x: Tensor, dst: int, tag: int) -> Handle: ...

    @abstractmethod
    def _recv(self, out: Tensor, src: int, tag: int) -> Handle: ...

    def _run(
        self, op: str, largest: Tensor, async_op: bool, call: Callable[[], Handle]
    ) -> Handle | None:
        count_call()
        for observer in self.observers:
            call = functools.partial(observer, self, op, largest.nbytes, call)
        handle = call()
        if async_op:
            return handle
        handle.wait()
        return None

    def _check(self, op: str, *tensors: Tensor, summed: bool = False, mean: bool = False) -> None:
        for t in tensors:
            if not t.is_contiguous() or t.device.type != self.device.type:
                raise ValueError(
                    f"{op}: expected contiguous tensors on {self.device}, got shape="
                    f"{list(t.shape)} stride={t.stride()} on {t.device}; pass x.contiguous()"
                )
            if t.dtype != tensors[0].dtype or (summed and t.dtype not in SUMMABLE):
                raise ValueError(
                    f"{op}: expected one dtype{' of ' + ', '.join(map(str, SUMMABLE)) * summed}, "
                    f"got dtype={t.dtype} and {tensors[0].dtype}; cast it"
                )
        if mean and not tensors[0].dtype.is_floating_point:
            raise ValueError(
                f"{op}: expected a floating-point dtype for mean=True, got {tensors[0].dtype}; "
                "divide the sum"
            )

    def _check_disjoint(self, op: str, x: Tensor, out: Tensor, where: str = "") -> None:
        if overlap(x, out):
            raise ValueError(
                f"{op}: expected out and x in different memory{where}, got out={out.dtype} inside "
                f"x={x.dtype}; pass another out"
            )

    def _check_sizes(self, op: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.world_size:
            raise ValueError(
                f"{op}: expected {self.world_size} slices of {part.numel()} elements, got "
                f"{whole.numel()} elements in all; pad to a multiple of the ranks"
            )

    def _check_slices(self, x: Tensor, sizes: Sequence[int] | None) -> list[int]:
        world_size = self.world_size
        lengths = [x.numel() // world_size] * world_size if sizes is None else list(sizes)
        if len(lengths) != world_size or sum(lengths) != x.numel() or min(lengths) < 0:
            raise ValueError(
                f"all_to_all: expected sizes of {world_size} slices that add up to {x.numel()} "
                f"elements, got sizes={lengths}; pass out_sizes and x_sizes, a number for each rank"
            )
        return lengths

    def _check_rank(self, op: str, name: str, rank: int, other: bool = False) -> None:
        if not 0 <= rank < self.world_size or (other and rank == self.rank):
            raise ValueError(
                f"{op}: expected 0 <= {name} < {self.world_size}, got {name}={rank}; "
                f"name {'another' if other else 'a'} rank of the group"
            )


class OneRank(Collectives):
    """A group of one rank: every operation is a copy or nothing, in the current stream.

    For an engine without other ranks: see fastpar/axes/offload.py.
    """

    rank, world_size, in_caller, captures = 0, 1, True, True
    transport, why = "none", "one rank"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _nothing(self, x: Tensor, *how: Any) -> Handle:
        return DONE

    def _copied(self, out: Tensor, x: Tensor, *how: Any) -> Handle:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return DONE

    _in_place: Any = _nothing
    _out_of_place: Any = _copied
    _all_reduce = _broadcast = _send = _recv = _in_place
    _reduce_scatter = _all_gather = _all_to_all = _out_of_place


class PairwiseSum:
    """A sum of tensors in a fixed tree: ((0 + 1) + (2 + 3)) + ..., the rest from the right."""

    def __init__(self, *first: Tensor) -> None:
        self.count = 0
        self._parts: list[Tensor] = []
        for x in first:
            self.push(x)

    def push(self, x: Tensor) -> None:
        """Add the next tensor, which must not be used afterwards."""
        order = self.count
        while order & 1:
            x = self._parts.pop().add_(x)
            order >>= 1
        self._parts.append(x)
        self.count += 1

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums."""
        return sum(x.nbytes for x in self._parts)

    def zero_(self, place: slice) -> None:
        """Zero these elements of all partial sums."""
        for x in self._parts:
            x[..., place].zero_()

    def total(self) -> Tensor:
        """The sum so far, a new tensor; push() may follow."""
        x = self._parts[-1].clone()
        for left in reversed(self._parts[:-1]):
            x = left + x
        return x


def sum_rows_in_tree(parts: Tensor, out: Tensor, mean: bool) -> None:
    """out[S] = the tree over the rows of parts[W, S], or the mean; parts is overwritten."""
    world_size = parts.shape[0]
    if parts.dtype in (torch.float64, torch.int64):
        step = 1
        while step < world_size:  # each row adds its next remaining neighbour
            for left in range(0, world_size - step, 2 * step):
                parts[left].add_(parts[left + step])
            step *= 2
        torch.div(parts[0], world_size, out=out) if mean else out.copy_(parts[0])
    elif not mean or world_size & (world_size - 1) == 0:  # a power of two: the product is exact
        sum_shards(parts, out, scale=1.0 / world_size if mean else None)
    else:  # divide before the only rounding
        wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        sum_shards(parts, wide)
        torch.div(wide, world_size, out=wide)
        if wide is not out:
            out.copy_(wide)
