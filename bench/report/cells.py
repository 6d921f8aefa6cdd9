"""The rows that tables and pictures show, how they group them, and how they write numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.ops.errors import ErrorRow
from bench.records import AnyRecord, Row, load, slug

OPS = {p.stem.removeprefix("bench_") for p in Path(__file__).parents[1].glob("ops/bench_*.py")}
OPS |= {"shm"}

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


def of_newest(about: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The machine with the commit of its newest row here: its file can be of another one."""
    last = max(rows, key=lambda row: row.date)
    return {**about, "commit": last.commit, "dirty": last.dirty, "date": last.date}


def pyplot() -> Any:
    """matplotlib, which needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def bare(axes: Any, *sides: str) -> None:
    for side in sides or ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


class NoResultsError(ValueError):
    """There is no result file of a device, or no row for a table."""


def newest(
    device: str,
    folder: Path,
    kind: type[AnyRecord] = Row,  # type: ignore[assignment]
) -> tuple[dict[str, Any], list[AnyRecord]]:
    """The newest machine of this device and its newest row of every key."""
    files = [load(path, kind) for path in sorted(folder.glob("*.json"))]
    files = [(about, rows) for about, rows in files if about["device"] == device]
    if not files:
        how = "make gpu" if device == "cuda" else "python -m bench --commit-results"
        if kind is ErrorRow:
            how = f"python -m bench errors --device {device} --commit-results"
        raise NoResultsError(
            f"newest: expected results of device {device}, got none in {folder.name}; "
            f"run `{how}` first"
        )
    files.sort(key=lambda file: file[0]["date"])
    about = files[-1][0]
    rows = {row.key: row for other, part in files if slug(other) == slug(about) for row in part}
    return about, list(rows.values())
