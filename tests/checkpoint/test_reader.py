"""Tensors of folders in chunks, in parts and as a whole; weights from wherever they lie."""

import os
from dataclasses import replace

import pytest
import torch
from manifest_cells import PIECES, WEIGHTS, make_folder
from nanogpt_cells import write
from safetensors.torch import load_file, save_file
from saved import indices, same_weights, whole_tensors

from fastpar import AdamW
from fastpar.checkpoint import reader as reader_module
from fastpar.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    by_key,
    digest_of,
    read_manifest,
)
from fastpar.checkpoint.reader import TensorReader, list_plain_tensors, verify_weights
from fastpar.checkpoint.restore import load_weights
from fastpar.checkpoint.saver import Saver, save_checkpoint
from fastpar.files.tensor_file import DTYPE_NAMES, STORED
from fastpar.models.gpt import GPT
from fastpar.models.hf import load_hf, save_hf
from fastpar.settings.model import GPTConfig
from fastpar.sharding.placements import HOLE, Run, whole_run

OPTIMIZER = "optimizer-00001-of-00002.safetensors"


@pytest.fixture
def made(tmp_path):
    return tmp_path / "a", make_folder(tmp_path / "a")


@pytest.fixture(params=[4, 12, 1 << 22])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(reader_module, "BLOCK_BYTES", request.param * 2)


def test_pieces_are_put_together_by_index(made, chunk_bytes):
    folder, manifest = made
    files = {entry.file: load_file(folder / entry.file) for entry in manifest.optimizer}
    tensors = by_key(manifest.weights + manifest.optimizer)
    assert list(tensors) == [*WEIGHTS, *PIECES]
    with TensorReader(folder, manifest) as reader:
        for name in WEIGHTS:
            whole = load_file(folder / "model.safetensors")[name]
            assert torch.equal(reader.read(tensors[name]), whole)
        for name in PIECES:
            found = tensors[name]
            values = torch.cat([files[entry.file][name] for entry in found])
            whole = reader.read(found)
            assert whole.shape == found[0].shape
            at = [i for entry in found for i in indices(entry.runs)]
            assert torch.equal(whole.view(-1)[at], values)


def test_every_dtype_and_holes(tmp_path, chunk_bytes):
    tensors = {f"t{i}": torch.arange(9).to(dtype) for i, dtype in enumerate(DTYPE_NAMES)}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    manifest = list_plain_tensors(tmp_path)
    assert {t.key for t in manifest.weights} == tensors.keys()
    with TensorReader(tmp_path, manifest) as reader:
        for entry in manifest.weights:
            assert STORED[entry.dtype] == tensors[entry.key].dtype
            assert torch.equal(reader.read([entry]), tensors[entry.key])
    save_file({"a/b": torch.arange(8.0)}, tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    head = len(raw) - 32
    first, rest = map(digest_of, (raw[:head], raw[head:]))
    runs = (Run(2, 2), Run(HOLE, 3), Run(0, 1, 1, 2), Run(HOLE, 1))
    entry = TensorEntry("a", "a/b", "F32", (2, 2), runs, rest)
    manifest = Manifest(1, {"a": FileEntry(len(raw), first, head)}, (), (entry,))
    with TensorReader(tmp_path, manifest) as reader:
        assert reader.read([entry]).tolist() == [[5.0, 6.0], [0.0, 1.0]]


def test_damage_is_found_as_the_bytes_pass_and_missing_files_are_named(made):
    folder, manifest = made
    found = by_key(manifest.optimizer)["ln_f.bias/exp_avg"]
    moments, weights = folder / OPTIMIZER, folder / "model.safetensors"

    def refused(words, entries, way=TensorReader.read):
        with TensorReader(folder, manifest) as reader, pytest.raises(ValueError, match=words):
            way(reader, entries)

    with TensorReader(folder, manifest) as reader:
        place = reader.places(OPTIMIZER)[found[0].key]
    raw = bytearray(moments.read_bytes())
    raw[place.stop - 1] ^= 1
    moments.write_bytes(raw)
    text = rf"ln_f.bias/exp_avg, elements 0 to 3 as saved, got other content in .*{OPTIMIZER}; the"
    refused(f"TensorReader: expected {text}", found)
    moments.unlink()
    refused(rf"got no such file in .*{OPTIMIZER}; the checkpoint", found)
    weights.write_bytes(weights.read_bytes()[:-1])
    cut = r"got \d+ bytes instead of \d+ in .*model.safetensors"
    refused(cut, manifest.weights[0], TensorReader.whole)


# Parts of tensors, straight to their places; see test_reshard for whole models.
SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=301)
MOMENT = "wte.weight/exp_avg"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = GPT(SMALL)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(*torch.arange(16).view(2, 1, 8)).backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("run")
    return save_checkpoint(folder, step=1, model=model, optimizer=optimizer)


