"""orthogonalize beyond the cases of kernels/cases.py: its other coefficients, singular values,
layouts, hostile values."""

import sys
from unittest import mock

import pytest
import torch
from cells import sweep
from roundings import allowed

from fastpar.kernels import backend, orthogonalize
from fastpar.kernels.cases import orthogonal_case
from fastpar.kernels.orthogonalize import QUINTIC, orthogonalize_each

MODULE = sys.modules["fastpar.kernels.orthogonalize"]  # the function hides it


@sweep("dtype", [torch.float32, torch.float64, torch.bfloat16])
@sweep("shape", [(64, 64), (150, 70), (1, 7), (7, 1)])
def test_quintic_coefficients_match_the_singular_value_decomposition(shape, dtype):
    """Of few rounded values luck decides which of two ways is nearer."""
    if dtype != torch.bfloat16 or min(shape) >= 64:
        case = orthogonal_case(*shape, QUINTIC)
        most = allowed(case, dtype, "cpu")["y"]
        assert case.measure(dtype, "cpu")["y"].max <= most


def test_singular_values():
    """What the module's first lines promise."""
    values = torch.logspace(-2, 0, 400, dtype=torch.float64)
    after = torch.linalg.svdvals(orthogonalize(torch.diag(values)))
    # Values are divided by the norm of all of them.
    kept = torch.linalg.svdvals(torch.diag(values / values.norm())) >= 0.01
    assert after.flip(0)[kept.flip(0)].min() > 0.87
    assert after.max() < 1.13


def test_the_same_bits_for_any_strides_threads_and_wide_dtype():
    x = torch.randn(200, 300)
    want = orthogonalize(x)
    assert torch.equal(want, orthogonalize(x.t().contiguous().t()))
    assert torch.equal(want, orthogonalize(torch.randn(200, 600)[:, ::2].copy_(x)))
    assert torch.equal(want.t(), orthogonalize(x.t()))
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        assert torch.equal(want, orthogonalize(x)) or not backend.has_gemm


def test_hostile_values():
    for shape in ((0, 5), (5, 0), (3, 4)):
        assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))
    x = torch.randn(8, 8)
    for scale, eps in ((2.0**-100, 1e-38), (2.0**100, 1e-7)):  # powers of 2 change no bit
        assert torch.equal(orthogonalize(x * scale, eps=eps), orthogonalize(x, eps=1e-7))
    for bad in (float("inf"), float("nan")):
        x = torch.randn(9, 300)
        x[3, 5] = bad
        assert orthogonalize(x).isnan().all()
    assert orthogonalize(torch.full((9, 9), 3e38)).isnan().all()
    assert not orthogonalize(torch.randn(5, 6).requires_grad_()).requires_grad


def test_many_at_once_are_each_alone(monkeypatch):
    """On a GPU's way: shapes are mixed, some lie on their side, one is zero, one is not finite. In
    fp64 a singular value near 0 grows by up to 8.3^5 and takes its rounding along: 1e-16 * 40,000,
    and each of some 30 products of 40 terms rounds."""
    shapes = [(20, 30), (30, 20), (20, 30), (8, 8), (20, 30), (30, 20), (20, 30)]
    xs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    xs[2] = xs[2] * 0
    xs[4][1, 1] = torch.inf
    want = [orthogonalize(x) for x in xs]
    products = mock.Mock(side_effect=torch.bmm)
    monkeypatch.setattr(torch, "bmm", products)
    monkeypatch.setattr(MODULE, "at_once", lambda x: 4)
    found = orthogonalize_each(xs)
    assert products.call_count == 2 * 5  # of four and of two; one is alone
    for x, got, alone in zip(xs, found, want):
        assert got.shape == x.shape
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-16 * 8.3**5 * 30, equal_nan=True)


@sweep(("x", "options", "words"), [
    (torch.zeros(3), {}, r"floating-point matrix \[M, N\], got x=\[3\] of dtype=torch.float32"),
    (torch.zeros(2, 2, 2), {}, r"got x=\[2, 2, 2\] .*; pass one matrix at a time"),
    (torch.zeros(2, 2, dtype=torch.int64), {}, "of dtype=torch.int64; pass one"),
    (torch.zeros(2, 2), {"coefficients": ()}, r"at least one step, got coefficients=\(\)"),
    (torch.zeros(2, 2), {"coefficients": ((1, 2),)}, "use POLAR_EXPRESS"),
])  # fmt: skip
def test_what_is_refused(x, options, words):
    with pytest.raises(ValueError, match=words):
        orthogonalize(x, **options)
