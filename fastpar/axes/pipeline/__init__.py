"""Pipelines: schedules as data, their simulator, the cut of a model into stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fastpar.axes import Axis, Making
from fastpar.axes.pipeline.schedules import stage_of
from fastpar.axes.pipeline.simulator import Costs, time_of
from fastpar.axes.pipeline.split import cut
from fastpar.axes.pipeline.stages import cut_stages, make_stages
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.settings.block import part_flops, vocabulary_rows
from fastpar.settings.config import GPTConfig
from fastpar.settings.mesh import pp_split


class RankParts(NamedTuple):
    """What a pipeline's rank has: of each layer of each chunk whether it has experts; whether the
    embedding, the head are there too."""

    layers: tuple[tuple[bool, ...], ...]
    first: bool
    last: bool


def stage_layers(shape: GPTConfig, setup: Setup) -> Sequence[int]:
    """Layers on each of the stages: as asked for, or by flops of a token's forward."""
    return setup.pp_split or _cut(shape, setup.pp * setup.chunks)


@functools.lru_cache(4096)
def _cut(shape: GPTConfig, n_stages: int) -> tuple[int, ...]:
    return tuple(cut(part_flops(shape), n_stages))


def parts_of(workload: Workload, setup: Setup) -> tuple[RankParts, ...]:
    """What each rank of a pipeline has."""
    if setup.pp == 1:
        return (RankParts((_layers(workload.shape),), True, True),)
    split = tuple(stage_layers(workload.shape, setup))
    return _rank_parts(workload.shape, setup.schedule, setup.pp, setup.chunks, split)


@functools.lru_cache(256)
def _layers(shape: GPTConfig) -> tuple[bool, ...]:
    return tuple(map(shape.has_experts, range(shape.n_layer)))


@functools.lru_cache(4096)
def _rank_parts(
    shape: GPTConfig, schedule: str, pp: int, chunks: int, split: tuple[int, ...]
) -> tuple[RankParts, ...]:
    layers, ends = _layers(shape), [0, *itertools.accumulate(split)]
    found, last = [], pp * chunks - 1
    for rank in range(pp):
        mine = [stage_of(schedule, pp, rank, c) for c in range(chunks)]
        chunk_layers = tuple(layers[ends[s] : ends[s + 1]] for s in mine)
        found.append(RankParts(chunk_layers, 0 in mine, last in mine))
    return tuple(found)


class Pipelined(Axis):
    """Layers in stages on ranks of pp."""

    name = "pipeline"
    order = 20

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """A stage's output forward, its gradient back; the sum of both copies of the table."""
        if setup.pp == 1:
            return
        tokens, width = setup.tokens_of_rank(workload), workload.shape.n_embd
        stride, t = setup.tp * setup.data, setup.tp
        n_bytes = float(tokens * width * setup.weight_bytes) / t
        count = 2 * setup.grad_accum_steps * setup.chunks
        yield CommOp("send", "pp", n_bytes, setup.pp, stride, count, "schedule")
        if setup.schedule == "zb-v":  # rank 0 has the first and the last stage
            return
        table = float(vocabulary_rows(workload.shape, t) * width * setup.wire_bytes)
        yield CommOp("all_reduce", "pp", table, 2, stride * (setup.pp - 1), 1, "")

    def header(self, known: Mapping[str, Any], shape: GPTConfig) -> Iterator[str]:
        """Also the part of the time in which a rank waits."""
        pp, name, m = known["pp"], known["schedule"], known["grad_accum_steps"]
        if pp == 1:
            return
        yield f"pp {pp}"
        split = known["pp_split"]
        ends = [0, *itertools.accumulate([split[0] + 1, *split[1:-1], split[-1] + 1])]
        flops = [sum(part_flops(shape)[a:b]) for a, b in itertools.pairwise(ends)]
        makespan, _ = time_of(name, pp, m, len(split) // pp, Costs(flops, flops, flops), 0.0)
        bubble = 1 - 3 * m * sum(flops) / (pp * makespan)
        yield (
            f"stages   {' + '.join(map(str, split))} layers, {name} over {m} micro-batches: "
            f"ranks wait for {bubble:.0%} of a step, by the floating-point operations of stages"
        )

    def cut(self, making: Making) -> None:
        asked = making.asked.pipeline
        split, model = pp_split(asked.split), making.model
        found = cut_stages(model, making.mesh, split, asked.schedule, asked.chunks)
        if found is not None:
            making.kept[self.name] = found

    def connect(self, making: Making) -> None:
        cut = making.kept.get(self.name)
        if cut is not None:
            making.stages = make_stages(cut, making.model, making.mesh, making.make)
            making.apart = cut.starts(making.model)


AXIS = Pipelined()
