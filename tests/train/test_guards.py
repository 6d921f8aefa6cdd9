"""Numbers that are not finite: verdicts, updates left out, the same on every rank."""

import math
import threading

import pytest
import torch
from cells import slow
from train_runs import STORAGE, Runs, bits, check_same, steps

from fastpar.checkpoint.restore import read_state
from fastpar.engine import engine
from fastpar.files.runs import checkpoint_folder, list_checkpoints
from fastpar.testing import run_ranks
from fastpar.train import trainer as train_module
from fastpar.train.trainer import IN_A_ROW, Guards, Trainer, poison

run = Runs(micro_batch_size=2, eval_every=0, save_every=4, num_samples=0)
BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan), (-math.inf, math.nan)]


@pytest.mark.parametrize(("loss", "norm"), BAD)
def test_policies_of_what_is_not_finite(loss, norm):
    """With a loss scale gradients may overflow, but not the loss."""
    told = rf"expected finite numbers, got loss={loss}, grad_norm={norm} in step 7"
    with pytest.raises(RuntimeError, match=told):
        Guards("stop", scaled=False).judge(7, loss, norm)
    said = Guards("skip", scaled=False).judge(7, loss, norm)
    assert said == f"loss={loss}, grad_norm={norm}; the update is left out, 1 by now"
    scaled = Guards("skip", scaled=True).judge(1, loss, norm)
    assert bool(scaled) == (not math.isfinite(loss))
    assert not Guards("stop", scaled=True).judge(1, loss, math.nan)


def test_too_many_in_a_row_are_an_error():
    g = Guards("skip", scaled=False)
    for step in range(IN_A_ROW - 1):
        assert g.judge(step, math.nan, 1.0)
    assert not g.judge(20, 1.0, 1.0)
    for step in range(IN_A_ROW - 1):
        assert g.judge(30 + step, math.nan, 1.0)
    words = r"a finite step among 10, got loss=nan, grad_norm=1.0 in step 40 as in"
    with pytest.raises(RuntimeError, match=words):
        g.judge(40, math.nan, 1.0)
    assert g.skipped == 2 * IN_A_ROW - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_not_finite_reaches_every_gradient(dtype):
    for loss, finite in ((2.5, True), (math.inf, False), (math.nan, False), (-math.inf, False)):
        x = torch.ones(3, dtype=dtype, requires_grad=True)
        value = x.sum() / 3 + (torch.tensor(loss, dtype=dtype) - 1)
        (value * poison(value)).backward()
        plain = torch.ones(3, dtype=dtype, requires_grad=True)
        (plain.sum() / 3).backward()
        assert torch.equal(x.grad, plain.grad) if finite else x.grad.isnan().all()


def nan_loss(loss):
    return loss * math.nan


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
    now, plan = threading.local(), {}
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
    change(nan_loss)
    return change


@pytest.mark.parametrize(
    ("how", "ranks", "changes"),
    [
        (inf_loss, 1, {}),
        (nan_grad, 2, {"zero_stage": 0}),
        slow(nan_grad, 2, {"zero_stage": 2, "optimizer": "muon"}),
        slow(inf_loss, 2, {"zero_stage": 3}),
        slow(nan_grad, 2, {"tp": 2}),
        slow(inf_loss, 4, {"tp": 2, "zero_stage": 2}),
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


@pytest.mark.parametrize("changes", [{}, *(slow(c) for c in ({"dtype": "bf16"}, *STORAGE))])
def test_the_rule_alone_changes_no_bit(made, changes):
    check_same(made(on_nonfinite="skip", **changes), made(**changes))


def test_the_count_goes_on_after_a_resume_and_ten_in_a_row_stop_the_run(here, spoil):
    spoil(nan_loss, 3, 35)
    run("r", on_nonfinite="skip", max_steps=4)
    run("r", on_nonfinite="skip", max_steps=5, resume=True)
    assert [row.get("skipped") for row in steps("r")] == [1, None, None, None, 2]
    spoil(nan_loss, *range(16, 200))
    with pytest.raises(RuntimeError, match=r"finite step among 10, got .* in step 12 as in those"):
        run.rank({"out": "ten", "on_nonfinite": "skip", "max_steps": 20})
    with pytest.raises(RuntimeError, match=r"expected finite numbers, got .* in step 3; lower"):
        run("one", save_every=0)
    assert not list_checkpoints("one")


def test_a_loss_scale_keeps_its_own_overflows(here, spoil, monkeypatch):
    """fp16 is refused on the CPU; the loop's part of it is run there all the same."""
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp16")
    spoil(nan_grad, 45)
    run("r", on_nonfinite="skip")
    scales = [row["loss_scale"] for row in steps("r")]
    assert scales == [2.0**16] * 6 + [2.0**15] * 2
    assert not any("skipped" in row for row in steps("r"))


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
            run.rank(changes)

    monkeypatch.setattr(Trainer, "train_step", step)
    changes = {"batch_size": 6, "check_replicas_every": 2, "save_every": 1, "async_save": False}
    run_ranks(fails, 3, {"out": "r", **changes})
    assert [p.name for p in list_checkpoints("r")] == [f"step_00000{i}" for i in (1, 2, 3)]


def test_ranks_that_are_well_are_compared_without_a_trace(here, monkeypatch):
    run("plain", 2, zero_stage=2)
    compared, check = [], engine.check_replicas

    def counted(shards, group, optimizer, *, step):
        compared.append(step)
        check(shards, group, optimizer, step=step)

    monkeypatch.setattr(engine, "check_replicas", counted)
    run("r", 2, zero_stage=2, check_replicas_every=3)
    assert sorted(compared) == [3, 3, 6, 6]
    check_same("r", "plain")
