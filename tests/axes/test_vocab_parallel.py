"""vocabulary.py: a vocabulary in parts against the whole one."""

import pytest
import torch

from fastpar.axes.tensor.functional import TensorParallel
from fastpar.axes.tensor.vocabulary import vocab_embedding, vocab_linear, vocab_linear_cross_entropy
from fastpar.comm.transports import TorchCollectives
from fastpar.kernels import embedding, linear, linear_cross_entropy
from fastpar.sharding.placements import Shard
from fastpar.testing import run_ranks

N, C = 12, 16
SHARES = Shard(0, pad_to=4)
DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2}  # of the largest value
sequence = pytest.mark.parametrize("sp", [True, False], ids=["sp", "plain"])
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def make(sp):
    return TensorParallel(TorchCollectives(), sequence_parallel=sp)


def random(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)  # the default one is shared by threads
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(vocab_size, dtype, factor=1.0, ignored=()):
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, vocab_size, (N,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    targets[list(ignored)] = -100
    x, weight = random(N, C, seed=1, dtype=dtype), random(vocab_size, C, seed=2, dtype=dtype)
    return x * factor, weight, targets


def assert_close(got, expected, dtype, wide=None):
    assert got.dtype == (wide or dtype)
    assert got.shape == expected.shape
    assert got.isfinite().all()
    bound = DTYPES[dtype] * expected.abs().max().item()
    assert (got.double() - expected.double()).abs().max().item() <= bound


def joined(dweights, vocab_size):
    """All ranks' gradients; rows of padding have exactly none."""
    whole = torch.cat(dweights)
    assert not whole[vocab_size:].any()
    return whole[:vocab_size]


# The loss


def loss_of_a_rank(sp, vocab_size, dtype, factor, ignored, options, needed=(True, True)):
    tp = make(sp)
    x, weight, targets = inputs(vocab_size, dtype, factor, ignored)
    mine = tp.slice(x, 0).clone() if sp else x
    mine.requires_grad_(needed[0])
    share = SHARES.cut(weight, tp.rank, tp.size).requires_grad_(needed[1])
    loss = vocab_linear_cross_entropy(mine, share, targets, tp, vocab_size=vocab_size, **options)
    if any(needed):
        (loss * 3.0).backward()
    return loss.detach(), mine.grad, share.grad


def check_loss(sp, ranks, vocab_size, dtype, factor=1.0, ignored=(), **options):
    args = (sp, vocab_size, dtype, factor, ignored, options)
    results = run_ranks(loss_of_a_rank, ranks, *args)
    x, weight, targets = inputs(vocab_size, dtype, factor, ignored)
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    whole = {k: v for k, v in options.items() if k != "chunk_rows"}
    expected = linear_cross_entropy(x, weight, targets, **whole)
    (expected * 3.0).backward()
    losses, dxs, dweights = zip(*results)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for loss in losses:
        assert torch.equal(loss, losses[0])
        assert_close(loss, expected.detach(), dtype, wide)
    for dx in dxs:
        assert sp or torch.equal(dx, dxs[0])
    assert_close(torch.cat(dxs) if sp else dxs[0], x.grad, dtype)
    assert_close(joined(dweights, vocab_size), weight.grad, dtype)


@dtypes
@sequence
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_the_whole(ranks, sp, dtype):
    check_loss(sp, ranks, 30, dtype)


@pytest.mark.parametrize("chunk_rows", [1, 5, 12, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@sequence
def test_chunks_of_rows(sp, reduction, chunk_rows):
    check_loss(sp, 2, 30, torch.float64, chunk_rows=chunk_rows, reduction=reduction)


@sequence
@pytest.mark.parametrize(
    ("ignored", "reduction"), [((0,), "mean"), ((3, 4, 11), "mean"), (range(12), "sum")]
)
def test_ignored_targets(sp, ignored, reduction):
    check_loss(sp, 2, 30, torch.float64, ignored=ignored, chunk_rows=3, reduction=reduction)


def test_a_mean_of_no_targets_is_nan_and_has_no_gradient():
    for loss, dx, dweight in run_ranks(
        loss_of_a_rank, 2, True, 30, torch.float64, 1.0, range(12), {}
    ):
        assert loss.isnan()
        assert not dx.any()
        assert not dweight.any()


def test_another_ignore_index():
    def rank():
        tp = make(False)
        x, weight, targets = inputs(30, torch.float64)
        targets[4] = 7
        share = SHARES.cut(weight, tp.rank, tp.size)
        loss = vocab_linear_cross_entropy(x, share, targets, tp, vocab_size=30, ignore_index=7)
        whole = linear_cross_entropy(x, weight, targets, ignore_index=7)
        return (loss - whole).abs().item() < 1e-13

    assert run_ranks(rank, 2) == [True] * 2


@sequence
@pytest.mark.parametrize("vocab_size", [2, 4, 5, 13])
def test_small_vocabularies_leave_ranks_of_padding_only(sp, vocab_size):
    """4 ranks with 4 rows each: one, two or three have none, and one is cut."""
    check_loss(sp, 4, vocab_size, torch.float64)


@dtypes
def test_huge_logits(dtype):
    """Logits of about 1e4: exp() of them alone overflows."""
    check_loss(True, 2, 30, dtype, factor=3e3)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
@sequence
def test_only_the_gradients_that_are_needed(sp, needed):
    results = run_ranks(loss_of_a_rank, 2, sp, 30, torch.float64, 1.0, (), {}, needed)
    everything = run_ranks(loss_of_a_rank, 2, sp, 30, torch.float64, 1.0, (), {})
    for got, expected in zip(results, everything):
        assert torch.equal(got[0], expected[0])
        for grad, want, need in zip(got[1:], expected[1:], needed):
            assert torch.equal(grad, want) if need else grad is None


def test_logits_of_minus_infinity():
    """A class that cannot be has no gradient, on the ranks that have it and on the others."""

    def rank():
        tp = make(False)
        x = torch.ones(4, 2, dtype=torch.float64)
        weight = torch.tensor([[0.0, 1], [-float("inf"), 1], [1, 1], [2, 0]], dtype=torch.float64)
        targets = torch.tensor([0, 2, 3, 3])
        logits = (x @ weight.T).requires_grad_()
        expected = torch.nn.functional.cross_entropy(logits, targets)
        expected.backward()
        share = Shard(0).cut(weight, tp.rank, 2).requires_grad_()
        loss = vocab_linear_cross_entropy(x, share, targets, tp, vocab_size=4)
        loss.backward()
        dweight = Shard(0).cut(logits.grad.T @ x, tp.rank, 2)
        return (loss - expected).abs().item(), (share.grad - dweight).abs().max().item()

    for error, of_dweight in run_ranks(rank, 2):
        assert error < 1e-14
        assert of_dweight < 1e-14


@sequence
def test_without_gradients_nothing_is_kept(sp):
    def rank():
        tp = make(sp)
        x, weight, targets = inputs(30, torch.float32)
        share = SHARES.cut(weight, tp.rank, tp.size).requires_grad_()
        mine = (tp.slice(x, 0) if sp else x).clone().requires_grad_()
        with torch.no_grad():
            quiet = vocab_linear_cross_entropy(mine, share, targets, tp, vocab_size=30)
        loud = vocab_linear_cross_entropy(mine, share, targets, tp, vocab_size=30)
        assert not quiet.requires_grad
        return torch.equal(quiet, loud.detach())

    assert run_ranks(rank, 2) == [True] * 2


def test_one_exchange_of_twelve_bytes_a_row_and_chunk():
    sent = []

    class Recorded(TorchCollectives):
        def _all_gather(self, out, x, tag):
            sent.append(("all_gather", x.numel() * x.element_size()))
            return super()._all_gather(out, x, tag)

        def _all_reduce(self, x, mean, tag):
            sent.append(("all_reduce", x.numel() * x.element_size()))
            return super()._all_reduce(x, mean, tag)

    def rank():
        tp = TensorParallel(Recorded(), sequence_parallel=False)
        x, weight, targets = inputs(30, torch.bfloat16)
        share = SHARES.cut(weight, 0, 1).requires_grad_()
        x.requires_grad_()
        loss = vocab_linear_cross_entropy(x, share, targets, tp, vocab_size=30, chunk_rows=5)
        forward = list(sent)
        loss.backward()
        return forward, sent[len(forward) :]

    forward, backward = run_ranks(rank, 1)[0]
    assert forward == [("all_gather", 12 * rows) for rows in (5, 5, 2)]
    assert backward == [("all_reduce", N * C * 2)]


@sequence
def test_no_tokens(sp):
    def rank():
        tp = make(sp)
        x = torch.zeros(0, C, requires_grad=True)
        weight = torch.ones(4, C, requires_grad=True)
        targets = torch.zeros(0, dtype=torch.int64)
        loss = vocab_linear_cross_entropy(x, weight, targets, tp, vocab_size=8, reduction="sum")
        loss.backward()
        return loss.item(), x.grad.shape[0], weight.grad.abs().max().item()

    assert run_ranks(rank, 2) == [(0.0, 0, 0.0)] * 2


def refused(match, error=ValueError, sp=False, **change):
    def rank():
        tp = make(sp)
        x, weight, targets = inputs(8, torch.float32)
        call = {"x": x, "weight": weight[:4], "targets": targets, "vocab_size": 8, **change}
        with pytest.raises(error, match=match):
            vocab_linear_cross_entropy(tp=tp, **call)

    run_ranks(rank, 2)


def test_a_reduction_that_there_is_not():
    refused(
        r"vocab_linear_cross_entropy: expected reduction mean or sum, got reduction=none; compute "
        r"losses of single rows from vocab_linear's logits",
        reduction="none",
    )


@pytest.mark.parametrize(
    ("change", "sp", "match"),
    [
        ({"targets": torch.zeros(5, dtype=torch.int64)}, False, r"each of 12 tokens, .*=\[5\]"),
        ({"targets": torch.zeros(12, dtype=torch.int64)}, True, r"each of 24 tokens, .*=\[12\]"),
        ({"weight": torch.ones(4, 3)}, False, r"got x=\[12, 16\] weight=\[4, 3\]"),
        ({"weight": torch.ones(4)}, False, r"weight=\[4\] .*pass this rank's rows of the weight"),
    ],
)
def test_shapes_that_do_not_fit(change, sp, match):
    refused(match, sp=sp, **change)


@pytest.mark.parametrize("target", [8, -1])
def test_targets_out_of_range(target):
    refused(
        rf"vocab_linear_cross_entropy: .*{target}",
        targets=torch.full((12,), target, dtype=torch.int64),
    )


def test_second_derivatives_are_refused():
    def rank():
        x, weight, targets = inputs(8, torch.float32)
        x.requires_grad_()
        loss = vocab_linear_cross_entropy(x, weight, targets, make(False), vocab_size=8)
        with pytest.raises(RuntimeError, match=r"linear_cross_entropy"):
            torch.autograd.grad(loss, x, create_graph=True)

    run_ranks(rank, 1)


# The embedding


def embedding_of_a_rank(sp, dtype, idx, vocab_size):
    tp = make(sp)
    weight = random(vocab_size, C, seed=2, dtype=dtype)
    share = SHARES.cut(weight, tp.rank, tp.size).requires_grad_()
    x = vocab_embedding(idx, share, tp)
    dy = random(idx.numel(), C, seed=4, dtype=dtype)
    x.backward(tp.slice(dy, 0) if sp else dy.view_as(x))
    return x.detach(), share.grad


@dtypes
@sequence
@pytest.mark.parametrize(("ranks", "vocab_size"), [(2, 30), (3, 30), (4, 5)])
def test_the_embedding_is_that_of_the_whole(ranks, vocab_size, sp, dtype):
    """Its sums have one term that is not 0: the same bits."""
    idx = torch.randint(0, vocab_size, (2, 6), generator=torch.Generator().manual_seed(7))
    idx[0, :2] = torch.tensor([0, vocab_size - 1])
    results = run_ranks(embedding_of_a_rank, ranks, sp, dtype, idx, vocab_size)
    weight = random(vocab_size, C, seed=2, dtype=dtype).requires_grad_()
    expected = embedding(idx, weight)
    expected.backward(random(12, C, seed=4, dtype=dtype).view_as(expected))
    got = torch.cat([x for x, _ in results]).view_as(expected) if sp else results[0][0]
    assert torch.equal(got, expected.detach())
    assert all(torch.equal(x, results[0][0]) or sp for x, _ in results)
    dweight = joined([grad for _, grad in results], vocab_size)
    assert_close(dweight, weight.grad, dtype)


def test_tokens_that_the_ranks_do_not_divide():
    def rank():
        message = r"scatter: expected tp=2 to divide dimension 0, got x=\[3, 16\]"
        with pytest.raises(ValueError, match=message):
            vocab_embedding(torch.zeros(1, 3, dtype=torch.int64), torch.ones(4, C), make(True))

    run_ranks(rank, 2)


# The logits


def logits_of_a_rank(sp, dims):
    tp = make(sp)
    x, weight, _ = inputs(30, torch.float64)
    x = x if dims == 2 else x.view(2, 6, C)
    mine = (tp.slice(x, -2) if sp else x).clone().requires_grad_()
    share = SHARES.cut(weight, tp.rank, tp.size).requires_grad_()
    logits = vocab_linear(mine, share, tp)
    logits[..., :30].square().sum().backward()
    return logits.detach(), mine.grad, share.grad


@pytest.mark.parametrize("dims", [2, 3])
@sequence
def test_logits_are_those_of_the_whole(sp, dims):
    results = run_ranks(logits_of_a_rank, 2, sp, dims)
    x, weight, _ = inputs(30, torch.float64)
    x, weight = (x if dims == 2 else x.view(2, 6, C)).requires_grad_(), weight.requires_grad_()
    expected = linear(x, weight)
    expected.square().sum().backward()
    for logits, dx, _ in results:
        assert torch.equal(logits, results[0][0])
        assert_close(logits[..., :30], expected.detach(), torch.float64)
        assert sp or torch.equal(dx, results[0][1])
    dxs = [dx for _, dx, _ in results]
    assert_close(torch.cat(dxs, -2) if sp else dxs[0], x.grad, torch.float64)
    assert_close(joined([g for _, _, g in results], 30), weight.grad, torch.float64)


# Under torch's machinery


def opchecked():
    tp = make(True)
    x, weight, targets = inputs(8, torch.float32)
    of = torch.ops.fastpar
    for needed in ((True, True), (True, False), (False, False)):
        tensors = [t.clone().requires_grad_(n) for t, n in zip((x, weight), needed)]
        args = (*tensors, targets, 8, -100, "mean", 5, *needed, tp.number)
        torch.library.opcheck(of.vocab_linear_cross_entropy.default, args)
    torch.library.opcheck(
        of.vocab_linear_cross_entropy_dx.default, (x, torch.tensor(2.0), tp.number)
    )


def test_opcheck():
    """On one rank: its checks run ops a number of times that other ranks would not follow."""
    run_ranks(opchecked, 1)


def compiled():
    torch._dynamo.reset()
    tp = make(True)
    x, weight, targets = inputs(30, torch.float32)
    idx = targets.view(2, 6)

    def head(x, share, idx):
        x = x + vocab_embedding(idx, share, tp)
        return vocab_linear_cross_entropy(x, share, idx, tp, vocab_size=30)

    results = []
    for run in (head, torch.compile(head, backend="aot_eager", fullgraph=True)):
        mine = tp.slice(x, 0).clone().requires_grad_()
        share = SHARES.cut(weight, tp.rank, tp.size).requires_grad_()
        loss = run(mine, share, idx)
        loss.backward()
        results.append((loss.detach(), mine.grad, share.grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow  # test_tp_compile.py compiles the whole model
def test_embedding_and_loss_compile_without_graph_breaks():
    assert run_ranks(compiled, 2, backend="gloo", timeout_s=120.0) == [True, True]
