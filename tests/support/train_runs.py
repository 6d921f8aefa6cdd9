"""Short runs of the trainer in this process, and what two of them must have alike."""

import random
import shutil
from pathlib import Path

import saved

from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.comm.mesh import Mesh
from fastpar.files.runs import checkpoint_folder, list_checkpoints
from fastpar.settings.config import TrainConfig
from fastpar.settings.mesh import axes_of
from fastpar.testing import run_ranks
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer, train

BF16 = {"dtype": "bf16"}
RANDOM = [
    {"moment_dtype": "bf16"},
    {**BF16, "stochastic_rounding": True, "moment_dtype": "int8"},
]
STORAGE = [
    {**BF16, "master_weights": "remainder", "moment_dtype": "bf16"},
    RANDOM[1],
    {**BF16, "optimizer": "adafactor"},
]
TINY = {
    "data": "text.txt",
    "tokenizer": "bytes",
    "model": "micro",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 16,
    "dropout": 0.2,
    "batch_size": 8,
    "lr": 1e-3,
    "max_steps": 8,
    "eval_every": 4,
    "eval_batches": 2,
    "save_every": 4,
    "keep_last": 0,
    "num_samples": 1,
    "max_new_tokens": 4,
    "threads": 1,
    "device": "cpu",
}
CURVE = ("step", "loss", "lr", "grad_norm", "tokens", "val_loss")


def make_text(folder: Path) -> None:
    words = ("the", "of", "and", "lord", "god", "unto", "shall", "he", "his", "that", "for", "was")
    rng = random.Random(0)
    lines = (" ".join(rng.choices(words, k=8)) for _ in range(600))
    (folder / "text.txt").write_text("\n".join(lines))


def run(out, **changes):
    """One run in this process; its exit status."""
    return train(TrainConfig().replace({**TINY, "out": str(out), **changes}))


class Runs:
    """Runs of several ranks, from settings that they share."""

    def __init__(self, shared):
        self.shared = shared

    def trainer(self, changes):
        config = TrainConfig().replace({**self.shared, **changes})
        return Trainer(config, Mesh(**axes_of(config.mesh), device="cpu"))

    def rank(self, changes):
        """One rank; its exit status."""
        return self.trainer(changes).run()

    def __call__(self, out, ranks=1, **changes):
        """All ranks, as threads; one in this thread, which gets signals."""
        changes = {"out": out, **changes}
        found = [self.rank(changes)] if ranks == 1 else run_ranks(self.rank, ranks, changes)
        assert found == [0] * ranks


def losses(out):
    return [row["loss"] for row in curve(out) if "loss" in row]


def curve(out):
    """Rows of steps and validations; rows of saves come when they are over."""
    rows = read_metrics(Path(out) / "metrics.jsonl")
    rows = [row for row in rows if {"loss", "val_loss"} & row.keys()]
    return [{k: row[k] for k in CURVE if k in row} for row in rows]


def bits(out, step=8):
    """Digests of weights and moments after a step."""
    path = checkpoint_folder(out, step)
    verify_checkpoint(path)
    return saved.bits(path)


def forget_after(out, step):
    """Leaves a run as a crash some steps after the checkpoint of `step` would."""
    for path in list_checkpoints(out):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
