"""`fastpar profile`: runs a few steps of `fastpar train`, measures, profiles and judges them.

[Note: two times] The profiler slows down what it records, the host's part most of all. So steps run
twice: without it, to measure phases and waits; with it, to see what is inside them
(verdict.fitted). On a GPU nothing is finished when the host is done with it: there the first run
gives the time of the step and the trace all the rest.

[Note: phases] A new phase begins when engine.on_phase is called: the trainer fetches a batch, calls
its model, has its loss, calls its optimizer. Backward ends when the next phase begins. A pipeline
stage's phase ends when the stage switches to its next operation: its wait for that operation
belongs to the next phase.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import profiler

from fastpar._version import __version__
from fastpar.axes.step import Op, Setup
from fastpar.comm.mesh import Mesh, gather_objects, ranks_along
from fastpar.comm.ranks import available_cores
from fastpar.comm.recorder import (
    COMPUTE,
    CONTROL,
    GATHER,
    HOST,
    INPUT,
    PP,
    REDUCE,
    TP,
    WAIT,
    Recorder,
    Span,
    busy_ms,
    in_turn,
    now_ms,
    window,
)
from fastpar.doctor.trial import synchronize
from fastpar.engine.engine import Engine
from fastpar.files.packages import import_package
from fastpar.files.runs import RUNS, is_taken
from fastpar.kernels import backend
from fastpar.models.gpt import GPT
from fastpar.observe.pictures import draw_timeline
from fastpar.observe.report import counted, percent, text_table
from fastpar.observe.trace import OpTime, TraceTimes, product_flops, times_of
from fastpar.observe.verdict import (
    PRODUCTS,
    Measured,
    Phase,
    Situation,
    advise,
    fitted,
    table,
    verdict,
    work_of,
)
from fastpar.predict.machine import measure_ceilings
from fastpar.predict.time import ops_of
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import check_at_least

WARM_UP = 2  # steps
CONTROL_BYTES = 4096  # below: an exchange of a few numbers, whose wait shows uneven ranks
TOP = 12  # operations that are shown
UNSTEADY = 1.5  # the longest step over the shortest
_COMPRESSED_FROM = 20 << 20  # bytes of a trace
_SHOWN_RANKS = 4
_AS_WORK = {"linear_cross_entropy": "loss", "adamw_step_": "optimizer"}  # names of step.Op


def parse_profile(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the remaining flags, which are those of `fastpar train`."""
    parser = argparse.ArgumentParser(
        "fastpar profile",
        add_help=False,
        allow_abbrev=False,
        description="Show where the time of a training step goes, and what to change. Takes all "
        "settings of `fastpar train` (see its --help), and:",
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="new folder for trace.json, timeline.png and profile.json; unset: the first unused of "
        f"{RUNS}/profile, {RUNS}/profile-2, ...",
    )
    options, left = parser.parse_known_args(arguments)
    if "-h" in left or "--help" in left:
        print(parser.format_help())
    check_at_least("profile", vars(options), {"steps": 1})
    return options, left


def prepare(options: argparse.Namespace, config: TrainConfig) -> TrainConfig:
    """The settings for the run of profile(); rank 0 chooses the folder, options.out.

    Raises:
        ValueError: --resume; a folder that is not new; settings that `fastpar train` refuses.
        ImportError: matplotlib is missing.
    """
    if config.run.resume or config.run.auto_resume:
        raise ValueError(
            "profile: expected a new run, got resume=True; drop --resume (nothing is saved here); "
            "use --init-from for the weights of a run"
        )
    import_package("matplotlib", "fastpar profile")
    if int(os.environ.get("RANK", "0")) == 0:
        names = itertools.chain(["profile"], (f"profile-{n}" for n in itertools.count(2)))
        free = (path for name in names if not (path := Path(RUNS, name)).exists())
        out = Path(options.out) if options.out is not None else next(free)
        if is_taken(out):
            raise ValueError(
                f"profile: expected a new or empty folder, got out={out}; choose another --out"
            )
        options.out = str(out)
    n_steps = max(config.run.max_steps, WARM_UP + 2 * options.steps + 1)
    # Replayed CUDA graphs have no phases that the host sees.
    return config.replace({"max_steps": n_steps, "out": None, "cuda_graphs": False})


class Trained(Protocol):
    """A run whose steps are profiled: the trainer of `fastpar train`."""

    config: TrainConfig
    mesh: Mesh
    model: GPT
    engine: Engine
    block_size: int
    setup: Setup

    def train_step(self) -> Any:
        """Runs one optimizer step; numbers() of the result waits for the device."""


