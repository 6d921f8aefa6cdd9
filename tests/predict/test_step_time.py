"""The time of a step: the textbook's bubble, what hides what, and sums that add up."""

from dataclasses import replace

import pytest

from fastpar.axes.pipeline.schedules import Costs
from fastpar.axes.pipeline.schedules import time_of as simulated
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.time import (
    comm_ops_of,
    cost_per_billion_tokens,
    makespan_of,
    ops_of,
    predict_step,
    time_of,
)
from fastpar.settings.model import GPTConfig, flops_per_token

SHAPE = GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, dropout=0.0)


class Fixed:
    """Each forward op 1 s, backward 2 s, an exchange 1 s; of `overlap` nothing but what is said."""

    peak_flops = None

    def __init__(self, overlap=1.0, send=1.0):
        self.overlap, self._send = overlap, send

    def op_s(self, op):
        return 2.0 if op.key[2] == "backward" else 1.0

    def comm_s(self, send):
        return self._send

    def overhead_s(self, workload, setup):
        return 0.5


def predict(setup, rates=None, shape=SHAPE):
    workload = Workload(shape, setup.dp * setup.micro_batch_size * setup.grad_accum_steps)
    return predict_step(workload, setup, rates or Fixed())


def exposed(setup, sends, rates):
    workload = Workload(SHAPE, 8)
    return time_of(workload, setup, rates, ops_of(workload, setup), sends).parts["dp"]


# Pipelines


class Layers(Fixed):
    """Embedding and loss take no time: stages are alike."""

    def op_s(self, op):
        return 0.0 if op.name in ("embedding", "loss") else super().op_s(op)


@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 1, 1), (4, 4, 1), (4, 16, 1), (8, 8, 2), (16, 200, 1)]
)
def test_bubble_of_the_textbook(p, m, v):
    """(p - 1) / m of the time that a stage works; in turns with v parts each, 1 / v of that."""
    shape = replace(SHAPE, n_layer=p * v)
    schedule = "interleaved" if v > 1 else "1f1b"
    split = (1,) * (p * v)
    pipe = Setup(p, pp=p, pp_split=split, schedule=schedule, chunks=v, grad_accum_steps=m)
    time = predict(pipe, Layers(send=0.0), shape)
    working = sum(time.parts[k] for k in ("forward", "backward", "recompute", "loss"))
    assert time.bubble_s == pytest.approx((p - 1) / (m * v) * working, rel=1e-3)


def test_the_slowest_stage_and_messages_are_in_the_bubble():
    pipe = Setup(4, pp=4, pp_split=(1, 1, 1, 1), grad_accum_steps=64)
    equal, slow = predict(pipe, Fixed(send=0.0)), predict(pipe, Fixed(send=1.0))
    assert slow.bubble_s - equal.bubble_s >= 6  # the first micro-batch's 3 messages, there and back
    uneven = predict(replace(pipe, pp_split=(1, 0, 2, 1)), Fixed(send=0.0))
    assert uneven.bubble_s > equal.bubble_s + 60 * 24  # a further layer, each micro-batch


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_more_micro_batches_are_predicted_from_fewer(schedule):
    """makespan_of() does not go through all of them."""
    p, m, v = 4, 131, 2 if schedule in ("interleaved", "zb-v") else 1
    each = tuple(1.0 + 0.3 * (stage == p * v - 1) for stage in range(p * v))
    costs = Costs(each, tuple(1.2 * x for x in each), each)
    whole, _ = simulated(schedule, p, m, v, costs, 0.01)
    found = makespan_of(schedule, p, m, v, costs, 0.01)
    assert found == pytest.approx(whole, rel=0.01)


# Sums


def test_parts_add_up():
    setup = Setup(8, tp=2, zero_stage=3, grad_accum_steps=2, activation_checkpointing="full")
    time = predict(setup)
    assert sum(time.parts.values()) == pytest.approx(time.step_s)
    layers = 2 * SHAPE.n_layer
    assert time.parts["forward"] == layers * 8 + 2 * 2  # with the last norm, the embedding
    assert time.parts["recompute"] == layers * 8
    assert time.parts["loss"] == 2 * (1 + 2)
    assert time.parts["optimizer"] == 1
    assert time.parts["other"] == 0.5
    total = sum(op.count * Fixed().op_s(op) for op in ops_of(Workload(SHAPE, 8), setup))
    assert time.compute_s == pytest.approx(total)
    assert time.comm_s == sum(s.count for s in comm_ops_of(Workload(SHAPE, 8), setup))
    assert time.mfu is None
    assert time.tokens_per_s == 8 * 128 / time.step_s


