"""How long csrc/ takes to compile and link: the CPU module alone, and with the CUDA kernels.

As many jobs run as there are cores. A row is one build, of a copy of the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.harness import Bench
from bench.records import ROOT, reason
from bench.targets import Target, note

TIME_LIMIT_S = {"cpu": 900, "cuda": 300}
LIMITS_MS = {"CPU module": 60e3, "with CUDA": 240e3}


def build_ms(with_cuda: bool, quick: bool) -> float:
    """Wall time of a full build; quick: of the smallest source alone."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(ROOT / "setup.py", copy)
        ignore = shutil.ignore_patterns("*_cpu.cpp", "bindings*", "*.cu") if quick else None
        shutil.copytree(ROOT / "csrc", copy / "csrc", ignore=ignore)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "lib"]
        environment = {**os.environ, "FASTPAR_CUDA": str(int(with_cuda))}
        start = time.perf_counter()
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        spent = (time.perf_counter() - start) * 1e3
        if done.returncode:
            raise RuntimeError(f"build_ms: expected a build, got {done.stderr[-200:]}")
        return spent


def run(bench: Bench) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for name, limit_ms in LIMITS_MS.items():
        with_cuda = name == "with CUDA"
        if with_cuda and not shutil.which("nvcc"):
            continue
        row = bench.row(f"build, {name}, {cores} cores", "build", "fastpar", torch.float32)
        row.notes = {} if bench.quick else note([Target("time", limit_ms)])
        try:
            row.median_ms = row.p20_ms = row.p80_ms = build_ms(with_cuda, bench.quick)
            row.runs = 1
        except Exception as error:
            row.refused = reason(error)
        bench.add(row)
