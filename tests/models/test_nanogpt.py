"""nanoGPT's ckpt.pt: the same weights and loss; anything in it that would run is refused."""

import math
import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nanogpt_cells import ARGS, weights, write

from fastpar.checkpoint.restore import load_weights
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf, save_hf
from fastpar.models.nanogpt import load_nanogpt
from fastpar.settings.model import GPTConfig


def loss_of(weights, idx, targets, gelu):
    """nanoGPT's forward, in fp64."""
    w = {name.removeprefix("transformer."): t.double() for name, t in weights.items()}
    x = w["wte.weight"][idx] + w["wpe.weight"][: idx.shape[1]]
    B, T, C = x.shape

    def norm(x, name):
        return F.layer_norm(x, (C,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    for i in range(ARGS["n_layer"]):
        h = f"h.{i}"
        qkv = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(C, dim=2)
        q, k, v = (t.view(B, T, ARGS["n_head"], -1).transpose(1, 2) for t in qkv)
        scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        y = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        x = x + linear(y.transpose(1, 2).reshape(B, T, C), f"{h}.attn.c_proj")
        y = gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"))
        x = x + linear(y, f"{h}.mlp.c_proj")
    logits = norm(x, "ln_f") @ w["lm_head.weight"].T
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def loss_and_batch(model):
    ids = torch.randint(0, ARGS["vocab_size"], (3, 9), generator=torch.Generator().manual_seed(1))
    idx, targets = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        return float(model.eval()(idx, targets)), idx, targets


def test_the_loss_is_nanogpts(tmp_path):
    loss, idx, targets = loss_and_batch(load_nanogpt(write(tmp_path / "ckpt.pt")))
    tanh = loss_of(weights(), idx, targets, lambda x: F.gelu(x, approximate="tanh"))
    assert loss == pytest.approx(float(tanh), rel=1e-6)
    erf = loss_of(weights(), idx, targets, F.gelu)
    assert 1e-6 < abs(loss / float(erf) - 1) < 1e-3


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
    for file in (
        write(tmp_path / "b.pt", compiled),
        write(tmp_path / "c.pt", {**weights(), **masks}, old),
        tmp_path / "d.pt",
    ):
        if file.name == "d.pt":
            content = torch.load(tmp_path / "a.pt", weights_only=True)
            torch.save(content, file, _use_new_zipfile_serialization=False)
        model = load_nanogpt(file)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)


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
        tanh = loss_of(zeros, idx, targets, lambda x: F.gelu(x, approximate="tanh"))
        assert loss == pytest.approx(float(tanh), rel=1e-6)
        assert said.pop() == f"{path} has no biases: its model gets 13 of 0, with the same outputs"
    with pytest.warns(
        UserWarning, match="load_nanogpt: .*ckpt.pt has no biases: its model gets 13"
    ):
        load_weights(path)
    write(path, {n: t for n, t in given.items() if "c_fc" not in n}, {**ARGS, "bias": False})
    with pytest.raises(ValueError, match=r"expected a tensor transformer.h.0.mlp.c_fc.weight"):
        load_nanogpt(path, say=said.append)


def test_models_that_are_none_of_ours(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save({"model": weights(), "model_args": ARGS, "best_val_loss": np.float64(1.5)}, path)
    with pytest.raises(ValueError, match=r"\(it asks for numpy\.\S*multiarray.scalar, which is n"):
        load_nanogpt(path)
    name = "transformer.h.1.mlp.c_fc.bias"
    write(path, {n: t for n, t in weights().items() if n != name})
    with pytest.raises(ValueError, match=f"expected a tensor {name}, got none of this name"):
        load_nanogpt(path)
    write(path, weights(), {**ARGS, "vocab_size": 50})
    with pytest.raises(ValueError, match=r"wte.weight of shape \[50, 16\], got shape=\[40, 16\]"):
        load_nanogpt(path)
    write(path, weights(), {**ARGS, "n_layer": 10**12})
    with pytest.raises(ValueError, match=r"load_nanogpt: expected weights of n_layer=10+ layers"):
        load_nanogpt(path)
    scalars = {**weights(), "transformer.wte.weight": torch.tensor(1.0)}
    write(path, {n: t for n, t in scalars.items() if n != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"wte.weight of shape \[40, 16\], got shape=\[\]"):
        load_nanogpt(path)
    write(path, args={**ARGS, "n_head": 3})
    with pytest.raises(ValueError, match="expected n_embd divisible by n_head=3"):
        load_nanogpt(path)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"model": [1]}, "no model and model_args"),
        ({"model_args": None}, "no model and model_args"),
        ({"model_args": {**ARGS, "n_embd": "16"}}, "n_embd='16'"),
        ({"model_args": {**ARGS, "n_embd": True}}, "n_embd=True"),
        ({"model_args": {**ARGS, "dropout": "0"}}, "dropout='0'"),
        ({"model_args": {**ARGS, "bias": 0}}, "bias=0"),
        ({"model": {"transformer.wte.weight": 3}}, "'transformer.wte.weight' of type int"),
        ({"model": {3: torch.zeros(1)}}, "3 of type Tensor"),
        ({"model": {"a": torch.eye(2).to_sparse()}}, "a that is no plain tensor"),
        ({"model": {"a": torch.empty(2, device="meta")}}, "a that is no plain tensor"),
    ],
)
def test_contents_that_are_not_nanogpts(more, problem, tmp_path):
    with pytest.raises(ValueError, match=f"weights of nanoGPT, got .*{problem}.; pass the ckpt.pt"):
        load_nanogpt(write(tmp_path / "ckpt.pt", **more))


class Exploit:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_in_the_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    made = tmp_path / "made"
    torch.save({"model": Exploit(made)}, tmp_path / "zip.pt")
    old = {"_use_new_zipfile_serialization": False}
    torch.save({"model": Exploit(made)}, tmp_path / "old.pt", **old)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Exploit(made)))
    for name in ("zip.pt", "old.pt", "pickle.pt"):
        with pytest.raises(ValueError, match=rf"plain values, got .*{name} \(.*nothing is execut"):
            load_nanogpt(tmp_path / name)
    assert not made.exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)  # it is one
    assert made.exists()


def test_files_that_are_no_pickles(tmp_path):
    path = write(tmp_path / "ckpt.pt")
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04", b"{}", whole[:100], whole[: len(whole) // 2], b"\x80\x05."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"load_nanogpt: expected a ckpt.pt of tensors"):
            load_nanogpt(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"ckpt.pt \(no such file\)"):
        load_nanogpt(path)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"ckpt.pt \(not a regular file\)"):
        load_nanogpt(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"ckpt.pt \(not a regular file\)"):
        load_nanogpt(path)


def test_a_whole_module_is_refused(tmp_path):
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=9))
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="of tensors and plain values, got"):
        load_nanogpt(tmp_path / "model.pt")
