"""Models and passes that engines stumble over: every stage gives the bits of one process."""

import contextlib
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cells import covering, slow
from programs import (
    OPTIMIZER,
    SMALL,
    STAGES,
    STEPS,
    Block,
    C,
    Case,
    Net,
    V,
    assert_same,
    batch,
    check,
    fill,
    gradients,
    loss_of,
    set_mean,
)
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fastpar import AdamW, Mesh, parallelize
from fastpar.engine.engine import engine_of_parameter
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

CASES = {"tied": Case()}


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


def loss_of_extra(model, i):
    model.i = i
    return loss_of(model, i)


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
    """0-dim and one-element parameters, one without elements, one that is not contiguous; less than
    one shard per rank."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.table = nn.Parameter(torch.ones(V, 1))
        self.turned = nn.Parameter(torch.ones(V, 5).t())

    def forward(self, idx):
        return self.scale * self.table[idx].squeeze(-1) @ self.turned + self.shift


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


def loss_of_beside(model, i):
    with torch.no_grad():
        model(batch(i))
    return loss_of(model, i)


class NoList(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.first, self.second = nn.Embedding(V, C), Block(), Block()
        self.head = nn.Linear(C, V)

    def forward(self, idx):
        return self.head(self.second(self.first(self.wte(idx))))


class Recurrent(nn.Module):
    """Cells that ranks call differently often: over sequences of their own length."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList((nn.GRUCell(C, C), nn.RNNCell(C, C)))

    def forward(self, x):
        first = second = torch.zeros(1, C)
        for row in x:
            first = self.cells[0](row[None], first)
            second = self.cells[1](first, second)
        return second.square().sum()


class Branches(nn.Module):
    """Two in either order: hooks fire in another order, reductions do not."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x, swapped):
        first, second = (self.b, self.a) if swapped else (self.a, self.b)
        return second(first(x)).sum()


CASES |= {
    "frozen": Case(frozen),
    "cells": Case(Recurrent, lambda m, i: m(torch.ones(1 + 3 * i % 4, C) / 3)),
    "branches in another order": Case(Branches, lambda m, i: m(torch.ones(2, C), i % 2)),
    "unused on a rank": Case(lambda: Extra(lambda i: i % 2), loss_of_extra),
    "unused a step": Case(lambda: Extra(lambda i: 1 < i < 4), loss_of_extra),
    "never used": Case(lambda: Extra(lambda i: False), loss_of_extra),
    "used several times": Case(Reused),
    "parameter groups": Case(groups=groups_of),
    "dtypes": Case(Dtypes),
    "small": Case(Small, lambda m, i: (m(batch(i)) + m.empty.sum()).square().mean()),
    "lists in lists": Case(Lists),
    "used without a call": Case(Beside, loss_of_beside),
    "no list": Case(NoList),
    "sequential": Case(lambda: nn.Sequential(nn.Embedding(V, C), Block(), nn.Linear(C, V))),
    "units of a class": Case(NoList, options={"units": Block}),
}


# What blocks take and return: two tensors and more, in a structure
@dataclass
class Output:
    x: torch.Tensor
    skip: torch.Tensor
    count: int = 0


STRUCTURES = {  # of two tensors, and one tensor of it
    "dict": (lambda x, y: {"x": x, "more": [y, None]}, lambda s: s["x"] + s["more"][0]),
    "tuple": (lambda x, y: (x, (y, {"n": 3})), lambda s: s[0] + s[1][0]),
    "dataclass": (Output, lambda s: s.x + s.skip),
    "namespace": (lambda x, y: SimpleNamespace(x=x, y=y), lambda s: s.x + s.y),  # not looked into
}


class Wrapped(Block):
    def __init__(self, pack, unpack):
        super().__init__()
        self.pack, self.unpack = pack, unpack

    def forward(self, s):
        x = self.unpack(s)
        return self.pack(super().forward(x), 2.0 * x)


class Structured(Net):
    def __init__(self, pack, unpack):
        super().__init__()
        self.blocks = nn.ModuleList(Wrapped(pack, unpack) for _ in range(3))

    def forward(self, idx):
        x = self.wte(idx)
        s = self.blocks[0].pack(x, x)
        for block in self.blocks:
            s = block(s)
        return self.head(self.norm(self.blocks[0].unpack(s)))


CASES |= {
    f"outputs in a {kind}": Case(functools.partial(Structured, *how))
    for kind, how in STRUCTURES.items()
}


# Activation checkpointing: the bits of the same model without
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


CHECKPOINTED = {
    "blocks": lambda: Net(run=checkpointed),
    "stack": Whole,
    "recompute full": lambda: recompute(Net()),
    "recompute selective": lambda: recompute(Net(), "selective"),
    "recompute every second": lambda: recompute(Net(), every=2),
}
CASES |= {f"checkpoints, {name}": Case(build) for name, build in CHECKPOINTED.items()}


def evaluate(no_grad):
    """Several forwards, as generate() runs them, in eval mode and back."""

    def between(model, i):
        model.eval()
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            idx = batch(100 + i)
            for _ in range(3):
                logits = model(idx)
                idx = torch.cat([idx[:, 1:], logits[:, -1:].argmax(-1)], 1)
        model.train()

    return between


def loss_before_evaluation(model, i):
    """The graph of the step is alive while other forwards run."""
    loss = loss_of(model, i)
    evaluate(True)(model, i)
    return loss


def twice(model, i):
    loss = loss_of(model, i)
    loss.backward(retain_graph=True)
    loss.backward()


def inference(model, i):
    with torch.inference_mode():
        model(batch(100 + i))


def all_but_one(model, i):
    """At the end of an epoch a rank has nothing left; it only steps."""
    if i != 3:
        loss_of(model, i).backward()


def two_forwards(model, i):
    return loss_of(model, i) + 0.5 * loss_of(model, 50 + i)


CASES |= {
    "evaluation without gradients": Case(between=evaluate(True)),
    "evaluation with gradients": Case(between=evaluate(False)),
    "inference mode": Case(between=inference),
    "evaluation before backward": Case(loss=loss_before_evaluation),
    "two forwards": Case(loss=two_forwards),
    "two forwards, checkpoints": Case(CHECKPOINTED["blocks"], two_forwards),
    "retained, full": Case(backward=twice, options={"accumulate": "full", "grad_accum_steps": 2}),
    "retain_graph": Case(backward=twice, options={"deterministic": True}),
    "a rank without a batch": Case(backward=all_but_one),
}


# Units that look at parameters or change outputs at unusual moments
def x_of(step):
    return torch.randn(4, 3, C, generator=torch.Generator().manual_seed(step))


def square(model, step):
    return model(x_of(step)).square().mean()


class Stack(nn.Module):
    """Blocks, and what happens to the output of each."""

    def __init__(self, block, after=lambda x: x, n=3):
        super().__init__()
        self.blocks, self.after = nn.ModuleList(block() for _ in range(n)), after
        self.head = nn.Linear(C, C)

    def forward(self, x):
        for block in self.blocks:
            x = self.after(block(x))
        return self.head(x)


class Plain(nn.Module):
    """form: how the output is made of the linear layers' result."""

    def __init__(self, form=lambda y: y):
        super().__init__()
        self.up, self.down, self.form = nn.Linear(C, 2 * C), nn.Linear(2 * C, C), form

    def forward(self, x):
        return self.form(self.down(self.up(x).tanh()))


