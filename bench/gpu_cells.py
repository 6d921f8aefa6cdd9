"""Runs cells: checks and measurements on a GPU (gpu_checks.py) that cannot spoil each other.

A cell is one function. It runs in a forked child of a process that has imported torch, Triton and
fastpar but never touched CUDA, under a limit of its own, so a hang, a segmentation fault, a CUDA
error or a wrong result ends one cell and nothing else. Cells that check run AT_ONCE together; those
that time run alone. $OUT gets three files: report.json (whole after every cell), report.txt (a page
for a person) and logs.tar.gz. `python -m bench ingest report.json` makes results of the report.

[Note: shares] Cells run in the order in which they stand here, which is by value. Each belongs to a
stage, which is over END[stage] seconds after the first cell began: a cell that is late ends there
at the latest, so that it takes nothing from those of later stages. Its own limit begins when it
starts. A build takes from the last stages. What is left of a call of fewer seconds, the next call
does: cells that were ok with the same sources are kept.
"""

import collections
import contextlib
import faulthandler
import hashlib
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.records import ROOT, commit, machine_line
from fastpar.files.plain_files import write_text
from fastpar.kernels import choice
from fastpar.kernels.choice import OWN

LIMIT_S = 590.0
END = {  # of a stage, in seconds
    "facts": 25, "prove": 135, "headline": 210, "checks": 360, "compiled": 395, "large": 465,
    "tune": 590, "on request": 590,
}  # fmt: skip
AT_ONCE = 6
# quick: tiny shapes, does the code run? scratch: of this run, its children's files. known: device
# code that earlier reports found right.
RUN = SimpleNamespace(quick=False, device="cuda", scratch=Path(tempfile.gettempdir()), known={})
GOOD = ("ok", "proven")


@dataclass(frozen=True)
class Cell:
    """One check: run() returns what its row gets; note() adds to the row at once."""

    name: str
    run: Callable[[], dict[str, Any] | None]
    limit_s: float = 25.0
    stage: str = "checks"
    on_cpu: bool = True  # a rehearsal without a GPU can run it

    @property
    def alone(self) -> bool:
        """Whether another cell would disturb it."""
        return self.stage != "checks"


CELLS: list[Cell] = []
_row: dict[str, Any] = {}
_row_path: Path | None = None


