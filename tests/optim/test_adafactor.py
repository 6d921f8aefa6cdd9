"""adafactor.py: torch.optim.Adafactor's step, the paper's, little memory, state of any form."""

import copy
import io
import math

import pytest
import torch
from cells import cells
from torch import nn

import fastpar
from fastpar.comm.mesh import Mesh
from fastpar.optim.adafactor import Adafactor
from fastpar.testing import run_ranks

U = 2.0**-24  # largest relative error of one fp32 rounding
SHAPES = [(24, 17), (3, 5, 7), (33,), (1,), (), (1, 6)]
PAPER = {"eps": (1e-30, 1e-3), "add_eps": True}


def build(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def put_gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def run(params, optimizer, steps, scale=1.0, start=0):
    for step in range(start, start + steps):
        put_gradients(params, step, scale)
        optimizer.step()
    return [p.detach().clone() for p in params]


def exact_run(params, steps, scale=1.0, *, lr, weight_decay=0.0, d=1.0, beta2_decay=-0.8,
              eps=(None, 1e-3), add_eps=False, relative_step=True, scale_parameter=True,
              beta1=None):  # fmt: skip
    """The formulas one by one in fp64, for gradients of put_gradients; the largest |U| too."""
    least, largest = eps[0] if eps[0] is not None else 2.0**-23, 0.0
    values = [p.detach().double() for p in params]
    rows, columns, means = ([0.0] * len(values) for _ in range(3))
    for step in range(steps):
        put_gradients(params, step, scale)
        t = step + 1
        beta2 = 1 - t**beta2_decay
        rho = min(lr, 1 / math.sqrt(t)) if relative_step else lr
        for i, p in enumerate(params):
            g, x = p.grad.double(), values[i]
            squares = g * g + (least if add_eps else 0.0)
            alpha = rho
            if scale_parameter:
                alpha *= max(eps[1], x.square().mean().sqrt().item())
            x = x - lr * weight_decay * x
            if g.dim() > 1:
                rows[i] = beta2 * rows[i] + (1 - beta2) * squares.mean(-1, keepdim=True)
                columns[i] = beta2 * columns[i] + (1 - beta2) * squares.mean(-2, keepdim=True)
                mean = rows[i].mean(-2, keepdim=True)
                v = rows[i] * columns[i] / (mean if add_eps else mean.clamp(min=least))
            else:
                rows[i] = beta2 * rows[i] + (1 - beta2) * squares
                v = rows[i]
            u = g / (v.sqrt() if add_eps else v.sqrt().clamp(min=least))
            u = u / max(1.0, u.square().mean().sqrt().item() / d)
            largest = max(largest, u.abs().max().item())
            if beta1 is not None:
                u = means[i] = beta1 * means[i] + (1 - beta1) * alpha * u
                alpha = 1.0
            values[i] = x - alpha * u
    return values, largest


def error_bound(exact, start, steps, largest, *, lr, least_rms, relative=True, roundings):
    """How far an fp32 run may be from the exact one after `steps` steps.

    One step changes a value by at most a * L, a = lr * max(least rms, rms(p)), L the largest |U|,
    with a relative error of `roundings` * U; then it rounds the value and its decay, 3 * U * |p|.
    An error e before the step moves rms(p) by at most e, and so the step by lr * L * e.
    """
    reach = max(max(x.abs().max().item() for x in values) for values in (start, exact))
    size = lr * max(least_rms, reach)
    error = 0.0
    for _ in range(steps):
        error += lr * largest * error * relative
        error += roundings * U * size * largest + 3 * U * (reach + size * largest)
    return error


# Roundings of one U: a mean of squares of n values, n + 3 (norm, square, division, factor), halved
# by the root as is all of V; at most 3 for each of the steps in a running mean; two means of those
# (n again) and three operations in V; root 2, product, factor; size / clip: two norms of n, root,
# products. n is at most 33 here.
def roundings(steps, n=33):
    return 3 * (n + 3) + 3 * steps + 2 * n + 12


OPTIONS = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"d": 2.0, "beta2_decay": -0.5},
    {"lr": 0.3, "eps": (None, 100.0)},  # 1 / sqrt(t) is smaller from the 12th step on
    {"eps": (0.5, 2.0)},
]


