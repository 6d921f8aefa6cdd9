"""Real steps: their time for `fastpar plan --measure`, on this machine's ranks, and their memory.

All ranks of a layout train at the same time, as in a run: they share the machine's cores, caches
and links. Layouts take turns, because what else runs there changes within minutes.

A step's peak memory is measured with StepMemory:

    with StepMemory(device) as memory:
        step()
    print(memory.peak_bytes)

On a GPU it is the peak of torch's allocator. The CPU's allocator records no peak, but reports every
allocation and release to a profiler: the peak is the highest sum of these, on top of what was alive
before. Alive are the storages of all tensors that Python knows, and this rank's share of memory
that ranks share (comm/transports.py), which does not come from torch's allocators.

Not counted: a transport's own memory (NCCL's buffers; up to 8 MiB per group of the shared memory),
the heaps of the interpreter and of libraries, and on the CPU allocations by other threads.

[Note: what Python does not know] Buckets of torch's DDP belong to C++ alone. For such strategies
enter with alive_bytes=0 before the model is built, and call begin_step() before the step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import Mesh
from fastpar.comm.ranks import Rank, Ranks, threads_per_rank
from fastpar.comm.transports import shared_bytes, shared_ranges
from fastpar.data.batches import sample_batch, to_device
from fastpar.doctor.trial import synchronize
from fastpar.engine.engine import Engine, engine_of
from fastpar.engine.pipeline_step import pipeline_step
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import make_key
from fastpar.kernels.backend import _C
from fastpar.kernels.loss.linear_cross_entropy import workspace_bytes
from fastpar.models.gpt import GPT
from fastpar.models.set_up import set_up
from fastpar.settings.mesh import parse_grid

SEED = 1
SECONDS, QUICK_SECONDS = 30.0, 6.0  # of all turns together
WARM_UP, STEPS = 1, 2  # of a turn


class ShortRun:
    """The model of a workload, set up on the ranks, and steps of it.

    Args:
        mesh: with setup.world_size ranks, setup.tp and setup.mesh.pp.
    Ranks: all.
    """

    def __init__(self, workload: Workload, setup: Setup, mesh: Mesh) -> None:
        self.workload, self.setup, self.mesh = workload, setup, mesh
        config, dtype = setup.config(workload), DTYPES[setup.dtype]
        if setup.transport == "gloo":
            config = config.replace({"transport": "torch"})
        self.model = GPT(workload.shape, seed=SEED).to(mesh.device, dtype)
        many = setup.grad_accum_steps
        self.optimizer = set_up(self.model, mesh, config, dtype=dtype, grad_accum_steps=many)
        self.engine = engine_of(self.model)
        n_tokens = (max(4 * workload.batch_size, 8) + 1) * workload.seq_len + 1
        vocabulary = workload.shape.vocab_size
        self._tokens = np.random.default_rng(SEED).integers(vocabulary, size=n_tokens)
        self._tokens = self._tokens.astype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self._next = 0

    def step(self) -> None:
        """Runs one optimizer step, like Trainer.train_step()."""
        workload, setup, mesh = self.workload, self.setup, self.mesh
        self.model.train()
        many, piped = setup.grad_accum_steps, self.engine.shards.stages is not None
        loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        batches = []
        for j in range(many):
            first = self._next + (j * mesh.dp_size + mesh.dp_rank) * setup.micro_batch_size
            x, y = sample_batch(
                self._tokens,
                seed=SEED,
                first_sample=first,
                n_samples=setup.micro_batch_size,
                block_size=workload.seq_len,
                device=mesh.device,
            )
            key = to_device(make_key(SEED, first), mesh.device)
            if piped:  # its stages take all micro-batches at once
                batches.append((x, y, key))
                continue
            part = self.model(x, y, rng_key=key) / many
            part.backward()
            loss += part.detach()
        if piped:
            xs, ys, keys = zip(*batches)
            rows = torch.cat(xs), torch.cat(ys)
            loss += pipeline_step(self.model, *rows, micro_batches=many, rng_keys=keys)
        self.engine.contribute(loss.reshape(1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._next += workload.batch_size
        assert self.optimizer.grad_norm is not None
        if mesh.device.type == "cpu":
            self.optimizer.grad_norm.item()  # the trainer reads every step's numbers

    def seconds(self, count: int) -> list[float]:
        """Seconds of `count` steps on this rank; on a GPU their mean, repeated."""
        synchronize(self.mesh.device.type)
        marks = [time.perf_counter()]
        for _ in range(count):
            self.step()
            marks.append(time.perf_counter())
        if self.mesh.device.type != "cuda":
            return [end - start for start, end in pairwise(marks)]
        torch.cuda.synchronize()
        return [(time.perf_counter() - marks[0]) / count] * count


def slowest(ranks: list[list[float]]) -> list[float]:
    """The seconds of each step on its slowest rank."""
    return [max(each) for each in zip(*ranks)]


def measure(
    workload: Workload, setups: Sequence[Setup], *, threads: int | None = None, seconds: float
) -> list[list[float]]:
    """Seconds of steps of each setup, on its slowest rank; all have the same number of ranks.

    Args:
        threads: CPU threads per rank; None: as `fastpar train` would choose.
        seconds: of all turns; each setup has one at least.
    Raises:
        RuntimeError: a rank died.
    """
    ranks, times_s = setups[0].world_size, [list[float]() for _ in setups]
    with Ranks(
        ranks, threads=threads_per_rank(threads, ranks), device=setups[0].device_type
    ) as pool:
        stop = time.monotonic() + seconds
        while not times_s[-1] or time.monotonic() < stop:
            for setup, times in zip(setups, times_s):
                times += slowest(pool.call(_turn, workload, setup))
    return times_s


def mesh_of(setup: Setup, device: torch.device | str) -> Mesh:
    """The mesh of a layout. Ranks: all."""
    if setup.mesh.tp_grid is not None:
        return Mesh(tp_grid=parse_grid(setup.mesh.tp_grid), device=device)
    return Mesh(tp=setup.tp, cp=setup.mesh.cp, pp=setup.mesh.pp, ep=setup.mesh.ep, device=device)


def _turn(rank: Rank, workload: Workload, setup: Setup) -> list[float]:
    """Seconds of some steps on this rank."""
    run = ShortRun(workload, setup, mesh_of(setup, rank.mesh.device))
    run.seconds(WARM_UP)
    rank.barrier()
    times = run.seconds(STEPS)
    del run
    gc.collect()
    return times


# Memory

_MARK = "fastpar: a step begins"


class StepMemory:
    """Measures the peak between entering, or the last begin_step(), and leaving.

    Args:
        device: where the step computes.
        alive_bytes: this rank's memory on entering; None: this process's. Ranks that are threads of
            one process must pass it.
    Attributes:
        alive_bytes: before the step; peak_bytes: during it, alive_bytes included; left_bytes: after
            it. Known after leaving.
    Ranks: each on its own; nothing is sent.
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
            _start_profiler()
        return self

    def begin_step(self) -> None:
        """Resets the peak."""
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
    """What a rank holds between two steps: the engine's tensors, the optimizer's, workspaces.

    Do not use alive_bytes() in a process with other threads: it briefly references every object,
    and a tuple that a thread is building then fails to grow (SystemError).
    """
    storages = {}
    for state in optimizer.state.values():
        for x in state.values():
            if isinstance(x, torch.Tensor):
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(engine.memory().values()) + sum(storages.values()) + workspace_bytes()


