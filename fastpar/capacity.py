"""Whether a model can be trained on the ranks and the memory that are there, before it is built.

Counted is what surely is there between two steps: weights, gradients, the optimizer's numbers; no
activations, no buffers, and of what tp leaves whole on every rank nothing. So what is refused here
could not have worked; what passes may still run out of memory.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastpar.config import GPTConfig, TrainConfig
from fastpar.job import count_parameters

_BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}


@dataclass(frozen=True)
class Layout:
    """What decides how many bytes a rank holds."""

    ranks: int  # that compute different sequences, times tp
    tp: int
    zero_stage: int
    shard_size: int | None
    weights: int  # bytes of an element
    grads: int
    states: int  # of the optimizer

    @classmethod
    def of(cls, config: TrainConfig, *, dtype: torch.dtype, world_size: int) -> Layout:
        """Of a run; dtype is that of its weights."""
        optim, parallel = config.optim, config.parallel
        states = 2 * _BYTES[optim.moment_dtype] if optim.optimizer == "adamw" else 0
        if dtype.itemsize == 2 and not optim.stochastic_rounding:
            states += 2 if optim.master_weights == "remainder" else 4
        return cls(
            ranks=world_size,
            tp=parallel.tp,
            zero_stage=parallel.zero_stage,
            shard_size=parallel.shard_size,
            weights=dtype.itemsize,
            grads=_BYTES[parallel.grad_dtype],
            states=states,
        )

    @property
    def n_shards(self) -> int:
        """Ranks that share one copy of what the stage shares out."""
        dp = max(1, self.ranks // self.tp)
        return min(dp, self.shard_size or dp) if self.zero_stage else 1

    def bytes_per_rank(self, n_parameters: int) -> dict[str, int]:
        """Kind -> bytes, of a model with so many parameters."""
        mine = n_parameters / self.tp
        shared = mine / self.n_shards
        return {
            "weights": round(self.weights * (shared if self.zero_stage == 3 else mine)),
            "gradients": round(self.grads * (shared if self.zero_stage >= 2 else mine)),
            "optimizer": round(self.states * (shared if self.zero_stage else mine)),
        }


def check_capacity(
    shape: GPTConfig, layout: Layout, *, limit_bytes: int, of_what: str, sharing: int = 1
) -> None:
    """Refuse a model whose states alone are more than the memory.

    Args:
        limit_bytes: of the memory.
        of_what: whose, for the message; sharing: ranks that share it.
    Raises:
        ValueError: says the need, what there is, and what would hold the model.
    """
    n, mine = count_parameters(shape), limit_bytes // sharing
    need = layout.bytes_per_rank(n)
    if sum(need.values()) <= mine:
        return
    parts = ", ".join(f"{kind} {_gb(size)}" for kind, size in need.items())
    where = f"{_gb(mine)} of {of_what}" + (f" for each of {sharing} ranks" if sharing > 1 else "")
    raise ValueError(
        f"train: expected a model whose states fit into {where}, got {n:,} parameters that take "
        f"{_gb(sum(need.values()))} a rank ({parts}); {what_would_hold(shape, layout, mine)}"
    )


def check_building(shape: GPTConfig, *, limit_bytes: int, sharing: int) -> None:
    """Refuse a model that the ranks of a machine cannot build side by side.

    Args:
        limit_bytes: of the machine's memory; sharing: ranks here.
    Raises:
        ValueError: each makes the whole model in fp32 before it takes its part.
    """
    n = count_parameters(shape)
    if 4 * n * sharing <= limit_bytes:
        return
    most = limit_bytes // (4 * n)
    raise ValueError(
        f"train: expected memory for a model of {n:,} parameters in fp32, {_gb(4 * n)}, on each of "
        f"{sharing} ranks of a machine, which all begin with the whole of it, got "
        f"{_gb(limit_bytes)}; use "
        + (f"at most {most} ranks on a machine" if most else "a smaller model")
    )


def what_would_hold(shape: GPTConfig, layout: Layout, mine: int) -> str:
    """The smallest changes after which a rank's states fit into its memory, in words."""
    n, ways = count_parameters(shape), []

    def size(**changes: int | None) -> int:
        return sum(replace(layout, **changes).bytes_per_rank(n).values())  # type: ignore[arg-type]

    for stage in range(layout.zero_stage + 1, 4):
        if size(zero_stage=stage) <= mine:
            ways.append(f"--zero {stage} ({_gb(size(zero_stage=stage))} a rank)")
            break
    if layout.shard_size is not None and size(shard_size=None) <= mine:
        ways.append(f"no --shard-size ({_gb(size(shard_size=None))} a rank)")
    for tp in range(layout.tp + 1, layout.ranks + 1):
        fits = layout.ranks % tp == 0 and shape.n_head % tp == 0
        if fits and size(tp=tp) <= mine:
            ways.append(f"--tp {tp} ({_gb(size(tp=tp))} a rank)")
            break
    if not ways:
        per_element = layout.weights + layout.grads + layout.states
        ranks = -(-n * per_element // max(mine, 1))
        ranks = -(-ranks // layout.tp) * layout.tp
        ways.append(f"{ranks} ranks with as much memory each and --zero 3")
    return "use " + ", or ".join([*ways, "a smaller model"])


def check_ranks(
    shape: GPTConfig, config: TrainConfig, *, dtype: torch.dtype, device: torch.device, ranks: int
) -> None:
    """Refuse a model that these ranks cannot hold; dtype is that of its weights.

    Raises:
        ValueError: see check_building and check_capacity.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_building(shape, limit_bytes=host_memory(), sharing=ranks_here)
    limit, whose, sharing = memory_of(device)
    layout = Layout.of(config, dtype=dtype, world_size=ranks)
    check_capacity(shape, layout, limit_bytes=limit, of_what=whose, sharing=sharing)


def memory_of(device: torch.device) -> tuple[int, str, int]:
    """(bytes, whose they are, ranks that share them) of where a rank of this process computes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.total_memory, properties.name, 1
    return host_memory(), "this machine's memory", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_memory(root: Path = Path("/")) -> int:
    """Bytes that this machine's processes can have: RAM and swap, or the container's limit."""
    limits = []
    with contextlib.suppress(OSError):  # Linux only
        text = (root / "proc/meminfo").read_text()
        found = re.findall(r"^(?:MemTotal|SwapTotal):\s+(\d+) kB", text, re.M)
        limits = [1024 * sum(map(int, found))] if found else []
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # another version; "max"
            limits.append(int((root / name).read_text()))
    return min(limits, default=1 << 62)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
