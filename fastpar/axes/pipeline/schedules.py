"""Pipeline schedules as data: per rank, which chunk runs which micro-batch next.

With p ranks, m micro-batches and v chunks of the model on each rank there are p v stages.

    gpipe        all forwards, then all backward passes
    1f1b         p - 1 - rank forwards ahead, then one forward and one backward alternately
    interleaved  1f1b over v chunks per rank (Narayanan et al. 2021): stage c p + rank is chunk c

In every schedule the backward passes of a chunk are in the order of the micro-batches: sums over
them are those of one process.

Simulation shows a schedule's cost, and whether it can run at all: time_of(), held_of(). cut() says
where to cut a model: cut([embedding, layer, ..., layer, head], 4) -> layers on each stage, so that
the most expensive stage is as cheap as possible.
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fastpar.settings.mesh import pp_chunks
from fastpar.settings.rules import check


class Kind(enum.Enum):
    """What a chunk does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


class Op(NamedTuple):
    """An operation: a kind, of one chunk of this rank, for one micro-batch."""

    kind: Kind
    chunk: int
    micro: int


class Schedule(NamedTuple):
    """The operations of every rank, in order.

    Attributes:
        name: see the table above.
        ranks, micro_batches, chunks: p, m and v.
        ops: a sequence for each rank.
    """

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    ops: tuple[tuple[Op, ...], ...]

    @property
    def stages(self) -> int:
        """Number of chunks of all ranks."""
        return self.ranks * self.chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage of a rank's chunk."""
        return chunk * self.ranks + rank

    def owner(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage; the inverse of stage_of."""
        chunk, rank = divmod(stage, self.ranks)
        return rank, chunk


F, B = Kind


def _gpipe(p: int, m: int, v: int, rank: int) -> Iterator[Op]:
    for kind in (F, B):
        yield from (Op(kind, 0, i) for i in range(m))


def _alternate(forwards: list[Op], backwards: list[Op], ahead: int) -> Iterator[Op]:
    """`ahead` forwards first; then one of each alternately; then the other backward passes."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in itertools.zip_longest(forwards[ahead:], backwards):
        if forward is not None:
            yield forward
        yield backward


def _interleaved(p: int, m: int, v: int, rank: int) -> Iterator[Op]:
    """In groups of p micro-batches; operations of missing ones in the last group are omitted."""
    groups = [range(low, low + p) for low in range(0, m, p)] if v > 1 else [range(m)]
    forwards = [Op(F, c, i) for group in groups for c in range(v) for i in group]
    backwards = [Op(B, v - 1 - c, i) for _, c, i in forwards]
    extra = 0 if v == 1 else p - 1 - rank + (v - 1) * p
    ops = _alternate(forwards, backwards, p - 1 - rank + extra)
    yield from (op for op in ops if op.micro < m)


Rule = Callable[[int, int, int, int], Iterator[Op]]
RULES: dict[str, Rule] = {
    "gpipe": _gpipe,
    "1f1b": lambda p, m, v, rank: _interleaved(p, m, 1, rank),
    "interleaved": _interleaved,
}


def check_name(name: str, *, caller: str) -> None:
    """Refuse an unknown schedule."""
    if name not in RULES:
        raise ValueError(
            f"{caller}: expected schedule to be one of {', '.join(RULES)}, got "
            f"schedule={name!r}; choose one of these"
        )


def chunks_of(name: str, chunks: int | None, *, caller: str) -> int:
    """The chunks on each rank. Default: the fewest with which the schedule differs from 1f1b.

    Raises:
        ValueError: an unknown schedule; chunks that it does not support.
    """
    check_name(name, caller=caller)
    check(caller, {"schedule": name, "chunks": chunks})
    return pp_chunks(name, chunks)


@functools.lru_cache(16)  # a training loop calls it in every step
def make_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None, *, caller: str = "plan"
) -> Schedule:
    """The operations of every rank.

    Raises:
        ValueError: see chunks_of; fewer than one rank or micro-batch.
    """
    chunks = chunks_of(name, chunks, caller=caller)
    if min(ranks, micro_batches) < 1:
        raise ValueError(
            f"{caller}: expected at least one rank and one micro-batch, got pp={ranks} "
            f"micro_batches={micro_batches}; pass larger ones"
        )
    each = (RULES[name](ranks, micro_batches, chunks, rank) for rank in range(ranks))
    return Schedule(name, ranks, micro_batches, chunks, tuple(tuple(ops) for ops in each))


# Costs

# More micro-batches than this many times the ranks only repeat the middle of the schedule: each
# further one costs the work of the busiest rank.
ENOUGH = 2


class Costs(NamedTuple):
    """Seconds of one micro-batch on each stage; see time_of()."""

    forward: Sequence[float]
    backward: Sequence[float]


def needs(schedule: Schedule, rank: int, op: Op) -> list[tuple[int, Op]]:
    """(rank, operation) of the operations that must come before this one."""
    stage, micro = schedule.stage_of(rank, op.chunk), op.micro

    def of(stage: int, kind: Kind) -> tuple[int, Op]:
        owner, chunk = schedule.owner(stage)
        return owner, Op(kind, chunk, micro)

    if op.kind is Kind.FORWARD:
        return [of(stage - 1, Kind.FORWARD)] if stage else []
    behind = [of(stage + 1, op.kind)] if stage + 1 < schedule.stages else []
    return [of(stage, Kind.FORWARD), *behind]


