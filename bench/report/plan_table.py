"""The table and the picture of bench_plan.py's rows: how far predictions are off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.records import Row
from bench.report.cells import table
from fastpar.plan.check import Errors
from fastpar.plan.check_picture import draw_check

LIMITS = {"peak memory": 0.05, "step time": 0.15}  # of a layout's error


def errors_of(rows: Sequence[Row]) -> dict[str, Errors]:
    """Errors of memory and step time, over all layouts and over those of each number of ranks."""
    found = {}
    kinds = {"peak memory": memory_error, "step time": time_error}
    ranks = sorted({row.notes["ranks"] for row in rows})
    for name, error in kinds.items():
        found[f"{name}, all layouts"] = Errors.of([error(row) for row in rows])
        for n in ranks if len(ranks) > 1 else ():
            some = [error(row) for row in rows if row.notes["ranks"] == n]
            found[f"{name}, {n} rank{'s' * (n > 1)}"] = Errors.of(some)
    return found


def memory_error(row: Row) -> float:
    return row.notes["predicted_bytes"] / (row.peak_bytes or 1) - 1


def time_error(row: Row) -> float:
    return row.notes["predicted_ms"] / (row.median_ms or 1.0) - 1


def plan_table(rows: Sequence[Row]) -> str:
    """The distribution of the errors; says which layouts are beyond their limit."""
    own = [row for row in rows if row.bench == "plan" and row.median_ms is not None]
    lines = []
    for name, errors in errors_of(own).items() if own else ():
        kind = name.partition(",")[0]
        error, limit = memory_error if kind == "peak memory" else time_error, LIMITS[kind]
        some = [row for row in own if "all" in name or f", {row.notes['ranks']} rank" in name]
        beyond = sum(abs(error(row)) > limit for row in some)
        lines.append(
            [
                name,
                str(errors.count),
                *(f"{value:.1%}" for value in (errors.median, errors.p90, errors.worst)),
                f"{errors.bias:+.1%}",
                f"{errors.count - beyond} of {errors.count} within {limit:.0%}",
            ]
        )
    head = ["predicted against measured", "layouts", "median error", "nine tenths within"]
    text = table([*head, "worst", "bias", "target"], lines)
    busy = sorted({row.notes["busy"] for row in own if row.notes.get("busy")})
    return text + (f"\n\nMeasured on a busy machine ({'; '.join(busy)})." if busy else "")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured of every row."""
    points = [
        (
            row.notes["ranks"],
            row.notes["predicted_bytes"] / 1e6,
            (row.peak_bytes or 1) / 1e6,
            row.notes["predicted_ms"],
            row.median_ms or 1.0,
        )
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_check(points, path)
