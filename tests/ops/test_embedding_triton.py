"""embedding's Triton kernels: against the oracle, runs of every length, ids outside."""

import pytest
import torch
from cells import covering, slow

pytest.importorskip("triton", reason="needs triton")

from test_embedding import DTYPES, RNG, added, tables

from fastpar.kernels import Rng, embedding, embedding_triton, make_key
from fastpar.kernels.reference import embedding_ref
from fastpar.testing import assert_matches_oracle


def on(device, *tensors):
    return [t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]


def reference(idx, wte, wpe=None, **options):
    """The oracle, whose mask is made on the CPU."""
    tables = [None if t is None else t.cpu() for t in (wte, wpe)]
    return embedding_ref(idx.cpu(), *tables, **options).to(wte.device)


@pytest.mark.usefixtures("poisoned")
@covering(
    1, (("B", "T", "C"), [(1, 1, 1), (5, 7, 127), (2, 3, 1000), (9, 2, 130)]), ("dtype", DTYPES)
)
def test_matches_oracle(triton_device, B, T, C, dtype):
    """The kernels have one configuration for every architecture."""
    idx = torch.randint(0, 50, (B, T)).to(triton_device)
    inputs = [idx, *on(triton_device, *tables(50, T + 4, C, dtype))]
    for first, p in ((0, 0.3), (3, 0.0)):

        def call(op, first=first, p=p):
            return lambda i, wte, wpe: op(i, wte, wpe, first_position=first, dropout_p=p, rng=RNG)

        assert len(assert_matches_oracle(call(embedding), call(reference), inputs)) == 3


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        *(
            slow(*dtypes)
            for dtypes in [(d, d) for d in DTYPES[1:]] + [(torch.float16, torch.float32)]
        ),
    ],
)
def test_wte_grad_gets_the_gradient_added(triton_device, dtype, wide):
    """dropout's oracle is on the CPU: without it here, with it in the next test."""
    wte, wpe = tables(50, 12, 33, dtype)
    idx = torch.randint(0, 2, (13, 12), dtype=torch.int32)
    dx, total = torch.randn(13, 12, 33).to(dtype), torch.randn(50, 33).to(wide)
    inputs = [t.detach().to(triton_device) for t in (idx, wte, wpe, total, dx)]
    assert_matches_oracle(added(embedding, 0.0), added(embedding_ref, 0.0), inputs)
    got, _ = added(embedding, 0.0)(*inputs)
    assert torch.equal(got[4:].cpu(), total[4:])


def test_adding_to_zeros_is_the_dense_gradient(triton_device):
    wte, wpe = on(triton_device, *tables(9, 10, 40))
    idx = torch.randint(0, 2, (15, 10)).to(triton_device)
    dx = torch.randn(15, 10, 40).to(triton_device)
    x = embedding(idx, wte, wpe, dropout_p=0.3, rng=RNG)
    want = torch.autograd.grad(x, (wte, wpe), dx)
    both = torch.zeros(9, 80, device=triton_device)
    got = added(embedding, 0.3)(idx, wte, wpe, both[:, 40:], dx)
    for a, b in zip(got, want):
        assert torch.equal(a, b)


PIECE = embedding_triton._PIECE
RUNS = {
    "one token": [5 * PIECE + 3],
    "whole pieces": [PIECE, PIECE, 2 * PIECE],
    "crosses every border": [PIECE - 1, 2, PIECE - 1, PIECE + 1, 3 * PIECE, 1],
    "more pieces than are added at once": [10, 11 * PIECE, 7],
    "single ones": [1] * (PIECE + 5),
    "begins and ends at a border": [3, PIECE - 3, 3 * PIECE, 5],
}
BORDERS = "crosses every border", "more pieces than are added at once"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", [n if n in ("one token", *BORDERS) else slow(n) for n in RUNS])
def test_runs_of_every_length(triton_device, name):
    """Small whole numbers: the sums are exact, so a term lost or counted twice shows."""
    runs = RUNS[name]
    ids = torch.repeat_interleave(torch.arange(len(runs)) * 2 + 1, torch.tensor(runs))
    order = torch.randperm(len(ids))
    idx, dx = ids[order][None], torch.randint(-8, 9, (1, len(ids), 128)).float()
    wte = torch.zeros(2 * len(runs) + 2, 128)
    want = torch.zeros_like(wte).index_add_(0, idx[0], dx[0])
    got = torch.autograd.grad(
        embedding(idx.to(triton_device), *(w := on(triton_device, wte.requires_grad_()))),
        w,
        dx.to(triton_device),
    )[0]
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("sms", [1, 1000])
def test_any_number_of_programs(triton_device, monkeypatch, sms):
    wte, _ = on(triton_device, *tables(9, 1, 20))
    idx = torch.randint(0, 9, (1, 200)).to(triton_device)
    dx = torch.randn(1, 200, 20).to(triton_device)
    want = torch.autograd.grad(embedding(idx, wte), wte, dx)[0]
    monkeypatch.setattr(embedding_triton, "sm_count", lambda device: sms)
    assert torch.equal(torch.autograd.grad(embedding(idx, wte), wte, dx)[0], want)


