"""The timer, its gate, and the door."""

import importlib
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_records import ABOUT

from bench import __main__ as door
from bench.harness import Bench, Case
from bench.ops import bench_adamw, bench_quantize
from bench.peers import packages
from bench.records import ResultFile, load
from bench.targets import faster
from fastpar.doctor.trial import CpuClock
from fastpar.kernels.reference import bias_gelu_ref
from fastpar.predict.machine import Ceilings

ROOT = Path(__file__).resolve().parents[2]


def make_bench(tmp_path, name="gelu", **kwargs):
    results = ResultFile(tmp_path / "rows.json", ABOUT)
    ceilings = Ceilings(100.0, 1.0, "fp32 64^3")
    return Bench(name, "cpu", True, results, clock=CpuClock(), ceilings=ceilings, **kwargs)


# The gate


def gelu_case(ours, **changes):
    def make_inputs(generator, small):
        x = torch.randn(8, 16, generator=generator)
        return x.requires_grad_(), torch.randn(16, generator=generator).requires_grad_()

    case = Case(
        "bias_gelu",
        make_inputs,
        {
            "eager": lambda x, b: torch.nn.functional.gelu(x + b, approximate="tanh"),
            "fastpar": ours,
        },
        bias_gelu_ref,
        torch.float32,
        bytes_moved={"forward": 1e3, "forward+backward": 2e3},
        compiled=False,
    )
    return replace(case, **changes)


def test_right_variant_gets_a_row_with_rates(tmp_path):
    bench = make_bench(tmp_path)
    bench.run([gelu_case(bias_gelu_ref)])
    _, rows = load(tmp_path / "rows.json")
    assert [(r.direction, r.variant) for r in rows] == [
        (direction, variant)
        for direction in ("forward", "forward+backward")
        for variant in ("eager", "fastpar")
    ]
    for row in rows:
        assert row.refused is None
        assert row.median_ms > 0
        assert row.gb_per_s == pytest.approx(
            (1e3 if row.direction == "forward" else 2e3) / row.median_ms / 1e6, rel=1e-4
        )
        assert row.percent_of_ceiling == pytest.approx(row.gb_per_s, rel=1e-4)  # of 100 GB/s
        assert row.ceiling == "copy 100 GB/s"
        assert row.baseline == "eager"
        assert row.threads == torch.get_num_threads()


def test_wrong_output_is_refused_and_said(tmp_path, capsys):
    make_bench(tmp_path).run([gelu_case(lambda x, b: bias_gelu_ref(x, b) * 1.001)])
    _, rows = load(tmp_path / "rows.json")
    ours = [r for r in rows if r.variant == "fastpar"]
    assert len(ours) == 2
    for row in ours:
        assert row.median_ms is None
        assert row.refused.startswith("AssertionError: output 0: expected error <=")
    assert all(r.median_ms for r in rows if r.variant == "eager")
    assert "refused: AssertionError: output 0" in capsys.readouterr().out


def test_wrong_gradient_is_refused_in_the_direction_that_shows_it(tmp_path):
    def ours(x, b):
        return bias_gelu_ref(x, b.detach())

    make_bench(tmp_path).run([gelu_case(ours)])
    _, rows = load(tmp_path / "rows.json")
    refused = {r.direction: r.refused for r in rows if r.variant == "fastpar"}
    assert refused["forward"] is None
    assert "results: expected" in refused["forward+backward"]


def test_peers_may_round_worse_but_not_compute_something_else(tmp_path):
    def coarse(x, b):  # more than twice eager's error
        y = bias_gelu_ref(x, b)
        return y + 2 * torch.finfo(y.dtype).eps * y.detach().abs().max()

    case = gelu_case(coarse, directions=("forward",))
    make_bench(tmp_path).run([case])
    case.variants = {"eager": case.variants["eager"], "peer": coarse}
    make_bench(tmp_path).run([case])
    case.variants = {"eager": case.variants["eager"], "other": lambda x, b: x * b}
    make_bench(tmp_path).run([case])
    refused = {r.variant: r.refused for r in load(tmp_path / "rows.json")[1]}
    assert refused["fastpar"]
    assert refused["peer"] is None
    assert refused["other"]


@pytest.mark.slow
def test_compiled_backward_alone(tmp_path):
    """Runs again and again although torch.compile would give its buffers away."""
    case = gelu_case(bias_gelu_ref, compiled=True, directions=("backward",))
    make_bench(tmp_path).run([case])
    _, rows = load(tmp_path / "rows.json")
    assert {r.variant: r.refused for r in rows} == {
        "eager": None,
        "fastpar": None,
        "torch.compile": None,
    }


