"""The launcher's parts on plain processes; whole runs with real ranks are in test_faults.py."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastpar.comm.watchdog import HUNG
from fastpar.files.runs import hold, release
from fastpar.train import launch
from fastpar.train.launch import (
    FAILED,
    LOST_PEER,
    USER_MISTAKE,
    _forwarding_signals,
    _from_where,
    _Rank,
    _report,
    _watch,
    catching_save,
    catching_stop,
    is_rank,
    launched_here,
    lost_peer,
)


@pytest.fixture
def start(tmp_path):
    """Starts ranks that run a line of Python each, in sessions of their own as torch does."""
    processes = []
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()

    def run(*codes):
        for code in codes:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"],
                    start_new_session=True,
                    stdout=subprocess.PIPE,
                )
            )
        return [_Rank(n, p, tmp_path / str(n)) for n, p in enumerate(processes)]

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_who_is_a_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "FASTPAR_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    assert not is_rank()
    assert not launched_here()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank()
    assert not launched_here()


def test_a_killed_rank_is_named_and_the_others_are_stopped(start, capfd, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.3)
    ranks = start("time.sleep(60)", "os.kill(os.getpid(), 9)", "time.sleep(0.1); sys.exit(3)")
    began = time.monotonic()
    _watch(ranks, [])
    assert time.monotonic() - began < 5
    assert [r.code for r in ranks] == [-9, -9, LOST_PEER]
    cause = f"rank 1 (pid {ranks[1].process.pid}) died of SIGKILL (out of memory?)"
    assert _report(ranks, []) == (FAILED, cause)
    assert capfd.readouterr().err == ""


def test_the_cause_is_named_though_it_is_seen_last(start, capfd):
    """Rank 0 loses its peer and ends first; the error file says why the peer failed."""
    ranks = start(f"sys.exit({LOST_PEER})", "time.sleep(0.3); sys.exit(1)")
    (ranks[1].folder / "stderr.log").write_text("Traceback ...\nRuntimeError: no memory\n")
    (ranks[1].folder / "error.json").write_text(
        json.dumps({"message": {"message": "RuntimeError: no memory\nx"}})
    )
    _watch(ranks, [])
    cause = f"rank 1 (pid {ranks[1].process.pid}) failed: RuntimeError: no memory"
    assert _report(ranks, []) == (FAILED, cause)
    assert capfd.readouterr().err == "Traceback ...\nRuntimeError: no memory\n"


def test_a_failure_without_last_words(start):
    ranks = start("", "sys.exit(7)")
    _watch(ranks, [])
    cause = f"rank 1 (pid {ranks[1].process.pid}) failed: exit status 7"
    assert _report(ranks, []) == (FAILED, cause)


@pytest.mark.parametrize("rank_0_says_it", [True, False])
def test_a_users_mistake_is_said_once(start, capfd, rank_0_says_it):
    code = f"sys.exit({USER_MISTAKE if rank_0_says_it else LOST_PEER})"
    ranks = start(code, f"sys.exit({USER_MISTAKE})")
    (ranks[1].folder / "stderr.log").write_text("a warning\ntrain: expected x, got y\n")
    _watch(ranks, [])
    assert _report(ranks, []) == (USER_MISTAKE, "")
    assert capfd.readouterr().err == ("" if rank_0_says_it else "train: expected x, got y\n")


def test_ranks_that_end_well(start, capfd):
    ranks = start("", "")
    _watch(ranks, [])
    assert _report(ranks, []) == (0, "")
    assert capfd.readouterr().err == ""


# In short naps: a signal that comes just before a nap begins is answered after it.
REST = "[time.sleep(0.05) for _ in range(1200)]"
WAIT = f"signal.signal(15, lambda *_: sys.exit(143)); print('up', flush=True); {REST}"


def test_a_signal_reaches_the_ranks(start):
    ranks = start(WAIT, WAIT)
    for rank in ranks:
        assert rank.process.stdout.readline() == b"up\n"
    with _forwarding_signals(ranks) as signals:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        _watch(ranks, signals)
    assert signals == [signal.SIGTERM]
    assert [r.code for r in ranks] == [143, 143]
    assert _report(ranks, signals) == (143, "")


def test_a_save_signal_reaches_the_ranks_and_ends_nothing(start):
    saves = "signal.signal(10, lambda *_: print('saves', flush=True))"
    stops = "signal.signal(15, lambda *_: sys.exit(0))"
    ranks = start(*[f"{saves}; {stops}; print('up', flush=True); {REST}"] * 2)
    for rank in ranks:
        assert rank.process.stdout.readline() == b"up\n"
    before = signal.getsignal(signal.SIGUSR1)
    with _forwarding_signals(ranks) as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            for rank in ranks:
                assert rank.process.stdout.readline() == b"saves\n"
        assert [rank.process.poll() for rank in ranks] == [None, None]
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        _watch(ranks, signals)
    assert signals == [signal.SIGTERM]
    assert _report(ranks, signals) == (0, "")
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_rank_notes_save_signals():
    before = signal.getsignal(signal.SIGUSR1)
    with catching_save() as received:
        assert received == []
        for n in (1, 2):
            signal.raise_signal(signal.SIGUSR1)
            assert len(received) == n
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_second_signal_kills_unless_it_is_the_same_again(start, capfd, monkeypatch):
    monkeypatch.setattr(launch, "REPEAT_S", 0.15)
    ranks = start("signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)")
    for rank in ranks:
        assert rank.process.stdout.readline() == b"up\n"
    with _forwarding_signals(ranks) as signals:
        for after in (0.1, 0.15, 0.5):
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)).start()
        _watch(ranks, signals)
    assert signals == [signal.SIGTERM] * 2
    assert ranks[0].code == -9
    assert _report(ranks, signals) == (143, "")
    assert "stopped at once; this stop has saved nothing" in capfd.readouterr().err


IGNORED = """
import os, re, signal, sys
from pathlib import Path
numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
for number in numbers:
    signal.signal(number, signal.SIG_IGN)
