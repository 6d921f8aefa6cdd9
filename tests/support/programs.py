"""Programs that are hard for engines, compared bit for bit with one process.

`plain` has no engine: it adds up the gradients of the ranks' batches in a pairwise tree, as the
collectives do, and steps a fastpar.AdamW.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from same_run import pairwise
from torch import nn

from fastpar import AdamW, Mesh, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.004, "first_bucket_mb": 0.001}  # several buckets of a few parameters
STAGES = (0, 1, 2, 3)
STEPS = 3
OPTIMIZER = {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 1.0, "master_weights": True}
V, C = 13, 8


class Block(nn.Module):
    def __init__(self, width=C):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Embedding, blocks, head; run: how a block is called."""

    def __init__(self, *, tied=True, n_block=3, run=nn.Module.__call__):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block() for _ in range(n_block))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.run = run

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


def batch(i, n=3):
    return torch.randint(0, V, (n, 5), generator=torch.Generator().manual_seed(i))


def loss_of(model, i, reduction="mean", n=3):
    idx = batch(i, n)
    logits = model(idx)
    targets = idx.roll(1, 1).flatten()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets, reduction=reduction)


class Case(NamedTuple):
    """loss(model, i) is that of batch i; between(model, i) runs after each step.

    Args:
        backward: what is done with batch i, in place of the backward of its loss.
        hang: is called with the model that parallelize() has returned.
        alike: every rank has the same batch, so that the mean is each rank's own gradient.
    """

    build: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, int], torch.Tensor] = loss_of
    backward: Callable[[nn.Module, int], None] | None = None
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    between: Callable[[nn.Module, int], None] = lambda model, i: None
    hang: Callable[[nn.Module], None] = lambda model: None
    options: Any = None
    stages: tuple[int, ...] = STAGES
    alike: bool = False

    def run(self, model, i, losses):
        if self.backward is not None:
            return self.backward(model, i)
        loss = self.loss(model, i)
        loss.backward()
        losses.append(loss.detach())


def fill(model, seed=5):
    """The same values on every rank: torch's default generator is shared by threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            values = torch.empty(p.shape, dtype=torch.float64)
            p.copy_(values.uniform_(-0.5, 0.5, generator=generator))
    return model


def set_mean(model, gradients):
    """p.grad = the mean of one gradient a rank; None where no rank has one."""
    for name, p in model.named_parameters():
        terms = [g[name] for g in gradients]
        if all(t is None for t in terms):
            p.grad = None
            continue
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        terms = [torch.zeros_like(p, dtype=wide) if t is None else t.to(wide) for t in terms]
        p.grad = (pairwise(terms) / len(terms)).to(p.dtype)


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def snapshot(model, optimizer, losses=()):
    """Everything that training changes, whole, as plain tensors. Ranks: all."""
    result = {f"model.{n}": v.clone() for n, v in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                result[f"optimizer.{i}.{key}"] = value.clone()
    return result | {f"loss {i}": loss for i, loss in enumerate(losses)}


def plain(case, world_size, steps=STEPS):
    """The expected parameters of each rank."""
    model = fill(case.build())
    for p in model.parameters():  # as in a bucket: products may round a transposed weight otherwise
        p.data = p.data.contiguous()
    case.hang(model)
    optimizer = AdamW(case.groups(model), **OPTIMIZER)
    ranks = range(1 if case.alike else world_size)
    losses = [[] for _ in ranks]
    for step in range(steps):
        parts = []
        for rank in ranks:
            model.zero_grad()
            case.run(model, step * len(ranks) + rank, losses[rank])
            parts.append(gradients(model))
        set_mean(model, parts)
        optimizer.step()
        case.between(model, step)
    return [snapshot(model, optimizer, losses[r % len(ranks)]) for r in range(world_size)]


def on_ranks(case, world_size, stage, steps=STEPS):
    def ranks():
        mesh = Mesh()
        asked = {**SMALL, **(case.options or {})}
        units = asked.pop("units", None)
        model = fill(case.build())
        parallelize(model, mesh, Parallel.of(zero_stage=stage, **asked), units=units)
        case.hang(model)
        optimizer, losses = AdamW(case.groups(model), **OPTIMIZER), []
        for step in range(steps):
            i = step if case.alike else step * world_size + mesh.dp_rank
            case.run(model, i, losses)
            optimizer.step()
            optimizer.zero_grad()
            case.between(model, step)
        return snapshot(model, optimizer, losses)

    return run_ranks(ranks, world_size)


def assert_same(got, expected, where=""):
    """Tensors, numbers, and dicts and sequences of them, bit for bit; shards are flat."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(got[name], value, f"{where} {name}")
    elif isinstance(expected, (list, tuple)):
        for x, y in zip(got, expected, strict=True):
            assert_same(x, y, where)
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, where
        assert torch.equal(got.reshape(expected.shape), expected), where
    else:
        assert got == expected, where


def check(case, world_size, stage, steps=STEPS):
    expected = plain(case, world_size, steps)
    assert all(v.isfinite().all() for v in expected[0].values())
    for result, want in zip(on_ranks(case, world_size, stage, steps), expected, strict=True):
        assert_same(result, want)
