"""optim.py: the steps and the interface of torch.optim.AdamW."""

import functools

import pytest
import torch
from adamw_bound import ExactAdamW
from torch import nn
from torch.optim import lr_scheduler

import fastpar
from fastpar.optim import adamw as optim
from fastpar.optim.adamw import AdamW

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def build(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=generator)
    return model.to(dtype)


def put_gradients(model, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def vector(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def run(model, optimizer, steps, scale=1.0, start=0):
    for step in range(start, start + steps):
        put_gradients(model, step, scale)
        optimizer.step()
    return vector(model)


def assert_like_torch(drive, groups=None, **options):
    """drive(model, optimizer) with torch in fp64 and fp32, and here: the bound of ExactAdamW."""
    models, optimizers = [], []
    for cls in (ExactAdamW, torch.optim.AdamW, AdamW):
        models.append(build(torch.float64 if cls is ExactAdamW else torch.float32))
        params = groups(models[-1]) if groups else models[-1].parameters()
        optimizers.append(cls(params, **{**HYPER, **options}))
        drive(models[-1], optimizers[-1])
    optimizers[0].holds(*(parameters_of(o) for o in optimizers[1:]))


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def two_groups(model):
    slow = {"params": list(model[0].parameters()), "lr": 1e-4, "weight_decay": 0.0}
    return [slow, {"params": list(model[2:].parameters()), "betas": (0.5, 0.6), "eps": 1e-3}]


twenty = functools.partial(run, steps=20)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"betas": (0.0, 0.0)},
        {"amsgrad": True},
        {"amsgrad": True, "maximize": True, "eps": 1e-3},
        {"foreach": False},
        {"fused": True},
    ],
)
def test_it_steps_like_torch(options):
    assert_like_torch(twenty, **options)


def test_double_precision_is_torchs():
    eager, ours = build(torch.float64), build(torch.float64)
    eager = run(eager, torch.optim.AdamW(eager.parameters(), **HYPER, fused=True), 5)
    assert torch.equal(run(ours, AdamW(ours.parameters(), **HYPER), 5), eager)


def test_the_largest_second_moment_counts_with_amsgrad():
    """Gradients that get smaller: without the maximum the steps would grow."""

    def fading(model, optimizer):
        for step in range(10):
            put_gradients(model, step, scale=10.0**-step)
            optimizer.step()

    assert_like_torch(fading, amsgrad=True)


def test_the_name_is_public():
    assert fastpar.AdamW is AdamW


def test_defaults_are_torchs():
    model = build()
    ours, torchs = AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    assert ours.defaults == torchs.defaults
    assert ours.param_groups[0].keys() == torchs.param_groups[0].keys()


def test_arguments_stand_where_torchs_stand():
    group = AdamW(build().parameters(), 0.5, (0.1, 0.2), 0.3, 0.4, True).param_groups[0]
    assert [group[k] for k in ("lr", "betas", "eps", "weight_decay", "amsgrad")] == [
        0.5, (0.1, 0.2), 0.3, 0.4, True,
    ]  # fmt: skip


# Groups


def test_groups_have_their_own_options():
    assert_like_torch(twenty, two_groups)


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_groups_may_differ_in_the_rule(option):
    def groups(model):
        first, second = two_groups(model)
        return [first, {**second, option: True}]

    assert_like_torch(twenty, groups)


def test_all_groups_are_one_call(monkeypatch):
    """Groups with other options, and parameters at other counts, do not multiply the launches."""
    calls = []

    def spy(*args, **kwargs):
        calls.append(len(args[0]))
        return step_(*args, **kwargs)

    step_ = optim.adamw_step_
    monkeypatch.setattr(optim, "adamw_step_", spy)
    model = build()
    optimizer = AdamW(two_groups(model), **HYPER)
    put_gradients(model, 0)
    model[0].weight.grad = None
    optimizer.step()
    run(model, optimizer, 1)
    assert calls == [5, 6]
    assert {int(s["step"]) for s in optimizer.state.values()} == {1, 2}


def test_a_group_can_be_added_later():
    def late(model, optimizer):
        run(model, optimizer, 3)
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.1})
        run(model, optimizer, 5, start=3)

    assert_like_torch(late, lambda model: list(model[:3].parameters()))


def test_named_parameters_keep_their_names():
    model = build()
    optimizer = AdamW(model.named_parameters(), **HYPER)
    assert optimizer.param_groups[0]["param_names"][-1] == "3.bias"
    plain = build()
    values = run(plain, AdamW(plain.parameters(), **HYPER), 2)
    assert torch.equal(run(model, optimizer, 2), values)


def test_random_bits_go_by_name_not_by_order():
    values = []
    for order in (list, lambda named: list(named)[::-1]):
        model = build()
        optimizer = AdamW(order(model.named_parameters()), moment_dtype=torch.bfloat16, **HYPER)
        values.append(run(model, optimizer, 3))
    assert torch.equal(*values)


# Schedules and hyper-parameters


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 2, gamma=0.1),
        lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1 / (e + 1), lambda e: 0.5**e]),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[4],
        ),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),  # moves betas too
    ],
    ids=["step", "lambda", "cosine", "sequential", "onecycle"],
)
def test_schedulers_drive_it(schedule):
    rates = []

    def scheduled(model, optimizer):
        scheduler = schedule(optimizer)
        for step in range(8):
            put_gradients(model, step)
            optimizer.step()
            scheduler.step()
        rates.append([(g["lr"], g["betas"]) for g in optimizer.param_groups])

    assert_like_torch(scheduled, two_groups)
    assert rates[0] == rates[2]


