"""The folder of a run: names, settings that come back, samples of any tokenizer."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from train_runs import run

from fastpar.axes.step import Setup
from fastpar.data.batches import TextData
from fastpar.data.tokenizer import CharTokenizer, IdTokenizer, make_tokenizer
from fastpar.files.runs import newest_run
from fastpar.models.gpt import GPT
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import SampleSettings
from fastpar.train import journal
from fastpar.train.journal import FILES, RunFolder, check_out, example_prompt
from fastpar.train.sample import sample

COUNTS = {"micro_batch_size": 4, "grad_accum_steps": 2, "zero_stage": 2}
SETUP = Setup(2, device_type="cpu", transport="shm", dtype="fp32", **COUNTS)
FACTS = {
    **SETUP.in_effect(),
    **{"device": "CPU", "threads": 1, "block_size": 8, "n_shards": 2},
    "storage": "adamw, master weights none, moments fp32",
}


@pytest.fixture
def model():
    return GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=256))


def open_folder(model, step=0, name="text.txt", **changes):
    tokens = np.zeros(100, dtype=np.uint16)
    data = TextData(name, tokens, tokens, make_tokenizer("bytes"), 256)
    config = TrainConfig().replace({"model": "mini", "batch_size": 32, **changes})
    return RunFolder(config, model=model, data=data, step=step, facts=FACTS)


def test_names_of_folders(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    assert newest_run() is None
    paths = [str(open_folder(model).path) for _ in range(3)]
    assert paths == ["runs/mini-text", "runs/mini-text-2", "runs/mini-text-3"]
    assert str(open_folder(model, name="my/own data!.txt").path) == "runs/mini-own-data"
    assert str(open_folder(model, name="x").path) == "runs/mini-x"
    folder = open_folder(model, out="deep/er/run")
    assert folder.path == Path("deep/er/run")
    assert str(newest_run("deep/er")) == "deep/er/run"
    assert newest_run() == Path("runs/mini-x")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_with_any_file_of_a_run_is_never_overwritten(tmp_path, name):
    out = str(tmp_path)
    check_out(TrainConfig().replace({"out": out}))
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"an --out without a run, got out={out} with {name}; the"):
        check_out(TrainConfig().replace({"out": out}))


def test_settings_come_back_and_changes_are_told(tmp_path, model):
    out = str(tmp_path / "r")
    folder = open_folder(model, out=out, lr=0.5, betas=[0.8, 0.9])
    assert not any(line.startswith("changed") for line in folder.header)
    content = json.loads((folder.path / "config.json").read_text())
    config = TrainConfig().replace(content["settings"])
    assert (config.optim.betas, config.run.out, config.run.resume) == ((0.8, 0.9), out, False)
    folder = open_folder(model, step=3, out=out, resume=True, lr=0.25, betas=[0.8, 0.9])
    assert folder.header[-1] == "changed  lr 0.5 -> 0.25"
    starts = json.loads((folder.path / "config.json").read_text())["starts"]
    assert [s["step"] for s in starts] == [0, 3]
    assert starts[0].keys() >= {"time", "torch", *FACTS}


def test_header_names_every_automatic_choice(tmp_path, model):
    text = "\n".join(open_folder(model, out=str(tmp_path / "r")).header)
    for part in ("CPU, ranks 2, threads a rank 1, fp32", "tokenizer bytes, 256 tokens",
                 "256 tokens a step: 32 sequences = ranks 2 * micro-batch 4 * accumulation 2",
                 "ranks    stage 2, shards 2, transport shm, accumulate shard; adamw, master weigh",
                 f"{model.num_parameters():,} parameters"):  # fmt: skip
        assert part in text
    assert " tp " not in text


@pytest.mark.parametrize(
    ("shared", "words"), [(True, "sequence parallel"), (False, "no sequence parallelism")]
)
def test_header_tells_how_ranks_are_split(tmp_path, monkeypatch, model, shared, words):
    for key, value in {"world_size": 8, "tp": 4, "sequence_parallel": shared}.items():
        monkeypatch.setitem(FACTS, key, value)
    text = "\n".join(open_folder(model, out=str(tmp_path / "r")).header)
    for part in ("CPU, ranks 8, threads", "32 sequences = dp 2 * micro-batch 4 * accumulation 2",
                 f"ranks    dp 2, tp 4 ({words}), stage 2, shards 2, tr"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("tokenizer", "begins"),
    [(make_tokenizer("bytes"), "\n"), (CharTokenizer("ab"), "a"), (IdTokenizer(9), "0 ")],
)
def test_free_text_of_any_tokenizer(tokenizer, begins):
    shape = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=tokenizer.vocab_size)
    model = GPT(shape)
    text = "".join(sample(model, tokenizer, SampleSettings(num_samples=1, max_new_tokens=3)))
    assert text.startswith(begins)
    assert model.training


def test_a_prompt_to_try_is_of_the_runs_own_text():
    def prompt(text, tokenizer=None):
        tokenizer = tokenizer or make_tokenizer("bytes")
        ids = np.array(tokenizer.encode(text), dtype=np.uint16)
        data = TextData("a", ids, ids, tokenizer, tokenizer.vocab_size)
        found = example_prompt(data)
        assert not found or tokenizer.encode(found)
        return found

    text = "cut line\n\n  3: it's  a very long line indeed\nand so on"
    assert prompt(text) == "3: it's a very"
    assert prompt(text, CharTokenizer(text)) == "3: it's a very"
    assert prompt("one line only") == "one line only"
    assert prompt("a\n12 34\n\n\u4e16\u754c\n") == "\u4e16\u754c"
    assert prompt("1 2 3", IdTokenizer(9)) == ""
    assert prompt("\n\n") == ""


def test_what_a_finished_run_shows_ends_it_no_more(here, monkeypatch, capsys):
    """The picture and the samples are made when all is saved: a full disk, a foreign prompt."""

    def full(rows, path, title):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(journal, "plot_loss", full)
    assert run("r", tokenizer="chars", prompt=("\u4e16",)) == 0
    printed = capsys.readouterr().out
    assert "no loss.png: [Errno 28] no room\n" in printed
    assert "no samples: CharTokenizer.encode: expected characters of the text" in printed
    assert "next: fastpar sample r" in printed