def test_a_variant_that_overwrites_its_input_comes_last(tmp_path, monkeypatch):
    """Or those after it would be judged and timed on what it left."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def overwrites(x, b):
        y = bias_gelu_ref(x, b)
        with torch.no_grad():
            x.zero_()
        return y

    case = gelu_case(bias_gelu_ref, directions=("forward",), in_place=("liger",), compiled=True)
    case.variants = {"liger": overwrites, **case.variants}
    make_bench(tmp_path).run([case])
    _, rows = load(tmp_path / "rows.json")
    assert [r.variant for r in rows] == ["eager", "fastpar", "torch.compile", "liger"]
    assert all(r.refused is None for r in rows)


def test_targets_go_into_the_notes_of_fastpar_alone(tmp_path):
    case = gelu_case(bias_gelu_ref, targets={"forward": [faster(2.0, "eager")]})
    make_bench(tmp_path).run([case])
    case.variants["fastpar"] = lambda x, b: x  # wrong: refused, and still bound to its target
    make_bench(tmp_path, only="bias").run([replace(case, name="bias wrong")])
    _, rows = load(tmp_path / "rows.json")
    noted = {(r.case, r.direction, r.variant): r.notes for r in rows if r.notes}
    assert noted == {
        (name, "forward", "fastpar"): {"targets": [["speed", 2.0, "eager"]]}
        for name in ("bias_gelu", "bias wrong")
    }


def test_a_peer_that_is_not_installed_is_a_visible_row(tmp_path):
    case = gelu_case(bias_gelu_ref, directions=("forward",))
    case.variants["liger"] = packages.installed("no_such_package.ops", "gelu")
    make_bench(tmp_path).run([case])
    _, rows = load(tmp_path / "rows.json")
    assert rows[-1].refused == "ImportError: no_such_package is not installed"
    assert packages.installed("math", "sqrt")(9.0) == 3.0


@pytest.mark.parametrize("variant", [*bench_adamw.STORAGE, "fp32"])
@pytest.mark.parametrize("wrong", [{"lr": 1.2e-3}, {"beta1": 0.8}, {"beta2": 0.8}])
def test_adamw_check_sees_a_wrong_step(variant, wrong, monkeypatch):
    mode = bench_adamw.STORAGE.get(variant, bench_adamw.FP32)
    bench_adamw.check("fastpar", mode, "cpu")
    right = bench_adamw.adamw_step_

    def step(*args, **kwargs):
        *tensors, values = args
        right(*tensors, values._replace(**wrong), **kwargs)

    monkeypatch.setattr(bench_adamw, "adamw_step_", step)
    with pytest.raises(AssertionError, match="expected error"):
        bench_adamw.check("fastpar", mode, "cpu")


@pytest.mark.parametrize("way", bench_quantize.WAYS)
@pytest.mark.parametrize("form", [bench_quantize.INT8, bench_quantize.INT4])
def test_quantize_check_sees_a_wrong_code(form, way, monkeypatch):
    bench_quantize.check("fastpar", form, way, "cpu")
    right = bench_quantize.quantize_blockwise

    def one_level_off(x, **how):
        codes, scales = right(x, **how)
        codes.view(torch.int8)[3] += 2
        return codes, scales

    monkeypatch.setattr(bench_quantize, "quantize_blockwise", one_level_off)
    with pytest.raises(AssertionError, match="codes: expected errors within"):
        bench_quantize.check("fastpar", form, way, "cpu")


def test_in_place_variants_are_judged_on_copies(tmp_path):
    def eager(x, bias):
        return x.add_(bias)

    def wrong(x, bias):
        return x.add_(bias, alpha=1.001)

    variants = {"eager": eager, "ours": eager, "fastpar": eager, "fastpar wrong": wrong}
    case = gelu_case(
        eager, variants=variants, oracle=eager, directions=("call",), in_place=tuple(variants)
    )
    bench = make_bench(tmp_path)
    bench.run([case])
    refused = {row.variant: row.refused for row in bench.results.rows.values()}
    assert refused.pop("fastpar wrong").startswith("AssertionError: output 0")
    assert set(refused.values()) == {None}


def test_every_op_has_a_bench_that_can_be_run():
    found = door.names()
    assert found[-1] == "train"
    modules = {p.stem for p in (ROOT / "kernels").glob("*.py")}
    ops = {stem for stem in modules if "triton" not in stem}
    parts = {stem for stem in ops if stem.startswith(("adamw_", "attention_", "layer_norm_"))}
    parts |= {stem for stem in ops if stem.endswith("_configs")}
    parts |= {"cross_entropy_shard", "choice", "config_table", "host", "weight_gradients"}
    assert ops - {"__init__", "backend", "op", "reference", *parts} <= set(found)
    for name in found:
        module = importlib.import_module(door.homes()[name])
        assert set(module.TIME_LIMIT_S) == {"cpu", "cuda"}
        assert callable(module.run)


# The door


def run(*command, **env):
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
    )


def test_bench_refuses_bad_arguments_in_one_line(capsys):
    assert door.main(["nope"]) == 2
    assert "bench: expected one of adamw, " in capsys.readouterr().err
    assert door.main(["gelu", "--quick", "--commit-results"]) == 2
    assert "bench: expected full shapes and no --out" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert door.main(["gelu", "--device", "cuda"]) == 2
        assert "bench: expected a GPU, got device=cuda" in capsys.readouterr().err


@pytest.mark.slow
def test_one_bench_that_runs_out_of_time_does_not_stop_the_next(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []
    apart = door.run_apart

    def run_apart(name, args, left_s):
        args.time_limit = 0.2 if name == "gelu" else 60.0
        started.append(name)
        return apart(name, args, left_s)

    monkeypatch.setattr(door, "run_apart", run_apart)
    out = tmp_path / "rows.json"
    arguments = ["gelu", "route", "--device", "cpu", "--quick", "--out", str(out)]
    assert door.main(arguments) == 1
    assert started == ["gelu", "route"]
    printed = capfd.readouterr().out
    assert "== gelu: stopped after 0 s; its rows so far are kept" in printed
    assert "failed: gelu" in printed
    # Of tiny shapes no time, rate or ratio.
    assert re.search(r"\n(\d+) of \1 rows ran\n", printed)
    assert not re.search(r"\d ms|[GT]B/s|FLOP/s|\d %|\dx ", printed)
    assert "report --results" not in printed
    assert {row.bench for row in load(out)[1]} == {"route"}
