"""Benches: the gate refuses what is wrong, rows outlive what dies, each runs, and the report."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cells import slow

from bench import __main__ as door
from bench import gpu_cells, gpu_checks, ingest
from bench.harness import Bench, Case
from bench.ops import tune
from bench.peers import packages
from bench.peers.published import TOLERANCE, predict, published, table
from bench.records import RESULTS, ResultFile, Row, load, machine, median_interval
from bench.report import report
from bench.systems import compare, steps
from fastpar.comm.ranks import RankFailed
from fastpar.doctor.table import VERSION
from fastpar.doctor.trial import CpuClock, launches_of
from fastpar.kernels.reference import bias_gelu_ref
from fastpar.predict import plan
from fastpar.predict.machine import Ceilings

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {
    "device": "cpu", "cpu": "Test CPU (R) 9000", "cores": 2, "python": "3.11.0", "torch": "2.13.0",
    "triton": None, "commit": "abc", "dirty": False, "date": "2026-01-02",
}  # fmt: skip


def make_row(**changes):
    values = {
        "bench": "gelu", "case": "bias_gelu N=1 F=2", "direction": "forward", "variant": "eager",
        "device": "cpu", "dtype": "float32", "threads": 2, "median_ms": 2.0, "p20_ms": 1.5,
        "p80_ms": 3.0, "runs": 9, "gb_per_s": 12.0, "percent_of_ceiling": 34.5,
        "baseline": "eager", "speedup": 1.0,
    }  # fmt: skip
    return Row(**{**values, **changes})


def make_bench(tmp_path, name="gelu", **more):
    results = ResultFile(tmp_path / "rows.json", ABOUT)
    ceilings = Ceilings(100.0, 1.0, "fp32 64^3")
    return Bench(name, "cpu", True, results, clock=CpuClock(), ceilings=ceilings, **more)


def gated(tmp_path, **variants):
    """What becomes of variants of a bias + GELU, by name and direction."""

    def make_inputs(generator, small):
        x = torch.randn(8, 16, generator=generator)
        return x.requires_grad_(), torch.randn(16, generator=generator).requires_grad_()

    moved = {"forward": 1e3, "forward+backward": 2e3}
    eager = {"eager": lambda x, b: torch.nn.functional.gelu(x + b, approximate="tanh")}
    case = Case("bias_gelu", make_inputs, eager | variants, bias_gelu_ref, torch.float32, moved)
    make_bench(tmp_path).run([replace(case, compiled=False)])
    return {(row.variant, row.direction): row for row in load(tmp_path / "rows.json")[1]}


def coarse(x, b):  # more than twice eager's error
    y = bias_gelu_ref(x, b)
    return y + 2 * torch.finfo(y.dtype).eps * y.detach().abs().max()


GATE = [  # a variant, what it computes, why each direction is refused; None: it is timed
    ("fastpar", bias_gelu_ref, None, None),
    ("fastpar", lambda x, b: bias_gelu_ref(x, b) * 1.001, "output 0: expected er", "output 0: ex"),
    ("fastpar", lambda x, b: bias_gelu_ref(x, b.detach()), None, "results: expected"),
    ("fastpar", coarse, "output 0: expected error", "output 0: expected error"),
    ("peer", coarse, None, None),  # may round worse, but not compute something else
    ("peer", lambda x, b: x * b, "output 0: expected error", "output 0: expected error"),
    ("liger", packages.installed("no_such.ops", "gelu"), "no_such is not installed", "not instal"),
]


@pytest.mark.parametrize(("name", "function", "forward", "both"), GATE)
def test_what_is_wrong_has_a_reason_in_the_place_of_a_time(tmp_path, name, function, forward, both):
    found = gated(tmp_path, **{name: function})
    for direction, why in (("forward", forward), ("forward+backward", both)):
        row, eager = found[name, direction], found["eager", direction]
        assert eager.median_ms > 0
        if why is not None:
            assert why in row.refused
            assert row.median_ms is None
            continue
        assert row.refused is None
        moved = 1e3 if direction == "forward" else 2e3
        assert row.gb_per_s == pytest.approx(moved / row.median_ms / 1e6, rel=1e-4)
        assert row.percent_of_ceiling == pytest.approx(row.gb_per_s, rel=1e-4)  # of 100 GB/s
        assert (row.ceiling, row.baseline) == ("copy 100 GB/s", "eager")


def test_weights_and_losses_of_another_run_are_refused():
    reference = {"error": 4e-6, "loss_error": 1e-7, "loss": 5.5}
    good = {"error": 7e-6, "first_loss": 5.5}
    assert steps.judge_weights([good, good], reference) == 7e-6
    for wrong in ({"error": 1e-5}, {"error": float("nan")}, {"first_loss": 5.50002}):
        with pytest.raises(RankFailed, match="expected"):
            steps.judge_weights([{**good, **wrong}, good], reference)
    logs = {name: steps.Log(losses=[5.0, 4.0]) for name in ("DDP", "FSDP2")}
    for loss in (4.001, float("nan")):
        logs["FSDP2"] = steps.Log(losses=[5.0, loss])
        steps.judge_losses(logs, "DDP")
        assert "losses: expected those of DDP within 0.0001, got" in logs["FSDP2"].refused


def test_a_speed_up_has_the_interval_of_its_median():
    """By order statistics: of n values, the k-th from either end leaves a tail of at most 2.5 %."""
    assert median_interval([1.0] * 5) is None  # the extremes of 5 miss the median in 1 of 16
    assert median_interval([6.0, 1.0, 3.0, 2.0, 5.0, 4.0]) == (1.0, 6.0)  # 2 / 2^6 = 3 %
    assert median_interval(range(100)) == (39, 60)  # ranks 40 and 61, as tables have them
    rng, missed = np.random.default_rng(0), 0
    for _ in range(400):  # of a skewed distribution whose median is 1
        low, high = median_interval(rng.lognormal(size=15))
        missed += not low <= 1 <= high
    assert missed <= 30  # 3.5 % are expected, 14; 30 has probability 1e-4


def test_only_what_differs_by_more_than_chance_is_called_significant():
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]  # the machine slows down: turns alone compare
    for factor, significant in ((2.0, True), (1.0, False)):
        noise = [1.1, 0.9, 1.0, 1.05, 0.95, 1.0]
        row = make_row(variant="fastpar", speedup=None)
        row.compare("eager", [factor * x * n for x, n in zip(drift, noise)], drift)
        assert row.speedup == pytest.approx(factor)
        assert row.interval == pytest.approx((0.9 * factor, 1.1 * factor))
        assert row.significant == row.times.endswith("), significant") == significant
        assert Row.from_json(json.loads(json.dumps(row.to_json()))).times == row.times
    row.compare("fastpar", drift, drift)
    assert (row.times, row.significant) == ("1.00x", False)


def test_compilation_is_told_apart_from_running(tmp_path):
    def compiled(x, b, seen=set()):  # noqa: B006 - what it has compiled
        if x.shape not in seen:
            time.sleep(0.3)
        seen.add(x.shape)
        return bias_gelu_ref(x, b)

    found = gated(tmp_path, fastpar=compiled)
    assert found["fastpar", "forward"].compile_s > 0.2
    assert found["eager", "forward"].host_us > 0


def test_rows_merge_by_key_and_survive_a_round_trip(tmp_path):
    path = tmp_path / "new" / "rows.json"
    ResultFile(path, ABOUT).add(make_row(), make_row(variant="fastpar", host_us=1.23456789))
    later = {**ABOUT, "date": "2026-01-03", "commit": "def", "dirty": True}
    ResultFile(path, later).add(make_row(median_ms=1.0))
    about, rows = load(path)
    assert about == later
    assert [(r.variant, r.median_ms, r.commit, r.dirty) for r in rows] == [
        ("eager", 1.0, "def", True),
        ("fastpar", 2.0, "abc", False),
    ]
    assert rows[1].host_us == 1.23457
    assert not list(path.parent.glob("*.tmp"))
    with pytest.raises(ValueError, match="ResultFile: expected rows of cpu-other-2-cores, got"):
        ResultFile(path, {**ABOUT, "cpu": "other"})


def test_foreign_and_damaged_files_are_refused(tmp_path):
    path, row = tmp_path / "rows.json", {**make_row().to_json(), "watts": 3}
    unknown = json.dumps({"schema": 1, "machine": ABOUT, "rows": [row]})
    for text, why in (
        ('{"schema": 99}', "load: expected schema=1, got schema=99"),
        ('{"schema": 1, ', r"load: expected a result file, got path=rows\.json"),
        (unknown, r"Row.from_json: expected .*, got fields=\['watts'\]"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            load(path)


# What a machine may lack; torch's flash attention for CPUs has no dropout.
MISSING = re.compile(r"not installed|No module named|NoLinkError|Ninja|[Cg]\+\+|available kernel")
QUICKEST = ("embedding", "philox")


def test_every_bench_can_be_found_and_has_a_limit():
    assert door.names()[-1] == "train"
    for name in door.names():
        assert all(door.limit_of(name, device) > 0 for device in ("cpu", "cuda"))
        assert callable(importlib.import_module(door.homes()[name]).run)


@pytest.mark.parametrize("name", [n if n in QUICKEST else slow(n) for n in door.names()])
def test_a_quick_run_has_rows_that_no_gate_refuses(name, tmp_path, monkeypatch):
    """Without torch.compile, which takes most of the time."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    only = {"wires": "1000 Mbit/s, fastpar", "train": "6x384", "checkpoint": "stage 3"}
    bench = make_bench(tmp_path, name, only=only.get(name, ""))
    importlib.import_module(door.homes()[name]).run(bench)
    rows = load(tmp_path / "rows.json")[1]
    red = {row.variant: row.refused for row in rows if row.refused}
    assert all(MISSING.search(why) for why in red.values()), red
    assert any(row.variant.startswith("fastpar") for row in rows) or red


