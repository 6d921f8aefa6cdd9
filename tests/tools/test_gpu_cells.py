"""Cells of bench/gpu.sh: each fails alone, the report is whole, and becomes results."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu_cells, ingest
from bench.gpu_cells import Cell, Runner, note
from bench.records import Row, load, machine
from fastpar.doctor.table import VERSION

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runner(tmp_path, monkeypatch):
    run = SimpleNamespace(quick=True, device="cpu", scratch=tmp_path)
    monkeypatch.setattr(gpu_cells, "RUN", run)
    return Runner(tmp_path / "out", "right", time.time(), 60.0)


def fail(error):
    raise error


def hang():
    note(lines=["found before"])
    time.sleep(1000)


def test_a_cell_fails_alone_and_the_report_is_whole(runner):
    cells = [
        Cell("right", lambda: {"shown": "fine"}),
        Cell("hangs", hang, limit_s=1),
        Cell("crashes", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        Cell("lost", lambda: fail(RuntimeError("CUDA error: lost"))),
        Cell("wrong", lambda: fail(AssertionError("dq is off")), alone=True),
        Cell("last", lambda: {}, alone=True),
    ]
    runner.run(cells, 4)
    assert runner.finish() == 1
    report = json.loads((runner.out / "report.json").read_text())
    found = {row["cell"]: row for row in report["cells"]}
    assert {name: row["status"] for name, row in found.items()} == {
        "right": "ok", "hangs": "timeout", "crashes": "crash", "lost": "error", "wrong": "wrong",
        "last": "ok",
    }  # fmt: skip
    assert found["hangs"]["lines"] == ["found before"]
    assert "in hang" in found["hangs"]["stderr"]  # where it hung
    assert found["crashes"]["signal"] == signal.SIGSEGV
    assert "dq is off" in found["wrong"]["traceback"]
    page = (runner.out / "report.txt").read_text()
    assert "WRONG    wrong: AssertionError: dq is off" in page
    assert {p.name for p in runner.out.iterdir()} == {"report.json", "report.txt", "logs.tar.gz"}


def test_what_must_run_keeps_its_time(runner):
    runner.deadline = time.time() + 6
    cells = [
        Cell("long", lambda: time.sleep(30), alone=True),
        Cell("later", lambda: {}, alone=True),
        Cell("headline", lambda: {}, limit_s=3, alone=True, must=True),
    ]
    runner.run(cells, 2)
    status = {row["cell"]: row["status"] for row in runner.rows}
    assert status == {"long": "timeout", "later": "no time", "headline": "ok"}


def report_of(tmp_path, **changes):
    about = {**machine("cpu"), "device": "cuda", "gpu": "A GPU", "driver": "1", "cuda": "13"}
    row = Row("gelu", "tanh", "forward", "fastpar", "cuda", dtype="bfloat16", threads=1)
    proofs = {"version": VERSION, "about": {"device": "A GPU"}, "proofs": []}
    cells = [
        {"cell": "time gelu", "status": "ok", "rows": [row.to_json()]},
        {"cell": "p", "status": "error", "error": "no /opt/me/x.py", "proofs": proofs},
    ]
    report = {"about": about, "quick": False, "mode": "fast", "seconds": 1.0, "cells": cells}
    report |= changes
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    return path, row


def test_a_report_becomes_results_and_a_rehearsal_does_not(tmp_path, capsys):
    path, row = report_of(tmp_path)
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
    path, _ = report_of(tmp_path, quick=True)
    assert ingest.main([str(path)]) == 2
    assert "got the rehearsal report.json" in capsys.readouterr().err
    assert ingest.ingest(path, tmp_path / "looked at", tmp_path)
    path.write_text("no report")
    with pytest.raises(ValueError, match=r"expected a report.json of bench/gpu.sh, got path=rep"):
        ingest.ingest(path, tmp_path / "results", tmp_path)


def test_the_tests_that_run_on_a_gpu_are_there():
    text = (ROOT / "bench" / "gpu_checks.py").read_text()
    listed = text.split("GPU_TESTS = {")[1].split("\n}")[0]
    files = re.findall(r'"(\w+/test_\w+)"', listed)
    assert len(files) > 5
    assert [file for file in files if not (ROOT / "tests" / f"{file}.py").exists()] == []


KINDS = [  # a cell of each kind
    *("layer_norm 768", "attention 64 own", "zero_stage 2", "step of 124M", "time gelu"),
    *("tests of engine", "small batches", "proofs", "orthogonalize", "demo"),
]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_rehearsal_without_a_gpu(tmp_path):
    """`bench/gpu.sh right --device cpu --quick` runs all cells, in an hour."""

    def script(*arguments):
        command = ["bash", str(ROOT / "bench" / "gpu.sh"), "right", *arguments]
        env = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    if not torch.cuda.is_available():
        failed = script()
        assert failed.returncode == 2
        assert "gpu.sh: expected a GPU that torch can use, got none" in failed.stderr
    only = [word for kind in KINDS for word in ("--only", kind)]
    done = script("--device", "cpu", "--quick", "--limit", "1400", *only)
    report = json.loads((tmp_path / "report.json").read_text())
    bad = {r["cell"]: r["status"] for r in report["cells"] if r["status"] != "ok"}
    assert bad == {
        "demo hangs": "timeout", "demo ends by a signal": "crash",
        "demo raises a CUDA error": "error", "demo is wrong": "wrong",
    }, done.stdout  # fmt: skip
    assert len(report["cells"]) >= len(KINDS) + 3
