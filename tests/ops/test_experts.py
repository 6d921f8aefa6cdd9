"""Ops of experts beyond the cases of kernels/cases.py: route with biases, ties and hostile logits;
permute and combine with capacities; grouped_linear with several sources."""

import pytest
import torch
from cells import sweep
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.kernels import combine, grouped_linear, linear, permute, route
from fastpar.kernels.cases import proof_cases
from fastpar.kernels.reference import combine_ref, grouped_linear_ref, permute_ref, route_ref
from fastpar.testing import assert_matches_oracle

LOGITS = {
    "many": torch.arange(7000.0).sin().view(1000, 7),
    "of equal ones the lower numbers are chosen": torch.zeros(9, 40),  # as stable sorts do
    "some are equal": torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0, 1.0]]),
    "huge and infinite": torch.tensor([[1e4, -1e4, 1e4 - 1], [-torch.inf, 0.0, 1.0]]),
}


@sweep("biased", [False, True])
@sweep("k", [1, 2, 3, 7, 40])
@sweep("name", LOGITS)
def test_route_matches_its_oracle(name, k, biased):
    """A bias changes the choice and not the weights; the oracle sorts stably."""
    logits = LOGITS[name].clone().requires_grad_()
    k, bias = min(k, logits.shape[1]), torch.randn(logits.shape[1]) if biased else None
    weights, experts = route(logits, k, bias)
    assert torch.equal(experts, route_ref(logits, k, bias)[1])
    if name.startswith("of equal") and not biased:
        assert experts.tolist() == [[*range(k)]] * 9
    ours, ref = (lambda *given, f=f: f(*given)[0] for f in (route, route_ref))
    assert_matches_oracle(ours, ref, (logits, k, bias))
    one = route(logits[:1], k, bias)
    assert all(map(torch.equal, one, (weights[:1], experts[:1])))
    assert route(logits[:0], k, bias)[1].shape == (0, k)


@sweep("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_show_as_nan_and_leave_the_others_alone(value):
    logits = torch.randn(4, 6)
    want = route(logits, 2)[0]
    logits[2, 3] = value
    weights, experts = route(logits, 2)
    assert weights[2].isnan().any()
    assert ((experts >= 0) & (experts < 6)).all()
    assert torch.equal(weights[[0, 1, 3]], want[[0, 1, 3]])


def test_logits_of_16_bits_are_computed_in_fp32():
    logits = torch.randn(30, 6).bfloat16().requires_grad_()
    weights, _ = route(logits, 2)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, route(logits.detach().float(), 2)[0])
    weights.square().sum().backward()
    assert logits.grad.dtype == torch.bfloat16


CHOICES = {
    "random": lambda n, k, e: route(torch.randn(n, e), k)[1],
    "one takes all": lambda n, k, e: torch.arange(k).expand(n, k).contiguous(),
    "the last ones": lambda n, k, e: e - 1 - torch.arange(k).expand(n, k).contiguous(),
}


@pytest.mark.usefixtures("poisoned")
@sweep("capacity", [None, 1, 9, 1000])
@sweep("how", CHOICES)
@sweep("sizes", [(1, 1, 1), (63, 2, 5), (127, 3, 3), (40, 1, 8)])
def test_permute_and_combine_match_their_oracles(sizes, how, capacity):
    """Of an expert's tokens the first ones stay; what is dropped adds nothing, gets no gradient."""
    n, k, e = sizes
    x, experts = torch.randn(n, 33).requires_grad_(), CHOICES[how](*sizes)
    _, order, counts = permute(x, experts, e, capacity)
    _, want, sums = permute_ref(x, experts, e, capacity)
    assert torch.equal(order, want)
    assert torch.equal(counts, sums)
    ours, ref = (lambda *given, f=f: f(*given)[0] for f in (permute, permute_ref))
    assert_matches_oracle(ours, ref, (x, experts, e, capacity))
    rows = torch.randn(len(order), 33).requires_grad_()
    weights = torch.rand(n, k).requires_grad_()
    assert_matches_oracle(combine, combine_ref, (rows, weights, order))