def title_of(trainer: Trained) -> str:
    """One line: model, batch, ranks, device."""
    config, mesh = trainer.config, trainer.mesh
    size = Path(config.shape.init_from or config.shape.model).name
    device = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "CPU"
    return (
        f"{size}, context {trainer.block_size}, {trainer.setup.dtype}, micro-batch "
        f"{trainer.setup.micro_batch_size} x {trainer.setup.grad_accum_steps}, {mesh.world_size} "
        f"rank{'s' * (mesh.world_size > 1)} (tp {mesh.tp_size}), ZeRO-"
        f"{trainer.engine.stage.number}, {device}, {torch.get_num_threads()} threads per rank"
    )


def profile(trainer: Trained, options: argparse.Namespace) -> int:
    """Profiles on one rank; rank 0 writes and prints. Returns the exit status. Ranks: all."""
    mesh, out = trainer.mesh, Path(options.out or RUNS)
    if mesh.is_main:
        out.mkdir(parents=True, exist_ok=True)
        print(f"profile  {title_of(trainer)}", flush=True)
    report, steps = measure(trainer, options.steps, out if mesh.is_main else None)
    everyone = [steps]
    if mesh.world_size > 1:
        assert dist.group.WORLD is not None
        rows = [[astuple(span) for span in step] for step in steps]
        received = gather_objects(rows, dist.group.WORLD)
        everyone = [[[Span(*span) for span in step] for step in theirs] for theirs in received]
    if mesh.is_main:
        print("\n".join(["", *report.lines()]))
        on_gpu, piped = mesh.device.type == "cuda", trainer.engine.shards.stages is not None
        kind = "a profiled step" if on_gpu else "a step without the profiler"
        ranks = counted(len(everyone), "rank")
        lines = [report.about["run"], f"{kind}; {ranks}; {report.bound}-bound, see profile.json"]
        step, bubble = _median_step(steps), {}
        panels = {name: everyone[r][step] for name, r in _lanes(trainer, len(everyone)).items()}
        if piped:
            waits = [waited_for_stages(spans) for spans in panels.values()]
            bubble = {"bubble": sum(waits) / len(waits), "bubble_of_ranks": waits}
            lines.append(
                "Bubble: stages wait for messages of other stages for "
                f"{percent(sum(waits) / len(waits))} of the step (by rank: "
                f"{', '.join(map(percent, waits))})."
            )
            print(f"\n{lines[-1]}")
        shown = dict(list(panels.items())[: 1 if on_gpu and not piped else _SHOWN_RANKS])
        draw_timeline(shown, lines, out / "timeline.png")
        (out / "profile.json").write_text(json.dumps(report.as_json() | bubble, indent=1) + "\n")
        print(f"\n{out}: {', '.join(sorted(p.name for p in out.iterdir()))}", flush=True)
    mesh.close()
    return 0


def _lanes(trainer: Trained, n_ranks: int) -> dict[str, int]:
    """The drawn ranks: title -> rank. Of several pipelines the first one, by stages."""
    stages = trainer.engine.shards.stages
    if stages is None:
        return {f"rank {rank}": rank for rank in range(n_ranks)}
    lanes, schedule = {}, stages.schedule
    for position, rank in enumerate(ranks_along(trainer.mesh.sizes, ["pp"])[0]):
        stages_here = [str(schedule.stage_of(position, chunk)) for chunk in range(schedule.chunks)]
        lanes[f"rank {rank}, stage{'s' * (len(stages_here) > 1)} {', '.join(stages_here)}"] = rank
    return lanes


def waited_for_stages(spans: Sequence[Span]) -> float:
    """The share of a step in which a pipeline stage waited for a message of another."""
    end = max((s.end_ms for s in spans if s.row in (HOST, COMPUTE)), default=0.0)
    waits = [s for s in spans if s.row == WAIT]
    ms = busy_ms([s for s in waits if s.name == PP], [WAIT])
    of_gpu = (s for s in waits if s.name == "nccl")  # of any collective: its bar says of which
    ms += sum(busy_ms(window(spans, s.begin_ms, s.end_ms), [PP]) for s in of_gpu)
    return ms / end if end else 0.0


