"""Late collectives, poisoned buffers, compared replicas: no bit of any cell changes.

A buffer that is freed, refilled or read too early mostly wins its race and goes unseen. Here each
collective of each rank starts late, by its own random time, and freed memory holds nans; cells are
compared with the same run of one process as in test_zero_matrix, which is the undelayed run.
"""

import pytest
from cells import slow
from zero_cells import Cell, all_cells, assert_same_run, run

from fastpar.engine.debug import Debug

FEW = [
    Cell(0, 2, accum="shard", precision="bf16", deterministic=False),
    Cell(1, 2, accum="shard_no_sync", precision="fp16", checkpoint="non-reentrant"),
    Cell(2, 4, 2, "full_2", clip=True),
    Cell(3, 2, accum="shard_2", precision="bf16", model="gpt", checkpoint="non-reentrant"),
    Cell(3, 3, accum="once", model="untied", frozen=True, deterministic=False),
]
MORE = [
    Cell(1, 3, clip=True, deterministic=False),
    Cell(2, 4, accum="shard", checkpoint="non-reentrant", deterministic=False),
    Cell(2, 4, 2, "full_no_sync", clip=True),
    Cell(3, 4, 2, "shard", "fp16", checkpoint="non-reentrant", clip=True),
]


def fuzz(cell, seed, delay_ms, **options):
    debug = Debug(delay_ms=delay_ms, poison=True, check_replicas=True, seed=seed)
    assert_same_run(cell, run(cell, debug=debug, **options))


@pytest.mark.parametrize("cell", [*FEW, *map(slow, MORE)], ids=str)
def test_few_cells(cell):
    fuzz(cell, 0, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": 3}, {"bucket_mb": 1e-6}], ids=str
)
def test_prefetch_and_many_buckets(options):
    fuzz(Cell(3, 3, accum="shard_2", clip=True, deterministic=False), 1, 1.0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [c for c in all_cells() if c.world_size > 1], ids=str)
def test_all_cells(cell):
    fuzz(cell, 2, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cell", [*FEW, *MORE], ids=str)
def test_long_delays(cell, seed):
    fuzz(cell, 3 + seed, 8.0)