def unit_case(build, loss=square, **more):
    return Case(
        build, loss, options={"bucket_mb": 0.001, "first_bucket_mb": 1e-4}, alike=True, **more
    )


def shifted(x):
    x += 0.1
    return x


def scaled_rows(x):
    x[:, 1:].mul_(0.5)
    return x


def after_a_dict(x):
    x["x"].relu_()
    return x["x"]


FORMS = {
    "of a linear layer, a view": lambda y: y,
    "its own memory": torch.sin,
    "contiguous": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "a transposed view": lambda y: y.sin().transpose(0, 1).transpose(0, 1),
    "a part": lambda y: torch.cat([y, y], 1)[:, :3],
    "changed in place by the unit": lambda y: y.view(-1, C).mul_(2.0).view_as(y),
}
CHANGES = {
    "relu": nn.ReLU(inplace=True),
    "shifted": shifted,
    "scaled": scaled_rows,
    "sin_": lambda x: x.sin_().view_as(x),
}
for i, (name, form) in enumerate(FORMS.items()):
    whole = name == "its own memory"
    for how, after in list(CHANGES.items()) if whole else [*CHANGES.items()][i % 2 :: 2]:
        CASES[f"output {name}, {how} in place"] = unit_case(
            lambda form=form, after=after: Stack(lambda: Plain(form), after),
            stages=STAGES if whole else (3,),
        )


class Checkpointed(Stack):
    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = shifted(checkpoint(block, x, use_reentrant=False))
        return self.head(x)


class Skips(Plain):
    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return super().forward(x), x


