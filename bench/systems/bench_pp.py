"""Pipeline stages on one host and behind a link: torch's and DeepSpeed's beside fastpar's.

Two CPU ranks with one thread each train eight sequences a step: the mini preset, and 12 layers of
384. Pipelines take a sequence as a micro-batch; one process, dp=2 and tp=2 compute all rows of a
rank at once. bench/peers/pipeline.py says what is compared. torch's schedule stays for a whole
case; others come a few at a time, and steps take turns. The gate is bench_zero.py's: weights and
loss after two steps against one process in fp64; `loss_difference` is the largest of all timed
steps from torch's, of the loss.

Then GPT-2 124M's shape in two network namespaces (bench/systems/links.py) that 1 Gbit/s join, at
several numbers of tokens a step: pp=2 by 1F1B and by zb-v, which has both ends of the tied table on
one rank, in micro-batches of one and two sequences, dp=2 and tp=2, all over gloo. dp sends the same
bytes a step however many tokens it has. Without such namespaces these rows are missing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.harness import Bench
from bench.peers import pipeline
from bench.peers.engines import SINGLE, Contender
from bench.peers.pipeline import DEEPSPEED, OWN, TORCH, VARIANTS
from bench.records import Row
from bench.systems import bench_zero
from bench.systems.bench_zero import GATE_STEPS, Trial, run_case
from bench.systems.links import Link, NoLinkError, Ranks
from fastpar.doctor.trial import Timing
from fastpar.observe.strategies import Settings
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel

LOSS_BOUND = 1e-5
TIME_LIMIT_S = {"cpu": 3600, "cuda": 10}
ROWS, MBIT = 8, 1000
MINI = GPTConfig.preset("mini", vocab_size=4096)
CONFIGS = {"mini": MINI, "12 layers of 384": replace(MINI, n_layer=12, n_head=6, n_embd=384)}
GPT2 = GPTConfig(12, 12, 768, 256, 50304, dropout=0.0)
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
GROUPS = ((OWN, DEEPSPEED), ("fastpar ZeRO-0", "fastpar TP"), (SINGLE,))
LINKED = {2: 256, 4: 256, 8: 256, 16: 256}  # sequences a step: their length


def trial_of(
    name: str, config: GPTConfig, folder: str, transport: str = "auto", rows: int = ROWS
) -> Trial:
    """One that trains so many sequences a step."""
    own = {"transport": transport} if name.startswith("fastpar") else {}
    piped = name in (TORCH, DEEPSPEED)
    many = rows if piped else None
    settings = Settings(parallel=Parallel.of(grad_accum_steps=many, **own))
    ranks = 1 if name == SINGLE else 2
    return Trial(name, config, folder, ranks, 2 // ranks, settings=settings, rows=rows)


class Rank(bench_zero.Rank):
    """One rank; public methods are the worker's commands."""

    def build(self) -> Contender:
        return pipeline.build(self.trial.name, self.trial.config, self.trial.settings)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        made = self.contender
        rows = self.trial.rows
        return bench_zero.batch(self.trial.config, step, made.dp_rank, made.dp_size, rows)


class Linked:
    """One that trains in two namespaces, a step at a time."""

    def __init__(self, link: Link, trial: Trial, make: str) -> None:
        self.link, self.trial = link, trial
        self.ms: list[float] = []
        self.losses: list[float] = []
        self.sent = 0
        self.ranks = Ranks(link, make, trial, timeout_s=400)

    def step(self) -> None:
        """Batches are those of every other's steps."""
        before = self.link.sent_bytes()
        answers = self.ranks.ask("steps", GATE_STEPS + len(self.ms), 1, timeout_s=400)
        self.sent += max(now - then for then, now in zip(before, self.link.sent_bytes()))
        self.ms.append(max(a["ms"][0] for a in answers))
        self.losses.append(statistics.fmean(a["losses"][0] for a in answers))

    def row(self, bench: Bench, case: str, base: Linked, base_ms: list[float]) -> Row:
        """Its times but that of its first step, beside those of base; refused if losses differ."""
        row = bench.row(case, "step", self.trial.name, torch.float32)
        row.threads, row.peak_bytes = self.trial.threads, max(self.ranks.ask("peak_bytes"))
        apart = max(abs(a - b) / b for a, b in zip(self.losses, base.losses))
        if apart > LOSS_BOUND:
            row.refused = f"losses differ from those of {base.trial.name} by {apart:.1e}"
        row.median_ms, row.p20_ms, row.p80_ms, row.runs = Timing.of(self.ms[1:])
        row.tokens_per_s = 1e3 * self.trial.tokens_per_step / row.median_ms
        row.baseline = base.trial.name
        row.speedup = statistics.median(a / b for a, b in zip(base_ms, self.ms[1:]))
        sent_mb = self.sent / len(self.ms) / 1e6
        row.notes = {"ranks": 2, "sent_mb": sent_mb, "loss_difference": apart}
        return row


def behind_link(bench: Bench, config: GPTConfig, rows: int, turns: int) -> None:
    """Steps of data parallelism and of each other one in turn, two at a time in memory."""
    size = "quick" if bench.quick else "GPT-2 124M"
    case = f"{size} T={config.block_size} B={rows}, 2 ranks, {MBIT} Mbit/s"
    if bench.only not in case:
        return
    fits = [name for name, (_, micro) in VARIANTS.items() if rows >= 2 * micro]
    names = ["fastpar ZeRO-0", OWN, *fits, "fastpar TP"]
    trials = [trial_of(name, config, "", transport="torch", rows=rows) for name in names]
    take_turns(bench, case, trials, turns)


def take_turns(
    bench: Bench,
    case: str,
    trials: Sequence[Trial],
    turns: int,
    make: str = f"{__name__}:Rank",
) -> None:
    """Steps of the first trial and of each other one in turn, in namespaces that a link joins.

    Args:
        make: a rank of a trial, as module:name.
    """
    with Link(MBIT) as link:
        base = Linked(link, trials[0], make)
        with base.ranks:
            for trial in trials[1:]:
                other = Linked(link, trial, make)
                with other.ranks:
                    for _ in range(turns + 1):
                        base.step()
                        other.step()
                    bench.add(other.row(bench, case, base, base.ms[-turns:]))
            bench.add(base.row(bench, case, base, base.ms[1:]))


def run(bench: Bench) -> None:
    """Case after case; a group's rows are kept as soon as it is done."""
    configs, rounds = ({"quick": QUICK}, 2) if bench.quick else (CONFIGS, 15)
    with tempfile.TemporaryDirectory() as folder:
        for size, config in configs.items():
            title = f"{size} T={config.block_size} B={ROWS}, 2 ranks"
            if bench.only not in title:
                continue
            groups = [[trial_of(name, config, folder) for name in group] for group in GROUPS]
            exact, base = (trial_of(name, config, folder) for name in (SINGLE, TORCH))
            run_case(bench, title, exact, base, groups, rounds, Rank)
    linked = {2: QUICK.block_size} if bench.quick else LINKED
    try:
        for rows, length in linked.items():
            config = replace(QUICK if bench.quick else GPT2, block_size=length)
            behind_link(bench, config, rows, 1 if bench.quick or rows > 8 else 2)
    except NoLinkError as error:
        print(f"no rows behind a link: {error}")
