"""Messages of few bits: what they hold, what sums of them are, what is left behind."""

import math

import torch
import torch.distributed as dist
from cells import covering, sweep

from fastpar.comm.transports import TorchCollectives
from fastpar.comm.wires import FORMATS, CompressedGathers, CompressedSums, NodeSums, Unsent, Worker
from fastpar.testing import run_ranks

SIZES = (0, 1, 63, 127, 128, 255, 256, 257, 1000)


def values(rank, n, step=0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, generator=generator) * 2.0 ** (rank % 3 - 4)


@sweep("name", list(FORMATS))
def test_a_message_holds_what_was_encoded(name):
    """Whole numbers times a power of two that are in the grid of every format come back as bits;
    others within the distance of two codes (int8: max / 127, int4: max / 7, bf16: 2^-8 of a
    value)."""
    form = FORMATS[name]
    for n in SIZES:
        message = torch.full((form.nbytes(n),), 255, dtype=torch.uint8)
        exact = torch.randint(-7, 8, (n,)).float() * 0.25
        exact[:: form.block or 1] = 0.25 * (127 if name == "int8" else 7)  # scale 0.25
        form.encode(exact, message, seed=3)
        assert torch.equal(form.decode(message, n), exact)
        x = values(1, n)
        form.encode(x, message, seed=3, index=64)
        rows = torch.nn.functional.pad(x, (0, -n % (form.block or 1))).view(-1, form.block or 1)
        top = rows.abs().amax(1, keepdim=True).expand_as(rows).reshape(-1)[:n]
        step = {"int8": top / 127, "int4": top / 7, "bf16": x.abs() * 2**-8}[name]
        assert ((form.decode(message, n) - x).abs() <= step * 1.0001).all()
        assert form.nbytes(n) >= n * form.bits / 8


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


def sums(name, n, steps, exact, feedback):
    """Of steps: the all_reduce and reduce_scatter results, the true means, what is left."""
    w = torch.distributed.get_world_size()
    error = torch.zeros(n) if feedback else None
    whole = make(CompressedSums, name, n, exact=exact, error=error)
    parts = make(CompressedSums, name, w * n, leaves_rest=feedback)
    unsent = Unsent(parts, slice(whole.rank * n, (whole.rank + 1) * n), w * n, [slice(0, w * n)])
    kept, got = torch.zeros(w * n), []
    for step in range(steps):
        x = values(whole.rank, n, step)
        whole.all_reduce(x, mean=True)
        unsent.open(kept)
        kept += values(whole.rank, w * n, step)
        out = torch.empty(n)
        parts.reduce_scatter(out, kept, mean=True)
        unsent.close()
        if not feedback:
            kept.zero_()
        got.append((x, out))
    unsent.open(kept)
    return got, error, kept


SUMS = [("int8", 1000), ("int4", 2048), ("bf16", 300), ("int4", 1)]


@covering(1, ("ranks", [1, 2, 3, 4]), (["name", "n"], SUMS))
def test_sums_of_any_size_and_world(ranks, name, n):
    """The mean is within the distance of two codes of the largest that took part, twice; two runs
    are the same, to the bit."""
    exact = min(n, 7)
    found, again = (run_ranks(sums, ranks, name, n, 2, exact, False) for _ in range(2))
    share = {"int8": 1 / 127, "int4": 1 / 7, "bf16": 2**-8}[name]
    for step in range(2):
        mean = torch.stack([values(r, n, step) for r in range(ranks)]).mean(0)
        both = torch.stack([values(r, ranks * n, step) for r in range(ranks)])
        for rank, (got, _, _) in enumerate(found):
            x, out = got[step]
            assert all(map(torch.equal, got[step], again[rank][0][step]))
            assert torch.equal(x, found[0][0][step][0])  # the same on all ranks
            torch.testing.assert_close(x[n - exact :], mean[n - exact :])  # as it was
            bound = 2 * share * both.abs().max() + 1e-6
            assert ((x - mean).abs() <= bound).all()
            assert ((out - both.mean(0)[rank * n : (rank + 1) * n]).abs() <= bound).all()


