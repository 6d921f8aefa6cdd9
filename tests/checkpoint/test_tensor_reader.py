"""Tensors of folders in chunks and as a whole, against the library and against the indices."""

import hashlib
import os

import numpy as np
import pytest
import torch
from manifest_cells import PIECES, WEIGHTS, make_folder
from safetensors.torch import load_file, save_file
from saved import whole_tensors

from fastpar import AdamW
from fastpar.checkpoint import reader as reader_module
from fastpar.checkpoint.manifest import FileEntry, Manifest, TensorEntry, by_key, read_manifest
from fastpar.checkpoint.reader import TensorReader, list_plain_tensors
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.files.tensor_file import DTYPE_NAMES, STORED
from fastpar.models.gpt import GPT
from fastpar.models.hf import save_hf
from fastpar.settings.model import GPTConfig
from fastpar.sharding.placements import HOLE, Run

OPTIMIZER = "optimizer-00001-of-00002.safetensors"


@pytest.fixture
def made(tmp_path):
    return tmp_path / "a", make_folder(tmp_path / "a")


@pytest.fixture(params=[4, 12, 1 << 22])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(reader_module, "BLOCK_BYTES", request.param * 2)


def indices(runs):
    return [run.start + i * run.stride + j for run in runs for i in range(run.count)
            for j in range(run.length)]  # fmt: skip


def chunks(reader, entries):
    return torch.cat([chunk.clone() for chunk in reader.chunks(entries)])


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
            at = np.concatenate([indices(entry.runs) for entry in found])
            assert torch.equal(whole.view(-1)[at], values)
            assert torch.equal(chunks(reader, found), values)


def test_every_dtype(tmp_path, chunk_bytes):
    tensors = {f"t{i}": torch.arange(9).to(dtype) for i, dtype in enumerate(DTYPE_NAMES)}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    manifest = list_plain_tensors(tmp_path)
    assert {t.key for t in manifest.weights} == tensors.keys()
    with TensorReader(tmp_path, manifest) as reader:
        for entry in manifest.weights:
            assert STORED[entry.dtype] == tensors[entry.key].dtype
            assert torch.equal(reader.read([entry]), tensors[entry.key])


def test_holes_are_left_out(tmp_path, chunk_bytes):
    save_file({"a/b": torch.arange(8.0)}, tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    head = len(raw) - 32
    digests = [hashlib.sha256(part).hexdigest() for part in (raw[:head], raw[head:])]
    runs = (Run(2, 2), Run(HOLE, 3), Run(0, 1, 1, 2), Run(HOLE, 1))
    entry = TensorEntry("a", "a/b", "F32", (2, 2), runs, digests[1])
    manifest = Manifest(1, {"a": FileEntry(len(raw), digests[0], head)}, (), (entry,))
    with TensorReader(tmp_path, manifest) as reader:
        assert reader.read([entry]).tolist() == [[5.0, 6.0], [0.0, 1.0]]
        assert chunks(reader, [entry]).tolist() == [0.0, 1.0, 5.0, 6.0]


def test_shards_and_links_of_transformers(tmp_path):
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=9))
    save_hf(model, tmp_path, max_shard_bytes=1000)
    path = sorted(tmp_path.glob("*.safetensors"))[0]
    path.rename(tmp_path / "blob")
    path.symlink_to("blob")
    manifest = list_plain_tensors(tmp_path)
    found = by_key(manifest.weights)
    with TensorReader(tmp_path, manifest) as reader:
        assert torch.equal(reader.read(found["transformer.wte.weight"]), model.wte.weight[:9])
    assert len(found) == len(list(model.parameters()))


def test_damage_is_found_as_the_bytes_pass(made):
    folder, manifest = made
    found = by_key(manifest.optimizer)["ln_f.bias/exp_avg"]
    with TensorReader(folder, manifest) as reader:
        place = reader.places(OPTIMIZER)[found[0].key]
    raw = bytearray((folder / OPTIMIZER).read_bytes())
    raw[place.stop - 1] ^= 1
    (folder / OPTIMIZER).write_bytes(raw)
    text = "ln_f.bias/exp_avg, elements 0 to 3 as saved, got other content in"
    with TensorReader(folder, manifest) as reader:
        with pytest.raises(ValueError, match=rf"TensorReader: expected {text} .*{OPTIMIZER}; the"):
            list(reader.chunks(found))
        with pytest.raises(ValueError, match="got other content"):
            reader.read(found)


