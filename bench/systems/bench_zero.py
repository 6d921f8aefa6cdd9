"""Data-parallel training of GPT-2 124M on one host: DDP, ZeRO and FSDP engines beside fastpar's.

Two CPU ranks with one thread each, T=256, one sequence a rank; "one process" has the same batch and
as many threads. The peers train bench/peers/stock.py's model, fastpar both that ("stock model": the
engine's share) and fastpar.GPT (engine and kernels). Memory does not hold all contenders: DDP stays
for the whole run, others come a few at a time, and within such a group steps take turns. `speedup`
is DDP's median over the row's, both of the same group.

Peak memory is a rank's largest resident memory in its first two steps, shared memory included, over
what it was before there was a model; live_bytes is what fastpar's engine holds between steps.

[Note: the gate of bench zero] After two steps the weights are compared with those of one process
in fp64: the error of the update, as a vector norm, may be at most twice that of one fp32 process of
plain PyTorch, plus one rounding, and so may the first loss, with two roundings for each rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.harness import Bench
from bench.peers import stock
from bench.peers.engines import DDP, SINGLE, build, update_error
from bench.records import Row
from bench.systems.links import Ranks
from bench.systems.worker import start
from fastpar.comm.host import memory_mb
from fastpar.comm.ranks import RankFailed
from fastpar.doctor.trial import Timing, stopwatch
from fastpar.models.gpt import GPT
from fastpar.observe.strategies import Contender, Settings, adamw_of, import_deepspeed
from fastpar.settings.model import GPTConfig

TIME_LIMIT_S = {"cpu": 1800, "cuda": 10}
CONFIG = GPTConfig(12, 12, 768, 256, 50304, dropout=0.0)
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
WORLD_SIZE = 2
STOCK = ", stock model"
ORDER = (  # what is compared runs side by side; a run that is stopped has the most important rows
    "FSDP2",
    "fastpar ZeRO-3",
    "DeepSpeed ZeRO-3",
    "fastpar ZeRO-0",
    "DeepSpeed ZeRO-1",
    "fastpar ZeRO-1",
    "DeepSpeed ZeRO-2",
    "fastpar ZeRO-2",
    SINGLE,
    f"fastpar ZeRO-0{STOCK}",
    "FSDP2, no reshard",
    f"fastpar ZeRO-3{STOCK}",
    "DDP + ZeRO optimizer",
    f"fastpar ZeRO-1{STOCK}",
    f"fastpar ZeRO-2{STOCK}",
)
QUICK_ORDER = (SINGLE, "FSDP2", "fastpar ZeRO-0", f"fastpar ZeRO-3{STOCK}")
BESIDE = 2  # contenders beside DDP at a time: 6 processes of 2.5 to 4 GB each
ROOM_BYTES = 20e9  # that BESIDE of them and DDP need; with less free memory one at a time
GATE_STEPS = 2


@dataclass(frozen=True)
class Trial:
    """What a worker trains; its name is the row's variant."""

    name: str
    config: GPTConfig
    folder: str  # where the exact weights lie
    world_size: int = WORLD_SIZE
    threads: int = 1
    device: str = "cpu"
    settings: Settings = field(default_factory=Settings)
    rows: int = WORLD_SIZE  # sequences of a step, over all ranks

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.config.block_size


def trial_of(name: str, config: GPTConfig, folder: str) -> Trial:
    if name == SINGLE:
        return Trial(name, config, folder, world_size=1, threads=WORLD_SIZE)
    return Trial(name, config, folder)


def batch(
    config: GPTConfig, step: int, rank: int, world_size: int, rows: int = WORLD_SIZE
) -> tuple[Tensor, Tensor]:
    """This rank's sequences of the step's `rows` ones."""
    generator = torch.Generator().manual_seed(step)
    shape = (rows, config.block_size + 1)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    mine = rows // world_size
    tokens = tokens[rank * mine : (rank + 1) * mine]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def stock_model(config: GPTConfig) -> nn.Module:
    """The weights that fastpar.GPT has with seed 0, without filling the module twice."""
    state = GPT(config, seed=0).state_dict()
    state["wte.weight"] = state["wte.weight"][: config.vocab_size]
    with torch.device("meta"):
        model = stock.GPT(config)
    model.load_state_dict(state, assign=True)
    return model


def model_of(trial: Trial) -> nn.Module:
    """The module that the trial's name asks for."""
    own = trial.name.startswith("fastpar") and not trial.name.endswith(STOCK)
    return GPT(trial.config, seed=0) if own else stock_model(trial.config)


