"""What a schedule costs, and whether it can run at all: found out by going through it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from fastpar.pipeline.schedules import Kind, Op, Schedule, make_schedule

# More micro-batches than this many times the ranks only repeat what the schedule does in its
# middle: every further one costs what the fullest rank has to do.
ENOUGH = 2

FINISHES = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)  # after it a micro-batch is no longer held


class Costs(NamedTuple):
    """Seconds of one micro-batch on each stage; see simulate()."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]

    def of(self, op: Op, stage: int) -> float:
        """Of one operation."""
        match op.kind:
            case Kind.FORWARD:
                return self.forward[stage]
            case Kind.INPUT_GRADIENT:
                return self.input_gradient[stage]
            case Kind.WEIGHT_GRADIENT:
                return self.weight_gradient[stage]
        return self.input_gradient[stage] + self.weight_gradient[stage]


class Simulated(NamedTuple):
    """What came out of simulate().

    Attributes:
        makespan: seconds from the first operation to the end of the last.
        busy: seconds of operations of each rank.
        peaks: the most micro-batches that each rank's chunks held at once, one number a chunk,
            at the moment when their sum, weighted by `held`, was largest.
        spans: of each rank, (operation, start, end) in seconds.
    """

    makespan: float
    busy: list[float]
    peaks: list[tuple[int, ...]]
    spans: list[list[tuple[Op, float, float]]]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def needs(schedule: Schedule, rank: int, op: Op) -> list[tuple[int, Op]]:
    """(rank, operation) of those that come before an operation."""
    stage, micro = schedule.stage_of(rank, op.chunk), op.micro

    def of(stage: int, kind: Kind) -> tuple[int, Op]:
        owner, chunk = schedule.owner(stage)
        return owner, Op(kind, chunk, micro)

    if op.kind is Kind.FORWARD:
        return [of(stage - 1, Kind.FORWARD)] if stage else []
    if op.kind is Kind.WEIGHT_GRADIENT:
        return [of(stage, Kind.INPUT_GRADIENT)]
    behind = [of(stage + 1, op.kind)] if stage + 1 < schedule.stages else []
    return [of(stage, Kind.FORWARD), *behind]


def simulate(
    schedule: Schedule,
    costs: Costs,
    *,
    message: float = 0.0,
    held: Sequence[float] | None = None,
) -> Simulated:
    """Run every operation as soon as those before it are done.

    Args:
        message: seconds of a message between two ranks, which costs neither of them work.
        held: what one micro-batch keeps on each stage, such as bytes; by default the same on each.
    Raises:
        ValueError: a schedule that can not run: operations wait for each other.
    """
    p = schedule.ranks
    weights = [1.0] * schedule.stages if held is None else held
    now, busy, at = [0.0] * p, [0.0] * p, [0] * p
    ends: dict[tuple[int, Op], float] = {}
    spans: list[list[tuple[Op, float, float]]] = [[] for _ in range(p)]
    counts = [[0] * schedule.chunks for _ in range(p)]
    most, peaks = [-1.0] * p, [(0,) * schedule.chunks] * p
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while at[rank] < len(ops):
                op = ops[at[rank]]
                before = needs(schedule, rank, op)
                if any(key not in ends for key in before):
                    break
                arrivals = [ends[k] + (message if k[0] != rank else 0.0) for k in before]
                start = max([now[rank], *arrivals])
                cost = costs.of(op, schedule.stage_of(rank, op.chunk))
                now[rank] = ends[rank, op] = start + cost
                busy[rank] += cost
                spans[rank].append((op, start, now[rank]))
                at[rank], moved = at[rank] + 1, True
                counts[rank][op.chunk] += op.kind is Kind.FORWARD
                sizes = (weights[schedule.stage_of(rank, c)] for c in range(schedule.chunks))
                kept = sum(n * size for n, size in zip(counts[rank], sizes))
                if kept > most[rank]:
                    most[rank], peaks[rank] = kept, tuple(counts[rank])
                counts[rank][op.chunk] -= op.kind in FINISHES
    waiting = [ops[i] for ops, i in zip(schedule.ops, at) if i < len(ops)]
    if waiting:
        raise ValueError(
            f"simulate: expected a schedule that can run, got {schedule.name} with pp={p} where "
            f"{waiting} wait for each other; mend its rule"
        )
    return Simulated(max(now), busy, peaks, spans)


