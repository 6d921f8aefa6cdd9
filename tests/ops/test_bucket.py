"""Bucket operations: bit for bit what plain torch gives in fp32 with one rounding, for every type,
offset, tail, cut, thread count, instruction set and device."""

import pytest
import torch
from cells import covering, slow, sweep
from hypothesis import given
from hypothesis import strategies as st

from fastpar.kernels import _C, accumulate_, backend, pack_, sum_shards, unpack_
from fastpar.kernels import reference as ref
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins, norm_from_bins

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 127, 1000, 0, 20011)
SCALES = (None, 0.37, "tensor")


def rand(n, dtype, device="cpu", offset=0):
    """Random values of many magnitudes, `offset` elements into their memory."""
    x = torch.randn(n + offset) * torch.exp2(torch.randint(-12, 12, (n + offset,)).float())
    return x.to(device, dtype)[offset:]


def factor_of(scale, device):
    """(what the op gets, the number)"""
    if scale == "tensor":
        return torch.tensor(0.37, device=device), torch.tensor(0.37).item()
    return scale, 1.0 if scale is None else torch.tensor(scale).item()


def assert_same(got, want):
    """Same dtype and bits; nan equals nan."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(
        got.cpu().signbit() & ~got.cpu().isnan(), want.cpu().signbit() & ~want.cpu().isnan()
    )


def expected_copy(x, dtype, scale):
    out = torch.empty(x.numel())
    ref.pack_ref(out, [x.cpu().float()], scale)
    return out.to(dtype)


def expected_add(total, x, scale):
    out = total.cpu().float()
    ref.accumulate_ref([out], [x.cpu().float()], scale)
    return out.to(total.dtype)


@sweep("scale", SCALES)
@sweep("to", DTYPES)
@sweep("source", DTYPES)
def test_pack_unpack_accumulate(source, to, scale, device):
    given_scale, number = factor_of(scale, device)
    tensors = [rand(n, source, device) for n in SIZES]
    flat = torch.full((sum(SIZES),), torch.nan, dtype=to, device=device)
    pack_(flat, tensors, scale=given_scale)
    assert_same(flat, torch.cat([expected_copy(t, to, number) for t in tensors]))

    flat = rand(sum(SIZES), source, device)
    outs = [torch.full((n,), torch.nan, dtype=to, device=device) for n in SIZES]
    unpack_(outs, flat, scale=given_scale)
    for out, part in zip(outs, flat.split(SIZES)):
        assert_same(out, expected_copy(part, to, number))

    totals = [rand(n, to, device) for n in SIZES]
    want = [expected_add(t, x, number) for t, x in zip(totals, tensors)]
    accumulate_(totals, tensors, scale=given_scale)
    for got, expected in zip(totals, want):
        assert_same(got, expected)


@sweep("world", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 515])
@covering(1, ("dtype", DTYPES), ("out_dtype", DTYPES))
def test_sum_shards_is_a_tree_over_the_ranks(dtype, out_dtype, world, device):
    n = 3001 if world < 99 else 67
    received = rand(world * n, dtype, device).view(world, n)
    for scale in SCALES:
        given_scale, number = factor_of(scale, device)
        out = torch.full((n,), torch.nan, dtype=out_dtype, device=device)
        sum_shards(received, out, scale=given_scale)
        want = torch.empty(n)
        ref.sum_shards_ref(received.cpu().float(), want, number)
        assert_same(out, want.to(out_dtype))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)])
def test_sum_shards_fills_the_bins_of_its_result(out_dtype, device):
    """The norm of these bins has the bits of norm_bins of the result, and adds up over calls."""
    for n, offset in ((0, 0), (1, 0), (5, 3), (3001, 1), (9001, 2)):
        shards = [rand(n, torch.bfloat16, device, offset=offset) for _ in range(3)]
        shards[0][: n // 2] *= 2.0**-40
        out = torch.zeros(n + 1, dtype=out_dtype, device=device)[1:]
        plain = out.clone()
        bins = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
        sum_shards(shards, out, scale=0.5, bins=bins)
        sum_shards(shards, plain, scale=0.5)
        assert_same(out, plain)
        assert norm_from_bins(bins).norm.item() == norm_from_bins(norm_bins([out])).norm.item()
        sum_shards(shards, out, scale=0.5, bins=bins)
        twice = norm_from_bins(norm_bins([out, plain]))
        assert norm_from_bins(bins).norm.item() == twice.norm.item()
    shards[1][77] = torch.inf
    shards[2][8_700] = torch.nan
    bins.zero_()
    sum_shards(shards, out, bins=bins)
    assert bins[-2:].tolist() == norm_bins([out])[-2:].tolist()
    assert bins[-1] == 1
    assert norm_from_bins(bins).found_inf == 1


@sweep("kind", ["cpp", "cuda"])
def test_lists_of_mixed_types_in_one_call(kind, request, monkeypatch):
    device = request.getfixturevalue("cuda_device") if kind == "cuda" else "cpu"
    calls = []
    module = backend.cuda_kernels if kind == "cuda" else _C
    name = "bucket_copy_cuda" if kind == "cuda" else "bucket_copy"
    run = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(1) or run(*args))
    totals = [rand(n, d, device) for n in (5, 300) for d in DTYPES for _ in DTYPES]
    values = [rand(n, d, device) for n in (5, 300) for _ in DTYPES for d in DTYPES]
    want = [expected_add(t, x, 0.5) for t, x in zip(totals, values)]
    accumulate_(totals, values, scale=0.5)
    for got, expected in zip(totals, want):
        assert_same(got, expected)
    assert len(calls) == 1


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
        pack_(memory[a : a + n], [x], scale=0.37)
        assert_same(memory[a : a + n], expected_copy(x, to, torch.tensor(0.37).item()))
        want = expected_add(memory[a : a + n], x, 1.0)
        accumulate_([memory[a : a + n]], [x])
        assert_same(memory[a : a + n], want)
        out = memory[a : a + n]
        sum_shards([x, x.clone(), x], out)
        assert_same(out, (x.float() + x.float() + x.float()).to(to))
        assert (memory[:a] == 7).all()
        assert (memory[a + n :] == 7).all()


def test_special_values(device):
    """Infinities, nans, signed zeros, subnormals and overflow into float16's infinity."""
    x = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-40, -6e-8, 65519.0, 65520.0, 3e38, -3e38]
    ).to(device)
    for to in DTYPES:
        flat = torch.ones(x.numel(), dtype=to, device=device)
        pack_(flat, [x])
        assert_same(flat, x.cpu().to(to))
        sum_shards([x, x], flat)
        assert_same(flat, (x.cpu() + x.cpu()).to(to))


