"""nanoGPT's ckpt.pt: the same weights and loss; anything in it that would run is refused."""

import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cells import sweep
from nanogpt_cells import ARGS, Exploit, NanoGPT, weights, write

from fastpar.checkpoint.restore import load_weights
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf, save_hf
from fastpar.models.nanogpt import load_nanogpt
from fastpar.settings.model import GPTConfig

SIZES = {name: value for name, value in ARGS.items() if name != "dropout"}


def loss_of(weights, idx, targets, approximate="tanh"):
    """By nanoGPT's model in fp64; its own gelu is approximate="none"."""
    model = NanoGPT(**SIZES, approximate=approximate).double()
    model.load_state_dict(weights)
    with torch.no_grad():
        return float(F.cross_entropy(model(idx).flatten(0, 1), targets.reshape(-1)))


def loss_and_batch(model):
    ids = torch.randint(0, ARGS["vocab_size"], (3, 9), generator=torch.Generator().manual_seed(1))
    idx, targets = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        return float(model.eval()(idx, targets)), idx, targets


def test_the_loss_is_nanogpts(tmp_path):
    loss, idx, targets = loss_and_batch(load_nanogpt(write(tmp_path / "ckpt.pt")))
    assert loss == pytest.approx(loss_of(weights(), idx, targets), rel=1e-6)
    assert 1e-6 < abs(loss / loss_of(weights(), idx, targets, "none") - 1) < 1e-3


def test_sizes_and_bits_are_the_files(tmp_path):
    model = load_nanogpt(write(tmp_path / "ckpt.pt"))
    sizes = {name: value for name, value in ARGS.items() if name != "bias"}
    assert model.config == GPTConfig(**sizes)
    assert model.training
    given = weights()
    for name, p in model.named_parameters():
        assert torch.equal(p[: len(given[f"transformer.{name}"])], given[f"transformer.{name}"])
    assert load_nanogpt(tmp_path / "ckpt.pt", dropout=0.0).config.dropout == 0.0
    half = load_nanogpt(tmp_path / "ckpt.pt", dtype=torch.bfloat16)
    assert half.wpe.weight.dtype == torch.bfloat16


def test_compiled_models_and_old_files(tmp_path):
    plain = load_nanogpt(write(tmp_path / "a.pt"))
    compiled = {f"_orig_mod.{name}": t for name, t in weights().items()}
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(2)}
    old = {name: value for name, value in ARGS.items() if name not in ("bias", "dropout")}
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save(content, tmp_path / "d.pt", _use_new_zipfile_serialization=False)
    write(tmp_path / "b.pt", compiled)
    write(tmp_path / "c.pt", {**weights(), **masks}, old)
    for file in ("b.pt", "c.pt", "d.pt"):
        model = load_nanogpt(tmp_path / file)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_rows_that_pad_the_vocabulary(tmp_path):
    """All of them by default; those of the tokens on demand, with the logits of nanoGPT."""
    path = write(tmp_path / "ckpt.pt")
    whole, cut = load_nanogpt(path).eval(), load_nanogpt(path, vocab_size=37).eval()
    assert (whole.config.vocab_size, cut.config.vocab_size) == (40, 37)
    assert torch.equal(cut.wte.weight[:37], whole.wte.weight[:37])
    assert torch.count_nonzero(cut.wte.weight[37:]) == 0
    save_hf(cut, tmp_path / "hf")
    assert load_hf(tmp_path / "hf").config.vocab_size == 37
    for n in (0, 41):
        with pytest.raises(ValueError, match=rf"<= vocab_size <= 40, got vocab_size={n}; leave"):
            load_nanogpt(path, vocab_size=n)


def test_a_model_without_biases(tmp_path):
    """nanoGPT's default: biases of 0, said, with the same loss; also of a compiled model."""
    given = {n: t for n, t in weights().items() if not n.endswith(".bias")}
    zeros = {n: torch.zeros_like(t) if n.endswith(".bias") else t for n, t in weights().items()}
    compiled = {f"_orig_mod.{name}": t for name, t in given.items()}
    said = []
    for model in (given, compiled):
        path = write(tmp_path / "ckpt.pt", model, {**ARGS, "bias": False})
        loss, idx, targets = loss_and_batch(load_nanogpt(path, say=said.append))
        assert loss == pytest.approx(loss_of(zeros, idx, targets), rel=1e-6)
        assert said.pop() == f"{path} has no biases; added 13 biases of 0, which change no output"
    with pytest.warns(UserWarning, match="load_nanogpt: .*ckpt.pt has no biases; added 13"):
        load_weights(path)
    write(path, {n: t for n, t in given.items() if "c_fc" not in n}, {**ARGS, "bias": False})
    with pytest.raises(ValueError, match=r"expected a tensor transformer.h.0.mlp.c_fc.weight"):
        load_nanogpt(path, say=said.append)


