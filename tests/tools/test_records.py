"""Result files: rows by key, of one machine; damaged and foreign files are refused."""

import json

import pytest
import torch

from bench.records import ResultFile, Row, load, machine, machine_line, slug

ABOUT = {
    "device": "cpu",
    "cpu": "Test CPU (R) 9000",
    "cores": 2,
    "python": "3.11.0",
    "torch": "2.13.0",
    "triton": None,
    "commit": "abc",
    "dirty": False,
    "date": "2026-01-02",
}


def make_row(**changes):
    values = {
        "bench": "gelu",
        "case": "bias_gelu N=1 F=2",
        "direction": "forward",
        "variant": "eager",
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
        "median_ms": 2.0,
        "p20_ms": 1.5,
        "p80_ms": 3.0,
        "runs": 9,
        "gb_per_s": 12.0,
        "percent_of_ceiling": 34.5,
        "baseline": "eager",
        "speedup": 1.0,
    }
    return Row(**{**values, **changes})


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


def test_rows_of_another_machine_are_refused(tmp_path):
    ResultFile(tmp_path / "rows.json", ABOUT).add(make_row())
    with pytest.raises(ValueError, match="ResultFile: expected rows of cpu-other-2-cores, got"):
        ResultFile(tmp_path / "rows.json", {**ABOUT, "cpu": "other"})


def test_foreign_and_damaged_files_are_refused(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="load: expected schema=1, got schema=99"):
        load(path)
    path.write_text('{"schema": 1, ')
    with pytest.raises(ValueError, match=r"load: expected a result file, got path=rows\.json"):
        load(path)
    row = {**make_row().to_json(), "watts": 3}
    path.write_text(json.dumps({"schema": 1, "machine": ABOUT, "rows": [row]}))
    with pytest.raises(ValueError, match=r"Row.from_json: expected .*, got fields=\['watts'\]"):
        load(path)


def test_machine_names_what_a_reader_needs():
    about = machine("cpu")
    assert {"cpu", "cores", "python", "torch", "triton", "commit", "dirty", "date"} <= set(about)
    line = machine_line(about)
    for part in (about["cpu"], f"{about['cores']} cores", torch.__version__, about["commit"]):
        assert part in line
    assert slug(ABOUT) == "cpu-test-cpu-r-9000-2-cores"
    gpu = {**ABOUT, "device": "cuda", "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"}
    assert slug(gpu) == "nvidia-h200"
    assert machine_line({**gpu, "dirty": True}).startswith(
        "NVIDIA H200, driver 580.1, CUDA 13.0; torch 2.13.0, triton none; commit abc + changes"
    )