def test_strided_tensors(device):
    base = rand(600, torch.float32, device).view(20, 30)
    strided = [base.t(), base[:, ::2], base[3].expand(4, 30), base[:, 5]]
    flat = torch.empty(sum(t.numel() for t in strided), dtype=torch.bfloat16, device=device)
    pack_(flat, strided)
    assert_same(flat, torch.cat([t.flatten() for t in strided]).bfloat16())

    outs = [torch.zeros(30, 20, device=device).t(), torch.zeros(20, 8, device=device)[:, ::3]]
    flat = rand(660, torch.float32, device)
    unpack_(outs, flat)
    assert_same(outs[0], flat[:600].view(20, 30))
    assert_same(outs[1], flat[600:].view(20, 3))

    for total in (base.clone().t(), torch.zeros(30, 40, device=device)[:, ::2]):
        value = rand(600, torch.bfloat16, device).view(30, 20)
        want = (total + value.float()).cpu()
        accumulate_([total], [value])
        assert_same(total, want)
    row = rand(20, torch.float32, device)
    total = torch.zeros(30, 20, device=device)
    accumulate_([total], [row.expand(30, 20)])
    assert_same(total, row.expand(30, 20))


def test_in_place(device):
    """A tensor that already lies at its place, a value that is its total, out that is a shard."""
    flat = rand(300, torch.bfloat16, device)
    want = (flat.float() * 0.5).bfloat16()
    pack_(flat, [flat[:100], flat[100:]], scale=0.5)
    assert_same(flat, want)
    accumulate_([flat], [flat])
    assert_same(flat, (want.float() * 2).bfloat16())
    for own in range(3):
        shards = rand(3 * 3000, torch.float32, device).view(3, 3000)
        want = shards[0] + shards[1] + shards[2]
        sum_shards(shards, shards[own])
        assert_same(shards[own], want)