@pytest.mark.slow
def test_two_commits_take_turns_in_processes_of_their_own(monkeypatch, capsys):
    """This checkout beside itself; another one's commit is a matter of building it."""
    started = []

    def start(folder, *words):
        started.append(start_in(folder, *words))
        return started[-1]

    start_in = compare.start
    monkeypatch.setattr(compare, "start", start)
    monkeypatch.setattr(compare, "tree", lambda commit: ROOT)
    assert door.main(["compare", "old", "new", "philox", "train", "--quick", "--rounds", "6"]) == 0
    out = capsys.readouterr().out
    assert "| ms | old | new | CPU, old | CPU, new | new, times as fast |" in out
    assert re.search(r"\n\| dropout.*, forward( \| [\d.e-]+){4} \| [\d.]+x \([\d.]+ to", out), out
    assert "\n| train quick, step |" in out
    assert len(started) == 4
    assert all(process.poll() is not None for process in started)
    assert door.main(["compare", "old", "new", "nothing", "--quick"]) == 2
    assert "compare: nothing cpu quick ended" in capsys.readouterr().err


def test_bad_arguments_are_refused_in_one_line(capsys):
    rows = [
        ("nope", "bench: expected one of activation, adamw, "),
        ("gelu --quick --commit-results", "bench: expected full shapes and no --out"),
        ("tune everything", "tune: expected a part of a place's name, got names=everything"),
        ("tune --device cpu", "tune: expected a GPU, got device=cpu, whose kernels have no tables"),
        ("compare no-such-commit HEAD", "compare: expected a commit, got no-such-commit; "),
        ("ingest nothing.json", "expected a report.json of bench/gpu.sh, got path=nothing.json"),
    ]
    if not torch.cuda.is_available():
        rows.append(("gelu --device cuda", "bench: expected a GPU, got device=cuda"))
    for words, why in rows:
        assert door.main(words.split()) == 2, words
        error = capsys.readouterr().err
        assert why in error
        assert error.count("\n") == 1


