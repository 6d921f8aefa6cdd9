"""What a step cost: time, time in communication, time in which communication was waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fastpar.collectives import Handle


@dataclass(frozen=True)
class StepReport:
    """Of one step on one rank; times in ms, None where they are not known (yet)."""

    step_ms: float | None
    compute_ms: float | None
    comm_ms: float | None
    exposed_ms: float | None
    wire_bytes: int


class StepTimer:
    """Collects a step's times; on a GPU by events, which are read only when they are over."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: float | None = None
        self._waits: list = []
        self._handles: list[Handle] = []
        self._wire_bytes = 0

    def begin(self) -> None:
        """A step begins, if none has."""
        if self._began is None:
            self._began = time.perf_counter()
            self._waits.clear()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for communication."""
        begin = time.perf_counter()
        yield
        self._waits.append((time.perf_counter() - begin) * 1e3)

    def add(self, handle: Handle, wire_bytes: int) -> None:
        """A collective that was started for this step."""
        self._handles.append(handle)
        self._wire_bytes += wire_bytes

    def end_step(self) -> StepReport:
        """The step is over."""
        assert self._began is not None
        step_ms = (time.perf_counter() - self._began) * 1e3
        exposed = sum(self._waits)
        known = [ms for h in self._handles if (ms := getattr(h, "ms", None)) is not None]
        report = StepReport(step_ms, step_ms - exposed, sum(known), exposed, self._wire_bytes)
        self._began, self._wire_bytes = None, 0
        self._handles.clear()
        return report
