"""The journal: rank 0 writes rows and says lines, the others are silent; pauses do not count."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fastpar import parallelize
from fastpar.axes.step import Setup
from fastpar.comm.mesh import Mesh
from fastpar.data.batches import TextData, to_device
from fastpar.data.tokenizer import make_tokenizer
from fastpar.engine.engine import engine_of
from fastpar.models.gpt import GPT
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks
from fastpar.train.journal import Journal, Step, read_metrics, to_host

SETUP = Setup(2, device_type="cpu", transport="shm", dtype="fp32", micro_batch_size=4)
FACTS = {
    **SETUP.in_effect(),
    **{"device": "CPU", "threads": 1, "block_size": 8, "n_shards": 1, "storage": "adamw"},
}


def journal_of(out, mesh, step=0):
    """An open journal and the engine of its model."""
    config = TrainConfig().replace({"out": str(out), "batch_size": 8, "max_steps": 9})
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=256))
    engine = engine_of(parallelize(model, mesh))
    tokens = np.zeros(100, dtype=np.uint16)
    data = TextData("text.txt", tokens, tokens, make_tokenizer("bytes"), 256)
    journal = Journal(config, mesh)
    journal.open(model=model, data=data, step=step, facts=FACTS)
    return journal, engine


def step_of(step, *values, scale=None):
    return Step(step, 0.5, 64 * step, torch.tensor(values).double(), None, scale)


def test_rows_and_lines(tmp_path, capsys):
    journal, engine = journal_of(tmp_path / "r", Mesh(device="cpu"))
    journal.write_step(step_of(1, scale=4.0), loss=2.5, norm=1.5, engine=engine, skipped=1)
    journal.note(1, "something happened", what=3)
    journal.close()
    first, second = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert {k: first[k] for k in ("step", "loss", "lr", "grad_norm", "tokens", "skipped")} == {
        "step": 1, "loss": 2.5, "lr": 0.5, "grad_norm": 1.5, "tokens": 64, "skipped": 1,
    }  # fmt: skip
    assert first["loss_scale"] == 4.0
    assert 0 < first["time_s"] <= second["time_s"]
    assert (second["step"], second["what"]) == (1, 3)
    out = capsys.readouterr().out
    assert "run      " in out
    assert "step 1/9  loss 2.500, " in out
    assert "step 1  something happened" in out


def test_a_pause_does_not_count_as_time_of_a_step(tmp_path):
    journal, engine = journal_of(tmp_path / "r", Mesh(device="cpu"))
    for pause in (True, False):
        journal.start_clock()
        time.sleep(0.2)
        if pause:
            journal.start_clock()
        journal.write_step(step_of(1), loss=1.0, norm=1.0, engine=engine)
    quick, slow = (row["tokens_per_s"] for row in read_metrics(tmp_path / "r" / "metrics.jsonl"))
    assert slow <= 64 / 0.2 < quick
    assert journal.seconds >= 0.4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, capsys):
    journal, engine = journal_of(tmp_path / "r", Mesh(device="cpu"))
    metrics = tmp_path / "r" / "metrics.jsonl"
    journal.note(1, "there is room")
    log = journal.folder.log
    room, log._file = log._file, open("/dev/full", "a")  # noqa: SIM115
    for step in (2, 3):
        journal.write_step(step_of(step), loss=1.0, norm=1.0, engine=engine)
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl cannot be written ([Errno 28] No space left on device)") == 1
    assert "step 3" not in out  # the lines of a run have an interval
    assert [row["step"] for row in read_metrics(metrics)] == [1]
    log._file = room
    journal.note(4, "there is room again")
    log._file = open("/dev/full", "a")  # noqa: SIM115
    journal.note(5, "and none")
    assert capsys.readouterr().out.count("cannot be written") == 1


def test_only_rank_0_writes(tmp_path, capsys):
    def of_rank():
        mesh = Mesh(device="cpu")
        journal, engine = journal_of(tmp_path / "r", mesh)
        journal.write_step(step_of(1), loss=1.0, norm=1.0, engine=engine)
        journal.note(1, "heard once", n=1)
        journal.close()
        return journal.folder is not None

    assert run_ranks(of_rank, 2) == [True, False]
    assert len(read_metrics(tmp_path / "r" / "metrics.jsonl")) == 2
    assert capsys.readouterr().out.count("heard once") == 1


def test_other_replicas_tell_only_what_is_unusual(tmp_path, capsys):
    def of_replica():
        mesh = Mesh(replicas=2, device="cpu")
        out = f"r{mesh.replica}"
        journal, engine = journal_of(tmp_path / out, mesh)
        journal.write_step(step_of(1), loss=1.0, norm=1.0, engine=engine)
        for name in ("val_loss", "save_mb", "save_error"):
            journal.note(1, f"{name} of {out}", **{name: 1})
        journal.close()
        return len(read_metrics(tmp_path / out / "metrics.jsonl"))

    assert run_ranks(of_replica, 2) == [4, 4]
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if "step " in line or "r1" in line]
    assert [line for line in told if line.startswith("replica 1")] == [
        "replica 1  step 1  save_error of r1"
    ]
    assert sum("r1" in line for line in told) == 1
    assert [line for line in told if "r1" not in line and "_" in line] == [
        f"step 1  {name} of r0" for name in ("val_loss", "save_mb", "save_error")
    ]
    assert sum("step 1/9" in line for line in told) == 1


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def test_numbers_travel_there_and_back(device):
    values = torch.tensor([1.5, 2.5], dtype=torch.float64)
    there, ready = to_host(to_device(values, torch.device(device)) * 2)
    assert Step(1, 0.0, 1, there, ready, None).numbers() == [3.0, 5.0]
    assert (ready is None) == (device == "cpu")
