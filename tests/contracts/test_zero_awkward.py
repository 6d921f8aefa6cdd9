"""Models and loops that engines usually stumble over: every stage gives the bits of one process.

`plain` is the yardstick: one process without an engine that adds up the gradients of the ranks'
batches in a pairwise tree, as the collectives do, and steps a fastpar.AdamW.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from cells import covering
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastpar
from fastpar import AdamW, Mesh, parallelize
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.004, "first_bucket_mb": 0.001}  # several buckets of a few parameters
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

    def __init__(self, *, tied=True, n_block=3, run=None):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block() for _ in range(n_block))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.run = run or (lambda block, x: block(x))

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
    return F.cross_entropy(logits.flatten(0, -2).float(), targets, reduction=reduction)


def backward(model, i):
    loss_of(model, i).backward()


class Case(NamedTuple):
    """backward(model, i) is batch i; between(model, i) runs after each step."""

    build: Callable[[], nn.Module] = Net
    backward: Callable[[nn.Module, int], None] = backward
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    between: Callable[[nn.Module, int], None] = lambda model, i: None
    options: Any = None


def fill(model):
    """The same values on every rank: torch's default generator is shared by threads."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            values = torch.empty(p.shape, dtype=torch.float64)
            p.copy_(values.uniform_(-0.5, 0.5, generator=generator))
    return model


def tree(terms):
    """((0 + 1) + (2 + 3)) + ..., what is left over folded from the right; None: a missing term."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2])]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def set_mean(model, gradients):
    """p.grad = the mean of one gradient a rank; None where no rank has one."""
    for name, p in model.named_parameters():
        terms = [g[name] for g in gradients]
        if all(t is None for t in terms):
            p.grad = None
            continue
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        terms = [torch.zeros_like(p, dtype=wide) if t is None else t.to(wide) for t in terms]
        p.grad = (tree(terms) / len(terms)).to(p.dtype)


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def snapshot(model, optimizer):
    """Everything that training changes, whole, as plain tensors. Ranks: all."""
    result = {f"model.{n}": v.clone() for n, v in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                result[f"optimizer.{i}.{key}"] = value.clone()
    return result


def plain(case, world_size, steps=STEPS):
    model = fill(case.build())
    optimizer = AdamW(case.groups(model), **OPTIMIZER)
    for step in range(steps):
        parts = []
        for rank in range(world_size):
            model.zero_grad()
            case.backward(model, step * world_size + rank)
            parts.append(gradients(model))
        set_mean(model, parts)
        optimizer.step()
        case.between(model, step)
    return snapshot(model, optimizer)


def on_ranks(case, world_size, stage, steps=STEPS, **options):
    def ranks():
        mesh = Mesh()
        asked = {**SMALL, **(case.options or {}), **options}
        units = asked.pop("units", None)
        asked = Parallel.of(zero_stage=stage, **asked)
        model = parallelize(fill(case.build()), mesh, asked, units=units)
        optimizer = AdamW(case.groups(model), **OPTIMIZER)
        for step in range(steps):
            case.backward(model, step * world_size + mesh.dp_rank)
            optimizer.step()
            optimizer.zero_grad()
            case.between(model, step)
        return snapshot(model, optimizer)

    return run_ranks(ranks, world_size)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name].reshape(value.shape), value), name


stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
sharded = pytest.mark.parametrize("stage", [1, 2, 3])
worlds = pytest.mark.parametrize("world_size", [2, 3])


# Which parameters, how often, of which kind


def frozen():
    model = Net(tied=False)
    for p in (model.wte.weight, model.blocks[1].up.weight, model.blocks[2].norm.bias):
        p.requires_grad_(False)
    model.blocks[0].requires_grad_(False)  # a whole unit
    return model


class Partly(Block):
    """A block with a part that it does not always use."""

    def __init__(self):
        super().__init__()
        self.idle, self.use_idle = nn.Linear(C, C), False

    def forward(self, x):
        return super().forward(self.idle(x) if self.use_idle else x)


class Extra(Net):
    """Batches i with used(i) alone use extra, the last two blocks and a part of another."""

    def __init__(self, used):
        super().__init__()
        self.extra, self.never = Block(), nn.Linear(C, C)
        self.blocks = nn.ModuleList([Block(), Partly(), Block(), Block()])
        self.used, self.i = used, 0

    def forward(self, idx):
        used = self.used(self.i)
        self.blocks[1].use_idle = used
        x = self.extra(self.wte(idx)) if used else self.wte(idx)
        for k, block in enumerate(self.blocks):
            if used or k < 2:
                x = block(x)
        return self.head(self.norm(x))


def backward_extra(model, i):
    model.i = i
    backward(model, i)


class Reused(Net):
    """A block three times, a parameter in two blocks, a module called twice in one place."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, idx):
        x = self.wte(idx)
        for block in (*self.blocks, self.blocks[0], self.blocks[2], self.blocks[0]):
            x = block(x) + 0.1 * self.norm(self.norm(x))
        return self.head(self.norm(x))


