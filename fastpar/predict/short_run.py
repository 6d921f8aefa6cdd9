"""A few of the trainer's steps on random tokens, without a run folder.

measure.py takes a step's fixed costs from it, `python -m bench plan` measures it beside a
prediction. The step is the trainer's without its journal, guards and signals.
"""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import torch

from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import Mesh
from fastpar.data.batches import sample_batch, to_device
from fastpar.engine.engine import engine_of
from fastpar.engine.pipeline_step import pipeline_step
from fastpar.files.dtypes import DTYPES
from fastpar.kernels import make_key
from fastpar.models.gpt import GPT
from fastpar.models.set_up import set_up

SEED = 1


class ShortRun:
    """The model of a workload, set up on the ranks, and steps of it.

    Args:
        mesh: of setup.world_size ranks, with setup.tp and setup.pp.
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
        """One optimizer step, like Trainer.train_step()."""
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
            if piped:  # its stages take all at once
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
        """Seconds of so many steps on this rank; on a GPU their mean, so many times."""
        on_gpu = self.mesh.device.type == "cuda"
        marks: list[float] = []
        for _ in range(count):
            if on_gpu and not marks:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            self.step()
        if on_gpu:
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        if on_gpu:
            return [(marks[-1] - marks[0]) / count] * count
        return [end - start for start, end in pairwise(marks)]


def slowest(ranks: list[list[float]]) -> list[float]:
    """The seconds of each step on the rank that took longest."""
    return [max(each) for each in zip(*ranks)]
