"""Adafactor: torch.optim.Adafactor's step, the paper's, in little memory."""

import math

import torch
from alive import Alive
from cells import covering
from optimizers import PAPER, put_gradients, run
from torch import nn

from fastpar.optim.adafactor import Adafactor

U = 2.0**-24  # largest relative error of one fp32 rounding
SHAPES = [(24, 17), (3, 5, 7), (33,), (1,), (), (1, 6)]


def build():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]


def exact_run(params, steps, scale=1.0, *, lr, weight_decay=0.0, d=1.0, beta2_decay=-0.8,
              eps=(None, 1e-3), add_eps=False, relative_step=True, scale_parameter=True,
              maximize=False):  # fmt: skip
    """The formulas one by one in fp64, for gradients of put_gradients; the largest |U| too."""
    least, largest = 2.0**-23 if eps[0] is None else eps[0], 0.0
    values = [p.detach().double() for p in params]
    rows, columns = ([0.0] * len(values) for _ in range(2))
    for step in range(steps):
        put_gradients(params, step, scale)
        t = step + 1
        beta2 = 1 - t**beta2_decay
        rho = min(lr, 1 / math.sqrt(t)) if relative_step else lr
        for i, p in enumerate(params):
            g, x = p.grad.double() * (-1 if maximize else 1), values[i]
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


LIKE_TORCH = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"d": 2.0, "beta2_decay": -0.5},
    {"lr": 0.3, "eps": (None, 100.0)},  # 1 / sqrt(t) is smaller from the 12th step on
    {"eps": (0.5, 2.0)},
]
FORMULAS = [
    PAPER,
    {**PAPER, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
]
STEPS = 50


@covering(
    1,
    ("options", [*LIKE_TORCH, *FORMULAS]),
    ("scale", [1.0, 1e-6]),
)
def test_it_follows_the_formulas_and_torch(options, scale):
    options, params = {"lr": 1e-2, **options}, build()
    start = [p.detach().clone() for p in params]
    optimizer = Adafactor(params, **options)
    run(params, optimizer, STEPS, scale)
    exact, largest = exact_run(build(), STEPS, scale, **options)
    relative = options.get("scale_parameter", True)
    least_rms = options.get("eps", (None, 1e-3))[1] if relative else 1.0
    # An rms(p) that is always below the least one does not count.
    how = {"lr": options["lr"], "least_rms": least_rms, "relative": relative and least_rms < 10}
    bound = error_bound(exact, start, STEPS, largest, **how, roundings=roundings(STEPS))
    for mine, x, before in zip(params, exact, start):
        assert (mine - x).abs().max() <= bound
        if before.numel() > 1 and "add_eps" in options:  # the bound is small beside what happened
            assert (x - before).abs().max() > 10 * bound
    if "add_eps" in options:
        return
    theirs = build()
    torchs = torch.optim.Adafactor(theirs, **options)
    run(theirs, torchs, STEPS, scale)
    for p, q in zip(theirs, params):
        assert (p - q).abs().max() <= 2 * bound  # each of the two may be off by it
        for name, value in torchs.state[p].items():  # the same operations on the same numbers
            assert torch.equal(optimizer.state[q][name], value), name
            assert optimizer.state[q][name].shape == value.shape


def test_memory_is_sublinear_and_bounded_in_a_step():
    """A large parameter is a batch of its own; more of them need no more temporary memory."""
    params = [nn.Parameter(torch.randn(512, 256)), nn.Parameter(torch.randn(256))]
    optimizer = Adafactor(params)
    run(params, optimizer, 2)
    tensors = [t for s in optimizer.state.values() for name, t in s.items() if name != "step"]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 4 * 1024
    peaks = []
    for n in (1, 4):
        params = [nn.Parameter(torch.randn(1 << 10, 1 << 10)) for _ in range(n)]
        optimizer = Adafactor(params)
        run(params, optimizer, 1)
        with Alive() as alive:
            alive.see([*params, *(p.grad for p in params), *optimizer.state.values()])
            before = alive.now()
            optimizer.step()
            peaks.append(alive.peak - before)
    assert 0 < peaks[1] <= 1.01 * peaks[0]
