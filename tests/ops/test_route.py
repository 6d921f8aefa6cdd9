"""route against its oracle: ties, biases, huge and non-finite logits."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import route
from fastpar.kernels.reference import route_ref
from fastpar.testing import assert_matches_oracle


def eager(logits, k, bias=None):
    """Weights by torch's topk of the biased logits."""
    experts = (logits if bias is None else logits + bias).topk(k, -1).indices
    if k == 1:
        return logits.softmax(-1).gather(1, experts)
    return logits.gather(1, experts).softmax(-1)


def check(logits, *args):
    """Weights by the 2x rule, experts exactly."""
    assert torch.equal(route(logits, *args)[1], route_ref(logits, *args)[1])
    ours, ref = (lambda *given, f=f: f(*given)[0] for f in (route, route_ref))
    assert_matches_oracle(ours, ref, (logits, *args), eager=eager)


@sweep("k", [1, 2, 7])
@sweep("n", [2, 63, 1000])
def test_matches_oracle(n, k):
    logits = torch.randn(n, 7).requires_grad_()
    bias = torch.randn(7)
    check(logits, k)
    check(logits, k, bias)


def test_weights_of_several_sum_to_one_and_of_one_are_its_probability():
    logits = torch.randn(50, 5)
    weights, experts = route(logits, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    assert (weights.diff(dim=-1) <= 0).all()
    weights, experts = route(logits, 1)
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, experts))


@sweep("k", [1, 3, 40])
def test_of_equal_logits_the_lower_numbers_are_chosen(k):
    """40 is beyond what sorts small rows stably by accident."""
    weights, experts = route(torch.zeros(9, 40), k)
    assert experts.tolist() == [[*range(k)]] * 9
    torch.testing.assert_close(weights, torch.full((9, k), 1 / k if k > 1 else 1 / 40))
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]])
    assert route(logits, 4 if k > 1 else 1)[1].tolist() == [[1, 2, 4, 0][: 4 if k > 1 else 1]]


def test_a_bias_changes_the_choice_and_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([-5.0, 0.0, 0.0])
    weights, experts = route(logits, 2, bias)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0]]).softmax(-1))


def test_huge_and_infinite_logits():
    logits = torch.tensor([[1e4, -1e4, 1e4 - 1], [-torch.inf, 0.0, 1.0]], requires_grad=True)
    check(logits, 2)
    check(logits, 1)


@sweep("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_show_as_nan_and_leave_the_others_alone(value):
    logits = torch.randn(4, 6)
    want = route(logits, 2)[0]
    logits[2, 3] = value
    weights, experts = route(logits, 2)
    assert weights[2].isnan().any()
    assert ((experts >= 0) & (experts < 6)).all()
    assert torch.equal(weights[[0, 1, 3]], want[[0, 1, 3]])


def test_16_bits_are_computed_in_fp32():
    logits = torch.randn(30, 6).bfloat16().requires_grad_()
    weights, _ = route(logits, 2)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, route(logits.detach().float(), 2)[0])
    weights.square().sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_no_rows_one_row_and_two_runs():
    many = torch.randn(40, 6)
    assert all(map(torch.equal, route(many[:1], 3), (t[:1] for t in route(many, 3))))
    assert route(torch.randn(0, 4), 2)[1].shape == (0, 2)
    logits = torch.randn(200, 9, requires_grad=True)
    runs = []
    for _ in range(2):
        logits.grad = None
        weights, experts = route(logits, 2)
        weights.square().sum().backward()
        runs.append((weights, experts, logits.grad))
    assert all(map(torch.equal, *runs))


def test_errors():
    with pytest.raises(ValueError, match=r"1 <= k <= E, got logits=\[3, 4\] k=5"):
        route(torch.randn(3, 4), 5)
    with pytest.raises(ValueError, match=r"expected bias \[E\].* got bias=\[3\]"):
        route(torch.randn(3, 4), 2, torch.randn(3))
    with pytest.raises(ValueError, match=r"route: expected a floating dtype"):
        route(torch.ones(3, 4, dtype=torch.int64), 2)
