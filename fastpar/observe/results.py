"""The results of `fastpar compare`: runs, their statistics, and conclusions from them.

[Note: timed steps] The first `untimed_steps` of a run count as set-up: memory is first touched,
buckets are laid out, bytes are counted. They train like all others but are not timed: an epoch's
time is the mean of its timed steps times its number of steps.

[Note: no difference] A number of a strategy is the median of its repeats, with their range. Two
strategies differ if the ranges do not overlap; one run each proves no difference.

[Note: within rounding] Strategies add the same gradients in different orders, so their losses drift
by an amount that cannot be known beforehand. So the drift is measured: `single` is trained again
with other micro-batches, which changes the order of its sums, and with the gradient's norm summed
in fp64, which changes its rounding (torch's fp32 sum of millions of squares is off by some 1e-6 on
a CPU, and so is every clipped step). The yardstick of a step is the largest difference between
these runs up to it. Losses are within rounding if no two differ by more than FACTOR times the
yardstick (few of the many orders were tried), or by FLOOR roundings of the loss itself (in the
first steps these runs may agree to the last bit).
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastpar.files.plain_files import write_text
from fastpar.observe.strategies import SINGLE, STRATEGIES

FORMAT = 1
BASELINE = "ddp"
FACTOR, FLOOR = 4.0, 8.0
EPS = 2.0**-23  # of fp32
RESULTS = "results.json"


class Stat(NamedTuple):
    """A number over the repeats of a strategy."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def touches(self, other: Stat) -> bool:
        """Whether the ranges overlap; see [Note: no difference]."""
        return min(self.n, other.n) < 2 or (self.low <= other.high and other.low <= self.high)


@dataclass
class Run:
    """One training run of one strategy, in fresh processes.

    Attributes:
        yardstick: a run of `single` in another order of sums; see [Note: within rounding].
        exact_norm: the gradient's norm was summed in fp64.
        error: why it failed, in a line; then the rest has no meaning.
        step_s: of each step, on its slowest rank.
        losses: of each step before its update, over all ranks. grad_norms: before clipping.
        step_bytes: of each rank, the most memory that a step allocated.
        wire_bytes: sent in a step by the rank that sends most; None: not known.
        exposed_ms: time of a step in which the rank that waits most only waits; None: not known.
        seconds: total, including start and end of the processes.
    """

    strategy: str
    repeat: int
    ranks: int
    threads: int
    micro_batch_size: int
    grad_accum_steps: int
    yardstick: bool = False
    exact_norm: bool = False
    error: str | None = None
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)
    wire_bytes: int | None = None
    exposed_ms: float | None = None
    seconds: float = 0.0

    def sent_mb(self) -> float | None:
        return None if self.wire_bytes is None else self.wire_bytes / 1e6

    def merge(self, ranks: Sequence[Run]) -> None:
        """Fills in what the ranks measured: the times of the slowest, the mean of the losses."""
        self.step_s = [max(times) for times in zip(*(r.step_s for r in ranks))]
        self.losses = [sum(losses) / len(ranks) for losses in zip(*(r.losses for r in ranks))]
        self.grad_norms = ranks[0].grad_norms  # the same on every rank
        self.step_bytes = [n for r in ranks for n in r.step_bytes]
        self.wire_bytes = _largest([r.wire_bytes for r in ranks])
        self.exposed_ms = _largest([r.exposed_ms for r in ranks])


def _largest(values: Sequence[Any]) -> Any:
    """The largest; None if one is not known."""
    return None if None in values else max(values)


