"""Collectives over the ranks of one group, whatever carries them: the interface, and the
implementation by torch.distributed.

A transport moves bytes and adds them; which one suits a group is decided in fastpar/transport.py.
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

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.kernels import sum_shards
from fastpar.mesh import all_gather

SUMMABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


class Handle(ABC):
    """An operation under way; its tensors must stay as they are until wait() has returned.

    Attributes:
        ms: after wait(), how long the operation itself took, peers included, where it was measured.
    """

    ms: float | None = None

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result is there; raise what the operation raised."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether wait() would return at once."""


class Collectives(ABC):
    """What a transport offers to one rank of a group.

    Attributes:
        rank, world_size: in the group.
        device: of the tensors.
        transport: "shm" | "gloo" | "nccl" ...; why: the reason for it, for people.
    """

    rank: int
    world_size: int
    device: torch.device
    transport: str
    why: str

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
        start, other = x.data_ptr(), out.data_ptr()
        if start < other + out.nbytes and other < start + x.nbytes:
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


class _TorchHandle(Handle):
    """A Work of torch.distributed, and what is left to do on this rank when it is over."""

    def __init__(self, work: dist.Work, finish: Callable[[], object] = lambda: None) -> None:
        self._work: dist.Work | None = work
        self._finish = finish

    def wait(self, timeout_s: float | None = None) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._finish()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


class TorchCollectives(Collectives):
    """torch.distributed's own: NCCL for GPUs, gloo across hosts.

    gloo's reduce-scatter moves as much as its all-reduce, so on a CPU it is an all-to-all and a
    local sum in rank order, which half of the bytes do.

    Args:
        in_rank_order: all_reduce too adds in rank order (reduce-scatter, then all-gather); x needs
            a size that the ranks divide. Otherwise the backend's own order.
    Wire: per rank 2 * (W - 1) / W * bytes for all_reduce, (W - 1) / W for the halves of it.
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
        self.transport = "nccl" if self.device.type == "cuda" else "gloo"
        self.in_rank_order = in_rank_order
        self.why = why

    def barrier(self, *, tag: int = 0) -> None:
        self._run(self._all_reduce(torch.zeros(1, device=self.device), False, tag), False)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        if self.in_rank_order and x.numel() % self.world_size == 0:
            part = x.view(-1).view(self.world_size, -1)[self.rank]
            self._reduce_scatter(part, x.view(-1), mean, tag).wait()
            return self._all_gather(x.view(-1), part, tag)
        work = dist.all_reduce(x, group=self.group, async_op=True)
        return _TorchHandle(work, lambda: x.div_(self.world_size) if mean else None)

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        received = torch.empty_like(x)
        work = dist.all_to_all_single(received, x, group=self.group, async_op=True)

        parts, total = received.view(self.world_size, -1), out.view(-1)
        return _TorchHandle(work, lambda: _sum_parts(parts, total, mean))

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        flat = out.view(-1), x.view(-1)
        return _TorchHandle(all_gather(*flat, group=self.group, async_op=True))

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        return _TorchHandle(dist.broadcast(x, group=self.group, group_src=src, async_op=True))


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
