"""What is left of a run: its folder, rows and lines, the picture, MFU, predictions."""

import errno
import json
import math
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from train_runs import start

from fastpar import parallelize
from fastpar.axes.step import Setup
from fastpar.comm.mesh import Mesh
from fastpar.data.batches import TextData
from fastpar.data.tokenizer import CharTokenizer, IdTokenizer, make_tokenizer
from fastpar.engine.engine import engine_of
from fastpar.files.runs import newest_run
from fastpar.models.gpt import GPT
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import SampleSettings
from fastpar.testing import run_ranks
from fastpar.train import journal as module
from fastpar.train.journal import Journal, MetricsLog, check_out, plot_loss, read_metrics
from fastpar.train.sample import sample

SETUP = Setup(2, device_type="cpu", transport="shm", dtype="fp32", micro_batch_size=4,
              grad_accum_steps=2, zero_stage=2, block_size=8)  # fmt: skip


FACTS = {"device": "CPU", "threads": 1, "storage": "adamw, master weights none, moments fp32"}
SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=256)
TOKENS = np.zeros(100, dtype=np.uint16)


def data_of(name="text.txt"):
    return TextData(name, TOKENS, TOKENS, make_tokenizer("bytes"), 256)


def open_folder(step=0, name="text.txt", setup=SETUP, **changes):
    config = TrainConfig().replace({"model": "mini", "batch_size": 32, **changes})
    about = {"data": data_of(name), "step": step, "facts": FACTS}
    return module.RunFolder(config, setup, model=GPT(SHAPE), **about)


def test_names_of_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_run() is None
    for name, out, path in (
        *(("text.txt", None, f"runs/mini-text{n}") for n in ("", "-2", "-3")),
        ("my/own data!.txt", None, "runs/mini-own-data"),
        ("text.txt", "deep/er/run", "deep/er/run"),
    ):
        assert open_folder(name=name, out=out).path == Path(path)
    assert str(newest_run("deep/er")) == "deep/er/run"
    assert newest_run() == Path("runs/mini-own-data")


def test_a_folder_with_any_file_of_a_run_is_never_overwritten(tmp_path):
    """Nor a config.json of somebody else."""
    whose = ("{}", '{"settings": 1, "starts": []}', "[", "null")
    for i, name in enumerate((*module.FILES, *whose)):
        out, file = tmp_path / f"{i}", "config.json" if name in whose else name
        out.mkdir()
        config = TrainConfig().replace({"out": str(out)})
        check_out(config)
        (out / file).write_text(name)
        words = f"--out without a run, got out={out} with {file}; it"
        with pytest.raises(ValueError, match=words):
            check_out(config)


def test_the_header_names_every_automatic_choice(tmp_path):
    setup = SETUP.change(world_size=8, tp=4, sequence_parallel=False)
    text = "\n".join(open_folder(out=str(tmp_path / "r"), setup=setup).header)
    for words in (
        "CPU, ranks 8, threads per rank 1, fp32",
        "tokenizer bytes, 256 tokens",
        "256 tokens per step: 32 sequences = dp 2 * micro-batch 4 * accumulation 2",
        "1 layers, 1 heads, width 8, context 8, dropout 0.1, ",
        "heads padded to 4",
        "ranks    dp 2, tp 4 (no sequence parallelism), ZeRO 2, shards 2, transport shm, accumul",
        f"{GPT(SHAPE).num_parameters():,} parameters",
    ):
        assert words in text, text


def test_what_a_finished_run_shows_ends_it_no_more(here, monkeypatch, capsys):
    """The picture and the samples are made when all is saved: a full disk, a foreign prompt."""

    def full(rows, path, title):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(module, "plot_loss", full)
    assert start("r", tokenizer="chars", prompt=("\u4e16",), max_steps=2) == 0
    printed = capsys.readouterr().out
    assert "loss.png failed: [Errno 28] no room\n" in printed
    assert "samples failed: CharTokenizer.encode: expected characters of its training" in printed
    assert "next: fastpar sample r" in printed


def test_prompts_are_of_the_runs_own_text_and_any_tokenizer_draws_without():
    text, of_bytes = "cut line\n\n  3: it's  a very long line indeed\n", make_tokenizer("bytes")
    for words, tokenizer, expected, begins in (
        (text, of_bytes, "3: it's a very", "\n"),
        (text, CharTokenizer(text), "3: it's a very", "\n"),
        ("one line only", of_bytes, "one line only", "\n"),
        ("a\n12 34\n\n\u4e16\u754c\n", of_bytes, "\u4e16\u754c", "\n"),
        ("1 2 3", IdTokenizer(9), "", "0 "),
        ("ab", CharTokenizer("ab"), "ab", "a"),
        ("\n\n", of_bytes, "", "\n"),
    ):
        ids = np.array(tokenizer.encode(words), dtype=np.uint16)
        found = module.example_prompt(TextData("a", ids, ids, tokenizer, tokenizer.vocab_size))
        assert found == expected
        assert not found or tokenizer.encode(found)
        model = GPT(GPTConfig(**{**vars(SHAPE), "vocab_size": tokenizer.vocab_size}))
        drawn = sample(model, tokenizer, SampleSettings(num_samples=1, max_new_tokens=3))
        assert "".join(drawn).startswith(begins)
        assert model.training


