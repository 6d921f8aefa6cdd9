"""What ranks that split layers or sequences say in a step, literally: kind, bytes and order.

One real rank of a lone mesh, as in test_collective_schedules.py. predict/test_exchanges.py compares
kinds, bytes and ranks of every axis, grids too, with what the planner counts.

[Note: tp] Between blocks of n tokens of C features a layer without sequence parallelism sums [n, C]
twice forward and twice backward; with it each of these sums is a gather and a reduce-scatter, which
together are as many bytes, and the inputs of the two column layers are gathered once more in
backward (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2 and 4.3). The loss adds an
exchange of 12 bytes a row and rank.

[Note: cp] By heads a layer exchanges 8 (cp - 1) / cp^2 of B*T*C elements, both ways, of the heads
as they are padded; by keys 2 (cp - 1) / cp forward, and twice that backward.
"""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from cells import covering
from lone_rank import LoneRun

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.comm.collectives import Collectives
from fastpar.comm.recorder import ring_bytes
from fastpar.kernels.global_norm import NORM_WORDS
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

DP, TP = 2, 4
LAYERS, C, B, T = 2, 32, 4, 8
N = B * T
SIZES = {"n_layer": LAYERS, "n_head": 4, "n_embd": C, "block_size": T, "vocab_size": 100}
PARTIAL = T * C + (4 * LAYERS + 2) * C + 2 * LAYERS * C  # positions, norms, biases of row layers
IDX = torch.arange(N).view(B, T) % 100
MODES = ("none", "selective", "full")


def run_of(axes, *, dp=DP, rank=1, dropout=0.0, **options):
    """A rank that trains, see LoneRun."""
    ranks = math.prod(axes["tp_grid"]) if "tp_grid" in axes else axes["tp"]
    config = GPTConfig(**SIZES, dropout=dropout)
    return LoneRun(lambda: GPT(config), (IDX, IDX), ranks * dp, rank, axes, **options)


def of_tp(ops):
    """Kind and bytes of those inside of layers."""
    return [f"{op.kind} {op.tensor_bytes}" for op in ops if op.role == "tp"]


def partial_elements(run):
    """Of this rank's pieces of parameters whose gradients are parts of sums."""
    shards = engine_of(run.model).shards
    parts = filter(shards.declared.is_partial, shards.params)
    return sum(shards.piece(p).param.numel() for p in parts)


SUM, GATHER, SCATTER = (f"{k} {4 * N * C}" for k in ("all_reduce", "all_gather", "reduce_scatter"))
ROWS = f"all_gather {12 * N * TP}"  # of the loss: all rows are one chunk
SPLIT_TOKENS = {
    "embedding": [SCATTER],
    "layer": [GATHER, SCATTER] * 2,
    "loss": [GATHER, ROWS],
    "loss, backward": [SCATTER],
    # A row layer's dy, then a column layer's input once more, and its dx.
    "layer, backward": [GATHER, GATHER, SCATTER] * 2,
    "embedding, backward": [GATHER],
}
ALL_TOKENS = {
    "embedding": [SUM], "layer": [SUM] * 2, "loss": [ROWS], "loss, backward": [SUM],
    "layer, backward": [SUM] * 2, "embedding, backward": [],
}  # fmt: skip
sequence = pytest.mark.parametrize("sp", [True, False], ids=["sp", "plain"])


def of_tp_ranks(sp, mode):
    """Forward and backward of one micro-batch."""
    said = SPLIT_TOKENS if sp else ALL_TOKENS
    again = said["layer"] if mode == "full" else []
    forward = said["embedding"] + said["layer"] * LAYERS + said["loss"]
    layers = (again + said["layer, backward"]) * LAYERS
    return forward, said["loss, backward"] + layers + said["embedding, backward"]


@covering(2, ("stage", [0, 1, 2, 3]), ("sp", [True, False]), ("mode", MODES))
def test_schedule_of_tp(stage, sp, mode):
    """Selective recomputation sends nothing again, a full one what a layer's forward sends."""
    forward, backward = of_tp_ranks(sp, mode)
    with run_of({"tp": TP}, sequence_parallel=sp, zero_stage=stage, mode=mode) as run:
        for _ in range(2):
            said = run.train()
            mine = partial_elements(run) if stage else PARTIAL
            assert stage == 0 or mine < PARTIAL
            partial = f"all_reduce {4 * mine}"
            assert of_tp(said[0]) == forward
            assert of_tp(said[1]) == backward + [partial] * (sp and stage == 0)
            assert of_tp(said[2]) == [partial] * (sp and stage > 0)
            control = [op for ops in said for op in ops if op.role == "control"]
            assert [(op.kind, op.world_size) for op in control] == [("all_gather", DP * TP)]
            assert control[0].tensor_bytes == 8 * (5 + NORM_WORDS + 1) * DP * TP


