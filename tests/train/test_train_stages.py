"""The trainer at every stage: the same bits however ranks share and cut a step, resume across."""

import math
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from cells import slow
from train_runs import STORAGE, TINY, Runs, bits, curve, forget_after

from fastpar.checkpoint.reader import newest_checkpoint
from fastpar.comm.mesh import Mesh
from fastpar.engine.control import Control
from fastpar.engine.engine import Engine
from fastpar.files.runs import list_checkpoints
from fastpar.files.tensor_file import TensorFile
from fastpar.optim.schedule import DynamicLossScale
from fastpar.settings.config import TrainConfig
from fastpar.testing import run_ranks
from fastpar.train import trainer as train_module
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer

FEW = {**TINY, "deterministic": True, "micro_batch_size": 2, "max_steps": 4, "save_every": 2}
run = Runs(FEW)


def numbers(out):
    """The curve, without what validation adds up in another order for other ranks."""
    return [row for row in curve(out) if "loss" in row]


def files(out):
    """Samples, and which rank wrote what beside them."""
    return Path(out, "samples.txt").read_bytes()


CUTS = [
    (1, {"zero_stage": 3}),
    (1, {"accumulate": "shard"}),
    *((2, {"zero_stage": z, "accumulate": a}) for z in range(4) for a in ("shard", "full")),
    *((4, {"zero_stage": z}) for z in range(4)),
    *((4, {"zero_stage": z, "shard_size": 2}) for z in (1, 2, 3)),
    (2, {"zero_stage": 2, "bucket_mb": 1e-3}),
    (2, {"zero_stage": 3, "transport": "torch"}),
    (2, {"zero_stage": 3, "activation_checkpointing": "full"}),
    (2, {"zero_stage": 0, "activation_checkpointing": "selective"}),
]


FEW_CUTS = [
    (1, {"zero_stage": 3, "accumulate": "shard"}),
    (2, {"zero_stage": 0, "accumulate": "shard"}),
    (2, {"zero_stage": 1, "accumulate": "full"}),
    (4, {"zero_stage": 2}),
    (4, {"zero_stage": 3, "shard_size": 2}),
    (2, {"zero_stage": 3, "transport": "torch", "activation_checkpointing": "full"}),
]


