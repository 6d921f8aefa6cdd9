"""What a run tells while it goes: a row of metrics.jsonl and a word on the terminal, from rank 0.

The other ranks have a journal too, which keeps silent, so that the loop is the same on every rank.
Of several replicas the first one tells how it goes, the others only, by name, what is unusual.

[Note: the two lines at the end] compare what a step took with what predict/prediction.py says.
Memory is measured in one early step, of every rank, by step_memory.py, which slows that step and no
other; the fullest rank counts. The step's time is the median of all but the first ones, on the rank
where it is longest, as the engine's reports have it: from the first forward to the end of the
update. The figures stand in metrics.jsonl, as the row that has "prediction". The lines come only
where `fastpar plan --measure` has measured such ranks: by data sheets a step is a guess.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastpar.axes.step import Setup
from fastpar.comm.host import memory_mb
from fastpar.comm.mesh import Mesh
from fastpar.data.batches import TextData
from fastpar.engine.control import gather_numbers
from fastpar.engine.engine import Engine
from fastpar.files.progress import Progress
from fastpar.models.gpt import GPT
from fastpar.predict.step_memory import StepMemory, held_bytes
from fastpar.settings.config import GPTConfig, TrainConfig
from fastpar.train.metrics import mfu
from fastpar.train.run_folder import RunFolder

T = TypeVar("T")

MEMORY_STEP = 2  # the first one makes the optimizer's state
SKIPPED = 3  # steps whose time does not count: first ones, and that in which memory is measured
MOST = 1000  # times that are kept, the newest


@dataclass
class Step:
    """What is known of a step once its numbers have arrived."""

    step: int
    lr: float
    tokens: int
    values: Tensor  # fp64 on the host: loss, grad_norm, then what the loop asked of all ranks
    ready: torch.cuda.Event | None
    scale: float | None
    of_experts: int = 0  # the last so many of the values

    def numbers(self) -> list[float]:
        """The values without those of experts; waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values[: len(self.values) - self.of_experts].tolist()

    def experts(self) -> Tensor:
        """What experts counted, after numbers()."""
        return self.values[len(self.values) - self.of_experts :]


