"""What a step is made of, without saying how long it takes: compute and communication of one rank.

Op and CommOp are the words between those who count (here), those who know a machine (Rates) and
those who add up (step_time.py). Counted is what fastpar's own ops and engine do, on the rank that
has most to do; of pipeline stages the mean, fractions of the loss and of the embedding included.

Shape legend as in gpt.py; N is the tokens of a micro-batch, t is tp. Under sequence parallelism
norms see N/t of them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Protocol

from fastpar.axes import every
from fastpar.axes.data import buckets_of, elements_of
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.engine.control import count_words
from fastpar.kernels.linear_cross_entropy import default_chunk_rows
from fastpar.predict.matrix_updates import (
    STEPS,
    MatrixUpdates,
    product_bytes,
    product_flops,
    updates_of,
)
from fastpar.settings import block
from fastpar.settings.block import (
    FIRST,
    LAST,
    Part,
    block_parts,
    parameters_of,
    widths,
    work_of,
)
from fastpar.settings.config import GPTConfig

UPDATES = ("optimizer", "orthogonalize", "matrix_update")  # once a step, after the passes


class Rates(Protocol):
    """How fast a machine is: DatasheetRates on paper, MeasuredRates for this machine."""

    def op_s(self, op: Op) -> float:
        """Seconds of one such operation."""

    def comm_s(self, comm: CommOp) -> float:
        """Seconds of one such communication."""

    def overhead_s(self, workload: Workload, setup: Setup) -> float:
        """Seconds of a step that no Op and no CommOp stands for: Python, hooks, data."""

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of a rank at the format of the weights, for MFU; None: not known."""

    @property
    def overlap(self) -> float:
        """Fraction of the compute time under which communication hides; 0: cores do both."""

    @property
    def generation(self) -> str:
        """Of the device, which tells what host it usually has: a key of host_step.HOSTS."""


# Compute


def ops_of(workload: Workload, setup: Setup) -> tuple[Op, ...]:
    """What a rank computes in one optimizer step."""
    passes = _passes(workload.shape, *_decides_passes(setup))
    more = (op for axis in every() for op in axis.ops(workload, setup))
    return *passes, *more, *_updates(workload, setup)


_decides_passes = attrgetter(
    *("samples_of_rank", "grad_accum_steps", "tp", "cp", "by_keys", "pp", "sequence_parallel"),
    *("activation_checkpointing", "weight_bytes", "device_type", "ep"),
)


