"""Writes README tables between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` from bench/results.

    python -m bench.report [FILE ...]    rewrite the tables of these files (README, error ledger)
    python -m bench.report --check       exit code 1 when a table is not what the results say
    python -m bench.report --pictures    draw bench/results/<op>.png for every op, of zero and of tp

NAME is <table>-<device>: train, char, zero, tp, overlap, checkpoint, emulated, ops, ceilings,
targets, errors, published or one bench (attention, ...), and cpu or cuda. Rows come from the newest
machine of that device; where several of its files hold a key, the newest row counts.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from bench import published
from bench.errors import ErrorRow
from bench.records import (
    RESULTS,
    ROOT,
    AnyRecord,
    Row,
    load,
    machine_line,
    slug,
)
from bench.tables import NOT_OPS, TABLES, errors_table, ops_table

MARKER = re.compile(r"<!-- bench:([\w-]+) -->\n(.*?)<!-- /bench:\1 -->", re.DOTALL)
DOCUMENTS = [ROOT / "README.md", RESULTS / "errors" / "table.md", RESULTS / "plan" / "published.md"]
OPENING = re.compile(r"<!-- bench:([\w-]+) -->")


def op_benches() -> list[str]:
    """Benches that have a table and a picture of their own."""
    found = {p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py")}
    return sorted(found - NOT_OPS)


class NoResultsError(ValueError):
    """There is no result file of a device."""


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


def render(name: str, folder: Path) -> str:
    """The text between one pair of markers."""
    kind, _, device = name.rpartition("-")
    known = [*TABLES, "errors", "published", *op_benches()]
    if kind not in known or device not in ("cpu", "cuda"):
        raise ValueError(
            f"render: expected one of {', '.join(known)} with -cpu or -cuda, got name={name}; "
            "correct the marker"
        )
    if kind == "published":
        return published.table() + "\n"
    if kind == "errors":
        about, errors = newest(device, folder / "errors", ErrorRow)
        text = errors_table(errors)
    else:
        about, rows = newest(device, folder, Row)
        own = [row for row in rows if row.bench == kind]
        shown = own or [row for row in rows if row.bench not in NOT_OPS] or rows
        last = max(shown, key=lambda row: row.date)  # the machine's file can be of another commit
        about = {**about, "commit": last.commit, "dirty": last.dirty, "date": last.date}
        text = TABLES[kind](rows) if kind in TABLES else ops_table(own)
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
    parser.add_argument("files", nargs="*", type=Path, default=DOCUMENTS)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    parser.add_argument("--pictures", action="store_true", help="draw one picture for each op")
    args = parser.parse_args(argv)
    if args.pictures:
        from bench.pictures import draw_all

        for path in draw_all(RESULTS):
            print(f"{path.name}: drawn")
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
