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
from fastpar.doctor.clocks import CpuClock
from fastpar.kernels import make_key
from fastpar.measure.ceilings import Ceilings

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


def test_gpu_cases_of_attention(gpu_cases):
    cases = gpu_cases("attention")
    for T in (1024, 4096, 16384):
        for D in (64, 128):
            case = cases[f"attention B={16384 // T} H={768 // D} T={T} D={D}"]
            assert {"sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash-attn 2"} <= {
                *case.variants
            }
            assert ("sdpa-math" in case.variants) == (T == 1024)
            assert {"forward", "backward"} <= {*case.directions}
    best = "x the best of sdpa-flash, sdpa-cudnn"
    targets = {
        name: {d: [str(t) for t in ts] for d, ts in case.targets.items()}
        for name, case in cases.items()
    }
    first = targets["attention B=16 H=12 T=1024 D=64"]
    assert first == {"forward": [f">= 1.15{best}"], "backward": [f">= 1.1{best}"]}
    for D, H in ((64, 12), (128, 6)):
        long = targets[f"attention B=1 H={H} T=16384 D={D}"]
        assert long == {"forward": [f">= 0.95{best}"], "backward": [f">= 0.95{best}"]}
    masked = targets["attention B=16 H=12 T=1024 D=64 dropout 0.1"]
    assert masked == {"backward": [">= 0.926x fastpar without dropout"]}  # 8 % slower
    assert (
        "fastpar without dropout" in cases["attention B=1 H=12 T=16384 D=64 dropout 0.1"].variants
    )


def test_gpu_cases_of_the_norms(gpu_cases):
    cases = gpu_cases("layer_norm")
    for C in (768, 1024, 1280, 1600):
        assert {f"layer_norm N=32768 C={C}", f"residual_layer_norm N=32768 C={C}"} <= {*cases}
    stock = ">= 1x the best of eager, torch.compile"
    for C in (768, 1600):
        plain = cases[f"layer_norm N=32768 C={C}"]
        assert "liger" in plain.variants
        assert plain.compiled
        assert {d: [str(t) for t in ts] for d, ts in plain.targets.items()} == {
            "forward": [">= 90 % of the ceiling", stock],
            "backward": [">= 75 % of the ceiling", stock],
        }
        fused = cases[f"bias + dropout + residual_layer_norm N=32768 C={C}"]
        assert fused.compiled
        for direction in ("forward", "backward"):
            found = [str(t) for t in fused.targets[direction]]
            assert found == [">= 1.5x eager", ">= 1.1x torch.compile"]


def test_gpu_cases_of_the_losses(gpu_cases):
    cases = gpu_cases("linear_cross_entropy")
    assert {*cases} == {
        f"linear_cross_entropy N={N} C={C} V=50304" for N in (16384, 32768) for C in (768, 1600)
    }
    for case in cases.values():
        found = [str(t) for t in case.targets["forward+backward"]]
        assert found == [">= 1x eager", ">= 1x torch.compile", "peak <= 15 % of eager"]
        assert case.compiled
        assert case.track_peak
        assert "liger" in case.variants
        assert hasattr(torch.nn, "LinearCrossEntropyOptions") == ("torch chunked" in case.variants)
    (case,) = gpu_cases("cross_entropy").values()
    assert case.track_peak
    assert {"fastpar", "fastpar in place", "liger"} <= {*case.variants}
    assert {*case.in_place} == {"fastpar in place", "liger"}


@pytest.mark.parametrize("name", BY_CASE)
def test_every_gpu_case_has_an_oracle_and_a_rate(name, gpu_cases):
    for case in gpu_cases(name).values():
        assert case.oracle is not None or case.check is not None
        for direction in case.directions:
            assert case.bytes_moved.get(direction) or case.flops.get(direction)
        assert {*case.unjudged} <= {*case.variants, "torch.compile"}
        assert "fastpar" not in case.unjudged
