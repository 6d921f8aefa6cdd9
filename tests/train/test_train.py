"""The loop: what a run leaves, stops, resumes and what changes with them; numbers that are not
finite; the way of a batch."""

import functools
import json
import math
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import saved
import torch
import torch.distributed as dist
from cells import slow
from train_runs import (
    STORAGE,
    TINY,
    Runs,
    bits,
    check_same,
    curve,
    forget_after,
    in_folder,
    start,
    steps,
)

import fastpar
from fastpar.checkpoint.manifest import read_manifest
from fastpar.checkpoint.restore import read_state
from fastpar.engine import engine
from fastpar.files.runs import checkpoint_folder, list_checkpoints
from fastpar.models.hf import load_hf
from fastpar.optim.schedule import DynamicLossScale
from fastpar.settings.config import TrainConfig
from fastpar.testing import run_ranks
from fastpar.train import journal
from fastpar.train import trainer as train_module
from fastpar.train.journal import plot_loss
from fastpar.train.trainer import IN_A_ROW, Guards, Trainer, poison

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
    assert rows[-1]["tokens"] == 8 * 8 * 16
    assert rows[0]["wire_mb"] == 0.0
    assert rows[0]["exposed_ms"] < rows[0]["step_ms"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.1)
    assert [p.name for p in list_checkpoints("r")] == ["step_000004", "step_000008"]
    assert Path("r/loss.png").stat().st_size > 5000
    sample = Path("r/samples.txt").read_text()
    assert sample.startswith("== step 8\n")
    assert sample.partition("\n")[2].rstrip("\n") in out
    settings = json.loads(Path("r/config.json").read_text())
    assert settings["settings"]["n_embd"] == 16
    assert settings["starts"][0]["dtype"] == "fp32"
    for expected in ("1 layers, 2 heads, 16 wide, context 16, dropout 0.2", "tokenizer bytes",
                     "128 tokens a step: 8 sequences = ranks 1 * micro-batch 8 * accumulation 1",
                     "steps 0 to 8", "validation loss", "fastpar sample r"):  # fmt: skip
        assert expected in out


def test_what_must_not_change_the_run(made, here, monkeypatch):
    """Validation, saves and buckets; other code's random numbers, which a resume gives back; and
    what a GPU does, where a step's numbers are fetched while the next step runs."""
    for i, changes in enumerate(
        [{"eval_every": 1, "save_every": 1, "num_samples": 0}, {"bucket_mb": 1e-6}, ONCE]
    ):
        Runs()(f"r{i}", **changes, deterministic=i == 1)
        assert bits(f"r{i}") == bits(made()), changes
        assert [r for r in curve(f"r{i}") if "loss" in r] == [r for r in curve(made()) if "lr" in r]
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


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [
        ({"accumulate": "shard"}, [0, 4, 8, 12], [2, 6, 10, 14]),
        ({"accumulate": "full"}, [0, 2, 8, 10], [4, 6, 12, 14]),
        ({"zero_stage": 1}, [0, 2, 8, 10], [4, 6, 12, 14]),
        ({"zero_stage": 2}, [0, 4, 8, 12], [2, 6, 10, 14]),
    ],
)
def test_who_takes_which_micro_batches(here, monkeypatch, changes, first, second):
    """And draws the masks of its dropout by them."""
    taken, keys = ({0: [], 1: []} for _ in range(2))
    batch, key = train_module.sample_batch, train_module.make_key

    def sample_batch(tokens, *, first_sample, **rest):
        taken[dist.get_rank()].append(first_sample)
        return batch(tokens, first_sample=first_sample, **rest)

    def make_key(seed, first_sample):
        keys[dist.get_rank()].append(first_sample)
        return key(seed, first_sample)

    def two_steps():
        trainer = Runs().trainer(micro_batch_size=2, **changes)
        for _ in range(2):
            trainer.train_step()

    monkeypatch.setattr(train_module, "sample_batch", sample_batch)
    monkeypatch.setattr(train_module, "make_key", make_key)
    run_ranks(two_steps, 2)
    assert taken == keys == {0: first, 1: second}


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_used(made, capsys):
    out = made.cut(8)
    with open(out / "checkpoints/step_000008/model.safetensors", "r+b") as file:
        file.truncate(100)
    made.go_on(out)
    said = capsys.readouterr().out
    assert "damaged, trying the one before: verify_files: expected" in said
    assert "100 bytes instead of" in said
    check_same(out, made())


