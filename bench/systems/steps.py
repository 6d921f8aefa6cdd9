"""Whole training steps: ranks that hold a contender and run steps when told to, turns, gates, rows.

A contender lives in processes of its own, so that its peak memory is its own. Contenders take turns
of a few steps, never two at once, so that their times are side by side; all see the same batches.

[Note: memory of a rank] Peak memory is a rank's largest resident memory in its first GATE_STEPS
steps, shared memory included, over what it was before there was a model.

[Note: the gate of weights] After GATE_STEPS the weights are compared with those of one process in
fp64: the error of the update, as a vector norm, may be at most twice that of one fp32 process of
plain PyTorch, plus one rounding, and so may the first loss, with two roundings for each rank.

[Note: the gate of losses] Behind a link, where no process has the exact weights, losses, as means
over the ranks, may differ from those of the first contender by rounding only.
"""

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench
from bench.peers.contenders import build, update_error
from bench.peers.stock import stock_model
from bench.records import Row
from bench.systems.links import Link, Ranks
from fastpar.comm.host import memory_mb
from fastpar.comm.mesh import initialize
from fastpar.comm.ranks import RankFailed
from fastpar.kernels import keep_freed_memory
from fastpar.observe.strategies import Settings, adamw_of, import_deepspeed
from fastpar.settings.model import GPTConfig

GATE_STEPS = 2
LOSS_BOUND = 1e-4  # see [Note: the gate of losses]
QUIET_BYTES = 10_000  # in a tenth of a second: keep-alives, no collective
MEMORY_BYTES = 1 << 30  # that two more ranks need


@dataclass(frozen=True)
class Trial:
    """What ranks train; name is the row's variant, title the contender's if it has another. rows:
    sequences of a step, over all ranks. stock: fastpar, too, trains plain PyTorch's model. folder:
    where the exact weights lie; "": there are none. linked: ranks are behind a link."""

    name: str
    config: GPTConfig
    folder: str = ""
    ranks: int = 2
    threads: int = 1
    rows: int = 2
    title: str = ""
    stock: bool = False
    linked: bool = False
    gated: bool = True  # runs GATE_STEPS first, for its peak and its weights
    timeout_s: float = 600.0
    device: str = "cpu"
    settings: Settings = field(default_factory=Settings)

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.config.block_size


