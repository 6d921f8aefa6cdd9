"""Products of split layers under sequence parallelism, with their gathers and scatters under way.

    gather_matmul     x[N/tp, K] of every rank -> x[N, K] @ w[K, F]     (into a column layer, and
                      backward out of a row layer)
    matmul_scatter    x[N, K] @ w[K, F] -> this rank's [N/tp, F] of the sum over the ranks

[Note: chunks] With one chunk the collective is a whole and the product is a whole. With more, each
rank's N/tp rows are cut into so many: the own rows are multiplied while the first of the others
arrive, and rows are multiplied in the order in which they arrive; the other way round a chunk is
added up while the next is computed. Chunks are rows: a sum has the same terms in the same order, in
the product as in the reduction, so that results do not depend on their number where a product of
fewer rows has the same bits (our own do; smaller ones than kernels/linear.py's limit are MKL's) and
the transport adds element by element (NCCL's order depends on sizes); test_tp_overlap.py.

[Note: when it pays] One chunk is the default. Chunks hide gathers and scatters of a forward, which
has no weight's gradient to do so; each is a message more and a smaller product. Four layers of
GPT-2 124M's width, 512 tokens, one core a rank, gloo over a link of two network namespaces
(bench/systems/links.py), on a busy machine, the fastest of 8 forwards and backwards with 1, 2 and
4 chunks:
752, 627 and 599 ms at 1 Gbit/s, 440, 515 and 641 ms at 4 Gbit/s; 2 chunks took 10 % more processor
time, 4 chunks 25 %. On slow links tp_overlap=2 is worth trying; between ranks of one host nothing
waits for a link.

[Note: symmetric memory] torch's symm_mem operators do the same on GPUs that read each other's
memory, copying by DMA beside the product. They work where all ranks sit on one host and are joined
by NVLink, and are used when asked for: no machine with two such GPUs was at hand, so this path has
only ever run on doubles, and what has not been measured is no default.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle, started
from fastpar.comm.mesh import gather_objects
from fastpar.kernels.linear import matmul

_PROBE_BYTES = 1 << 20


class Scattering:
    """Reduce-scatters under way into rows of out; what they read stays until wait()."""

    def __init__(self, out: Tensor) -> None:
        self._out = out
        self._parts: list[tuple[Handle, Tensor]] = []

    def begin(self, group: Collectives, part: Tensor, rows: slice) -> None:
        mine = self._out[rows].view(-1)
        handle = started(group.reduce_scatter(mine, part.view(-1), async_op=True))
        self._parts.append((handle, part))

    def wait(self) -> Tensor:
        for handle, _ in self._parts:
            handle.wait()
        self._parts.clear()
        return self._out


class Overlap:
    """How one rank of tp overlaps; made by choose_overlap().

    Args:
        group: of the ranks along tp.
        chunks: of the N/tp rows of a rank; symmetric: name of the process group, for symm_mem.
    Attributes:
        why: the reason for the choice, for people.
    """

    def __init__(
        self, group: Collectives, chunks: int = 1, symmetric: str | None = None, why: str = ""
    ) -> None:
        self.group, self.chunks, self.symmetric, self.why = group, chunks, symmetric, why

    def __str__(self) -> str:
        how = "symmetric memory" if self.symmetric else f"chunks={self.chunks}"
        return f"overlap {how} ({self.why})"

    def gather_matmul(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """y[N, F] = x @ weight[K, F] + bias of the tokens x[N/tp, K] of all ranks; keep: and x."""
        tp, (n, k) = self.group.world_size, x.shape
        x = x.contiguous()
        if self.symmetric is not None:
            whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, self.symmetric)
            return (y if bias is None else y.add_(bias)), whole
        if self.chunks == 1:
            whole = x.new_empty(tp * n, k)
            self.group.all_gather(whole.view(-1), x.view(-1))
            return matmul(whole, weight, bias=bias), whole
        bounds = list(self._bounds(n))
        arriving = [x.new_empty(tp, end - start, k) for start, end in bounds]
        handles = [
            started(self.group.all_gather(out.view(-1), x[start:end].view(-1), async_op=True))
            for out, (start, end) in zip(arriving, bounds)
        ]
        y = x.new_empty(tp, n, weight.shape[1])
        matmul(x, weight, bias=bias, out=y[self.group.rank])
        rows = x.new_empty(tp, n, k) if keep else None
        for out, handle, (start, end) in zip(arriving, handles, bounds):
            handle.wait()
            for rank in range(tp):
                if rank != self.group.rank:
                    matmul(out[rank], weight, bias=bias, out=y[rank, start:end])
            if rows is not None:
                rows[:, start:end] = out
        return y.flatten(0, 1), None if rows is None else rows.flatten(0, 1)

    def matmul_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """This rank's [N/tp, F] of the sum of x[N, K] @ weight[K, F]."""
        if self.symmetric is not None or self.chunks > 1:
            return self.begin_matmul_scatter(x, weight).wait()
        part = matmul(x, weight)
        out = part.new_empty(part.shape[0] // self.group.world_size, part.shape[1])
        self.group.reduce_scatter(out.view(-1), part.view(-1))
        return out

    def begin_matmul_scatter(self, x: Tensor, weight: Tensor) -> Scattering:
        """Starts matmul_scatter()."""
        tp = self.group.world_size
        if self.symmetric is not None:
            scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
            return Scattering(scatter(x, weight, "sum", 0, self.symmetric))
        n = x.shape[0] // tp
        summing = Scattering(x.new_empty(n, weight.shape[1]))
        if self.chunks == 1:
            summing.begin(self.group, matmul(x, weight), slice(None))
            return summing
        x = x.unflatten(0, (tp, n))
        for start, end in self._bounds(n):
            part = x.new_empty(tp, end - start, weight.shape[1])
            for rank in range(tp):
                matmul(x[rank, start:end], weight, out=part[rank])
            summing.begin(self.group, part, slice(start, end))
        return summing

    def _bounds(self, n: int) -> Sequence[tuple[int, int]]:
        """Rows of each chunk; fewer chunks where there are not so many rows."""
        chunks = max(1, min(self.chunks, n))
        return list(itertools.pairwise(n * i // chunks for i in range(chunks + 1)))


def choose_overlap(
    asked: int | str | None, group: Collectives, *, sequence_parallel: bool
) -> Overlap:
    """The Overlap of a group; None: one chunk.

    Ranks: all of the group, with the same arguments.
    Raises:
        ValueError: neither None, a positive number nor "symmetric"; not None without sequence
            parallelism.
        RuntimeError: "symmetric" where it does not work; says why.
    """
    check_overlap(asked, sequence_parallel)
    if not sequence_parallel:
        return Overlap(group, why="whole sequences")
    if asked is None:
        return Overlap(group, why="by default")
    if isinstance(asked, int):
        return Overlap(group, asked, why="asked for")
    reason = why_not_symmetric(group)
    if reason is not None:
        raise RuntimeError(
            f"parallelize: expected symmetric memory for tp_overlap='symmetric', got none: {reason}"
            "; leave it out, or pass a number of chunks"
        )
    name = group.group.group_name  # type: ignore[attr-defined]
    return Overlap(group, symmetric=name, why="NVLink between all ranks")


def check_overlap(asked: int | str | None, sequence_parallel: bool) -> None:
    """Raises ValueError, see choose_overlap()."""
    number = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1
    if not number and asked not in (None, "symmetric"):
        raise ValueError(
            "parallelize: expected tp_overlap None, 'symmetric' or a number of chunks >= 1, got "
            f"tp_overlap={asked!r}; leave it out"
        )
    if asked is not None and not sequence_parallel:
        raise ValueError(
            "parallelize: expected tp_overlap=None without sequence parallelism, got "
            f"tp_overlap={asked!r}; there are no gathers to overlap: leave it out"
        )


def why_not_symmetric(group: Collectives) -> str | None:
    """Why symm_mem's operators do not work in this group; None: they do. Ranks: all."""
    if group.device.type != "cuda":
        return f"the ranks compute on {group.device.type}"
    process_group = getattr(group, "group", None)
    if group.transport != "nccl" or process_group is None:
        return f"the transport is {group.transport}"
    try:
        import torch.distributed._symmetric_memory as symm_mem
    except ImportError:
        return "this torch has no symmetric memory"
    ops = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    missing = [op for op in ops if not hasattr(torch.ops.symm_mem, op)]
    if missing:
        return f"this torch has no symm_mem.{missing[0]}"
    places = gather_objects(_place(), process_group)
    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts"
    devices = [device for _, device in places]
    links = _nvlinks()
    for a, b in itertools.combinations(devices, 2):
        if a >= len(links) or b >= len(links) or not links[a][b]:
            return f"there is no NVLink between GPUs {a} and {b}"
    failed = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions enable every group by themselves
            symm_mem.enable_symm_mem_for_group(process_group.group_name)
        symm_mem.get_symm_mem_workspace(process_group.group_name, _PROBE_BYTES)
    except Exception as error:  # whatever a driver says: all ranks must hear of it
        failed = f"a probe failed on rank {group.rank} ({error})"
    return next((text for text in gather_objects(failed, process_group) if text), None)


def _place() -> tuple[str, int]:
    """This rank's host and GPU."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, torch.cuda.current_device()


def _nvlinks() -> list[list[int]]:
    """NVLinks between each two GPUs of this host, directly or through a switch."""
    from torch._C import _distributed_c10d as c10d

    detect = getattr(c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return []
    return detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
