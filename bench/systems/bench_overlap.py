"""How much of the communication of a step hides behind its computation, on a rate-limited link.

Two ranks with one thread each, in two network namespaces (bench/systems/links.py), train a GPT-2
of 25.6
million parameters through gloo. The link's rate follows from a first measurement of compute: an
all-reduce of all gradients takes COMM_RATIO of a backward. The vocabulary is small on purpose:
a tied embedding's gradient is final only when backward ends, so that with 50k tokens half of the
bytes could not overlap with anything.

Variants take turns of a few steps. The first step of a turn is not timed; the others run from
start to start, so that a gather which a step leaves to the next forward is paid by someone.

[Note: what the columns mean] comm_ms is the time that the link needs for the bytes that this
variant was seen to send, at the rate of a bare all-reduce; exposed_ms is the step's time beyond
that of the same step without communication, so the processor time that sending takes counts as
exposed, and a sharded optimizer, which has half of the work, as a gain. cpu_ms is the processor
time of a rank's step: where the ranks fill the cores, what it has beyond that of the step without
communication cannot be hidden. For fastpar the engine's own account stands beside it.

[Note: the gate of overlap] All variants see the same batches: their losses, as means over the
ranks, may differ from DDP's by rounding only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.harness import Bench
from bench.peers import stock
from bench.records import Row
from bench.systems.bench_zero import available_bytes, forget_peak
from bench.systems.links import PROBE_BYTES, Link, NoLinkError, Ranks, all_reduce_ms
from bench.targets import Target, faster, note
from fastpar.comm.ranks import RankFailed, reason
from fastpar.doctor.trial import Timing
from fastpar.kernels import keep_freed_memory
from fastpar.models.gpt import GPT
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel

TIME_LIMIT_S = {"cpu": 720, "cuda": 30}
CONFIG = GPTConfig(8, 8, 512, 256, 512, dropout=0.0)
QUICK = GPTConfig(2, 2, 64, 32, 256, dropout=0.0)
BATCH_SIZE = 4  # sequences of a rank
COMM_RATIO = 0.75  # all-reduce of the gradients / backward
BUCKET_MB = 4.0  # of DDP, DeepSpeed and fastpar alike
EXPOSED_PERCENT = 15.0
LOSS_BOUND = 1e-4  # see [Note: the gate of overlap]
TIMEOUT_S = 90.0
QUIET_BYTES = 10_000  # in a tenth of a second: keep-alives, no collective
MEMORY_BYTES = 1 << 30  # that two more ranks need

ALONE = "no communication"
DDP, FSDP2 = "DDP, same buckets", ("FSDP2", "FSDP2, no reshard")
DEEPSPEED = tuple(f"DeepSpeed ZeRO-{stage}" for stage in (1, 2, 3))
PEERS = (DDP, "DDP, 25 MB buckets", "DDP + ZeRO optimizer", *FSDP2, *DEEPSPEED)
STAGES = tuple(f"fastpar ZeRO-{stage}" for stage in range(4))
OWN = "fastpar ZeRO-2, fastpar.GPT"
VARIANTS = (ALONE, *PEERS, *STAGES, OWN)
QUICK_VARIANTS = (ALONE, DDP, FSDP2[0], *STAGES)


class Trainer:
    """One rank of one variant; the public methods are called through bench.systems.links.Ranks."""

    def __init__(self, variant: str, config: GPTConfig, batch_size: int) -> None:
        from bench.peers import engines
        from fastpar.observe.strategies import Settings

        keep_freed_memory()  # in every variant, as fastpar's trainer does
        self.variant, self.config, self.batch_size = variant, config, batch_size
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self.rank = dist.get_rank()
        own = variant.startswith("DDP, ") and variant != DDP
        settings = Settings(parallel=Parallel(bucket_mb=25.0 if own else BUCKET_MB))
        name, model = variant, self._stock
        if variant == ALONE:
            name = engines.SINGLE
        elif variant.startswith("DDP, "):
            name = engines.DDP
        if variant == OWN:
            name, model = name.partition(",")[0], self._own
        if variant in DEEPSPEED:
            without_shared_memory()
        self.contender = self._build(name, settings, model)

    def _build(self, name: str, settings: Any, model: Any) -> Any:
        from bench.peers import engines

        return engines.build(name, model, settings)

    def _own(self) -> nn.Module:
        return GPT(self.config, seed=0)

    def _stock(self) -> nn.Module:
        return stock.GPT(self.config).load_fastpar(self._own().state_dict())

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2 * step + self.rank)
        shape = (self.batch_size, self.config.block_size + 1)
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def steps(self, first: int, count: int) -> dict[str, list]:
        """Run 1 + count steps; ms from start to start of the last `count`, losses of all."""
        batches = [self._batch(first + i) for i in range(count + 1)]
        if self.variant != ALONE:
            dist.barrier()
        begins, losses, reports, cpu = [], [], [], time.process_time()
        for x, y in batches:
            begins.append(time.perf_counter())
            losses.append(self.contender.step(x, y).item())
            reports.append(self.contender.report())
        begins.append(time.perf_counter())
        cpu = (time.process_time() - cpu) * 1e3 / len(batches)
        forget_peak()  # the other variants need freed memory while this one waits
        ms = [(b - a) * 1e3 for a, b in itertools.pairwise(begins)]
        return {"ms": ms[1:], "losses": losses, "reports": reports[1:], "cpu_ms": [cpu]}

    def phases(self, first: int, count: int) -> dict[str, float]:
        """Median ms of forward, backward and optimizer; the first two steps are not counted."""
        model, optimizer = self.contender.model, self.contender.optimizer
        marks = []
        for step in range(first, first + count + 2):
            x, y = self._batch(step)
            now = [time.perf_counter()]
            loss = model(x, y)
            now.append(time.perf_counter())
            loss.backward()
            now.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            now.append(time.perf_counter())
            marks.append([1e3 * (b - a) for a, b in itertools.pairwise(now)])
        names = ("forward", "backward", "optimizer")
        return dict(zip(names, map(statistics.median, zip(*marks[2:]))))


def without_shared_memory() -> None:
    """DeepSpeed would compile an operator by which ranks of one host pass the link by."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.suppress(ImportError):  # build() says that it is not installed
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False