@dataclass
class Comparison:
    """A folder's results.

    Attributes:
        settings: strategies (in the requested order), nproc, batch_size, block_size, epochs,
            epoch_steps, repeats, untimed_steps, device, ... as compare.py decided them.
        skipped: strategy -> why it was not run.
        complete: all planned runs were tried.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    complete: bool = False

    # Files

    def save(self, path: Path) -> None:
        """Writes a run per line; the file is complete at any time."""
        fields = {name: value for name, value in vars(self).items() if name != "runs"}
        lines = ",\n  ".join(json.dumps(asdict(run)) for run in self.runs)
        text = json.dumps({"format": FORMAT, **fields}, indent=1).removesuffix("\n}")
        write_text(path, f'{text},\n "runs": [\n  {lines}\n ]\n}}\n')

    # Which runs

    @property
    def names(self) -> list[str]:
        """Strategies with a successful run, in the requested order."""
        return [name for name in self.settings["strategies"] if self.of(name)]

    def of(self, name: str) -> list[Run]:
        """The successful repeats of a strategy."""
        return [r for r in self.runs if r.strategy == name and not r.yardstick and r.error is None]

    @property
    def failed(self) -> dict[str, str]:
        """Strategy -> why a run of it failed."""
        return {run.strategy: run.error for run in self.runs if run.error is not None}

    @property
    def orders(self) -> list[Run]:
        """Successful runs of one process that differ in the order of their sums, one per order."""
        runs = [r for r in self.runs if r.strategy == SINGLE and r.error is None]
        kinds = {(run.micro_batch_size, run.exact_norm): run for run in reversed(runs)}
        return list(kinds.values())

    # Numbers

    @property
    def tokens_per_step(self) -> int:
        return self.settings["batch_size"] * self.settings["block_size"]

    def _timed(self, run: Run, epoch: int | None = None) -> list[float]:
        n, untimed = self.settings["epoch_steps"], self.settings["untimed_steps"]
        end = None if epoch is None else (epoch + 1) * n
        return run.step_s[max(untimed, (epoch or 0) * n) : end]

    def epoch_s(self, run: Run, epoch: int) -> float:
        """Seconds of an epoch (0, 1, ...); see [Note: timed steps]."""
        return statistics.fmean(self._timed(run, epoch)) * self.settings["epoch_steps"]

    def mean_epoch_s(self, run: Run) -> float:
        epochs = self.settings["epochs"]
        return sum(self.epoch_s(run, epoch) for epoch in range(epochs)) / epochs

    def tokens_per_s(self, run: Run, epoch: int | None = None) -> float:
        """Of an epoch, or of the whole run."""
        return self.tokens_per_step / statistics.fmean(self._timed(run, epoch))

    def memory_mb(self, run: Run) -> float:
        """Peak memory allocated in a step, of the rank with the most."""
        return max(run.step_bytes) / 1e6

    def stat(self, name: str, value: Callable[[Run], float | None]) -> Stat | None:
        """A number over the repeats of a strategy; None if a run does not know it."""
        values = [value(run) for run in self.of(name)]
        known = [v for v in values if v is not None]
        return Stat.of(known) if known and len(known) == len(values) else None

    @property
    def baseline(self) -> str | None:
        """The strategy whose ratios are 1: torch's plain data parallelism, else a single rank, else
        the first; None: no run succeeded."""
        return next((name for name in (BASELINE, SINGLE, *self.names) if self.of(name)), None)

    def ranking(
        self, value: Callable[[Run], float | None], *, most: bool
    ) -> list[tuple[str, Stat]]:
        """Strategies and their numbers, the best first."""
        stats = [(name, self.stat(name, value)) for name in self.names]
        known = [(name, stat) for name, stat in stats if stat is not None]
        return sorted(known, key=lambda row: row[1].median, reverse=most)


@dataclass(frozen=True)
class LossVerdict:
    """How far the losses of strategies differ; see [Note: within rounding].

    Attributes:
        difference: the largest between two strategies, in this step (1 is the first): `high` had
            the larger loss, `low` the smaller one.
        yardstick: the largest between two orders of sums, over all steps; None: one was run.
        orders: number of orders that were run.
        beyond: the first step that is not within rounding, and the strategy furthest from the
            median there; None: there is none, or no yardstick.
    """

    difference: float
    step: int
    high: str
    low: str
    yardstick: float | None
    orders: int
    beyond: tuple[int, str] | None


def _curves(runs: Sequence[Run]) -> np.ndarray:
    return np.array([run.losses for run in runs], dtype=np.float64)


def yardstick(comparison: Comparison) -> np.ndarray | None:
    """The drift by rounding up to each step; None if only one order was run."""
    orders = comparison.orders
    if len(orders) < 2:
        return None
    curves = _curves(orders)
    return np.maximum.accumulate(curves.max(0) - curves.min(0))


def allowed(comparison: Comparison) -> np.ndarray | None:
    """The difference of losses that counts as rounding, per step; None: not known."""
    measured = yardstick(comparison)
    if measured is None:
        return None
    losses = _curves(comparison.orders).max(0)
    return np.maximum(FACTOR * measured, FLOOR * EPS * np.abs(losses))


def judge_losses(comparison: Comparison) -> LossVerdict | None:
    """Compares all repeats of all dense strategies; None with fewer than two of them."""
    names = [name for name in comparison.names if not STRATEGIES[name].other_run]
    if len(names) < 2:
        return None
    curves = {name: _curves(comparison.of(name)) for name in names}
    pairs = []
    for high, low in itertools.permutations(names, 2):
        difference = curves[high].max(0) - curves[low].min(0)
        pairs.append((float(difference.max()), int(difference.argmax()) + 1, high, low))
    best = max(pairs, key=lambda pair: pair[0])
    measured, limit = yardstick(comparison), allowed(comparison)
    beyond = None
    if limit is not None:
        together = np.concatenate(list(curves.values()))
        steps = np.flatnonzero(together.max(0) - together.min(0) > limit)
        if len(steps):
            first = int(steps[0])
            middle = float(np.median([c[:, first].mean() for c in curves.values()]))
            outlier = max(names, key=lambda n: float(np.abs(curves[n][:, first] - middle).max()))
            beyond = (first + 1, outlier)
    largest = None if measured is None else float(measured[-1])
    return LossVerdict(*best, largest, len(comparison.orders), beyond)
