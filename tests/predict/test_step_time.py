"""The time of a step: its operations, the textbook's bubble, what hides what, sums that add up."""

from dataclasses import replace

import pytest
from cells import sweep
from memory_cells import setup, workload

from fastpar.axes.offload import waiting_s
from fastpar.axes.pipeline.schedules import Costs
from fastpar.axes.pipeline.schedules import time_of as simulated
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.predict.machine import Cluster, DatasheetRates, host_of
from fastpar.predict.time import (
    STEPS,
    comm_ops_of,
    cost_per_billion_tokens,
    makespan_of,
    ops_of,
    predict_step,
    product_flops,
    time_of,
)
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import PRESETS, GPTConfig, flops_per_token

SHAPE = GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, dropout=0.0)
LARGE = Workload(GPTConfig.preset("gpt2-xl"), 64)
XL = Workload(PRESETS["gpt2-xl"], 8)


def test_ranks_of_a_setup():
    setup = Setup(world_size=16, tp=2, zero_stage=3, shard_size=4)
    assert (setup.dp, setup.n_shards) == (8, 4)
    assert Setup(world_size=16, tp=2, zero_stage=0).n_shards == 1
    assert Setup(world_size=16, tp=2, pp=4, zero_stage=1).dp == 2
    config = TrainConfig().replace({"tp_grid": "2x2x2", "nproc": 8, "n_head": 4, "n_embd": 64})
    setup = Setup(8, config)
    assert (setup.tp, setup.rows, setup.depth, setup.data, setup.dp) == (2, 2, 2, 2, 1)
    assert replace(setup, tp_grid=None, tp=2).data == 4


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_operations_are_the_models_flops(tp):
    """6 * P a token, and attention with its mask: half of the formula's 12 * L * T * C. The head's
    product is 3 of the 6, and there is none for positions."""
    setup = Setup(world_size=tp, tp=tp, micro_batch_size=4, grad_accum_steps=2)
    tokens, s = 8 * LARGE.seq_len, LARGE.shape
    found = dict.fromkeys(("matmul", "attention", "loss"), 0.0)
    for op in ops_of(LARGE, setup):
        if op.name in found and (op.name, op.direction) != ("loss", "backward"):
            found[op.name] += op.flops * op.count * tp
    padded = tp * s.heads_of_rank(tp) / s.n_head  # 25 heads: 25, 26, 28
    widths = (8 + 4 * padded) * s.n_embd**2
    assert found["matmul"] == pytest.approx(6 * tokens * s.n_layer * widths, rel=1e-12)
    causal_bwd = 3.5 / 3
    expected = tokens * 6 * s.n_layer * s.n_embd * LARGE.seq_len * causal_bwd * padded
    assert found["attention"] == pytest.approx(expected, rel=1e-9)
    assert found["loss"] == pytest.approx(6 * tokens * s.n_embd * s.padded_vocab_size, rel=0.01)