def journal_of(out, mesh, step=0):
    config = TrainConfig().replace({"out": str(out), "batch_size": 8, "max_steps": 9})
    model = GPT(SHAPE)
    engine = engine_of(parallelize(model, mesh))
    journal = Journal(config, mesh)
    journal.open(SETUP, model=model, data=data_of(), step=step, facts=FACTS)
    return journal, engine


def step_of(step, scale=None):
    return module.Step(step, 0.5, 64 * step, torch.tensor([]).double(), None, scale)


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


def test_mfu():
    for gpu, flops, rate, expected in (
        ("NVIDIA H100 80GB HBM3", 989e12 / 1e9, 1e9, 1.0),
        ("NVIDIA H100 PCIe", 378e12 / 1e9, 1e9, 0.5),
        ("NVIDIA L4", 1.0, 121e12, 1.0),
        ("GeForce 8800 GT", 1.0, 1.0, None),
    ):
        assert module.mfu(gpu, flops, rate) == pytest.approx(expected)


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


@pytest.mark.parametrize("replicas", [1, 2])
def test_rank_0_of_a_replica_writes_and_the_first_replica_tells(tmp_path, capsys, replicas):
    """The others tell only what is unusual."""

    def of_rank():
        mesh = Mesh(replicas=replicas, device="cpu")
        out = f"r{mesh.replica}"
        journal, engine = journal_of(tmp_path / out, mesh)
        journal.write_step(step_of(1, scale=4.0), loss=2.5, norm=1.5, engine=engine, skipped=1)
        for name in ("val_loss", "save_error"):
            journal.note(1, f"{name} of {out}", **{name: 3})
        journal.close()
        return journal.folder is not None

    assert run_ranks(of_rank, 2) == [True, replicas == 2]
    numbers = {"step": 1, "lr": 0.5, "tokens": 64, "skipped": 1, "loss_scale": 4.0}
    for i in range(replicas):
        first, second, third = read_metrics(tmp_path / f"r{i}" / "metrics.jsonl")
        assert first.items() >= {**numbers, "loss": 2.5, "grad_norm": 1.5}.items()
        assert 0 < first["time_s"] <= second["time_s"]
        assert (second["step"], second["val_loss"], third["save_error"]) == (1, 3, 3)
    out = capsys.readouterr().out
    for words in ("step 1/9, eta ", ", loss 2.500, ", "1  val_loss of r0", "1  save_error of r0"):
        assert out.count(words) == 1
    others = [line for line in out.splitlines() if line.endswith(" of r1") or "replica 1" in line]
    assert others == ["replica 1  step 1  save_error of r1"][: replicas - 1]


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


def test_a_resume_of_a_long_run_needs_little_memory(tmp_path):
    """Events may be of an earlier step than the rows before them."""
    path, log = tmp_path / "metrics.jsonl", MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 1001):
        log.write({"step": step, "loss": 1.0 / step, "text": "x" * (step % 100)})
        if step % 50 == 9:
            log.write({"step": step - 5, "save_mb": 1.0})  # known later
            log.write({"step": step, "val_loss": 2.0})
    log.close()
    whole = path.read_bytes()
    for resume_step, cut in ((960, b""), (956, b'{"step": 3'), (504, b"\n"), (-1, b"")):
        path.write_bytes(whole + cut)
        expected = [row for row in read_metrics(path) if row["step"] <= resume_step]
        tracemalloc.start()
        MetricsLog(path, resume_step=resume_step).close()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert read_metrics(path) == expected
        assert path.read_bytes().count(b"\n") == len(expected)
        assert peak < len(whole)


def test_the_picture_of_a_long_run_has_few_points():
    """Each the mean of equally many neighbours, at the step of the last one."""
    for n, joined in ((0, 1), (3, 1), (7, 1), (8, 2), (9, 2), (100, 25)):
        points = [(i, i * i % 17) for i in range(1, n + 1)]
        steps, values = module.few(points, 4)
        parts = [points[i : i + joined] for i in range(0, n - joined + 1, joined)]
        assert steps.tolist() == [part[-1][0] for part in parts]
        means = [sum(value for _, value in part) / joined for part in parts]
        assert values.tolist() == pytest.approx(means)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"package {name} for --logger {name}, .* pip inst"):
            module.check_log(name)
    module.check_log("auto")
    for rows in ([], [{"step": 1, "loss": None}, {"step": 1, "val_loss": 3.4}]):
        plot_loss(rows, tmp_path / "loss.png", title="a run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = r"plot_loss: expected the package matplotlib.*; run pip install 'fastpar\[train\]'"
    with pytest.raises(ImportError, match=words):
        plot_loss([], tmp_path / "loss.png", title="")
