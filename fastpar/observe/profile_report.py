"""What `fastpar profile` tells: phases, verdict, top operations, advice; and profile.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastpar.axes.step import Op
from fastpar.observe.advice import advise
from fastpar.observe.trace import OpTime, product_flops
from fastpar.observe.verdict import PRODUCTS, Measured, percent, table, verdict

TOP = 12  # operations that are shown
UNSTEADY = 1.5  # the longest step over the shortest
_AS_WORK = {"linear_cross_entropy": "loss", "adamw_step_": "optimizer"}  # names of work.Op


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        profiled_step_ms: a step under the profiler, which is longer than one without.
        steps_ms: of the steps without it, as the host saw them.
        about: model, ranks, machine: for the head of the report.
    """

    measured: Measured
    ops: Sequence[OpTime]
    work: Sequence[Op]
    profiled_step_ms: float
    steps_ms: Sequence[float]
    about: dict[str, Any]

    def lines(self) -> list[str]:
        """The report for the terminal."""
        measured = self.measured
        longer = self.profiled_step_ms / max(measured.step_ms, 1e-9) - 1
        return [
            *table(measured),
            "",
            *verdict(measured),
            f"Shares inside of phases are those of profiled steps, {self.profiled_step_ms:.1f} ms "
            f"each ({round(100 * longer):+d} %); times are of steps without the profiler.",
            *self._spread(),
            "",
            *top_table(self.ops, self.work, self.profiled_step_ms),
            "",
            "What to change:",
            *(f"  {n}. {text}" for n, text in enumerate(advise(measured), 1)),
        ]

    def _spread(self) -> list[str]:
        """Said where it matters: then the times are not the machine's."""
        low, high = min(self.steps_ms), max(self.steps_ms)
        if high <= UNSTEADY * low:
            return []
        return [
            f"Steps took {low:.1f} to {high:.1f} ms: something else uses this machine; profile it "
            "again when it is quiet."
        ]

    def as_json(self) -> dict[str, Any]:
        """For profile.json."""
        measured = self.measured
        ops = [
            {**op._asdict(), "rate": rate_of(op, self.ops, self.work)} for op in self.ops[: 4 * TOP]
        ]
        return {
            **self.about,
            "step_ms": measured.step_ms,
            "profiled_step_ms": self.profiled_step_ms,
            "steps_ms": list(self.steps_ms),
            "bound": measured.bound,
            "shares": measured.shares,
            "ceilings": measured.ceilings._asdict(),
            "phases": [
                {
                    **phase._asdict(),
                    "ms": phase.ms,
                    "bound": phase.bound,
                    "of_matmul": measured.of_matmul([phase]),
                    "of_copy": measured.of_copy([phase]),
                }
                for phase in measured.phases
            ],
            "situation": {
                "batch_size": measured.workload.batch_size,
                "block_size": measured.workload.seq_len,
                "n_parameters": measured.workload.n_parameters,
                **measured.setup.in_effect(),
                **asdict(measured.situation),
            },
            "verdict": verdict(measured),
            "advice": advise(measured),
            "ops": ops,
        }


def rate_of(op: OpTime, ops: Iterable[OpTime], work: Iterable[Op]) -> str:
    """TFLOP/s or GB/s of an operation, where its FLOPs or bytes are known; else empty.

    Products by their own shapes; others by what a step needs of all that have this name.
    """
    if not op.ms:
        return ""
    flops = product_flops(op)
    if flops is not None:
        return f"{flops * op.calls / op.ms / 1e9:.3g} TFLOP/s"
    direction = "backward" if op.name.endswith("_bwd") else "forward"
    name = op.name.removesuffix("_bwd")
    key = _AS_WORK.get(name, name), direction
    same = [w for w in work if (w.name, w.direction.replace("recompute", "forward")) == key]
    ms = sum(o.ms for o in ops if o.name == op.name)
    if key[0] in PRODUCTS:
        total = sum(w.flops * w.count for w in same)
        return f"{total / ms / 1e9:.3g} TFLOP/s" if total else ""
    total = sum(w.bytes * w.count for w in same)
    return f"{total / ms / 1e6:.3g} GB/s" if total else ""


def top_table(ops: Sequence[OpTime], work: Sequence[Op], step_ms: float) -> list[str]:
    """The longest operations: time in a step, share of it, calls, rate."""
    lines = [f"{'top operations':46}{'phase':>10}{'ms':>9}{'share':>7}{'calls':>7}  rate"]
    for op in ops[:TOP]:
        sizes = " ".join("x".join(map(str, dims)) for dims in op.shape[:2])
        name = f"{op.name} {sizes}"
        name = name if len(name) <= 45 else f"{name[:43]}.."
        share = percent(op.ms / max(step_ms, 1e-9))
        lines.append(
            f"{name:46}{op.phase:>10}{op.ms:9.2f}{share:>7}{op.calls:7.0f}  "
            f"{rate_of(op, ops, work)}".rstrip()
        )
    return lines