def test_missing_and_damaged_files_are_named(made):
    folder, manifest = made
    (folder / OPTIMIZER).unlink()
    with TensorReader(folder, manifest) as reader:
        with pytest.raises(ValueError, match=rf"got no such file in .*{OPTIMIZER}; the checkpoint"):
            reader.read(manifest.optimizer[:1])
        path = folder / "model.safetensors"
        plain = list_plain_tensors(folder)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(
            ValueError, match=r"got \d+ bytes instead of \d+ in .*model.safetensors"
        ):
            reader.whole(manifest.weights[0])
    with pytest.raises(ValueError, match=r"got .*model.safetensors \(\d+ bytes instead of \d+\)"):
        list_plain_tensors(folder)
    with (
        TensorReader(folder, plain) as reader,
        pytest.raises(ValueError, match=r"got \d+ bytes instead of .*; copy or save it again"),
    ):
        reader.read(list(plain.weights[:1]))
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"got .*model.safetensors \(not a regular file\)"):
        list_plain_tensors(folder)


# Parts of tensors, straight to their places; see test_reshard for whole models.

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=301)
MOMENT = "wte.weight/exp_avg"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, its model and optimizer."""
    model = GPT(SMALL)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(*torch.arange(16).view(2, 1, 8)).backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("run")
    path = save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    return path, model, optimizer


RUNS = {
    "one": [Run(5, 1000)],
    "columns": [Run(3, 8, 32, 290)],
    "backwards, with holes": [Run(7000, 90), Run(HOLE, 6), Run(64, 32, 64, 20)],
    "nothing": [],
}


@pytest.mark.parametrize("span", [64, 1 << 22])
@pytest.mark.parametrize("direct", [1, 1 << 16], ids=["direct", "picked"])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_the_elements_of_some_runs(saved, monkeypatch, runs, direct, span):
    monkeypatch.setattr(reader_module, "_DIRECT_BYTES", direct)
    monkeypatch.setattr(reader_module, "_SPAN_BYTES", span)
    path, _, _ = saved
    manifest = read_manifest(path)
    whole = whole_tensors(path)[1][MOMENT].reshape(-1)
    parts = [torch.empty(0)]
    for run in runs:
        for i in range(run.count):
            start = run.start + i * run.stride
            hole = run.start == HOLE
            parts.append(torch.zeros(run.length) if hole else whole[start : start + run.length])
    wanted = torch.cat(parts)
    found = [entry for entry in manifest.optimizer if entry.key == MOMENT]
    room = torch.full_like(wanted, 7.0)
    with TensorReader(path, manifest) as reader:
        new, same = reader.gather(found, runs), reader.gather(found, runs, room)
        other = reader.gather(found, runs, torch.empty(len(wanted) + 1))
    assert same is room
    for got in (new, same, other):
        assert torch.equal(got, wanted)


def test_rows_that_follow_one_another_are_read_at_once(saved, monkeypatch):
    """What is cut as it was saved costs one call, in however many runs."""
    calls, read = [], os.preadv
    path, _, _ = saved
    manifest = read_manifest(path)
    found = [entry for entry in manifest.optimizer if entry.key == MOMENT]
    with TensorReader(path, manifest) as reader:
        reader.places(found[0].file)
        monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or read(*args))
        reader.gather(found, [Run(0, 32, 32, 200)])
    assert len(calls) == 1


def test_moments_are_read_into_the_memory_they_have(saved):
    path, model, optimizer = saved
    places = {p: s["exp_avg"].data_ptr() for p, s in optimizer.state.items()}
    before = {p: s["exp_avg"].clone() for p, s in optimizer.state.items()}
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    load_checkpoint(path, model=model, optimizer=optimizer)
    for p, state in optimizer.state.items():
        assert state["exp_avg"].data_ptr() == places[p]
        assert torch.equal(state["exp_avg"], before[p])


def test_a_file_that_ends_early_is_named(saved, monkeypatch):
    path, _, _ = saved
    manifest = read_manifest(path)
    with TensorReader(path, manifest) as reader:
        reader.places(manifest.weights[0].file)
        monkeypatch.setattr(os, "preadv", lambda *args: 0)
        with pytest.raises(
            ValueError, match=r"TensorReader: expected transformer\.w.*, got ends at"
        ):
            reader.whole(manifest.weights[0])


def test_a_file_that_is_gone_is_named(saved, tmp_path):
    path, _, _ = saved
    manifest = read_manifest(path)
    with (
        TensorReader(tmp_path, manifest) as reader,
        pytest.raises(
            ValueError, match=r"got no such file in .*; the checkpoint is damaged, use another"
        ),
    ):
        reader.whole(manifest.weights[0])
