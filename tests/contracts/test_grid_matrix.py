"""Layers split over a grid of ranks: every grid, stage and option is the run of one process.

tp_cells.py has the run that they are compared with; here in fp64, to 1e-12.
"""

import math

import pytest
from cells import slow
from tp_cells import Cell, assert_same_run, run

GRIDS = ((1, 2), (2, 1), (2, 2), (2, 2, 2))
MODES = ("none", "full", "selective")
PLAIN = {"dropout": False, "clip": True}
DROPS = {"dropout": True, "clip": True}


def cell(grid, **options):
    return Cell(math.prod(grid), grid=grid, **options)


QUICK = [
    cell((1, 2), stage=0, **DROPS),
    cell((2, 1), stage=3, dp=2, recompute="full", **DROPS),
    cell((2, 2), stage=1, dp=2, recompute="selective", **DROPS),
    cell((2, 2), stage=2, recompute="full", n_head=6, **PLAIN),
    cell((2, 2, 2), stage=3, **DROPS),
    cell((2, 2), n_head=5, head_dim=4, accum="full", **DROPS),  # 3 + 2 heads, one of padding
]


def matrix():
    """Grid x stage x dropout x recomputation, with the vocabulary tied as GPT has it."""
    product = [
        cell(grid, stage=stage, dropout=dropout, recompute=mode, clip=True)
        for grid in GRIDS
        for stage in range(4)
        for dropout in (False, True)
        for mode in MODES
    ]
    more = [
        cell((2, 2), stage=3, dp=2, shard_size=1, **DROPS),
        cell((2, 2, 2), stage=2, shard_size=1, deterministic=True, **DROPS),
        cell((2, 2), stage=2, accum="shard", **DROPS),
        cell((2, 1, 2), stage=3, shard_size=2, **DROPS),
        cell((1, 2, 2), stage=1, accum="no_sync", **DROPS),
        cell((4, 1), stage=1, **DROPS),
        cell((1, 4), stage=1, **DROPS),
        cell((2, 2), vocab_size=300, **PLAIN),
        *(cell((2, 2), dp=2, stage=s, precision="fp32", **DROPS) for s in (0, 3)),
        cell((2, 2), dp=2, stage=2, precision="bf16", **DROPS),
        cell((2, 2), stage=1, precision="fp16", **DROPS),
    ]
    return [*QUICK, *(slow(c) for c in [*product, *more] if c not in QUICK)]


@pytest.mark.parametrize("cell", matrix(), ids=str)
def test_cell(cell):
    assert_same_run(cell, run(cell))
