"""What a layer keeps between forward and backward on a rank, in bytes, against the formulas.

Of s tokens, b sequences, h features, t ranks, in bf16 and with attention that keeps no scores,
Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2, without the term 5 * a * s / h) count

    34 * s*b*h / t                with sequence parallelism
    s*b*h * (10 + 24 / t)         without
    2 * s*b*h / t                 recomputed in full, with sequence parallelism: the input

Ours, in units of s*b*h bytes: 2 for each bf16 tensor of a token's features.

                     none                          selective                   full
    per token        x and y of both norms: 8      x, delta, c_proj's: 6       x, delta: 4
    split            qkv 6, o 2, fc 8, gelu 8      qkv 6, o 2, fc 8            -

No dropout mask is kept: they are drawn again. A recomputed block has two inputs, because it adds
the residual of the one below (model.py, [Note: delayed residual]): 4 where the formula has 2.
fp32 statistics come on top: 2 norms' mean and rstd for each token, and attention's lse.
"""

import gc

import torch
from cells import covering
from lone_rank import LoneMesh, heard

from fastpar import GPT, GPTConfig, Mesh, parallelize
from fastpar.engine.debug import Debug
from fastpar.kernels import make_key
from fastpar.nn.recompute import recompute
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

B, T, C, HEADS = 2, 32, 64, 4
SBH = B * T * C
STATISTICS = 2 * 2 * 4 / C  # mean and rstd of two norms, in units of s*b*h bytes
LSE = 2 * 4 * HEADS / C  # two numbers a row and head

PER_TOKEN = {"none": 8 + STATISTICS, "selective": 6, "full": 4}
SPLIT = {"none": 24 + LSE, "selective": 16 + LSE, "full": 0}


def formula(mode, sp, tp):
    """Bytes that a layer keeps, in units of s*b*h."""
    return PER_TOKEN[mode] / (tp if sp else 1) + SPLIT[mode] / tp


def published(sp, tp):
    return 34 / tp if sp else 10 + 24 / tp


def build(mesh, n_layer, mode, sp, dropout=0.1, debug=None):
    config = GPTConfig(
        n_layer=n_layer, n_head=HEADS, n_embd=C, block_size=T, vocab_size=100, dropout=dropout
    )
    model = GPT(config).to(torch.bfloat16)
    parallelize(model, mesh, Parallel(sequence_parallel=sp), debug=debug)
    return recompute(model, mode)


def loss_of(model):
    idx = torch.arange(B * T).view(B, T)
    return model(idx, idx, rng_key=make_key(1, 2))


def saved_bytes(n_layer, tp, sp, dropout):
    """Storages that autograd saves, each once, without those of parameters."""
    model = build(Mesh(tp=tp), n_layer, "none", sp, dropout)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(model)
    loss.backward()
    return sum(storage.nbytes() for storage in saved.values())


def allocated_bytes(n_layer, tp, mode, sp):
    """What a forward leaves allocated, by torch's allocator; the graph is alive meanwhile."""
    with LoneMesh(tp, 0, tp=tp) as mesh:
        model = build(mesh, n_layer, mode, sp, debug=Debug(collectives=heard([])))
        loss_of(model)
        gc.collect()
        gc.disable()  # what another test left in cycles must not be freed in the measurement
        try:
            with torch.autograd.profiler.profile(profile_memory=True) as profile:
                loss = loss_of(model)
        finally:
            gc.enable()
        total = sum(event.self_cpu_memory_usage for event in profile.key_averages())
        del loss
        return total


def of_a_layer(measure, *args):
    """In units of s*b*h bytes; what is not a layer's is in both."""
    return (measure(4, *args) - measure(2, *args)) / (2 * SBH)


CASES = [(1, True), (2, True), (4, True), (2, False), (4, False)]


@covering(1, (("tp", "sp"), CASES), ("mode", PER_TOKEN))
def test_what_a_layer_keeps(mode, tp, sp):
    """Exactly; 1 / t of it with sequence parallelism."""
    generator = torch.get_rng_state().nbytes if mode != "none" else 0  # torch's, for each block
    kept = of_a_layer(allocated_bytes, tp, mode, sp) - generator / SBH
    assert kept == formula(mode, sp, tp)
    if mode == "none":
        assert kept < published(sp, tp)


@covering(1, (("tp", "sp"), CASES), ("dropout", [0.0, 0.1]))
def test_what_autograd_saves(tp, sp, dropout):
    """The same, seen from another side, on every rank; masks take nothing."""

    def rank(n_layer):
        return saved_bytes(n_layer, tp, sp, dropout)

    more, less = (run_ranks(rank, tp, n_layer) for n_layer in (4, 2))
    for a, b in zip(more, less, strict=True):
        assert (a - b) / (2 * SBH) == formula("none", sp, tp)
