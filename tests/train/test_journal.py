"""What is left of a run: its folder, rows and lines, the picture, MFU. Rank 0 writes, the others
are silent; pauses do not count."""

import errno
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from train_runs import start

from fastpar import parallelize
from fastpar.axes.step import Setup
from fastpar.comm.mesh import Mesh
from fastpar.data.batches import TextData, to_device
from fastpar.data.tokenizer import CharTokenizer, IdTokenizer, make_tokenizer
from fastpar.engine.engine import engine_of
from fastpar.files.runs import newest_run
from fastpar.models.gpt import GPT
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import SampleSettings
from fastpar.testing import run_ranks
from fastpar.train import journal as module
from fastpar.train.journal import (
    FILES,
    Journal,
    MetricsLog,
    RunFolder,
    Step,
    check_log,
    check_out,
    example_prompt,
    mfu,
    plot_loss,
    read_metrics,
    to_host,
)
from fastpar.train.sample import sample

SETUP = Setup(2, device_type="cpu", transport="shm", dtype="fp32", micro_batch_size=4,
              grad_accum_steps=2, zero_stage=2)  # fmt: skip
FACTS = {
    **SETUP.in_effect(),
    **{"device": "CPU", "threads": 1, "block_size": 8, "n_shards": 2},
    "storage": "adamw, master weights none, moments fp32",
}
SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=256)
TOKENS = np.zeros(100, dtype=np.uint16)


def data_of(name="text.txt"):
    return TextData(name, TOKENS, TOKENS, make_tokenizer("bytes"), 256)


def open_folder(step=0, name="text.txt", facts=FACTS, **changes):
    config = TrainConfig().replace({"model": "mini", "batch_size": 32, **changes})
    return RunFolder(config, model=GPT(SHAPE), data=data_of(name), step=step, facts=facts)


# The folder


def test_names_of_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_run() is None
    for name, out, path in (
        *(("text.txt", None, f"runs/mini-text{n}") for n in ("", "-2", "-3")),
        ("my/own data!.txt", None, "runs/mini-own-data"),
        ("x", None, "runs/mini-x"),
        ("text.txt", "deep/er/run", "deep/er/run"),
    ):
        assert open_folder(name=name, out=out).path == Path(path)
    assert str(newest_run("deep/er")) == "deep/er/run"
    assert newest_run() == Path("runs/mini-x")


@pytest.mark.parametrize("name", [*FILES, "{}", '{"settings": 1, "starts": []}', "[", "null"])
def test_a_folder_with_any_file_of_a_run_is_never_overwritten(tmp_path, name):
    """Nor a config.json of somebody else."""
    config = TrainConfig().replace({"out": str(tmp_path)})
    check_out(config)
    if name in FILES:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / "config.json").write_text(name)
    found = name if name in FILES else "config.json"
    words = f"an --out without a run, got out={tmp_path} with {found}; the"
    with pytest.raises(ValueError, match=words):
        check_out(config)


def test_settings_come_back_and_changes_are_told(tmp_path):
    out = str(tmp_path / "r")
    folder = open_folder(out=out, lr=0.5, betas=[0.8, 0.9])
    assert not any(line.startswith("changed") for line in folder.header)
    content = json.loads((folder.path / "config.json").read_text())
    config = TrainConfig().replace(content["settings"])
    assert (config.optim.betas, config.run.out, config.run.resume) == ((0.8, 0.9), out, False)
    folder = open_folder(step=3, out=out, resume=True, lr=0.25, betas=[0.8, 0.9])
    assert folder.header[-1] == "changed  lr 0.5 -> 0.25"
    starts = json.loads((folder.path / "config.json").read_text())["starts"]
    assert [s["step"] for s in starts] == [0, 3]
    assert starts[0].keys() >= {"time", "torch", *FACTS}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ("CPU, ranks 2, threads a rank 1, fp32", "tokenizer bytes, 256 tokens",
              "256 tokens a step: 32 sequences = ranks 2 * micro-batch 4 * accumulation 2",
              "ranks    stage 2, shards 2, transport shm, accumulate shard; adamw, master weigh",
              f"{GPT(SHAPE).num_parameters():,} parameters")),
        *(({"world_size": 8, "tp": 4, "sequence_parallel": shared},
           ("CPU, ranks 8, threads", "32 sequences = dp 2 * micro-batch 4 * accumulation 2",
            f"ranks    dp 2, tp 4 ({words}), stage 2, shards 2, tr"))
          for shared, words in ((True, "sequence parallel"), (False, "no sequence parallelism"))),
    ],
)  # fmt: skip
def test_the_header_names_every_automatic_choice(tmp_path, changes, parts):
    text = "\n".join(open_folder(out=str(tmp_path / "r"), facts={**FACTS, **changes}).header)
    assert all(part in text for part in parts), text
    assert (" tp " in text) == bool(changes)


