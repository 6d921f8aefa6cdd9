"""What a run starts from, and what is refused before anything is made."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nanogpt_cells import weights, write
from train_runs import TINY, curve, flags_of, forget_after, start, steps

from fastpar.checkpoint import reader as reader_module
from fastpar.cli import main, parse_train
from fastpar.comm.mesh import Mesh
from fastpar.data import sources
from fastpar.data.tokenizer import GPT2_VOCABULARY, ByteTokenizer
from fastpar.files.runs import check_free, hold, release
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf, save_hf
from fastpar.predict import run as capacity
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks
from fastpar.train import start as start_module
from fastpar.train.journal import check_out
from fastpar.train.start import digest, find_checkpoint, load_model_and_data, pick_dtype
from fastpar.train.trainer import Trainer

NO_SIZES = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))
SHAPE = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16}


@pytest.fixture(autouse=True)
def given_back(here):
    yield
    release()


def load(state=None, progress=False, meet=lambda: None, **changes):
    config = TrainConfig().replace({**TINY, **SHAPE, "block_size": 8, "dropout": None, **changes})
    return load_model_and_data(config, state, progress=progress, meet=meet)


def test_a_new_model_takes_its_vocabulary_from_the_text():
    model, block_size, data = load()
    assert (model.config.vocab_size, block_size) == (data.vocab_size, 8) == (256, 8)
    assert not load(seed=2)[0].wpe.weight.equal(model.wpe.weight)
    others = {"train": data.train[:-1]}, {"val": data.val[1:]}, {"train": data.train.astype("i4")}
    known = {digest(replace(data, **change)) for change in ({}, *others)}
    assert len(known) == 4  # it sees both ends, the length and the kind
    assert digest(replace(data, name="other")) in known


def test_the_rank_with_the_bar_tokenizes(monkeypatch):
    """Though the others come first."""
    by, tokenize = [], sources._tokenize

    def noted(corpus, tokenizer, folder, progress):
        by.append(progress)
        tokenize(corpus, tokenizer, folder, progress)

    def start_as_rank():
        mesh, others_came = Mesh(device="cpu"), came
        if mesh.is_main:
            assert others_came.wait(60)

        def meet():
            others_came.set()
            start_module.meet(mesh)

        return len(load(progress=mesh.is_main, meet=meet, tokenizer="bpe-300")[2].train)

    monkeypatch.setattr(sources, "_tokenize", noted)
    came = threading.Event()
    first, second = run_ranks(start_as_rank, 2)
    assert first == second
    assert by == [True]


def test_weights_to_start_from_are_read_once_only(here):
    first = GPT(GPTConfig(**SHAPE, vocab_size=256))
    save_hf(first, here / "w")
    given = {"init_from": "w", **NO_SIZES}
    model, block_size, _ = load(**given)
    assert model.wpe.weight.equal(first.wpe.weight)
    assert (block_size, load(**{**given, "block_size": 4})[1]) == (16, 4)
    for changes, words in (
        ({"tp": 2, "data": "not read"}, "train: expected tp <= n_head=1, got tp=2"),
        ({"block_size": 17}, r"expected block_size <= 16, the context of .*, got "),
        ({"tokenizer": "bpe-300"}, "256 tokens, the model's vocabulary, got tokenizer=bpe-300"),
    ):
        with pytest.raises(ValueError, match=words):
            load(**{**given, **changes})
    # A resumed run has them in its checkpoint: the folder may be gone.
    shape = asdict(replace(first.config, dropout=0.0))
    model, _, _ = load({"model": shape}, **{**given, "init_from": "gone"})
    assert model.config.dropout == 0.0
    sizes = {**SHAPE, "vocab_size": 256}
    write(here / "ckpt.pt", args={**sizes, "dropout": 0.2})  # nanoGPT's
    model, block_size, _ = load(**{**given, "init_from": "ckpt.pt"})
    assert model.wpe.weight.equal(weights(sizes)["transformer.wpe.weight"])
    assert (block_size, model.config.dropout) == (16, 0.2)


def test_weights_to_start_from_have_their_own_tokenizer(here):
    """The vocabulary that a text would teach has other tokens under the same numbers."""
    given = {**NO_SIZES, "init_from": "w", "tokenizer": "auto", "model": "mini", "block_size": 4}

    def tokenizer(**changes):
        return load(**{**given, **changes})[2].tokenizer.name

    def save(vocab_size):
        shutil.rmtree(here / "w", ignore_errors=True)
        save_hf(GPT(GPTConfig(**SHAPE, vocab_size=vocab_size)), here / "w")

    save(300)
    with pytest.raises(ValueError, match=r"tokenizer that the weights were trained with, got none"):
        tokenizer()
    np.arange(200, dtype="<u2").tofile(here / "train.bin")
    (here / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(map(chr, range(200))))}))
    assert tokenizer(tokenizer="bpe-300") == "bpe-300"
    assert tokenizer(data="train.bin") == "chars"  # the data's own
    ByteTokenizer().save(here / "w")
    assert tokenizer() == "bytes"
    save(GPT2_VOCABULARY)
    assert tokenizer() == "gpt2"
    (here / "w" / "vocab.json").touch()  # as old tokenizers: maybe of another language
    with pytest.raises(ValueError, match=r"got none for the text text; name it: gpt2, bytes or a"):
        tokenizer()


def test_a_run_that_began_with_the_weights_of_another():
    start("first", max_steps=4)
    given = {"init_from": "first/latest", **NO_SIZES, "dropout": 0.0, "seed": 3, "max_steps": 4}
    start("second", **given, save_every=2)
    assert curve("second")[0]["val_loss"] == curve("first")[-1]["val_loss"]
    assert json.loads(Path("second/config.json").read_text())["model"]["dropout"] == 0.0
    shutil.rmtree("first")  # its resume needs the folder no more
    forget_after("second", 2)
    before = curve("second")
    start("second", **given, resume=True)
    assert curve("second") == before


def test_all_ranks_learn_which_checkpoint_is_the_newest_whole_one(tmp_path, monkeypatch, capsys):
    """Only rank 0 reads the folder."""
    damaged = set()

    def verify(path):
        if path.name in damaged:
            raise ValueError(f"{path.name} is damaged")

    monkeypatch.setattr(reader_module, "verify_checkpoint", verify)
    config = TrainConfig().replace({"out": str(tmp_path), "resume": True, "auto_resume": True})

    def newest(steps=None, config=config):
        of_rank = lambda: find_checkpoint(config, Mesh(tp=2, device="cpu"), steps)  # noqa: E731
        (found,) = set(run_ranks(of_rank, 4))
        return found and found.name

    assert newest(config=TrainConfig()) is newest() is None
    two, four = "step_000002", "step_000004"
    for name in (two, four):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert (newest(), newest({2})) == (four, two)
    damaged.add(four)
    assert newest() == two
    assert "step_000004 is damaged" in capsys.readouterr().out
    damaged.add(two)
    with pytest.raises(ValueError, match=r"with only damaged ones; the newest: step_000004 is"):
        newest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere.txt"}, "expected .*got .*nowhere.txt"),
        ({"dtype": "fp16"}, r"dtype fp32 or bf16 on the CPU, got dtype=fp16; use --dtype bf16"),
        ({"block_size": 4000}, r"expected at least block_size \+ 1 = 4001 validation tokens"),
        ({"resume": True}, r"expected a folder with a run to resume, got out=r; drop --resume"),
        pytest.param(
            {"device": "cuda"}, r"expected a GPU for device=cuda, got none; use",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        pytest.param(
            {"device": "auto", "cuda_graphs": True},
            r"expected a GPU for --cuda-graphs, got none; drop",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_refused_starts_leave_no_folder(changes, message):
    with pytest.raises(ValueError, match=message):
        start("r", **changes)
    assert not Path("r").exists()


def test_resume_with_another_model_or_text_is_refused():
    Path("other.txt").write_text(Path("text.txt").read_text().replace("lord", "fish"))
    start("r", max_steps=4)
    before = Path("r/metrics.jsonl").read_bytes()
    for changes, message in (
        ({"n_embd": 32}, r"expected the model of r/checkpoints/step_000004 with n_embd=16, "),
        ({"data": "other.txt"}, r"the same tokens as at the run's start, got different ones from"),
        ({"tokenizer": "bpe-300"}, r"expected the model of .* with vocab_size=256, got"),
        ({"optimizer": "muon"}, "momentum_buffer"),
    ):
        with pytest.raises(ValueError, match=message):
            start("r", resume=True, **{"max_steps": 9, **changes})
        assert Path("r/metrics.jsonl").read_bytes() == before


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_built(monkeypatch):
    start("first", max_steps=4)
    n = sum(p.numel() for p in load_hf("first/latest").parameters())
    monkeypatch.setattr(GPT, "__init__", lambda *a, **k: pytest.fail("it was built"))
    monkeypatch.setattr(capacity, "host_memory", lambda: 15 * n)
    for again in ({"out": "r"}, {"out": "first", "resume": True}):
        with pytest.raises(ValueError, match=r"a model whose states fit into .* of this machine"):
            start(**again)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"in fp32, .* on each of 4 ranks .* at most 3 ranks"):
        start("r")
    assert not Path("r").exists()


def train(more=""):
    return main(["train", *flags_of({**TINY, "max_steps": 2, "out": "r"}), *more.split()])


def test_a_start_that_failed_in_its_first_step_leaves_the_folder_free(monkeypatch, capsys):
    def refuse(self):
        GPTConfig(n_layer=0)  # fastpar refuses it

    def said(more, words="", status=2):
        capsys.readouterr()
        assert train(more) == status
        assert capsys.readouterr().err.endswith(words)

    Path("r").mkdir()
    Path("r/notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", refuse)
        said("")
    assert [row["step"] for row in curve("r")] == [0]
    rule = "expected a run with a checkpoint to resume, got out=r without one; drop --resu"
    said("--resume", f"{rule}me to start it again\n")
    said("--max-steps 3", status=0)
    assert Path("r/notes.txt").read_text() == "mine"
    assert [row["step"] for row in steps("r")] == [1, 2, 3]
    assert [row["step"] for row in curve("r") if "val_loss" in row] == [0, 3]
    content = json.loads(Path("r/config.json").read_text())
    assert (len(content["starts"]), content["settings"]["max_steps"]) == (1, 3)

    # What has made steps is a run's, with a checkpoint or without.
    said("", "; add --resume to resume it, or choose another folder\n")
    shutil.rmtree("r/checkpoints")
    for name in ("latest", "samples.txt", "loss.png"):
        Path("r", name).unlink()
    said("", "; it has no checkpoint to resume: choose another folder\n")
    said("--resume", "drop --resume to start a new run in another folder\n")


def test_two_starts_at_once_are_refused():
    """The settings of --auto-resume were read when the folder was free."""
    settings, plain = (TrainConfig().replace({"out": "r", "auto_resume": x}) for x in (True, False))
    Path("r").mkdir()
    Path("r/config.json").write_text(json.dumps({"settings": {}, "model": {}, "starts": []}))
    code = "import sys; from fastpar.files.runs import hold; hold('r'); print('held', flush=True)"
    command = [sys.executable, "-c", f"{code}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        rule = f"a run that no other process writes, got out=.*/r, used by process {other.pid}"
        for config in (settings, plain):
            with pytest.raises(ValueError, match=rule):
                check_out(config)
    check_out(settings)  # the other one has failed before its first step
    Path("r/checkpoints/step_000002").mkdir(parents=True)
    with pytest.raises(ValueError, match="another process has just created it: repeat the comm"):
        check_out(settings)
    hold("r")
    for name in ("r", "none"):
        check_free(name)


def saved(**settings):
    os.makedirs("r/checkpoints/step_000002", exist_ok=True)
    whole = TrainConfig().replace({"out": "r", **settings}).settings()
    content = {"settings": whole, "model": {}, "starts": []}
    Path("r/config.json").write_text(json.dumps(content))


def test_unset_takes_the_default_of_what_a_run_or_a_file_has_set():
    saved(zero_stage=2, shard_size=2, lr=0.5)
    Path("a.toml").write_text("seed = 5\n")
    for flags, shard_size, seed, lr in (
        ("--out r --resume --config a.toml --zero 0 --unset shard-size seed", None, 1, 0.5),
        ("--config a.toml --unset=seed --lr 0.25", None, 1, 0.25),
        ("--config a.toml", None, 5, 2.5e-3),
    ):
        config = parse_train(flags.split())
        found = (config.parallel.shard_size, config.run.seed, config.lr)
        assert found == (shard_size, seed, lr)
    with pytest.raises(ValueError, match="in --unset, got key=xyzzy; remove it"):
        parse_train(["--unset", "xyzzy"])


def test_a_run_goes_on_from_another_folder_and_version(here, monkeypatch, capsys):
    """Unknown settings are dropped with a message."""
    ByteTokenizer().save("t")
    assert train("--tokenizer t") == 0
    content = json.loads(Path("r/config.json").read_text())
    content["settings"] |= {"batch_ramp": 4, "wire_rank": 4, "pp": 2, "cp": 2}
    Path("r/config.json").write_text(json.dumps(content))
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    capsys.readouterr()
    again = ["train", "--resume", "--out", f"{here}/r", "--max-steps", "3", "--pp", "1", "--cp=1"]
    assert main(again) == 0
    found = capsys.readouterr()
    said = "is not registered (fastpar.axes.register): batch_ramp=4, wire_rank=4\n"
    assert said in found.err
    assert "batch_ramp" not in json.loads((here / "r/config.json").read_text())["settings"]
    changed = dict(re.findall(r"changed  (\w+) (.*)\n", found.out))
    assert changed.pop("out")
    assert changed == {"max_steps": "2 -> 3", "pp": "2 -> 1", "cp": "2 -> 1"}


def picked(state=None, **changes):
    config = TrainConfig().replace({"model": "gpt2", **changes})
    return pick_dtype(config, Mesh(device="cpu"), state)


def test_auto_is_bf16_where_all_ranks_multiply_it_fast(monkeypatch):
    for ranks in (1, 2):
        for fast, chosen in ((False, "fp32"), (True, "bf16")):
            monkeypatch.setattr("fastpar.train.start.has_bf16_gemm", fast)
            assert set(run_ranks(picked, ranks, init=False)) == {chosen}
    assert picked() == picked(dtype="bf16") == "bf16"
    assert picked(n_embd=756) == picked(init_from="w") == picked({"dtype": "fp32"}) == "fp32"
    monkeypatch.setattr("fastpar.train.start.gather_objects", lambda mine: [mine, False])
    assert set(run_ranks(picked, 2, init=False)) == {"fp32"}
