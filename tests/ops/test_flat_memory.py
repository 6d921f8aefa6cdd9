"""Ops on flat memory and lists: sums of shards, the global norm, blockwise codes. Bit for bit what
plain torch or an oracle gives, for every type, offset, tail, cut, thread count, instruction set and
device; autograd notices what they write."""

import itertools
import math

import pytest
import torch
from cells import covering, sweep
from torch.testing._internal.logging_tensor import LoggingTensorMode, capture_logs

from fastpar.kernels import (
    _C,
    Hyper,
    Rng,
    adamw_step_,
    backend,
    dequantize_blockwise,
    dropout,
    global_norm,
    keep_mask,
    lists,
    make_key,
    quantize_blockwise,
    sum_shards,
)
from fastpar.kernels import reference as ref
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins, norm_from_bins
from fastpar.kernels.lists import are_at, copy_into, rows_of, swap

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 127, 1000, 0, 20011)
SPECIAL = (math.inf, -math.inf, math.nan, -0.0, 0.0, 1e-40, -6e-8, 65519.0, 65520.0, 3e38, -3e38)
BIG = torch.finfo(torch.float32).max
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)


def rand(n, dtype=torch.float32, device="cpu", offset=0, spread=12):
    """Random values of many magnitudes, `offset` elements into their memory."""
    n += offset
    x = torch.randn(n) * torch.exp2(torch.randint(-spread, spread, (n,)).float())
    return x.to(device, dtype)[offset:]


def assert_same(got, want):
    """Tensors or lists of the same dtypes and bits, signs of zeros too; nan equals nan."""
    if not isinstance(got, torch.Tensor):
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
        return
    assert got.dtype == want.dtype
    got, want = got.cpu(), want.cpu()
    if got.is_floating_point() and got.element_size() > 1:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())
    else:
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


# Sums of shards


@sweep("world", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 515])
@covering(1, ("dtype", DTYPES), ("out_dtype", DTYPES))
def test_sum_shards_is_a_tree_over_the_ranks(dtype, out_dtype, world, device):
    n = 3001 if world < 99 else 67
    received = rand(world * n, dtype, device).view(world, n)
    received[:2, :11] = torch.tensor(SPECIAL).to(dtype)
    for scale in (None, 0.37):
        out = torch.full((n,), torch.nan, dtype=out_dtype, device=device)
        sum_shards(received, out, scale=scale)
        want, number = torch.empty(n), 1.0 if scale is None else torch.tensor(scale).item()
        ref.sum_shards_ref(received.cpu().float(), want, number)
        assert_same(out, want.to(out_dtype))


@covering(1, ("to", DTYPES[:2]), ("source", DTYPES[:2]))
def test_every_offset_and_tail(source, to, device):
    """Offsets 0..63 bytes of source and destination, all tails of 16 elements, nothing outside."""
    steps_to, steps_source = 64 // to.itemsize, 64 // source.itemsize
    pairs = {(i, 0) for i in range(steps_to)} | {(0, i) for i in range(steps_source)}
    pairs |= {(i, i * 5 % steps_source) for i in range(steps_to)} | {(i, i) for i in range(8)}
    for k, (a, b) in enumerate(sorted(pairs)):
        n = (k % 17) + (300 if k % 3 == 0 else 0)
        memory = torch.full((a + n + 9,), 7.0, dtype=to, device=device)
        x = rand(n, source, device, offset=b)
        out = memory[a : a + n]
        sum_shards([x, x.clone(), x], out)
        assert_same(out, (x.float() + x.float() + x.float()).to(to))
        assert (memory[:a] == 7).all()
        assert (memory[a + n :] == 7).all()


def test_out_may_be_a_shard_and_empty(device):
    for own in range(3):
        shards = rand(3 * 3000, torch.float32, device).view(3, 3000)
        want = shards[0] + shards[1] + shards[2]
        sum_shards(shards, shards[own])
        assert_same(shards[own], want)
    empty = torch.empty(0, device=device)
    sum_shards(empty.view(2, 0), empty)


