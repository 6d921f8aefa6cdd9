"""`fastpar plan --check` as a bench: every layout of the grid, predicted and measured.

A row's time and memory are the measured ones; the predicted ones stand in its notes. Rates are
measured for each number of ranks right before its layouts run (fastpar/plan/check.py).
"""

from __future__ import annotations

import torch

from bench.harness import Bench
from bench.records import Row
from bench.report.plan_table import draw
from fastpar.cost.measured_rates import MeasuredRates
from fastpar.plan import check
from fastpar.plan.check import run_all

TIME_LIMIT_S = {"cpu": 1200, "cuda": 500}


def to_row(bench: Bench, cell: check.Row, rates: MeasuredRates) -> Row:
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    row = bench.row(cell.title, "step", "fastpar", dtype)
    row.threads, row.runs = cell.threads, cell.steps
    row.median_ms, row.p20_ms, row.p80_ms = (
        1e3 * seconds for seconds in (cell.measured_s, cell.p20_s, cell.p80_s)
    )
    row.peak_bytes = cell.measured_bytes
    row.notes = {
        "ranks": cell.world_size,
        "predicted_ms": 1e3 * cell.predicted_s,
        "predicted_bytes": cell.predicted_bytes,
        "spread": rates.about["spread"],
        "busy": rates.about["busy"],
    }
    return row


def run(bench: Bench) -> None:
    """The grid, and its picture beside the file of rows."""
    rows = []
    for cells, rates in run_all(device=bench.device, quick=bench.quick):
        rows += [to_row(bench, cell, rates) for cell in cells]
        bench.add(*rows[-len(cells) :])
    folder = bench.results.path.parent / "plan"
    folder.mkdir(parents=True, exist_ok=True)
    draw(rows, folder / f"check_{bench.device}.png")
