"""The matrix of experts: every layout is the run of a dense oracle, in deterministic mode bit for
bit that of one process."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from cells import few, slow
from ep_cells import Cell, assert_same_bits, assert_same_run, build, run

import fastpar

AXES = {
    "ep": (1, 2, 4),
    "dp": (1, 2, 4),
    "stage": (0, 1, 2, 3),
    "accum": ("full", "shard"),
    "tp": (1, 2),
    "pp": (1, 2),
    "recompute": ("none", "full", "selective"),
    "kind": tuple(Cell.KINDS),
}


@functools.cache
def all_cells():
    every = [Cell(**dict(zip(AXES, values))) for values in itertools.product(*AXES.values())]
    left = [c for c in every if c.dp % c.ep == 0 and c.ranks <= 8 and (c.pp == 1 or c.tp == 1)]
    random.Random(0).shuffle(left)
    quick = few(left[:600], pairs, lambda c: c.ranks**0.5)
    return [*quick, *(slow(c) for c in left[:160] if c not in quick)]


def pairs(cell):
    return set(itertools.combinations([(n, getattr(cell, n)) for n in AXES], 2))


@pytest.mark.parametrize("cell", all_cells(), ids=str)
def test_cell(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    ("cell", "transport"),
    [(Cell(2, 2, 3, "shard"), None), slow(Cell(2, 4, 2, tp=1), None), slow(Cell(2, 2, tp=2), None)],
    ids=str,
)
def test_processes(cell, transport):
    assert_same_run(cell, run(cell, backend="gloo"))


@pytest.mark.parametrize(
    "cell", [Cell(2, 4, 2, shard_size=2), slow(Cell(2, 4, 3, "shard", shard_size=2))], ids=str
)
def test_copies_of_shards(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(2, 2, 2, optimizer="muon"),
        slow(Cell(2, 4, 3, optimizer="muon")),
        slow(Cell(4, 4, 0, optimizer="muon")),
        slow(Cell(2, 2, 1, tp=2, optimizer="muon")),
    ],
    ids=str,
)
def test_muon_at_every_layout(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    "cell",
    [Cell(2, 4, 1, pp=2, kind="bias"), slow(Cell(2, 4, 3, "shard", pp=2, kind="bias"))],
    ids=str,
)
def test_a_stage_without_experts_makes_the_groups_of_the_others(cell):
    """Every other layer has experts: all of them are in one of two stages."""
    assert_same_run(cell, run(cell))


def test_muon_has_a_matrix_for_each_expert():
    """Each is orthogonal by itself, and the router is AdamW's."""
    model = build(Cell(1))
    groups = fastpar.muon_groups(model)
    adamw = {id(p) for g in groups if g.get("adamw") for p in g["params"]}
    assert id(model.h[0].mlp.router.weight) in adamw
    opt = fastpar.Muon(groups, lr=1.0, weight_decay=0.0)
    weight = model.h[0].mlp.c_fc.weight
    before = weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    for moved in (before - weight.detach()) / 2:  # sqrt(64 / 16), of each expert
        s = torch.linalg.svdvals(moved)
        assert s.min() > 0.8
        assert s.max() < 1.2


BITS = [
    Cell(2, 2, 0),
    Cell(2, 4, 3, "shard"),
    Cell(4, 4, 2, kind="capacity"),
    *(
        slow(Cell(ep, dp, stage, accum))
        for ep, dp in ((1, 4), (2, 2), (2, 4), (4, 4))
        for stage in (0, 1, 2, 3)
        for accum in ("full", "shard")
    ),
    slow(Cell(2, 2, 2, recompute="full", kind="bias")),
    slow(Cell(2, 2, 2, optimizer="muon")),
    slow(Cell(2, 4, 1, precision="fp32", n_embd=96)),
    slow(Cell(2, 4, 3, "shard", kind="Switch")),
]


@functools.cache
def one_process(cell):
    return run(replace(cell, ep=1, dp=1, stage=0, accum="full", recompute="none"))[0]


@pytest.mark.parametrize("cell", BITS, ids=str)
def test_deterministic_mode_has_the_bits_of_one_process(cell):
    cell = replace(cell, deterministic=True)
    for result in run(cell):
        assert_same_bits(result, one_process(cell))


def test_a_pipeline_has_them_too():
    cell = Cell(2, 2, 0, pp=2, deterministic=True)
    expected = one_process(replace(cell, pp=1))
    for result in run(cell):
        assert all(map(torch.equal, result["norms"], expected["norms"]))


SEQUENCES = [
    Cell(1, 1, 2, cp=2, kind="bias"),
    Cell(2, 2, 0, cp=2, method="keys"),
    slow(Cell(2, 2, 3, "shard", cp=2)),
    slow(Cell(2, 2, 1, tp=2, cp=2, method="keys", kind="Switch")),
    slow(Cell(1, 2, 3, pp=2, cp=2)),
    slow(Cell(2, 2, 2, pp=2, cp=2, method="keys", recompute="full")),
    slow(Cell(4, 4, 2, cp=2, recompute="selective", method="keys", kind="all")),
    slow(Cell(1, 1, 0, cp=4, method="keys", optimizer="muon")),
    *(slow(Cell(1, 2, stage, accum, cp=2)) for stage in range(4) for accum in ("full", "shard")),
]


@pytest.mark.parametrize("cell", SEQUENCES, ids=str)
def test_ranks_that_share_out_sequences_too(cell):
    assert_same_run(cell, run(cell))


OFFLOADED = [
    Cell(2, 2, 2, offload="optimizer"),
    slow(Cell(4, 4, 3, offload="parameters")),
    slow(Cell(2, 4, 0, offload="optimizer", kind="bias")),
    slow(Cell(2, 4, 1, offload="optimizer", deterministic=True, kind="capacity")),
    slow(Cell(2, 4, 3, offload="parameters", shard_size=2)),
]


@pytest.mark.parametrize("cell", OFFLOADED, ids=str)
def test_states_on_the_host(cell):
    """Over a stand-in for the bus."""
    assert_same_run(cell, run(cell))