@pytest.mark.parametrize("capturable", [False, True])
def test_hyper_parameters_may_be_tensors(capturable):
    """The same steps as with numbers, and they follow what is written into the tensor."""
    plain, ours = build(), build()
    a = AdamW(plain.parameters(), **HYPER)
    lr = torch.tensor(HYPER["lr"])
    betas = tuple(torch.tensor(b).reshape(1) for b in HYPER["betas"])
    a.param_groups[0]["lr"] = lr.item()  # what fp32 makes of it
    a.param_groups[0]["betas"] = tuple(b.item() for b in betas)
    b = AdamW(ours.parameters(), lr, betas, weight_decay=0.1, capturable=capturable)
    assert torch.equal(run(plain, a, 3), run(ours, b, 3))
    lr.fill_(0.5)
    a.param_groups[0]["lr"] = 0.5
    assert torch.equal(run(plain, a, 3, start=3), run(ours, b, 3, start=3))


def test_a_scheduler_fills_a_tensor():
    def scheduled(model, optimizer):
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            put_gradients(model, step)
            optimizer.step()
            scheduler.step()
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)

    results = []
    for lr in (2.0**-6, torch.tensor(2.0**-6)):
        model = build()
        optimizer = AdamW(model.parameters(), lr=lr)
        if isinstance(lr, torch.Tensor):
            scheduled(model, optimizer)
        else:
            for step in range(4):
                put_gradients(model, step)
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5
        results.append(vector(model))
    assert torch.equal(*results)


def test_double_precision_tensors_are_read_in_double():
    plain, ours = build(), build()
    a = AdamW(plain.parameters(), lr=1 / 3)
    b = AdamW(ours.parameters(), lr=torch.tensor(1 / 3, dtype=torch.float64))
    assert torch.equal(run(plain, a, 3), run(ours, b, 3))


# What takes part in a step


def test_a_closure_is_called_with_gradients_enabled():
    model = build()
    optimizer = AdamW(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 7)).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]
    assert optimizer.step() is None


@pytest.mark.parametrize("capturable", [False, True])
def test_parameters_without_a_gradient_are_skipped(capturable):
    """They keep their own step count, so a late one gets the bias correction of a first step."""
    model = build()
    optimizer = AdamW(model.parameters(), capturable=capturable)
    optimizer.step()
    assert not optimizer.state
    counts = []

    def sometimes(model, optimizer):
        for step in range(4):
            put_gradients(model, step)
            if step in (0, 2):
                model[step].weight.grad = None
            optimizer.step()
        counts.append([int(s["step"]) for s in optimizer.state.values()])

    assert_like_torch(sometimes)
    sometimes(model, optimizer)
    assert sorted(counts[0]) == sorted(counts[2]) == sorted(counts[3]) == [3, 3, 4, 4, 4, 4]
    plain = build()
    sometimes(plain, AdamW(plain.parameters()))
    assert torch.equal(vector(model), vector(plain))


def test_frozen_parameters_and_empty_ones_are_left_alone():
    model = build()
    model[0].requires_grad_(False)
    empty = nn.Parameter(torch.zeros(0, 3))
    before = model[0].weight.clone()
    optimizer = AdamW([*model.parameters(), empty], **HYPER)
    model(torch.ones(2, 7)).sum().backward()
    empty.grad = torch.zeros(0, 3)
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    assert int(optimizer.state[empty]["step"]) == 1


def test_gradients_may_have_any_strides():
    plain, ours = build(), build()
    a, b = AdamW(plain.parameters(), **HYPER), AdamW(ours.parameters(), **HYPER)
    for step in range(2):
        put_gradients(plain, step)
        put_gradients(ours, step)
        ours[0].weight.grad = ours[0].weight.grad.t().contiguous().t()
        plain[3].bias.grad = torch.full((3,), 0.25)
        ours[3].bias.grad = torch.tensor(0.25).expand(3)
        a.step()
        b.step()
    assert torch.equal(vector(plain), vector(ours))


def test_parameters_and_state_may_be_replaced_between_steps():
    """Nothing of an earlier step is kept that the user can change."""
    plain, ours = build(), build()
    a, b = AdamW(plain.parameters(), **HYPER), AdamW(ours.parameters(), **HYPER)
    run(plain, a, 2)
    run(ours, b, 2)
    for p in ours.parameters():
        p.data = p.data.clone()
        b.state[p] = {name: value.clone() for name, value in b.state[p].items()}
    assert torch.equal(run(plain, a, 2, start=2), run(ours, b, 2, start=2))


def test_hooks_are_called_around_a_step():
    model = build()
    optimizer = AdamW(model.parameters(), **HYPER)
    before, seen = vector(model), []

    def look(*_):
        seen.append(torch.equal(vector(model), before))

    pre = optimizer.register_step_pre_hook(look)
    post = optimizer.register_step_post_hook(look)
    run(model, optimizer, 1)
    assert seen == [True, False]
    pre.remove()
    post.remove()
    run(model, optimizer, 1)
    assert len(seen) == 2