def test_a_table_is_written_between_its_markers_from_the_newest_rows(tmp_path):
    """A table for each machine, the newest first."""
    of_train = {"bench": "train", "case": "6x384", "direction": "step", "tokens_per_s": 600.0}
    for name, changes, rows in (
        ("z", {"cpu": "AMD Old", "date": "2025-12-31"}, [make_row(), make_row(variant="fastpar")]),
        ("b", {"date": "2026-01-01"}, [make_row(median_ms=55.0), make_row(**of_train)]),
        ("a", {}, [make_row(), make_row(variant="fastpar", median_ms=None, refused="red check")]),
    ):
        ResultFile(tmp_path / f"{name}.json", {**ABOUT, **changes}).add(*rows)
    text = "before\n<!-- bench:ops-cpu -->\nold\n<!-- /bench:ops-cpu -->\nafter\n"
    new = report.update(text, tmp_path)
    assert new.startswith("before\n<!-- bench:ops-cpu -->\n| op |")
    assert new.endswith("<!-- /bench:ops-cpu -->\nafter\n")
    assert "| bias_gelu N=1 F=2, forward | 2 (eager) |" in new
    assert "refused: red check" in new
    assert not re.search("old|55", new)
    assert new.index("CPU: Test CPU (R) 9000, 2 cores") < new.index("CPU: AMD Old, 2 cores")
    assert report.update(new, tmp_path) == new
    # Only the older file of this machine has it.
    assert "| 6x384 | eager | 1 x 2 | 2 | 600 | 1.00x |" in report.render("train-cpu", tmp_path)
    for name, why in (
        ("nope", "render: expected one of train, .*, got name=nope"),
        ("zero-cpu", "render: expected rows for the table zero-cpu"),
        ("zero-cuda", "machines_of: expected results of device cuda, got none in"),
    ):
        with pytest.raises(ValueError, match=why):
            report.update(f"<!-- bench:{name} -->\n<!-- /bench:{name} -->\n", tmp_path)


