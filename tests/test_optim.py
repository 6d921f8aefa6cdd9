"""optim.py: torch.optim.AdamW's behaviour, plus master weights, clipping and skipped steps."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import fastpar
from fastpar.kernels.adamw_storage import master_split
from fastpar.mesh import Mesh
from fastpar.optim import AdamW, global_norm
from fastpar.testing import run_ranks

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


def assert_two_x(ours, eager, exact):
    """Error against fp64 at most twice torch's in fp32, plus one rounding of the largest value."""
    floor = 2.0**-24 * exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weight_decay": 0.0}])
def test_it_steps_like_torch(options):
    options = {**HYPER, **options}
    exact = build().double()
    exact = run(exact, torch.optim.AdamW(exact.parameters(), **options, foreach=False), 20)
    eager, ours = build(), build()
    eager = run(eager, torch.optim.AdamW(eager.parameters(), **options), 20)
    ours = run(ours, AdamW(ours.parameters(), **options), 20)
    assert_two_x(ours, eager, exact)


def test_the_name_is_public():
    assert fastpar.AdamW is AdamW


def test_defaults_are_torchs():
    model = build()
    ours, torchs = AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    for key, value in ours.defaults.items():
        assert torchs.defaults[key] == value


def test_groups_have_their_own_options():
    def groups(model):
        slow = {"params": list(model[0].parameters()), "lr": 1e-4, "weight_decay": 0.0}
        return [slow, {"params": list(model[2:].parameters()), "betas": (0.5, 0.6), "eps": 1e-3}]

    exact, eager, ours = build().double(), build(), build()
    exact = run(exact, torch.optim.AdamW(groups(exact), **HYPER), 10)
    eager = run(eager, torch.optim.AdamW(groups(eager), **HYPER), 10)
    ours = run(ours, AdamW(groups(ours), **HYPER), 10)
    assert_two_x(ours, eager, exact)


def test_learning_rate_schedulers_work():
    eager, ours = build(), build()
    for model, cls in ((eager, torch.optim.AdamW), (ours, AdamW)):
        optimizer = cls(model.parameters(), **HYPER)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        for step in range(6):
            put_gradients(model, step)
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
    assert (vector(eager) - vector(ours)).abs().max() < 1e-5


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


def test_parameters_without_a_gradient_are_skipped():
    """They keep their own step count, so a late one gets the bias correction of a first step."""
    eager, ours = build(), build()
    a = torch.optim.AdamW(eager.parameters(), **HYPER)
    b = AdamW(ours.parameters(), **HYPER)
    b.step()
    assert not b.state
    for step in range(4):
        for model, optimizer in ((eager, a), (ours, b)):
            put_gradients(model, step)
            if step in (0, 2):
                model[step].weight.grad = None
            optimizer.step()
    for p, q in zip(eager.parameters(), ours.parameters()):
        assert a.state[p]["step"] == b.state[q]["step"]
    assert {int(s["step"]) for s in b.state.values()} == {3, 4}
    assert (vector(eager) - vector(ours)).abs().max() < 1e-5


# Clipping and norms


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_clipping_is_torchs_and_leaves_gradients_alone(scale):
    exact, eager, ours = build().double(), build(), build()
    norms = []
    for model in (exact, eager):
        optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
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
    assert_two_x(vector(ours), vector(eager), vector(exact))


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
    AdamW(plain.parameters()).step()
    assert torch.equal(vector(plain), vector(model))
    assert not torch.equal(before, vector(model))


@pytest.mark.parametrize("value", [None, 1e-3])
def test_the_norm_of_a_large_gradient_is_accurate(value):
    """As large as a few fp32 partial sums can no longer add: torch is off by 1e-3 here."""
    n = 8_000_000
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(n, generator=generator) if value is None else torch.full((n,), value)
    exact = grad.double().norm().item()
    # Each of the 2**14 terms of a piece costs at most one rounding, half of it in the root;
    # measured: 2e-8 (random) and 1e-5 (equal values), torch's own 6e-5 and 3e-3.
    assert abs(global_norm([grad]).item() / exact - 1) <= 2**14 * 2**-24 / 2


def test_the_norm_does_not_depend_on_where_gradients_lie():
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator) for n in (1, 40_000, 63, 16_384, 16_385)]
    expected = global_norm(grads)
    for offset in (0, 64, 1, 13):
        moved = []
        for grad in grads:
            flat = torch.zeros(grad.numel() + offset)
            flat[offset:] = grad
            moved.append(flat[offset:])
        assert torch.equal(global_norm(moved), expected)


