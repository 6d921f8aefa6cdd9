"""The trainer's guards: updates left out, rollbacks past samples, the same on every rank."""

import math
import shutil
import threading
from pathlib import Path

import pytest
import torch
from train_runs import STORAGE, TINY, bits, curve, forget_after

from fastpar.checkpoint.restore import read_state
from fastpar.comm.mesh import Mesh
from fastpar.config.config import TrainConfig
from fastpar.files.step_folders import checkpoint_folder, list_checkpoints
from fastpar.parallel import engine
from fastpar.testing import run_ranks
from fastpar.train import trainer as train_module
from fastpar.train.metrics import read_metrics
from fastpar.train.trainer import Trainer

FEW = {**TINY, "micro_batch_size": 2, "eval_every": 0, "save_every": 4, "num_samples": 0}
BACK = {"on_nonfinite": "rollback", "deterministic": True}


def rank(changes):
    """One rank of a run; its exit status."""
    config = TrainConfig().replace({**FEW, **changes})
    return Trainer(config, Mesh(tp=config.parallel.tp, device="cpu")).run()


def run(out, ranks=1, **changes):
    """All ranks, as threads."""
    assert run_ranks(rank, ranks, {"out": out, **changes}) == [0] * ranks


def nan_loss(loss):
    return loss * math.nan


def inf_loss(loss):
    """Not finite itself, but all its gradients are."""
    return loss + math.inf


def nan_grad(loss):
    """Finite itself, but none of its gradients is."""
    loss.register_hook(lambda g: g * math.nan)
    return loss * 1.0


def high_loss(loss):
    return loss + 100.0


@pytest.fixture
def spoil(monkeypatch):
    """spoil(how, *samples): the losses of these samples are spoiled from now on, on any rank."""
    now, plan, taken = threading.local(), {}, set()
    batch, real = train_module.sample_batch, Trainer.__init__

    def sample_batch(tokens, *, first_sample, n_samples, **rest):
        now.samples = range(first_sample, first_sample + n_samples)
        taken.update(now.samples)
        return batch(tokens, first_sample=first_sample, n_samples=n_samples, **rest)

    def init(self, config, mesh):
        real(self, config, mesh)
        forward = self.forward
        self.skipped_samples = list(plan.get("never", self.skipped_samples))
        self.keep_pending = plan.get("late", self.keep_pending)

        def spoiled(*args, **rest):
            loss = forward(*args, **rest)
            return plan["how"](loss) if plan["samples"] & set(now.samples) else loss

        self.forward = spoiled

    def change(how, *samples, **more):
        plan.clear()
        taken.clear()
        plan.update(how=how, samples=set(samples), **more)
        return taken

    monkeypatch.setattr(train_module, "sample_batch", sample_batch)
    monkeypatch.setattr(Trainer, "__init__", init)
    change(nan_loss)
    return change


def steps(out):
    return [row for row in read_metrics(Path(out) / "metrics.jsonl") if "grad_norm" in row]


def events(out):
    return [r for r in read_metrics(Path(out) / "metrics.jsonl") if "rollback_from" in r]


MESHES = [
    (1, {}),
    (2, {"zero_stage": 0}),
    (2, {"zero_stage": 3}),
    (2, {"tp": 2}),
    (4, {"tp": 2, "zero_stage": 2}),
]


@pytest.mark.parametrize(
    ("how", "ranks", "changes"),
    [
        (inf_loss, *MESHES[0]),
        (nan_grad, *MESHES[1]),
        (nan_grad, 2, {"zero_stage": 2, "optimizer": "muon"}),
        *(
            pytest.param(how, *MESHES[i], marks=pytest.mark.slow)
            for how in (inf_loss, nan_grad)
            for i in range(len(MESHES))
            if (how, i) not in ((inf_loss, 0), (nan_grad, 1))
        ),
    ],
)
def test_an_update_is_left_out_on_all_ranks(here, spoil, capsys, how, ranks, changes):
    """Sample 47 is the last of step 6: one micro-batch of one rank sees it."""
    spoil(how, 47)
    run("r", ranks, on_nonfinite="skip", save_every=1, **changes)
    assert bits("r", 6) == bits("r", 5)
    assert bits("r", 5) != bits("r", 4)
    assert bits("r", 7) != bits("r", 6)
    assert [r.get("skipped") for r in steps("r")] == [None] * 5 + [1, None, None]
    assert math.isfinite(steps("r")[-1]["loss"])
    out = capsys.readouterr().out
    assert "step 6  loss=" in out
    assert "the update is left out, 1 by now" in out
    state = read_state(checkpoint_folder("r", 8))
    assert (state["next_sample"], state["guards"]["skipped"]) == (64, 1)


