"""Parts of a checkpoint's tensors, read to their places; see test_reshard for whole models."""

import os

import pytest
import torch
from saved import whole_tensors

from fastpar import GPT, AdamW, GPTConfig
from fastpar.checkpoint import tensor_reader
from fastpar.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from fastpar.checkpoint.manifest import read_manifest
from fastpar.checkpoint.tensor_reader import TensorReader
from fastpar.sharding.ranges import HOLE, Run

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=301)
KEY = "wte.weight/exp_avg"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, its model and optimizer."""
    model = GPT(CONFIG)
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
    monkeypatch.setattr(tensor_reader, "_DIRECT_BYTES", direct)
    monkeypatch.setattr(tensor_reader, "_SPAN_BYTES", span)
    path, _, _ = saved
    manifest = read_manifest(path)
    whole = whole_tensors(path)[1][KEY].reshape(-1)
    parts = [torch.empty(0)]
    for run in runs:
        for i in range(run.count):
            start = run.start + i * run.stride
            hole = run.start == HOLE
            parts.append(torch.zeros(run.length) if hole else whole[start : start + run.length])
    wanted = torch.cat(parts)
    found = [entry for entry in manifest.optimizer if entry.key == KEY]
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
    found = [entry for entry in manifest.optimizer if entry.key == KEY]
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
