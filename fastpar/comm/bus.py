"""The bus between a GPU and its host, in both directions at once: for what is offloaded.

[Note: the stand-in] Debug(bus_gb_s=) is the bus of a machine without a GPU: both sides lie in
the host's memory, and a thread for each direction copies at that speed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.handles import FutureHandle, Handle, StreamHandle, TaskThread
from fastpar.comm.host import local_ranks


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x, non_blocking=True)


class Bus:
    """Copies between a GPU and its host, a stream for each direction.

    Args:
        pinned: memory of the host that crosses the bus is locked; else copies take about twice as
            long, and down the host waits for them.
    """

    has_gpu = True

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pinned = pinned

    def down(self, host: Tensor, x: Tensor) -> Handle:
        """host = x, behind what the current stream has been given; x may be freed at once."""
        x.record_stream(self._down)
        return StreamHandle(self._down, lambda: _copy(host, x), (), "offload")

    def up(self, x: Tensor, host: Tensor) -> Handle:
        """x = host; the current stream waits for it where wait() is called."""
        return StreamHandle(self._up, lambda: _copy(x, host), (x,), "offload")

    def behind(self, ups: Sequence[Handle] = ()) -> contextlib.AbstractContextManager[Any]:
        """What is begun inside follows these copies up, and nothing that the device computes."""
        return torch.cuda.stream(self._up)

    def n_ranks(self, world_size: int) -> int:
        """Ranks that take memory of this host."""
        return local_ranks(world_size)

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] on the host.

        Raises:
            RuntimeError: it is pinned, and the system has no more of that to give.
        """
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=self.pinned, device="cpu")
        except RuntimeError as error:
            raise RuntimeError(
                f"parallelize: expected {numel * dtype.itemsize / 1e9:.3g} GB of pinned memory on "
                f"the host for offload, got none ({error}); raise the limit of locked memory "
                "(ulimit -l), share the state among more ranks, or take memory that is not pinned, "
                "at about half of the speed: offload_pinned=False, --no-offload-pinned"
            ) from error

    def arrived(self, handle: Handle) -> None:
        """Return when a copy to the host is there."""
        while not handle.is_completed():
            time.sleep(2e-5)


def bus_of(device: torch.device, *, pinned: bool = True) -> Bus:
    """The bus of a GPU; pinned: see Bus.

    Raises:
        ValueError: a CPU, which has none.
    """
    if device.type == "cpu":
        raise ValueError(
            "offload: expected a GPU, got device=cpu; it moves what is on a GPU into its host's "
            "memory: leave it out on a CPU"
        )
    return Bus(device, pinned=pinned)


class SlowBus(Bus):
    """See [Note: the stand-in]; gb_s: of each direction."""

    has_gpu = pinned = False

    def __init__(self, gb_s: float) -> None:
        self._rate, self._threads = gb_s * 1e9, (TaskThread(), TaskThread())
        for thread in self._threads:
            thread.end_with(self)

    def down(self, host: Tensor, x: Tensor) -> Handle:
        """As on a GPU."""
        return self._copy(0, host, x)

    def up(self, x: Tensor, host: Tensor) -> Handle:
        """As on a GPU."""
        return self._copy(1, x, host)

    def arrived(self, handle: Handle) -> None:
        """As on a GPU."""
        handle.wait()

    def behind(self, ups: Sequence[Handle] = ()) -> contextlib.AbstractContextManager[Any]:
        """As on a GPU, but the caller waits."""
        for up in ups:
            up.wait()
        return contextlib.nullcontext()

    def n_ranks(self, world_size: int) -> int:
        """One: ranks are threads of one process, or share a machine with nothing else to do."""
        return 1

    def _copy(self, way: int, out: Tensor, x: Tensor) -> Handle:
        def copy() -> None:
            begin = time.perf_counter()
            with torch.inference_mode(False), torch.no_grad():
                out.copy_(x)
            time.sleep(max(0.0, x.nbytes / self._rate - (time.perf_counter() - begin)))

        future: Future = Future()
        self._threads[way].put((future, copy, (), (out, x)))
        return FutureHandle("offload", future, self)