class _Step(NamedTuple):
    """An operation as the numbers that time_of() needs; after: (position, from another rank)."""

    rank: int
    kind: Kind
    stage: int
    after: tuple[tuple[int, bool], ...]


@functools.lru_cache(512)
def _in_order(name: str, ranks: int, micro_batches: int, chunks: int) -> list[_Step]:
    """The operations of all ranks, each behind those that it needs, whatever they cost."""
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    ones = [1.0] * schedule.stages
    spans = simulate(schedule, Costs(ones, ones, ones)).spans
    begins = (
        (start, rank, i) for rank, own in enumerate(spans) for i, (_, start, _) in enumerate(own)
    )
    order = [(rank, spans[rank][i][0]) for _, rank, i in sorted(begins)]
    at = {key: i for i, key in enumerate(order)}
    return [
        _Step(
            rank,
            op.kind,
            schedule.stage_of(rank, op.chunk),
            tuple((at[key], key[0] != rank) for key in needs(schedule, rank, op)),
        )
        for rank, op in order
    ]


def time_of(
    name: str, ranks: int, micro_batches: int, chunks: int, costs: Costs, message: float
) -> tuple[float, float]:
    """(makespan, seconds of the busiest rank) as simulate() has them, many times faster."""
    seconds = {
        Kind.FORWARD: costs.forward,
        Kind.INPUT_GRADIENT: costs.input_gradient,
        Kind.WEIGHT_GRADIENT: costs.weight_gradient,
        Kind.BACKWARD: [a + b for a, b in zip(costs.input_gradient, costs.weight_gradient)],
    }
    now, busy, ends = [0.0] * ranks, [0.0] * ranks, list[float]()
    for rank, kind, stage, after in _in_order(name, ranks, micro_batches, chunks):
        start = now[rank]
        for before, moved in after:
            arrival = ends[before] + message if moved else ends[before]
            start = max(start, arrival)
        cost = seconds[kind][stage]
        busy[rank] += cost
        now[rank] = start + cost
        ends.append(now[rank])
    return max(now), max(busy)


class Held(NamedTuple):
    """What a rank holds during a backward.

    Attributes:
        chunk: whose backward it is.
        held: micro-batches of each chunk; waiting: those among them that wait for W.
    """

    chunk: int
    held: tuple[int, ...]
    waiting: tuple[int, ...]

    def within(self, other: Held) -> bool:
        """Whether another moment of a backward of this chunk has more, and of nothing less."""
        less = map(operator.le, self.held + self.waiting, other.held + other.waiting)
        return self != other and self.chunk == other.chunk and all(less)


@functools.lru_cache(4096)
def held_of(schedule: str, pp: int, micro_batches: int, chunks: int) -> list[list[Held]]:
    """Of each rank and chunk: moments at which it holds more of something than at any other."""
    few = micro_batches
    if schedule != "gpipe":  # which holds all
        few = min(micro_batches, ENOUGH * pp + micro_batches % pp)
    return [_most_held(ops, chunks) for ops in make_schedule(schedule, pp, few, chunks).ops]


def _most_held(ops: Sequence[Op], chunks: int) -> list[Held]:
    held, waiting, found = [0] * chunks, [0] * chunks, dict[Held, None]()
    for op in ops:
        held[op.chunk] += op.kind is Kind.FORWARD
        waiting[op.chunk] += op.kind is Kind.INPUT_GRADIENT
        if op.kind is not Kind.FORWARD:
            found[Held(op.chunk, tuple(held), tuple(waiting))] = None
        waiting[op.chunk] -= op.kind is Kind.WEIGHT_GRADIENT
        held[op.chunk] -= op.kind in FINISHES

    return [a for a in found if not any(a.within(b) for b in found)]
