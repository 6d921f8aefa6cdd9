"""orthogonalize against the singular value decomposition; the same bits for any layout of x."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import backend, orthogonalize
from fastpar.kernels.orthogonalize import POLAR_EXPRESS, QUINTIC
from fastpar.kernels.reference import orthogonalize_ref

SHAPES = [(1, 1), (1, 7), (7, 1), (64, 64), (129, 257), (300, 100), (256, 1024)]


def rand(m, n, dtype=torch.float32):
    """Gradients have a few large singular values and many small ones."""
    generator = torch.Generator().manual_seed(m * 1000 + n)
    x = torch.randn(m, n, generator=generator, dtype=torch.float64)
    rank_one = torch.randn(m, 1, generator=generator) @ torch.randn(1, n, generator=generator)
    return (x + rank_one.double()).to(dtype)


def eager(x, coefficients, dtype):
    """The same steps in torch's own products, as torch.optim.Muon runs them."""
    y = x.to(dtype) / x.float().norm().clamp(min=1e-7).to(dtype)
    y = y.t() if x.shape[0] > x.shape[1] else y
    for a, b, c in coefficients:
        gram = y @ y.t()
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.t() if x.shape[0] > x.shape[1] else y


@sweep("shape", SHAPES)
@sweep("coefficients", [POLAR_EXPRESS, QUINTIC])
@sweep("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_matches_the_singular_value_decomposition(shape, coefficients, dtype):
    if dtype == torch.bfloat16 and min(shape) < 64:
        return  # few rounded values: luck decides which of the two is nearer
    x = rand(*shape)
    got = orthogonalize(x, coefficients=coefficients, dtype=dtype)
    want = orthogonalize_ref(x, coefficients=coefficients)
    assert got.dtype == dtype
    assert got.shape == x.shape
    yardstick = (eager(x, coefficients, dtype).double() - want).norm()
    # Floor: one rounding of each element of a matrix of norm sqrt(min(M, N)), a step.
    floor = 5 * torch.finfo(dtype).eps * min(shape) ** 0.5
    assert (got.double() - want).norm() <= 2 * yardstick + floor


def test_singular_values():
    """What the module's first lines promise."""
    values = torch.logspace(-2, 0, 400, dtype=torch.float64)
    after = torch.linalg.svdvals(orthogonalize(torch.diag(values)))
    # Values are divided by the norm of all of them.
    kept = torch.linalg.svdvals(torch.diag(values / values.norm())) >= 0.01
    assert after.flip(0)[kept.flip(0)].min() > 0.87
    assert after.max() < 1.13


def test_the_same_bits_for_any_strides_threads_and_wide_dtype():
    x = rand(200, 300)
    want = orthogonalize(x)
    assert torch.equal(want, orthogonalize(x.t().contiguous().t()))
    assert torch.equal(want, orthogonalize(torch.randn(200, 600)[:, ::2].copy_(x)))
    assert torch.equal(want.t(), orthogonalize(x.t()))
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(want, orthogonalize(x)) or not backend.has_gemm
    finally:
        torch.set_num_threads(threads)


def test_hostile_values():
    for shape in ((0, 5), (5, 0), (3, 4)):
        assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))
    tiny = orthogonalize(rand(8, 8) * 1e-30, eps=1e-38)
    torch.testing.assert_close(tiny, orthogonalize(rand(8, 8)))
    large = orthogonalize(rand(8, 8) * 1e30)
    torch.testing.assert_close(large, orthogonalize(rand(8, 8)))
    for bad in (float("inf"), float("nan")):
        x = rand(9, 300)
        x[3, 5] = bad
        assert orthogonalize(x).isnan().all()
    assert orthogonalize(torch.full((9, 9), 3e38)).isnan().all()
    assert not orthogonalize(rand(5, 6).requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(3), {}, r"floating-point matrix \[M, N\], got x=\[3\] of dtype=torch.float32"),
        (torch.zeros(2, 2, 2), {}, r"got x=\[2, 2, 2\] .*; pass one matrix at a time"),
        (torch.zeros(2, 2, dtype=torch.int64), {}, "of dtype=torch.int64; pass one"),
        (torch.zeros(2, 2), {"coefficients": ()}, r"at least one step, got coefficients=\(\)"),
        (torch.zeros(2, 2), {"coefficients": ((1, 2),)}, "take POLAR_EXPRESS"),
    ],
)
def test_bad_input(x, options, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(x, **options)