@pytest.mark.slow
def test_launches_of_lists(cuda_device, recorded):
    """The norm of a list of any types is two launches. More shards than fit a launch's arguments
    are refused."""
    names = ("norm_partials_cuda", "norm_finish_cuda")
    calls = [recorded(backend.cuda_kernels, name) for name in names]
    tensors = [rand(3, d, cuda_device) for d in DTYPES for _ in range(500)]
    global_norm(tensors, max_norm=1.0, loss_scale=torch.ones((), device=cuda_device))
    assert list(map(len, calls)) == [1, 1]
    shards, out = [torch.ones(1, device=cuda_device)] * 4088, torch.zeros(1, device=cuda_device)
    sum_shards(shards[1:], out)
    assert out.item() == 4087
    with pytest.raises(ValueError, match="expected at most 4087 shards, got world=4088"):
        sum_shards(shards, out)


X, LOW, FLAT = torch.ones(4), torch.ones(4).bfloat16(), torch.zeros(8)
WORDS = torch.zeros(NORM_WORDS, dtype=torch.int64)
REFUSALS = [
    (r"expected a contiguous out .* out=\[2, 4\]", sum_shards, ([X], FLAT.view(2, 4)), {}),
    (r"sum_shards: expected a contiguous out .* stride=\(2,\)", sum_shards, ([X], FLAT[::2]), {}),
    ("sum_shards: expected memory that holds values", sum_shards, ([X], torch._neg_view(X)), {}),
    ("sum_shards: expected fp32, .* out=torch.int32", sum_shards, ([X], X.int()), {}),
    ("sum_shards: expected at least one shard", sum_shards, ([], X), {}),
    (r"shards of shape \[4\] .* received\[1\]=\[3\]", sum_shards, ([X, X[:3]], FLAT[:4]), {}),
    (r"received\[1\]=.* torch.bfloat16", sum_shards, ([X, LOW], FLAT[:4]), {}),
    (r"stride=\(2,\)", sum_shards, ([FLAT[::2]], X), {}),
    ("sum_shards: .* received.0. on meta", sum_shards, ([X.to("meta")], X), {}),
    ("expected at least one shard, got 0", _C.sum_shards, ([], X, 1.0, 1), {}),
    ("_C: expected shards of 3 contiguous elements of float32", _C.sum_shards,
     ([X[:3], X[:2]], torch.zeros(3), 1.0, 1), {}),
]  # fmt: skip


