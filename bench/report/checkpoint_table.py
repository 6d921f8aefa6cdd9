"""The table of bench_checkpoint.py's rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Row


def checkpoint_table(rows: Sequence[Row]) -> str:
    """Every contender of every direction; a fastpar row that misses a target says so."""
    from bench.report.tables import by_case, megabytes, number, rate, table, times
    from bench.targets import targets_of

    lines = []
    for (case, direction), group in by_case([r for r in rows if r.bench == "checkpoint"]).items():
        for row in group:
            what = [f"{case}: {direction}", row.variant]
            if row.median_ms is None:
                lines.append([*what, f"refused: {row.refused}", "", "", "", ""])
                continue
            found = [(t, t.reached(row, group)) for t in targets_of(row)]
            short = [str(t) for t, reached in found if reached is not None and not t.met(reached)]
            against = f"{times(row.speedup)} {row.baseline}" if row.baseline else ""
            lines.append(
                [
                    *what,
                    number(row.median_ms),
                    rate(row) if row.gb_per_s else "",
                    against,
                    megabytes(row),
                    "; ".join(f"not {text}" for text in short),
                ]
            )
    head = ["checkpoint", "variant", "ms", "rate", "speed-up over", "extra MB", "target missed"]
    return table(head, lines)