class PassedOn(Stack):
    """An output that is the input, and one without any gradient, beside one with."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = block(x)
        return self.head(x[0] + x[1])


def activations():
    act = nn.ReLU(inplace=True)
    return nn.Sequential(nn.Linear(C, C), act, nn.Linear(C, C), act, nn.Linear(C, C))


class Table(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(8, C)), kind

    def forward(self, n):
        whole = {"itself": self.weight, "view": self.weight[:n], "new": self.weight[:n] * 2}
        return whole[self.kind]


class Tables(nn.Module):
    """Units that return their own parameters: they stay until backward has used them, though the
    unit's forward is over."""

    def __init__(self, kind):
        super().__init__()
        self.tables = nn.ModuleList([Table(kind), Table(kind)])
        self.head = nn.Linear(C, C)

    def forward(self, x):
        with torch.no_grad():
            assert all(table(3).isfinite().all() for table in self.tables)
        tables = [table(3)[:3] for table in self.tables]
        return self.head(x * tables[0] + tables[1].sin())


def loss_of_tables(model, step):
    model(x_of(step)).sum().item()
    with torch.no_grad():
        first = square(model, step)
    second = square(model, step)
    with torch.no_grad():
        assert torch.equal(first, second)
        assert torch.equal(square(model, step), second)
    return second


