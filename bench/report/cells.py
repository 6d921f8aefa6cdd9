"""How tables and pictures of results write numbers, and group rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Row

ASIDE = "fastpar without dropout"  # what a row with dropout is compared with: no result by itself


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, plain notation."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(case, direction) -> its variants."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.direction), []).append(row)
    return groups


def is_ours(row: Row) -> bool:
    return row.variant.startswith("fastpar") and row.variant != ASIDE


def rate(row: Row) -> str:
    if row.tflop_per_s:
        return f"{number(row.tflop_per_s)} TFLOP/s"
    return f"{number(row.gb_per_s)} GB/s"


def megabytes(row: Row | None) -> str:
    return "" if row is None or row.peak_bytes is None else number(row.peak_bytes / 1e6)