class _Step(NamedTuple):
    """An operation as time_of() needs it; after: (position, whether from another rank)."""

    rank: int
    kind: Kind
    stage: int
    after: tuple[tuple[int, bool], ...]


def in_order(schedule: Schedule) -> list[_Step]:
    """The operations of all ranks, each after those that it needs, whatever they cost.

    Raises:
        ValueError: operations wait for each other, so the schedule cannot run.
    """
    steps: list[_Step] = []
    at: dict[tuple[int, Op], int] = {}
    left, before = [list(reversed(ops)) for ops in schedule.ops], -1
    while before < len(steps):
        before = len(steps)
        for rank, ops in enumerate(left):
            while ops and -1 not in (
                behind := [at.get(key, -1) for key in needs(schedule, rank, ops[-1])]
            ):
                op = ops.pop()
                at[rank, op] = len(steps)
                after = tuple((i, steps[i].rank != rank) for i in behind)
                steps.append(_Step(rank, op.kind, schedule.stage_of(rank, op.chunk), after))
    if any(left):
        raise ValueError(
            f"in_order: {schedule.name} with pp={schedule.ranks} cannot run: "
            f"{[ops[-1] for ops in left if ops]} wait for each other; correct its rule"
        )
    return steps


@functools.lru_cache(512)
def _steps(name: str, ranks: int, micro_batches: int, chunks: int) -> list[_Step]:
    return in_order(make_schedule(name, ranks, micro_batches, chunks))


def time_of(
    name: str, ranks: int, micro_batches: int, chunks: int, costs: Costs, message: float
) -> tuple[float, float]:
    """(makespan, seconds of the busiest rank) if each operation begins as early as possible.

    Args:
        message: seconds of a message between two ranks, during which both can work.
    """
    seconds = {Kind.FORWARD: costs.forward, Kind.BACKWARD: costs.backward}
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
    """The micro-batches that a rank holds during a backward.

    Attributes:
        chunk: of the backward.
        held: micro-batches of each chunk.
    """

    chunk: int
    held: tuple[int, ...]

    def within(self, other: Held) -> bool:
        """Whether another moment with a backward of this chunk holds more, and nothing less."""
        less = map(operator.le, self.held, other.held)
        return self != other and self.chunk == other.chunk and all(less)


@functools.lru_cache(4096)
def held_of(schedule: str, pp: int, micro_batches: int, chunks: int) -> list[list[Held]]:
    """For each rank: the moments at which it holds more of something than at any other."""
    few = micro_batches
    if schedule != "gpipe":  # gpipe holds all
        few = min(micro_batches, ENOUGH * pp + micro_batches % pp)
    return [_most_held(ops, chunks) for ops in make_schedule(schedule, pp, few, chunks).ops]


def _most_held(ops: Sequence[Op], chunks: int) -> list[Held]:
    held, moments = [0] * chunks, dict[Held, None]()
    for op in ops:
        if op.kind is Kind.FORWARD:
            held[op.chunk] += 1
        else:
            moments[Held(op.chunk, tuple(held))] = None
            held[op.chunk] -= 1
    return [a for a in moments if not any(a.within(b) for b in moments)]


# Cutting a model


def cut(costs: Sequence[float], n_stages: int) -> list[int]:
    """Layers on each stage: of all cuts the one whose slowest stage is fastest, then the most even.

    The first stage has the embedding, the last one the head; each may have no layer besides.

    Args:
        costs: of each part, such as seconds of forward and backward: the embedding, the layers, the
            head.
        n_stages: of all ranks and chunks.
    Raises:
        ValueError: more stages than parts, or fewer than one.
    """
    if not 1 <= n_stages <= len(costs):
        raise ValueError(
            f"cut: expected 1 to {len(costs)} stages (the model's number of parts), got "
            f"n_stages={n_stages}; choose a smaller pp, or fewer chunks"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    ends = _most_even(sums, n_stages, _least_limit(sums, n_stages))
    counts = [b - a for a, b in itertools.pairwise(ends)]
    counts[0] -= 1  # the embedding
    counts[-1] -= 1  # the head
    return counts


def _least_limit(sums: Sequence[float], n_stages: int) -> float:
    """A lower bound of the slowest of n_stages: the smallest sum of consecutive parts with which
    greedily filled stages suffice."""
    limits = sorted({b - a for a, b in itertools.combinations(sums, 2)})

    def enough(limit: float) -> bool:
        start, used = 0, 0
        while start < len(sums) - 1 and used < n_stages:
            # The end of the largest stage that begins here: sums do not decrease.
            end = bisect.bisect_right(sums, limit, start, key=lambda x: x - sums[start]) - 1
            if end == start:
                return False
            start, used = end, used + 1
        return start == len(sums) - 1

    return limits[bisect.bisect_left(limits, True, key=enough)]


def _most_even(sums: Sequence[float], n_stages: int, limit: float) -> list[int]:
    """The first part of each stage, and the end: of all cuts without a stage above the limit the
    one with the least sum of squares."""
    n = len(sums) - 1
    best = {0: (0.0, [0])}
    for stage in range(1, n_stages + 1):
        tried: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, n + 1):
            for start in range(end - 1, stage - 2, -1):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                if start in best:
                    value = best[start][0] + cost * cost
                    if end not in tried or (value, [*best[start][1], end]) < tried[end]:
                        tried[end] = value, [*best[start][1], end]
        best = tried
    return best[n][1]
