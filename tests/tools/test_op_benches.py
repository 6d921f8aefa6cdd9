"""Every op's bench: tiny shapes run on the CPU, and the GPU's cases carry the peers and targets."""

import importlib
from dataclasses import replace

import pytest
import torch
from cells import slow
from test_records import ABOUT

from bench.__main__ import homes
from bench.harness import Bench
from bench.records import ResultFile
from bench.report.tables import OPS
from fastpar.doctor.trial import CpuClock
from fastpar.kernels import make_key
from fastpar.predict.machine import Ceilings

# These make calls of their own.
BY_CASE = [name for name in sorted(OPS) if name not in ("adamw", "shm")]
# Each library draws masks of its own; and torch's flash kernel for CPUs has no dropout.
WITHOUT_CPU_DROPOUT = "sdpa-flash"


class Collect:
    """Stands for a Bench whose device is not there."""

    device, quick, only = "cuda", False, ""

    def __init__(self):
        self.cases = []

    def run(self, cases):
        self.cases += cases


@pytest.fixture
def gpu_cases(monkeypatch):
    def cases(name):
        module = importlib.import_module(homes()[name])
        if hasattr(module, "make_key"):
            monkeypatch.setattr(
                module, "make_key", lambda seed, first, device: make_key(seed, first)
            )
        collected = Collect()
        module.run(collected)
        return {case.name: case for case in collected.cases}

    return cases


@pytest.mark.parametrize("name", [n if n == "layer_norm" else slow(n) for n in sorted(OPS)])
def test_quick_run_on_the_cpu(name, tmp_path, monkeypatch):
    """Without torch.compile, whose part test_bench.py covers: it takes most of the time."""
    results = ResultFile(tmp_path / "rows.json", ABOUT)
    ceilings = Ceilings(100.0, 1.0, "fp32 64^3")
    bench = Bench(name, "cpu", True, results, clock=CpuClock(), ceilings=ceilings)
    run = bench.run
    monkeypatch.setattr(
        bench, "run", lambda cases: run([replace(c, compiled=False) for c in cases])
    )
    if name == "adamw":
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    importlib.import_module(homes()[name]).run(bench)
    rows = list(results.rows.values())
    assert any(row.variant == "fastpar" for row in rows)
    for row in rows:
        if row.refused is not None:
            cannot = row.variant == WITHOUT_CPU_DROPOUT and "dropout" in row.case
            assert cannot or row.refused.endswith("is not installed")
            assert not row.variant.startswith("fastpar")
        assert "targets" not in row.notes  # they are for full shapes


@pytest.mark.parametrize("name", BY_CASE)
def test_every_gpu_case_has_an_oracle_and_a_rate(name, gpu_cases):
    for case in gpu_cases(name).values():
        assert case.oracle is not None or case.check is not None
        for direction in case.directions:
            assert case.bytes_moved.get(direction) or case.flops.get(direction)
        assert {*case.unjudged} <= {*case.variants, "torch.compile"}
        assert "fastpar" not in case.unjudged
