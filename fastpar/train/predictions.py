"""What the planner says of a run, beside what the run measures: two lines at its end.

    memory   predicted 52.1 MB, measured 51.0 MB (+2.2 %): parameters 12.0 MB, ...
    step     predicted 61.0 ms (measured on this machine, ...), measured 58.2 ms (+4.8 %)

Memory is measured in one early step, of every rank, by step_memory.py, which slows that step and no
other; the fullest rank counts. The step's time is the median of all but the first ones, on the rank
where it is longest, as the engine's reports have it: from the first forward to the end of the
update. The figures stand in metrics.jsonl, as the row that has "prediction". The lines come only
where `fastpar plan --measure` has measured such ranks: by data sheets a step is a guess.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from fastpar.config.config import GPTConfig, TrainConfig
from fastpar.cost.datasheet import DatasheetRates
from fastpar.cost.devices import Cluster, device_of
from fastpar.cost.measured_rates import MeasuredRates, find_rates
from fastpar.cost.memory_model import format_bytes, predict_memory
from fastpar.cost.operations import Rates
from fastpar.cost.step_memory import StepMemory, held_bytes
from fastpar.cost.step_time import predict_step
from fastpar.cost.workload import Setup, Workload
from fastpar.parallel.agreement import everyone
from fastpar.parallel.engine import Engine
from fastpar.parallel.step_report import StepReport
from fastpar.train.journal import Journal

T = TypeVar("T")

MEMORY_STEP = 2  # the first one makes the optimizer's state
SKIPPED = 3  # steps whose time does not count: first ones, and that in which memory is measured
MOST = 1000  # times that are kept, the newest


class Predictions:
    """On every rank: watches steps, and tells at the end.

    Attributes:
        peak_bytes: of this rank, in the step that was watched; 0 before.
        times_ms: of this rank's steps.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.engine, self.optimizer, self.peak_bytes = engine, optimizer, 0
        self.times_ms: deque[float] = deque(maxlen=MOST)
        self._steps, self._last = 0, engine.report

    def watched(self, step: Callable[[], T]) -> T:
        """The step, with an eye on it."""
        self._steps += 1
        with self._measured():
            found = step()
        report = self.engine.report  # on a GPU of an earlier step
        if report is not self._last and self._steps > SKIPPED:
            self._take(report)
        self._last = report
        return found

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        if self._steps != MEMORY_STEP:
            yield
            return
        held = held_bytes(self.engine, self.optimizer)
        with StepMemory(self.engine.mesh.device, alive_bytes=held) as memory:
            yield
        self.peak_bytes = memory.peak_bytes

    def _take(self, report: StepReport | None) -> None:
        if report is not None and report.step_ms is not None:
            self.times_ms.append(report.step_ms)

    def tell(
        self, journal: Journal, config: TrainConfig, shape: GPTConfig, facts: dict[str, Any]
    ) -> None:
        """The two lines, for the end of the run, and the row. Ranks: all.

        Args:
            shape: of the model; facts: see RunFolder.
        """
        if not self._steps:
            return
        mine = statistics.median(self.times_ms) if self.times_ms else 0.0
        peak, ms = (max(everyone(self.engine, value)) for value in (float(self.peak_bytes), mine))
        if journal.folder is None:
            return
        try:
            found = predict(config, shape, facts)
        except ValueError as error:
            journal.folder.notes += (f"predicted: not available, {error}",)
            return
        except Exception as error:
            # The run is done and saved: what is wrong with its prediction must not fail it.
            journal.folder.notes += (f"predicted: not available ({type(error).__name__}: {error})",)
            return
        row = {**found, "measured_bytes": int(peak) or None, "measured_ms": ms or None}
        if found["measured_rates"]:
            journal.folder.notes += tuple(lines_of(row))
        journal.keep(prediction=row)


def predict(config: TrainConfig, shape: GPTConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """Of a run with these facts: bytes and ms, their parts, and whose rates they are."""
    workload, setup = workload_of(config, shape, facts)
    memory = predict_memory(workload, setup)
    rates, whose = rates_of(workload, setup, facts)
    step = predict_step(workload, setup, rates)
    return {
        "predicted_bytes": memory.total,
        "memory": {name: int(size) for name, size in asdict(memory).items() if size},
        "predicted_ms": step.step_s * 1e3,
        "step_ms": {name: seconds * 1e3 for name, seconds in step.parts.items() if seconds},
        "rates": whose,
        "measured_rates": isinstance(rates, MeasuredRates),
    }


def workload_of(
    config: TrainConfig, shape: GPTConfig, facts: dict[str, Any]
) -> tuple[Workload, Setup]:
    """What a run trains, and how, in the planner's words."""
    on_gpu = facts["device"] != "CPU"
    setup = Setup.of(
        config,
        dtype=facts["dtype"],
        world_size=facts["world_size"],
        micro_batch_size=facts["micro_batch_size"],
        grad_accum_steps=facts["grad_accum_steps"],
        device_type="cuda" if on_gpu else "cpu",
        transport=facts["transport"] if facts["transport"] != "none" else "shm",
    )
    workload = Workload(replace(shape, block_size=facts["block_size"]), config.text.batch_size)
    return workload, replace(setup, zero_stage=facts["zero_stage"])


def rates_of(workload: Workload, setup: Setup, facts: dict[str, Any]) -> tuple[Rates, str]:
    """The rates of this machine if such ranks have been measured, else a data sheet's; which.

    Raises:
        ValueError: the measured ones are of no use, see find_rates.
    """
    note, on_gpu = "", setup.device_type == "cuda"
    found = find_rates(
        device_type=setup.device_type,
        dtype=setup.dtype,
        ranks=setup.world_size,
        threads=facts["threads"],
        dropout=workload.shape.dropout > 0,
    )
    if found is not None:
        return found, str(found)
    device = device_of(facts["device"]) if on_gpu else "cpu"
    if device is None:
        device, note = "h100", f"; {facts['device']} is not in the table"
    name = device if isinstance(device, str) else device.name
    rates = DatasheetRates(Cluster.of(device, setup.world_size), setup)
    return rates, f"data sheet of {name}{note}; `fastpar plan --measure` makes it exact"


def lines_of(row: dict[str, Any]) -> list[str]:
    """The two lines."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in row["memory"].items())
    memory = f"predicted {format_bytes(row['predicted_bytes'])}"
    if row["measured_bytes"]:
        error = row["predicted_bytes"] / row["measured_bytes"] - 1
        memory += f", measured {format_bytes(row['measured_bytes'])} ({error:+.1%})"
    step = f"predicted {row['predicted_ms']:.1f} ms ({row['rates']})"
    if row["measured_ms"]:
        error = row["predicted_ms"] / row["measured_ms"] - 1
        step += f", measured {row['measured_ms']:.1f} ms ({error:+.1%})"
    return [f"memory   {memory}: {parts}", f"step     {step}"]