class Dtypes(Net):
    """A float64 and a bf16 block among fp32 ones."""

    def __init__(self):
        super().__init__(tied=False)
        self.blocks[0].double()
        self.blocks[2].bfloat16()
        self.run = lambda block, x: block(x.to(block.up.weight.dtype)).to(x.dtype)


def groups_of(model):
    """Three groups with their own options, across buckets and units."""
    named = dict(model.named_parameters())
    norms = [p for n, p in named.items() if "norm" in n]
    ups = [p for n, p in named.items() if ".up." in n]
    rest = [p for n, p in named.items() if "norm" not in n and ".up." not in n]
    return [
        {"params": norms, "weight_decay": 0.0, "lr": 0.02},
        {"params": ups, "betas": (0.5, 0.7), "eps": 1e-3},
        {"params": rest},
    ]


class Small(nn.Module):
    """0-dim and one-element parameters, one without elements; less than one shard per rank."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.table = nn.Parameter(torch.ones(V, 1))

    def forward(self, idx):
        return self.scale * self.table[idx].squeeze(-1) @ torch.ones(5, V) + self.shift


def backward_small(model, i):
    (model(batch(i)) + model.empty.sum()).square().mean().backward()


class Lists(nn.Module):
    """ModuleLists in a ModuleList, and one inside a block."""

    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(V, C), nn.Linear(C, V)
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.stages[0][0].experts = nn.ModuleList(nn.Linear(C, C) for _ in range(2))

    def forward(self, idx):
        x = self.wte(idx)
        for stage in self.stages:
            for block in stage:
                x = block(x)
                for expert in getattr(block, "experts", ()):  # from outside of their unit
                    x = x + expert(x)
        return self.head(x)


class Beside(Net):
    """Weights that are used without a call of their module: of blocks before, after and without
    their forward, in a part's, in a recomputation, and without gradients."""

    def forward(self, idx):
        first, second, third = self.blocks
        x = self.wte(idx)
        x = x + (x @ second.up.weight.T).tanh() @ second.up.weight
        with torch.no_grad():
            scale = 1 + second.down.weight.square().mean()
        x = second(first(x)) * scale
        x = x + F.linear(F.linear(x, first.up.weight), first.down.weight, first.down.bias)
        x = checkpoint(
            lambda x: x + x @ first.up.weight.t() @ third.up.weight, x, use_reentrant=False
        )
        return self.head(self.norm(first(x))) + first.norm.weight.sum() + third.norm.bias.sum()


def backward_beside(model, i):
    with torch.no_grad():
        model(batch(i))
    backward(model, i)


