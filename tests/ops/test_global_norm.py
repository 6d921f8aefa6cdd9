"""global_norm against exact sums; the same bits for any order, cut, rank, thread, instruction set,
device and storage of the same values."""

import math
from fractions import Fraction

import pytest
import torch
from cells import slow, sweep
from hypothesis import given
from hypothesis import strategies as st

from fastpar.kernels import _C, backend, global_norm
from fastpar.kernels.global_norm import NORM_WORDS, GlobalNorm, norm_bins, norm_from_bins
from fastpar.kernels.reference import global_norm_ref

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 127, 1000, 0, 20011)


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


@sweep("dtype", DTYPES)
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


RANGES = {
    "small": lambda: rand(5000) * 1e-30,
    "large": lambda: rand(5000) * 1e30,
    "mixed": lambda: torch.exp2(torch.rand(9000) * 270 - 145),
    "subnormal": lambda: torch.rand(5000) * 1e-40,
    "smallest": lambda: torch.full((5000,), 2.0**-149),
    "largest": lambda: torch.full((3,), torch.finfo(torch.float32).max / 2),
    "equal": lambda: torch.full((20_000,), 0.1),
    "zeros": lambda: torch.zeros(5000),
    "negative": lambda: -rand(5000).abs(),
    "outlier first": lambda: torch.cat([torch.ones(1), torch.full((10_000,), 1e-7)]),
    "outlier last": lambda: torch.cat([torch.full((10_000,), 1e-7), torch.ones(1)]),
    "one": lambda: torch.tensor([0.3]),
    "nothing": lambda: torch.ones(0),
    "an outlier in the middle": lambda: torch.full((200_000,), 1e-3).index_fill_(
        0, torch.tensor([77_777]), 1e6
    ),
}


@sweep("name", RANGES)
def test_ranges(name, device):
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


def test_bins_hold_their_worst_sums(device):
    """Equal elements of the largest counts that a bin or the one below sees, both signs."""
    edges = bin_edges()[:11]  # just below each bin's largest square
    for value in (*edges[::3], *farthest_from_a_unit()):
        n = 1_050_000 if device == "cpu" and backend.cuda_on_cpu else 20_000
        exact = float(value) * math.sqrt(n)
        got = global_norm([torch.full((n,), float(value)).to(device)]).norm.cpu()
        if math.isfinite(torch.tensor(exact).item()):
            assert_rounded(got, exact, n)


def top_bins(words):
    """What makes the norm: the highest bin that is not zero, its total, that of the one below."""
    units = [low + (high << 32) for low, high in zip(words[:-2:2], words[1:-2:2])]
    top = max(b for b, n in enumerate(units) if n)
    return top, units[top], units[top - 1]


def split(x):
    """The same in rational arithmetic, from the rule in csrc/norm_math.h."""
    squares = [Fraction(value) ** 2 for value in x.tolist()]
    unit = [Fraction(2) ** (52 * b - 350) for b in range(12)]
    top = max(b for b in range(12) if max(squares) > unit[b] / 2)
    high = [round(s / unit[top]) for s in squares]
    below = [round((s - n * unit[top]) / unit[top - 1]) for s, n in zip(squares, high)]
    return top, sum(high), sum(below)


