"""Pipelines on paper: seconds of each stage, the schedule's makespan, micro-batches held."""

from __future__ import annotations

import functools
from collections import Counter

from fastpar.config.config import GPTConfig
from fastpar.cost.buckets import stage_layers
from fastpar.cost.operations import UPDATES, Op
from fastpar.cost.workload import Setup
from fastpar.pipeline.schedules import Kind
from fastpar.pipeline.simulator import ENOUGH, Costs, time_of

F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


class PassCosts:
    """Seconds of a step's passes on a mean rank, by (what part of the model, kind of operation)."""

    def __init__(self) -> None:
        self.seconds = Counter[tuple[str, Kind]]()

    def add(self, op: Op, seconds: float) -> None:
        """All operations like this one."""
        if op.name in UPDATES:
            return
        part = {"embedding": "embedding", "loss": "head"}.get(op.name, "layers")
        if op.direction == "forward":
            self.seconds[part, F] += seconds  # type: ignore[assignment]  # Counter of floats
        elif op.name == "matmul" and op.direction == "backward":
            self.seconds[part, I] += seconds / 2  # type: ignore[assignment]
            self.seconds[part, W] += seconds / 2  # type: ignore[assignment]
        else:
            kind = W if op.name == "embedding" else I
            self.seconds[part, kind] += seconds  # type: ignore[assignment]

    def of_part(self, setup: Setup, part: str, count: int = 1) -> dict[Kind, float]:
        """Of one micro-batch; count: of such parts in the model."""
        share = setup.pp / setup.grad_accum_steps / count
        return {kind: self.seconds[part, kind] * share for kind in (F, I, W)}

    def bubble_s(self, shape: GPTConfig, setup: Setup, waited_s: float, message_s: float) -> float:
        """What the makespan has more than the work of a mean rank.

        Args:
            waited_s: for communication in forward and backward, half of it in each.
            message_s: see simulate().
        """
        for kind in (F, I):
            self.seconds["layers", kind] += waited_s / 2  # type: ignore[assignment]
        first, each, last = (
            self.of_part(setup, part, count)
            for part, count in (("embedding", 1), ("layers", shape.n_layer), ("head", 1))
        )
        counts = stage_layers(shape, setup)
        end = len(counts) - 1
        stages = {
            kind: tuple(
                count * each[kind] + (s == 0) * first[kind] + (s == end) * last[kind]
                for s, count in enumerate(counts)
            )
            for kind in (F, I, W)
        }
        # In parts of a mean stage, and rounded, so that layouts that are alike share a simulation.
        unit = sum(map(sum, stages.values())) / len(counts) or 1.0
        costs = [tuple(round(x / unit, 4) for x in of_kind) for of_kind in stages.values()]
        what = setup.schedule, setup.pp, setup.grad_accum_steps, setup.chunks
        makespan = unit * makespan_of(*what, Costs(*costs), round(message_s / unit, 4))
        return makespan - sum(self.seconds.values())


@functools.lru_cache(65536)
def makespan_of(
    schedule: str, pp: int, micro_batches: int, chunks: int, costs: Costs, message: float
) -> float:
    """See simulate(); costs are tuples."""
    few = min(micro_batches, ENOUGH * pp + micro_batches % pp)
    makespan, busiest = time_of(schedule, pp, few, chunks, costs, message)
    return makespan + (micro_batches - few) * busiest / few
