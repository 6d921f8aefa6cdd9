"""Steps of every optimizer: AdamW within the roundings of torch's; what may not change a bit."""

import copy
import functools
import math

import pytest
import torch
from adamw_bound import ExactAdamW
from optimizers import (
    BF16,
    FP16,
    FP32,
    FP64,
    HYPER,
    UINT8,
    adafactor,
    adamw,
    assert_same_state,
    build,
    muon,
    parameters,
    put_gradients,
    run,
    step_counts,
    vector,
)
from torch import nn
from torch.optim import lr_scheduler

import fastpar
from fastpar.kernels import backend
from fastpar.optim import adamw as optim
from fastpar.optim.adamw import AdamW

MAKERS = {"adamw": adamw, "adafactor": adafactor, "muon": muon}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)

# AdamW against torch's, in fp64 and fp32: the bound of ExactAdamW


def two_groups(model):
    slow = {"params": parameters(model[0]), "lr": 1e-4, "weight_decay": 0.0}
    return [slow, {"params": parameters(model[2:]), "betas": (0.5, 0.6), "eps": 1e-3}]


def groups_with(option):
    return lambda model: [two_groups(model)[0], {**two_groups(model)[1], option: True}]


twenty = functools.partial(run, steps=20)


def fading(model, optimizer):
    """Gradients that get smaller: without amsgrad's maximum the steps would grow."""
    for step in range(10):
        put_gradients(model, step, scale=10.0**-step)
        optimizer.step()


def late(model, optimizer):
    run(model, optimizer, 3)
    optimizer.add_param_group({"params": parameters(model[3]), "lr": 0.1})
    run(model, optimizer, 5, start=3)


def sometimes(model, optimizer):
    """A late parameter has a count of its own, and the bias correction of a first step."""
    for step in range(4):
        put_gradients(model, step)
        if step in (0, 2):
            model[step].weight.grad = None
        optimizer.step()
    assert step_counts(optimizer) == [3, 3, 4, 4, 4, 4]


def scheduled(schedule):
    def drive(model, optimizer):
        scheduler = schedule(optimizer)
        for step in range(8):
            put_gradients(model, step)
            optimizer.step()
            scheduler.step()

    return drive, two_groups, {}


def sequential(o):
    parts = [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    return lr_scheduler.SequentialLR(o, parts, milestones=[4])


# Sums of at most 231 squares and of 6 norms, roots and a quotient
ROUNDINGS_OF_A_NORM = 256


def clipped_to_one(scale):
    def drive(model, optimizer):
        """By the step here, by clip_grad_norm_ with torch; the norm is the same."""
        optimizer.roundings = ROUNDINGS_OF_A_NORM
        ours = isinstance(optimizer, AdamW)
        optimizer.max_grad_norm = 1.0 if ours else None
        for step in range(10):
            put_gradients(model, step, scale)
            grads = [p.grad.clone() for p in model.parameters()]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if ours:
                for p, grad in zip(model.parameters(), grads):
                    p.grad = grad
            optimizer.step()
            assert not ours or optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)

    return drive, parameters, {}


def by_grad_scaler(unscale, clip):
    def drive(model, optimizer):
        """Also where the user unscales; overflows are skipped and halve the scale."""
        optimizer.roundings = ROUNDINGS_OF_A_NORM if clip else 0  # scales are powers of 2
        ours = isinstance(optimizer, AdamW)
        optimizer.max_grad_norm = 1.0 if ours and clip else None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for step in range(8):
            put_gradients(model, step)
            loss = sum((p * p.grad.clone()).sum() for p in model.parameters())
            optimizer.zero_grad()
            scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
            if unscale or (clip and not ours):
                scaler.unscale_(optimizer)
            if clip and not ours:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            assert not ours or optimizer.skipped == (step == 2)
            scaler.update()
            halvings = 1 if step >= 2 else 0
            assert scaler.get_scale() == 2.0 ** (10 - halvings + (step >= 5))
        assert set(step_counts(optimizer)) == {7}
        assert not ours or (optimizer.grad_scale, optimizer.found_inf) == (1.0, None)

    return drive, parameters, {}


