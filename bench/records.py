"""Rows and the files they live in: bench/results/<device>_<date>.json, merged by key.

A row's key is bench/case/direction/variant/device. A new row replaces the old one of its key and no
other, so that benches run alone, in any order, and one that dies loses nothing of the others.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from fastpar.comm.ranks import available_cores
from fastpar.doctor.table import cpu_name
from fastpar.files.plain_files import reason, write_text
from fastpar.kernels import _C
from fastpar.predict.machine import version_of

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"  # tracked: the documents' tables are made from it
SCRATCH = ROOT / "build" / "bench"  # not tracked


@dataclass
class Row:
    """One measured variant. Times are of one call; None means not measured."""

    bench: str  # "layer_norm"
    case: str  # "layer_norm N=32768 C=768"
    direction: str  # "forward", "forward+backward", "step", ...
    variant: str  # "eager", "torch.compile", "fastpar", ...
    device: str  # "cpu" | "cuda"
    dtype: str
    threads: int = 0  # of the process, or of each rank
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    runs: int = 0
    host_us: float | None = None  # CPU time of the calling thread; to enqueue on an idle GPU
    compile_s: float | None = None  # of the first call, beyond the median
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    percent_of_ceiling: float | None = None
    ceiling: str | None = None  # "copy 4288 GB/s": measured by the same process
    baseline: str | None = None  # the variant that speedup compares with, in the same run
    speedup: float | None = None  # median over the turns of baseline's time / this one's
    interval: Sequence[float] | None = None  # of speedup, 95 % sure
    peak_bytes: int | None = None
    tokens_per_s: float | None = None
    refused: str | None = None  # why there is no time: a red check, an error, out of memory
    notes: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    dirty: bool = False  # the tree differed from commit
    date: str = ""

    @property
    def key(self) -> str:
        """Rows of one key replace each other."""
        return "/".join((self.bench, self.case, self.direction, self.variant, self.device))

    @property
    def baseline_ms(self) -> float | None:
        """The baseline's median in the same turns, which its own row need not show."""
        return self.speedup * self.median_ms if self.speedup and self.median_ms else None

    def compare(self, baseline: str, base_ms: Sequence[float], ms: Sequence[float]) -> None:
        """Beside the baseline's times in the same turns."""
        ratios = [theirs / own for theirs, own in zip(base_ms, ms)]
        self.baseline, self.speedup = baseline, statistics.median(ratios)
        self.interval = median_interval(ratios) if baseline != self.variant else None

    def add_first(self, ms: float) -> None:
        """The time of the first call, which compiles what it runs."""
        self.compile_s = max(0.0, ms - (self.median_ms or 0.0)) / 1e3

    @property
    def significant(self) -> bool:
        """Whether the times differ by more than chance."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    @property
    def times(self) -> str:
        """The speed-up with its interval: "1.20x (1.17 to 1.22), significant"."""
        if self.speedup is None:
            return ""
        low_high = f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})" if self.interval else ""
        return f"{self.speedup:.2f}x{low_high}{', significant' * self.significant}"

    def to_json(self) -> dict[str, Any]:
        kept = {k: v for k, v in asdict(self).items() if v is not None and v != {}}
        return {"key": self.key, **{k: _rounded(v) for k, v in kept.items()}}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Row:
        unknown = set(row) - {f.name for f in fields(cls)} - {"key"}
        if unknown:
            raise ValueError(
                f"Row.from_json: expected the fields of schema {SCHEMA}, got "
                f"fields={sorted(unknown)}; read the file with the version that wrote it"
            )
        return cls(**{k: v for k, v in row.items() if k != "key"})


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The two values between which the median of what they are drawn from lies, 95 % sure; None of
    fewer than 6. By order statistics (Hahn and Meeker 1991): each value is above the median with
    probability 1/2, whatever its distribution."""
    ordered, n, k = sorted(values), len(values), 0
    while sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= 0.025:
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _output(*command: str) -> str | None:
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


