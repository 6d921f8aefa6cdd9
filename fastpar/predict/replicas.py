"""What replicas that train apart would make of a layout: bytes, time, and where they pay."""

from __future__ import annotations

from dataclasses import replace

from fastpar.axes.data import elements_of
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.recorder import ring_bytes
from fastpar.predict.estimate import size_text
from fastpar.predict.time import Rates, predict_step
from fastpar.predict.wires import sent_bytes

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


def replicas_text(workload: Workload, setup: Setup, rates: Rates, nodes: int) -> list[str]:
    """A line for each H: it pays where a rank sends more slowly than it saves bytes."""
    n = replicas_of(setup, nodes)
    if n == 1 or workload.batch_size % n:
        return []
    lines, plain = [], sent_bytes(workload, setup)
    rows, one = apart(workload, setup, n)
    _, stepped = elements_of(rows, one)
    inside, step_s = sent_bytes(rows, one), predict_step(rows, one, rates).step_s
    meeting = CommOp("all_reduce", "replicas", 4.0 * stepped, n, one.world_size, 1, "")
    moved = int(OUTER_BYTES * stepped)
    outer_s = rates.op_s(Op("copy", (moved,), "backward", 0.0, float(moved), 1))
    for every in EVERY:
        between = ring_bytes("all_reduce", int(4 * stepped), n) / every
        # Of several machines only these bytes are on the link between them.
        sent = between + inside * (nodes == 1)
        ms = (step_s + (rates.comm_s(meeting) + outer_s) / every) * 1e3
        if sent < plain:
            pays = 8e-9 * (plain - sent) * every / outer_s
            lines.append(
                f"  --replicas {n} --outer-every {every}: a rank sends {size_text(between)} a step "
                f"to other replicas and {size_text(inside)} inside, not {size_text(plain)}; outer "
                f"step {outer_s / every * 1e3:.3g} ms, step {ms:,.4g} ms; pays below {pays:,.4g} "
                "Gbit/s a rank"
            )
    return lines
