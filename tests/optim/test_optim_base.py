"""optim_base.py: clipping, the norm, loss scales, GradScaler, skipped steps; with AdamW."""

import copy
import math

import pytest
import torch
from adamw_bound import ExactAdamW
from test_optim import HYPER, build, put_gradients, run, vector
from torch import nn

import fastpar
from fastpar.kernels.global_norm import norm_bins
from fastpar.optim import base as optim_base
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import DynamicLossScale

# Sums of at most 231 squares and of 6 norms, roots and a quotient
ROUNDINGS_OF_A_NORM = 256

# Clipping


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_clipping_is_torchs_and_leaves_gradients_alone(scale):
    exact, eager, ours = build().double(), build(), build()
    norms = []
    for model, cls in ((exact, ExactAdamW), (eager, torch.optim.AdamW)):
        optimizer = cls(model.parameters(), **HYPER)
        if model is exact:
            bound = optimizer
            bound.roundings = ROUNDINGS_OF_A_NORM
        for step in range(10):
            put_gradients(model, step, scale)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
    optimizer = AdamW(ours.parameters(), **HYPER, max_grad_norm=1.0)
    for step in range(10):
        put_gradients(ours, step, scale)
        before = [p.grad.clone() for p in ours.parameters()]
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norms[step], rel=1e-6)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours.parameters(), before))
    bound.holds(eager.parameters(), ours.parameters())


def test_the_norm_is_over_all_groups():
    model = build()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = AdamW(groups, max_grad_norm=math.inf)
    put_gradients(model, 0)
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()
    before = vector(model)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-6)
    plain = build()
    put_gradients(plain, 0)
    unmeasured = AdamW(plain.parameters())
    unmeasured.step()
    assert unmeasured.grad_norm is None
    assert torch.equal(vector(plain), vector(model))
    assert not torch.equal(before, vector(model))


def test_the_norm_of_gradients_and_of_bins_is_one_norm():
    """Bins come from other devices and from other ranks."""
    grads = [torch.randn(n) for n in (3, 1000, 64)]
    options = {"max_norm": 1.0, "loss_scale": torch.tensor(4.0)}
    cpu = torch.device("cpu")
    whole = optim_base._norm(grads, [], cpu, **options)
    for n in range(4):
        parts = optim_base._norm(grads[n:], [norm_bins(grads[:n])], cpu, **options)
        for one, other in zip(whole, parts):
            assert torch.equal(one, other)
    exact = torch.cat(grads).double().norm().item() / 4
    assert whole.norm.item() == pytest.approx(exact, rel=1e-6)


def test_gradients_can_be_zeroed_in_the_step():
    plain, ours = build(), build()
    a = AdamW(plain.parameters(), **HYPER, max_grad_norm=1.0)
    b = AdamW(ours.parameters(), **HYPER, max_grad_norm=1.0, zero_grad_in_step=True)
    for step in range(3):
        put_gradients(plain, step)
        put_gradients(ours, step)
        ours[0].weight.grad = plain[0].weight.grad = None
        a.step()
        b.step()
        assert ours[0].weight.grad is None
        assert all(not p.grad.any() for p in ours.parameters() if p.grad is not None)
    assert torch.equal(vector(plain), vector(ours))
    assert torch.equal(a.grad_norm, b.grad_norm)


# Loss scale


def test_gradients_are_divided_by_grad_scale_before_clipping():
    plain, scaled = build(), build()
    a = AdamW(plain.parameters(), **HYPER, max_grad_norm=1.0)
    b = AdamW(scaled.parameters(), **HYPER, max_grad_norm=1.0)
    assert b.grad_scale == 1.0
    for step in range(3):
        b.grad_scale = 2.0**10 if step % 2 else torch.tensor(2.0**10)
        put_gradients(plain, step)
        put_gradients(scaled, step, scale=2.0**10)
        a.step()
        b.step()
        assert torch.equal(a.grad_norm, b.grad_norm)
        assert not b.skipped
    assert torch.equal(vector(plain), vector(scaled))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_with_non_finite_gradients_is_skipped_under_a_loss_scale(
    bad, max_grad_norm, capturable
):
    model = build()
    optimizer = AdamW(
        model.parameters(),
        **HYPER,
        max_grad_norm=max_grad_norm,
        capturable=capturable,
        zero_grad_in_step=True,
    )
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
    assert all(not p.grad.any() for p in model.parameters())
    run(model, optimizer, 1)
    assert not optimizer.skipped
    assert not torch.equal(vector(model), before)
    assert {int(s["step"]) for s in optimizer.state.values()} == {2}


def test_the_first_step_can_be_skipped():
    plain, ours = build(), build()
    a, b = AdamW(plain.parameters(), **HYPER), AdamW(ours.parameters(), **HYPER)
    b.grad_scale = 1.0
    put_gradients(ours, 0, scale=math.inf)
    b.step()
    assert b.skipped
    assert torch.equal(run(plain, a, 3), run(ours, b, 3))


