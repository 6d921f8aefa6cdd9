"""Exported folders: the same bytes, or another dtype from the masters; never half of one."""

import json
import os

import pytest
import torch
from nanogpt_cells import ARGS, weights, write
from safetensors.torch import load_file, save_file

from fastpar.checkpoint.commands import export_weights
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf, save_hf
from fastpar.settings.model import GPTConfig

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=131, dropout=0.0)


@pytest.fixture(params=[10**9, 9000], ids=["one file", "shards"])
def plain(request, tmp_path):
    """A folder of transformers with a tokenizer, and a file that nobody asked for."""
    folder = tmp_path / "plain"
    save_hf(GPT(CONFIG, seed=1), folder, max_shard_bytes=request.param)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_text("a pickle")
    return folder


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_bytes_of_a_transformers_folder(plain, tmp_path):
    names = export_weights(plain, tmp_path / "to")
    assert names == sorted(n for n in os.listdir(plain) if n != "training_args.bin")
    for name in names:
        assert (tmp_path / "to" / name).read_bytes() == (plain / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["plain", "to"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes(plain, tmp_path, dtype):
    transformers = pytest.importorskip("transformers")
    export_weights(plain, tmp_path / "to", dtype)
    assert same(load_hf(tmp_path / "to"), load_hf(plain).to(dtype))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "to")
    assert str(getattr(theirs, "dtype", None) or theirs.torch_dtype) == str(dtype)
    index = tmp_path / "to" / "model.safetensors.index.json"
    if index.exists():
        total = json.loads(index.read_text())["metadata"]["total_size"]
        assert total == sum(p.nbytes for p in load_hf(tmp_path / "to").parameters()) - (
            (load_hf(plain).config.padded_vocab_size - 131) * 16 * dtype.itemsize
        )


def test_masks_keep_their_dtype(plain, tmp_path):
    for path in plain.glob("*.safetensors"):
        tensors = load_file(path)
        tensors[f"transformer.h.{path.stem[-1]}.attn.bias"] = torch.ones(1, 1, 8, 8)
        save_file(tensors, path)
    export_weights(plain, tmp_path / "to", torch.bfloat16)
    for path in (tmp_path / "to").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            mask = name.endswith(".attn.bias")
            assert tensor.dtype == (torch.float32 if mask else torch.bfloat16)


def test_values_that_a_dtype_does_not_hold(plain, tmp_path):
    path = sorted(plain.glob("*.safetensors"))[0]
    tensors = load_file(path)
    name = min(tensors)
    tensors[name].view(-1)[0] = 1e6
    save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"that float16 holds, got {name} with 1e\+06; use --dty"):
        export_weights(plain, tmp_path / "to", torch.float16)
    assert sorted(os.listdir(tmp_path)) == ["plain"]
    export_weights(plain, tmp_path / "to", torch.bfloat16)


def test_nanogpt_for_transformers(tmp_path):
    names = export_weights(write(tmp_path / "ckpt.pt"), tmp_path / "to")
    assert names == ["config.json", "model.safetensors"]
    wte = load_hf(tmp_path / "to").wte.weight[: ARGS["vocab_size"]]
    assert torch.equal(wte, weights()["transformer.wte.weight"])
    export_weights(tmp_path / "ckpt.pt", tmp_path / "half", torch.float16)
    assert load_hf(tmp_path / "half").wte.weight.dtype == torch.float16


def test_bad_folders(plain, tmp_path):
    with pytest.raises(ValueError, match=r"fastpar export: expected a folder that does not exist"):
        export_weights(plain, plain)
    with pytest.raises(ValueError, match=r"or model.safetensors.index.json, got neither"):
        export_weights(tmp_path, tmp_path / "to")
    path = sorted(plain.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    for dtype in (None, torch.float16):
        with pytest.raises(ValueError, match=f"complete safetensors file, got .*{path.name}"):
            export_weights(plain, tmp_path / "to", dtype)
    assert sorted(os.listdir(tmp_path)) == ["plain"]
