"""testing.py: the 2x rule can say no."""

import pytest
import torch

from fastpar.testing import assert_matches_oracle, measure_errors


def square(x):
    return x * x


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2.00001 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x * x * (1 + 2e-6), r"output 0: expected error <= .*, got"),
        (WrongGradient.apply, r"gradient of input 0: expected error <= .*, got"),
        (lambda x: (x * x).where(x != x.max(), torch.nan), r"output 0: expected error .* got inf"),
        (lambda x: (x * x)[:-1], r"output 0: expected shape torch.Size\(\[200\]\), got"),
        (lambda x: (x * x).double(), r"output 0: expected dtype torch.float32, got torch.float64"),
        (lambda x: (x * x, x), r"results: expected \['output 0', 'gradient"),
        (lambda x: (x * x).detach(), r"results: expected .*, got \['output 0'\]"),
    ],
)
def test_what_is_wrong_fails(fn, message):
    x = torch.randn(200, requires_grad=True)
    with pytest.raises(AssertionError, match=message):
        assert_matches_oracle(fn, square, [x])


def test_the_yardstick_can_be_another_function():
    """fn is off by 3 in one of four elements, the yardstick by 1 in all; inf is left out. A
    yardstick without error leaves the condition of the inputs: one rounding of 100 moves a
    difference of sums by up to 2 * 100 * 2^-24."""
    exact = torch.tensor([1.0, -4.0, 2.0, 3.0, torch.inf])
    ours = exact + torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0])
    (errors,) = measure_errors(
        lambda x: ours.clone(), lambda x: x.clone(), [exact], eager=lambda x: x + 1
    ).values()
    assert errors == (3.0, 1.0, 4.0 * 2.0**-24, 4.0 * 2.0**-24)
    x = [torch.tensor([100.0, 99.0])]
    for off, passes in ((2.0**-16, True), (2.0**-14, False)):
        (errors,) = measure_errors(
            lambda x, e=off: x[:1] - x[1:] + e, lambda x: x[:1] - x[1:], x
        ).values()
        assert errors.eager_max == 0.0
        assert (errors.max <= errors.bound) == passes
