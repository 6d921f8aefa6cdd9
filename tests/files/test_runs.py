"""The folders of runs and of their checkpoints; one process at a time writes one."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fastpar.files import runs
from fastpar.files.runs import (
    LOCK,
    checkpoint_folder,
    find_run,
    hold,
    is_restart,
    list_checkpoints,
    release,
    run_id,
    step_of,
)

HOLD = """
import sys, time
from fastpar.files.runs import hold
hold({folder!r}, wait_s=0.0)
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def given_back():
    yield
    release()


@pytest.fixture
def holder():
    """Starts a process that holds a folder."""
    started = []

    def start(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD.format(folder=str(folder))],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_folder_that_another_process_has_is_refused_and_it_is_named(tmp_path, holder):
    process = holder(tmp_path)
    rule = (
        rf"train: expected a run that no other process writes, got out={tmp_path}, which process "
        rf"{process.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d has; wait for it, stop it, "
        "or choose another --out"
    )
    began = time.monotonic()
    with pytest.raises(ValueError, match=rule):
        hold(tmp_path, wait_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5
    holder(tmp_path.parent)  # another folder


def test_what_was_written_by_nobody_known(tmp_path, holder):
    holder(tmp_path)
    (tmp_path / LOCK).write_text("[1, 2")
    with pytest.raises(ValueError, match=r"which another process has; wait"):
        hold(tmp_path, wait_s=0.0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_death_of_any_kind_frees_it_and_a_restart_waits_for_it(tmp_path, holder, end):
    process = holder(tmp_path)
    killer = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({process.pid}, {end:d})"]
    )
    assert hold(tmp_path)
    killer.wait()
    known = json.loads((tmp_path / LOCK).read_text())
    assert known["pid"] == os.getpid()


def test_the_same_process_has_it_as_often_as_it_asks(tmp_path):
    assert hold(tmp_path, wait_s=0.0)
    assert hold(tmp_path / ".", wait_s=0.0)
    release()
    assert hold(tmp_path, wait_s=0.0)


def test_a_fork_does_not_keep_it(tmp_path, holder):
    """A worker can outlive its rank."""
    assert hold(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    try:
        release()
        holder(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Each has its own error for it; 524 is ENOTSUPP, which NFS and FUSE let through."""
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL, 524):

        def flock(descriptor, how, number=number):
            raise OSError(number, "no locks")

        monkeypatch.setattr(runs.fcntl, "flock", flock)
        assert not hold(tmp_path)
        runs.check_free(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        hold(tmp_path / "missing")


def test_a_restart_finds_the_folder_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        hold(tmp_path / name)
        release()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{name}-later")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / LOCK).write_text("{")
    assert find_run(tmp_path, "night") == tmp_path / "a"
    assert find_run(tmp_path, "a-later") == tmp_path / "b"
    assert find_run(tmp_path, "unknown") is None
    assert find_run(tmp_path, "") is None
    assert find_run(tmp_path / "missing", "night") is None
    hold(tmp_path / "a")  # with another id now
    assert find_run(tmp_path, "night") is None


def test_the_name_of_a_run(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-17")
    assert run_id() == "job-17"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ours = run_id()
    assert f"-{os.getppid()}-" in ours
    code = "from fastpar.files.runs import run_id; print(run_id())"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert theirs.stdout.strip() not in ("", "none", ours)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert run_id() == ""


def test_what_is_a_restart(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not is_restart()
    for count, expected in (("0", False), ("1", True), ("", False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert is_restart() == expected


def test_folders_are_listed_by_step(tmp_path):
    for step in (1_000_000, 3, 200):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    for other in (".step_000009.1a.tmp", "step_12", "step_0000x1", "else"):
        (tmp_path / "checkpoints" / other).mkdir()
    (tmp_path / "checkpoints" / "step_000010").touch()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 200, 1_000_000]
    assert list_checkpoints(tmp_path / "none") == []
