"""Saves in the background: what is committed, when, and what a failure leaves."""

import os
import shutil
import threading
import time
from collections import namedtuple

import pytest
import torch
from saved import bits

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint import saver as saver_module
from fastpar.checkpoint.commands import examine
from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.checkpoint.restore import load_checkpoint, read_state
from fastpar.checkpoint.saver import Saver
from fastpar.files.runs import list_checkpoints
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=131)


class Rank:
    """A model that trains, and its saver."""

    def __init__(self, run, stage=0, tp=1, **options):
        self.mesh = Mesh(tp=tp, device="cpu")
        self.model = GPT(CONFIG)
        parallelize(self.model, self.mesh, zero_stage=stage)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.saver = Saver(run, model=self.model, optimizer=self.optimizer, **options)

    def step(self):
        x = torch.arange(8)[None]
        self.model(x, x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until it is set."""
    event, real = threading.Event(), saver_module._write_tensors

    def write(*args):
        assert event.wait(30)
        return real(*args)

    monkeypatch.setattr(saver_module, "_write_tensors", write)
    return event


@pytest.mark.parametrize(("ranks", "stage", "tp"), [(1, 0, 1), (2, 3, 1), (2, 0, 2)])
def test_training_goes_on_and_the_checkpoint_is_of_its_step(tmp_path, gate, ranks, stage, tp):
    def work():
        rank = Rank(tmp_path, stage, tp)
        rank.step()
        assert rank.saver.save(1, {"a": [1]})
        assert rank.saver.busy
        assert rank.saver.unsettled
        expected = {k: v.clone() for k, v in rank.model.state_dict().items()}
        for _ in range(3):
            rank.step()
        assert not list_checkpoints(tmp_path)
        rank.saver._capture.engine.all_reduce_scalars(torch.zeros(1, dtype=torch.float64))
        gate.set()
        result = rank.saver.settle()
        assert not rank.saver.busy
        return result, expected

    result, expected = run_ranks(work, ranks)[0]
    assert result.ok
    assert result.errors == ()
    assert (result.step, result.path) == (1, list_checkpoints(tmp_path)[0])
    assert result.seconds > result.pause_ms / 1e3 > 0
    verify_checkpoint(result.path)
    assert read_state(result.path)["a"] == [1]
    model = GPT(CONFIG, seed=9)
    load_checkpoint(result.path, model=model)
    assert all(torch.equal(p, expected[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", ["skip", "wait"])
def test_a_second_save_while_one_is_running(tmp_path, gate, overlap, ranks):
    def work():
        rank = Rank(tmp_path, overlap=overlap)
        rank.step()
        assert rank.saver.save(1, {})
        rank.step()
        if overlap == "wait":
            gate.set()
        began = rank.saver.save(2, {})
        first = rank.saver.last
        rank.saver._capture.engine.all_reduce_scalars(torch.zeros(1, dtype=torch.float64))
        gate.set()
        return began, first and first.step, rank.saver.settle().step

    got = run_ranks(work, ranks)
    steps = [int(p.name.removeprefix("step_")) for p in list_checkpoints(tmp_path)]
    if overlap == "skip":
        assert got == [(False, None, 1)] * ranks
        assert steps == [1]
    else:
        assert got == [(True, 1, 2)] * ranks
        assert steps == [1, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_the_full_disk_of_one_rank_is_told_to_all(tmp_path, monkeypatch, victim):
    real = saver_module._write_tensors

    def write(folder, step, items):
        if step == 2 and items[-1].file.startswith(f"optimizer-{victim + 1:05d}"):
            raise OSError(28, "No space left on device")
        return real(folder, step, items)

    monkeypatch.setattr(saver_module, "_write_tensors", write)

    def work():
        rank = Rank(tmp_path, stage=1)
        results = []
        for step in (1, 2, 3):
            rank.step()
            rank.saver.save(step, {})
            results.append(rank.saver.settle())
        assert rank.saver.settle() is None
        return [(r.ok, r.errors) for r in results]

    said = (f"rank {victim}: [Errno 28] No space left on device",)
    assert run_ranks(work, 2) == [[(True, ()), (False, said), (True, ())]] * 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000001", "step_000003"]


def test_a_disk_without_room_is_seen_before(tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1000))

    def work():
        rank = Rank(tmp_path)
        rank.step()
        assert rank.saver.save(1, {})
        return rank.saver.settle()

    for result in run_ranks(work, 2):
        assert not result.ok
        assert "rank 0: expected 4 MB free for a checkpoint, got 0 MB in " in result.errors[0]
        assert result.errors[0].endswith("make room, or lower --keep-last")
    assert os.listdir(tmp_path / "checkpoints") == []


def test_what_is_kept(tmp_path):
    rank = Rank(tmp_path, keep_last=2, keep_every=4, asynchronous=False)
    for step in range(1, 10):
        rank.step()
        rank.saver.save(step, {})
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["step_000004", "step_000008", "step_000009"]
    assert os.readlink(tmp_path / "latest") == "checkpoints/step_000009"


@pytest.mark.parametrize("flag", [2, 1 << 20], ids=["exchanged", "in two steps"])
def test_a_step_that_is_there_already(tmp_path, monkeypatch, flag):
    monkeypatch.setattr("fastpar.files.runs._EXCHANGE", flag)
    rank = Rank(tmp_path, asynchronous=False)
    rank.step()
    for number in (1, 2):
        rank.saver.save(7, {"number": number})
        assert read_state(rank.saver.last.path)["number"] == number
        verify_checkpoint(rank.saver.last.path)
    assert os.listdir(tmp_path / "checkpoints") == ["step_000007"]


def test_parts_of_another_attempt_are_never_taken(tmp_path):
    rank = Rank(tmp_path, asynchronous=False)
    rank.step()
    stale = tmp_path / "checkpoints" / ".step_000001.5.tmp"
    stale.mkdir(parents=True)
    (stale / "part-00000.json").write_text("{}")
    rank.saver.save(1, {})
    assert rank.saver.last.ok
    assert os.listdir(tmp_path / "checkpoints") == ["step_000001"]


def test_the_memory_can_be_made_before(tmp_path):
    rank = Rank(tmp_path, asynchronous=False)
    rank.step()
    rank.saver.prepare()
    rank.saver.save(1, {})
    first = [block.data_ptr() for block in rank.saver._capture._blocks]
    rank.step()
    rank.saver.save(2, {})
    assert [block.data_ptr() for block in rank.saver._capture._blocks] == first
    one, two = list_checkpoints(tmp_path)
    assert bits(one) != bits(two)


def test_a_module_of_ones_own(tmp_path):
    """And weights alone: no optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model(torch.rand(5, 3))
    saver = Saver(tmp_path, model=model, asynchronous=False)
    saver.save(1, {})
    again = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    load_checkpoint(saver.last.path, model=again)
    expected = model.state_dict()
    assert all(torch.equal(b, expected[name]) for name, b in again.state_dict().items())


def test_transformers_model_comes_back_with_its_own_reader(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=33)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = AdamW(model.parameters())
    x = torch.arange(8)[None]
    model(x, labels=x).loss.backward()
    optimizer.step()
    saver = Saver(tmp_path, model=model, optimizer=optimizer, asynchronous=False)
    saver.save(1, {})
    assert examine(saver.last.path).damage == []
    again = transformers.GPT2LMHeadModel.from_pretrained(saver.last.path)
    expected = model.state_dict()
    assert all(torch.equal(b, expected[name]) for name, b in again.state_dict().items())


def test_a_state_that_is_not_json_fails_on_all_ranks(tmp_path):
    """One that raised on rank 0 left the others waiting."""

    def rank():
        mine = Rank(tmp_path)
        mine.step()
        mine.saver.save(1, {"x": torch.ones(2)})
        return mine.saver.settle().errors

    words = "rank 0: expected a state of JSON values, got Object of type Tensor is not JSON"
    for (error,) in run_ranks(rank, 2):
        assert error.startswith(words)


def test_a_save_that_raised_leaves_nothing_to_settle(tmp_path, monkeypatch):
    rank = Rank(tmp_path)
    rank.step()
    with monkeypatch.context() as patched:
        patched.setattr(rank.saver._capture, "take", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rank.saver.save(1, {})
    assert not rank.saver.busy
    assert rank.saver.settle() is None
    assert rank.saver.save(2, {})
    assert rank.saver.settle().ok


def test_unknown_overlap(tmp_path):
    with pytest.raises(ValueError, match=r"Saver: expected overlap to be .*, got overlap='later'"):
        Saver(tmp_path, model=torch.nn.Linear(1, 1), overlap="later")


def test_a_part_is_seen_when_all_of_it_is_there(tmp_path, monkeypatch):
    """Rank 0 looks for the others' parts while they are being written."""

    def write(path, content, f=saver_module._write_flushed):
        if path.name.startswith("part-00001"):
            path.write_bytes(content[:10])
            time.sleep(0.2)
        f(path, content)

    monkeypatch.setattr(saver_module, "_write_flushed", write)

    def work():
        model = parallelize(GPT(CONFIG), Mesh(device="cpu"))
        saver = Saver(tmp_path, model=model)
        saver.save(1, {})
        return saver.settle().errors

    assert run_ranks(work, 2) == [(), ()]