from fastpar.train import launch
watch = launch._watch
def look(ranks, *rest):
    for pid in (os.getpid(), *(rank.process.pid for rank in ranks)):
        mask = int(re.search(r"SigIgn:\\s*(\\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
        print(all(mask >> number - 1 & 1 for number in numbers))
    watch(ranks, *rest)
launch._watch = look
sys.exit(launch.launch(["--version"], 2))
"""


def test_files_of_the_current_folder_stand_in_for_no_module(tmp_path, monkeypatch, capfd):
    """A user's ./random.py beside the text: in ranks, and where ranks come from -m fastpar."""
    monkeypatch.chdir(tmp_path)
    for name in ("random", "select", "statistics", "tokenize"):
        Path(f"{name}.py").write_text("print('executed')\nraise SystemExit(7)\n")
    ranks = [
        launch._start_rank(0, ["--version"], {}, tmp_path / "rank").process,
        subprocess.Popen([sys.executable, "-m", "fastpar", "--version"]),
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert "executed" not in capfd.readouterr().out


def test_what_was_ignored_at_the_start_stays_ignored(tmp_path, monkeypatch):
    """SIGHUP under nohup, for one; in the launcher and in its ranks."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.split() if line in ("True", "False")] == ["True"] * 3
    assert not list(tmp_path.iterdir())


def test_of_two_that_failed_who_tells_of_a_hang_is_heard(start):
    ranks = start("os.kill(os.getpid(), 9)", f"time.sleep(0.3); sys.exit({HUNG})")
    (ranks[1].folder / "error.json").write_text(
        json.dumps({"message": {"message": "watchdog: got rank=0 stuck"}})
    )
    _watch(ranks, [])
    cause = f"rank 1 (pid {ranks[1].process.pid}) failed: watchdog: got rank=0 stuck"
    assert _report(ranks, []) == (FAILED, cause)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([FAILED, FAILED, 0], 0),
        ([FAILED, FAILED, FAILED, FAILED], FAILED),
        ([FAILED, USER_MISTAKE], USER_MISTAKE),
        ([128 + signal.SIGTERM], 128 + signal.SIGTERM),
        ([0], 0),
    ],
)
def test_all_ranks_are_started_again_unless_nobody_failed(
    monkeypatch, tmp_path, capfd, statuses, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoints/step_000040").mkdir(parents=True)
    starts = []

    def one(arguments, nproc, threads, start):
        starts.append(start)
        status = statuses[len(starts) - 1]
        return status, "rank 1 died" if status == FAILED else ""

    monkeypatch.setattr(launch, "_run_ranks", one)
    assert launch.launch(["train"], 2, max_restarts=3, out="run") == expected
    assert len(starts) == len(statuses)
    assert [s["TORCHELASTIC_RESTART_COUNT"] for s in starts] == list("0123")[: len(starts)]
    assert len({s["TORCHELASTIC_RUN_ID"] for s in starts}) == 1
    after = [*(f"restart {n} of 3, from step 40" for n in (1, 2, 3)), "all ranks stopped"]
    lines = [f"fastpar: rank 1 died; {text}\n" for text in after]
    assert capfd.readouterr().err == "".join(lines[: statuses.count(FAILED)])


def test_where_a_restart_goes_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert _from_where(None, "night") == "from the start"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    (tmp_path / "runs/micro").mkdir(parents=True)
    hold("runs/micro")
    release()
    assert _from_where(None, "night") == "from the start"
    (tmp_path / "runs/micro/checkpoints/step_000012").mkdir(parents=True)
    assert _from_where(None, "night") == "from step 12"
    assert _from_where("elsewhere", "night") == "from the start"


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


def test_signals_are_left_alone_outside_of_the_main_thread():
    seen = []

    def body():
        with catching_save() as received:
            seen.append(received)
        with catching_stop(loud=False) as received:
            seen.append(list(received))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [[], []]


def test_lost_peers_are_told_from_other_errors():
    gloo = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
    assert lost_peer(RuntimeError(f"Engine: expected every rank to take part, got ... ({gloo})"))
    shm = "all_reduce: expected every rank to live, got the end of rank 1; restart the run"
    assert lost_peer(RuntimeError(shm))
    assert not lost_peer(RuntimeError("out of memory"))


def test_shared_memory_still_says_what_is_looked_for():
    source = (Path(__file__).parents[2] / "csrc/shm_cpu.cpp").read_text()
    ours = [text for text in launch._LOST_PEER_TEXTS if text in source]
    assert len(ours) == 4