@pytest.mark.parametrize(("options", "foreach"), cells(OPTIONS, [None, False, True], strength=1))
def test_it_steps_like_torch(options, foreach):
    theirs, ours = build(), build()
    a = torch.optim.Adafactor(theirs, **options)
    b = Adafactor(ours, **options, foreach=foreach)
    start = [p.detach().clone() for p in ours]
    run(theirs, a, 100)
    run(ours, b, 100)
    lr = options.get("lr", 1e-2)
    plain = {k: v for k, v in options.items() if k != "maximize"}
    _, largest = exact_run(build(), 100, **{"lr": lr, **plain})
    least_rms = options.get("eps", (None, 1e-3))[1]
    # The moments are equal: what is left of roundings() are two norms of at most 33 and 12.
    bound = error_bound(
        theirs,
        start,
        100,
        largest,
        lr=lr,
        least_rms=least_rms,
        relative=least_rms < 10,  # it is above every rms(p) otherwise
        roundings=2 * 33 + 12,
    )
    for p, q in zip(theirs, ours):
        assert (p - q).abs().max() <= 2 * bound  # each of the two may be off by it
        for name, value in a.state[p].items():
            got = b.state[q][name]
            assert got.shape == value.shape
            # The same operations on the same numbers: no error at all.
            assert torch.equal(got, value), name


FORMULAS = [
    PAPER,
    {**PAPER, "beta1": 0.9},
    {**PAPER, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
    {"eps": (None, 1e-3)},
]


@pytest.mark.parametrize(("options", "scale"), cells(FORMULAS, [1.0, 1e-6], strength=1))
def test_it_follows_the_papers_formulas(options, scale):
    options = {"lr": 1e-2, **options}
    params = build()
    start = [p.detach().clone() for p in params]
    ours = run(params, Adafactor(params, **options), 100, scale)
    exact, largest = exact_run(build(), 100, scale, **options)
    relative = options.get("scale_parameter", True)
    bound = error_bound(
        exact,
        start,
        100,
        largest,
        lr=options["lr"],
        least_rms=1.0 if not relative else 1e-3,
        relative=relative,
        roundings=roundings(100),
    )
    for mine, x, before in zip(ours, exact, start):
        assert (mine - x).abs().max() <= bound
        if before.numel() > 1:  # the bound is small beside what happened
            assert (x - before).abs().max() > 10 * bound


def test_the_rest_of_a_model_does_not_change_a_parameter():
    """Batches of any size give the same bits."""
    params = build()
    together = run(params, Adafactor(params), 5)
    for i in range(len(SHAPES)):
        params = build()
        optimizer = Adafactor([params[i]])
        assert torch.equal(run(params, optimizer, 5)[i], together[i])


@pytest.mark.parametrize(
    ("options", "elements"),
    [({}, 512 + 256 + 256), ({"beta1": 0.9}, 512 + 256 + 256 + 512 * 256 + 256)],
)
def test_memory_is_sublinear(options, elements):
    params = [nn.Parameter(torch.randn(512, 256)), nn.Parameter(torch.randn(256))]
    optimizer = Adafactor(params, **options)
    run(params, optimizer, 2)
    tensors = [t for s in optimizer.state.values() for name, t in s.items() if name != "step"]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 4 * elements


def test_batches_are_bounded():
    """A large parameter is a batch of its own; more of them need no more temporary memory."""
    from fastpar.optim import adafactor

    sizes = [(1 << 19, 1), (1 << 19, 2), (1 << 18, 1), (5,), (1 << 18, 1), (7,), (0,), (1 << 20, 1)]
    pairs = [(torch.empty(n), torch.empty(n)) for n in sizes]
    batches = adafactor._batches(pairs, None)
    found = [[tuple(p.shape) for p, _ in batch] for batch in batches]
    assert found == [
        [(1 << 19, 1)],
        [(1 << 19, 2)],
        [(1 << 18, 1), (1 << 18, 1)],
        [(5,), (7,)],
        [(1 << 20, 1)],
    ]
    assert len(adafactor._batches(pairs, True)) == 2
    assert len(adafactor._batches(pairs, False)) == 7


def test_parameters_without_a_gradient_are_skipped():
    theirs, ours = build(), build()
    a, b = torch.optim.Adafactor(theirs), Adafactor(ours)
    b.step()
    assert not b.state
    for step in range(4):
        for params, optimizer in ((theirs, a), (ours, b)):
            put_gradients(params, step)
            if step in (0, 2):
                params[1].grad = None
            optimizer.step()
    for p, q in zip(theirs, ours):
        assert a.state[p]["step"] == b.state[q]["step"]
        assert torch.allclose(p, q)
    assert {int(s["step"]) for s in b.state.values()} == {2, 4}


# Clipping and the loss scale


@pytest.mark.parametrize("options", [{}, PAPER])
def test_clipping_is_torchs_and_leaves_gradients_alone(options):
    """By powers of two, which no order of the products rounds."""
    clipped, ours = build(), build()
    a = Adafactor(clipped, **options)
    b = Adafactor(ours, **options, max_grad_norm=1.0)
    for step, factor in enumerate((0.125, 0.5, 1.0, 0.25, 4.0)):
        for params in (clipped, ours):
            put_gradients(params, step, 10.0)
        before = [p.grad.clone() for p in ours]
        norm = torch.cat([g.double().flatten() for g in before]).norm().float()
        b.max_grad_norm = factor * (norm.item() + 1e-6)  # clip_grad_norm_'s rule
        b.step()
        assert b.grad_norm == norm
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before))
        for p in clipped:
            p.grad.mul_(min(factor, 1.0))
        a.step()
    for p, q in zip(clipped, ours):
        assert torch.equal(p, q)
        for name, value in a.state[p].items():
            assert torch.equal(b.state[q][name], value), name