@pytest.mark.parametrize(
    "changes",
    [{}, *(pytest.param(c, marks=pytest.mark.slow) for c in ({"dtype": "bf16"}, *STORAGE))],
)
def test_the_rule_alone_changes_no_bit(here, changes):
    run("stop", **changes)
    for policy in ("skip", "rollback"):
        run(policy, on_nonfinite=policy, loss_spike=9.0, **changes)
        assert bits(policy) == bits("stop")
        assert curve(policy) == curve("stop")


def test_ten_updates_left_out_in_a_row_stop_the_run(here, spoil):
    spoil(nan_loss, *range(16, 200))
    with pytest.raises(RuntimeError, match=r"finite step among 10, got .* in step 12 as in those"):
        rank({"out": "r", "on_nonfinite": "skip", "max_steps": 20})


@pytest.mark.parametrize(
    ("how", "ranks", "changes"),
    [
        (nan_loss, *MESHES[0]),
        (nan_grad, 2, STORAGE[0]),
        *(pytest.param(nan_loss, *mesh, marks=pytest.mark.slow) for mesh in MESHES[1:]),
        *(
            pytest.param(nan_grad, 2, storage, marks=pytest.mark.slow)
            for storage in ({}, {"dtype": "bf16"}, STORAGE[1])
        ),
    ],
)
def test_a_run_that_went_back_never_had_those_samples(here, spoil, how, ranks, changes):
    changes = {**BACK, **changes}
    spoil(how, 45)
    run("r", ranks, **changes)
    taken = spoil(how, never=[(40, 48)])
    run("clean", ranks, **changes)
    assert not taken & set(range(40, 48))
    assert taken == set(range(72)) - set(range(40, 48))
    assert bits("r") == bits("clean")
    assert steps_of_curve("r") == steps_of_curve("clean")
    state = read_state(checkpoint_folder("r", 8))
    assert (state["next_sample"], state["skipped_samples"]) == (72, [[40, 48]])
    [event] = events("r")
    assert (event["step"], event["rollback_from"], event["skipped_samples"]) == (4, 6, [40, 48])


def steps_of_curve(out):
    return [row for row in curve(out) if "grad_norm" in row]


def test_what_is_said_of_a_rollback(here, spoil, capsys):
    spoil(nan_loss, 45)
    run("r", **BACK)
    assert (
        "step 4  went back to here from step 6: loss=nan, grad_norm=nan; its samples 40 to 47 are "
        "skipped (rollback 1 of 3)"
    ) in capsys.readouterr().out


@pytest.mark.parametrize("bad", [45, *(pytest.param(n, marks=pytest.mark.slow) for n in (37, 61))])
def test_a_verdict_that_comes_a_step_late_condemns_the_same_samples(
    here,
    spoil,
    monkeypatch,
    bad,
):
    """A GPU does this; 61 is of the last step, which is to be saved, and is not."""
    saved, save = [], Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self: saved.append(self.step) or save(self))
    spoil(nan_loss, bad)
    run("now", **BACK)
    spoil(nan_loss, bad, late=1)
    run("late", **BACK)
    assert bits("late") == bits("now")
    assert events("late")[0]["skipped_samples"] == events("now")[0]["skipped_samples"]
    assert events("late")[0]["skipped_samples"][0] == bad // 8 * 8
    assert steps_of_curve("late") == steps_of_curve("now")
    assert saved.count(4) == 2  # once in each run


def test_a_loss_spike_goes_back(here, spoil):
    changes = {"loss_spike": 6.0, "deterministic": True, "max_steps": 40, "save_every": 10}
    spoil(high_loss, 271)
    run("r", 2, **changes)
    spoil(high_loss, never=[(264, 272)])
    run("clean", 2, **changes)
    assert bits("r", 40) == bits("clean", 40)
    assert steps_of_curve("r") == steps_of_curve("clean")
    [event] = events("r")
    assert (event["step"], event["rollback_from"]) == (30, 34)
    assert "spreads of" in event["reason"]
    # What is usual is part of a checkpoint: the resumed run has the same opinion.
    shutil.copytree("r", "cut", symlinks=True)
    forget_after("cut", 30)
    spoil(high_loss, 271)
    run("cut", 2, resume=True, **changes)
    assert events("cut")[-1]["reason"] == event["reason"]
    assert bits("cut", 40) == bits("r", 40)


def test_without_the_rule_a_spike_is_trained_on(here, spoil):
    spoil(high_loss, 271)
    run("r", max_steps=40, save_every=10)
    assert max(row["loss"] for row in steps("r")) > 20


