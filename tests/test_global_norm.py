"""global_norm against exact sums; the same bits for any order, cut, rank, thread, instruction set,
device and storage of the same values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastpar.kernels import _C, backend, global_norm
from fastpar.kernels.global_norm import NORM_WORDS, GlobalNorm, norm_bins, norm_from_bins
from fastpar.kernels.reference import global_norm_ref

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 127, 1000, 0, 20011)


@pytest.fixture(params=["cpp", "torch", "cuda"])
def device(request, monkeypatch):
    """Every test that uses it runs the compiled CPU kernels, the composed path and CUDA's."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "choice", "torch")
    return request.getfixturevalue("cuda_device") if request.param == "cuda" else "cpu"


def rand(n, dtype=torch.float32, spread=12):
    """Random values of many magnitudes."""
    return (torch.randn(n) * torch.exp2(torch.randint(-spread, spread, (n,)).float())).to(dtype)


def exact_norm(tensors):
    """The norm of a list, its sum of squares exact and then rounded to fp64 once."""
    squares = (float(x) ** 2 for t in tensors for x in t.flatten().tolist())
    return math.sqrt(math.fsum(squares))


def bits(result):
    return torch.stack(list(result)).cpu().view(torch.int32).tolist()


def assert_rounded(norm, exact, elements):
    """norm (fp32) is `exact` within the promised error: see global_norm's docstring."""
    assert norm.dtype == torch.float32
    ulp = max(math.ulp(exact) * 2**29, 2.0**-149)  # of fp32 at this magnitude, or a subnormal's
    assert abs(norm.item() - exact) <= ulp / 2 + exact * (elements * 2.0**-53 + 2.0**-50)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_match_the_oracle_and_the_exact_sum(dtype, device):
    tensors = [rand(n, dtype).to(device) for n in SIZES]
    result = global_norm(tensors, max_norm=2.0, loss_scale=8.0)
    assert isinstance(result, GlobalNorm)
    assert all(x.shape == () and x.dtype == torch.float32 for x in result)
    want = global_norm_ref([t.cpu() for t in tensors], None, 2.0, 8.0)
    for got, expected in zip(result, want):
        # The factor inherits the norm's rounding and adds one of its own.
        assert abs(got.cpu().double() - expected) <= 2.0**-23 * expected
    assert_rounded(result.norm.cpu(), exact_norm(tensors) / 8, sum(SIZES))
