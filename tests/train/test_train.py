"""The loop: resume bit for bit, the same run however it is cut, stops, refusals."""

import functools
import json
import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import saved
import torch
import torch.distributed as dist
from train_runs import BF16, STORAGE, TINY, bits, curve, forget_after, losses, run

from fastpar.checkpoint.manifest import read_manifest
from fastpar.checkpoint.restore import read_state
from fastpar.comm.mesh import Mesh
from fastpar.files.runs import checkpoint_folder, list_checkpoints
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf
from fastpar.optim.schedule import DynamicLossScale
from fastpar.predict import run as capacity
from fastpar.settings.config import TrainConfig
from fastpar.testing import run_ranks
from fastpar.train import journal
from fastpar.train import trainer as train_module
from fastpar.train.journal import plot_loss, read_metrics
from fastpar.train.trainer import Trainer


def test_a_run_leaves_what_it_promises(here, monkeypatch, capsys):
    monkeypatch.setattr(journal, "plot_loss", plot_loss)
    assert run("r") == 0
    out = capsys.readouterr().out
    rows = read_metrics("r/metrics.jsonl")
    steps = [r for r in rows if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert [r["step"] for r in rows if "val_loss" in r] == [0, 4, 8]
    assert steps[0].keys() >= {
        "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "compute_ms", "comm_ms",
        "exposed_ms", "wire_mb", "rss_mb", "peak_rss_mb", "tokens", "time_s",
    }  # fmt: skip
    assert steps[-1]["tokens"] == 8 * 8 * 16
    assert steps[0]["wire_mb"] == 0.0
    assert steps[0]["exposed_ms"] < steps[0]["step_ms"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[0]["loss"] == pytest.approx(math.log(256), abs=0.1)
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


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 2},
        STORAGE[0],
        *(pytest.param(c, marks=pytest.mark.slow) for c in ({}, BF16, *STORAGE[1:])),
    ],
)
def test_resume_equals_the_uninterrupted_run(here, changes):
    run("whole", **changes)
    shutil.copytree("whole", "cut", symlinks=True)
    forget_after("cut", 4)
    assert run("cut", resume=True, **changes) == 0
    assert curve("cut") == curve("whole")
    assert bits("cut") == bits("whole")
    assert read_state(checkpoint_folder("cut", 8))["next_sample"] == 64


def test_random_numbers_of_other_code_go_on_too(here, monkeypatch):
    drawn, real = [], Trainer.train_step

    def step(self):
        drawn.append((self.step, torch.rand(()).item()))
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", step)
    run("r")
    whole = drawn.copy()
    forget_after("r", 4)
    drawn.clear()
    run("r", resume=True)
    assert drawn == whole[4:]


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_used(here, capsys):
    run("whole")
    shutil.copytree("whole", "cut", symlinks=True)
    with open("cut/checkpoints/step_000008/model.safetensors", "r+b") as file:
        file.truncate(100)
    assert run("cut", resume=True) == 0
    out = capsys.readouterr().out
    assert "damaged, trying the one before: verify_files: expected" in out
    assert "100 bytes instead of" in out
    assert bits("cut") == bits("whole")


def test_what_must_not_change_the_run(here):
    """Validation, saving and buckets leave no trace in the weights."""
    run("a")
    for i, changes in enumerate(
        [
            {"eval_every": 1, "save_every": 1, "num_samples": 0},
            {"bucket_mb": 1e-6},
            {"deterministic": True},
            {"eval_every": 0, "save_every": 0},
        ]
    ):
        out = f"b{i}"
        run(out, **changes)
        assert bits("a") == bits(out), changes
        assert [r for r in curve("a") if "loss" in r] == [r for r in curve(out) if "loss" in r]


