"""What a step says to whom, literally and in bytes, at 64 ranks: one real rank of a lone mesh.

The other 63 do not exist, so that the schedule is that of a large run at the cost of a small one.
Volumes are compared with the textbook's (Rajbhandari et al. 2020, arXiv 1910.02054, section 7): 2P
for data parallel and ZeRO-1 and 2, 3P for ZeRO-3.

[Note: words] A schedule is written in words: an operation and the bucket, `0` to `3` are blocks.

    a all_reduce and who used what, r reduce_scatter, g all_gather, c mean over copies, C control
    f0, b0: block 0 computes forward, backward
"""

import pytest
import torch
from schedule_runs import CONTROL, KIB, LAST, ROOT, P, Run, W, is_control

from fastpar.optim.adamw import AdamW

OPERATIONS = {
    "a": "reduce all_reduce",
    "r": "reduce reduce_scatter",
    "g": "gather all_gather",
    "c": "replicate all_reduce",
}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def lines(words, ranks=W):
    """As Run.table() has them: KiB of the whole tensor, and ranks."""
    found = []
    for word in words.split():
        kind, name = word[0], word[1:]
        if kind in "fb":
            found.append(f"{'forward' if kind == 'f' else 'backward'} {name}")
        elif kind == "C":
            found.append(f"control {CONTROL} B {W}")
        else:
            kib = 256 if name.isdigit() else 64
            kib = kib // ranks if kind == "c" else kib + (kind == "a")
            name = f"blocks.{name}" if name.isdigit() else name
            found.append(f"{OPERATIONS[kind]} {name} {kib} {W // ranks if kind == 'c' else ranks}")
    return found


REDUCE = "ahead a3 a2 a1 a0 aembed C "
SCATTER = "rhead r3 r2 r1 r0 rembed "
GATHER = "gembed ghead g0 g1 g2 g3 "
BACKWARD_3 = "g2 rhead r3 g1 r2 g0 r1 r0 rembed "
FULL = {"n_micro": 2, "accumulate": "full", "grad_accum_steps": 2}
# Shards in groups of 8 neighbours; a bucket's mean over the 8 copies follows when the bucket's
# reduce-scatter is over, which is waited for when more than three caps are under way.
COPIES = "r1 chead r0 c3 rembed c2 c1 c0 cembed C "
SCHEDULES = [
    ({"zero_stage": 0}, REDUCE),
    ({"zero_stage": 1}, SCATTER + "C " + GATHER),
    ({"zero_stage": 2}, SCATTER + "C " + GATHER),
    ({"zero_stage": 3}, GATHER + BACKWARD_3 + "C"),
    ({"zero_stage": 2, "n_micro": 2}, SCATTER * 2 + "C " + GATHER),
    ({"zero_stage": 0, **FULL}, REDUCE),
    ({"zero_stage": 2, **FULL}, SCATTER + "C " + GATHER),
    ({"zero_stage": 3, "n_micro": 2}, (GATHER + BACKWARD_3) * 2 + "C"),
    ({"zero_stage": 3, **FULL}, GATHER + "g2 g1 g0 " + GATHER + BACKWARD_3 + "C"),
    ({"zero_stage": 2, "shard_size": 8}, "rhead r3 r2 " + COPIES + GATHER),
    ({"zero_stage": 3, "shard_size": 8}, GATHER + "g2 rhead r3 g1 r2 g0 " + COPIES),
]


@pytest.mark.parametrize(("settings", "words"), SCHEDULES, ids=str)
def test_schedule(settings, words):
    with Run(**settings) as run:
        first = run.table(run.train())
        for _ in range(2):
            said = run.table(run.train())
            assert said == lines(words, settings.get("shard_size", W))
        if settings["zero_stage"] == 3:
            # Blocks are taken to run in the order of the modules: the last stays for backward.
            assert sorted(first) == sorted(said)


@STAGES
def test_every_rank_has_the_same_schedule(stage):
    found = []
    for rank in (0, 5, 63):
        with Run(rank=rank, zero_stage=stage) as run:
            found.append([run.train() for _ in range(2)])
    assert found[0] == found[1] == found[2]