def test_random_rounding_follows_the_seed(here):
    changes = {**STORAGE[1], "max_steps": 2, **ONCE}
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        start(out, **changes, seed=seed)
    assert bits("a", 2) == bits("b", 2) != bits("c", 2)


def test_a_signal_stops_after_the_step_and_saves(here, monkeypatch, capsys):
    start("whole", max_steps=6, save_every=0)
    real = Trainer.train_step

    def step(self):
        if self.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        capsys.readouterr()
        assert start("cut", max_steps=6, save_every=0) == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert "stopped by SIGTERM after step 3, saved in cut" in out
    assert "go on: fastpar train --resume --out cut" in out
    assert not Path("cut/samples.txt").exists()
    assert Path("cut/loss.png").exists()
    start("cut", max_steps=6, save_every=0, resume=True)
    check_same("cut", "whole", saves=[6])


def test_max_time_ends_the_run_with_a_sample(here, capsys):
    assert start("r", max_time="0.0001s") == 0
    out = capsys.readouterr().out
    assert "validation loss" in out
    assert "the time was up; go on: fastpar train --resume --out r" in out
    assert [p.name for p in list_checkpoints("r")] == ["step_000001"]
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


def test_fp16_scales_skips_and_resumes(here, monkeypatch):
    """fp16 is refused on the CPU; the loop's part of it is run there all the same."""
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp16")
    scale = functools.partial(DynamicLossScale, growth_interval=3)
    monkeypatch.setattr(train_module, "DynamicLossScale", scale)
    start("whole")
    state = read_state(checkpoint_folder("whole", 4))
    assert state["loss_scale"] == {"scale": 2.0**17, "finite_steps": 1}
    shutil.copytree("whole", "cut", symlinks=True)
    forget_after("cut", 4)
    start("cut", resume=True)
    check_same("cut", "whole")
    scales = [r["loss_scale"] for r in steps("cut")]
    assert scales[:7] == [2.0**16] * 3 + [2.0**17] * 3 + [2.0**18]

    trainer = Runs().trainer(out="skip")
    before = [p.clone() for p in trainer.model.parameters()]
    handle = trainer.model.wpe.weight.register_hook(lambda g: g * math.inf)
    trainer.pending.append(trainer.train_step())
    trainer._read(0)
    handle.remove()
    assert trainer.loss_scale.scale == 2.0**15
    assert all(torch.equal(p, q) for p, q in zip(before, trainer.model.parameters()))


def test_another_format_loses_nothing_of_what_was_trained(made, capsys):
    """fp32 to bf16 keeps the fp32 values as masters, and bf16 to fp32 goes on from them."""
    out = made.cut(8)
    for was, dtype, step in (("fp32", "bf16", 8), ("bf16", "fp32", 10)):
        with in_folder(made.folder):
            trainer = Runs().trainer(out=str(out), resume=True, dtype=dtype)
        path = checkpoint_folder(out, step)
        weights, masters = load_hf(path).state_dict(), saved.whole_tensors(path)[1]
        for name, p in trainer.model.named_parameters():
            if dtype == "bf16":
                master = trainer.optimizer.state[p]["master_weight"]
                assert torch.equal(master, weights[name])
                assert torch.equal(p, master.bfloat16())
            else:
                assert torch.equal(p, masters[f"{name}/master_weight"])
        capsys.readouterr()
        made.go_on(out, dtype=dtype, max_steps=step + 2)
        assert f"changed  format of weights {was} -> {dtype}\n" in capsys.readouterr().out
        assert read_state(checkpoint_folder(out, step + 2))["dtype"] == dtype
    # Another max_steps has another schedule; bf16 keeps 8 bits of the weights.
    plain = steps(made(max_steps=12))
    assert [row["step"] for row in steps(out)] == list(range(1, 13))
    for row, found in zip(plain, steps(out)):
        assert found["loss"] == pytest.approx(row["loss"], rel=2e-2)


@pytest.mark.slow
def test_a_run_goes_on_with_another_storage(made):
    """Moments are converted; of another optimizer there are none."""
    out = made.cut(4, **STORAGE[0])
    made.go_on(out, **STORAGE[1])
    losses = [row["loss"] for row in steps(out)]
    assert len(losses) == 8
    assert all(map(math.isfinite, losses))
    entries = {e.key.rpartition("/")[2] for e in read_manifest(checkpoint_folder(out, 8)).optimizer}
    assert entries == {"step"} | {
        f"{moment}_{part}" for moment in ("exp_avg", "exp_avg_sq") for part in ("codes", "scale")
    }
    forget_after(out, 4)
    with pytest.raises(ValueError, match=r"Adafactor.*: expected row_var for wte.weight"):
        made.go_on(out, **STORAGE[2])


