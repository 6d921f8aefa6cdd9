"""A rank that holds some heads, or some rows of the flattened tokens, draws their part of the mask
that one process draws: the same bits, forward and backward."""

import itertools

import pytest
import torch
from cells import slow, sweep

from fastpar.kernels import (
    Rng,
    attention,
    attention_qkvpacked,
    backend,
    dropout,
    embedding,
    keep_mask,
    make_key,
    residual_layer_norm,
    residual_rms_norm,
)
from fastpar.kernels.attention import BITS, Mask
from fastpar.kernels.philox import MaskBlock, mask_parts
from fastpar.kernels.reference import (
    keep_mask_ref,
)

P = 0.3
KEY = make_key(3, 2**32 - 2)  # the sample index crosses 2**32 within the batch
RNG = Rng(KEY, 2**15 - 1)
# Cuts of 4 samples of 7 rows: at a sample, inside one, a part inside one sample, ranks of 2, 3, 4.
CUTS = [(0, 14, 28), (0, 9, 28), (0, 3, 6, 28), (0, 5, 23, 28), (0, 7, 14, 21, 28), (0, 1, 27, 28)]
B, T, C = 4, 7, 37


def parts(cut):
    for start, end in itertools.pairwise(cut):
        yield slice(start, end), Rng(*RNG[:2], first_row=start, rows=T)


def with_grads(fn, *inputs):
    """Outputs and the gradients of every input, for the same dy at every row."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((y * y.detach().cos()).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def residual_ops(device):
    weight, bias = torch.randn(C, device=device), torch.randn(C, device=device)
    yield lambda x, r, rng, op=residual_layer_norm: op(x, r, weight, bias, dropout_p=P, rng=rng)
    yield lambda x, r, rng, op=residual_rms_norm: op(
        x, r, weight, x_bias=bias, dropout_p=P, rng=rng
    )


def same(a, b):
    """Bits; composed of torch's functions, products of other shapes add in another order."""
    if backend.choice == "torch":
        torch.testing.assert_close(a, b)
    else:
        assert torch.equal(a, b)


def of_interpreter(form, cuts):
    """The second one where Triton is interpreted."""
    return cuts[1:2] if backend.choice == "triton" and form == "cpu" else cuts


@pytest.mark.parametrize("shape", [(T, 2, 16), slow((T, 3, 5, 64))])
def test_dropout_of_rows(form, shape):
    """Of more than one dimension a sample."""
    x = torch.randn(B, *shape, device=form)
    (n, *_), cols, per = shape, shape[-1], x[0, 0].numel() // shape[-1]
    whole = with_grads(lambda x: dropout(x.view(B, -1, cols), P, RNG), x)
    flat = x.view(B * T, *shape[1:])
    for part, rng in itertools.chain(*map(parts, of_interpreter(form, CUTS))):
        rng = rng._replace(rows=n * per, first_row=part.start * per)
        got = with_grads(lambda x, rng=rng: dropout(x, P, rng), flat[part])
        for a, b in zip(got, whole):
            assert torch.equal(a, b.reshape(flat.shape)[part])
        mask = keep_mask(rng, P, flat[part].shape, device=form)
        assert torch.equal(mask, whole[1].reshape(flat.shape)[part] != 0)


def moved_parts(low, high):
    """(rows of the whole batch, rng): the first and the second half of a rank's rows are runs of 2
    that lie apart in a sample, all of them and some."""
    places = torch.tensor([b * T + r for b in range(B) for r in (low, low + 1, high + 2, high + 3)])
    for start, end in ((0, 4 * B), (1, 11)):
        rng = Rng(*RNG[:2], first_row=start, rows=4, moved=(low, high))
        yield places[start:end], rng


