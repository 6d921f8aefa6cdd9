"""tensor_parallel.py: what ranks compute together is what one rank computes of the whole."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

from fastpar.axes.tensor.functional import (
    TensorParallel,
    column_linear,
    copy_to,
    gather,
    handle_of,
    reduce_from,
    row_linear,
    scatter,
)
from fastpar.comm.transports import TorchCollectives
from fastpar.sharding.placements import Partial, Replicate
from fastpar.testing import run_ranks

RANKS = 2
DTYPES = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 4e-2}  # of the largest value


def make(sequence_parallel=True):
    return TensorParallel(TorchCollectives(), sequence_parallel=sequence_parallel)


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)  # the default one is shared by threads
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def slices(whole, dim):
    return whole.chunk(RANKS, dim)


def assert_close(got, expected, dtype):
    assert got.dtype == dtype
    assert got.shape == expected.shape
    bound = DTYPES[dtype] * expected.abs().max().item()
    assert (got.double() - expected.double()).abs().max().item() <= bound


# Conjugate operators: whole integers, so that sums are exact


def ints(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, shape, generator=generator).double()


OPERATORS = ("copy_to", "reduce_from", "gather", "gather partial", "scatter", "scatter partial")
SHAPES = [((4, 6), 0), ((4, 6), -2), ((4, 6), -1), ((3, 4, 6), 1), ((2, 4, 6), 0), ((2, 4, 6), -1)]


def one_operator(name, shape, dim, strided):
    """This rank's output and input gradient."""
    tp = make()
    mine = ints(*shape, seed=tp.rank if name in ("reduce_from", "scatter partial") else 9)
    if name.startswith("gather"):
        mine = slices(mine, dim)[tp.rank]
    if strided:
        mine = mine.transpose(0, -1).contiguous().transpose(0, -1)
    x = mine.requires_grad_()
    op, partial = name.split()[0], "partial" in name
    if op == "copy_to":
        y = copy_to(x, tp)
    elif op == "reduce_from":
        y = reduce_from(x, tp)
    else:
        y = {"gather": gather, "scatter": scatter}[op](x, dim, tp, partial=partial)
    differs = name in ("copy_to", "gather partial")
    dy = ints(*shape, seed=20 + tp.rank if differs else 20)
    if op == "scatter":
        dy = slices(dy, dim)[tp.rank]
    y.backward(dy.transpose(0, -1).contiguous().transpose(0, -1) if strided else dy)
    return y.detach(), x.grad, y.is_contiguous()


def by_autograd(name, shape, dim):
    """The same of every rank, from one graph over whole tensors."""
    summed = name in ("reduce_from", "scatter partial")
    inputs = [ints(*shape, seed=r if summed else 9).requires_grad_() for r in range(RANKS)]
    differs = name in ("copy_to", "gather partial")
    cotangents = [ints(*shape, seed=20 + r if differs else 20) for r in range(RANKS)]
    if name in ("copy_to", "gather", "gather partial"):  # one tensor, used by every rank
        x = inputs[0]
        if name == "gather":  # all do the same with it: that is one use
            x.backward(cotangents[0])
        else:
            torch.autograd.backward([x.clone() for _ in cotangents], cotangents)
        grads = [x.grad] * RANKS
        outputs = [x.detach()] * RANKS
        if name != "copy_to":
            grads = slices(x.grad, dim)
        return list(zip(outputs, grads))
    if summed:
        y = sum(inputs)
        y.backward(cotangents[0])
        whole = [y.detach()] * RANKS
        if name == "reduce_from":
            return [(whole[r], inputs[r].grad) for r in range(RANKS)]
        return [(slices(whole[r], dim)[r], inputs[r].grad) for r in range(RANKS)]
    x = inputs[0]
    torch.cat(slices(x, dim), dim).backward(cotangents[0])
    return [(slices(x.detach(), dim)[r], x.grad) for r in range(RANKS)]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_against_autograd_of_the_whole(name, shape, dim, strided):
    expected = by_autograd(name, shape, dim)
    for (y, grad, contiguous), (want, want_grad) in zip(
        run_ranks(one_operator, RANKS, name, shape, dim, strided), expected, strict=True
    ):
        assert torch.equal(y, want)
        assert torch.equal(grad, want_grad)
        assert contiguous or name in ("copy_to", "gather", "gather partial")