# what drives it, its groups, options of both
LIKE_TORCH = {
    "plain": (twenty, parameters, {}),
    "maximize": (twenty, parameters, {"maximize": True}),
    "no decay": (twenty, parameters, {"weight_decay": 0.0}),
    "no betas": (twenty, parameters, {"betas": (0.0, 0.0)}),
    "amsgrad": (twenty, parameters, {"amsgrad": True}),
    "all three": (twenty, parameters, {"amsgrad": True, "maximize": True, "eps": 1e-3}),
    "not foreach": (twenty, parameters, {"foreach": False}),
    "fused": (twenty, parameters, {"fused": True}),
    "fading": (fading, parameters, {"amsgrad": True}),
    "some without a gradient": (sometimes, parameters, {}),
    "groups": (twenty, two_groups, {}),
    "groups, one maximizes": (twenty, groups_with("maximize"), {}),
    "groups, one has amsgrad": (twenty, groups_with("amsgrad"), {}),
    "a late group": (late, lambda model: parameters(model[:3]), {}),
    "StepLR": scheduled(lambda o: lr_scheduler.StepLR(o, 2, gamma=0.1)),
    "LambdaLR": scheduled(
        lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1 / (e + 1), lambda e: 0.5**e])
    ),
    "CosineAnnealingLR": scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 8)),
    "SequentialLR": scheduled(sequential),
    "clipped": clipped_to_one(10.0),
    "clipped, small": clipped_to_one(1e-3),
    **{
        f"GradScaler-{unscale}-{clip}": by_grad_scaler(unscale, clip)
        for unscale in (False, True)
        for clip in (False, True)
    },
    "OneCycleLR": scheduled(  # moves betas too
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10)
    ),
}


@pytest.mark.parametrize("case", LIKE_TORCH)
def test_adamw_steps_like_torch(case):
    drive, groups, options = LIKE_TORCH[case]
    optimizers, rates = [], []
    for cls in (ExactAdamW, torch.optim.AdamW, AdamW):
        model = build(FP64 if cls is ExactAdamW else FP32)
        optimizers.append(cls(groups(model), **{**HYPER, **options}))
        drive(model, optimizers[-1])
        rates.append([(g["lr"], g["betas"]) for g in optimizers[-1].param_groups])
    exact, *others = optimizers
    exact.holds(*([p for g in o.param_groups for p in g["params"]] for o in others))
    assert rates[0] == rates[2]
    assert step_counts(exact) == step_counts(others[1])


def test_double_precision_is_torchs():
    eager, ours = build(FP64), build(FP64)
    eager = run(eager, torch.optim.AdamW(eager.parameters(), **HYPER, fused=True), 5)
    assert torch.equal(run(ours, adamw(ours.parameters()), 5), eager)


def test_the_interface_is_torchs():
    assert fastpar.AdamW is AdamW
    ours, torchs = (cls(build().parameters()) for cls in (AdamW, torch.optim.AdamW))
    assert ours.defaults == torchs.defaults
    assert ours.param_groups[0].keys() == torchs.param_groups[0].keys()
    group = AdamW(build().parameters(), 0.5, (0.1, 0.2), 0.3, 0.4, True).param_groups[0]
    assert [group[k] for k in ("lr", "betas", "eps", "weight_decay", "amsgrad")] == [
        0.5, (0.1, 0.2), 0.3, 0.4, True,
    ]  # fmt: skip


# What changes no bit: a plain run, and a twin that differs in options or in what drives it


def plainly(model, optimizer, twin):
    run(model, optimizer, 4)


def other_rate(model, optimizer, twin):
    """Half way another one is written into the tensor, or into the group."""
    for start in (0, 3):
        run(model, optimizer, 3, start=start)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(0.5)
            else:
                group["lr"] = 0.5


def falling_rate(model, optimizer, twin):
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        put_gradients(model, step)
        assert optimizer.step(lambda: 3.0) == 3.0
        scheduler.step()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == twin


