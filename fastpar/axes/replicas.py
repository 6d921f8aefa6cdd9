"""Replicas, which train apart and meet every few steps; the optimizer that meets is optim/outer.py.

What it is    M copies of a run, each on world_size / M ranks with its own batches. Every
              outer_every steps they average what they learned (local SGD, DiLoCo).
Bytes         one all-reduce of fp32 weights, 8 (M - 1) / M bytes a parameter of a rank, every
              outer_every steps; outer_wire has fewer. The outer optimizer keeps 8 bytes a
              parameter: the weight of the last meeting, and a momentum.
Pays          below the link speed between replicas that `fastpar plan` prints. The loss curve is
              another one than with a mean of every step: compare it before you rely on it.
Not with      tp_grid, CUDA graphs; outer_wire not with deterministic.
Source: Douillard et al. 2023 (DiLoCo), arXiv 2311.08105; Lin et al. 2018 (local SGD),
arXiv 1808.07217
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastpar.axes import Axis, Prices, size_text
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.recorder import ring_bytes
from fastpar.settings.model import GPTConfig

EVERY = (10, 50, 200)


OUTER_BYTES = 56  # moved in an outer step, of an element: four fp32 tensors, read and written


def replicas_of(setup: Setup, nodes: int) -> int:
    """How many: the machines where they divide the data-parallel ranks, or halves; 1: none."""
    if setup.pp > 1 or setup.ep > 1 or setup.tp_grid is not None:
        return 1
    return next((n for n in (nodes, 2) if n > 1 and setup.dp % n == 0), 1)


def apart(workload: Workload, setup: Setup, n: int) -> tuple[Workload, Setup]:
    """One of n replicas."""
    ranks = setup.world_size // n
    shards = setup.shard_size and min(setup.shard_size, ranks)
    rows = replace(workload, batch_size=workload.batch_size // n)
    return rows, setup.change(world_size=ranks, shard_size=shards)


class Replicas(Axis):
    """Copies of a run that exchange their progress."""

    name = "replicas"
    order = 10

    def header(self, known: Mapping[str, Any], shape: GPTConfig) -> Iterator[str]:
        if known["outer_every"] is not None:
            yield f"replicas {known['replicas']}, which meet every {known['outer_every']} steps"

    def what_if(self, workload: Workload, setup: Setup, prices: Prices) -> Sequence[str]:
        """For each H: it pays where a rank sends more slowly than it saves bytes."""
        n = replicas_of(setup, prices.nodes)
        if n == 1 or workload.batch_size % n:
            return ()
        lines = ["replicas, with a loss curve of their own"]
        plain = prices.sent_bytes(workload, setup)
        one = apart(workload, setup, n)
        stepped, ranks = prices.stepped_elements(*one), one[1].world_size
        inside, step_s = prices.sent_bytes(*one), prices.step_s(*one)
        meeting = CommOp("all_reduce", "replicas", 4.0 * stepped, n, ranks, 1, "")
        moved = int(OUTER_BYTES * stepped)
        outer_s = prices.op_s(Op("copy", (moved,), "backward", 0.0, float(moved), 1))
        for every in EVERY:
            between = ring_bytes("all_reduce", int(4 * stepped), n) / every
            # Of several machines only these bytes are on the link between them.
            sent = between + inside * (prices.nodes == 1)
            ms = (step_s + (prices.comm_s(meeting) + outer_s) / every) * 1e3
            if sent < plain:
                pays = 8e-9 * (plain - sent) * every / outer_s
                lines.append(
                    f"  --replicas {n} --outer-every {every}: a rank sends {size_text(between)} a "
                    f"step to other replicas and {size_text(inside)} inside, not "
                    f"{size_text(plain)}; outer step {outer_s / every * 1e3:.3g} ms, step "
                    f"{ms:,.4g} ms; pays below {pays:,.4g} Gbit/s a rank"
                )
        return lines if len(lines) > 1 else ()


AXIS = Replicas()