def test_what_recomputation_and_layouts_change():
    def ops(**settings):
        return list(ops_of(LARGE, Setup(**settings)))

    def again(mode):
        found = ops(micro_batch_size=2, activation_checkpointing=mode)
        return [op for op in found if op.direction == "recompute"]

    full = again("full")
    forward = {op.key: op for op in ops(micro_batch_size=2) if op.direction == "forward"}
    assert again("none") == []
    assert {op.name for op in again("selective")} == {"layer_norm", "bias_gelu"}
    assert sum(op.count for op in full) == LARGE.shape.n_layer * 8
    assert all(op.key in forward and forward[op.key].flops == op.flops for op in full)
    norm = LARGE.seq_len // 2, LARGE.shape.n_embd  # of a part of the tokens
    for sp in (True, False):
        found = {op.shape for op in ops(world_size=2, tp=2, sequence_parallel=sp)}
        assert (norm in found) == sp
    for stage, shards in ((0, 1), (1, 8), (3, 8)):
        (step,) = (op for op in ops(world_size=8, zero_stage=stage) if op.name == "optimizer")
        assert step.shape[0] == -(-LARGE.n_parameters // shards)
    assert ops(grad_accum_steps=4)[-2].count == 3


@sweep(["ep", "tp"], [(1, 1), (2, 1), (4, 2)])
def test_a_step_of_experts_has_the_flops_of_its_tokens(ep, tp):
    """Top 4 of half of the features: twice the products of an MLP, and the router's."""
    experts = GPTConfig(2, 2, 128, 16, 256, dropout=0.0, n_expert=4, top_k=4, expert_hidden=256)
    setup = Setup(8, tp=tp, ep=ep)
    found, mlps = (
        sum(
            op.flops * op.count
            for op in ops_of(Workload(shape, setup.dp), setup)
            if op.name == "matmul"
        )
        for shape in (experts, replace(experts, n_expert=0))
    )
    router = 6 * experts.n_layer * experts.n_embd * experts.n_expert * 16
    assert found - router == mlps + 6 * experts.n_layer * 8 * experts.n_embd**2 * 16 / tp


def test_exchanges_on_paper():
    """The last bucket has the tied table, complete when backward ends: it hides nowhere."""
    setup = Setup(world_size=16, pp=4, tp=2, grad_accum_steps=8, schedule="interleaved", chunks=2)
    send, table = (s for s in comm_ops_of(LARGE, setup) if s.axis == "pp")
    assert (send.count, send.stride) == (2 * 8 * 2, 4)
    assert send.bytes == LARGE.seq_len * LARGE.shape.n_embd * 2 / 2
    assert (table.kind, table.ranks) == ("all_reduce", 2)
    layers = [op.count for op in ops_of(LARGE, setup) if op.name == "attention"]
    assert layers == [8 * 12, 8 * 12]
    sends = comm_ops_of(LARGE, Setup(world_size=8, zero_stage=2))
    (last,) = (s for s in sends if s.kind == "reduce_scatter" and not s.under)
    assert last.bytes >= 4.0 * LARGE.shape.padded_vocab_size * LARGE.shape.n_embd
    assert last.count == 1
    hidden = [s for s in sends if s.kind == "reduce_scatter" and s.under == "backward"]
    assert sum(s.count for s in hidden) > 10
    assert not comm_ops_of(LARGE, Setup(world_size=1))


def test_bytes_of_updates():
    """Stage 0 sends results; a shard's slices go to their ranks and back; along tp columns do."""
    one = workload(n_layer=3, width=64, tokens=16, batch=4)
    elements = 12 * 3 * 64**2
    for how, expected in (
        ({"world_size": 4}, {"dp": elements}),
        ({"world_size": 4, "zero_stage": 1}, {"shard": 2 * elements / 4}),
        ({"world_size": 4, "zero_stage": 3, "shard_size": 2}, {"shard": 2 * elements / 2}),
        ({"world_size": 2, "tp": 2, "micro_batch_size": 4}, {"tp": 2 * elements / 2}),
    ):
        sends = comm_ops_of(one, setup(optimizer="muon", **how))
        found = {c.axis: c.count * c.bytes for c in sends if c.kind == "all_to_all"}
        assert found == pytest.approx({axis: 4 * n for axis, n in expected.items()}), how


def test_updates_are_done_once_and_take_time():
    """12 products of q, k, v and the projection, 8 of the MLP: shared out, none twice."""
    one = Workload(GPTConfig.preset("gpt2"), 8)
    total = 12 * (4 * product_flops(768, 768) + 2 * product_flops(768, 3072))
    assert STEPS * total == pytest.approx(1.6e12, rel=0.05)  # a step of 124M
    for ranks in (1, 4):
        s = Setup(world_size=ranks, zero_stage=1, optimizer="muon", micro_batch_size=8 // ranks)
        ops = [op for op in ops_of(one, s) if op.name == "orthogonalize"]
        share = sum(op.flops * op.count for op in ops) / STEPS / total
        assert 1 / ranks <= share < 1.05 / ranks
    assert not [op for op in ops_of(one, Setup(micro_batch_size=8)) if op.name == "orthogonalize"]


class Fixed:
    """Each forward op 1 s, backward 2 s, an exchange 1 s; of `overlap` nothing but what is said."""

    peak_flops, overhead_s = 1e12, 0.5

    def __init__(self, overlap=1.0, send=1.0):
        self.overlap, self._send = overlap, send

    def op_s(self, op):
        return 2.0 if op.key[2] == "backward" else 1.0

    def comm_s(self, send):
        return self._send


def predict(setup, rates=None, shape=SHAPE):
    workload = Workload(shape, setup.dp * setup.micro_batch_size * setup.grad_accum_steps)
    return predict_step(workload, setup, rates or Fixed())


def exposed(setup, sends, rates):
    workload = Workload(SHAPE, 8)
    return time_of(workload, setup, rates, ops_of(workload, setup), sends).parts["dp"]


class Layers(Fixed):
    """Embedding and loss take no time: stages are alike."""

    def op_s(self, op):
        return 0.0 if op.name in ("embedding", "loss") else super().op_s(op)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 1), (4, 4, 1), (4, 16, 1), (8, 8, 2), (8, 99, 1)])
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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_more_micro_batches_are_predicted_from_fewer(schedule):
    p, m, v = 4, 131, 2 if schedule == "interleaved" else 1
    each = tuple(1.0 + 0.3 * (stage == p * v - 1) for stage in range(p * v))
    costs = Costs(each, tuple(2.2 * x for x in each))
    whole, _ = simulated(schedule, p, m, v, costs, 0.01)
    found = makespan_of(schedule, p, m, v, costs, 0.01)
    assert found == pytest.approx(whole, rel=0.01)


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
    computed = ("forward", "backward", "recompute", "loss", "optimizer")
    assert sum(time.parts[name] for name in computed) == pytest.approx(total)
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


