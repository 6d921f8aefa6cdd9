"""Processes of a run: results put together, a failure's last words, nobody left behind."""

import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from fastpar.compare import processes as compare_processes
from fastpar.compare.processes import RunFailed, measure, watch, without_paths
from fastpar.compare.results import Run
from fastpar.compare.worker import Spec
from fastpar.config.config import GPTConfig

SPEC = Spec({}, Run("dp", 1, 2, 1, 2, 1), "bible", "bytes")


def start(tmp_path, *programs):
    """Python processes, rank 0 with its output caught, and their logs."""
    processes, logs = [], []
    for rank, program in enumerate(programs):
        log = (tmp_path / f"log{rank}").open("w+")
        out = subprocess.PIPE if rank == 0 else log
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", program], stdout=out, stderr=log, text=True, bufsize=1
            )
        )
        logs.append(log)
    return processes, logs


def end(processes):
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


WELL = 'print(\'{"step": 1, "loss": 2.5, "seconds": 0.5}\'); print(\'a word\')'
FAILS = "raise RuntimeError('no room in /some/where/deep')"
WAITS = "import time; time.sleep(60)"
LOST = "import time; time.sleep(0.2); raise RuntimeError('Connection closed by peer')"


def test_steps_are_heard_and_words_go_to_the_log(tmp_path):
    heard = []
    processes, logs = start(tmp_path, WELL, "pass")
    watch(processes, logs, lambda *said: heard.append(said))
    assert heard == [(1, 2.5, 0.5)]
    logs[0].flush()
    assert (tmp_path / "log0").read_text() == "a word\n"
    end(processes)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ((FAILS,), r"^RuntimeError: no room in <path>$"),
        ((WELL, FAILS), r"^rank 1: RuntimeError: no room in <path>$"),
        ((WAITS, FAILS), r"^rank 1: RuntimeError: no room in <path>$"),
        ((LOST, FAILS), r"^rank 1: RuntimeError: no room in <path>$"),
        ((FAILS, LOST), r"^rank 0: RuntimeError: no room in <path>$"),
        (("import os; os.kill(os.getpid(), 9)", WELL), r"^rank 0: died of SIGKILL \(out of memo"),
        (("raise SystemExit(7)",), r"^exit status 7$"),
    ],
)
def test_the_rank_that_failed_is_named(tmp_path, monkeypatch, programs, message):
    monkeypatch.setattr(compare_processes, "GRACE_S", 0.3)
    processes, logs = start(tmp_path, *programs)
    with pytest.raises(RunFailed, match=message):
        watch(processes, logs, lambda *said: None)
    end(processes)


def test_a_silent_run_is_stopped(tmp_path):
    processes, logs = start(tmp_path, WAITS, WAITS)
    with pytest.raises(RunFailed, match=r"finished no step for 0\.2 s, and was stopped"):
        watch(processes, logs, lambda *said: None, silence_s=0.2)
    end(processes)


def test_no_rank_outlives_an_interrupt(monkeypatch):
    started = []

    def interrupted(processes, logs, say):
        started.extend(processes)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_processes, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(SPEC, lambda *said: None)
    assert [process.poll() for process in started] == [-9, -9]
    for process in started:
        if process.stdout:
            process.stdout.close()


def test_what_the_ranks_measured_is_merged():
    def of_rank(**measured):
        return Run("dp", 1, 2, 1, 2, 1, grad_norms=[1.0, 1.0], **measured)

    run = Run("dp", 1, 2, 1, 2, 1)
    first = of_rank(step_s=[0.1, 0.4], losses=[2.0, 3.0], rss_bytes=[100], wire_bytes=7)
    first.exposed_ms = 1.5
    second = of_rank(step_s=[0.3, 0.2], losses=[4.0, 5.0], rss_bytes=[200], wire_bytes=9)
    second.step_bytes = [50]
    run.merge([first, second])
    assert run.step_s == [0.3, 0.4], "the slowest rank counts"
    assert run.losses == [3.0, 4.0], "the mean over the ranks"
    assert (run.rss_bytes, run.step_bytes, run.wire_bytes) == ([100, 200], [50], 9)
    assert run.exposed_ms is None, "not known of one rank is not known"


def test_two_ranks_train_and_are_measured(tmp_path, monkeypatch):
    """The processes that `fastpar compare` starts; what it makes of them is a slow test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("In the beginning was the word, and it was short.\n" * 40)
    shape = asdict(GPTConfig(1, 2, 32, 16, 256, dropout=0.0))
    settings = {"shape": shape, "block_size": 16, "batch_size": 2, "lr": 1e-2, "epochs": 1,
                "epoch_steps": 2, "untimed_steps": 1, "seed": 7, "device": "cpu"}  # fmt: skip
    run = Run("zero1", 1, 2, 1, 1, 1)
    heard = []
    measure(Spec(settings, run, str(tmp_path / "text.txt"), "bytes"), lambda *s: heard.append(s[0]))
    assert heard == [1, 2]
    assert len(run.step_s) == len(run.losses) == len(run.grad_norms) == 2
    assert len(run.step_bytes) == len(run.rss_bytes) == 2
    assert run.wire_bytes > 4 * 4096
    assert run.exposed_ms >= 0


def test_errors_name_no_path():
    assert without_paths("no /a/b.py\n  here, a/b stays") == "no <path> here, a/b stays"
    assert len(without_paths("x" * 1000)) == 300
    assert without_paths("caf\u00e9") == "caf?"


def test_the_last_line_is_the_reason(tmp_path):
    started = time.monotonic()
    processes, logs = start(tmp_path, "import sys; print('Traceback', file=sys.stderr); 1/0")
    with pytest.raises(RunFailed, match=r"^ZeroDivisionError: division by zero$"):
        watch(processes, logs, lambda *said: None)
    assert time.monotonic() - started < 30
    end(processes)
