"""One training step (forward, backward, clip, AdamW): fastpar beside plain PyTorch.

Plain PyTorch is bench/peers/stock.py, eager and under torch.compile, with fused AdamW and
clip_grad_norm_; for two ranks it is DDP with 25 MB buckets. Same weights, batches and threads.
Variants take turns of a few steps, so that their times are side by side; each lives in processes of
its own, so that its peak memory is its own. Cases: 6x384 and 12x768 on a CPU, one process and two
ranks; char, nanoGPT's CPU recipe with its loss curve; muon, fastpar.Muon beside it; on a GPU 124M
and 1.5B.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from bench.harness import Bench
from bench.records import Row
from bench.systems.links import Ranks
from bench.systems.worker import Spec, Variant, start
from fastpar.comm.ranks import RankFailed
from fastpar.doctor.trial import Timing
from fastpar.settings.model import GPTConfig

TIME_LIMIT_S = {"cpu": 3600, "cuda": 280}
CONFIGS = {
    "6x384": (GPTConfig(6, 6, 384, 256, 50304, dropout=0.0), 8),
    "12x768": (GPTConfig(12, 12, 768, 256, 50304, dropout=0.0), 4),
    "124M": (GPTConfig(12, 12, 768, 1024, 50304, dropout=0.0), 32),
    "1.5B": (GPTConfig(48, 25, 1600, 1024, 50304, dropout=0.0), 4),
}
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
CHAR_STEPS, CHAR_BATCH, CHAR_SLICE = 2000, 12, 50
MUON_STEPS = 520  # to at most the loss of eager's CHAR_STEPS
GPU_CASES = ("124M", "1.5B")


@dataclass
class Log:
    """What one variant did so far."""

    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # mean over ranks
    exposed_comm_ms: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    refused: str | None = None

    def extend(self, answers: Sequence[dict[str, list]], timed: bool) -> None:
        self.losses += [statistics.fmean(step) for step in zip(*(a["losses"] for a in answers))]
        if timed:
            self.ms += [max(step) for step in zip(*(a["ms"] for a in answers))]
            by_step = zip(*(a["exposed_comm_ms"] for a in answers))
            self.exposed_comm_ms += [max(step) for step in by_step if None not in step]


def _start(spec: Spec) -> Ranks:
    return start(spec, Variant)


def take_turns(
    specs: Mapping[str, Spec],
    *,
    rounds: int,
    steps: int | Mapping[str, int],
    warmup: int,
    val: bool = False,
    timeout_s: float = 900.0,
    worker: Callable[[Spec], Any] = _start,
) -> dict[str, Log]:
    """Every variant runs `steps` steps in each of `rounds` rounds; a failure stops only its own."""
    logs = {name: Log() for name in specs}
    many = steps if isinstance(steps, Mapping) else dict.fromkeys(specs, steps)
    with contextlib.ExitStack() as stack:
        workers: dict[str, Any] = {}

        def tell(name: str, command: str, *args: Any) -> list[Any]:
            return workers[name].ask(command, *args, timeout_s=timeout_s)

        def each(job: Any) -> None:
            for name in specs:
                if logs[name].refused is None:
                    try:
                        job(name)
                    except RankFailed as error:
                        logs[name].refused = str(error)

        def begin(name: str) -> None:
            workers[name] = stack.enter_context(worker(specs[name]))
            logs[name].extend(tell(name, "steps", 0, warmup), timed=False)
            tell(name, "reset_peak")

        each(begin)
        for turn in range(rounds):

            def some(name: str, turn: int = turn) -> None:
                first, count = warmup + turn * many[name], many[name]
                logs[name].extend(tell(name, "steps", first, count), timed=True)

            each(some)

        def finish(name: str) -> None:
            logs[name].peak_bytes = max(tell(name, "peak_bytes"))
            if val:
                logs[name].notes["val_loss"] = statistics.fmean(tell(name, "val_loss"))
            if specs[name].kind != "fastpar":
                workers[name].close()  # the gate below needs memory for fp64 gradients

        def gate(name: str) -> None:
            if specs[name].kind == "fastpar":
                judge(tell(name, "check"))

        each(finish)
        each(gate)
    return logs


def judge(answers: Sequence[dict[str, float]]) -> None:
    """The gate of worker.py's note: raises RankFailed when gradients are wrong."""
    for rank, answer in enumerate(answers):
        bound = 2 * answer["stock_error"] + answer["eps"]
        if not answer["error"] <= bound:
            raise RankFailed(
                rank,
                f"gradients: expected an error against fp64 of at most {bound:.2e}, "
                f"got {answer['error']:.2e}",
            )


def to_rows(
    bench: Bench,
    case: str,
    specs: Mapping[str, Spec],
    logs: Mapping[str, Log],
    baseline: str,
) -> list[Row]:
    """A row for each variant, compared with the baseline of the same run."""
    rows = []
    base = logs[baseline]
    for name, log in logs.items():
        spec = specs[name]
        precision = "float32" if spec.device == "cpu" else "bfloat16"
        row = bench.row(case, "step", name, getattr(torch, precision), refused=log.refused)
        row.threads = spec.threads
        row.notes = {"ranks": spec.world_size, "batch_size": spec.batch_size, **log.notes}
        rows.append(row)
        if log.refused is not None or not log.ms:
            continue
        timing = Timing.of(log.ms)
        row.median_ms, row.p20_ms, row.p80_ms, row.runs = timing
        row.tokens_per_s = 1e3 * spec.tokens_per_step / timing.median_ms
        row.peak_bytes = log.peak_bytes
        if log.exposed_comm_ms:
            row.notes["exposed_comm_ms"] = statistics.median(log.exposed_comm_ms)
        if base.ms and base.refused is None:
            # Per token, since the best batches on a GPU differ.
            ratio = specs[baseline].tokens_per_step / statistics.median(base.ms)
            row.baseline = baseline
            row.speedup = row.tokens_per_s / 1e3 / ratio
            if base.peak_bytes and log.peak_bytes:
                row.notes["memory_ratio"] = log.peak_bytes / base.peak_bytes
            if spec.schedule == specs[baseline].schedule:
                pairs = list(zip(log.losses, base.losses))[:200]
                row.notes["max_loss_difference"] = max(abs(a - b) for a, b in pairs)
    return rows