def test_norms_of_half_gradients_are_fp32():
    grads = [torch.full((10_000,), 300.0, dtype=torch.float16)]
    assert global_norm(grads).item() == pytest.approx(30_000.0)
    assert global_norm([g * 100 for g in grads]).item() == pytest.approx(3e6, rel=1e-3)


# Loss scale


def test_grad_scale_unscales_before_clipping():
    plain, scaled = build(), build()
    a = AdamW(plain.parameters(), **HYPER, max_grad_norm=1.0)
    b = AdamW(scaled.parameters(), **HYPER, max_grad_norm=1.0)
    assert b.grad_scale == 1.0
    for step in range(3):
        b.grad_scale = 2.0**-10 if step % 2 else torch.tensor(2.0**-10)
        put_gradients(plain, step)
        put_gradients(scaled, step, scale=2.0**10)
        a.step()
        b.step()
        assert torch.equal(a.grad_norm, b.grad_norm)
        assert not b.skipped
    assert torch.equal(vector(plain), vector(scaled))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_with_non_finite_gradients_is_skipped_under_a_loss_scale(bad, max_grad_norm):
    model = build()
    optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=max_grad_norm)
    optimizer.grad_scale = 1.0  # a loss scale that has come down to 1 is still one
    run(model, optimizer, 1)
    before, state = vector(model), copy.deepcopy(optimizer.state_dict())
    put_gradients(model, 1)
    model[3].bias.grad[1] = bad
    optimizer.step()
    assert optimizer.skipped
    assert torch.equal(vector(model), before)
    assert str(optimizer.state_dict()) == str(state)
    run(model, optimizer, 1)
    assert not optimizer.skipped
    assert not torch.equal(vector(model), before)


def test_without_a_loss_scale_non_finite_gradients_go_in():
    model = build()
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    put_gradients(model, 0)
    model[3].bias.grad[1] = math.nan
    optimizer.step()
    assert not optimizer.skipped
    assert optimizer.grad_norm.isnan()
    assert vector(model).isnan().any()


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_follow_the_fp32_run(dtype):
    """16-bit gradients are exact in fp32, so the master weights must be the fp32 run's, bit for
    bit, and the parameters their rounding."""
    half = build(dtype)
    single = copy.deepcopy(half).float()
    a = AdamW(half.parameters(), **HYPER, master_weights=True, max_grad_norm=1.0)
    b = AdamW(single.parameters(), **HYPER, max_grad_norm=1.0)
    for step in range(10):
        put_gradients(half, step)
        for p, q in zip(half.parameters(), single.parameters()):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(half.parameters(), single.parameters()):
        assert torch.equal(a.state[p]["master_weight"], q)
        assert torch.equal(p, q.to(dtype))
        assert a.state[p]["exp_avg"].dtype == torch.float32


def test_fp32_parameters_are_their_own_master():
    model = build()
    optimizer = AdamW(model.parameters(), master_weights=True)
    run(model, optimizer, 1)
    assert all("master_weight" not in s for s in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_need_master_weights(dtype):
    with pytest.raises(ValueError, match=rf"got dtype={dtype} with master_weights=False; pass"):
        AdamW(build(dtype).parameters())


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"expected fp32 parameters, .* dtype=torch\.float64"):
        AdamW(build(torch.float64).parameters(), master_weights=True)


# State


@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_of_torch_loads_here(amsgrad):
    eager, ours = build(), build()
    a = torch.optim.AdamW(eager.parameters(), **HYPER, amsgrad=amsgrad)
    run(eager, a, 3)
    ours.load_state_dict(eager.state_dict())
    b = AdamW(ours.parameters(), lr=1.0)
    if amsgrad:
        with pytest.raises(ValueError, match=r"expected amsgrad=False, got amsgrad=True"):
            b.load_state_dict(a.state_dict())
        return
    options = b.param_groups[0].keys()
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert b.param_groups[0]["lr"] == HYPER["lr"]
    assert b.param_groups[0].keys() == options
    for p, q in zip(eager.parameters(), ours.parameters()):
        for name, value in a.state[p].items():
            assert torch.equal(b.state[q][name], value)
            assert b.state[q][name].data_ptr() != value.data_ptr()
    run(eager, a, 3, start=3)
    run(ours, b, 3, start=3)
    assert (vector(eager) - vector(ours)).abs().max() < 1e-5


def test_state_of_adam_is_refused():
    model = build()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=True, got .*=False; continue"):
        AdamW(model.parameters()).load_state_dict(adam.state_dict())


