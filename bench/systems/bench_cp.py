"""Long sequences on two ranks: context parallel beside tensor and data parallel, and behind a link.

Two CPU ranks with one thread each train two sequences of 4096 tokens a step, 2 layers of 256:
cp=2 by both methods, tp=2 with sequence parallelism, and dp=2, which has a sequence on each
rank and, unlike the others, cannot train a single one on both. Steps take turns. The gate is
bench_zero.py's: weights and loss after two steps against one process in fp64.

Then the same in two network namespaces (bench/systems/links.py) that 1 Gbit/s join, over gloo.

torch's own context parallel is missing: on CPUs its attention has no sharding strategy
(torch 2.13: NotImplementedError of _scaled_dot_product_flash_attention_for_cpu; with
SDPBackend.MATH a RuntimeError, "got mixed torch.Tensor and DTensor").
"""

from __future__ import annotations

import tempfile

from torch import Tensor

from bench.harness import Bench
from bench.peers.engines import SINGLE, Contender, build
from bench.systems import bench_zero
from bench.systems.bench_pp import MBIT, take_turns
from bench.systems.bench_zero import Trial, batch, model_of, run_case
from bench.systems.links import NoLinkError
from fastpar.observe.strategies import Settings
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel

TIME_LIMIT_S = {"cpu": 900, "cuda": 10}
ROWS = 2
CONFIG = GPTConfig(2, 4, 256, 4096, 1024, dropout=0.0)
QUICK = GPTConfig(2, 2, 32, 64, 256, dropout=0.0)
BASE, OTHERS = "fastpar TP", ("fastpar CP", "fastpar CP, keys", "fastpar ZeRO-0")


def trial_of(name: str, config: GPTConfig, folder: str, transport: str = "auto") -> Trial:
    """One that trains ROWS sequences a step."""
    ranks = 1 if name == SINGLE else 2
    settings = Settings(parallel=Parallel.of(transport=transport))
    return Trial(name, config, folder, ranks, 2 // ranks, settings=settings, rows=ROWS)


class Rank(bench_zero.Rank):
    """One rank; public methods are the worker's commands."""

    def build(self) -> Contender:
        return build(self.trial.name, lambda: model_of(self.trial), self.trial.settings)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        made = self.contender
        return batch(self.trial.config, step, made.dp_rank, made.dp_size, ROWS)


def run(bench: Bench) -> None:
    """On one host, then behind the link."""
    config, rounds = (QUICK, 2) if bench.quick else (CONFIG, 3)
    size = "quick" if bench.quick else f"{config.n_layer} layers of {config.n_embd}"
    case = f"{size} T={config.block_size} B={ROWS}, 2 ranks"
    if bench.only in case:
        with tempfile.TemporaryDirectory() as folder:
            exact, base, *others = (
                trial_of(name, config, folder) for name in (SINGLE, BASE, *OTHERS)
            )
            run_case(bench, case, exact, base, [others], rounds, Rank)
    if bench.only in f"{MBIT} Mbit/s":
        trials = [trial_of(name, config, "", transport="torch") for name in (BASE, *OTHERS)]
        try:
            title = f"{case}, {MBIT} Mbit/s"
            take_turns(bench, title, trials, 1 if bench.quick else 2, f"{__name__}:Rank")
        except NoLinkError as error:
            print(f"no rows behind a link: {error}")
