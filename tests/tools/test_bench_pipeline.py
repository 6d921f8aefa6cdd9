"""Benches of pipelines: what they measure is what really happened."""

import pytest
from test_bench import make_bench
from test_records import ABOUT

from bench.records import ResultFile, load
from bench.report import report
from bench.systems import bench_bubble
from fastpar.pipeline.schedules import RULES, Kind, Op


def test_waiting_is_what_is_left_of_all_ranks_time():
    op = Op(Kind.FORWARD, 0, 0)
    ranks = [[(op, 0.0, 1.0, 1.0), (op, 3.0, 4.0, 1.0)], [(op, 1.0, 3.0, 1.5)]]
    assert bench_bubble.waiting(ranks) == (1 - 3.5 / 8, 4.0)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_costs_are_the_means_of_each_stage(name):
    trial = bench_bubble.Trial(name, 2, 0.0, world_size=2)
    schedule = bench_bubble.make_schedule(name, 2, 2)
    took = {Kind.FORWARD: 1.0, Kind.BACKWARD: 4.0, Kind.INPUT_GRADIENT: 2.0}

    def timed(rank, op):
        seconds = took.get(op.kind, 3.0) + schedule.stage_of(rank, op.chunk) + op.micro
        return op, 0.0, 9.0, seconds

    step = [[timed(rank, op) for op in ops] for rank, ops in enumerate(schedule.ops)]
    costs = bench_bubble.measured_costs(trial, [step])
    stages = range(schedule.stages)
    assert costs.forward == [1.5 + s for s in stages]
    if name == "1f1b":
        assert costs.input_gradient == costs.weight_gradient == [(4.5 + s) / 2 for s in stages]
    else:
        assert costs.input_gradient == [2.5 + s for s in stages]
        assert costs.weight_gradient == [3.5 + s for s in stages]


@pytest.mark.slow
def test_table_of_bubbles(tmp_path):
    bench = make_bench(tmp_path, "bubble")
    bench_bubble.run(bench)
    _, rows = load(tmp_path / "rows.json")
    assert {row.variant for row in rows} == set(RULES)
    assert all(0 < row.notes["bubble"] < 1 for row in rows)
    ResultFile(tmp_path / "a.json", ABOUT).add(*rows)
    assert report.render("bubble-cpu", tmp_path).count(" micro-batches, ") == len(RULES)
