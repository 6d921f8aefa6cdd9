"""The bytes of whole gradients under way, against an engine that is watched while it trains."""

import pytest
from memory_cells import setup, workload

from fastpar.comm.mesh import Mesh
from fastpar.cost.buckets import buckets_of
from fastpar.cost.gradient_flow import gradient_flow
from fastpar.measure.short_run import ShortRun
from fastpar.testing import run_ranks

SHAPE = {"n_layer": 6, "width": 128, "tokens": 16, "vocab": 500}


def buckets(stage=2, *, tp=1, n_layer=6):
    s = setup(world_size=2 * tp, zero_stage=stage, tp=tp, bucket_mb=0.25)
    return buckets_of(workload(**{**SHAPE, "n_layer": n_layer}), s)


def flow(buckets, *, stage=2, whole=False, **more):
    options = {"wire_bytes": 0, "sum_bytes": 0.0, "copies": False, "reduces": True, **more}
    return gradient_flow(buckets, stage=stage, bucket_mb=0.25, whole=whole, **options)


def watched(stage, tp):
    """(elements of each bucket, most bytes of whole gradients in a backward) of a run."""
    s = setup(world_size=2, zero_stage=stage, tp=tp, bucket_mb=0.25)
    run, most = ShortRun(workload(**SHAPE), s, Mesh(tp=tp, device="cpu")), 0

    def watch(p):
        nonlocal most
        alive = sum(b.grad_bytes for b in run.engine.buckets if b.grad is not None)
        most = max(most, alive)

    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(watch)
    for _ in range(2):
        run.step()
    return [b.spec.numel for b in run.engine.buckets], most


@pytest.mark.parametrize(("stage", "tp"), [(0, 1), (2, 1), (0, 2)])
def test_the_buckets_of_parallelize(stage, tp):
    (found, _), *_ = run_ranks(watched, 2, stage, tp)
    mine, n_shards = buckets(stage, tp=tp), 2 if stage else 1
    kinds = [kind.padded(n_shards) for kind in mine.kinds.elements()]
    assert sorted(kinds) == sorted(found)
    assert [b.numel for b in mine.layout.buckets] == found or n_shards > 1
    assert mine.padded(n_shards) == sum(found)
    assert mine.padded(1) - 256 * 80 < mine.elements < mine.padded(1)


def test_as_many_whole_gradients_as_the_engine_has():
    (_, most), *_ = run_ranks(watched, 2, 2, 1)
    mine = flow(buckets())
    tops = [top for pairs in mine.in_blocks for _, top in pairs]
    assert max(*tops, mine.at_table) == pytest.approx(most, rel=0.01)
    assert most < 0.8 * 4 * buckets().padded(1)  # not simply all


def test_stages_that_keep_whole_gradients_have_none_on_the_way():
    mine = flow(buckets(0), stage=1)
    assert mine == flow(buckets(0), stage=0)
    assert max(mine.at_loss, mine.at_end, mine.at_table) == 0
    assert all(top == 0 for pairs in mine.in_blocks for _, top in pairs)


def test_another_format_on_the_wire_stays_to_the_end_at_stage_0():
    one = buckets(0)
    assert flow(one, stage=0, wire_bytes=2).at_end == 2 * one.padded(1)


def test_sums_of_later_micro_batches_stay_where_shards_have_copies():
    one = buckets()
    plain, more = flow(one), flow(one, sum_bytes=2.0)
    kept = flow(one, sum_bytes=2.0, copies=True)
    assert plain.at_end < more.at_end < kept.at_end
    assert kept.at_end - more.at_end > one.padded(1)
    assert kept.at_end <= plain.at_end + 2 * one.padded(1)


def test_gradients_of_earlier_micro_batches_are_all_there():
    one = buckets()
    mine = flow(one, whole=True)
    assert mine.at_loss == 4 * one.padded(1)
    assert mine.in_blocks[0][0] == (6, 4 * one.padded(1))


def test_alone_everything_stays():
    one = buckets()
    assert flow(one, reduces=False).at_end == 4 * one.padded(1)


def test_of_many_blocks_only_the_worst_are_listed():
    mine = flow(buckets(n_layer=64))
    assert all(len(pairs) < 16 for pairs in mine.in_blocks)
    for pairs in mine.in_blocks:
        left, tops = zip(*pairs, strict=True)
        assert list(left) == sorted(left, reverse=True)
        assert list(tops) == sorted(tops)
