"""Collectives over the ranks of one group, whatever carries them: the interface, and the
implementation by torch.distributed.

A transport moves bytes and adds them; which one suits a group is decided in
fastpar/comm/transport.py.
Every operation is collective: all ranks of the group call the same ones in the same order. A tag
names a call, so that a transport that compares tags (shared memory) finds ranks that are out of
step; torch does not compare.

Sums are a tree in rank order where a class says so (csrc/sum_tree.h, [Note: the tree]), 16-bit
types are added in fp32 and rounded once, and a mean is the sum divided by the number of ranks: then
every rank, every chunking, every transport and both ways to reduce (all_reduce, or reduce_scatter
and all_gather) give the same bits.

[Note: streams] On a GPU an operation is enqueued behind what the current stream has been given, and
Handle.wait() makes the current stream wait for it; the host waits for neither. On a CPU the
operation runs in another thread and wait() blocks. A transport between GPUs of one host (peer to
peer) implements the same class: empty() then gives memory that the peers can read.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, wait

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.handles import (
    Begun,
    Call,
    FutureHandle,
    Handle,
    Rest,
    StreamHandle,
    Task,
    TaskThread,
    overlap,
    run_task,
    through,
)
from fastpar.comm.mesh import all_gather
from fastpar.comm.watchdog import count_call, waiting
from fastpar.kernels import sum_shards

SUMMABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


class Collectives(ABC):
    """What a transport offers to one rank of a group.

    Attributes:
        rank, world_size: in the group.
        device: of the tensors.
        transport: "shm" | "gloo" | "nccl" ...; why: the reason for it, for people.
        in_caller: operations run in the thread that calls them, before the call returns.
    """

    rank: int
    world_size: int
    device: torch.device
    transport: str
    why: str
    in_caller: bool = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new [numel] tensor in memory that this transport reads and writes without a copy.

        Ranks: all, in the same order with the same sizes.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    def all_reduce(
        self, x: Tensor, *, mean: bool = False, async_op: bool = False, tag: int = 0
    ) -> Handle | None:
        """Replace x[P] by its sum (or mean) over the ranks."""
        self._check("all_reduce", x, summed=True, mean=mean)
        return self._run(self._all_reduce(x, mean, tag), async_op)

    def reduce_scatter(
        self,
        out: Tensor,
        x: Tensor,
        *,
        mean: bool = False,
        async_op: bool = False,
        tag: int = 0,
    ) -> Handle | None:
        """out[P / W] = this rank's slice of the sum (or mean) of x[P]; x is left in any state.

        out may be that slice of x itself. An fp32 out of a 16-bit x is the sum as it was made, not
        rounded to 16 bits; it lies apart from x.
        """
        widened = out.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
        if widened:
            self._check("reduce_scatter", x, summed=True, mean=mean)
            self._check("reduce_scatter", out)
            self._check_apart("reduce_scatter", x, out)
        else:
            self._check("reduce_scatter", x, out, summed=True, mean=mean)
        self._check_sizes("reduce_scatter", x, out)
        return self._run(self._reduce_scatter(out, x, mean, tag), async_op)

    def all_gather(
        self, out: Tensor, x: Tensor, *, async_op: bool = False, tag: int = 0
    ) -> Handle | None:
        """out[W * S] = the x[S] of every rank; x may be its slice of out."""
        self._check("all_gather", out, x)
        self._check_sizes("all_gather", out, x)
        return self._run(self._all_gather(out, x, tag), async_op)

    def broadcast(
        self, x: Tensor, src: int, *, async_op: bool = False, tag: int = 0
    ) -> Handle | None:
        """Replace x by that of rank src of the group."""
        self._check("broadcast", x)
        if not 0 <= src < self.world_size:
            raise ValueError(
                f"broadcast: expected 0 <= src < {self.world_size}, got src={src}; "
                "name a rank of the group"
            )
        return self._run(self._broadcast(x, src, tag), async_op)

    @abstractmethod
    def barrier(self, *, tag: int = 0) -> None:
        """Return when every rank has called it."""

    def close(self) -> None:
        """Give back what the group holds. Not collective; nothing may be under way."""
        return

    @abstractmethod
    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle: ...

    def _run(self, handle: Handle, async_op: bool) -> Handle | None:
        count_call()
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
                    f"got dtype={t.dtype} beside {tensors[0].dtype}; cast it"
                )
        if mean and not tensors[0].dtype.is_floating_point:
            raise ValueError(
                f"{op}: expected a floating-point dtype for mean=True, got {tensors[0].dtype}; "
                "divide the sum"
            )

    def _check_apart(self, op: str, x: Tensor, out: Tensor) -> None:
        if overlap(x, out):
            raise ValueError(
                f"{op}: expected out apart from x where it is wider, got out={out.dtype} inside "
                f"x={x.dtype}; pass another out"
            )

    def _check_sizes(self, op: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.world_size:
            raise ValueError(
                f"{op}: expected {self.world_size} slices of {part.numel()} elements, got a whole "
                f"of {whole.numel()}; pad it to a multiple of the ranks"
            )


_MOST_EXCHANGES = 7  # beyond it an all-gather goes around a ring


class TorchCollectives(Collectives):
    """torch.distributed's own: NCCL for GPUs, gloo across hosts.

    gloo's reduce-scatter moves as much as its all-reduce, so on a CPU it is an all-to-all and a
    local sum, which half of the bytes do.

    [Note: who runs it] On a CPU each instance has a thread that runs its operations in the order of
    the calls, local sums included, so the caller never waits before wait(). The next one is sent
    while an earlier one is under way or being added up, unless they share memory: otherwise the
    link is idle in between.
    The process group is that thread's while an operation is under way: whoever calls
    torch.distributed on the same group meanwhile, an instance beside this one too, mixes up the
    order of the ranks' messages. On a GPU a stream takes the thread's place. Groups that cannot be
    used from another thread (torch's threaded and fake ones) run in the caller.

    Args:
        in_rank_order: all_reduce too is the tree in rank order (reduce-scatter, then all-gather),
            the same bytes), otherwise the backend's own order, which changes with sizes and ranks.
    Wire: per rank 2 * (W - 1) / W * bytes for all_reduce, (W - 1) / W for the halves of it.
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
        why: str = "asked for",
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.transport = "nccl" if on_gpu else "gloo"
        self.in_rank_order = in_rank_order
        self.why = why
        self._failed: BaseException | None = None
        self._closed = False
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.in_caller = dist.get_backend(self.group) in ("threaded", "fake")
        self._thread = None if on_gpu or self.in_caller else TaskThread()
        self._under_way: deque[Begun] = deque()
        self._received: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._took_s: dict[tuple, float] = {}  # by operation and size

    def barrier(self, *, tag: int = 0) -> None:
        x = torch.zeros(1, device=self.device)
        self._all_reduce(x, False, tag).wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._closed = True

    def _submit(self, op: str, call: Call, *of: Tensor) -> Handle:
        if self._closed:
            raise RuntimeError(
                f"TorchCollectives.{op}: expected an open group, got one after close(); "
                "make a new one"
            )
        if self._stream is not None:
            begin = functools.partial(self._guard, op, call, False)
            return StreamHandle(self._stream, lambda: through(begin()), of, op)
        future: Future = Future()
        inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own
        task = (future, self._guard, (op, call, inference), of)
        if self._thread is None:
            run_task(task)
        elif self.in_rank_order:  # its all_reduce sends twice: the thread keeps the order
            self._thread.put(task)
        else:
            self._begin(task)
        hurry = None if self._thread is None else self._thread.hurry
        return FutureHandle(op, future, self, hurry)

    def _begin(self, task: Task) -> None:
        """Sends at once, beside earlier operations unless they use the same memory."""
        while self._under_way and self._under_way[0].future.done():
            self._under_way.popleft()
        for begun in self._under_way:
            if begun.shares(task[3]):
                with waiting(task[2][0]):
                    wait([begun.future])
        begun = Begun(task)
        self._under_way.append(begun)
        assert self._thread is not None
        self._thread.put(begun)

    def _guard(self, op: str, call: Call, inference: bool) -> Rest:
        """call(), unless an earlier one failed; says who failed where. What is left is guarded."""
        if self._failed is not None:
            raise RuntimeError(
                f"TorchCollectives.{op}: expected a working group, got one that failed before on "
                f"rank {self.rank} ({self._failed}); make a new one"
            ) from self._failed
        try:
            with torch.inference_mode(inference), torch.no_grad():
                rest = call()
        except Exception as error:
            self._failed = error
            raise RuntimeError(
                f"TorchCollectives.{op}: expected every rank to take part, got an error on rank "
                f"{self.rank} of {self.world_size} ({error}); another rank ended or skipped an "
                "operation: its own message says why"
            ) from error
        return None if rest is None else functools.partial(self._guard, op, rest, inference)

    def _finish(self, work: dist.Work, kind: tuple = ()) -> None:
        """work.wait(), which on a CPU the thread of the group enters when there is no wait left.

        A thread that waits inside of torch when the interpreter ends aborts the process. Each look
        interrupts a core that computes, so nobody looks before most of the time has passed that the
        last operation of this kind took, unless somebody waits.
        Looks ask the future, never work.is_completed(): that waits for the work's mutex with
        Python's lock held, and while a profiler is on, gloo's thread holds the mutex and waits for
        Python's lock, for the saved-tensor hooks and modes of the caller. Both then wait for ever
        (test_a_profiler_and_hooks_of_the_caller). work.wait() gives Python's lock away first.
        """
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
        def own_order() -> Rest:
            work = dist.all_reduce(x, group=self.group, async_op=True)

            def rest() -> None:
                self._finish(work, ("all_reduce", x.nbytes))
                if mean:
                    x.div_(self.world_size)

            return rest

        def tree() -> None:  # at once: the order of its two messages is that of the calls
            size = -(-x.numel() // self.world_size) * self.world_size
            whole = x.view(-1)
            if size != x.numel():
                whole = torch.cat([whole, whole.new_zeros(size - x.numel())])
            part = whole.view(self.world_size, -1)[self.rank]
            through(self._sum_into(part, whole, mean))
            through(self._gather_into(whole, part))
            if size != x.numel():
                x.view(-1).copy_(whole[: x.numel()])

        return self._submit("all_reduce", tree if self.in_rank_order else own_order, x)

    def _sum_into(self, out: Tensor, x: Tensor, mean: bool) -> Rest:
        kind = x.numel(), x.dtype
        free = self._received.setdefault(kind, [])
        received = free.pop() if free else torch.empty_like(x)
        work = dist.all_to_all_single(received, x, group=self.group, async_op=True)

        def rest() -> None:
            self._finish(work, ("reduce_scatter", x.nbytes))
            _sum_parts(received.view(self.world_size, -1), out, mean)
            if self._thread is not None:
                free.append(received)  # new memory of this size would be faulted in each time

        return rest

    def _gather_into(self, out: Tensor, x: Tensor) -> Rest:
        if self._thread is None or self.world_size > _MOST_EXCHANGES + 1:
            works = [all_gather(out, x, group=self.group, async_op=True)]
        else:
            works = [self._exchange(out, x, shift) for shift in range(1, self.world_size)]
            mine = out.view(self.world_size, -1)[self.rank]
            if mine.data_ptr() != x.data_ptr():
                mine.copy_(x)

        def rest() -> None:
            for i, work in enumerate(works):
                self._finish(work, ("all_gather", out.nbytes, i))

        return rest

    def _exchange(self, out: Tensor, x: Tensor, shift: int) -> dist.Work:
        """x to the rank `shift` to the right, that from the left into its place in out.

        gloo's own all-gather copies what it has received from memory that it allocates each time.
        """
        right = (self.rank + shift) % self.world_size
        left = (self.rank - shift) % self.world_size
        return dist.all_to_all_single(
            out.view(self.world_size, -1)[left],
            x,
            output_split_sizes=[x.numel() * (r == left) for r in range(self.world_size)],
            input_split_sizes=[x.numel() * (r == right) for r in range(self.world_size)],
            group=self.group,
            async_op=True,
        )

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        part, whole = out.view(-1), x.view(-1)
        call = functools.partial(self._sum_into, part, whole, mean)
        return self._submit("reduce_scatter", call, out, x)

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        call = functools.partial(self._gather_into, out.view(-1), x.view(-1))
        return self._submit("all_gather", call, out, x)

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        def call() -> Rest:
            work = dist.broadcast(x, group=self.group, group_src=src, async_op=True)
            return functools.partial(self._finish, work, ("broadcast", x.nbytes))

        return self._submit("broadcast", call, x)


def _sum_parts(parts: Tensor, out: Tensor, mean: bool) -> None:
    """out[S] = the tree over the rows of parts[W, S] (which is overwritten), or the mean."""
    world_size = parts.shape[0]
    if parts.dtype in (torch.float64, torch.int64):
        step = 1
        while step < world_size:  # each row adds its right neighbour of those still there
            for left in range(0, world_size - step, 2 * step):
                parts[left].add_(parts[left + step])
            step *= 2
        torch.div(parts[0], world_size, out=out) if mean else out.copy_(parts[0])
    elif not mean or world_size & (world_size - 1) == 0:  # a power of two: the product is exact
        sum_shards(parts, out, scale=1.0 / world_size if mean else None)
    else:  # divided before the one rounding
        wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        sum_shards(parts, wide)
        torch.div(wide, world_size, out=wide)
        if wide is not out:
            out.copy_(wide)
