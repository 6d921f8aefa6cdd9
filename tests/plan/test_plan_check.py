"""`fastpar plan --check`: the grid, the rows, how errors are reported; one tiny real check."""

import json
from dataclasses import replace

import pytest

from fastpar.config.config import GPTConfig
from fastpar.cost.measured_rates import FOLDER, MeasuredRates, Overhead, Rate, overhead_key
from fastpar.cost.memory_model import predict_memory
from fastpar.cost.step_time import predict_step
from fastpar.plan import check as plan_check
from fastpar.plan.check import (
    Effort,
    Errors,
    cell,
    cells_of,
    check_cells,
    make_row,
    run_check,
    title_of,
)

SHAPE = GPTConfig(2, 2, 32, 16, 128, dropout=0.0)
WORKLOAD, SETUP = cell(SHAPE, 2, 1, 1, "none", 2, 3)
ABOUT = {"device_type": "cpu", "ranks": 2, "threads": 1, "date": "now", "spread": 0.1, "busy": ""}


def rates():
    return MeasuredRates(
        ABOUT,
        {("matmul", (1, 1, 1), "forward"): Rate(1.0, 1e30, 1e30)},  # next to nothing
        {},
        {overhead_key(SETUP): Overhead(0.125, 0.0, 0.0, 0.0)},
    )


def row(**changes):
    answers = [([0.1, 0.3, 0.2, 0.1, 0.1], 900), ([0.2, 0.1, 0.2, 0.1, 0.3], 1000)]
    turns = [(predict_step(WORKLOAD, SETUP, rates()), answers)]
    return replace(make_row(WORKLOAD, SETUP, turns, 1), **changes)


def test_a_row_has_the_slowest_and_the_fullest_rank():
    found = row()
    assert found.measured_s == 0.2, "median of 0.2 0.3 0.2 0.1 0.3"
    assert found.measured_bytes == 1000
    assert found.steps == 5
    assert found.p20_s < 0.2 < found.p80_s
    assert found.predicted_bytes == predict_memory(WORKLOAD, SETUP).total
    assert sum(found.memory_parts.values()) == found.predicted_bytes
    assert found.predicted_s == pytest.approx(0.125)
    assert found.time_error == pytest.approx(0.125 / 0.2 - 1)
    other = row(predicted_bytes=950)
    assert other.memory_error == pytest.approx(-0.05)
    assert "memory 0.0 / 0.0 MB (-5.0%), step 125.0 / 200.0 ms (-37.5%)" in str(other)


def test_errors():
    found = Errors.of([0.01, -0.02, 0.03, -0.04, -0.05, -0.06, 0.07, -0.08, -0.09, 0.5])
    assert (found.count, found.p90, found.worst) == (10, 0.09, 0.5)
    assert found.median == pytest.approx(0.055)
    assert found.bias == pytest.approx(-0.03)
    assert str(found) == (
        "median 5.5%, nine tenths within 9.0%, worst 50.0%, bias -3.0% (10 layouts)"
    )
    assert Errors.of([-0.25]) == Errors(1, 0.25, 0.25, 0.25, -0.25)


def test_the_grid_is_what_the_runtime_can_do():
    cells = [c for some in cells_of("cpu").values() for c in some]
    assert len(cells) >= 24
    assert {s.world_size for _, s in cells} == {1, 2, 4}
    assert {s.tp for _, s in cells} == {1, 2}
    assert {s.zero_stage for _, s in cells} == {0, 1, 2, 3}
    assert {s.activation_checkpointing for _, s in cells} == {"none", "full", "selective"}
    assert len({title_of(*c) for c in cells}) == len(cells)
    for workload, setup in cells:
        setup.config(workload)
        assert workload.batch_size == setup.dp * setup.micro_batch_size * setup.grad_accum_steps


def test_the_grid_of_a_gpu_spans_gpt2_to_its_largest():
    (cells,) = cells_of("cuda").values()
    sizes = sorted({round(workload.n_parameters / 1e6, -1) for workload, _ in cells})
    assert (sizes[0], sizes[-1]) == (120, 1560)
    for _, setup in cells:
        assert (setup.dtype, setup.master_weights, setup.transport) == ("bf16", "full", "nccl")
        assert (setup.grad_dtype, setup.device_type) == ("fp32", "cuda")


def test_titles():
    assert title_of(WORKLOAD, SETUP) == (
        "2x32 T=16, 2 ranks: ZeRO-1, micro-batch 2 x 3, checkpointing none"
    )
    both = cell(SHAPE, 4, 2, 3, "full", 1, 1)
    assert "4 ranks: tp 2 x ZeRO-3, micro-batch 1 x 1, checkpointing full" in title_of(*both)
    assert ", 1 rank, " in title_of(*cell(SHAPE, 1, 1, 0, "none", 1, 1))


def test_a_check_says_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "rates"))
    busy = rates()
    busy.about = {**ABOUT, "busy": "spread 35%"}
    rows = [
        row(predicted_bytes=990, world_size=1),
        row(predicted_bytes=1020, predicted_s=0.22, world_size=2),
    ]
    kept = []
    monkeypatch.setattr(plan_check, "keep_rates", kept.append)
    monkeypatch.setattr(
        plan_check, "run_all", lambda **_: iter([([rows[0]], rates()), ([rows[1]], busy)])
    )
    said = []
    assert run_check(out=tmp_path / "out", say=said.append) == 0
    assert said[0] == (
        "memory  error median 1.5%, nine tenths within 2.0%, worst 2.0%, bias +0.5% (2 layouts)"
    )
    assert said[1].startswith("step    error median 23.7%")
    assert said[2].startswith("measured on a busy machine: 2 ranks: spread 35%")
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [r["memory_error"] for r in content["rows"]] == pytest.approx([-0.01, 0.02])
    assert content["memory"]["worst"] == pytest.approx(0.02)
    assert content["rates"]["2"]["busy"] == "spread 35%"
    assert (tmp_path / "out" / "errors.png").stat().st_size > 10_000
    assert len(kept) == 2
    assert sum("busy machine" in line for line in said) == 1


def run_for_real(turns, *cells):
    """Memory is what it was predicted to be; times are there."""
    said = []
    rows, found = check_cells(2, cells, Effort(0.5, 0.1, turns), say=said.append)
    assert [r.title for r in rows] == [title_of(*c) for c in cells]
    for each in rows:
        assert abs(each.memory_error) < 0.05, each.title
        assert each.measured_s > 0
        assert each.steps >= 4 * turns
        assert sum(each.parts.values()) == pytest.approx(each.predicted_s)
    assert found.about["ranks"] == 2
    assert len(said) == 1 + len(cells)


def test_a_cell_runs_for_real():
    run_for_real(1, cell(GPTConfig(2, 2, 64, 32, 512, dropout=0.0), 2, 1, 3, "none", 2, 1))


@pytest.mark.slow
def test_cells_run_by_turns():
    shape = GPTConfig(2, 2, 64, 32, 512, dropout=0.0)
    run_for_real(2, cell(shape, 2, 1, 3, "none", 2, 1), cell(shape, 2, 2, 0, "full", 4, 1))