def test_operators_leave_their_input():
    """A sum in place would change what others still read."""

    def rank():
        tp = make()
        x = torch.ones(4, 2)
        results = [reduce_from(x, tp), gather(x, 0, tp, partial=True)]
        results += [scatter(x, 0, tp, partial=p) for p in (True, False)]
        for y in results:
            y.fill_(5.0)
        return x.unique().tolist()

    assert run_ranks(rank, 2) == [[1.0]] * 2


def test_a_dimension_that_the_ranks_do_not_divide():
    def rank():
        message = (
            r"scatter: expected tp=2 to divide dimension -1, got x=\[4, 3\]; pad it to a multiple"
        )
        with pytest.raises(ValueError, match=message):
            scatter(torch.ones(4, 3), -1, make(), partial=False)

    run_ranks(rank, 2)


# Layers

C, FEATURES = 6, 8


def layer(kind, dtype, sp, dims, strided, bias, needed):
    """One rank's y and the gradients that are asked for."""
    tp = make(sp)
    x, w, b = whole_inputs(kind, dtype, dims)
    split = {"column": 0, "row": 1}[kind]
    w = slices(w, split)[tp.rank]
    if kind == "column":
        b = slices(b, 0)[tp.rank]
        x = slices(x, -2)[tp.rank] if sp else x
    else:
        x = slices(x, -1)[tp.rank]
    tensors = [x, w, b if bias else None]
    if strided:
        tensors = [t if t is None or t.dim() < 2 else t.mT.contiguous().mT for t in tensors]
    tensors = [t if t is None else t.clone().requires_grad_(n) for t, n in zip(tensors, needed)]
    before = [None if t is None else t.detach().clone() for t in tensors]
    y = {"column": column_linear, "row": row_linear}[kind](*tensors, tp)
    if any(needed[: 2 + bias]):
        dy = cotangent(kind, dtype, dims)
        if kind == "column":
            dy = slices(dy, -1)[tp.rank]
        elif sp:
            dy = slices(dy, -2)[tp.rank]
        dy = dy.mT.contiguous().mT if strided else dy.contiguous()
        kept = dy.clone()
        y.backward(dy)
        assert torch.equal(dy, kept)
    for t, old in zip(tensors, before):
        assert t is None or torch.equal(t.detach(), old)
    return y.detach(), *(None if t is None else t.grad for t in tensors)


def whole_inputs(kind, dtype, dims):
    n_in, n_out = (C, FEATURES) if kind == "column" else (FEATURES, C)
    x = random(*((4,) if dims == 2 else (3, 4)), n_in, seed=1, dtype=dtype)
    return x, random(n_out, n_in, seed=2, dtype=dtype), random(n_out, seed=3, dtype=dtype)


def cotangent(kind, dtype, dims):
    n_out = FEATURES if kind == "column" else C
    return random(*((4,) if dims == 2 else (3, 4)), n_out, seed=4, dtype=dtype)


def joined(kind, sp, results, needed, dtype):
    """What the ranks have, as whole tensors; sums over the ranks in fp64."""
    ys, dxs, dws, dbs = zip(*results)
    tokens = -2
    if kind == "column":
        y = torch.cat(ys, -1)
        dx = None if dxs[0] is None else torch.cat(dxs, tokens) if sp else dxs[0]
        dw = None if dws[0] is None else torch.cat(dws, 0)
        db = None if dbs[0] is None else torch.cat(dbs, 0)
    else:
        y = torch.cat(ys, tokens) if sp else ys[0]
        dx = None if dxs[0] is None else torch.cat(dxs, -1)
        dw = None if dws[0] is None else torch.cat(dws, 1)
        db = None if dbs[0] is None else sum(dbs) if sp else dbs[0]
    return y, dx, dw, db


def check_layer(kind, dtype, sp, dims, strided, bias=True, needed=(True, True, True)):
    args = (kind, dtype, sp, dims, strided, bias, needed)
    results = run_ranks(layer, RANKS, *args)
    got = joined(kind, sp, results, needed, dtype)
    x, w, b = (t.double().requires_grad_() for t in whole_inputs(kind, dtype, dims))
    y = F.linear(x, w, b if bias else None)
    y.backward(cotangent(kind, dtype, dims).double())
    assert_close(got[0], y.detach(), dtype)
    for grad, whole, need in zip(got[1:], (x, w, b), (*needed[:2], needed[2] and bias)):
        assert (grad is not None) == need
        if need:
            assert_close(grad, whole.grad, dtype)
    alike = [0] * (kind == "row" and not sp) + [1] * (kind == "column" and not sp)
    for i in alike:  # what all ranks have: the same bits
        assert all(r[i] is None or torch.equal(r[i], results[0][i]) for r in results)


