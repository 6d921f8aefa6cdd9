"""Ranks on several nodes: secondary shards, and gradients that are added up in each node first."""

import dataclasses
from collections import Counter

import pytest
import torch
from cells import covering, sweep
from test_wired_engine import SHAPE, distance, same

import fastpar
from fastpar.axes.step import Setup, Workload
from fastpar.comm.transports import TorchCollectives
from fastpar.engine.debug import Debug
from fastpar.nn.recompute import recompute
from fastpar.optim.schedule import AveragedWeights
from fastpar.predict.memory import predict_states
from fastpar.predict.time import comm_ops_of
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

SECOND = {"node_size": 2, "secondary_shards": True}
INT8 = {"wire_gradients": "int8"}
pytestmark = pytest.mark.filterwarnings("ignore:parallelize. int4 gradients")


def batch(step, mesh):
    """The rows of this rank's number along dp, of 8."""
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step))
    n = 8 // mesh.dp_size
    rows = tokens[mesh.dp_rank * n :][:n]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(options, micro=1, axes=None, between=None):
    """Weights after three steps, bytes sent and announced, memory; between: after each step."""
    mesh = fastpar.Mesh(**(axes or {}))
    options = {"zero_stage": 3, "bucket_mb": 0.01, "first_bucket_mb": 0.01, **options}
    model = fastpar.GPT(SHAPE, seed=0)
    if between == "recompute":
        recompute(model, "full")
    model = fastpar.parallelize(model, mesh, fastpar.Parallel.of(grad_accum_steps=micro, **options))
    optimizer = fastpar.AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=1.0)
    engine = fastpar.engine_of(model)
    for step in range(3):
        for part in range(micro):
            if between in ("evaluate", "write"):
                with torch.no_grad():
                    model(*batch(9, mesh))
            if between == "write":
                with engine.gathered(), torch.no_grad():
                    model.h[0].mlp.c_fc.weight.mul_(1.5)
            model(*batch(step * micro + part, mesh)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {k: v.clone() for k, v in model.state_dict().items()}
    return found, engine.report.wire_bytes, engine.wire_bytes(), engine.memory()


@covering(
    1,
    ("micro", [1, 2]),
    ("wire", [{}, {"wire_weights": "int8"}, {"deterministic": True}, INT8]),
    ("axes", [{}, {"tp": 2}, {"replicas": 1}]),
    ("between", [None, "evaluate", "write", "recompute"]),
)
def test_secondary_shards_change_no_bit(micro, wire, axes, between):
    """4 ranks along dp on two nodes; fewer bytes leave the node, where their number is known."""
    plain = {**wire, "node_size": 2} if wire is INT8 else wire
    ranks = 4 * axes.get("tp", 1)
    one, two = (
        run_ranks(train, ranks, o, micro, axes, between) for o in (plain, {**wire, **SECOND})
    )
    for (a, _, of_one, without), (b, sent, announced, memory) in zip(one, two):
        assert same(a, b)
        own = memory.pop("secondary shards")
        assert memory == without
        assert own == 2 * memory["parameter shards"]  # of 4 ranks: half instead of a quarter
        if (micro, axes, between) == (1, {}, None):
            assert sent == sum(announced.values())
            assert announced["all-gather in the node"] > 0
            assert announced["all-gather"] < of_one["all-gather"]


def averaged(options):
    """Losses with the weights, with their average, and with the weights again."""
    model = fastpar.parallelize(
        fastpar.GPT(SHAPE, seed=0), fastpar.Mesh(), fastpar.Parallel.of(zero_stage=3, **options)
    )
    optimizer, losses = fastpar.AdamW(model.parameters(), lr=1e-2), []
    average = AveragedWeights(optimizer, 0.9)
    for step in range(3):
        model(*batch(step, fastpar.Mesh())).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(step + 1)
    with torch.no_grad():
        losses.append(model(*batch(9, fastpar.Mesh())).item())
        with average.in_the_model():
            losses.append(model(*batch(9, fastpar.Mesh())).item())
        losses.append(model(*batch(9, fastpar.Mesh())).item())
    return losses


def test_weights_that_are_exchanged_are_gathered_anew():
    found = run_ranks(averaged, 4, SECOND)[0]
    assert found == run_ranks(averaged, 4, {})[0]
    assert found[0] == found[2] != found[1]


def outside(options, micro):
    """Bytes of weights that a rank sends over all ranks (True) and in its node; of all buckets."""
    mesh = fastpar.Mesh()
    sent = {}

    class Counting(TorchCollectives):
        def _all_gather(self, out, x, tag):
            far = self.world_size > 2
            sent[far] = sent.get(far, 0) + x.nbytes * (self.world_size - 1)
            return super()._all_gather(out, x, tag)

    def make(group, role):
        return (Counting if role == "gather" else TorchCollectives)(group)

    options = {"zero_stage": 3, "bucket_mb": 0.01, "first_bucket_mb": 0.01, **options}
    model = fastpar.parallelize(
        fastpar.GPT(SHAPE, seed=0),
        mesh,
        fastpar.Parallel.of(**options),
        debug=Debug(collectives=make),
    )
    sent.clear()
    for part in range(micro):
        model(*batch(part, mesh)).backward()
    return sent, 4 * sum(bucket.spec.numel for bucket in fastpar.engine_of(model).buckets)


@sweep("micro", [1, 3])
def test_weights_cross_between_nodes_once_a_step(micro):
    """The forward's first gather does, whatever number of passes follows; the rest stays inside."""
    (alone, _), (second, whole) = (run_ranks(outside, 4, o, micro)[0] for o in ({}, SECOND))
    assert second[True] == whole * 3 / 4
    assert second[False] == (alone[True] - second[True]) * 2 / 3 > 0


@covering(1, ("stage", [1, 2, 3]), ("name", ["bf16", "int8", "int4"]), ("ranks", [4, 8]))
def test_gradients_in_two_levels(stage, name, ranks):
    """Ranks stay alike, two runs too, bytes are those announced; it is near the run in fp32."""
    keep = "error_buffer" if stage > 1 else "error_feedback"
    options = {"zero_stage": stage, "wire_gradients": name, keep: True, "node_size": 2}
    one, two = (run_ranks(train, ranks, options) for _ in range(2))
    plain = run_ranks(train, ranks, {"zero_stage": stage})[0][0]
    flat = run_ranks(train, ranks, {**options, "node_size": None})
    begin = fastpar.GPT(SHAPE, seed=0).state_dict()
    for (a, sent, announced, _), (b, *_), (c, *_) in zip(one, two, flat):
        assert same(a, one[0][0])
        assert same(a, b)
        assert not same(a, c)
        assert sent == sum(announced.values())
        assert 0 < distance(a, plain) < 0.6 * distance(plain, begin)


@sweep("name", ["int8", "int4"])
def test_errors_of_sums_are_kept_in_the_memory_of_gradients(name):
    """Stage 1 keeps them in place, the bits of stage 2 with a buffer."""
    options = {"wire_gradients": name, "node_size": 2}
    free = run_ranks(train, 4, {**options, "zero_stage": 1, "error_feedback": True}, 2)
    paid = run_ranks(train, 4, {**options, "zero_stage": 2, "error_buffer": True}, 2)
    without = run_ranks(train, 4, {**options, "zero_stage": 1}, 2)
    for (a, *_), (b, *_), (c, *_) in zip(free, paid, without):
        assert same(a, b)
        assert not same(a, c)


def refused(options, axes):
    mesh = fastpar.Mesh(**axes)
    options = {"zero_stage": 3, **options}
    config = GPTConfig(2, 2, 40, 16, 64, dropout=0.0, n_expert=2 if "ep" in axes else 0)
    debug = Debug(bus_gb_s=12) if options.get("offload") else None
    fastpar.parallelize(fastpar.GPT(config), mesh, fastpar.Parallel.of(**options), debug=debug)


@sweep(
    ("options", "axes", "message"),
    [
        ({**SECOND, "node_size": 3}, {}, "expected node_size to divide the ranks .* node_size=3"),
        ({**SECOND, "node_size": True}, {}, "expected int for node_size, got node_size=True"),
        ({"node_size": 2}, {}, "^node_size needs wire_gradients; add wire_gradients, or drop"),
        (SECOND, {"ep": 2}, "^ep does not run with node_size; drop one of them"),
    ],
)
def test_bad_nodes(options, axes, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(refused, 4, options, axes)


def test_what_they_cost_on_paper():
    """Memory and bytes of the cost model are those of an engine."""
    shape = GPTConfig(4, 2, 256, 16, 64, dropout=0.0)
    workload = Workload(shape, batch_size=4)
    base = Setup(world_size=4, zero_stage=3, dtype="fp32", node_size=2, secondary_shards=True)
    setup = dataclasses.replace(base, accumulate="shard", master_weights="none")
    plain = dataclasses.replace(setup, node_size=None, secondary_shards=False)
    more = predict_states(workload, setup).parameters - predict_states(workload, plain).parameters
    assert more == 2 * predict_states(workload, plain).parameters
    gathers = Counter()
    for c in comm_ops_of(workload, setup):
        gathers[c.ranks] += c.bytes * c.count * (c.kind == "all_gather" and c.axis == "shard")
    assert 0 < gathers[2] < gathers[4]
    wired = dataclasses.replace(setup, wire_gradients="int8", secondary_shards=False, zero_stage=2)
    sums = {
        (c.ranks, c.stride): c.bytes for c in comm_ops_of(workload, wired) if c.kind == "all_to_all"
    }
    assert sums[2, 2] == sums[2, 1] / 2
