import json
from dataclasses import replace

import pytest

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.predict.machine import (
    FOLDER,
    MeasuredRates,
    Overhead,
    Rate,
    find_rates,
    machine_name,
    overhead_key,
    rates_folder,
)
from fastpar.predict.time import predict_step
from fastpar.settings.model import GPTConfig

SETUP = Setup(world_size=2, dtype="fp32", device_type="cpu", transport="shm")
WORKLOAD = Workload(GPTConfig(3, 2, 32, 16, 128, dropout=0.0), 2)


def rates(**about):
    known = {
        "machine": machine_name(),
        "gpu": "",
        "device_type": "cpu",
        "dtype": "fp32",
        "dropout": False,
        "ranks": 2,
        "threads": 1,
        "torch": "2",
        "date": "2026-11-22",
        "spread": 0.07,
        "busy": "",
    }
    return MeasuredRates(
        {**known, **about},
        {
            ("matmul", (64, 32, 16), "forward"): Rate(1e-3, 2.0 * 64 * 32 * 16, 4.0 * 3584),
            ("matmul", (64, 32, 64), "forward"): Rate(3e-3, 2.0 * 64 * 32 * 64, 4.0 * 8192),
            ("copy", (4096,), "backward"): Rate(1e-5, 0.0, 4096.0),
        },
        {
            "all_reduce, 2 ranks": [(1000.0, 1e-4), (3000.0, 2e-4), (9000.0, 8e-4)],
            "all_reduce, 4 ranks": [(1000.0, 3e-4)],
        },
        {
            overhead_key(SETUP): Overhead(1e-3, 2e-3, 3e-4, 4e-4),
            overhead_key(replace(SETUP, zero_stage=3)): Overhead(5e-3, 0.0, 0.0, 0.0),
        },
    )


def op(name, shape, flops, n_bytes, direction="forward"):
    return Op(name, shape, direction, flops, n_bytes, 1)


def test_a_measured_shape_is_what_was_measured():
    known = rates()
    assert known.op_s(op("matmul", (64, 32, 16), 1.0, 1.0)) == 1e-3
    assert known.op_s(op("matmul", (64, 32, 16), 1.0, 1.0, "recompute")) == 1e-3
    assert not known.scaled


def test_other_shapes_are_scaled_from_the_nearest_and_listed():
    known = rates()
    twice = op("matmul", (64, 32, 128), 2.0 * 64 * 32 * 128, 4.0 * 8192)  # of the second's flops
    assert known.op_s(twice) == pytest.approx(6e-3)
    by_bytes = op("matmul", (64, 32, 17), 2.0 * 64 * 32 * 16, 3 * 4.0 * 3584)
    assert known.op_s(by_bytes) == pytest.approx(3e-3)
    assert known.op_s(op("copy", (8192,), 0.0, 8192.0, "backward")) == pytest.approx(2e-5)
    assert known.scaled == {
        "matmul (64, 32, 128) forward",
        "matmul (64, 32, 17) forward",
        "copy (8192,) backward",
    }


def test_an_unknown_operation_goes_at_the_peak():
    known = rates()
    peak = 2.0 * 64 * 32 * 64 / 3e-3
    assert known.peak_flops == pytest.approx(peak)
    assert known.op_s(op("attention", (1, 1, 8, 8), 1e6, 4.0)) == pytest.approx(1e6 / peak)
    moved = op("bias_gelu", (8, 8), 1.0, 4096e3)
    assert known.op_s(moved) == pytest.approx(1e-2)
    assert MeasuredRates(known.about).op_s(moved) == 0.0


def send(n_bytes, ranks=2, kind="all_reduce", axis="dp"):
    return CommOp(kind, axis, n_bytes, ranks, 1, 1, "")


@pytest.mark.parametrize(
    ("n_bytes", "seconds"),
    [(10, 1e-4), (1000, 1e-4), (2000, 1.5e-4), (6000, 5e-4), (9000, 8e-4), (18000, 1.6e-3)],
)
def test_exchanges_lie_between_what_was_measured(n_bytes, seconds):
    assert rates().comm_s(send(float(n_bytes))) == pytest.approx(seconds)


def test_exchanges_of_other_ranks_and_kinds_take_the_nearest():
    known = rates()
    assert known.comm_s(send(1000.0, ranks=3)) == 1e-4
    assert known.comm_s(send(1000.0, ranks=8)) == 3e-4
    assert known.comm_s(send(1000.0, kind="all_gather")) == 1e-4
    assert known.scaled == {
        "all_reduce of 3 ranks",
        "all_reduce of 8 ranks",
        "all_gather of 2 ranks",
    }
    assert known.comm_s(send(1000.0, ranks=1)) == 0.0
    assert known.comm_s(send(1000.0, axis="control")) == 0.0, "a part of the overhead"
    assert MeasuredRates(known.about).comm_s(send(1000.0)) == 0.0