def test_overlap_is_refused(cuda_device, monkeypatch):
    for _ in range(2):  # the CUDA kernels' binding, then the CPU kernels'
        flat, x = torch.zeros(12, device=cuda_device), torch.ones(4, device=cuda_device)
        low = flat[:4].view(torch.bfloat16)[:4]
        for words, op, *args in (
            ("got shard 1 partly over out", sum_shards, [x, flat[1:5]], flat[:4]),
            ("got shard 0 partly over out", sum_shards, [flat[:4]], low),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                op(*args)
        monkeypatch.setattr(backend, "cuda_on_cpu", False)


# The norm


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


RANGES = {
    "small": lambda: rand(5000) * 1e-30,
    "large": lambda: rand(5000) * 1e30,
    "mixed": lambda: torch.exp2(torch.rand(9000) * 270 - 145),
    "subnormal": lambda: torch.rand(5000) * 1e-40,
    "smallest": lambda: torch.full((5000,), 2.0**-149),
    "largest": lambda: torch.full((3,), BIG / 2),
    "equal": lambda: torch.full((20_000,), 0.1),
    "zeros": lambda: torch.zeros(5000),
    "outlier first": lambda: torch.cat([torch.ones(1), torch.full((10_000,), 1e-7)]),
    "outlier last": lambda: torch.cat([torch.full((10_000,), 1e-7), torch.ones(1)]),
    "an outlier in the middle": lambda: torch.full((200_000,), 1e-3).index_fill_(
        0, torch.tensor([77_777]), 1e6
    ),
}


@sweep("name", RANGES)
def test_norms_of_any_range(name, device):
    x = RANGES[name]()
    assert_rounded(global_norm([x.to(device)]).norm.cpu(), exact_norm([x]), x.numel())


def bin_edges():
    """The floats on both sides of each bin's largest square, 2^(52 b - 299)."""
    low = [math.ldexp(math.sqrt(2), 26 * b - 150) for b in range(1, 12) if 26 * b - 150 < 127]
    x = torch.tensor(low).float()
    return torch.cat([x.nextafter(torch.zeros(())), x, x.nextafter(torch.tensor(torch.inf))])


def farthest_from_a_unit():
    """Floats near 1 whose squares are almost half a unit of their bin, 2^14, away from a multiple
    of it, above and below."""
    x = torch.randint(1 << 23, 1 << 24, (200_000,)).float() * 2.0**-13
    square = x.double() ** 2 / 2.0**14
    away = square - square.round()
    return x[away.argmax()], x[away.argmin()]


@pytest.mark.slow
def test_bins_hold_their_worst_sums(device):
    """Equal elements of the largest counts that a bin or the one below sees, both signs; the
    largest element just below or above the edge of a bin, over smaller ones; in parts."""
    edges = bin_edges()[:11]  # just below each bin's largest square
    for i, value in enumerate((*edges[::3], *farthest_from_a_unit())):
        n = 20_000 if i % 3 or not (device == "cpu" and backend.cuda_on_cpu) else 1_050_000
        exact = float(value) * math.sqrt(n)
        got = global_norm([torch.full((n,), float(value)).to(device)]).norm.cpu()
        if math.isfinite(torch.tensor(exact).item()):
            assert_rounded(got, exact, n)
    small = torch.exp2(-torch.rand(40) * 60)
    for value in bin_edges():
        x = torch.cat([value.view(1), value * small])
        whole = norm_bins([x.to(device)])
        norm, exact = norm_from_bins(whole).norm.cpu(), exact_norm([x])
        if exact < BIG:
            assert_rounded(norm, exact, 41)
        parts = [norm_bins([part.to(device)]) for part in (x[20:], x[:1], x[1:20])]
        assert bits(norm_from_bins(sum(parts))) == bits(norm_from_bins(whole))


@pytest.mark.slow
def test_any_order_and_cut_of_elements_of_every_size(device):
    """Sorted both ways, shuffled, one by one and in pieces that cross chunks: the running top of
    the kernels takes every course."""
    x = torch.cat([torch.exp2(torch.rand(9000) * 250 - 145), bin_edges(), torch.zeros(50)])
    x = x.to(device)
    want = bits(global_norm([x], max_norm=1.0))
    for y in (x.sort().values, x.sort(descending=True).values, x[torch.randperm(x.numel())]):
        assert bits(global_norm([y], max_norm=1.0)) == want
        for cuts in ([1], [4, 2049, 4099], [3, 8192], list(range(0, 40))):
            assert bits(global_norm(list(y.tensor_split(cuts)), max_norm=1.0)) == want
    some = torch.cat([bin_edges(), torch.zeros(3)]).to(device)
    singles = list(some.split(1))
    assert bits(global_norm(singles)) == bits(global_norm([some]))
    assert bits(global_norm(singles[::-1])) == bits(global_norm([some]))


@pytest.mark.slow
@sweep(("bad", "dtype"), zip((torch.inf, -torch.inf, torch.nan), DTYPES))
def test_what_is_not_finite_is_found_anywhere(dtype, bad, device):
    n = 4500
    whole = rand(n + 1, dtype, spread=6).to(device)
    for at in (0, 1, 2047, n - 9, n - 1):
        x = whole[at % 2 :][:n].clone()
        rest = bits(global_norm([x[:at], x[at + 1 :]]))
        x[at] = bad
        result = global_norm([whole[:9], x], max_norm=1.0)
        assert result.found_inf.item() == 1
        assert result.norm.isnan().item() == math.isnan(bad)
        assert result.norm.isinf().item() == math.isinf(bad)
        assert (result.grad_scale.item() == 0) == math.isinf(bad)  # nan stays nan, as in torch
        words = norm_bins([x])
        assert words[-2:].tolist() == ([0, 1] if math.isnan(bad) else [1, 0])
        words[-2:] = 0
        assert bits(norm_from_bins(words)) == rest


def test_a_norm_beyond_fp32_is_an_overflow(device):
    x = torch.full((50,), 3e38).to(device)
    result, scaled = global_norm([x], max_norm=1.0), global_norm([x], loss_scale=1024.0)
    assert result.norm.isinf()
    assert (result.found_inf.item(), scaled.found_inf.item()) == (1, 0)
    assert_rounded(scaled.norm.cpu(), exact_norm([x]) / 1024, 50)


def test_norms_over_ranks(device):
    """Uneven shards, one empty; a sum of words is what an all-reduce makes. What another rank
    counts is left out, unless it is not finite."""
    x = rand(8334, device=device)
    total = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
    out = torch.zeros_like(total)
    for shard in (x[:5001].split(5000), [x[5001:]], []):
        total += norm_bins(shard)
        assert norm_bins(shard, out=out) is out
    assert torch.equal(out, total)
    options = {"max_norm": 0.5, "loss_scale": 2.0}
    assert bits(norm_from_bins(total, **options)) == bits(global_norm([x], **options))
    theirs = rand(5000, device=device)
    got = global_norm([theirs, x, theirs], counted=[False, True, False])
    assert bits(got) == bits(global_norm([x]))
    theirs[4321] = torch.inf
    assert global_norm([x, theirs], counted=[True, False]).found_inf.item() == 1
    assert global_norm([theirs], counted=[False]).norm.isinf()


def test_words_of_many_chunks_carry(device):
    """The value of bins does not depend on how it is spread over their words."""
    words = norm_bins([rand(3000).to(device)])
    want = bits(norm_from_bins(words))
    for b, carry in itertools.product(range(0, NORM_WORDS - 2, 2), (-1, 1, 77)):
        spread = words.clone()
        spread[b : b + 2] += carry * torch.tensor([2**32, -1], device=device)
        assert bits(norm_from_bins(spread)) == want


LIMITS, LOSS_SCALES = [None, 0.01, 1.0, 1e6, math.inf], [None, 65536.0, 0.3]
PAIRS = itertools.product(enumerate(LIMITS), enumerate(LOSS_SCALES))


@pytest.mark.slow
@sweep(("max_norm", "loss_scale", "eps"),
       [(m, s, [0.0, 1e-6, 5.0][(i + j) % 3]) for (i, m), (j, s) in PAIRS])  # fmt: skip
def test_norm_and_factor_of_a_list(max_norm, loss_scale, eps, device):
    """Of mixed types, against the exact sum and the oracle, whose rounding the factor inherits."""
    x = [rand(n, dtype, device) for n, dtype in zip(SIZES[3:7], (*DTYPES, torch.float32))]
    how = {"max_norm": max_norm, "eps": eps}
    got = global_norm(x, **how, loss_scale=loss_scale)
    assert all(t.shape == () and t.dtype == torch.float32 for t in got)
    scale = torch.tensor(1.0 if loss_scale is None else loss_scale).item()
    as_tensor = torch.tensor([scale]).to(device)
    assert bits(global_norm(x, **how, loss_scale=as_tensor)) == bits(got)
    assert bits(norm_from_bins(norm_bins(x), **how, loss_scale=as_tensor)) == bits(got)
    assert_rounded(got.norm.cpu(), exact_norm(x) / scale, sum(SIZES[3:7]))
    exact = ref.global_norm_ref([t.cpu() for t in x], None, max_norm, scale, eps)
    for value, want in zip(got, exact):
        assert abs(value.item() - want) <= 2.0**-23 * want
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (float(got.norm) + eps))
    assert got.grad_scale.item() == torch.tensor(factor / scale, dtype=torch.float64).float().item()