@sweep("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_added_in_fp32_and_rounded_once(dtype):
    experts = route(torch.randn(50, 6), 3)[1]
    rows, order, _ = permute(torch.randn(50, 16).to(dtype), experts, 6)
    rows, weights = rows.clone().requires_grad_(), torch.rand(50, 3)
    y, dy = combine(rows, weights, order), torch.randn(50, 16).to(dtype)
    exact = combine_ref(rows.detach().double(), weights.double(), order)
    assert torch.equal(y, exact.float().to(dtype))
    (drows,) = torch.autograd.grad(y, rows, dy)
    exact = weights.double().flatten()[order, None] * dy.double()[order // 3]
    torch.testing.assert_close(drows.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


SOME = [5, 0, 17, 3]
FIVE_SOURCES = [SOME, [0, 1, 40, 0], [1, 1, 1, 1], [0, 0, 0, 9], [2, 3, 4, 5]]


def make(counts, c, f, dtype=torch.float32):
    counts = torch.tensor(counts)
    sizes = (int(counts.sum()), c), (4, f, c), (4, f)
    tensors = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    return *tensors, counts


@pytest.mark.usefixtures("poisoned")
@sweep("bias", [True, False])
@sweep(("c", "f", "dtype"), [(1, 1, torch.float32), (33, 47, torch.float32),
                             (127, 256, torch.bfloat16)])  # fmt: skip
@sweep("counts", [[0, 63, 0, 0], [0, 0, 0, 0], FIVE_SOURCES[:2], FIVE_SOURCES])
def test_grouped_linear_matches_its_oracle(counts, c, f, dtype, bias):
    x, weight, of_groups, counts = make(counts, c, f, dtype)
    inputs = (x, weight, of_groups if bias else None, counts)
    assert_matches_oracle(grouped_linear, grouped_linear_ref, inputs)


@sweep(("c", "f"), [(64, 256), (256, 64)])
def test_a_row_does_not_see_other_groups(c, f):
    """What ranks of ep compute has the bits of one process, for any rows of other ranks."""
    x, weight, bias, counts = make([[300, 100], [40, 260]], c, f)
    x, weight, bias = x.detach(), weight[:2].detach(), bias[:2].detach()
    parts = grouped_linear(x, weight, bias, counts).split(counts.flatten().tolist())
    for g, (part, y) in enumerate(zip(x.split([len(p) for p in parts]), parts)):
        one = counts.new_zeros(2)
        one[g % 2] = len(part)
        assert torch.equal(grouped_linear(part, weight, bias, one), y)
        assert torch.equal(linear(part, weight[g % 2], bias[g % 2]), y)


def test_strided_inputs_expanded_gradients_and_no_tokens():
    x, weights = torch.randn(12, 20).t()[::2].requires_grad_(), torch.rand(2, 10).t()
    rows, order, _ = permute(x, route(torch.randn(10, 4), 2)[1], 4)
    y = combine(rows, weights, order)
    y.backward(torch.ones(1).expand_as(y))
    torch.testing.assert_close(x.grad, weights.sum(1, keepdim=True).expand(10, 12))
    empty = torch.empty(0, 5, requires_grad=True)
    rows, order, counts = permute(empty, torch.empty(0, 2, dtype=torch.int64), 3)
    assert (rows.shape, counts.tolist()) == ((0, 5), [0, 0, 0])
    combine(rows, torch.empty(0, 2), order).sum().backward()
    assert empty.grad.shape == (0, 5)
    x = torch.randn(50, 50).t()[:25].requires_grad_()
    weight = torch.randn(4, 50, 30).transpose(1, 2).requires_grad_()
    y = grouped_linear(x, weight, None, torch.tensor(SOME))
    y.backward(torch.ones(1).expand_as(y))
    of_row = torch.arange(4).repeat_interleave(torch.tensor(SOME))
    want = weight.detach().double().sum(1)[of_row]  # of 30 terms in fp32, in any order
    most = 30 * 2.0**-24 * weight.detach().double().abs().sum(1)[of_row]
    assert ((x.grad - want).abs() <= most).all()
    assert not weight.grad[1].any()


X, NUMBERS = torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.int64)
GROUPS = [t.detach() for t in make(SOME, 5, 7)]
REFUSALS = [
    (r"1 <= k <= E, got logits=\[3, 4\] k=5", route, (torch.randn(3, 4), 5)),
    (r"expected bias \[E\].* got bias=\[3\]", route, (torch.randn(3, 4), 2, torch.randn(3))),
    ("route: expected a floating dtype", route, (NUMBERS, 2)),
    (r"permute: expected x \[N, C\] .* experts=\[3, 2\]", permute, (X, NUMBERS[:3], 2)),
    ("expected capacity >= 1, got capacity=0", permute, (X, NUMBERS, 2, 0)),
    (r"combine: expected rows \[M, C\].* order=\[3\]", combine,
     (X, torch.rand(2, 2), torch.arange(3))),
    (r"counts \[..., E\], got .* counts=\[3\]", grouped_linear, (*GROUPS[:3], GROUPS[3][:3])),
    (r"expected bias \[E, F\].* got bias=\[4, 6\]", grouped_linear,
     (*GROUPS[:2], GROUPS[2][:, :6], GROUPS[3])),
    ("counts of the 24 rows of x, got counts that add up to 25", grouped_linear,
     (GROUPS[0][:24], *GROUPS[1:])),
]  # fmt: skip


@sweep(("words", "op", "args"), REFUSALS)
def test_what_is_refused(words, op, args):
    with pytest.raises(ValueError, match=words):
        op(*args)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that a call makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return found


def test_the_oracle_of_grouped_layers_makes_nothing_larger_than_its_arguments():
    """A weight for each row was 19 GB at the rows and C = 768 of a proof, and as much again in
    backward: where it did not fit, experts ran one by one."""
    (case,) = proof_cases("grouped_linear", 32, "cpu", 1024)[:1]
    inputs = list(case.inputs(torch.float64, "cpu").values())
    with Largest() as largest:
        y = case.ref(*inputs)
        y.sum().backward()
    assert largest.elements <= max(x.numel() for x in (y, *inputs))
