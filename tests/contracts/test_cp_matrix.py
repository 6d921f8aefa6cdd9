"""The matrix of context parallelism: every mesh, stage and option is the run of one process.

tp_cells.py has the cells and the run that they are compared with. Four heads and six positions, of
which some of these cp divide neither.
"""

import functools
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cells import few, slow
from packed_rows import positions_of
from tp_cells import (
    ACCUM,
    STEPS,
    Cell,
    assert_same_run,
    batch,
    build,
    micro_batch,
    plain,
    run,
    whole_state,
)

from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.engine.pipeline_step import pipeline_step
from fastpar.nn.recompute import recompute
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import param_groups
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

AXES = {
    "cp": (2, 3, 4),
    "method": ("heads", "keys"),
    "documents": (False, True),
    "tp": (1, 2),
    "dp": (1, 2),
    "stage": (0, 1, 2, 3),
    "sequence": (True, False),
    "dropout": (True, False),
    "clip": (True, False),
    "accum": ("once", "shard", "full"),
    "recompute": ("none", "full", "selective"),
    "precision": ("fp64", "fp32"),
    "time": (6, 5),
}


@functools.cache
def all_cells():
    """Of the product of AXES some hundred, and the few of these that have every pair of values."""
    every = list(itertools.product(*AXES.values()))
    random.Random(0).shuffle(every)
    left = [Cell(**dict(zip(AXES, values))) for values in every]
    left = [c for c in left if c.cp * c.tp <= 4 and (c.tp > 1 or c.sequence)]
    # Masks of documents are numbered by micro-batch: one process has those of one alone.
    left = [c for c in left if not (c.documents and c.dropout) or c.micro_batches == 1]
    quick = few(left[:900], pairs, lambda c: (c.tp * c.dp * c.cp) ** 0.5)
    return [*quick, *(slow(c) for c in left[:150] if c not in quick)]


def pairs(cell):
    return set(itertools.combinations([(n, getattr(cell, n)) for n in AXES], 2))


@pytest.mark.parametrize("cell", all_cells(), ids=str)
def test_cell(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    ("cell", "transport"),
    [
        (Cell(1, 1, 3, cp=2, dropout=True, clip=True), "torch"),
        slow(Cell(1, 2, 2, cp=2, dropout=True), "shm"),
        slow(Cell(2, 1, 1, cp=2, dropout=True), "torch"),
        slow(Cell(1, 1, 0, cp=3, time=5), "torch"),
        (Cell(1, 1, 2, cp=2, dropout=True, method="keys", documents=True), "torch"),
        slow(Cell(1, 2, 3, cp=2, dropout=True, method="keys"), "shm"),
    ],
    ids=str,
)
def test_processes(cell, transport):
    assert_same_run(cell, run(cell, backend="gloo", transport=transport))


# Deterministic mode


@pytest.mark.parametrize("method", ["heads", "keys"])
@pytest.mark.parametrize(
    ("cp", "dp", "stage", "accum"),
    [
        (2, 1, 3, "shard_4"),
        (2, 4, 0, "once"),
        *(
            slow(2, dp, stage, accum)
            for dp, accum in ((2, "shard"), (4, "once"))
            for stage in (1, 2)
        ),
        slow(4, 2, 3, "shard"),
    ],
)
def test_the_same_bits_at_every_stage_and_cut_into_dp_ranks(cp, dp, stage, accum, method):
    """Sums over a sequence's pieces are another order than one process has, but a fixed one."""
    cell = Cell(1, 4, 0, cp=cp, dropout=True, clip=True, deterministic=True, precision="fp32")
    cell = replace(cell, dp=1, accum="shard_4", method=method)
    expected = run(cell)[0]
    for result in run(replace(cell, dp=dp, stage=stage, accum=accum)):
        assert result["norms"] == expected["norms"]
        for name, p in expected["parameters"].items():
            assert torch.equal(result["parameters"][name], p), name


@pytest.mark.parametrize(
    ("mode", "method"), [("full", "heads"), ("selective", "keys"), slow("full", "keys")]
)
def test_recomputation_changes_no_bit(mode, method):
    cell = Cell(1, 1, 0, cp=2, dropout=True, precision="fp32", deterministic=True, method=method)
    [stored, *_], [again, *_] = run(cell), run(replace(cell, recompute=mode))
    assert again["losses"] == stored["losses"]
    for name, p in stored["parameters"].items():
        assert torch.equal(again["parameters"][name], p), name


# What is sent


