"""Collectives of ranks on one host over shared memory: no socket, no copy through the kernel.

[Note: the block]
Rank 0 makes one block of memory with memfd_create: a file of the system's memory that has no name
at all, so nobody can guess one, nothing can be left behind in /dev/shm, and a container's small
/dev/shm does not limit it. The others open it through /proc/<pid of rank 0>/fd, which the system
allows to the same user only, and make sure by a random token in it that it is the right one. It is
gone when the last rank that maps it is, however that ended (test_kill_leaves_nothing_behind).

What the ranks do in it is csrc/shm_cpu.cpp.

[Note: the thread of a group]
Each group has one daemon thread that runs its operations in the order of the calls. It is stopped
by close(), when nothing refers to the group any more, and at the end of the interpreter: a rank
that leaves with an operation under way ends at once and so do its peers' operations, where joining
an ordinary thread would wait for peers that wait for it (test_exit_with_an_operation_under_way).
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import FutureHandle, Handle, TaskThread
from fastpar.comm.mesh import gather_objects
from fastpar.comm.torch_collectives import TorchCollectives
from fastpar.comm.watchdog import waiting
from fastpar.kernels import _C

_groups: weakref.WeakSet[ShmCollectives] = weakref.WeakSet()  # of this process
_PAGE = 4096
_ALIGNMENT = 4096  # of tensors in the heap


class ShmUnavailable(RuntimeError):  # noqa: N818 - a reason, not a mistake
    """Why these ranks cannot share memory; the same on every rank."""


class ShmCollectives(Collectives):
    """Shared memory; every sum is a tree in rank order.

    Args:
        group: of torch.distributed, used to meet and for send and recv; None is all ranks. Ranks
            may be threads.
        timeout_s: after this long without a peer an operation fails; a peer that died is noticed
            within about 0.1 s.
        chunk_kb: what a rank hands to one other at a time; None derives it from the ranks.
        heap_gb: address space for empty() per rank; memory is taken when it is written.
    Ranks: all of the group construct it together.
    Raises:
        ShmUnavailable: ranks on several hosts or in several containers, or no access to each other,
            or one without the compiled module.
        RuntimeError: from an operation, when a rank died, failed, or called something else; the
            message names it. The group is broken then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 1800.0,
        chunk_kb: int | None = None,
        heap_gb: float = 16.0,
    ) -> None:
        self._met_in = group = group if group is not None else dist.group.WORLD
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
                f"ShmCollectives.empty: expected at most {self._heap_bytes} bytes in all, got "
                f"{end}; make the group with a larger heap_gb"
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
                f"ShmCollectives.{op}: expected process {self._pid}, got its fork {os.getpid()}; "
                "make a group in the processes that use it"
            )
        if not self._stop.alive:
            raise RuntimeError(
                f"ShmCollectives.{op}: expected an open group, got one after close(); "
                "make a new one"
            )
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
        inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own
        args = (out.view(-1), x.view(-1), [x_sizes, out_sizes], tag, inference)
        return self._submit("all_to_all", self._exchange, *args)

    def _exchange(
        self, out: Tensor, x: Tensor, sizes: list[list[int]], tag: int, inference: bool
    ) -> None:
        """Every rank reads what all send, and takes its own: W times the least traffic."""

        def gather(mine: Tensor) -> Tensor:
            rows = mine.new_empty(self.world_size, mine.numel())
            self._group.all_gather(rows, mine, *_element(mine), tag)
            return rows

        table = gather(torch.tensor(sizes, dtype=torch.int64, device="cpu").view(-1)).view(
            self.world_size, 2, self.world_size
        )
        sent, expected = table[:, 0], table[:, 1]  # [from, to], [to, from]
        if not torch.equal(sent, expected.t()):
            to, src = (expected.t() != sent).t().nonzero()[0].tolist()
            raise RuntimeError(
                f"ShmCollectives.all_to_all: expected rank {to} to take the {int(sent[src, to])} "
                f"elements that rank {src} sends it, got {int(expected[to, src])} in its out_sizes;"
                " give out_sizes what the other ranks have in x_sizes"
            )
        padded = x.new_empty(int(sent.sum(1).max()))
        padded[: x.numel()] = x
        starts = (sent.cumsum(1) - sent)[:, self.rank].tolist()
        rows, parts = gather(padded), sent[:, self.rank].tolist()
        with torch.inference_mode(inference):
            torch.cat([row[a : a + n] for row, a, n in zip(rows, starts, parts)], out=out)

    @functools.cached_property
    def _messages(self) -> TorchCollectives:
        """Carries send and recv, which concern two ranks: rounds in the block are of all ranks."""
        return TorchCollectives(self._met_in)

    def _send(self, x: Tensor, dst: int, tag: int) -> Handle:
        return self._messages._send(x, dst, tag)

    def _recv(self, out: Tensor, src: int, tag: int) -> Handle:
        return self._messages._recv(out, src, tag)