class NoList(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.first, self.second = nn.Embedding(V, C), Block(), Block()
        self.head = nn.Linear(C, V)

    def forward(self, idx):
        return self.head(self.second(self.first(self.wte(idx))))


MODELS = {
    "tied": Case(),
    "frozen": Case(frozen),
    "unused on a rank": Case(lambda: Extra(lambda i: i % 2), backward_extra),
    "unused a step": Case(lambda: Extra(lambda i: 1 < i < 4), backward_extra),
    "never used": Case(lambda: Extra(lambda i: False), backward_extra),
    "used several times": Case(Reused),
    "parameter groups": Case(groups=groups_of),
    "dtypes": Case(Dtypes),
    "small": Case(Small, backward_small),
    "lists in lists": Case(Lists),
    "used without a call": Case(Beside, backward_beside),
    "no list": Case(NoList),
    "sequential": Case(lambda: nn.Sequential(nn.Embedding(V, C), Block(), nn.Linear(C, V))),
    "units of a class": Case(NoList, options={"units": Block}),
}


@covering(2, ("name", MODELS), ("stage", [0, 1, 2, 3]), ("world_size", [2, 3]))
def test_models(name, stage, world_size):
    case = MODELS[name]
    expected = plain(case, world_size)
    for result in on_ranks(case, world_size, stage):
        assert_same(result, expected)


@sharded
def test_a_loss_that_uses_an_absent_weight_is_refused_by_name(stage):
    def ranks():
        model = parallelize(fill(Net()), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        optimizer, p = AdamW(model.parameters(), **OPTIMIZER), model.blocks[0].up.weight
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        match = r"parameter 'blocks\.0\.up\.weight' is used outside of the model's forward"
        with pytest.raises(RuntimeError, match=match):
            p.square().sum()
        with torch.no_grad():
            assert p.square().sum().isnan()
        with fastpar.engine_of(model).gathered():
            assert p.square().sum().isfinite()
        loss = loss_of(model, 1)
        if stage == 3:
            with pytest.raises(RuntimeError, match=match):
                loss + torch.stack([p.sum(), p.T.sum()]).sum()
        else:
            loss = loss + p.sum()
        loss.backward()
        optimizer.step()

    run_ranks(ranks, 2)


@stages
def test_what_no_rank_uses_does_not_move(stage):
    """Neither its value nor its state; weight decay would show it."""
    case = Case(lambda: Extra(lambda i: i < 2), backward_extra)
    start = fill(case.build()).state_dict()
    after_one = on_ranks(case, 2, stage, steps=1)
    for result, early in zip(on_ranks(case, 2, stage), after_one):
        for name, value in result.items():
            if "never" in name:
                assert torch.equal(value, start[name.removeprefix("model.")])
            if "extra" in name or "idle" in name or "blocks.2" in name or "blocks.3" in name:
                assert torch.equal(value, early[name])
                assert not torch.equal(value, start[name.removeprefix("model.")])


# What blocks return


@dataclass
class Output:
    x: torch.Tensor
    count: int = 0
    more: dict = field(default_factory=dict)


class Wrapped(Block):
    """Takes and returns x inside a structure of the given kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "dict":
            return {"x": super().forward(x["x"]), "extra": [x["x"] * 2.0, None]}
        if self.kind == "tuple":
            return super().forward(x[0]), (x[0], {"n": 3})
        return Output(super().forward(x.x), x.count + 1, {"skip": x.x * 2.0})


class Structured(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Wrapped(kind) for _ in range(3))

    def forward(self, idx):
        x = self.wte(idx)
        if self.kind == "dict":
            x = {"x": x}
            for block in self.blocks:
                x = block(x)
            x = x["x"] + x["extra"][0]
        elif self.kind == "tuple":
            x = (x, None)
            for block in self.blocks:
                x = block(x)
            x = x[0] + x[1][0]
        else:
            x = Output(x)
            for block in self.blocks:
                x = block(x)
            x = x.x + x.more["skip"]
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass"])
@stages
def test_outputs(kind, stage):
    case = Case(lambda: Structured(kind))
    expected = plain(case, 2)
    for result in on_ranks(case, 2, stage):
        assert_same(result, expected)


# Activation checkpointing


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


class Whole(Net):
    """The whole stack in one checkpoint."""

    def forward(self, idx):
        x = self.wte(idx)
        x = checkpointed(self.stack, x)
        return self.head(self.norm(x))

    def stack(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def gpt(mode):
    def build():
        config = fastpar.GPTConfig(
            n_layer=3, n_head=2, n_embd=C, block_size=5, vocab_size=V, dropout=0.0
        )
        return recompute(fastpar.GPT(config), mode)

    return build


@pytest.mark.parametrize(
    ("build", "same_as"),
    [
        pytest.param(lambda: Net(run=checkpointed), Net, id="blocks"),
        pytest.param(Whole, Net, id="stack"),
        pytest.param(lambda: recompute(Net()), Net, id="recompute full"),
        pytest.param(lambda: recompute(Net(), "selective"), Net, id="recompute selective"),
        pytest.param(lambda: recompute(Net(), every=2), Net, id="recompute every second"),
        pytest.param(gpt("full"), gpt("none"), id="GPT full"),
        pytest.param(gpt("selective"), gpt("none"), id="GPT selective"),
    ],
)
@stages
def test_checkpointing(build, same_as, stage):
    expected = plain(Case(build), 2)
    if same_as is not None:
        assert_same(plain(Case(same_as), 2), expected)
    for result in on_ranks(Case(build), 2, stage):
        assert_same(result, expected)
