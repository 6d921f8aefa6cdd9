"""Replicas that train independently and average every few steps, with optim/outer.py.

What it does  M replicas of a run, each on world_size / M ranks with its own batches. Every
              outer_every steps they average their weights (local SGD, DiLoCo).
Bytes         one all-reduce of fp32 weights, 8 (M - 1) / M bytes per parameter of a rank, every
              outer_every steps; less with outer_wire. The outer optimizer keeps 8 bytes per
              parameter: the last common weight, and a momentum.
Use it        below the link speed between replicas that `fastpar plan` prints. The loss curve
              differs from that of data parallelism: compare it first.
Not with      tp_grid, CUDA graphs; outer_wire not with deterministic.
Source: Douillard et al. 2023 (DiLoCo), arXiv 2311.08105; Lin et al. 2018 (local SGD),
arXiv 1808.07217
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastpar.axes import Axis, number_text, size_text
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.recorder import ring_bytes
from fastpar.settings.model import GPTConfig

EVERY = (10, 50, 200)


OUTER_BYTES = 56  # moved per element in an outer step: four fp32 tensors, read and written


def replicas_of(setup: Setup, nodes: int) -> int:
    """Number of replicas: one per machine if that divides dp, or two; 1: none."""
    if setup.pp > 1 or setup.ep > 1 or setup.tp_grid is not None:
        return 1
    return next((n for n in (nodes, 2) if n > 1 and setup.dp % n == 0), 1)


def one_replica(workload: Workload, setup: Setup, n: int) -> tuple[Workload, Setup]:
    """The workload and layout of one of n replicas."""
    ranks = setup.world_size // n
    shards = setup.shard_size and min(setup.shard_size, ranks)
    rows = replace(workload, batch_size=workload.batch_size // n)
    return rows, setup.change(world_size=ranks, shard_size=shards)


class Replicas(Axis):
    """Replicas that exchange weights every few steps."""

    name = "replicas"
    order = 10

    def header(self, known: Mapping[str, Any], shape: GPTConfig) -> dict[str, str]:
        replicas, steps = known["replicas"], known["outer_every"]
        return {"ranks": f"replicas {replicas}, averaged every {steps} steps"} if steps else {}

    def what_if(self, workload: Workload, setup: Setup, prices: Any) -> Sequence[str]:
        """For each interval: below which link speed replicas pay."""
        n = replicas_of(setup, prices.nodes)
        if n == 1 or workload.batch_size % n:
            return ()
        lines = ["replicas, with a different loss curve"]
        plain = prices.sent_bytes(workload, setup)
        one = one_replica(workload, setup, n)
        stepped, ranks = prices.stepped_elements(*one), one[1].world_size
        inside, step_s = prices.sent_bytes(*one), prices.step_s(*one)
        exchange = CommOp("all_reduce", "replicas", 4.0 * stepped, n, ranks, 1, "")
        moved = int(OUTER_BYTES * stepped)
        outer_s = prices.op_s(Op("copy", (moved,), "backward", 0.0, float(moved), 1))
        for every in EVERY:
            between = ring_bytes("all_reduce", int(4 * stepped), n) / every
            # With several machines only these bytes use the link between them.
            sent = between + inside * (prices.nodes == 1)
            ms = (step_s + (prices.comm_s(exchange) + outer_s) / every) * 1e3
            if sent < plain:
                pays = 8e-9 * (plain - sent) * every / outer_s
                lines.append(
                    f"  --replicas {n} --outer-every {every}: a rank sends {size_text(between)} a "
                    f"step to other replicas and {size_text(inside)} inside, not "
                    f"{size_text(plain)}; outer step {number_text(outer_s / every * 1e3)} ms, step "
                    f"{number_text(ms, 4)} ms; pays below {number_text(pays, 4)} Gbit/s a rank"
                )
        return lines if len(lines) > 1 else ()


AXIS = Replicas()
