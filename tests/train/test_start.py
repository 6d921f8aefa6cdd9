"""What a run starts from: weights, context and tokens that go together."""

import pickle
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from nanogpt_cells import weights, write

from fastpar.checkpoint import reader as reader_module
from fastpar.comm.mesh import Mesh
from fastpar.data.tokenizer import GPT2_VOCABULARY, ByteTokenizer
from fastpar.models.gpt import GPT
from fastpar.models.hf import save_hf
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks
from fastpar.train.start import digest, find_checkpoint, load_model_and_data

TINY = {
    "data": "text.txt", "tokenizer": "bytes", "model": "micro", "n_layer": 1, "n_head": 1,
    "n_embd": 8, "block_size": 8,
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("in the beginning " * 40)
    return tmp_path


def load(state=None, **changes):
    return load_model_and_data(TrainConfig().replace({**TINY, **changes}), state, progress=False)


def test_a_new_model_takes_its_vocabulary_from_the_text(here):
    model, block_size, data = load()
    assert (model.config.vocab_size, block_size) == (data.vocab_size, 8) == (256, 8)
    again, _, _ = load(seed=2)
    assert not again.wpe.weight.equal(model.wpe.weight)


def test_weights_to_start_from_are_read_once_only(here):
    first = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=256))
    save_hf(first, here / "w")
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))
    model, block_size, _ = load(init_from="w", **sizes)
    assert model.wpe.weight.equal(first.wpe.weight)
    assert block_size == 16
    assert load(init_from="w", **{**sizes, "block_size": 4})[1] == 4
    with pytest.raises(ValueError, match=r"train: expected tp of at most n_head=1, got tp=2"):
        load(init_from="w", **sizes, tp=2, data="a text that is not read")
    # A resumed run has them in its checkpoint: the folder may be gone.
    shape = asdict(replace(first.config, dropout=0.0))
    model, _, _ = load({"model": shape}, init_from="gone", **sizes)
    assert model.config.dropout == 0.0


def test_nanogpts_weights_to_start_from(here):
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16, "vocab_size": 256}
    write(here / "ckpt.pt", args={**sizes, "dropout": 0.2})
    ours = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))
    model, block_size, _ = load(init_from="ckpt.pt", **ours)
    assert model.wpe.weight.equal(weights(sizes)["transformer.wpe.weight"])
    assert (block_size, model.config.dropout) == (16, 0.2)


def test_weights_to_start_from_have_their_own_tokenizer(here):
    """The vocabulary that a text would teach has other tokens under the same numbers."""
    given = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))
    given |= {"init_from": "w", "tokenizer": "auto", "model": "mini", "block_size": 4}

    def save(vocab_size):
        shutil.rmtree(here / "w", ignore_errors=True)
        shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16}
        save_hf(GPT(GPTConfig(**shape, vocab_size=vocab_size)), here / "w")

    save(300)
    with pytest.raises(ValueError, match=r"tokenizer that the weights were trained with, got none"):
        load(**given)
    assert load(**given | {"tokenizer": "bpe-300"})[2].tokenizer.name == "bpe-300"
    np.arange(200, dtype="<u2").tofile(here / "train.bin")
    (here / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(map(chr, range(200))))}))
    assert load(**given | {"data": "train.bin"})[2].tokenizer.name == "chars"  # the data's own
    ByteTokenizer().save(here / "w")
    assert load(**given)[2].tokenizer.name == "bytes"
    save(GPT2_VOCABULARY)
    assert load(**given)[2].tokenizer.name == "gpt2"
    (here / "w" / "vocab.json").touch()  # as old tokenizers: maybe of another language
    with pytest.raises(ValueError, match=r"got none for the text text; name it: gpt2, bytes or a"):
        load(**given)


def test_digest_sees_both_ends_and_the_length(here):
    _, _, data = load()
    known = {digest(data)}
    for change in (
        {"train": data.train[:-1]},
        {"val": data.val[1:]},
        {"train": data.train.astype(np.int32)},
    ):
        known.add(digest(replace(data, **change)))
    assert len(known) == 4
    assert digest(replace(data, name="other")) in known


def test_without_resume_there_is_no_checkpoint():
    assert find_checkpoint(TrainConfig(), Mesh(device="cpu")) is None


def test_all_ranks_learn_which_checkpoint_is_the_newest_whole_one(tmp_path, monkeypatch, capsys):
    """Only rank 0 reads the folder."""
    damaged = set()

    def verify(path):
        if path.name in damaged:
            raise ValueError(f"{path.name} is damaged")

    monkeypatch.setattr(reader_module, "verify_checkpoint", verify)
    config = TrainConfig().replace({"out": str(tmp_path), "resume": True, "auto_resume": True})

    def of_rank(steps=None):
        return find_checkpoint(config, Mesh(tp=2, device="cpu"), steps)

    assert run_ranks(of_rank, 4) == [None] * 4
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert run_ranks(of_rank, 4) == [tmp_path / "checkpoints" / "step_000004"] * 4
    assert run_ranks(of_rank, 4, {2}) == [tmp_path / "checkpoints" / "step_000002"] * 4
    damaged.add("step_000004")
    assert run_ranks(of_rank, 4) == [tmp_path / "checkpoints" / "step_000002"] * 4
    assert "step_000004 is damaged" in capsys.readouterr().out
    damaged.add("step_000002")
    with pytest.raises(ValueError, match=r"with damaged ones only; the newest: step_000004 is"):
        run_ranks(of_rank, 4)


LOADED = """
import sys
from fastpar.settings.config import TrainConfig
from fastpar.train.trainer import train

def one_step(trainer):
    trainer.predictions.watched(trainer.train_step)
    print(*(name for name in sys.modules if name.startswith("fastpar.")))
    return 0

settings = {"data": "text.txt", "tokenizer": "bytes", "model": "micro", "device": "cpu"}
sys.exit(train(TrainConfig().replace(settings), one_step))
"""


def test_a_step_loads_nothing_of_the_planner(tmp_path):
    """Only what refuses a model that does not fit, and what measures memory."""
    (tmp_path / "text.txt").write_text("in the beginning god created the heaven\n" * 200)
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = [name.split(".")[1:] for name in done.stdout.split()]
    assert "observe" not in {room for room, *_ in loaded}
    found = {file for room, *rest in loaded if room == "predict" for file in rest}
    assert found <= {"run", "memory", "time", "machine"}
