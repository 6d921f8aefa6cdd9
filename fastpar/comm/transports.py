"""Transports of collectives, torch.distributed and shared memory, and the choice between them.

torch.distributed uses NCCL for GPUs and gloo across hosts. Shared memory serves ranks on one host,
without sockets and copies through the kernel.

The block: rank 0 makes one block of memory with memfd_create: a file in memory without a name, so
nobody can guess one, nothing is left behind in /dev/shm, and a container's small /dev/shm does not
limit it. The others open it through /proc/<pid of rank 0>/fd, which the system allows to the same
user only, and check a random token in it. It is freed when the last rank that maps it ends, in
whatever way (test_a_killed_rank_is_an_error_on_the_others). The ranks' work in it is in
csrc/shm_cpu.cpp.

The thread of a group: each group has one daemon thread that runs its operations in the order of the
calls. close() stops it, as do the collection of the group and the end of the interpreter: a rank
that exits during an operation ends at once, and so do its peers' operations. Joining an ordinary
thread would wait for peers that wait for this rank (test_exit_with_an_operation_under_way).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import secrets
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.collectives import (
    DONE,
    Begun,
    Call,
    Collectives,
    FutureHandle,
    Handle,
    Rest,
    StreamHandle,
    Task,
    TaskThread,
    enqueue,
    run_task,
    sum_rows_in_tree,
    through,
)
from fastpar.comm.mesh import all_gather, gather_objects
from fastpar.comm.nodes import plain_words
from fastpar.comm.watchdog import waiting
from fastpar.kernels import _C

# torch 2.13 warns about the old name.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_MOST_EXCHANGES = 7  # with more peers an all-gather uses a ring


class TorchCollectives(Collectives):
    """torch.distributed: NCCL for GPUs, gloo across hosts.

    On NCCL each operation is NCCL's own; a mean is its AVG. gloo's reduce-scatter sends as much as
    its all-reduce, so on a CPU it is an all-to-all and a local sum, with half of the bytes.

    Threads: on a CPU each instance has a thread that runs its operations in the order of the calls,
    with local sums, so the caller waits only in wait(). The next operation is sent while an earlier
    one runs or is summed, unless they share memory; otherwise the link would be idle in between.
    The process group belongs to that thread while an operation runs: calls of torch.distributed on
    the same group meanwhile, also by another instance, would mix up the order of the ranks'
    messages. On a GPU a stream replaces the thread; synchronous operations are enqueued in the
    current stream, without a handle and without timing. Groups that cannot be used from another
    thread (torch's threaded and fake ones) run in the caller.

    Args:
        in_rank_order: sums are the tree in rank order, see [Note: order of a sum]: an all-to-all
            and a local sum, followed by an all-gather in all_reduce. On NCCL this sends equally
            many bytes, but does not sum inside a host first.
        in_caller: on a CPU operations run in the caller: no thread, and no memory is kept.
    Wire: per rank 2 * (W - 1) / W * bytes for all_reduce, (W - 1) / W for its halves and
        all_to_all.
    Raises:
        RuntimeError: from an operation that failed, or that a rank did not join within the process
            group's timeout; from every later one, with the first error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        in_rank_order: bool = False,
        in_caller: bool = False,
        why: str = "requested",
    ) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device(device)
        self._on_gpu = self.device.type == "cuda"
        self.transport = "nccl" if self._on_gpu else "gloo"
        self.in_rank_order = in_rank_order
        self.why = why
        backends = dist.get_backend_config(self.group) if self._on_gpu else "gloo"
        self._averages = self.captures = "nccl" in backends  # else a sum, and a division
        self._failed: BaseException | None = None
        self._closed = False
        self._synchronous = False  # a synchronous operation is being enqueued
        # NCCL's kernels run in this stream. High priority: the few blocks that move bytes run as
        # soon as a block of a matrix product ends, not after its last one.
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self._on_gpu else None
        backend = dist.get_backend(self.group)
        self.in_caller = in_caller or backend in ("threaded", "fake")
        self._mailbox = _Mailbox(self.group) if backend == "threaded" else None
        self._thread = None if self._on_gpu or self.in_caller else TaskThread()
        self._under_way: deque[Begun] = deque()
        self._received: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._took_s: dict[tuple, float] = {}  # by operation and size

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._closed = True

    def _run(
        self, op: str, largest: Tensor, async_op: bool, call: Callable[[], Handle]
    ) -> Handle | None:
        self._synchronous = self._on_gpu and not async_op and not self.observers
        try:
            return super()._run(op, largest, async_op, call)
        finally:
            self._synchronous = False

    def _submit(self, op: str, call: Call, *of: Tensor, message: bool = False) -> Handle:
        if self._closed:
            raise RuntimeError(f"TorchCollectives.{op}: the group was closed; make a new one")
        if self._stream is not None:

            def whole() -> None:
                self._guard(op, lambda: through(call()))

            if self._synchronous:
                enqueue(self.device, op, whole)
                return DONE
            return StreamHandle(self._stream, whole, of, op)
        inference = torch.is_inference_mode_enabled()  # threads have their own mode
        begin = functools.partial(self._guard, op, call, inference)
        thread = self._mailbox.thread if message and self._mailbox is not None else self._thread
        future: Future = Future()
        task = (future, begin, (), of)
        if thread is None:
            run_task(task)
        elif self.in_rank_order and not message:
            thread.put(task)  # its all_reduce sends twice: the thread keeps the order
        else:
            thread.put(self._begin(op, task))
        return FutureHandle(op, future, self, None if thread is None else thread.hurry)

    def _begin(self, op: str, task: Task) -> Begun:
        """Send at once, during earlier operations unless they use the same memory."""
        while self._under_way and self._under_way[0].future.done():
            self._under_way.popleft()
        for begun in self._under_way:
            if begun.shares(task[3]):
                with waiting(op):
                    wait([begun.future])
        begun = Begun(task)
        self._under_way.append(begun)
        return begun

    def _guard(self, op: str, call: Call, inference: bool | None = None) -> Rest:
        """Run call() unless an earlier one failed; errors name the rank. A returned rest too.

        inference: the caller's mode; None in the caller's thread, as setting it costs a call.
        """
        if self._failed is not None:
            raise RuntimeError(
                f"TorchCollectives.{op}: this group failed before on rank {self.rank} "
                f"({self._failed}); make a new one"
            ) from self._failed
        try:
            unchanged = contextlib.nullcontext()
            mode = unchanged if inference is None else torch.inference_mode(inference)
            with mode, torch.no_grad():
                rest = call()
        except Exception as error:
            self._failed = error
            raise RuntimeError(
                f"TorchCollectives.{op}: failed on rank {self.rank} of {self.world_size} "
                f"({plain_words(error)}); if another rank ended or skipped an operation, its own "
                "message says why"
            ) from error
        return None if rest is None else functools.partial(self._guard, op, rest, inference)

    def _finish(self, work: dist.Work | None, kind: tuple = ()) -> None:
        """work.wait(), which the group's thread on a CPU calls only when the work is done.

        A thread that waits inside torch when the interpreter ends aborts the process, so the thread
        polls. Each poll interrupts a computing core, so it polls only after most of the time that
        the last operation of this kind took, unless a caller waits.
        It polls the future, never work.is_completed(): that waits for the work's mutex while
        holding the GIL, and while a profiler is on, gloo's thread holds the mutex and waits for the
        GIL, for the caller's saved-tensor hooks and modes: a deadlock
        (test_a_profiler_and_hooks_of_the_caller). work.wait() releases the GIL first.
        """
        if work is None:  # it runs in the current stream
            return
        start = time.perf_counter()
        if self._thread is not None:
            future = work.get_future()
            while not future.done():
                passed = time.perf_counter() - start
                if self._thread.hurry.is_set():
                    time.sleep(min(5e-4, max(5e-5, passed / 10)))
                else:
                    ahead = 0.9 * self._took_s.get(kind, 0.0) - passed
                    self._thread.hurry.wait(max(ahead, 5e-5, min(5e-3, passed / 8)))
        self._took_s[kind] = time.perf_counter() - start
        work.wait()

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        call = self._tree_all_reduce if self.in_rank_order else self._own_all_reduce
        return self._submit("all_reduce", functools.partial(call, x, mean), x)

    def _own_all_reduce(self, x: Tensor, mean: bool) -> Rest:
        work = dist.all_reduce(x, op=self._op(mean), group=self.group, async_op=not self._on_gpu)

        def rest() -> None:
            self._finish(work, ("all_reduce", x.nbytes))
            self._divide(x, mean)

        return rest

    def _tree_all_reduce(self, x: Tensor, mean: bool) -> None:
        """Synchronous: the order of its two messages is that of the calls."""
        size = -(-x.numel() // self.world_size) * self.world_size
        whole = x.view(-1)
        if size != x.numel():
            whole = torch.cat([whole, whole.new_zeros(size - x.numel())])
        part = whole.view(self.world_size, -1)[self.rank]
        through(self._sum_into(part, whole, mean))
        through(self._gather_into(whole, part))
        if size != x.numel():
            x.view(-1).copy_(whole[: x.numel()])

    def _op(self, mean: bool) -> Any:
        return dist.ReduceOp.AVG if mean and self._averages else dist.ReduceOp.SUM

    def _divide(self, x: Tensor, mean: bool) -> None:
        if mean and not self._averages:
            x.div_(self.world_size)

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        own = self._on_gpu and not self.in_rank_order
        call = self._own_reduce_scatter if own else self._sum_into
        call = functools.partial(call, out.view(-1), x.view(-1), mean)
        return self._submit("reduce_scatter", call, out, x)

    def _own_reduce_scatter(self, out: Tensor, x: Tensor, mean: bool) -> None:
        """In one dtype: a 16-bit sum is made in this rank's slice of x and then widened."""
        part = out if out.dtype == x.dtype else x.view(self.world_size, -1)[self.rank]
        reduce_scatter(part, x, op=self._op(mean), group=self.group)
        self._divide(part, mean)
        if part is not out:
            out.copy_(part)

    def _sum_into(self, out: Tensor, x: Tensor, mean: bool) -> Rest:
        kind = x.numel(), x.dtype
        free = self._received.setdefault(kind, [])
        received = free.pop() if free else torch.empty_like(x)
        work = self._exchange(received, x)

        def rest() -> None:
            self._finish(work, ("reduce_scatter", x.nbytes))
            sum_rows_in_tree(received.view(self.world_size, -1), out, mean)
            if self._thread is not None:
                free.append(received)  # new memory of this size would page-fault each time

        return rest

    def _gather_into(self, out: Tensor, x: Tensor) -> Rest:
        if self._thread is None or self.world_size > _MOST_EXCHANGES + 1:
            works = [all_gather(out, x, group=self.group, async_op=not self._on_gpu)]
        else:  # gloo's own all-gather copies from memory that it allocates each time
            works = [self._shift(out, x, by) for by in range(1, self.world_size)]
            shard = out.view(self.world_size, -1)[self.rank]
            if shard.data_ptr() != x.data_ptr():
                shard.copy_(x)

        def rest() -> None:
            for i, work in enumerate(works):
                self._finish(work, ("all_gather", out.nbytes, i))

        return rest

    def _shift(self, out: Tensor, x: Tensor, by: int) -> dist.Work | None:
        """Send x to the rank `by` to the right; receive from the left into its part of out."""
        right, left = (self.rank + by) % self.world_size, (self.rank - by) % self.world_size
        from_left = [x.numel() * (r == left) for r in range(self.world_size)]
        to_right = [x.numel() * (r == right) for r in range(self.world_size)]
        return self._exchange(out.view(self.world_size, -1)[left], x, from_left, to_right)

    def _exchange(
        self,
        out: Tensor,
        x: Tensor,
        out_sizes: list[int] | None = None,
        x_sizes: list[int] | None = None,
    ) -> dist.Work | None:
        return dist.all_to_all_single(
            out, x, out_sizes, x_sizes, group=self.group, async_op=not self._on_gpu
        )

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        call = functools.partial(self._gather_into, out.view(-1), x.view(-1))
        return self._submit("all_gather", call, out, x)

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        def call() -> Rest:
            work = dist.broadcast(x, group=self.group, group_src=src, async_op=not self._on_gpu)
            return functools.partial(self._finish, work, ("broadcast", x.nbytes))

        return self._submit("broadcast", call, x)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], tag: int
    ) -> Handle:
        def call() -> Rest:
            work = self._exchange(out.view(-1), x.view(-1), out_sizes, x_sizes)
            return functools.partial(self._finish, work, ("all_to_all", x.nbytes))

        return self._submit("all_to_all", call, out, x)

    def _send(self, x: Tensor, dst: int, tag: int) -> Handle:
        return self._message("send", x, dst, tag)

    def _recv(self, out: Tensor, src: int, tag: int) -> Handle:
        return self._message("recv", out, src, tag)

    def _message(self, op: str, x: Tensor, peer: int, tag: int) -> Handle:
        def call() -> Rest:
            if self._mailbox is not None:
                return getattr(self._mailbox, op)(x, peer, tag)
            if op == "send":
                work = dist.isend(x, group=self.group, group_dst=peer, tag=tag)
            else:
                work = dist.irecv(x, group=self.group, group_src=peer, tag=tag)
            assert work is not None  # None only if this rank is not in the group
            return lambda: work.wait() and None

        return self._submit(op, call, x, message=True)