def alive_bytes() -> int:
    """Bytes of all tensors in this process's CPU memory, each storage once; see held_bytes()."""
    shared = shared_ranges()
    storages: dict[int, int] = {}
    for x in gc.get_objects():
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
            continue
        if x.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(x):
            continue
        storage = x.untyped_storage()
        start = storage.data_ptr()
        if storage.nbytes() and not any(a <= start < b for a, b in shared):
            storages[start] = storage.nbytes()
    workspace = 0 if _C is None else torch.ops.fastpar._workspace_bytes()  # no tensors of Python
    return sum(storages.values()) + shared_bytes() + workspace


# torch's older profiler: unlike the newer one it is local to a thread, so that ranks may be
# threads, and it prints nothing.


def _start_profiler() -> None:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig, ProfilerState, _enable_profiler_legacy

    record_shapes, memory, stack, flops, modules = False, True, False, False, False
    options = (record_shapes, memory, stack, flops, modules, _ExperimentalConfig())
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *options))


def _stop_profiler() -> list[tuple[str, str, int]]:
    """(kind, name, bytes) of this thread's events, in order."""
    from torch.autograd import _disable_profiler_legacy

    events: list[Any] = [event for thread in _disable_profiler_legacy() for event in thread]
    return [(e.kind(), e.name(), e.cpu_memory_usage()) for e in events]
