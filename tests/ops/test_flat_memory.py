"""What ops on flat memory and lists have in common: the same bits on every instruction set, number
of threads and device, autograd that notices what they write, more than 2^31 elements."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import (
    _C,
    Hyper,
    Rng,
    accumulate_,
    adamw_step_,
    backend,
    dequantize_blockwise,
    dropout,
    global_norm,
    keep_mask,
    make_key,
    pack_,
    quantize_blockwise,
    sum_shards,
    unpack_,
)
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins, norm_from_bins

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (100_003, 5, 70_001)
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)


def rand(n, dtype=torch.float32):
    """Random values of many magnitudes."""
    return (torch.randn(n) * torch.exp2(torch.randint(-12, 12, (n,)).float())).to(dtype)


def bucket(device):
    values = [rand(n, d).to(device) for n, d in zip(SIZES, DTYPES)]
    totals = [rand(n, d).to(device) for n, d in zip(SIZES, reversed(DTYPES))]
    accumulate_(totals, values, scale=0.37)
    out = torch.empty(SIZES[0], dtype=torch.float16, device=device)
    bins = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
    sum_shards(rand(3 * SIZES[0], torch.bfloat16).view(3, -1).to(device), out, bins=bins)
    assert norm_from_bins(bins).norm == norm_from_bins(norm_bins([out])).norm
    return [*totals, out]


def norm(device):
    bad = [torch.tensor([1.0, torch.inf, 2.0] * 2000), torch.tensor([torch.nan])]
    words = norm_bins([t.to(device) for t in bad], counted=[True, False])
    return [*global_norm([rand(n, d).to(device) for d in DTYPES for n in SIZES]), words[-2:]]


def quantize(device):
    found = []
    for bits in (8, 4):
        for seed in (None, 8):
            error = rand(SIZES[0]).to(device)
            x = rand(SIZES[0], torch.bfloat16).to(device)
            codes, scales = quantize_blockwise(x, bits=bits, seed=seed, error=error)
            found += [codes, scales, error, dequantize_blockwise(codes, scales)]
    return found


def masks(device):
    rng = Rng(make_key(1, 0), 0)
    return [dropout(rand(195_000).view(3, 2, 500, 65), 0.2, rng), keep_mask(rng, 0.2, (3, 7, 65))]


def results(run, device="cpu"):
    torch.manual_seed(3)
    return [t.cpu() for t in run(device)]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@sweep("isa", ["baseline", "avx2", "avx512"])
@sweep("run", [bucket, norm, quantize, masks])
def test_same_bits_on_every_instruction_set_and_thread_count(isa, run):
    if not _C.isa_supported(isa):
        return  # test_backend.py skips visibly
    before, want = _C.isa(), results(run)
    try:
        _C.set_isa(isa)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same(results(run), want)
    finally:
        _C.set_isa(before)


@pytest.mark.parametrize("run", [bucket, norm, quantize])
def test_devices_give_the_same_bits(run, cuda_device, monkeypatch):
    got = results(run, cuda_device)
    monkeypatch.setattr(backend, "cuda_on_cpu", False)
    assert_same(got, results(run))


@sweep("write", [
    lambda p: pack_(p, [torch.ones(5)]),
    lambda p: unpack_([p], torch.ones(5)),
    lambda p: accumulate_([p], [torch.ones(5)]),
    lambda p: sum_shards(torch.ones(2, 5), p),
    lambda p: quantize_blockwise(torch.ones(5), error=p),
    lambda p: adamw_step_([p], [torch.ones(5)], [torch.zeros(5)], [torch.zeros(5)], HYPER),
])  # fmt: skip
def test_autograd_notices_the_change_and_inference_mode_has_none(write):
    p = torch.randn(5, requires_grad=True)
    y = (p * p).sum()
    write(p)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        x = torch.zeros(5)
        write(x)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    n = 2**31 + 5
    x = torch.ones(n, dtype=torch.bfloat16)
    x[-3:] = 3
    flat = torch.zeros(n, dtype=torch.bfloat16)
    pack_(flat, [x[:7], x[7:]], scale=2)
    assert flat[-4:].tolist() == [2, 6, 6, 6]
    accumulate_([flat], [x])
    sum_shards([flat, x], flat)
    assert flat[-4:].tolist() == [4, 12, 12, 12]
    assert flat.view(torch.int16).min() == flat[0].view(torch.int16)
    x[-5:] = torch.arange(5.0).bfloat16()
    exact = (n - 5 + 30) ** 0.5  # half a unit of fp32, and 2^-53 for each element
    assert abs(global_norm([x]).norm.item() - exact) <= exact * (2.0**-25 + n * 2.0**-53)
    codes, scales = quantize_blockwise(x, seed=1)
    assert codes[-5:].tolist() == quantize_blockwise(x[-5:], seed=1, first_index=2**31)[0].tolist()
    assert codes[:-5].min() == 127
    assert dequantize_blockwise(codes, scales, out_dtype=torch.bfloat16)[-1] == 4
    x[-2] = torch.nan
    assert global_norm([x], counted=[False]).norm.isnan()
