"""The loop: what a run leaves, saves, stops and resumes; numbers that are not finite."""

import errno
import functools
import json
import math
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from cells import slow, sweep
from train_runs import STORAGE, Runs, bits, check_same, curve, forget_after, start, steps

from fastpar.checkpoint.manifest import read_manifest
from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.checkpoint.restore import read_state
from fastpar.checkpoint.saver import Saver
from fastpar.engine import engine
from fastpar.files.runs import checkpoint_folder, list_checkpoints, step_of
from fastpar.files.tensor_file import TensorFile
from fastpar.optim.schedule import DynamicLossScale
from fastpar.testing import run_ranks
from fastpar.train import journal
from fastpar.train import trainer as train_module
from fastpar.train.journal import plot_loss, read_metrics
from fastpar.train.trainer import IN_A_ROW, Guards, Trainer

ONCE = {"eval_every": 0, "save_every": 0}


def test_a_run_leaves_what_it_promises(here, monkeypatch, capsys):
    monkeypatch.setattr(journal, "plot_loss", plot_loss)
    assert start("r") == 0
    out = capsys.readouterr().out
    rows = steps("r")
    assert [r["step"] for r in rows] == list(range(1, 9))
    assert [r["step"] for r in curve("r") if "val_loss" in r] == [0, 4, 8]
    assert rows[0].keys() >= {
        "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "compute_ms", "comm_ms",
        "exposed_ms", "wire_mb", "rss_mb", "peak_rss_mb", "tokens", "time_s",
    }  # fmt: skip
    assert (rows[-1]["tokens"], rows[0]["wire_mb"]) == (8 * 8 * 16, 0.0)
    assert rows[0]["exposed_ms"] < rows[0]["step_ms"]
    assert rows[-1]["loss"] < rows[0]["loss"] == pytest.approx(math.log(256), abs=0.1)
    assert [p.name for p in list_checkpoints("r")] == ["step_000004", "step_000008"]
    assert Path("r/loss.png").stat().st_size > 5000
    first, _, sample = Path("r/samples.txt").read_text().partition("\n")
    assert first == "== step 8"
    for expected in (sample.rstrip("\n"), "steps 0 to 8", "validation loss", "fastpar sample r"):
        assert expected in out
    settings = json.loads(Path("r/config.json").read_text())
    assert settings["settings"]["n_embd"] == 16
    [began] = settings["starts"]
    assert began.items() >= {"dtype": "fp32", "device": "CPU", "step": 0}.items()
    assert began.keys() >= {"time", "torch", "threads", "storage", "zero_stage"}


def test_what_must_not_change_the_run(made, here, monkeypatch):
    """Validation, saves, buckets, random numbers of others, and numbers fetched a step later."""
    for out, changes in (
        ("often", {"eval_every": 1, "save_every": 1, "bucket_mb": 1e-6, "on_nonfinite": "skip"}),
        ("once", {**ONCE, "deterministic": True}),
    ):
        Runs()(out, **changes)
        assert bits(out) == bits(made()), changes
        assert [r for r in curve(out) if "loss" in r] == [r for r in curve(made()) if "lr" in r]
    drawn, step, init = [], Trainer.train_step, Trainer.__init__

    def draws(self):
        drawn.append((self.step, torch.rand(()).item()))
        return step(self)

    def late(self, config, mesh):
        init(self, config, mesh)
        self.keep_pending = 1

    monkeypatch.setattr(Trainer, "train_step", draws)
    monkeypatch.setattr(Trainer, "__init__", late)
    start("late")
    check_same("late", made())
    forget_after("late", 4)
    start("late", resume=True)
    assert drawn[8:] == drawn[4:8]


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_used(made, capsys):
    out = made.cut(8)
    with open(out / "checkpoints/step_000008/model.safetensors", "r+b") as file:
        file.truncate(100)
    made.go_on(out)
    said = capsys.readouterr().out
    assert "damaged, trying an older one: verify_files: expected" in said
    assert "100 bytes instead of" in said
    check_same(out, made())


def test_a_signal_stops_after_the_step_and_saves(made, here, before, capsys):
    whole = made()
    before(3, stop)
    assert start("cut", save_every=0) == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert "stopped by SIGTERM after step 3, saved in cut" in out
    assert "to resume: fastpar train --resume --out cut" in out
    assert not Path("cut/samples.txt").exists()
    assert Path("cut/loss.png").exists()
    start("cut", save_every=0, resume=True)
    check_same("cut", whole, saves=[8])


