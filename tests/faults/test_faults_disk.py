"""Disks that are full, read-only or limited: a save fails visibly, and nothing older is lost."""

import errno
import os
import resource
import shutil
import stat
import subprocess
from collections import namedtuple

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.checkpoint.saver import Saver
from fastpar.files.runs import list_checkpoints
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=8, vocab_size=1031)  # 2 MB in all
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def disk(tmp_path):
    """disk(mb): a file system of this size."""
    mounted = []

    def mount(mb):
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={mb}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def train_and_save(run, steps, before=lambda step: None):
    """Saves after each of some steps, on one rank of several; (ok, errors) of each."""
    model = GPT(CONFIG)
    mesh = Mesh(device="cpu")
    parallelize(model, mesh, zero_stage=1)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    saver = Saver(run, model=model, optimizer=optimizer)
    found = []
    for step in range(1, steps + 1):
        x = torch.arange(8)[None]
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
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


@pytest.mark.parametrize("seen", [True, False], ids=["seen before", "in the middle"])
def test_a_full_disk(disk, monkeypatch, seen):
    """It has room for two; the third is refused before a byte is written, or fails on the way."""
    run = disk(9 if seen else 5)
    if not seen:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 10**9))

    def make_room(step):
        if step == 5:
            shutil.rmtree(list_checkpoints(run)[0])

    results = run_ranks(lambda: train_and_save(run, 5, make_room), 2)[0]
    words = "free disk space, or lower --keep-last" if seen else "No space left on device"
    check(results, (3, 4), words, run, (2, 5))


def test_a_disk_that_becomes_read_only(disk):
    run = disk(20)

    def remount(step):
        if step in (2, 3):
            kind = "ro" if step == 2 else "rw"
            subprocess.run(["mount", "-o", f"remount,{kind}", str(run)], check=True)

    results = run_ranks(lambda: train_and_save(run, 3, remount), 2)[0]
    check(results, (2,), "Read-only file system", run, (1, 3))


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
    """CIFS and FUSE say so in these words; names are as safe there as they can be."""
    fsync, numbers = os.fsync, (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
    for number, folders in (*((number, True) for number in numbers), (errno.EINVAL, False)):

        def refusing(descriptor, number=number, folders=folders):
            if not folders or stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", refusing)
            ((ok, errors),) = train_and_save(tmp_path / f"{number}-{folders}", 1)
        assert ok == folders
        assert folders or os.strerror(number) in errors[0]