def test_what_a_finished_run_shows_ends_it_no_more(here, monkeypatch, capsys):
    """The picture and the samples are made when all is saved: a full disk, a foreign prompt."""

    def full(rows, path, title):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(module, "plot_loss", full)
    assert start("r", tokenizer="chars", prompt=("\u4e16",), max_steps=2) == 0
    printed = capsys.readouterr().out
    assert "no loss.png: [Errno 28] no room\n" in printed
    assert "no samples: CharTokenizer.encode: expected characters of the text" in printed
    assert "next: fastpar sample r" in printed


def test_prompts_are_of_the_runs_own_text_and_any_tokenizer_draws_without():
    text = "cut line\n\n  3: it's  a very long line indeed\nand so on"
    for words, tokenizer, expected in (
        (text, make_tokenizer("bytes"), "3: it's a very"),
        (text, CharTokenizer(text), "3: it's a very"),
        ("one line only", make_tokenizer("bytes"), "one line only"),
        ("a\n12 34\n\n\u4e16\u754c\n", make_tokenizer("bytes"), "\u4e16\u754c"),
        ("1 2 3", IdTokenizer(9), ""),
        ("\n\n", make_tokenizer("bytes"), ""),
    ):
        ids = np.array(tokenizer.encode(words), dtype=np.uint16)
        found = example_prompt(TextData("a", ids, ids, tokenizer, tokenizer.vocab_size))
        assert found == expected
        assert not found or tokenizer.encode(found)
    for tokenizer, begins in (
        (make_tokenizer("bytes"), "\n"),
        (CharTokenizer("ab"), "a"),
        (IdTokenizer(9), "0 "),
    ):
        model = GPT(GPTConfig(**{**vars(SHAPE), "vocab_size": tokenizer.vocab_size}))
        drawn = sample(model, tokenizer, SampleSettings(num_samples=1, max_new_tokens=3))
        assert "".join(drawn).startswith(begins)
        assert model.training


# Rows and lines


def journal_of(out, mesh, step=0):
    """An open journal and the engine of its model."""
    config = TrainConfig().replace({"out": str(out), "batch_size": 8, "max_steps": 9})
    model = GPT(SHAPE)
    engine = engine_of(parallelize(model, mesh))
    journal = Journal(config, mesh)
    journal.open(model=model, data=data_of(), step=step, facts=FACTS)
    return journal, engine


def step_of(step, scale=None):
    return Step(step, 0.5, 64 * step, torch.tensor([]).double(), None, scale)


def test_rows_and_lines_of_rank_0_alone(tmp_path, capsys):
    def of_rank():
        journal, engine = journal_of(tmp_path / "r", Mesh(device="cpu"))
        journal.write_step(step_of(1, scale=4.0), loss=2.5, norm=1.5, engine=engine, skipped=1)
        journal.note(1, "something happened", what=3)
        journal.close()
        return journal.folder is not None

    assert run_ranks(of_rank, 2) == [True, False]
    first, second = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert {k: first[k] for k in ("step", "loss", "lr", "grad_norm", "tokens", "skipped")} == {
        "step": 1, "loss": 2.5, "lr": 0.5, "grad_norm": 1.5, "tokens": 64, "skipped": 1,
    }  # fmt: skip
    assert first["loss_scale"] == 4.0
    assert 0 < first["time_s"] <= second["time_s"]
    assert (second["step"], second["what"]) == (1, 3)
    out = capsys.readouterr().out
    for words in ("run      ", "step 1/9  loss 2.500, ", "step 1  something happened"):
        assert out.count(words) == 1


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
    assert [line for line in told if "r1" in line or line.startswith("replica 1")] == [
        "replica 1  step 1  save_error of r1"
    ]
    assert [line for line in told if "r1" not in line and "_" in line] == [
        f"step 1  {name} of r0" for name in ("val_loss", "save_mb", "save_error")
    ]
    assert sum("step 1/9" in line for line in told) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_travel_there_and_back(device):
    values = torch.tensor([1.5, 2.5], dtype=torch.float64)
    there, ready = to_host(to_device(values, torch.device(device)) * 2)
    assert Step(1, 0.0, 1, there, ready, None).numbers() == [3.0, 5.0]
    assert (ready is None) == (device == "cpu")