def measured(model, optimizer, twin):
    """The norm is over all groups."""
    run(model, optimizer, 2)
    want = torch.cat([p.grad.flatten() for p in parameters(model)]).double().norm().item()
    got = optimizer.grad_norm
    assert got is None or got.item() == pytest.approx(want, rel=1e-6)
    assert twin == (got is not None)


def replaced(model, optimizer, twin):
    """Nothing of an earlier step is kept that the user can change."""
    run(model, optimizer, 2)
    for p in parameters(model) if twin else []:
        p.data = p.data.clone()
        optimizer.state[p] = {name: value.clone() for name, value in optimizer.state[p].items()}
    run(model, optimizer, 2, start=2)


def zeroed(model, optimizer, twin):
    for step in range(3):
        put_gradients(model, step)
        model[0].weight.grad = None
        optimizer.step()
        assert model[0].weight.grad is None
        assert twin == all(not p.grad.any() for p in parameters(model) if p.grad is not None)


def clipped(model, optimizer, twin):
    """By powers of two, which no order of the products rounds; gradients stay as they were."""
    for step, factor in enumerate((0.125, 0.5, 1.0, 0.25, 4.0)):
        put_gradients(model, step, 10.0)
        before = [p.grad.clone() for p in parameters(model)]
        norm = torch.cat([g.double().flatten() for g in before]).norm().float()
        if twin:
            optimizer.max_grad_norm = factor * (norm.item() + 1e-6)  # clip_grad_norm_'s rule
        else:
            before = [p.grad.mul_(min(factor, 1.0)).clone() for p in parameters(model)]
        optimizer.step()
        assert not twin or optimizer.grad_norm == norm
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters(model), before))


def scaled(model, optimizer, twin):
    """A loss scale is divided out before the clipping."""
    assert optimizer.grad_scale == 1.0
    for step in range(3):
        if twin:
            optimizer.grad_scale = 2.0**10 if step % 2 else torch.tensor(2.0**10)
        run(model, optimizer, 1, scale=2.0**10 if twin else 1.0, start=step)
        assert not optimizer.skipped


def first_skipped(model, optimizer, twin):
    if twin:
        optimizer.grad_scale = 1.0
        put_gradients(model, 0, scale=math.inf)
        optimizer.step()
        assert optimizer.skipped
    run(model, optimizer, 3)
    assert not optimizer.skipped


def told_overflow(model, optimizer, twin):
    """A flag that is known needs no look at the gradients."""
    run(model, optimizer, 1)
    if twin:
        optimizer.grad_scale = torch.tensor(8.0)
        for flag in (2.0, 0.0):  # GradScaler adds up flags of devices
            optimizer.found_inf = torch.tensor([flag]).squeeze(0)
            run(model, optimizer, 1, scale=8.0)
            assert optimizer.skipped == (flag > 0)
            assert optimizer.grad_norm is None
    else:
        run(model, optimizer, 1)


def by_scaler(model, optimizer, twin):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, factor in enumerate((1.0, math.inf, 2.0)):
        put_gradients(model, step)
        loss = factor * sum((p * p.grad.clone()).sum() for p in parameters(model))
        optimizer.zero_grad()
        if twin:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.skipped == (factor == math.inf)
        elif factor < math.inf:
            loss.backward()
            optimizer.step()
    assert scaler.get_scale() == (2.0 if twin else 4.0)


