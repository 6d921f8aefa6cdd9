"""The host of a rank: its memory, the cores of its threads, and the bus to its GPU.

Cores are ordered by NUMA node and split in equal parts among the ranks of the machine, in rank
order. On servers with equally many GPUs per socket a rank gets cores of its GPU's socket. One core
of the part is left to the rank's other threads.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.collectives import FutureHandle, Handle, StreamHandle, TaskThread
from fastpar.comm.ranks import local_ranks

_NODES = Path("/sys/devices/system/node")


def nodes_of_cores() -> dict[int, int]:
    """Core -> its NUMA node; empty if the host has no such list."""
    nodes = {}
    for path in _NODES.glob("node[0-9]*/cpulist"):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores = range(int(first), int(last or first) + 1) if part else ()
            nodes.update(dict.fromkeys(cores, int(path.parent.name[4:])))
    return nodes


def cores_of_rank(cores: Iterable[int], nodes: dict[int, int], rank: int, ranks: int) -> list[int]:
    """The cores of a rank; see the top of this file."""
    ordered = sorted(cores, key=lambda core: (nodes.get(core, 0), core))
    share = max(1, len(ordered) // ranks)
    first = rank * share % len(ordered)
    return ordered[first : first + share][: max(1, share - 1)]


class HostCores:
    """The cores of one thread of this rank, after take()."""

    def __init__(self) -> None:
        self._mine: list[int] = []

    def take(self) -> None:
        """Pin the calling thread, and threads that its kernels start, to its cores."""
        if not self._mine:
            rank, ranks = (
                int(os.environ.get(f"LOCAL_{name}", default))
                for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
            )
            self._mine = cores_of_rank(os.sched_getaffinity(0), nodes_of_cores(), rank, ranks)
            os.sched_setaffinity(0, self._mine)
            torch.set_num_threads(len(self._mine))

    def describe(self) -> str:
        """Text: number of threads and NUMA node."""
        nodes = nodes_of_cores()
        cores = self._mine or os.sched_getaffinity(0)
        names = sorted({nodes[core] for core in cores if core in nodes})
        where = f" on NUMA node {', '.join(map(str, names))}" if names else ""
        return f"{len(self._mine) or torch.get_num_threads()} threads{where}"


def memory_mb() -> tuple[float, float]:
    """Resident memory of this process in MB: (now, highest so far)."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: its peak begins with the parent's at fork.
        sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status.read_text(), re.M))
        if len(sizes) == 2:
            return int(sizes["VmRSS"]) * 1024 / 1e6, int(sizes["VmHWM"]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mb = peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return peak_mb, peak_mb


def free_memory() -> int:
    """Bytes that the host can give without swapping, within a cgroup's limit if there is one."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    folder = Path("/sys/fs/cgroup")
    for limit, used in (
        (folder / "memory.max", folder / "memory.current"),
        (folder / "memory/memory.limit_in_bytes", folder / "memory/memory.usage_in_bytes"),
    ):
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, int(text) - int(used.read_text()))
    return free


def pinned_bytes(nbytes: int) -> int:
    """Bytes that torch allocates for so many bytes of pinned memory: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


def check_host_memory(buckets: Sequence[tuple[int, int]], ranks: int) -> None:
    """Check that the offloaded state of all ranks of this machine fits into its memory.

    Args:
        buckets: (bytes of optimizer state, bytes in all) of each, the first to keep on GPU first.
    Raises:
        ValueError: it does not fit; says what would.
    """
    needed, free = ranks * sum(n for _, n in buckets), free_memory()
    if needed <= free:
        return
    times = -(-needed // max(1, free))
    left, kept, advice = needed, 0, f"use {times} times as many hosts"
    for state, n in buckets[:-1]:
        left, kept = left - n * ranks, kept + state
        if left <= free:
            advice = f"offload_keep_mb={-(-kept // 2**20)} fits, or {advice}"
            break
    raise ValueError(
        f"parallelize: offload by {ranks} rank{'s' * (ranks > 1)} needs {needed / 1e9:.3g} GB "
        f"of free host memory, got {free / 1e9:.3g} GB; {advice}"
    )


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x, non_blocking=True)


class Bus:
    """Copies between a GPU and its host, with a stream for each direction.

    Args:
        pinned: host memory for copies is pinned; otherwise copies take about twice as long, and
            the host waits for copies from the GPU.
    """

    has_gpu = True

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pinned = pinned

    def down(self, host: Tensor, x: Tensor) -> Handle:
        """Start host = x, after the present work of the current stream; x may be freed at once."""
        x.record_stream(self._down)
        return StreamHandle(self._down, lambda: _copy(host, x), (), "offload")

    def up(self, x: Tensor, host: Tensor) -> Handle:
        """Start x = host; the current stream waits for it in wait()."""
        return StreamHandle(self._up, lambda: _copy(x, host), (x,), "offload")

    def behind(self, ups: Sequence[Handle] = ()) -> contextlib.AbstractContextManager[Any]:
        """Context whose work follows these copies to the GPU, but no computation of the GPU."""
        return torch.cuda.stream(self._up)

    def n_ranks(self, world_size: int) -> int:
        """Number of ranks that use memory of this host."""
        return local_ranks(world_size)

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] on the host.

        Raises:
            RuntimeError: the system refuses to pin the memory.
        """
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=self.pinned, device="cpu")
        except RuntimeError as error:
            raise RuntimeError(
                f"parallelize: could not pin {numel * dtype.itemsize / 1e9:.3g} GB of host memory "
                f"for offload ({error}); raise the limit of locked memory (ulimit -l), use more "
                "ranks, or set offload_pinned=False, --no-offload-pinned (copies then take about "
                "twice as long)"
            ) from error

    def arrived(self, handle: Handle) -> None:
        """Wait for a copy to the host."""
        while not handle.is_completed():
            time.sleep(2e-5)


def bus_of(device: torch.device, *, pinned: bool = True) -> Bus:
    """The bus of a GPU; pinned: see Bus.

    Raises:
        ValueError: device is a CPU.
    """
    if device.type == "cpu":
        raise ValueError(
            "offload: expected a GPU, got device=cpu; it moves data from a GPU to its host: do not "
            "use it on a CPU"
        )
    return Bus(device, pinned=pinned)


class SlowBus(Bus):
    """A simulated bus on a machine without a GPU: both sides are in host memory, and one thread per
    direction copies at gb_s GB/s. For Debug(bus_gb_s=)."""

    has_gpu = pinned = False

    def __init__(self, gb_s: float) -> None:
        self._rate, self._threads = gb_s * 1e9, (TaskThread(), TaskThread())
        for thread in self._threads:
            thread.end_with(self)

    def down(self, host: Tensor, x: Tensor) -> Handle:
        """Like Bus.down."""
        return self._copy(0, host, x)

    def up(self, x: Tensor, host: Tensor) -> Handle:
        """Like Bus.up."""
        return self._copy(1, x, host)

    def arrived(self, handle: Handle) -> None:
        """Like Bus.arrived."""
        handle.wait()

    def behind(self, ups: Sequence[Handle] = ()) -> contextlib.AbstractContextManager[Any]:
        """Like Bus.behind, but the caller waits."""
        for up in ups:
            up.wait()
        return contextlib.nullcontext()

    def n_ranks(self, world_size: int) -> int:
        """One: the check of host memory is for real machines."""
        return 1

    def _copy(self, way: int, out: Tensor, x: Tensor) -> Handle:
        def copy() -> None:
            begin = time.perf_counter()
            with torch.inference_mode(False), torch.no_grad():
                out.copy_(x)
            time.sleep(max(0.0, x.nbytes / self._rate - (time.perf_counter() - begin)))

        future: Future = Future()
        self._threads[way].put((future, copy, (), (out, x)))
        return FutureHandle("offload", future, self)