RUNS = {
    "one": [Run(5, 1000)],
    "columns": [Run(3, 8, 32, 290)],
    "backwards, with holes": [Run(7000, 90), Run(HOLE, 6), Run(64, 32, 64, 20)],
    "nothing": [],
}


def test_the_elements_of_some_runs(saved, monkeypatch):
    """What is cut as it was saved costs one call."""
    manifest, whole = read_manifest(saved), whole_tensors(saved)[1][MOMENT].reshape(-1)
    found = [entry for entry in manifest.optimizer if entry.key == MOMENT]
    for runs in RUNS.values():
        parts = [torch.empty(0)]
        for run in runs:
            for i in range(run.count):
                at = run.start + i * run.stride
                hole = run.start == HOLE
                parts.append(torch.zeros(run.length) if hole else whole[at : at + run.length])
        wanted = torch.cat(parts)
        room = torch.full_like(wanted, 7.0)
        with TensorReader(saved, manifest) as reader:
            new, same = reader.gather(found, runs), reader.gather(found, runs, room)
            other = reader.gather(found, runs, torch.empty(len(wanted) + 1))
        assert same is room
        for got in (new, same, other):
            assert torch.equal(got, wanted), runs
    calls, read = [], os.preadv
    with TensorReader(saved, manifest) as reader:
        reader.places(found[0].file)
        monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or read(*args))
        reader.gather(found, [Run(0, 32, 32, 200)])
        assert len(calls) == 1


# Weights from wherever they lie; those of a checkpoint only if every byte is right
CONFIG = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=9, dropout=0.0)


@pytest.fixture
def checkpoint(tmp_path):
    """Of weights alone, in several files."""
    saver = Saver(tmp_path, model=GPT(CONFIG, seed=3), shard_mb=1e-3, asynchronous=False)
    saver.save(3, {})
    assert len(list(saver.last.path.glob("*.safetensors"))) > 1
    return saver.last.path.rename(tmp_path / "c")


def test_folders_of_transformers_and_files_of_nanogpt(tmp_path):
    model = GPT(CONFIG, seed=3)
    save_hf(model, tmp_path / "hf")
    assert same_weights(load_weights(tmp_path / "hf"), model)
    for source in (tmp_path / "hf", write(tmp_path / "ckpt.pt")):
        assert load_weights(source, dropout=0.3).config.dropout == 0.3
    with pytest.raises(ValueError, match=r"load_hf: expected a readable config.json"):
        load_weights(tmp_path / "none")
    with pytest.raises(ValueError, match=r"load_nanogpt: expected a ckpt.pt"):
        load_weights(tmp_path / "hf" / "config.json")


def test_files_beside_a_checkpoint_are_not_taken_for_its_own(checkpoint, tmp_path):
    assert verify_weights(checkpoint) == read_manifest(checkpoint)
    assert same_weights(load_weights(checkpoint), GPT(CONFIG, seed=3))
    save_hf(GPT(CONFIG, seed=4), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(checkpoint / "model.safetensors")
    assert same_weights(load_hf(checkpoint), GPT(CONFIG, seed=4))  # what transformers would read
    with pytest.raises(ValueError, match=r"verify_weights: .*got model.safetensors, which"):
        load_weights(checkpoint)


def test_what_is_read_of_other_folders(checkpoint):
    """Not the optimizer; without a manifest of ours those of transformers."""
    folder, manifest = checkpoint, read_manifest(checkpoint)
    path, digest = folder / MANIFEST, "xxh3:" + "0" * 32
    state = TensorEntry("optimizer.safetensors", "w/x", "F32", (2,), (*whole_run(2),), digest)
    files = {**manifest.files, state.file: FileEntry(108, digest, 100)}
    for content in (
        replace(manifest, files=files, optimizer=(state,)).sealed(),
        b'{"name": "a web page"}',
    ):
        path.write_bytes(content)
        assert same_weights(load_weights(folder), GPT(CONFIG, seed=3))
    assert verify_weights(folder) is None
    path.write_text('{"format": "fastpar-checkpoint", "version": 1}')
    with pytest.raises(ValueError, match=r"of version 1; fastpar 0\.1 reads it"):
        load_weights(folder)
    path.unlink()
    path = max(folder.glob("*.safetensors"))  # a link, as the hub's cache has them
    path.rename(folder / "blob")
    path.symlink_to("blob")
    assert same_weights(load_weights(folder), GPT(CONFIG, seed=3))
    step = folder.rename(folder.parent / "step_000003")
    with pytest.raises(ValueError, match=r"read_manifest: .*manifest.json \(no such file\)"):
        load_weights(step)
