"""The host of a rank: its cores, and memory that is taken and that is free.

[Note: cores of a rank] Cores are put in the order of their NUMA nodes and shared out in equal parts
among the ranks of the machine, in the order of these: on servers with as many GPUs at each socket
that is a part of the GPU's own socket. One core of the part is left to the rank's other threads.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def local_ranks(world_size: int) -> int:
    """Ranks of this machine."""
    return min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def available_cores() -> int:
    """Cores that this process may use: affinity and the container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2; "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def threads_per_rank(asked: int | None, ranks_here: int) -> int:
    """CPU threads of a rank: what was asked for, or this machine's cores shared by its ranks."""
    return asked or max(1, available_cores() // ranks_here)


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
        import torch

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
        import torch

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
