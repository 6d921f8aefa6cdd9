"""A save that fails, or is killed, at any of its file operations leaves a whole checkpoint, also
where files are limited. checkpoint/test_saver.py has a full disk."""

import errno
import json
import os
import resource
import shutil
import stat
import time
from pathlib import Path

import pytest
import torch
from cells import slow
from fault_points import Countdown, watching
from fault_runs import TRAIN, curve, finish, torchrun
from saved import bits

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.reader import newest_checkpoint, verify_checkpoint
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import Saver
from fastpar.files.runs import list_checkpoints, step_of

DRIVER = str(Path(__file__).parents[1] / "support" / "fault_driver.py")


def trained(steps):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32), seed=1)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        train_step(model, optimizer)
    return model, optimizer


def train_step(model, optimizer):
    x = torch.randint(0, 32, (2, 8))
    model(x, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def refuse():
    raise OSError(errno.EIO, "the disk is gone")


@pytest.mark.parametrize(("again", "every"), [(True, 5), slow(True, 1), slow(False, 1)])
def test_a_save_that_fails_at_any_operation(tmp_path, monkeypatch, again, every):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted, but not waited for
    model, optimizer = trained(1)
    base, known = tmp_path / "base", {}
    saver = Saver(base, model=model, optimizer=optimizer, asynchronous=False)
    for number in (1, 2, 3) if again else (1, 2):
        train_step(model, optimizer)
        assert saver.save(number, {})
        known[number] = bits(saver.last.path)
    failed, n = 0, 1 - every
    while True:
        n += every
        run = tmp_path / str(n)
        shutil.copytree(base, run, symlinks=True)
        saver = Saver(run, model=model, optimizer=optimizer, keep_last=2, asynchronous=False)
        train_step(model, optimizer)
        points = Countdown(n, refuse)
        with watching(points):
            saver.save(3, {"n": n})
        result = saver.last
        failed += not result.ok
        newest = newest_checkpoint(run, say=lambda line: pytest.fail(line))
        found = step_of(newest)
        if result.ok or again:  # the one of this step stays until the new one has its name
            assert found == 3
        elif found == 3:  # it failed after the commit
            assert "fsync" in points.names[n - 1] or "latest" in points.names[n - 1]
        else:
            assert found == 2
            assert bits(newest) == known[2]
        other, theirs = trained(0)
        state = load_checkpoint(newest, model=other, optimizer=theirs)
        assert state["step"] == found
        assert saver.save(4, {"n": n})
        assert saver.last.ok, saver.last
        folder = run / "checkpoints"
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert step_of(newest_checkpoint(run)) == 4
        assert len(list_checkpoints(run)) == 2
        if len(points.names) < n:
            break
    assert n > 40, points.names
    assert 30 // every < failed < n


LENGTH = ("--batch-size=12", "--keep-last=2", "--zero=1", "--eval-every=0")
INTERVAL = 10
KILLS = [(1, "op", 20), (0, "op", 66), (1, "step", 17)]  # a save has 70 operations of rank 0


@pytest.mark.slow
def test_three_kills_inside_and_outside_of_saves(here, start):
    """Each costs at most an interval, and the run ends as the one that was left alone."""
    settings = (*TRAIN, *LENGTH, "--max-steps=40", f"--save-every={INTERVAL}")
    command = torchrun(2, "--max-restarts=4")[:-2]
    code, _, err = finish(start(*command, DRIVER, "[]", *settings, "--out=whole"), timeout_s=280)
    assert code == 0, err
    Path("log.txt").unlink()
    last = {"LAST_KILL": str(time.time() + 600)}
    began = start(*command, DRIVER, json.dumps(KILLS), *settings, "--out=r", env=last)
    code, out, err = finish(began, timeout_s=280)
    assert code == 0, err
    assert "damaged" not in out
    starts = [s["step"] for s in json.loads(Path("r/config.json").read_text())["starts"]]
    killed, begun = 0, 0
    for line in Path("log.txt").read_text().splitlines():
        word, number = line.split()
        if word == "save":
            begun = int(number)
            continue
        killed += 1
        assert 0 <= begun - starts[killed] <= INTERVAL, starts
        begun = starts[killed]
    assert killed == len(KILLS) == len(starts) - 1
    a, b = (list_checkpoints(run)[-1] for run in ("r", "whole"))
    assert a.name == b.name
    assert bits(a) == bits(b)
    assert curve("r") == curve("whole")


# A limit, folders that are not flushed: a save fails visibly, and nothing older is lost
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=8, vocab_size=1031)  # 2 MB in all


def train_and_save(run, steps, before=lambda step: None):
    """Saves after each of some steps; (ok, errors) of each."""
    model = GPT(CONFIG)
    mesh = Mesh(device="cpu")
    parallelize(model, mesh, zero_stage=1)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    saver = Saver(run, model=model, optimizer=optimizer)
    found = []
    for step in range(1, steps + 1):
        train_step(model, optimizer)
        if mesh.is_main:
            before(step)
        saver.save(step, {})
        result = saver.settle()
        found.append((result.ok, result.errors))
    return found


def check(results, failed, words, run, left):
    """Some saves failed with these words, the others are whole."""
    for step, (ok, errors) in enumerate(results, 1):
        assert (ok, any(words in error for error in errors)) == (step not in failed, step in failed)
    assert sorted(os.listdir(run / "checkpoints")) == [f"step_{step:06d}" for step in left]
    for path in list_checkpoints(run):
        verify_checkpoint(path)


@pytest.mark.parametrize("nbytes", [100, 5000, 400_000])
def test_a_limit_in_the_middle_of_a_save(tmp_path, nbytes):
    """A quota does the same: no file of this process may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(step):
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes if step == 2 else soft, hard))

    try:
        results = train_and_save(tmp_path, 3, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check(results, (2,), "File too large", tmp_path, (1, 3))


def test_a_file_system_that_flushes_no_folders(tmp_path, monkeypatch):
    """CIFS and FUSE say so in these words. A file must be flushed; a disk's own error counts."""
    fsync, numbers = os.fsync, (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
    wrong = (errno.EINVAL, False), (errno.EIO, True)
    for number, folders in (*((number, True) for number in numbers), *wrong):

        def refusing(descriptor, number=number, folders=folders):
            if not folders or stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", refusing)
            ((ok, errors),) = train_and_save(tmp_path / f"{number}-{folders}", 1)
        assert ok == ((number, folders) not in wrong)
        assert ok or os.strerror(number) in errors[0]
