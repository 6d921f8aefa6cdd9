"""The saves of a run: beside training, agreed on by all ranks, reported, asked for by a signal."""

import errno
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from cells import slow
from train_runs import Runs, bits, check_same

from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.checkpoint.saver import Saver
from fastpar.files.runs import list_checkpoints
from fastpar.files.tensor_file import TensorFile
from fastpar.testing import run_ranks
from fastpar.train import trainer as train_module
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer

run = Runs(eval_every=0, save_every=2, num_samples=0, micro_batch_size=4)


def steps_saved(out):
    for path in list_checkpoints(out):
        verify_checkpoint(path)
    return [int(path.name[5:]) for path in list_checkpoints(out)]


def rows_of(out, key):
    return [row for row in read_metrics(Path(out) / "metrics.jsonl") if key in row]


@pytest.fixture
def gate(monkeypatch):
    """What is written waits until it is set."""
    event, real = threading.Event(), Saver._work

    def work(self, *args):
        assert event.wait(30)
        return real(self, *args)

    monkeypatch.setattr(Saver, "_work", work)
    return event


@pytest.fixture
def before(monkeypatch):
    """before(step, action): the action is done when the step begins, on every rank."""
    actions, real = {}, Trainer.train_step

    def step(self):
        if self.step + 1 in actions:
            actions[self.step + 1](self)
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", step)
    return actions.__setitem__


def soon(action, seconds=0.3):
    threading.Timer(seconds, action).start()


@pytest.mark.parametrize("ranks", [slow(1), 2])
def test_training_goes_on_while_a_checkpoint_is_written(here, gate, before, ranks, capsys):
    before(7, lambda trainer: gate.set())
    run("aside", ranks, save_every=4)
    rows = [r["step"] for r in read_metrics("aside/metrics.jsonl") if {"loss", "save_s"} & r.keys()]
    assert rows.index(4) < rows.index(6) < len(rows) - 1 - rows[::-1].index(4)
    assert steps_saved("aside") == [4, 8]
    run("at once", ranks, save_every=4, async_save=False)
    kept = read_metrics("at once/metrics.jsonl")
    kept = [row["step"] for row in kept if not {"val_loss", "prediction"} & row.keys()]
    assert kept == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    check_same("aside", "at once")
    row = rows_of("aside", "save_s")[0]
    assert row["save_s"] > 0
    assert row["save_mb"] == pytest.approx(row["save_mb_per_s"] * row["save_s"])
    assert 0 < row["save_pause_ms"] < row["save_s"] * 1e3
    row = rows_of("at once", "save_s")[0]
    assert row["save_pause_ms"] >= row["save_s"] * 1e3
    assert "step 4  saved: 0.1 MB in " in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_save_is_left_out_while_one_is_written(here, gate, before, capsys, ranks):
    before(5, lambda trainer: gate.set())
    before(6, lambda trainer: trainer.saves._saver.close())
    run("r", ranks, save_overlap="skip", save_every=2, max_steps=7)
    assert steps_saved("r") == [2, 6, 7]
    assert [row["step"] for row in rows_of("r", "save_skipped")] == [4]
    words = "step 4  no checkpoint: the one before is still being written (--save-overlap skip)"
    assert words in capsys.readouterr().out


def full(monkeypatch, rank, steps):
    """The disk is full in the middle of the third tensor of this rank's saves of these steps."""
    real, written = TensorFile.write, []

    def write(self, name, tensor):
        path = str(self._file.name)
        if f"optimizer-{rank + 1:05d}" in path and any(f"step_{n:06d}" in path for n in steps):
            written.append(name)
            if len(written) % 3 == 0:
                raise OSError(28, "No space left on device")
        return real(self, name, tensor)

    monkeypatch.setattr(TensorFile, "write", write)


@pytest.mark.parametrize(
    ("async_save", "wrong_rank"), [(True, 1), slow(True, 0), slow(False, 0), slow(False, 1)]
)
def test_a_full_disk_is_said_and_training_goes_on(
    here, monkeypatch, capsys, wrong_rank, async_save
):
    with monkeypatch.context() as patched:
        full(patched, wrong_rank, (2, 4))
        run("r", 2, async_save=async_save, zero_stage=3)
    words = f"(rank {wrong_rank}: [Errno 28] No space left on device); "
    said = capsys.readouterr().out
    assert f"no checkpoint of step 2 {words}there is no older one" in said
    assert "no checkpoint of step 4" in said
    assert steps_saved("r") == [6, 8]
    assert [row["step"] for row in rows_of("r", "save_error")] == [2, 4]
    assert not list(Path("r/checkpoints").glob(".*"))
    run("plain", 2, zero_stage=3)
    assert bits("r") == bits("plain")


