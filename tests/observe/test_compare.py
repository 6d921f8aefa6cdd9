"""`fastpar compare` as a command: a real comparison on two ranks, and what ends one."""

import json

import pytest
from test_compare_results import make_comparison, make_run, read

from fastpar import cli
from fastpar.comm.ranks import RankFailed
from fastpar.observe import compare
from fastpar.observe.compare import write_report
from fastpar.observe.results import RESULTS

TEXT = "In the beginning was the word, and the word was short.\n" * 40
FILES = {
    *("results.json", "table.md", "throughput.png", "epoch_time.png"),
    *("memory.png", "grad_norm.png", "loss.png", "communication.png"),
}


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    pytest.importorskip("tyro", reason="needs tyro")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return [
        *("compare", "--data", str(tmp_path / "text.txt"), "--tokenizer", "bytes"),
        *("--n-layer", "1", "--n-embd", "32", "--block-size", "16", "--threads", "1"),
        *("--device", "cpu", "--epochs", "1", "--epoch-steps", "2", "--repeats", "1"),
        *("--batch-size", "2", "--out", str(tmp_path / "out")),
    ]


@pytest.mark.slow
def test_two_strategies_on_two_ranks(arguments, tmp_path, capfd):
    """With batch size 2 there are two more orders of sums: four runs."""
    assert cli.main([*arguments, "--strategies", "zero1,ddp,tp-zero1"]) == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == FILES
    found = read(out / RESULTS)
    assert found.complete
    assert found.names == ["zero1", "ddp"]
    assert found.skipped == {"tp-zero1": "needs 4 ranks, got 2"}
    for name in found.names:
        (run,) = found.of(name)
        assert len(run.step_s) == len(run.losses) == len(run.grad_norms) == 2
        assert len(run.step_bytes) == len(run.rss_bytes) == 2
        assert run.wire_bytes > 4 * 4096
        assert run.exposed_ms >= 0
    losses = [found.of(name)[0].losses for name in found.names]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    said = capfd.readouterr().out
    assert "skipped  tp-zero1: needs 4 ranks, got 2" in said
    assert "run 1/4 zero1: " in said
    assert "In every step that is within rounding: single with its sums in 2 orders" in said
    assert str(tmp_path) not in (out / RESULTS).read_text()
    assert cli.main([*arguments, "--strategies", "zero1"]) == 2, "the folder is taken"


def test_a_user_s_mistake_is_a_line(arguments, capfd):
    assert cli.main([*arguments, "--strategies", "zero9"]) == 2
    assert "did you mean zero" in capfd.readouterr().err


def fake_measure(monkeypatch, failing=(), interrupted_at=None):
    """Runs are made up; those of some strategies fail, and one is interrupted."""
    count = 0

    def measure(settings, run, text, on_step):
        nonlocal count
        count += 1
        if count == interrupted_at:
            raise KeyboardInterrupt
        if run.strategy in failing:
            raise RankFailed(1, "RuntimeError: no room")
        on_step(1, 5.0, 0.1)
        made = make_run(run.strategy, run.repeat)
        steps = settings["epochs"] * settings["epoch_steps"]
        run.step_s, run.losses, run.grad_norms = [0.1] * steps, [5.0] * steps, [1.0] * steps
        run.rss_bytes, run.wire_bytes, run.exposed_ms = made.rss_bytes, 1, None
        run.seconds = 1.0

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "draw_all", lambda comparison, folder: None)  # tested by itself


def test_one_that_fails_ends_no_other(arguments, tmp_path, capfd, monkeypatch):
    fake_measure(monkeypatch, failing=("ddp",))
    assert cli.main([*arguments, "--strategies", "single,ddp,dp"]) == 1
    found = read(tmp_path / "out" / RESULTS)
    assert found.names == ["single", "dp"]
    assert found.failed == {"ddp": "rank 1: RuntimeError: no room"}
    said = capfd.readouterr().out
    assert "ddp: failed: rank 1: RuntimeError: no room" in said
    table = (tmp_path / "out" / "table.md").read_text()
    assert "failed: rank 1: RuntimeError: no room" in table


def test_nothing_that_ends_well_makes_no_pictures(arguments, tmp_path, monkeypatch, capfd):
    fake_measure(monkeypatch, failing=("dp", "single"))
    assert cli.main([*arguments, "--strategies", "dp"]) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == [RESULTS]
    assert "nothing was measured" in capfd.readouterr().out


def test_an_interrupt_keeps_what_was_measured(arguments, tmp_path, monkeypatch, capfd):
    fake_measure(monkeypatch, interrupted_at=3)
    assert cli.main([*arguments, "--strategies", "single,ddp,dp"]) == 130
    found = read(tmp_path / "out" / RESULTS)
    assert found.names == ["single", "ddp"]
    assert not found.complete
    assert "stopped before all of its runs" in capfd.readouterr().out
    assert "stopped before its first run" in (tmp_path / "out" / "table.md").read_text()


def test_without_out_the_first_free_folder_is_taken(arguments, tmp_path, monkeypatch):
    fake_measure(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("compare", "compare-2"):
        assert cli.main([*arguments[:-2], "--strategies", "dp"]) == 0
        assert (tmp_path / "runs" / name / RESULTS).exists()


def test_without_matplotlib_there_is_the_table(tmp_path, monkeypatch, capfd):
    def missing(*args):
        raise ImportError("draw_all: expected matplotlib, got none")

    monkeypatch.setattr(compare, "draw_all", missing)
    write_report(make_comparison(make_run("dp")), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"table.md"}
    assert "no pictures: draw_all: expected matplotlib" in capfd.readouterr().out


def test_a_report_is_made_again_from_its_results(tmp_path):
    found = make_comparison(make_run("dp"), epochs=1, epoch_steps=10)
    found.save(tmp_path / RESULTS)
    write_report(read(tmp_path / RESULTS), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert json.loads((tmp_path / RESULTS).read_text())["format"] == 1