def test_numbers_that_are_read_a_step_later_are_the_same(here, monkeypatch):
    """What a GPU does: the step's numbers are fetched while the next step runs."""
    run("a")
    late = Trainer.__init__

    def init(self, config, mesh):
        late(self, config, mesh)
        self.keep_pending = 1

    monkeypatch.setattr(Trainer, "__init__", init)
    run("b")
    assert curve("a") == curve("b")
    assert bits("a") == bits("b")


@pytest.mark.slow
def test_every_cut_of_a_step_takes_the_same_samples_and_masks(here, monkeypatch):
    taken = []
    batch, key = train_module.sample_batch, train_module.make_key

    def sample_batch(tokens, *, first_sample, n_samples, **rest):
        taken.append(("samples", range(first_sample, first_sample + n_samples)))
        return batch(tokens, first_sample=first_sample, n_samples=n_samples, **rest)

    def make_key(seed, first_sample):
        taken.append(("key", seed, first_sample))
        return key(seed, first_sample)

    monkeypatch.setattr(train_module, "sample_batch", sample_batch)
    monkeypatch.setattr(train_module, "make_key", make_key)
    for micro in (8, 4, 1):
        taken.clear()
        run(f"r{micro}", micro_batch_size=micro, max_steps=2, eval_every=0, save_every=0)
        firsts = range(0, 16, micro)
        assert taken == [
            entry
            for first in firsts
            for entry in (("samples", range(first, first + micro)), ("key", 1, first))
        ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"accumulate": "shard"}, {0: [0, 4, 8, 12], 1: [2, 6, 10, 14]}),
        ({"accumulate": "full"}, {0: [0, 2, 8, 10], 1: [4, 6, 12, 14]}),
        ({"zero_stage": 1}, {0: [0, 2, 8, 10], 1: [4, 6, 12, 14]}),
        ({"zero_stage": 2}, {0: [0, 4, 8, 12], 1: [2, 6, 10, 14]}),
    ],
)
def test_who_takes_which_micro_batches(here, monkeypatch, changes, expected):
    taken, batch = {}, train_module.sample_batch

    def sample_batch(tokens, *, first_sample, **rest):
        taken.setdefault(dist.get_rank(), []).append(first_sample)
        return batch(tokens, first_sample=first_sample, **rest)

    def steps():
        config = TrainConfig().replace({**TINY, "micro_batch_size": 2, **changes})
        trainer = Trainer(config, Mesh())
        for _ in range(2):
            trainer.train_step()

    monkeypatch.setattr(train_module, "sample_batch", sample_batch)
    run_ranks(steps, 2)
    assert taken == expected


def _one_rank(folder, changes):
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    config = TrainConfig().replace({**TINY, **changes})
    return Trainer(config, Mesh()).run()


def test_two_ranks_resume_bit_for_bit_and_equal_one(here):
    run("one", micro_batch_size=4)
    assert run_ranks(_one_rank, 2, here, {"out": "two"}, backend="gloo") == [0, 0]
    shutil.copytree("two", "cut", symlinks=True)
    forget_after("cut", 4)
    again = {"out": "cut", "resume": True}
    assert run_ranks(_one_rank, 2, here, again) == [0, 0]
    assert curve("cut") == curve("two")
    assert bits("cut") == bits("two")
    # Two micro-batches of 4 are summed the same way in one process; halving them is exact.
    assert bits("two") == bits("one")
    for x, y in zip(curve("one"), curve("two")):
        # Validation adds up in another order, in fp64.
        assert x.pop("val_loss", 0.0) == pytest.approx(y.pop("val_loss", 0.0), rel=1e-12)
        assert x == y
    for row in (r for r in read_metrics("two/metrics.jsonl") if "loss" in r):
        assert 0 < row["exposed_ms"] < row["step_ms"]
        assert row["comm_ms"] > 0
        assert row["wire_mb"] > 0


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit_however_the_optimizer_stores(here):
    for i, changes in enumerate(STORAGE):
        changes = {**changes, "max_steps": 4, "save_every": 2, "eval_every": 0}
        whole, cut = f"whole{i}", f"cut{i}"
        run_ranks(_one_rank, 2, here, {**changes, "out": whole}, backend="gloo")
        shutil.copytree(whole, cut, symlinks=True)
        forget_after(cut, 2)
        run_ranks(_one_rank, 2, here, {**changes, "out": cut, "resume": True}, backend="gloo")
        assert bits(cut, 4) == bits(whole, 4)
        assert curve(cut) == curve(whole)