ALL = tuple(MAKERS)
EXACT = {"lr": 2.0**-6, "betas": (0.5, 0.75)}
TENSORS = {"lr": torch.tensor(2.0**-6), "betas": (torch.tensor([0.5]), torch.tensor(0.75))}
# of which optimizers, options of both, options of the twin alone, what drives both
SAME_BITS = {
    "capturable": ("adamw", {"max_grad_norm": 1.0}, {"capturable": True}, plainly),
    "tensors": ("adamw", EXACT, TENSORS, other_rate),
    "tensors on the device": ("adamw", EXACT, {**TENSORS, "capturable": True}, other_rate),
    "a rate in a tensor": (
        ("adamw", "adafactor"), {"lr": 2.0**-6}, {"lr": torch.tensor(2.0**-6)}, falling_rate,
    ),
    "double": ("adamw", {"lr": 1 / 3}, {"lr": torch.tensor(1 / 3, dtype=FP64)}, plainly),
    "measured": (ALL, {}, {"max_grad_norm": math.inf}, measured),
    "replaced": (ALL, {}, {}, replaced),
    "zeroed": ("adamw", {"max_grad_norm": 1.0}, {"zero_grad_in_step": True}, zeroed),
    "clipped": (ALL, {}, {}, clipped),
    "scaled": (ALL, {"max_grad_norm": 1.0}, {}, scaled),
    "first skipped": (ALL, {}, {}, first_skipped),
    "told of an overflow": (ALL, {}, {}, told_overflow),
    "told on the device": ("adamw", {}, {"capturable": True}, told_overflow),
    "by GradScaler": (ALL, {}, {}, by_scaler),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "maker"),
    [(c, m) for c in SAME_BITS for m in ALL if m in SAME_BITS[c][0]],
)
def test_no_bit_changes(case, maker):
    _, both, twins, drive = SAME_BITS[case]
    found = []
    for twin in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = MAKERS[maker](
            model.parameters(), **copy.deepcopy({**both, **(twins if twin else {})})
        )
        drive(model, optimizer, twin)
        found.append((vector(model), optimizer.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    assert_same_state(found[0][1], found[1][1])


def test_a_parameters_name_and_neighbours_do_not_count():
    """Named or not, in any order and alone: the same bits; random ones go by the name."""
    for make in (adamw, adafactor):
        want, model = build(), build()
        run(want, make(want.parameters()), 3)
        optimizer = make(model.named_parameters())
        assert optimizer.param_groups[0]["param_names"][-1] == "3.bias"
        assert torch.equal(run(model, optimizer, 3), vector(want))
        for i, p in enumerate(want.parameters()):
            alone = build()
            optimizer = make([parameters(alone)[i]])
            run(alone, optimizer, 3)
            assert torch.equal(parameters(alone)[i], p)
    values = []
    for order in (list, lambda named: list(named)[::-1]):
        model = build()
        optimizer = adamw(order(model.named_parameters()), moment_dtype=BF16)
        values.append(run(model, optimizer, 3))
    assert torch.equal(*values)


def test_all_groups_are_one_call(monkeypatch):
    """Groups with other options, and parameters at other counts, do not multiply the launches."""
    calls = []
    step_ = optim.adamw_step_
    monkeypatch.setattr(
        optim, "adamw_step_", lambda *a, **k: calls.append(len(a[0])) or step_(*a, **k)
    )
    model = build()
    groups = [{"params": [p], "lr": 10.0**-i} for i, p in enumerate(model.parameters())]
    optimizer = adamw(groups)
    put_gradients(model, 0)
    model[3].bias.grad = None
    optimizer.step()
    run(model, optimizer, 1)
    assert calls == [5, 6]
    assert step_counts(optimizer) == [1, 2, 2, 2, 2, 2]


# What takes part in a step


def test_closures_and_hooks_of_a_step():
    model = build()
    optimizer = adamw(model.parameters(), lr=0.1)
    seen = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: seen.append(vector(model)))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 7)).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]
    assert optimizer.step() is None
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])


@makers
def test_parameters_without_a_gradient_frozen_ones_and_empty_ones(make):
    """Skipped, they have no state; the others step as they do without them."""
    model, want = build(), build()
    empty = nn.Parameter(torch.zeros(0, 3))
    optimizer, alone = make([*model.parameters(), empty]), make(want[2:].parameters())
    optimizer.step()
    assert not optimizer.state
    model[0].requires_grad_(False)
    before = vector(model[0])
    for step in range(3):
        put_gradients(want, step)
        for p, q in zip(model[2:].parameters(), want[2:].parameters()):
            p.grad = q.grad.clone()
        empty.grad = torch.zeros(0, 3) if step == 2 else None
        optimizer.step()
        alone.step()
    assert torch.equal(vector(model[0]), before)
    assert not optimizer.state.get(model[0].weight)
    assert torch.equal(vector(model[2:]), vector(want[2:]))
    if make is adamw:
        assert int(optimizer.state[empty]["step"]) == 1


