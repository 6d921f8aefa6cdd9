"""What a step says to whom, literally and in bytes, at 64 ranks: one real rank of a lone mesh.

The other 63 do not exist, so that the schedule is that of a large run at the cost of a small one.
Volumes are compared with the textbook's (Rajbhandari et al. 2020, arXiv 1910.02054, section 7): 2P
for data parallel and ZeRO-1 and 2, 3P for ZeRO-3.

[Note: words] A schedule is written in words: an operation and the bucket, `0` to `3` are blocks.

    a all_reduce and who used what, r reduce_scatter, g all_gather, c mean over copies, C control
    f0, b0: block 0 computes forward, backward
"""

import functools

import pytest
import torch
from lone_rank import LoneRun
from torch import nn

from fastpar.engine.engine import engine_of
from fastpar.kernels.global_norm import NORM_WORDS
from fastpar.optim.adamw import AdamW

W, RANK, KIB = 64, 5, 1024
P = 64 + 4 * 256 + 64  # KiB of parameters: slices for 64 ranks need no padding
ROOT, LAST = 128, 256  # of it, the root unit (embed and head) and the last block
CONTROL = W * 8 * (5 + NORM_WORDS + 1)  # bytes; 5 words ahead, a bit each for up to 62 parameters
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Block(nn.Module):
    """256 KiB of parameters; logs when it computes."""

    def __init__(self, index, log):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)
        self.index, self.log = index, log

    def forward(self, x):
        self.log.append(f"f{self.index}")
        y = torch.tanh(x @ self.weight)
        if y.requires_grad:
            y.register_hook(lambda grad: self.log.append(f"b{self.index}"))
        return y