class _Mailbox:
    """Messages between ranks that are threads; torch's threaded group has no send and recv."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._name, self._rank = group.group_name, dist.get_rank(group)
        self._counts: Counter[tuple[int, ...]] = Counter()

    @functools.cached_property
    def thread(self) -> TaskThread:
        """Waits for messages instead of the caller."""
        return TaskThread()

    def _key(self, *way: int) -> str:
        self._counts[way] += 1
        return f"fastpar/message/{self._name}/{way}/{self._counts[way]}"

    def send(self, x: Tensor, dst: int, tag: int) -> Rest:
        raw = x.detach().view(-1).view(torch.uint8).numpy().tobytes()
        self._store.set(self._key(self._rank, dst, tag), raw)
        return lambda: None

    def recv(self, out: Tensor, src: int, tag: int) -> Rest:
        key = self._key(src, self._rank, tag)

        def rest() -> None:
            raw = self._store.get(key)
            self._store.delete_key(key)
            if len(raw) != out.nbytes:
                raise ValueError(f"recv: got a message of {len(raw)} bytes for {out.nbytes} bytes")
            if raw:
                received = torch.frombuffer(bytearray(raw), dtype=out.dtype)
                out.copy_(received.view(out.shape))

        return rest


_groups: weakref.WeakSet[ShmCollectives] = weakref.WeakSet()  # of this process
_PAGE = 4096
_ALIGNMENT = 4096  # of tensors in the heap


class ShmUnavailable(RuntimeError):  # noqa: N818 - a reason, not a mistake
    """The reason why these ranks cannot share memory; the same on every rank."""


class ShmCollectives(Collectives):
    """Shared memory; every sum is a tree in rank order.

    Args:
        group: of torch.distributed, for the setup and for send and recv; None: all ranks. Ranks
            may be threads.
        timeout_s: seconds after which an operation without a peer fails; a peer that died is
            noticed within about 0.1 s.
        chunk_kb: size of the piece that one rank passes to another at a time. Default: by the
            number of ranks.
        heap_gb: address space for empty() per rank; memory is allocated when it is written.
    Ranks: all of the group construct it together.
    Raises:
        ShmUnavailable: ranks on several hosts or in several containers, or without access to each
            other, or without the compiled module.
        RuntimeError: from an operation, if a rank died, failed, or called another one; the message
            names it. The group is unusable then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 1800.0,
        chunk_kb: int | None = None,
        heap_gb: float = 16.0,
    ) -> None:
        self._process_group = group = group if group is not None else dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cpu")
        self.transport, self.why = "shm", "all ranks are on this host"
        chunk = (chunk_kb or 4096 // (self.world_size + 1)) << 10
        chunk = max(16 << 10, -(-chunk // _PAGE) * _PAGE)
        heap = int(heap_gb * 2**30) // _PAGE * _PAGE
        size = 0 if _C is None else _C.ShmGroup.block_bytes(self.world_size, chunk, heap)
        self._block, pidfds = _share(group, self.rank, size)
        memory = torch.frombuffer(self._block, dtype=torch.uint8)
        self._group = _C.ShmGroup(
            memory.data_ptr(), self.rank, self.world_size, chunk, heap, pidfds, timeout_s
        )
        self._range = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        _groups.add(self)
        self._heap_start = self._group.heap - memory.data_ptr()
        self._heap_bytes, self._heap_used = heap, 0
        self._pid = os.getpid()
        self._thread = TaskThread()
        self._stop = weakref.finalize(
            self, _stop, self._pid, self._group, self._thread, pidfds, memory
        )

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        start = -(-self._heap_used // _ALIGNMENT) * _ALIGNMENT
        end = start + numel * dtype.itemsize
        if end > self._heap_bytes:
            raise RuntimeError(
                f"ShmCollectives.empty: {end} bytes in all exceed the heap of {self._heap_bytes}; "
                "make the group with a larger heap_gb"
            )
        self._heap_used = end
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        place = self._heap_start + start
        return torch.frombuffer(self._block, dtype=dtype, count=numel, offset=place)

    def close(self) -> None:
        self._stop()

    def _submit(self, op: str, call: Callable[..., Any], *args: Any) -> Handle:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"ShmCollectives.{op}: process {os.getpid()} is a fork of {self._pid}, which made "
                "the group; make a group in the processes that use it"
            )
        if not self._stop.alive:
            raise RuntimeError(f"ShmCollectives.{op}: the group was closed; make a new one")
        future: Future = Future()
        self._thread.put((future, call, args, ()))
        return FutureHandle(op, future, self)

    def _barrier(self, x: Tensor, tag: int) -> Handle:
        return self._submit("barrier", self._group.barrier, tag)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        return self._submit("all_reduce", self._group.all_reduce, x, mean, tag)

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        return self._submit("reduce_scatter", self._group.reduce_scatter, out, x, mean, tag)

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        args = (out, x, *_element(x), tag)
        return self._submit("all_gather", self._group.all_gather, *args)

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        args = (x, *_element(x), src, tag)
        return self._submit("broadcast", self._group.broadcast, *args)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], tag: int
    ) -> Handle:
        inference = torch.is_inference_mode_enabled()  # threads have their own mode
        args = (out.view(-1), x.view(-1), [x_sizes, out_sizes], tag, inference)
        return self._submit("all_to_all", self._exchange, *args)

    def _exchange(
        self, out: Tensor, x: Tensor, sizes: list[list[int]], tag: int, inference: bool
    ) -> None:
        """Every rank reads all slices and keeps its own: W times the least traffic."""

        def gather(local: Tensor) -> Tensor:
            rows = local.new_empty(self.world_size, local.numel())
            self._group.all_gather(rows, local, *_element(local), tag)
            return rows

        table = gather(torch.tensor(sizes, dtype=torch.int64, device="cpu").view(-1)).view(
            self.world_size, 2, self.world_size
        )
        sent, expected = table[:, 0], table[:, 1]  # [from, to], [to, from]
        if not torch.equal(sent, expected.t()):
            to, src = (expected.t() != sent).t().nonzero()[0].tolist()
            raise RuntimeError(
                f"ShmCollectives.all_to_all: rank {src} sends {int(sent[src, to])} elements to "
                f"rank {to}, whose out_sizes says {int(expected[to, src])}; make out_sizes equal "
                "to the senders' x_sizes"
            )
        padded = x.new_empty(int(sent.sum(1).max()))
        padded[: x.numel()] = x
        starts = (sent.cumsum(1) - sent)[:, self.rank].tolist()
        rows, parts = gather(padded), sent[:, self.rank].tolist()
        with torch.inference_mode(inference):
            torch.cat([row[a : a + n] for row, a, n in zip(rows, starts, parts)], out=out)

    @functools.cached_property
    def _messages(self) -> TorchCollectives:
        """Carries send and recv, which only two ranks call; the block serves calls of all ranks."""
        return TorchCollectives(self._process_group)

    def _send(self, x: Tensor, dst: int, tag: int) -> Handle:
        return self._messages._send(x, dst, tag)

    def _recv(self, out: Tensor, src: int, tag: int) -> Handle:
        return self._messages._recv(out, src, tag)


def shared_bytes() -> int:
    """Bytes that ranks of this process have allocated with empty(), in all groups."""
    return sum(group._heap_used for group in list(_groups))


def shared_ranges() -> list[tuple[int, int]]:
    """Addresses [start, stop) of all blocks that this process maps."""
    return [group._range for group in list(_groups)]


def _place() -> tuple[str, str, int]:
    """An id of where a rank runs; ranks with equal ids can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid"), os.getuid()


def _element(x: Tensor) -> tuple[str, int]:
    return str(x.dtype).removeprefix("torch."), x.element_size()


def _stop(
    pid: int, group: _C.ShmGroup, worker: TaskThread, pidfds: list[int], memory: Tensor
) -> None:
    """Free what a group holds; memory stays mapped until its thread has ended."""
    if os.getpid() != pid:
        return  # a fork: the group and its descriptors are the parent's
    group.stop()
    worker.stop()
    if worker.thread is not threading.current_thread():
        worker.thread.join()
    _close(pidfds)
    del memory


def _share(group: dist.ProcessGroup | None, rank: int, size: int) -> tuple[mmap.mmap, list[int]]:
    """The block of all ranks, and for each rank a descriptor that is readable when it ended.

    The descriptor of a rank that is a thread of this process is -1.
    """
    token, fd, reason = secrets.token_bytes(16), -1, ""
    place: tuple[str, str, int] | None = None
    pidfds: list[int] = []
    block: mmap.mmap | None = None
    with contextlib.ExitStack() as always, contextlib.ExitStack() as on_error:
        if _C is None:
            reason = f"rank {rank} has no compiled module: it was installed with FASTPAR_CPP=0"
        try:
            place = _place()
            if rank == 0:
                fd = os.memfd_create("fastpar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                always.callback(os.close, fd)
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, size + _PAGE)
                os.pwrite(fd, token, size)
                # No process can shrink the file while others use it.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except (OSError, AttributeError) as error:
            reason = f"rank {rank} cannot make shared memory ({error})"
        sent = (place, os.getpid(), fd, token.hex(), reason)
        first, pids = _exchange_places(group, sent)
        try:
            block = _attach(rank, fd, first, size)
        except OSError as error:
            reason = f"rank {rank} cannot open the memory of rank 0 ({error})"
        # Before the next exchange: from here on the descriptor shows a rank that dies.
        try:
            for pid in pids:
                pidfds.append(-1 if pid == os.getpid() else os.pidfd_open(pid))
                on_error.callback(_close, pidfds[-1:])
        except (OSError, AttributeError) as error:
            reason = reason or f"rank {rank} cannot watch process {pid} ({error})"
        with waiting("setting up shared memory"):
            reasons = gather_objects(reason, group)
        for reason in filter(None, reasons):
            raise ShmUnavailable(reason)
        assert block is not None
        on_error.pop_all()
        return block, pidfds


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _exchange_places(group: dist.ProcessGroup | None, local: tuple) -> tuple[tuple, list[int]]:
    """(rank 0's values, pid of every rank); ShmUnavailable unless all can share memory."""
    with waiting("setting up shared memory"):
        everyone = gather_objects(local, group)
    for rank, (place, _, _, _, reason) in enumerate(everyone):
        if reason:
            raise ShmUnavailable(reason)
        if place != everyone[0][0]:
            raise ShmUnavailable(
                f"rank {rank} is on another host, in another container or of another user than "
                "rank 0"
            )
    return everyone[0], [pid for _, pid, *_ in everyone]


def _attach(rank: int, fd: int, first: tuple, size: int) -> mmap.mmap:
    """This rank's mapping of rank 0's block."""
    _, pid, theirs, token, _ = first
    mark = bytes.fromhex(token)
    opened = os.dup(fd) if rank == 0 else os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR)
    try:
        if os.pread(opened, len(mark), size) != mark:
            raise OSError(f"process {pid} is not rank 0")
        return mmap.mmap(opened, size)
    finally:
        os.close(opened)


def make_collectives(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    transport: str = "auto",
    timeout_s: float = 1800.0,
    in_rank_order: bool = False,
) -> Collectives:
    """Make the collectives of one group of ranks.

    Args:
        group: of torch.distributed; None: all ranks.
        transport: "shm" (CPU tensors of ranks on one host), "torch" (gloo or NCCL), or "auto":
            shared memory if CPU ranks can share it, else torch with a warning that says why.
        timeout_s: seconds after which an operation without its peers fails (torch: the group's).
        in_rank_order: every transport's all_reduce gives the bits of shared memory's.
    Ranks: all of the group, with the same arguments.
    Raises:
        ValueError: an unknown transport; shm for CUDA tensors.
        RuntimeError: transport="shm" if the ranks cannot share memory.
    """
    device = torch.device(device)
    if transport not in ("auto", "shm", "torch"):
        raise ValueError(
            f"make_collectives: expected auto, shm or torch, got transport={transport}; "
            "choose one of these"
        )
    if transport == "shm" and device.type != "cpu":
        raise ValueError(
            f"make_collectives: expected CPU tensors for transport=shm, got device={device}; "
            "use transport='torch'"
        )
    if transport == "torch" or device.type != "cpu":
        why = "requested" if transport == "torch" else f"tensors are on {device.type}"
        return TorchCollectives(group, device=device, in_rank_order=in_rank_order, why=why)
    try:
        return ShmCollectives(group, timeout_s=timeout_s)
    except ShmUnavailable as reason:
        if transport == "shm":
            raise RuntimeError(
                f"make_collectives: the ranks cannot share memory: {reason}; use transport='torch'"
            ) from reason
        warnings.warn(f"fastpar: using gloo, not shared memory: {reason}", stacklevel=2)
        return TorchCollectives(group, device=device, in_rank_order=in_rank_order, why=str(reason))