class Journal:
    """Rank 0's folder and progress bar, and the clock of the run, which starts here.

    Attributes:
        folder: on rank 0, once it is open.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.began = self._clock = time.monotonic()
        self.folder: RunFolder | None = None
        self._progress = Progress(config.run.max_steps, enabled=False)
        self._facts: dict[str, Any] = {}
        self._step = 0  # the last that was written
        self._full = False  # the disk
        self._told_host = False  # how fast it steps
        self._rate = 0.0  # tokens/s, smoothed
        self._flops_per_token = 0.0

    def open(self, *, model: GPT, data: TextData, step: int, facts: dict[str, Any]) -> None:
        """Make the folder, or open that of the run to go on with; says what runs where.

        Args:
            step: steps done before.
            facts: see RunFolder.
        """
        if not self.mesh.is_main:
            return
        self._facts, self._flops_per_token = facts, model.flops_per_token()
        first = self.mesh.replica == 0
        self._progress = Progress(self.config.run.max_steps, step, bar=None if first else False)
        self.folder = RunFolder(self.config, model=model, data=data, step=step, facts=facts)
        if not first:
            self.folder.tell = lambda *text, **how: None
        for line in self.folder.header if first else ():
            self.say(line)

    @property
    def path(self) -> Path | None:
        """The run's folder, on rank 0 once it is open."""
        return None if self.folder is None else self.folder.path

    @property
    def seconds(self) -> float:
        """Since the start of this process' run."""
        return time.monotonic() - self.began

    def start_clock(self) -> None:
        """What was done since the last step does not count as time of the next one."""
        self._clock = time.monotonic()

    def say(self, text: str) -> None:
        """A line of its own on the terminal."""
        number = self.mesh.replica
        self._progress.say(f"replica {number}  {text}" if number else text)

    def note(self, step: int, text: str, **row: Any) -> None:
        """Something happened after a step: a line, and a row of metrics.jsonl."""
        self._write({"step": step, **row, "time_s": self.seconds})
        if self.mesh.replica == 0 or not {"val_loss", "save_mb"} & row.keys():
            self.say(f"step {step}  {text}")

    def keep(self, **row: Any) -> None:
        """A row of metrics.jsonl about the run so far, under its last step."""
        self._write({"step": self._step, **row, "time_s": self.seconds})

    def write_step(
        self, done: Step, *, loss: float, norm: float, engine: Engine, **more: Any
    ) -> None:
        """A step is done; `more` are further columns of its row."""
        self._step = done.step
        now = time.monotonic()
        seconds, self._clock = now - self._clock, now
        if self.folder is None:
            return
        tokens = self.config.text.batch_size * self._facts["block_size"]
        rate = tokens / max(seconds, 1e-9)
        self._rate = 0.9 * self._rate + 0.1 * rate if self._rate else rate
        rss, peak = memory_mb()
        row: dict[str, Any] = {
            "step": done.step,
            "loss": loss,
            "lr": done.lr,
            "grad_norm": norm,
            "tokens_per_s": rate,
            **_costs(engine),
            "tokens": done.tokens,
            "time_s": self.seconds,
            "rss_mb": rss,
            "peak_rss_mb": peak,
            **more,
        }
        text = f"loss {loss:.3f}, {self._rate:,.0f} tokens/s"
        if done.scale is not None:
            row["loss_scale"] = done.scale
        if self.mesh.device.type == "cuda":
            row["cuda_peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
            per_gpu = self._rate / self.mesh.world_size
            used = mfu(torch.cuda.get_device_name(), per_gpu, self._flops_per_token)
            if used is not None and self._facts["dtype"] != "fp32":
                row["mfu"] = used
                text += f", MFU {used:.0%}"
        self._write(row)
        if self.mesh.replica:
            return
        self._progress.update(done.step, text)
        if engine.shards.offload is not None and not self._told_host:
            self._told_host = True
            self.say(f"offload  {engine.shards.offload.describe()}")

    def _write(self, row: dict[str, Any]) -> None:
        if self.folder is not None:
            self._on_disk(self.folder.log.write, row)

    def _on_disk(self, action: Callable[[Any], None], value: Any) -> None:
        """A full disk ends no run: it is said once, until there is room again."""
        try:
            action(value)
        except OSError as error:
            if not self._full:
                self.say(f"metrics.jsonl cannot be written ({error}); training goes on")
            self._full = True
        else:
            self._full = False

    def close(self) -> None:
        """The bar ends."""
        self._progress.close()


class Predictions:
    """On every rank: measures steps, and reports at the end; see the note above.

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

    def tell(self, journal: Journal, shape: GPTConfig, setup: Setup, facts: dict[str, Any]) -> None:
        """The two lines, for the end of the run, and the row. Ranks: all.

        Args:
            shape: of the model; setup, facts: see start.py.
        """
        if not self._steps:
            return
        mine = statistics.median(self.times_ms) if self.times_ms else 0.0
        peak, ms = (
            max(gather_numbers(self.engine, value)) for value in (float(self.peak_bytes), mine)
        )
        if journal.folder is None:
            return
        from fastpar.predict import prediction  # many modules, which no step needs

        try:
            found = prediction.predict(shape, setup, facts)
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


def _costs(engine: Engine) -> dict[str, float | None]:
    """Times of this rank in ms and MB that it sent, in the newest step that is known."""
    report = engine.report
    names = ["step_ms", "compute_ms", "comm_ms", "exposed_ms"]
    names += ["offload_ms"] * (engine.shards.offload is not None)
    costs = {name: None if report is None else getattr(report, name) for name in names}
    return {**costs, "wire_mb": None if report is None else report.wire_bytes / 1e6}


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The values on the host, to be read after the event."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
