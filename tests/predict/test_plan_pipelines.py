"""Pipelines in the search: what is left out could not win, and what wins is explained."""

import pytest

from fastpar.axes.pipeline.schedules import chunks_of
from fastpar.axes.step import Setup, Workload
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.memory import predict_memory
from fastpar.predict.plan import PlanCommand, make_plan, report
from fastpar.predict.search import (
    layouts,
    least_wait_s,
    micro_batches,
    refused,
    try_in_order,
)
from fastpar.predict.time import predict_step
from fastpar.settings.model import GPTConfig

INF = float("inf")
MODES = ("none", "full")


def pipelines(workload, template, per_node):
    return [way for way in layouts(workload, template, per_node) if way.pp > 1]


def everything(workload, ways, rates):
    """Every pipeline's (seconds, bound, setup)."""
    for way in ways:
        for mode in MODES:
            for setup in micro_batches(workload, way.change(activation_checkpointing=mode)):
                early = predict_step(workload, setup, rates, bubble=False)
                passes = ("forward", "backward", "recompute", "loss")
                waits = least_wait_s(setup, sum(early.parts[name] for name in passes))
                seconds = predict_step(workload, setup, rates).step_s
                yield seconds, early.step_s + waits, setup


@pytest.mark.parametrize("shape", [GPTConfig(8, 8, 512, 256), GPTConfig(12, 8, 1024, 512, 50304)])
@pytest.mark.parametrize("link", ["eth-100", "ib-ndr"])
def test_the_bounds_leave_out_no_winner(shape, link):
    workload = Workload(shape, 32)
    cluster = Cluster.of("h100", 8, 2, inter=link)
    template = Setup(8)
    rates = DatasheetRates(cluster, template)
    ways = [way for way in pipelines(workload, template, 2) if way.zero_stage < 2]
    cases = list(everything(workload, ways, rates))
    assert all(bound <= seconds for seconds, bound, _ in cases)
    for limit in (INF, 0.6 * max(predict_memory(workload, s).total for *_, s in cases)):
        fitting = [c for c in cases if predict_memory(workload, c[2]).total <= limit]
        found = [e for e in try_in_order(workload, rates, limit, MODES, ways, ()) if e.time]
        best = min(found, key=lambda e: e.step_s)
        assert best.step_s == min(seconds for seconds, *_ in fitting)
        assert all(e.memory.total <= limit for e in found)


def test_a_slow_link_makes_stages_and_the_report_says_why():
    command = PlanCommand(gpus=8, gpus_per_node=1, inter_link="eth-100", batch_size=64)
    plan = make_plan(command)
    winner = plan.estimates[0].setup
    assert winner.pp > 1
    assert refused(plan.workload, winner) is None
    text = report(plan)
    assert f" --pp {winner.pp} " in text
    if winner.schedule != "1f1b":
        assert f" --schedule {winner.schedule}" in text
    usual = chunks_of(winner.schedule, None, caller="test")
    assert (" --chunks " in text) == (winner.chunks != usual)
    assert f"stages   {winner.pp}: the best without, " in text
    assert "  bubble  " in text
    near = report(make_plan(PlanCommand(gpus=8)))
    assert "stages   none: the best pipeline, " in near


def test_no_stage_is_without_layers():
    workload = Workload(GPTConfig(3, 2, 64, 64), 16)
    assert {way.pp for way in pipelines(workload, Setup(8), 8)} == {2}