def test_rows_of_ops(form):
    """Of dropout and of the residual norms, in any leading dimensions."""
    x, r = (torch.randn(B, T, C, device=form) for _ in range(2))
    some = [part for cut in of_interpreter(form, CUTS) for part in parts(cut)]
    some += [part for cut in of_interpreter(form, [(0, 2), (3, 1)]) for part in moved_parts(*cut)]
    some = some[1::2] if backend.choice == "triton" and form == "cpu" else some
    for op in [*residual_ops(form), lambda x, r, rng: dropout(x + r, P, rng)]:
        whole = with_grads(lambda x, r, op=op: op(x, r, RNG), x, r)
        for part, rng in some:
            for shape in of_interpreter(form, [(1, -1, C), (-1, 1, C), (-1, C)]):
                rows = (t.view(B * T, C)[part].view(shape) for t in (x, r))
                got = with_grads(lambda x, r, op=op, rng=rng: op(x, r, rng), *rows)
                for a, b in zip(got, whole):
                    assert torch.equal(a.view(-1, C), b.view(B * T, C)[part])
    for part, rng in some:
        n = len(torch.arange(B * T)[part])
        exact = keep_mask_ref((KEY.cpu(), *rng[1:]), P, (n, C))
        assert torch.equal(keep_mask(rng, P, (n, C), device=form).cpu(), exact)


@pytest.mark.parametrize(
    ("cut", "documents"),
    [
        ((0, 1, 2), False),
        slow((0, 2, 4), True),
        slow((0, 1, 6), True),
        *(slow((0, 1, 3, 6), documents) for documents in (False, True)),
    ],
)
def test_attention_of_heads(form, cut, documents):
    qkv = torch.randn(2 if cut[-1] > 2 else 1, 19, 3, cut[-1], 16, device=form)
    settings = {"dropout_p": P}
    if documents:
        qkv = qkv.flatten(0, 1)
        settings["cu_seqlens"] = torch.tensor([0, 11, 38], dtype=torch.int32, device=form)
    whole = with_grads(lambda x: attention_qkvpacked(x, rng=RNG, **settings), qkv)
    for start, end in itertools.pairwise(cut):
        settings["rng"] = RNG._replace(first_head=start)
        heads = qkv[..., start:end, :]
        got = with_grads(lambda x: attention_qkvpacked(x, **settings), heads)
        apart = with_grads(lambda *x: attention(*x, **settings), *heads.unbind(-3))
        for a, b in zip([*got, apart[0], torch.stack(apart[1:], -3)], whole * 2, strict=True):
            same(a, b[..., start:end, :])


@pytest.fixture
def drawn():
    """Where the whole mask is kept as bits, as on Hopper, Triton adds up keys in another order."""
    with BITS.trying((), Mask(0)):
        yield


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 9, 16), torch.float32),
        slow((5, 19, 16), torch.float32),
        *(slow(s, torch.float16) for s in ((64, 128, 16), (63, 150, 24))),
    ],
)
def test_attention_of_the_last_queries(form, sizes, dtype):
    """Of their keys, as a key/value cache has them; first_row says where their rows lie in the
    mask."""
    (n, Tk, D), H = sizes, 2 if sizes[0] > 1 else 1
    q, k, v = torch.randn(3, H, Tk, H, D, device=form).to(dtype)
    at = Tk - n
    whole = with_grads(lambda *x: attention(*x, dropout_p=P, rng=RNG), q, k, v)
    rng = RNG._replace(first_row=at)
    o, dq, *_ = with_grads(lambda *x: attention(*x, dropout_p=P, rng=rng), q[:, at:], k, v)
    same(o, whole[0][:, at:])
    same(dq, whole[1][:, at:])
    first, last = (slice(0, at), RNG), (slice(at, Tk), rng)
    grads = [
        with_grads(
            lambda *x, rng=rng: attention(*x, dropout_p=P, rng=rng),
            q[:, rows], k[:, : rows.stop], v[:, : rows.stop],
        )[2:]
        for rows, rng in (first, last)
    ]  # fmt: skip
    for whole_grad, head, tail in zip(whole[2:], *grads):
        tail[:, :at] += head
        # The sum of two parts: three roundings of values below 4, and what their sums differ by.
        atol = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(tail, whole_grad, atol=atol, rtol=0)


def test_masks_of_heads_are_the_oracles():
    rng = RNG._replace(first_head=9)
    heads = keep_mask(rng, P, (2, 4, 5, 33))
    assert torch.equal(heads, keep_mask_ref(rng, P, (2, 4, 5, 33)))
    assert torch.equal(heads, keep_mask(RNG, P, (2, 13, 5, 33))[:, 9:])


