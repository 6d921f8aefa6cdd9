"""Writes README tables between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` from bench/results.

    python -m bench.report [FILE ...]    rewrite the tables of these files (README.md)
    python -m bench.report --check       exit code 1 when a table is not what the results say

NAME is <table>-<device>: train, char, ops or ceilings, and cpu or cuda. Rows come from the newest
machine of that device; where several of its files hold a key, the newest row counts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.records import RESULTS, ROOT, Row, load, machine_line, slug

MARKER = re.compile(r"<!-- bench:([\w-]+) -->\n(.*?)<!-- /bench:\1 -->", re.DOTALL)
OPENING = re.compile(r"<!-- bench:([\w-]+) -->")


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


def train_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.bench != "train" or row.case.startswith("char"):
            continue
        what = [row.case, row.variant, f"{row.notes.get('ranks', 1)} x {row.threads}"]
        if row.refused:
            lines.append([*what, f"refused: {row.refused}", "", "", "", ""])
            continue
        peak = row.peak_bytes and row.peak_bytes / 1e6
        ratio = row.notes.get("memory_ratio")
        lines.append(
            [
                *what,
                number(row.median_ms),
                number(row.tokens_per_s),
                times(row.speedup),
                number(peak),
                times(ratio),
            ]
        )
    head = ["training step", "variant", "ranks x threads", "ms", "tokens/s", "speed-up"]
    return table([*head, "peak MB", "memory"], lines)


def char_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.bench != "train" or not row.case.startswith("char"):
            continue
        if row.refused:
            lines.append([row.case, row.variant, f"refused: {row.refused}", "", "", "", ""])
            continue
        notes = row.notes
        lines.append(
            [
                row.case,
                row.variant,
                number(notes["total_s"]),
                number(row.median_ms),
                times(row.speedup),
                f"{notes['val_loss']:.4f}",
                f"{notes.get('max_loss_difference', 0.0):.1e}",
            ]
        )
    head = ["run", "variant", "seconds", "ms a step", "speed-up", "validation loss"]
    return table([*head, "largest loss difference in 200 steps"], lines)


def ops_table(rows: Sequence[Row]) -> str:
    """fastpar beside eager and beside the fastest other variant."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.bench not in ("train", "ceilings"):
            groups.setdefault((row.case, row.direction), []).append(row)
    lines = []
    for (case, direction), group in groups.items():
        timed = [r for r in group if r.median_ms is not None]
        peers = [r for r in timed if not r.variant.startswith("fastpar")]
        best = min(peers, key=lambda r: r.median_ms or 0.0, default=None)
        base = next((r for r in peers if r.variant == r.baseline), None)
        for row in (r for r in group if r.variant.startswith("fastpar")):
            name = case if row.variant == "fastpar" else f"{case} ({row.variant})"
            cells = [f"{name}, {direction}"]
            cells.append(f"{number(base.median_ms)} ({base.variant})" if base else "")
            cells.append(f"{number(best.median_ms)} ({best.variant})" if best else "")
            if row.median_ms is None:
                lines.append([*cells, f"refused: {row.refused}", "", "", ""])
                continue
            rate = (
                f"{number(row.tflop_per_s)} TFLOP/s"
                if row.tflop_per_s
                else f"{number(row.gb_per_s)} GB/s"
            )
            against = best.median_ms / row.median_ms if best and best.median_ms else None
            percent = f"{number(row.percent_of_ceiling)} %"
            lines.append([*cells, number(row.median_ms), times(against), rate, percent])
    head = ["op", "stock ms", "fastest stock ms", "fastpar ms", "against fastest", "rate"]
    return table([*head, "of the ceiling"], lines)


def ceilings_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.bench == "ceilings" and row.median_ms is not None:
            rate = (
                f"{number(row.tflop_per_s)} TFLOP/s"
                if row.tflop_per_s
                else f"{number(row.gb_per_s)} GB/s"
            )
            lines.append([row.case, row.dtype, number(row.median_ms), rate])
    return table(["ceiling", "dtype", "ms", "rate"], lines)


def summary(rows: Sequence[Row]) -> str:
    """For the console: a line for each case and direction with all its variants."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.direction), []).append(row)
    lines = []
    for (case, direction), group in groups.items():
        cells = []
        for row in group:
            if row.refused:
                cells.append(f"{row.variant} refused")
                continue
            text = f"{row.variant} {number(row.median_ms)}"
            if row.percent_of_ceiling is not None:
                text += f" ({row.percent_of_ceiling:.0f} %)"
            if row.tokens_per_s is not None:
                text += f" ({row.tokens_per_s:.0f} tokens/s)"
            cells.append(text)
        short = {"forward": "fwd", "forward+backward": "fwd+bwd"}.get(direction, direction)
        lines.append(f"{case}, {short}, ms: {' | '.join(cells)}")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "train": train_table,
    "char": char_table,
    "ops": ops_table,
    "ceilings": ceilings_table,
}


def newest(device: str, folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """The newest machine of this device and its newest row of every key."""
    files = [load(path) for path in sorted(folder.glob("*.json"))]
    files = [(about, rows) for about, rows in files if about["device"] == device]
    if not files:
        how = "make gpu" if device == "cuda" else "python -m bench --commit-results"
        raise ValueError(
            f"newest: expected results of device {device}, got none in {folder.name}; "
            f"run `{how}` first"
        )
    files.sort(key=lambda file: file[0]["date"])
    about = files[-1][0]
    rows = {row.key: row for other, part in files if slug(other) == slug(about) for row in part}
    return about, list(rows.values())


def render(name: str, folder: Path) -> str:
    """The text between one pair of markers."""
    kind, _, device = name.rpartition("-")
    if kind not in TABLES or device not in ("cpu", "cuda"):
        known = ", ".join(f"{k}-{d}" for k in TABLES for d in ("cpu", "cuda"))
        raise ValueError(f"render: expected one of {known}, got name={name}; correct the marker")
    about, rows = newest(device, folder)
    text = TABLES[kind](rows)
    if text.count("\n") < 2:
        raise ValueError(
            f"render: expected rows for the table {name}, got none in {folder.name}; "
            "run its bench with --commit-results first"
        )
    return f"{text}\n\n{machine_line(about)}.\n"


def update(text: str, folder: Path = RESULTS) -> str:
    """The text with every table between markers made anew."""
    closed = [name for name, _ in MARKER.findall(text)]
    for name in OPENING.findall(text):
        if name not in closed:
            raise ValueError(
                f"update: expected <!-- /bench:{name} --> after its opening, got name={name} "
                "without one; add the closing marker"
            )

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- bench:{name} -->\n{render(name, folder)}<!-- /bench:{name} -->"

    return MARKER.sub(replace, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "README.md"])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    args = parser.parse_args(argv)
    stale = 0
    for path in args.files:
        try:
            old = path.read_text()
            new = update(old)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        if new != old:
            stale += 1
            print(f"{path.name}: {'out of date' if args.check else 'tables rewritten'}")
            if not args.check:
                path.write_text(new)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
