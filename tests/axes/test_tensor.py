"""Layers and vocabularies in parts: what ranks compute together is what one rank computes of the
whole, and what is under way beside which product."""

import copy
import functools
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.axes.tensor import functional
from fastpar.axes.tensor.vocabulary import vocab_embedding, vocab_linear_cross_entropy
from fastpar.comm.transports import TorchCollectives
from fastpar.kernels import linear_cross_entropy
from fastpar.kernels.linear import matmul
from fastpar.sharding.placements import Partial, Replicate, Shard
from fastpar.testing import run_ranks

RANKS = 2
# Of the largest value: sums of at most 30 terms, which are 10 times as large before they cancel;
# each term is rounded, in 16 bits (added up in fp32) the result alone.
DTYPES = {
    torch.float64: 10 * 30 * 2.0**-53,
    torch.float32: 10 * 30 * 2.0**-24,
    torch.bfloat16: 10 * 2.0**-8,
}


def make(sequence_parallel=True):
    return functional.TensorParallel(TorchCollectives(), sequence_parallel=sequence_parallel)


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)  # the default one is shared by threads
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def slices(whole, dim):
    return whole.chunk(RANKS, dim)


def assert_close(got, expected, dtype, wide=None):
    assert got.dtype == (wide or dtype)
    assert got.shape == expected.shape
    assert got.isfinite().all()
    bound = DTYPES[dtype] * expected.abs().max().item()
    assert (got.double() - expected.double()).abs().max().item() <= bound


# Conjugate operators: whole integers, so that sums are exact
def ints(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, shape, generator=generator).double()


SHAPES = [((4, 6), 0), ((4, 6), -2), ((4, 6), -1), ((3, 4, 6), 1), ((2, 4, 6), 0), ((2, 4, 6), -1)]
# Whether x and dy are parts of sums, and which of x and y is a slice.
OPERATORS = {
    functional.copy_to: (False, True, ""),
    functional.reduce_from: (True, False, ""),
    functools.partial(functional.gather, partial=False): (False, False, "x"),
    functools.partial(functional.gather, partial=True): (False, True, "x"),
    functools.partial(functional.scatter, partial=False): (False, False, "y"),
    functools.partial(functional.scatter, partial=True): (True, False, "y"),
}


@sweep("strided", [False, True])
@sweep(("shape", "dim"), SHAPES)
@sweep("op", OPERATORS)
def test_operators_and_their_adjoints(op, shape, dim, strided):
    """What goes in is the same on all ranks, a part of a sum, or a slice; so is what comes out."""
    sums_x, sums_dy, sliced = OPERATORS[op]

    def of_rank(side, seed, rank, summed):
        x = ints(*shape, seed=seed + rank * summed)
        x = slices(x, dim)[rank] if side == sliced else x
        return x.transpose(0, -1).contiguous().transpose(0, -1) if strided else x

    def adjoint():
        tp = make()
        x = of_rank("x", 9, tp.rank, sums_x).requires_grad_()
        before = x.detach().clone()
        y = op(x, dim, tp) if sliced else op(x, tp)
        assert torch.equal(x, before)  # a sum in place would change what others still read
        assert op is functional.copy_to or y.data_ptr() != x.data_ptr()
        assert y.is_contiguous() or op is functional.copy_to or sliced == "x"
        y.backward(of_rank("y", 20, tp.rank, sums_dy))
        return y.detach(), x.grad

    def whole(seed, summed):
        return sum(ints(*shape, seed=seed + rank) for rank in range(RANKS if summed else 1))

    y, dx = whole(9, sums_x), whole(20, sums_dy)
    for rank, (found, grad) in enumerate(run_ranks(adjoint, RANKS)):
        assert torch.equal(found, slices(y, dim)[rank] if sliced == "y" else y)
        assert torch.equal(grad, slices(dx, dim)[rank] if sliced == "x" else dx)


C, FEATURES = 6, 8
LINEAR = {"column": functional.column_linear, "row": functional.row_linear}


def whole_inputs(dtype, dims):
    """x, weight and bias of a column layer and of a row layer behind it, dy."""
    rows = (4,) if dims == 2 else (3, 4)
    shapes = ((*rows, C), (FEATURES, C), (FEATURES,), (C, FEATURES), (C,), (*rows, C))
    return [random(*shape, seed=1 + i, dtype=dtype) for i, shape in enumerate(shapes)]


sequence = sweep("sp", [True, False])


