"""Debug(made=...): collectives that start late.

A buffer written before its collective has read it, or read before the collective has written it,
mostly stays unnoticed, because the collective starts at once and wins the race. Here it loses: each
operation starts after a random delay, in its own thread (on a GPU in its own stream), in the order
of the calls. The same seed gives the same delays.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from fastpar.comm.collectives import (
    Collectives,
    FutureHandle,
    Handle,
    StreamHandle,
    TaskThread,
    run_task,
)

_CYCLES_PER_MS = 1_500_000  # of a GPU, approximately


class Late:
    """Delays every operation of one group, up to delay_ms; its threads or streams serve it only."""

    def __init__(self, group: Collectives, delay_ms: float, seed: int = 0) -> None:
        self._longest_ms, self._random = delay_ms, random.Random(f"{seed} {group.rank}")
        on_gpu = group.device.type == "cuda"
        self._stream = torch.cuda.Stream(group.device) if on_gpu else None
        self._thread = None if on_gpu or group.in_caller else TaskThread()
        group.why += f"; delayed by up to {delay_ms} ms"
        group.observers += (self,)

    def __call__(
        self, group: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]
    ) -> Handle:
        delay_ms = self._random.uniform(0.0, self._longest_ms)
        if self._stream is not None:

            def on_stream() -> None:
                torch.cuda._sleep(int(delay_ms * _CYCLES_PER_MS))
                begin().wait()

            return StreamHandle(self._stream, on_stream, (begin,))  # begin holds the tensors

        inference = torch.is_inference_mode_enabled()  # threads have their own mode

        def late() -> None:
            time.sleep(delay_ms / 1e3)
            with torch.inference_mode(inference):
                begin().wait()

        future: Future = Future()
        task = (future, late, (), ())
        self._thread.put(task) if self._thread is not None else run_task(task)
        return FutureHandle(op, future, group)