def test_a_deterministic_run_after_other_products_says_how_to_start(here, monkeypatch):
    def refuse(*args):
        raise RuntimeError("not deterministic: set CUBLAS_WORKSPACE_CONFIG=:4096:8")

    monkeypatch.setattr(torch, "mm", refuse)
    mesh = SimpleNamespace(device=torch.device("meta"))
    config = TrainConfig().replace({**TINY, "out": "r", "deterministic": True})
    try:
        with pytest.raises(RuntimeError, match=r"ran on the GPU before .* start the process with"):
            train_module._train(config, mesh, None)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_deterministic_run_on_a_gpu_does_not_fill_new_memory(monkeypatch):
    """torch would write each output once more."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(train_module, "Trainer", lambda config, mesh: None)
    monkeypatch.setattr(train_module, "_check_cublas", lambda device: None)
    config = TrainConfig().replace({"device": "cuda", "deterministic": True})
    mesh = SimpleNamespace(device=torch.device("cuda"), check_same=lambda *args: None)
    try:
        with torch.autograd.profiler.profile() as profile:
            train_module._train(config, mesh, lambda trainer: len(torch.empty(7)))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [event.name for event in profile.function_events] == ["aten::empty"]


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
    rows = steps("whole")
    assert all(r["cuda_peak_mb"] > 0 for r in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_compiled_model_trains_the_same(here):
    start("a", max_steps=3, **ONCE)
    start("b", max_steps=3, **ONCE, compile=True)
    # Before the first update only the order of fp32 sums differs: of 16 to 256 terms in each of
    # some ten layers, 2**-24 * 256 * 10 of the loss at the very most.
    plain, compiled = curve("a"), curve("b")
    assert compiled[0]["loss"] == pytest.approx(plain[0]["loss"], rel=256 * 10 * 2**-24)
    assert compiled[2]["loss"] < compiled[0]["loss"]


# Numbers that are not finite


guarded = Runs(micro_batch_size=2, eval_every=0, save_every=4, num_samples=0)
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
    guarded("r", ranks, on_nonfinite="skip", save_every=1, **changes)
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
    guarded("r", on_nonfinite="skip", max_steps=4)
    guarded("r", on_nonfinite="skip", max_steps=5, resume=True)
    assert [row.get("skipped") for row in steps("r")] == [1, None, None, None, 2]
    spoil(nan_loss, *range(16, 200))
    with pytest.raises(RuntimeError, match=r"finite step among 10, got .* in step 12 as in those"):
        guarded.rank({"out": "ten", "on_nonfinite": "skip", "max_steps": 20})
    with pytest.raises(RuntimeError, match=r"expected finite numbers, got .* in step 3; lower"):
        guarded("one", save_every=0)
    assert not list_checkpoints("one")


def test_a_loss_scale_keeps_its_own_overflows(here, spoil, monkeypatch):
    """fp16 is refused on the CPU; the loop's part of it is guarded there all the same."""
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp16")
    spoil(nan_grad, 45)
    guarded("r", on_nonfinite="skip")
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
            guarded.rank(changes)

    monkeypatch.setattr(Trainer, "train_step", step)
    changes = {"batch_size": 6, "check_replicas_every": 2, "save_every": 1, "async_save": False}
    run_ranks(fails, 3, {"out": "r", **changes})
    assert [p.name for p in list_checkpoints("r")] == [f"step_00000{i}" for i in (1, 2, 3)]


def test_ranks_that_are_well_are_compared_without_a_trace(here, monkeypatch):
    guarded("plain", 2, zero_stage=2)
    compared, check = [], engine.check_replicas

    def counted(shards, group, optimizer, *, step):
        compared.append(step)
        check(shards, group, optimizer, step=step)

    monkeypatch.setattr(engine, "check_replicas", counted)
    guarded("r", 2, zero_stage=2, check_replicas_every=3)
    assert sorted(compared) == [3, 3, 6, 6]
    check_same("r", "plain")


# The way of a batch


README = Path(fastpar.__file__).parent / "train" / "README.md"


def test_a_batch_walks_as_the_readme_says(here):
    section = README.read_text().partition("## A batch's walk\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)` `(\w+)`", section, re.MULTILINE)
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
