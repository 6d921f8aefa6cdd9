"""A prediction for `fastpar train`: whether a run fits into memory.

Before a model is built, the memory that certainly stays between two steps is counted: weights,
gradients, the optimizer's state (memory.predict_states()), but no activations and nothing in
flight. So a refused run could not have worked; an accepted run may still run out of memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path

import torch

from fastpar.axes.step import Setup, Workload
from fastpar.comm.host import free_memory
from fastpar.comm.ranks import local_ranks
from fastpar.predict.memory import activations_on_host, format_bytes, predict_states
from fastpar.settings.model import GPTConfig, count_parameters


def bytes_per_rank(shape: GPTConfig, setup: Setup) -> dict[str, int]:
    """Bytes that stay between steps, by kind."""
    states = predict_states(Workload(shape, 1), setup)
    kinds = {"weights": states.parameters, "gradients": states.gradients}
    return {**kinds, "optimizer": states.optimizer}


def check_capacity(
    shape: GPTConfig, setup: Setup, *, limit_bytes: int, of_what: str, sharing: int = 1
) -> None:
    """Refuses a model whose states alone exceed the memory.

    Args:
        limit_bytes: of the memory.
        of_what: its owner, for the message; sharing: ranks that share it.
    Raises:
        ValueError: states the need, the memory, and what would fit.
    """
    n, limit = count_parameters(shape, padded=True), limit_bytes // sharing
    need = bytes_per_rank(shape, setup)
    if sum(need.values()) <= limit:
        return
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in need.items())
    where = f"{format_bytes(limit)} of {of_what}"
    where += f" for each of {sharing} ranks" if sharing > 1 else ""
    whole = format_bytes(sum(need.values()))
    raise ValueError(
        f"train: expected a model whose states fit into {where}, got {n:,} parameters that take "
        f"{whole} a rank ({parts}); {what_would_hold(shape, setup, limit)}"
    )


def check_building(shape: GPTConfig, *, limit_bytes: int, sharing: int) -> None:
    """Refuses a model that the ranks of a machine cannot build at the same time.

    Args:
        limit_bytes: of the machine's memory; sharing: ranks here.
    Raises:
        ValueError: each rank first builds the full model in fp32.
    """
    n = count_parameters(shape, padded=True)
    if 4 * n * sharing <= limit_bytes:
        return
    most = limit_bytes // (4 * n)
    raise ValueError(
        f"train: expected memory for a model of {n:,} parameters in fp32, {format_bytes(4 * n)}, "
        f"on each of {sharing} ranks of a machine, which all build the full model first, got "
        f"{format_bytes(limit_bytes)}; use "
        + (f"at most {most} ranks on a machine" if most else "a smaller model")
    )


def what_would_hold(shape: GPTConfig, setup: Setup, limit: int) -> str:
    """The smallest change after which a rank's states fit into its memory, in words."""
    for stage in range(setup.parallel.zero_stage + 1, 4):
        size = sum(bytes_per_rank(shape, setup.change(zero_stage=stage)).values())
        if size <= limit:
            return f"use --zero {stage} ({format_bytes(size)} a rank), or a smaller model"
    per_element = setup.weight_bytes + setup.grad_bytes + setup.state_bytes
    ranks = math.ceil(count_parameters(shape, padded=True) * per_element / max(limit, 1))
    ranks = -(-ranks // setup.tp) * setup.tp
    return f"use {ranks} ranks with as much memory each and --zero 3, or a smaller model"


def check_ranks(shape: GPTConfig, setup: Setup, device: torch.device) -> None:
    """Refuses a model that these ranks cannot hold.

    Raises:
        ValueError: see check_building and check_capacity.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_building(shape, limit_bytes=host_memory(), sharing=ranks_here)
    limit, whose, sharing = memory_of(device)
    check_capacity(shape, setup, limit_bytes=limit, of_what=whose, sharing=sharing)


def check_host_activations(shape: GPTConfig, setup: Setup) -> None:
    """Refuses inputs of blocks for which the host has too little memory.

    Raises:
        ValueError: states the need and the memory.
    """
    ranks, free = local_ranks(setup.world_size), free_memory()
    needed = ranks * activations_on_host(setup.workload(shape), setup)
    if needed > free:
        raise ValueError(
            f"train: expected {format_bytes(needed)} of free memory on the host for "
            f"offload_activations by {ranks} rank{'s' * (ranks > 1)}, got {format_bytes(free)}; "
            "lower --micro-batch-size or --block-size, or drop --offload-activations"
        )


def memory_of(device: torch.device) -> tuple[int, str, int]:
    """(bytes, owner, ranks that share them) of the memory in which this process computes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.total_memory, properties.name, 1
    return host_memory(), "this machine's memory", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_memory(root: Path = Path("/")) -> int:
    """Bytes available to this machine's processes: RAM and swap, or the container's limit."""
    limits = []
    with contextlib.suppress(OSError):  # Linux only
        text = (root / "proc/meminfo").read_text()
        sizes = re.findall(r"^(?:MemTotal|SwapTotal):\s+(\d+) kB", text, re.M)
        limits = [1024 * sum(map(int, sizes))] if sizes else []
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # another version; "max"
            limits.append(int((root / name).read_text()))
    return min(limits, default=1 << 62)
