"""`fastpar plan --measure`: real steps of the best layouts, on this machine's ranks.

All ranks of a layout train at the same time, as in a run: they share the machine's cores, caches
and links. Layouts take turns, because what else runs there changes within minutes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import Mesh
from fastpar.comm.ranks import Rank, Ranks, threads_per_rank
from fastpar.data.batches import sample_batch, to_device
from fastpar.doctor.trial import synchronize
from fastpar.engine.engine import engine_of
from fastpar.engine.pipeline_step import pipeline_step
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import make_key
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
