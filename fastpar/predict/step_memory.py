"""The peak of a training step's memory on this rank, measured.

    with StepMemory(device) as memory:
        step()
    print(memory.peak_bytes)

On a GPU it is the peak of torch's allocator. The CPU's allocator keeps none, but tells a profiler
of every allocation and every release: the peak is the highest sum of these, on top of what was
alive before. Alive are the storages of all tensors that Python knows, and what this rank took from
memory that ranks share (shm.py), which no allocator of torch's has given.

Not counted: what a transport keeps for itself (NCCL's buffers; up to 8 MiB for each group of the
shared memory), the heaps of the interpreter and of libraries, and on the CPU what other threads
than this one allocate.

[Note: what Python does not know] Buckets of torch's DDP belong to C++ alone. For such strategies
enter with alive_bytes=0 before the model is built, and call begin_step() before the step.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from typing import Any

import torch

from fastpar.comm.shm import shared_bytes, shared_ranges
from fastpar.engine.engine import Engine
from fastpar.kernels.linear_cross_entropy import workspace_bytes

_MARK = "fastpar: a step begins"


class StepMemory:
    """Measures the peak between entering, or the last begin_step(), and leaving.

    Args:
        device: where the step computes.
        alive_bytes: what this rank has when it enters; None: what this process has. Ranks that are
            threads of one process have to say it.
    Attributes:
        alive_bytes: before the step; peak_bytes: during it, alive_bytes included; left_bytes: after
            it. Known after leaving.
    Ranks: each for itself; nothing is sent.
    """

    def __init__(self, device: torch.device, *, alive_bytes: int | None = None) -> None:
        self.device = device
        self._given = alive_bytes
        self.alive_bytes = self.peak_bytes = self.left_bytes = 0

    def __enter__(self) -> StepMemory:
        if self.device.type == "cuda":
            self.begin_step()
        else:
            self.alive_bytes = alive_bytes() if self._given is None else self._given
            self._shared = shared_bytes()
            _use_up_warning()
            _start_profiler()
        return self

    def begin_step(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.alive_bytes = torch.cuda.memory_allocated(self.device)
        else:
            with torch.autograd.profiler.record_function(_MARK):
                pass

    def __exit__(self, *exc_info: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            self.left_bytes = torch.cuda.memory_allocated(self.device)
            return
        now = peak = self.alive_bytes + shared_bytes() - self._shared
        for kind, name, size in _stop_profiler():
            if kind == "memory_alloc":
                now += size
                peak = max(peak, now)
            elif name == _MARK and kind == "push":
                self.alive_bytes = peak = now
        self.peak_bytes, self.left_bytes = peak, now


def held_bytes(engine: Engine, optimizer: torch.optim.Optimizer) -> int:
    """What a rank has between two steps: the engine's tensors, the optimizer's, workspaces.

    In a process with other threads alive_bytes() is no choice: it holds every object for a moment,
    and a tuple that a thread is just making then fails (SystemError) where it grows.
    """
    found = {}
    for state in optimizer.state.values():
        for x in state.values():
            if isinstance(x, torch.Tensor):
                found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(engine.memory().values()) + sum(found.values()) + workspace_bytes()


def alive_bytes() -> int:
    """Bytes of all tensors in this process's CPU memory, each storage once; see held_bytes()."""
    shared = shared_ranges()
    found: dict[int, int] = {}
    for x in gc.get_objects():
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
            continue
        if x.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(x):
            continue
        storage = x.untyped_storage()
        start = storage.data_ptr()
        if storage.nbytes() and not any(a <= start < b for a, b in shared):
            found[start] = storage.nbytes()
    return sum(found.values()) + shared_bytes()


# torch's older profiler: unlike the newer one it is a thread's own, so that ranks may be threads,
# and it prints nothing.


@functools.cache
def _use_up_warning() -> None:
    """torch says on stderr that it does not know the size of what is freed but was allocated before
    the profile; the first time and every 1000th. That is known here, so nobody needs to read it."""
    x = torch.empty(1, dtype=torch.float32, device="cpu")
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        _start_profiler()
        del x
        _stop_profiler()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _start_profiler() -> None:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig, ProfilerState, _enable_profiler_legacy

    record_shapes, memory, stack, flops, modules = False, True, False, False, False
    options = (record_shapes, memory, stack, flops, modules, _ExperimentalConfig())
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *options))


def _stop_profiler() -> list[tuple[str, str, int]]:
    """(kind, name, bytes) of what this thread did, in order."""
    from torch.autograd import _disable_profiler_legacy

    events: list[Any] = [event for thread in _disable_profiler_legacy() for event in thread]
    return [(e.kind(), e.name(), e.cpu_memory_usage()) for e in events]
