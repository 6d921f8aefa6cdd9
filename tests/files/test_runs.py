"""The folders of runs and of their checkpoints, which one process at a time writes; the bar and its
lines; files that others made; where a user's files of every run are kept; processes of ours."""

import errno
import fcntl
import json
import os
import pty
import pwd
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from fastpar.data.sources import cache_folder
from fastpar.doctor.table import proofs_folder
from fastpar.files import plain_files, runs
from fastpar.files.packages import call_command

HOLD = """
import sys, time
from fastpar.files.runs import hold
hold({folder!r}, wait_s=0.0)
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture
def holder():
    """Starts a process that holds a folder."""
    started = []

    def start(folder):
        code = HOLD.format(folder=str(folder))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    runs.release()
    for process in started:
        process.kill()
        process.communicate()


def test_a_folder_that_another_process_has_is_refused_and_it_is_named(tmp_path, holder):
    process = holder(tmp_path)
    rule = rf"expected a run that no other process writes, got out={tmp_path}, used by process "
    rule += rf"{process.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d; wait for it, stop it"
    began = time.monotonic()
    with pytest.raises(ValueError, match=rule):
        runs.hold(tmp_path, wait_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5
    (tmp_path / runs.LOCK).write_text("[1, 2")  # by nobody known
    with pytest.raises(ValueError, match=r"used by another process; wait"):
        runs.hold(tmp_path, wait_s=0.0)
    assert runs.hold(tmp_path.parent, wait_s=0.0)  # another folder


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_death_of_any_kind_frees_it_and_a_restart_waits_for_it(tmp_path, holder, end):
    process = holder(tmp_path)
    threading.Timer(0.5, process.send_signal, (end,)).start()
    assert runs.hold(tmp_path)
    known = json.loads((tmp_path / runs.LOCK).read_text())
    assert known["pid"] == os.getpid()
    for again in (tmp_path, tmp_path / "."):  # it has it as often as it asks
        assert runs.hold(again, wait_s=0.0)
    child = os.fork()  # which does not keep it: a worker can outlive its rank
    if child == 0:
        time.sleep(100)
        os._exit(0)
    try:
        runs.release()
        holder(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Each has its own error for it; 524 is ENOTSUPP, which NFS and FUSE let through."""
    with pytest.raises(FileNotFoundError):
        runs.hold(tmp_path / "missing")
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL, 524):
        no_locks = mock.Mock(side_effect=OSError(number, "no locks"))
        monkeypatch.setattr(runs.fcntl, "flock", no_locks)
        assert not runs.hold(tmp_path)
        runs.check_free(tmp_path)


