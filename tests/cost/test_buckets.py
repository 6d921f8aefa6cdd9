"""The buckets of a model that need not exist are those that parallelize() makes."""

import pytest
from memory_cells import setup, workload

from fastpar.comm.mesh import Mesh
from fastpar.cost.buckets import buckets_of
from fastpar.measure.short_run import ShortRun
from fastpar.testing import run_ranks

ONE = workload(n_layer=6, width=128, tokens=16, vocab=500)


def sizes(stage, tp):
    """Elements of each bucket of a run."""
    s = setup(world_size=2, zero_stage=stage, tp=tp, bucket_mb=0.25)
    run = ShortRun(ONE, s, Mesh(tp=tp, device="cpu"))
    return [b.spec.numel for b in run.engine.buckets]


@pytest.mark.parametrize(("stage", "tp"), [(0, 1), (2, 1), (0, 2)])
def test_the_buckets_of_parallelize(stage, tp):
    found, *_ = run_ranks(sizes, 2, stage, tp)
    s = setup(world_size=2 * tp, zero_stage=stage, tp=tp, bucket_mb=0.25)
    mine, n_shards = buckets_of(ONE, s), 2 if stage else 1
    kinds = [kind.padded(n_shards) for kind in mine.kinds.elements()]
    assert sorted(kinds) == sorted(found)
    assert [b.numel for b in mine.layout.buckets] == found or n_shards > 1
    assert mine.padded(n_shards) == sum(found)
    assert mine.padded(1) - 256 * 80 < mine.elements < mine.padded(1)