def test_state_loads_into_torch():
    eager, ours = build(), build()
    b = AdamW(ours.parameters(), **HYPER)
    run(ours, b, 3)
    eager.load_state_dict(ours.state_dict())
    a = torch.optim.AdamW(eager.parameters())
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    run(eager, a, 3, start=3)
    run(ours, b, 3, start=3)
    assert (vector(eager) - vector(ours)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_half_parameters_stays_fp32(dtype):
    """A run that goes through a saved state continues bit for bit."""
    whole, half = build(dtype), build(dtype)
    a = AdamW(whole.parameters(), **HYPER, master_weights=True)
    run(whole, a, 6)
    b = AdamW(half.parameters(), **HYPER, master_weights=True)
    run(half, b, 3)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": b.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = build(dtype, seed=1)
    resumed.load_state_dict(saved["model"])
    c = AdamW(resumed.parameters(), master_weights=True)
    c.load_state_dict(saved["optimizer"])
    run(resumed, c, 3, start=3)
    assert torch.equal(vector(resumed), vector(whole))
    for p, q in zip(whole.parameters(), resumed.parameters()):
        for name, value in a.state[p].items():
            assert c.state[q][name].dtype == torch.float32
            assert torch.equal(c.state[q][name], value)


def test_deepcopy_continues_alone():
    model = build()
    optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=1.0)
    run(model, optimizer, 2)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert torch.equal(run(model, optimizer, 2, start=2), run(twin_model, twin, 2, start=2))


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"expected 0\.0 <= lr < inf, got lr=-1\.0"),
        ({"lr": math.nan}, r"expected 0\.0 <= lr < inf, got lr=nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] < 1\.0, got betas\[0\]=1\.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] < 1\.0, got betas\[1\]=-0\.1"),
        ({"eps": -1.0}, r"got eps=-1\.0"),
        ({"weight_decay": -0.1}, r"got weight_decay=-0\.1"),
        ({"max_grad_norm": 0.0}, r"expected max_grad_norm > 0 or None, got max_grad_norm=0\.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(build().parameters(), **options)


def test_options_of_a_group_are_checked_and_the_group_is_not_kept():
    optimizer = AdamW(build().parameters())
    with pytest.raises(ValueError, match=r"got lr=-2\.0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -2.0})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"expected dense gradients, got layout=torch\.sparse"):
        AdamW(model.parameters()).step()


# With an engine


def test_step_finishes_the_engines_reduction():
    def ranks():
        mesh = Mesh()
        model = fastpar.parallelize(build(seed=mesh.rank), mesh)
        optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=1.0)
        engine = fastpar.engine_of(model)
        for step in range(4):
            with engine.no_sync():
                model(torch.full((2, 7), step + mesh.rank + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.check_replicas()
        return vector(model), optimizer.grad_norm

    plain = build()
    optimizer = AdamW(plain.parameters(), **HYPER, max_grad_norm=1.0)
    for step in range(4):
        for rank in range(2):
            (plain(torch.full((2, 7), step + rank + 1.0)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values, norm in run_ranks(ranks, 2):
        assert torch.equal(values, vector(plain))
        assert torch.equal(norm, optimizer.grad_norm)


def test_a_rank_without_a_batch_takes_part_in_every_step():
    def ranks():
        mesh = Mesh()
        model = fastpar.parallelize(build(), mesh)
        optimizer = AdamW(model.parameters(), **HYPER)
        for step in range(3):
            if mesh.rank == 0 or step == 0:
                model(torch.full((2, 7), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fastpar.engine_of(model).check_replicas()
        return vector(model)

    plain = build()
    optimizer = AdamW(plain.parameters(), **HYPER)
    for step in range(3):
        share = 1.0 if step == 0 else 0.5
        (plain(torch.full((2, 7), step + 1.0)).square().mean() * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(run_ranks(ranks, 2, timeout_s=20)[1], vector(plain))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_main_gradients_are_used_and_cleared(set_to_none):
    model, single = build(torch.bfloat16), build(torch.bfloat16).float()
    fastpar.parallelize(model, Mesh(), grad_dtype=torch.float32)
    a = AdamW(model.parameters(), **HYPER, master_weights=True)
    b = AdamW(single.parameters(), **HYPER)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), single.parameters()):
            q.grad = torch.zeros_like(q)
            for _ in range(3):
                g = torch.randn(p.shape, generator=generator).bfloat16()
                (p * g).sum().backward()
                q.grad += g.float()
        a.step()
        b.step()
        a.zero_grad(set_to_none=set_to_none)
        for p, q in zip(model.parameters(), single.parameters()):
            assert torch.equal(a.state[p]["master_weight"], q)
            assert torch.equal(p, master_split(q)[0])
