"""One real rank of an emulated mesh that trains a GPT, and what it says."""

import contextlib

import torch

from bench.systems.emulated import EmulatedMesh, Link, emulated
from fastpar import GPT, AdamW, parallelize
from fastpar.nn.recompute import recompute


class EmulatedRun:
    """A rank that trains, and what it said: forward, backward, step.

    Args:
        idx: tokens and targets of every step.
        axes: of the mesh.
        mode: of recomputation; options: of parallelize().
    """

    def __init__(self, config, idx, world_size, rank, axes, mode="none", **options):
        self.idx = idx
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(EmulatedMesh(world_size, rank, **axes))
            self.link = Link(None)
            stack.callback(self.link.close)
            self.model = GPT(config)
            parallelize(self.model, mesh, collectives=emulated(self.link), **options)
            recompute(self.model, mode)
            self.optimizer = AdamW(self.model.parameters())
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def train(self, n_micro=1):
        """What was said in each phase, and by zero_grad() at the end."""
        phases = []
        for _ in range(n_micro):
            loss = self.model(self.idx, self.idx)
            phases.append(self.said())
            loss.backward()
            phases.append(self.said())
        self.optimizer.step()
        phases.append(self.said())
        self.optimizer.zero_grad()
        return [*phases, self.said()]

    @torch.no_grad()
    def evaluate(self):
        self.model(self.idx)
        return self.said()

    def said(self):
        ops = list(self.link.ops)
        self.link.ops.clear()
        return ops


def of_tp(ops):
    """Kind and bytes of those inside of layers."""
    return [f"{op.kind} {op.tensor_bytes}" for op in ops if op.role == "tp"]
