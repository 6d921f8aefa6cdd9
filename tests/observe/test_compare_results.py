"""Statistics of constructed runs, what counts as rounding, and the file that keeps them."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from fastpar.observe.results import (
    EPS,
    FACTOR,
    FLOOR,
    RESULTS,
    Comparison,
    Run,
    Stat,
    allowed,
    judge_losses,
    yardstick,
)

EPOCHS, STEPS = 2, 5
LOSSES = [8.0, 7.0, 6.5, 6.0, 5.5, 5.2, 5.0, 4.9, 4.8, 4.7]


def make_run(name, repeat=1, *, step_s=0.1, memory=50e6, nudge=0.0, **more):
    """A run whose steps take step_s, the untimed ones ten times as long; losses moved by nudge."""
    values = {
        "ranks": 1 if name == "single" else 2,
        "threads": 1,
        "micro_batch_size": 4,
        "grad_accum_steps": 2 if name == "single" else 1,
        "step_s": [10 * step_s] * 2 + [step_s] * 8,
        "losses": [loss + nudge for loss in LOSSES],
        "grad_norms": [2.0] * 10,
        "rss_bytes": [int(memory), int(memory) - 1000],
        "wire_bytes": 0 if name == "single" else 5_000_000,
        "exposed_ms": None if name.startswith("fsdp") else 3.0,
        "seconds": 9.0,
    }
    return Run(name, repeat, **{**values, **more})


def read(path):
    """What save() has written."""
    content = json.loads(path.read_text())
    assert content.pop("format") == 1
    runs = [Run(**run) for run in content.pop("runs")]
    return Comparison(runs=runs, **content)


def make_comparison(*runs, skipped=None, complete=True, **settings):
    """With what Schedule.of() decides."""
    known = {
        "strategies": list(dict.fromkeys(run.strategy for run in runs if not run.yardstick)),
        "nproc": 2,
        "model": "micro",
        "shape": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64},
        "parameters": 1_325_824,
        "data": "bible",
        "tokenizer": "bpe-4096",
        "batch_size": 8,
        "block_size": 64,
        "epochs": EPOCHS,
        "epoch_steps": STEPS,
        "repeats": max(run.repeat for run in runs),
        "untimed_steps": 2,
        "optimizer": "adamw",
        "lr": 2.5e-3,
        "muon_lr": 0.02,
        "seed": 1,
        "device": "cpu",
        "threads": 1,
    }
    machine = {
        "device": "CPU: test, 2 cores",
        "python": "3.11",
        "torch": "2.13",
        "fastpar": "0.1",
        "deepspeed": None,
        "commit": "abc",
        "date": "2026-11-22",
    }
    return Comparison({**known, **settings}, machine, skipped or {}, list(runs), complete)


def orders(*nudges):
    """Runs of `single` with their sums in other orders."""
    return [
        make_run("single", nudge=nudge, yardstick=True, micro_batch_size=1 + at)
        for at, nudge in enumerate(nudges)
    ]


def test_untimed_steps_do_not_count():
    found = make_comparison(make_run("dp", step_s=0.1))
    (run,) = found.of("dp")
    assert found.tokens_per_s(run) == pytest.approx(512 / 0.1)
    assert [found.epoch_s(run, e) for e in range(2)] == pytest.approx([0.5, 0.5])
    assert found.tokens_per_s(run, 0) == pytest.approx(5120)


def test_numbers_are_medians_with_their_range():
    runs = [make_run("dp", n + 1, step_s=s) for n, s in enumerate((0.1, 0.3, 0.2))]
    found = make_comparison(*runs)
    stat = found.stat("dp", lambda run: found.epoch_s(run, 1))
    assert stat == Stat(pytest.approx(1.0), pytest.approx(0.5), pytest.approx(1.5), 3)
    assert make_comparison(make_run("fsdp2")).stat("fsdp2", lambda run: run.exposed_ms) is None


def test_ranges_that_touch_prove_nothing():
    assert Stat(2, 1, 3, 3).touches(Stat(4, 3, 5, 3))
    assert not Stat(2, 1, 3, 3).touches(Stat(4, 3.1, 5, 3))
    assert Stat(2, 2, 2, 1).touches(Stat(9, 9, 9, 1)), "one run each"


def test_memory_is_of_one_kind_for_all():
    counted = make_run("dp", step_bytes=[7, 9])
    both = make_comparison(counted, make_run("zero1", step_bytes=[5, 5]))
    assert both.memory_mb(counted) == 9e-6
    assert "allocated in a step" in both.memory_label
    mixed = make_comparison(counted, make_run("zero1"))
    assert mixed.memory_mb(counted) == 50
    assert "resident" in mixed.memory_label


def test_yardsticks_and_failed_runs_are_no_repeats():
    failed = Run("ddp", 1, 2, 1, 4, 1, error="RuntimeError: no")
    found = make_comparison(make_run("single"), failed, *orders(1e-6))
    assert found.names == ["single"]
    assert len(found.of("single")) == 1
    assert found.failed == {"ddp": "RuntimeError: no"}
    assert len(found.orders) == 2


def test_the_yardstick_grows_and_has_a_floor():
    single, other = make_run("single"), make_run("single", yardstick=True, micro_batch_size=1)
    other.losses = [loss + (1e-4 if at == 3 else 0.0) for at, loss in enumerate(LOSSES)]
    found = make_comparison(single, make_run("dp"), other)
    np.testing.assert_allclose(yardstick(found), [0] * 3 + [1e-4] * 7, rtol=1e-6)
    limit = allowed(found)
    assert limit[0] == pytest.approx(FLOOR * EPS * 8.0)
    assert limit[5] == pytest.approx(FACTOR * 1e-4)
    assert yardstick(make_comparison(single, make_run("dp"))) is None


@pytest.mark.parametrize(("nudge", "beyond"), [(3.9e-5, None), (4.1e-5, (1, "zero2"))])
def test_losses_apart_by_more_than_rounding_are_found(nudge, beyond):
    runs = [make_run("single"), make_run("dp"), make_run("zero2", nudge=nudge), *orders(1e-5)]
    verdict = judge_losses(make_comparison(*runs))
    assert verdict.difference == pytest.approx(nudge)
    assert verdict.high == "zero2"
    assert verdict.low in ("single", "dp")
    assert (verdict.beyond, verdict.orders) == (beyond, 2)
    assert verdict.yardstick == pytest.approx(1e-5)


def test_a_repeat_that_goes_astray_is_found():
    runs = [make_run("single"), make_run("dp"), make_run("dp", 2, nudge=1.0), *orders(1e-5)]
    assert judge_losses(make_comparison(*runs)).beyond == (1, "dp")


def test_the_largest_difference_is_between_two_strategies():
    """Repeats of one strategy are not compared with each other."""
    runs = [make_run("dp"), make_run("dp", 2, nudge=0.5), make_run("single", nudge=0.4)]
    verdict = judge_losses(make_comparison(*runs))
    assert verdict.difference == pytest.approx(0.4)
    assert (verdict.high, verdict.low) == ("single", "dp")
    assert verdict.yardstick is None
    assert verdict.beyond is None
    runs[2] = make_run("single", nudge=0.2)
    verdict = judge_losses(make_comparison(*runs))
    assert verdict.difference == pytest.approx(0.3)
    assert (verdict.high, verdict.low) == ("dp", "single")
    assert judge_losses(make_comparison(make_run("dp"))) is None


def test_the_file_keeps_everything(tmp_path):
    found = make_comparison(
        make_run("single"), make_run("dp"), skipped={"tp": "needs 4 ranks, got 2"}, complete=False
    )
    found.save(tmp_path / RESULTS)
    again = read(tmp_path / RESULTS)
    assert asdict(again) == asdict(found)
    assert [p.name for p in tmp_path.iterdir()] == [RESULTS]
    lines = (tmp_path / RESULTS).read_text().splitlines()
    assert sum('"strategy": ' in line for line in lines) == 2, "a run a line"


def test_the_file_loses_no_digit_of_an_fp32(tmp_path):
    loss = float(np.float32(8.123456789))
    make_comparison(make_run("dp", losses=[loss] * 10)).save(tmp_path / RESULTS)
    assert np.float32(read(tmp_path / RESULTS).runs[0].losses[0]) == np.float32(loss)