def test_the_committed_tables_are_what_the_results_say():
    assert report.main(["--check"]) == 0


def test_the_planner_is_within_a_fifth_of_what_others_reported():
    rows = list(published())
    assert len(rows) == 10 + 8 + 2 + 6
    errors = {row.name: abs(predict(row)[1] / row.reported - 1) for row in rows}
    assert max(errors.values()) < TOLERANCE, errors
    assert max(errors.values()) <= plan.PUBLISHED_ERROR < max(errors.values()) + 0.02  # as it says
    assert table() in (RESULTS / "plan" / "published.md").read_text()


@pytest.mark.parametrize(("arch", "sms"), [(80, 108), (90, 132)])
def test_every_place_that_is_tuned_changes_what_runs(arch, sms):
    """The tiles of kernels that no call launches cost half a minute of a GPU."""
    pytest.importorskip("triton", reason="needs triton")

    def launched(entry, config):
        forced = (entry.table.name, entry.place, tuple(config))
        return [
            (x.name, x.grid, x.constants, x.options)
            for x in launches_of(entry.case, (arch, sms), forced)
        ]

    for entry in tune.entries(arch):
        if entry.table.name == "attention_configs" and entry.case.size == 64:
            present, *others = entry.configs(arch).values()
            assert launched(entry, present) != launched(entry, others[0]), entry.name


def test_a_report_becomes_results_and_a_rehearsal_does_not(tmp_path, capsys):
    about = {**machine("cpu"), "device": "cuda", "gpu": "A GPU", "driver": "1", "cuda": "13"}
    row = Row("gelu", "tanh", "forward", "fastpar", "cuda", dtype="bfloat16", threads=1)
    proofs = {"version": VERSION, "about": {"device": "A GPU"}, "proofs": []}
    cells = [
        {"cell": "time gelu", "status": "ok", "rows": [row.to_json()]},
        {"cell": "p", "status": "error", "error": "no /opt/me/x.py", "proofs": proofs},
    ]
    report = {"about": about, "quick": False, "mode": "fast", "seconds": 1.0, "cells": cells}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    package = tmp_path / "package"
    (package / "fastpar" / "doctor").mkdir(parents=True)
    said = ingest.ingest(path, tmp_path / "results", package)
    assert said[0].startswith("1 rows in a-gpu_")
    (rows,) = (tmp_path / "results").glob("*.json")
    assert [r.key for r in load(rows)[1]] == [row.key]
    (shipped,) = (package / "fastpar" / "doctor" / "shipped").iterdir()
    assert json.loads(shipped.read_text())["version"] == VERSION  # else it would be ignored
    kept, text = sorted((tmp_path / "results" / "gpu").iterdir())
    assert "/opt" not in kept.read_text() + text.read_text()
    assert "ERROR    p: no <path>" in text.read_text()
    path.write_text(json.dumps({**report, "quick": True}))
    assert ingest.main([str(path)]) == 2
    assert "got the rehearsal report.json" in capsys.readouterr().err