@dataclass
class Log:
    """What one variant did so far; each entry is the slower rank's, losses are means."""

    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reports: list[dict[str, float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of all threads per step, of each turn
    sent_bytes: list[float] = field(default_factory=list)  # per step, of each turn
    refused: str | None = None

    def extend(self, answers: Sequence[dict[str, list]], sent_bytes: float) -> None:
        self.ms += [max(both) for both in zip(*(a["ms"] for a in answers))]
        self.losses += [statistics.fmean(both) for both in zip(*(a["losses"] for a in answers))]
        for both in zip(*(a["reports"] for a in answers)):
            self.reports.append({name: max(r[name] for r in both) for name in both[0]})
        self.cpu_ms.append(max(a["cpu_ms"][0] for a in answers))
        self.sent_bytes.append(sent_bytes)


@dataclass(frozen=True)
class Plan:
    """What is run: the model, its batch, how often."""

    title: str
    config: GPTConfig
    batch_size: int
    rounds: int
    steps: int
    variants: Sequence[str] = VARIANTS


def settled_bytes(link: Link) -> list[int]:
    """What each end has sent, after what a step left to the next one has gone too."""
    sent = link.sent_bytes()
    while True:
        time.sleep(0.1)
        before, sent = sent, link.sent_bytes()
        if max(now - then for now, then in zip(sent, before)) < QUIET_BYTES:
            return sent


def choose_rate(plan: Plan, backward_ms: float) -> float:
    """Mbit/s at which all gradients take COMM_RATIO of a backward; two ranks send each once."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in stock.GPT(plan.config).parameters())
    return 8e-3 * 4 * numel / (COMM_RATIO * backward_ms)


def measure(plan: Plan, link: Link) -> tuple[dict[str, Log], dict[str, Any]]:
    """Every variant in turn on the link; a failure stops only its own. Logs, and the conditions."""
    logs = {variant: Log() for variant in plan.variants}
    about: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        ranks: dict[str, Ranks] = {}

        def each(job: Any, variants: Sequence[str] = plan.variants) -> None:
            for variant in variants:
                if logs[variant].refused is None:
                    try:
                        job(variant)
                    except RankFailed as error:
                        logs[variant].refused = str(error)
                        if variant in ranks:
                            ranks[variant].close()

        def start(variant: str) -> None:
            if available_bytes() < MEMORY_BYTES:
                raise RankFailed(
                    0, f"not started: less than {MEMORY_BYTES >> 20} MiB of memory free"
                )
            args = ("bench.systems.bench_overlap:Trainer", variant, plan.config, plan.batch_size)
            ranks[variant] = stack.enter_context(Ranks(link, *args, timeout_s=TIMEOUT_S))

        def turn(variant: str, index: int) -> None:
            before = settled_bytes(link)
            first = index * (plan.steps + 1)
            answers = ranks[variant].ask("steps", first, plan.steps, timeout_s=TIMEOUT_S)
            sent = max(now - then for now, then in zip(settled_bytes(link), before))
            # The first turn also holds what is done once.
            logs[variant].extend(answers, sent / (plan.steps + 1))

        start(ALONE)
        phases = ranks[ALONE].ask("phases", 1000, 3)
        for name in ("forward", "backward", "optimizer"):
            about[f"{name}_ms"] = max(rank[name] for rank in phases)
        link.set_rate(choose_rate(plan, about["backward_ms"]))
        probe = statistics.median(all_reduce_ms(link))
        about["link_mbit"] = link.mbit
        about["link_bytes_per_ms"] = PROBE_BYTES / probe
        about["all_reduce_25MiB_ms"] = probe
        others = [v for v in plan.variants if v != ALONE]
        each(start, sorted(others, key=lambda v: v not in STAGES))  # while there is memory
        for index in range(plan.rounds):
            each(functools.partial(turn, index=index))
    return logs, about


def judge(
    logs: Mapping[str, Log], base: str = DDP, bound: Callable[[str], float] = lambda _: LOSS_BOUND
) -> None:
    """The gate: refuses what did not compute the losses of base."""
    for variant, log in logs.items():
        if variant == ALONE or log.refused is not None or base not in logs:
            continue
        errors = [abs(a - b) for a, b in zip(log.losses, logs[base].losses)]
        wrong = next((i for i, e in enumerate(errors) if not e <= bound(variant)), None)
        if wrong is not None:
            log.refused = (
                f"losses: expected those of DDP within {bound(variant):g}, got a difference of "
                f"{errors[wrong]:.2e} in step {wrong}"
            )


def targets_of(variant: str) -> list[Target]:
    if variant not in STAGES:
        return []
    targets = [Target("exposed", EXPOSED_PERCENT), faster(1.0, *PEERS)]
    return targets + [faster(1.2, *FSDP2)] * (variant in STAGES[2:])


def to_rows(bench: Bench, plan: Plan, logs: Mapping[str, Log], about: dict[str, Any]) -> list[Row]:
    """A row for each variant; see [Note: what the columns mean]."""
    rows = []
    alone_ms = statistics.median(logs[ALONE].ms) if logs[ALONE].ms else math.nan
    base = logs.get(DDP, Log(refused="not run"))
    for variant, log in logs.items():
        row = bench.row(plan.title, "step", variant, torch.float32, refused=log.refused)
        row.threads = 1
        row.notes = {"ranks": 2, **({} if bench.quick else note(targets_of(variant)))}
        rows.append(row)
        if log.refused is not None or not log.ms:
            continue
        row.median_ms, row.p20_ms, row.p80_ms, row.runs = timing = Timing.of(log.ms)
        row.notes["sent_bytes"] = min(log.sent_bytes)  # of turns without set-up
        row.notes["cpu_ms"] = statistics.median(log.cpu_ms)
        if base.refused is None and base.ms:
            row.baseline, row.speedup = DDP, statistics.median(base.ms) / timing.median_ms
        if variant == ALONE:
            row.notes |= about
            continue
        comm_ms = row.notes["sent_bytes"] / about["link_bytes_per_ms"]
        row.notes["comm_ms"] = comm_ms
        if variant != OWN:  # another model than the one that ran alone
            exposed_ms = timing.median_ms - alone_ms
            row.notes |= {"exposed_ms": exposed_ms, "exposed_percent": 100 * exposed_ms / comm_ms}
        for name in log.reports[-1] if log.reports else ():
            row.notes[f"engine_{name}"] = statistics.median(r[name] for r in log.reports)
    return rows


def describe(about: dict[str, Any]) -> str:
    """The conditions of a run in one line."""
    return (
        f"2 ranks x 1 CPU thread, link of {about['link_mbit']:.0f} Mbit/s (all-reduce of 25 MiB: "
        f"{about['all_reduce_25MiB_ms']:.0f} ms); alone: forward {about['forward_ms']:.0f}, "
        f"backward {about['backward_ms']:.0f}, optimizer {about['optimizer_ms']:.0f} ms"
    )


def run(bench: Bench) -> None:
    if bench.device != "cpu":
        return  # the link is between CPU ranks
    plan = Plan("GPT-2 25.6M B=4 T=256 V=512, 2 ranks", CONFIG, BATCH_SIZE, 2, 3)
    if bench.quick:
        plan = Plan("quick GPT-2 B=2 T=32 V=256, 2 ranks", QUICK, 2, 1, 2, QUICK_VARIANTS)
    if bench.only not in plan.title:
        return
    try:
        link = Link(1000)
    except NoLinkError as error:
        row = bench.row(plan.title, "step", "link", torch.float32, refused=reason(error))
        bench.add(row)
        return
    with link:
        run_on(bench, plan, link)


def run_on(bench: Bench, plan: Plan, link: Link) -> None:
    """Measure, judge, write rows."""
    logs, about = measure(plan, link)
    judge(logs)
    bench.add(*to_rows(bench, plan, logs, about))
    print(describe(about), flush=True)