def _median_step(steps: Sequence[Sequence[Span]]) -> int:
    """The step that takes the median time."""
    ends = [max((s.end_ms for s in step), default=0.0) for step in steps]
    return sorted(range(len(steps)), key=lambda i: ends[i])[len(steps) // 2]


# Measuring and profiling steps


def measure(
    trainer: Trained, steps: int, out: Path | None
) -> tuple[Report, Sequence[Sequence[Span]]]:
    """Measures and profiles steps on this rank; returns the report and the spans to draw.

    Args:
        out: folder for the trace; None: the trace is read and deleted.
    Ranks: all.
    """
    on_gpu, marks = trainer.mesh.device.type == "cuda", Recorder()
    ceilings = measure_ceilings(trainer.mesh.device.type)
    if on_gpu:
        torch.cuda.empty_cache()
    _watch(trainer, marks)
    trainer.engine.on_phase = marks.phase
    _steps(trainer, marks, WARM_UP)
    marks.on = True
    step_ms, edges = _steps(trainer, marks, steps)
    marks.on, spans = False, in_turn(marks.spans)
    marks.in_trace = True
    activity = profiler.ProfilerActivity
    activities = [activity.CPU] + [activity.CUDA] * on_gpu
    with profiler.profile(activities=activities):  # the profiler's first start is slow
        _steps(trainer, marks, 1)
    with profiler.profile(activities=activities, record_shapes=True) as profiled:
        profiled_ms, _ = _steps(trainer, marks, steps)
    trace = _trace(profiled, out)
    shown = [window(spans, begin, end) for begin, end in pairwise(edges)]
    phases = _fit_to_step(trace, step_ms) if on_gpu else _fit_to_spans(trace, shown)
    workload = trainer.setup.workload(trainer.model.config)
    work = ops_of(workload, trainer.setup)
    if trainer.engine.shards.stages is None:  # else only an average rank's work is known
        needed = work_of(work)
        phases = [p._replace(**needed.get(p.name, {})) for p in phases]
    settings = trainer.config.settings()
    about = {
        "run": title_of(trainer),
        "fastpar": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "settings": {k: v for k, v in settings.items() if k not in ("out", "max_steps")},
    }
    report = Report(
        phases,
        ceilings,
        workload,
        trainer.setup,
        _situation(trainer, spans, steps, trace),
        trace.ops,
        work,
        profiled_ms if on_gpu else trace.step_ms,
        [end - begin for begin, end in pairwise(edges)],
        about,
    )
    return report, [trace.spans] if on_gpu else shown


def _watch(trainer: Trained, marks: Recorder) -> None:
    """Records every exchange of the engine and of split layers."""
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
    """(ms per step, begin of each and end of the last) of `count` steps as the loop runs them."""
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


def _trace(profiled: Any, out: Path | None) -> TraceTimes:
    """Writes the trace, compressed if it is large, and reads the times from it."""
    with tempfile.TemporaryDirectory() as scratch:
        path = (out or Path(scratch)) / "trace.json"
        profiled.export_chrome_trace(str(path))
        times = times_of(json.loads(path.read_text())["traceEvents"])
        if out is not None and path.stat().st_size > _COMPRESSED_FROM:
            with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", 5) as packed:
                shutil.copyfileobj(plain, packed)
            path.unlink()
    return times


def _fit_to_step(trace: TraceTimes, step_ms: float) -> list[Phase]:
    """A GPU's phases: the host's parts shrink until the sum is a step without the profiler."""
    idle = sum(kinds[HOST] for kinds in trace.parts.values())
    busy = trace.step_ms - idle
    waits = max(0.0, step_ms - busy) / idle if idle else 0.0
    works = min(1.0, step_ms / busy) if busy else 1.0
    return [
        Phase(name, *(ms * (waits if kind == HOST else works) for kind, ms in kinds.items()))
        for name, kinds in trace.parts.items()
    ]


def _fit_to_spans(trace: TraceTimes, steps: Sequence[Sequence[Span]]) -> list[Phase]:
    """A CPU's phases, with the duration and the waits for other ranks of the median step."""
    phases = []
    for name, kinds in trace.parts.items():
        of_steps = [[s for s in step if (s.row, s.name) == (COMPUTE, name)] for step in steps]
        wall_ms = [sum(s.end_ms - s.begin_ms for s in spans) for spans in of_steps]
        waited_ms = [
            sum(busy_ms(window(step, s.begin_ms, s.end_ms), [WAIT]) for s in spans)
            for step, spans in zip(steps, of_steps)
        ]
        medians = statistics.median(wall_ms), statistics.median(waited_ms)
        phases.append(fitted(Phase(name, *kinds.values()), *medians))
    return phases


def _situation(trainer: Trained, spans: Sequence[Span], steps: int, trace: TraceTimes) -> Situation:
    config, engine = trainer.config, trainer.engine
    waited = dict.fromkeys((REDUCE, GATHER, TP, PP, CONTROL), 0.0)
    on_gpu = trainer.mesh.device.type == "cuda"
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
    """Bytes that this rank sends inside layers, along tp, cp and ep: all-to-all as pairwise
    sends, the others as rings."""
    return sum(
        (2 if s.name == "all_reduce" else 1) * (1 - 1 / s.ranks) * s.size_bytes
        for s in spans
        if s.row == TP
    )


# The report


@dataclass(frozen=True)
class Report(Measured):
    """All results.

    Attributes:
        profiled_step_ms: a step under the profiler, longer than one without.
        steps_ms: of the steps without it, as the host saw them.
        about: model, ranks, machine: the head of the report.
    """

    ops: Sequence[OpTime]
    work: Sequence[Op]
    profiled_step_ms: float
    steps_ms: Sequence[float]
    about: dict[str, Any]

    def lines(self) -> list[str]:
        """The report for the terminal."""
        longer = self.profiled_step_ms / max(self.step_ms, 1e-9) - 1
        lines = [
            *table(self),
            "",
            *verdict(self),
            f"Shares within a phase come from profiled steps ({self.profiled_step_ms:.1f} ms each, "
            f"{round(100 * longer):+d} %); times come from steps without the profiler.",
        ]
        low, high = min(self.steps_ms), max(self.steps_ms)
        if high > UNSTEADY * low:  # another program ran meanwhile
            lines.append(
                f"Steps took {low:.1f} to {high:.1f} ms: another program uses this machine; "
                "profile again when it is idle."
            )
        lines += ["", *self._top_table(), "", "What to change:"]
        return lines + [f"  {n}. {text}" for n, text in enumerate(advise(self), 1)]

    def _top_table(self) -> list[str]:
        """The longest operations: time in a step, share of it, calls, rate."""
        rows = [["top operations", "phase", "ms", "share", "calls", "rate"]]
        for op in self.ops[:TOP]:
            sizes = " ".join("x".join(map(str, dims)) for dims in op.shape[:2])
            name = f"{op.name} {sizes}"
            name = name if len(name) <= 45 else f"{name[:43]}.."
            share = percent(op.ms / max(self.profiled_step_ms, 1e-9))
            cells = [f"{op.ms:.2f}", share, f"{op.calls:.0f}", self.rate_of(op)]
            rows.append([name, op.phase, *cells])
        return text_table(rows, 46, 10, 9, 7, 7)

    def rate_of(self, op: OpTime) -> str:
        """TFLOP/s or GB/s of an operation if its FLOPs or bytes are known; else empty.

        Products count by their own shapes, other operations by the work of all of that name.
        """
        if not op.ms:
            return ""
        flops = product_flops(op)
        if flops is not None:
            return f"{flops * op.calls / op.ms / 1e9:.3g} TFLOP/s"
        direction = "backward" if op.name.endswith("_bwd") else "forward"
        name = op.name.removesuffix("_bwd")
        name = _AS_WORK.get(name, name)
        same = [w for w in self.work if (w.name, w.key[2]) == (name, direction)]
        ms = sum(o.ms for o in self.ops if o.name == op.name)
        in_flops = name in PRODUCTS
        total = sum((w.flops if in_flops else w.bytes) * w.count for w in same)
        rate = f"{total / ms / 1e9:.3g} TFLOP/s" if in_flops else f"{total / ms / 1e6:.3g} GB/s"
        return rate if total else ""

    def as_json(self) -> dict[str, Any]:
        """The content of profile.json."""
        return {
            **self.about,
            "step_ms": self.step_ms,
            "profiled_step_ms": self.profiled_step_ms,
            "steps_ms": list(self.steps_ms),
            "bound": self.bound,
            "shares": self.shares,
            "ceilings": self.ceilings._asdict(),
            "phases": [
                {
                    **phase._asdict(),
                    "ms": phase.ms,
                    "bound": phase.bound,
                    "of_matmul": self.of_matmul([phase]),
                    "of_copy": self.of_copy([phase]),
                }
                for phase in self.phases
            ],
            "situation": {
                "batch_size": self.workload.batch_size,
                "block_size": self.workload.seq_len,
                "n_parameters": self.workload.n_parameters,
                **self.setup.in_effect(),
                **asdict(self.situation),
            },
            "verdict": verdict(self),
            "advice": advise(self),
            "ops": [{**op._asdict(), "rate": self.rate_of(op)} for op in self.ops[: 4 * TOP]],
        }
