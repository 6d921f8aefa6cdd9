"""The launcher's parts on plain processes; whole runs with real ranks are in test_faults.py."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastpar.comm.ranks import FAILED, LOST_PEER, USER_MISTAKE
from fastpar.comm.watchdog import HUNG
from fastpar.files.runs import hold, release
from fastpar.train import launch


@pytest.fixture
def start(tmp_path):
    """Starts ranks that run a line of Python each, in sessions of their own as torch does."""
    processes = []
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "stderr.log").touch()

    def run(*codes):
        how = {"start_new_session": True, "stdout": subprocess.PIPE}
        for code in codes:
            command = [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"]
            processes.append(subprocess.Popen(command, **how))
        return processes

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


KILLED = "os.kill(os.getpid(), 9)"
NO_MEMORY = "Traceback ...\nRuntimeError: no memory\n"


@pytest.mark.parametrize(
    ("codes", "told", "words", "reason"),
    [
        (("", ""), None, "", None),
        # Rank 0 hangs, and rank 2 loses its peer.
        (("time.sleep(60)", KILLED, "time.sleep(0.1); sys.exit(3)"), None, "",
         "died of SIGKILL (out of memory?)"),
        # Rank 0 loses its peer and ends first.
        (("sys.exit(3)", "time.sleep(0.3); sys.exit(1)"), "RuntimeError: no memory\nx", NO_MEMORY,
         "failed: RuntimeError: no memory"),
        (("", "sys.exit(7)"), None, "", "failed: exit status 7"),
        # Who tells of a hang knows the cause.
        ((KILLED, f"time.sleep(0.3); sys.exit({HUNG})"), "watchdog: got rank=0 stuck", "",
         "failed: watchdog: got rank=0 stuck"),
        # A user's mistake is said once, by rank 0 or for it.
        ((f"sys.exit({USER_MISTAKE})",) * 2, None, "", ""),
        ((f"sys.exit({LOST_PEER})", f"sys.exit({USER_MISTAKE})"), None, "train: got y\n", ""),
    ],
)  # fmt: skip
def test_rank_1_is_named_and_the_others_are_stopped(
    start, tmp_path, capfd, monkeypatch, codes, told, words, reason
):
    monkeypatch.setattr(launch, "GRACE_S", 0.5 if "time.sleep(60)" in codes else 20.0)
    ranks = start(*codes)
    (tmp_path / "1" / "stderr.log").write_text("a warning\n" * (reason == "") + words)
    if told is not None:
        (tmp_path / "1" / "error.json").write_text(json.dumps({"message": {"message": told}}))
    began = time.monotonic()
    failures = launch._watch(ranks, [], tmp_path)
    assert time.monotonic() - began < 50
    cause = (FAILED, f"rank 1 (pid {ranks[1].pid}) {reason}")
    status = {None: (0, ""), "": (USER_MISTAKE, "")}.get(reason, cause)
    assert launch._report(ranks, [], tmp_path, failures) == status
    assert capfd.readouterr().err == words


# In short naps: a signal that comes just before a nap begins is answered after it.
UP = "print('up', flush=True)"
REST = "[time.sleep(0.05) for _ in range(1200)]"
WAIT = f"signal.signal(15, lambda *_: sys.exit(143)); {UP}; {REST}"


@contextlib.contextmanager
def watched(ranks, folder, *delays):
    """(signals, failures); SIGTERM comes so many seconds after what is done inside."""
    for rank in ranks:
        assert rank.stdout.readline() == b"up\n"
    with launch._forwarding_signals(ranks) as signals:
        failures = []
        yield signals, failures
        for delay in delays:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
        failures += launch._watch(ranks, signals, folder)


def test_signals_reach_the_ranks_and_that_for_a_save_ends_nothing(start, tmp_path):
    saves = "signal.signal(10, lambda *_: print('saves', flush=True))"
    ranks = start(*[f"{saves}; {WAIT}"] * 2)
    before = signal.getsignal(signal.SIGUSR1)
    with watched(ranks, tmp_path, 0.1) as (signals, failures):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            for rank in ranks:
                assert rank.stdout.readline() == b"saves\n"
        assert [rank.poll() for rank in ranks] == [None, None]
    assert signals == [signal.SIGTERM]
    assert [r.returncode for r in ranks] == [143, 143]
    assert launch._report(ranks, signals, tmp_path, failures) == (143, "")
    with launch.catching_save() as received:  # in a rank
        for n in (1, 2):
            signal.raise_signal(signal.SIGUSR1)
            assert len(received) == n
    assert signal.getsignal(signal.SIGUSR1) == before

    def body():  # outside of the main thread they are left alone
        with launch.catching_save() as saves, launch.catching_stop(loud=False) as stops:
            return saves, list(stops)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(body).result() == ([], [])


def test_a_second_signal_kills_unless_it_is_the_same_again(start, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "REPEAT_S", 0.15)
    ranks = start(f"signal.signal(15, signal.SIG_IGN); {UP}; time.sleep(60)")
    with watched(ranks, tmp_path, 0.1, 0.15, 0.5) as (signals, failures):
        pass
    assert signals == [signal.SIGTERM] * 2
    assert ranks[0].returncode == -9
    assert launch._report(ranks, signals, tmp_path, failures) == (143, "")
    assert "stopped at once, without saving" in capfd.readouterr().err


def test_files_of_the_current_folder_stand_in_for_no_module(tmp_path, monkeypatch, capfd):
    """A user's ./random.py beside the text: in ranks, and where ranks come from -m fastpar."""
    monkeypatch.chdir(tmp_path)
    for name in ("random", "select", "statistics", "tokenize"):
        Path(f"{name}.py").write_text("print('executed')\nraise SystemExit(7)\n")
    ranks = [
        launch._start_rank(0, ["--version"], {}, tmp_path / "rank"),
        subprocess.Popen([sys.executable, "-m", "fastpar", "--version"]),
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert "executed" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([FAILED, FAILED, 0], 0),
        ([FAILED, FAILED, FAILED, FAILED], FAILED),
        ([FAILED, USER_MISTAKE], USER_MISTAKE),
        ([128 + signal.SIGTERM], 128 + signal.SIGTERM),
    ],
)
def test_ranks_start_again_unless_nobody_failed(monkeypatch, tmp_path, capfd, statuses, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoints/step_000040").mkdir(parents=True)
    starts = []

    def one(arguments, nproc, threads, start):
        starts.append(start)
        status = statuses[len(starts) - 1]
        return status, "rank 1 died" if status == FAILED else ""

    monkeypatch.setattr(launch, "_run_ranks", one)
    assert launch.launch(["train"], 2, max_restarts=3, out="run") == expected
    assert [s["TORCHELASTIC_RESTART_COUNT"] for s in starts] == list("0123")[: len(statuses)]
    assert len({s["TORCHELASTIC_RUN_ID"] for s in starts}) == 1
    after = [*(f"restart {n} of 3, from step 40" for n in (1, 2, 3)), "all ranks stopped"]
    lines = [f"fastpar: rank 1 died; {text}\n" for text in after]
    assert capfd.readouterr().err == "".join(lines[: statuses.count(FAILED)])
    # In a folder that the run has chosen, which its lock tells, or from the start.
    for out in (None, "elsewhere"):
        assert launch._from_where(out, "night") == "from the start"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    (tmp_path / "runs/micro/checkpoints").mkdir(parents=True)
    hold("runs/micro")
    release()
    assert launch._from_where(None, "night") == "from the start"
    (tmp_path / "runs/micro/checkpoints/step_000012").mkdir()
    assert launch._from_where(None, "night") == "from step 12"


FIRST_SIGNAL = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from fastpar.train import launch
clock = [100.0]
launch.time.monotonic = lambda: clock[0]
before = signal.getsignal(signal.SIGINT)
with launch.catching_stop(loud=True) as received:
    signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGINT], received
    signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGINT], received
    clock[0] += 2.0
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("quits")
assert signal.getsignal(signal.SIGINT) == before
"""


def test_the_first_signal_in_a_rank_only_asks():
    """In a process of its own: in a shell's background job this one ignores SIGINT from birth."""
    done = subprocess.run([sys.executable, "-c", FIRST_SIGNAL], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "quits\n"), done.stderr
    assert done.stderr.count("finishing this step, then saving") == 1