def test_random_rounding_follows_the_seed(here):
    changes = {**STORAGE[1], "max_steps": 2, "eval_every": 0, "save_every": 0}
    run("a", **changes)
    run("b", **changes)
    run("c", **{**changes, "seed": 2})
    assert bits("a", 2) == bits("b", 2) != bits("c", 2)


def test_the_format_that_auto_finds_must_fit_the_storage(here):
    with pytest.raises(ValueError, match=r"--stochastic-rounding does not run with --dtype fp32"):
        run("r", stochastic_rounding=True)


@pytest.mark.slow
def test_a_run_goes_on_with_another_storage(here):
    """Moments are converted; of another optimizer there are none."""
    run("r", **STORAGE[0])
    forget_after("r", 4)
    run("r", **{**STORAGE[1], "resume": True})
    assert len(losses("r")) == 8
    assert all(map(math.isfinite, losses("r")))
    entries = {e.key.rpartition("/")[2] for e in read_manifest(checkpoint_folder("r", 8)).optimizer}
    assert entries == {"step"} | {
        f"{moment}_{part}" for moment in ("exp_avg", "exp_avg_sq") for part in ("codes", "scale")
    }
    forget_after("r", 4)
    with pytest.raises(ValueError, match=r"Adafactor.*: expected row_var for wte.weight"):
        run("r", **{**STORAGE[2], "resume": True})


def test_a_signal_stops_after_the_step_and_saves(here, monkeypatch, capsys):
    run("whole", max_steps=6, save_every=0)
    with monkeypatch.context() as patch:
        real = Trainer.train_step

        def step(self):
            if self.step == 2:
                signal.raise_signal(signal.SIGTERM)
            return real(self)

        patch.setattr(Trainer, "train_step", step)
        capsys.readouterr()
        assert run("cut", max_steps=6, save_every=0) == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert "stopped by SIGTERM after step 3, saved in cut" in out
    assert "go on: fastpar train --resume --out cut" in out
    assert not Path("cut/samples.txt").exists()
    assert Path("cut/loss.png").exists()
    run("cut", max_steps=6, save_every=0, resume=True)
    assert curve("cut") == curve("whole")
    assert bits("cut", 6) == bits("whole", 6)


def test_max_time_ends_the_run_with_a_sample(here, capsys):
    assert run("r", max_time="0.0001s") == 0
    out = capsys.readouterr().out
    assert "validation loss" in out
    assert "the time was up; go on: fastpar train --resume --out r" in out
    assert [p.name for p in list_checkpoints("r")] == ["step_000001"]
    assert Path("r/samples.txt").exists()


def test_resume_says_what_has_changed(here, capsys):
    run("r")
    assert run("r", resume=True, max_steps=10, lr=1e-4) == 0
    out = capsys.readouterr().out
    assert "changed  lr 0.001 -> 0.0001" in out
    assert "changed  max_steps 8 -> 10" in out
    assert "steps 8 to 10" in out
    settings = json.loads(Path("r/config.json").read_text())
    assert settings["settings"]["max_steps"] == 10
    assert [start["step"] for start in settings["starts"]] == [0, 8]


def test_a_run_that_is_complete_resumes_to_nothing_new(here):
    run("r")
    before = curve("r")
    assert run("r", resume=True) == 0
    assert curve("r")[: len(before)] == before
    assert curve("r")[len(before) :] == before[-1:]  # its validation, once more


