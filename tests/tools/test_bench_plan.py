"""bench plan: its rows, their table and their picture."""

import json

import pytest

from bench.harness import Bench
from bench.records import ResultFile, Row, load, machine
from bench.report import plan_table
from bench.report.report import render
from bench.systems import bench_plan
from fastpar.config.config import GPTConfig
from fastpar.cost.measured_rates import MeasuredRates
from fastpar.plan.check import Row as Cell
from fastpar.plan.check import cell, title_of

SHAPE = GPTConfig(2, 2, 32, 16, 128, dropout=0.0)
RATES = MeasuredRates({"spread": 0.1, "busy": ""})
BUSY = MeasuredRates({"spread": 0.4, "busy": "spread 40%"})


def made(ranks, stage, predicted_mb, predicted_ms, micro=1):
    title = title_of(*cell(SHAPE, ranks, 1, stage, "none", micro, 1))
    size, seconds = int(predicted_mb * 1e6), predicted_ms / 1e3
    return Cell(title, ranks, 1, size, 100_000_000, seconds, 0.1, 0.09, 0.12, 9, {}, {})


CELLS = [
    ([made(1, 0, 101, 90), made(1, 0, 98, 104, micro=2)], RATES),
    ([made(2, 0, 94, 120), made(2, 3, 100, 101)], BUSY),
]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_plan, "run_all", lambda **_: iter(CELLS))
    results = ResultFile(tmp_path / "rows.json", machine("cpu"), Row)
    return Bench("plan", "cpu", True, results)


def test_rows_table_and_picture(bench, tmp_path):
    bench_plan.run(bench)
    _, rows = load(tmp_path / "rows.json")
    assert len(rows) == 4
    assert (rows[0].median_ms, rows[0].p20_ms, rows[0].p80_ms, rows[0].runs) == (100, 90, 120, 9)
    assert (rows[0].peak_bytes, rows[0].notes["predicted_bytes"]) == (100_000_000, 101_000_000)
    assert (tmp_path / "plan" / "check_cpu.png").stat().st_size > 10_000
    lines = render("plan-cpu", tmp_path).splitlines()
    assert {number: lines[number] for number in (2, 3, 5, 7)} == {
        2: "| peak memory, all layouts | 4 | 1.5% | 6.0% | 6.0% | -1.0% | 3 of 4 within 5% |",
        3: "| peak memory, 1 rank | 2 | 1.5% | 2.0% | 2.0% | -0.5% | 2 of 2 within 5% |",
        5: "| step time, all layouts | 4 | 7.0% | 20.0% | 20.0% | +2.5% | 3 of 4 within 15% |",
        7: "| step time, 2 ranks | 2 | 10.5% | 20.0% | 20.0% | +10.5% | 1 of 2 within 15% |",
    }
    assert "Measured on a busy machine (spread 40%)." in lines
    assert json.loads((tmp_path / "rows.json").read_text())["rows"]


def test_quiet_rates_need_no_word(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_plan, "run_all", lambda **_: iter(CELLS[:1]))
    bench_plan.run(bench)
    _, rows = load(tmp_path / "rows.json")
    text = plan_table.plan_table(rows)
    assert "busy" not in text
    assert text.count("\n") == 3, "one number of ranks: no rows of their own"
