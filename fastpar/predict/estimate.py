"""What the search for a layout is made of: an estimate, and the numbers that divide others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastpar.axes.step import Setup, Workload
from fastpar.predict.memory import Memory
from fastpar.predict.time import StepTime

ALIKE = 0.01  # a smaller share of a step's time the model cannot tell apart
MAX_MICRO_BATCH_TOKENS = 131072  # of a rank: matrices of more rows are no faster


@dataclass(frozen=True)
class Estimate:
    """A layout and what it would cost; time is None where it does not fit."""

    setup: Setup
    memory: Memory
    time: StepTime | None

    @property
    def family(self) -> tuple[int | str, ...]:
        """What people compare: tp, cp, pp, grid, stage, ranks that share a copy, offload."""
        return self.family_of(self.setup)

    @staticmethod
    def family_of(setup: Setup) -> tuple[int | str, ...]:
        """See family."""
        axes = setup.tp, setup.cp, setup.by_keys, setup.pp
        return *axes, setup.tp_grid or "", setup.zero_stage, setup.n_shards, setup.offload or ""


def divisors(n: int) -> list[int]:
    """In rising order."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def tp_sizes(workload: Workload, template: Setup, per_node: int) -> list[int]:
    """Those whose ranks share a node: across nodes every layer would wait for the network."""
    world = template.world_size
    in_node = math.gcd(world, min(world, per_node))
    return [tp for tp in divisors(in_node) if workload.shape.splits_by(tp)]


def size_text(n_bytes: float) -> str:
    """Bytes for people."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.0f} MB"


def cp_sizes(workload: Workload, template: Setup, tp: int, per_node: int) -> list[tuple[int, str]]:
    """(cp, method) of ranks that share a node with tp and have something of their own to attend.

    Where cp divides the heads, "heads" does the same work and sends 4 / (3 * cp) of what "keys"
    sends; where it does not, heads are padded, and with fewer than cp there is "keys" alone.
    """
    world, heads = template.world_size, workload.shape.heads_of_rank(tp)
    in_node = math.gcd(world, min(world, per_node)) // tp
    sizes = [cp for cp in divisors(in_node) if 2 * cp <= workload.seq_len]
    found = [(cp, "heads") for cp in sizes if cp <= heads]
    return found + [(cp, "keys") for cp in sizes if heads % cp]


def layout_text(setup: Setup) -> str:
    """A layout in words: dp 4 x tp 2, ZeRO-3 in groups of 8."""
    tp = ("tp", setup.tp if setup.tp_grid is None else 1)
    sizes = (("dp", setup.dp), tp, ("cp", setup.cp), ("pp", setup.pp))
    axes = [
        f"{name} {n}" + " by keys" * (name == "cp" and setup.by_keys) for name, n in sizes if n > 1
    ]
    axes += [f"grid {setup.tp_grid}"] * (setup.tp_grid is not None)
    text = " x ".join(axes) or ("one GPU" if setup.device_type == "cuda" else "one rank")
    if setup.stage or setup.data > 1:
        text += f", ZeRO-{setup.zero_stage}"
    text += "" if setup.offload is None else f", {setup.offload} on the host"
    if setup.shard_size is not None:
        text += f" in groups of {setup.shard_size}"
    if setup.pp > 1:
        text += f", {setup.schedule}" + f" of {setup.chunks} chunks" * (setup.chunks > 1)
    return text
