"""Ranks that do not answer: how that is seen, and the process that ends what a launcher left.

A rank can stand still with Python's lock held: a deadlock in a library, a driver. Then no handler
of a signal runs any more, nor does a watchdog. So each rank that `fastpar train --nproc` starts
touches a file once a second, from a thread; the launcher, and when that is dead the reaper, kill
who does not while it should end.

[Note: the reaper] A process beside the launcher, in a session of its own, this file run as a
script; it imports neither torch nor fastpar. It reads the ranks' pids from the launcher until the
pipe ends, with the launcher, however that ended. The kernel tells the ranks, which save and end;
those that do not answer are killed here. Last, the launcher's folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

SILENT_S = 30.0  # without an answer, a rank that was told to stop is killed
_BEAT_S = 1.0
_POLL_S = 0.05


def begin_heartbeat(file: str | Path) -> None:
    """In a rank: touch the file every second, as long as it is there."""

    def touch() -> None:
        with contextlib.suppress(OSError):
            while True:
                os.utime(file)
                time.sleep(_BEAT_S)

    threading.Thread(target=touch, name="heartbeat", daemon=True).start()


class Silence:
    """How long a rank has not touched its file.

    Only time in which somebody looks counts, so a machine that was suspended accuses nobody.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = file
        self._touched: int | None = None
        self._looked, self._seconds = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Until now; to be asked more than once a second."""
        touched: int | None = None
        with contextlib.suppress(OSError):
            touched = os.stat(self._file).st_mtime_ns
        now = time.monotonic()
        passed = min(now - self._looked, _BEAT_S)
        same = touched == self._touched
        self._seconds = self._seconds + passed if same else 0.0
        self._touched, self._looked = touched, now
        return self._seconds


def kill(pid: int) -> None:
    """A rank and the processes that it has started; they share its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _born(pid: int) -> str:
    """Tells a process from a later one with its number; empty for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def main(folder: Path, silent_s: float) -> None:
    """What the script does: reads lines "PID FILE"; see [Note: the reaper]."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # a batch system signals all processes of a job
    ranks = []
    for line in sys.stdin:
        pid, _, file = line.rstrip("\n").partition(" ")
        ranks.append((int(pid), _born(int(pid)), file))
    silences = [(pid, born, Silence(file)) for pid, born, file in ranks]
    while silences := [each for each in silences if each[1] and _born(each[0]) == each[1]]:
        for pid, _, silence in silences:
            if silence.seconds() > silent_s:
                kill(pid)
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
