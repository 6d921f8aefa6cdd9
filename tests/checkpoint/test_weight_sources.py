"""Weights from wherever they lie; those of a checkpoint only if every byte is right."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from nanogpt_cells import write

from fastpar.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry
from fastpar.checkpoint.reader import verify_weights
from fastpar.checkpoint.restore import load_weights
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf, save_hf
from fastpar.settings.model import GPTConfig
from fastpar.sharding.placements import whole_run

CONFIG = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=9, dropout=0.0)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def commit(folder):
    """A manifest of weights alone for a folder of transformers."""
    files, tensors = {}, []
    (folder / "trainer_state.json").write_text("{}")
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        head = len(raw)
        if path.suffix == ".safetensors":
            head = 8 + int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:head])
            header.pop("__metadata__")
            for key, entry in header.items():
                start, stop = (head + i for i in entry["data_offsets"])
                digest = hashlib.sha256(raw[start:stop]).hexdigest()
                runs = tuple(whole_run((stop - start) // 4))
                shape = tuple(entry["shape"])
                tensors.append(TensorEntry(path.name, key, entry["dtype"], shape, runs, digest))
        files[path.name] = FileEntry(len(raw), hashlib.sha256(raw[:head]).hexdigest(), head)
    manifest = Manifest(3, files, tuple(tensors))
    (folder / MANIFEST).write_bytes(manifest.sealed())
    return manifest


@pytest.fixture(params=[10**9, 1000])
def checkpoint(request, tmp_path):
    save_hf(GPT(CONFIG, seed=3), tmp_path / "c", max_shard_bytes=request.param)
    return tmp_path / "c", commit(tmp_path / "c")


def test_folders_of_transformers_and_files_of_nanogpt(tmp_path):
    model = GPT(CONFIG, seed=3)
    save_hf(model, tmp_path / "hf")
    assert same(load_weights(tmp_path / "hf"), model)
    for source in (tmp_path / "hf", write(tmp_path / "ckpt.pt")):
        assert load_weights(source, dropout=0.3).config.dropout == 0.3
    with pytest.raises(ValueError, match=r"load_hf: expected a readable config.json"):
        load_weights(tmp_path / "none")
    with pytest.raises(ValueError, match=r"load_nanogpt: expected a ckpt.pt"):
        load_weights(tmp_path / "hf" / "config.json")


def test_a_checkpoint_is_verified(checkpoint):
    folder, manifest = checkpoint
    assert verify_weights(folder) == manifest
    assert same(load_weights(folder), GPT(CONFIG, seed=3))
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        i = len(whole) // 2
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(
            ValueError, match=r"^(read_manifest|verify_files): expected .*" + path.name
        ):
            load_weights(folder)
        path.write_bytes(whole)


def test_files_beside_a_checkpoint_are_not_taken_for_its_own(tmp_path):
    save_hf(GPT(CONFIG, seed=3), tmp_path / "c", max_shard_bytes=1000)
    commit(tmp_path / "c")
    save_hf(GPT(CONFIG, seed=4), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "c" / "model.safetensors")
    assert same(load_hf(tmp_path / "c"), GPT(CONFIG, seed=4))  # what transformers would read
    with pytest.raises(ValueError, match=r"verify_weights: .*got model.safetensors beside them"):
        load_weights(tmp_path / "c")


def test_the_optimizer_is_not_read(checkpoint):
    folder, manifest = checkpoint
    state = TensorEntry("optimizer.safetensors", "w/x", "F32", (2,), (*whole_run(2),), "0" * 64)
    files = {**manifest.files, state.file: FileEntry(108, "0" * 64, 100)}
    more = replace(manifest, files=files, optimizer=(state,))
    (folder / MANIFEST).write_bytes(more.sealed())
    assert same(load_weights(folder), GPT(CONFIG, seed=3))


def test_a_checkpoint_without_its_manifest(checkpoint):
    folder, _ = checkpoint
    (folder / MANIFEST).unlink()
    assert verify_weights(folder) is None
    step = folder.rename(folder.parent / "step_000003")
    with pytest.raises(ValueError, match=r"read_manifest: .*manifest.json \(no such file\)"):
        load_weights(step)


def test_other_manifests(checkpoint):
    folder, _ = checkpoint
    (folder / MANIFEST).write_text('{"name": "a web page"}')
    assert verify_weights(folder) is None
    assert same(load_weights(folder), GPT(CONFIG, seed=3))
    (folder / MANIFEST).write_text('{"format": "fastpar-checkpoint", "version": 1}')
    with pytest.raises(ValueError, match=r"of version 1; fastpar 0\.1 reads it"):
        load_weights(folder)
