"""A few steps of a workload in this process, without a run: the trainer's step on random tokens.

What is measured beside a prediction (plan_check.py) and where its fixed costs come from
(measure.py). The step is that of train.py without its journal, guards and signals.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from fastpar.comm.mesh import Mesh
from fastpar.cost.workload import Setup, Workload
from fastpar.data.batches import sample_batch
from fastpar.kernels import make_key
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.optim.schedule import make_optimizer
from fastpar.parallel.engine import engine_of
from fastpar.parallel.parallelize import parallelize
from fastpar.train.journal import to_device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 1


class ShortRun:
    """The model of a workload, set up on the ranks, and steps of it.

    Args:
        mesh: of setup.world_size ranks, with setup.tp.
    Ranks: all.
    """

    def __init__(self, workload: Workload, setup: Setup, mesh: Mesh) -> None:
        self.workload, self.setup, self.mesh = workload, setup, mesh
        config, dtype = setup.config(workload), DTYPES[setup.dtype]
        model = GPT(workload.shape, seed=SEED).to(mesh.device, dtype)
        parallelize(
            model,
            mesh,
            zero_stage=setup.zero_stage,
            shard_size=setup.shard_size,
            bucket_mb=setup.bucket_mb,
            grad_dtype=DTYPES[setup.grad_dtype],
            reduce_dtype=DTYPES[setup.reduce_dtype],
            accumulate=setup.accumulate,
            grad_accum_steps=setup.grad_accum_steps,
            transport="auto" if setup.transport in ("shm", "nccl") else "torch",
            sequence_parallel=setup.sequence_parallel,
        )
        recompute(model, setup.activation_checkpointing)
        self.model, self.engine = model, engine_of(model)
        self.optimizer = make_optimizer(model, config.optim, dtype=dtype, seed=SEED)
        rows = max(4 * workload.batch_size, 8)
        generator = np.random.default_rng(SEED)
        self._tokens = generator.integers(
            workload.shape.vocab_size, size=(rows + 1) * workload.seq_len + 1
        ).astype(np.uint16 if workload.shape.vocab_size <= 1 << 16 else np.uint32)
        self._next = 0

    def step(self) -> None:
        """One optimizer step, as Trainer.train_step()."""
        workload, setup, mesh = self.workload, self.setup, self.mesh
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for j in range(setup.grad_accum_steps):
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
            part = self.model(x, y, rng_key=key) / setup.grad_accum_steps
            part.backward()
            loss += part.detach()
        self.engine.contribute(loss.reshape(1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._next += workload.batch_size
        assert self.optimizer.grad_norm is not None
        if mesh.device.type == "cpu":
            self.optimizer.grad_norm.item()  # the trainer reads every step's numbers

    def seconds(self, count: int) -> list[float]:
        """Of each of so many steps on this rank; on a GPU their mean, so many times."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                self.step()
            torch.cuda.synchronize()
            return [(time.perf_counter() - start) / count] * count
        found = []
        for _ in range(count):
            start = time.perf_counter()
            self.step()
            found.append(time.perf_counter() - start)
        return found


def slowest(ranks: list[list[float]]) -> list[float]:
    """Of each step, the rank that took longest."""
    return [max(each) for each in zip(*ranks)]
