"""Tensor parallelism in odd worlds: three ranks, lengths and vocabularies that do not divide."""

import functools

import pytest
import torch
from cells import slow
from tp_cells import Cell, assert_same_run, batch, build, run

from fastpar.comm.mesh import Mesh
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import make_key
from fastpar.optim.adamw import AdamW
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell(3, 1, 0, n_head=3, dropout=True, clip=True),
        Cell(3, 2, 3, n_head=3, dropout=True, time=7),
        slow(Cell(3, 1, 0, False, n_head=3, dropout=True, time=5)),
        slow(Cell(3, 2, 1, False, n_head=6, dropout=True, clip=True)),
        slow(Cell(3, 1, 0, n_head=6, precision="fp32", dropout=True)),
    ],
    ids=str,
)
def test_three_ranks(cell):
    assert_same_run(cell, run(cell))


LENGTHS = [(4, 2, 2, 7)]
MORE_LENGTHS = [
    (4, 2, 2, 1),
    (2, 4, 3, 5),
    (4, 2, 0, 5),
    (4, 2, 3, 11),
    (2, 4, 1, 7),
    (2, 4, 2, 11),
    (4, 4, 1, 3),
]


@pytest.mark.parametrize(
    ("tp", "dp", "stage", "time"), [*LENGTHS, *(slow(*m) for m in MORE_LENGTHS)]
)
def test_lengths_that_the_ranks_do_not_divide(tp, dp, stage, time):
    """Each dp rank has 4 / dp samples, padded behind their last position."""
    cell = Cell(tp, dp, stage, dropout=True, clip=True, time=time)
    assert cell.samples // dp * time % tp
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(4, 1, 0, vocab_size=100, dropout=True),  # 128 rows a rank: three have padding only
        slow(Cell(2, 2, 3, False, vocab_size=100, clip=True)),
        slow(Cell(2, 2, 2, vocab_size=129)),
        slow(Cell(3, 1, 0, vocab_size=128, n_head=3, precision="fp32")),
    ],
    ids=str,
)
def test_ranks_with_padding_only(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    ("tp", "rows", "n_head"),
    [
        (3, 16768, 3),
        slow(2, 25216, 4),
        slow(4, 12672, 4),
    ],
)
def test_the_vocabulary_of_gpt2(tp, rows, n_head):
    """50257 rows as multiples of 128 on each rank, and what is behind them stays 0."""
    cell = Cell(tp, vocab_size=50257, n_head=n_head)
    results = run_ranks(functools.partial(pad_and_step, cell), tp)
    model = build(cell, 0)
    loss = take_steps(cell, model)
    for result_loss, shape, behind, state in results:
        assert shape == rows
        assert result_loss == pytest.approx(loss, rel=1e-12)
        assert behind == (tp * rows - 50257) * 4 * n_head
        assert state.keys() == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            assert (state[name] - p).abs().max() <= 1e-12 * p.abs().max(), name


def pad_and_step(cell):
    mesh = Mesh(dp=cell.dp, tp=cell.tp)
    model = build(cell, mesh.rank)
    parallelize(model, mesh, Parallel.of(sequence_parallel=cell.sequence))
    loss = take_steps(cell, model)
    wte = model.wte.weight
    first = mesh.tp_rank * wte.shape[0]
    zeros = (wte[max(0, cell.vocab_size - first) :] == 0).sum()
    torch.distributed.all_reduce(zeros)
    return loss, wte.shape[0], zeros.item(), model.state_dict()


def take_steps(cell, model):
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    for step in range(2):
        x, y = batch(cell, step)
        loss = model(x, y, rng_key=make_key(0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