class Reference:
    """One process of plain PyTorch in fp64 and in fp32: what the gate compares with."""

    def __init__(self, trial: Trial):
        self.trial = trial

    def write(self) -> dict[str, float]:
        """exact.pt: weights and loss in fp64; returns the fp32 process's errors against them."""
        start = dict(stock_model(self.trial.config).state_dict())
        loss, weights = self._train(torch.float64)
        exact = {"start": start, "weights": weights, "loss": loss}
        torch.save(exact, Path(self.trial.folder) / "exact.pt")
        single_loss, single = self._train(torch.float32)
        error = update_error(iter(single.items()), weights, start)
        return {"error": error, "loss_error": abs(single_loss - loss), "loss": loss}

    def _train(self, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
        model = stock_model(self.trial.config).to(dtype)
        optimizer = adamw_of(model, self.trial.settings)
        losses = []
        for step in range(GATE_STEPS):
            loss = model(*batch(self.trial.config, step, 0, 1, self.trial.rows))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses[0], {name: p.detach() for name, p in model.named_parameters()}


class Rank:
    """One rank of one contender; public methods are the worker's commands."""

    def __init__(self, trial: Trial):
        self.trial, self.rank = trial, int(os.environ.get("RANK", "0"))
        warnings.simplefilter("ignore")  # of the peers' deprecated calls
        if trial.world_size > 1:
            dist.init_process_group("gloo")
        if trial.name.startswith("DeepSpeed"):
            import_deepspeed(trial.device)
        before = memory_mb()[0]
        self.contender = self.build()
        gc.collect()
        forget_peak()
        self.first_losses = self.steps(0, GATE_STEPS)["losses"]
        self.peak = round(1e6 * (memory_mb()[1] - before))

    def build(self) -> Contender:
        trial = self.trial
        return build(trial.name.removesuffix(STOCK), lambda: model_of(trial), trial.settings)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        trial = self.trial
        return batch(trial.config, step, self.rank, trial.world_size, trial.rows)

    def steps(self, first: int, count: int) -> dict[str, list]:
        """Steps first .. first + count - 1: ms and loss of each, and what the engine reports."""
        times, losses, reports = [], [], []
        for index in range(first, first + count):
            x, y = self.batch(index)
            ms, _ = stopwatch(lambda x=x, y=y: losses.append(self.contender.step(x, y)), "cpu")  # type: ignore[misc]
            times.append(ms)
            reports.append(self.contender.report())
        return {"ms": times, "losses": [loss.item() for loss in losses], "reports": reports}

    def peak_bytes(self) -> int:
        return self.peak

    def check(self) -> dict[str, float]:
        """Errors against the exact run. Ranks: all; rank 0 compares."""
        if self.rank == 0:
            exact = torch.load(Path(self.trial.folder) / "exact.pt", mmap=True)
            error = update_error(self.contender.weights(), exact["weights"], exact["start"])
        else:
            for _ in self.contender.weights():
                error = 0.0
        return {"error": error, "first_loss": self.first_losses[0]}


def available_bytes() -> float:
    """Memory that new processes can have; infinite where the system does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return 1024.0 * int(found[1])
    return float("inf")


def forget_peak() -> None:
    """Freed memory back to the system, and the peak of this process starts anew."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def judge(answers: Sequence[dict[str, float]], reference: dict[str, float]) -> float:
    """The gate: raises RankFailed where weights or loss are wrong; the weights' error."""
    eps = torch.finfo(torch.float32).eps
    error, bound = answers[0]["error"], 2 * reference["error"] + eps
    if not error <= bound:
        raise RankFailed(
            0,
            f"weights after {GATE_STEPS} steps: expected an error of the update of at most "
            f"{bound:.2e}, got {error:.2e}",
        )
    loss = statistics.fmean(a["first_loss"] for a in answers)
    bound = 2 * reference["loss_error"] + 2 * len(answers) * eps * reference["loss"]
    if not abs(loss - reference["loss"]) <= bound:
        raise RankFailed(
            0, f"first loss: expected {reference['loss']:.7f} within {bound:.1e}, got {loss:.7f}"
        )
    return error


class Entry:
    """A contender that runs: its worker, its times, why it stopped."""

    def __init__(self, trial: Trial, reference: dict[str, float], make: type[Rank] = Rank):
        self.trial = trial
        self.ms: list[float] = []
        self.losses: list[float] = []  # of timed steps, as means over the ranks
        self.notes: dict[str, Any] = {}
        self.peak_bytes: int | None = None
        self.refused: str | None = None
        self.worker: Ranks | None = None
        try:
            self.worker = start(trial, make)
            self.peak_bytes = max(self.worker.ask("peak_bytes"))
            self.notes["update_error"] = judge(self.worker.ask("check"), reference)
        except RankFailed as error:
            self.refuse(error)

    def refuse(self, error: RankFailed) -> None:
        self.refused = str(error)
        self.close()

    def turn(self, first: int, count: int) -> None:
        if self.worker is None:
            return
        try:
            answers = self.worker.ask("steps", first, count)
        except RankFailed as error:
            self.refuse(error)
            return
        self.ms += [max(step) for step in zip(*(a["ms"] for a in answers))]
        self.losses += [statistics.fmean(step) for step in zip(*(a["losses"] for a in answers))]
        for report in (a["reports"][-1] for a in answers):
            for name, value in report.items():
                self.notes.setdefault(name, []).append(value)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def to_row(bench: Bench, case: str, entry: Entry, base_ms: Sequence[float], base: str = DDP) -> Row:
    """The row of an entry; base_ms: the times of `base` in the same group."""
    trial = entry.trial
    row = bench.row(case, "step", trial.name, torch.float32, refused=entry.refused)
    row.threads = trial.threads
    row.notes = {"ranks": trial.world_size}
    row.notes |= {
        name: statistics.median(value) if isinstance(value, list) else value
        for name, value in entry.notes.items()
    }
    if entry.refused is not None or not entry.ms:
        return row
    row.median_ms, row.p20_ms, row.p80_ms, row.runs = Timing.of(entry.ms)
    row.tokens_per_s = 1e3 * trial.tokens_per_step / row.median_ms
    row.peak_bytes = entry.peak_bytes
    if base_ms:
        row.baseline, row.speedup = base, statistics.median(base_ms) / row.median_ms
    return row


def run(bench: Bench) -> None:
    """Group after group beside DDP; rows are kept as soon as their group is done."""
    config = QUICK if bench.quick else CONFIG
    rounds = 2 if bench.quick else 3
    names = [n for n in (QUICK_ORDER if bench.quick else ORDER) if bench.only in n]
    size = "quick" if bench.quick else "GPT-2 124M"
    case = f"{size} T={config.block_size} B=1 a rank, {WORLD_SIZE} ranks"
    beside = BESIDE if bench.quick or available_bytes() >= ROOM_BYTES else 1
    with tempfile.TemporaryDirectory() as folder:
        trials = [trial_of(name, config, folder) for name in names]
        groups = [trials[i : i + beside] for i in range(0, len(trials), beside)]
        exact, base = (trial_of(name, config, folder) for name in (SINGLE, DDP))
        run_case(bench, case, exact, base, groups, rounds)


def run_case(
    bench: Bench,
    case: str,
    exact: Trial,
    base: Trial,
    groups: Sequence[Sequence[Trial]],
    rounds: int,
    make: type[Rank] = Rank,
) -> None:
    """Groups of trials beside base, judged by what `exact` computes, a trial of one process."""
    with start(exact, Reference) as worker:
        (reference,) = worker.ask("write")
    entry = Entry(base, reference, make)
    try:
        for group in groups:
            run_group(bench, case, entry, group, reference, rounds, make)
    finally:
        entry.close()


def run_group(
    bench: Bench,
    case: str,
    base: Entry,
    trials: Sequence[Trial],
    reference: dict[str, float],
    rounds: int,
    make: type[Rank] = Rank,
) -> None:
    """Turns of base and of each trial; their rows, with speed-ups over base."""
    entries: list[Entry] = []
    known = len(base.ms)
    try:
        for trial in trials:
            entries.append(Entry(trial, reference, make))
        for turn in range(rounds):
            for entry in (base, *entries):
                entry.turn(GATE_STEPS + turn, 1)
        for entry in entries:  # base did these steps in its first turns
            pairs = zip(entry.losses, base.losses)
            entry.notes["loss_difference"] = max((abs(a - b) / b for a, b in pairs), default=0.0)
    finally:
        for entry in entries:
            entry.close()
    base_ms = base.ms[known:]
    name = base.trial.name
    bench.add(to_row(bench, case, base, base.ms, name))
    bench.add(*(to_row(bench, case, entry, base_ms, name) for entry in entries))
