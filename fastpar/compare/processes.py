"""The processes of one run: started, watched, ended, and their measurements merged into the run.

[Note: who is stopped] The ranks have sessions of their own, so Ctrl-C reaches the command alone,
which kills them. A rank that fails leaves the others waiting: after GRACE_S they are killed. So is
a run that finishes no step for SILENCE_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO

from fastpar.compare.results import Run
from fastpar.compare.worker import Spec, result_path
from fastpar.train.launch import lost_peer, rank_environment

GRACE_S = 5.0
SILENCE_S = 300.0
_POLL_S = 0.05
_REASON_LENGTH = 300  # characters of an error

StepListener = Callable[[int, float, float], None]  # step, loss of rank 0, seconds


class RunFailed(RuntimeError):  # noqa: N818 - of a strategy, not of the command
    """A run did not end well; the text is the reason, in one line."""


def measure(spec: Spec, on_step: StepListener) -> None:
    """Trains spec.run in fresh processes and fills it in.

    Raises:
        RunFailed: a rank failed or finished no step.
    """
    run, start = spec.run, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastpar_") as name:
        folder = Path(name)
        spec.save(folder)
        _start_and_watch(folder, run, on_step)
        results = (result_path(folder, rank).read_text() for rank in range(run.ranks))
        run.merge([Run(**json.loads(text)) for text in results])
    run.seconds = round(time.monotonic() - start, 3)


def _start_and_watch(folder: Path, run: Run, on_step: StepListener) -> None:
    import torch.distributed as dist

    # Held here: its port is taken before a rank starts.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SILENCE_S)
    )
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context((folder / f"log{r}").open("w+")) for r in range(run.ranks)]
        processes: list[subprocess.Popen] = []
        for rank, log in enumerate(logs):
            environment = rank_environment(rank, run.ranks, store.port, run.threads)
            process = subprocess.Popen(
                [sys.executable, "-m", "fastpar.compare.worker", str(folder)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log if rank else subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
            stack.callback(_end, process)  # whatever happens, no rank outlives this
            processes.append(process)
        watch(processes, logs, on_step)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def watch(
    processes: Sequence[subprocess.Popen],
    logs: Sequence[IO[str]],
    on_step: StepListener,
    silence_s: float | None = None,
) -> None:
    """Waits until every rank has ended well; see [Note: who is stopped].

    Raises:
        RunFailed: names the rank that failed first and its last words.
    """
    silence_s = SILENCE_S if silence_s is None else silence_s
    reader = _OutputReader(processes[0].stdout, logs[0], on_step)
    failed: list[int] = []  # ranks, the first first
    deadline = float("inf")
    while True:
        running = [process for process in processes if process.poll() is None]
        failed += [r for r, p in enumerate(processes) if p.returncode and r not in failed]
        now = time.monotonic()
        if failed:
            deadline = min(deadline, now + GRACE_S)
        if not running or now > deadline:
            break
        if not failed and now - reader.last > silence_s:
            raise RunFailed(f"finished no step for {silence_s:g} s, and was stopped")
        time.sleep(_POLL_S)
    for process in running:
        process.kill()
    reader.join()
    if failed:
        reasons = {rank: _reason(processes[rank], logs[rank]) for rank in failed}
        # A rank that lost a peer is not the cause.
        causes = [rank for rank in failed if not lost_peer(RuntimeError(reasons[rank]))]
        rank = (causes or failed)[0]
        raise RunFailed(f"rank {rank}: {reasons[rank]}" if len(processes) > 1 else reasons[rank])


class _OutputReader(threading.Thread):
    """Reads what rank 0 prints: steps as JSON, all else goes to its log."""

    def __init__(self, stream: IO[str] | None, log: IO[str], on_step: StepListener) -> None:
        super().__init__(daemon=True)
        assert stream is not None
        self._stream, self._log, self._on_step = stream, log, on_step
        self.last = time.monotonic()
        self.start()

    def run(self) -> None:
        for line in self._stream:
            self.last = time.monotonic()
            try:
                found = json.loads(line)
                self._on_step(found["step"], found["loss"], found["seconds"])
            except (ValueError, KeyError, TypeError):
                self._log.write(line)


def _reason(process: subprocess.Popen, log: IO[str]) -> str:
    """Why a rank failed: the signal, or its last line."""
    if process.returncode is not None and process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return f"died of {name}" + " (out of memory?)" * (name == "SIGKILL")
    log.flush()
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return without_paths(lines[-1]) if lines else f"exit status {process.returncode}"


def without_paths(text: str) -> str:
    """An error in one line of ASCII that names no path of this machine."""
    text = re.sub(r"(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+", "<path>", " ".join(text.split()))
    return text.encode("ascii", "replace").decode()[:_REASON_LENGTH]