def test_bins_are_the_documented_split(device):
    """Also where the largest element lies just below or above the edge of a bin, and in parts."""
    small = torch.exp2(-torch.rand(40) * 60)
    for value in bin_edges():
        x = torch.cat([value.view(1), value * small])
        want = split(x)
        assert top_bins(norm_bins([x.to(device)]).tolist()) == want
        parts = [p.to(device) for p in (x[20:], x[:1], x[1:20])]
        if device == "cpu" and not backend.cuda_on_cpu:
            assert top_bins(sum(norm_bins([p]) for p in parts).tolist()) == want
        assert top_bins(norm_bins(parts).tolist()) == want


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


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, min_size=1, max_size=60), st.data())
def test_hypothesis_any_cut_and_order(values, data):
    """Parts, ranks and single elements give the bits of the whole, and these are right."""
    x = torch.tensor(values)
    whole = global_norm([x], max_norm=1.0)
    exact = exact_norm([x])
    if exact < 3.4e38:
        assert_rounded(whole.norm, exact, len(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    parts = x[order].tensor_split(cuts)
    assert bits(global_norm(parts, max_norm=1.0)) == bits(whole)
    ranks = torch.stack([norm_bins([p]) for p in parts]).sum(0)
    assert bits(norm_from_bins(ranks, max_norm=1.0)) == bits(whole)


@sweep("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.bfloat16), slow(torch.float32)])
def test_what_is_not_finite_is_found_anywhere(dtype, bad, device):
    n = 4500
    whole = rand(n + 1, dtype, spread=6).to(device)
    for at in (0, 1, 63, 2047, 2048, n - 9, n - 1):
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
    result = global_norm([x], max_norm=1.0)
    assert result.norm.isinf()
    assert result.found_inf.item() == 1
    scaled = global_norm([x], loss_scale=1024.0)
    assert scaled.found_inf.item() == 0
    assert scaled.norm.item() == pytest.approx(3e38 * 50**0.5 / 1024, rel=1e-6)


def test_what_another_rank_counts(device):
    mine, theirs = rand(3000).to(device), rand(5000).to(device)
    got = global_norm([theirs, mine, theirs], counted=[False, True, False])
    assert bits(got) == bits(global_norm([mine]))
    theirs[4321] = torch.inf
    assert global_norm([mine, theirs], counted=[True, False]).found_inf.item() == 1
    assert global_norm([theirs], counted=[False]).norm.isinf()


def test_ranks_add_their_bins(device):
    """Uneven shards, one empty; a sum of words is what an all-reduce makes."""
    tensors = [rand(n).to(device) for n in (5000, 0, 1, 3333)]
    want = bits(global_norm(tensors, max_norm=0.5, loss_scale=2.0))
    shards = [tensors[:2], [tensors[2], tensors[3][:100]], [tensors[3][100:]]]
    total = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
    for shard in shards:
        total += norm_bins(shard)
    assert bits(norm_from_bins(total, max_norm=0.5, loss_scale=2.0)) == want
    out = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
    for shard in shards:
        assert norm_bins(shard, out=out) is out
    assert torch.equal(out, total)
    assert norm_bins([], out=out) is out
    assert torch.equal(out, total)


def test_words_of_many_chunks_carry(device):
    """The value of bins does not depend on how it is spread over their words."""
    words = norm_bins([rand(3000).to(device)])
    want = bits(norm_from_bins(words))
    for b in range(0, NORM_WORDS - 2, 2):
        if words[b] == 0 and words[b + 1] == 0:
            continue
        for carry in (-1, 1, 77):
            spread = words.clone()
            spread[b] += carry * 2**32
            spread[b + 1] -= carry
            assert bits(norm_from_bins(spread)) == want
    zero = torch.zeros_like(words)
    zero[8], zero[9] = 2**32, -1
    assert norm_from_bins(zero).norm.item() == 0


@sweep("max_norm", [None, 0.01, 1.0, 1e6, math.inf])
@sweep("loss_scale", [None, 65536.0, 0.3])
@sweep("eps", [0.0, 1e-6, 5.0])
def test_factor(max_norm, loss_scale, eps, device):
    x = [torch.randn(2000).to(device), torch.randn(30).to(device)]
    got = global_norm(x, max_norm=max_norm, eps=eps, loss_scale=loss_scale)
    scale = torch.tensor(1.0 if loss_scale is None else loss_scale).item()
    as_tensor = torch.tensor([scale]).to(device)
    assert bits(global_norm(x, max_norm=max_norm, eps=eps, loss_scale=as_tensor)) == bits(got)
    bins = norm_bins(x)
    assert bits(norm_from_bins(bins, max_norm=max_norm, eps=eps, loss_scale=as_tensor)) == bits(got)
    norm = float(got.norm)
    assert_rounded(got.norm.cpu(), exact_norm(x) / scale, 2030)
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + eps))
    assert got.grad_scale.item() == torch.tensor(factor / scale, dtype=torch.float64).float().item()
    assert got.found_inf.item() == 0


def test_norm_takes_two_launches(cuda_device, monkeypatch):
    module, calls = backend.cuda_kernels, []
    for name in ("norm_partials_cuda", "norm_finish_cuda"):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, r=run, n=name: calls.append(n) or r(*a))
    tensors = [rand(100, d).to(cuda_device) for d in DTYPES for _ in range(300)]
    global_norm(tensors, max_norm=1.0, loss_scale=torch.ones((), device=cuda_device))
    assert calls == ["norm_partials_cuda", "norm_finish_cuda"]


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    x = [torch.randn(100_003, device="cuda"), torch.randn(70_001, device="cuda").bfloat16()]
    scale = torch.ones((), device="cuda")
    global_norm(x, max_norm=1.0, loss_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = global_norm(x, max_norm=1.0, loss_scale=scale)
    for factor in (1.0, 3.0):
        x[0].mul_(factor)
        scale.fill_(factor)
        graph.replay()
        assert bits(captured) == bits(global_norm(x, max_norm=1.0, loss_scale=scale))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)])
