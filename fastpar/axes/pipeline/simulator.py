"""What a schedule costs, and whether it can run at all: found out by going through it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from fastpar.axes.pipeline.schedules import Kind, Op, Schedule, make_schedule

# More micro-batches than this many times the ranks only repeat what the schedule does in its
# middle: every further one costs what the fullest rank has to do.
ENOUGH = 2

FINISHES = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)  # after it a micro-batch is no longer held


class Costs(NamedTuple):
    """Seconds of one micro-batch on each stage; see time_of()."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]


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


class _Step(NamedTuple):
    """An operation as the numbers that time_of() needs; after: (position, from another rank)."""

    rank: int
    kind: Kind
    stage: int
    after: tuple[tuple[int, bool], ...]


def in_order(schedule: Schedule) -> list[_Step]:
    """The operations of all ranks, each behind those that it needs, whatever they cost.

    Raises:
        ValueError: a schedule that can not run: operations wait for each other.
    """
    found: list[_Step] = []
    at: dict[tuple[int, Op], int] = {}
    left, before = [list(reversed(ops)) for ops in schedule.ops], -1
    while before < len(found):
        before = len(found)
        for rank, ops in enumerate(left):
            while ops and -1 not in (
                behind := [at.get(key, -1) for key in needs(schedule, rank, ops[-1])]
            ):
                op = ops.pop()
                at[rank, op] = len(found)
                after = tuple((i, found[i].rank != rank) for i in behind)
                found.append(_Step(rank, op.kind, schedule.stage_of(rank, op.chunk), after))
    if any(left):
        raise ValueError(
            f"in_order: expected a schedule that can run, got {schedule.name} with "
            f"pp={schedule.ranks} where {[ops[-1] for ops in left if ops]} wait for each other; "
            "mend its rule"
        )
    return found


@functools.lru_cache(512)
def _steps(name: str, ranks: int, micro_batches: int, chunks: int) -> list[_Step]:
    return in_order(make_schedule(name, ranks, micro_batches, chunks))


def time_of(
    name: str, ranks: int, micro_batches: int, chunks: int, costs: Costs, message: float
) -> tuple[float, float]:
    """(makespan, seconds of the busiest rank) where each operation begins as early as it can.

    Args:
        message: seconds of a message between two ranks, which costs neither of them work.
    """
    seconds = {
        Kind.FORWARD: costs.forward,
        Kind.INPUT_GRADIENT: costs.input_gradient,
        Kind.WEIGHT_GRADIENT: costs.weight_gradient,
        Kind.BACKWARD: [a + b for a, b in zip(costs.input_gradient, costs.weight_gradient)],
    }
    now, busy, ends = [0.0] * ranks, [0.0] * ranks, list[float]()
    for rank, kind, stage, after in _steps(name, ranks, micro_batches, chunks):
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