@functools.cache
def commit() -> tuple[str, bool]:
    """(commit, whether the tree differs from it); FASTPAR_COMMIT names it for a copy of a tree."""
    if "FASTPAR_COMMIT" in os.environ:
        return os.environ["FASTPAR_COMMIT"], False
    git = ("git", "-c", "safe.directory=*")
    head = _output(*git, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown", True
    changed = _output(*git, "status", "--porcelain", "--", ".", ":!bench/results", ":!README.md")
    return head, changed != ""


SEVERAL = {  # benches of one module
    "layouts": ("zero", "tp", "pp", "cp"),
    "links": ("overlap", "wires"),
    "ops": (
        "activation", "attention", "cross_entropy", "embedding", "gelu", "global_norm",
        "grouped_linear", "layer_norm", "linear", "linear_cross_entropy", "linear_fp8",
        "orthogonalize", "permute", "philox", "quantize", "route", "sum_shards",
    ),
}  # fmt: skip


def homes() -> dict[str, str]:
    """name -> the module of a bench."""
    found = {}
    for path in Path(__file__).parent.glob("*/bench_*.py"):
        stem = path.stem.removeprefix("bench_")
        for name in SEVERAL.get(stem, (stem,)):
            found[name] = f"bench.{path.parent.name}.{path.stem}"
    return found


def parser_of(name: str, about: str | None, *, device: bool = False) -> argparse.ArgumentParser:
    """Of a command. device: it runs on a CPU or a GPU."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m {name}", description=about, formatter_class=layout)
    if device:
        how = "default: cuda if there is a GPU"
        parser.add_argument("--device", choices=("cpu", "cuda"), help=how)
    return parser


def device_of(args: argparse.Namespace, command: str) -> str:
    """The device to run on.

    Raises:
        RuntimeError: a GPU was asked for and there is none.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"{command}: expected a GPU, got device=cuda; use --device cpu")
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    head, dirty = commit()
    about: dict[str, Any] = {
        "device": device, "cpu": cpu_name(),
        "isa": _C.isa() if _C else torch.backends.cpu.get_cpu_capability().lower(),
        "cores": available_cores(), "python": platform.python_version(), "torch": torch.__version__,
        "triton": version_of("triton"), "commit": head, "dirty": dirty,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    if device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
        query = "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        about["driver"] = _output("nvidia-smi", *query)
        about["cuda"] = torch.version.cuda
    return about


def cpu_of(about: dict[str, Any]) -> str:
    """The processor and its vector instructions, which earlier results do not record."""
    return f"{about['cpu']} ({about['isa']})" if "isa" in about else about["cpu"]


def machine_line(about: dict[str, Any]) -> str:
    """One line for the top of a table."""
    if about["device"] == "cuda":
        where = f"{about['gpu']}, driver {about['driver']}, CUDA {about['cuda']}"
    else:
        where = f"CPU: {cpu_of(about)}, {about['cores']} cores"
    tree = f"{about['commit']}{' + changes' if about['dirty'] else ''}"
    triton = about["triton"] or "none"
    return f"{where}; torch {about['torch']}, triton {triton}; commit {tree}; {about['date']}"


def slug(about: dict[str, Any]) -> str:
    """The machine's part of a result file's name."""
    cpu = f"cpu {cpu_of(about)} {about['cores']} cores"
    name = about["gpu"] if about["device"] == "cuda" else cpu
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def default_path(about: dict[str, Any], folder: Path) -> Path:
    return folder / f"{slug(about)}_{about['date']}.json"


class ResultFile:
    """Rows of one machine by key; every add() leaves a complete file behind."""

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any]):
        self.path = Path(path)
        self.about = about
        self.rows: dict[str, Row] = {}
        if self.path.exists():
            old, rows = load(self.path)
            if slug(old) != slug(about):
                raise ValueError(
                    f"ResultFile: expected rows of {slug(about)}, got "
                    f"path={self.path.name} with rows of {slug(old)}; choose another --out"
                )
            self.rows = {row.key: row for row in rows}

    def add(self, *rows: Row) -> None:
        for row in rows:
            row.commit, row.dirty, row.date = (self.about[k] for k in ("commit", "dirty", "date"))
            self.rows[row.key] = row
        stored = [row.to_json() for row in self.rows.values()]
        write_rows(self.path, {"machine": self.about}, stored)


def write_rows(path: Path, head: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """A file with a row a line, that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))
    text = json.dumps({"schema": SCHEMA, **head})[:-1] + f', "rows": [\n{lines}\n]}}\n'
    write_text(path, text)


def read_rows(path: Path, remedy: str) -> dict[str, Any]:
    """What write_rows wrote. ValueError: it is missing or of another format, and the remedy."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"load: expected a result file, got path={path.name} ({reason(error)}); {remedy}"
        ) from None
    schema = stored.get("schema") if isinstance(stored, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"load: expected schema={SCHEMA}, got {schema=} in {path.name}; {remedy}")
    return stored


def is_known(about: dict[str, Any]) -> bool:
    """Whether a machine has said what decides its times: its GPU, or its CPU's instruction set."""
    return bool(about.get("gpu") or about.get("isa"))


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Row]]:
    """The machine and the rows of a result file."""
    stored = read_rows(Path(path), "delete it and run `python -m bench` again")
    return stored["machine"], [Row.from_json(row) for row in stored["rows"]]
