"""Tensor-parallel training on one host: torch's DTensor, with FSDP2 and alone, beside fastpar.

GPT-2 124M's widths and vocabulary with four layers, two sequences of 256 tokens a step, one thread
a rank: two ranks at tp=2, and four ranks at dp=2 x tp=2 (of which two share a core where there are
two). torch talks over gloo, fastpar over gloo and over shared memory;
bench/peers/tensor_parallel.py says what is compared.

torch's fastest stays for a whole case, others come a few at a time, and steps take turns. `speedup`
is its median over the row's, both of the same group. The gate is bench_zero.py's: weights and loss
after two steps against one process in fp64.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from torch import Tensor

from bench.harness import Bench
from bench.peers import tensor_parallel
from bench.peers.engines import SINGLE, Contender
from bench.peers.tensor_parallel import OWN, TORCH, Way
from bench.systems import bench_zero
from bench.systems.bench_zero import Trial, batch, run_case
from fastpar.settings.model import GPTConfig

TIME_LIMIT_S = {"cpu": 475, "cuda": 300}
CONFIG = GPTConfig(4, 12, 768, 256, 50304, dropout=0.0)
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)


@dataclass(frozen=True)
class Case:
    """Ways on so many ranks, compared with `base`; in the order of what they tell."""

    title: str
    ranks: int
    base: Way
    groups: tuple[tuple[Way, ...], ...]  # those of one group run beside the base
    rounds: int


CASES = (
    Case(
        "tp=2",
        2,
        Way(TORCH),
        (
            (Way(OWN), Way(OWN, transport="shm")),
            (Way(TORCH, sequence_parallel=False), Way(OWN, sequence_parallel=False)),
        ),
        5,
    ),
    Case(
        "dp=2 tp=2",
        4,
        Way(TORCH, zero_stage=3),
        (
            (Way(OWN, zero_stage=3),),
            (Way(OWN, zero_stage=2),),
            (Way(OWN, zero_stage=1),),
            (Way(OWN, zero_stage=3, transport="shm"),),
            (Way(TORCH, zero_stage=2),),
        ),
        3,
    ),
)


@dataclass(frozen=True)
class TPTrial(Trial):
    """What a worker trains."""

    way: Way = Way(TORCH)  # noqa: RUF009 - frozen


def trial_of(way: Way, ranks: int, config: GPTConfig, folder: str) -> TPTrial:
    return TPTrial(str(way), config, folder, world_size=ranks, way=way)


class Rank(bench_zero.Rank):
    """One rank of one way."""

    trial: TPTrial

    def build(self) -> Contender:
        return tensor_parallel.build(self.trial.way, self.trial.config, self.trial.settings)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        tp = self.trial.way.tp
        return batch(self.trial.config, step, self.rank // tp, self.trial.world_size // tp)


def title_of(case: Case, config: GPTConfig, quick: bool) -> str:
    size = "quick" if quick else f"GPT-2 124M of {config.n_layer} layers"
    return f"{case.title}, {size} T={config.block_size} B=2, {case.ranks} ranks"


def run(bench: Bench) -> None:
    """Case after case; a group's rows are kept as soon as it is done."""
    if bench.device == "cuda":
        return  # ranks on a CPU
    config = QUICK if bench.quick else CONFIG
    with tempfile.TemporaryDirectory() as folder:
        exact = Trial(SINGLE, config, folder, world_size=1, threads=2)
        for case in CASES:
            title = title_of(case, config, bench.quick)
            if bench.only not in title:
                continue
            groups = [
                [trial_of(way, case.ranks, config, folder) for way in group]
                for group in (case.groups[:1] if bench.quick else case.groups)
            ]
            base = trial_of(case.base, case.ranks, config, folder)
            run_case(bench, title, exact, base, groups, 2 if bench.quick else case.rounds, Rank)
