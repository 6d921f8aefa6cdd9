"""Watchdog: names a rank for which the others wait too long, and ends the run, to be restarted.

Peers notice at once that a rank died. If it hangs (a stopped process, a driver, a file system, an
endless loop), they wait in a collective until its timeout, which knows neither the rank nor the
reason. So every rank publishes its state once a second in the store of its process group; a rank
that has waited too long reads the others' states and names the slow one.

Why a rank is slow: the first of these that applies:
    no sign of life   its heartbeat has stopped (stopped, dead, host gone), or never came
    has ended         it left the run while others wait for it
    not waiting       it computes, reads or loops while others wait for it
    behind            all wait, and it has begun the fewest steps and collectives
A rank is judged only if others wait for it, however long it computes. A rank that was stopped
itself counts only the time in which its own watchdog ran, so a suspended machine accuses nobody.
The process groups' own timeouts count all time: see Mesh.trust_watchdog.

A launcher that was stopped (SIGSTOP, Ctrl-Z) should not have ranks that train on. It cannot tell
them, so each watchdog looks at the state of its parent: 45 us, twice a second.

Threads: a thread that may wait records the reason in its own Activity: a few attributes, no lock.
The watchdog's two threads read them. One talks to the store, which may itself hang with its host;
the other one judges with what is known.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

HUNG = 4  # exit status of a rank that waited too long
MARGIN_S = 10.0  # the process groups' own timeouts are this much longer
_BEAT_S = 1.0
_STALE_BEATS = 3
_LINGER_S = 2.0  # time for other ranks to report before a launcher sees that this one ended
_STORE_S = 3.0
_DEEPEST = 40  # reported frames of a stack: 26 from the loop to a wait in a split layer
MARK = "FASTPAR_MARK"  # variable: the file that a rank makes while it is stopped with its launcher
_RECENT = 64  # collectives of a stream that are checked


class Activity:
    """What one thread of this rank is doing.

    Attributes:
        step: of the training, None before the first.
        place: (words, number) of the bucket or micro-batch that it waits for, or None.
        op: the collective that it waits for, or None; waits: number of waits so far.
    """

    __slots__ = ("op", "place", "step", "waits")

    def __init__(self) -> None:
        self.step: int | None = None
        self.place: tuple[str, int] | None = None
        self.op: str | None = None
        self.waits = 0


_local = threading.local()
_calls = [0]  # collectives that this rank has begun
_streams: dict[Any, deque] | None = None  # recent collectives by stream; None: no watchdog


def activity() -> Activity:
    """The Activity of the calling thread."""
    try:
        return _local.activity
    except AttributeError:
        _local.activity = Activity()
        return _local.activity


def in_step(step: int) -> None:
    """Note the training step of the calling thread."""
    activity().step = step


def count_call() -> None:
    """Count a collective that this rank has begun."""
    _calls[0] += 1


def watched() -> bool:
    """Whether a watchdog needs the collectives of streams."""
    return _streams is not None


def on_stream(stream: Any, op: str, start: Any, end: Any) -> None:
    """Note a collective that was enqueued between two events of a stream."""
    if _streams is not None:
        entry = (activity().place, op, start, end)
        _streams.setdefault(stream, deque(maxlen=_RECENT)).append(entry)


@contextlib.contextmanager
def in_place(what: str, number: int) -> Iterator[None]:
    """Context of work that waits for a bucket or a micro-batch."""
    here = activity()
    outer, here.place = here.place, (what, number)
    try:
        yield
    finally:
        here.place = outer


@contextlib.contextmanager
def waiting(op: str) -> Iterator[None]:
    """Context of a call that returns when the other ranks have done their part."""
    here = activity()
    if here.op is not None:  # inside another one
        yield
        return
    here.waits += 1
    here.op = op
    try:
        yield
    finally:
        here.op = None


class _Seen(NamedTuple):
    """The newest heartbeat of a rank, when it arrived, and whether an earlier one differed."""

    beat: dict[str, Any]
    when: float
    alive: bool


def on_this_gpu(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap a new thread's function to run on the caller's GPU.

    A thread that never chose a device opens a context on GPU 0 when it queries an event: half a
    gigabyte there for every rank.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return run
    device = torch.cuda.current_device()

    def there(*args: object) -> None:
        torch.cuda.set_device(device)
        run(*args)

    return there


_frames_lock = threading.Lock()


def _frame_of(thread: int) -> FrameType | None:
    """The frame of a thread. The garbage collector is off meanwhile: before Python 3.12 a
    collection inside sys._current_frames() can stop every thread for good (gh-106883)."""
    with _frames_lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if enabled:
                gc.enable()


class Watchdog:
    """Watches this rank and, if it waits too long, finds the slow one.

    Args:
        rank, world_size: of the whole run.
        timeout_s: a longer wait in one collective ends the run.
        store: of the ranks. Default: that of the default process group.
        start: an id of this start of the ranks; after a restart the same store has another.
        end: is called with the message, the exit status and the slow process. Default: print and
            exit.
    Ranks: each for itself, in the thread that trains; a context manager, which ends the watch.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        store: Any = None,
        start: str = "",
        end: Callable[[str, int, list], None] | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(
                f"Watchdog: expected timeout_s > 0, got timeout_s={timeout_s}; pass the seconds "
                "after which a rank counts as hung"
            )
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._end = end or _exit
        self._here, self._thread = activity(), threading.get_ident()
        self._beat_s = min(_BEAT_S, timeout_s / 8)
        self._store: Any = _own_connection(store, start) if world_size > 1 else None
        self._seen: dict[int, _Seen] = {}
        self._since = time.monotonic()  # start of the present look at the others
        self._looking = False
        self._answered = time.monotonic()  # last answer of the store
        self._n_beats, self._process = 0, _process(os.getpid())
        self._waited, self._wait = 0.0, None  # seconds in the present wait, and its key
        self._verdict: dict[str, Any] | None = None  # of this rank
        self._looks = 0
        self._over, self._hurry = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=on_this_gpu(target), name="watchdog", daemon=True)
            for target in (self._talk, self._watch)
        ]

    def __enter__(self) -> Watchdog:
        global _streams
        if self.world_size > 1:
            _streams = {}
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the watch, and publish that this rank has ended."""
        global _streams
        if self._over.is_set() or self.world_size == 1:
            return
        self._over.set()
        self._hurry.set()
        _streams = None
        self._threads[0].join(self._beat_s)  # it may hang with the store

    # State of this rank

    def _now(self) -> tuple[Any, tuple[str, int] | None, str] | None:
        """(key of the present wait, place, op), or None."""
        here = self._here
        op, waits, place = here.op, here.waits, here.place
        if op is not None:
            return waits, place, op
        for recent in list((_streams or {}).values()):
            found = _unfinished(list(recent))
            if found is not None:
                return id(found), found[0], found[1]
        return None

    def _beat(self) -> dict[str, Any]:
        now = self._now()
        self._n_beats += 1
        return {
            "beat": self._n_beats,
            "ended": self._over.is_set(),
            "step": self._here.step,
            "calls": _calls[0],
            "place": now and now[1],
            "op": now and now[2],
            "waited": self._waited if now else 0.0,
            "stack": _stack(_frame_of(self._thread)),
            "process": self._process,
            "verdict": self._verdict,
        }

    # The thread that talks to the store

    def _talk(self) -> None:
        while True:
            over = self._over.is_set()
            with contextlib.suppress(Exception):  # the host of the store is gone, or hangs
                self._store.set(f"beat/{self.rank}", json.dumps(self._beat()))
                if self._waited > self._beat_s and not self._over.is_set():
                    self._look()
                else:
                    self._looking = False
                self._answered = time.monotonic()
            if over:
                return
            self._hurry.wait(self._beat_s)
            self._hurry.clear()

    def _look(self) -> None:
        """Read the states of the other ranks, and their verdicts."""
        if not self._looking:
            self._seen, self._since, self._looking = {}, time.monotonic(), True
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        there = [
            rank for rank in others if rank in self._seen or self._store.check([f"beat/{rank}"])
        ]
        raw = self._store.multi_get([f"beat/{rank}" for rank in there]) if there else []
        now = time.monotonic()
        for rank, text in zip(there, raw):
            beat = json.loads(text)
            known = self._seen.get(rank)
            if known is None or known.beat["beat"] != beat["beat"]:
                self._seen[rank] = _Seen(beat, now, known is not None)
        self._looks += 1

    def _known_verdict(self) -> dict[str, Any] | None:
        """The verdict of the first rank that has one; ignores processes before a restart."""
        verdicts = {rank: seen.beat["verdict"] for rank, seen in self._seen.items() if seen.alive}
        verdicts[self.rank] = self._verdict
        return next((verdicts[rank] for rank in sorted(verdicts) if verdicts[rank]), None)

    # The thread that judges

    def _watch(self) -> None:
        last, mark = time.monotonic(), os.environ.get(MARK)
        while not self._over.wait(self._beat_s / 2):
            now = time.monotonic()
            passed, stood_s, last = min(now - last, self._beat_s), now - last, now
            if stood_s > 2 * self._beat_s:  # what the others did meanwhile is not known yet
                self._looking, self._answered = False, now
            if mark is not None and _is_stopped(os.getppid()):
                _stop(mark)
            wait = self._now()
            key = wait and wait[0]
            same = wait is not None and key == self._wait
            self._waited, self._wait = (self._waited + passed if same else 0.0), key
            if wait is None:
                continue
            late = now - self._answered > _STORE_S
            ready = late or (self._looking and now - self._since > _STALE_BEATS * self._beat_s)
            judged = self._looking and self._known_verdict() is not None
            if judged or (self._waited > self.timeout_s and ready):
                self._report(wait, late)
                return

    def _report(self, wait: tuple[Any, tuple[str, int] | None, str], late: bool) -> None:
        """Report the slow rank, the same as the other ranks report, and end this one."""
        verdict = self._known_verdict()
        if verdict is None:
            self._verdict = self._judge(late)
            looks, deadline = self._looks, time.monotonic() + _STORE_S / 2
            while self._looks < looks + 2 and not late and time.monotonic() < deadline:
                self._hurry.set()
                time.sleep(0.02)
            verdict = self._known_verdict() or self._verdict
        mine = _where({"step": self._here.step, "place": wait[1], "op": wait[2]})
        message = (
            f"watchdog: a collective did not end within timeout={self.timeout_s:g}s: "
            f"{verdict['who']}; rank {self.rank} has waited {self._waited:.1f} s: {mine}; this "
            "rank ends, resume the run from its last checkpoint"
        )
        if verdict["stack"]:
            lines = "\n".join(f"    {line}" for line in verdict["stack"])
            message += f"\n  last stack of rank {verdict['rank']}, innermost last:\n{lines}"
        self._end(message, HUNG, verdict["process"])

    def _judge(self, late: bool) -> dict[str, Any]:
        """Find the slow rank, by the rules above."""
        now = time.monotonic()
        seen = dict(self._seen)
        beats = {rank: each.beat for rank, each in seen.items()}

        def found(rank: int, how: str) -> dict[str, Any]:
            beat = beats.get(rank, {})
            known = {name: beat.get(name, []) for name in ("stack", "process")}
            return {"rank": rank, "who": f"rank {rank} {how}", **known}

        if late:
            s = now - self._answered
            return found(0, f"or the host of the ranks' store has not answered for {s:.1f} s")
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        if missing := [rank for rank in others if rank not in seen]:
            return found(missing[0], "never gave a sign of life")
        ended = [rank for rank in others if beats[rank]["ended"]]
        silent = {rank: now - seen[rank].when for rank in others}
        longest = max(others, key=lambda rank: (rank not in ended, silent[rank]))
        if silent[longest] > _STALE_BEATS * self._beat_s and longest not in ended:
            return found(
                longest,
                f"gave no sign of life for {silent[longest]:.1f} s (stopped, dead or cut off), "
                f"last seen in {_where(beats[longest])}",
            )
        if ended:
            return found(ended[0], "has left the run")
        if busy := [rank for rank in others if beats[rank]["op"] is None]:
            rank = min(busy, key=lambda rank: _progress(beats[rank]))
            return found(rank, f"is not waiting: {_where(beats[rank])}")
        beats[self.rank] = self._beat()
        rank = min(sorted(beats), key=lambda rank: _progress(beats[rank]))
        if any(_progress(beat) != _progress(beats[rank]) for beat in beats.values()):
            return found(rank, f"is behind: {_where(beats[rank])}")
        each = ", ".join(f"rank {rank} in {_where(beats[rank])}" for rank in sorted(beats))
        return found(rank, f"and all others wait, none is behind: {each}")


def _own_connection(store: Any, start: str) -> Any:
    """A new connection to the store: calls on one connection queue, and some block."""
    import torch.distributed as dist

    if store is None:
        store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with contextlib.suppress(AttributeError, RuntimeError):  # this kind of store cannot
        store = store.clone()
    store.set_timeout(timedelta(seconds=_STORE_S))
    return dist.PrefixStore(f"fastpar/watchdog/{start}", store)


def _process(pid: int) -> list[Any]:
    """An id of a process: host, PID namespace, number and start time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        born = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return [boot, os.readlink(f"/proc/{pid}/ns/pid"), pid, born]
    except OSError:
        return []


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _stop(mark: str) -> None:
    """Stop this process until its launcher, which looks for the mark, continues it."""
    with contextlib.suppress(OSError):  # the folder is gone: so is the launcher
        Path(mark).touch()
        # To this thread: it stops before it could remove the mark.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        Path(mark).unlink()


