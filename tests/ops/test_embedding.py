"""embedding beyond the cases of kernels/cases.py: runs of tokens, ids outside, what is refused."""

import pytest
import torch
from cells import slow, sweep

from fastpar.kernels import Rng, dropout, embedding, make_key

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = Rng(make_key(3, 5), 0)


def tables(V, positions, C, dtype=torch.float32, device="cpu"):
    return [torch.randn(n, C).to(device, dtype).requires_grad_() for n in (V, positions)]


def test_16_bit_gradients_of_a_frequent_token_are_summed_in_float32(place):
    """300 terms of 1 + 1/128: bf16 sums stop growing at 256."""
    wte = torch.zeros(3, 4, dtype=torch.bfloat16, device=place, requires_grad=True)
    idx = torch.ones(1, 300, dtype=torch.int64, device=place)
    dx = torch.full((1, 300, 4), 1.0078125, dtype=torch.bfloat16, device=place)
    embedding(idx, wte).backward(dx)
    assert torch.equal(wte.grad[1].cpu(), torch.full((4,), 300 * 1.0078125).bfloat16())
    assert (wte.grad[[0, 2]] == 0).all()


def test_nothing_int32_and_one_tensor_as_both(place):
    """No samples, no tokens, no columns; wpe may be the very tensor wte."""
    for shape, c in (((0, 4), 4), ((2, 0), 4), ((1, 2), 0)):
        wte, wpe = tables(5, 6, c, device=place)
        idx = torch.zeros(shape, dtype=torch.int64, device=place)
        x = embedding(idx, wte, wpe)
        assert x.shape == (*shape, c)
        x.sum().backward()
        assert not wte.grad.any()
        assert not wpe.grad.any()
    one, idx = torch.randn(5, 4, device=place), torch.tensor([[4, 0, 3]], device=place)
    assert torch.equal(embedding(idx.int(), one, one), one[idx] + one[:3])


def test_dropout_is_that_of_the_op_alone_and_of_the_samples_of_the_batch(place):
    """Samples cross 2^33; of a batch cut in two the second half starts at the next sample."""
    wte, idx = torch.randn(9, 40, device=place), torch.randint(0, 5, (4, 9)).to(place)
    rng, second = (Rng(make_key(7, 2**33 - 2 + first), 3) for first in (0, 1))
    whole = dropout(embedding(idx, wte, wte), 0.5, rng)
    assert torch.equal(embedding(idx, wte, wte, dropout_p=0.5, rng=rng), whole)
    assert torch.equal(embedding(idx[1:], wte, wte, dropout_p=0.5, rng=second), whole[1:])


def test_infinite_rows_stay_their_own(place):
    wte = torch.ones(4, 20, device=place, requires_grad=True)
    dx = torch.ones(1, 4, 20, device=place)
    dx[0, 1], dx[0, 2] = torch.inf, torch.nan
    embedding(torch.tensor([[0, 1, 2, 0]], device=place), wte).backward(dx)
    want = torch.tensor([2.0, torch.inf, torch.nan, 0])
    torch.testing.assert_close(wte.grad[:, 0].cpu(), want, rtol=0, atol=0, equal_nan=True)


