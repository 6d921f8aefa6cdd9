"""grouped_linear against its oracle: empty groups, several sources, gradients kept apart."""

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import grouped_linear, linear
from fastpar.kernels.grouped_linear import summed
from fastpar.kernels.reference import grouped_linear_ref
from fastpar.testing import assert_matches_oracle

COUNTS = {
    "some": [5, 0, 17, 3],
    "one takes all": [0, 63, 0, 0],
    "none": [0, 0, 0, 0],
    "two sources": [[5, 0, 17, 3], [0, 1, 40, 0]],
}


def eager(x, weight, bias, counts):
    parts, start = [x.new_empty(0, weight.shape[1])], 0
    for g, n in enumerate(counts.flatten().tolist()):
        e = g % len(weight)
        parts.append(F.linear(x[start : start + n], weight[e], None if bias is None else bias[e]))
        start += n
    return torch.cat(parts)


def make(counts, c, f, dtype=torch.float32):
    counts = torch.tensor(counts)
    sizes = (int(counts.sum()), c), (4, f, c), (4, f)
    tensors = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    return *tensors, counts


@pytest.mark.usefixtures("poisoned")
@sweep("sizes", [(1, 1), (33, 47), (127, 256)])
@sweep("counts", COUNTS)
def test_matches_oracle(counts, sizes):
    x, weight, bias, counts = make(COUNTS[counts], *sizes)
    assert_matches_oracle(
        grouped_linear, grouped_linear_ref, (x, weight, bias, counts), eager=eager
    )
    assert_matches_oracle(
        grouped_linear, grouped_linear_ref, (x, weight, None, counts), eager=eager
    )


def test_16_bits():
    inputs = make(COUNTS["two sources"], 32, 64, torch.bfloat16)
    assert_matches_oracle(grouped_linear, grouped_linear_ref, inputs, eager=eager)


def test_a_row_does_not_see_other_groups():
    """What ranks of ep compute has the bits of one process, for any rows of other ranks."""
    for c, f in ((64, 256), (256, 64)):
        x, weight, bias, counts = make([[300, 100], [40, 260]], c, f)
        weight, bias = weight[:2].detach(), bias[:2].detach()
        y = grouped_linear(x, weight, bias, counts)
        ends = counts.flatten().cumsum(0).tolist()
        for g, (start, stop) in enumerate(zip([0, *ends], ends)):
            part, one = x[start:stop].detach(), counts.new_zeros(2)
            one[g % 2] = stop - start
            assert torch.equal(grouped_linear(part, weight, bias, one), y[start:stop])
            assert torch.equal(linear(part, weight[g % 2], bias[g % 2]), y[start:stop])


def test_gradients_apart_are_those_of_each_source():
    x, weight, bias, counts = make(COUNTS["two sources"], 24, 40)
    taken = {}
    weight.apart = lambda grad: taken.setdefault("weight", grad)
    bias.apart = lambda grad: taken.setdefault("bias", grad)
    y = grouped_linear(x, weight, bias, counts)
    dy = torch.randn_like(y)
    y.backward(dy)
    del weight.apart, bias.apart
    n = int(counts[0].sum())
    for source, rows in enumerate((slice(0, n), slice(n, None))):
        y = grouped_linear(x[rows].detach(), weight, bias, counts[source])
        dweight, dbias = torch.autograd.grad(y, (weight, bias), dy[rows])
        assert torch.equal(taken["weight"][source], dweight)
        assert torch.equal(taken["bias"][source], dbias)
    assert torch.equal(weight.grad, taken["weight"].sum(0))
    assert torch.equal(bias.grad, taken["bias"].sum(0))


def test_sums_of_sources_are_a_pairwise_tree():
    parts = torch.randn(5, 1000)
    want = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    assert torch.equal(summed(parts.clone()), want)


def test_strided_inputs_and_expanded_gradient():
    x = torch.randn(50, 50).t()[:25].requires_grad_()
    weight = torch.randn(4, 50, 30).transpose(1, 2).requires_grad_()
    y = grouped_linear(x, weight, None, torch.tensor(COUNTS["some"]))
    y.backward(torch.ones(1).expand_as(y))
    of_row = torch.arange(4).repeat_interleave(torch.tensor(COUNTS["some"]))
    torch.testing.assert_close(x.grad, weight.detach().sum(1)[of_row], rtol=1e-4, atol=1e-4)
    assert not weight.grad[1].any()


def test_only_what_is_needed_and_two_runs():
    x, weight, bias, counts = make(COUNTS["some"], 33, 65)
    grouped_linear(x.detach(), weight, bias, counts).sum().backward()
    assert x.grad is None
    first = weight.grad, bias.grad
    weight.grad = bias.grad = None
    grouped_linear(x, weight, bias, counts).sum().backward()
    assert torch.equal(weight.grad, first[0])
    assert torch.equal(bias.grad, first[1])


def test_errors():
    x, weight, bias, counts = make(COUNTS["some"], 5, 7)
    with pytest.raises(ValueError, match=r"counts \[..., E\], got .* counts=\[3\]"):
        grouped_linear(x, weight, bias, counts[:3])
    with pytest.raises(ValueError, match=r"expected bias \[E, F\].* got bias=\[4, 6\]"):
        grouped_linear(x, weight, bias[:, :6], counts)
    with pytest.raises(ValueError, match=r"counts of the 24 rows of x, got counts that make 25"):
        grouped_linear(x[:24], weight, bias, counts)
