"""What a rank sends and how long it waits, counted where every collective passes.

torch's collectives (DDP, FSDP2, DeepSpeed) are seen by torch's dispatcher, those that C++ starts
included; fastpar's by their one interface, collectives.Collectives.

[Note: sent bytes] A collective over W ranks of b bytes counts as what each rank sends in a ring:
(W - 1) / W * b for reduce-scatter, all-gather, all-to-all and, in the mean over the ranks, a
broadcast; twice that for an all-reduce; b for a send. Any algorithm must send as much in all; some
send more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle

_NAMESPACES = ("c10d", "_c10d_functional")


def ring_bytes(operation: str, whole_bytes: int, world_size: int) -> int:
    """Bytes that one rank sends by a ring algorithm: [Note: sent bytes].

    Args:
        operation: its name, as torch or fastpar have it.
        whole_bytes: of the tensor that all ranks reduce, gather or get.
    """
    name = operation.replace("_", "")
    if name == "send":
        return whole_bytes
    if not any(word in name for word in ("reduce", "gather", "broadcast", "alltoall")):
        return 0
    ways = 2 if "allreduce" in name else 1
    return ways * whole_bytes * (world_size - 1) // world_size


class WireMeter:
    """Counts one rank's collectives while a counting context is open.

    Attributes:
        sent_bytes: see [Note: sent bytes]; of all groups together.
        waited_s: on a CPU, of fastpar's: in calls and in waits, where nothing else was done.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.waited_s = 0.0

    @contextlib.contextmanager
    def of_torch(self, world_size: int) -> Iterator[None]:
        """Counts collectives of torch's groups of that size."""
        with _Dispatched(self, world_size):
            yield

    @contextlib.contextmanager
    def of_fastpar(self) -> Iterator[None]:
        """Counts those of fastpar's transports, and the time in them."""
        Collectives.observers += (self._count,)
        try:
            yield
        finally:
            Collectives.observers = tuple(o for o in Collectives.observers if o != self._count)

    def _count(
        self, group: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]
    ) -> Handle:
        self.sent_bytes += ring_bytes(op, n_bytes, group.world_size)
        with self._waiting():
            return _Waited(begin(), self)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start


class _Waited(Handle):
    """A handle whose waits are counted."""

    def __init__(self, handle: Handle, meter: WireMeter) -> None:
        self._handle, self._meter = handle, meter

    @property
    def ms(self) -> float | None:
        return self._handle.ms

    def wait(self, timeout_s: float | None = None) -> None:
        with self._meter._waiting():
            self._handle.wait(timeout_s)

    def is_completed(self) -> bool:
        return self._handle.is_completed()


class _Dispatched(TorchDispatchMode):
    """Sees torch's operations; autograd's threads take it along."""

    def __init__(self, meter: WireMeter, world_size: int) -> None:
        super().__init__()
        self._meter, self._world_size = meter, world_size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            name = func._schema.name.partition("::")[2]
            whole = max((_bytes(arg) for arg in args), default=0)
            self._meter.sent_bytes += ring_bytes(name, whole, self._world_size)
        return func(*args, **(kwargs or {}))


def _bytes(arg: Any) -> int:
    """Bytes of the tensors in an argument; gathers fill lists of lists of tensors."""
    if isinstance(arg, torch.Tensor):
        return arg.nbytes
    if isinstance(arg, Iterable) and not isinstance(arg, str):
        return sum(_bytes(item) for item in arg)
    return 0