class Slowed(Plain):
    """A hook on an output inside: it is there before the unit has returned, and so before ours."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * self.up.weight.mean().cos())
        return y


CASES |= {
    "in place in a dict": unit_case(
        lambda: Stack(lambda: Plain(lambda y: {"x": y, "n": [1, None]}), after_a_dict)
    ),
    "in place after a checkpoint": unit_case(lambda: Checkpointed(lambda: Plain(torch.sin))),
    "in-place activations": unit_case(activations),
    "units that pass their input on": unit_case(lambda: PassedOn(Skips)),
    "hooks inside of a unit": unit_case(lambda: Stack(Slowed)),
    "hooks inside of a unit, in place": unit_case(lambda: Stack(Slowed, lambda x: x.add_(0.5))),
    **{
        f"a unit returns its parameter, {kind}": unit_case(
            functools.partial(Tables, kind), loss_of_tables
        )
        for kind in ("itself", "view", "new")
    },
}

# Weights made of parameters: in a part of a block, in a block itself and outside of all blocks
MAKERS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


class Normed(Plain):
    def __init__(self, make):
        super().__init__()
        make(self.up)


def made(make):
    torch.manual_seed(0)  # what orthogonal and spectral_norm draw; buffers are rank 0's anyway
    model = Stack(lambda: Normed(make))
    model.blocks.append(nn.Linear(C, C))
    make(model.blocks[-1])
    make(model.head)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.dim() == 1:
                buffer.copy_(torch.ones_like(buffer) / len(buffer) ** 0.5)
            elif buffer.is_floating_point():
                buffer.copy_(torch.eye(*buffer.shape))
    return model


CASES |= {name: unit_case(lambda make=make: made(make)) for name, make in MAKERS.items()}


# Hooks see whole parameters: of a unit, of its parts, of modules outside and of the model
def hang(model):
    def note(module, *args):
        norms = [p.detach().norm() for p in module.parameters()]
        model.seen.append(torch.stack(norms).sum())

    model.seen = []
    modules = [*model.blocks, *(block.up for block in model.blocks), model.head]
    for module in [*modules, model]:
        module.register_forward_pre_hook(note)
        module.register_forward_hook(note)


def loss_and_seen(model, step):
    loss = square(model, step)
    found, model.seen[:] = torch.stack(model.seen).sum(), []
    return loss + found


def hooked(before):
    model = Stack(Plain)
    if before:
        hang(model)
    return model


for when in ("before", "after"):
    build = functools.partial(hooked, when == "before")
    after = {} if when == "before" else {"hang": hang}
    CASES[f"hooks {when} parallelize"] = unit_case(build, loss_and_seen, **after)


def penalized(model, step):
    x = x_of(step).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.mean() + (slope.norm() - 1).square()


def critic(model, step):
    """As WGAN-GP trains: more forwards between the penalty and its backward."""
    penalty = penalized(model, step)
    with torch.no_grad():
        model(x_of(step + 10))
    return penalty + model(x_of(step + 20)).mean() - model(x_of(step + 30)).mean()


def curvature(model, step):
    """Hessian times vector, twice over one graph. In gathered() a forward uses the parameters."""
    engine = engine_of_parameter(next(model.parameters()))
    with contextlib.nullcontext() if engine is None else engine.gathered():
        loss, params = square(model, step), list(model.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        for _ in range(2):
            products = torch.autograd.grad(
                grads, params, [g.detach() for g in grads], retain_graph=True
            )
    weights = [p.detach().clone() for p in products]
    return square(model, step) + sum((p * w).sum() for p, w in zip(params, weights)) * 0.01


def smooth():
    return Stack(lambda: Plain(torch.sin))


def three_layers():
    return nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C))


CASES |= {
    "a gradient penalty": unit_case(smooth, penalized, stages=(0, 1, 2)),
    "a critic": unit_case(smooth, critic, stages=(0, 1, 2)),
    "Hessian-vector products": unit_case(three_layers, curvature, stages=(0, 1, 2)),
}


def all_but_one_backward(model, i):
    """A rank whose loss was not good enough."""
    loss = loss_of(model, i)
    if i != 3:
        loss.backward()


CASES["a rank without a backward"] = Case(backward=all_but_one_backward, stages=(2, 3))


@pytest.mark.filterwarnings("ignore:.*ran no backward before a step:UserWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("turn", [0, slow(1), slow(2)])
@pytest.mark.parametrize("name", CASES)
def test_every_stage_has_the_bits_of_one_process(name, turn):
    """On two ranks or three, at two of the stages, by turns."""
    case, number = CASES[name], [*CASES].index(name) + turn
    stages = case.stages
    for stage in sorted({stages[number % len(stages)], stages[-1 - number % min(2, len(stages))]}):
        # A mean of three equal gradients is rounded.
        check(case, 2 if case.alike else 2 + (stage + number // 2) % 2, stage)


def test_what_stage_3_has_freed_is_not_used_again():
    """By the backward of a backward, or by a transform of torch.func."""

    def slope(model):
        return torch.func.grad(lambda x: model(x).sum())(x_of(0))

    def ranks(call):
        call(parallelize(fill(Stack(Plain)), Mesh(), Parallel.of(zero_stage=3, **SMALL)))

    message = r"zero_stage=3 does not support backward with create_graph=True, .*; use zero_stage=2"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(ranks, 2, lambda model: penalized(model, 0))
    message = r"with zero_stage=3 a transform of torch.func .* shards of it; call it inside `with"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(ranks, 2, slope)


def test_transforms_of_torch_func():
    """As in plain torch at stages 1 and 2, which keep weights whole; stage 3: test_by_hand.py."""

    def slopes(model):
        new = {name: p.detach() * 0.5 for name, p in fill(Stack(Plain)).named_parameters()}
        by = torch.func.grad(lambda q: torch.func.functional_call(model, q, (x_of(0),)).sum())(new)
        return [*by.values(), torch.func.grad(lambda x: model(x).sum())(x_of(0))]

    def ranks(stage):
        options = Parallel.of(zero_stage=stage, **SMALL)
        return slopes(parallelize(fill(Stack(Plain)), Mesh(), options))

    expected = slopes(fill(Stack(Plain)))
    for stage in (1, 2):
        assert all(map(torch.equal, run_ranks(ranks, 2, stage)[0], expected))


@covering(1, ("stage", STAGES), ("one_optimizer", [False, True]))
def test_two_models(stage, one_optimizer):
    """Two engines in one process; the second model feeds on the first's output in backward too."""

    def losses(models, i):
        first = loss_of(models[0], i)
        second = loss_of(models[1], i + 30)
        return first + second * first.detach()

    def start():
        models = [fill(Net(n_block=n)) for n in (2, 3)]
        sets = [[*model.parameters()] for model in models]
        return models, [[*sets[0], *sets[1]]] if one_optimizer else sets

    def ranks():
        mesh, (models, sets) = Mesh(), start()
        for model, zero_stage in zip(models, (stage, 3 - stage)):
            parallelize(model, mesh, Parallel.of(zero_stage=zero_stage, **SMALL))
        optimizers = [AdamW(params, **OPTIMIZER) for params in sets]
        for step in range(STEPS):
            losses(models, step * 2 + mesh.dp_rank).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [{n: v.clone() for n, v in model.state_dict().items()} for model in models]

    models, sets = start()
    optimizers = [AdamW(params, **OPTIMIZER) for params in sets]
    for step in range(STEPS):
        parts = []
        for rank in range(2):
            for model in models:
                model.zero_grad()
            losses(models, step * 2 + rank).backward()
            parts.append([gradients(model) for model in models])
        for k, model in enumerate(models):
            set_mean(model, [part[k] for part in parts])
        for optimizer in optimizers:
            optimizer.step()
    for result in run_ranks(ranks, 2):
        for got, model in zip(result, models):
            assert_same(got, model.state_dict())