def test_without_a_loss_scale_non_finite_gradients_go_in():
    model = build()
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    put_gradients(model, 0)
    model[3].bias.grad[1] = math.nan
    optimizer.step()
    assert not optimizer.skipped
    assert optimizer.grad_norm.isnan()
    assert vector(model).isnan().any()


@pytest.mark.parametrize("capturable", [False, True])
def test_a_known_overflow_needs_no_look_at_the_gradients(monkeypatch, capturable):
    monkeypatch.setattr(optim_base, "_norm", None)
    plain, ours = build(), build()
    a = AdamW(plain.parameters(), **HYPER)
    b = AdamW(ours.parameters(), **HYPER, capturable=capturable)
    run(plain, a, 1)
    b.grad_scale = torch.tensor(8.0)
    b.found_inf = torch.tensor([2.0])  # GradScaler adds up flags of devices
    run(ours, b, 1, scale=8.0)
    assert b.skipped
    b.found_inf = torch.tensor(0.0)
    run(ours, b, 1, scale=8.0)
    assert not b.skipped
    assert b.grad_norm is None
    assert torch.equal(vector(plain), vector(ours))


def test_a_known_overflow_counts_beside_a_finite_norm():
    model = build()
    optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=1.0)
    before = vector(model)
    optimizer.found_inf = torch.tensor(1.0)
    run(model, optimizer, 1)
    assert optimizer.grad_norm.isfinite()
    assert optimizer.skipped
    assert torch.equal(vector(model), before)


# GradScaler


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_grad_scaler_drives_it_like_torchs(unscale, max_grad_norm):
    """Also where the user unscales; overflows are skipped and halve the scale as with torch."""
    models, scales, optimizers = [], [], []
    for cls in (ExactAdamW, torch.optim.AdamW, AdamW):
        model = build(torch.float64 if cls is ExactAdamW else torch.float32)
        options = {"max_grad_norm": max_grad_norm} if cls is AdamW else {}
        optimizer = cls(model.parameters(), **HYPER, **options)
        optimizer.roundings = ROUNDINGS_OF_A_NORM if max_grad_norm else 0  # scales are powers of 2
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scales.append([])
        for step in range(8):
            put_gradients(model, step)
            loss = sum((p * p.grad.clone()).sum() for p in model.parameters())
            optimizer.zero_grad()
            scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
            if unscale or (max_grad_norm and not options):
                scaler.unscale_(optimizer)
            if max_grad_norm and not options:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            scaler.step(optimizer)
            if cls is AdamW:
                assert optimizer.skipped == (step == 2)
            scaler.update()
            scales[-1].append(scaler.get_scale())
        assert {int(s["step"]) for s in optimizer.state.values()} == {7}
        models.append(model)
        optimizers.append(optimizer)
    assert scales[0] == scales[1] == scales[2]
    optimizers[0].holds(*(m.parameters() for m in models[1:]))
    assert optimizer.grad_scale == 1.0
    assert optimizer.found_inf is None


def test_grad_scaler_takes_fp16_gradients():
    """torch refuses to unscale those; here step() does it, into the master weights."""
    model = build(torch.float16)
    single = copy.deepcopy(model).float()
    a = AdamW(model.parameters(), **HYPER, master_weights=True)
    b = AdamW(single.parameters(), **HYPER)
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


def test_grad_scaler_beside_main_gradients_is_refused():
    """It would not see them: its update() fails, and a loss scale never finds its level."""
    model = fastpar.parallelize(build(torch.bfloat16), fastpar.Mesh(), grad_dtype=torch.float32)
    optimizer = AdamW(model.parameters(), **HYPER, master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 7).bfloat16()).float().square().mean()).backward()
    with pytest.raises(
        RuntimeError, match=r"expected gradients in p\.grad under GradScaler, got main"
    ):
        scaler.step(optimizer)


def test_the_trainers_loss_scale_drives_it():
    """The gradient 1e-3 * scale overflows fp16 (65504) until the scale has come down to 2**25."""
    model = nn.Linear(2, 1, bias=False).half()
    optimizer = AdamW(model.parameters(), lr=0.1, master_weights=True)
    scale = DynamicLossScale(init=2.0**30, max_scale=2.0**30)
    before, skipped = model.weight.detach().clone(), 0
    for _ in range(8):
        model.weight.grad = torch.full((1, 2), 1e-3 * scale.scale).half()
        optimizer.grad_scale = scale.scale
        optimizer.step()
        scale.update(optimizer.skipped)
        skipped += optimizer.skipped
        if optimizer.skipped:
            assert torch.equal(model.weight, before)
    assert (skipped, scale.scale) == (5, 2.0**25)
    assert optimizer.grad_norm.item() == pytest.approx(2**0.5 * 1e-3, rel=1e-3)