def test_a_loss_scale_divides_and_skips():
    plain, scaled = build(), build()
    a, b = Adafactor(plain, max_grad_norm=1.0), Adafactor(scaled, max_grad_norm=1.0)
    b.grad_scale = 2.0**10
    run(plain, a, 2)
    run(scaled, b, 2, scale=2.0**10)
    assert not b.skipped
    before, state = [p.detach().clone() for p in scaled], str(b.state_dict())
    put_gradients(scaled, 2)
    scaled[1].grad[0, 0, 0] = math.inf
    b.step()
    assert b.skipped
    assert str(b.state_dict()) == state
    for p, q, x in zip(plain, scaled, before):
        assert torch.equal(q, x)
        assert torch.equal(p, q)


def test_gradscaler_drives_it():
    plain, scaled = build(shapes=[(4, 3)]), build(shapes=[(4, 3)])
    a, b = Adafactor(plain), Adafactor(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 2.0):
        (plain[0].square().sum() * factor).backward()
        scaler.scale(scaled[0].square().sum() * factor).backward()
        if math.isfinite(factor):
            a.step()
        scaler.step(b)
        scaler.update()
        assert b.skipped == (factor == math.inf)
        a.zero_grad()
        b.zero_grad()
    assert scaler.get_scale() == 2.0
    assert torch.equal(plain[0], scaled[0])


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_follow_the_fp32_run(dtype):
    half = build(dtype)
    single = [nn.Parameter(p.detach().float()) for p in half]
    a = Adafactor(half, master_weights=True, beta1=0.9)
    b = Adafactor(single, beta1=0.9)
    for step in range(10):
        put_gradients(half, step)
        for p, q in zip(half, single):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(half, single):
        assert torch.equal(a.state[p]["master_weight"], q)
        assert (p.float() - q).abs().max() <= 2.0 ** (-8 if dtype == torch.bfloat16 else -11) * (
            q.abs().max()
        )
        assert {t.dtype for t in a.state[p].values()} == {torch.float32}


def test_a_remainder_is_as_good_as_a_master():
    full, short = build(torch.bfloat16), build(torch.bfloat16)
    a, b = Adafactor(full, master_weights=True), Adafactor(short, master_weights="remainder")
    run(full, a, 10)
    run(short, b, 10)
    for p, q in zip(full, short):
        assert torch.equal(p, q)
        assert b.state[q]["master_remainder"].dtype == torch.int16
    c = Adafactor(short, master_weights=True)
    c.load_state_dict(b.state_dict())
    d = Adafactor(full, master_weights="remainder")
    d.load_state_dict(a.state_dict())
    for p, q in zip(full, short):
        assert torch.equal(c.state[q]["master_weight"], a.state[p]["master_weight"])
        assert torch.equal(d.state[p]["master_remainder"], b.state[q]["master_remainder"])


# State


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_torch_loads_here_and_ours_there(dtype):
    theirs, ours = build(dtype), build(dtype)
    a = torch.optim.Adafactor(theirs, lr=0.03)
    run(theirs, a, 3)
    for p, q in zip(theirs, ours):
        q.data.copy_(p.data)
    b = Adafactor(ours, lr=1.0, master_weights=True)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert b.param_groups[0]["lr"] == 0.03
    assert b.param_groups[0]["add_eps"] is False
    for p, q in zip(theirs, ours):
        for name, value in a.state[p].items():
            assert b.state[q][name].dtype == torch.float32
            assert torch.equal(b.state[q][name], value.float())
    run(ours, b, 3, start=3)
    for p, q in zip(theirs, ours):
        p.data.copy_(q.data)
    c = torch.optim.Adafactor(theirs)
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    for p, q in zip(theirs, ours):
        for name in a.state[p]:
            assert torch.equal(c.state[p][name], b.state[q][name].to(c.state[p][name].dtype))
    run(theirs, c, 1, start=6)
    run(ours, b, 1, start=6)
    if dtype == torch.float32:
        assert all(torch.allclose(p, q) for p, q in zip(theirs, ours))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [True, "remainder"])
