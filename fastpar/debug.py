"""What makes mistakes of a training step loud: replicas compared, freed memory poisoned, and
collectives that start late.

[Note: late collectives] A buffer that is written before its collective has read it, or read before
the collective has written it, mostly goes unseen: the collective is under way at once and wins the
race. DelayedCollectives lets it lose: each operation starts after a random delay, in a thread (on a
GPU a stream) of its own, in the order of the calls. The same seed gives the same delays.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.collectives import Collectives
from fastpar.tasks import FutureHandle, Handle, StreamHandle, TaskThread, run_task

_CYCLES_PER_MS = 1_500_000  # of a GPU, about


@dataclass(frozen=True)
class Debug:
    """Checks of parallelize(debug=...); each costs time.

    Args:
        check_replicas: after each step compare every parameter over the ranks, bit for bit.
        poison: fill buffers with NaN before they are freed.
        delay_ms: every collective starts after a random delay of up to this; 0: at once.
        seed: of the delays.
    Raises:
        ValueError: delay_ms below 0.
    """

    check_replicas: bool = False
    poison: bool = False
    delay_ms: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms < float("inf"):
            raise ValueError(
                f"Debug: expected 0 <= delay_ms, got delay_ms={self.delay_ms}; use a few ms"
            )

    def delayed(self, collectives: Collectives) -> Collectives:
        """The collectives, late if delay_ms asks for it. Ranks: each for itself."""
        if not self.delay_ms:
            return collectives
        return DelayedCollectives(collectives, self.delay_ms, self.seed)


class DelayedCollectives(Collectives):
    """Other collectives whose operations start late; see the note.

    Args:
        inner: carries the operations, and is used by nobody else.
        delay_ms: the longest delay; each is drawn from seed and rank.
    """

    def __init__(self, inner: Collectives, delay_ms: float, seed: int = 0) -> None:
        self.inner, self.delay_ms = inner, delay_ms
        self.rank, self.world_size, self.device = inner.rank, inner.world_size, inner.device
        self.transport, self.in_caller = inner.transport, inner.in_caller
        self.why = f"{inner.why}; delayed by up to {delay_ms} ms"
        self._random = random.Random(f"{seed} {inner.rank}")
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._thread = None if on_gpu or self.in_caller else TaskThread()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.empty(numel, dtype)

    def barrier(self, *, tag: int = 0) -> None:
        self._submit("barrier", lambda: self.inner.barrier(tag=tag)).wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self.inner.close()

    def _submit(self, op: str, call: Callable[[], Any], *of: Tensor) -> Handle:
        delay_ms = self._random.uniform(0.0, self.delay_ms)
        if self._stream is not None:

            def on_stream() -> None:
                torch.cuda._sleep(int(delay_ms * _CYCLES_PER_MS))
                call()

            return StreamHandle(self._stream, on_stream, of)

        inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own

        def late() -> None:
            time.sleep(delay_ms / 1e3)
            with torch.inference_mode(inference):
                call()

        future: Future = Future()
        task = (future, late, (), of)
        self._thread.put(task) if self._thread is not None else run_task(task)
        return FutureHandle(op, future, self)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        return self._submit("all_reduce", lambda: self.inner.all_reduce(x, mean=mean, tag=tag), x)

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        def call() -> None:
            self.inner.reduce_scatter(out, x, mean=mean, tag=tag)

        return self._submit("reduce_scatter", call, out, x)

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        return self._submit("all_gather", lambda: self.inner.all_gather(out, x, tag=tag), out, x)

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        return self._submit("broadcast", lambda: self.inner.broadcast(x, src, tag=tag), x)