NAME = "transformer.h.1.mlp.c_fc.bias"
SCALAR = {**weights(), "transformer.wte.weight": torch.tensor(1.0)}
NOT_ITS = "weights of nanoGPT, got .*{}.; pass the ckpt.pt"


@sweep(
    ("more", "problem"),
    [
        ({"model": {n: t for n, t in weights().items() if n != NAME}},
         f"expected a tensor {NAME}, got none of this name"),
        ({"model": weights(), "args": {**ARGS, "vocab_size": 50}},
         r"wte.weight of shape \[50, 16\], got shape=\[40, 16\]"),
        ({"model": weights(), "args": {**ARGS, "n_layer": 10**12}},
         "load_nanogpt: expected weights of n_layer=10+ layers"),
        ({"model": {n: t for n, t in SCALAR.items() if n != "lm_head.weight"}},
         r"wte.weight of shape \[40, 16\], got shape=\[\]"),
        ({"args": {**ARGS, "n_head": 3}}, "expected n_embd divisible by n_head=3"),
        ({"best_val_loss": np.float64(1.5)},
         r"\(it contains a numpy\.\S*multiarray.scalar object; save"),
        ({"model": [1]}, NOT_ITS.format("no model and model_args")),
        ({"model_args": None}, NOT_ITS.format("no model and model_args")),
        ({"model_args": {**ARGS, "n_embd": "16"}}, NOT_ITS.format("n_embd='16'")),
        ({"model_args": {**ARGS, "n_embd": True}}, NOT_ITS.format("n_embd=True")),
        ({"model_args": {**ARGS, "dropout": "0"}}, NOT_ITS.format("dropout='0'")),
        ({"model_args": {**ARGS, "bias": 0}}, NOT_ITS.format("bias=0")),
        ({"model": {"transformer.wte.weight": 3}},
         NOT_ITS.format("'transformer.wte.weight' of type int")),
        ({"model": {3: torch.zeros(1)}}, NOT_ITS.format("3 of type Tensor")),
        ({"model": {"a": torch.eye(2).to_sparse()}},
         NOT_ITS.format("a that is not a plain tensor")),
        ({"model": {"a": torch.empty(2, device="meta")}},
         NOT_ITS.format("a that is not a plain tensor")),
    ],
)  # fmt: skip
def test_models_and_contents_that_are_not_nanogpts(more, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        load_nanogpt(write(tmp_path / "ckpt.pt", **more))


def test_nothing_in_the_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    made = tmp_path / "made"
    torch.save({"model": Exploit(made)}, tmp_path / "zip.pt")
    old = {"_use_new_zipfile_serialization": False}
    torch.save({"model": Exploit(made)}, tmp_path / "old.pt", **old)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Exploit(made)))
    module = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=9))
    torch.save(module, tmp_path / "module.pt")
    for name in ("zip.pt", "old.pt", "pickle.pt", "module.pt"):
        with pytest.raises(ValueError, match=rf"plain values, got .*{name} \(.*nothing in it is e"):
            load_nanogpt(tmp_path / name)
    assert not made.exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)  # it is one
    assert made.exists()


def test_files_that_are_no_pickles(tmp_path):
    path = write(tmp_path / "ckpt.pt")
    whole = path.read_bytes()

    def refused(words):
        with pytest.raises(ValueError, match=words):
            load_nanogpt(path)

    for content in (b"", b"PK\x03\x04", b"{}", whole[:100], whole[: len(whole) // 2], b"\x80\x05."):
        path.write_bytes(content)
        refused(r"load_nanogpt: expected a ckpt.pt of tensors")
    path.unlink()
    refused(r"ckpt.pt \(no such file\)")
    for make in (os.mkfifo, os.mkdir):
        make(path)
        refused(r"ckpt.pt \(not a regular file\)")
        path.rmdir() if path.is_dir() else path.unlink()