PIECE = 64  # of the sorted list, in Triton
RUNS = {
    "one token": [5 * PIECE + 3],
    "whole pieces": [PIECE, PIECE, 2 * PIECE],
    "crosses every border": [PIECE - 1, 2, PIECE - 1, PIECE + 1, 3 * PIECE, 1],
    "more pieces than are added at once": [10, 11 * PIECE, 7],
    "single ones": [1] * (PIECE + 5),
    "begins and ends at a border": [3, PIECE - 3, 3 * PIECE, 5],
}
BORDERS = "crosses every border", "more pieces than are added at once"


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", [n if n in ("one token", *BORDERS) else slow(n) for n in RUNS])
def test_runs_of_every_length(triton_device, monkeypatch, name):
    """Small whole numbers: the sums are exact, so a term lost or counted twice shows; with any
    number of programs."""
    from fastpar.kernels import embedding_triton

    assert embedding_triton._PIECE == PIECE
    runs = RUNS[name]
    ids = torch.repeat_interleave(torch.arange(len(runs)) * 2 + 1, torch.tensor(runs))
    order = torch.randperm(len(ids))
    idx, dx = ids[order][None], torch.randint(-8, 9, (1, len(ids), 128)).float()
    wte = torch.zeros(2 * len(runs) + 2, 128)
    want = torch.zeros_like(wte).index_add_(0, idx[0], dx[0])
    wte = wte.to(triton_device).requires_grad_()
    x = embedding(idx.to(triton_device), wte)
    for sms in (3, 1, 1000) if name == "crosses every border" else (3,):
        monkeypatch.setattr(embedding_triton, "sm_count", lambda device, sms=sms: sms)
        (got,) = torch.autograd.grad(x, wte, dx.to(triton_device), retain_graph=True)
        assert torch.equal(got.cpu(), want)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("wrong", [-1, 2**32 + 3, *map(slow, (5, -(2**40), 2**31))])
def test_ids_outside_give_nan_and_no_gradient(triton_device, wrong):
    """Straight to the host functions: on CPU tensors the op refuses such ids."""
    from fastpar.kernels import embedding_triton

    wte, wpe = (t.detach().to(triton_device) for t in tables(5, 3, 20))
    idx = torch.tensor([[4, wrong, 0]], device=triton_device)
    x = embedding_triton.embedding_fwd(idx, wte, wpe, 0, None, 0, 0)
    assert x[0, 1].isnan().all()
    assert torch.equal(x[0, [0, 2]], wte[[4, 0]] + wpe[[0, 2]])
    mask = (make_key(1, 2, triton_device), 3, 77)
    dropped = embedding_triton.embedding_fwd(idx, wte, wpe, 0, *mask)
    assert (dropped[0, 1].isnan() | (dropped[0, 1] == 0)).all()
    # With a run of them that crosses a border of the sorted list.
    idx = torch.tensor([[4, *[wrong] * 3 * PIECE, 0]], device=triton_device)
    dx = torch.ones(*idx.shape, 20, device=triton_device)
    # Rows of a larger buffer on each side: nothing may be written there.
    around = torch.zeros(9, 20, device=triton_device)
    embedding_triton.embedding_bwd_wte(dx, idx, None, 0, 0, around[2:7])
    assert torch.equal(around[:, 0].cpu(), torch.tensor([0.0, 0, 1, 0, 0, 0, 1, 0, 0]))


IDX = torch.tensor([[4, 0]])


WTE, WPE = torch.ones(5, 4), torch.ones(3, 4)


@sweep(
    ("args", "options", "words"),
    [
        ((IDX + 1, WTE), {}, r"expected token ids in \[0, 5\), got id=5"),
        ((IDX - 1, WTE), {}, r"expected token ids in \[0, 5\), got id=-1"),
        ((IDX[0], WTE), {}, r"expected idx \[B, T\] of int64 or int32, got idx=\[2\]"),
        ((IDX.float(), WTE), {}, r"got idx=\[1, 2\] torch.float32"),
        ((IDX, WTE[0]), {}, r"expected wte \[V, C\] of a floating dtype, got wte=\[4\]"),
        ((IDX, WTE.long()), {}, r"expected wte \[V, C\] of a floating dtype, got .*int64"),
        ((IDX, WTE.to("meta")), {}, r"expected idx on wte's device meta, got idx on cpu"),
        ((IDX, WTE, WPE.new_ones(3, 5)), {}, r"wpe \[positions, C\] with C=4, got wpe=\[3, 5"),
        ((IDX, WTE, WPE.half()), {}, r"expected wpe like wte .*got wpe=torch.float16"),
        *(((IDX, WTE, WPE), {"first_position": n}, rf"in \[0, 3\), got first_position={n}")
          for n in (2, -1)),
    ],
)  # fmt: skip
def test_what_is_refused(args, options, words):
    """On a CPU: ids on a GPU are not checked."""
    with pytest.raises(ValueError, match="embedding: .*" + words):
        embedding(*args, **options)