@sequence
def test_there_may_be_no_tokens_and_no_ranks(sp):
    def rank():
        tp = make(sp)
        x = torch.zeros(0, C, requires_grad=True)
        w, v = torch.ones(4, C, requires_grad=True), torch.ones(C, 4, requires_grad=True)
        y = functional.row_linear(functional.column_linear(x, w, None, tp), v, None, tp)
        y.sum().backward()
        assert (list(y.shape), w.grad.any(), v.grad.any()) == ([0, C], False, False)

    run_ranks(rank, 2)
    x, w, b, *_ = whole_inputs(torch.float32, 3)
    for linear in LINEAR.values():  # without ranks
        assert torch.equal(linear(x, w, b), F.linear(x, w, b))


class Recorded(TorchCollectives):
    """Notes when an operation begins and when it is waited for."""

    def __init__(self, log):
        super().__init__()
        self.log = log


def noting(name, begin):
    def noted(self, *args):
        self.log.append(name)
        handle = begin(self, *args)
        return SimpleNamespace(
            wait=lambda timeout_s=None: self.log.append(f"wait {name}") or handle.wait(timeout_s)
        )

    return noted


for name in ("all_reduce", "reduce_scatter", "all_gather"):
    setattr(Recorded, f"_{name}", noting(name, getattr(TorchCollectives, f"_{name}")))


def order(kind, sp, needed):
    """Collectives and products of forward and backward, as this rank calls them."""
    log = []
    tp = functional.TensorParallel(Recorded(log), sequence_parallel=sp)
    x, w, b, v, c, _ = whole_inputs(torch.float32, 2)
    tensors = (x, w, b) if kind == "column" else (random(4, FEATURES), v, c)
    tensors = [t.requires_grad_(n) for t, n in zip(tensors, needed)]

    def noted(a, b, **kwargs):
        log.append(f"product {list(a.shape)} {list(b.shape)}")
        return matmul(a, b, **kwargs)

    with mock.patch.object(functional, "matmul", noted):
        y = LINEAR[kind](*tensors, tp)
        log.append("backward")
        y.sum().backward()
    return log


FORWARD = {"column": "product [4, 6] [6, 8]", "row": "product [4, 8] [8, 6]"}
DX = {"column": "product [4, 8] [8, 6]", "row": "product [4, 6] [6, 8]"}
DW = {"column": "product [8, 4] [4, 6]", "row": "product [6, 4] [4, 8]"}
ORDERS = {
    ("column", False): "F backward X all_reduce W wait-all_reduce",
    ("column", True): "all_gather wait-all_gather F backward all_gather X reduce_scatter "
    "wait-all_gather W wait-reduce_scatter",
    ("row", False): "F all_reduce wait-all_reduce backward X W",
    ("row", True): "F reduce_scatter wait-reduce_scatter backward all_gather wait-all_gather X W",
}


def test_sums_are_under_way_during_the_weights_gradient():
    """One rank, so that shapes are whole: the order is every rank's. What is not needed is not
    sent: a frozen weight needs no input once more, a first layer no gradient of its input."""
    for (kind, sp), words in ORDERS.items():
        of = {"F": FORWARD[kind], "X": DX[kind], "W": DW[kind]}
        expected = [of.get(word, word.replace("-", " ")) for word in words.split()]
        assert run_ranks(order, 1, kind, sp, (True, True, True)) == [expected]
    for needed, expected in (
        ((True, False, True), [DX["column"], "reduce_scatter", "wait reduce_scatter"]),
        ((False, True, False), ["all_gather", "wait all_gather", DW["column"]]),
        ((False, False, True), []),
    ):
        [log] = run_ranks(order, 1, "column", True, needed)
        assert log[log.index("backward") + 1 :] == expected


N, WIDTH = 12, 16
SHARES = Shard(0, pad_to=4)