layers = pytest.mark.parametrize("kind", ["column", "row"])
sequence = pytest.mark.parametrize("sp", [True, False], ids=["sp", "plain"])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@sequence
@layers
def test_layers_match_the_whole_linear(kind, sp, dtype, dims, strided):
    check_layer(kind, dtype, sp, dims, strided)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=3)))
@sequence
@layers
def test_only_the_gradients_that_are_needed(kind, sp, needed, bias):
    check_layer(kind, torch.float64, sp, 2, False, bias, needed)


@sequence
def test_the_bias_of_a_row_layer_counts_once(sp):
    def rank():
        tp = make(sp)
        y = row_linear(torch.zeros(4, 3), torch.zeros(2, 3), torch.tensor([1.0, 2.0]), tp)
        return y.tolist()

    assert run_ranks(rank, 2) == [[[1.0, 2.0]] * (2 if sp else 4)] * 2


@layers
def test_without_ranks_layers_are_linear(kind):
    x, w, b = whole_inputs(kind, torch.float32, 3)
    op = {"column": column_linear, "row": row_linear}[kind]
    assert torch.equal(op(x, w, b), F.linear(x, w, b))


@sequence
def test_a_batch_of_no_tokens(sp):
    def rank():
        tp = make(sp)
        x = torch.zeros(0, C, requires_grad=True)
        w, v = torch.ones(4, C, requires_grad=True), torch.ones(C, 4, requires_grad=True)
        y = row_linear(column_linear(x, w, None, tp), v, None, tp)
        y.sum().backward()
        return list(y.shape), w.grad.abs().max().item(), v.grad.abs().max().item()

    assert run_ranks(rank, 2) == [([0, C], 0.0, 0.0)] * 2


# Under torch's machinery


def opchecked():
    tp = make()
    x, w, v = random(4, C), random(FEATURES, C), random(C, FEATURES)
    b, dy = random(FEATURES), random(4, FEATURES)
    of = torch.ops.fastpar
    for op, args in (
        (of.column_linear, (x, w, b)),
        (of.column_linear, (x, w, None)),
        (of.row_linear, (random(4, FEATURES), v, random(C))),
        (of.row_linear, (random(4, FEATURES), v, None)),
    ):
        args = [t if t is None else t.clone().requires_grad_() for t in args]
        torch.library.opcheck(op.default, (*args, tp.number))
    for needed in itertools.product([True, False], repeat=3):
        torch.library.opcheck(of.column_linear_bwd.default, (dy, x, w, *needed, tp.number))
        args = (random(4, C), random(4, FEATURES), v, *needed, tp.number)
        torch.library.opcheck(of.row_linear_bwd.default, args)
    torch.library.opcheck(of.tp_all_reduce.default, (x, tp.number))
    torch.library.opcheck(of.tp_all_gather.default, (x, 1, tp.number))
    torch.library.opcheck(of.tp_reduce_scatter.default, (x, 0, tp.number))


def test_opcheck():
    """On one rank: its checks run ops a number of times that other ranks would not follow."""
    run_ranks(opchecked, 1)


