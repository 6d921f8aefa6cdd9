"""Schedules of a pipeline as data: per rank, which part of which micro-batch comes next.

With p ranks, m micro-batches and v chunks of the model on each rank there are p v stages.

    gpipe        all forwards, then all backward passes
    1f1b         p - 1 - rank forwards ahead, then one forward, one backward in turn
    interleaved  1f1b over v chunks a rank (Narayanan et al. 2021): stage c p + rank is chunk c
    zb-h1        1f1b with split backward (Qi et al. 2023): weight gradients fill the waiting at
                 the end; as many micro-batches are held
    zb-v         two chunks a rank in the shape of a V: rank 0 has the first and the last stage, so
                 that a tied table is there once (Qi et al. 2024)

[Note: order] In every schedule the backward passes of a chunk, and its weight gradients, come in
the order of the micro-batches: sums over them are those of one process.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fastpar.settings.mesh import pp_chunks
from fastpar.settings.rules import check, check_synchronous


class Kind(enum.Enum):
    """What is done to a micro-batch by a chunk."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Op(NamedTuple):
    """A kind, of one chunk of this rank, for one micro-batch."""

    kind: Kind
    chunk: int
    micro: int


class Schedule(NamedTuple):
    """What every rank does, in order.

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
        """All chunks of all ranks."""
        return self.ranks * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are operations of their own."""
        return self.name in SPLIT

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that a rank has as one of its chunks."""
        return stage_of(self.name, self.ranks, rank, chunk)

    def owner(self, stage: int) -> tuple[int, int]:
        """The rank that has a stage, and as which chunk; the other way round of stage_of."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank if _in_v(self.name) and chunk % 2 else rank), chunk


def stage_of(name: str, ranks: int, rank: int, chunk: int) -> int:
    """See Schedule.stage_of."""
    back = _in_v(name) and chunk % 2
    return chunk * ranks + (ranks - 1 - rank if back else rank)


def _in_v(name: str) -> bool:
    return name == "zb-v"


F, B, I, W = Kind  # noqa: E741


def _gpipe(p: int, m: int, v: int, rank: int) -> Iterator[Op]:
    for kind in (F, B):
        yield from (Op(kind, 0, i) for i in range(m))


def _alternate(forwards: list[Op], backwards: list[Op], ahead: int) -> Iterator[Op]:
    """So many forwards first; then one of each in turn; the rest of the backward passes."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in itertools.zip_longest(forwards[ahead:], backwards):
        if forward is not None:
            yield forward
        yield backward


def _interleaved(p: int, m: int, v: int, rank: int) -> Iterator[Op]:
    """In groups of p micro-batches; operations of those that the last group lacks are left out."""
    groups = [range(low, low + p) for low in range(0, m, p)] if v > 1 else [range(m)]
    forwards = [Op(F, c, i) for group in groups for c in range(v) for i in group]
    backwards = [Op(B, v - 1 - c, i) for _, c, i in forwards]
    extra = 0 if v == 1 else p - 1 - rank + (v - 1) * p
    ops = _alternate(forwards, backwards, p - 1 - rank + extra)
    yield from (op for op in ops if op.micro < m)


def _zb_h1(p: int, m: int, v: int, rank: int) -> Iterator[Op]:
    done = weights = 0
    for op in _interleaved(p, m, 1, rank):
        yield op if op.kind is F else Op(I, 0, op.micro)
        done += op.kind is B
        if done - weights > rank:
            yield Op(W, 0, weights)
            weights += 1
    yield from (Op(W, 0, i) for i in range(weights, m))


def _zb_v(p: int, m: int, v: int, rank: int) -> Iterator[Op]:
    """For m >= 2 p - 1; of fewer micro-batches, the operations of the missing ones are left out."""
    most, count = max(m, 2 * p - 1), {(kind, c): 0 for kind in Kind for c in (0, 1)}

    def do(*what: tuple[Kind, int]) -> Iterator[Op]:
        for kind, c in what:
            micro, count[kind, c] = count[kind, c], count[kind, c] + 1
            if micro < m:
                yield Op(kind, c, micro)

    behind = p - rank
    yield from do(*[(F, 0)] * (2 * behind - 1))
    yield from do(*[(F, 1), (F, 0)] * rank)
    yield from do(*[(F, 1), (I, 1), (W, 1)] * behind)
    while count[F, 1] < most:
        forward = [(F, 0)] * (count[F, 0] < most)
        yield from do(*forward, (I, 0), (W, 0), (F, 1), (I, 1), (W, 1))
    yield from do(*[(I, 0), (I, 1)] * rank)
    yield from do(*[(I, 0), (W, 0)] * behind)
    for c in (1, 0):
        yield from do(*[(W, c)] * (most - count[W, c]))


Rule = Callable[[int, int, int, int], Iterator[Op]]
RULES: dict[str, Rule] = {
    "gpipe": _gpipe,
    "1f1b": lambda p, m, v, rank: _interleaved(p, m, 1, rank),
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
SPLIT = ("zb-h1", "zb-v")


def check_name(name: str, *, caller: str) -> None:
    """Refuse an unknown schedule, and those of stale weights."""
    check_synchronous(caller, "schedule", name, "'1f1b', PipeDream's order with a flush")
    if name not in RULES:
        raise ValueError(
            f"{caller}: expected schedule to be one of {', '.join(RULES)}, got "
            f"schedule={name!r}; choose one of these"
        )


def chunks_of(name: str, chunks: int | None, *, caller: str) -> int:
    """The chunks on each rank; None: the fewest that make the schedule differ from 1f1b.

    Raises:
        ValueError: an unknown schedule; chunks that it does not take.
    """
    check_name(name, caller=caller)
    check(caller, {"schedule": name, "chunks": chunks})
    return pp_chunks(name, chunks)


@functools.lru_cache(16)  # a training loop asks in every step
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
            f"micro_batches={micro_batches}; choose larger ones"
        )
    each = (RULES[name](ranks, micro_batches, chunks, rank) for rank in range(ranks))
    return Schedule(name, ranks, micro_batches, chunks, tuple(tuple(ops) for ops in each))