@sequence
def test_nobody_else_along_dp(sp):
    """dp=1: activations, the partial sums and the control exchange are all there is."""
    with run_of({"tp": TP}, dp=1, sequence_parallel=sp, zero_stage=2) as run:
        for _ in range(2):
            said = run.train()
            others = [op for ops in said for op in ops if op.role != "tp"]
            assert [(op.role, op.kind) for op in others] == [("control", "all_gather")]
            partial = [f"all_reduce {4 * PARTIAL}"] * sp
            assert of_tp(said[1]) == of_tp_ranks(sp, "none")[1] + partial


@pytest.mark.parametrize(("stage", "sums"), [(0, [1, 1, 1]), (2, [0, 0, 0])])
def test_partial_sums_of_several_micro_batches(stage, sums):
    """At stage 0 after each backward, where p.grad can be read; later once in the step."""
    forward, backward = of_tp_ranks(True, "none")
    with run_of({"tp": TP}, zero_stage=stage) as run:
        *passes, step, _ = run.train(n_micro=3)
        assert [of_tp(ops) for ops in passes[::2]] == [forward] * 3
        assert [len(of_tp(ops)) - len(backward) for ops in passes[1::2]] == sums
        assert len(of_tp(step)) == (stage > 0)


@sequence
def test_evaluation(sp):
    """A forward without targets gathers the logits instead of 12 bytes a row."""
    logits = f"all_gather {4 * N * TP * 128}"
    said = SPLIT_TOKENS if sp else ALL_TOKENS
    expected = said["embedding"] + said["layer"] * LAYERS + [GATHER] * sp + [logits]
    with run_of({"tp": TP}, sequence_parallel=sp) as run:
        run.train()
        assert of_tp(run.evaluate()) == expected


def test_every_rank_has_the_same_schedule():
    found = []
    for rank in range(TP):
        with run_of({"tp": TP}, rank=rank, zero_stage=3, mode="full", dropout=0.1) as run:
            found.append([of_tp(ops) for ops in run.train()])
    assert all(said == found[0] for said in found)


@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (4, 1)])
def test_bytes_of_real_ranks_are_those_of_the_schedule(grid, monkeypatch):
    with run_of({"tp_grid": grid}, dp=1) as run:
        run.train()
        run.ops.clear()
        run.model(IDX, IDX).backward()
        wire = sum(op.wire_bytes for op in run.ops)
    sent = []

    def note(group, op, n_bytes, begin):
        sent.append(ring_bytes(op, n_bytes, group.world_size))
        return begin()

    def rank():
        model = parallelize(GPT(GPTConfig(**SIZES, dropout=0.0)), Mesh(tp_grid=grid))
        engine_of(model).input_checks.clear()
        dist.barrier()
        if dist.get_rank() == 0:
            sent.clear()
        dist.barrier()
        model(IDX, IDX).backward()

    monkeypatch.setattr(Collectives, "observers", (*Collectives.observers, note))
    run_ranks(rank, 4)
    assert sum(sent) == 4 * wire


def of_sequences(cp, method, heads, time):
    """Bytes that a rank sends by kind in forward and backward."""
    model = GPT(GPTConfig(LAYERS, heads, 4 * heads, time, 37, dropout=0.0), seed=0)
    parallelize(model, Mesh(cp=cp), Parallel.of(cp_method=method))
    engine_of(model).input_checks.clear()
    sent = Counter()

    def observer(group, op, n_bytes, begin):
        sent[op] += n_bytes * (cp - 1) / cp  # of others
        return begin()

    model.cp.group.observers = (observer,)
    idx = torch.arange(4 * time).view(4, time) % 37
    model(idx, idx).backward()
    return sent


@pytest.mark.parametrize(("cp", "heads"), [(2, 4), (3, 4), (4, 4), (3, 6), (5, 4)])
def test_bytes_of_cp(cp, heads):
    for method in ("heads", "keys"):
        if method == "heads" and cp > heads:
            continue
        time = 2 * cp
        padded = -(-heads // cp) * cp if method == "heads" else heads
        units = 4 * 4 * time * padded * 4  # bytes of B*T*C elements
        for sent in run_ranks(of_sequences, cp, cp, method, heads, time):
            if method == "heads":
                assert sent["all_to_all"] * cp**2 == LAYERS * 8 * (cp - 1) * units
            else:
                assert sent["all_gather"] * cp == LAYERS * 4 * (cp - 1) * units
                assert sent["all_to_all"] * cp == LAYERS * 2 * (cp - 1) * units