def test_a_loss_that_is_not_finite_ends_the_run(here):
    with pytest.raises(RuntimeError, match=r"expected finite numbers, got .* in step [2-8]; lower"):
        run("r", lr=1e30, min_lr=1e30, warmup_steps=0, max_grad_norm=0.0, save_every=0)
    assert not list_checkpoints("r")


def test_fp16_scales_skips_and_resumes(here, monkeypatch):
    """fp16 is refused on the CPU; the loop's part of it is run there all the same."""
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp16")
    scale = functools.partial(DynamicLossScale, growth_interval=3)
    monkeypatch.setattr(train_module, "DynamicLossScale", scale)
    run("whole")
    state = read_state(checkpoint_folder("whole", 4))
    assert state["loss_scale"] == {"scale": 2.0**17, "finite_steps": 1}
    shutil.copytree("whole", "cut", symlinks=True)
    forget_after("cut", 4)
    run("cut", resume=True)
    assert curve("cut") == curve("whole")
    assert bits("cut") == bits("whole")
    scales = [r["loss_scale"] for r in read_metrics("cut/metrics.jsonl") if "loss" in r]
    assert scales[:7] == [2.0**16] * 3 + [2.0**17] * 3 + [2.0**18]

    trainer = Trainer(TrainConfig().replace({**TINY, "out": "skip"}), Mesh(device="cpu"))
    before = [p.clone() for p in trainer.model.parameters()]
    handle = trainer.model.wpe.weight.register_hook(lambda g: g * math.inf)
    trainer.pending.append(trainer.train_step())
    trainer._read(0)
    handle.remove()
    assert trainer.loss_scale.scale == 2.0**15
    assert all(torch.equal(p, q) for p, q in zip(before, trainer.model.parameters()))