def batch(config: GPTConfig, step: int, rank: int, size: int, rows: int) -> tuple[Tensor, Tensor]:
    """The sequences of one of `size` data-parallel ranks, of the step's `rows` ones."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab_size, (rows, config.block_size + 1), generator=generator)
    tokens = tokens.view(size, rows // size, -1)[rank]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Rank:
    """One rank of one trial; public methods are called through Ranks.ask()."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.count = trial, 0
        warnings.simplefilter("ignore")  # of the peers' deprecated calls
        if trial.linked:
            keep_freed_memory()  # in every contender, as fastpar's trainer does
        if trial.ranks > 1:
            initialize(int(os.environ["RANK"]), trial.ranks, torch.device("cpu"), trial.timeout_s)
        if trial.name.startswith("DeepSpeed"):
            if trial.linked:  # it would compile an operator by which ranks of a host skip the link
                os.environ["DS_ACCELERATOR"] = "cpu"
                with contextlib.suppress(ImportError):  # build() says that it is not installed
                    ops = importlib.import_module("deepspeed.ops").__compatible_ops__
                    ops["deepspeed_shm_comm"] = False
            import_deepspeed(trial.device)
        before = memory_mb()[0]
        title = trial.title or trial.name
        self.made = build(title, trial.config, trial.settings, stock=trial.stock)
        gc.collect()
        forget_peak()
        self.first = self.steps(GATE_STEPS) if trial.gated else {}
        self.peak = round(1e6 * (memory_mb()[1] - before))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        made = self.made
        return batch(self.trial.config, step, made.dp_rank, made.dp_size, self.trial.rows)

    def steps(self, count: int) -> dict[str, list]:
        """The next steps: ms of each from start to start, losses, and what the engine reports."""
        batches = [self.batch(self.count + i) for i in range(count)]
        self.count += count
        begins, losses, reports, host, cpu = [], [], [], [], time.process_time()
        for x, y in batches:
            begins.append(time.perf_counter())
            host.append(-time.thread_time())
            losses.append(self.made.step(x, y).item())
            host[-1] += time.thread_time()
            reports.append(self.made.report())
        begins.append(time.perf_counter())
        cpu = (time.process_time() - cpu) * 1e3 / count
        if self.trial.linked:
            forget_peak()  # the other contenders need freed memory while this one waits
        ms = [(b - a) * 1e3 for a, b in itertools.pairwise(begins)]
        return {"ms": ms, "losses": losses, "reports": reports, "cpu_ms": [cpu], "host_s": host}

    def phases(self, count: int) -> dict[str, float]:
        """Median ms of forward, backward and optimizer; the first two steps are not counted."""
        optimizer, marks = self.made.optimizer, []
        for step in range(count + 2):
            x, y = self.batch(1000 + step)
            now = [time.perf_counter()]
            loss = self.made.model(x, y)
            for each in (loss.backward, lambda: (optimizer.step(), optimizer.zero_grad())):
                now.append(time.perf_counter())
                each()
            now.append(time.perf_counter())
            marks.append([1e3 * (b - a) for a, b in itertools.pairwise(now)])
        names = ("forward_ms", "backward_ms", "optimizer_ms")
        return dict(zip(names, map(statistics.median, zip(*marks[2:]))))

    def peak_bytes(self) -> int:
        return self.peak

    def first_ms(self) -> float:
        return self.first["ms"][0]

    def check(self) -> dict[str, float]:
        """Errors against the exact run. Ranks: all; rank 0 compares."""
        if os.environ.get("RANK", "0") == "0":
            exact = torch.load(Path(self.trial.folder) / "exact.pt", mmap=True)
            error = update_error(self.made.weights(), exact["weights"], exact["start"])
        else:
            for _ in self.made.weights():
                error = 0.0
        return {"error": error, "first_loss": self.first["losses"][0]}


class Reference:
    """One process of plain PyTorch in fp64 and in fp32: what the gate of weights compares with."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def write(self) -> dict[str, float]:
        """exact.pt: weights and loss in fp64; returns the fp32 process's errors against them."""
        start = dict(stock_model(self.trial.config).state_dict())
        loss, weights = self._train(torch.float64)
        exact = {"start": start, "weights": weights}
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


def judge_error(rank: int, what: str, error: float, bound: float) -> None:
    if not error <= bound:
        raise RankFailed(rank, f"{what} of at most {bound:.2e}, got {error:.2e}")


def judge_weights(answers: Sequence[dict[str, float]], reference: Mapping[str, float]) -> float:
    """Raises RankFailed where weights or loss are wrong; the weights' error."""
    eps, error = torch.finfo(torch.float32).eps, answers[0]["error"]
    what = f"weights after {GATE_STEPS} steps: expected an error of the update"
    judge_error(0, what, error, 2 * reference["error"] + eps)
    loss, exact = statistics.fmean(a["first_loss"] for a in answers), reference["loss"]
    bound = 2 * reference["loss_error"] + 2 * len(answers) * eps * exact
    judge_error(0, f"first loss: expected {exact:.7f} within an error", abs(loss - exact), bound)
    return error


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


def start(trial: Any, make: type, link: Link | None = None) -> Ranks:
    """The processes of one trial, which names ranks and threads; each holds make(trial)."""
    target = f"{make.__module__}:{make.__name__}"
    timeout_s = getattr(trial, "timeout_s", 300.0)
    return Ranks(link, target, trial, ranks=trial.ranks, threads=trial.threads, timeout_s=timeout_s)


