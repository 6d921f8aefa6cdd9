"""permute and combine against their oracles: empty experts, capacities, order of ties."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import combine, permute, route
from fastpar.kernels.reference import combine_ref, permute_ref
from fastpar.testing import assert_matches_oracle

CHOICES = {
    "random": lambda n, k, e: route(torch.randn(n, e), k)[1],
    "one takes all": lambda n, k, e: torch.arange(k).expand(n, k).contiguous(),
    "the last ones": lambda n, k, e: e - 1 - torch.arange(k).expand(n, k).contiguous(),
}


def rows_of(x, experts, n_expert, capacity=None):
    return permute(x, experts, n_expert, capacity)[0]


def rows_of_ref(x, experts, n_expert, capacity=None):
    return permute_ref(x, experts, n_expert, capacity)[0]


def eager(rows, weights, order):
    """By one gather: a slot without a row reads a row of zeros."""
    places = torch.full((weights.numel(),), len(rows))
    places[order] = torch.arange(len(rows))
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return (padded[places].unflatten(0, weights.shape) * weights[..., None]).sum(1)


@pytest.mark.usefixtures("poisoned")
@sweep("capacity", [None, 1, 9, 1000])
@sweep("how", CHOICES)
@sweep("sizes", [(1, 1, 1), (63, 2, 5), (127, 3, 3), (40, 1, 8)])
def test_matches_oracle(sizes, how, capacity):
    n, k, e = sizes
    x, experts = torch.randn(n, 33).requires_grad_(), CHOICES[how](*sizes)
    _, order, counts = permute(x, experts, e, capacity)
    _, want, sums = permute_ref(x, experts, e, capacity)
    assert torch.equal(order, want)
    assert torch.equal(counts, sums)
    assert_matches_oracle(rows_of, rows_of_ref, (x, experts, e, capacity))
    rows = torch.randn(len(order), 33).requires_grad_()
    weights = torch.rand(n, k).requires_grad_()
    assert_matches_oracle(combine, combine_ref, (rows, weights, order), eager=eager)


@sweep("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_added_in_fp32_and_rounded_once(dtype):
    experts = route(torch.randn(50, 6), 3)[1]
    rows, order, _ = permute(torch.randn(50, 16).to(dtype), experts, 6)
    rows, weights = rows.clone().requires_grad_(), torch.rand(50, 3, requires_grad=True)
    y = combine(rows, weights, order)
    exact = combine_ref(rows.detach().double(), weights.detach().double(), order)
    assert y.dtype == dtype
    assert torch.equal(y, exact.float().to(dtype))
    dy = torch.randn_like(y)
    drows, dweights = torch.autograd.grad(y, (rows, weights), dy)
    exact_rows = weights.detach().double().flatten()[order, None] * dy.double()[order // 3]
    torch.testing.assert_close(drows.double(), exact_rows, rtol=torch.finfo(dtype).eps, atol=0)
    assert dweights.dtype == torch.float32


def test_the_way_there_and_back():
    x, experts = torch.randn(31, 8), route(torch.randn(31, 4), 2)[1]
    rows, order, counts = permute(x, experts, 4)
    assert counts.sum() == 62
    torch.testing.assert_close(combine(rows, torch.full((31, 2), 0.5), order), x)


def test_what_is_dropped_adds_nothing_and_gets_no_gradient():
    x = torch.randn(10, 4, requires_grad=True)
    experts = torch.zeros(10, 1, dtype=torch.int64)
    rows, order, counts = permute(x, experts, 3, 4)
    assert counts.tolist() == [4, 0, 0]
    assert order.tolist() == [0, 1, 2, 3]  # the first ones stay
    weights = torch.ones(10, 1, requires_grad=True)
    y = combine(rows, weights, order)
    y.sum().backward()
    assert torch.equal(y[:4], x[:4])
    assert not y[4:].any()
    assert not x.grad[4:].any()
    assert not weights.grad[4:].any()


def test_strided_inputs_expanded_gradients_and_no_tokens():
    x = torch.randn(12, 20).t()[::2].requires_grad_()
    experts = route(torch.randn(10, 4), 2)[1]
    rows, order, _ = permute(x, experts, 4)
    weights = torch.rand(2, 10).t().requires_grad_()
    y = combine(rows, weights, order)
    y.backward(torch.ones(1).expand_as(y))
    torch.testing.assert_close(x.grad, weights.detach().sum(1, keepdim=True).expand(10, 12))
    empty = torch.empty(0, 5, requires_grad=True)
    rows, order, counts = permute(empty, torch.empty(0, 2, dtype=torch.int64), 3)
    assert rows.shape == (0, 5)
    assert counts.tolist() == [0, 0, 0]
    combine(rows, torch.empty(0, 2), order).sum().backward()
    assert empty.grad.shape == (0, 5)


def test_two_runs():
    x, experts = torch.randn(300, 17, requires_grad=True), route(torch.randn(300, 5), 2)[1]
    runs = []
    for _ in range(2):
        rows, order, _ = permute(x, experts, 5, 100)
        weights = torch.linspace(0, 1, 600).view(300, 2).requires_grad_()
        y = combine(rows, weights, order)
        runs.append((y, *torch.autograd.grad(y.square().sum(), (x, weights))))
    assert all(map(torch.equal, *runs))


def test_errors():
    x, experts = torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"permute: expected x \[N, C\] .* experts=\[3, 2\]"):
        permute(x, experts[:3], 2)
    with pytest.raises(ValueError, match=r"expected capacity >= 1, got capacity=0"):
        permute(x, experts, 2, 0)
    with pytest.raises(ValueError, match=r"combine: expected rows \[M, C\].* order=\[3\]"):
        combine(x, torch.rand(2, 2), torch.arange(3))
