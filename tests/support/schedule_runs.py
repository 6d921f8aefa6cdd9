"""One real rank of a lone mesh trains a small model; its communication is recorded."""

import contextlib

import torch
from lone_rank import LoneMesh, heard
from torch import nn

from fastpar.engine.debug import Debug
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.kernels.global_norm import NORM_WORDS
from fastpar.settings.parallel import Parallel

W, RANK = 64, 5
KIB = 1024
CONTROL = W * 8 * (5 + NORM_WORDS + 1)  # bytes; 5 words ahead, a bit each for up to 62 parameters


class Block(nn.Module):
    """65536 parameters, 256 KiB in fp32; says when it computes."""

    def __init__(self, index, log):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)
        self.index, self.log = index, log

    def forward(self, x):
        self.log.append(f"forward {self.index}")
        y = torch.tanh(x @ self.weight)
        if y.requires_grad:
            y.register_hook(lambda grad: self.log.append(f"backward {self.index}"))
        return y


class Model(nn.Module):
    """64 + 4 x 256 + 64 KiB: slices for 64 ranks need no padding."""

    def __init__(self, log, n_blocks=4):
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(Block(i, log) for i in range(n_blocks))
        self.head = nn.Linear(256, 64, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


P = 64 + 4 * 256 + 64  # KiB
ROOT, LAST = 128, 256  # of it, the root unit (embed and head) and the last block


class Sgd:
    """The least that an optimizer of an engine does."""

    def __init__(self, engine):
        self.engine = engine

    @torch.no_grad()
    def step(self):
        self.engine.before_step()
        self.engine.exchange(None)
        for p in self.engine.shards.params:
            param, grad, _ = self.engine.shards.piece(p)
            if self.engine.has_grad(p):
                param.sub_(grad, alpha=0.1)
        self.engine.after_step()

    def zero_grad(self):
        self.engine.zero_grad()


class Run:
    """A rank that trains, with a record of its communication."""

    def __init__(self, *, world_size=W, rank=RANK, n_micro=1, **kwargs):
        self.n_micro = n_micro
        self.log = []  # of ops, and of what the blocks say
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(LoneMesh(world_size, rank))
            self.model = Model(self.log)
            kwargs = {"bucket_mb": 1 / 4, "first_bucket_mb": 1 / 16, **kwargs}
            parallelize(
                self.model, mesh, Parallel.of(**kwargs), debug=Debug(collectives=heard(self.log))
            )
            self.engine = engine_of(self.model)
            self.optimizer = Sgd(self.engine)
            self._stack = stack.pop_all()
        self.world_size = world_size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def train(self):
        """Runs one step; returns its operations."""
        self.log.clear()
        for _ in range(self.n_micro):
            self.model(torch.arange(64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return list(self.log)

    @torch.no_grad()
    def evaluate(self):
        self.log.clear()
        self.model(torch.arange(64))
        return list(self.log)

    def ops(self, said, control=False):
        """Operations, without what the blocks say and without the control exchange."""
        ops = [op for op in said if not isinstance(op, str)]
        return ops if control else [op for op in ops if not is_control(op)]

    def table(self, said, *, blocks=False):
        """A line for each operation, and for each block that computes."""
        names = [
            "+".join(
                self.engine.shards.layout.slots[i].spec.names[0].split(".weight")[0]
                for i in b.slots
            )
            for b in self.engine.shards.layout.buckets
        ]
        lines = []
        for op in said:
            if isinstance(op, str):
                lines += [op] * blocks
            elif is_control(op):
                lines.append(f"control {op.tensor_bytes} B {op.world_size}")
            else:
                kib, rest = divmod(op.tensor_bytes, KIB)
                assert not rest
                lines.append(f"{op.role} {op.kind} {names[op.tag]} {kib} {op.world_size}")
        return lines


def is_control(op):
    return (op.role, op.kind) == ("reduce", "all_gather")
