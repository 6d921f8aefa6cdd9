"""Measures memory and time of a run's steps, for the two lines at its end.

They compare with what cost/prediction.py says. Memory is measured in one early step, of every rank,
by step_memory.py, which slows that step and no other; the fullest rank counts. The step's time is
the median of all but the first ones, on the rank where it is longest, as the engine's reports have
it: from the first forward to the end of the update. The figures stand in metrics.jsonl, as the row
that has "prediction". The lines come only where `fastpar plan --measure` has measured such ranks:
by data sheets a step is a guess.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastpar.config.config import GPTConfig, TrainConfig
from fastpar.cost.step_memory import StepMemory, held_bytes
from fastpar.parallel.control import everyone
from fastpar.parallel.engine import Engine
from fastpar.train.journal import Journal

T = TypeVar("T")

MEMORY_STEP = 2  # the first one makes the optimizer's state
SKIPPED = 3  # steps whose time does not count: first ones, and that in which memory is measured
MOST = 1000  # times that are kept, the newest


class Predictions:
    """On every rank: measures steps, and reports at the end.

    Attributes:
        peak_bytes: of this rank, in the step that was watched; 0 before.
        times_ms: of this rank's steps.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.engine, self.optimizer, self.peak_bytes = engine, optimizer, 0
        self.times_ms: deque[float] = deque(maxlen=MOST)
        self._steps, self._last = 0, engine.report

    def watched(self, step: Callable[[], T]) -> T:
        """Runs the step; measures its time, and the memory of one."""
        self._steps += 1
        if self._steps == MEMORY_STEP:
            held = held_bytes(self.engine, self.optimizer)
            with StepMemory(self.engine.mesh.device, alive_bytes=held) as memory:
                found = step()
            self.peak_bytes = memory.peak_bytes
        else:
            found = step()
        report = self.engine.report  # on a GPU of an earlier step
        new = report is not self._last and self._steps > SKIPPED
        if new and report is not None and report.step_ms is not None:
            self.times_ms.append(report.step_ms)
        self._last = report
        return found

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
        from fastpar.cost import prediction  # many modules, which no step needs

        try:
            found = prediction.predict(config, shape, facts)
        except Exception as error:
            # The run is done and saved: what is wrong with its prediction must not fail it.
            known = isinstance(error, ValueError)
            why = f", {error}" if known else f" ({type(error).__name__}: {error})"
            journal.folder.notes += (f"predicted: not available{why}",)
            return
        row = {**found, "measured_bytes": int(peak) or None, "measured_ms": ms or None}
        if found["measured_rates"]:
            journal.folder.notes += tuple(prediction.lines_of(row))
        journal.keep(prediction=row)
