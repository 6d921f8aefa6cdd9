"""The parts of `make gpu`: what a GPU must answer, correctness first, in less than 9 minutes each.

Every step runs in processes of its own with a share of the time that is left, writes into one new
folder, and is followed by a new archive of that folder: whenever a run ends, what it found so far
is there, and nothing of an earlier run can be taken for it. summary.txt, at most 100 lines, is
printed at the end. bench/gpu.sh builds and calls this.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.records import ROOT, machine, machine_line, slug

LIMIT_S = 525.0  # of a part, from the start of its build
MOST_LINES = 100
REHEARSAL = "rehearsal"  # how the name of an archive with --quick begins
NO_TESTS = 5  # pytest's exit status
ENGINE = ("optim", "parallel", "comm", "checkpoint", "train")  # rooms whose GPU tests come first


@dataclass(frozen=True)
class Step:
    """One command of a part."""

    name: str
    command: Sequence[str]  # of this Python; "" parts are left out
    most_s: float
    least_s: float = 20.0  # kept free for it by the steps before
    program: str = ""  # instead of this Python
    shown: str = ""  # a pattern: lines of its output that the summary shows


def correctness(device: str, quick: bool, folder: Path) -> list[Step]:
    """Part 1: is it right?"""
    on = ["--device", device, *["--quick"] * quick]
    tests = ["-m", "pytest", "-q", "--timeout=120", "-p", "no:cacheprovider"]
    apart = [*tests, *_workers(quick)]
    marked = ["-m", "gpu"] if device == "cuda" else ["-m", "not slow", "-k", "matches_oracle"]
    rooms = sorted({path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")})
    engine = [f"tests/{room}" for room in ENGINE]
    rest = [f"tests/{room}" for room in rooms if room not in ENGINE]
    few = ["-k", "matches_oracle"] if quick else []
    ops = [*apart, "-m", "not slow and not gpu", "tests/ops", *few]
    proofs = ["-m", "fastpar", "doctor", "--device", device, "--json", str(folder / "proofs.json")]
    kernels = ["-m", "gpu", "tests/ops/test_adamw_cuda.py", "tests/ops/test_global_norm.py"]
    shown = r"^(FAILED|ERROR)|\d+ (passed|failed)"
    return [
        Step("module", ["-c", _MODULE.format(device=device)], 60, shown="."),
        Step("smoke", ["-m", "bench.gpu_smoke", *on], 120, 60, shown=r"^(ok|WRONG|ms)"),
        Step("proofs", proofs, 110, 60, shown=r"own|WRONG|slower"),
        Step("tests of the engine", [*apart, *marked, *engine], 100, shown=shown),
        Step("tests of the rest", [*apart, *marked, *rest], 100, shown=shown),
        Step("tests of ops", ops, 120, shown=shown),
        Step(
            "sanitizer",
            [sys.executable, *tests, *kernels],
            90,
            program="compute-sanitizer",
            shown=f"{shown}|ERROR SUMMARY",
        ),
    ]


def speed(device: str, quick: bool, folder: Path) -> list[Step]:
    """Part 2: is it fast? GPT-2 124M beside plain PyTorch, larger models, where the time goes."""
    on = ["--device", device, *["--quick"] * quick]
    rows = [*on, "--out", str(folder / "rows.json")]
    profile = ["-m", "bench.systems.profile_gpt2", *on, "--out", str(folder / "profile")]

    def train(case: str, most_s: float, least_s: float) -> Step:
        command = ["-m", "bench", f"train:{case}", *rows]
        return Step(f"train {case}", command, most_s, least_s, shown="fastpar|eager|compile")

    return [
        train("124M", 170, 60),
        Step("profile", profile, 100, 40, shown=r"%|ms"),
        train("1.5B", 170, 60),
        Step("plan", ["-m", "bench", "plan", *rows], 120, 50, shown=r"gpt2|%"),
        Step("offload", ["-m", "bench", "offload", *rows], 100, 30, shown="fastpar"),
        train("best batch", 120, 20),
    ]


def details(device: str, quick: bool, folder: Path) -> list[Step]:
    """Part 3: the tuning list, single ops, what hides behind emulated links."""
    on = ["--device", device, *["--quick"] * quick]
    rows = [*on, "--out", str(folder / "rows.json")]
    tune = ["-m", "bench", "tune", "--out", str(folder / "proofs.json"), "--device", device]
    tune += ["--minutes", "2.2", "--commit-results"] if device == "cuda" else ["--minutes", "0.2"]
    tune += ["bias_gelu"] * quick
    errors = ["-m", "bench", "errors", *on, "--out", str(folder / "errors.json")]
    return [
        Step("tuning list", tune, 150, shown=r"^==|chosen|refused|not "),
        Step("ops", ["-m", "bench", *_OPS, *rows], 180, 90, shown="fastpar"),
        Step("errors", errors, 60, shown="fails|rows in"),
        Step("emulated links", ["-m", "bench", "emulated", *rows], 90, 45, shown="fastpar"),
        Step("tensor parallel", ["-m", "bench", "tp", *rows], 110, 30, shown="fastpar"),
    ]


PARTS = {1: correctness, 2: speed, 3: details}
_MODULE = (
    "from fastpar.kernels import _C, backend; print(backend.describe()); "
    "assert '{device}' != 'cuda' or _C.built_with_cuda, 'the module has no CUDA'"
)
_OPS = (
    *("ceilings", "adamw", "global_norm", "bucket", "quantize", "attention", "layer_norm"),
    *("linear_cross_entropy", "cross_entropy", "gelu", "embedding", "philox", "linear", "gelu_mlp"),
    *("orthogonalize", "route", "permute", "grouped_linear"),
)


def _workers(quick: bool) -> list[str]:
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", "2" if quick else "8"]


class Part:
    """One part of a run: its folder, archive and summary."""

    def __init__(
        self, number: int, device: str, out: Path, started: float, kind: str = "gpu"
    ) -> None:
        about = machine(device)
        self.name = f"{kind}_part{number}_{slug(about)}_{time.strftime('%Y-%m-%d_%H%M%S')}"
        self.out, self.deadline = out, started + LIMIT_S
        self.folder = out / self.name
        self.folder.mkdir(parents=True)
        self.lines = [f"part {number}: {machine_line(about)}"]
        self.failed: list[str] = []

    def run(self, step: Step, kept_s: float) -> None:
        """One step, in the time that is left but for what later steps need."""
        begin = time.time()
        left = self.deadline - begin - kept_s
        limit = min(step.most_s, left)
        program = shutil.which(step.program) if step.program else sys.executable
        if program is None:
            self.lines.append(f"{step.name}: left out, {step.program} is not installed")
            return
        if left < 5:
            self.failed.append(step.name)
            self.lines.append(f"{step.name}: NOT STARTED, no time is left")
            return
        log = self.folder / f"{step.name.replace(' ', '_')}.log"
        status = _run([program, *step.command], limit, log)
        seconds = time.time() - begin
        if status == 0:
            self.lines.append(f"{step.name}: ok, {seconds:.0f} s")
        elif status == NO_TESTS and "pytest" in step.command:
            self.lines.append(f"{step.name}: none is collected here")
        else:
            self.failed.append(step.name)
            why = f"stopped after {limit:.0f} s" if status is None else f"exit status {status}"
            self.lines.append(f"{step.name}: FAILED, {why}")
        text = log.read_text(errors="replace").splitlines()
        shown = [line for line in text if step.shown and re.search(step.shown, line)]
        self.lines += [f"    {line[:160]}" for line in (shown or text)[-14:]]

    def archive(self) -> Path:
        """The folder as one file, replaced whole."""
        (self.folder / "summary.txt").write_text("\n".join(self.summary()) + "\n")
        path = self.out / f"{self.name}.tar.gz"
        partial = path.with_suffix(".tmp")
        with tarfile.open(partial, "w:gz") as tar:
            tar.add(self.folder, arcname=self.name)
        os.replace(partial, path)
        return path

    def summary(self) -> list[str]:
        """At most MOST_LINES lines: of longer ones the details in the middle go first."""
        lines = list(self.lines)
        details = [i for i, line in enumerate(lines) if line.startswith("    ")]
        for i in reversed(details[: max(0, len(lines) - MOST_LINES + 2)]):
            del lines[i]
        verdict = f"FAILED: {', '.join(self.failed)}" if self.failed else "all steps are ok"
        return [*lines[: MOST_LINES - 1], verdict]


def _run(command: Sequence[str], limit_s: float, log: Path) -> int | None:
    """Exit status; None when it had to be stopped, with all that it started."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # pytest and benches say how far they came
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return None


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that are asked for; 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", type=int, action="append", choices=sorted(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the code run?")
    parser.add_argument("--started", type=float, default=time.time(), help="of the build")
    parser.add_argument("--build-log", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu.sh: expected a GPU that torch can use, got none from {sys.executable}; set "
            "PYTHON, or use --device cpu --quick",
            file=sys.stderr,
        )
        return 2
    status = 0
    for i, number in enumerate(args.part or PARTS):
        started, kind = time.time() if i else args.started, REHEARSAL if args.quick else "gpu"
        part = Part(number, args.device, args.out, started, kind)
        if args.build_log is not None and args.build_log.exists():
            shutil.copy(args.build_log, part.folder / "build.log")
        steps = PARTS[number](args.device, args.quick, part.folder)
        for at, step in enumerate(steps):
            print(f"== {step.name}", flush=True)
            part.run(step, sum(later.least_s for later in steps[at + 1 :]))
            archive = part.archive()
        if number == 3 and args.device == "cuda":
            for table in (ROOT / "kernels").glob("*.json"):
                shutil.copy(table, part.folder)
            archive = part.archive()
        print("\n".join(part.summary()))
        print(f"archive: {archive}", flush=True)
        status |= bool(part.failed)
    return status


if __name__ == "__main__":
    sys.exit(main())
