"""The norms' Triton kernels beyond test_cases.py: tiles, masks, mixed dtypes, partial sums."""

import pytest
import torch
from cells import covering, sweep

pytest.importorskip("triton", reason="needs triton")

import itertools

import pytest
from cells import slow

from fastpar.kernels import (
    Rng,
    layer_norm,
    make_key,
    residual_layer_norm,
    rms_norm,
    triton_launch,
)
from fastpar.kernels.norm import TABLE, Config
from fastpar.kernels.norm import triton as bwd
from fastpar.kernels.norm import triton as fwd
from fastpar.kernels.reference import (
    layer_norm_ref,
    residual_layer_norm_ref,
    rms_norm_ref,
)
from fastpar.testing import assert_matches_oracle

RNG = Rng(make_key(3, 5), 2)
pytestmark = pytest.mark.usefixtures("poisoned")


def with_bias(op, p=0.0, rng=RNG):
    """op of (x, residual, weight, bias, x_bias)."""
    return lambda x, r, w, b=None, xb=None: op(x, r, w, b, x_bias=xb, dropout_p=p, rng=rng)


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


@pytest.mark.parametrize("c", [5000, slow(2500)])
def test_wide_rows(draw, c, triton_device):
    """Rows that warps share; from 4096 on rows whose columns programs share in backward."""
    # fp16, because the interpreter adds what warps exchange one after another, a GPU in a tree.
    dtype = torch.float32 if triton_device == "cuda" else torch.float16
    inputs = [draw(1, 3, c, dtype=dtype), draw(1, 3, c, dtype=dtype)]
    inputs += [draw(c, dtype=dtype) for _ in range(3)]
    ops = residual_layer_norm, residual_layer_norm_ref
    assert_matches_oracle(*(with_bias(op, 0.1) for op in ops), inputs)
    assert_matches_oracle(rms_norm, rms_norm_ref, inputs[1:3])


@pytest.mark.slow
def test_widest_rows(draw, triton_device):
    dtype = torch.float32 if triton_device == "cuda" else torch.float16
    c = 16384
    inputs = [draw(1, c, dtype=dtype), draw(c, dtype=dtype), draw(c, dtype=dtype)]
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs)


@pytest.mark.parametrize("arch", [90, *(slow(a) for a in triton_launch.SMS if a != 90)])
def test_every_arch(monkeypatch, draw, arch):
    """Its number of programs, and so few that each walks over several tiles, some over one more."""
    monkeypatch.setattr(triton_launch, "INTERPRETED_ARCH", arch)
    inputs = [draw(2, 13, 200) for _ in range(2)] + [draw(200) for _ in range(3)]
    for sms in (1, triton_launch.SMS[arch]):
        monkeypatch.setattr(triton_launch, "_INTERPRETED_SMS", sms)
        ops = residual_layer_norm, residual_layer_norm_ref
        assert_matches_oracle(*(with_bias(op, 0.1) for op in ops), inputs)


def test_more_programs_than_one_block_of_partials(monkeypatch, draw):
    """Counts rows: exact in fp32."""
    monkeypatch.setattr(triton_launch, "_INTERPRETED_SMS", 132)
    x, weight, bias = draw(4300, 3), draw(3), draw(3)
    layer_norm(x, weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 4300.0))


@sweep("itemsize", [2, 4])
@sweep("c", [1, 63, 768, 1024, 1280, 1600, 4096])
@sweep("sums", [1, 2, 3])
@sweep("tensors", [2, 3])
def test_programs_of_an_sm_fit_together(c, itemsize, sums, tensors):
    """Or the last of a fixed number of programs would run alone, after the others."""
    for rms, how in itertools.product((False, True), TABLE.candidates(90)):
        tile, programs, registers = bwd.bwd_tile_of(c, itemsize, sums, tensors, rms, how)
        assert tile.rows * tile.chunk == 32 * tile.num_warps * tile.side
        assert programs * 32 * tile.num_warps * registers <= 65536
        assert programs * tile.num_warps >= 8
