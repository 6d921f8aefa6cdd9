"""The saves of a run: when the ranks agree on how one ended, and what is said of it.

[Note: who settles] In the control exchange of every step each rank tells whether its part of the
last save failed, and whether it is still being written. All read the same sums, so all settle after
the same step, and mostly when there is nothing left to wait for; a save that is due before that
waits for the one before, or is left out (--save-overlap). A disk that is full ends no run: the save
is reported, and the next one tries again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastpar.checkpoint.saver import Result, Saver, try_folder
from fastpar.config.config import TrainConfig
from fastpar.parallel.control import gather_numbers
from fastpar.parallel.engine import Engine
from fastpar.train.journal import Journal

_LAST_WAIT_S = 3.0  # below launch.GRACE_S
_POLL_S = 0.05


class RunSaves:
    """The Saver of a run, made by open(), and its reports.

    Args:
        committed: step of the checkpoint that the run goes on from; -1: none.
    Attributes:
        committed: step of the newest checkpoint.
        why: what made the last save fail.
        asked: a save is asked for, by SIGUSR1 on any rank; the same on every rank.
        signals: of this rank; see launch.catching_save.
    """

    def __init__(self, engine: Engine, journal: Journal, committed: int = -1) -> None:
        self.engine, self.journal, self.committed = engine, journal, committed
        self.asked, self.why = False, ""
        self.signals: list[int] = []
        self._saver: Saver | None = None
        self._prepared = False
        self._waited_ms = self._pause_ms = 0.0

    def open(self, folder: Path, config: TrainConfig, **saved: Any) -> None:
        """From now on it saves to the run's folder; saved: model, optimizer, tokenizer."""
        run, faults = config.run, config.faults
        try_folder(folder, self.engine.mesh.rank)
        self._saver = Saver(
            folder,
            keep_last=run.keep_last,
            keep_every=run.keep_every,
            asynchronous=faults.async_save,
            overlap=faults.save_overlap,
            **saved,
        )

    def prepare(self) -> None:
        """Memory for the host copy, in the background; best after the first step."""
        if self._saver is not None and not self._prepared:
            self._prepared = True
            self._saver.prepare()

    def requests(self) -> list[float]:
        """What this rank tells all others in a step: the arguments of take_requests."""
        saver = self._saver
        failed, busy = (False, False) if saver is None else (saver.failed, saver.busy)
        return [float(failed), float(busy), float(bool(self.signals))]

    def take_requests(self, failed: float, busy: float, asked: float) -> None:
        """Sums over all ranks of what they told in a step. Ranks: all, after that step."""
        self.asked = self.asked or asked > 0
        if failed or not busy:
            self.settle()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin a checkpoint of this step. Ranks: all, the numbers of all earlier steps read."""
        saver = self._saver
        assert saver is not None
        self.asked = False
        self.signals.clear()
        began = time.perf_counter()
        if saver.unsettled:
            if saver.overlap == "skip" and any(gather_numbers(self.engine, float(saver.busy))):
                self.journal.note(
                    step,
                    "no checkpoint: the one before is still being written (--save-overlap skip)",
                    save_skipped=1,
                )
                return
            self.settle()
        waited = time.perf_counter()
        saver.save(step, state)
        self._waited_ms = (waited - began) * 1e3
        self._pause_ms = (time.perf_counter() - waited) * 1e3
        if not saver.unsettled and saver.last is not None:  # not asynchronous
            self._report(saver.last)
        self.journal.start_clock()

    def settle(self) -> None:
        """Wait for the last save, if it is not settled, and say how it ended. Ranks: all."""
        result = None if self._saver is None else self._saver.settle()
        if result is not None:
            self._report(result)

    def wait_briefly(self) -> None:
        """The run fails: give a save that is nearly there a moment. For one rank."""
        deadline = time.monotonic() + _LAST_WAIT_S
        while self._saver is not None and self._saver.busy and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _report(self, result: Result) -> None:
        if not result.ok:
            self.why = "; ".join(result.errors)
            older = "the older ones are intact" if self.committed >= 0 else "there is no older one"
            text = f"no checkpoint of step {result.step} ({self.why}); {older}"
            self.journal.note(result.step, text, save_error=self.why)
            return
        self.committed = result.step
        mb = result.nbytes / 1e6
        stood = f"training stood for {self._pause_ms:,.0f} ms"
        if self._waited_ms >= 1:
            stood += f" and {self._waited_ms:,.0f} ms for the save before"
        rate = mb / max(result.seconds, 1e-9)
        self.journal.note(
            result.step,
            f"saved: {mb:,.1f} MB in {result.seconds:.2f} s ({rate:,.0f} MB/s), {stood}",
            save_mb=mb,
            save_s=result.seconds,
            save_mb_per_s=rate,
            save_pause_ms=self._pause_ms,
            save_wait_ms=self._waited_ms,
        )


def is_due(every: int, step: int) -> bool:
    """Whether something is done after this step; every 0: never."""
    return every > 0 and step % every == 0
