"""Numbers and errors of every rank, on every rank."""

import torch

from fastpar import Mesh, parallelize
from fastpar.engine.control import broadcast_text, gather_errors, gather_numbers
from fastpar.engine.engine import engine_of
from fastpar.testing import run_ranks


def rank_of(fn, tp=1):
    def work():
        model = torch.nn.Linear(4, 4) if tp == 1 else split()
        mesh = Mesh(tp=tp, device="cpu")
        parallelize(model, mesh)
        return fn(engine_of(model), mesh.rank)

    return work


def split():
    from fastpar import GPT, GPTConfig

    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=4, vocab_size=9))


def test_every_rank_learns_of_all():
    for tp in (1, 2):
        got = run_ranks(rank_of(lambda e, rank: gather_numbers(e, rank + 0.5), tp), 2)
        assert got == [[0.5, 1.5]] * 2
    assert gather_numbers(None, 3.0) == [3.0]


def test_errors_have_the_rank_where_they_were():
    def work(engine, rank):
        return (
            gather_errors(engine, None),
            gather_errors(engine, "no room, n\u00e4mlich" if rank == 1 else None),
            broadcast_text(engine, f"from {rank}"),
        )

    assert run_ranks(rank_of(work), 3) == [({}, {1: "no room, n\u00e4mlich"}, "from 0")] * 3
    assert gather_errors(None, None) == {}
    assert gather_errors(None, "x") == {0: "x"}
    assert broadcast_text(None, "mine") == "mine"


def test_a_long_text_is_cut():
    got = run_ranks(rank_of(lambda e, rank: gather_errors(e, "x" * 9999)), 2)
    assert len(got[0][1]) == 2048
