"""Forms of AdamW's state: 8-bit codes and remainders, against their definition."""

import numpy as np
import pytest
import torch
from cells import sweep

from fastpar.kernels import Hyper, adamw_step_
from fastpar.kernels.adamw import (
    MOMENT_BLOCK,
    decode_moment,
    encode_moment,
    master_join,
    master_split,
    new_moment,
    round_to_bf16,
)

SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    1e-45,
    -1e-45,
    1e-38,
    3.4028234e38,
    -3.4028234e38,
)


def every_upper_half():
    """Every upper half of an fp32 number with the lower halves at which rounding changes."""
    top = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    bits = (top[:, None] | low).reshape(-1)
    return torch.from_numpy(bits.view(np.float32).copy())


def test_split_and_join_are_exact():
    x = torch.cat([every_upper_half(), torch.randn(100_000), torch.tensor(SPECIAL)])
    param, remainder = master_split(x)
    back = master_join(param, remainder)
    number = ~x.isnan()
    assert torch.equal(back.view(torch.int32)[number], x.view(torch.int32)[number])
    assert (back.view(torch.int32)[~number] == 0x7FC00000).all()


def test_rounding_is_to_nearest_with_ties_away_from_zero():
    x = every_upper_half()
    x = x[x.isfinite() & (x.abs() < 3.38e38)].double()
    param = round_to_bf16(x.float()).double()
    bits = x.float().view(torch.int32) & ~0xFFFF
    below, above = bits.view(torch.float32).double(), (bits + 0x10000).view(torch.float32).double()
    gap, nearer = (x - below).abs(), (above - x).abs()
    expected = torch.where(gap < nearer, below, above)  # `above` is away from zero
    assert torch.equal(param, expected)


@sweep("signed", [True, False])
def test_codes_mean_what_the_header_says(signed):
    codes = torch.arange(256, dtype=torch.uint8)
    if signed:
        k = codes.view(torch.int8).double()
        want = 3.0 * k.sign() * (k / 127) ** 2
    else:
        want = 3.0 * (codes.double() / 255) ** 4
    got = decode_moment(codes, torch.tensor([3.0]), signed=signed)
    # Roundings of k / 127 (reciprocal, product), its powers and the scale: at most 4 * 2 + 3 units.
    assert ((got - want).abs() <= 11 * 2.0**-24 * want.abs()).all()


@sweep("signed", [True, False])
@sweep("n", [0, 1, 255, 256, 257, 1000])
def test_encoding_takes_the_nearest_level(n, signed):
    x = torch.randn(n) ** 3
    x = x if signed else x.abs()
    codes, scale = encode_moment(x, signed=signed)
    assert codes.dtype == torch.uint8
    assert scale.shape == (-(-n // MOMENT_BLOCK),)
    got = decode_moment(codes, scale, signed=signed)
    table = torch.arange(256, dtype=torch.uint8)
    if signed:
        table = table[table != 128]  # -128 is not used
    for i in range(0, n, MOMENT_BLOCK):
        block = x[i : i + MOMENT_BLOCK]
        levels = decode_moment(table, scale[i // MOMENT_BLOCK][None], signed=signed)
        allowed = levels if signed else levels[1:]
        best = (block[:, None] - allowed).abs().amin(1)
        error = (got[i : i + MOMENT_BLOCK] - block).abs()
        assert (error <= best + 2.0**-22 * block.abs()).all()
        assert scale[i // MOMENT_BLOCK] == block.abs().max()
    again, scale_again = encode_moment(got, signed=signed)
    assert torch.equal(again, codes)
    assert torch.equal(scale_again, scale)


def test_zero_stays_zero_and_small_squares_do_not_become_it():
    x = torch.zeros(512)
    x[3], x[4] = 1.0, 1e-30
    codes, _ = encode_moment(x, signed=False)
    assert codes[:6].tolist() == [0, 0, 0, 255, 1, 0]
    assert not codes[256:].any()


def test_strides_are_kept():
    x = torch.randn(6, 50).t()
    codes, scale = encode_moment(x, signed=True)
    assert codes.stride() == x.stride()
    back = decode_moment(codes, scale, signed=True)
    assert back.stride() == x.stride()
    assert (back - x).abs().max() < 0.02 * x.abs().max()
    assert master_split(x)[1].stride() == x.stride()


def test_new_moment():
    p = torch.randn(6, 50).t().requires_grad_()
    for dtype in (torch.float32, torch.bfloat16):
        moment, scale = new_moment(p, dtype)
        assert scale is None
        assert (moment.dtype, moment.stride(), moment.requires_grad) == (dtype, p.stride(), False)
    codes, scale = new_moment(p, torch.uint8)
    assert scale is not None
    assert scale.shape == (2,)
    assert not decode_moment(codes, scale, signed=True).any()


def test_errors():
    with pytest.raises(ValueError, match=r"new_moment: expected dtype .* got dtype=torch.float16"):
        new_moment(torch.ones(3), torch.float16)
    codes = torch.zeros(300, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"decode_moment: expected uint8 codes .* shape \[2\]"):
        decode_moment(codes, torch.zeros(1), signed=True)
    with pytest.raises(ValueError, match=r"decode_moment: expected a dense tensor, got stride="):
        decode_moment(codes[::2], torch.zeros(1), signed=True)
    with pytest.raises(ValueError, match="encode_moment: expected a dense tensor"):
        encode_moment(torch.ones(4)[::2], signed=True)
    with pytest.raises(ValueError, match="master_split: expected an fp32 master, got"):
        master_split(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="master_join: expected a bf16 parameter and an int16"):
        master_join(torch.ones(2), torch.zeros(2, dtype=torch.int16))


def test_small_second_moments_are_never_stored_as_zero():
    """A small exp_avg over the root of 0 would be a step that Adam does not make."""
    grad = torch.full((512,), 1e-9)
    grad[::256] = 1.0
    grad[7::256] = 0.0
    param, exp_avg = torch.zeros(512), new_moment(torch.zeros(512), torch.uint8)
    exp_avg_sq = new_moment(torch.zeros(512), torch.uint8)
    adamw_step_(
        [param],
        [grad],
        [exp_avg[0]],
        [exp_avg_sq[0]],
        Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, 1),
        exp_avg_scales=[exp_avg[1]],
        exp_avg_sq_scales=[exp_avg_sq[1]],
    )
    assert torch.equal(exp_avg_sq[0] > 0, grad != 0)


@sweep("master_dtype", [torch.float32, torch.int16])
def test_a_nan_stays_one_whatever_its_lower_bits(master_dtype):
    """The upper half of some nans is an infinity, and rounding others would make them -0."""
    bits = torch.tensor([0x7F800001, 0x7FC0FFFF, 0x7FFFFFFF, -1], dtype=torch.int32)
    param = torch.zeros(4, dtype=torch.bfloat16)
    master = torch.zeros(4, dtype=master_dtype)
    moments = torch.zeros(4), torch.zeros(4)
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)
    adamw_step_([param], [bits.view(torch.float32)], *([m] for m in moments), hyper,
                master_weights=[master])  # fmt: skip
    assert param.isnan().all()
    whole = master if master_dtype == torch.float32 else master_join(param, master)
    assert torch.equal(whole.view(torch.int32), torch.full((4,), 0x7FC00000, dtype=torch.int32))