def test_offsets_leave_gaps_alone(device):
    flat = torch.full((20,), 7.0, device=device)
    x = [torch.arange(3.0, device=device), torch.arange(4.0, device=device)]
    pack_(flat, x, offsets=[16, 2])
    assert flat.tolist() == [7, 7, 0, 1, 2, 3, *[7] * 10, 0, 1, 2, 7]
    back = [torch.zeros(3, device=device), torch.zeros(4, device=device)]
    unpack_(back, flat, offsets=[16, 2], scale=2)
    assert [t.tolist() for t in back] == [[0, 2, 4], [0, 2, 4, 6]]


def test_empty_lists_and_tensors(device):
    pack_(torch.empty(0, device=device), [])
    unpack_([], torch.empty(0, device=device))
    accumulate_([], [])
    accumulate_([torch.zeros(0, device=device)], [torch.zeros(0, device=device)])
    sum_shards(torch.empty(2, 0, device=device), torch.empty(0, device=device))
    one = torch.ones((), device=device)
    accumulate_([one], [torch.full((), 2.0, device=device)])
    assert one.item() == 3


@st.composite
def lists(draw):
    sizes = draw(st.lists(st.integers(0, 70), min_size=1, max_size=6))
    dtypes = draw(
        st.lists(st.sampled_from(DTYPES), min_size=2 * len(sizes), max_size=2 * len(sizes))
    )
    offsets = draw(st.lists(st.integers(0, 20), min_size=len(sizes), max_size=len(sizes)))
    scale = draw(st.floats(-4, 4, width=32))
    return sizes, dtypes, offsets, scale, draw(st.integers(0, 2**31))


@given(lists())
def test_hypothesis_finds_nothing(case):
    sizes, dtypes, offsets, scale, seed = case
    torch.manual_seed(seed)
    values = [rand(n, d, offset=o) for n, d, o in zip(sizes, dtypes, offsets)]
    totals = [rand(n, d) for n, d in zip(sizes, dtypes[len(sizes) :])]
    want = [expected_add(t, v, scale) for t, v in zip(totals, values)]
    accumulate_(totals, values, scale=scale)
    for got, expected in zip(totals, want):
        assert_same(got, expected)
    flat = torch.empty(sum(sizes), dtype=dtypes[-1])
    pack_(flat, values, scale=scale)
    assert_same(flat, torch.cat([expected_copy(v, flat.dtype, scale) for v in values]))
    unpack_(totals, flat, scale=scale)
    for got, part in zip(totals, flat.split(sizes)):
        assert_same(got, expected_copy(part, got.dtype, scale))


def test_long_lists_take_as_few_launches_as_hold_them(cuda_device):
    """The descriptors of a launch fit its arguments; a longer list is cut, shards are refused."""
    for count in (1000, 2500):
        tensors = list(rand(3 * count, torch.float32, cuda_device).split(3))
        flat = torch.empty(3 * count, device=cuda_device)
        pack_(flat, tensors)
        assert_same(flat, torch.cat(tensors))
    shards, out = [torch.ones(1, device=cuda_device)] * 4088, torch.zeros(1, device=cuda_device)
    sum_shards(shards[1:], out)
    assert out.item() == 4087
    with pytest.raises(ValueError, match="expected at most 4087 shards, got world=4088"):
        sum_shards(shards, out)