# The norm, loss scales, skipped steps


SKIPPING = [
    *((make, {"max_grad_norm": limit}) for make in ALL for limit in (None, 1.0)),
    ("adamw", {"max_grad_norm": 1.0, "zero_grad_in_step": True, "capturable": True}),
    ("adamw", {"zero_grad_in_step": True, "capturable": True}),
]


@pytest.mark.parametrize(("maker", "options"), SKIPPING, ids=str)
def test_a_step_with_non_finite_gradients_is_skipped_under_a_loss_scale(maker, options):
    for bad in (math.inf, -math.inf, math.nan):
        model = build()
        optimizer = MAKERS[maker](model.parameters(), **options)
        optimizer.grad_scale = 1.0  # a loss scale that has come down to 1 is still one
        run(model, optimizer, 1)
        before, state = vector(model), copy.deepcopy(optimizer.state_dict())
        put_gradients(model, 1)
        model[3].bias.grad[1] = bad
        optimizer.step()
        assert optimizer.skipped
        assert not optimizer.grad_norm.isfinite()
        assert torch.equal(vector(model), before)
        assert str(optimizer.state_dict()) == str(state)
        zeroed = "zero_grad_in_step" in options
        assert zeroed == all(not p.grad.any() for p in model.parameters())
        run(model, optimizer, 1)
        assert not optimizer.skipped
        assert not torch.equal(vector(model), before)
        assert set(step_counts(optimizer)) == {2}


def test_without_a_loss_scale_non_finite_gradients_go_in():
    model = build()
    optimizer = adamw(model.parameters(), max_grad_norm=1.0)
    put_gradients(model, 0)
    model[3].bias.grad[1] = math.nan
    optimizer.step()
    assert not optimizer.skipped
    assert optimizer.grad_norm.isnan()
    assert vector(model).isnan().any()
    # An overflow that is told counts beside a finite norm.
    model = build()
    optimizer, before = adamw(model.parameters(), max_grad_norm=1.0), vector(model)
    optimizer.found_inf = torch.tensor(1.0)
    run(model, optimizer, 1)
    assert optimizer.grad_norm.isfinite()
    assert optimizer.skipped
    assert torch.equal(vector(model), before)


def test_grad_scaler_takes_fp16_gradients():
    """torch refuses to unscale those; here step() does it, into the master weights."""
    model = build(FP16)
    single = copy.deepcopy(model).float()
    a, b = adamw(model.parameters(), master_weights=True), adamw(single.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(4):
        put_gradients(model, step)
        for p, q in zip(model.parameters(), single.parameters()):
            q.grad = p.grad.float()
            p.grad *= scaler.scale(torch.ones(())).half()  # exact: a power of two
        scaler.step(a)
        scaler.update()
        b.step()
    for p, q in zip(model.parameters(), single.parameters()):
        assert torch.equal(a.state[p]["master_weight"], q)


@makers
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_master_weights_follow_the_fp32_run(make, dtype):
    """And a remainder is as good as a master, where there is one."""
    half = build(dtype)
    single, short = copy.deepcopy(half).float(), copy.deepcopy(half)
    options = {"beta1": 0.9} if make is adafactor else {}
    pairs = [(half, make(half.parameters(), master_weights=True, **options))]
    pairs += [(single, make(single.parameters(), **options))]
    if dtype == BF16 and make is not muon:
        pairs += [(short, make(short.parameters(), master_weights="remainder", **options))]
    for step in range(6):
        put_gradients(half, step)
        for model, optimizer in pairs:
            for p, q in zip(half.parameters(), model.parameters()):
                q.grad = p.grad.to(q.dtype)
            optimizer.step()
    for p, q, r in zip(half.parameters(), single.parameters(), short.parameters()):
        assert torch.equal(pairs[0][1].state[p]["master_weight"], q)
        rounding = 2.0 ** (-8 if dtype == BF16 else -11)
        assert ((p.float() - q).abs() <= rounding * q.abs().clamp(min=2.0**-14)).all()
        if len(pairs) > 2:
            assert torch.equal(p, r)
            assert pairs[2][1].state[r]["master_remainder"].dtype == torch.int16


# On a GPU's terms: CUDA kernels, graphs without host reads, torch.compile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (FP32, {"max_grad_norm": 1.0}),
        (FP32, {"max_grad_norm": 1.0, "capturable": True, "amsgrad": True}),
        (BF16, {"master_weights": "remainder", "moment_dtype": BF16}),
        (BF16, {"stochastic_rounding": True, "moment_dtype": UINT8}),
        (FP16, {"master_weights": True, "zero_grad_in_step": True}),
    ],
)
def test_the_cuda_kernels_take_the_same_steps(cuda_device, monkeypatch, dtype, options):
    """Bit for bit those of the CPU, a skipped one included."""

    def take(device):
        model = build(dtype).to(device)
        optimizer = adamw(model.parameters(), **options)
        optimizer.grad_scale = torch.tensor(4.0, device=device)
        norms = []
        for step in range(5):
            put_gradients(model.cpu(), step, scale=math.inf if step == 2 else 4.0)
            model.to(device)
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
            assert optimizer.skipped == (step == 2)
        return vector(model).cpu(), str(norms)

    values, norms = take(cuda_device)
    monkeypatch.setattr(backend, "cuda_on_cpu", False)
    expected, expected_norms = take("cpu")
    assert torch.equal(values, expected)
    assert norms == expected_norms


