"""bench.systems.curves: runs of `fastpar train` in every storage mode, and what is said of them."""

import json

import pytest

from bench.systems import curves
from bench.systems.curves import BASELINE, MASTER, MODES, REMAINDER, Run


def make_run(mode, seed, last, **changes):
    run = Run(mode, seed, [5.0, 4.0], [(0, 6.0), (2, last)], 100.0, 12.0, "w", [5.01, 4.01])
    return Run(**{**vars(run), **changes})


RUNS = [
    make_run(BASELINE, 1, 3.0),
    make_run(BASELINE, 2, 3.2),
    make_run(BASELINE, 3, 3.1),
    make_run(MASTER, 1, 3.15),
    make_run(MASTER, 2, 3.45),
    make_run(REMAINDER, 1, 3.15),
    make_run("adafactor", 1, 3.3),
    make_run("fp32, 8-bit moments", 1, 2.5),
]


def test_verdicts_are_against_the_same_seeds_and_the_spread_of_fp32():
    verdicts = {v.mode: v for v in curves.judge(RUNS)}
    assert curves.spread(RUNS) == pytest.approx(0.2)
    assert verdicts[MASTER].difference == pytest.approx(0.2)
    assert verdicts[MASTER].val_loss == pytest.approx(3.3)
    assert [v.mode for v in verdicts.values() if not v.holds] == ["adafactor"]
    assert verdicts["fp32, 8-bit moments"].holds  # lower is no failure
    text = curves.table(RUNS)
    assert f"| {REMAINDER} | 12.0 | 1 | 3.1500 | +0.1500 | yes, the master's bits |" in text
    assert "| adafactor | 12.0 | 1 | 3.3000 | +0.3000 | **no** |" in text


@pytest.mark.parametrize("changes", [{"digest": "x"}, {"exact": [5.01, 4.0100001]}])
def test_a_remainder_that_differs_is_an_error(changes):
    curves.check_remainder(RUNS)
    other = make_run(REMAINDER, 2, 3.2, **changes)
    with pytest.raises(RuntimeError, match=r"curves: expected 'bf16, 16-bit remainder' to give"):
        curves.check_remainder([*RUNS, other])


def test_files_are_written_and_drawn_again(tmp_path):
    about = {"device": "cpu", "cpu": "Test", "cores": 2, "torch": "2", "triton": None,
             "commit": "abc", "dirty": False, "date": "2026-01-01"}  # fmt: skip
    curves.save(tmp_path, about, curves.SETTINGS, RUNS)
    result = json.loads((tmp_path / "curves.json").read_text())
    assert result["spread"] == 0.2
    assert result["runs"][3]["val_losses"] == [[0, 6.0], [2, 3.15]]
    assert result["settings"]["max_steps"] == 400
    names = ("table.md", "curves.png")
    before = [(tmp_path / name).read_bytes() for name in names]
    assert b"Spread of fp32: 0.2. CPU: Test, 2 cores" in before[0]
    assert len(before[1]) > 5000
    for name in names:
        (tmp_path / name).unlink()
    assert curves.main(["--draw", "--out", str(tmp_path)]) == 0
    assert [(tmp_path / name).read_bytes() for name in names] == before


@pytest.mark.slow
def test_quick_runs_train(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text(
        "in the beginning god created the heaven and the earth\n" * 99
    )
    monkeypatch.setattr(curves, "MODES", {m: MODES[m] for m in (BASELINE, MASTER, REMAINDER)})
    out = tmp_path / "out"
    data = str(tmp_path / "text.txt")
    assert curves.main(["--quick", "--out", str(out), "--data", data]) == 0
    result = json.loads((out / "curves.json").read_text())
    found = [(run["mode"], run["seed"]) for run in result["runs"]]
    assert found == [(BASELINE, 1), (BASELINE, 2), (MASTER, 1), (REMAINDER, 1)]
    for run in result["runs"]:
        assert len(run["losses"]) == 12
        assert [step for step, _ in run["val_losses"]] == [0, 6, 12]
        assert run["losses"][-1] < run["losses"][0]
    sizes = [run["bytes_per_parameter"] for run in result["runs"]]
    assert [round(size) for size in sizes] == [12, 12, 14, 12]
    assert "spread of fp32: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"a run of fp32 to end, got exit code 2; it said: .*no"):
        curves.train_once(BASELINE, 1, curves.QUICK, str(tmp_path / "none.txt"), 1)


@pytest.mark.parametrize("option", [["--quick"], ["--out", "x"], ["--data", "x"]])
def test_only_full_runs_are_committed(option, capsys):
    assert curves.main(["--commit-results", *option]) == 2
    assert "curves: expected a full run on the own text" in capsys.readouterr().err
