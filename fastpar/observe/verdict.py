"""What bounds a training step, and which setting of `fastpar train` to change.

The input is the numbers of a measured step, the output is text.

[Note: what bounds] A phase is bound by the kind that takes most of its time: matrix products
(compute), operations that read and write more than they compute (memory), waiting for other ranks
(communication), or time in which nothing runs because Python and dispatch are late (host). Fetching
a batch is always input. The whole step is bound by the largest of these sums. The fractions next to
the verdict rate the time: FLOPs of the model over the time of the products, and minimal bytes moved
over the time of the rest, both relative to a square product and a copy that were measured on this
machine just before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastpar.axes.step import Op, Setup, Workload
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
)
from fastpar.kernels.backend import WITH_CPP
from fastpar.observe.report import percent, text_table
from fastpar.observe.trace import COMMUNICATION, KINDS
from fastpar.predict.machine import Ceilings
from fastpar.predict.time import UPDATES

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
