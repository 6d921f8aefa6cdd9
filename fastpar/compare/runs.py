"""One run of a comparison: its processes are started, watched, and their results put together.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from fastpar.compare.results import Run
from fastpar.compare.worker import SPEC, Measured, Spec, result_path
from fastpar.train.launch import lost_peer, rank_environment

GRACE_S = 5.0
SILENCE_S = 300.0
_POLL_S = 0.05
_LAST_WORDS = 300  # characters of an error

Say = Callable[[int, float, float], None]  # step, loss of rank 0, seconds


class RunFailed(RuntimeError):  # noqa: N818 - of a strategy, not of the command
    """A run did not end well; the text says why, in one line."""


def measure(spec: Spec, ranks: int, run: Run, say: Say) -> Run:
    """Fills a run in by training in fresh processes.

    Args:
        say: is told of every step.
    Raises:
        RunFailed: a rank failed or said nothing.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastpar_") as folder:
        (Path(folder) / SPEC).write_text(json.dumps(asdict(spec)))
        _start_and_watch(Path(folder), ranks, spec.threads, say)
        found = [
            Measured(**json.loads(result_path(Path(folder), rank).read_text()))
            for rank in range(ranks)
        ]
    run.seconds = round(time.monotonic() - start, 3)
    return put_together(run, found)


def put_together(run: Run, found: list[Measured]) -> Run:
    """What all ranks say as one: times of the slowest, losses in the mean."""
    run.step_s = [max(times) for times in zip(*(m.step_s for m in found))]
    run.losses = [sum(losses) / len(found) for losses in zip(*(m.losses for m in found))]
    run.grad_norms = found[0].grad_norms  # the same on every rank
    run.rss_bytes = [m.rss_bytes for m in found]
    run.step_bytes = [m.step_bytes for m in found if m.step_bytes is not None]
    run.wire_bytes = _largest([m.wire_bytes for m in found])
    run.exposed_ms = _largest([m.exposed_ms for m in found])
    return run


def _largest(values: list[Any]) -> Any:
    return None if any(value is None for value in values) else max(values)


def _start_and_watch(folder: Path, ranks: int, threads: int, say: Say) -> None:
    import torch.distributed as dist

    # Held here: its port is taken before a rank starts.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SILENCE_S)
    )
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context((folder / f"log{r}").open("w+")) for r in range(ranks)]
        processes: list[subprocess.Popen] = []
        stack.enter_context(_killed_at_the_end(processes))
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "fastpar.compare.worker", str(folder)],
                    env={**os.environ, **rank_environment(rank, ranks, store.port, threads)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else logs[rank],
                    stderr=logs[rank],
                    start_new_session=True,
                    text=True,
                )
            )
        watch(processes, logs, say)


@contextlib.contextmanager
def _killed_at_the_end(processes: list[subprocess.Popen]) -> Iterator[None]:
    """Whatever happens, no rank outlives this."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def watch(
    processes: Sequence[subprocess.Popen],
    logs: Sequence[IO[str]],
    say: Say,
    silence_s: float | None = None,
) -> None:
    """Until every rank has ended well; see [Note: who is stopped].

    Raises:
        RunFailed: names the rank that failed first and its last words.
    """
    silence_s = SILENCE_S if silence_s is None else silence_s
    heard = _Ear(processes[0].stdout, logs[0], say)
    failed: list[tuple[int, float]] = []  # rank, when
    while running := [p for p in processes if p.poll() is None]:
        known = {rank for rank, _ in failed}
        failed += [
            (rank, time.monotonic())
            for rank, process in enumerate(processes)
            if process.returncode not in (None, 0) and rank not in known
        ]
        if failed and time.monotonic() - failed[0][1] > GRACE_S:
            for process in running:
                process.kill()
            break
        if not failed and time.monotonic() - heard.last > silence_s:
            raise RunFailed(f"finished no step for {silence_s:g} s, and was stopped")
        time.sleep(_POLL_S)
    if not running:
        known = {rank for rank, _ in failed}
        failed += [
            (rank, time.monotonic())
            for rank, process in enumerate(processes)
            if process.returncode and rank not in known
        ]
    heard.join()
    if failed:
        reasons = [(rank, _reason(processes[rank], logs[rank])) for rank, _ in failed]
        # A rank that lost a peer is not the cause.
        own = [(rank, why) for rank, why in reasons if not lost_peer(RuntimeError(why))]
        rank, why = (own or reasons)[0]
        raise RunFailed(f"rank {rank}: {why}" if len(processes) > 1 else why)


class _Ear(threading.Thread):
    """Reads what rank 0 prints: steps as JSON, all else goes to its log."""

    def __init__(self, stream: IO[str] | None, log: IO[str], say: Say) -> None:
        super().__init__(daemon=True)
        assert stream is not None
        self._stream, self._log, self._say = stream, log, say
        self.last = time.monotonic()
        self.start()

    def run(self) -> None:
        for line in self._stream:
            self.last = time.monotonic()
            try:
                said = json.loads(line)
                self._say(said["step"], said["loss"], said["seconds"])
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
    return text.encode("ascii", "replace").decode()[:_LAST_WORDS]
