import itertools
import os
from dataclasses import replace

import pytest

from fastpar.axes.step import Setup, Workload
from fastpar.predict import measure as module
from fastpar.predict.machine import FOLDER, MeasuredRates, Overhead, find_rates
from fastpar.predict.measure import (
    WHOLE,
    busy,
    cores_at_work,
    keep_rates,
    known_s,
    measure,
    solve,
    spaced,
    waited_for,
)
from fastpar.predict.time import comm_ops_of, ops_of, predict_step
from fastpar.settings.model import GPTConfig

SETUP = Setup(world_size=2, dtype="fp32", device_type="cpu", transport="shm")
WORKLOAD = Workload(GPTConfig(2, 2, 32, 16, 128, dropout=0.0), 4)
SETUPS = [
    replace(SETUP, micro_batch_size=2),
    replace(SETUP, zero_stage=3, accumulate="shard", grad_accum_steps=2),
    replace(SETUP, tp=2, micro_batch_size=4, activation_checkpointing="full"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rates")
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder)
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "_spread", lambda times: 0.1)  # whatever else runs here
    try:
        yield measure(WORKLOAD, SETUPS[1:2], threads=1, seconds=0.5), folder
    finally:
        patch.undo()
        os.environ.pop(FOLDER)
        if before is not None:
            os.environ[FOLDER] = before


def check(rates, setups):
    for setup in setups:
        for op in ops_of(WORKLOAD, setup):
            assert rates.op_s(op) > 0
        for send in comm_ops_of(WORKLOAD, setup):
            assert rates.comm_s(send) > 0 or send.axis == "control"
        assert rates.overhead_s(WORKLOAD, setup) >= 0
        assert predict_step(WORKLOAD, setup, rates).step_s > known_s(WORKLOAD, setup, rates) * 0.999
    assert not rates.scaled
    assert len(rates.overheads) == len(setups)
    assert rates.about["ranks"] == 2
    assert rates.about["threads"] == 1


def test_all_that_a_setup_does_is_measured(measured):
    check(measured[0], SETUPS[1:2])


