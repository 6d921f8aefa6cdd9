"""Tensors of folders in chunks and as a whole, against the library and against the indices."""

import numpy as np
import pytest
import torch
from manifest_cells import PIECES, WEIGHTS, make_folder
from safetensors.torch import load_file, save_file

from fastpar.checkpoint import folder_tensors as module
from fastpar.checkpoint.folder_tensors import Piece, StoredTensor, stored_tensors
from fastpar.config.config import GPTConfig
from fastpar.files.tensor_file import DTYPE_NAMES
from fastpar.files.tensor_header import Place
from fastpar.models.gpt import GPT
from fastpar.models.hf import save_hf
from fastpar.sharding.ranges import HOLE, Run

OPTIMIZER = "optimizer-00001-of-00002.safetensors"


@pytest.fixture
def made(tmp_path):
    return tmp_path / "a", make_folder(tmp_path / "a")


@pytest.fixture(params=[4, 12, 1 << 22])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", request.param * 2)


def indices(runs):
    return [run.start + i * run.stride + j for run in runs for i in range(run.count)
            for j in range(run.length)]  # fmt: skip


def test_pieces_are_put_together_by_index(made, chunk_bytes):
    folder, manifest = made
    files = {entry.file: load_file(folder / entry.file) for entry in manifest.optimizer}
    tensors = {t.name: t for t in stored_tensors(folder, manifest)}
    assert list(tensors) == [*WEIGHTS, *PIECES]
    for name in WEIGHTS:
        assert torch.equal(tensors[name].whole(), load_file(folder / "model.safetensors")[name])
    for name in PIECES:
        found = [entry for entry in manifest.optimizer if entry.key == name]
        values = torch.cat([files[entry.file][name] for entry in found])
        whole = tensors[name].whole()
        assert whole.shape == found[0].shape
        at = np.concatenate([indices(entry.runs) for entry in found])
        assert torch.equal(whole.view(-1)[at], values)
        assert torch.equal(torch.cat(list(tensors[name].chunks())), values)


def test_every_dtype(tmp_path, chunk_bytes):
    tensors = {f"t{i}": torch.arange(9).to(dtype) for i, dtype in enumerate(DTYPE_NAMES)}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = {t.name: t for t in stored_tensors(tmp_path, None)}
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].whole(), value)


def test_holes_are_left_out(tmp_path, chunk_bytes):
    (tmp_path / "a").write_bytes(torch.arange(8.0).numpy().tobytes())
    runs = (Run(2, 2), Run(HOLE, 3), Run(0, 1, 1, 2), Run(HOLE, 1))
    piece = Piece(tmp_path / "a", Place(0, 32), runs, None)
    tensor = StoredTensor("a", torch.float32, (2, 2), (piece,))
    assert tensor.whole().tolist() == [[5.0, 6.0], [0.0, 1.0]]
    assert torch.cat(list(tensor.chunks())).tolist() == [0.0, 1.0, 5.0, 6.0]


def test_shards_and_links_of_transformers(tmp_path):
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=9))
    save_hf(model, tmp_path, max_shard_bytes=1000)
    path = sorted(tmp_path.glob("*.safetensors"))[0]
    path.rename(tmp_path / "blob")
    path.symlink_to("blob")
    found = {t.name: t for t in stored_tensors(tmp_path, None)}
    assert torch.equal(found["transformer.wte.weight"].whole(), model.wte.weight[:9])
    assert len(found) == len(list(model.parameters()))


def test_damage_is_found_as_the_bytes_pass(made):
    folder, manifest = made
    tensor = next(t for t in stored_tensors(folder, manifest) if t.name == "ln_f.bias/exp_avg")
    raw = bytearray((folder / OPTIMIZER).read_bytes())
    raw[tensor.pieces[0].place.stop - 1] ^= 1
    (folder / OPTIMIZER).write_bytes(raw)
    text = "ln_f.bias/exp_avg, elements 0 to 3 as the manifest has it, got other content in"
    with pytest.raises(ValueError, match=rf"stored_tensors: expected {text} .*{OPTIMIZER}; the"):
        list(tensor.chunks())
    with pytest.raises(ValueError, match="got other content"):
        tensor.whole()


def test_missing_and_damaged_files_are_named(made):
    folder, manifest = made
    tensors = stored_tensors(folder, manifest)
    (folder / OPTIMIZER).unlink()
    with pytest.raises(ValueError, match=rf"complete safetensors file, got .*{OPTIMIZER} \(no suc"):
        stored_tensors(folder, manifest)
    with pytest.raises(ValueError, match=rf"got .*{OPTIMIZER} \(no such file\); copy or save"):
        tensors[-1].whole()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"got .*model.safetensors \(\d+ bytes instead of \d+\)"):
        stored_tensors(folder, None)
    with pytest.raises(ValueError, match=r"model.safetensors \(ends at byte \d+\)"):
        max(tensors[:2], key=lambda t: t.pieces[0].place).whole()
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"got .*model.safetensors \(not a regular file\)"):
        stored_tensors(folder, None)