def inputs(vocab_size, dtype, factor=1.0, ignored=()):
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, vocab_size, (N,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    targets[list(ignored)] = -100
    x, weight = (
        random(N, WIDTH, seed=1, dtype=dtype),
        random(vocab_size, WIDTH, seed=2, dtype=dtype),
    )
    return x * factor, weight, targets


def padded_off(dweights, vocab_size):
    """All ranks' gradients; rows of padding have exactly none."""
    whole = torch.cat(dweights)
    assert not whole[vocab_size:].any()
    return whole[:vocab_size]


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


def check_loss(sp, ranks, vocab_size, dtype=torch.float64, factor=1.0, ignored=(), **options):
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
    assert_close(padded_off(dweights, vocab_size), weight.grad, dtype)


LOSSES = [  # ranks, vocabulary, options
    *((ranks, 30, {}) for ranks in (1, 2, 3, 4)),
    *((2, 30, {"chunk_rows": n}) for n in (1, 5, 12, 100)),
    *((2, 30, {"chunk_rows": n, "reduction": "sum"}) for n in (1, 5, 12, 100)),
    (2, 30, {"ignored": (0,)}),
    (2, 30, {"ignored": (3, 4, 11), "chunk_rows": 3}),
    (2, 30, {"ignored": range(12), "chunk_rows": 3, "reduction": "sum"}),
    # Logits of about 1e4: exp() of them alone overflows.
    *((2, 30, {"dtype": dtype, "factor": factor}) for dtype in DTYPES for factor in (1.0, 3e3)),
    # 4 ranks with 4 rows each: one, two or three have padding alone, and one is cut.
    *((4, vocab_size, {}) for vocab_size in (2, 4, 5, 13)),
]  # fmt: skip


@sequence
@sweep(("ranks", "vocab_size", "options"), LOSSES)
def test_loss_and_gradients_are_those_of_the_whole(ranks, vocab_size, sp, options):
    check_loss(sp, ranks, vocab_size, **options)


def test_other_targets_and_logits_of_minus_infinity():
    """A mean of no targets is nan and has no gradient; a class that cannot be has none, on the rank
    that has it and on the others; another ignore_index."""
    args = (True, 30, torch.float64, 1.0, range(12), {})
    for loss, dx, dweight in run_ranks(loss_of_a_rank, 2, *args):
        assert (loss.isnan(), dx.any(), dweight.any()) == (True, False, False)

    def rank():
        tp = make(False)
        x, weight, targets = inputs(30, torch.float64)
        targets[4] = 7
        share = SHARES.cut(weight, tp.rank, tp.size)
        loss = vocab_linear_cross_entropy(x, share, targets, tp, vocab_size=30, ignore_index=7)
        assert (loss - linear_cross_entropy(x, weight, targets, ignore_index=7)).abs() < 1e-13
        x = torch.ones(4, 2, dtype=torch.float64)
        weight = torch.tensor([[0.0, 1], [-float("inf"), 1], [1, 1], [2, 0]], dtype=torch.float64)
        targets = torch.tensor([0, 2, 3, 3])
        logits = (x @ weight.T).requires_grad_()
        expected = F.cross_entropy(logits, targets)
        expected.backward()
        share = Shard(0).cut(weight, tp.rank, 2).requires_grad_()
        loss = vocab_linear_cross_entropy(x, share, targets, tp, vocab_size=4)
        loss.backward()
        dweight = Shard(0).cut(logits.grad.T @ x, tp.rank, 2)
        assert (loss - expected).abs() < 1e-14
        assert (share.grad - dweight).abs().max() < 1e-14

    run_ranks(rank, 2)


@sequence
def test_only_the_gradients_of_the_loss_that_are_needed(sp):
    args = (loss_of_a_rank, 2, sp, 30, torch.float64, 1.0, (), {})
    everything = run_ranks(*args)
    for needed in ((True, False), (False, True), (False, False)):
        for got, expected in zip(run_ranks(*args, needed), everything):
            assert torch.equal(got[0], expected[0])
            for grad, want, need in zip(got[1:], expected[1:], needed):
                assert torch.equal(grad, want) if need else grad is None

    def rank():
        tp = make(sp)
        x, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(4, WIDTH)
        weight.requires_grad_()
        none = torch.zeros(0, dtype=torch.int64)
        loss = vocab_linear_cross_entropy(x, weight, none, tp, vocab_size=8, reduction="sum")
        loss.backward()
        assert (loss.item(), x.grad.shape[0], weight.grad.any()) == (0.0, 0, False)
        with torch.no_grad():
            loss = vocab_linear_cross_entropy(x, weight, none, tp, vocab_size=8)
        assert not loss.requires_grad

    run_ranks(rank, 2)


def opchecked():
    """On one rank: its checks run ops a number of times that other ranks would not follow."""
    tp, of, check = make(), torch.ops.fastpar, torch.library.opcheck
    x, w, v = random(4, C), random(FEATURES, C), random(C, FEATURES)
    b, dy, wide = random(FEATURES), random(4, FEATURES), random(4, FEATURES)
    for op, args in (
        *((of.column_linear, (x, w, bias)) for bias in (b, None)),
        *((of.row_linear, (wide, v, bias)) for bias in (random(C), None)),
    ):
        args = [t if t is None else t.clone().requires_grad_() for t in args]
        check(op.default, (*args, tp.number))
    for needed in ((True, True, True), (False, True, False), (True, False, True)):
        check(of.column_linear_bwd.default, (dy, x, w, *needed, tp.number))
        check(of.row_linear_bwd.default, (x, wide, v, *needed, tp.number))
    check(of.tp_all_reduce.default, (x, tp.number))
    check(of.tp_all_gather.default, (x, 1, tp.number))
    check(of.tp_reduce_scatter.default, (x, 0, tp.number))
    x, weight, targets = inputs(8, torch.float32)
    for needed in ((True, True), (False, False)):
        tensors = [t.clone().requires_grad_(n) for t, n in zip((x, weight), needed)]
        softcap = 3.0 if needed[0] else 0.0
        args = (*tensors, targets, 8, -100, "mean", softcap, 5, *needed, tp.number)
        check(of.vocab_linear_cross_entropy.default, args)
    check(of.vocab_linear_cross_entropy_dx.default, (x, torch.tensor(2.0), tp.number))


def test_opcheck():
    run_ranks(opchecked, 1, timeout_s=300)


def test_a_handle_is_known_by_its_number_while_somebody_has_it():
    def rank():
        one, two = make(), make(False)
        assert one.number != two.number
        assert functional.handle_of(two.number) is two
        assert (one.per_token, two.per_token) == (Partial(), Replicate())
        assert copy.deepcopy({"tp": one})["tp"] is one
        number = two.number
        del two
        with pytest.raises(AssertionError, match=r"the model keeps it"):
            functional.handle_of(number)
        message = (
            r"TensorParallel: cannot save the model itself, of which rank "
            rf"{torch.distributed.get_rank()} of 2 has a slice; save model\."
        )
        with pytest.raises(RuntimeError, match=message):
            pickle.dumps(one)

    run_ranks(rank, 2)


def of_loss(sp=False, **change):
    """The loss of these arguments, of which some are changed."""

    def call():
        x, weight, targets = inputs(8, torch.float32)
        call = {"x": x, "weight": weight[:4], "targets": targets, "vocab_size": 8, **change}
        vocab_linear_cross_entropy(tp=make(sp), **call)

    return call


def of_linear(name, *shapes):
    return lambda: LINEAR[name](*(torch.ones(s) for s in shapes), tp=make())


def second_derivative(of):
    """Of whatever of(x) is."""

    def call():
        x = torch.ones(12, WIDTH, requires_grad=True)
        torch.autograd.grad(of(x).sum(), x, create_graph=True)

    return call


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int64)


