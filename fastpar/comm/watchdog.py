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

Threads: a thread that may wait records the reason in its own Activity: a few attributes, no lock.
The watchdog's two threads read them. One talks to the store, which may itself hang with its host;
the other one judges with what is known.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

HUNG = 4  # exit status of a rank that waited too long
MARGIN_S = 10.0  # the process groups' own timeouts are this much longer
_BEAT_S = 1.0
_STALE_BEATS = 3
_LINGER_S = 2.0  # time for other ranks to report before a launcher sees that this one ended
_STORE_S = 3.0
_DEEPEST = 40  # reported frames of a stack: 26 from the loop to a wait in a split layer
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
        end: is called with the message instead of printing it and ending the process.
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
        end: Callable[[str], None] | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(
                f"Watchdog: expected timeout_s > 0, got timeout_s={timeout_s}; pass the seconds "
                "after which a rank counts as hung"
            )
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._others = [other for other in range(world_size) if other != rank]
        self._end = end or _exit
        self._here, self._thread = activity(), threading.get_ident()
        self._beat_s = min(_BEAT_S, timeout_s / 8)
        self._store: Any = _own_connection(store, start) if world_size > 1 else None
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}  # newest heartbeat, its arrival
        self._since: float | None = None  # the first states of the present look have arrived
        self._answered = time.monotonic()  # last answer of the store
        self._n_beats, self._waited, self._wait = 0, 0.0, None  # seconds of the wait, and its key
        self._own_verdict: dict[str, Any] | None = None
        self._verdict: dict[str, Any] | None = None  # that of the first rank that judged
        self._over = threading.Event()
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
        """End the watch, and publish that this rank has ended."""
        global _streams
        if self._over.is_set() or self.world_size == 1:
            return
        self._over.set()
        _streams = None
        self._threads[0].join(self._beat_s)  # it may hang with the store

    def _now(self) -> tuple[Any, tuple[str, int] | None, str] | None:
        """(key of the present wait, place, op), or None."""
        here = self._here
        op, waits, place = here.op, here.waits, here.place
        if op is not None:
            return waits, place, op
        for recent in list((_streams or {}).values()):
            collective = _unfinished(list(recent))
            if collective is not None:
                return id(collective), collective[0], collective[1]
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
            "stack": _stack(_frame_of(self._thread)),
        }

    def _talk(self) -> None:
        """The thread that talks to the store."""
        over = False
        while not over:
            over = self._over.is_set()
            with contextlib.suppress(Exception):  # the host of the store is gone, or hangs
                self._store.set(f"beat/{self.rank}", json.dumps(self._beat()))
                if self._waited > self._beat_s and not over:
                    self._look()
                else:
                    self._since = None
                self._answered = time.monotonic()
            self._over.wait(self._beat_s)

    def _look(self) -> None:
        """Read the states of the other ranks, and the verdict if there is one."""
        if self._since is None:
            self._seen = {}
        there = [
            rank
            for rank in self._others
            if rank in self._seen or self._store.check([f"beat/{rank}"])
        ]
        raw = self._store.multi_get([f"beat/{rank}" for rank in there]) if there else []
        for rank, beat in zip(there, map(json.loads, raw)):
            if rank not in self._seen or self._seen[rank][0]["beat"] != beat["beat"]:
                self._seen[rank] = (beat, time.monotonic())
        if self._since is None:  # not before: a slow store would make a stopped rank look alive
            self._since = time.monotonic()
        if self._own_verdict is not None:  # the first one counts
            text = self._store.compare_set("verdict", "", json.dumps(self._own_verdict))
            self._verdict = json.loads(text)
        elif self._store.check(["verdict"]):
            self._verdict = json.loads(self._store.get("verdict"))

    def _watch(self) -> None:
        """The thread that judges."""
        last = time.monotonic()
        while not self._over.wait(self._beat_s / 2):
            now = time.monotonic()
            stood_s, last = now - last, now
            if stood_s > 2 * self._beat_s:  # what the others did meanwhile is not known yet
                self._since, self._answered = None, now
            wait = self._now()
            if wait is None or wait[0] != self._wait:
                self._waited, self._wait = 0.0, wait and wait[0]
                continue
            self._waited += min(stood_s, self._beat_s)
            late = now - self._answered > _STORE_S
            looked = self._since is not None and now - self._since > _STALE_BEATS * self._beat_s
            if self._verdict or (self._waited > self.timeout_s and (late or looked)):
                self._report(wait, late)
                return

    def _report(self, wait: tuple[Any, tuple[str, int] | None, str], late: bool) -> None:
        """Report the slow rank, the same as the other ranks report, and end this one."""
        if self._verdict is None:
            self._own_verdict = self._judge(late)
            deadline = time.monotonic() + (0.0 if late else _STORE_S)
            while self._verdict is None and time.monotonic() < deadline:
                time.sleep(self._beat_s / 8)
        verdict = self._verdict or self._own_verdict
        assert verdict is not None
        here = _where({"step": self._here.step, "place": wait[1], "op": wait[2]})
        message = (
            f"watchdog: a collective did not end within timeout={self.timeout_s:g}s: "
            f"{verdict['who']}; rank {self.rank} has waited {self._waited:.1f} s: {here}; this "
            "rank ends, resume the run from its last checkpoint"
        )
        if verdict["stack"]:
            lines = "\n".join(f"    {line}" for line in verdict["stack"])
            message += f"\n  last stack of rank {verdict['rank']}, innermost last:\n{lines}"
        self._end(message)

    def _judge(self, late: bool) -> dict[str, Any]:
        """Find the slow rank, by the rules above."""
        now, others = time.monotonic(), self._others
        beats = {rank: beat for rank, (beat, _) in self._seen.items()}
        silent_s = {rank: now - arrived for rank, (_, arrived) in self._seen.items()}

        def verdict(rank: int, how: str) -> dict[str, Any]:
            stack = beats.get(rank, {}).get("stack", [])
            return {"rank": rank, "who": f"rank {rank} {how}", "stack": stack}

        if late:
            s = now - self._answered
            return verdict(0, f"or the host of the ranks' store has not answered for {s:.1f} s")
        if missing := [rank for rank in others if rank not in beats]:
            return verdict(missing[0], "never gave a sign of life")
        ended = [rank for rank in others if beats[rank]["ended"]]
        rank = max(others, key=lambda rank: (rank not in ended, silent_s[rank]))
        if silent_s[rank] > _STALE_BEATS * self._beat_s and rank not in ended:
            return verdict(
                rank,
                f"gave no sign of life for {silent_s[rank]:.1f} s (stopped, dead or cut off), "
                f"last seen in {_where(beats[rank])}",
            )
        if ended:
            return verdict(ended[0], "has left the run")
        if busy := [rank for rank in others if beats[rank]["op"] is None]:
            rank = min(busy, key=lambda rank: _progress(beats[rank]))
            return verdict(rank, f"is not waiting: {_where(beats[rank])}")
        beats[self.rank] = self._beat()
        rank = min(sorted(beats), key=lambda rank: _progress(beats[rank]))
        if any(_progress(beat) != _progress(beats[rank]) for beat in beats.values()):
            return verdict(rank, f"is behind: {_where(beats[rank])}")
        each = ", ".join(f"rank {rank} in {_where(beats[rank])}" for rank in sorted(beats))
        return verdict(rank, f"and all others wait, none is behind: {each}")


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


def _unfinished(recent: list[tuple]) -> tuple | None:
    """The collective of a stream that the device runs now."""
    first = None
    for entry in reversed(recent):
        if entry[3].query():
            break
        first = entry
    return first if first is not None and first[2].query() else None


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
    frames = [] if frame is None else list(traceback.walk_stack(frame))[:_DEEPEST]
    codes = [(f.f_code, number) for f, number in reversed(frames)]
    return [
        f"{'/'.join(Path(code.co_filename).parts[-3:])}:{number} {code.co_name}"
        for code, number in codes
    ]


def _exit(message: str) -> None:
    """Print the message, pass it to a launcher, and end this process."""
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
    os._exit(HUNG)
