"""The README's only table: what a user would swap or run, beside the fastest other way to do it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.records import Row
from bench.report.cells import number, table, times


class Line(NamedTuple):
    """A line of the table and where its rows are.

    case is a regular expression for a row's whole case, because a GPU measures other sizes than a
    CPU; its group is the size that is shown. The first case with a fastpar row that passed its
    check counts. Others whose name begins like `without` do less, and are left out.
    """

    what: str
    bench: str
    case: str
    direction: str
    variant: str = "fastpar"
    without: str = r"(?!)"  # matches nothing


ZERO = r"(GPT-2 124M T=\d+ B=\d+ a rank, 2 ranks)"
CHECKPOINT = "(GPT-2 124M and AdamW), one process"
BOTH = "forward+backward"

LINES = (
    Line("`AdamW` step, fp32", "adamw", r"adamw fp32 (\d{3,}M)", "step", "fastpar AdamW"),
    *(
        Line(what, "adamw", rf"norm \+ clip \+ adamw {dtype} (GPT-2, \d+.*M) .*", "step", variant)
        for what, dtype, variant in (
            ("`AdamW` step with clipping, fp32", "fp32", "fastpar AdamW"),
            ("clipping and step, bf16 with fp32 masters", "bf16", "fastpar"),
        )
    ),
    *(
        Line(what, bench, case, BOTH)
        for what, bench, case in (
            ("`LayerNorm`", "layer_norm", r"layer_norm (N=\d+ C=768)"),
            (
                "bias + dropout + residual + `LayerNorm`",
                *("layer_norm", r"bias \+ dropout \+ residual_layer_norm (N=\d+ C=768)"),
            ),
            ("`attention`", "attention", r"attention (B=\d+ H=12 T=1024 D=64)"),
            ("bias + GELU", "gelu", r"bias_gelu (N=\d+ F=3072)"),
            ("`cross_entropy`", "cross_entropy", r"cross_entropy (N=\d+ V=50304)"),
        )
    ),
    Line("`linear_cross_entropy`", "linear_cross_entropy", r".* (N=.* V=50304)", "forward"),
    Line("training step, one process", "train", r"(12x768 T=\d+ B=\d+|124M T=1024 B=32)", "step"),
    *(
        Line(f"training step, ZeRO-{stage}", "zero", ZERO, "step", f"fastpar ZeRO-{stage}", "one")
        for stage in (1, 2, 3)
    ),
    Line("training step, tensor parallel", "tp", r"tp=2, (.*, 2 ranks)", "step", "fastpar, shm"),
    Line("checkpoint save to disk", "checkpoint", CHECKPOINT, "save", without="torch.save$"),
    Line("pause of a checkpoint save", "checkpoint", CHECKPOINT, "pause of a save"),
    Line("checkpoint load", "checkpoint", CHECKPOINT, "load"),
)


def headline_table(cpu: Sequence[Row], cuda: Sequence[Row]) -> str:
    """A line for each of LINES with a CPU row that passed its check; slower ones say so."""
    lines = []
    for line in LINES:
        pair = _find(line, cpu)
        if pair is None:
            continue
        ours, other = pair
        size = re.sub(line.case, r"\1", ours.case)
        direction = f", {line.direction}" if "forward" in line.direction else ""
        ratio = _ratio(ours, other)
        lines.append(
            [
                f"{line.what}: {size}{direction}",
                f"{number(ours.median_ms)} ms",
                f"{number(other.median_ms)} ms, {other.variant}",
                times(ratio) + ", slower" * (ratio < 1),
                _on_gpu(_find(line, cuda)),
            ]
        )
    return table(["what", "fastpar, CPU", "fastest other, CPU", "speed-up", "GPU"], lines)


def _find(line: Line, rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """fastpar's row and the fastest other one of its case; None where either is missing."""
    timed = [
        row
        for row in rows
        if (row.bench, row.direction) == (line.bench, line.direction)
        and row.median_ms is not None
        and row.refused is None
        and re.fullmatch(line.case, row.case)
    ]
    for ours in (row for row in timed if row.variant == line.variant):
        others = [r for r in timed if r.case == ours.case and not r.variant.startswith("fastpar")]
        others = [r for r in others if not re.match(line.without, r.variant)]
        if others:
            return ours, min(others, key=lambda other: _ratio(ours, other))
    return None


def _ratio(ours: Row, other: Row) -> float:
    """How many times faster: of the speed-ups over the variant with which both took turns."""
    if ours.speedup and other.speedup and ours.baseline == other.baseline:
        return ours.speedup / other.speedup
    return (other.median_ms or 0.0) / (ours.median_ms or 1.0)


def _on_gpu(pair: tuple[Row, Row] | None) -> str:
    if pair is None:
        return "not yet measured"
    ours, other = pair
    return f"{number(ours.median_ms)} ms, {times(_ratio(ours, other))} {other.variant}"