def test_mfu_and_cost():
    cluster = Cluster.of("a100", 8)
    setup = Setup(8, micro_batch_size=4)
    workload = Workload(GPTConfig.preset("gpt2"), 32)
    time = predict_step(workload, setup, DatasheetRates(cluster, setup))
    flops = time.tokens_per_s * flops_per_token(workload.shape)
    assert time.mfu == pytest.approx(flops / (8 * 312e12))
    assert 0.2 < time.mfu < 0.65
    hours = 1e9 / time.tokens_per_s / 3600
    assert cost_per_billion_tokens(time, cluster) == pytest.approx(hours * 8 * 1.8)
    assert cost_per_billion_tokens(time, cluster, 1.0) == pytest.approx(hours * 8)
    with pytest.raises(ValueError, match="expected price_per_hour >= 0, got price_per_hour=-1"):
        cost_per_billion_tokens(time, cluster, -1)


# What hides


def send(under, kind="all_reduce", axis="dp", count=1.0):
    return CommOp(kind, axis, 1e6, 8, 1, count, under)


def test_nothing_hides_without_overlap():
    setup = Setup(8)
    for under in ("", "forward", "backward"):
        assert exposed(setup, [send(under, count=7)], Fixed(overlap=0.0)) == 7
    assert exposed(setup, [send("", count=7)], Fixed()) == 7
    assert exposed(setup, [send("backward", count=7)], Fixed()) == 0


def test_sums_of_a_step_have_one_backward():
    """With 4 micro-batches of b seconds each, what is sent once hides in b, what is sent by each
    in 4 b."""
    full = Setup(8, grad_accum_steps=4)
    parts = predict(full).parts
    b, f = parts["backward"] / 4, parts["forward"] / 4
    reduce = send("backward", count=3 * b)
    assert exposed(full, [reduce], Fixed()) == pytest.approx(2 * b)
    assert exposed(replace(full, accumulate="shard", zero_stage=2), [reduce], Fixed()) == 0
    gather = send("forward", "all_gather", "shard", count=3 * f)
    assert exposed(replace(full, zero_stage=1), [gather], Fixed()) == pytest.approx(2 * f)
    assert exposed(replace(full, zero_stage=3), [gather], Fixed()) == 0


def test_each_micro_batch_waits_for_what_it_gathers():
    """4 times (f + 1) seconds of gathers under 4 forwards of f each: 1 second each is seen."""
    setup = Setup(8, zero_stage=3, grad_accum_steps=4)
    f = predict(setup).parts["forward"] / 4
    gather = send("forward", "all_gather", "shard", count=4 * (f + 1))
    assert exposed(setup, [gather], Fixed()) == pytest.approx(4)


def test_recomputation_hides_too():
    setup = Setup(8)
    again = replace(setup, activation_checkpointing="full")
    reduce = [send("backward", count=1000)]
    less = exposed(setup, reduce, Fixed()) - exposed(again, reduce, Fixed())
    assert less == pytest.approx(predict(again).parts["recompute"])


def test_along_tp_column_products_hide():
    setup = Setup(2, tp=2)
    workload = Workload(SHAPE, 1)
    products = 2.0 * 4 * SHAPE.n_layer * 7 / 12
    for count, expected in ((products, 0.0), (products + 5, 5.0)):
        comm = send("backward", axis="tp", count=count)
        found = time_of(workload, setup, Fixed(), ops_of(workload, setup), [comm])
        assert found.parts["tp"] == pytest.approx(expected)


# Bad input, speed


@pytest.mark.parametrize(
    ("setup", "batch", "match"),
    [
        (Setup(8), 7, r"predict_step: expected batch_size = dp \* micro_batch_size .* = 8, got ba"),
        (Setup(8, tp=3), 8, r"expected tp \* pp to divide world_size=8, got tp \* pp=3"),
        (Setup(0), 8, "predict_step: expected world_size >= 1, got world_size=0; count from 1"),
        (
            Setup(8, micro_batch_size=-1),
            8,
            "expected micro_batch_size >= 1, got micro_batch_size=-",
        ),
    ],
)
def test_bad_setups(setup, batch, match):
    with pytest.raises(ValueError, match=match):
        predict_step(Workload(SHAPE, batch), setup, Fixed())


def test_large_machines():
    """1T parameters on 16,384 GPUs."""
    shape = GPTConfig(n_layer=128, n_head=160, n_embd=25600, block_size=2048, dropout=0.0)
    workload = Workload(shape, 2048)
    cluster = Cluster.of("h100", 16384)
    setups = [
        Setup(16384, tp=tp, zero_stage=stage, shard_size=shard, grad_accum_steps=tp // 8)
        for tp in (8, 16, 32)
        for stage in (1, 2, 3)
        for shard in (None, 64)
    ]
    rates = DatasheetRates(cluster, setups[0])
    times = [predict_step(workload, setup, rates) for setup in setups]
    assert all(0 < t.mfu < 0.6 for t in times)
    assert all(t.step_s > t.compute_s for t in times)