def settled_bytes(link: Link) -> list[int]:
    """What each end has sent, after what a step left to the next one has gone too."""
    sent = link.sent_bytes()
    while True:
        time.sleep(0.1)
        before, sent = sent, link.sent_bytes()
        if max(now - then for now, then in zip(sent, before)) < QUIET_BYTES:
            return sent


@dataclass
class Log:
    """What one contender did so far; entries are the slowest rank's, losses are means."""

    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reports: list[dict[str, float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of all threads a step, of each turn
    host_s: list[float] = field(default_factory=list)  # CPU time of the thread that trains
    first_ms: float | None = None  # of the first step, which compiles
    sent_bytes: list[float] = field(default_factory=list)  # a step, of each turn
    notes: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    refused: str | None = None

    def extend(self, answers: Sequence[dict[str, list]], warm: int | None = 0) -> None:
        """A turn, whose first `warm` steps are not timed; None: nothing of it is."""
        self.losses += [statistics.fmean(step) for step in zip(*(a["losses"] for a in answers))]
        if self.first_ms is None:
            self.first_ms = max(a["ms"][0] for a in answers)
        if warm is None:
            return
        self.ms += [max(step) for step in zip(*(a["ms"] for a in answers))][warm:]
        self.host_s += [max(step) for step in zip(*(a["host_s"] for a in answers))][warm:]
        for step in [*zip(*(a["reports"] for a in answers))][warm:]:
            self.reports.append({name: max(r[name] for r in step) for name in step[0]})
        self.cpu_ms += [max(turn) for turn in zip(*(a.get("cpu_ms", ()) for a in answers))]


class Turns(contextlib.AbstractContextManager["Turns"]):
    """Contenders that live side by side and take turns; a failure stops only its own.
    begin(trial) -> its processes, whose ask(command, ...) has the answers of all ranks."""

    def __init__(
        self, begin: Callable[[Any], Any], link: Link | None = None, timeout_s: float = 600.0
    ) -> None:
        self.begin, self.link, self.timeout_s = begin, link, timeout_s
        self.trials: dict[str, Any] = {}
        self.logs: dict[str, Log] = {}
        self.ranks: dict[str, Any] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *names: str) -> None:
        for name in names or list(self.ranks):
            if name in self.ranks:
                self.ranks.pop(name).close()

    def ask(self, name: str, command: str, *args: Any) -> list[Any]:
        return self.ranks[name].ask(command, *args, timeout_s=self.timeout_s)

    def each(self, job: Callable[[str], object], names: Sequence[str] | None = None) -> None:
        """job(name) of all that were not refused."""
        for name in names or list(self.trials):
            if self.logs[name].refused is None:
                try:
                    job(name)
                except RankFailed as error:
                    self.logs[name].refused = str(error)
                    self.close(name)

    def start(self, trials: Mapping[str, Any], reference: dict[str, float] | None = None) -> None:
        """Start them; reference: what the gate of weights compares with."""
        self.trials |= trials

        def one(name: str) -> None:
            if self.link is not None and available_bytes() < MEMORY_BYTES:
                least = f"{MEMORY_BYTES >> 20} MiB"
                raise RankFailed(0, f"not started: less than {least} of memory free")
            self.ranks[name] = self.begin(trials[name])
            if getattr(trials[name], "gated", False):
                self.logs[name].peak_bytes = max(self.ask(name, "peak_bytes"))
                self.logs[name].first_ms = max(self.ask(name, "first_ms"))
            if reference is not None:
                answers = self.ask(name, "check")
                self.logs[name].notes["update_error"] = judge_weights(answers, reference)

        for name in trials:
            self.logs[name] = Log()
        self.each(one, list(trials))

    def turn(self, name: str, steps: int, warm: int | None = 0) -> None:
        """So many timed steps, after `warm` ones."""
        count = steps + (warm or 0)
        before = settled_bytes(self.link) if self.link else []
        self.logs[name].extend(self.ask(name, "steps", count), warm)
        if self.link:
            sent = max(now - then for now, then in zip(settled_bytes(self.link), before))
            self.logs[name].sent_bytes.append(sent / count)

    def run(
        self, rounds: int, steps: int, names: Sequence[str] | None = None, warm: int = 0
    ) -> None:
        """Every contender's steps in each of the rounds."""
        for _ in range(rounds):
            self.each(lambda name: self.turn(name, steps, warm), names)


def judge_losses(
    logs: Mapping[str, Log], base: str, bound: Callable[[str], float] = lambda _: LOSS_BOUND,
    aside: Sequence[str] = (),
) -> None:  # fmt: skip
    """Refuses what did not compute the losses of base; see [Note: the gate of losses]."""
    for name, log in logs.items():
        if name in aside or log.refused is not None or base not in logs:
            continue
        errors = [abs(a - b) for a, b in zip(log.losses, logs[base].losses)]
        wrong = next((i for i, e in enumerate(errors) if not e <= bound(name)), None)
        if wrong is not None:
            log.refused = (
                f"losses: expected those of {base} within {bound(name):g}, got a difference of "
                f"{errors[wrong]:.2e} in step {wrong}"
            )


def row_of(
    bench: Bench, case: str, trial: Any, log: Log, base: str, base_ms: Sequence[float],
    name: str = "",
) -> Row:  # fmt: skip
    """A row; base_ms: the times of `base` in the same turns."""
    found: dict[str, Any] = {"threads": trial.threads, "refused": log.refused, "ranks": trial.ranks}
    name = name or trial.name
    row = bench.timed_row(case, "step", name, log.ms, (base, base_ms), **found, **log.notes)
    if row.median_ms is None:
        return row
    row.tokens_per_s = 1e3 * trial.tokens_per_step / row.median_ms
    row.peak_bytes = log.peak_bytes
    row.host_us = 1e6 * statistics.median(log.host_s)
    row.add_first(log.first_ms or 0.0)
    mark = "engine_" if log.sent_bytes else ""  # where the bench has an account of its own
    for name in log.reports[-1] if log.reports else ():
        row.notes[mark + name] = statistics.median(r[name] for r in log.reports)
    if log.sent_bytes:
        row.notes["sent_bytes"] = min(log.sent_bytes)  # of turns without set-up
        row.notes["cpu_ms"] = statistics.median(log.cpu_ms)
    return row


def run_case(
    bench: Bench, case: str, base: Trial, groups: Sequence[Sequence[Trial]], rounds: int,
    link: Link | None = None,
) -> None:  # fmt: skip
    """Groups of trials beside base, which stays; a group's rows are kept as soon as it is done, and
    base's own row is of the first group's turns. On this host the gate is that of weights, behind a
    link that of losses."""
    reference, warm = None, int(link is not None)
    if link is None:
        exact = Trial("", base.config, base.folder, 1, threads=2, rows=base.rows)
        with start(exact, Reference) as worker:
            (reference,) = worker.ask("write")
    with Turns(lambda trial: start(trial, Rank, link), link, base.timeout_s) as turns:
        turns.start({base.name: base}, reference)
        first = turns.logs[base.name]
        for group in groups:
            known = len(first.ms)
            trials = {trial.name: trial for trial in group}
            turns.start(trials, reference)
            turns.run(rounds, 1, [base.name, *trials], warm)
            if link is not None:
                judge_losses(turns.logs, base.name)
            for name, trial in trials.items() if known else {base.name: base, **trials}.items():
                log = turns.logs[name]
                pairs = zip(log.losses, first.losses)
                log.notes["loss_difference"] = max((abs(a - b) / b for a, b in pairs), default=0.0)
                row = row_of(bench, case, trial, log, base.name, first.ms[known:])
                if log.sent_bytes:
                    row.notes["sent_mb"] = min(log.sent_bytes) / 1e6
                bench.add(row)
            turns.close(*trials)
