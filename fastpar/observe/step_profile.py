"""Steps of one rank, measured and profiled: phases, waits, operations.

[Note: two times] The profiler lengthens what it looks at, the host's part most of all. So the same
steps run twice: without it for how long phases and waits are, with it for what is in them
(verdict.fitted). On a GPU nothing ends when the host is through with it: there the first run gives
the step and the trace the rest.

[Note: phases] A step is cut where engine.on_phase is told of the next phase: the trainer fetches a
batch, calls its model, has its loss, calls its optimizer. Backward ends where the next of these
begins. The stage of a pipeline is cut where it turns to its next operation: what it waits for then
is a part of that.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from fastpar._version import __version__
from fastpar.axes.step import Setup
from fastpar.comm.host import available_cores
from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import (
    COMPUTE,
    CONTROL,
    GATHER,
    HOST,
    INPUT,
    PHASES,
    PP,
    REDUCE,
    TP,
    WAIT,
    Recorder,
    Span,
    busy_ms,
    now_ms,
    window,
)
from fastpar.doctor.trial import synchronize
from fastpar.engine.engine import Engine
from fastpar.kernels import backend
from fastpar.models.gpt import GPT
from fastpar.observe.profile_report import Report
from fastpar.observe.trace import TraceTimes, times_of
from fastpar.observe.verdict import Measured, Phase, Situation, fitted, work_of
from fastpar.predict.machine import measure_ceilings
from fastpar.predict.time import ops_of
from fastpar.settings.config import TrainConfig

WARM_UP = 2  # steps
CONTROL_BYTES = 4096  # exchanges of a few numbers tell of uneven ranks
_COMPRESSED_FROM = 20 << 20  # bytes of a trace


class Trained(Protocol):
    """A run whose steps are profiled: the trainer of `fastpar train`."""

    config: TrainConfig
    mesh: Mesh
    model: GPT
    engine: Engine
    block_size: int
    setup: Setup

    def train_step(self) -> Any:
        """One optimizer step; its numbers() wait for the device."""


def title_of(trainer: Trained) -> str:
    """One line: model, batch, ranks, device."""
    config, mesh = trainer.config, trainer.mesh
    size = Path(config.shape.init_from or config.shape.model).name
    device = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "CPU"
    return (
        f"{size}, context {trainer.block_size}, {trainer.setup.dtype}, micro-batch "
        f"{trainer.setup.micro_batch_size} * accumulation {trainer.setup.grad_accum_steps}, ranks "
        f"{mesh.world_size} (tp {mesh.tp_size}), stage {trainer.engine.stage.number}, {device}, "
        f"threads a rank {torch.get_num_threads()}"
    )


def measure(
    trainer: Trained, steps: int, out: Path | None
) -> tuple[Report, Sequence[Sequence[Span]]]:
    """What this rank found in measured and in profiled steps, and the spans of those to show.

    Args:
        out: where the trace goes; None: it is looked at and thrown away.
    Ranks: all.
    """
    device, marks = trainer.mesh.device.type, Recorder()
    ceilings = measure_ceilings(device)
    if device == "cuda":
        torch.cuda.empty_cache()
    _watch(trainer, marks)
    trainer.engine.on_phase = marks.phase
    _steps(trainer, marks, WARM_UP)
    marks.on = True
    step_ms, edges = _steps(trainer, marks, steps)
    marks.on, spans = False, list(marks.spans)
    marks.in_trace = True
    with profile(activities=_activities(device)):  # its own start is slow
        _steps(trainer, marks, 1)
    with profile(activities=_activities(device), record_shapes=True) as profiler:
        profiled_ms, _ = _steps(trainer, marks, steps)
    trace = _trace(profiler, out)
    shown = [window(spans, begin, end) for begin, end in pairwise(edges)]
    phases = _fit_to_step(trace, step_ms) if device == "cuda" else _fit_to_spans(trace, shown)
    setup = trainer.setup
    workload = setup.workload(trainer.model.config)
    work = ops_of(workload, setup)
    # What one stage of a pipeline has to do is not known here: that of a mean rank is.
    needed = work_of(work) if trainer.engine.shards.stages is None else {}
    phases = [
        p._replace(flops=needed[p.name][0], bytes=needed[p.name][1]) if p.name in needed else p
        for p in phases
    ]
    situation = _situation(trainer, spans, steps, trace)
    report = Report(
        Measured(phases, ceilings, workload, setup, situation),
        trace.ops,
        work,
        trace.step_ms if device == "cpu" else profiled_ms,
        [end - begin for begin, end in pairwise(edges)],
        _about(trainer),
    )
    return report, [trace.spans] if device == "cuda" else shown


def _watch(trainer: Trained, marks: Recorder) -> None:
    """Note every exchange of the engine and of layers that are split."""
    engine = trainer.engine
    split = {} if engine.declared is None else engine.declared.groups
    groups = engine.buckets[0].groups
    rows: dict[Any, str] = dict.fromkeys(
        (groups.reduce, groups.copies, engine.control_group), REDUCE
    )
    cp = trainer.model.cp
    rows |= {groups.gather: GATHER, cp.group if cp is not None else None: TP}
    rows |= dict.fromkeys(split.values(), TP)
    stages = engine.shards.stages
    if stages is not None:
        rows |= dict.fromkeys((*stages.links.values(), stages.pair), PP)
    for group, row in rows.items():
        if group is not None:
            marks.watch(group.exact, row)


def _steps(trainer: Trained, marks: Recorder, count: int) -> tuple[float, list[float]]:
    """(ms of a step, begin of each and end of the last) of so many steps as the loop does them."""
    device = trainer.mesh.device.type
    synchronize(device)
    edges, before = [], None
    for _ in range(count):
        edges.append(now_ms())
        marks.phase(INPUT)
        step = trainer.train_step()
        if before is not None or device == "cpu":
            (before or step).numbers()
        before = step if device == "cuda" else None
        marks.phase("")
    if before is not None:
        before.numbers()
    synchronize(device)
    edges.append(now_ms())
    return (edges[-1] - edges[0]) / count, edges


def _activities(device: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")


def _trace(profiler: Any, out: Path | None) -> TraceTimes:
    """Writes the trace, compressed where it is large, and reads the times from it."""
    with tempfile.TemporaryDirectory() as scratch:
        path = (out or Path(scratch)) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = times_of(json.loads(path.read_text())["traceEvents"])
        if out is not None and path.stat().st_size > _COMPRESSED_FROM:
            with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", 5) as packed:
                shutil.copyfileobj(plain, packed)
            path.unlink()
    return found


def _phase_of(trace: TraceTimes, name: str) -> Phase:
    return Phase(name, *trace.parts[name].values())


def _fit_to_step(trace: TraceTimes, step_ms: float) -> list[Phase]:
    """A GPU's phases: the host's parts shrink until they add up to a step without the profiler."""
    phases = [_phase_of(trace, name) for name in PHASES]
    idle = sum(p.host_ms for p in phases)
    busy = trace.step_ms - idle
    waits = max(0.0, step_ms - busy) / idle if idle else 0.0
    works = min(1.0, step_ms / busy) if busy else 1.0
    return [
        Phase(p.name, *(ms * (waits if kind == HOST else works) for kind, ms in p.parts.items()))
        for p in phases
    ]


def _fit_to_spans(trace: TraceTimes, steps: Sequence[Sequence[Span]]) -> list[Phase]:
    """A CPU's phases: each as long, and with the waits, as in the median step."""

    def median(of: Callable[[Sequence[Span], str], float], name: str) -> float:
        return statistics.median(of(step, name) for step in steps)

    return [
        fitted(_phase_of(trace, name), median(_wall_ms, name), median(_waited_ms, name))
        for name in PHASES
    ]