def fakes(sp):
    """Shapes that a compiler is told are those that come out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    tp = make(sp)
    x, w = random(4, C), random(4, C)
    column_linear_bwd = torch.ops.fastpar.column_linear_bwd
    row_linear_bwd = torch.ops.fastpar.row_linear_bwd
    calls = [
        lambda x, w: column_linear(x, w, None, tp),
        lambda x, w: row_linear(x, w, None, tp),
        lambda x, w: gather(x, -1, tp, partial=True),
        lambda x, w: scatter(x, 0, tp, partial=True),
        lambda x, w: column_linear_bwd(
            column_linear(x, w, None, tp), x, w, True, True, True, tp.number
        )[0],
        lambda x, w: row_linear_bwd(row_linear(x, w, None, tp), x, w, True, True, True, tp.number)[
            0
        ],
    ]
    found = []
    for call in calls:
        real = call(x, w)
        mode = FakeTensorMode()
        fake = call(*(mode.from_tensor(t) for t in (x, w)))
        found.append(
            (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        )
    return found


@sequence
def test_fake_tensors_have_the_shapes_of_real_ones(sp):
    assert run_ranks(fakes, RANKS, sp) == [[True] * 6] * RANKS


def compiled(sp):
    """A column and a row layer in one graph, and the eager bits."""
    torch._dynamo.reset()
    tp = make(sp)
    x = slices(random(8, C, seed=1), 0)[tp.rank] if sp else random(8, C, seed=1)
    w = slices(random(FEATURES, C, seed=2), 0)[tp.rank]
    v = slices(random(C, FEATURES, seed=3), 1)[tp.rank]
    b, c = slices(random(FEATURES, seed=4), 0)[tp.rank], random(C, seed=5)

    def block(x, w, b, v, c):
        return row_linear(F.relu(column_linear(x, w, b, tp)), v, c, tp)

    results = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        tensors = [t.clone().requires_grad_() for t in (x, w, b, v, c)]
        y = run(*tensors)
        y.square().sum().backward()
        results.append([y.detach(), *(t.grad for t in tensors)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def compiled_both():
    return compiled(True), compiled(False)


@pytest.mark.slow  # test_tp_compile.py compiles the whole model
def test_a_block_compiles_without_graph_breaks():
    results = run_ranks(compiled_both, 2, backend="gloo", timeout_s=120.0)
    assert results == [(True, True)] * 2


@pytest.mark.parametrize("op", ["column_linear", "row_linear"])
def test_second_derivatives_are_refused(op):
    def rank():
        x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
        y = {"column_linear": column_linear, "row_linear": row_linear}[op](x, w, None, make())
        with pytest.raises(RuntimeError, match=op):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    run_ranks(rank, 1)


# The handle


def test_a_handle_is_known_by_its_number_while_somebody_has_it():
    def rank():
        one, two = make(), make(False)
        assert one.number != two.number
        assert handle_of(two.number) is two
        assert (one.per_token, two.per_token) == (Partial(), Replicate())
        assert copy.deepcopy({"tp": one})["tp"] is one
        number = two.number
        del two
        with pytest.raises(AssertionError, match=r"the model keeps it"):
            handle_of(number)

    run_ranks(rank, 1)


def test_a_handle_is_not_pickled():
    def rank():
        message = (
            r"TensorParallel: expected a model's state_dict\(\) to be saved, got the model itself "
            rf"on rank {torch.distributed.get_rank()} of 2, which has a slice of it; save model\."
        )
        with pytest.raises(RuntimeError, match=message):
            pickle.dumps(make())

    run_ranks(rank, 2)


@pytest.mark.parametrize("op", [column_linear, row_linear])
def test_shapes_that_do_not_fit(op):
    name = op.__name__
    x = r"\[F, C\], got x=\[4, 3\] weight=\[2, 5\]; pass this rank's slice of the weight"
    cases = [
        ((torch.ones(4, 3), torch.ones(2, 5)), rf"{name}: expected x \[..., N, C\] and weight {x}"),
        ((torch.ones(3), torch.ones(2, 3)), r"got x=\[3\] weight=\[2, 3\]"),
        ((torch.ones(4, 3), torch.ones(2, 3, 1)), r"weight=\[2, 3, 1\]"),
        (
            (torch.ones(4, 3), torch.ones(2, 3), torch.ones(3)),
            rf"{name}: expected bias \[F\] with weight \[F, C\], got bias=\[3\] weight=\[2, 3\]; "
            "pass this rank's slice of it",
        ),
    ]

    def rank():
        for args, message in cases:
            with pytest.raises(ValueError, match=message):
                op(*args, tp=make())

    run_ranks(rank, 1)


def test_tokens_that_the_ranks_do_not_divide():
    def rank():
        message = r"row_linear: expected tp=2 to divide dimension 0, got x=\[3, 4\]; pad it"
        with pytest.raises(ValueError, match=message):
            row_linear(torch.ones(3, 4), torch.ones(2, 4), None, make())
        row_linear(torch.ones(3, 4), torch.ones(2, 4), None, make(False))

    run_ranks(rank, 2)