# metrics.jsonl


def test_rows_are_json_lines_and_a_resume_drops_later_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1, "loss": 2.5, "grad_norm": math.inf, "exposed_comm_ms": None})
    [line] = path.read_text().splitlines()  # on disk before close
    row = {"step": 1, "loss": 2.5, "grad_norm": None, "exposed_comm_ms": None}
    assert [json.loads(line)] == read_metrics(path) == [row]
    for step in range(2, 6):
        log.write({"step": step, "loss": 1.0 * step})
    log.write({"step": 3, "val_loss": 3.5})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    log = MetricsLog(path, resume_step=3)
    log.write({"step": 4, "loss": 40.0})
    log.close()
    rows = read_metrics(path)
    assert [r["step"] for r in rows] == [1, 2, 3, 3, 4]
    assert rows[-2:] == [{"step": 3, "val_loss": 3.5}, {"step": 4, "loss": 40.0}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_tensorboard_is_fed_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    log = MetricsLog(tmp_path / "metrics.jsonl", log="tensorboard")
    log.write({"step": 1, "loss": 2.5, "grad_norm": None})
    log.write({"step": 1, "numbers": [8, 16], "reason": "words"})  # no curves
    log.close()
    assert any((tmp_path / "tensorboard").iterdir())


def test_wandb_without_a_key_keeps_its_run_in_the_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no key of this user's
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    log = MetricsLog(path, log="wandb", settings={"lr": 0.5})
    log.write({"step": 1, "loss": 2.5, "grad_norm": None})
    log.write({"step": 2, "loss": 2.25})
    log.close()
    log = MetricsLog(path, resume_step=1, log="wandb")  # step 2 comes again: in a run of its own
    log.write({"step": 2, "loss": 2.0})
    log.close()
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(kept) == 2
    assert b"loss" in kept[0].read_bytes()
    assert "wandb: no key, so curves stay on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": 2.0}], "both"])
def test_picture(tmp_path, rows):
    if rows == "both":
        rows = [{"step": s, "loss": 8 / s**0.2} for s in range(1, 200)]
        rows += [{"step": 100, "val_loss": 3.4}, {"step": 199, "val_loss": 3.0}]
        rows += [{"step": 150, "loss": None}]
    plot_loss(rows, tmp_path / "loss.png", title="a run")
    from matplotlib.image import imread

    image = imread(tmp_path / "loss.png")
    assert image.shape[:2] == (540, 960)
    assert image[..., :3].min() < 0.5 < image[..., :3].max()


def test_missing_packages_are_named(tmp_path, monkeypatch):
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        words = f"train: expected the package {name} for --log {name}, .* run pip install {name}, o"
        with pytest.raises(ImportError, match=words):
            check_log(name)
    check_log("auto")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = r"plot_loss: expected the package matplotlib.*; run pip install matplotlib"
    with pytest.raises(ImportError, match=words):
        plot_loss([], tmp_path / "loss.png", title="")


def test_mfu():
    for gpu, flops, rate, expected in (
        ("NVIDIA H100 80GB HBM3", 989e12 / 1e9, 1e9, 1.0),
        ("NVIDIA H100 PCIe", 378e12 / 1e9, 1e9, 0.5),
        ("NVIDIA A100-SXM4-80GB", 1.0, 312e12, 1.0),
        ("NVIDIA L40S", 1.0, 362e12, 1.0),
        ("NVIDIA L4", 1.0, 121e12, 1.0),
    ):
        assert mfu(gpu, flops, rate) == pytest.approx(expected)
    assert mfu("GeForce 8800 GT", 1.0, 1.0) is None