@sweep("name", list(FORMATS))
def test_what_was_sent_and_what_is_left_are_the_gradients(name):
    """Exactly, in the grid of the codes: the sum of means over the steps, times the ranks, and what
    every rank has left are the sum of what they gave. Each step rounds x + error and the new error
    (2^-24 of |x + error| <= 2 max|x| twice), on each of two ranks; a mean is rounded as well."""
    n, steps, ranks = 512, 20, 2
    found = run_ranks(sums, ranks, name, n, steps, 0, True)
    true = sum(values(r, n, s).double() for r in range(ranks) for s in range(steps))
    sent = sum(got[0].double() for got in found[0][0]) * ranks
    slices = [slice(r * n // ranks, (r + 1) * n // ranks) for r in range(ranks)]
    left = torch.zeros(n).double()
    for r, (_, error, _) in enumerate(found):
        for owner, place in enumerate(slices):  # the owner's place is that of the means
            left[place] += error[place].double() * (ranks if owner == r else 1)
    bound = 8 * ranks * steps * 2.0**-24 * 4
    assert (sent + left - true).abs().max() <= bound
    for rank, (got, _, _) in enumerate(found):
        mine = slice(rank * n, (rank + 1) * n)
        gave = sum(
            values(r, ranks * n, s)[mine].double() for r in range(ranks) for s in range(steps)
        )
        rest = sum(kept[mine].double() for _, _, kept in found)
        assert (sum(g[1].double() for g in got) * ranks + rest - gave).abs().max() <= bound
    plain = run_ranks(sums, ranks, name, n, steps, 0, False)
    lost = sum(got[0].double() for got in plain[0][0]) * ranks - true
    assert (sent - true).norm() < 0.7 * lost.norm()


def node_sums(name, n, steps, in_place):
    """What two nodes of two ranks get in each step, and what is left with this rank."""
    rank = dist.get_rank()
    pairs = [dist.new_subgroups_by_enumeration(g)[0] for g in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    nodes = tuple(map(TorchCollectives, pairs))
    kept = None if in_place else torch.zeros(n)
    how = {"error": kept, "leaves_rest": in_place, "key": (0, rank)}
    inner = TorchCollectives()
    wire = NodeSums(inner, FORMATS[name], Worker(inner), nodes=nodes, **how)
    own, x, got = slice(rank * n // 4, (rank + 1) * n // 4), torch.zeros(n), []
    for step in range(steps):
        x[own] = 0.0
        x = x + values(rank, n, step) if in_place else values(rank, n, step)
        out = torch.empty(n // 4)
        wire.reduce_scatter(out, x, mean=True)
        got.append(out)
    left = x if in_place else kept
    left[own] = 0.0
    return got, left, wire.sent_bytes("reduce_scatter", 4 * n, n)


@covering(1, ("name", list(FORMATS)), ("in_place", [True, False]))
def test_what_two_levels_sent_and_left_are_the_gradients(name, in_place):
    """As above; a sum of a node is encoded again, and what that loses stays with its rank."""
    n, steps, ranks = 1024, 20, 4
    found, again = (run_ranks(node_sums, ranks, name, n, steps, in_place) for _ in range(2))
    true = sum(values(r, n, s).double() for r in range(ranks) for s in range(steps))
    sent = torch.cat([sum(out.double() for out in got) for got, *_ in found]) * ranks
    left = sum(rest.double() for _, rest, _ in found)
    bound = 8 * ranks * steps * 2.0**-24 * 4
    assert (sent + left - true).abs().max() <= bound
    assert left.any()
    assert all(torch.equal(x, y) for (a, *_), (b, *_) in zip(found, again) for x, y in zip(a, b))
    assert {n_bytes for *_, n_bytes in found} == {3 * FORMATS[name].nbytes(n // ranks)}  # 2 + 1


def broken(name):
    c = make(CompressedSums, name, 1024)
    x = torch.ones(1024)
    if c.rank == 1:
        x[[3, 700]] = torch.tensor([torch.inf, torch.nan])
    y = x.clone()
    c.all_reduce(y, mean=True)
    out = torch.empty(512)
    c.reduce_scatter(out, x.clone())
    left = make(CompressedSums, name, 1024, leaves_rest=True)
    left.reduce_scatter(torch.empty(512), x)
    return y, out, x[(1 - c.rank) * 512 :][:512]


@sweep("name", list(FORMATS))
def test_what_is_not_finite_arrives(name):
    block = FORMATS[name].block or 1
    for rank, (y, out, left) in enumerate(run_ranks(broken, 2, name)):
        bad = {3, 700}
        for at in sorted(bad):
            first = at // block * block
            assert not y[first : first + block].isfinite().any()
        assert y.isfinite().sum() == 1024 - 2 * block
        assert not out[(3, 700 - 512)[rank]].isfinite()
        assert left.isfinite().all()  # nothing of it stays


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