def test_storage_shapes_and_strides_of_the_same_values_do_not_matter(device):
    """Also tensors that require a gradient, and fp64, which is rounded to fp32 first."""
    for dtype in DTYPES[1:]:
        x = rand(30_001, dtype, spread=6).to(device)
        want = bits(global_norm([x]))
        assert bits(global_norm([x.float()])) == want
        assert bits(global_norm([x[:999], x[999:20_000].float(), x[20_000:]])) == want
    x = rand(600).to(device)
    want, square = bits(global_norm([x])), x.view(20, 30)
    for same in ([square.t()], [square[:, ::2], square[:, 1::2]], [x[0], x[1:].view(1, 599, 1)]):
        assert bits(global_norm(same)) == want
    result = global_norm([x.clone().requires_grad_()])
    assert bits(result) == want
    assert not result.norm.requires_grad
    assert global_norm([torch.ones(1).to(device).expand(100)]).norm.item() == 10
    x = torch.randn(3000, dtype=torch.float64).to(device)
    assert bits(global_norm([x, x[:5].float()])) == bits(global_norm([x.float(), x[:5].float()]))
    assert global_norm([x * 1e300]).found_inf.item() == 1
    for tensors in ([], [torch.ones(0).to(device)], [torch.ones(3, 0).to(device)] * 5):
        assert [t.item() for t in global_norm(tensors, max_norm=1.0)] == [0, 1, 0]
        assert not norm_bins(tensors).any()


