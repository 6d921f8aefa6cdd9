"""What bounds a training step, and which setting to change: numbers in, words out.

[Note: what bounds] A phase is bound by what most of its time is: products of matrices (compute),
operations that read and write more than they compute (memory), waits for other ranks
(communication), or the time in which none of these runs because Python and dispatch have not come
that far (host). Fetching a batch is the input, whatever it does. The whole step is bound by the
largest of these sums. The fractions beside the verdict say how good the time is: FLOPs of the model
over the time of the products, bytes that must move at least over the time of the rest, both against
what this machine reached in a copy and in a square product a moment before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastpar.comm.recorder import COMPUTE, CONTROL, GATHER, HOST, REDUCE, TP
from fastpar.cost.operations import Op
from fastpar.kernels.backend import WITH_CPP
from fastpar.measure.ceilings import Ceilings
from fastpar.profile.trace import BACKWARD, COMMUNICATION, FORWARD, INPUT, MEMORY, OPTIMIZER

PRODUCTS = ("matmul", "attention", "loss")  # of work.Op: limited by arithmetic
HOST_SHARE = 0.25  # of a step: shares from which a rule speaks
EXPOSED_SHARE = 0.1
INPUT_SHARE = 0.05
UPDATE_SHARE = 0.2
POOR = 0.5  # of a ceiling
SMALL_ROWS = 2048  # of a product: below, a GPU's is launched in vain
SMALL_BUCKET_MB = 1.0


class Phase(NamedTuple):
    """Of a step on one rank: times in ms, and what the model must do in it.

    flops: of products; bytes: of all the rest.
    """

    name: str
    compute_ms: float = 0.0
    memory_ms: float = 0.0
    communication_ms: float = 0.0
    host_ms: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def ms(self) -> float:
        return self.compute_ms + self.memory_ms + self.communication_ms + self.host_ms

    @property
    def parts(self) -> dict[str, float]:
        """Kind -> ms."""
        return {
            COMPUTE: self.compute_ms,
            MEMORY: self.memory_ms,
            COMMUNICATION: self.communication_ms,
            HOST: self.host_ms,
        }

    @property
    def bound(self) -> str:
        """See [Note: what bounds]."""
        parts = self.parts
        return INPUT if self.name == INPUT else max(parts, key=lambda kind: parts[kind])


@dataclass(frozen=True)
class Situation:
    """What a rule knows of the run.

    waited_ms: REDUCE, GATHER, TP, CONTROL -> ms of a step; moving_ms: in which any exchange was
        under way.
    forced_backend: FASTPAR_BACKEND, "" for auto, "none" without the compiled module.
    idle_cores: of this host, that no rank may use.
    """

    device: str = "cpu"
    world_size: int = 1
    tp: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    batch_size: int = 1
    block_size: int = 1024
    dtype: str = "fp32"
    grad_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    accumulate: str = "full"
    optimizer: str = "adamw"
    moment_dtype: str = "fp32"
    activation_checkpointing: str = "none"
    transport: str = "none"
    compiled: bool = False
    deterministic: bool = False
    forced_backend: str = ""
    idle_cores: int = 0
    n_buckets: int = 1
    bucket_mb: float = 0.0
    n_parameters: int = 0
    sent_bytes: float = 0.0
    moving_ms: float = 0.0
    waited_ms: dict[str, float] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        return self.world_size // self.tp

    @property
    def rows(self) -> int:
        """Of the products: tokens of a micro-batch."""
        return self.micro_batch_size * self.block_size


@dataclass(frozen=True)
class Measured:
    """A step as it was measured."""

    phases: Sequence[Phase]
    ceilings: Ceilings
    situation: Situation

    @property
    def step_ms(self) -> float:
        return sum(phase.ms for phase in self.phases)

    @property
    def shares(self) -> dict[str, float]:
        """compute, memory, communication, host, input -> fraction of the step."""
        found = dict.fromkeys((COMPUTE, MEMORY, COMMUNICATION, HOST, INPUT), 0.0)
        for phase in self.phases:
            for kind, ms in phase.parts.items():
                found[INPUT if phase.name == INPUT else kind] += ms
        return {kind: ms / max(self.step_ms, 1e-9) for kind, ms in found.items()}

    @property
    def bound(self) -> str:
        """What bounds the step."""
        shares = self.shares
        return max(shares, key=lambda kind: shares[kind])

    def phase(self, name: str) -> Phase:
        """The phase of this name; empty if there was none."""
        return next((p for p in self.phases if p.name == name), Phase(name))

    def of_matmul(self, phases: Iterable[Phase]) -> float | None:
        """Fraction of the measured product's rate that the products of these phases reached."""
        found = [p for p in phases if p.flops and p.compute_ms]
        if not found:
            return None
        rate = sum(p.flops for p in found) / sum(p.compute_ms for p in found) / 1e9
        return rate / self.ceilings.matmul_tflop_per_s

    def of_copy(self, phases: Iterable[Phase]) -> float | None:
        """Fraction of the measured copy's rate that the rest of these phases reached."""
        found = [p for p in phases if p.bytes and p.memory_ms]
        if not found:
            return None
        rate = sum(p.bytes for p in found) / sum(p.memory_ms for p in found) / 1e6
        return rate / self.ceilings.copy_gb_per_s


