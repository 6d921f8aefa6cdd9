"""Runs of the trainer in this process: made once, cut as by a crash, resumed, compared."""

import contextlib
import random
import shutil
from pathlib import Path

import pytest
import saved

from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.checkpoint.restore import read_run_state
from fastpar.comm.mesh import Mesh
from fastpar.files.runs import checkpoint_folder, list_checkpoints
from fastpar.settings.config import TrainConfig
from fastpar.settings.mesh import axes_of
from fastpar.testing import run_ranks
from fastpar.train import journal
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer, train

BF16 = {"dtype": "bf16"}
STORAGE = [
    {**BF16, "master_weights": "remainder", "moment_dtype": "bf16"},
    {**BF16, "stochastic_rounding": True, "moment_dtype": "int8"},
    {**BF16, "optimizer": "adafactor"},
]
TINY = {
    "data": "text.txt", "tokenizer": "bytes", "model": "micro", "n_layer": 1, "n_head": 2,
    "n_embd": 16, "block_size": 16, "dropout": 0.2, "batch_size": 8, "lr": 1e-3, "max_steps": 8,
    "eval_every": 4, "eval_batches": 2, "save_every": 4, "keep_last": 0, "num_samples": 1,
    "max_new_tokens": 4, "threads": 1, "device": "cpu",
}  # fmt: skip
FEW = {**TINY, "micro_batch_size": 2, "max_steps": 4, "save_every": 2}
CURVE = ("step", "loss", "lr", "grad_norm", "tokens", "val_loss", "ema_val_loss")


def make_text(folder: Path) -> None:
    """text.txt, and texts/: documents, some longer than others."""
    words = ("the", "of", "and", "lord", "god", "unto", "shall", "he", "his", "that", "for", "was")
    rng = random.Random(0)
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(600)]
    (folder / "text.txt").write_text("\n".join(lines))
    (folder / "texts").mkdir()
    for i, line in enumerate(lines[:90]):
        (folder / "texts" / f"{i}.txt").write_text(line * (1 + i % 4 // 3))


@contextlib.contextmanager
def in_folder(folder):
    """Puts runs into this folder, without pictures, which take longer than a short run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patched.setattr(journal, "plot_loss", lambda rows, path, title: path.touch())
        yield folder


def trainer_of(changes):
    config = TrainConfig().replace(changes)
    return Trainer(config, Mesh(**axes_of(config.mesh), device="cpu"))


class Runs:
    """Runs of several ranks, from settings that they share."""

    def __init__(self, **shared):
        self.shared = {**TINY, **shared}

    def trainer(self, **changes):
        return trainer_of({**self.shared, **changes})

    def rank(self, changes):
        """One rank; its exit status."""
        return self.trainer(**changes).run()

    def __call__(self, out, ranks=1, status=0, **changes):
        """All ranks, as threads; one in this thread, which gets signals."""
        changes = {"out": str(out), **changes}
        found = [self.rank(changes)] if ranks == 1 else run_ranks(self.rank, ranks, changes)
        assert found == [status] * ranks


class Made:
    """Runs that a module's tests share: made(ranks, ...) is the folder of one, made once."""

    def __init__(self, folder):
        self.folder, self.known = folder, {}
        make_text(folder)

    def __call__(self, ranks=1, **settings):
        name = repr((ranks, sorted(settings.items())))
        if name not in self.known:
            # A number of its own, also after a run that failed and left its folder.
            out = self.folder / f"run{len(list(self.folder.iterdir()))}"
            with in_folder(self.folder):
                Runs()(out, ranks, **settings)
            self.known[name] = out
        return self.known[name]

    def go_on(self, out, ranks=1, **settings):
        with in_folder(self.folder):
            Runs()(out, ranks, resume=True, **settings)

    def cut(self, step, ranks=1, **settings):
        """A copy of it as a crash some steps after the checkpoint of `step` would leave it."""
        out = self.folder / f"cut{len(list(self.folder.iterdir()))}"
        shutil.copytree(self(ranks, **settings), out, symlinks=True)
        forget_after(out, step)
        return out


def forget_after(out, step):
    """Leaves a run as a crash some steps after the checkpoint of `step` would."""
    for path in list_checkpoints(out):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def steps(out):
    """The rows of steps."""
    return [row for row in read_metrics(Path(out) / "metrics.jsonl") if "loss" in row]


def curve(out):
    """Rows of steps and validations; rows of saves come when they are over."""
    rows = read_metrics(Path(out) / "metrics.jsonl")
    rows = [row for row in rows if {"loss", "val_loss", "ema_val_loss"} & row.keys()]
    return [{k: row[k] for k in CURVE if k in row} for row in rows]


def bits(out, step=8):
    """Digests of weights and moments after a step."""
    path = checkpoint_folder(out, step)
    verify_checkpoint(path)
    return saved.bits(path)


def check_same(found, expected, saves=None):
    """Two runs have the same curve, weights, moments, counters and texts, bit for bit, after each
    of `saves`. Validation adds up in another order on other ranks, in fp64.
    """
    for row, wanted in zip(curve(found), curve(expected), strict=True):
        for name in ("val_loss", "ema_val_loss"):
            loss = wanted.pop(name, 0.0)
            assert row.pop(name, 0.0) == pytest.approx(loss, rel=1e-12), wanted
        assert row == wanted
    for path in list_checkpoints(expected):
        step = int(path.name.removeprefix("step_"))
        if saves is None or step in saves:
            assert bits(found, step) == bits(expected, step), step
            states = [read_run_state(checkpoint_folder(run, step)) for run in (found, expected)]
            assert states[0].get("fp8") == states[1].get("fp8")
    texts = [Path(run, "samples.txt") for run in (found, expected)]
    if all(text.exists() for text in texts):
        last = [text.read_text().rpartition("== step ")[2] for text in texts]
        assert last[0] == last[1]


def flags_of(settings):
    """Settings as words of a command line."""
    words = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [name if value is True else f"{name}={value}" for name, value in words.items()]


def start(out, **changes):
    """One run as `fastpar train` starts it, in this process; its exit status."""
    return train(TrainConfig().replace({**TINY, "out": str(out), **changes}))
