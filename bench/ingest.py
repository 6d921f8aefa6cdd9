"""`python -m bench ingest report.json ...`: what bench/gpu.sh brought back becomes results.

Rows go to bench/results (a file for each machine and day), proofs to fastpar/doctor/shipped, where
they save the trial on that GPU as long as the kernels are the same, the rest of report.json and
report.txt, without paths of that machine, to bench/results/gpu. Then the tables are
drawn anew. A rehearsal (--quick) is no result: with --into DIR what it found goes there instead.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench.gpu_cells import report as page
from bench.records import RESULTS, ROOT, ResultFile, Row, default_path, parser_of, slug
from fastpar.comm.ranks import without_paths
from fastpar.doctor.table import SHIPPED, shipped_name


def ingest(path: Path, results: Path = RESULTS, package: Path = ROOT) -> list[str]:
    """Takes over one report; what became of its parts. ValueError: it is no report, or a rehearsal
    for the committed results, or its rows are of another format."""
    try:
        report = json.loads(path.read_text())
        about, cells = report["about"], list(report["cells"])
        quick, mode = bool(report["quick"]), str(report["mode"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"ingest: expected a report.json of bench/gpu.sh, got path={path.name} "
            f"({type(error).__name__}: {error}); name the one that it left in $OUT"
        ) from None
    if quick and results == RESULTS:
        raise ValueError(
            f"ingest: expected a run at full size, got the rehearsal {path.name}; run bench/gpu.sh "
            "without --quick, or add --into DIR to look at its tables"
        )
    said: list[str] = []
    rows = [Row.from_json(row) for cell in cells for row in cell.get("rows", ())]
    if rows:
        file = ResultFile(default_path(about, results), about)
        file.add(*rows)
        said.append(f"{len(rows)} rows in {file.path.name}")
    for cell in cells:
        if cell.get("proofs"):
            said += ship_proofs(cell["proofs"], package)
    for cell in cells:
        for name in ("rows", "traceback", "stderr"):
            cell.pop(name, None)
        cell |= {"error": without_paths(cell["error"])} if "error" in cell else {}
        cell |= {"wrong": [*map(without_paths, cell["wrong"])]} if "wrong" in cell else {}
    kept = results / "gpu" / f"{slug(about)}_{about['date']}_{mode}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({**report, "cells": cells}, indent=1) + "\n")
    kept.with_suffix(".txt").write_text("\n".join(page(report, cells)) + "\n")
    return [*said, f"gpu/{kept.name}"]


def ship_proofs(content: dict[str, Any], package: Path) -> list[str]:
    """Puts proofs, as `fastpar doctor --json` writes them, where they save the trial."""
    if content["about"]["device"].startswith("CPU"):
        return ["proofs of a CPU are not shipped"]
    name = shipped_name(content["about"])
    folder = package / SHIPPED.relative_to(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("version", "about", "proofs")
    shipped = {"tried": [], **{key: content[key] for key in names}}
    (folder / name).write_text(json.dumps(shipped, indent=1) + "\n")
    return [f"proofs in fastpar/doctor/shipped/{name}"]


def main(argv: list[str]) -> int:
    """Takes over reports, then writes the tables."""
    parser = parser_of("bench ingest", __doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, metavar="DIR", help="instead of bench/results")
    args = parser.parse_args(argv)
    try:
        for path in args.reports:
            into = (args.into, args.into) if args.into else ()
            print("\n".join(ingest(path, *into)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    from bench.report import report

    if not args.into:
        return report.main([])
    report.write_own(args.into)
    return 0
