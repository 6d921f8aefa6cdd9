"""The norms' Triton kernels, through the public ops: on a GPU, else in Triton's interpreter."""

import pytest
import torch
from cells import covering, slow, sweep

pytest.importorskip("triton", reason="needs triton")

from fastpar.kernels import (
    Rng,
    layer_norm,
    make_key,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    triton_launch,
)
from fastpar.kernels import layer_norm_triton as fwd
from fastpar.kernels.layer_norm_configs import TABLE, Config
from fastpar.kernels.reference import (
    layer_norm_ref,
    residual_layer_norm_ref,
    residual_rms_norm_ref,
    rms_norm_ref,
)
from fastpar.testing import assert_matches_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = Rng(make_key(3, 5), 2)
pytestmark = pytest.mark.usefixtures("poisoned")


def with_bias(op, p=0.0, rng=RNG):
    """op of (x, residual, weight, bias, x_bias)."""
    return lambda x, r, w, b=None, xb=None: op(x, r, w, b, x_bias=xb, dropout_p=p, rng=rng)


def without_bias(op, p=0.0):
    """op of (x, residual, weight, x_bias)."""
    return lambda x, r, w, xb=None: op(x, r, w, x_bias=xb, dropout_p=p, rng=RNG)


@pytest.mark.parametrize(
    ("c", "dtype"),
    [
        (1, torch.float32),
        (768, torch.float32),
        (1600, torch.bfloat16),
        (127, torch.float16),
        slow(127, torch.float32),
        *(slow(c, torch.bfloat16) for c in (1, 63, 768)),
        slow(1000, torch.float16),
    ],
)
def test_layer_norm_matches_oracle(draw, c, dtype):
    """More rows than a tile has, for the widths that share one."""
    inputs = [draw(3, 7, c, dtype=dtype), draw(c, dtype=dtype), draw(c, dtype=dtype)]
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs)


@covering(1, ("c", [1, 127, 600]), ("dtype", DTYPES))
def test_rms_norm_matches_oracle(draw, c, dtype):
    inputs = [draw(3, 5, c, dtype=dtype), draw(c, dtype=dtype)]
    assert_matches_oracle(rms_norm, rms_norm_ref, inputs)


@covering(1, ("c", [63, 300]), ("x_bias", [True, False]), ("p", [0.0, 0.1]), ("dtype", DTYPES))
def test_residual_forms_match_oracle(draw, c, x_bias, p, dtype):
    """y and residual_out, and dx, dresidual, dweight, dbias, dx_bias."""
    inputs = [draw(2, 7, c, dtype=dtype) for _ in range(2)]
    inputs += [draw(c, dtype=dtype) for _ in range(3 if x_bias else 2)]
    ops = residual_layer_norm, residual_layer_norm_ref
    report = assert_matches_oracle(*(with_bias(op, p) for op in ops), inputs)
    assert len(report) == 2 + len(inputs)
    ops = residual_rms_norm, residual_rms_norm_ref
    report = assert_matches_oracle(*(without_bias(op, p) for op in ops), inputs[:-1])
    assert len(report) == 1 + len(inputs)


def test_weight_without_bias(draw):
    inputs = [draw(2, 3, 40), draw(2, 3, 40), draw(40)]
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs[1:])
    ops = residual_layer_norm, residual_layer_norm_ref
    assert_matches_oracle(*(with_bias(op) for op in ops), inputs)


@covering(1, ("c", [768, 2500]), ("mean", [1e2, 1e4, -1e6]))
def test_large_mean_costs_no_accuracy(draw, c, mean):
    """A few roundings of y, whatever the mean: one warp to a row, and several."""
    x = draw(5, c, mean=mean).detach()
    y = layer_norm(x, torch.ones(c, device=x.device))
    exact = layer_norm_ref(x.double(), torch.ones(c, device=x.device).double())
    assert (y - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * exact.abs().max()


@covering(1, ("p", [0.0, 0.1]), ("dtype", [torch.bfloat16, torch.float16]))
def test_mixed_dtypes(draw, dtype, p):
    """fp32 weights; a 16-bit branch on a fp32 stream, read as it is."""
    inputs = [draw(2, 3, 96, dtype=dtype), draw(96), draw(96)]
    assert layer_norm(*inputs).dtype == dtype
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs)
    inputs = [inputs[0], draw(2, 3, 96), *inputs[1:], draw(96, dtype=dtype)]
    y, residual_out = with_bias(residual_layer_norm)(*inputs)
    assert y.dtype == residual_out.dtype == torch.float32
    ops = residual_layer_norm, residual_layer_norm_ref
    assert_matches_oracle(*(with_bias(op, p) for op in ops), inputs)


@covering(
    1, ("dtype", [torch.float32, torch.float16]), ("shape", [(3, 5, 40), (2, 3, 4, 40), (7, 40)])
)
def test_mask_is_the_oracles(draw, shape, dtype, triton_device):
    """Its bits, forward and backward, in every sample, head and row."""
    x, w = torch.ones(shape, dtype=dtype, device=triton_device), draw(shape[-1], dtype=dtype)
    x = x.requires_grad_()
    key = make_key(1 << 40, (1 << 33) - 2)
    rng = Rng(key, 32767)
    _, out = residual_layer_norm(x, torch.zeros_like(x), w, dropout_p=0.4, rng=rng)
    _, want = residual_layer_norm_ref(
        x.detach().cpu(), torch.zeros(shape, dtype=dtype), w.detach().cpu(), dropout_p=0.4, rng=rng
    )
    assert torch.equal(out.cpu() != 0, want != 0)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(dx.cpu() != 0, want != 0)


def test_rows_apart_are_not_copied(monkeypatch, draw):
    """A slice of a wider tensor is read in place."""
    seen = []
    launch = triton_launch.launch
    monkeypatch.setattr(
        fwd, "launch", lambda k, g, *args, **kw: (seen.append(args), launch(k, g, *args, **kw))
    )
    wide = draw(2, 5, 96).detach()
    part = wide[..., 32:64]
    layer_norm(part, draw(32))
    assert seen[0][0].data_ptr() == part.data_ptr()


@sweep("itemsize", [2, 4])
@sweep("c", [1, 16, 63, 768, 1024, 1280, 1600, 4096, 16384])
def test_tiles(c, itemsize):
    """Every column is in a chunk, a thread's part of a row stays small, warps have whole tiles."""
    for how in TABLE.candidates(90):
        tile = fwd.tile_of(c, itemsize, how.fwd_values, how.num_warps)
        threads = 32 * tile.num_warps
        assert tile.rows * tile.chunk == threads * tile.side
        assert triton_launch.cdiv(c, tile.chunk) * tile.side <= how.fwd_values


@pytest.mark.parametrize("how", [Config(16, 16, 2), Config(64, 24, 8)])
def test_every_kind_of_config(triton_device, how):
    """Several warps a row, one, and several rows a program."""
    x, r = (torch.randn(5, 7, 300).to(triton_device).requires_grad_() for _ in range(2))
    w, b = (torch.randn(300).to(triton_device).requires_grad_() for _ in range(2))
    with TABLE.trying((), how):
        found = assert_matches_oracle(
            lambda *inputs: residual_layer_norm(*inputs)[0],
            lambda *inputs: residual_layer_norm_ref(*inputs)[0],
            [x, r, w, b],
        )
    assert len(found) == 5