def test_the_tests_that_run_on_a_gpu_are_there():
    text = (ROOT / "bench" / "gpu_checks.py").read_text()
    listed = text.split("GPU_TESTS = {")[1].split("\n}")[0]
    files = re.findall(r'"(\w+/test_\w+)"', listed)
    assert len(files) > 5
    assert [file for file in files if not (ROOT / "tests" / f"{file}.py").exists()] == []


def test_a_stage_has_time_for_its_cells_and_leaves_the_others_theirs():
    starts = dict(zip(gpu_cells.END, (0, *gpu_cells.END.values())))
    assert list(gpu_cells.END.values())[-1] == gpu_cells.LIMIT_S
    order = [one.stage for one in gpu_checks.CELLS]
    assert order == sorted(order, key=list(gpu_cells.END).index)
    for stage, end in gpu_cells.END.items():
        limits = [one.limit_s for one in gpu_checks.CELLS if one.stage == stage]
        alone = stage != "checks"  # there six run at once
        assert (sum if alone else max)(limits or [0]) <= end - starts[stage]
    names = [one.name for one in (*gpu_checks.CELLS, *gpu_checks.ON_REQUEST)]
    assert len(set(names)) == len(names)


def come_half_way():
    gpu_cells.note(at="the third of six")
    time.sleep(100)


def test_a_late_cell_says_how_far_it_came_and_takes_nothing_from_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_cells, "END", {"prove": 4, "large": 9, "tune": 12})
    monkeypatch.setattr(gpu_cells, "LIMIT_S", 12.0)
    monkeypatch.setattr(
        gpu_cells, "RUN", SimpleNamespace(quick=True, device="cpu", scratch=tmp_path)
    )
    cells = [
        gpu_cells.Cell("a", come_half_way, 90, "prove"),  # ends with its stage
        gpu_cells.Cell("b", lambda: time.sleep(1.5), 1, "large"),  # from its start; twice on CPUs
        gpu_cells.Cell("c", come_half_way, 1, "large"),
        gpu_cells.Cell("d", lambda: None, 1, "tune"),
    ]
    # After a build of two seconds, which takes nothing from the first stage.
    runner = gpu_cells.Runner(tmp_path / "out", time.time() - 2, 14.0)
    runner.run(cells, 2)
    rows = {row["cell"]: row for row in runner.rows}
    assert {n: row["status"] for n, row in rows.items()} == {
        "a": "timeout", "b": "ok", "c": "timeout", "d": "ok"
    }  # fmt: skip
    assert 3 < rows["a"]["seconds"] < 5
    page = "\n".join(gpu_cells.report(runner.head, runner.rows))
    assert "TIMEOUT  c: after 2 s, at the third of six" in page
    again = gpu_cells.Runner(tmp_path / "out", time.time(), 12.0)
    assert [one.name for one in again.not_done(cells)] == ["a", "c"]
    assert [row["cell"] for row in again.rows] == ["b", "d"]
    other = gpu_cells.Runner(tmp_path / "out", time.time(), 12.0)
    other.head["sources"] = "changed"
    assert other.not_done(cells) == cells