@pytest.mark.parametrize(
    "cuts", [FEW_CUTS, pytest.param(CUTS, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_stage_and_cut_gives_the_same_bits(here, cuts):
    """Dropout and clipping are on: 1 x 4, 2 x 2 and 4 x 1 micro-batches."""
    run("one", 1)
    assert 0 < max(row["grad_norm"] for row in numbers("one")) != 1.0
    for i, (ranks, changes) in enumerate(cuts):
        run(f"r{i}", ranks, **changes)
        assert bits(f"r{i}", 4) == bits("one", 4), (ranks, changes)
        assert numbers(f"r{i}") == numbers("one"), (ranks, changes)
        assert files(f"r{i}") == files("one"), (ranks, changes)


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_every_stage_gives_the_same_bits_in_16_bits(here, monkeypatch, dtype):
    """fp16 is refused on the CPU; the loop's part of it, a loss scale for all ranks, is run.

    Its gradients below 2**-14 lose bits when the mean over more micro-batches divides them: the
    same split for all stages there.
    """
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: dtype)
    monkeypatch.setattr(train_module, "DynamicLossScale", partial(DynamicLossScale, init=2.0**20))
    one, *cuts = [(1, 0), (2, 1), (2, 2), (4, 3)] if dtype == "bf16" else [(2, z) for z in range(4)]
    run("one", one[0])
    skipped = [row["grad_norm"] is None for row in numbers("one")]
    assert any(skipped) == (dtype == "fp16")
    assert not all(skipped)
    for ranks, stage in cuts:
        run(f"r{stage}", ranks, zero_stage=stage)
        assert bits(f"r{stage}", 4) == bits("one", 4)
        assert numbers(f"r{stage}") == numbers("one")


STAGES = [(2, {"zero_stage": z}) for z in range(4)] + [(4, {"zero_stage": 3, "shard_size": 2})]


@pytest.mark.parametrize(
    "storage", [STORAGE[0], *(pytest.param(s, marks=pytest.mark.slow) for s in ({}, STORAGE[1]))]
)
def test_a_run_goes_on_at_any_stage_and_number_of_ranks(here, storage):
    """Saved at one stage, resumed at another, saved, resumed at the next: as if uninterrupted."""
    storage = {**storage, "save_every": 1}
    run("whole", 1, **storage)
    run("cut", 2, **storage, zero_stage=3)
    for step, ranks, stage in ((1, 1, 0), (2, 2, 2), (3, 2, 1)):
        assert bits("cut", step) == bits("whole", step)
        forget_after("cut", step)
        run("cut", ranks, **storage, zero_stage=stage, resume=True)
    assert bits("cut", 4) == bits("whole", 4)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [STAGES[2], *(pytest.param(*s, marks=pytest.mark.slow) for s in (*STAGES[:2], *STAGES[3:]))],
)
def test_resume_equals_the_uninterrupted_run_at_every_stage(here, ranks, changes):
    changes = {**changes, "deterministic": False, "micro_batch_size": None}
    run("whole", ranks, **changes)
    shutil.copytree("whole", "cut", symlinks=True)
    forget_after("cut", 2)
    run("cut", ranks, **changes, resume=True)
    assert curve("cut") == curve("whole")
    assert bits("cut", 4) == bits("whole", 4)


@pytest.mark.parametrize("stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3))])
def test_validation_where_a_rank_has_nothing_to_read(here, stage):
    """Three windows for two ranks of two rows; one window, which is rank 0's alone."""
    text = Path("text.txt").read_text()
    changes = {"batch_size": 4, "block_size": 16, "max_steps": 2, "save_every": 0}
    for n, size in enumerate((1000, 400)):  # a twentieth is for validation
        Path("text.txt").write_text(text[:size])
        for name, ranks, zero in ((f"one{n}", 1, 0), (f"r{n}", 2, stage)):
            run(name, ranks, **changes, zero_stage=zero)
        losses = [[r["val_loss"] for r in read_metrics(f"{x}{n}/metrics.jsonl") if "val_loss" in r]
                  for x in ("one", "r")]  # fmt: skip
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_a_full_disk_is_learned_by_all_ranks(here, monkeypatch, capsys):
    """Rank 1 fails in the middle of its third tensor; rank 0 has written all of its own."""
    real, written = TensorFile.write, []

    def write(self, name, tensor):
        if "step_000002" in self._file.name and "optimizer-00002" in self._file.name:
            written.append(name)
            if len(written) == 3:
                raise OSError(28, "No space left on device")
        return real(self, name, tensor)

    monkeypatch.setattr(TensorFile, "write", write)
    run("r", 2, zero_stage=3, save_every=1)
    assert len(written) == 3
    assert "no checkpoint of step 2 (rank 1: [Errno 28] No space left on device); the older" in (
        capsys.readouterr().out
    )
    assert [p.name for p in list_checkpoints("r")] == [f"step_00000{n}" for n in (1, 3, 4)]


def _dies_in_a_save(folder, changes):
    """Rank 1 is gone before the third tensor that it writes of its second checkpoint."""
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    mesh, real, written = Mesh(), TensorFile.write, []

    def write(self, name, tensor):
        if mesh.rank == 1 and "step_000002" in self._file.name:
            written.append(name)
            if len(written) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, name, tensor)

    train_module._LAST_WAIT_S = 0.0  # run_ranks waits less for an answer than a launcher
    TensorFile.write = write
    return Trainer(TrainConfig().replace({**FEW, **changes}), mesh).run()


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_that_dies_in_a_save_leaves_the_older_checkpoints(here, stage):
    changes = {"zero_stage": stage, "out": "r", "save_every": 1}
    errors = run_ranks(_dies_in_a_save, 2, here, changes, backend="gloo", return_exceptions=True)
    assert "rank 1: died of SIGKILL" in str(errors[1])
    assert "got the end of rank 1" in str(errors[0])
    assert [p.name for p in list_checkpoints("r")] == ["step_000001"]
    assert newest_checkpoint("r").name == "step_000001"
    run("r", 2, zero_stage=stage, resume=True)
    assert not list(Path("r/checkpoints").glob(".step*"))
    run("whole", 2, zero_stage=stage)
    assert bits("r", 4) == bits("whole", 4)


def test_a_step_has_one_exchange(here, monkeypatch):
    counted = []
    for cls, name in ((Control, "exchange"), (Engine, "all_reduce_scalars"), (Mesh, "broadcast_")):
        real = getattr(cls, name)

        def call(self, *args, name=name, real=real, **rest):
            counted.append(name)
            return real(self, *args, **rest)

        monkeypatch.setattr(cls, name, call)

    def steps(stage):
        trainer = run.trainer({"zero_stage": stage})
        counted.clear()
        run_steps = [trainer.train_step() for _ in range(3)]
        return [step.values.tolist() for step in run_steps]

    for stage in range(4):
        counted.clear()
        one, two = run_ranks(steps, 2, stage)
        assert counted == ["exchange"] * 6
        assert one == two
        assert all(math.isfinite(x) for values in one for x in values)


@pytest.mark.parametrize("dtype", ["fp32", slow("bf16")])
def test_threads_do_not_matter(here, dtype):
    """One process with two threads is the run of two with one each, as cores are shared out."""
    sizes = {"n_embd": 256, "block_size": 128, "batch_size": 2, "micro_batch_size": 1}
    flags = {**FEW, **sizes, "dtype": dtype, "max_steps": 2, "save_every": 0}
    for out, cut in (("one", ["--nproc=1", "--threads=2"]), ("two", ["--nproc=2", "--threads=1"])):
        words = [f"--{k.replace('_', '-')}={v}" for k, v in flags.items() if k != "deterministic"]
        words += ["--deterministic", f"--out={out}", *cut]
        subprocess.run([sys.executable, "-m", "fastpar", "train", *words], check=True)
    assert bits("two", 2) == bits("one", 2)
    assert numbers("two") == numbers("one")