XS = [torch.ones(3), torch.ones(2)]
REFUSALS += [
    *((words, f, args, options) for f in (global_norm, norm_bins) for words, args, options in (
        ("one entry of counted .* got 1 for 2 tensors", (XS,), {"counted": [True]}),
        (r"got tensors\[1\]=torch.int32; cast it", ([XS[0], XS[1].int()],), {}),
        (r"dense tensors, got tensors\[0\]=torch.sparse_coo", ([XS[0].to_sparse()],), {}),
        (r"one device, got tensors\[1\] on meta", ([XS[0], XS[1].to("meta")],), {}),
    )),
    *((words + name, f, (first,), {name: bad})
      for f, first in ((global_norm, XS), (norm_from_bins, WORDS))
      for name, words, values in (
        ("max_norm", "expected max_norm > 0 or None, got ", (0.0, -1.0, math.nan)),
        ("eps", "expected 0 <= eps < inf, got ", (-1.0, math.inf, math.nan)),
        ("loss_scale", "expected 0 < loss_scale < inf, got ", (0.0, -1.0, math.inf, math.nan)),
        ("loss_scale", "one fp32 element on cpu, got ",
         (torch.ones(2), torch.ones(1).double(), torch.ones((), device="meta"))),
      ) for bad in values),
    *(("expected contiguous bins of shape .26. int64", f, args, {name: bins} if name else {})
      for bins in (torch.zeros(3).long(), torch.zeros(NORM_WORDS), torch.zeros(NORM_WORDS, 2)[:, 0])
      for f, args, name in ((norm_from_bins, (bins,), ""), (norm_bins, (XS,), "out"))),
    *(("norm_bins: expected contiguous float32, bfloat16 or float16 in one place", _C.norm_bins,
       (rows_of(bad), [], WORDS, 1), {})
      for bad in ([XS[0].double()], [torch.zeros(4)[::2]], [XS[0], XS[0].to("meta")])),
    ("norm_bins: expected .* got 2 tensors", _C.norm_bins, (rows_of(XS[:2]), [True], WORDS, 1), {}),
    (f"words of {NORM_WORDS} .* int64, got 3 of int6", _C.norm_bins,
     (rows_of(XS), [True] * len(XS), WORDS[:3], 1), {}),
    ("expected result of 3 .* float32, got 3 of float64", _C.norm_from_bins,
     (WORDS, -1.0, 0.0, 1.0, None, XS[0].double()), {}),
]  # fmt: skip


# Blockwise codes


def seeds(*numbers):
    """Rounding to nearest, and at random, which the composed path does not do."""
    return (None,) if backend.choice == "torch" else (None, *numbers)


