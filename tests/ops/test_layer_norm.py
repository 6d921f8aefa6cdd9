"""layer_norm, rms_norm and their residual forms beyond test_cases.py: large means, what is used of
the results, refusals."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import (
    Rng,
    layer_norm,
    make_key,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from fastpar.kernels.reference import (
    layer_norm_ref,
    residual_layer_norm_ref,
)


def draw(*shape, dtype=torch.float32, mean=0.0, scale=1.0):
    return (torch.randn(shape) * scale + mean).to(dtype).requires_grad_()


@sweep("mean", [1e2, 1e4, -1e6])
def test_large_mean_costs_no_accuracy(mean):
    """x - center is exact and the mean's rounding is corrected: a few roundings of y, whatever the
    mean. (Uncorrected, the error is half an ulp of the mean: 3e-2 at -1e6.)"""
    x = torch.randn(7, 768) + mean
    y = layer_norm(x, torch.ones(768))
    exact = layer_norm_ref(x.double(), torch.ones(768).double())
    assert (y - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_only_the_residual_is_used():
    """Without a gradient of y; and residual_out unused, as by the last norm of a model."""
    x, r, w = draw(2, 3, 8), draw(2, 3, 8), draw(8)
    _, out = residual_layer_norm(x, r, w)
    for grad in torch.autograd.grad(out.sum(), (x, r)):
        assert torch.equal(grad, torch.ones(2, 3, 8))
    y, _ = residual_layer_norm(x, r, w)
    want = residual_layer_norm_ref(x, r, w)[0]
    for a, b in zip(*(torch.autograd.grad(z.sin().sum(), (x, r, w)) for z in (y, want))):
        torch.testing.assert_close(a, b)


def test_frozen_inputs():
    """Gradients that nobody needs change nothing."""
    x, r, w = draw(2, 3, 8), draw(2, 3, 8), draw(8)
    for needed in (x, r, w):
        args = [t if t is needed else t.detach() for t in (x, r, w)]
        (got,) = torch.autograd.grad(residual_layer_norm(*args)[0].sin().sum(), needed)
        (want,) = torch.autograd.grad(residual_layer_norm(x, r, w)[0].sin().sum(), needed)
        assert torch.equal(got, want)


def test_a_batch_is_its_samples():
    """Dropout by sample: rows do not depend on how the batch is cut."""
    x, r, w = draw(4, 6, 32), draw(4, 6, 32), draw(32)
    whole = residual_layer_norm(x, r, w, dropout_p=0.3, rng=Rng(make_key(1, 10), 2))
    for first in range(4):
        key = make_key(1, 10 + first)
        part = slice(first, first + 1)
        one = residual_layer_norm(x[part], r[part], w, dropout_p=0.3, rng=Rng(key, 2))
        assert torch.equal(whole[0][part], one[0])
        assert torch.equal(whole[1][part], one[1])


def ones(*shape, **kwargs):
    return torch.ones(shape, **kwargs)


@sweep(
    ("args", "message"),
    [
        ((torch.tensor(1.0), ones(1)), r"expected x of shape \[..., C\] .*got x=\[\]"),
        ((ones(2, 0), ones(0)), r"expected x of shape \[..., C\] .*got x=\[2, 0\]"),
        ((ones(1, 16385), ones(16385)), r"expected .* 1 <= C <= 16384, got x=\[1, 16385\]"),
        ((ones(2, 4).long(), ones(4)), r"expected a floating dtype, got x=torch.int64"),
        ((ones(2, 4), ones(5)), r"expected weight of shape \[C\]=\[4\], got weight=\[5\]"),
        ((ones(2, 4), ones(4), ones(3)), r"expected bias of shape \[C\]=\[4\], got bias=\[3\]"),
        (
            (ones(2, 4), ones(4).double()),
            r"expected weight of x's dtype .*got weight=torch.float64",
        ),
        (
            (ones(2, 4), ones(4, device="meta")),
            r"expected weight on x's device cpu, got .* on meta",
        ),
    ],
)
def test_bad_input_is_refused(args, message):
    with pytest.raises(ValueError, match="layer_norm: " + message):
        layer_norm(*args)
    if len(args) == 2:
        with pytest.raises(ValueError, match="rms_norm: " + message):
            rms_norm(*args)


@sweep(
    ("x", "residual", "x_bias", "message"),
    [
        (ones(2, 3, 4), ones(2, 4), None, r"of one shape, got x=\[2, 3, 4\] residual=\[2, 4\]"),
        (ones(2, 4), ones(2, 4).half(), None, r"expected x of residual's dtype torch.float16"),
        (
            ones(2, 4).double(),
            ones(2, 4),
            None,
            r"or 16 bits with a float32 residual, got x=torch.f",
        ),
        (ones(2, 4, device="meta"), ones(2, 4), None, r"expected x on residual's device cpu, got"),
        (
            ones(2, 4),
            ones(2, 4),
            ones(5),
            r"expected x_bias of shape \[C\]=\[4\], got x_bias=\[5\]",
        ),
    ],
)
def test_bad_residual_is_refused(x, residual, x_bias, message):
    with pytest.raises(ValueError, match="residual_layer_norm: .*" + message):
        residual_layer_norm(x, residual, ones(4), x_bias=x_bias)
    with pytest.raises(ValueError, match="residual_rms_norm: .*" + message):
        residual_rms_norm(x, residual, ones(4), x_bias=x_bias)


def test_bad_dropout_is_refused():
    with pytest.raises(ValueError, match=r"dropout: expected 0 <= p < 1, got p=1.0"):
        residual_layer_norm(ones(2, 4), ones(2, 4), ones(4), dropout_p=1.0)
