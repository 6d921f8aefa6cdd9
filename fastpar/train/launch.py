"""The launcher of `fastpar train --nproc N`: starts N ranks on this machine.

Rank 0 writes to the terminal; the other ranks write to files, which are printed if one of them
fails. torchrun does not use this file.

[Note: stopping ranks] Each rank runs in a session of its own, so Ctrl-C reaches only the launcher,
which forwards it: every rank learns of the stop in the same step (see trainer.py), saves and ends.
A second Ctrl-C kills the ranks, but not within REPEAT_S, because a batch system signals launcher
and ranks at the same time, which must not interrupt the save.
When a rank dies, its peers fail in their next collective (gloo) or wait forever (NCCL on one
machine); after GRACE_S they are killed. Otherwise a run would hang until the timeout of its process
group (test_a_host_that_fails_in_its_step).
Ctrl-Z stops the ranks before the launcher, and they go on with it.
The watchdogs of the other ranks find a hanging rank (comm/watchdog.py). When the launcher dies, the
kernel kills its ranks (files/packages.py). A signal that was ignored at the start (SIGHUP under
nohup) stays ignored in launcher and ranks.
torchrun kills ranks 30 s after it has signalled them to stop; if torchrun itself is killed, its
ranks keep running; they also do while torchrun is stopped. It dies of SIGHUP under nohup unless
TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from fastpar.comm.ranks import (
    FAILED,
    GRACE_S,
    LOST_PEER,
    USER_MISTAKE,
    RankFailed,
    cause_of_death,
    culprit,
    make_store,
    rank_environment,
    start_rank,
    stopping_with,
    threads_per_rank,
)
from fastpar.files.packages import call_command
from fastpar.files.runs import RUNS, find_run, list_checkpoints, step_of

REPEAT_S = 1.0
POLL_S = 0.05
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to save and stop
SAVE_SIGNAL = signal.SIGUSR1  # save now and continue
STOPPED = tuple(128 + number for number in SIGNALS)  # exit statuses, as in a shell
Processes = Sequence[subprocess.Popen]


@contextlib.contextmanager
def _handlers(handlers: Mapping[int, Any]) -> Iterator[dict[int, Any]]:
    """Set signal handlers temporarily (in the main thread only); yields the former ones."""
    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.getsignal(number) for number in handlers} if main else {}
    for number in old:
        signal.signal(number, handlers[number])
    try:
        yield old
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def interrupt_kills() -> AbstractContextManager:
    """Let Ctrl-C end the process at once, for use around long imports.

    Python's own handler would raise inside the import, which prints a traceback, or loses the
    signal if the import catches all exceptions.
    """
    raises = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    return _handlers({signal.SIGINT: signal.SIG_DFL} if raises else {})


def _stop_signals() -> list[int]:
    """The SIGNALS that this process does not ignore (nohup ignores SIGHUP)."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def catching_stop(*, loud: bool, last: str = "this step") -> Iterator[list[int]]:
    """In a rank: record the first signal in a list; a second one has its usual effect.

    Args:
        loud: print a line at the first signal.
        last: what the run finishes before it stops, for that line.
    """
    text = f"\nfinishing {last}, then saving; repeat to quit at once\n".encode()
    received: list[int] = []
    first = 0.0

    def catch(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not received:
            first = time.monotonic()
            received.append(number)
            if loud:  # not print(), which the signal may have interrupted
                with contextlib.suppress(OSError):
                    os.write(2, text)
        elif time.monotonic() - first > REPEAT_S:
            signal.signal(number, old[number])
            signal.raise_signal(number)

    with _handlers(dict.fromkeys(_stop_signals(), catch)) as old:
        yield received


@contextlib.contextmanager
def catching_save() -> Iterator[list[int]]:
    """In a rank: record SAVE_SIGNAL in a list."""
    received: list[int] = []
    with _handlers({SAVE_SIGNAL: lambda number, frame: received.append(number)}):
        yield received


@contextlib.contextmanager
def _forwarding_signals(ranks: Processes) -> Iterator[list[int]]:
    """Forward this process's signals to the ranks; yields the list of received ones."""
    received: list[int] = []
    last = -REPEAT_S

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    def forward_stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if not received or time.monotonic() - last > REPEAT_S:
            last = time.monotonic()
            received.append(number)
            forward(number, frame)

    with _handlers({**dict.fromkeys(_stop_signals(), forward_stop), SAVE_SIGNAL: forward}):
        yield received


def launch(
    arguments: Sequence[str],
    nproc: int,
    *,
    threads: int | None = None,
    max_restarts: int = 0,
    out: str | None = None,
) -> int:
    """Run `python -m fastpar ARGUMENTS` as nproc ranks of one process group on this machine.

    Args:
        threads: CPU threads per rank; None: cores / nproc.
        max_restarts: how often to restart all ranks after one failed.
        out: the run folder; None: rank 0 chooses it.
    Returns:
        The exit status: 0; 2 for a user's mistake; 128 + signal after a stop by a signal; 1 after a
        failure, when one line on stderr has named the rank and the reason.
    """
    name = f"fastpar-{os.urandom(16).hex()}"
    for restart in range(max_restarts + 1):
        start = {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(restart)}
        status, cause = _run_ranks(arguments, nproc, threads, start)
        if status != FAILED:
            break
        after = "all ranks stopped"
        if restart < max_restarts:
            after = f"restart {restart + 1} of {max_restarts}, {_from_where(out, name)}"
        print(f"fastpar: {cause}; {after}", file=sys.stderr, flush=True)
    return status


def _from_where(out: str | None, name: str) -> str:
    """Where a restart continues; a damaged checkpoint may still lead to an earlier one."""
    run = Path(out) if out is not None else find_run(RUNS, name)
    checkpoints = list_checkpoints(run) if run is not None else []
    return f"from step {step_of(checkpoints[-1])}" if checkpoints else "from the start"


def _run_ranks(
    arguments: Sequence[str], nproc: int, threads: int | None, start: Mapping[str, str]
) -> tuple[int, str]:
    """Start all ranks once; return the exit status and, if it is FAILED, the cause."""
    with interrupt_kills():
        store = make_store()
    logs = Path(tempfile.mkdtemp(prefix="fastpar_"))
    ranks: list[subprocess.Popen] = []

    # The ranks inherit this and ignore SAVE_SIGNAL until they can save.
    with _handlers({SAVE_SIGNAL: signal.SIG_IGN}):
        try:
            for number in range(nproc):
                env = rank_environment(number, nproc, store.port, threads_per_rank(threads, nproc))
                ranks.append(_start_rank(number, arguments, {**env, **start}, logs / str(number)))
            with _forwarding_signals(ranks) as signals, stopping_with(ranks):
                failures = _watch(ranks, signals, logs)
                return _report(ranks, signals, logs, failures)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            shutil.rmtree(logs, ignore_errors=True)


def _start_rank(
    number: int, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.Popen:
    """Start a rank that writes its error to the folder; rank 0 also writes to the terminal."""
    folder.mkdir()
    variables = {**environment, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    with (folder / "stderr.log").open("w") as err:
        streams = {"stdout": subprocess.DEVNULL, "stderr": err} if number else {}
        return start_rank([*call_command("fastpar.__main__.run"), *arguments], variables, **streams)


def _watch(
    ranks: Sequence[subprocess.Popen], signals: Sequence[int], logs: Path
) -> list[RankFailed]:
    """Wait until every rank has ended; return the failed ones. See [Note: stopping ranks]."""
    running, killed, deadline = dict(enumerate(ranks)), set(), float("inf")
    failures: list[RankFailed] = []
    while running:
        for number, rank in list(running.items()):
            code = rank.poll()
            if code is None:
                if time.monotonic() > deadline or len(signals) > 1:
                    killed.add(number)
                    rank.kill()
                continue
            del running[number]
            if code not in (0, *STOPPED):
                why, follows = _why(code, logs / str(number)), code == LOST_PEER or number in killed
                failures.append(RankFailed(number, why, code, follows=follows))
                deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    return failures


def _why(code: int, folder: Path) -> str:
    """Why a rank failed, in one line."""
    text = ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no recorded exception
        text = json.loads((folder / "error.json").read_text())["message"]["message"]
    text = text.partition("\n")[0] or f"exit status {code}"
    return cause_of_death(code) or f"failed: {text}"


def _report(
    ranks: Sequence[subprocess.Popen],
    signals: Sequence[int],
    logs: Path,
    failures: list[RankFailed],
) -> tuple[int, str]:
    """The exit status of all ranks together and, if it is FAILED, the cause.

    Prints the stderr of the rank that failed first, unless it is rank 0, whose stderr is shown.
    """
    if not failures:
        return max(rank.returncode for rank in ranks), ""
    if signals:  # a rank died of it: before the first step, after the last one, or of the second
        print("fastpar: stopped at once, without saving", file=sys.stderr)
        return 128 + signals[0], ""
    first = culprit(failures)
    words = (logs / str(first.rank) / "stderr.log").read_text(errors="replace").rstrip()
    if first.code == USER_MISTAKE:
        if ranks[0].returncode != USER_MISTAKE:
            print(words.rpartition("\n")[2], file=sys.stderr)
        return USER_MISTAKE, ""
    if words:
        print(words, file=sys.stderr)
    return FAILED, f"rank {first.rank} (pid {ranks[first.rank].pid}) {first.reason}"
