"""How many bytes a step sends, at 64 ranks, one of them real.

Volumes are compared with the textbook's (Rajbhandari et al. 2020, arXiv 1910.02054, section 7): 2P
for data parallel and ZeRO-1 and 2, 3P for ZeRO-3.
"""

import pytest
import torch
from schedule_runs import KIB, LAST, ROOT, P, Run, W, is_control

from fastpar.optim.adamw import AdamW


def padded(run):
    """Bytes of all buckets."""
    return sum(b.numel for b in run.engine.shards.layout.buckets) * 4


def sent(ops):
    return sum(op.wire_bytes for op in ops)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_volumes_are_the_textbook_s(stage):
    """Per rank and step, in units of P (W - 1) / W: 2 at stages 0 to 2, 3 at stage 3, less what
    stage 3 does not have to gather again in backward: the root unit, whose parameters stay from the
    beginning of the forward to the end of the backward, and the last block, whose backward follows
    its forward. Stage 0 sends 256 more elements per bucket, which say who used a parameter.
    """
    with Run(zero_stage=stage) as run:
        run.train()
        said = run.train()
        volume = sent(run.ops(said)) / KIB * W / (W - 1)
        assert (
            volume
            == {
                0: 2 * (P + 6 * 1),
                1: 2 * P,
                2: 2 * P,
                3: 3 * P - ROOT - LAST,
            }[stage]
        )
        (control,) = [op for op in run.ops(said, control=True) if is_control(op)]
        assert control.tensor_bytes / W < 1024  # a rank's part, whatever P is


@pytest.mark.parametrize("world_size", [2, 3, 7, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padding_is_at_most_a_slice_of_256_elements_a_rank(world_size, stage):
    with Run(world_size=world_size, rank=1, zero_stage=stage) as run:
        run.train()
        whole, n_buckets = padded(run), len(run.engine.shards.layout.buckets)
        assert 0 <= whole - P * KIB < n_buckets * world_size * 256 * 4
        reductions = [op for op in run.ops(run.train()) if op.kind == "reduce_scatter"]
        assert sent(reductions) == pytest.approx(whole * (world_size - 1) / world_size, abs=1e-3)


@pytest.mark.parametrize("d", [2, 8, 32])
def test_volumes_of_hsdp(d):
    """Shards of d ranks, W / d copies: the reduce-scatter and the gathers as of d ranks, and an
    all-reduce of the shard, P / d, over the copies.
    """
    copies = W // d
    for stage, gathers in ((2, P), (3, 2 * P - ROOT - LAST)):
        with Run(zero_stage=stage, shard_size=d) as run:
            run.train()
            said = run.ops(run.train())
            by_role = {r: sent(op for op in said if op.role == r) / KIB for r in run_roles(said)}
            assert by_role == {
                "reduce": P * (d - 1) / d,
                "replicate": 2 * (P / d) * (copies - 1) / copies,
                "gather": gathers * (d - 1) / d,
            }


def run_roles(ops):
    return dict.fromkeys(op.role for op in ops)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_sends_each_micro_batch_or_the_sum(stage):
    """A micro-batches: "shard" reduces A times, "full" once; parameters are gathered once a step at
    stages 1 and 2, for each micro-batch at stage 3. The control exchange is one in all cases.
    """
    n_micro = 3
    reduced, gathered = {}, {}
    for mode in ("shard", "full"):
        kwargs = {"accumulate": mode, "grad_accum_steps": n_micro, "n_micro": n_micro}
        with Run(zero_stage=stage, **kwargs) as run:
            run.train()
            said = run.train()
            ops = run.ops(said)
            reduced[mode] = sum(op.tensor_bytes for op in ops if op.role == "reduce")
            gathered[mode] = sum(op.tensor_bytes for op in ops if op.role == "gather") / KIB
            assert sum(map(is_control, run.ops(said, control=True))) == 1
    assert reduced["shard"] == n_micro * reduced["full"]
    expected = {0: 0, 1: P, 2: P, 3: n_micro * (2 * P - ROOT - LAST)}[stage]
    assert gathered == {"shard": expected, "full": expected}


def test_16_bit_gradients_halve_the_reduction():
    with Run(zero_stage=2, reduce_dtype=torch.bfloat16) as run:
        run.train()
        ops = run.ops(run.train())
        assert sum(op.tensor_bytes for op in ops if op.kind == "reduce_scatter") == P * KIB / 2
        assert sum(op.tensor_bytes for op in ops if op.kind == "all_gather") == P * KIB


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adamw_with_clipping_adds_nothing(stage):
    """Its norm, and whatever else the ranks have to agree on, is in the one control exchange."""
    with Run(zero_stage=stage) as run:
        run.train()
        expected = run.train()
    with Run(zero_stage=stage) as run:
        run.optimizer = AdamW(run.model.parameters(), max_grad_norm=1.0)
        run.engine.contribute(torch.ones(1))
        run.train()
        assert run.train() == expected


@pytest.mark.parametrize("shard_size", [None, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_describe_tells_what_is_sent(stage, shard_size):
    with Run(zero_stage=stage, shard_size=shard_size) as run:
        run.train()
        assert sum(run.engine.wire_bytes().values()) == sent(run.ops(run.train()))
