"""Which collectives a step issues, literally: kind, bucket, bytes, group and order, at 64 ranks.

One real rank of a lone mesh: the other 63 do not exist, so that the schedule is that of a
large run at the cost of a small one.
"""

import pytest
from schedule_runs import CONTROL, Run


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
