"""engine.describe(): what it prints is what the engine holds and sends."""

import pytest
import torch
from cells import covering
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.05, "first_bucket_mb": 0.01}


def model_of():
    generator = torch.Generator().manual_seed(0)  # the default one is shared by threads
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.1, 0.1, generator=generator)
    return model


def engine_after(steps, **options):
    model = parallelize(model_of(), Mesh(), Parallel.of(**SMALL, **options))
    optimizer, engine, sent = AdamW(model.parameters()), engine_of(model), []
    for _ in range(steps):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(engine.report.wire_bytes)
    return model, engine, sent


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.bfloat16}])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wire_bytes_are_those_of_a_step(stage, options):
    def ranks():
        _, engine, sent = engine_after(4, zero_stage=stage, **options)
        # The gathers that zero_grad() launches belong to the step that follows.
        assert sent[2] == sent[3] == sum(engine.wire_bytes().values())

    run_ranks(ranks, 2)


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        (0, {"parameters": 4, "gradients": 4}),
        (1, {"parameters": 4, "gradients": 4}),
        (2, {"parameters": 4, "gradient shards": 2}),
        (3, {"parameter shards": 2, "gradient shards": 2}),
    ],
)
def test_memory_between_steps(stage, kinds):
    def ranks():
        _, engine, _ = engine_after(2, zero_stage=stage)
        if stage == 3:
            engine.zero_grad()
        return engine.memory(), sum(b.spec.numel for b in engine.buckets)

    for memory, numel in run_ranks(ranks, 2):
        assert {k: n for k, n in memory.items() if n} == {k: n * numel for k, n in kinds.items()}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {"zero_stage": 0}), (2, {"zero_stage": 3}), (2, {"zero_stage": 2, "deterministic": True})],
)
def test_it_has_a_line_for_each_bucket(ranks, options):
    engine = run_ranks(lambda: engine_after(1, **options)[1], ranks)[0]
    text = engine.describe()
    assert f"stage {options['zero_stage']}, dp={ranks}, {ranks} shards" in text
    rows = [line.split() for line in text.splitlines()]
    found = [int(row[0]) for row in rows if len(row) > 2 and row[2] == "float32"]
    assert found == list(range(len(engine.buckets)))


def test_frozen_parameters_are_counted():
    model = model_of()
    model[0].requires_grad_(False)
    parallelize(model, Mesh())
    assert engine_of(model).memory()["frozen parameters"] == 4 * (64 * 64 + 64)


@pytest.mark.parametrize(("stage", "copies"), [(0, 1.0), (1, 0.5), (2, 0.5), (3, 0.5)])
def test_what_fixed_sums_cost_is_counted(stage, copies):
    """After one micro-batch a tree holds its reduced gradients once more."""

    def ranks():
        model = parallelize(
            model_of(), Mesh(), Parallel.of(zero_stage=stage, deterministic=True, **SMALL)
        )
        engine = engine_of(model)
        model(torch.ones(2, 64)).square().sum().backward()
        held = engine.memory()["partial sums"]
        engine.zero_grad()
        return held, engine.memory()["partial sums"], sum(b.spec.numel for b in engine.buckets)

    for held, after, numel in run_ranks(ranks, 2):
        assert held == copies * 4 * numel
        assert after == 0


# Along tp


def gpt_after(steps, tp, dtype=torch.float32, **options):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 8, "vocab_size": 100}
    model = parallelize(
        GPT(GPTConfig(**sizes)).to(dtype), Mesh(tp=tp), Parallel.of(**SMALL, **options)
    )
    wide = dtype == torch.float32
    optimizer = AdamW(model.parameters(), master_weights=not wide)
    engine, sent = engine_of(model), []
    for _ in range(steps):
        idx = torch.arange(8)[None]
        model(idx, idx).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(engine.report.wire_bytes)
    return engine, sent


@covering(
    2,
    (("dp", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]),
    ("sequence_parallel", [True, False]),
    ("dtype", [torch.float32, torch.bfloat16]),
)
def test_wire_bytes_with_partial_sums_are_those_of_a_step(dp, stage, sequence_parallel, dtype):
    def ranks():
        engine, sent = gpt_after(4, 2, dtype, zero_stage=stage, sequence_parallel=sequence_parallel)
        assert sent[2] == sent[3] == sum(engine.wire_bytes().values())
        kind = "all-reduce of partial gradients"
        return engine.wire_bytes().get(kind, 0)

    partial = (8 + 10 + 4) * 32 * dtype.itemsize  # wpe, norms, biases
    sums = run_ranks(ranks, 2 * dp)
    if not sequence_parallel:
        assert sums == [0] * 2 * dp
    elif stage == 0:
        assert sums == [partial] * 2 * dp
    else:  # the ranks of dp share the elements
        assert sums[0] == sums[1]
        assert sums[0] + sums[2] == partial
