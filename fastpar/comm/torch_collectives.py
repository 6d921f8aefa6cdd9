"""Collectives over torch.distributed: NCCL for GPUs, gloo across hosts."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.fixed_sum import sum_rows_in_tree
from fastpar.comm.handles import (
    DONE,
    Begun,
    Call,
    FutureHandle,
    Handle,
    Rest,
    StreamHandle,
    Task,
    TaskThread,
    enqueue,
    run_task,
    through,
)
from fastpar.comm.mesh import all_gather
from fastpar.comm.watchdog import waiting

# torch 2.13 warns about the old name.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_MOST_EXCHANGES = 7  # beyond it an all-gather goes around a ring


class TorchCollectives(Collectives):
    """torch.distributed's own: NCCL for GPUs, gloo across hosts.

    Each operation is NCCL's own there, a mean its AVG. gloo's reduce-scatter moves as much as its
    all-reduce, so on a CPU it is an all-to-all and a local sum, which half of the bytes do.

    [Note: who runs it] On a CPU each instance has a thread that runs its operations in the order of
    the calls, local sums included, so the caller never waits before wait(). The next one is sent
    while an earlier one is under way or being added up, unless they share memory: otherwise the
    link is idle in between.
    The process group is that thread's while an operation is under way: whoever calls
    torch.distributed on the same group meanwhile, an instance beside this one too, mixes up the
    order of the ranks' messages. On a GPU a stream takes the thread's place; what is synchronous is
    enqueued in the current stream, without a handle and without timing. Groups that cannot be used
    from another thread (torch's threaded and fake ones) run in the caller.

    Args:
        in_rank_order: sums are the tree in rank order, see [Note: order of a sum]: an all-to-all
            and a local sum, followed by an all-gather in all_reduce. On NCCL this sends as many
            bytes, but none of them are added up inside a host.
        in_caller: on a CPU the caller runs them: no thread, and no memory kept for the next one.
    Wire: per rank 2 * (W - 1) / W * bytes for all_reduce, (W - 1) / W for the halves of it and for
        all_to_all.
    Raises:
        RuntimeError: from an operation that failed, or that a rank did not take part in within the
            process group's timeout; from every later one, with the first error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        in_rank_order: bool = False,
        in_caller: bool = False,
        why: str = "asked for",
    ) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device(device)
        self._on_gpu = self.device.type == "cuda"
        self.transport = "nccl" if self._on_gpu else "gloo"
        self.in_rank_order = in_rank_order
        self.why = why
        backends = dist.get_backend_config(self.group) if self._on_gpu else "gloo"
        self._averages = "nccl" in backends  # else a sum, and a division
        self._failed: BaseException | None = None
        self._closed = False
        self._synchronous = False  # a synchronous operation is being enqueued
        # NCCL's kernels run in it, not in a stream of NCCL's own. High priority: the few blocks
        # that move bytes come next when a block of a product ends, not after its last one.
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
            raise RuntimeError(
                f"TorchCollectives.{op}: expected an open group, got one after close(); "
                "make a new one"
            )
        if self._stream is not None:

            def whole() -> None:
                self._guard(op, lambda: through(call()))

            if self._synchronous:
                enqueue(self.device, op, whole)
                return DONE
            return StreamHandle(self._stream, whole, of, op)
        inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own
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
        """Sends at once, beside earlier operations unless they use the same memory."""
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
        """call(), unless an earlier one failed; says who failed where. What is left is guarded.

        inference: the caller's mode, None in its own thread: to set it takes as long as a call.
        """
        if self._failed is not None:
            raise RuntimeError(
                f"TorchCollectives.{op}: expected a working group, got one that failed before on "
                f"rank {self.rank} ({self._failed}); make a new one"
            ) from self._failed
        try:
            unchanged = contextlib.nullcontext()
            mode = unchanged if inference is None else torch.inference_mode(inference)
            with mode, torch.no_grad():
                rest = call()
        except Exception as error:
            self._failed = error
            raise RuntimeError(
                f"TorchCollectives.{op}: expected every rank to take part, got an error on rank "
                f"{self.rank} of {self.world_size} ({error}); another rank ended or skipped an "
                "operation: its own message says why"
            ) from error
        return None if rest is None else functools.partial(self._guard, op, rest, inference)

    def _finish(self, work: dist.Work | None, kind: tuple = ()) -> None:
        """work.wait(), which on a CPU the thread of the group enters when there is no wait left.

        A thread that waits inside of torch when the interpreter ends aborts the process. Each look
        interrupts a core that computes, so nobody looks before most of the time has passed that the
        last operation of this kind took, unless somebody waits.
        Looks ask the future, never work.is_completed(): that waits for the work's mutex with
        Python's lock held, and while a profiler is on, gloo's thread holds the mutex and waits for
        Python's lock, for the saved-tensor hooks and modes of the caller. Both then wait for ever
        (test_a_profiler_and_hooks_of_the_caller). work.wait() gives Python's lock away first.
        """
        if work is None:  # in the current stream
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
        """At once: the order of its two messages is that of the calls."""
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
        """One dtype: a sum of 16 bits is made in place, in this rank's slice of x, and widened."""
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
                free.append(received)  # new memory of this size would be faulted in each time

        return rest

    def _gather_into(self, out: Tensor, x: Tensor) -> Rest:
        if self._thread is None or self.world_size > _MOST_EXCHANGES + 1:
            works = [all_gather(out, x, group=self.group, async_op=not self._on_gpu)]
        else:  # gloo's own copies what it has received from memory that it allocates each time
            works = [self._shift(out, x, by) for by in range(1, self.world_size)]
            mine = out.view(self.world_size, -1)[self.rank]
            if mine.data_ptr() != x.data_ptr():
                mine.copy_(x)

        def rest() -> None:
            for i, work in enumerate(works):
                self._finish(work, ("all_gather", out.nbytes, i))

        return rest

    def _shift(self, out: Tensor, x: Tensor, by: int) -> dist.Work | None:
        """x to the rank `by` to the right, that from the left into its place in out."""
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
            assert work is not None  # this rank is in the group
            return lambda: work.wait() and None

        return self._submit(op, call, x, message=True)


class _Mailbox:
    """Messages between ranks that are threads: torch's threaded group has no send and recv."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._name, self._rank = group.group_name, dist.get_rank(group)
        self._counts: Counter[tuple[int, ...]] = Counter()

    @functools.cached_property
    def thread(self) -> TaskThread:
        """Waits for messages in the caller's stead."""
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
                raise ValueError(f"a message of {len(raw)} bytes for an out of {out.nbytes}")
            if raw:
                received = torch.frombuffer(bytearray(raw), dtype=out.dtype)
                out.copy_(received.view(out.shape))

        return rest
