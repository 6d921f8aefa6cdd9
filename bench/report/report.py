"""Writes tables between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` from bench/results.

    python -m bench report                all of it: every picture, every table
    python -m bench report --check        exit code 1 when a table is not what the results say
    python -m bench report --tables [FILE ...]     rewrite the tables of these files alone
    python -m bench report --pictures     draw bench/results/*.png alone: ops, roofline, zero, tp
    python -m bench report --results DIR  of your own rows in DIR: its pictures and DIR/report.md

The documents are README.md, bench/results/README.md, errors/table.md and plan/published.md beside
it; each has the markers it wants. NAME is headline, or <table>-<device>: a table of tables.py or
learning.py, errors, published or one bench (attention, ...), and cpu or cuda. Rows come from the
newest machine of that device; where several of its files hold a key, the newest row counts.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

from bench.peers import published
from bench.records import RESULTS, ROOT, Row, machine_line, parser_of
from bench.report import learning, tables
from bench.report.pictures import draw_all
from bench.report.tables import OPS, TABLES, NoResultsError, newest

MARKER = re.compile(r"<!-- bench:([\w-]+) -->\n(.*?)<!-- /bench:\1 -->", re.DOTALL)
_PAGES = ("README.md", "errors/table.md", "plan/published.md", "parameter_server.md")
DOCUMENTS = [ROOT / "README.md", *(RESULTS / name for name in _PAGES)]
OPENING = re.compile(r"<!-- bench:([\w-]+) -->")


def render(name: str, folder: Path) -> str:
    """The text between one pair of markers."""
    if name == "headline":
        return _headline(folder)
    kind, _, device = name.rpartition("-")
    known = [*TABLES, "errors", "published", *learning.TABLES, *sorted(OPS)]
    if kind not in known or device not in ("cpu", "cuda"):
        raise ValueError(
            f"render: expected one of {', '.join(known)} with -cpu or -cuda, or headline, got "
            f"name={name}; correct the marker"
        )
    if kind == "published":
        return published.table() + "\n"
    if kind in learning.TABLES:
        about, table = learning.table(kind, folder, lambda: newest(device, folder)[1])
    elif kind == "errors":
        about, errors = newest(device, folder / "errors")
        table = tables.errors_table(errors)
    else:
        about, rows = newest(device, folder)
        one = [row for row in rows if row.bench == kind]
        table = TABLES[kind](rows) if kind in TABLES else tables.ops_table(one)
    if not table.lines:
        raise NoResultsError(
            f"render: expected rows for the table {name}, got none in {folder.name}; "
            "run its bench with --commit-results first"
        )
    return tables.render(table, about)


def _headline(folder: Path) -> str:
    found: dict[str, tuple[dict[str, Any], list[Row]]] = {"cpu": newest("cpu", folder)}
    with contextlib.suppress(NoResultsError):
        found["cuda"] = newest("cuda", folder)
    rows = {device: part for device, (_, part) in found.items()}
    lines = [machine_line(about).partition("; commit")[0] for about, _ in found.values()]
    return (
        f"{tables.headline(rows['cpu'], rows.get('cuda', []))}\n\n{'; '.join(lines)}; each row of\n"
        "bench/results has its date and commit. A speed-up is of two variants that took turns, "
        "which their\nmedians over the whole run need not show exactly.\n"
    )


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
    parser = parser_of("bench report", __doc__)
    parser.add_argument("files", nargs="*", type=Path, default=DOCUMENTS)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    only.add_argument("--tables", action="store_true", help="no pictures")
    only.add_argument("--pictures", action="store_true", help="no tables")
    only.add_argument("--results", type=Path, metavar="DIR", help="rows that you have measured")
    args = parser.parse_args(argv)
    try:
        if args.results is not None:
            write_own(args.results)
            return 0
        if not (args.check or args.tables or args.files is not DOCUMENTS):
            draw_pictures()
        return 0 if args.pictures else _tables(args)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def write_own(folder: Path) -> None:
    """Draws every picture of the rows in folder, and writes every table into <folder>/report.md."""
    parts = []
    for device in ("cuda", "cpu"):
        for kind in [*TABLES, "errors"]:
            with contextlib.suppress(NoResultsError):
                parts.append(f"## {kind}, {device}\n\n{render(f'{kind}-{device}', folder)}")
    if not parts:
        raise NoResultsError(
            f"report: expected a folder with rows of `python -m bench`, got results={folder}; "
            "without --out they go to build/bench/full"
        )
    draw_pictures(folder)
    (folder / "report.md").write_text("\n".join(["# Measured with python -m bench\n", *parts]))
    print("report.md: written")


def draw_pictures(folder: Path = RESULTS) -> None:
    """Every picture that comes from the results in folder."""
    print("\n".join(f"{path.name}: drawn" for path in draw_all(folder)))


def _tables(args: argparse.Namespace) -> int:
    """Makes every table of these files anew, or looks whether that would change one."""
    stale = 0
    for path in args.files:
        old = path.read_text()
        new = update(old)
        if new != old:
            stale += 1
            print(f"{path.name}: {'out of date' if args.check else 'tables rewritten'}")
            if not args.check:
                path.write_text(new)
    return int(args.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
