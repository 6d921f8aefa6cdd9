"""Modules that look at parameters or change outputs at unusual moments train as in plain torch.

Every rank has the same batch, so the mean gradient is each rank's own, bit for bit.
"""

import functools

import pytest
import torch
from test_zero_awkward import fill
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fastpar import AdamW, Mesh, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.001, "first_bucket_mb": 1e-4}  # a unit per block
STAGES = (0, 1, 2, 3)
C = 6


def x_of(step):
    return torch.randn(4, 3, C, generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return model(x_of(step)).square().mean()


def train(build, stage, *, loss_of=loss_of, steps=3, watch=None, options=None):
    """Losses, then parameters after some steps; stage None: plain torch."""
    model = fill(build())
    if stage is not None:
        parallelize(model, Mesh(), Parallel.of(zero_stage=stage, **{**SMALL, **(options or {})}))
    if watch is not None:
        watch(model)
    optimizer = AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def assert_as_plain_torch(build, *, stages=STAGES, world_size=2, **kwargs):
    expected = train(build, None, **kwargs)
    assert all(value.isfinite().all() for value in expected)
    for stage in stages:
        for got in run_ranks(functools.partial(train, build, stage, **kwargs), world_size):
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b), f"stage {stage}"


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


class Block(nn.Module):
    """form: how the output is made of the linear layers' result."""

    def __init__(self, form=lambda y: y):
        super().__init__()
        self.up, self.down, self.form = nn.Linear(C, 2 * C), nn.Linear(2 * C, C), form

    def forward(self, x):
        return self.form(self.down(self.up(x).tanh()))


# Outputs that are changed in place


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


@pytest.mark.parametrize("form", FORMS)
def test_an_output_may_be_changed_in_place(form):
    for after in (nn.ReLU(inplace=True), shifted, scaled_rows, lambda x: x.sin_().view_as(x)):
        stages = STAGES if form == "its own memory" else (3,)
        build = lambda after=after: Stack(lambda: Block(FORMS[form]), after)  # noqa: E731
        assert_as_plain_torch(build, stages=stages)


def test_outputs_in_containers_may_be_changed_in_place():
    build = lambda: Stack(lambda: Block(lambda y: {"x": y, "n": [1, None]}), after_a_dict)  # noqa: E731
    assert_as_plain_torch(build)


def test_checkpointed_outputs_may_be_changed_in_place():
    class Checkpointed(Stack):
        def forward(self, x):
            x = x.requires_grad_()
            for block in self.blocks:
                x = shifted(checkpoint(block, x, use_reentrant=False))
            return self.head(x)

    assert_as_plain_torch(lambda: Checkpointed(lambda: Block(torch.sin)))


def test_a_sequential_with_in_place_activations():
    def build():
        act = nn.ReLU(inplace=True)
        return nn.Sequential(nn.Linear(C, C), act, nn.Linear(C, C), act, nn.Linear(C, C))

    assert_as_plain_torch(build)


def test_units_that_pass_their_input_on():
    """An output that is the input, and one without any gradient, beside one with."""

    class Skips(Block):
        def forward(self, x):
            x = x[0] if isinstance(x, tuple) else x
            return super().forward(x), x

    class Net(Stack):
        def forward(self, x):
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = block(x)
            return self.head(x[0] + x[1])

    assert_as_plain_torch(lambda: Net(Skips))


