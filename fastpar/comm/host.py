"""The host of a rank: its memory, the cores of a thread there, and its bus to a GPU.

[Note: cores of a rank] Cores are put in the order of their NUMA nodes and shared out in equal parts
among the ranks of the machine, in the order of these: on servers with as many GPUs at each socket
that is a part of the GPU's own socket. One core of the part is left to the rank's other threads.

[Note: the stand-in] Debug(bus_gb_s=) is the bus of a machine without a GPU: both sides lie in
the host's memory, and a thread for each direction copies at that speed.
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
    """Core -> its NUMA node; empty where the host tells none."""
    found = {}
    for path in _NODES.glob("node[0-9]*/cpulist"):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores = range(int(first), int(last or first) + 1) if part else ()
            found.update(dict.fromkeys(cores, int(path.parent.name[4:])))
    return found


def cores_of_rank(cores: Iterable[int], nodes: dict[int, int], rank: int, ranks: int) -> list[int]:
    """The part of a rank: see [Note: cores of a rank]."""
    ordered = sorted(cores, key=lambda core: (nodes.get(core, 0), core))
    share = max(1, len(ordered) // ranks)
    first = rank * share % len(ordered)
    return ordered[first : first + share][: max(1, share - 1)]


class HostCores:
    """The cores of one thread of this rank, once it has taken them."""

    def __init__(self) -> None:
        self._mine: list[int] = []

    def take(self) -> None:
        """The calling thread, and those that its kernels start, run there from now on."""
        if not self._mine:
            rank, ranks = (
                int(os.environ.get(f"LOCAL_{name}", default))
                for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
            )
            self._mine = cores_of_rank(os.sched_getaffinity(0), nodes_of_cores(), rank, ranks)
            os.sched_setaffinity(0, self._mine)
            torch.set_num_threads(len(self._mine))

    def describe(self) -> str:
        """How many, and where."""
        nodes = nodes_of_cores()
        mine = self._mine or os.sched_getaffinity(0)
        names = sorted({nodes[core] for core in mine if core in nodes})
        where = f" on NUMA node {', '.join(map(str, names))}" if names else ""
        return f"{len(self._mine) or torch.get_num_threads()} threads{where}"


def memory_mb() -> tuple[float, float]:
    """Resident memory of this process in MB: (now, highest so far)."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: its peak starts from the parent's at the time of fork.
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status.read_text(), re.M))
        if len(found) == 2:
            return int(found["VmRSS"]) * 1024 / 1e6, int(found["VmHWM"]) * 1024 / 1e6
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
    """What torch takes for so many bytes of pinned memory: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


def check_host_memory(buckets: Sequence[tuple[int, int]], ranks: int) -> None:
    """Refuse what does not fit beside the same of the machine's other ranks.

    Args:
        buckets: (bytes of its optimizer's state, of all that it takes), the first to keep first.
    Raises:
        ValueError: says what would fit.
    """
    needed, free = ranks * sum(n for _, n in buckets), free_memory()
    if needed <= free:
        return
    times = -(-needed // max(1, free))
    left, kept, advice = needed, 0, f"share the state among {times} times as many hosts"
    for state, n in buckets[:-1]:
        left, kept = left - n * ranks, kept + state
        if left <= free:
            advice = f"offload_keep_mb={-(-kept // 2**20)} fits, or {advice}"
            break
    raise ValueError(
        f"parallelize: expected {needed / 1e9:.3g} GB of free memory on the host for offload by "
        f"{ranks} rank{'s' * (ranks > 1)}, got {free / 1e9:.3g} GB; {advice}"
    )


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x, non_blocking=True)


class Bus:
    """Copies between a GPU and its host, a stream for each direction.

    Args:
        pinned: memory of the host that crosses the bus is locked; else copies take about twice as
            long, and down the host waits for them.
    """

    has_gpu = True

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pinned = pinned

    def down(self, host: Tensor, x: Tensor) -> Handle:
        """host = x, behind what the current stream has been given; x may be freed at once."""
        x.record_stream(self._down)
        return StreamHandle(self._down, lambda: _copy(host, x), (), "offload")

    def up(self, x: Tensor, host: Tensor) -> Handle:
        """x = host; the current stream waits for it where wait() is called."""
        return StreamHandle(self._up, lambda: _copy(x, host), (x,), "offload")

    def behind(self, ups: Sequence[Handle] = ()) -> contextlib.AbstractContextManager[Any]:
        """What is begun inside follows these copies up, and nothing that the device computes."""
        return torch.cuda.stream(self._up)

    def n_ranks(self, world_size: int) -> int:
        """Ranks that take memory of this host."""
        return local_ranks(world_size)

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] on the host.

        Raises:
            RuntimeError: it is pinned, and the system has no more of that to give.
        """
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=self.pinned, device="cpu")
        except RuntimeError as error:
            raise RuntimeError(
                f"parallelize: expected {numel * dtype.itemsize / 1e9:.3g} GB of pinned memory on "
                f"the host for offload, got none ({error}); raise the limit of locked memory "
                "(ulimit -l), share the state among more ranks, or take memory that is not pinned, "
                "at about half of the speed: offload_pinned=False, --no-offload-pinned"
            ) from error

    def arrived(self, handle: Handle) -> None:
        """Return when a copy to the host is there."""
        while not handle.is_completed():
            time.sleep(2e-5)


def bus_of(device: torch.device, *, pinned: bool = True) -> Bus:
    """The bus of a GPU; pinned: see Bus.

    Raises:
        ValueError: a CPU, which has none.
    """
    if device.type == "cpu":
        raise ValueError(
            "offload: expected a GPU, got device=cpu; it moves what is on a GPU into its host's "
            "memory: leave it out on a CPU"
        )
    return Bus(device, pinned=pinned)


class SlowBus(Bus):
    """See [Note: the stand-in]; gb_s: of each direction."""

    has_gpu = pinned = False

    def __init__(self, gb_s: float) -> None:
        self._rate, self._threads = gb_s * 1e9, (TaskThread(), TaskThread())
        for thread in self._threads:
            thread.end_with(self)

    def down(self, host: Tensor, x: Tensor) -> Handle:
        """As on a GPU."""
        return self._copy(0, host, x)

    def up(self, x: Tensor, host: Tensor) -> Handle:
        """As on a GPU."""
        return self._copy(1, x, host)

    def arrived(self, handle: Handle) -> None:
        """As on a GPU."""
        handle.wait()

    def behind(self, ups: Sequence[Handle] = ()) -> contextlib.AbstractContextManager[Any]:
        """As on a GPU, but the caller waits."""
        for up in ups:
            up.wait()
        return contextlib.nullcontext()

    def n_ranks(self, world_size: int) -> int:
        """One: ranks are threads of one process, or share a machine with nothing else to do."""
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