def test_samples_stay_skipped_after_a_resume(here, spoil):
    spoil(nan_loss, 45)
    changes = {**BACK, "max_steps": 12}
    run("whole", **changes)
    shutil.copytree("whole", "cut", symlinks=True)
    forget_after("cut", 8)
    taken = spoil(nan_loss)
    run("cut", resume=True, **changes)
    assert bits("cut", 12) == bits("whole", 12)
    assert min(taken) == 72
    # Even where a larger batch begins before them.
    shutil.copytree("whole", "more", symlinks=True)
    forget_after("more", 4)
    state = read_state(checkpoint_folder("more", 4))
    assert state["skipped_samples"] == []
    taken = spoil(nan_loss, never=[(40, 48)])
    run("more", resume=True, **{**changes, "batch_size": 16})
    assert not taken & set(range(40, 48))
    assert min(taken) == 48


@pytest.mark.slow
def test_several_rollbacks_and_one_too_many(here, spoil):
    spoil(nan_loss, 45, 50, 63)
    run("r", **BACK)
    assert [e["skipped_samples"] for e in events("r")] == [[40, 48], [48, 56], [56, 64]]
    assert read_state(checkpoint_folder("r", 8))["skipped_samples"] == [[40, 64]]
    with pytest.raises(
        RuntimeError,
        match=r"at most max_rollbacks=2 rollbacks, got one more reason: loss=nan, grad_norm=nan in "
        r"step 6 \(samples 56 to 63\); look at",
    ):
        rank({"out": "s", **BACK, "max_rollbacks": 2})


def test_before_the_first_checkpoint_there_is_nothing_to_go_back_to(here, spoil):
    spoil(nan_loss, 20)

    def fails(changes):
        with pytest.raises(
            RuntimeError,
            match=r"a checkpoint to go back to, got none: loss=nan, .* in step 3 \(samples 16 to 2",
        ):
            rank(changes)

    run_ranks(fails, 2, {"out": "r", **BACK})


def test_a_damaged_checkpoint_is_not_what_it_goes_back_to(here, spoil, capsys, monkeypatch):
    real = Trainer.train_step

    def step(self):
        if self.step == 5 and self.rollbacks == 0:
            with open("r/checkpoints/step_000004/model.safetensors", "r+b") as file:
                file.truncate(100)
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", step)
    spoil(nan_loss, 45)
    run("r", **BACK, save_every=2, async_save=False)
    assert "damaged, trying the one before" in capsys.readouterr().out
    assert events("r")[0]["step"] == 2
    monkeypatch.setattr(Trainer, "train_step", real)
    spoil(nan_loss, never=[(40, 48)])
    run("clean", **BACK, save_every=2)
    assert bits("r") == bits("clean")


def test_a_loss_scale_keeps_its_own_overflows(here, spoil, monkeypatch):
    """fp16 is refused on the CPU; the loop's part of it is run there all the same."""
    monkeypatch.setattr("fastpar.train.trainer.pick_dtype", lambda *given: "fp16")
    spoil(nan_grad, 45)
    run("r", **BACK)
    assert not events("r")
    scales = [row["loss_scale"] for row in steps("r")]
    assert scales == [2.0**16] * 6 + [2.0**15] * 2
    spoil(nan_loss, 45)
    run("s", **BACK)
    assert [e["rollback_from"] for e in events("s")] == [6]
    assert torch.isfinite(torch.tensor([row["loss"] for row in steps("s")])).all()
    assert [row["loss_scale"] for row in steps("s")] == [2.0**16] * 8


def test_a_rank_that_drifts_is_named_before_its_state_is_saved(here, monkeypatch):
    real = Trainer.train_step

    def step(self):
        done = real(self)
        if self.step == 3 and self.mesh.rank == 2:
            with torch.no_grad():
                self.model.ln_f.bias[1] += 1e-9
        return done

    def fails(changes):
        with pytest.raises(
            RuntimeError, match=r"a difference on rank 2 in parameter 'ln_f.bias' after step 4, wh"
        ):
            rank(changes)

    monkeypatch.setattr(Trainer, "train_step", step)
    changes = {"batch_size": 6, "check_replicas_every": 2, "save_every": 1, "async_save": False}
    run_ranks(fails, 3, {"out": "r", **changes})
    assert [p.name for p in list_checkpoints("r")] == [f"step_00000{i}" for i in (1, 2, 3)]


def test_ranks_that_are_well_are_compared_without_a_trace(here, monkeypatch):
    run("plain", 2, zero_stage=2)
    steps, check = [], engine.check_replicas

    def counted(shards, group, optimizer, *, step):
        steps.append(step)
        check(shards, group, optimizer, step=step)

    monkeypatch.setattr(engine, "check_replicas", counted)
    run("r", 2, zero_stage=2, check_replicas_every=3)
    assert sorted(steps) == [3, 3, 6, 6]
    assert bits("r") == bits("plain")