@pytest.mark.parametrize(("cp", "heads"), [(2, 4), (3, 4), (4, 4), (3, 6)])
def test_bytes_of_a_layer_are_those_of_the_formula(cp, heads):
    """8 (cp - 1) / cp^2 of B*T*C elements, both ways, of the heads as they are padded."""
    padded = -(-heads // cp) * cp
    cell = Cell(1, 1, 0, cp=cp, n_head=heads, time=12, precision="fp32")
    for sent in run_ranks(functools.partial(count_bytes, cell), cp):
        layers, units = 2, 4 * 12 * padded * cell.head_dim * 4
        assert sent["all_to_all"] * cp**2 == layers * 8 * (cp - 1) * units


@pytest.mark.parametrize(("cp", "heads"), [(2, 4), (3, 4), (4, 4), (5, 4)])
def test_bytes_of_a_layer_by_keys(cp, heads):
    """2 (cp - 1) / cp of B*T*C elements forward, twice that backward; no head is padded."""
    cell = Cell(1, 1, 0, cp=cp, n_head=heads, time=2 * cp, precision="fp32", method="keys")
    for sent in run_ranks(functools.partial(count_bytes, cell), cp):
        layers, units = 2, 4 * 2 * cp * heads * cell.head_dim * 4
        assert sent["all_gather"] * cp == layers * 4 * (cp - 1) * units
        assert sent["all_to_all"] * cp == layers * 2 * (cp - 1) * units


def count_bytes(cell):
    mesh = Mesh(cp=cell.cp)
    model = build(cell, 0)
    parallelize(model, mesh, Parallel.of(cp_method=cell.method))
    sent = Counter()

    def observer(group, op, n_bytes, begin):
        of_others = (cell.cp - 1) / cell.cp
        sent[op] += n_bytes * of_others
        return begin()

    model.cp.group.observers = (observer,)
    model(*batch(cell, 0)).backward()
    return sent


def test_recomputation_sends_the_forward_of_a_block_again():
    """So that q, k, v and o are not kept twice."""
    cell = Cell(1, 1, 0, cp=2, dropout=True)
    none, selective, full = (
        run_ranks(functools.partial(count_collectives, replace(cell, recompute=mode)), 2)[0]
        for mode in ("none", "selective", "full")
    )
    assert selective == full == none + Counter({"all_to_all": 4})


def count_collectives(cell):
    model = build(cell, 0)
    parallelize(model, Mesh(cp=cell.cp))
    recompute(model, cell.recompute)
    seen = Counter()

    def observer(group, op, n_bytes, begin):
        seen[op] += 1
        return begin()

    engine_of(model)
    model.cp.group.observers = (observer,)
    model(*batch(cell, 0)).backward()
    return seen


# Stages of a pipeline


def staged(cell, pp):
    """A rank's run of a cell on stages, whose micro-batches are those of accumulation."""
    mesh, model = Mesh(dp=cell.dp, tp=cell.tp, cp=cell.cp, pp=pp), build(cell, 0)
    many, sizes = ACCUM[cell.accum][0], {"bucket_mb": 0.01, "first_bucket_mb": 0.003}
    parallelize(
        model,
        mesh,
        Parallel.of(
            zero_stage=cell.stage, sequence_parallel=cell.sequence, cp_method=cell.method, **sizes
        ),
    )
    recompute(model, cell.recompute)
    limit = 0.25 if cell.clip else float("inf")
    optimizer = AdamW(param_groups(model, 0.1), lr=2e-2, eps=1e-3, max_grad_norm=limit)
    losses, norms = [], []
    for step in range(STEPS):
        given = [
            micro_batch(cell, step, mesh.dp_rank * many + j, cell.micro_batches)
            for j in range(many)
        ]
        xs, ys, keys = zip(*given)
        places = [positions_of(cell, x, key) for x, key in zip(xs, keys)]
        more = {"positions": torch.cat([p["positions"] for p in places])} if places[0] else {}
        loss = pipeline_step(
            model, torch.cat(xs), torch.cat(ys), micro_batches=many, rng_keys=keys, **more
        )
        optimizer.step()
        losses.append(loss.item())
        norms.append(optimizer.grad_norm.item())
        optimizer.zero_grad()
    return mesh.dp_rank, losses, norms, whole_state(model)


STAGED = [
    (2, Cell(1, 1, 2, cp=2, dropout=True, clip=True, accum="full")),
    (2, Cell(1, 1, 0, cp=2, method="keys", documents=True, accum="full", time=5)),
    *(
        slow(2, Cell(tp, dp, stage, cp=cp, method=method, accum="full", **more))
        for tp, dp, cp, stage, method, more in (
            (2, 1, 2, 0, "heads", {"dropout": True}),
            (2, 1, 2, 3, "keys", {"documents": True}),
            (2, 1, 2, 1, "keys", {"clip": True, "sequence": False}),
            (1, 1, 3, 0, "keys", {"dropout": True, "recompute": "full"}),
            (1, 1, 4, 1, "heads", {"recompute": "selective"}),
            (1, 2, 2, 3, "keys", {"dropout": True, "clip": True}),
            (1, 2, 2, 2, "heads", {"documents": True, "recompute": "full"}),
        )
    ),
]


@pytest.mark.parametrize(("pp", "cell"), STAGED, ids=str)
def test_stages_of_a_pipeline(pp, cell):
    expected = plain(cell, "fp64")
    results = run_ranks(functools.partial(staged, cell, pp), pp * cell.tp * cell.cp * cell.dp)
    seen = set()
    for step, want in enumerate(expected["losses"]):
        found = {dp: losses[step] for dp, losses, _, _ in results}
        assert sum(found.values()) / cell.dp == pytest.approx(want, rel=1e-12)
    for _, _, norms, parameters in results:
        assert norms == pytest.approx(expected["norms"], rel=1e-6)
        for name, p in parameters.items():
            want = expected["parameters"][name]
            assert (p - want).abs().max() <= 1e-12 * want.abs().max(), name
        seen |= set(parameters)
    assert seen == set(expected["parameters"])
