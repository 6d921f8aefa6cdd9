"""How long the ranks of a pipeline wait: measured, and as the simulator says, schedule by schedule.

Four processes run pipeline_step() with a model that is too small to matter: each operation sleeps
before its work, the longer the more layers its stage has, so that cores that the processes share do
not count. Each rank notes when each of its operations began and ended, by the clock of the host,
and how long it waited in it: the last stage for the first, where both have a part of the gradient
of a tied table.
The simulator gets the mean length of each kind on each stage, as measured; what it then says of the
part of the time in which ranks wait is compared with what they really waited.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch

from bench.harness import Bench
from bench.records import Row
from bench.systems.worker import Worker
from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import WireMeter
from fastpar.config.config import GPTConfig
from fastpar.models.gpt import GPT
from fastpar.parallel.parallelize import parallelize
from fastpar.parallel.pipeline import PipelineStep, pipeline_step
from fastpar.pipeline.schedules import RULES, Kind, Op, make_schedule
from fastpar.pipeline.simulator import Costs, simulate

TIME_LIMIT_S = {"cpu": 300, "cuda": 10}
SLEEP_S = 0.2  # of a rank's forward; each half of its backward sleeps as long
STEPS = 3
CONFIG = GPTConfig(8, 1, 8, 8, 32, dropout=0.0)
Timed = tuple[Op, float, float, float]  # operation, begin, end, seconds of work in between


@dataclass(frozen=True)
class Trial:
    """What the workers run."""

    schedule: str
    micro_batches: int
    sleep_s: float
    world_size: int = 4
    threads: int = 1
    device: str = "cpu"


class Rank:
    """One rank; public methods are the worker's commands."""

    def __init__(self, trial: Trial, rank: int) -> None:
        self.trial = trial
        self.times: list[Timed] = []  # of the last step
        mesh = Mesh(pp=trial.world_size, device="cpu")
        self.model = parallelize(GPT(CONFIG, seed=0), mesh, pp_schedule=trial.schedule)
        self.group = mesh.new_group("pp")
        work, meter = PipelineStep.do, WireMeter()

        def timed(step: PipelineStep, op: Op, *args: Any, **options: Any) -> None:
            begin, waited = perf_counter(), meter.waited_s
            halves = 2 if op.kind is Kind.BACKWARD else 1
            sleep(halves * trial.sleep_s / step.schedule.chunks)
            with meter.of_fastpar():
                work(step, op, *args, **options)
            end = perf_counter()
            self.times.append((op, begin, end, end - begin - meter.waited_s + waited))

        PipelineStep.do = timed  # type: ignore[assignment, method-assign]  # of this process

    def step(self) -> list[Timed]:
        """The operations of one step."""
        torch.distributed.barrier(self.group)
        self.times = []
        idx = torch.zeros(self.trial.micro_batches, CONFIG.block_size, dtype=torch.int64)
        pipeline_step(self.model, idx, idx, micro_batches=self.trial.micro_batches)
        self.model.zero_grad()
        return self.times


def measured_costs(trial: Trial, steps: Sequence[Sequence[Sequence[Timed]]]) -> Costs:
    """Seconds of each kind on each stage; a backward counts as two equal halves."""
    schedule = make_schedule(trial.schedule, trial.world_size, trial.micro_batches)
    found: dict[Kind, list[list[float]]] = defaultdict(lambda: [[] for _ in range(schedule.stages)])
    for ranks in steps:
        for rank, times in enumerate(ranks):
            for op, _, _, busy in times:
                found[op.kind][schedule.stage_of(rank, op.chunk)].append(busy)

    def mean(kind: Kind, part: float = 1.0) -> list[float]:
        return [part * statistics.fmean(seconds) for seconds in found[kind]]

    if schedule.splits_backward:
        return Costs(*(mean(k) for k in (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)))
    half = mean(Kind.BACKWARD, 0.5)
    return Costs(mean(Kind.FORWARD), half, half)


def waiting(ranks: Sequence[Sequence[Timed]]) -> tuple[float, float]:
    """(the part of all ranks' time in which they waited, seconds of the step)."""
    begin = min(times[0][1] for times in ranks)
    makespan = max(times[-1][2] for times in ranks) - begin
    busy = sum(seconds for times in ranks for *_, seconds in times)
    return 1 - busy / (len(ranks) * makespan), makespan


def measure(bench: Bench, trial: Trial, n_steps: int) -> Row:
    """A row of one schedule."""
    with Worker(trial, make=Rank) as worker:
        worker.call("step")
        steps = [worker.call("step") for _ in range(n_steps)]
    schedule = make_schedule(trial.schedule, trial.world_size, trial.micro_batches)
    simulated = simulate(schedule, measured_costs(trial, steps))
    bubbles, seconds = zip(*(waiting(ranks) for ranks in steps))
    case = f"pp {trial.world_size}, {trial.micro_batches} micro-batches"
    row = bench.row(case, "bubble", trial.schedule, torch.float32)
    row.notes = {
        "bubble": statistics.median(bubbles),
        "simulated": simulated.bubble,
        "of_simulated": statistics.median(bubbles) / simulated.bubble,
        "step_ms": 1e3 * statistics.median(seconds),
        "simulated_ms": 1e3 * simulated.makespan,
    }
    return row


def run(bench: Bench) -> None:
    many, seconds, n_steps = (4, 0.002, 1) if bench.quick else (8, SLEEP_S, STEPS)
    for schedule in RULES:
        row = measure(bench, Trial(schedule, many, seconds), n_steps)
        bench.add(row)
        if not bench.quick:
            print(", ".join(f"{name} {value:.4g}" for name, value in row.notes.items()))
