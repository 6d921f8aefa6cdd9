"""Messages of few bits: what they hold, and what sums of them are."""

import math

import torch
from cells import covering, sweep

from fastpar.comm.transports import TorchCollectives
from fastpar.comm.wires import FORMATS, CompressedGathers, CompressedSums, Worker
from fastpar.testing import run_ranks

SIZES = (0, 1, 63, 127, 128, 255, 256, 257, 1000)


def values(rank, n, step=0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, generator=generator) * 2.0 ** (rank % 3 - 4)


@sweep("name", list(FORMATS))
def test_a_message_holds_what_was_encoded(name):
    """Whole numbers times a power of two that are in the grid of every format come back as bits;
    others within the distance of two codes (int8: max / 127, bf16: 2^-8 of a value)."""
    form = FORMATS[name]
    for n in SIZES:
        message = torch.full((form.nbytes(n),), 255, dtype=torch.uint8)
        exact = torch.randint(-7, 8, (n,)).float() * 0.25
        exact[:: form.block or 1] = 0.25 * 127  # scale 0.25
        form.encode(exact, message, seed=3)
        assert torch.equal(form.decode(message, n), exact)
        x = values(1, n)
        form.encode(x, message, seed=3, index=64)
        rows = torch.nn.functional.pad(x, (0, -n % (form.block or 1))).view(-1, form.block or 1)
        top = rows.abs().amax(1, keepdim=True).expand_as(rows).reshape(-1)[:n]
        step = {"int8": top / 127, "bf16": x.abs() * 2**-8}[name]
        assert ((form.decode(message, n) - x).abs() <= step * 1.0001).all()
        assert form.nbytes(n) >= n * form.dtype.itemsize


def test_int8_is_unbiased_over_a_thousand_draws():
    """The mean of n draws that are at most one step s from x has a standard error of at most
    s / 2 / sqrt(n); four of them. Rounding to nearest fails it."""
    form, draws, n = FORMATS["int8"], 1000, 256
    x = values(0, n)
    message, total = torch.empty(form.nbytes(n), dtype=torch.uint8), torch.zeros(n).double()
    for seed in range(draws):
        form.encode(x, message, seed=seed)
        total += form.decode(message, n)
    bound = 4 * (x.abs().max() / 127).double() / 2 / math.sqrt(draws)
    assert ((total / draws - x.double()).abs() <= bound + 1e-7 * x.abs()).all()
    form.encode(x, message, seed=None)
    assert ((form.decode(message, n).double() - x.double()).abs() > bound).any()


def make(kind, name, n, **how):
    inner = TorchCollectives()
    return kind(inner, FORMATS[name], Worker(inner), key=(5, inner.rank), **how)


def sums(name, n, steps, exact):
    """The all_reduce and reduce_scatter results of steps."""
    w = torch.distributed.get_world_size()
    whole, parts = (make(CompressedSums, name, n, exact=e) for e in (exact, 0))
    got = []
    for step in range(steps):
        x, out = values(whole.rank, n, step), torch.empty(n)
        whole.all_reduce(x, mean=True)
        parts.reduce_scatter(out, values(whole.rank, w * n, step), mean=True)
        got.append((x, out))
    return got


SUMS = [("int8", 1000), ("int8", 2048), ("bf16", 300), ("int8", 1)]


@covering(1, ("ranks", [1, 2, 3, 4]), (["name", "n"], SUMS))
def test_sums_of_any_size_and_world(ranks, name, n):
    """The mean is within the distance of two codes of the largest that took part, twice; two runs
    are the same, to the bit."""
    exact = min(n, 7)
    found, again = (run_ranks(sums, ranks, name, n, 2, exact) for _ in range(2))
    share = {"int8": 1 / 127, "bf16": 2**-8}[name]
    for step in range(2):
        mean = torch.stack([values(r, n, step) for r in range(ranks)]).mean(0)
        both = torch.stack([values(r, ranks * n, step) for r in range(ranks)])
        for rank, got in enumerate(found):
            x, out = got[step]
            assert all(map(torch.equal, got[step], again[rank][step]))
            assert torch.equal(x, found[0][step][0])  # the same on all ranks
            torch.testing.assert_close(x[n - exact :], mean[n - exact :])  # as it was
            bound = 2 * share * both.abs().max() + 1e-6
            assert ((x - mean).abs() <= bound).all()
            assert ((out - both.mean(0)[rank * n : (rank + 1) * n]).abs() <= bound).all()


def broken(name):
    c = make(CompressedSums, name, 1024)
    x = torch.ones(1024)
    if c.rank == 1:
        x[[3, 700]] = torch.tensor([torch.inf, torch.nan])
    y = x.clone()
    c.all_reduce(y, mean=True)
    out = torch.empty(512)
    c.reduce_scatter(out, x)
    return y, out


@sweep("name", list(FORMATS))
def test_what_is_not_finite_arrives(name):
    block = FORMATS[name].block or 1
    for rank, (y, out) in enumerate(run_ranks(broken, 2, name)):
        bad = {3, 700}
        for at in sorted(bad):
            first = at // block * block
            assert not y[first : first + block].isfinite().any()
        assert y.isfinite().sum() == 1024 - 2 * block
        assert not out[(3, 700 - 512)[rank]].isfinite()


def gathers(name, dtype):
    inner = TorchCollectives()
    c = CompressedGathers(inner, Worker(inner), FORMATS[name])
    x = values(c.rank, 300).to(dtype)
    out, exact = (torch.empty(c.world_size * 300, dtype=dtype) for _ in range(2))
    c.all_gather(out, x)
    c.exact.all_gather(exact, x)
    return out, exact


@sweep("name", ["int8", "bf16"])
def test_all_ranks_gather_the_same_rounded_values(name):
    for dtype in (torch.float32, torch.bfloat16):
        found = run_ranks(gathers, 3, name, dtype)
        whole = torch.cat([values(r, 300).to(dtype) for r in range(3)])
        for out, exact in found:
            assert torch.equal(out, found[0][0])
            assert torch.equal(exact, whole)
            assert torch.equal(out, whole) == (name == "bf16" and dtype == torch.bfloat16)
            top = whole.float().view(3, 300).abs().amax(1).repeat_interleave(300)
            assert ((out.float() - whole.float()).abs() <= top / 127).all()


def test_bytes_are_those_that_are_sent():
    """As the meter sees what the transport is given, and as is announced."""

    def rank():
        inner, seen = TorchCollectives(), []
        inner.observers += (lambda c, op, n, begin: (seen.append((op, n)), begin())[1],)
        c = CompressedSums(inner, FORMATS["int8"], Worker(inner))
        c.reduce_scatter(torch.empty(512), torch.zeros(1024))
        return seen, c.sent_bytes("reduce_scatter", 4096, 1024)

    assert run_ranks(rank, 2) == [([("all_to_all", 528)], 528)] * 2  # codes, two scales, padding