X, LOW, FLAT = torch.ones(4), torch.ones(4).bfloat16(), torch.zeros(8)
BINS = torch.zeros(NORM_WORDS, dtype=torch.int64)
REFUSALS = [
    (r"pack_: expected a contiguous flat .* flat=\[2, 4\]", pack_, (FLAT.view(2, 4), [X]), {}),
    (r"unpack_: expected a contiguous flat .* stride=\(2,\)", unpack_, ([X], FLAT[::2]), {}),
    ("pack_: expected flat to hold the tensors exactly, got flat of 8", pack_, (FLAT, [X]), {}),
    ("got 1 offsets for 2 tensors", pack_, (FLAT, [X, X]), {"offsets": [0]}),
    (r"tensor inside flat .* offsets\[0\]=5 with 4", pack_, (FLAT, [X]), {"offsets": [5]}),
    (r"offsets\[0\]=-1", unpack_, ([X], FLAT), {"offsets": [-1]}),
    (r"pack_: expected fp32, .* tensors\[1\]=torch.float64", pack_, (FLAT, [X, X.double()]), {}),
    ("pack_: .* flat.0.=torch.int32", pack_, (FLAT.int(), [X, X]), {}),
    (r"one device, got tensors\[0\] on meta", unpack_, ([X.to("meta")], FLAT), {}),
    ("element on cpu, got scale=.2.", pack_, (FLAT, [X, X]), {"scale": torch.ones(2)}),
    ("got scale=.. torch.float64", pack_, (FLAT, [X, X]), {"scale": torch.tensor(1.0).double()}),
    ("on meta; pass a number", accumulate_, ([X], [X]), {"scale": torch.ones(1, device="meta")}),
    ("got 1 totals and 2 values", accumulate_, ([X], [X, X]), {}),
    (r"totals\[0\]=\[4\] values\[0\]=\[3\]", accumulate_, ([X], [X[:3]]), {}),
    (r"totals\[0\] expanded, stride=\(0,\)", accumulate_, ([X[:1].expand(4)], [LOW]), {}),
    (r"tensors\[0\] expanded", unpack_, ([X[:1].expand(8)], FLAT), {}),
    ("sum_shards: expected at least one shard", sum_shards, ([], X), {}),
    (r"shards of shape \[4\] .* received\[1\]=\[3\]", sum_shards, ([X, X[:3]], FLAT[:4]), {}),
    (r"received\[1\]=.* torch.bfloat16", sum_shards, ([X, LOW], FLAT[:4]), {}),
    (r"stride=\(2,\)", sum_shards, ([FLAT[::2]], X), {}),
    ("sum_shards: .* received.0. on meta", sum_shards, ([X.to("meta")], X), {}),
    *(("expected contiguous int64 bins", sum_shards, ([X], LOW.float()), {"bins": bad})
      for bad in (BINS[1:], BINS.int(), BINS.to("meta"))),
    ("expected at least one shard, got 0", _C.sum_shards, ([], X, 1.0, None, None, 1), {}),
    ("_C: expected shards of 3 contiguous elements of float32", _C.sum_shards,
     ([X[:3], X[:2]], torch.zeros(3), 1.0, None, None, 1), {}),
    *(("pack_: expected entry 0 to fit, got 4 elements", _C.bucket_copy,
       ("pack_", to, [X], offsets, [], False, 1.0, None, 1), {})
      for to, offsets in (([FLAT], [-1]), ([FLAT], [5]), ([FLAT[::2]], [0]))),
]  # fmt: skip


@sweep(("words", "op", "args", "options"), REFUSALS)
def test_what_is_refused(words, op, args, options):
    with pytest.raises(ValueError, match=words):
        op(*args, **options)


def test_overlap_is_refused(cuda_device, monkeypatch):
    for _ in range(2):  # the CUDA kernels' binding, then the CPU kernels'
        flat, x = torch.zeros(12, device=cuda_device), torch.ones(4, device=cuda_device)
        low = flat[:4].view(torch.bfloat16)[:4]
        for words, op, *args in (
            ("pack_: .* apart from each other, got entry 1 over entry 0", pack_, flat, [x, x]),
            ("accumulate_: .* got entry 2 over entry 0", accumulate_, [x, flat[:4], x],
             [flat[4:8], flat[8:], flat[4:8]]),
            ("got source 1 over destination 0; clone", pack_, flat[:8], [x, flat[:4]]),
            ("unpack_: .* got source 0 over destination 0", unpack_, [flat[1:5]], flat[:4]),
            ("got source 0 over destination 0", pack_, low, [flat[:4]]),
            ("got shard 1 partly over out", sum_shards, [x, flat[1:5]], flat[:4]),
            ("got shard 0 partly over out", sum_shards, [flat[:4]], low),
        ):  # fmt: skip
            options = {"offsets": [0, 3]} if "apart" in words else {}
            with pytest.raises(ValueError, match=words):
                op(*args, **options)
        unpack_([x, flat[4:8]], flat, offsets=[0, 0])  # sources may overlap
        monkeypatch.setattr(backend, "cuda_on_cpu", False)