def _kill(process: list[Any]) -> None:
    """Kill a rank of this host that may not answer a launcher: torchrun waits 30 s for it."""
    if process and process == _process(process[2]):
        with contextlib.suppress(OSError):
            os.kill(process[2], signal.SIGKILL)


def _unfinished(recent: list[tuple]) -> tuple | None:
    """The collective of a stream that the device runs now."""
    found = None
    for entry in reversed(recent):
        if entry[3].query():
            break
        found = entry
    return found if found is not None and found[2].query() else None


def _progress(beat: dict[str, Any]) -> tuple[int, int]:
    step = beat["step"]
    return (-1 if step is None else step), beat["calls"]


def _where(beat: dict[str, Any]) -> str:
    """Text: step, bucket or micro-batch, and collective."""
    step, place, op = beat["step"], beat["place"], beat["op"]
    words = "no step yet" if step is None else f"step {step}"
    if place is not None:
        words += f", {place[0]} {place[1]}"
    return words + (f" ({op})" if op is not None else ", outside of collectives")


def _stack(frame: FrameType | None) -> list[str]:
    """The innermost frames, the last one innermost."""
    lines = []
    for f, number in traceback.walk_stack(frame) if frame is not None else ():
        code = f.f_code
        parts = Path(code.co_filename).parts[-3:]
        path = "/".join(parts if parts[0] == "fastpar" else parts[-2:])
        lines.append(f"{path}:{number} {code.co_name}")
        if len(lines) == _DEEPEST:
            break
    return lines[::-1]


def _exit(message: str, status: int, slow: list[Any]) -> None:
    """Print the message, pass it to a launcher, and end this process and the slow one."""
    with contextlib.suppress(OSError):  # stderr is closed
        os.write(2, ("\n" + message + "\n").encode())
    with contextlib.suppress(Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise RuntimeError(message)
        except RuntimeError as error:  # raised: torchrun prints the traceback
            get_error_handler().record_exception(error)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    time.sleep(_LINGER_S)
    _kill(slow)
    os._exit(status)