def test_a_restart_finds_the_folder_of_its_run(tmp_path, holder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.hold(tmp_path / name)
        runs.release()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{name}-later")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / runs.LOCK).write_text("{")
    for name, folder in (("night", "a"), ("a-later", "b"), ("unknown", None), ("", None)):
        assert runs.find_run(tmp_path, name) == (folder and tmp_path / folder)
    assert runs.find_run(tmp_path / "missing", "night") is None
    runs.hold(tmp_path / "a")  # with another id now
    assert runs.find_run(tmp_path, "night") is None


def test_names_of_runs_and_restarts(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-17")
    assert runs.run_id() == "job-17"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ours = runs.run_id()
    assert f"-{os.getppid()}-" in ours
    code = "from fastpar.files.runs import run_id; print(run_id())"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert theirs.stdout.strip() not in ("", "none", ours)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert runs.run_id() == ""
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not runs.is_restart()
    for count, expected in (("0", False), ("1", True), ("", False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert runs.is_restart() == expected


def test_folders_are_listed_by_step(tmp_path):
    for step in (1_000_000, 3, 200):
        runs.checkpoint_folder(tmp_path, step).mkdir(parents=True)
    for other in (".step_000009.1a.tmp", "step_12", "step_0000x1", "else"):
        (tmp_path / "checkpoints" / other).mkdir()
    (tmp_path / "checkpoints" / "step_000010").touch()
    assert [runs.step_of(path) for path in runs.list_checkpoints(tmp_path)] == [3, 200, 1_000_000]
    assert runs.list_checkpoints(tmp_path / "none") == []


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(runs, "_INTERVAL_S", 0.0)
    progress = runs.Progress(100, 20, bar=False)
    time.sleep(0.01)
    for step in range(21, 24):
        progress.update(step, "loss 1.000")
    progress.say("saved")
    monkeypatch.setattr(progress._tqdm, "mininterval", 60.0)
    progress.update(25, "loss 2.000")
    progress.close()
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 21/100, eta [\d:?]+, loss 1.000", first)
    assert [line.partition(",")[0] for line in lines] == [
        "step 22/100", "step 23/100", "saved", "step 25/100",
    ]  # fmt: skip
    assert [runs.duration(s) for s in (0, 61, 3723, -2)] == ["0:00", "1:01", "1:02:03", "0:00"]
    assert runs.smoothed([9.0, 7.0, 5.0, 3.0, 1.0], 2) == [9.0, 7.0, 5.0, 3.0, 1.0]  # no lag
    assert runs.smoothed([1.0, 6.0, 2.0, 6.0], 1) == pytest.approx([1.0, 3.0, 14 / 3, 6.0])
    assert runs.smoothed([], 3) == []


def test_a_bar_on_a_terminal_that_knows_its_size(capfd, monkeypatch):
    progress = runs.Progress(10, 2, bar=True)
    progress.update(3, "loss 1.250")
    progress.say("saved")
    progress.close()
    out, err = capfd.readouterr()
    assert out == "saved\n"
    assert "3/10" in err
    assert "loss 1.250" in err
    for rows, bar in ((40, True), (0, False)):
        parent, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 100, 0, 0))
        with os.fdopen(terminal, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(runs.sys, "stderr", stderr)
            assert runs._can_show_bar() == bar
        os.close(parent)


def test_plain_names():
    for name in ("model.safetensors", "a", "A-b_c.1", "0", "x" * 255):
        assert plain_files.is_plain_name(name), name
    for name in (
        *("", ".", "..", "../a", "a/b", "/etc/passwd", ".hidden", "a\0", "a\n", "a b", "\u00e4"),
        *("-x", "x" * 256, "a\\b", None, 3, ["a"]),
    ):
        assert not plain_files.is_plain_name(name), name


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the length of a socket's path is limited
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for name, words in (
        *((name, "not a regular file") for name in ("folder", "pipe", "socket")),
        *((name, "not a file name") for name in ("a\0b", "\ud800")),
        ("link", "a symbolic link"),
    ):
        with pytest.raises(OSError, match=words):
            plain_files.open_plain(name)
    with pytest.raises(OSError, match="not a regular file"):
        plain_files.open_plain("to_pipe", links=True)
    assert plain_files.read_plain("link", 3, links=True) == b"abc"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        plain_files.read_plain("file", 2)
    with pytest.raises(FileNotFoundError) as error:
        plain_files.open_plain("none")
    assert plain_files.reason(error.value) == "no such file"


def test_what_is_not_an_object(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match=r"^no such file$"):
        plain_files.read_object(path)
    with pytest.raises(ValueError, match=r"^not a regular file$"):
        plain_files.read_object(tmp_path)
    for content, problem in (
        (b"", "not JSON: Expecting value"), (b'{"a": 1', "not JSON: Expecting ',' delimiter"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 at byte 0"), (b"[1]", "not a JSON object but list"),
        (b"1", "not a JSON object but int"), (b"[" * 100000, "nested too deeply"),
    ):  # fmt: skip
        path.write_bytes(content)
        for parse in (
            lambda content=content: plain_files.parse_object(content),
            lambda: plain_files.read_object(path),
        ):
            with pytest.raises(ValueError, match=problem):
                parse()
    assert plain_files.shown("\n\u00e4") == r"'\n\xe4'"
    assert len(plain_files.shown("x" * 1000)) == 80


def test_a_user_without_a_home(monkeypatch):
    """As in a container that runs under a number: neither HOME nor an entry in passwd."""
    for name in ("HOME", "XDG_CACHE_HOME", "FASTPAR_PROOFS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    for folder in (plain_files.user_cache, proofs_folder, partial(cache_folder, None)):
        with pytest.raises(ValueError, match="user_cache: expected a home folder, got none; set"):
            folder()
    monkeypatch.setenv("HOME", "/h")
    assert plain_files.user_cache() == Path("/h/.cache/fastpar")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert plain_files.user_cache() == Path("/x/fastpar")


CHAIN = """
import subprocess, time
from fastpar.files.packages import call_command

def launcher():
    subprocess.Popen(call_command("chain.rank"))
    time.sleep(60)

def rank():
    subprocess.Popen(call_command("chain.helper"))
    time.sleep(60)

def helper():
    print("up", flush=True)
    time.sleep(60)
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the kernel has no prctl")


@linux_only
def test_a_killed_launcher_leaves_no_rank_nor_its_helper(tmp_path, monkeypatch):
    (tmp_path / "chain.py").write_text(CHAIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = subprocess.Popen(call_command("chain.launcher"), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout.readline() == "up\n"
    launcher.kill()
    assert launcher.communicate(timeout=10) == ("", None)  # the pipe ends with the last of them


@linux_only
def test_a_process_whose_parent_ended_before_it_could_follow_ends_at_once():
    ours = call_command("fastpar.__main__.run")  # of this process, not of the one that starts it
    code = f"import subprocess; print(subprocess.run({ours!r}).returncode)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{-signal.SIGKILL}\n"
