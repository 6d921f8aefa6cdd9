"""Compute and communication of a step, against arithmetic by hand and real engines."""

import pytest
import torch
from lone_rank import LoneMesh, heard

from fastpar import GPT, AdamW, engine_of, parallelize
from fastpar.axes.data import buckets_of
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.engine.debug import Debug
from fastpar.kernels.global_norm import NORM_WORDS
from fastpar.models.gpt import use_fp8
from fastpar.nn.recompute import recompute
from fastpar.predict.time import comm_ops_of, ops_of
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel

C, T, LAYERS = 64, 32, 3
SHAPE = GPTConfig(n_layer=LAYERS, n_head=4, n_embd=C, block_size=T, vocab_size=500, dropout=0.0)
FP32 = {"dtype": "fp32", "device_type": "cpu", "transport": "nccl"}
CONTROL = 8 * (5 + NORM_WORDS + 1)  # bytes of a rank; fewer than 63 parameters
LARGE = Workload(GPTConfig.preset("gpt2-xl"), 64)


def wire(send: CommOp) -> float:
    """Bytes that a rank sends for it."""
    ways = 2 if send.kind == "all_reduce" else 1
    return ways * send.bytes * (send.ranks - 1) / send.ranks * send.count


class Run:
    """A real rank of a lone mesh, trained for two steps; what it sent in the second."""

    def __init__(
        self, shape, *, world_size, tp=1, cp=1, micro=2, n_micro=1, mode="none", fp8="none",
        **options,
    ):  # fmt: skip
        self.ops = []
        with LoneMesh(world_size, 0, tp=tp, cp=cp) as mesh:
            model = GPT(shape)
            use_fp8(model, fp8, scaling="tensor", emulate=True)
            parallelize(
                model, mesh, Parallel.of(**options), debug=Debug(collectives=heard(self.ops))
            )
            recompute(model, mode)
            optimizer = AdamW(model.parameters())
            for _ in range(2):
                self.ops.clear()
                for _ in range(n_micro):
                    idx = torch.arange(micro * T).view(micro, T) % shape.vocab_size
                    model(idx, idx).backward()
                optimizer.step()
                optimizer.zero_grad()
            self.engine = engine_of(model)
            self.described = self.engine.wire_bytes()
            self.buckets = [b.spec.numel for b in self.engine.buckets]
            self.local = sum(p.numel() for p in model.parameters())


def setup_of(*, world_size, micro=2, n_micro=1, mode="none", **options):
    accumulate = options.pop("accumulate", "full")
    return Setup(
        world_size=world_size,
        micro_batch_size=micro,
        grad_accum_steps=n_micro,
        activation_checkpointing=mode,
        accumulate=accumulate,
        **options,
        **FP32,
    )


# Operations


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


def test_recomputation_is_a_forward_more():
    base = Setup(micro_batch_size=2)
    full, selective = (
        [
            op
            for op in ops_of(LARGE, Setup(micro_batch_size=2, activation_checkpointing=mode))
            if op.direction == "recompute"
        ]
        for mode in ("full", "selective")
    )
    forward = {op.key: op for op in ops_of(LARGE, base) if op.direction == "forward"}
    assert {op.name for op in selective} == {"layer_norm", "bias_gelu"}
    assert sum(op.count for op in full) == LARGE.shape.n_layer * 8
    assert all(op.key in forward and forward[op.key].flops == op.flops for op in full)
    assert not [op for op in ops_of(LARGE, base) if op.direction == "recompute"]