def work_of(ops: Iterable[Op]) -> dict[str, tuple[float, float]]:
    """Phase -> (FLOPs of products, bytes of the rest) of a step, of work.ops_of."""
    found = {FORWARD: (0.0, 0.0), BACKWARD: (0.0, 0.0), OPTIMIZER: (0.0, 0.0)}
    for op in ops:
        phase = FORWARD if op.direction == "forward" else BACKWARD
        phase = OPTIMIZER if op.name == "optimizer" else phase
        flops, moved = found[phase]
        if op.name in PRODUCTS:
            flops += op.flops * op.count
        else:
            moved += op.bytes * op.count
        found[phase] = flops, moved
    return found


def fitted(phase: Phase, ms: float, waited_ms: float) -> Phase:
    """The phase of profiled steps, as long as it takes without the profiler.

    The profiler lengthens the host's part, so that one gives way; then operations do. Where steps
    with it were the shorter ones, something else ran meanwhile: then all parts grow alike.

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


def percent(fraction: float | None) -> str:
    """0.237 -> 24 %."""
    return "" if fraction is None else f"{100 * fraction:.0f} %"


def table(measured: Measured) -> list[str]:
    """A line for each phase and one for the step."""
    head = ("phase", "ms", "share", "compute", "memory", "comm.", "host", "of matmul", "of copy")
    lines = [f"{head[0]:10}" + "".join(f"{cell:>10}" for cell in head[1:]) + "  bound by"]
    total = max(measured.step_ms, 1e-9)
    sums = Phase("step", *(sum(p[i] for p in measured.phases) for i in range(1, 7)))  # type: ignore[misc]
    for phase in (*measured.phases, sums):
        part = [p for p in measured.phases if phase in (p, sums)]
        cells = [f"{phase.ms:.2f}", percent(phase.ms / total)]
        cells += [percent(ms / max(phase.ms, 1e-9)) for ms in phase.parts.values()]
        cells += [percent(measured.of_matmul(part)), percent(measured.of_copy(part))]
        bound = measured.bound if phase is sums else phase.bound
        lines.append(f"{phase.name:10}" + "".join(f"{cell:>10}" for cell in cells) + f"  {bound}")
    return lines


def verdict(measured: Measured) -> list[str]:
    """What bounds the step, what its products and the rest reach, what communication hides."""
    shares, ceilings, here = measured.shares, measured.ceilings, measured.situation
    bound = measured.bound
    lines = [
        f"The step is {bound}-bound: {percent(shares[bound])} of {measured.step_ms:.1f} ms; "
        + ", ".join(f"{kind} {percent(share)}" for kind, share in shares.items() if kind != bound)
        + "."
    ]
    product, rest = measured.of_matmul(measured.phases), measured.of_copy(measured.phases)
    if product is not None:
        lines.append(
            f"Products of matrices reach {percent(product)} of the {ceilings.matmul} product's "
            f"{ceilings.matmul_tflop_per_s:.3g} TFLOP/s a rank."
        )
    if rest is not None:
        lines.append(
            f"The other operations move {percent(rest)} of what a copy moves, "
            f"{ceilings.copy_gb_per_s:.3g} GB/s a rank."
        )
    if here.world_size > 1 and here.moving_ms:
        exposed = shares[COMMUNICATION] * measured.step_ms
        hidden = max(0.0, 1 - exposed / here.moving_ms)
        lines.append(
            f"Exchanges are under way for {here.moving_ms:.1f} ms "
            f"({here.sent_bytes / 1e6 / here.moving_ms:.3g} GB/s sent a rank over "
            f"{here.transport}), {percent(hidden)} of it behind computation."
        )
    return lines


Rule = Callable[[Measured], str | None]


def advise(measured: Measured) -> list[str]:
    """What to change, the most promising first; each names a flag."""
    found = [text for rule in RULES if (text := rule(measured)) is not None]
    if not found:
        reached = percent(measured.of_matmul(measured.phases))
        return [
            f"No rule applies: {measured.bound}-bound"
            + (f", products at {reached} of the ceiling." if reached else ".")
        ]
    return found


def _forced(m: Measured) -> str | None:
    here = m.situation
    if not here.forced_backend:
        return None
    if here.forced_backend == "none":
        return "There is no compiled module, so torch computes everything: " + WITH_CPP + "."
    return (
        f"FASTPAR_BACKEND={here.forced_backend} forces a backend: unset it, so that the fastest "
        "kernel of each op runs (`fastpar info` lists them)."
    )


def _sixteen_bits(m: Measured) -> str | None:
    if m.situation.device != "cuda" or m.situation.dtype != "fp32":
        return None
    return "Weights are fp32 on a GPU: --dtype bf16 is several times as fast in every product."


def _input(m: Measured) -> str | None:
    share = m.shares[INPUT]
    if share < INPUT_SHARE:
        return None
    return (
        f"Batches take {percent(share)} of the step: keep the token cache on a local disk "
        "(XDG_CACHE_HOME), and raise --micro-batch-size so that fewer batches are cut."
    )


def _small_micro_batches(m: Measured) -> str | None:
    here, reached = m.situation, m.of_matmul(m.phases)
    on_host = m.shares[HOST] >= HOST_SHARE
    poor = reached is not None and reached < POOR and here.rows < SMALL_ROWS
    if not on_host and not (poor and m.bound == COMPUTE):
        return None
    why = (
        f"The host takes {percent(m.shares[HOST])} of the step"
        if on_host
        else f"Products of {here.rows} rows reach {percent(reached)} of the ceiling"
    )
    if here.grad_accum_steps > 1:
        larger = 2 * here.micro_batch_size
        even = here.grad_accum_steps % 2 == 0
        flag = f"--micro-batch-size {larger if even else here.batch_size // here.dp}"
        return f"{why}: {flag} does the same samples in fewer, larger operations."
    return (
        f"{why}: a larger --batch-size (now {here.batch_size}) gives every operation more rows "
        "for the same overhead."
    )


def _compile(m: Measured) -> str | None:
    if m.situation.compiled or m.shares[HOST] < HOST_SHARE or m.situation.device != "cuda":
        return None
    return "The GPU waits for the host: --compile joins small operations, after a slow start."


def _threads(m: Measured) -> str | None:
    here = m.situation
    if not here.idle_cores or m.shares[COMPUTE] < 0.5:
        return None
    return (
        f"{here.idle_cores} cores of this machine belong to no rank: leave --threads out, or raise "
        "--threads or --nproc."
    )


def _is_exposed(m: Measured, row: str) -> bool:
    """Whether waits for this kind of exchange are a tenth of the step, and most of its waits."""
    waited = m.situation.waited_ms
    mine = waited.get(row, 0.0)
    return mine >= EXPOSED_SHARE * m.step_ms and mine == max(waited.values())


def _gathers(m: Measured) -> str | None:
    here = m.situation
    if here.zero_stage == 0 or not _is_exposed(m, GATHER):
        return None
    item = 4 if here.dtype == "fp32" else 2
    if here.zero_stage == 3:
        whole = here.n_parameters / here.tp * item * (1 - 1 / here.dp) / 1e6
        return (
            f"{here.waited_ms[GATHER]:.1f} ms a step wait for gathered weights: --zero 2 keeps "
            f"them whole, for {whole:,.0f} MB more a rank."
        )
    return (
        f"{here.waited_ms[GATHER]:.1f} ms a step wait for updated weights: --zero 0 keeps the "
        "optimizer whole on every rank; or a larger --batch-size, for more work to hide them in."
    )


def _reductions(m: Measured) -> str | None:
    here = m.situation
    if not _is_exposed(m, REDUCE):
        return None
    why = f"{here.waited_ms[REDUCE]:.1f} ms a step wait for reduced gradients"
    if here.grad_accum_steps > 1 and here.accumulate == "shard":
        return (
            f"{why}, which are sent {here.grad_accum_steps} times: --accumulate full sends their "
            "sum once."
        )
    if here.dtype != "fp32" and here.reduce_dtype == "fp32":
        return f"{why}: --reduce-dtype {here.dtype} halves the bytes."
    if here.n_buckets <= 2:
        half = max(0.1, here.bucket_mb / 4)
        return (
            f"{why} in {here.n_buckets} buckets, the first of which leaves late: --bucket-mb "
            f"{half:.2g}."
        )
    if here.bucket_mb < SMALL_BUCKET_MB and here.n_buckets > 8:
        return (
            f"{why} in {here.n_buckets} buckets of {here.bucket_mb:.2g} MB: --bucket-mb "
            f"{4 * here.bucket_mb:.2g}."
        )
    return f"{why}: a larger --batch-size per step with --grad-accum-steps sends them less often."


def _along_tp(m: Measured) -> str | None:
    here = m.situation
    if here.tp == 1 or not _is_exposed(m, TP):
        return None
    return (
        f"{here.waited_ms[TP]:.1f} ms a step wait for exchanges inside of layers: --tp "
        f"{here.tp // 2} with a higher --zero stage splits the memory with less of them."
    )


def _uneven(m: Measured) -> str | None:
    here = m.situation
    if not _is_exposed(m, CONTROL):
        return None
    return (
        f"{here.waited_ms[CONTROL]:.1f} ms a step wait for the slowest rank: other programs use "
        "its cores, or ranks have more --threads than cores."
    )


def _gloo(m: Measured) -> str | None:
    here = m.situation
    if here.transport != "gloo" or m.shares[COMMUNICATION] < EXPOSED_SHARE:
        return None
    if here.forced_backend == "none":
        return None  # shared memory needs the module, which `_forced` asks for
    return "Ranks of one host exchange over gloo: --transport auto uses shared memory."


def _fixed_sums(m: Measured) -> str | None:
    if not m.situation.deterministic or m.shares[COMMUNICATION] < EXPOSED_SHARE:
        return None
    return (
        "Sums in a fixed order wait for all ranks: leave --deterministic out where bits may vary."
    )


def _update(m: Measured) -> str | None:
    here, share = m.situation, m.phase(OPTIMIZER).ms / max(m.step_ms, 1e-9)
    if share < UPDATE_SHARE:
        return None
    why = f"The optimizer takes {percent(share)} of the step"
    if here.dp > 1 and here.zero_stage == 0 and here.optimizer == "adamw":
        return f"{why}: --zero 1 gives each of {here.dp} ranks its part of the update."
    if here.moment_dtype == "fp32" and here.optimizer == "adamw" and here.device == "cuda":
        return f"{why}: --moment-dtype bf16 moves half the bytes of its moments."
    return f"{why}: a larger --batch-size with --grad-accum-steps updates less often."


def _recomputing(m: Measured) -> str | None:
    mode = m.situation.activation_checkpointing
    if mode == "none":
        return None
    other = "selective" if mode == "full" else "none"
    return (
        f"Blocks are computed again in backward (--activation-checkpointing {mode}): {other} "
        "does less of it, where memory allows."
    )


RULES: tuple[Rule, ...] = (
    _forced,
    _sixteen_bits,
    _input,
    _small_micro_batches,
    _compile,
    _threads,
    _gloo,
    _uneven,
    _along_tp,
    _gathers,
    _reductions,
    _fixed_sums,
    _update,
    _recomputing,
)
