"""Which collectives a step issues, literally: kind, bucket, bytes, group and order, at 64 ranks.

One real rank of an emulated mesh: the other 63 do not exist, so that the schedule is that of a
large run at the cost of a small one. Volumes are compared with the textbook's (Rajbhandari et al.
2020, arXiv 1910.02054, section 7): 2P for data parallel and ZeRO-1 and 2, 3P for ZeRO-3.
"""

import contextlib

import pytest
import torch
from torch import nn

from bench.systems.emulated import EmulatedMesh, Link, emulated
from fastpar.kernels.global_norm import NORM_WORDS
from fastpar.optim.adamw import AdamW
from fastpar.parallel.engine import engine_of
from fastpar.parallel.parallelize import parallelize

W, RANK = 64, 5
KIB = 1024
CONTROL = W * 8 * (5 + NORM_WORDS + 1)  # bytes; 5 words ahead, a bit each for up to 62 parameters


class Block(nn.Module):
    """65536 parameters, 256 KiB in fp32; says when it computes."""

    def __init__(self, index, log):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)
        self.index, self.log = index, log

    def forward(self, x):
        self.log.append(f"forward {self.index}")
        y = torch.tanh(x @ self.weight)
        if y.requires_grad:
            y.register_hook(lambda grad: self.log.append(f"backward {self.index}"))
        return y


