"""Where the compiled CPU kernels run: threads, their CPUs, the instruction set.

A step of the optimizer is bound by memory, so on a machine with several NUMA nodes each process
should stay on one of them:

    host.set_threads(16)
    host.bind_threads(node=0)      # before the tensors are made

Linux puts a page on the node of the thread that first writes it; tensors made after bind_threads
are therefore near their threads. Nothing here changes a result: the kernels give the same bits for
any number of threads and any instruction set.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fastpar.kernels import _C
from fastpar.kernels.backend import WITH_CPP

_NODES = Path("/sys/devices/system/node")


def threads() -> int:
    """Default number of threads of a kernel: torch's."""
    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Sets the number of threads of this process's kernels, and of torch's."""
    if count < 1:
        raise ValueError(
            f"set_threads: expected count >= 1, got count={count}; use at most len(cpus())"
        )
    torch.set_num_threads(count)


def cpus() -> tuple[int, ...]:
    """The CPUs on which the calling thread may run."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def worker_cpus(count: int | None = None) -> list[tuple[int, ...]]:
    """The CPUs on which each of `count` kernel threads (threads()) may run, the caller's first.

    Raises:
        RuntimeError: fastpar was installed without its compiled module.
    """
    if _C is None:
        raise RuntimeError(
            "worker_cpus: expected the compiled module, which has these threads, got none; "
            f"{WITH_CPP}"
        )
    return [tuple(found) for found in _C.worker_cpus(count or threads())]


def read_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs in Linux's list format: "0-2,8" is 0, 1, 2, 8."""
    found: list[int] = []
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def numa_nodes(folder: Path = _NODES) -> dict[int, tuple[int, ...]]:
    """CPUs of each NUMA node that has any; if the system does not say, one node with cpus()."""
    nodes = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        found = read_cpu_list(path.read_text())
        if found:
            nodes[int(path.parent.name.removeprefix("node"))] = found
    return dict(sorted(nodes.items())) or {0: cpus()}


def bind_threads(
    node: int | None = None, cpus: Sequence[int] | None = None, *, count: int | None = None
) -> tuple[int, ...]:
    """Keeps the calling thread and its kernel threads on the CPUs of a node, or on these CPUs.

    Threads started later by the caller inherit it. Call it after set_threads, in each process (and
    each Python thread) that runs kernels; call it again to undo it.

    Args:
        node: a key of numa_nodes().
        cpus: instead of node, numbers of CPUs.
        count: kernel threads; None is threads().
    Returns:
        The CPUs.
    Raises:
        ValueError: both or none of node and cpus; a node or a CPU that the machine lacks.
        RuntimeError: not on Linux; CPUs that this process may not use (a container's limit); no
            compiled module.
    """
    nodes = numa_nodes()
    if (node is None) == (cpus is None):
        raise ValueError(
            f"bind_threads: expected node or cpus, got node={node} cpus={cpus}; pass one of them"
        )
    if node is not None and node not in nodes:
        raise ValueError(
            f"bind_threads: expected a node of {list(nodes)}, got node={node}; see numa_nodes()"
        )
    wanted = nodes[node] if node is not None else tuple(sorted(set(cpus or ())))
    known = {cpu for found in nodes.values() for cpu in found}
    if not wanted or not known.issuperset(wanted):
        raise ValueError(
            f"bind_threads: expected CPUs of {sorted(known)}, got cpus={list(wanted)}; "
            "see numa_nodes()"
        )
    count = count or threads()
    before = worker_cpus(1)[0]
    _C.bind_workers(list(wanted), count)
    got = worker_cpus(count)
    if any(found != wanted for found in got):
        _C.bind_workers(list(before), count)
        raise RuntimeError(
            f"bind_threads: expected to run on cpus={list(wanted)}, got {sorted(set(got))}, the "
            "limit of this process; pass CPUs of cpus()"
        )
    return wanted


def isa() -> str:
    """The instruction set in use: baseline, avx2 or avx512; none without the compiled module."""
    return "none" if _C is None else _C.isa()


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine supports; () without the compiled module."""
    if _C is None:
        return ()
    return tuple(name for name in ("baseline", "avx2", "avx512", "amx") if _C.isa_supported(name))


def set_isa(name: str) -> None:
    """Sets the instruction set of the compiled kernels: auto, baseline, avx2 or avx512.

    Raises:
        ValueError: another name.
        RuntimeError: this machine lacks it; no compiled module.
    """
    if _C is None:
        raise RuntimeError(
            f"set_isa: expected the compiled module, which has these instructions, got none; "
            f"{WITH_CPP}"
        )
    _C.set_isa(name)
