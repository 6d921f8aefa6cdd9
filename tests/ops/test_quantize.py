"""Blockwise codes: the oracle's bits for every type, block, tail and device; unbiased at random;
nothing lost over steps; nothing that is not finite vanishes."""

import math

import pytest
import torch
from cells import covering, sweep
from hypothesis import given
from hypothesis import strategies as st

from fastpar.kernels import _C, backend, dequantize_blockwise, quantize_blockwise
from fastpar.kernels.quantize import pack_int4, unpack_int4
from fastpar.kernels.reference import dequantize_blockwise_ref, quantize_blockwise_ref

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
BITS = {8: 127.0, 4: 7.0}  # the largest code
BIG = torch.finfo(torch.float32).max
U = 2.0**-24  # unit roundoff of fp32


@pytest.fixture(params=["cpp", "cuda"])
def device(request):
    return request.getfixturevalue("cuda_device") if request.param == "cuda" else "cpu"


def rand(n, dtype=torch.float32, device="cpu"):
    """Random values of many magnitudes, blocks of zeros and of tiny numbers among them."""
    x = torch.randn(n) * torch.exp2(torch.randint(-10, 4, (n,)).float())
    x[n // 3 : n // 3 + n // 4] *= 2.0**-140
    x[n // 2 : n // 2 + n // 4] = 0
    return x.to(device, dtype)


def assert_same(got, want):
    """Same dtype and bits; nan equals nan."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.element_size() == 1:
        assert torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8))
    else:
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)


def check(x, bits, device, *, block=256, seed=None, first_index=0, error=None):
    """Op and oracle agree in codes, scales, error and values."""
    kwargs = {"bits": bits, "block": block, "seed": seed, "first_index": first_index}
    lost = None if error is None else error.to(device, copy=True)
    codes, scales = quantize_blockwise(x.to(device), error=lost, **kwargs)
    want_error = None if error is None else error.clone()
    want, want_scales = quantize_blockwise_ref(x.float(), error=want_error, **kwargs)
    assert_same(codes, want)
    assert_same(scales, want_scales)
    if error is not None:
        assert_same(lost, want_error)
    for out_dtype in FLOATS:
        got = dequantize_blockwise(codes, scales, out_dtype=out_dtype, block=block)
        assert_same(got, dequantize_blockwise_ref(want, want_scales, block=block).to(out_dtype))


@covering(1, ("bits", [8, 4]), ("seed", [None, 5, 2**64 - 3]))
def test_matches_the_oracle(bits, seed, device):
    for n, block in ((0, 256), (1, 256), (255, 256), (257, 64), (1003, 256), (517, 16)):
        for i, x_dtype in enumerate(FLOATS):
            error = (None, torch.randn(n), torch.randn(n).bfloat16())[i]
            check(rand(n, x_dtype), bits, device, block=block, seed=seed, error=error)
    for block in (512, 1024, 4096):  # a warp's, and more than a warp holds at once
        x = rand(9001, torch.bfloat16)
        check(x, bits, device, block=block, seed=seed, first_index=2**33 + 7)
        check(x, bits, device, block=block, seed=seed, error=torch.randn(9001).bfloat16())


def test_two_codes_of_four_bits_fit_in_a_byte(device):
    for n in (1, 255, 1003):
        codes, _ = quantize_blockwise(rand(n).to(device), bits=4)
        padded = torch.nn.functional.pad(codes, (0, n % 2))
        packed = pack_int4(padded)
        assert (packed.dtype, packed.numel()) == (torch.uint8, -(-n // 2))
        assert_same(unpack_int4(packed), padded)
    every = torch.arange(-7, 8, dtype=torch.int8, device=device)
    pairs = torch.cartesian_prod(every, every).view(-1)
    assert_same(unpack_int4(pack_int4(pairs)), pairs)


@sweep("bits", [8, 4])
def test_the_rest_of_x_can_stay_in_x(bits, device):
    """The bits of an error of its own that was 0; 0 where a block is not finite."""
    for x_dtype in FLOATS[:2]:
        for seed in (None, 4):
            x = rand(1003, x_dtype, device)
            x[[300, 700]] = torch.tensor([torch.inf, torch.nan], dtype=x_dtype, device=device)
            error, rest = torch.zeros_like(x), x.clone()
            codes, scales = quantize_blockwise(x, bits=bits, seed=seed, error=error)
            got, got_scales = quantize_blockwise(rest, bits=bits, seed=seed, error=rest)
            for a, b in ((got, codes), (got_scales, scales), (rest, error)):
                assert_same(a, b)
            assert (rest[256:768] == 0).all()
            assert rest.any()


@sweep("bits", [8, 4])
def test_the_composed_path_has_the_same_bits(bits, monkeypatch):
    monkeypatch.setattr(backend, "choice", "torch")
    x = rand(1003)
    check(x, bits, "cpu", error=torch.randn(1003))
    x[[300, 700]] = torch.tensor([torch.inf, BIG])
    check(x, bits, "cpu", block=64, error=torch.randn(1003).bfloat16())
    error, rest = torch.zeros_like(x), x.clone()
    quantize_blockwise(x, bits=bits, error=error)
    quantize_blockwise(rest, bits=bits, error=rest)
    assert_same(rest, error)
    with pytest.raises(RuntimeError, match="FASTPAR_BACKEND=torch seed=1; unset"):
        quantize_blockwise(x, seed=1)


@sweep("dtype", CODES)
def test_every_code_decodes_as_torchs(dtype, device):
    codes = torch.arange(700, dtype=torch.int32).to(torch.uint8).view(dtype)
    scales = torch.tensor([1.0, 0.37, 2.0**-126])
    want = codes.float() * scales.repeat_interleave(256)[:700]
    for out_dtype in FLOATS:
        got = dequantize_blockwise(codes.to(device), scales.to(device), out_dtype=out_dtype)
        assert_same(got, want.to(out_dtype))


@sweep("seed", [None, 3])
@sweep("bits", [8, 4])
def test_the_error_is_at_most_one_step(bits, seed):
    """Half a step to nearest, one step otherwise; U * |x| covers the roundings of 1 / scale, of the
    product, of the scale and of the way back."""
    x = torch.randn(5000)
    codes, scales = quantize_blockwise(x, bits=bits, seed=seed)
    step = scales.repeat_interleave(256)[:5000]
    error = (dequantize_blockwise(codes, scales) - x).abs()
    assert (error <= step * (0.5 if seed is None else 1.0) + 4 * U * x.abs()).all()


FRACTIONS = (0.5, 0.25, 0.9, 1 / 3, 2.0**-10)


@sweep("bits", [8, 4])
def test_stochastic_rounding_is_unbiased(bits):
    """The count of roundings up is binomial; six deviations are exceeded with probability 2e-9, by
    any of the 50 counts with less than 2e-7 (normal approximation: at least 256 are expected)."""
    n, largest = 2**18, BITS[bits]
    for k, low in enumerate((0, 1, 3, int(largest) // 3, int(largest) - 1)):
        for f, fraction in enumerate(FRACTIONS):
            value = torch.tensor(low + fraction)
            p = value.item() - low  # of the rounded number
            x = value.repeat(n)
            x[::4096] = largest
            sign = -1.0 if f % 2 else 1.0
            codes, scales = quantize_blockwise(
                sign * x, bits=bits, block=4096, seed=1000 * k + f, first_index=2**32 - 5000
            )
            assert (scales == 1).all()
            y = sign * codes.float().view(-1, 4096)[:, 1:]
            assert ((y == low) | (y == low + 1)).all()
            ups, draws = (y == low + 1).sum().item(), y.numel()
            assert abs(ups - p * draws) < 6 * math.sqrt(draws * p * (1 - p)), (low, fraction)


def test_seeds_and_cuts(device):
    """Same seed, same bits; another seed, others; a cut at a multiple of the block changes none."""
    x = rand(4000, torch.bfloat16, device)
    for bits in BITS:
        kwargs = {"bits": bits, "block": 64, "seed": 9}
        whole, scales = quantize_blockwise(x, first_index=128, **kwargs)
        again, _ = quantize_blockwise(x, first_index=128, **kwargs)
        assert_same(again, whole)
        for cut in (64, 1280, 3968):
            left = quantize_blockwise(x[:cut], first_index=128, **kwargs)
            right = quantize_blockwise(x[cut:], first_index=128 + cut, **kwargs)
            assert_same(torch.cat([left[0], right[0]]), whole)
            assert_same(torch.cat([left[1], right[1]]), scales)
        plain = torch.randn(4000, device=device)  # two drawings of it differ in a third
        whole, _ = quantize_blockwise(plain, first_index=128, **kwargs)
        for other in ({"seed": 10, "first_index": 128}, {"seed": 9, "first_index": 192}):
            codes, _ = quantize_blockwise(plain, **{**kwargs, **other})
            assert (codes != whole).float().mean() > 0.2


@sweep("error_dtype", FLOATS[:2])
@sweep("seed", [None, 4])
@sweep("bits", [8, 4])
def test_error_feedback_loses_nothing_over_steps(bits, seed, error_dtype):
    """sum of values + last error = sum of inputs, up to the rounding of x + e and of the new e in
    each step: U * |v| + u_e * |e|, u_e = U, and 2^-8 where e is bf16."""
    torch.manual_seed(1)
    n, steps = 600, 50
    x = torch.randn(n)
    unit = U if error_dtype == torch.float32 else 2.0**-8
    error = torch.zeros(n, dtype=error_dtype)
    total, inputs = torch.zeros(n).double(), torch.zeros(n).double()
    bound, plain = torch.zeros(n).double(), torch.zeros(n).double()
    for step in range(steps):
        part = x + 0.1 * torch.randn(n)
        kwargs = {"bits": bits, "seed": None if seed is None else seed + step}
        v = (part + error.float()).double().abs()
        values = dequantize_blockwise(*quantize_blockwise(part, error=error, **kwargs))
        total += values.double()
        plain += dequantize_blockwise(*quantize_blockwise(part, **kwargs)).double()
        inputs += part.double()
        bound += U * v + (unit + U) * error.double().abs()
    assert ((total + error.double() - inputs).abs() <= bound).all()
    lost = (total - inputs).norm()
    assert lost < 0.5 * (plain - inputs).norm()  # what it would be without
    assert error.float().abs().max() < x.abs().max() / 3


def test_what_is_not_finite_does_not_vanish(device):
    for bits in BITS:
        for seed in (None, 3):
            x = torch.randn(5 * 64, device=device)
            clean, clean_scales = quantize_blockwise(x, bits=bits, block=64, seed=seed)
            x[70], x[140], x[141], x[200] = torch.inf, -torch.inf, torch.nan, BIG
            error = torch.full((5 * 64,), 0.25, device=device)
            error[200] = BIG  # x + error overflows
            codes, scales = quantize_blockwise(x, bits=bits, block=64, seed=seed, error=error)
            assert scales.isinf().tolist() == [False, True, False, True, False]
            assert scales.isnan().tolist() == [False, False, True, False, False]
            values = dequantize_blockwise(codes, scales, block=64).view(5, 64)
            assert values[1:4].isnan().all()
            assert values[[0, 4]].isfinite().all()
            assert (codes.view(5, 64)[1:4] == 0).all()
            assert (error.view(5, 64)[1:3] == 0.25).all()  # as it was
            assert error[200] == BIG
            assert (error.view(5, 64)[[0, 4]] != 0.25).any()
            codes, scales = quantize_blockwise(x, bits=bits, block=64, seed=seed)
            for b in (0, 4):  # neighbours do not suffer
                part = slice(64 * b, 64 * b + 64)
                assert_same(codes[part], clean[part])
                assert scales[b] == clean_scales[b]


def test_every_offset_and_tail(device):
    """Offsets 0..63 bytes of x and error, all tails, codes that start anywhere."""
    for offset in range(16):
        n = 64 + 7 * offset
        x, error = torch.randn(n + offset, device=device), torch.randn(n + offset, device=device)
        kwargs = {"block": 32, "seed": 1}
        want_error = error[offset:].clone()
        want, scales = quantize_blockwise(x[offset:].clone(), error=want_error, **kwargs)
        got, got_scales = quantize_blockwise(x[offset:], error=error[offset:], **kwargs)
        assert_same(got, want)
        assert_same(got_scales, scales)
        assert_same(error[offset:], want_error)
        moved = torch.zeros(n + offset, dtype=torch.int8, device=device)
        moved[offset:] = want
        values = dequantize_blockwise(moved[offset:], scales, block=32)
        assert_same(values, dequantize_blockwise(want, scales, block=32))
    for n in range(1, 70):
        x = torch.randn(n)
        check(x, 4, device, block=32, seed=2, error=torch.randn(n).bfloat16())


@given(
    st.integers(0, 300),
    st.sampled_from(FLOATS),
    st.sampled_from([8, 4]),
    st.sampled_from([16, 32, 64, 256]),
    st.none() | st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.sampled_from([None, torch.float32, torch.bfloat16]),
    st.integers(-140, 120),
)
def test_hypothesis_finds_nothing(
    n, x_dtype, bits, block, seed, first_index, error_dtype, exponent
):
    torch.manual_seed(n + block)
    x = (torch.randn(n) * 2.0**exponent).to(x_dtype)
    error = None if error_dtype is None else (torch.randn(n) * 2.0**exponent).to(error_dtype)
    check(x, bits, "cpu", block=block, seed=seed, first_index=first_index, error=error)


@sweep("seed", [None, 3])
@sweep("bits", [8, 4])
def test_values_at_the_edges(bits, seed, device):
    """Zeros, blocks below the least scale, the largest numbers, numbers that are codes."""
    x = torch.zeros(256, device=device)
    x[:16] = -0.0
    codes, scales = quantize_blockwise(x, bits=bits, block=64, seed=seed)
    assert not codes.any()
    assert not scales.any()
    assert (dequantize_blockwise(codes, scales, block=64) == 0).all()
    x = torch.full((64,), 2.0**-149, device=device)
    x[0], error = 2.0**-126, torch.zeros(64, device=device)
    codes, scales = quantize_blockwise(x, bits=bits, block=64, seed=seed, error=error)
    assert scales.item() == 2.0**-126
    values = dequantize_blockwise(codes, scales, block=64)
    assert values[0] == 2.0**-126
    assert torch.equal(values + error, x)  # what is lost is kept
    for top in (BIG, BIG * (1 - 2**-20), 3e38):
        x = torch.tensor([top, -top, 1.0, BIG / 2], device=device)
        values = dequantize_blockwise(*quantize_blockwise(x, bits=bits, seed=seed))
        assert values.isfinite().all()
        torch.testing.assert_close(values[0].item(), top, rtol=2.0**-20, atol=0)
    x = torch.arange(-BITS[bits], BITS[bits] + 1, device=device) * 2.0**-20
    assert torch.equal(dequantize_blockwise(*quantize_blockwise(x, bits=bits, seed=seed)), x)


def test_shapes_and_strides(device):
    x = torch.randn(30, 20, device=device)
    codes, scales = quantize_blockwise(x.t(), block=64)
    assert (codes.shape, scales.shape) == ((20, 30), (10,))
    assert_same(codes, quantize_blockwise(x.t().contiguous(), block=64)[0])
    values = dequantize_blockwise(codes.t(), scales, block=64)
    assert_same(values, dequantize_blockwise(codes.t().contiguous(), scales, block=64))
    assert dequantize_blockwise(*quantize_blockwise(torch.tensor(3.0, device=device))).item() == 3.0


X = torch.ones(300)
Q, SCALES = quantize_blockwise(X)
TO, FROM = quantize_blockwise, dequantize_blockwise
REFUSALS = [
    ("expected fp32, bf16 or fp16, got x=torch.float64", TO, (X.double(),), {}),
    *((f"power of two from 16 to 4096, got block={n}", TO, (X,), {"block": n})
      for n in (0, 8, 48, 8192)),
    ("got block=8", FROM, (Q, SCALES), {"block": 8}),
    (r"expected 0 <= seed < 2\*\*64, got seed=-1", TO, (X,), {"seed": -1}),
    ("got seed=18446744073709551616", TO, (X,), {"seed": 2**64}),
    ("got first_index=-1", TO, (X,), {"first_index": -1}),
    (r"error of shape \[300\] .* got error=\[2\]", TO, (X,), {"error": X[:2]}),
    ("got error=.* torch.float16", TO, (X,), {"error": X.half()}),
    ("on cpu, got error=.* on meta", TO, (X,), {"error": X.to("meta")}),
    (r"got error=.* stride=\(2,\)", TO, (X,), {"error": torch.zeros(600)[::2]}),
    ("expected bits=8 or 4, got bits=2", TO, (X,), {"bits": 2}),
    ("got codes=torch.float32 out", FROM, (X, SCALES), {}),
    ("out_dtype=torch.float64", FROM, (Q, SCALES), {"out_dtype": torch.float64}),
    (r"2 fp32 scales .* got scales=\[1\]", FROM, (Q, SCALES[:1]), {}),
    ("got scales=.* torch.float64", FROM, (Q, SCALES.double()), {}),
    ("got scales=.* on meta", FROM, (Q, SCALES.to("meta")), {}),
    ("codes of int8, float8_e4m3fn or float8_e", _C.dequantize_blockwise,
     (X, SCALES, 256, X, 1), {}),
    ("power of two .* got block=100", _C.dequantize_blockwise, (Q, SCALES, 100, X, 1), {}),
    *(("_C: expected out of", _C.dequantize_blockwise, (Q, SCALES, 256, wrong, 1), {})
      for wrong in (X[:-1], X.double(), torch.zeros(600)[::2])),
]  # fmt: skip


@sweep(("words", "op", "args", "options"), REFUSALS)
def test_what_is_refused(words, op, args, options):
    with pytest.raises(ValueError, match=words):
        op(*args, **options)