def blocks(n, dtype=torch.float32, device="cpu"):
    """Random values of many magnitudes, blocks of zeros and of tiny numbers among them."""
    x = torch.randn(n) * torch.exp2(torch.randint(-10, 4, (n,)).float())
    x[n // 3 : n // 3 + n // 4] *= 2.0**-140
    x[n // 2 : n // 2 + n // 4] = 0
    return x.to(device, dtype)


def placed(x, device, offset):
    """The values on the device, `offset` elements into their memory."""
    return torch.empty(offset + x.numel(), dtype=x.dtype, device=device)[offset:].copy_(x)


def check(x, device, *, block=256, seed=None, first_index=0, offset=0):
    """Op and oracle agree in codes, scales and values."""
    kwargs = {"block": block, "seed": seed, "first_index": first_index}
    codes, scales = quantize_blockwise(placed(x, device, offset), **kwargs)
    want, want_scales = ref.quantize_blockwise_ref(x.float(), **kwargs)
    assert_same([codes, scales], [want, want_scales])
    codes = placed(codes, device, offset)
    for out_dtype in DTYPES:
        got = dequantize_blockwise(codes, scales, out_dtype=out_dtype, block=block)
        assert_same(got, ref.dequantize_blockwise_ref(want, want_scales, block=block).to(out_dtype))


@sweep("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_decodes_as_torchs(dtype, device):
    codes = torch.arange(700, dtype=torch.int32).to(torch.uint8).view(dtype)
    scales = torch.tensor([1.0, 0.37, 2.0**-126])
    want = codes.float() * scales.repeat_interleave(256)[:700]
    for out_dtype in DTYPES:
        got = dequantize_blockwise(codes.to(device), scales.to(device), out_dtype=out_dtype)
        assert_same(got, want.to(out_dtype))


@pytest.mark.parametrize("device", ["cpp", "cuda"], indirect=True)
def test_seeds_and_cuts(device):
    """Same seed, same bits; another seed, others; a cut at a multiple of the block changes none."""
    x, kwargs = blocks(4000, torch.bfloat16, device), {"block": 64, "seed": 9}
    whole = quantize_blockwise(x, first_index=128, **kwargs)
    for cut in (64, 1280, 3968):
        left = quantize_blockwise(x[:cut], first_index=128, **kwargs)
        right = quantize_blockwise(x[cut:], first_index=128 + cut, **kwargs)
        assert_same(map(torch.cat, zip(left, right)), whole)
    plain = torch.randn(4000, device=device)  # two drawings of it differ in a third
    first, *others = (
        quantize_blockwise(plain, **{**kwargs, "seed": seed, "first_index": at})[0]
        for seed, at in ((9, 128), (10, 128), (9, 192))
    )
    assert all((codes != first).float().mean() > 0.2 for codes in others)


def test_what_is_not_finite_does_not_vanish(device):
    for seed in seeds(3):
        kwargs = {"block": 64, "seed": seed}
        x = torch.randn(5 * 64, device=device)
        clean, clean_scales = quantize_blockwise(x, **kwargs)
        x[70], x[140], x[141], x[200] = torch.inf, -torch.inf, torch.nan, torch.inf
        codes, scales = quantize_blockwise(x, **kwargs)
        assert str(scales[1:4].tolist()) == "[inf, nan, inf]"
        values = dequantize_blockwise(codes, scales, block=64).view(5, 64)
        assert values.isnan().all(1).tolist() == [False, True, True, True, False]
        assert values[[0, 4]].isfinite().all()
        assert not codes.view(5, 64)[1:4].any()
        rest = [0, 4]  # does not suffer
        assert_same(codes.view(5, 64)[rest], clean.view(5, 64)[rest])
        assert_same(scales[rest], clean_scales[rest])


def test_codes_of_every_offset_shape_and_stride(device):
    """Offsets 0..63 bytes of x, codes that start anywhere. test_cases.py has other sizes."""
    if backend.choice == "torch":
        with pytest.raises(RuntimeError, match="FASTPAR_BACKEND=torch seed=1; unset"):
            quantize_blockwise(torch.ones(64), seed=1)
    for offset in range(16):
        block = (16, 32, 64, 512, 4096)[offset % 5]
        x, seed = torch.randn(64 + 307 * offset), seeds(2**64 - 3)[-1]
        check(x, device, block=block, seed=seed, first_index=7 * block, offset=offset)
    x = torch.randn(30, 20, device=device)
    codes, scales = quantize_blockwise(x.t(), block=64)
    assert (codes.shape, scales.shape) == ((20, 30), (10,))
    assert_same(codes, quantize_blockwise(x.t().contiguous(), block=64)[0])
    values = dequantize_blockwise(codes.t(), scales, block=64)
    assert_same(values, dequantize_blockwise(codes.t().contiguous(), scales, block=64))
    assert dequantize_blockwise(*quantize_blockwise(torch.tensor(3.0, device=device))).item() == 3.0


def test_codes_at_the_edges(device):
    """Zeros, blocks below the least scale, the largest numbers, numbers that are codes."""
    for seed in seeds(3):
        x = torch.tensor([0.0, -0.0], device=device)
        assert not any(t.any() for t in quantize_blockwise(x, seed=seed))
        x = torch.full((64,), 2.0**-149, device=device)
        x[0] = 2.0**-126
        codes, scales = quantize_blockwise(x, block=64, seed=seed)
        assert scales.item() == 2.0**-126
        assert dequantize_blockwise(codes, scales, block=64)[0] == 2.0**-126
        for top in (BIG, BIG * (1 - 2**-20), 3e38):
            x = torch.tensor([top, -top, 1.0, BIG / 2], device=device)
            values = dequantize_blockwise(*quantize_blockwise(x, seed=seed))
            assert values.isfinite().all()
            torch.testing.assert_close(values[0].item(), top, rtol=2.0**-20, atol=0)
        x = torch.arange(-127, 128, device=device) * 2.0**-20
        assert torch.equal(dequantize_blockwise(*quantize_blockwise(x, seed=seed)), x)


WIDE = torch.ones(300)
Q, OF_Q = quantize_blockwise(WIDE)
TO, FROM = quantize_blockwise, dequantize_blockwise
REFUSALS += [
    ("expected fp32, bf16 or fp16, got x=torch.float64", TO, (WIDE.double(),), {}),
    *((f"power of two from 16 to 4096, got block={n}", TO, (WIDE,), {"block": n})
      for n in (0, 8, 48, 8192)),
    ("got block=8", FROM, (Q, OF_Q), {"block": 8}),
    (r"expected 0 <= seed < 2\*\*64, got seed=-1", TO, (WIDE,), {"seed": -1}),
    ("got seed=18446744073709551616", TO, (WIDE,), {"seed": 2**64}),
    ("got first_index=-1", TO, (WIDE,), {"first_index": -1}),
    ("got codes=torch.float32 out", FROM, (WIDE, OF_Q), {}),
    ("out_dtype=torch.float64", FROM, (Q, OF_Q), {"out_dtype": torch.float64}),
    (r"2 fp32 scales .* got scales=\[1\]", FROM, (Q, OF_Q[:1]), {}),
    ("got scales=.* torch.float64", FROM, (Q, OF_Q.double()), {}),
    ("got scales=.* on meta", FROM, (Q, OF_Q.to("meta")), {}),
    ("codes of int8, float8_e4m3fn or float8_e", _C.dequantize_blockwise,
     (WIDE, OF_Q, 256, WIDE, 1), {}),
    ("power of two .* got block=100", _C.dequantize_blockwise, (Q, OF_Q, 100, WIDE, 1), {}),
    *(("_C: expected out of", _C.dequantize_blockwise, (Q, OF_Q, 256, wrong, 1), {})
      for wrong in (WIDE[:-1], WIDE.double(), torch.zeros(600)[::2])),
]  # fmt: skip


@sweep(("words", "op", "args", "options"), REFUSALS)
def test_what_is_refused(words, op, args, options):
    with pytest.raises(ValueError, match=words):
        op(*args, **options)


# All of them


LONG = (40_003, 5, 30_001)


def sums(device):
    out = torch.empty(LONG[0], dtype=torch.float16, device=device)
    sum_shards(rand(3 * LONG[0], torch.bfloat16).view(3, -1).to(device), out)
    return [out]


def norms(device):
    bad = [torch.tensor([1.0, torch.inf, 2.0] * 2000), torch.tensor([torch.nan])]
    words = norm_bins([t.to(device) for t in bad], counted=[True, False])
    return [*global_norm([rand(n, d, device) for d in DTYPES for n in LONG]), words[-2:]]


def codes(device):
    found = []
    for seed in (None, 8):
        codes, scales = quantize_blockwise(rand(LONG[0], torch.bfloat16, device), seed=seed)
        found += [codes, scales, dequantize_blockwise(codes, scales)]
    return found


def masks(device):
    rng = Rng(make_key(1, 0), 0)
    return [dropout(rand(195_000).view(3, 2, 500, 65), 0.2, rng), keep_mask(rng, 0.2, (3, 7, 65))]


def results(run, device="cpu"):
    torch.manual_seed(3)
    return [t.cpu() for t in run(device)]


@pytest.mark.slow
@sweep("run", [sums, norms, codes, masks])
def test_same_bits_on_every_instruction_set_and_thread_count(run, isas):
    want = results(run)
    for _ in isas():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same(results(run), want)


@pytest.mark.parametrize("run", [sums, norms, codes])
def test_devices_give_the_same_bits(run, cuda_device, monkeypatch):
    got = results(run, cuda_device)
    monkeypatch.setattr(backend, "cuda_on_cpu", False)
    assert_same(got, results(run))


@sweep("write", [
    lambda p: sum_shards(torch.ones(2, 5), p),
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
    sum_shards([x, x], flat)
    sum_shards([flat, x], flat, scale=2)
    assert flat[-4:].tolist() == [6, 18, 18, 18]
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


def test_lists_are_copied_as_tensors_are():
    """Of any dtype, layout and size, seen by modes and by autograd's versions."""
    shapes = (3,), (2, 5), (0,), (600, 200)
    source = [*map(torch.randn, shapes), torch.randn(5, 3).t(), torch.randn(7)[::2]]
    source.append(torch.randn(4).bfloat16())
    for one in (source, source[:1]):
        *starts, size = itertools.accumulate((x.numel() + 1 for x in one), initial=1)
        flat = torch.zeros(size)
        version, view = flat._version, flat[1:4]
        copy_into(flat, starts, one)
        gap = torch.zeros(1)
        parts = [y for x in one for y in (gap, x.float().flatten())]
        assert_same([flat], [torch.cat([*parts, gap])])
        assert flat._version > version
        assert view._version == flat._version
    with LoggingTensorMode(), capture_logs() as seen:
        copy_into(torch.zeros(3), [0], [source[0]])
    assert any("copy_" in line for line in seen)
    for wrong in ([2], [-1], []):
        with pytest.raises(ValueError, match="copy_into: expected"):
            copy_into(torch.zeros(4), wrong, [source[0]])


def test_entries_of_dicts_are_swapped_where_they_are_the_old_ones(monkeypatch):
    old, new = [object() for _ in range(3)], [object() for _ in range(3)]
    for _ in range(2):  # compiled, then in Python
        first, second = {"a": old[0], "b": old[1]}, {"a": "another", "c": old[2]}
        uses = [(first, "a", 0), (first, "b", 1), (second, "a", 2), (second, "c", 2)]
        uses.append((second, "missing", 0))
        swap(uses, old, new, [True, False, True])
        assert first == {"a": new[0], "b": old[1]}
        assert second == {"a": "another", "c": new[2]}
        monkeypatch.setattr(lists, "_C", None)


def test_lists_of_the_same_memory():
    x, other = torch.randn(4, 4), torch.randn(4, 4)
    assert are_at([x, x[1]], [x.view(4, 4), x[1]])
    for wrong in (other, x.t(), x.view(16), x.view(torch.int32), x[:2]):
        assert not are_at([other, x], [other, wrong])
    assert not are_at([x], [x, x])