def shared_bytes() -> int:
    """What this process's ranks have taken by empty(), of all groups."""
    return sum(group._heap_used for group in list(_groups))


def shared_ranges() -> list[tuple[int, int]]:
    """Addresses [start, stop) of all blocks that this process maps."""
    return [group._range for group in list(_groups)]


def _place() -> tuple[str, str, int]:
    """What ranks that can share memory have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid"), os.getuid()


def _element(x: Tensor) -> tuple[str, int]:
    return str(x.dtype).removeprefix("torch."), x.element_size()


def _stop(
    pid: int, group: _C.ShmGroup, worker: TaskThread, pidfds: list[int], memory: Tensor
) -> None:
    """Ends what a group holds; memory stays mapped until its thread is over."""
    if os.getpid() != pid:
        return  # a fork: the group and its descriptors are the parent's
    group.stop()
    worker.stop()
    if worker.thread is not threading.current_thread():
        worker.thread.join()
    for fd in pidfds:
        if fd >= 0:
            os.close(fd)
    del memory


def _share(group: dist.ProcessGroup | None, rank: int, size: int) -> tuple[mmap.mmap, list[int]]:
    """The block of all ranks, and for each a descriptor that is readable when it ended.

    The descriptor of a rank that is a thread of this process is -1.
    """
    token, fd, reason = secrets.token_bytes(16), -1, ""
    place: tuple[str, str, int] | None = None
    if _C is None:
        reason = f"rank {rank} has no compiled module: it was installed with FASTPAR_CPP=0"
    try:
        place = _place()
        if rank == 0:
            fd = os.memfd_create("fastpar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size + _PAGE)
            os.pwrite(fd, token, size)
            # Nobody can make it shorter under the others' feet.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (OSError, AttributeError) as error:
        reason = f"rank {rank} cannot make shared memory ({error})"
    pidfds: list[int] = []
    block: mmap.mmap | None = None
    try:
        with waiting("meeting to share memory"):
            first, pids = _meet(group, (place, os.getpid(), fd, token, reason))
        try:
            block = _attach(rank, fd, first, size)
        except OSError as error:
            reason = f"rank {rank} cannot open the memory of rank 0 ({error})"
        # Before the ranks meet again: who dies from here on is seen through its descriptor.
        try:
            for pid in pids:
                pidfds.append(-1 if pid == os.getpid() else os.pidfd_open(pid))
        except (OSError, AttributeError) as error:
            reason = reason or f"rank {rank} cannot watch process {pid} ({error})"
        with waiting("meeting to share memory"):
            reasons = gather_objects(reason, group)
        for reason in reasons:
            if reason:
                raise ShmUnavailable(reason)
        assert block is not None
        return block, pidfds
    except BaseException:
        for opened in pidfds:
            if opened >= 0:
                os.close(opened)
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _meet(group: dist.ProcessGroup | None, mine: tuple) -> tuple[tuple, list[int]]:
    """What rank 0 says, and every rank's process; ShmUnavailable unless they are in one place."""
    everyone = gather_objects(mine, group)
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
    opened = os.dup(fd) if rank == 0 else os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR)
    try:
        if os.pread(opened, len(token), size) != token:
            raise OSError(f"process {pid} is another one than rank 0")
        return mmap.mmap(opened, size)
    finally:
        os.close(opened)