def run_cpu(bench: Bench, name: str) -> None:
    """One process with all cores, then two ranks with one thread each."""
    config, batch_size = (QUICK, 4) if bench.quick else CONFIGS[name]
    cores = torch.get_num_threads()
    rounds, steps = (1, 2) if bench.quick else (6, 2 if name == "6x384" else 1)
    title = f"{'quick' if bench.quick else name} T={config.block_size} B={batch_size}"
    one = Spec("stock", config, batch_size, threads=cores)
    specs = {
        "eager": one,
        "torch.compile": replace(one, compiled=True),
        "fastpar": replace(one, kind="fastpar", keep_memory=True),
        "eager, freed memory kept": replace(one, keep_memory=True),
    }
    logs = take_turns(specs, rounds=rounds, steps=steps, warmup=2)
    bench.add(*to_rows(bench, title, specs, logs, "eager"))
    two = replace(one, threads=max(1, cores // 2), world_size=2)
    specs = {"DDP": two, "fastpar": replace(two, kind="fastpar", keep_memory=True)}
    specs["DDP, freed memory kept"] = replace(two, keep_memory=True)
    logs = take_turns(specs, rounds=rounds, steps=steps, warmup=2)
    bench.add(*to_rows(bench, f"{title}, 2 ranks", specs, logs, "DDP"))


def run_char(bench: Bench, *, muon: bool = False) -> None:
    """nanoGPT's CPU recipe on the characters of the text that fastpar's dependency ships.

    muon: fastpar.Muon beside it, with learning rates and a number of steps of its own.
    """
    from bench.systems.worker import load_text

    data = load_text()
    total, width = (4, 2) if bench.quick else (CHAR_STEPS, CHAR_SLICE)
    config = GPTConfig(4, 4, 128, 64, data.vocab_size, dropout=0.0)
    stock = Spec(
        "stock",
        config,
        CHAR_BATCH,
        device=bench.device,
        threads=torch.get_num_threads(),
        text=True,
        lr=1e-3,
        schedule=(100, CHAR_STEPS, 1e-4),
    )
    ours = replace(stock, kind="fastpar", keep_memory=True)
    specs, rounds, steps = {"eager": stock, "fastpar": ours}, total // width, {"eager": width}
    if muon:
        schedule = (MUON_STEPS // 10, MUON_STEPS, 0.0)
        specs["fastpar"] = replace(ours, lr=0.015, muon_lr=0.02, schedule=schedule)
    steps["fastpar"] = MUON_STEPS // rounds if muon and not bench.quick else width
    logs = take_turns(specs, rounds=rounds, steps=steps, warmup=0, val=True)
    for log in logs.values():
        log.notes |= {
            "text": data.name,
            "characters": data.vocab_size,
            "steps": len(log.ms),
            "total_s": sum(log.ms) / 1e3,
            "time_ratio": sum(log.ms) / sum(logs["eager"].ms or [1.0]),
            "losses_every_100": [round(loss, 4) for loss in log.losses[::100]],
        }
    title = f"char 4x128 T=64 B={CHAR_BATCH} {total} steps"
    title += f", Muon {len(logs['fastpar'].ms)}" * muon
    bench.add(*to_rows(bench, title, specs, logs, "eager"))


def run_gpu(bench: Bench, name: str) -> None:
    """One size at one batch size, two variants at a time: so much memory is there."""
    config, batch_size = (QUICK, 4) if bench.quick else CONFIGS[name]
    rounds, steps = (1, 2) if bench.quick else (4, 5)
    title = f"{'quick' if bench.quick else name} T={config.block_size} B={batch_size}"
    eager = Spec("stock", config, batch_size, device=bench.device)
    bases = {"eager": eager, "torch.compile": replace(eager, compiled=True)}
    for base, stock in bases.items():
        specs = {base: stock, "fastpar": replace(eager, kind="fastpar")}
        logs = take_turns(specs, rounds=rounds, steps=steps, warmup=3)
        case = f"{title}, compiled" if stock.compiled else title
        bench.add(*to_rows(bench, case, specs, logs, base))


def run(bench: Bench) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    jobs: dict[str, Callable[[], None]] = {
        "6x384": lambda: run_cpu(bench, "6x384"),
        "12x768": lambda: run_cpu(bench, "12x768"),
        "char": lambda: run_char(bench),
        "muon": lambda: run_char(bench, muon=True),
    }
    if bench.device == "cuda" or (bench.quick and bench.only in GPU_CASES):
        jobs = {name: partial(run_gpu, bench, name) for name in GPU_CASES}
    for name, job in jobs.items():
        if bench.only in name and not (bench.quick and name == "12x768"):  # tiny as well
            job()