# Order: what is launched before what is computed; prefetch is one unit ahead, and a bucket is
# launched as soon as its last gradient is there, not at the end


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"zero_stage": 3, "prefetch": 1},
            "gembed ghead g0 g1 f0 g2 f1 g3 f2 f3 g2 rhead b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 rembed C",
        ),
        (
            {"zero_stage": 3, "prefetch": 0},
            "gembed ghead g0 f0 g1 f1 g2 f2 g3 f3 rhead b3 r3 g2 b2 r2 g1 b1 r1 g0 b0 r0 rembed C",
        ),
        (
            {"zero_stage": 2},
            "f0 f1 f2 f3 rhead b3 r3 b2 r2 b1 r1 b0 r0 rembed C " + GATHER,
        ),
    ],
    ids=str,
)
def test_what_is_launched_while_blocks_compute(settings, words):
    with Run(**settings) as run:
        run.train()
        assert run.table(run.train(), blocks=True) == lines(words)


def test_evaluation_gathers_what_a_step_made_stale_and_no_more():
    for stage in (0, 1, 2):
        with Run(zero_stage=stage) as run:
            run.train()
            assert run.evaluate() == lines("f0 f1 f2 f3")  # launched by zero_grad
    with Run(zero_stage=3) as run:
        assert run.table(run.evaluate()) == lines(GATHER)  # nothing is recorded yet
        for _ in range(2):
            run.train()
            steady = run.table(run.train())
            for _ in range(2):
                assert run.table(run.evaluate()) == lines(GATHER)
            assert run.table(run.train()) == steady == lines(GATHER + BACKWARD_3 + "C")


# Bytes


def sent(ops):
    return sum(op.wire_bytes for op in ops)


@STAGES
def test_volumes_are_the_textbook_s(stage):
    """Per rank and step, in units of P (W - 1) / W: 2 at stages 0 to 2, 3 at stage 3, less what
    stage 3 does not have to gather again in backward: the root unit, whose parameters stay from the
    beginning of the forward to the end of the backward, and the last block, whose backward follows
    its forward. Stage 0 sends 256 more elements per bucket, which say who used a parameter.
    AdamW's norm, and whatever else the ranks have to agree on, is in the one control exchange.
    """
    volumes = {0: 2 * (P + 6 * 1), 1: 2 * P, 2: 2 * P, 3: 3 * P - ROOT - LAST}
    with Run(zero_stage=stage) as run:
        run.train()
        said = run.train()
        assert sent(run.ops(said)) / KIB * W / (W - 1) == volumes[stage]
        (control,) = [op for op in run.ops(said, control=True) if is_control(op)]
        assert control.tensor_bytes / W < 1024  # a rank's part, whatever P is
        run.optimizer = AdamW(run.model.parameters(), max_grad_norm=1.0)
        run.engine.contribute(torch.ones(1))
        run.train()
        assert run.train() == said


@pytest.mark.parametrize("world_size", [2, 3, 7, 64])
def test_padding_is_at_most_a_slice_of_256_elements_a_rank(world_size):
    for stage in (1, 2, 3):
        with Run(world_size=world_size, rank=1, zero_stage=stage) as run:
            run.train()
            buckets = run.engine.shards.layout.buckets
            whole = sum(b.numel for b in buckets) * 4
            assert 0 <= whole - P * KIB < len(buckets) * world_size * 256 * 4
            reductions = [op for op in run.ops(run.train()) if op.kind == "reduce_scatter"]
            expected = whole * (world_size - 1) / world_size
            assert sent(reductions) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("d", [2, 8, 32])
def test_volumes_of_hsdp(d):
    """Shards of d ranks, W / d copies: the reduce-scatter and the gathers as of d ranks, and an
    all-reduce of the shard, P / d, over the copies."""
    copies = W // d
    for stage, gathers in ((2, P), (3, 2 * P - ROOT - LAST)):
        with Run(zero_stage=stage, shard_size=d) as run:
            run.train()
            said = run.ops(run.train())
            roles = dict.fromkeys(op.role for op in said)
            assert {r: sent(op for op in said if op.role == r) / KIB for r in roles} == {
                "reduce": P * (d - 1) / d,
                "replicate": 2 * (P / d) * (copies - 1) / copies,
                "gather": gathers * (d - 1) / d,
            }
            assert sum(run.engine.wire_bytes().values()) == sent(said)


def test_16_bit_gradients_halve_the_reduction():
    with Run(zero_stage=2, reduce_dtype=torch.bfloat16) as run:
        run.train()
        ops = run.ops(run.train())
        assert sum(op.tensor_bytes for op in ops if op.kind == "reduce_scatter") == P * KIB / 2
        assert sum(op.tensor_bytes for op in ops if op.kind == "all_gather") == P * KIB


@STAGES
def test_describe_tells_what_is_sent(stage):
    with Run(zero_stage=stage) as run:
        run.train()
        assert sum(run.engine.wire_bytes().values()) == sent(run.ops(run.train()))
