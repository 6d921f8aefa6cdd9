"""Writes tables between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` from bench/results.

    python -m bench report [FILE ...]     in every document, or in these
    python -m bench report --check        exit code 1 if a table differs from the results
    python -m bench report --results DIR  tables of your own rows in DIR: DIR/report.md
    python -m bench report --picture      the picture of README.md: bench/results/steps.png

The documents are bench/results/README.md and plan/published.md beside it; each has the markers it
wants. NAME is headline, or <table>-<device>: a table of tables.py or
learning.py, published or one bench (attention, ...), and cpu or cuda. Where several files of one
machine hold a key, the newest row counts.
"""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

from bench.peers import published
from bench.records import RESULTS, Row, is_known, machine_line, parser_of
from bench.report import learning, picture, tables
from bench.report.tables import OPS, TABLES, NoResultsError, machines_of

MARKER = re.compile(r"<!-- bench:([\w-]+) -->\n(.*?)<!-- /bench:\1 -->", re.DOTALL)
DOCUMENTS = [RESULTS / name for name in ("README.md", "plan/published.md")]
OPENING = re.compile(r"<!-- bench:([\w-]+) -->")


def render(name: str, folder: Path) -> str:
    """The text between two markers; a bench has a table for each machine, newest first."""
    if name == "headline":
        return _headline(folder)
    kind, _, device = name.rpartition("-")
    known = [*TABLES, "published", *learning.TABLES, *sorted(OPS)]
    if kind not in known or device not in ("cpu", "cuda"):
        raise ValueError(
            f"render: expected one of {', '.join(known)} with -cpu or -cuda, or headline, got "
            f"name={name}; correct the marker"
        )
    if kind == "published":
        return published.table() + "\n"
    if kind in learning.TABLES:
        made = learning.tables(kind, folder)
    else:
        make = TABLES.get(kind, tables.ops_table)
        found = [
            (about, rows if kind in TABLES else [row for row in rows if row.bench == kind])
            for about, rows in machines_of(device, folder)
        ]
        made = [(about, make(rows)) for about, rows in found]
    parts = [tables.render(table, about) for about, table in made if table.lines]
    if not parts:
        raise NoResultsError(f"render: expected rows for the table {name}, got none; run its bench")
    return "\n".join(parts)


def _headline(folder: Path) -> str:
    """Columns: newest machine of each maker and instruction set. GPUs have their own table."""
    parts = []
    for device in ("cpu", "cuda"):
        found: dict[str, tuple[dict[str, Any], list[Row]]] = {}
        with contextlib.suppress(NoResultsError):
            for about, rows in machines_of(device, folder):
                maker = about["cpu"].partition(" ")[0].removesuffix("(R)")
                cpu = ", ".join(filter(None, (maker, about.get("isa"), f"{about['cores']} cores")))
                name = about["gpu"] if device == "cuda" else cpu
                if is_known(about) and tables.headline([(name, rows)]).count("\n") > 1:
                    found.setdefault(name, (about, rows))
        if found:
            machines = [(name, rows) for name, (_, rows) in found.items()]
            lines = [machine_line(about).partition("; commit")[0] for about, _ in found.values()]
            parts.append(f"{tables.headline(machines)}\n\n" + ";\n".join(lines) + ".\n")
    return "\n".join(parts)


def update(text: str, folder: Path = RESULTS) -> str:
    """The text with every table between markers rewritten."""
    closed = [name for name, _ in MARKER.findall(text)]
    for name in OPENING.findall(text):
        if name not in closed:
            raise ValueError(f"update: expected <!-- /bench:{name} -->, got none; add this marker")

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- bench:{name} -->\n{render(name, folder)}<!-- /bench:{name} -->"

    return MARKER.sub(replace, text)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("bench report", __doc__)
    parser.add_argument("files", nargs="*", type=Path, default=DOCUMENTS)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    only.add_argument("--results", type=Path, metavar="DIR", help="rows that you have measured")
    only.add_argument("--picture", action="store_true", help="draw bench/results/steps.png")
    args, stale = parser.parse_args(argv), 0
    try:
        if args.picture:
            print(f"{picture.draw().name}: drawn")
            return 0
        if args.results is not None:
            write_own(args.results)
            return 0
        for path in args.files:
            old = path.read_text()
            new = update(old)
            if new != old:
                stale += 1
                print(f"{path.name}: {'out of date' if args.check else 'tables rewritten'}")
                if not args.check:
                    path.write_text(new)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return int(args.check and stale > 0)


def write_own(folder: Path) -> None:
    """Writes every table of the rows in folder into <folder>/report.md."""
    parts = []
    for device in ("cuda", "cpu"):
        for kind in TABLES:
            with contextlib.suppress(NoResultsError):
                parts.append(f"## {kind}, {device}\n\n{render(f'{kind}-{device}', folder)}")
    if not parts:
        raise NoResultsError(f"report: expected rows, got results={folder}; see build/bench/full")
    (folder / "report.md").write_text("\n".join(["# Measured with python -m bench\n", *parts]))
    print("report.md: written")


if __name__ == "__main__":
    sys.exit(main())