def test_a_capture_begins_after_a_first_step(monkeypatch):
    model = build()
    optimizer = adamw(model.parameters())
    put_gradients(model, 0)
    monkeypatch.setattr(optim, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"expected capturable=True while a CUDA graph"):
        optimizer.step()
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(RuntimeError, match=r"expected a first step before the capture"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.gpu
def test_a_captured_step_replays():
    plain, ours = build().cuda(), build().cuda()
    options = {"max_grad_norm": 1.0, "capturable": True}
    a = AdamW(plain.parameters(), lr=torch.tensor(1e-2, device="cuda"), **options)
    b = AdamW(ours.parameters(), lr=torch.tensor(1e-2, device="cuda"), **options)
    generator = torch.Generator().manual_seed(0)
    shapes = [p.shape for p in plain.parameters()]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    for p in (*plain.parameters(), *ours.parameters()):
        p.grad = torch.zeros_like(p)

    def fill(model, values):
        for p, g in zip(model.parameters(), values):
            p.grad.copy_(g)

    for model, optimizer in ((plain, a), (ours, b)):
        fill(model, grads[0])
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b.step()
    for values in grads[1:]:
        for model, do in ((plain, a.step), (ours, graph.replay)):
            fill(model, values)
            do()
        a.param_groups[0]["lr"].mul_(0.5)
        b.param_groups[0]["lr"].mul_(0.5)
    assert torch.equal(vector(plain), vector(ours))
    assert set(step_counts(b)) == {4}


@pytest.mark.parametrize(
    "whole", [pytest.param(True, marks=pytest.mark.slow), False], ids=["step", "forward"]
)
def test_it_works_under_torch_compile(whole):
    """Compiled with the optimizer's calls inside, and around a compiled forward: the same bits."""

    def train(compiled):
        model = build()
        optimizer = adamw(model.parameters(), max_grad_norm=1.0)
        forward = torch.compile(model, backend="eager") if compiled and not whole else model

        def step(x):
            loss = forward(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if compiled and whole:
            step = torch.compile(step, backend="eager")
        losses = [step(torch.full((2, 7), 0.1 * i)).item() for i in range(4)]
        return losses, vector(model)

    (losses, values), (compiled_losses, compiled_values) = train(False), train(True)
    assert losses == compiled_losses
    assert torch.equal(values, compiled_values)


def test_the_compiler_does_not_trace_the_step():
    from torch._dynamo.testing import CompileCounter

    model = build()
    optimizer = adamw(model.parameters())
    put_gradients(model, 0)
    counter = CompileCounter()
    step = torch.compile(lambda: optimizer.step(), backend=counter)
    for _ in range(3):
        step()
    assert counter.frame_count == 0
    assert set(step_counts(optimizer)) == {3}
    assert math.isfinite(vector(model).sum())