def cell(stage: str, name: str, limit_s: float, **how: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        CELLS.append(Cell(name, run, limit_s, stage, **how))
        return run

    return add


def note(**found: Any) -> None:
    """What a cell has found so far: kept if it is stopped. at: how far it came, for the page."""
    _row.update(found)
    if _row_path is not None:
        write_text(_row_path, json.dumps(_row, default=str))


def _child(one: Cell, path: Path, log: Path, until: float, blocking: bool) -> None:
    """Never returns."""
    global _row_path
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    if blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    faulthandler.dump_traceback_later(max(1.0, until - time.time() - 1), file=2)
    _row_path, start, code = path, time.time(), 0
    torch.set_num_threads(2 if RUN.device == "cuda" else 1)
    note(status="stopped")
    try:
        found = one.run() or {}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of the last kernel is this cell's
            found["peak_mb"] = torch.cuda.max_memory_allocated() >> 20
        note(**{"status": "ok", **found})
    except BaseException as error:
        status = "wrong" if isinstance(error, AssertionError) else "error"
        text = f"{type(error).__name__}: {error}"[:3000]
        note(status=status, error=text, traceback=traceback.format_exc()[-12000:])
        code = 1
    note(seconds=round(time.time() - start, 2), blocking=blocking, serves=serves())
    note(cpu_s=round(time.process_time(), 2))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no destructors: CUDA may hang in them


def serves() -> dict[str, str]:
    """Who ran each class of calls of this process, where proofs decide: without it a slow row
    could be PyTorch's in disguise."""
    return {
        str(case): "/".join(dict.fromkeys(proof.serves)) if proof.chosen == OWN else proof.chosen
        for case, proof in choice.proofs.items()
    }


def sources_digest() -> str:
    """Of what a cell's result depends on in this tree."""
    digest = hashlib.sha256()
    for folder in ("csrc", "kernels", "fastpar", "bench", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json", ".cpp", ".cu", ".h") and "results" not in path.parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Runner:
    """Starts cells, ends those that are late, and keeps the report whole."""

    def __init__(self, out: Path, started: float, limit_s: float) -> None:
        self.out, self.started, self.begun = out, started, time.time()
        self.deadline, self.slower = started + limit_s, max(1.0, limit_s / LIMIT_S)
        self.rows: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {"mode": "all", "quick": RUN.quick, "commit": commit()[0]}
        self.head |= {"sources": sources_digest(), "device": RUN.device}
        self.dead = ""  # why nothing more can run
        self.running: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    def not_done(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that an earlier call on this machine did not find ok; its rows are kept."""
        same, done = ("quick", "sources", "device"), set[str]()
        with contextlib.suppress(OSError, ValueError, KeyError):
            report = json.loads((self.out / "report.json").read_text())
            if all(report[name] == self.head[name] for name in same):
                rows = [row for row in report["cells"] if row["status"] in GOOD]
                done = {row["cell"] for row in rows} & {c.name for c in cells} - {"facts"}
                for row in rows:
                    if row["cell"] in done:
                        self.keep(row)
        return [one for one in cells if one.name not in done]

    def keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        first = row.get("error", "").partition("\n")[0][:110]
        print(f"{row['status']:8} {row['cell']:34} {row.get('seconds', '')} {first}", flush=True)
        for found in ("about", "ceilings"):
            if found in row:
                self.head[found] = row[found]
        self.head["seconds"] = round(time.time() - self.started, 1)
        whole = {**self.head, "cells": self.rows}
        write_text(self.out / "report.json", json.dumps(whole, indent=1))

    def start(self, one: Cell, until: float, blocking: bool = False) -> dict[str, Any]:
        stem = one.name.replace("/", "_").replace(" ", "_") + "_again" * blocking
        path, log = RUN.scratch / f"{stem}.json", RUN.scratch / f"{stem}.log"
        slow = 1 if RUN.device == "cuda" else 2  # a CPU is a rehearsal
        limit = min(time.time() + slow * one.limit_s, until)
        pid = os.fork()
        if pid == 0:
            _child(one, path, log, limit, blocking)
        at = {"since": time.time(), "until": limit}
        return {"cell": one, "pid": pid, "path": path, "log": log, **at}

    def ended(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """The row of a child that is over; None while it runs."""
        pid, status = os.waitpid(run["pid"], os.WNOHANG)
        late = pid == 0 and time.time() > run["until"]
        if pid == 0 and not late:
            return None
        if late:
            os.killpg(run["pid"], signal.SIGKILL)
            give_up = time.time() + 5  # a process that is in the driver may not die at once
            while time.time() < give_up and os.waitpid(run["pid"], os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        row = {"cell": run["cell"].name}
        with contextlib.suppress(OSError, ValueError):
            row |= json.loads(run["path"].read_text())
        row.setdefault("seconds", round(time.time() - run["since"], 2))
        if late:
            row["status"] = "timeout"
        elif row.get("status", "stopped") == "stopped":
            row["status"] = "crash"
            row["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            row["rc"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        if row["status"] not in GOOD and run["log"].exists():
            text = run["log"].read_text(errors="replace")
            hung = text.rfind("Timeout (")  # its stacks begin with the innermost call
            row["stderr"] = text[hung:][:4000] if hung >= 0 else text[-4000:]
        return row

    def run(self, cells: Sequence[Cell], at_once: int) -> None:
        """Runs cells: neighbours that need not be alone together, the others one by one."""
        todo = list(cells)
        self.running = running = list[dict[str, Any]]()
        while todo or running:
            while todo and not self.dead:
                one = todo[0]
                until = min(self.deadline, self.begun + self.slower * END[one.stage])
                most = 1 if one.alone else at_once
                if len(running) >= most or any(r["cell"].alone for r in running):
                    break
                todo.pop(0)
                if time.time() > until - 2:
                    self.keep({"cell": one.name, "status": "no time"})
                else:
                    running.append(self.start(one, until))
            if self.dead and not running:
                for one in todo:
                    self.keep({"cell": one.name, "status": "no time", "error": self.dead})
                return
            for run in list(running):
                row = self.ended(run)
                if row is None:
                    continue
                running.remove(run)
                sticky = "CUDA error" in row.get("error", "")
                if sticky and not row.get("blocking") and RUN.device == "cuda":
                    running.append(self.start(run["cell"], time.time() + 30, blocking=True))
                self.keep(row)
                if row["status"] in ("timeout", "crash") or sticky:
                    self.check_health()
            time.sleep(0.01)

    def check_health(self) -> None:
        """After a hang or a crash: does the GPU still answer? Two tries."""
        if RUN.device != "cuda":
            return
        for _ in range(2):
            run = self.start(Cell("health", lambda: (torch.zeros(1).cuda(), {})[1]), 1e18)
            while (row := self.ended(run)) is None:
                time.sleep(0.05)
            if row["status"] == "ok":
                return
            time.sleep(2)
        self.dead = "the GPU does not answer any more; start again on another machine"
        print(self.dead, flush=True)

    def stop(self, *_: Any) -> None:
        """On a signal: no child outlives this process, and what was found is written."""
        for run in self.running:
            os.killpg(run["pid"], signal.SIGKILL)
        self.finish()
        os._exit(1)

    def finish(self) -> int:
        """Writes the page and the logs; 1 if a cell is not ok."""
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as tar:
            for path in sorted(RUN.scratch.glob("*.log")) + sorted(RUN.scratch.glob("*.gz")):
                tar.add(path, arcname=path.name)
        page = "\n".join(report(self.head, self.rows)) + "\n"
        (self.out / "report.txt").write_text(page)
        print(page)
        return int(any(row["status"] not in GOOD for row in self.rows))


def report(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A page: what failed first, with its first line; then figures."""
    about = head.get("about")
    lines = [machine_line(about) if about else f"commit {head['commit']}"]
    if "ceilings" in head:
        copy, product, what = head["ceilings"]
        lines.append(f"ceilings: copy {copy:.0f} GB/s, {what} {product:.0f} TFLOP/s")
    count = collections.Counter(row["status"] for row in rows)
    lines += [f"{head['seconds']:.0f} s: " + ", ".join(f"{n} {s}" for s, n in count.items()), ""]
    for row in rows:
        if row["status"] not in (*GOOD, "no time"):
            said = [line for line in row.get("error", "").splitlines() if line.strip()][:3]
            if not said and row["status"] == "timeout":
                said = [f"after {row['seconds']:.0f} s, at {row.get('at', 'its start')}"]
            said = said or [f"signal {row.get('signal')}, rc {row.get('rc')}, at {row.get('at')}"]
            lines += [f"{row['status'].upper():8} {row['cell']}: {said[0][:150]}"]
            lines += [f"         {line[:150]}" for line in said[1:]]
    for row in rows:
        if row["status"] in GOOD:
            lines.append(f"{row['status']:8} {row['cell']}: {row.get('shown', '')}"[:170])
    for row in rows:
        lines += [f"  {line[:170]}" for line in row.get("lines", ())]
        others = [f"{case} {who}" for case, who in row.get("serves", {}).items() if who != OWN]
        if others and "lines" in row:
            lines.append(f"  {row['cell']}: not by fastpar's kernels alone: {', '.join(others)}")
    left = [row["cell"] for row in rows if row["status"] == "no time"]
    return lines + ([f"no time was left for: {', '.join(left)}"] if left else [])
