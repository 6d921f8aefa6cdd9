"""The trainer on ranks that split the model: the curve of one process, checkpoints, resume."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from train_runs import TINY, Runs, bits, curve, forget_after

from fastpar.cli import main
from fastpar.models import set_up
from fastpar.optim.schedule import DynamicLossScale
from fastpar.testing import run_ranks
from fastpar.train import trainer as train_module
from fastpar.train.journal import read_metrics

FEW = {**TINY, "n_head": 4, "n_layer": 2, "micro_batch_size": 2, "max_steps": 4, "save_every": 2}
run = Runs(FEW)
MESHES = [
    (4, {"tp": 4, "sequence_parallel": False}),
    (4, {"tp": 2, "zero_stage": 3, "activation_checkpointing": "full"}),
]
MORE_MESHES = [
    (2, {"tp": 2}),
    (4, {"tp": 2, "zero_stage": 2, "sequence_parallel": False}),
    (2, {"tp": 2, "sequence_parallel": False}),
    (4, {"tp": 4}),
    (4, {"tp": 4, "accumulate": "shard"}),
    *((4, {"tp": 2, "zero_stage": stage}) for stage in range(4)),
    (4, {"tp": 2, "zero_stage": 1, "activation_checkpointing": "selective"}),
]
# The losses of these runs are near 5.5, their norms below that; single precision has 24 bits, and
# before clipping and dividing by sqrt(exp_avg_sq) a step hands on what its sums of some hundred
# products were rounded by: less than 2**5 units in the last place.
ROUNDING = 2.0 ** -(24 - 5)


def values(out, *names):
    """Values of every row that has them."""
    return [row[name] for row in curve(out) for name in names if name in row]


@pytest.fixture
def double(monkeypatch):
    """Trains in fp64, where a difference that is no rounding cannot hide."""
    real = set_up.parallelize
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp64")
    monkeypatch.setattr(
        set_up, "parallelize", lambda model, mesh, s: real(model, mesh, s.change(grad_dtype=None))
    )


def numbers(changes):
    """(step, loss) of validations and (loss, norm, requests) of steps, on one rank."""
    trainer = run.trainer(changes)
    tp, found = trainer.model.tp, []
    assert tp is None or tp.sequence_parallel == (
        trainer.config.parallel.sequence_parallel is not False
    )
    for _ in range(3):
        trainer.validate()
        found += [torch.tensor(trainer.val).double(), trainer.train_step().values]
    return torch.cat(found)


@pytest.mark.parametrize("meshes", [MESHES, pytest.param(MORE_MESHES, marks=pytest.mark.slow)])
def test_every_mesh_gives_the_curve_of_one_process(here, double, meshes):
    """Dropout and clipping are on; 8 sequences in micro-batches of two."""
    [one] = run_ranks(numbers, 1, {})
    for ranks, changes in meshes:
        found = run_ranks(numbers, ranks, changes)
        assert all(torch.equal(x, found[0]) for x in found), changes
        torch.testing.assert_close(found[0], one, rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "tp", "stage"), [(2, 2, 3), pytest.param(1, 4, 0, marks=pytest.mark.slow)]
)
def test_all_ranks_skip_a_step_that_overflows(here, monkeypatch, dp, tp, stage):
    """fp16 is refused on the CPU; the loop's part of it, a loss scale for all ranks, is run.

    Each against the run with as many dp ranks, whose micro-batches have the same weight in fp16.
    Under sequence parallelism a bias' gradient is summed over 1/tp of the tokens in fp16, and these
    sums in fp32: what overflows in one process may not there.
    """
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp16")
    monkeypatch.setattr(train_module, "DynamicLossScale", partial(DynamicLossScale, init=2.0**20))
    run("plain", dp, zero_stage=stage)
    expected = skipped("plain")
    assert expected[0] > expected[-1]
    for shared in (True, False):
        out = f"split {shared}"
        run(out, dp * tp, tp=tp, zero_stage=stage, sequence_parallel=shared)
        assert skipped(out)[0] > skipped(out)[-1]
        if not shared:
            assert skipped(out) == expected
            # fp16 has 11 bits; a loss is a mean of losses that are computed from fp16 logits.
            losses = values("plain", "loss")
            assert values(out, "loss") == pytest.approx(losses, rel=2.0**-11)


def skipped(out):
    return [row["grad_norm"] is None for row in curve(out) if "loss" in row]


@pytest.mark.slow
def test_ranks_of_one_tp_give_the_same_bits_at_every_stage_and_cut(here):
    """In deterministic mode."""
    whole = {"deterministic": True, "tp": 2}
    run("one", 2, **whole)
    for stage in range(4):
        run(f"z{stage}", 4, **whole, zero_stage=stage)
        assert bits(f"z{stage}", 4) == bits("one", 4)
        assert values(f"z{stage}", "loss", "grad_norm") == values("one", "loss", "grad_norm")
        assert Path(f"z{stage}/samples.txt").read_bytes() == Path("one/samples.txt").read_bytes()


@pytest.mark.slow
def test_resume_equals_the_uninterrupted_run_on_the_same_mesh(here):
    changes = {"tp": 2, "zero_stage": 3}
    run("r", 4, **changes)
    before = curve("r"), bits("r", 4)
    forget_after("r", 2)
    run("r", 4, **changes, resume=True)
    assert (curve("r"), bits("r", 4)) == before


def test_a_run_goes_on_on_any_mesh(here):
    """One process, then meshes that split it, one step each: the curve of one process."""
    run("whole", 1, save_every=1)
    run("cut", 1, save_every=1)
    for step, (ranks, changes) in enumerate(
        [
            (4, {"tp": 2, "zero_stage": 3}),
            (4, {"tp": 4, "sequence_parallel": False}),
            (2, {"tp": 1, "zero_stage": 1}),
        ],
        1,
    ):
        forget_after("cut", step)
        run("cut", ranks, **changes, save_every=1, resume=True)
    names = ("loss", "grad_norm", "val_loss")
    assert values("cut", *names) == pytest.approx(values("whole", *names), rel=ROUNDING)


def test_another_models_checkpoint_is_refused(here):
    run("r", 2, tp=2, max_steps=1)
    with pytest.raises(ValueError, match="the model of r/checkpoints/step_000001 with n_embd=16, "):
        run("r", 4, tp=4, n_embd=32, resume=True)


@pytest.mark.slow
def test_the_time_is_up_for_all_ranks(here):
    run("r", 4, tp=2, zero_stage=2, max_steps=10**6, max_time="1s", eval_every=0, save_every=0)
    [step] = [p.name for p in Path("r/checkpoints").iterdir()]
    assert int(step.removeprefix("step_")) == read_metrics("r/metrics.jsonl")[-1]["step"] < 10**6


def test_validation_where_a_group_of_tp_ranks_has_nothing_to_read(here):
    """Three windows for two groups of two rows; one window, which is the first group's alone."""
    text = Path("text.txt").read_text()
    changes = {"batch_size": 4, "max_steps": 1, "save_every": 0, "num_samples": 0}
    for size in (1000, 400):  # a twentieth is for validation
        Path("text.txt").write_text(text[:size])
        run(f"one {size}", 1, **changes)
        run(f"four {size}", 4, **changes, tp=2, zero_stage=3)
        losses = [values(f"{name} {size}", "val_loss") for name in ("one", "four")]
        assert losses[1] == pytest.approx(losses[0], rel=ROUNDING)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sample_and_export_take_a_run_of_tp_ranks(here, capsys, tp):
    """The text at the end of the run is that of the weights it saved, whole."""
    run("r", 4, tp=tp, num_samples=2)
    drawn = Path("r/samples.txt").read_text().partition("\n")[2]
    capsys.readouterr()
    options = ["--num-samples=2", f"--max-new-tokens={TINY['max_new_tokens']}", "--seed=1"]
    assert main(["sample", "r", *options]) == 0
    assert capsys.readouterr().out == drawn
    assert main(["export", "r", "--to=given"]) == 0
    assert main(["sample", "given", *options]) == 0
    assert capsys.readouterr().out.endswith(drawn)


FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in FEW.items()]
FASTPAR = [sys.executable, "-m", "fastpar"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def command(*arguments):
    """What a command printed."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_processes_print_the_curve_of_one(here):
    run("one", 1)
    names = ("loss", "grad_norm", "val_loss")
    told = command(*FASTPAR, "train", *FLAGS, "--nproc=4", "--tp=2", "--zero=2", "--out=four")
    assert "ranks    dp 2, tp 2 (sequence parallel), stage 2, shards 2, transport shm" in told
    assert values("four", *names) == pytest.approx(values("one", *names), rel=ROUNDING)
    forget_after("four", 2)
    command(*TORCHRUN, "-m", "fastpar", "train", "--resume", "--out=four", "--zero=0")
    assert values("four", *names) == pytest.approx(values("one", *names), rel=ROUNDING)
