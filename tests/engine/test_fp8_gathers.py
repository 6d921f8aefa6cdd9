"""Weights that are gathered as the codes of 8-bit products: the run without, in fewer bytes."""

import pytest
import torch
from cells import slow

from fastpar import GPT, AdamW, Mesh, engine_of, parallelize
from fastpar.kernels.linear_fp8 import WEIGHT, DelayedScales, Fp8
from fastpar.models.gpt import use_fp8
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=8, vocab_size=40, dropout=0.0)
STEPS = 4


def make(layers, dtype):
    model = GPT(CONFIG, seed=0).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        model.wte.weight[CONFIG.vocab_size :] = 0.0
    use_fp8(model, layers, scaling="tensor", emulate=True)
    return model


def train(layers, dtype, options, idle, tp=1):
    """Losses, weights, what scales are made of, overflows by step, bytes by step."""
    model, mesh = make(layers, dtype), Mesh(tp=tp)
    kept = torch.promote_types(dtype, torch.float32)
    parallelize(
        model,
        mesh,
        Parallel.of(
            zero_stage=3,
            bucket_mb=0.02,
            first_bucket_mb=0.005,
            deterministic=True,
            grad_dtype=kept,
            **options,
        ),
    )
    master = {"master_weights": dtype != kept}
    optimizer = AdamW(model.parameters(), lr=0.3, eps=1e-3, weight_decay=0.0, **master)
    losses, over, sent = [], [], []
    engine = engine_of(model)
    for step in range(STEPS):
        tokens = torch.randint(40, (24, 9), generator=torch.Generator().manual_seed(step))
        for rows in tokens.chunk(1 if idle else 2):
            rows = rows.chunk(mesh.dp_size)[mesh.dp_rank]
            if idle and step == 2 and mesh.dp_rank == 1:
                continue
            if not idle:  # a validation between two
                with torch.no_grad():
                    model(rows[:, :-1].contiguous())
            loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        over.append(model.fp8_scales.overflows.clone())
        sent.append((engine.report.wire_bytes, sum(engine.wire_bytes().values())))
    whole = {n: p.clone() for n, p in model.state_dict().items()}
    return losses, whole, model.fp8_scales.history, over, sent


def same(found, plain):
    for (losses, whole, history, over, _), (l0, w0, h0, o0, _) in zip(found, plain):
        assert losses == l0
        assert all(torch.equal(whole[n], w0[n]) for n in w0)
        assert torch.equal(history, h0)
        assert all(map(torch.equal, over, o0))


@pytest.mark.parametrize(
    ("layers", "dtype", "ranks", "options", "tp"),
    [
        ("all", torch.float32, 2, {}, 1),
        ("mlp", torch.bfloat16, 3, {"prefetch": 2}, 1),
        slow("all", torch.float16, 4, {"shard_size": 2}, 1),
        slow("all", torch.float64, 4, {}, 2),
        slow("mlp", torch.float32, 4, {"node_size": 2, "secondary_shards": True}, 1),
    ],
)
def test_codes_on_the_wire_change_nothing(layers, dtype, ranks, options, tp):
    plain, codes = (
        run_ranks(train, ranks, layers, dtype, {**options, **more}, False, tp)
        for more in ({}, {"wire_weights": "fp8"})
    )
    same(codes, plain)
    assert sum(over[:, 1].sum() for over in plain[0][3]) > 0  # of weights, too


def refused(stage, options, message):
    model = make("mlp", torch.float32)
    with pytest.raises(ValueError, match=message):
        parallelize(model, Mesh(), Parallel.of(zero_stage=stage, wire_weights="fp8", **options))


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (2, {}, "^wire_weights=fp8 needs zero_stage=3; add"),
        (
            3,
            {"wire_gradients": "int8", "deterministic": True},
            "^deterministic does not run with wire_gr",
        ),
        (3, {"transport": "shm"}, "^transport=shm does not run with wire_weights: ranks"),
    ],
)
def test_what_is_refused(stage, options, message):
    run_ranks(refused, 2, stage, options, message)


def test_a_rank_without_a_batch_tells_of_its_part():
    plain, codes = (
        run_ranks(train, 2, "all", torch.float32, more, True)
        for more in ({}, {"wire_weights": "fp8"})
    )
    for a, b in zip(codes, plain):
        assert torch.equal(a[2], b[2])
        assert all(torch.equal(a[1][n], b[1][n]) for n in b[1])


def test_parts_tell_of_the_weights_of_their_step_alone():
    scales, zero = DelayedScales(1), torch.zeros(2, dtype=torch.float64)
    scales.note(0, (zero, zero + 448.0, zero))
    scales.update()
    how = Fp8("tensor", emulate=True, scales=scales)
    codes = how.round_part(torch.tensor([500.0, *[1.0] * 15]), 2)
    assert codes.view(torch.float8_e4m3fn).float().tolist() == [448.0, *[1.0] * 15]
    scales.note(0, (zero, zero, zero))  # what a product finds in the codes
    scales.update()
    assert scales.history[0, 0, WEIGHT] == 500.0
    assert scales.overflows[0, WEIGHT] == 2.0
    scales.note(0, (zero, zero + 3.0, zero))  # of weights that were not gathered so
    scales.update()
    assert scales.history[0, 0, WEIGHT] == 3.0