@pytest.mark.parametrize("ranks", [1, 2])
def test_max_time_ends_the_run_of_all_ranks_with_a_sample(here, capsys, ranks):
    Runs()("r", ranks, max_time="0.3s", max_steps=10**6, **ONCE)
    out = capsys.readouterr().out
    assert re.search("validation loss.*; to resume: fastpar train --resume --out r", out, re.DOTALL)
    [path] = list_checkpoints("r")
    assert step_of(path) == steps("r")[-1]["step"] < 10**6
    assert Path("r/samples.txt").exists()


def test_resume_says_what_has_changed_and_ends_at_once_where_nothing_is_left(made, capsys):
    out = made.cut(8)
    newest = checkpoint_folder(out, 8).stat().st_ino
    made.go_on(out)
    assert checkpoint_folder(out, 8).stat().st_ino == newest  # it is not written again
    before = curve(made())
    assert curve(out) == [*before, before[-1]]  # its validation, once more
    capsys.readouterr()
    made.go_on(out, max_steps=10, lr=1e-4)
    said = capsys.readouterr().out
    for words in ("changed  lr 0.001 -> 0.0001", "changed  max_steps 8 -> 10", "steps 8 to 10"):
        assert words in said
    settings = json.loads((out / "config.json").read_text())
    assert settings["settings"]["max_steps"] == 10
    assert [one["step"] for one in settings["starts"]] == [0, 8, 8]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_fp16_scales_skips_and_resumes(here, spoil, monkeypatch, ranks):
    """The CPU refuses fp16, but can run the loop. One rank's overflow halves the scale of all."""
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp16")
    scale = functools.partial(DynamicLossScale, growth_interval=3)
    monkeypatch.setattr(train_module, "DynamicLossScale", scale)
    spoil(nan_grad, 45)  # of step 6
    run = Runs(micro_batch_size=8 // ranks, on_nonfinite="skip", zero_stage=3 * (ranks > 1))
    run("whole", ranks)
    state = read_state(checkpoint_folder("whole", 4))
    assert state["loss_scale"] == {"scale": 2.0**17, "finite_steps": 1}
    shutil.copytree("whole", "cut", symlinks=True)
    forget_after("cut", 4)
    run("cut", ranks, resume=True)
    check_same("cut", "whole")
    scales = [r["loss_scale"] for r in steps("cut")]
    assert scales == [2.0**16] * 3 + [2.0**17] * 3 + [2.0**16] * 2
    assert not any("skipped" in row for row in steps("cut"))  # its own overflows are not counted


def test_another_format_loses_nothing_of_what_was_trained(made, capsys):
    """tests/checkpoint/test_checkpoint.py has weights, masters and moments."""
    out = made.cut(8)
    for was, dtype, step in (("fp32", "bf16", 8), ("bf16", "fp32", 10)):
        capsys.readouterr()
        made.go_on(out, dtype=dtype, max_steps=step + 2)
        assert f"changed  format of weights {was} -> {dtype}\n" in capsys.readouterr().out
        assert read_state(checkpoint_folder(out, step + 2))["dtype"] == dtype
    # Another max_steps has another schedule; bf16 keeps 8 bits of the weights.
    found, plain = ({r["step"]: r["loss"] for r in steps(run)} for run in (out, made(max_steps=12)))
    assert found == pytest.approx(plain, rel=2e-2)


@pytest.mark.slow
def test_a_run_goes_on_with_another_storage(made):
    """Moments are converted; of another optimizer there are none. Rounding follows the seed."""
    out = made.cut(4, **STORAGE[0])
    made.go_on(out, **STORAGE[1])
    assert [math.isfinite(row["loss"]) for row in steps(out)] == [True] * 8
    entries = {e.key.rpartition("/")[2] for e in read_manifest(checkpoint_folder(out, 8)).optimizer}
    assert entries >= {"exp_avg_codes", "exp_avg_sq_scale"}
    forget_after(out, 4)
    with pytest.raises(ValueError, match=r"Adafactor.*: expected row_var for wte.weight"):
        made.go_on(out, **STORAGE[2])
    assert bits(made(**STORAGE[1])) != bits(made(**STORAGE[1], seed=2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_resume_equals_the_uninterrupted_run(here, dtype):
    changes = {"device": "cuda", "dtype": dtype, "deterministic": True}
    try:
        start("whole", **changes)
        shutil.copytree("whole", "cut", symlinks=True)
        forget_after("cut", 4)
        start("cut", resume=True, **changes)
    finally:
        torch.use_deterministic_algorithms(False)
    check_same("cut", "whole")
    assert all(r["cuda_peak_mb"] > 0 for r in steps("whole"))


guarded = Runs(micro_batch_size=2, eval_every=0, save_every=4, num_samples=0)
BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan), (-math.inf, math.nan)]


@sweep(("loss", "norm"), BAD)
def test_policies_of_what_is_not_finite(loss, norm):
    """With a loss scale gradients may overflow, but not the loss; ten in a row are an error."""
    told = rf"expected finite numbers, got loss={loss}, grad_norm={norm} in step 7"
    with pytest.raises(RuntimeError, match=told):
        Guards("stop", scaled=False).judge(7, loss, norm)
    guards = Guards("skip", scaled=False)
    said = guards.judge(7, loss, norm)
    assert said == f"loss={loss}, grad_norm={norm}; update skipped, 1 in total"
    assert not guards.judge(8, 1.0, 1.0)
    for step in range(1, IN_A_ROW):
        assert guards.judge(30 + step, loss, norm)
    words = rf"a finite step among 10, got loss={loss}, grad_norm={norm} in step 40 and"
    with pytest.raises(RuntimeError, match=words):
        guards.judge(40, loss, norm)
    assert guards.skipped == IN_A_ROW + 1
    scaled = Guards("skip", scaled=True).judge(1, loss, norm)
    assert bool(scaled) == (not math.isfinite(loss))
    assert not Guards("stop", scaled=True).judge(1, loss, math.nan)


def inf_loss(loss):
    """Not finite itself, but all its gradients are."""
    return loss + math.inf


def nan_grad(loss):
    """Finite itself, but none of its gradients is."""
    loss.register_hook(lambda g: g * math.nan)
    return loss * 1.0


@pytest.fixture
def spoil(monkeypatch):
    """spoil(how, *samples): the losses of these samples are spoiled from now on, on any rank."""
    now, plan = threading.local(), {"samples": set()}
    batch, real = train_module.sample_batch, Trainer.__init__

    def sample_batch(tokens, *, first_sample, n_samples, **rest):
        now.samples = range(first_sample, first_sample + n_samples)
        return batch(tokens, first_sample=first_sample, n_samples=n_samples, **rest)

    def init(self, config, mesh):
        real(self, config, mesh)
        forward = self.forward

        def spoiled(*args, **rest):
            loss = forward(*args, **rest)
            return plan["how"](loss) if plan["samples"] & set(now.samples) else loss

        self.forward = spoiled

    def change(how, *samples):
        plan.update(how=how, samples=set(samples))

    monkeypatch.setattr(train_module, "sample_batch", sample_batch)
    monkeypatch.setattr(Trainer, "__init__", init)
    return change


@pytest.mark.parametrize(
    ("how", "ranks", "changes"),
    [
        (inf_loss, 1, {}),
        (nan_grad, 2, {"zero_stage": 0}),
        slow(nan_grad, 2, {"zero_stage": 2, "optimizer": "muon"}),
        slow(inf_loss, 4, {"tp": 2, "zero_stage": 3}),
    ],
)
def test_an_update_is_left_out_on_all_ranks(here, spoil, capsys, how, ranks, changes):
    """Sample 47 is the last of step 6: one micro-batch of one rank sees it."""
    spoil(how, 47)
    guarded("r", ranks, on_nonfinite="skip", save_every=1, **changes)
    assert bits("r", 6) == bits("r", 5)
    assert bits("r", 5) != bits("r", 4)
    assert bits("r", 7) != bits("r", 6)
    assert [r.get("skipped") for r in steps("r")] == [None] * 5 + [1, None, None]
    assert math.isfinite(steps("r")[-1]["loss"])
    out = capsys.readouterr().out
    assert "step 6  loss=" in out
    assert "update skipped, 1 in total" in out
    state = read_state(checkpoint_folder("r", 8))
    assert (state["next_sample"], state["guards"]["skipped"]) == (64, 1)


def test_the_count_goes_on_after_a_resume_and_ten_in_a_row_stop_the_run(here, spoil):
    spoil(inf_loss, 3, 35)
    guarded("r", on_nonfinite="skip", max_steps=4)
    guarded("r", on_nonfinite="skip", max_steps=5, resume=True)
    assert [row.get("skipped") for row in steps("r")] == [1, None, None, None, 2]
    spoil(inf_loss, *range(16, 200))
    for out, changes, words in (
        ("ten", {"on_nonfinite": "skip", "max_steps": 20}, "finite step among 10, .* in step 12"),
        ("one", {"save_every": 0}, "expected finite numbers, got .* in step 3; lower"),
    ):
        with pytest.raises(RuntimeError, match=words):
            guarded(out, **changes)
    assert not list_checkpoints("one")


def test_a_rank_that_drifts_is_named_before_its_state_is_saved(here, monkeypatch, before):
    compared, check = [], engine.check_replicas

    def counted(shards, group, optimizer, *, step):
        compared.append(step)
        check(shards, group, optimizer, step=step)

    def drift(trainer):
        with torch.no_grad():
            trainer.model.ln_f.bias[1] += 1e-9 * (trainer.mesh.rank == 2)

    def fails(changes):
        words = r"replicas differ on rank 2 in parameter 'ln_f.bias' after step 4, wh"
        with pytest.raises(RuntimeError, match=words):
            guarded.rank(changes)

    monkeypatch.setattr(engine, "check_replicas", counted)
    before(4, drift)
    changes = {"batch_size": 6, "check_replicas_every": 2, "save_every": 1, "async_save": False}
    run_ranks(fails, 3, {"out": "r", **changes})
    assert sorted(compared) == [2] * 3 + [4] * 3
    assert steps_saved("r") == [1, 2, 3]


def test_a_batch_takes_the_documented_walk(here):
    section = train_module.__doc__.partition("[Note: a batch's walk]")[2]
    steps = re.findall(r"^ +\d+\. `([\w/]+\.py)` `(\w+)`", section, re.MULTILINE)
    assert len(steps) > 20
    left = list(reversed(steps))

    def follow(frame, event, arg):
        code = frame.f_code
        file, name = left[-1] if left else ("", "")
        if event == "call" and code.co_name == name and code.co_filename.endswith(f"/{file}"):
            left.pop()

    sys.setprofile(follow)
    try:
        assert start("r", max_steps=2, eval_every=0, save_every=0) == 0
    finally:
        sys.setprofile(None)
    assert not left, f"no call of {left[-1]} after {steps[-len(left) - 1]}"


saving = Runs(eval_every=0, save_every=2, num_samples=0, micro_batch_size=4)


def steps_saved(out):
    for path in list_checkpoints(out):
        verify_checkpoint(path)
    return list(map(step_of, list_checkpoints(out)))


def rows_of(out, *keys):
    return [row for row in read_metrics(Path(out) / "metrics.jsonl") if set(keys) & row.keys()]


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


def test_training_goes_on_while_a_checkpoint_is_written(here, gate, before, capsys):
    before(7, lambda trainer: gate.set())
    saving("aside", 2, save_every=4)
    rows = [row["step"] for row in rows_of("aside", "loss", "save_s")]
    assert rows.index(4) < rows.index(6) < len(rows) - 1 - rows[::-1].index(4)
    assert steps_saved("aside") == [4, 8]
    saving("at once", 2, save_every=4, async_save=False)
    kept = [row["step"] for row in rows_of("at once", "loss", "save_s")]
    assert kept == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    check_same("aside", "at once")
    for out, waits in (("aside", False), ("at once", True)):
        row = rows_of(out, "save_s")[0]
        assert row["save_mb"] == pytest.approx(row["save_mb_per_s"] * row["save_s"])
        assert (row["save_pause_ms"] >= row["save_s"] * 1e3) == waits
        assert row["save_pause_ms"] > 0
    assert "step 4  saved: 0.1 MB in " in capsys.readouterr().out


def test_a_save_is_left_out_while_one_is_written(here, gate, before, capsys):
    before(5, lambda trainer: gate.set())
    before(6, lambda trainer: trainer.saves._saver._attempt.join())
    saving("r", 2, save_overlap="skip", save_every=2, max_steps=7)
    assert steps_saved("r") == [2, 6, 7]
    assert [row["step"] for row in rows_of("r", "save_skipped")] == [4]
    words = "step 4  save skipped: the previous one is still running (--save-overlap skip)"
    assert words in capsys.readouterr().out


def full(monkeypatch, rank, steps):
    """The disk is full in the middle of the third tensor of this rank's saves of these steps."""
    real, written = TensorFile.write, []

    def write(self, name, *args):
        path = str(self._file.name)
        if f"optimizer-{rank + 1:05d}" in path and any(f"step_{n:06d}" in path for n in steps):
            written.append(name)
            if len(written) % 3 == 0:
                raise OSError(28, "No space left on device")
        return real(self, name, *args)

    monkeypatch.setattr(TensorFile, "write", write)


@pytest.mark.parametrize(("async_save", "wrong_rank"), [(True, 1), slow(False, 0)])
def test_a_full_disk_is_said_and_a_run_goes_on(here, monkeypatch, capsys, wrong_rank, async_save):
    """But a run without a checkpoint of its last step has failed."""
    with monkeypatch.context() as patched:
        full(patched, wrong_rank, (2, 4))
        saving("r", 2, async_save=async_save, zero_stage=3)
    words = f"(rank {wrong_rank}: [Errno 28] No space left on device); "
    said = capsys.readouterr().out
    assert f"step 2  saving the checkpoint failed {words}there is no older one" in said
    assert "step 4  saving the checkpoint failed (" in said
    assert steps_saved("r") == [6, 8]
    assert [row["step"] for row in rows_of("r", "save_error")] == [2, 4]
    assert not list(Path("r/checkpoints").glob(".*"))
    saving("plain", 2, zero_stage=3)
    assert bits("r") == bits("plain")

    def fails(changes):
        words = r"saving step 8 failed \(rank 0: .* No space .*; .*6$|step 1 failed \(.*\); no olde"
        with pytest.raises(RuntimeError, match=words):
            saving.rank(changes)

    full(monkeypatch, 0, (1, 8))
    run_ranks(fails, 2, {"out": "last"})
    assert steps_saved("last") == [2, 4, 6]
    assert len(rows_of("last", "save_error")) == 2  # it was tried again
    fails({"out": "first", "max_steps": 1})


def test_a_folder_that_takes_no_checkpoints_is_known_at_the_start(here, monkeypatch):
    """Not after hours of training: what a save does is tried once."""
    acts = {name: getattr(os, name) for name in ("fsync", "replace")}

    def refuses(name, at):
        folder = name == "fsync" and stat.S_ISDIR(os.fstat(at).st_mode)
        if folder or (name == "replace" and ".try" in str(at)):
            raise OSError(errno.EPERM, f"no {name} here")

    for name, act in acts.items():
        words = rf"can hold checkpoints, got out=.*no {name} here"
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *at, n=name, act=act: refuses(n, at[0]) or act(*at))
            with pytest.raises(RuntimeError, match=words):
                saving(name)
        assert read_metrics(Path(name) / "metrics.jsonl") == []
    saving("r")
    assert not list(Path("r").glob(".*"))


