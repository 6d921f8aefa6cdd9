"""layer_norm, rms_norm and their residual forms against fp64, on hostile inputs; refusals."""

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import (
    Rng,
    backend,
    layer_norm,
    make_key,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from fastpar.kernels.reference import (
    dropout_ref,
    layer_norm_ref,
    residual_layer_norm_ref,
    residual_rms_norm_ref,
    rms_norm_ref,
)
from fastpar.testing import assert_matches_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = Rng(make_key(3, 5), 2)


def partial(op, p):
    """op of (x, residual, weight, bias, x_bias) with dropout p."""
    return lambda x, r, w, b, xb=None: op(x, r, w, b, x_bias=xb, dropout_p=p, rng=RNG)


def partial_rms(op, p):
    """op of (x, residual, weight, x_bias) with dropout p."""
    return lambda x, r, w, xb=None: op(x, r, w, x_bias=xb, dropout_p=p, rng=RNG)


def eager_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype))


def eager_residual(x, residual, weight, bias, *, x_bias, dropout_p, rng):
    residual_out = residual + dropout_ref((x + x_bias).to(x.dtype), dropout_p, rng)
    return eager_norm(residual_out, weight, bias), residual_out


def draw(*shape, dtype=torch.float32, mean=0.0, scale=1.0):
    return (torch.randn(shape) * scale + mean).to(dtype).requires_grad_()


@sweep("dtype", DTYPES)
@sweep("c", [1, 63, 127, 384, 1000])
@sweep("bias", [True, False])
def test_layer_norm_matches_oracle(c, dtype, bias):
    inputs = [draw(3, 5, c, dtype=dtype), draw(c, dtype=dtype)]
    if bias:
        inputs.append(draw(c, dtype=dtype))
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs)


@sweep("dtype", DTYPES)
@sweep("c", [1, 63, 384, 1000])
def test_rms_norm_matches_oracle(c, dtype):
    assert_matches_oracle(
        rms_norm, rms_norm_ref, [draw(3, 5, c, dtype=dtype), draw(c, dtype=dtype)]
    )


@sweep("mean", [1e2, 1e4, -1e6])
def test_large_mean(mean):
    """Cancellation in x - mean. torch's kernel does not pass: it multiplies, then subtracts."""
    inputs = [draw(7, 768, mean=mean), draw(768), draw(768)]
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs)


@sweep("mean", [1e2, 1e4, -1e6])
def test_large_mean_costs_no_accuracy(mean):
    """x - center is exact and the mean's rounding is corrected: a few roundings of y, whatever the
    mean. (Uncorrected, the error is half an ulp of the mean: 3e-2 at -1e6.)"""
    x = torch.randn(7, 768) + mean
    y = layer_norm(x, torch.ones(768))
    exact = layer_norm_ref(x.double(), torch.ones(768).double())
    assert (y - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * exact.abs().max()


@sweep("dtype", [torch.bfloat16, torch.float16])
def test_float32_weights_with_16_bit_rows(dtype):
    inputs = [draw(4, 96, dtype=dtype), draw(96), draw(96)]
    assert layer_norm(*inputs).dtype == dtype
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs)


@sweep("dtype", DTYPES)
@sweep("p", [0.0, 0.1, 0.5])
@sweep("x_bias", [True, False])
@sweep("c", [1, 63, 384])
def test_residual_layer_norm_matches_oracle(c, x_bias, p, dtype):
    """y and residual_out, and dx, dresidual, dweight, dbias, dx_bias."""
    inputs = [draw(2, 5, c, dtype=dtype) for _ in range(2)]
    inputs += [draw(c, dtype=dtype) for _ in range(3 if x_bias else 2)]

    ops = residual_layer_norm, residual_layer_norm_ref
    report = assert_matches_oracle(*(partial(op, p) for op in ops), inputs)
    assert len(report) == 2 + len(inputs)


@sweep("dtype", DTYPES)
@sweep("p", [0.0, 0.1])
@sweep("x_bias", [True, False])
def test_residual_rms_norm_matches_oracle(x_bias, p, dtype):
    inputs = [draw(2, 5, 63, dtype=dtype) for _ in range(2)]
    inputs += [draw(63, dtype=dtype) for _ in range(2 if x_bias else 1)]
    ops = residual_rms_norm, residual_rms_norm_ref
    report = assert_matches_oracle(*(partial_rms(op, p) for op in ops), inputs)
    assert len(report) == 2 + len(inputs)


def test_16_bit_branch_on_a_float32_stream():
    inputs = [draw(2, 3, 64, dtype=torch.bfloat16), draw(2, 3, 64), draw(64), draw(64), draw(64)]
    fn, ref = (partial(op, 0.1) for op in (residual_layer_norm, residual_layer_norm_ref))
    y, residual_out = fn(*inputs)
    assert y.dtype == residual_out.dtype == torch.float32
    assert_matches_oracle(fn, ref, inputs)
    fn, ref = (partial_rms(op, 0.0) for op in (residual_rms_norm, residual_rms_norm_ref))
    assert_matches_oracle(fn, ref, inputs[:4])


def test_constant_rows_give_the_bias():
    bias = torch.randn(64)
    y = layer_norm(torch.full((3, 64), 7.0), torch.randn(64), bias)
    torch.testing.assert_close(y, bias.expand(3, 64), rtol=0, atol=1e-4)


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


def test_composed_form_matches_oracle(monkeypatch):
    """What runs without the compiled kernel; yardstick: torch's own layer_norm."""
    monkeypatch.setattr(backend, "choice", "torch")
    inputs = [draw(2, 5, 63), draw(2, 5, 63), draw(63), draw(63), draw(63)]
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs[1:4], eager=eager_norm)
    for p in (0.0, 0.1):
        ops = (residual_layer_norm, residual_layer_norm_ref, eager_residual)
        fn, ref, eager = (partial(op, p) for op in ops)
        assert_matches_oracle(fn, ref, inputs, eager=eager)
    assert_matches_oracle(rms_norm, rms_norm_ref, inputs[1:3])
    fn, ref = (partial_rms(op, 0.1) for op in (residual_rms_norm, residual_rms_norm_ref))
    assert_matches_oracle(fn, ref, inputs[:4])


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


@pytest.mark.gpu
@sweep("dtype", DTYPES)
def test_on_a_gpu(dtype):
    inputs = [draw(2, 9, 768, dtype=dtype) for _ in range(2)] + [draw(768) for _ in range(3)]
    inputs = [x.detach().cuda().requires_grad_() for x in inputs]
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs[1:4], eager=eager_norm)
    for p in (0.0, 0.1):
        ops = (residual_layer_norm, residual_layer_norm_ref, eager_residual)
        fn, ref, eager = (partial(op, p) for op in ops)
        assert_matches_oracle(fn, ref, inputs, eager=eager)
