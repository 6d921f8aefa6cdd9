"""What a rank of a tp group says in a step, literally: kind, bytes and order.

One real rank of a lone mesh, as in test_collective_schedules.py. Between blocks of n tokens of
C features a layer without sequence parallelism sums [n, C] twice forward and twice backward; with
it each of these sums is a gather and a reduce-scatter, which together are as many bytes, and the
inputs of the two column layers are gathered once more in backward (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2 and 4.3). The loss adds an exchange of 12 bytes a row and rank.
"""

import pytest
import torch
from cells import covering
from lone_rank import LoneRun, of_tp

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.kernels import make_key
from fastpar.kernels.global_norm import NORM_WORDS
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

DP, TP = 2, 4
LAYERS, C, B, T = 2, 32, 2, 8
N = B * T
SIZES = {"n_layer": LAYERS, "n_head": 4, "n_embd": C, "block_size": T, "vocab_size": 100}
PARTIAL = T * C + (4 * LAYERS + 2) * C + 2 * LAYERS * C  # positions, norms, biases of row layers


def run_of(*, world_size=DP * TP, tp=TP, rank=5, dropout=0.0, **options):
    """A rank that trains, see LoneRun."""
    config, idx = GPTConfig(**SIZES, dropout=dropout), torch.arange(N).view(B, T)
    return LoneRun(config, idx, world_size, rank, {"tp": tp}, **options)


SUM, GATHER, SCATTER = (
    f"{kind} {4 * N * C}" for kind in ("all_reduce", "all_gather", "reduce_scatter")
)
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
    "embedding": [SUM],
    "layer": [SUM] * 2,
    "loss": [ROWS],
    "loss, backward": [SUM],
    "layer, backward": [SUM] * 2,
    "embedding, backward": [],
}
sequence = pytest.mark.parametrize("sp", [True, False], ids=["sp", "plain"])
modes = pytest.mark.parametrize("mode", ["none", "selective", "full"])


def schedule(sp, mode):
    """Forward and backward of one micro-batch."""
    said = SPLIT_TOKENS if sp else ALL_TOKENS
    again = said["layer"] if mode == "full" else []
    forward = said["embedding"] + said["layer"] * LAYERS + said["loss"]
    layers = (again + said["layer, backward"]) * LAYERS
    return forward, said["loss, backward"] + layers + said["embedding, backward"]


def of_others(ops):
    return [f"{op.role} {op.kind}" for op in ops if op.role != "tp"]


@covering(
    2, ("stage", [0, 1, 2, 3]), ("sp", [True, False]), ("mode", ["none", "selective", "full"])
)
def test_schedule_of_a_step(stage, sp, mode):
    """Selective recomputation sends nothing again, a full one what a layer's forward sends."""
    forward, backward = schedule(sp, mode)
    with run_of(sequence_parallel=sp, zero_stage=stage, mode=mode) as run:
        for _ in range(2):
            said = run.train()
            partial = f"all_reduce {4 * PARTIAL}"
            if stage:  # of this rank's pieces
                shards = engine_of(run.model).shards
                partial_ones = filter(shards.declared.is_partial, shards.params)
                mine = sum(shards.piece(p).param.numel() for p in partial_ones)
                assert mine < PARTIAL
                partial = f"all_reduce {4 * mine}"
            assert of_tp(said[0]) == forward
            assert of_tp(said[1]) == backward + [partial] * (sp and stage == 0)
            assert of_tp(said[2]) == [partial] * (sp and stage > 0)
            control = [op for ops in said for op in ops if op.role == "control"]
            assert [(op.kind, op.world_size) for op in control] == [("all_gather", DP * TP)]
            words = 5 + NORM_WORDS + 1
            assert control[0].tensor_bytes == 8 * words * DP * TP


@sequence
def test_nobody_else_along_dp(sp):
    """dp=1: activations, the partial sums and the control exchange are all there is."""
    with run_of(sequence_parallel=sp, world_size=TP, rank=1, zero_stage=2) as run:
        for _ in range(2):
            said = run.train()
            others = [op for ops in said for op in of_others(ops)]
            assert others == ["control all_gather"]
            assert of_tp(said[1]) == schedule(sp, "none")[1] + [f"all_reduce {4 * PARTIAL}"] * sp


@pytest.mark.parametrize(("stage", "sums"), [(0, [1, 1, 1]), (2, [0, 0, 0])])
def test_partial_sums_of_several_micro_batches(stage, sums):
    """At stage 0 after each backward, where p.grad can be read; later once in the step."""
    forward, backward = schedule(True, "none")
    with run_of(zero_stage=stage) as run:
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
    with run_of(sequence_parallel=sp) as run:
        run.train()
        assert of_tp(run.evaluate()) == expected


def test_every_rank_has_the_same_schedule():
    found = []
    for rank in range(TP):
        with run_of(rank=rank, zero_stage=3, mode="full", dropout=0.1) as run:
            found.append([of_tp(ops) for ops in run.train()])
    assert all(said == found[0] for said in found)


# Bytes


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bytes_on_the_wire(tp):
    """8 * (tp - 1) / tp * n * C elements a layer, with sequence parallelism a quarter more: what is
    gathered again."""
    sent = {}
    for sp in (True, False):
        with run_of(world_size=2 * tp, tp=tp, rank=0, sequence_parallel=sp) as run:
            ops = [op for phase in run.train()[:2] for op in phase if op.role == "tp"]
            activations = [op for op in ops if op.tensor_bytes == 4 * N * C]
            sent[sp] = sum(op.wire_bytes for op in activations)
    share = (tp - 1) / tp * 4 * N * C
    of_layers = 8 * LAYERS * share
    assert sent[False] == of_layers + 4 * share  # embedding and loss: a sum each
    assert sent[True] == of_layers + 2 * LAYERS * share + 4 * share


# What recomputation must not change


def gradients(sp, mode, dropout):
    model = GPT(GPTConfig(**SIZES, dropout=dropout))
    parallelize(model, Mesh(tp=2), Parallel.of(sequence_parallel=sp))
    recompute(model, mode)
    idx = torch.arange(N).view(B, T)
    model(idx, idx, rng_key=make_key(1, 2)).backward()
    return [p.grad.clone() for p in model.parameters()]


@sequence
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_gradients_have_the_same_bits(mode, sp):
    expected = run_ranks(gradients, 2, sp, "none", 0.2)
    for got, want in zip(run_ranks(gradients, 2, sp, mode, 0.2), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
