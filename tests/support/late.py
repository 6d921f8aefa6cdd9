"""Collectives that begin late, on CPUs.

A buffer written before its collective has read it, or read before the collective has written it,
mostly stays unnoticed, because the collective starts at once and wins the race. Delays make it
lose: each operation starts after a random delay, in its own thread, in the order of the calls. The
same seed gives the same delays.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from fastpar.comm.collectives import Collectives, FutureHandle, Handle, TaskThread, run_task


class Delays:
    """Delays every operation of a group, as an observer; its threads must serve this group only.

    Args:
        delay_ms: the longest delay; each is drawn from seed and rank.
    """

    def __init__(self, group: Collectives, delay_ms: float = 1.0, seed: int = 0) -> None:
        self._longest_ms, self._random = delay_ms, random.Random(f"{seed} {group.rank}")
        self._thread = None if group.in_caller else TaskThread()
        group.why += f"; delayed by up to {delay_ms} ms"
        group.observers += (self,)

    def __call__(
        self, group: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]
    ) -> Handle:
        delay_ms = self._random.uniform(0.0, self._longest_ms)
        inference = torch.is_inference_mode_enabled()  # threads have their own mode

        def late() -> None:
            time.sleep(delay_ms / 1e3)
            with torch.inference_mode(inference):
                begin().wait()

        future: Future = Future()
        task = (future, late, (), ())
        self._thread.put(task) if self._thread is not None else run_task(task)
        return FutureHandle(op, future, group)
