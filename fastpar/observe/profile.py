"""`fastpar profile`: runs a few steps of `fastpar train`, measures, profiles and judges them.

[Note: two times] The profiler slows down what it records, the host's part most of all. So steps run
twice: without it, to measure phases and waits; with it, to see what is inside them
(fitted()). On a GPU nothing is finished when the host is done with it: there the first run
gives the time of the step and the trace all the rest.

[Note: phases] A new phase begins when engine.on_phase is called: the trainer fetches a batch, calls
its model, has its loss, calls its optimizer. Backward ends when the next phase begins. A pipeline
stage's phase ends when the stage switches to its next operation: its wait for that operation
belongs to the next phase.

[Note: what bounds] A phase is bound by the kind that takes most of its time: matrix products
(compute), operations that read and write more than they compute (memory), waiting for other ranks
(communication), or time in which nothing runs because Python and dispatch are late (host). Fetching
a batch is always input. The whole step is bound by the largest of these sums. The fractions next to
the verdict rate the time: FLOPs of the model over the time of the products, and minimal bytes moved
over the time of the rest, both relative to a square product and a copy that were measured on this
machine just before.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import profiler

from fastpar._version import __version__
from fastpar.axes.step import Op, Setup, Workload
from fastpar.comm.mesh import Mesh, gather_objects, ranks_along
from fastpar.comm.ranks import available_cores
from fastpar.comm.recorder import (
    BACKWARD,
    COMPUTE,
    CONTROL,
    FORWARD,
    GATHER,
    HOST,
    INPUT,
    OPTIMIZER,
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
from fastpar.kernels.backend import WITH_CPP
from fastpar.models.gpt import GPT
from fastpar.observe.pictures import draw_timeline
from fastpar.observe.report import counted, percent, text_table
from fastpar.observe.trace import COMMUNICATION, KINDS, OpTime, TraceTimes, product_flops, times_of
from fastpar.predict.machine import Ceilings, measure_ceilings
from fastpar.predict.time import UPDATES, ops_of
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import check_at_least

# What bounds a step

# Names of step.Op that are limited by arithmetic.
PRODUCTS = ("matmul", "attention", "loss", "orthogonalize")
HOST_SHARE = 0.25  # share of a step from which a rule applies
EXPOSED_SHARE = 0.1
INPUT_SHARE = 0.05
UPDATE_SHARE = 0.2
POOR = 0.5  # of a ceiling
SMALL_ROWS = 2048  # of a product: with fewer, a GPU's launch dominates
SMALL_BUCKET_MB = 1.0


class Phase(NamedTuple):
    """A phase of a step on one rank: times in ms, and the work of the model in it.

    flops: of products; bytes: of the rest.
    """

    name: str
    compute_ms: float = 0.0
    memory_ms: float = 0.0
    communication_ms: float = 0.0
    host_ms: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Kind -> ms."""
        return dict(zip(KINDS, self[1:5]))

    @property
    def ms(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The kind that takes most of its time; [Note: what bounds]."""
        parts = self.parts
        return INPUT if self.name == INPUT else max(parts, key=lambda kind: parts[kind])


@dataclass(frozen=True)
class Situation:
    """Facts about the run other than its phases.

    waited_ms: REDUCE, GATHER, TP, PP, CONTROL -> ms of a step; moving_ms: time with any exchange
        under way. bucket_mb: of gradients, the mean over the buckets.
    forced_backend: FASTPAR_BACKEND, "" for auto, "none" without the compiled module.
    idle_cores: cores of this host that no rank may use.
    """

    compiled: bool = False
    deterministic: bool = False
    forced_backend: str = ""
    idle_cores: int = 0
    n_buckets: int = 1
    bucket_mb: float = 0.0
    sent_bytes: float = 0.0
    moving_ms: float = 0.0
    waited_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """A measured step."""

    phases: Sequence[Phase]
    ceilings: Ceilings
    workload: Workload
    setup: Setup
    situation: Situation

    @property
    def step_ms(self) -> float:
        return sum(phase.ms for phase in self.phases)

    @property
    def shares(self) -> dict[str, float]:
        """compute, memory, communication, host, input -> fraction of the step."""
        ms_of = dict.fromkeys((*KINDS, INPUT), 0.0)
        for phase in self.phases:
            for kind, ms in phase.parts.items():
                ms_of[INPUT if phase.name == INPUT else kind] += ms
        return {kind: ms / max(self.step_ms, 1e-9) for kind, ms in ms_of.items()}

    @property
    def bound(self) -> str:
        """What bounds the step."""
        shares = self.shares
        return max(shares, key=lambda kind: shares[kind])

    def phase(self, name: str) -> Phase:
        """The phase of this name; empty if there was none."""
        return next((p for p in self.phases if p.name == name), Phase(name))

    def of_matmul(self, phases: Iterable[Phase]) -> float | None:
        """Fraction of the measured product's rate that the products of these phases reach."""
        flops_per_ms = _rate((p.flops, p.compute_ms) for p in phases)
        return flops_per_ms and flops_per_ms / 1e9 / self.ceilings.matmul_tflop_per_s

    def of_copy(self, phases: Iterable[Phase]) -> float | None:
        """Fraction of the measured copy's rate that the rest of these phases reaches."""
        bytes_per_ms = _rate((p.bytes, p.memory_ms) for p in phases)
        return bytes_per_ms and bytes_per_ms / 1e6 / self.ceilings.copy_gb_per_s


def _rate(parts: Iterable[tuple[float, float]]) -> float | None:
    """Work per ms of the (work, ms) parts that have both; None: none has."""
    measured = [part for part in parts if all(part)]
    return sum(work for work, _ in measured) / sum(ms for _, ms in measured) if measured else None


def work_of(ops: Iterable[Op]) -> dict[str, dict[str, Any]]:
    """Phase -> flops of products and bytes of the rest, in a step of these operations."""
    sums = {phase: {"flops": 0.0, "bytes": 0.0} for phase in (FORWARD, BACKWARD, OPTIMIZER)}
    for op in ops:
        phase = FORWARD if op.direction == "forward" else BACKWARD
        work = sums[OPTIMIZER if op.name in UPDATES else phase]
        if op.name in PRODUCTS:
            work["flops"] += op.flops * op.count
        else:
            work["bytes"] += op.bytes * op.count
    return sums


def fitted(phase: Phase, ms: float, waited_ms: float) -> Phase:
    """The phase of profiled steps, scaled to its duration without the profiler.

    The profiler lengthens the host's part, so that part shrinks first, then operations do. If steps
    were shorter with the profiler, another program ran meanwhile: then all parts grow alike.

    Args:
        ms, waited_ms: of steps without the profiler.
    """
    waited_ms = min(ms, waited_ms)
    left = ms - waited_ms
    operations = phase.compute_ms + phase.memory_ms
    total = operations + phase.host_ms
    if total <= left:
        scale = left / total if total else 0.0
        host_ms = phase.host_ms * scale if total else left
    else:
        scale = min(1.0, left / operations) if operations else 0.0
        host_ms = left - operations * scale
    return phase._replace(
        compute_ms=phase.compute_ms * scale,
        memory_ms=phase.memory_ms * scale,
        communication_ms=waited_ms,
        host_ms=max(0.0, host_ms),
    )


def table(measured: Measured) -> list[str]:
    """A line per phase and one for the step."""
    head = ("phase", "ms", "share", "compute", "memory", "comm.", "host", "of matmul", "of copy")
    rows = [[*head, "bound by"]]
    total = max(measured.step_ms, 1e-9)
    sums = Phase("step", *(sum(p[i] for p in measured.phases) for i in range(1, 7)))  # type: ignore[misc]
    for phase in (*measured.phases, sums):
        part = [p for p in measured.phases if phase in (p, sums)]
        parts = (phase.ms / total, *(ms / max(phase.ms, 1e-9) for ms in phase.parts.values()))
        shares = (*parts, measured.of_matmul(part), measured.of_copy(part))
        bound = measured.bound if phase is sums else phase.bound
        rows.append([phase.name, f"{phase.ms:.2f}", *map(percent, shares), bound])
    return text_table(rows, *[10] * len(head))


def verdict(measured: Measured) -> list[str]:
    """What bounds the step, how fast products and the rest are, what communication is hidden."""
    shares, ceilings, bound = measured.shares, measured.ceilings, measured.bound
    others = ", ".join(f"{kind} {percent(part)}" for kind, part in shares.items() if kind != bound)
    share, step_ms = percent(shares[bound]), measured.step_ms
    lines = [f"The step is {bound}-bound: {share} of {step_ms:.1f} ms; {others}."]
    product, rest = measured.of_matmul(measured.phases), measured.of_copy(measured.phases)
    if product is not None:
        best = f"{ceilings.matmul} product's {ceilings.matmul_tflop_per_s:.3g} TFLOP/s a rank"
        lines.append(f"Matrix products reach {percent(product)} of the {best}.")
    if rest is not None:
        best = f"the rate of a plain copy, {ceilings.copy_gb_per_s:.3g} GB/s a rank"
        lines.append(f"The other operations reach {percent(rest)} of {best}.")
    moving_ms = measured.situation.moving_ms
    if measured.setup.world_size > 1 and moving_ms:
        hidden = percent(max(0.0, 1 - shares[COMMUNICATION] * step_ms / moving_ms))
        gb_per_s = measured.situation.sent_bytes / 1e6 / moving_ms
        sent = f"{gb_per_s:.3g} GB/s sent a rank over {measured.setup.transport}"
        lines.append(
            f"Communication is under way for {moving_ms:.1f} ms ({sent}), {hidden} of it overlaps "
            "computation."
        )
    return lines


# What to change


def advise(measured: Measured) -> list[str]:
    """What to change, the most promising first; each names a flag."""
    advice = [text for rule in RULES for text in rule(measured)]
    if advice:
        return advice
    reached = percent(measured.of_matmul(measured.phases))
    products = f", products at {reached} of the ceiling" if reached else ""
    return [f"No rule applies: {measured.bound}-bound{products}."]


def _kernels(m: Measured) -> Iterator[str]:
    forced = m.situation.forced_backend
    if forced == "none":
        yield f"The compiled module is missing, so torch computes everything: {WITH_CPP}."
    elif forced:
        free = "unset it to run the fastest kernel of each op (`fastpar info` lists them)"
        yield f"FASTPAR_BACKEND={forced} forces a backend: {free}."
    if m.setup.device_type == "cuda" and m.setup.dtype == "fp32":
        yield "Weights are fp32 on a GPU: --dtype bf16 makes products several times as fast."


def _host(m: Measured) -> Iterator[str]:
    share, idle = m.shares[INPUT], m.situation.idle_cores
    if share >= INPUT_SHARE:
        why = f"Fetching batches takes {percent(share)} of the step"
        yield (
            f"{why}: keep the token cache on a local disk (XDG_CACHE_HOME), or raise "
            "--micro-batch-size for fewer batches."
        )
    yield from _small_operations(m)
    waits = m.shares[HOST] >= HOST_SHARE and m.setup.device_type == "cuda"
    if waits and not m.situation.compiled:
        yield (
            "The GPU waits for the host, here without CUDA graphs: if the first lines of the run "
            "name graphs, it does not wait in training; "
            "or --compile fuses small operations, after a slow start."
        )
    if idle and m.shares[COMPUTE] >= 0.5:
        use = "drop --threads, or raise --threads or --nproc"
        yield f"{idle} cores of this machine are unused: {use}."


def _small_operations(m: Measured) -> Iterator[str]:
    setup, reached = m.setup, m.of_matmul(m.phases)
    rows, batch_size = setup.micro_batch_size * m.workload.seq_len, m.workload.batch_size
    if m.shares[HOST] >= HOST_SHARE:
        why = f"The host takes {percent(m.shares[HOST])} of the step"
    elif m.bound == COMPUTE and rows < SMALL_ROWS and reached is not None and reached < POOR:
        why = f"Products of {rows} rows reach {percent(reached)} of the ceiling"
    else:
        return
    if setup.grad_accum_steps > 1:
        even = setup.grad_accum_steps % 2 == 0
        larger = 2 * setup.micro_batch_size if even else batch_size // setup.dp
        more = f"--micro-batch-size {larger}"
        yield f"{why}: {more} does the same work in fewer, larger operations."
    else:
        more = f"a larger --batch-size (now {batch_size})"
        yield f"{why}: {more} gives every operation more rows for the same overhead."


def _exchanges(m: Measured) -> Iterator[str]:
    seen, waited = m.situation, m.situation.waited_ms
    communicates = m.shares[COMMUNICATION] >= EXPOSED_SHARE
    # Shared memory needs the compiled module, which the first rule names.
    if communicates and m.setup.transport == "gloo" and seen.forced_backend != "none":
        yield "Ranks on one host communicate over gloo: --transport auto uses shared memory."
    longest = max(waited, key=lambda kind: waited[kind], default=None)
    if longest is not None and waited[longest] >= EXPOSED_SHARE * m.step_ms:
        yield from (f"{waited[longest]:.1f} ms a step wait for {t}" for t in _WAITS[longest](m))
    if communicates and seen.deterministic:
        why = "Sums in a fixed order wait for all ranks"
        yield f"{why}: drop --deterministic if bits may vary."


def _control_waits(m: Measured) -> Iterator[str]:
    why = "other programs use its cores, or ranks have more --threads than cores"
    yield f"the slowest rank: {why}."


def _tp_waits(m: Measured) -> Iterator[str]:
    tp, cp = m.setup.tp, m.setup.mesh.cp
    heads = m.workload.shape.heads_of_rank(tp) if m.setup.by_keys else 0
    if cp > 1 and heads and heads % cp == 0:
        yield f"context-parallel exchanges: --cp-method heads sends {4 / (3 * cp):.0%} as much."
    elif cp > 1:
        fewer = f"--cp {cp // 2} with --activation-checkpointing full"
        yield f"context-parallel exchanges: {fewer} needs as little memory with fewer exchanges."
    if tp > 1:
        fewer = f"--tp {tp // 2} with a higher --zero stage"
        yield f"tensor-parallel exchanges: {fewer} splits the memory with fewer exchanges."


def _gather_waits(m: Measured) -> Iterator[str]:
    setup = m.setup
    if setup.parallel.zero_stage == 3:
        whole = m.workload.n_parameters / setup.tp * setup.weight_bytes * (1 - 1 / setup.data) / 1e6
        yield f"gathered weights: --zero 2 keeps them whole, for {whole:,.0f} MB more a rank."
    elif setup.parallel.zero_stage:
        yield (
            "updated weights: --zero 0 keeps the whole optimizer state on every rank; or a larger "
            "--batch-size gives more computation to overlap with."
        )


def _reduce_waits(m: Measured) -> Iterator[str]:
    setup, n_buckets, mean_mb = m.setup, m.situation.n_buckets, m.situation.bucket_mb
    if setup.grad_accum_steps > 1 and setup.accumulate == "shard":
        often = f"sent {setup.grad_accum_steps} times a step"
        yield f"reduced gradients, {often}: --accumulate full sends their sum once."
    elif setup.dtype != "fp32" and setup.reduce_dtype == "fp32":
        yield f"reduced gradients: --reduce-dtype {setup.dtype} halves the bytes."
    elif n_buckets <= 2:
        smaller = f"--bucket-mb {max(0.1, mean_mb / 4):.2g}"
        yield (
            f"reduced gradients in {n_buckets} buckets, the first of which is sent late: {smaller}."
        )
    elif mean_mb < SMALL_BUCKET_MB and n_buckets > 8:
        buckets, larger = f"{n_buckets} buckets of {mean_mb:.2g} MB", f"{4 * mean_mb:.2g}"
        yield f"reduced gradients in {buckets}: --bucket-mb {larger}."
    else:
        more = "a larger --batch-size per step with --grad-accum-steps"
        yield f"reduced gradients: {more} sends them less often."


def _stage_waits(m: Measured) -> Iterator[str]:
    setup, rows = m.setup, m.setup.micro_batch_size
    if setup.grad_accum_steps < 4 * setup.mesh.pp and rows > 1:
        change = f"--micro-batch-size {rows // 2} gives more, smaller micro-batches"
    elif setup.parallel.pipeline.schedule != "interleaved":
        change = "--schedule interleaved runs two stages per rank and waits less"
    else:
        change = "a larger --batch-size gives more micro-batches; --pp-split moves layers"
    yield f"other stages of the pipeline: {change}."


# What a rank waits for -> the end of "... ms a step wait for ".
_WAITS: dict[str, Callable[[Measured], Iterator[str]]] = {
    **{CONTROL: _control_waits, TP: _tp_waits, PP: _stage_waits},
    **{GATHER: _gather_waits, REDUCE: _reduce_waits},
}


def _update(m: Measured) -> Iterator[str]:
    setup, share = m.setup, m.phase(OPTIMIZER).ms / max(m.step_ms, 1e-9)
    if share >= UPDATE_SHARE:
        change = "a larger --batch-size with --grad-accum-steps updates less often"
        optim = setup.optim
        if setup.data > 1 and setup.parallel.zero_stage == 0 and optim.optimizer == "adamw":
            change = f"--zero 1 shards the update over {setup.data} ranks"
        elif (optim.moment_dtype, optim.optimizer, setup.device_type) == ("fp32", "adamw", "cuda"):
            change = "--moment-dtype bf16 halves the bytes of the moments"
        yield f"The optimizer takes {percent(share)} of the step: {change}."
    mode = setup.recompute.activation_checkpointing
    if mode != "none":
        less = f"{'selective' if mode == 'full' else 'none'} recomputes less, if memory allows"
        yield f"Blocks are recomputed in backward (--activation-checkpointing {mode}): {less}."


RULES: tuple[Callable[[Measured], Iterator[str]], ...] = (_kernels, _host, _exchanges, _update)


# A run

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