@pytest.mark.slow
def test_all_that_several_setups_do_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    check(measure(WORKLOAD, SETUPS[1:], threads=1, seconds=0.5), SETUPS[1:])


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), pytest.param("zb-v", 2, marks=pytest.mark.slow)]
)
def test_what_stages_do_is_measured(schedule, chunks, tmp_path, monkeypatch):
    """Messages too, and the overhead by models that have too few layers for stages."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    piped = {"pp": 2, "schedule": schedule, "chunks": chunks, "grad_accum_steps": 2}
    setup = replace(SETUP, micro_batch_size=2, **piped)
    rates = measure(WORKLOAD, [setup], threads=1, seconds=0.2)
    assert all(rates.op_s(op) > 0 for op in ops_of(WORKLOAD, setup))
    sends = [send for send in comm_ops_of(WORKLOAD, setup) if send.axis != "control"]
    assert all(rates.comm_s(send) > 0 for send in sends)
    assert predict_step(WORKLOAD, setup, rates).step_s > 0
    assert "send, 2 ranks" in rates.sends
    # What goes through a stage's parameters is in proportion to the whole model's.
    assert {name.split()[0] for name in rates.scaled} <= {"copy", "optimizer"}


def test_rates_are_kept_for_later_runs(measured):
    rates, folder = measured
    found = find_rates(device_type="cpu", dtype="fp32", ranks=2, threads=1, dropout=False)
    assert found is not None
    assert found.ops == rates.ops
    assert [path.parent for path in folder.iterdir()] == [folder]
    more = MeasuredRates({**rates.about, "date": "later"})
    keep_rates(more)
    found = find_rates(device_type="cpu", dtype="fp32", ranks=2, threads=1, dropout=False)
    assert found is not None
    assert (found.about["date"], found.ops) == ("later", rates.ops)


def test_rates_with_a_large_spread_are_not_kept(measured):
    rates, folder = measured
    before = [path.read_bytes() for path in folder.iterdir()]
    keep_rates(MeasuredRates({**rates.about, "spread": 1.72, "date": "wild"}, rates.ops))
    assert [path.read_bytes() for path in folder.iterdir()] == before
    keep_rates(MeasuredRates({**rates.about, "spread": 1.72, "threads": 7}, rates.ops))
    assert len(list(folder.iterdir())) == len(before)


def test_a_damaged_file_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    about = {"machine": module.machine_name(), "gpu": "", "device_type": "cpu", "dtype": "fp32"}
    about |= {"dropout": False, "ranks": 1, "threads": 1, "date": "now", "spread": 0.0}
    rates = MeasuredRates(about)
    rates.path.parent.mkdir(exist_ok=True)
    rates.path.write_text("{")
    keep_rates(rates)
    assert MeasuredRates.load(rates.path).about == about


@pytest.mark.parametrize("setups", [[], [SETUP, replace(SETUP, world_size=4)]])
def test_setups_of_one_kind_only(setups):
    with pytest.raises(ValueError, match="expected setups of the same ranks, device and format"):
        measure(WORKLOAD, setups)


def test_overhead_is_solved_from_four_steps():
    truth = Overhead(1.0, 0.5, 0.25, 0.125)

    def took(layers, micro):
        return (
            truth.step
            + micro * (truth.micro_batch + layers * truth.layer)
            + layers * truth.layer_step
        )

    steps = [took(layers, micro) for layers in (1, 3) for micro in (1, 3)]
    assert solve(steps) == pytest.approx(truth)
    cells = module._tiny_cells(SETUP)
    order = [(workload.shape.n_layer, setup.grad_accum_steps) for workload, setup in cells]
    assert order == [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert solve([1.0, 1.0, 0.5, 0.5]) == (1.0, 0.0, 0.0, 0.0), "none is negative"


def test_a_busy_machine_is_told_by_cores_and_spread(monkeypatch):
    monkeypatch.setattr(module, "available_cores", lambda: 4)
    assert busy(0.9, 0.1) == ""
    assert busy(3.0, 0.1) == "3.0 of 4 cores at work before the start"
    assert busy(0.0, 0.35) == "spread 35%"
    assert busy(3.0, 0.35) == "3.0 of 4 cores at work before the start, spread 35%"


def test_cores_at_work_are_counted(monkeypatch, tmp_path):
    seen = iter([(100, 1000), (150, 1200)])
    monkeypatch.setattr(module, "_ticks", lambda: next(seen))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert cores_at_work(0.0) == pytest.approx(2.0)
    monkeypatch.undo()
    file = tmp_path / "stat"
    file.write_text("cpu  10 1 5 100 7 2 1 3 0 0\ncpu0 1 1 1 1\n")
    assert module._ticks(file) == (22, 129)
    assert module._ticks(tmp_path / "none") is None
    file.write_text("nothing")
    assert module._ticks(file) is None
    monkeypatch.setattr(module, "_ticks", lambda: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert cores_at_work(0.0) == 1.5


def test_sizes_of_exchanges_span_what_is_asked_for():
    found = spaced(40_000.0, 4e6)
    assert found[0] <= 11_000
    assert abs(found[-1] - 4e6) <= 1024
    assert len(found) == 4
    ratios = [b / a for a, b in itertools.pairwise(found)]
    assert max(ratios) / min(ratios) < 1.2
    assert spaced(8.0, 8.0) == [1024]


def test_cells_of_the_same_operations_share_a_chain():
    cells = [(WORKLOAD, s) for s in SETUPS]
    again = (WORKLOAD, replace(SETUPS[0], zero_stage=1))
    chains = module._distinct_chains([*cells, again])
    assert [len(chain) for chain in chains] == [2, 1, 1]
    assert chains[0] == [cells[0], again]


def test_the_slowest_rank_is_the_one_that_counts():
    """Ranks of dp meet behind the chain, those of tp at every operation."""
    a, b = ("matmul", (1, 2, 3), "forward"), ("copy", (4,), "backward")
    ranks = [{a: [1.0, 5.0], b: [2.0], WHOLE: [3.0, 7.0]}, {a: [2.0, 4.0], b: [1.0], WHOLE: [9.0]}]
    assert waited_for(ranks, each_operation=False) is ranks[0]
    assert waited_for(ranks, each_operation=True) == {a: [2.0, 5.0], b: [2.0], WHOLE: [9.0]}