def send(under, kind="all_reduce", axis="dp", count=1.0):
    return CommOp(kind, axis, 1e6, 8, 1, count, under)


def test_what_hides():
    """With 4 micro-batches of b seconds each, what is sent once hides in b, what is sent by each in
    4 b; recomputation hides too, and column products along tp."""
    one = Setup(8)
    for under in ("", "forward", "backward"):
        assert exposed(one, [send(under, count=7)], Fixed(overlap=0.0)) == 7
    assert exposed(one, [send("", count=7)], Fixed()) == 7
    assert exposed(one, [send("backward", count=7)], Fixed()) == 0
    full = Setup(8, grad_accum_steps=4)
    parts = predict(full).parts
    b, f = parts["backward"] / 4, parts["forward"] / 4
    reduce = send("backward", count=3 * b)
    assert exposed(full, [reduce], Fixed()) == pytest.approx(2 * b)
    assert exposed(replace(full, accumulate="shard", zero_stage=2), [reduce], Fixed()) == 0
    gather = send("forward", "all_gather", "shard", count=3 * f)
    assert exposed(replace(full, zero_stage=1), [gather], Fixed()) == pytest.approx(2 * f)
    stage_3 = replace(full, zero_stage=3)
    assert exposed(stage_3, [gather], Fixed()) == 0
    f = predict(stage_3).parts["forward"] / 4
    gather = send("forward", "all_gather", "shard", count=4 * (f + 1))
    assert exposed(stage_3, [gather], Fixed()) == pytest.approx(4)  # each waits for 1 second
    again = replace(one, activation_checkpointing="full")
    reduce = [send("backward", count=1000)]
    less = exposed(one, reduce, Fixed()) - exposed(again, reduce, Fixed())
    assert less == pytest.approx(predict(again).parts["recompute"])
    setup, workload = Setup(2, tp=2), Workload(SHAPE, 1)
    products = 2.0 * 4 * SHAPE.n_layer * 7 / 12
    for count, expected in ((products, 0.0), (products + 5, 5.0)):
        comm = send("backward", axis="tp", count=count)
        found = time_of(workload, setup, Fixed(), ops_of(workload, setup), [comm])
        assert found.parts["tp"] == pytest.approx(expected)


ONE = Setup(zero_stage=2, offload="optimizer", grad_accum_steps=8, accumulate="shard")


def test_a_longer_forward_hides_the_host():
    """GPT-2 XL on one H100: the host's memory bounds the step, and a long forward hides it."""
    touched = 2 * (12 + 2) + 4  # bytes of an element
    host, n = host_of("hopper"), XL.n_parameters
    slow = waiting_s(XL, ONE, host, 0.0, 10.0)
    assert slow == pytest.approx(n * touched / host.bytes_per_s, rel=0.01)
    assert waiting_s(XL, ONE, host, 10.0, 10.0) == 0
    kept = replace(ONE, offload_keep_mb=12 * n / 2 / 2**20)
    assert waiting_s(XL, kept, host, 0.0, 10.0) == pytest.approx(slow / 2, rel=0.01)
    assert waiting_s(XL, ONE, host_of("volta"), 0.0, 10.0) > 3 * slow
    down = 4 * n / host.bus_bytes_per_s  # backward hides the way down
    assert waiting_s(XL, ONE, host, 10.0, 0.0) == pytest.approx(down, rel=0.01)