def test_every_offset_and_tail(dtype, device):
    """All starts within 64 bytes, tails of up to two vectors, exactly; what lies around is not
    read."""
    integers = torch.randint(-999, 999, (400,)).to(dtype)
    for k, offset in enumerate(range(64 // dtype.itemsize)):
        parts, exact = [], 0
        for n in (*range(k % 3, 34, 3), 130 + k % 16):
            around = torch.full((400,), torch.nan, dtype=dtype, device=device)
            parts.append(around[offset : offset + n].copy_(integers[offset : offset + n]))
            exact += sum(int(x) ** 2 for x in integers[offset : offset + n].tolist())
        words = norm_bins(parts).tolist()  # an exact number of units 2^-350
        units = [low + (high << 32) for low, high in zip(words[:-2:2], words[1:-2:2])]
        assert sum(n << (52 * b) for b, n in enumerate(units)) == exact << 350


X, WORDS = [torch.ones(3), torch.ones(2)], torch.zeros(NORM_WORDS, dtype=torch.int64)
REFUSALS = [
    *((words, f, args, options) for f in (global_norm, norm_bins) for words, args, options in (
        ("one entry of counted .* got 1 for 2 tensors", (X,), {"counted": [True]}),
        (r"got tensors\[1\]=torch.int32; cast it", ([X[0], X[1].int()],), {}),
        (r"dense tensors, got tensors\[0\]=torch.sparse_coo", ([X[0].to_sparse()],), {}),
        (r"one device, got tensors\[1\] on meta", ([X[0], X[1].to("meta")],), {}),
    )),
    *((words + name, f, (first,), {name: bad})
      for f, first in ((global_norm, X), (norm_from_bins, WORDS))
      for name, words, values in (
        ("max_norm", "expected max_norm > 0 or None, got ", (0.0, -1.0, math.nan)),
        ("eps", "expected 0 <= eps < inf, got ", (-1.0, math.inf, math.nan)),
        ("loss_scale", "expected 0 < loss_scale < inf, got ", (0.0, -1.0, math.inf, math.nan)),
        ("loss_scale", "one fp32 element on cpu, got ",
         (torch.ones(2), torch.ones(1).double(), torch.ones((), device="meta"))),
      ) for bad in values),
    *(("expected contiguous bins of shape .26. int64", f, args, {name: bins} if name else {})
      for bins in (torch.zeros(3).long(), torch.zeros(NORM_WORDS), torch.zeros(NORM_WORDS, 2)[:, 0])
      for f, args, name in ((norm_from_bins, (bins,), ""), (norm_bins, (X,), "out"))),
    ("tensors of float32, .* got float64", _C.norm_bins, ([X[0].double()], [True], WORDS, 1), {}),
    (f"words of {NORM_WORDS} .* int64, got 3 of int6", _C.norm_bins,
     (X, [True] * 2, WORDS[:3], 1), {}),
    ("expected result of 3 .* float32, got 3 of float64", _C.norm_from_bins,
     (WORDS, -1.0, 0.0, 1.0, None, X[0].double()), {}),
]  # fmt: skip


@sweep(("words", "call", "args", "options"), REFUSALS)
def test_what_is_refused(words, call, args, options):
    with pytest.raises(ValueError, match=words):
        call(*args, **options)
