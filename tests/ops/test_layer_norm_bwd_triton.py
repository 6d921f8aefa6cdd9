"""What only the norms' backward kernels have: columns shared by programs, partial sums, grids."""

import itertools

import pytest
import torch
from cells import slow, sweep

pytest.importorskip("triton", reason="needs triton")

from test_layer_norm_triton import with_bias

from fastpar.kernels import layer_norm, residual_layer_norm, rms_norm, triton_launch
from fastpar.kernels.norm import TABLE
from fastpar.kernels.norm import triton as bwd
from fastpar.kernels.reference import layer_norm_ref, residual_layer_norm_ref, rms_norm_ref
from fastpar.testing import assert_matches_oracle

pytestmark = pytest.mark.usefixtures("poisoned")


def test_large_mean_gradients(draw):
    inputs = [draw(5, 300, mean=1e4), draw(300), draw(300)]
    assert_matches_oracle(layer_norm, layer_norm_ref, inputs)


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


def test_only_the_residual_is_used(draw):
    x, r, w = draw(2, 3, 8), draw(2, 3, 8), draw(8)
    _, out = residual_layer_norm(x, r, w)
    for grad in torch.autograd.grad(out.sum(), (x, r)):
        assert torch.equal(grad, torch.ones_like(grad))


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