@pytest.mark.parametrize(("ranks", "asked", "late"), [(1, 0, 0), (2, 1, 0), slow(2, 0, 1)])
def test_a_signal_saves_and_the_run_goes_on(here, made, before, capsys, ranks, asked, late):
    """Of any rank; late: numbers are read a step later, as on a GPU."""

    def ask(trainer):
        trainer.keep_pending = late
        if ranks == 1:
            signal.raise_signal(signal.SIGUSR1)
        elif trainer.mesh.rank == asked:
            trainer.saves.signals.append(signal.SIGUSR1)

    before(3, ask)
    saving("r", ranks, save_every=5, keep_last=1, keep_every=5)
    assert [row["step"] for row in rows_of("r", "save_s")] == [3 + late, 5, 8]
    assert f"step {3 + late}  saved: " in capsys.readouterr().out
    assert steps_saved("r") == [5, 8]
    if ranks == 1:
        assert bits("r") == bits(made(micro_batch_size=4))


def stop(trainer):
    signal.raise_signal(signal.SIGTERM)


def make_nan(trainer):
    trainer.model.register_forward_hook(lambda module, args, out: out * torch.nan)


def fail(trainer):
    raise OSError("the text is gone")


@pytest.mark.parametrize(
    ("how", "error", "words", "saved"),
    [
        (stop, None, "", [2, 3]),
        (make_nan, RuntimeError, "expected finite numbers, got .* in step 3; lower", [2]),
        (fail, OSError, "the text is gone", [2]),
        (fail, OSError, "the text is gone", []),
    ],
)
def test_what_ends_a_run_waits_for_saves(here, gate, before, monkeypatch, how, error, words, saved):
    """An error that one rank alone has gives it a moment, in which it may not come."""
    monkeypatch.setattr(train_module, "_LAST_WAIT_S", 10.0 if (how, saved) == (fail, [2]) else 0.1)

    def end(trainer):
        if saved:
            threading.Timer(0.3, gate.set).start()
        how(trainer)

    before(3, end)
    began = time.monotonic()
    if error is None:
        assert saving.rank({"out": "r"}) == 128 + signal.SIGTERM
    else:
        with pytest.raises(error, match=words):
            saving.rank({"out": "r"})
    assert time.monotonic() - began < 9.0
    assert steps_saved("r") == saved
    gate.set()
