"""What the committed result files said over the commits: speed-ups side by side, drops flagged.

    python -m bench report --history     writes bench/results/history.md

Absolute times drift with the machine's other users; a speed-up is of two variants that took turns
in one run, so it is what commits can be compared by. It is read from git (log and show), so a
shallow clone knows less, and says so. Written on demand: --check does not look at it, because every
new commit of results changes it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.records import RESULTS, slug
from bench.report.cells import table, times

DROP = 0.1  # of the speed-up before: more is flagged
SHOWN = 4  # measurements of a row, the newest ones


class Point(NamedTuple):
    """A speed-up that was measured at a commit."""

    commit: str
    date: str
    baseline: str
    speedup: float


Key = tuple[str, ...]  # machine, bench, case, direction, variant


def _git(root: Path, *command: str) -> str | None:
    git = ["git", "-c", "safe.directory=*", *command]
    try:
        run = subprocess.run(git, cwd=root, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None


def versions(folder: Path) -> tuple[list[str], str]:
    """(the texts of all result files at all commits, oldest first, then as they are; a remark).

    The remark says what is missing, and is empty where nothing is.
    """
    listed = _git(folder, "log", "--reverse", "--format=commit %H", "--name-only", "--", "*.json")
    texts, remark = [], ""
    if listed is None:
        remark = "No git history here: only the files as they are."
    else:
        commit = ""
        for line in filter(None, listed.splitlines()):
            if line.startswith("commit "):
                commit = line.removeprefix("commit ")
            elif Path(line).parent.name == folder.name:
                texts.append(_git(folder, "show", f"{commit}:{line}") or "")
        if (_git(folder, "rev-parse", "--is-shallow-repository") or "").strip() == "true":
            remark = "A shallow clone: older commits are missing here."
    texts += [path.read_text() for path in sorted(folder.glob("*.json"))]
    return texts, remark


def points_of(texts: Iterable[str]) -> dict[Key, list[Point]]:
    """The speed-ups of fastpar's rows in the order of their measurement, each once."""
    found: dict[Key, list[Point]] = {}
    for text in texts:
        try:
            stored = json.loads(text)
            machine, rows = slug(stored["machine"]), stored["rows"]
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # removed in that commit, or of a format before the first one
        for row in rows:
            speedup, base, variant = row.get("speedup"), row.get("baseline"), row.get("variant", "")
            if speedup and base not in (None, variant) and variant.startswith("fastpar"):
                point = Point(row.get("commit", ""), row.get("date", ""), base, float(speedup))
                key = (machine, *(row[k] for k in ("bench", "case", "direction", "variant")))
                points = found.setdefault(key, [])
                points += [point] * (point not in points)
    return found


def drop(points: Sequence[Point]) -> float:
    """Fraction by which the newest speed-up is below the one before it, over the same baseline."""
    if len(points) < 2 or points[-1].baseline != points[-2].baseline:
        return 0.0
    return max(0.0, 1 - points[-1].speedup / points[-2].speedup)


def render(found: dict[Key, list[Point]], remark: str) -> str:
    """The page: rows that were measured more than once, the largest drops first."""
    again = {key: points for key, points in found.items() if len(points) > 1}
    fell = {key: drop(points) for key, points in again.items()}
    order = sorted(again, key=lambda key: (-fell[key] if fell[key] > DROP else 0.0, key))
    lines = []
    for key in order:
        points = again[key]
        machine, bench, case, direction, variant = key
        shown = " -> ".join(f"{times(p.speedup)} ({p.commit[:7]})" for p in points[-SHOWN:])
        change = points[-1].speedup / points[-2].speedup - 1
        same = points[-1].baseline == points[-2].baseline
        flag = f"**{100 * change:+.0f} %**" if fell[key] > DROP else f"{100 * change:+.0f} %"
        what = case if case.startswith(bench) else f"{bench}: {case}"
        cells = [f"{what}, {direction}, {variant}", machine, points[-1].baseline, shown]
        lines.append([*cells, flag if same else "another baseline"])
    flagged = sum(fraction > DROP for fraction in fell.values())
    head = ["row", "machine", "against", "speed-ups by commit, oldest first", "last change"]
    text = [
        "# Speed-ups over commits",
        "",
        "Written by `python -m bench report --history` from the result files in git's history. "
        "A speed-up is of two variants in one run on the same machine.",
        "",
        f"{len(found)} rows of fastpar have been measured, {len(again)} of them more than once; "
        f"{flagged} fell by more than {100 * DROP:.0f} % the last time (bold).",
    ]
    if remark:
        text += ["", remark]
    if lines:
        text += ["", table(head, lines)]
    return "\n".join(text) + "\n"


def write(folder: Path = RESULTS) -> Path:
    """history.md in the folder of results."""
    texts, remark = versions(folder)
    path = folder / "history.md"
    path.write_text(render(points_of(texts), remark))
    return path