class Model(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(Block(i, log) for i in range(4))
        self.head = nn.Linear(256, 64, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Run(LoneRun):
    """A rank that trains; train() and evaluate() return one list of operations."""

    def __init__(self, *, world_size=W, rank=RANK, n_micro=1, no_sync=False, **options):
        self.micro, self.d, log = (n_micro, no_sync), options.get("shard_size", W), []
        options = {"bucket_mb": 1 / 4, "first_bucket_mb": 1 / 16, **options}
        build = functools.partial(Model, log)
        super().__init__(build, (torch.arange(64),), world_size, rank, ops=log, **options)
        self.engine = engine_of(self.model)

    def train(self):
        return [op for ops in super().train(*self.micro) for op in ops]

    def words(self, said, *, blocks=False):
        """One for each operation, see [Note: words], and for each block that computes."""
        layout, found = self.engine.shards.layout, []
        for op in said:
            if isinstance(op, str):
                found += [op] * blocks
            elif is_control(op):
                assert (op.tensor_bytes, op.world_size) == (CONTROL, W)
                found.append("C")
            else:
                [slot] = layout.buckets[op.tag].slots
                name = layout.slots[slot].spec.names[0].removesuffix(".weight")
                kind = KINDS[op.role, op.kind]
                ranks, parts = (W // self.d, self.d) if kind == "c" else (self.d, 1)
                kib = (256 if "blocks" in name else 64) // parts + (kind == "a")
                assert (op.tensor_bytes, op.world_size) == (kib * KIB, ranks)
                found.append(kind + name.removeprefix("blocks."))
        return found


KINDS = {
    ("reduce", "all_reduce"): "a",
    ("reduce", "reduce_scatter"): "r",
    ("gather", "all_gather"): "g",
    ("replicate", "all_reduce"): "c",
}


def is_control(op):
    return (op.role, op.kind) == ("reduce", "all_gather")


def operations(said):
    """Without the control exchange."""
    return [op for op in said if not isinstance(op, str) and not is_control(op)]


REDUCE = "ahead a3 a2 a1 a0 aembed C "
SCATTER = "rhead r3 r2 r1 r0 rembed "
GATHER = "gembed ghead g0 g1 g2 g3 "
BACKWARD_3 = "g2 rhead r3 g1 r2 g0 r1 r0 rembed "
QUIET = {"n_micro": 3, "no_sync": True}  # only the last micro-batch is sent
FULL = {"n_micro": 2, "accumulate": "full", "grad_accum_steps": 2}
# Shards in groups of 8 neighbours; a bucket's mean over the 8 copies follows when the bucket's
# reduce-scatter is over, which is waited for when more than three caps are under way.
COPIES = "r1 chead r0 c3 rembed c2 c1 c0 cembed C "
# Prefetch is one unit ahead, and a bucket is launched as soon as its last gradient is there.
AHEAD = "gembed ghead g0 g1 f0 g2 f1 g3 f2 f3 g2 rhead b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 rembed C"
NOT_AHEAD = "gembed ghead g0 f0 g1 f1 g2 f2 g3 f3 rhead b3 r3 g2 b2 r2 g1 b1 r1 g0 b0 r0 rembed C"
SCHEDULES = [  # with f and b: when blocks compute, too
    ({"zero_stage": 0}, REDUCE), ({"zero_stage": 1}, SCATTER + "C " + GATHER),
    ({"zero_stage": 2}, "f0 f1 f2 f3 rhead b3 r3 b2 r2 b1 r1 b0 r0 rembed C " + GATHER),
    ({"zero_stage": 3}, GATHER + BACKWARD_3 + "C"),
    ({"zero_stage": 2, "n_micro": 2}, SCATTER * 2 + "C " + GATHER),
    ({"zero_stage": 0, **FULL}, REDUCE), ({"zero_stage": 2, **FULL}, SCATTER + "C " + GATHER),
    ({"zero_stage": 3, "n_micro": 2}, (GATHER + BACKWARD_3) * 2 + "C"),
    ({"zero_stage": 3, **FULL}, GATHER + "g2 g1 g0 " + GATHER + BACKWARD_3 + "C"),
    *(({"zero_stage": stage, **QUIET}, SCATTER + "C " + GATHER) for stage in (1, 2)),
    ({"zero_stage": 0, **QUIET}, REDUCE),
    ({"zero_stage": 3, **QUIET}, (GATHER + "g2 g1 g0 ") * 2 + GATHER + BACKWARD_3 + "C"),
    ({"zero_stage": 2, "shard_size": 8}, "rhead r3 r2 " + COPIES + GATHER),
    ({"zero_stage": 3, "shard_size": 8}, GATHER + "g2 rhead r3 g1 r2 g0 " + COPIES),
    ({"zero_stage": 3, "prefetch": 1}, AHEAD), ({"zero_stage": 3, "prefetch": 0}, NOT_AHEAD),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), SCHEDULES, ids=str)
def test_schedule(settings, words):
    with Run(**settings) as run:
        first = run.words(run.train())
        for _ in range(2):
            said = run.train()
            assert run.words(said, blocks="f" in words) == words.split()
        if settings["zero_stage"] == 3:
            # Blocks are taken to run in the order of the modules: the last stays for backward.
            assert sorted(first) == sorted(run.words(said))


@STAGES
def test_every_rank_has_the_same_schedule(stage):
    found = []
    for rank in (0, 5, 63):
        with Run(rank=rank, zero_stage=stage) as run:
            found.append([run.train() for _ in range(2)])
    assert found[0] == found[1] == found[2]


def test_evaluation_gathers_what_a_step_made_stale_and_no_more():
    for stage in (0, 1, 2):
        with Run(zero_stage=stage) as run:
            run.train()
            assert run.evaluate() == ["f0", "f1", "f2", "f3"]  # launched by zero_grad
    with Run(zero_stage=3) as run:
        assert run.words(run.evaluate()) == GATHER.split()  # nothing is recorded yet
        for _ in range(2):
            run.train()
            steady = run.words(run.train())
            for _ in range(2):
                assert run.words(run.evaluate()) == GATHER.split()
            assert run.words(run.train()) == steady == [*(GATHER + BACKWARD_3).split(), "C"]


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
        assert sent(operations(said)) / KIB * W / (W - 1) == volumes[stage]
        assert "C" in run.words(said)
        assert CONTROL / W < 1024  # a rank's part, whatever P is
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
            reductions = [op for op in operations(run.train()) if op.kind == "reduce_scatter"]
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
            said = operations(run.train())
            roles = dict.fromkeys(op.role for op in said)
            assert {r: sent(op for op in said if op.role == r) / KIB for r in roles} == {
                "reduce": P * (d - 1) / d,
                "replicate": 2 * (P / d) * (copies - 1) / copies,
                "gather": gathers * (d - 1) / d,
            }


def test_16_bit_gradients_halve_the_reduction():
    with Run(zero_stage=2, reduce_dtype=torch.bfloat16) as run:
        run.train()
        ops = operations(run.train())
        assert sum(op.tensor_bytes for op in ops if op.kind == "reduce_scatter") == P * KIB / 2
        assert sum(op.tensor_bytes for op in ops if op.kind == "all_gather") == P * KIB