def _wall_ms(step: Sequence[Span], name: str) -> float:
    return sum(s.end_ms - s.begin_ms for s in step if s.row == COMPUTE and s.name == name)


def _waited_ms(step: Sequence[Span], name: str) -> float:
    """In a phase, for other ranks."""
    return sum(
        busy_ms(window(step, s.begin_ms, s.end_ms), [WAIT])
        for s in step
        if s.row == COMPUTE and s.name == name
    )


def _situation(trainer: Trained, spans: Sequence[Span], steps: int, trace: TraceTimes) -> Situation:
    config, mesh, engine = trainer.config, trainer.mesh, trainer.engine
    waited = dict.fromkeys((REDUCE, GATHER, TP, PP, CONTROL), 0.0)
    on_gpu = mesh.device.type == "cuda"
    if on_gpu:
        moving_ms = busy_ms(trace.spans, [REDUCE, GATHER])
        waited[GATHER if engine.stage.number == 3 else REDUCE] = busy_ms(trace.spans, [WAIT])
    else:
        moving_ms = busy_ms(spans, [REDUCE, GATHER, TP]) / steps
        for span in spans:
            if span.row == WAIT:
                small = span.name != PP and 0 < span.size_bytes < CONTROL_BYTES
                kind = CONTROL if small else span.name
                waited[kind] += (span.end_ms - span.begin_ms) / steps
    sizes = [b.spec.numel * b.grad_dtype.itemsize / 1e6 for b in engine.buckets]
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    idle = available_cores() - ranks_here * torch.get_num_threads()
    sent = engine.report.wire_bytes if engine.report is not None else 0
    return Situation(
        compiled=config.system.compile,
        deterministic=config.parallel.deterministic,
        forced_backend=backend.forced(),
        idle_cores=0 if on_gpu else max(0, idle),
        n_buckets=len(sizes),
        bucket_mb=statistics.mean(sizes),
        sent_bytes=sent + layer_bytes(spans) / steps,
        moving_ms=moving_ms,
        waited_ms=waited,
    )


def layer_bytes(spans: Sequence[Span]) -> float:
    """Sent by this rank in exchanges inside of layers, along tp, cp and ep, as rings and, all to
    all, pairs send them."""
    return sum(
        (2 if s.name == "all_reduce" else 1) * (1 - 1 / s.ranks) * s.size_bytes
        for s in spans
        if s.row == TP
    )


def _about(trainer: Trained) -> dict[str, Any]:
    settings = {k: v for k, v in trainer.config.settings().items() if k not in ("out", "max_steps")}
    return {
        "run": title_of(trainer),
        "fastpar": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "settings": settings,
    }