def test_without_a_checkpoint_of_the_last_step_a_run_fails(here, monkeypatch):
    def fails(changes):
        with pytest.raises(RuntimeError, match=r"of step 8 \(rank 0: .* No space .*; .*6$"):
            run.rank(changes)

    full(monkeypatch, 0, (8,))
    run_ranks(fails, 2, {"out": "r"})
    assert steps_saved("r") == [2, 4, 6]
    assert len(rows_of("r", "save_error")) == 2  # it was tried again
    full(monkeypatch, 0, (1,))
    with pytest.raises(RuntimeError, match=r"step 1 \(.*\); there is none to go on from"):
        run("first", max_steps=1)


def test_a_folder_that_takes_no_checkpoints_is_known_at_the_start(here, monkeypatch):
    """Not after hours of training: what a save does is tried once."""
    acts = {name: getattr(os, name) for name in ("fsync", "replace")}

    def refuses(name, at):
        folder = name == "fsync" and stat.S_ISDIR(os.fstat(at).st_mode)
        if folder or (name == "replace" and ".try" in str(at)):
            raise OSError(errno.EPERM, f"no {name} here")

    for name, act in acts.items():
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *at, n=name, act=act: refuses(n, at[0]) or act(*at))
            with pytest.raises(RuntimeError, match=rf"takes checkpoints, got out=.*no {name} here"):
                run(name)
        assert read_metrics(Path(name) / "metrics.jsonl") == []
    run("r")
    assert not list(Path("r").glob(".*"))


def test_a_signal_saves_and_the_run_goes_on(here, before, capsys):
    """Beside the checkpoints that are kept."""
    run("plain", save_every=1, keep_last=2, keep_every=3)
    assert steps_saved("plain") == [3, 6, 7, 8]
    before(3, lambda trainer: signal.raise_signal(signal.SIGUSR1))
    run("r", save_every=0)
    assert steps_saved("r") == [3, 8]
    check_same("r", "plain", saves=[3, 8])
    assert "step 3  saved: " in capsys.readouterr().out


@pytest.mark.parametrize(("asked", "late"), [(1, 0), slow(0, 0), slow(0, 1), slow(1, 1)])
def test_a_signal_to_any_rank_makes_all_save(here, before, asked, late):
    """late: numbers are read a step later, as on a GPU."""

    def ask(trainer):
        trainer.keep_pending = late
        if trainer.mesh.rank == asked:
            trainer.saves.signals.append(signal.SIGUSR1)

    before(3, ask)
    run("r", 2, save_every=0)
    assert steps_saved("r") == [3 + late, 8]


def test_a_stop_waits_for_the_save_that_is_running(here, gate, before):
    def stop(trainer):
        soon(gate.set)
        signal.raise_signal(signal.SIGTERM)

    before(3, stop)
    assert run.rank({"out": "r"}) == 128 + signal.SIGTERM
    assert steps_saved("r") == [2, 3]


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_run_that_fails_waits_for_its_save(here, gate, before, monkeypatch, ranks):
    def spoil(trainer):
        trainer.model.register_forward_hook(lambda module, args, out: out * torch.nan)
        soon(gate.set)

    def fails(changes):
        with pytest.raises(RuntimeError, match=r"expected finite numbers, got .* in step 3; lower"):
            run.rank(changes)

    monkeypatch.setattr(train_module, "_LAST_WAIT_S", 0.0)
    before(3, spoil)
    run_ranks(fails, ranks, {"out": "r"})
    assert steps_saved("r") == [2]


@pytest.mark.parametrize("comes", [True, False])
def test_an_error_of_one_rank_gives_a_save_a_moment(here, gate, before, monkeypatch, comes):
    monkeypatch.setattr(train_module, "_LAST_WAIT_S", 10.0 if comes else 0.2)

    def fail(trainer):
        if comes:
            soon(gate.set)
        raise OSError("the text is gone")

    before(3, fail)
    began = time.monotonic()
    with pytest.raises(OSError, match="the text is gone"):
        run.rank({"out": "r"})
    assert time.monotonic() - began < 9.0
    assert steps_saved("r") == ([2] if comes else [])
    gate.set()