def test_norms_see_a_part_of_the_tokens():
    shapes = {
        sp: {op.shape for op in ops_of(LARGE, Setup(2, tp=2, sequence_parallel=sp))}
        for sp in (True, False)
    }
    tokens, width = LARGE.seq_len, LARGE.shape.n_embd
    assert (tokens // 2, width) in shapes[True]
    assert (tokens // 2, width) not in shapes[False]


def test_optimizer_has_this_ranks_elements():
    for stage, elements in ((0, 1), (1, 8), (3, 8)):
        ops = ops_of(LARGE, Setup(world_size=8, zero_stage=stage))
        (step,) = (op for op in ops if op.name == "optimizer")
        assert step.shape[0] == -(-LARGE.n_parameters // elements)
    assert ops_of(LARGE, Setup(grad_accum_steps=4))[-2].count == 3


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_local_parameters_are_those_of_a_rank(tp):
    run = Run(SHAPE, world_size=2 * tp, tp=tp)
    assert buckets_of(Workload(SHAPE, 4), Setup(tp=tp)).elements == run.local


# Exchanges, as real engines do them


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_mb", [None, 0.02])
def test_bytes_of_an_engine(stage, bucket_mb):
    options = {"world_size": 4, "zero_stage": stage, "bucket_mb": bucket_mb}
    run = Run(SHAPE, **options)
    workload, setup = Workload(SHAPE, 8), setup_of(**options)
    kinds = buckets_of(workload, setup).kinds
    counted = [kind.padded(setup.n_shards) for kind in kinds.elements()]
    assert sorted(counted) == sorted(run.buckets)
    sends = [send for send in comm_ops_of(workload, setup) if send.axis in ("dp", "shard")]
    assert sum(map(wire, sends)) == sum(run.described.values())


@pytest.mark.parametrize("fp8", ["mlp", "all"])
def test_bytes_of_weights_as_codes(fp8):
    """One for each element of a block's matrices, four for all else, by what was really sent."""
    options = {"world_size": 4, "zero_stage": 3, "wire_weights": "fp8"}
    run = Run(SHAPE, fp8=fp8, **options)
    setup = setup_of(fp8=fp8, fp8_scaling="tensor", **options)
    kinds = buckets_of(Workload(SHAPE, 8), setup).kinds
    assert sorted(kind.padded(4) for kind in kinds.elements()) == sorted(run.buckets)
    sends = [s for s in comm_ops_of(Workload(SHAPE, 8), setup) if s.axis == "shard"]
    assert sum(map(wire, sends)) == sum(run.described.values())
    said = sorted(
        op.tensor_bytes for op in run.ops if (op.kind, op.role) == ("all_gather", "gather")
    )
    gathers = [s for s in sends if s.kind == "all_gather"]
    assert said == sorted(s.bytes for s in gathers for _ in range(s.count))
    matrices = {"mlp": 8, "all": 12}[fp8] * C * C * LAYERS
    assert said.count(matrices) == 1  # all layers are one unit


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_bytes_of_many_layers(wide):
    """Many units of the same size."""
    shape = GPTConfig(
        n_layer=11, n_head=4, n_embd=192 if wide else 64, block_size=T, vocab_size=500, dropout=0.0
    )
    for mb in (0.3, 2.0):
        options = {"world_size": 2, "zero_stage": 3, "bucket_mb": mb}
        run, setup = Run(shape, **options), setup_of(**options)
        sends = [send for send in comm_ops_of(Workload(shape, 4), setup) if send.axis == "shard"]
        assert sum(map(wire, sends)) == sum(run.described.values())
        n_reduced = sum(send.count for send in sends if send.kind == "reduce_scatter")
        assert n_reduced == len(run.buckets)


def test_bytes_between_copies():
    options = {"world_size": 4, "zero_stage": 2, "shard_size": 2}
    run, setup = Run(SHAPE, **options), setup_of(**options)
    for axis, kinds in (
        ("copies", ["all-reduce of shards"]),
        ("shard", ["reduce-scatter", "all-gather"]),
    ):
        sends = [send for send in comm_ops_of(Workload(SHAPE, 8), setup) if send.axis == axis]
        assert sum(map(wire, sends)) == sum(run.described[kind] for kind in kinds)
        assert {send.stride for send in sends} == {2 if axis == "copies" else 1}


@pytest.mark.parametrize("accumulate", ["full", "shard"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sums_of_several_micro_batches(accumulate, stage):
    options = {"world_size": 2, "zero_stage": stage, "accumulate": accumulate}
    run = Run(SHAPE, n_micro=3, grad_accum_steps=3, **options)
    setup = setup_of(n_micro=3, **options)
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        said = [op for op in run.ops if op.kind == kind and op.tensor_bytes != CONTROL * 2]
        sends = [s for s in comm_ops_of(Workload(SHAPE, 12), setup) if s.kind == kind]
        sends = [s for s in sends if s.axis in ("dp", "shard")]
        assert sum(s.count for s in sends) == len(said)
        assert sum(s.bytes * s.count for s in sends) == sum(op.tensor_bytes for op in said)


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_exchanges_along_tp(sp, mode):
    options = {"world_size": 4, "tp": 4, "sequence_parallel": sp}
    run = Run(SHAPE, mode=mode, n_micro=2, **options)
    setup = setup_of(mode=mode, n_micro=2, **options)
    said, counted = {}, {}
    for op in run.ops:
        if op.role == "tp":
            key = op.kind, float(op.tensor_bytes)
            said[key] = said.get(key, 0) + 1
    for send in comm_ops_of(Workload(SHAPE, 4), setup):
        if send.axis == "tp":
            key = send.kind, send.bytes
            counted[key] = counted.get(key, 0) + send.count
    assert counted == said


@pytest.mark.parametrize("method", ["heads", "keys"])
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_exchanges_along_cp(cp, tp, mode, method):
    """Of what is padded too: by heads four on three ranks are six, by keys the tokens of a row."""
    world = 2 * cp * tp
    cut = {"world_size": world, "cp": cp, "cp_method": method, "tp": tp}
    run = Run(SHAPE, **cut, mode=mode, n_micro=2, micro=3)
    setup = setup_of(**cut, mode=mode, n_micro=2, micro=3)
    said, counted = {}, {}
    for op in run.ops:
        if op.role == "cp":
            key = op.kind, float(op.tensor_bytes)
            said[key] = said.get(key, 0) + 1
    for send in comm_ops_of(Workload(SHAPE, 12), setup):
        if send.axis == "cp":
            counted[send.kind, send.bytes] = send.count
    assert counted == said
    if method == "keys":
        rows = 3 * 2 * cp * -(-T // (2 * cp))
        of_layer = 6 * (cp - 1) / cp * rows * 4 * (4 // tp) * (C // 4)
        of_all = counted.items() if mode != "full" else ()
        sent = sum(n_bytes * n for (kind, n_bytes), n in of_all if kind != "all_reduce")
        assert not sent or sent * (cp - 1) / cp == pytest.approx(2 * LAYERS * of_layer)
        return
    heads = -(-4 // (cp * tp)) * cp * tp
    of_layer = 8 * (cp - 1) / cp**2 * 3 * T * 4 * heads / tp * (C // 4)
    if mode == "none":
        sent = sum(n_bytes * n for (kind, n_bytes), n in counted.items() if kind == "all_to_all")
        assert sent * (cp - 1) / cp == pytest.approx(2 * LAYERS * of_layer)


def test_partial_sums_are_of_pieces():
    """Once in a step, and of what this rank has: norms, biases of row layers, positions."""
    found = {}
    for stage in (0, 2):
        setup = setup_of(world_size=8, tp=2, n_micro=3, zero_stage=stage)
        sends = [
            s for s in comm_ops_of(Workload(SHAPE, 24), setup) if (s.axis, s.under) == ("tp", "")
        ]
        (found[stage],) = (s for s in sends if s.kind == "all_reduce")
    elements = (6 * LAYERS + 2 + T) * C
    assert (found[0].bytes, found[0].count) == (4 * elements, 3)
    assert (found[2].bytes, found[2].count) == (elements, 1)


def test_one_control_exchange():
    run = Run(SHAPE, world_size=2)
    (said,) = (op for op in run.ops if op.kind == "all_gather")
    assert said.tensor_bytes == CONTROL * 2
    (send,) = (
        s for s in comm_ops_of(Workload(SHAPE, 4), setup_of(world_size=2)) if s.axis == "control"
    )
    assert (send.bytes, send.ranks) == (said.tensor_bytes, said.world_size)
    assert not comm_ops_of(Workload(SHAPE, 4), setup_of(world_size=1))


def test_the_bucket_that_is_complete_last_hides_nowhere():
    """It has the tied table, whose gradient is complete when backward ends."""
    table = 4.0 * LARGE.shape.padded_vocab_size * LARGE.shape.n_embd
    sends = comm_ops_of(LARGE, Setup(world_size=8, zero_stage=2))
    (last,) = (s for s in sends if s.kind == "reduce_scatter" and not s.under)
    assert last.bytes >= table
    assert last.count == 1
    hidden = [s for s in sends if s.kind == "reduce_scatter" and s.under == "backward"]
    assert sum(s.count for s in hidden) > 10


def test_stages_on_paper():
    setup = Setup(world_size=16, pp=4, tp=2, grad_accum_steps=8, schedule="interleaved", chunks=2)
    send, table = (s for s in comm_ops_of(LARGE, setup) if s.axis == "pp")
    assert (send.count, send.stride) == (2 * 8 * 2, 4)
    assert send.bytes == LARGE.seq_len * LARGE.shape.n_embd * 2 / 2
    assert (table.kind, table.ranks) == ("all_reduce", 2)
    layers = [op.count for op in ops_of(LARGE, setup) if op.name == "attention"]
    assert layers == [8 * 12, 8 * 12]