def test_weights_to_start_from(here):
    run("first")
    latest = "first/latest"
    sizes = {"n_layer": None, "n_head": None, "n_embd": None, "block_size": None}
    run("second", init_from=latest, **{**sizes, "dropout": 0.0, "seed": 3})
    assert curve("second")[0]["val_loss"] == curve("first")[-1]["val_loss"]
    assert json.loads(Path("second/config.json").read_text())["model"]["dropout"] == 0.0
    # Its resume needs the folder no more.
    shutil.rmtree("first")
    forget_after("second", 4)
    before = curve("second")
    run("second", init_from=latest, resume=True, **{**sizes, "dropout": 0.0, "seed": 3})
    assert curve("second") == before
    with pytest.raises(ValueError, match=r"expected block_size <= 16, the context of .*, got "):
        run("third", init_from="second/latest", **{**sizes, "block_size": 17})
    with pytest.raises(ValueError, match=r"model's vocabulary of 256, got tokenizer=bpe-300 with"):
        run("third", init_from="second/latest", **{**sizes, "tokenizer": "bpe-300"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere.txt"}, "expected .*got .*nowhere.txt"),
        ({"dtype": "fp16"}, r"dtype fp32 or bf16 on the CPU, got dtype=fp16; use --dtype bf16"),
        ({"batch_size": 9, "micro_batch_size": 2}, r"1 \* 2 \* 4 = 8, got batch_size=9"),
        ({"block_size": 4000}, r"expected at least block_size \+ 1 = 4001 validation tokens"),
        ({"resume": True}, r"expected a folder with a run to go on with, got out=r; leave out"),
    ],
)
def test_refused_starts_leave_no_folder(here, changes, message):
    with pytest.raises(ValueError, match=message):
        run("r", **changes)
    assert not Path("r").exists()


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_built(here, monkeypatch):
    run("first", max_steps=4)
    n = sum(p.numel() for p in load_hf("first/latest").parameters())
    monkeypatch.setattr(GPT, "__init__", lambda *a, **k: pytest.fail("it was built"))
    monkeypatch.setattr(capacity, "host_memory", lambda: 15 * n)
    for again in ({"out": "r"}, {"out": "first", "resume": True}):
        with pytest.raises(ValueError, match=r"a model whose states fit into .* of this machine"):
            run(**again)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"in fp32, .* on each of 4 ranks .* at most 3 ranks"):
        run("r")
    assert not Path("r").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(here):
    with pytest.raises(ValueError, match=r"expected a GPU for device=cuda, got none that"):
        run("r", device="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_layer": 2},
            r"expected the model of .* with n_layer=1, got n_layer=2",
        ),
        (
            {"data": "other.txt"},
            r"the tokens that the run was started with, got others from",
        ),
        (
            {"tokenizer": "bpe-300"},
            r"expected the model of .* with vocab_size=256, got",
        ),
    ],
)
def test_resume_with_another_model_or_text_is_refused(here, changes, message):
    Path("other.txt").write_text(Path("text.txt").read_text().replace("lord", "fish"))
    run("r")
    before = Path("r/metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        run("r", resume=True, **{"max_steps": 9, **changes})
    assert Path("r/metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_goes_on_in_another_format(here, capsys):
    """fp32 to bf16 keeps the fp32 values as masters, and bf16 to fp32 goes on from them."""
    run("plain", max_steps=12)
    run("r")
    capsys.readouterr()
    for dtype, steps, was in (("bf16", 10, "fp32"), ("fp32", 12, "bf16")):
        run("r", resume=True, dtype=dtype, max_steps=steps)
        assert f"changed  format of weights {was} -> {dtype}\n" in capsys.readouterr().out
        assert read_state(checkpoint_folder("r", steps))["dtype"] == dtype
    # Another max_steps has another schedule; bf16 keeps 8 bits of the weights.
    plain, found = ([row for row in curve(out) if "loss" in row] for out in ("plain", "r"))
    assert [row["step"] for row in found] == list(range(1, 13))
    for x, y in zip(plain, found):
        assert y["loss"] == pytest.approx(x["loss"], rel=2e-2)
    run("r", resume=True, dtype="fp32", max_steps=12)
    assert "format of weights" not in capsys.readouterr().out


def test_another_format_loses_nothing_of_what_was_trained(here):
    for was, dtype in (("fp32", "bf16"), ("bf16", "fp32")):
        run(was, dtype=was)
        config = TrainConfig().replace({**TINY, "out": was, "resume": True, "dtype": dtype})
        trainer = Trainer(config, Mesh(device="cpu"))
        path = checkpoint_folder(was, 8)
        weights = load_hf(path).state_dict()
        masters = saved.whole_tensors(path)[1]
        for name, p in trainer.model.named_parameters():
            if dtype == "bf16":
                master = trainer.optimizer.state[p]["master_weight"]
                assert torch.equal(master, weights[name])
                assert torch.equal(p, master.bfloat16())
            else:
                assert torch.equal(p, masters[f"{name}/master_weight"])


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
        run("whole", **changes)
        shutil.copytree("whole", "cut", symlinks=True)
        forget_after("cut", 4)
        run("cut", resume=True, **changes)
    finally:
        torch.use_deterministic_algorithms(False)
    assert curve("cut") == curve("whole")
    assert bits("cut") == bits("whole")
    rows = [r for r in read_metrics("whole/metrics.jsonl") if "loss" in r]
    assert all(r["cuda_peak_mb"] > 0 for r in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_compiled_model_trains_the_same(here):
    run("a", max_steps=3, save_every=0, eval_every=0)
    run("b", max_steps=3, save_every=0, eval_every=0, compile=True)
    # Before the first update only the order of fp32 sums differs: of 16 to 256 terms in each of
    # some ten layers, 2**-24 * 256 * 10 of the loss at the very most.
    plain, compiled = curve("a"), curve("b")
    assert compiled[0]["loss"] == pytest.approx(plain[0]["loss"], rel=256 * 10 * 2**-24)
    assert compiled[2]["loss"] < compiled[0]["loss"]
