"""Pipelines in the search: what is left out could not win, and what wins is explained."""

from dataclasses import replace
from itertools import product

import pytest

from fastpar.axes.pipeline.schedules import chunks_of
from fastpar.axes.step import Setup, Workload
from fastpar.predict import pipelines
from fastpar.predict.estimate import divisors
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.memory import predict_memory
from fastpar.predict.pipelines import SCHEDULES, least_bubble_s, pipeline_splits, search_pipelines
from fastpar.predict.plan import PlanCommand, make_plan, refused, report
from fastpar.predict.time import predict_step
from fastpar.settings.config import GPTConfig

INF = float("inf")
MODES = ("none", "full")


def everything(workload, template, rates, per_node):
    """Every pipeline's (seconds, bound, setup)."""
    for split, mode, (schedule, chunks) in product(
        pipeline_splits(workload, template, per_node), MODES, SCHEDULES
    ):
        rows = workload.batch_size // split.dp
        for micro in divisors(rows):
            setup = replace(
                split,
                schedule=schedule,
                chunks=chunks,
                micro_batch_size=micro,
                grad_accum_steps=rows // micro,
                activation_checkpointing=mode,
            )
            if setup.pp * setup.chunks <= workload.shape.n_layer:
                early = predict_step(workload, setup, rates, bubble=False)
                bound = early.step_s + least_bubble_s(setup, early)
                yield predict_step(workload, setup, rates).step_s, bound, setup


@pytest.mark.parametrize("shape", [GPTConfig(8, 8, 512, 256), GPTConfig(12, 8, 1024, 512, 50304)])
@pytest.mark.parametrize("link", ["eth-100", "ib-ndr"])
def test_the_bounds_leave_out_no_winner(shape, link):
    workload = Workload(shape, 32)
    cluster = Cluster.of("h100", 8, 2, inter=link)
    template = Setup(8)
    rates = DatasheetRates(cluster, template)
    cases = list(everything(workload, template, rates, 2))
    assert all(bound <= seconds for seconds, bound, _ in cases)
    for limit in (INF, 0.6 * max(predict_memory(workload, s).total for *_, s in cases)):
        fitting = [c for c in cases if predict_memory(workload, c[2]).total <= limit]
        found = search_pipelines(
            workload,
            template,
            rates=rates,
            limit_bytes=limit,
            per_node=2,
            checkpointing=MODES,
            fastest_s=INF,
        )
        best = min(found, key=lambda e: e.time.step_s)
        assert best.time.step_s == min(seconds for seconds, *_ in fitting)
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
    found = {s.pp for s in pipeline_splits(workload, Setup(8), 8)}
    assert found == {2}
    assert pipelines.MOST_STAGES >= 64