def test_16_bit_gradients_of_a_frequent_token_are_summed_in_float32(triton_device):
    """1000 terms of 1 + 1/128: bf16 sums stop growing at 256."""
    wte = torch.zeros(3, 4, dtype=torch.bfloat16, device=triton_device, requires_grad=True)
    idx = torch.ones(1, 1000, dtype=torch.int64, device=triton_device)
    dx = torch.full((1, 1000, 4), 1.0078125, dtype=torch.bfloat16, device=triton_device)
    embedding(idx, wte).backward(dx)
    assert torch.equal(wte.grad[1].cpu(), torch.full((4,), 1007.8125).bfloat16())
    assert (wte.grad[[0, 2]] == 0).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("wrong", [-1, 5, -(2**40), 2**31, 2**32 + 3])
def test_ids_outside_give_nan_and_no_gradient(triton_device, wrong):
    """Straight to the host functions: on CPU tensors the op refuses such ids."""
    wte, wpe = (t.detach().to(triton_device) for t in tables(5, 3, 20))
    idx = torch.tensor([[4, wrong, 0]], device=triton_device)
    mask = (make_key(1, 2, triton_device), 3, 77)
    x = embedding_triton.embedding_fwd(idx, wte, wpe, 0, None, 0, 0)
    assert x[0, 1].isnan().all()
    assert torch.equal(x[0, [0, 2]], wte[[4, 0]] + wpe[[0, 2]])
    dropped = embedding_triton.embedding_fwd(idx, wte, wpe, 0, *mask)
    assert (dropped[0, 1].isnan() | (dropped[0, 1] == 0)).all()
    dx = torch.ones(1, 3, 20, device=triton_device)
    for add in (False, True):
        # Rows of a larger buffer on each side: nothing may be written there.
        around = torch.zeros(9, 20, device=triton_device)
        embedding_triton.embedding_bwd_wte(dx, idx, None, 0, 0, around[2:7], add)
        assert torch.equal(around[:, 0].cpu(), torch.tensor([0.0, 0, 1, 0, 0, 0, 1, 0, 0]))
    # A run of them that crosses a border of the sorted list.
    many = torch.full((1, 3 * PIECE), wrong, device=triton_device)
    around.zero_()
    ones = torch.ones(1, 3 * PIECE, 20, device=triton_device)
    embedding_triton.embedding_bwd_wte(ones, many, None, 0, 0, around[2:7], False)
    assert (around == 0).all()


def test_ids_on_the_cpu_are_still_checked(triton_device):
    if triton_device != "cpu":
        pytest.skip("tensors on a GPU: their ids are not checked")
    with pytest.raises(ValueError, match=r"expected token ids in \[0, 5\), got id=5"):
        embedding(torch.tensor([[5]]), torch.ones(5, 4))


def test_infinite_rows_stay_their_own(triton_device):
    wte = torch.ones(4, 20, device=triton_device, requires_grad=True)
    dx = torch.ones(1, 4, 20, device=triton_device)
    dx[0, 1], dx[0, 2] = torch.inf, torch.nan
    idx = torch.tensor([[0, 1, 2, 0]], device=triton_device)
    embedding(idx, wte).backward(dx)
    want = torch.tensor([2.0, torch.inf, torch.nan, 0])
    torch.testing.assert_close(wte.grad[:, 0].cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_one_table_for_both(triton_device):
    """wpe may be the very tensor wte."""
    table = torch.randn(6, 20, device=triton_device)
    idx = torch.tensor([[4, 0]], device=triton_device)
    assert torch.equal(embedding(idx, table, table), embedding_ref(idx, table, table))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_tokens(triton_device, shape):
    wte, wpe = on(triton_device, *tables(5, 6, 4))
    idx = torch.zeros(shape, dtype=torch.int64, device=triton_device)
    x = embedding(idx, wte, wpe)
    assert x.shape == (*shape, 4)
    x.sum().backward()
    assert (wte.grad == 0).all()
    assert (wpe.grad == 0).all()
    total = torch.ones(5, 4, device=triton_device)
    embedding(idx, wte, wpe, wte_grad=total).sum().backward()
    assert (total == 1).all()


def test_no_columns(triton_device):
    wte = torch.ones(5, 0, device=triton_device, requires_grad=True)
    x = embedding(torch.tensor([[4, 0]], device=triton_device), wte)
    x.sum().backward()
    assert x.shape == (1, 2, 0)
    assert wte.grad.shape == (5, 0)


def test_dropout_has_the_samples_of_the_batch(triton_device):
    """A batch cut in two, whose second half starts at the next sample."""
    wte, wpe = (t.detach().to(triton_device) for t in tables(5, 9, 40))
    idx = torch.randint(0, 5, (4, 9)).to(triton_device)
    whole = embedding(idx, wte, wpe, dropout_p=0.5, rng=Rng(make_key(7, 2**33 - 2), 3))
    for start, n in ((0, 1), (1, 3)):
        rng = Rng(make_key(7, 2**33 - 2 + start), 3)
        part = embedding(idx[start : start + n], wte, wpe, dropout_p=0.5, rng=rng)
        assert torch.equal(part, whole[start : start + n])
