"""Processes of ours: they end with who started them."""

import signal
import subprocess
import sys

import pytest

from fastpar.files.packages import call_command

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