SLICE = r"\[F, C\], got x=\[4, 3\] weight=\[2, 5\]; pass this rank's slice of the weight"
LOSS = "vocab_linear_cross_entropy: "
REFUSED = [
    (lambda: functional.scatter(torch.ones(4, 3), -1, make(), partial=False),
     r"scatter: expected tp=2 to divide dimension -1, got x=\[4, 3\]; pad it to a multiple"),
    (lambda: functional.row_linear(torch.ones(3, 4), torch.ones(2, 4), None, make()),
     r"row_linear: expected tp=2 to divide dimension 0, got x=\[3, 4\]; pad it"),
    (lambda: vocab_embedding(zeros(1, 3), torch.ones(4, WIDTH), make()),
     r"scatter: expected tp=2 to divide dimension 0, got x=\[3, 16\]"),
    *((of_linear(kind, (4, 3), (2, 5)),
       rf"{kind}_linear: expected x \[..., N, C\] and weight {SLICE}") for kind in LINEAR),
    (of_linear("row", (3,), (2, 3)), r"got x=\[3\] weight=\[2, 3\]"),
    (of_linear("column", (4, 3), (2, 3, 1)), r"weight=\[2, 3, 1\]"),
    *((of_linear(kind, (4, 3), (2, 3), (3,)),
       rf"{kind}_linear: expected bias \[F\] with weight \[F, C\], got bias=\[3\] weight=\[2, 3\]; "
       "pass this rank's slice of it") for kind in LINEAR),
    (of_loss(reduction="none"), LOSS + "expected reduction mean or sum, got reduction=none; comp"),
    (of_loss(targets=zeros(5)), r"each of 12 tokens, .*=\[5\]"),
    (of_loss(True, targets=zeros(12)), r"each of 24 tokens, .*=\[12\]"),
    (of_loss(weight=torch.ones(4, 3)), r"got x=\[12, 16\] weight=\[4, 3\]"),
    (of_loss(weight=torch.ones(4)), r"weight=\[4\] .*pass this rank's rows of the weight"),
    *((of_loss(targets=torch.full((12,), n)), f"{LOSS}.*{n}") for n in (8, -1)),
    *((second_derivative(lambda x, of=of: of(x, torch.ones(4, WIDTH), None, make(False))),
       f"{kind}_linear") for kind, of in LINEAR.items()),
    (second_derivative(lambda x: vocab_linear_cross_entropy(
        x, torch.ones(4, WIDTH), zeros(12), make(False), vocab_size=8)), "linear_cross_entropy"),
]  # fmt: skip


@sweep(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    def rank():
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()

    run_ranks(rank, 2)