def test_exchanges_along_tp_are_apart():
    known = rates()
    known.sends["all_reduce, 2 ranks at once"] = [(1000.0, 7e-5)]
    assert known.comm_s(send(1000.0, axis="tp")) == 7e-5
    assert known.comm_s(send(1000.0)) == 1e-4


def test_overhead_adds_up_and_takes_the_nearest_setup():
    known = rates()
    setup = replace(SETUP, grad_accum_steps=5)
    assert known.overhead_s(WORKLOAD, setup) == pytest.approx(
        1e-3 + 5 * (2e-3 + 3 * 3e-4) + 3 * 4e-4
    )
    assert not known.scaled
    other = replace(SETUP, zero_stage=3, activation_checkpointing="full")
    assert known.overhead_s(WORKLOAD, other) == 5e-3
    assert known.scaled == {"overhead of stage 3, tp 1, full"}
    assert MeasuredRates(known.about).overhead_s(WORKLOAD, SETUP) == 0.0


def test_predict_step_takes_them():
    found = predict_step(WORKLOAD, SETUP, rates())
    assert found.parts["other"] == pytest.approx(1e-3 + 2e-3 + 3 * 7e-4)
    assert found.step_s > found.parts["other"]


def test_what_is_saved_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    known = rates()
    path = known.save()
    assert path.parent == tmp_path
    loaded = MeasuredRates.load(path)
    assert (loaded.ops, loaded.sends, loaded.overheads) == (
        known.ops,
        known.sends,
        known.overheads,
    )
    assert str(loaded) == "measured on this machine, 2 ranks x 1 thread, 2026-11-22, spread 7%"
    found = find_rates(device_type="cpu", dtype="fp32", ranks=2, threads=1, dropout=False)
    assert found is not None
    assert found.ops == known.ops
    for other in ({"ranks": 4}, {"threads": 2}, {"dtype": "bf16"}, {"dropout": True}):
        asked = {"device_type": "cpu", "dtype": "fp32", "ranks": 2, "threads": 1, "dropout": False}
        assert find_rates(**{**asked, **other}) is None, other


def test_a_busy_machine_is_said():
    text = str(rates(spread=0.28, busy="load 3.1 before the start, spread 28%"))
    assert text.endswith("spread 28%; busy: load 3.1 before the start, spread 28%")


def test_a_spread_that_is_too_large_is_said_and_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    asked = {"device_type": "cpu", "dtype": "fp32", "ranks": 2, "threads": 1, "dropout": False}
    limit = rates(spread=0.3)
    limit.save()
    assert limit.steady
    assert find_rates(**asked) is not None
    wild = rates(spread=1.72)
    assert not wild.steady
    assert (
        "spread 172%; a spread above 30%: what follows is a rough guess, and not kept for later "
        "runs; end what else runs here and measure again" in str(wild)
    )
    wild.save()  # as earlier versions did
    with pytest.raises(
        ValueError, match=r"find_rates: expected rates with a spread of at most 30%, got spread=172"
    ):
        find_rates(**asked)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"ops"', '"oops"'),
        lambda text: text.replace("0.001", "-0.001"),
        lambda text: text.replace("0.001", "NaN"),
        lambda text: text.replace('"spread": 0.07,', ""),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "rates.json"
    rates().save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match="expected a file of measured rates, got"):
        MeasuredRates.load(path)


def test_another_machines_or_versions_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    path = rates(machine="Z80, 1 CPUs").save()
    with pytest.raises(ValueError, match=r"expected rates of this machine, got path=.* of Z80"):
        find_rates(device_type="cpu", dtype="fp32", ranks=2, threads=1, dropout=False)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": 99}))
    with pytest.raises(ValueError, match="expected version=1, got version=99"):
        MeasuredRates.load(path)


def test_later_measurements_count():
    known, more = rates(), rates(date="2026-11-23")
    more.ops = {("matmul", (64, 32, 16), "forward"): Rate(9e-3, 1.0, 1.0)}
    known.update(more)
    assert known.ops["matmul", (64, 32, 16), "forward"].seconds == 9e-3
    assert known.ops["matmul", (64, 32, 64), "forward"].seconds == 3e-3
    assert known.about["date"] == "2026-11-23"


def test_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates_folder() == tmp_path / "fastpar" / "rates"


def test_what_overhead_depends_on():
    assert overhead_key(replace(SETUP, tp=2)) == "stage 0, tp 2 sequence, none"
    assert overhead_key(replace(SETUP, tp=2, sequence_parallel=False)) == "stage 0, tp 2, none"


def test_cpu_ranks_hide_nothing():
    assert rates().overlap == 0.0
    assert rates(device_type="cuda").overlap == 1.0