class Model(nn.Module):
    """64 + 4 x 256 + 64 KiB: slices for 64 ranks need no padding."""

    def __init__(self, log, n_blocks=4):
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(Block(i, log) for i in range(n_blocks))
        self.head = nn.Linear(256, 64, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


P = 64 + 4 * 256 + 64  # KiB
ROOT, LAST = 128, 256  # of it, the root unit (embed and head) and the last block


class Sgd:
    """The least that an optimizer of an engine does."""

    def __init__(self, engine):
        self.engine = engine

    @torch.no_grad()
    def step(self):
        self.engine.before_step()
        self.engine.exchange(None)
        for p in self.engine.shards.params:
            param, grad, _ = self.engine.shards.piece(p)
            if self.engine.has_grad(p):
                param.sub_(grad, alpha=0.1)
        self.engine.after_step()

    def zero_grad(self):
        self.engine.zero_grad()


class Run:
    """A rank that trains, and what it said to whom."""

    def __init__(self, *, world_size=W, rank=RANK, n_micro=1, **kwargs):
        self.n_micro = n_micro
        self.log = []  # of ops, and of what the blocks say
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(EmulatedMesh(world_size, rank))
            self.link = Link(None)
            stack.callback(self.link.close)
            self.link.ops = self.log
            self.model = Model(self.log)
            kwargs = {"bucket_mb": 1 / 4, "first_bucket_mb": 1 / 16, **kwargs}
            parallelize(self.model, mesh, collectives=emulated(self.link), **kwargs)
            self.engine = engine_of(self.model)
            self.optimizer = Sgd(self.engine)
            self._stack = stack.pop_all()
        self.world_size = world_size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def train(self):
        """One step; what was said in it."""
        self.log.clear()
        for _ in range(self.n_micro):
            self.model(torch.arange(64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return list(self.log)

    @torch.no_grad()
    def evaluate(self):
        self.log.clear()
        self.model(torch.arange(64))
        return list(self.log)

    def ops(self, said, control=False):
        """Operations, without what the blocks say and without the control exchange."""
        ops = [op for op in said if not isinstance(op, str)]
        return ops if control else [op for op in ops if not is_control(op)]

    def table(self, said, *, blocks=False):
        """A line for each operation, and for each block that computes."""
        names = [
            "+".join(
                self.engine.shards.layout.slots[i].spec.names[0].split(".weight")[0]
                for i in b.slots
            )
            for b in self.engine.shards.layout.buckets
        ]
        lines = []
        for op in said:
            if isinstance(op, str):
                lines += [op] * blocks
            elif is_control(op):
                lines.append(f"control {op.tensor_bytes} B {op.world_size}")
            else:
                kib, rest = divmod(op.tensor_bytes, KIB)
                assert not rest
                lines.append(f"{op.role} {op.kind} {names[op.tag]} {kib} {op.world_size}")
        return lines


def is_control(op):
    return (op.role, op.kind) == ("reduce", "all_gather")


def lines(text):
    """Of a table in this file: role, kind, bucket, KiB of the whole tensor, ranks."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


# Stages 0 to 3, after the first step

ALL_REDUCE = f"""
    reduce  all_reduce      head        65  64
    reduce  all_reduce      blocks.3   257  64
    reduce  all_reduce      blocks.2   257  64
    reduce  all_reduce      blocks.1   257  64
    reduce  all_reduce      blocks.0   257  64
    reduce  all_reduce      embed       65  64
    control {CONTROL} B 64
"""
SCATTER = """
    reduce  reduce_scatter  head        64  64
    reduce  reduce_scatter  blocks.3   256  64
    reduce  reduce_scatter  blocks.2   256  64
    reduce  reduce_scatter  blocks.1   256  64
    reduce  reduce_scatter  blocks.0   256  64
    reduce  reduce_scatter  embed       64  64
"""
GATHER = f"""
    control {CONTROL} B 64
    gather  all_gather      embed       64  64
    gather  all_gather      head        64  64
    gather  all_gather      blocks.0   256  64
    gather  all_gather      blocks.1   256  64
    gather  all_gather      blocks.2   256  64
    gather  all_gather      blocks.3   256  64
"""
FORWARD_3 = """
    gather  all_gather      embed       64  64
    gather  all_gather      head        64  64
    gather  all_gather      blocks.0   256  64
    gather  all_gather      blocks.1   256  64
    gather  all_gather      blocks.2   256  64
    gather  all_gather      blocks.3   256  64
"""
BACKWARD_3 = """
    gather  all_gather      blocks.2   256  64
    reduce  reduce_scatter  head        64  64
    reduce  reduce_scatter  blocks.3   256  64
    gather  all_gather      blocks.1   256  64
    reduce  reduce_scatter  blocks.2   256  64
    gather  all_gather      blocks.0   256  64
    reduce  reduce_scatter  blocks.1   256  64
    reduce  reduce_scatter  blocks.0   256  64
    reduce  reduce_scatter  embed       64  64
"""
BACKWARD_3_LOCAL = """
    gather  all_gather      blocks.2   256  64
    gather  all_gather      blocks.1   256  64
    gather  all_gather      blocks.0   256  64
"""
CONTROL_LINE = f"control {CONTROL} B 64"
FULL = {"n_micro": 2, "accumulate": "full", "grad_accum_steps": 2}
SCHEDULES = {
    "stage 0": ({"zero_stage": 0}, ALL_REDUCE),
    "stage 1": ({"zero_stage": 1}, SCATTER + GATHER),
    "stage 2": ({"zero_stage": 2}, SCATTER + GATHER),
    "stage 3": ({"zero_stage": 3}, FORWARD_3 + BACKWARD_3 + CONTROL_LINE),
    "stage 2, two micro-batches into the shard": (
        {"zero_stage": 2, "n_micro": 2},
        SCATTER + SCATTER + GATHER,
    ),
    "stage 0, two micro-batches in full": ({"zero_stage": 0, **FULL}, ALL_REDUCE),
    "stage 2, two micro-batches in full": ({"zero_stage": 2, **FULL}, SCATTER + GATHER),
    "stage 3, two micro-batches into the shard": (
        {"zero_stage": 3, "n_micro": 2},
        (FORWARD_3 + BACKWARD_3) * 2 + CONTROL_LINE,
    ),
    "stage 3, two micro-batches in full": (
        {"zero_stage": 3, **FULL},
        FORWARD_3 + BACKWARD_3_LOCAL + FORWARD_3 + BACKWARD_3 + CONTROL_LINE,
    ),
    # Shards in groups of 8 neighbours; a bucket's mean over the 8 copies follows when the bucket's
    # reduce-scatter is over, which is waited for when more than three caps are under way.
    "HSDP, stage 2": (
        {"zero_stage": 2, "shard_size": 8},
        f"""
    reduce     reduce_scatter  head        64  8
    reduce     reduce_scatter  blocks.3   256  8
    reduce     reduce_scatter  blocks.2   256  8
    reduce     reduce_scatter  blocks.1   256  8
    replicate  all_reduce      head         8  8
    reduce     reduce_scatter  blocks.0   256  8
    replicate  all_reduce      blocks.3    32  8
    reduce     reduce_scatter  embed       64  8
    replicate  all_reduce      blocks.2    32  8
    replicate  all_reduce      blocks.1    32  8
    replicate  all_reduce      blocks.0    32  8
    replicate  all_reduce      embed        8  8
    control {CONTROL} B 64
    gather     all_gather      embed       64  8
    gather     all_gather      head        64  8
    gather     all_gather      blocks.0   256  8
    gather     all_gather      blocks.1   256  8
    gather     all_gather      blocks.2   256  8
    gather     all_gather      blocks.3   256  8
""",
    ),
    "HSDP, stage 3": (
        {"zero_stage": 3, "shard_size": 8},
        f"""
    gather     all_gather      embed       64  8
    gather     all_gather      head        64  8
    gather     all_gather      blocks.0   256  8
    gather     all_gather      blocks.1   256  8
    gather     all_gather      blocks.2   256  8
    gather     all_gather      blocks.3   256  8
    gather     all_gather      blocks.2   256  8
    reduce     reduce_scatter  head        64  8
    reduce     reduce_scatter  blocks.3   256  8
    gather     all_gather      blocks.1   256  8
    reduce     reduce_scatter  blocks.2   256  8
    gather     all_gather      blocks.0   256  8
    reduce     reduce_scatter  blocks.1   256  8
    replicate  all_reduce      head         8  8
    reduce     reduce_scatter  blocks.0   256  8
    replicate  all_reduce      blocks.3    32  8
    reduce     reduce_scatter  embed       64  8
    replicate  all_reduce      blocks.2    32  8
    replicate  all_reduce      blocks.1    32  8
    replicate  all_reduce      blocks.0    32  8
    replicate  all_reduce      embed        8  8
    control {CONTROL} B 64
""",
    ),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedule(case):
    kwargs, expected = SCHEDULES[case]
    with Run(**kwargs) as run:
        run.train()
        for _ in range(2):
            assert run.table(run.train()) == lines(expected)


def test_first_step_of_stage_3_has_the_schedule_of_the_others():
    """Blocks are taken to run in the order of the modules: the last one stays for the backward."""
    with Run(zero_stage=3) as run:
        first = run.table(run.train())
        assert sorted(first) == sorted(run.table(run.train()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_has_the_same_schedule(stage):
    found = []
    for rank in (0, 5, 63):
        with Run(rank=rank, zero_stage=stage) as run:
            found.append([run.train() for _ in range(2)])
    assert found[0] == found[1] == found[2]


# Order: what is launched before what is computed

PREFETCH_1 = """
    gather all_gather embed 64 64
    gather all_gather head 64 64
    gather all_gather blocks.0 256 64
    gather all_gather blocks.1 256 64
    forward 0
    gather all_gather blocks.2 256 64
    forward 1
    gather all_gather blocks.3 256 64
    forward 2
    forward 3
    gather all_gather blocks.2 256 64
    reduce reduce_scatter head 64 64
    backward 3
    reduce reduce_scatter blocks.3 256 64
    gather all_gather blocks.1 256 64
    backward 2
    reduce reduce_scatter blocks.2 256 64
    gather all_gather blocks.0 256 64
    backward 1
    reduce reduce_scatter blocks.1 256 64
    backward 0
    reduce reduce_scatter blocks.0 256 64
    reduce reduce_scatter embed 64 64
"""
PREFETCH_0 = """
    gather all_gather embed 64 64
    gather all_gather head 64 64
    gather all_gather blocks.0 256 64
    forward 0
    gather all_gather blocks.1 256 64
    forward 1
    gather all_gather blocks.2 256 64
    forward 2
    gather all_gather blocks.3 256 64
    forward 3
    reduce reduce_scatter head 64 64
    backward 3
    reduce reduce_scatter blocks.3 256 64
    gather all_gather blocks.2 256 64
    backward 2
    reduce reduce_scatter blocks.2 256 64
    gather all_gather blocks.1 256 64
    backward 1
    reduce reduce_scatter blocks.1 256 64
    gather all_gather blocks.0 256 64
    backward 0
    reduce reduce_scatter blocks.0 256 64
    reduce reduce_scatter embed 64 64
"""


@pytest.mark.parametrize(("prefetch", "expected"), [(1, PREFETCH_1), (0, PREFETCH_0)])
def test_prefetch_launches_one_unit_ahead(prefetch, expected):
    with Run(zero_stage=3, prefetch=prefetch) as run:
        run.train()
        assert run.table(run.train(), blocks=True) == [*lines(expected), CONTROL_LINE]


def test_reductions_start_while_backward_runs():
    """A bucket is launched as soon as its last gradient is there, not at the end."""
    with Run(zero_stage=2) as run:
        run.train()
        table = run.table(run.train(), blocks=True)
    backward = table[table.index("backward 3") : table.index(CONTROL_LINE)]
    assert backward == lines("""
        backward 3
        reduce reduce_scatter blocks.3 256 64
        backward 2
        reduce reduce_scatter blocks.2 256 64
        backward 1
        reduce reduce_scatter blocks.1 256 64
        backward 0
        reduce reduce_scatter blocks.0 256 64
        reduce reduce_scatter embed 64 64
    """)


# Evaluation


def test_evaluation_gathers_what_a_step_made_stale_and_no_more():
    for stage in (1, 2):
        with Run(zero_stage=stage) as run:
            run.train()
            assert run.evaluate() == [f"forward {i}" for i in range(4)]  # launched by zero_grad
    with Run(zero_stage=0) as run:
        run.train()
        assert run.ops(run.evaluate()) == []


def test_evaluation_at_stage_3_gathers_each_unit_once():
    with Run(zero_stage=3) as run:
        first = run.evaluate()  # nothing is recorded yet
        assert run.table(first) == lines(FORWARD_3)
        for _ in range(2):
            run.train()
            steady = run.table(run.train())
            for _ in range(2):
                assert run.table(run.evaluate()) == lines(FORWARD_3)
            assert run.table(run.train()) == steady == lines(FORWARD_3 + BACKWARD_3 + CONTROL_LINE)


# Volumes


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
        assert run.engine.wire_bytes_per_step == sent(run.ops(run.train()))
