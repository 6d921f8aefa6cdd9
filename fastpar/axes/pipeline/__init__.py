"""Pipelines: schedules as data, their simulator, and the cut of a model into stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastpar.axes import Axis, Making
from fastpar.axes.pipeline.schedules import Costs, cut, time_of
from fastpar.axes.pipeline.stages import cut_stages, make_stages
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.settings.mesh import divisors, pp_split
from fastpar.settings.model import GPTConfig, part_flops, vocabulary_rows


class RankParts(NamedTuple):
    """The parts of the model on a pipeline's rank: for each layer of each chunk whether it has
    experts (other models: the kind of block); whether the rank has the embedding, and the head."""

    layers: tuple[tuple[int, ...], ...]
    first: bool
    last: bool


def stage_layers(shape: GPTConfig, setup: Setup) -> Sequence[int]:
    """Layers on each of the stages: by pp_split, or by FLOPs of a token's forward."""
    return setup.pp_split or _cut(shape, setup.mesh.pp * setup.chunks)


@functools.lru_cache(4096)
def _cut(shape: GPTConfig, n_stages: int) -> tuple[int, ...]:
    return tuple(cut(part_flops(shape), n_stages))


def parts_of(workload: Workload, setup: Setup) -> tuple[RankParts, ...]:
    """The parts of each rank of a pipeline."""
    if setup.mesh.pp == 1:
        return (RankParts((_layers(workload.shape),), True, True),)
    split = tuple(stage_layers(workload.shape, setup))
    return _rank_parts(workload.shape, setup.mesh.pp, setup.chunks, split)


@functools.lru_cache(256)
def _layers(shape: GPTConfig) -> tuple[bool, ...]:
    return tuple(map(shape.has_experts, range(shape.n_layer)))


@functools.lru_cache(4096)
def _rank_parts(
    shape: GPTConfig, pp: int, chunks: int, split: tuple[int, ...]
) -> tuple[RankParts, ...]:
    layers, ends = _layers(shape), [0, *itertools.accumulate(split)]
    parts, last = [], pp * chunks - 1
    for rank in range(pp):
        stages = range(rank, pp * chunks, pp)
        chunk_layers = tuple(layers[ends[s] : ends[s + 1]] for s in stages)
        parts.append(RankParts(chunk_layers, 0 in stages, last in stages))
    return tuple(parts)


MOST_STAGES = 64


SCHEDULES = (("1f1b", None), ("interleaved", None), ("interleaved", 4))


def most_stages(workload: Workload) -> int:
    """The largest number of stages; each has a layer."""
    return min(MOST_STAGES, workload.shape.n_layer)


class Pipelined(Axis):
    """Layers in stages on the ranks of pp."""

    name = "pipeline"
    order = 20
    place = 6

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """A stage's output forward, its gradient back; the sum of both copies of the table."""
        if setup.mesh.pp == 1:
            return
        tokens, width = setup.tokens_of_rank(workload), workload.shape.n_embd
        stride, t = setup.tp * setup.data, setup.tp
        n_bytes = float(tokens * width * setup.weight_bytes) / t
        count = 2 * setup.grad_accum_steps * setup.chunks
        yield CommOp("send", "pp", n_bytes, setup.mesh.pp, stride, count, "schedule")
        table = float(vocabulary_rows(workload.shape, t) * width * setup.wire_bytes)
        yield CommOp("all_reduce", "pp", table, 2, stride * (setup.mesh.pp - 1), 1, "")

    def header(self, setup: Setup, shape: GPTConfig) -> dict[str, str]:
        """Also the fraction of the time in which a rank waits."""
        pp, name, m = setup.mesh.pp, setup.parallel.pipeline.schedule, setup.grad_accum_steps
        if pp == 1:
            return {}
        split = setup.pp_split or stage_layers(shape, setup)
        ends = [0, *itertools.accumulate([split[0] + 1, *split[1:-1], split[-1] + 1])]
        flops = [sum(part_flops(shape)[a:b]) for a, b in itertools.pairwise(ends)]
        costs = Costs(flops, [2 * f for f in flops])
        makespan, _ = time_of(name, pp, m, len(split) // pp, costs, 0.0)
        bubble = 1 - 3 * m * sum(flops) / (pp * makespan)
        waits = f"ranks wait {bubble:.0%} of a step, by the stages' FLOPs"
        stages = f"{' + '.join(map(str, split))} layers, {name} over {m} micro-batches: {waits}"
        return {"ranks": f"pp {pp}", "stages": stages}

    def cut(self, making: Making) -> None:
        pipeline = making.parallel.pipeline
        split, model = pp_split(pipeline.split), making.model
        stages = cut_stages(model, making.mesh, split, pipeline.schedule, pipeline.chunks)
        if stages is not None:
            making.kept[self.name] = stages

    def connect(self, making: Making) -> None:
        cut = making.kept.get(self.name)
        if cut is not None:
            making.stages = make_stages(cut, making.model, making.mesh, making.make)
            making.unit_starts = cut.starts(making.model)

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        if setup.mesh.pp == 1:
            yield setup
        sizes = divisors(setup.world_size)[1:] if setup.mesh.pp == 1 else [setup.mesh.pp]
        if setup.mesh.tp_grid is not None or setup.parallel.offload.what is not None:
            return
        for pp in sizes:
            for schedule, chunks in SCHEDULES:
                staged = setup.change(pp=pp, schedule=schedule, chunks=chunks)
                if pp * staged.chunks <= most_stages(workload):
                    yield staged

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        return (setup.mesh.pp,)

    def text(self, setup: Setup) -> str:
        return f"pp {setup.mesh.pp}" * (setup.mesh.pp > 1)

    def note(self, setup: Setup) -> str:
        chunks = f" of {setup.chunks} chunks" * (setup.chunks > 1)
        return f"{setup.parallel.pipeline.schedule}{chunks}" * (setup.mesh.pp > 1)

    def check(self, command: Any, workload: Workload) -> None:
        """Refuse more stages than layers, or a number that does not divide the ranks."""
        stages, world_size = command.pp, command.gpus
        if stages in (None, 1):
            return
        most = most_stages(workload)
        near = [n for n in divisors(world_size) if n <= most]
        if not 1 <= stages <= most or world_size % stages:
            raise ValueError(
                f"plan: expected pp to divide the {world_size} ranks and to be at most {most} "
                f"({workload.shape.n_layer} layers), got pp={stages}; use --pp "
                + " or ".join(map(str, near[-3:]))
            )


AXIS = Pipelined()
