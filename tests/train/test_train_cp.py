"""The trainer on ranks that share sequences: the curve of one process, checkpoints, resume."""

import subprocess
import sys

import pytest
import torch
from train_runs import TINY, Runs, bits, curve, forget_after

from fastpar.cli import main
from fastpar.models import set_up
from fastpar.testing import run_ranks

FEW = {**TINY, "n_head": 4, "n_layer": 2, "micro_batch_size": 2, "max_steps": 4, "save_every": 2}
run = Runs(FEW)
ROUNDING = 2.0 ** -(24 - 5)  # see test_train_tp.py
MESHES = [
    (2, {"cp": 2, "zero_stage": 3, "activation_checkpointing": "selective"}),
    (3, {"cp": 3, "block_size": 16, "zero_stage": 2}),
    (4, {"cp": 2, "tp": 2, "optimizer": "muon", "muon_lr": 1e-3}),
]
MORE_MESHES = [
    (4, {"cp": 4}),
    (4, {"cp": 2, "pp": 2, "grad_accum_steps": 4}),
    (4, {"cp": 2, "zero_stage": 1, "accumulate": "shard"}),
    *((4, {"cp": 2, "zero_stage": stage}) for stage in (2, 3)),
    (4, {"cp": 2, "tp": 2, "sequence_parallel": False, "activation_checkpointing": "full"}),
]


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
    trainer, found = run.trainer(changes), []
    for _ in range(3):
        trainer.validate()
        found += [torch.tensor(trainer.val).double(), trainer.train_step().values]
    return torch.cat(found)


@pytest.mark.parametrize("meshes", [MESHES, pytest.param(MORE_MESHES, marks=pytest.mark.slow)])
def test_every_mesh_gives_the_curve_of_one_process(here, double, meshes):
    """Dropout and clipping are on; 8 sequences in micro-batches of two."""
    alone = ("optimizer", "lr", "muon_lr", "block_size")
    for ranks, changes in meshes:
        of_run = {name: changes[name] for name in alone if name in changes}
        [one] = run_ranks(numbers, 1, of_run)
        found = run_ranks(numbers, ranks, changes)
        assert all(torch.equal(x, found[0]) for x in found), changes
        torch.testing.assert_close(found[0], one, rtol=1e-12, atol=0)


def test_a_run_goes_on_on_any_mesh(here):
    """With cp, without, and with another: the curve of one process."""
    run("whole", 1, save_every=1)
    run("cut", 2, cp=2, save_every=1)
    for step, (ranks, changes) in enumerate([(1, {}), (4, {"cp": 2, "tp": 2, "zero_stage": 3})], 1):
        forget_after("cut", step)
        run("cut", ranks, save_every=1, resume=True, **changes)
    for one, other in zip(curve("whole"), curve("cut"), strict=True):
        assert one == pytest.approx(other, rel=ROUNDING)


def test_resume_has_the_bits_of_the_uninterrupted_run(here, capsys):
    changes = {"cp": 2, "zero_stage": 3, "deterministic": True}
    run("r", 2, **changes)
    printed = capsys.readouterr().out
    assert "ranks    dp 1, cp 2, stage 3, shards 2" in printed
    before = curve("r"), bits("r", 4)
    forget_after("r", 2)
    run("r", 2, **changes, resume=True)
    assert (curve("r"), bits("r", 4)) == before


def test_a_sample_of_stage_0_comes_from_the_checkpoint(here, capsys):
    """Rank 0 alone has no peers to attend with."""
    run("r", 2, cp=2, max_steps=1, num_samples=1)
    assert "1 steps, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cp=3", "--nproc=4"], "nproc to be a multiple of cp=3, got nproc=4; use --nproc 6, or "
         "change --cp"),
        (["--cp=2", "--tp=2", "--nproc=6"], "a multiple of tp * cp = 2 * 2, got nproc=6; use "
         "--nproc 8, or change --cp, --tp"),
        (["--cp=5", "--nproc=5"], "cp of at most the 4 heads / tp=1, which are exchanged, got "
         "cp=5; lower --cp, or add --cp-method keys"),
        (["--cp=0"], "expected cp >= 1, got cp=0; set --cp"),
        (["--cp=2", "--nproc=2", "--cuda-graphs", "--device=cuda"], "--cuda-graphs does not"
         " run with --cp: "),
        (["--cp=2", "--nproc=8", "--batch-size=3"], "for each of dp=4"),
    ],
)  # fmt: skip
def test_bad_settings(here, capsys, flags, message):
    assert main(["train", *flags]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_processes(here):
    """Ranks of their own, started as a user does."""
    options = [f"--{k.replace('_', '-')}={v}" for k, v in FEW.items()]
    options += ["--deterministic", "--out=r", "--nproc=2", "--cp=2"]
    subprocess.run([sys.executable, "-m", "fastpar", "train", *options], check=True)
    run("threads", 2, cp=2, deterministic=True)
    assert bits("r", 4) == bits("threads", 4)
