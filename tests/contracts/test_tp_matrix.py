"""The matrix of tensor parallelism: every mesh, stage and option is the run of one process.

tp_cells.py has the cells and the run that they are compared with.
"""

import functools
import itertools

import pytest
import torch
from cells import covering, slow
from tp_cells import (
    AXES,
    OVERFLOW_STEP,
    Cell,
    all_cells,
    assert_same_run,
    bounds,
    build,
    pairs,
    plain,
    run,
    values_of,
    whole_state,
)

from fastpar.comm.mesh import Mesh
from fastpar.engine.parallelize import parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def matrix():
    """make test runs the cells that together have every pair, make test-slow the rest."""
    return [c if quick else slow(c) for c, quick in all_cells()]


@pytest.mark.parametrize("cell", matrix(), ids=str)
def test_cell(cell):
    assert_same_run(cell, run(cell))


def test_the_matrix_is_the_product_and_its_quick_part_has_every_pair():
    cells = [c for c, _ in all_cells()]
    wanted = set(itertools.product(*AXES.values()))
    found = {tuple(getattr(c, n) for n in AXES) for c in cells}
    assert len(found) == len(cells)
    assert {v for v in wanted - found if v[0] > 1 or v[3]} == set()
    quick = [c for c, is_quick in all_cells() if is_quick]
    assert set().union(*map(pairs, quick)) == set().union(*map(pairs, cells))
    assert len(quick) < len(cells) / 8


def test_the_reference_trains_clips_and_draws_masks():
    """Otherwise cells could agree on nothing."""
    for model in AXES["model"]:
        truth = plain(Cell(model=model), "fp64")
        assert min(truth["norms"]) > 0.5  # twice the limit
        others = [plain(Cell(model=model, **{n: True}), "fp64") for n in ("clip", "dropout")]
        for name, p in truth["parameters"].items():
            for other in (truth["start"][name], *(o["parameters"][name] for o in others)):
                assert (p - other).abs().max() > 0.01 * p.abs().max(), (model, name)


@pytest.mark.parametrize(("precision", "at_most"), [("fp32", 1e-4), ("fp16", 0.05)])
def test_bounds_are_those_of_rounding(precision, at_most):
    """Nothing that the 2x rule lets through is near a wrong factor."""
    for model in AXES["model"]:
        cell = Cell(precision=precision, dropout=True, model=model)
        truth = values_of(plain(cell, "fp64"))
        for key, bound in bounds(cell).items():
            assert 0 < bound < at_most * truth[key].abs().max(), key


def test_the_reference_overflows():
    truth = plain(Cell(precision="fp16"), "fp16")
    assert not torch.tensor(truth["norms"][OVERFLOW_STEP]).isfinite()
    assert truth["scales"][OVERFLOW_STEP + 1] == truth["scales"][OVERFLOW_STEP] / 2


# Processes


@pytest.mark.parametrize(
    ("cell", "transport"),
    [
        slow(Cell(2, 1, 0, False, "untied", precision="fp32"), "shm"),
        (Cell(2, 2, 3, dropout=True, clip=True), "torch"),
        slow(Cell(2, 1, dropout=True, clip=True), "torch"),
        slow(Cell(2, 2, 2, precision="fp32"), "shm"),
        slow(Cell(4, 1, 0, model="untied", dropout=True), "shm"),
        slow(Cell(4, 1, 0, False, clip=True), "torch"),
    ],
    ids=str,
)
def test_processes(cell, transport):
    assert_same_run(cell, run(cell, backend="gloo", transport=transport))


# Initialization

MESHES = [(2, 1), (4, 1), (2, 2), (4, 2), (3, 1)]


@covering(1, (("tp", "dp"), MESHES), ("meta", [True, False]), ("sequence", [True, False]))
def test_first_weights_have_the_bits_of_one_process(tp, dp, meta, sequence):
    cell = Cell(tp, dp, sequence=sequence, n_head=12 if tp == 3 else 4, precision="fp32")
    expected = build(cell, 0).state_dict()
    for stage in (0, 3):
        for state in run_ranks(functools.partial(first_weights, cell, stage, meta), tp * dp):
            assert state.keys() == expected.keys()
            for name, p in expected.items():
                assert torch.equal(state[name], p), name


def first_weights(cell, stage, meta):
    mesh = Mesh(dp=cell.dp, tp=cell.tp)
    options = {"zero_stage": stage, "sequence_parallel": cell.sequence}
    if meta:
        values = build(cell, 0).state_dict()
        with torch.device("meta"):
            model = build(cell, 0)
        fill = lambda name, out: out.copy_(values[name])  # noqa: E731
        parallelize(model, mesh, Parallel.of(**options), materialize=fill)
    else:
        model = build(cell, mesh.rank)
        parallelize(model, mesh, Parallel.of(**options))
    return whole_state(model)
