"""Adafactor: torch.optim.Adafactor's step, the paper's, in little memory."""

import math

import pytest
import torch
from cells import cells
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
    # least_rms is above every rms(p) otherwise.
    how = {"lr": lr, "least_rms": least_rms, "relative": least_rms < 10}
    bound = error_bound(theirs, start, 100, largest, **how, roundings=2 * 33 + 12)
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
    run(params, Adafactor(params, **options), 100, scale)
    exact, largest = exact_run(build(), 100, scale, **options)
    relative = options.get("scale_parameter", True)
    least_rms = 1e-3 if relative else 1.0
    how = {"lr": options["lr"], "least_rms": least_rms, "relative": relative}
    bound = error_bound(exact, start, 100, largest, **how, roundings=roundings(100))
    for mine, x, before in zip(params, exact, start):
        assert (mine - x).abs().max() <= bound
        if before.numel() > 1:  # the bound is small beside what happened
            assert (x - before).abs().max() > 10 * bound


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
    halves = [(1 << 18, 1), (1 << 18, 1)]
    assert found == [[(1 << 19, 1)], [(1 << 19, 2)], halves, [(5,), (7,)], [(1 << 20, 1)]]
    assert len(adafactor._batches(pairs, True)) == 2
    assert len(adafactor._batches(pairs, False)) == 7
