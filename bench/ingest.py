"""`python -m bench ingest ARCHIVE ...`: what `make gpu` brought back becomes the project's results.

Rows go to bench/results (a file for each machine and day), the error ledger to its errors/, proofs
to fastpar/doctor/shipped, where they save the trial on that GPU, tuned tables to kernels/, the
summary and the profile to bench/results/gpu. Then the tables
and pictures are drawn anew. A rehearsal (--quick) is no result: with --into DIR what it found goes
there instead, with tables and pictures of its own. An archive is read like any file from outside:
nothing leaves the folder it is put in.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from bench.gpu import REHEARSAL
from bench.ops.errors import ErrorRow
from bench.records import RESULTS, ROOT, ResultFile, Row, default_path, load
from fastpar.doctor.table import SHIPPED, file_name
from fastpar.doctor.warm import TABLES


def ingest(archive: Path, results: Path = RESULTS, package: Path = ROOT) -> list[str]:
    """Takes over one archive; what became of each of its files.

    Raises:
        ValueError: it is no archive of a part, or a rehearsal for the committed results, or its
            rows are of another format.
    """
    said: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise ValueError(
                f"ingest: expected an archive of `make gpu`, got path={archive.name} ({error}); "
                "name the .tar.gz that it printed"
            ) from None
        folders = [p for p in Path(scratch).iterdir() if (p / "summary.txt").is_file()]
        if len(folders) != 1:
            raise ValueError(
                f"ingest: expected one part with a summary.txt, got {len(folders)} in "
                f"{archive.name}; name the .tar.gz that `make gpu` printed"
            )
        folder = folders[0]
        if folder.name.startswith(REHEARSAL) and results == RESULTS:
            raise ValueError(
                f"ingest: expected a run at full size, got the rehearsal {archive.name}; run `make "
                "gpu` without --quick, or add --into DIR to look at its tables and pictures"
            )
        for name, kind, target in (
            ("rows.json", Row, results),
            ("errors.json", ErrorRow, results / "errors"),
        ):
            if (folder / name).exists():
                about, rows = load(folder / name, kind)
                file = ResultFile(default_path(about, target), about, kind)
                file.add(*rows)
                said.append(f"{len(rows)} rows in {file.path.name}")
        if (folder / "proofs.json").exists():
            said += ship_proofs(json.loads((folder / "proofs.json").read_text()), package)
        for name in TABLES:
            if (folder / f"{name}.json").exists():
                (package / "kernels").mkdir(exist_ok=True)
                shutil.copy(folder / f"{name}.json", package / "kernels")
                said.append(f"choices in kernels/{name}.json")
        (results / "gpu").mkdir(parents=True, exist_ok=True)
        for name in ("summary.txt", "profile/profile.json", "profile/timeline.png"):
            if (folder / name).exists():
                kept = f"{folder.name}_{Path(name).name}"
                shutil.copy(folder / name, results / "gpu" / kept)
                said.append(f"gpu/{kept}")
    return said


def ship_proofs(content: dict[str, Any], package: Path) -> list[str]:
    """Puts proofs, as `fastpar doctor --json` writes them, where they save the trial."""
    if content["about"]["device"].startswith("CPU"):
        return ["proofs of a CPU are not shipped"]
    name = file_name(content["about"])
    folder = package / SHIPPED.relative_to(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("version", "about", "proofs")
    shipped = {"tried": {}, **{key: content[key] for key in names}}
    (folder / name).write_text(json.dumps(shipped, indent=1) + "\n")
    return [f"proofs in fastpar/doctor/shipped/{name}"]


def main(argv: list[str]) -> int:
    """Takes over archives, then draws the report."""
    parser = argparse.ArgumentParser(prog="python -m bench ingest", description=__doc__)
    parser.add_argument("archives", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, metavar="DIR", help="instead of bench/results")
    args = parser.parse_args(argv)
    try:
        for archive in args.archives:
            into = (args.into, args.into) if args.into else ()
            print("\n".join(ingest(archive, *into)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    from bench.report import report

    if not args.into:
        return report.main([])
    report.write_own(args.into)
    return 0