def test_a_run_through_a_saved_state_continues_bit_for_bit(dtype, master_weights):
    options = {"master_weights": master_weights, "beta1": 0.9, "weight_decay": 0.1, **PAPER}
    whole, half = build(dtype), build(dtype)
    expected = run(whole, Adafactor(whole, **options), 6)
    b = Adafactor(half, **options)
    run(half, b, 3)
    file = io.BytesIO()
    torch.save(b.state_dict(), file)
    file.seek(0)
    resumed = build(dtype, seed=1)
    for p, q in zip(half, resumed):
        q.data.copy_(p.data)
    c = Adafactor(resumed, master_weights=master_weights)
    c.load_state_dict(torch.load(file))
    assert all(torch.equal(p, q) for p, q in zip(run(resumed, c, 3, start=3), expected))
    twin, optimizer = copy.deepcopy((half, b))
    assert all(torch.equal(p, q) for p, q in zip(run(twin, optimizer, 3, start=3), expected))


def test_entries_have_the_shapes_that_checkpoints_expect():
    params = build(torch.bfloat16)
    for master_weights in (True, "remainder"):
        optimizer = Adafactor(params, master_weights=master_weights, beta1=0.9)
        run(params, optimizer, 1)
        for p in params:
            shapes = {name: value.shape for name, value in optimizer.state[p].items()}
            assert shapes.items() <= optimizer.entry_shapes(p).items()
            assert optimizer.master_entry(p) in shapes


def test_state_of_another_model_is_refused_and_nothing_changes():
    params, others = build(shapes=[(4, 3), (5,)]), build(shapes=[(4, 6), (5,)])
    a, b = Adafactor(params), Adafactor(others)
    run(params, a, 2)
    run(others, b, 1)
    before = str(b.state_dict())
    with pytest.raises(
        ValueError,
        match=r"load_state_dict: expected col_var of shape \[1, 6\] for parameter 0 of group 0, "
        r"got shape=\[1, 3\]; load the state that was saved with this model",
    ):
        b.load_state_dict(a.state_dict())
    swapped = Adafactor(list(reversed(build(shapes=[(4, 3), (5,)]))))
    with pytest.raises(ValueError, match=r"expected variance for parameter 0 of group 0, got entr"):
        swapped.load_state_dict(a.state_dict())
    with pytest.raises(ValueError, match=r"Adafactor.* expected 2 parameter groups, got 1; load"):
        Adafactor([{"params": [p]} for p in params]).load_state_dict(a.state_dict())
    saved = a.state_dict()
    saved["param_groups"][0]["d"] = 0.5
    with pytest.raises(ValueError, match=r"Adafactor.load_state_dict: expected 1.0 <= d < inf"):
        a.load_state_dict(saved)
    assert str(b.state_dict()) == before


# With an engine


def test_two_ranks_step_like_one_process():
    def model(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 3))

    models = [model(rank) for rank in range(2)]  # not in the threads, which share a generator

    def ranks():
        mesh = Mesh()
        ours = fastpar.parallelize(models[mesh.rank], mesh)
        optimizer = Adafactor(ours.parameters(), max_grad_norm=1.0)
        for step in range(4):
            with fastpar.engine_of(ours).no_sync():
                ours(torch.full((2, 7), step + mesh.rank + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fastpar.engine_of(ours).check_replicas()
        return [p.detach().clone() for p in ours.parameters()]

    plain = model()
    optimizer = Adafactor(plain.parameters(), max_grad_norm=1.0)
    for step in range(4):
        for rank in range(2):
            (plain(torch.full((2, 7), step + rank + 1.0)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in run_ranks(ranks, 2):
        assert all(torch.equal(p, q) for p, q in zip(values, plain.parameters()))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_main_gradients_are_used_and_cleared(set_to_none):
    model = nn.Linear(5, 4).bfloat16()
    single = copy.deepcopy(model).float()
    fastpar.parallelize(model, Mesh(), grad_dtype=torch.float32)
    a = Adafactor(model.parameters(), master_weights=True)
    b = Adafactor(single.parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), single.parameters()):
            g = torch.randn(p.shape, generator=generator).bfloat16()
            (p * g).sum().backward()
            q.grad = g.float()
        a.step()
        b.step()
        a.zero_grad(set_to_none=set_to_none)
        for p, q in zip(model.parameters(), single.parameters()):
            assert torch.equal(a.state[p]["master_weight"], q)
