"""What bounds a training step: numbers in, words out.

[Note: what bounds] A phase is bound by what most of its time is: products of matrices (compute),
operations that read and write more than they compute (memory), waits for other ranks
(communication), or the time in which none of these runs because Python and dispatch have not come
that far (host). Fetching a batch is the input, whatever it does. The whole step is bound by the
largest of these sums. The fractions beside the verdict say how good the time is: FLOPs of the model
over the time of the products, bytes that must move at least over the time of the rest, both against
what this machine reached in a copy and in a square product a moment before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastpar.axes.step import Op, Setup, Workload
from fastpar.comm.recorder import BACKWARD, FORWARD, INPUT, OPTIMIZER
from fastpar.observe.trace import COMMUNICATION, KINDS
from fastpar.predict.machine import Ceilings
from fastpar.predict.time import UPDATES

PRODUCTS = ("matmul", "attention", "loss", "orthogonalize")  # of work.Op: limited by arithmetic


class Phase(NamedTuple):
    """A phase of a step on one rank: times in ms, and what the model must do in it.

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
    def parts(self) -> dict[str, float]:
        """Kind -> ms."""
        return dict(zip(KINDS, self[1:5]))

    @property
    def ms(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The kind of most of its time; [Note: what bounds]."""
        parts = self.parts
        return INPUT if self.name == INPUT else max(parts, key=lambda kind: parts[kind])


@dataclass(frozen=True)
class Situation:
    """What was seen of the run beside its phases.

    waited_ms: REDUCE, GATHER, TP, PP, CONTROL -> ms of a step; moving_ms: in which any exchange was
        under way. bucket_mb: of gradients, the mean over the buckets.
    forced_backend: FASTPAR_BACKEND, "" for auto, "none" without the compiled module.
    idle_cores: of this host, that no rank may use.
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
    """A step as it was measured."""

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
        found = dict.fromkeys((*KINDS, INPUT), 0.0)
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
        flops_per_ms = _rate((p.flops, p.compute_ms) for p in phases)
        return flops_per_ms and flops_per_ms / 1e9 / self.ceilings.matmul_tflop_per_s

    def of_copy(self, phases: Iterable[Phase]) -> float | None:
        """Fraction of the measured copy's rate that the rest of these phases reached."""
        bytes_per_ms = _rate((p.bytes, p.memory_ms) for p in phases)
        return bytes_per_ms and bytes_per_ms / 1e6 / self.ceilings.copy_gb_per_s


def _rate(parts: Iterable[tuple[float, float]]) -> float | None:
    """Work a ms of those parts, (work, ms), that have both; None: none has."""
    found = [part for part in parts if all(part)]
    return sum(work for work, _ in found) / sum(ms for _, ms in found) if found else None


def work_of(ops: Iterable[Op]) -> dict[str, tuple[float, float]]:
    """Phase -> (FLOPs of products, bytes of the rest) of a step, of work.ops_of."""
    found = {FORWARD: (0.0, 0.0), BACKWARD: (0.0, 0.0), OPTIMIZER: (0.0, 0.0)}
    for op in ops:
        phase = FORWARD if op.direction == "forward" else BACKWARD
        phase = OPTIMIZER if op.name in UPDATES else phase
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
    shares, ceilings, bound = measured.shares, measured.ceilings, measured.bound
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
    if measured.setup.optimizer == "muon":
        lines.append(_of_muon(measured))
    moving_ms = measured.situation.moving_ms
    if measured.setup.world_size > 1 and moving_ms:
        hidden = max(0.0, 1 - shares[COMMUNICATION] * measured.step_ms / moving_ms)
        lines.append(
            f"Exchanges are under way for {moving_ms:.1f} ms "
            f"({measured.situation.sent_bytes / 1e6 / moving_ms:.3g} GB/s sent a rank over "
            f"{measured.setup.transport}), {percent(hidden)} of it behind computation."
        )
    return lines


def _of_muon(measured: Measured) -> str:
    update = measured.phase(OPTIMIZER)
    return (
        f"Of the update's {update.ms:.1f} ms products of Newton-Schulz take "
        f"{update.compute_ms:.1f} ms, what is done element by element {update.memory_ms:.1f}, "
        f"waits for pieces of matrices {update.communication_ms:.1f}, the host "
        f"{update.host_ms:.1f}."
    )