@functools.lru_cache(4096)
def _passes(shape: GPTConfig, *decides: Any) -> tuple[Op, ...]:
    """Forward and backward."""
    micro, n_micro, t, c, by_keys, pp, sequence_parallel, mode, item, device, ep = decides
    sizes, seq_len = widths(shape, t), shape.block_size
    rows = 2 * micro * -(-seq_len // (2 * c)) if by_keys else -(-micro * seq_len // c)
    sent, heads = rows * shape.top_k, shape.heads_of_rank(t)
    on = {"tokens": rows, "own": -(-rows // t) if sequence_parallel else rows, "choices": sent}
    if shape.n_expert:  # chosen equally often
        on["experts"] = -(-sent * ep // shape.n_expert)

    def pair(part: Part) -> tuple[Op, Op]:
        """Its forward and its backward."""
        size: tuple[int, ...] = (on[part.on], sizes[part.out])
        more = sizes["V"]
        if part.op == "attention":
            size = (micro, heads if by_keys else -(-heads // c), seq_len, shape.head_dim)
        elif part.op in ("matmul", "loss"):
            size = (on[part.on], sizes[part.into], sizes[part.out])
        if part.op == "loss":
            more = max(1, -(-rows // default_chunk_rows(rows, sizes["C"], more, device)))
        flops, moved, *back = work_of(part.op, size, 4 if part.into == "X" else item, more)
        forward = Op(part.op, size, "forward", flops, moved, 1)
        return forward, Op(part.op, size, "backward", back[0], back[1], 1)

    layers, ends = n_micro * shape.n_layer / pp, n_micro / pp
    sparse = layers * shape.expert_layers / shape.n_layer
    counts = (block.ATTENTION, layers), (block.MLP, layers - sparse), (block.EXPERTS, sparse)
    every = [(part, pair(part), count) for parts, count in counts if count for part in parts]
    every.sort(key=lambda each: (not each[0].cheap, each[0].op == "matmul"))
    again = {"none": (), "selective": (True,), "full": (True, False)}[mode]
    found = Counter[Op]()
    for recomputed in (False, True):
        for part, (forward, backward), count in every:
            if part.op == "attention" and by_keys:
                count /= c  # 1/c of all queries
            if part.on == "experts":
                count *= shape.n_expert // ep
            if not recomputed:
                found[forward] += count
                found[backward] += count
            elif part.cheap in again:
                found[forward._replace(direction="recompute")] += count
    for part in (*LAST, *FIRST[:1]):
        for op in pair(part):
            found[op] += ends
    return tuple(op._replace(count=count) for op, count in found.items())


def _updates(workload: Workload, setup: Setup) -> Iterator[Op]:
    """The update of this rank's elements."""
    _, shard = elements_of(workload, setup)
    mine = math.ceil(shard)
    of_element = 2 * setup.grad_bytes + 2 * setup.weight_bytes + 2 * setup.state_bytes
    if setup.optimizer == "muon":
        matrices = updates_of(workload.shape, buckets_of(workload, setup), setup)
        mine -= matrices.elements
        yield from _matrix_updates(matrices, setup)
    yield Op("optimizer", (mine,), "forward", 15.0 * mine, mine * of_element, 1)


def _matrix_updates(matrices: MatrixUpdates, setup: Setup) -> Iterator[Op]:
    """The products of the rank that has most of them, and what is done element by element."""
    item = product_bytes(setup)
    for (short, long), count in matrices.jobs.items():
        flops = STEPS * product_flops(short, long)
        moved = float(STEPS * item * (4 * short * long + 5 * short * short))
        yield Op("orthogonalize", (short, long), "forward", flops, moved, count)
    # Gradient, momentum and update are gone through 25 times by torch's operations.
    moved, flops = 25.0 * 4 * matrices.elements, 12.0 * matrices.elements
    yield Op("matrix_update", (matrices.elements,), "forward", flops, moved, 1)


# Communication


def comm_ops_of(workload: Workload, setup: Setup) -> tuple[CommOp, ...]:
    """What a rank communicates in one optimizer step."""
    found = [comm for axis in reversed(every()) for comm in axis.comms(workload, setup)]
    if setup.optimizer == "muon":
        found += _to_homes(workload, setup)
    if setup.world_size > 1:
        ends, each = (len([*parameters_of(p)]) for p in (FIRST + LAST, block_parts()))
        words = count_words(ends + each * -(-workload.shape.n_layer // setup.pp))
        total = 8.0 * words * setup.world_size
        found.append(CommOp("all_gather", "control", total, setup.world_size, 1, 1, ""))
    return tuple(comm for comm in found if comm.count and comm.ranks > 1)


def _to_homes(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """Muon's matrices to their homes and back: of the rank that sends most."""
    matrices = updates_of(workload.shape, buckets_of(workload, setup), setup)
    item, along = product_bytes(setup), "shard" if setup.stage else "dp"
    for axis, ranks, stride, sent, count in (
        (along, matrices.n_dp, setup.tp, max(s.dp for s in matrices.sent), matrices.messages.dp),
        ("tp", setup.tp, 1, max(s.tp for s in matrices.sent), matrices.messages.tp),
    ):
        if count:
            n_bytes = float(item * sent) * ranks / (ranks - 1) / count
            yield CommOp("all_to_all", axis, n_bytes, ranks, stride, count, "update")
