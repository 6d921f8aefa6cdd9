"""embedding against fp64, its dense deterministic gradients, and its refusals."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import Rng, dropout, embedding, make_key
from fastpar.kernels.reference import embedding_ref
from fastpar.testing import assert_matches_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = Rng(make_key(3, 5), 0)


def tables(V, positions, C, dtype=torch.float32):
    return [torch.randn(n, C).to(dtype).requires_grad_() for n in (V, positions)]


@sweep("dtype", DTYPES)
@sweep(("B", "T", "C"), [(1, 1, 1), (2, 63, 127), (3, 5, 1000), (2, 12, 384)])
@sweep("p", [0.0, 0.3])
def test_matches_oracle(B, T, C, dtype, p):
    idx = torch.randint(0, 50, (B, T))
    for first in (0, 3):

        def call(op, first=first):
            return lambda i, wte, wpe: op(i, wte, wpe, first_position=first, dropout_p=p, rng=RNG)

        report = assert_matches_oracle(
            call(embedding), call(embedding_ref), [idx, *tables(50, T + 4, C, dtype)]
        )
        assert len(report) == 3


def test_without_positions():
    wte, _ = tables(50, 1, 8)
    idx = torch.randint(0, 50, (2, 7))
    assert_matches_oracle(embedding, embedding_ref, [idx, wte])
    assert torch.equal(embedding(idx.int(), wte), embedding(idx, wte))


def test_16_bit_gradients_of_a_frequent_token_are_summed_in_float32():
    """1000 terms of 1 + 1/128: bf16 sums stop growing at 256."""
    wte = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    idx = torch.ones(1, 1000, dtype=torch.int64)
    embedding(idx, wte).backward(torch.full((1, 1000, 4), 1.0078125, dtype=torch.bfloat16))
    assert torch.equal(wte.grad[1], torch.full((4,), 1007.8125).bfloat16())
    assert (wte.grad[[0, 2]] == 0).all()


def test_only_the_gradients_that_are_needed():
    wte, wpe = tables(5, 3, 4)
    idx = torch.tensor([[4, 0, 4]])
    for needed in (wte, wpe):
        frozen = [t if t is needed else t.detach() for t in (wte, wpe)]
        (grad,) = torch.autograd.grad(embedding(idx, *frozen).sum(), needed)
        want = (1, 0, 0, 0, 2) if needed is wte else (1, 1, 1)
        assert torch.equal(grad, torch.tensor(want)[:, None].expand(-1, 4).float())


@sweep("shape", [(0, 4), (2, 0)])
def test_no_tokens(shape):
    wte, wpe = tables(5, 6, 4)
    x = embedding(torch.zeros(shape, dtype=torch.int64), wte, wpe)
    assert x.shape == (*shape, 4)
    x.sum().backward()
    assert (wte.grad == 0).all()
    assert (wpe.grad == 0).all()


def test_dropout_is_that_of_the_op_alone():
    wte, wpe = tables(5, 3, 40)
    idx = torch.tensor([[4, 0, 4], [1, 2, 3]])
    expected = dropout(embedding(idx, wte, wpe), 0.5, RNG)
    assert torch.equal(embedding(idx, wte, wpe, dropout_p=0.5, rng=RNG), expected)


def added(op, p):
    """(idx, wte, wpe, wte_grad, dx) -> wte_grad with the gradient of wte added, and that of wpe."""

    def run(idx, wte, wpe, total, dx):
        wte, wpe = (t.detach().requires_grad_() for t in (wte, wpe))
        if op is embedding_ref:
            x = op(idx, wte, wpe, dropout_p=p, rng=RNG)
            dwte, dwpe = torch.autograd.grad(x, (wte, wpe), dx)
            return total + dwte, dwpe
        total = total.clone()
        op(idx, wte, wpe, dropout_p=p, rng=RNG, wte_grad=total).backward(dx)
        assert wte.grad is None
        return total, wpe.grad

    return run


@sweep(("dtype", "wide"), [(d, w) for d in DTYPES for w in (d, torch.float32)])
@sweep("p", [0.0, 0.3])
def test_wte_grad_gets_the_gradient_added(dtype, wide, p):
    wte, wpe = tables(50, 20, 33, dtype)
    idx = torch.randint(0, 20, (4, 17), dtype=torch.int32)
    dx, total = torch.randn(4, 17, 33).to(dtype), torch.randn(50, 33).to(wide)
    inputs = [idx, wte.detach(), wpe.detach(), total, dx]
    assert_matches_oracle(added(embedding, p), added(embedding_ref, p), inputs)
    got, _ = added(embedding, p)(*inputs)
    assert torch.equal(got[20:], total[20:])


def test_wte_grad_with_rows_apart():
    wte, _ = tables(5, 1, 4)
    both = torch.zeros(5, 8)
    embedding(torch.tensor([[4, 0, 4]]), wte, wte_grad=both[:, 4:]).sum().backward()
    assert torch.equal(both[:, 4], torch.tensor([1.0, 0, 0, 0, 2]))
    assert (both[:, :4] == 0).all()


def test_wte_grad_sums_in_float32_before_it_rounds():
    """256 + 1000 terms of 1/128: in bf16 not one of them would change 256."""
    wte = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    total = torch.full((3, 4), 256.0, dtype=torch.bfloat16)
    x = embedding(torch.ones(1, 1000, dtype=torch.int64), wte, wte_grad=total)
    x.backward(torch.full((1, 1000, 4), 1 / 128, dtype=torch.bfloat16))
    assert torch.equal(total[1], torch.full((4,), 256 + 1000 / 128).bfloat16())
    assert (total[[0, 2]] == 256).all()
    # 256 + (1 + 2^-8) is nearer to 258; with the sum rounded to 1 first it would stay 256.
    x = embedding(torch.tensor([[0, 0]]), wte, wte_grad=total)
    x.backward(torch.tensor([1.0, 2**-8]).bfloat16()[None, :, None].expand(1, 2, 4))
    assert (total[0] == 258).all()


def test_wte_grad_may_change_between_forward_and_backward():
    """The tied head adds to it."""
    wte, _ = tables(5, 3, 4)
    total = torch.zeros(5, 4)
    x = embedding(torch.tensor([[4, 0, 4]]), wte, wte_grad=total)
    total += 1
    x.sum().backward()
    assert torch.equal(total[:, 0], torch.tensor([2.0, 1, 1, 1, 3]))


def test_frozen_wte_leaves_wte_grad_alone():
    wte, wpe = tables(5, 3, 4)
    total = torch.zeros(5, 4)
    embedding(torch.tensor([[4, 0]]), wte.detach(), wpe, wte_grad=total).sum().backward()
    assert (total == 0).all()
    assert torch.equal(wpe.grad[:, 0], torch.tensor([1.0, 1, 0]))


IDX = torch.tensor([[4, 0]])


def ones(*shape, **kwargs):
    return torch.ones(shape, **kwargs)


@sweep(
    ("args", "first_position", "message"),
    [
        ((IDX + 1, ones(5, 4)), 0, r"expected token ids in \[0, 5\), got id=5"),
        ((IDX - 1, ones(5, 4)), 0, r"expected token ids in \[0, 5\), got id=-1"),
        ((IDX[0], ones(5, 4)), 0, r"expected idx \[B, T\] of int64 or int32, got idx=\[2\]"),
        ((IDX.float(), ones(5, 4)), 0, r"got idx=\[1, 2\] torch.float32"),
        ((IDX, ones(5)), 0, r"expected wte \[V, C\] of a floating dtype, got wte=\[5\]"),
        ((IDX, ones(5, 4).long()), 0, r"expected wte \[V, C\] of a floating dtype, got .*int64"),
        ((IDX, ones(5, 4, device="meta")), 0, r"expected idx on wte's device meta, got idx on cpu"),
        (
            (IDX, ones(5, 4), ones(3, 5)),
            0,
            r"expected wpe \[positions, C\] with C=4, got wpe=\[3, 5",
        ),
        ((IDX, ones(5, 4), ones(3, 4).half()), 0, r"expected wpe like wte .*got wpe=torch.float16"),
        ((IDX, ones(5, 4), ones(3, 4)), 2, r"expected positions in \[0, 3\), got first_position=2"),
        (
            (IDX, ones(5, 4), ones(3, 4)),
            -1,
            r"expected positions in \[0, 3\), got first_position=-1",
        ),
    ],
)
def test_bad_input_is_refused(args, first_position, message):
    with pytest.raises(ValueError, match="embedding: .*" + message):
        embedding(*args, first_position=first_position)


@sweep(
    ("wte_grad", "message"),
    [
        (ones(5, 3), r"expected wte_grad like wte \(\[5, 4\], cpu\), got wte_grad=\[5, 3\] on cpu"),
        (ones(5, 4, device="meta"), r"got wte_grad=\[5, 4\] on meta"),
        (
            ones(5, 4).half(),
            r"expected wte_grad of wte's dtype .*float32, got wte_grad=torch.float16",
        ),
        (ones(4, 5).T, r"expected wte_grad with contiguous rows, got wte_grad.stride\(\)=\(1, 5\)"),
    ],
)
def test_bad_wte_grad_is_refused(wte_grad, message):
    with pytest.raises(ValueError, match="embedding: .*" + message):
        embedding(IDX, ones(5, 4), wte_grad=wte_grad)


@pytest.mark.gpu
@sweep("dtype", DTYPES)
def test_on_a_gpu(dtype):
    wte, wpe = (t.detach().cuda().requires_grad_() for t in tables(50, 64, 768, dtype))
    idx = torch.randint(0, 50, (4, 60), device="cuda")
    assert_matches_oracle(embedding, embedding_ref, [idx, wte, wpe])
    grads = [torch.autograd.grad(embedding(idx, wte, wpe).sin().sum(), (wte, wpe)) for _ in "ab"]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