def test_a_unit_may_return_its_own_parameters():
    """They stay until backward has used them, though the unit's forward is over."""

    class Table(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.weight, self.kind = nn.Parameter(torch.ones(8, C)), kind

        def forward(self, n):
            whole = {"itself": self.weight, "view": self.weight[:n], "new": self.weight[:n] * 2}
            return whole[self.kind]

    class Net(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.tables = nn.ModuleList([Table(kind), Table(kind)])
            self.head = nn.Linear(C, C)

        def forward(self, x):
            with torch.no_grad():
                assert all(table(3).isfinite().all() for table in self.tables)
            tables = [table(3)[:3] for table in self.tables]
            return self.head(x * tables[0] + tables[1].sin())

    def evaluate(model, step):
        model(x_of(step)).sum().item()
        with torch.no_grad():
            first = model(x_of(step)).square().mean()
        second = loss_of(model, step)
        assert torch.equal(first, second)
        return second

    for kind in ("itself", "view", "new"):
        assert_as_plain_torch(lambda kind=kind: Net(kind), loss_of=evaluate)


# Hooks that look at parameters


class Normed(Block):
    """make: what is done to a linear layer of the block."""

    def __init__(self, make):
        super().__init__()
        make(self.up)


MAKERS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make", MAKERS)
def test_weights_made_of_parameters(make):
    """In a part of a block, in a block itself and outside of all blocks."""

    def build():
        torch.manual_seed(0)  # what orthogonal and spectral_norm draw; buffers are rank 0's anyway
        model = Stack(lambda: Normed(MAKERS[make]))
        model.blocks.append(nn.Linear(C, C))
        MAKERS[make](model.blocks[-1])
        MAKERS[make](model.head)
        with torch.no_grad():
            for buffer in model.buffers():
                if buffer.dim() == 1:
                    buffer.copy_(torch.ones_like(buffer) / len(buffer) ** 0.5)
                elif buffer.is_floating_point():
                    buffer.copy_(torch.eye(*buffer.shape))
        return model

    assert_as_plain_torch(build)


def norms(seen):
    """A hook that notes the norm of all parameters of its module."""
    return lambda module, *args: seen.append(
        torch.stack([p.detach().norm() for p in module.parameters()]).sum()
    )


@pytest.mark.parametrize("when", ["before parallelize", "after parallelize"])
def test_hooks_see_whole_parameters(when):
    """Those of a unit, of its parts and of modules outside; at stages 1 and 2 of the model too."""

    def loss_and_seen(model, step):
        loss = loss_of(model, step)
        found, model.seen[:] = torch.stack(model.seen).sum(), []
        return loss + found

    def hang(model):
        model.seen = []
        for module in (*model.blocks, *(block.up for block in model.blocks), model.head):
            module.register_forward_pre_hook(norms(model.seen))
            module.register_forward_hook(norms(model.seen))
        if model.whole:
            model.register_forward_pre_hook(norms(model.seen))
            model.register_forward_hook(norms(model.seen))

    for stages, whole in (((0, 1, 2), True), ((3,), False)):

        def build(whole=whole):
            model = Stack(Block)
            model.whole = whole
            if when == "before parallelize":
                hang(model)
            return model

        watch = hang if when == "after parallelize" else None
        assert_as_plain_torch(build, stages=stages, loss_of=loss_and_seen, watch=watch)


# Backward through a backward


def penalized(model, step, reach=lambda x: x):
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
    """Hessian times vector, twice over one graph."""
    loss, params = loss_of(model, step), list(model.parameters())
    grads = torch.autograd.grad(loss, params, create_graph=True)
    for _ in range(2):
        products = torch.autograd.grad(
            grads, params, [g.detach() for g in grads], retain_graph=True
        )
    weights = [p.detach().clone() for p in products]
    return loss_of(model, step) + sum((p * w).sum() for p, w in zip(params, weights)) * 0.01


def test_gradient_penalties():
    for loss in (penalized, critic):
        assert_as_plain_torch(
            lambda: Stack(lambda: Block(torch.sin)), loss_of=loss, stages=(0, 1, 2)
        )


def test_what_stage_3_has_freed_is_not_used_again():
    """By the backward of a backward, or by a transform of torch.func."""

    def slope(model):
        return torch.func.grad(lambda x: model(x).sum())(x_of(0))

    def ranks(call):
        call(parallelize(fill(Stack(Block)), Mesh(), Parallel.of(zero_stage=3, **SMALL)))

    message = r"backward without create_graph with zero_stage=3, got one .*; use zero_stage=2"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(ranks, 2, lambda model: penalized(model, 0))
    with pytest.raises((RuntimeError, TypeError), match=r"TensorWrapper|GradTrackingTensor"):
        run_ranks(ranks, 2, slope)


def test_transforms_of_torch_func():
    """As in plain torch at stages 1 and 2, which keep weights whole."""

    def slopes(model):
        new = {name: p.detach() * 0.5 for name, p in fill(Stack(Block)).named_parameters()}
        by = torch.func.grad(lambda q: torch.func.functional_call(model, q, (x_of(0),)).sum())(new)
        return [*by.values(), torch.func.grad(lambda x: model(x).sum())(x_of(0))]

    expected = slopes(fill(Stack(Block)))
    for stage in (1, 2):
        ranks = run_ranks(
            lambda stage=stage: slopes(
                parallelize(fill(Stack(Block)), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
            ),
            2,
        )
        assert all(map(torch.equal, ranks[0], expected))


def test_hessian_vector_products():
    assert_as_plain_torch(
        lambda: nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)),
        loss_of=curvature,
        stages=(0, 1, 2),
    )


def test_hooks_on_outputs_inside_of_a_unit_see_whole_parameters():
    """They are there before the unit has returned, and so before ours."""

    class Slowed(Block):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * self.up.weight.mean().cos())
            return y

    def changed(x):
        return x.add_(0.5)

    assert_as_plain_torch(lambda: Stack(Slowed))
    assert_as_plain_torch(lambda: Stack(Slowed, changed))
