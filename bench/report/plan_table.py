"""The table of bench_plan.py's rows: how far predictions are off."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.records import Row
from bench.report.cells import table

LIMITS = {"peak memory": 0.05, "step time": 0.15}  # of a layout's error


def plan_table(rows: Sequence[Row]) -> str:
    """Errors of memory and step time, of all layouts and of those of each number of ranks."""
    own = [row for row in rows if row.bench == "plan" and row.median_ms is not None]
    ranks = sorted({row.notes["ranks"] for row in own})
    lines = []
    for kind, limit in LIMITS.items():
        for n in (None, *ranks) if len(ranks) > 1 else (None,) * bool(own):
            errors = [_error(kind, row) for row in own if n in (None, row.notes["ranks"])]
            sizes = sorted(map(abs, errors))
            ninth = sizes[-(-9 * len(sizes) // 10) - 1]  # nine tenths are no larger
            which = "all layouts" if n is None else f"{n} rank{'s' * (n > 1)}"
            within = sum(size <= limit for size in sizes)
            spread = [f"{value:.1%}" for value in (statistics.median(sizes), ninth, sizes[-1])]
            bias = f"{statistics.median(errors):+.1%}"
            target = f"{within} of {len(sizes)} within {limit:.0%}"
            lines.append([f"{kind}, {which}", str(len(sizes)), *spread, bias, target])
    head = ["predicted against measured", "layouts", "median error", "nine tenths within"]
    text = table([*head, "worst", "bias", "target"], lines)
    busy = sorted({row.notes["busy"] for row in own if row.notes.get("busy")})
    return text + (f"\n\nMeasured on a busy machine ({'; '.join(busy)})." if busy else "")


def _error(kind: str, row: Row) -> float:
    if kind == "peak memory":
        return row.notes["predicted_bytes"] / (row.peak_bytes or 1) - 1
    return row.notes["predicted_ms"] / (row.median_ms or 1.0) - 1