def test_a_cell_whose_device_code_was_found_right_is_not_run(tmp_path, monkeypatch):
    found = {"gelu 8": "ok", "norm 8": "wrong"}
    rows = [{"cell": name, "status": status, "code": "abc"} for name, status in found.items()]
    (tmp_path / "gpu_2026.json").write_text(json.dumps({"cells": rows}))
    run = SimpleNamespace(quick=False, device="cuda", known=gpu_checks.known_code(tmp_path))
    monkeypatch.setattr(gpu_checks, "RUN", run)
    monkeypatch.setattr(gpu_checks, "device_code", lambda cases: "abc")
    found, result = gpu_checks.unless_known("gelu 8", [], None), {"shown": "ran"}
    assert found["status"] == "proven"
    assert "gpu_2026.json: not run" in found["shown"]
    assert gpu_checks.unless_known("norm 8", [], lambda: result) is result
    assert gpu_checks.unless_known("gelu 8", [], lambda: result, "torch 7") is result


def test_comments_and_lines_of_a_source_are_no_device_code():
    def ptx(n, value=7):
        code = f" .loc 1 {n} 0\n$L__tmp{n}:\n mov.u32 %r1, {value};\n"
        return f'.entry k()\n{{\n{code}}}\n .file "{n}"\n .section .debug_info\n .b8 {n}\n'

    first = gpu_checks.without_debug(ptx(3))
    assert first == gpu_checks.without_debug(ptx(77))
    assert "mov.u32 %r1, 7" in first
    assert gpu_checks.without_debug(ptx(3, 8)) != first


CARRIED = """
import os, sys
from fastpar.doctor import trial

gpu, row, folder = (90, 132), ["dropout", "bfloat16", 0, None], os.environ["TRITON_CACHE_DIR"]
trial.compile_launch(trial._launches(row, gpu)[0], gpu)
assert (0, 0) not in trial.missing([row], gpu)[0]
os.rename(folder, sys.argv[1])
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
assert ((0, 0) in trial.missing([row], gpu)[0]) == (sys.argv[2] == "lost")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["found", "lost"])
def test_what_was_compiled_elsewhere_is_found(tmp_path, how):
    """By bench/gpu.sh alone: Triton keeps the paths of the machine that compiled."""
    pytest.importorskip("triton", reason="needs triton")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "a"), "PYTHONPATH": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    if how == "found":
        (tmp_path / "sitecustomize.py").symlink_to(ROOT / "bench" / "triton_key.py")
    command = [sys.executable, "-c", CARRIED, str(tmp_path / "b"), how]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


KINDS = [  # a cell of each kind
    "module",
    *("layer_norm 768", "attention 64 own", "zero_stage 2", "124M in the trainer", "time gelu"),
    *("tests of engine", "beside eager", "prove", "orthogonalize", "demo"),
]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_rehearsal_without_a_gpu(tmp_path):
    """Each cell fails alone, and the report is whole. All cells take three minutes."""

    def script(*arguments):
        command = ["bash", str(ROOT / "bench" / "gpu.sh"), *arguments]
        env = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
        env["FASTPAR_PROOFS"] = str(tmp_path / "proofs")
        return subprocess.run(command, env=env, capture_output=True, text=True)

    if not torch.cuda.is_available():
        failed = script()
        assert failed.returncode == 2
        assert "gpu.sh: expected a GPU that torch can use, got none" in failed.stderr
    only = [word for kind in KINDS for word in ("--only", kind)]
    done = script("--device", "cpu", "--quick", "--limit", "1400", *only)
    assert done.returncode == 1
    report = json.loads((tmp_path / "out/report.json").read_text())
    bad = {r["cell"]: r for r in report["cells"] if r["status"] != "ok"}
    assert {name: row["status"] for name, row in bad.items()} == {
        "demo hangs": "timeout", "demo ends by a signal": "crash",
        "demo raises a CUDA error": "error", "demo is wrong": "wrong",
    }, done.stdout  # fmt: skip
    assert len(report["cells"]) >= len(KINDS) + 3
    assert "gpu_checks.py" in bad["demo hangs"]["stderr"]  # where it hung
    assert bad["demo hangs"]["at"] == "the second of three sleeps"
    assert bad["demo ends by a signal"]["signal"] == signal.SIGSEGV
    page = (tmp_path / "out/report.txt").read_text()
    assert "WRONG    demo is wrong: AssertionError: error of dq is 3e-2" in page
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "report.json",
        "report.txt",
        "logs.tar.gz",
    }