def test_whole_samples_are_one_block():
    assert mask_parts((2, 6, 8), 0, 4, (8, 0, 0)) == [MaskBlock(3, 1, 4, 8, 2, 0, 0)]
    assert mask_parts((12, 8), 0, 4, (7, 0, 0)) == [
        MaskBlock(1, 1, 1, 8, 1, 0, 3),
        MaskBlock(2, 1, 4, 8, 2, 0, 0),
        MaskBlock(1, 1, 3, 8, 4, 0, 0),
    ]


ROWS = Rng(KEY, 0, first_row=2, rows=3)
X = torch.ones(2, 3, 8)
Q, CU = torch.ones(1, 2, 3, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
IDX = torch.zeros(2, 3, dtype=torch.int64)
NORMS = (residual_layer_norm, residual_rms_norm)
HEAD = RNG._replace(first_head=1)
OTHERS = [ROWS, RNG._replace(rows=0), RNG._replace(moved=(1, 2))]
REFUSALS = [  # (words, op, tensors, rng, more)
    *(("%s: expected an rng without first_head", op, (x, x, x[0, 0]), HEAD, {})
      for op in NORMS for x in (X, X.double())),
    *(("%s: expected an rng without (rows|moved)", attention, (q, q, q), rng, {})
      for rng in OTHERS for q in (Q, Q.double())),
    *((f"%s: expected 0 <= rng.first_row .* got first_row={n} T=2; count row", attention, (Q, Q, Q),
       RNG._replace(first_row=n), {}) for n in (-1, 2**31 - 2)),
    ("%s: expected an rng without first_row, got fir", attention, (torch.ones(5, 3, 8),) * 3,
     RNG._replace(first_row=2), {"cu_seqlens": CU}),
    *(("%s: expected an rng without (first_row|rows|mov)", embedding, (IDX, X[0]), rng, {})
      for rng in (*OTHERS, RNG._replace(first_row=2))),
    ("%s: expected an rng without first_head, got fir", embedding, (IDX, X[0]),
     RNG._replace(first_head=2), {}),
    *((f"dropout: expected 0 <= rng.first_head .*got first_head={n} H=3", attention, (Q, Q, Q),
       RNG._replace(first_head=n), {}) for n in (-1, 2**16 - 3)),
    *((f"%s: {words}", op, tensors, ROWS._replace(**changes), {})
      for op, tensors in ((dropout, ()), (residual_layer_norm, (X, X, X[0, 0])), (keep_mask, ()))
      for changes, words in (
        ({"rows": 0}, "expected rng.rows >= 1, .*got rows=0"),
        ({"first_row": -1}, "expected 0 <= rng.first_row .*got first_row=-1 N=6"),
        ({"first_row": 2**31 - 6}, "expected 0 <= .* first_row=2147483642 N=6"),
        ({"first_head": 1}, "expected an rng without first_head, got first_head=1"),
        ({"rows": None}, "expected an rng without first_row, got first_row=2"),
        ({"moved": (1, 2)}, "expected rng.rows >= 1, and even if .*got rows=3 moved"),
        ({"rows": 4, "moved": (-1, 2)}, "expected rng.moved that leave no row below 0"),
        ({"rows": 4, "moved": (1, -3)}, r"expected rng.moved that leave .*moved=\(1, -3"),
        ({"rows": 4, "moved": (0, 2**30)}, "expected rng.moved that leave .*1073741824"),
      )),
]  # fmt: skip


@sweep(("words", "op", "tensors", "rng", "more"), REFUSALS)
def test_what_is_refused(words, op, tensors, rng, more):
    words = words % op.__name__ if "%s" in words else words
    calls = {keep_mask: lambda: keep_mask(rng, P, X.shape), dropout: lambda: dropout(X, P, rng)}
    call = calls.get(op, lambda: op(*tensors, dropout_p=P, rng=rng, **more))
    with pytest.raises(ValueError, match=words):
        call()
