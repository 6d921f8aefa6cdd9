"""Loops that engines usually stumble over: every stage gives the bits of one process."""

import contextlib

import pytest
import torch
from test_zero_awkward import (
    OPTIMIZER,
    SMALL,
    STEPS,
    Case,
    Net,
    assert_same,
    backward,
    batch,
    checkpointed,
    fill,
    gradients,
    loss_of,
    on_ranks,
    plain,
    set_mean,
    snapshot,
    stages,
    worlds,
)

from fastpar import AdamW, Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def evaluate(no_grad):
    """Several forwards, as generate() runs them, in eval mode and back."""

    def between(model, i):
        model.eval()
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            idx = batch(100 + i)
            for _ in range(3):
                logits = model(idx)
                idx = torch.cat([idx[:, 1:], logits[:, -1:].argmax(-1)], 1)
        model.train()

    return between


def backward_after_evaluation(model, i):
    """The graph of the step is alive while other forwards run."""
    loss = loss_of(model, i)
    evaluate(True)(model, i)
    loss.backward()


def two_forwards(model, i):
    (loss_of(model, i) + 0.5 * loss_of(model, 50 + i)).backward()


def forwards_then_backwards(model, i):
    losses = [loss_of(model, i), loss_of(model, 50 + i)]
    total = losses[0] + losses[1]
    total.backward()


def twice(model, i):
    loss = loss_of(model, i)
    loss.backward(retain_graph=True)
    loss.backward()


def inference(model, i):
    with torch.inference_mode():
        model(batch(100 + i))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(between=evaluate(True)), id="evaluation without gradients"),
        pytest.param(Case(between=evaluate(False)), id="evaluation with gradients"),
        pytest.param(Case(between=inference), id="inference mode"),
        pytest.param(Case(backward=backward_after_evaluation), id="evaluation before backward"),
        pytest.param(Case(backward=two_forwards), id="two forwards"),
        pytest.param(Case(backward=forwards_then_backwards), id="losses added"),
        pytest.param(
            Case(backward=twice, options={"accumulate": "full", "grad_accum_steps": 2}),
            id="retain_graph full",
        ),
        pytest.param(Case(backward=twice, options={"deterministic": True}), id="retain_graph"),
        pytest.param(
            Case(lambda: Net(run=checkpointed), two_forwards), id="two forwards, checkpoints"
        ),
    ],
)
@stages
def test_loops(case, stage):
    expected = plain(case, 2)
    for result in on_ranks(case, 2, stage):
        assert_same(result, expected)


@stages
@worlds
def test_batches_of_different_sizes(stage, world_size):
    """Losses are sums; the gradients are divided by the tokens of all ranks: 5, 10, 15 and 0."""

    def sizes(step, rank):
        return (step + rank) % 3 + (step != 1)

    def ranks():
        mesh = Mesh()
        model = parallelize(fill(Net()), mesh, Parallel.of(zero_stage=stage, **SMALL))
        engine, optimizer = engine_of(model), AdamW(model.parameters(), **OPTIMIZER)
        for step in range(STEPS):
            n = sizes(step, mesh.dp_rank)
            engine.count_tokens(5 * n)
            loss_of(model, step * world_size + mesh.dp_rank, "sum", n).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    results = run_ranks(ranks, world_size)
    model = fill(Net())
    optimizer = AdamW(model.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        model.zero_grad()
        tokens = 5 * sum(sizes(step, rank) for rank in range(world_size))
        for rank in range(world_size):
            n = sizes(step, rank)
            loss_of(model, step * world_size + rank, "sum", n).div(tokens).backward()
        optimizer.step()
    expected = snapshot(model, optimizer)
    for result in results:
        assert_same(result, results[0])
        for name, value in expected.items():  # divided before or after the sum: a few roundings
            assert torch.allclose(result[name], value, rtol=2e-5, atol=1e-6), name


@stages
@worlds
def test_a_rank_without_a_batch(stage, world_size):
    """At the end of an epoch one rank has nothing left; it only steps."""

    def ranks():
        mesh = Mesh()
        model = parallelize(fill(Net()), mesh, Parallel.of(zero_stage=stage, **SMALL))
        optimizer = AdamW(model.parameters(), **OPTIMIZER)
        for step in range(STEPS):
            if not (step == 1 and mesh.dp_rank == 1):
                loss_of(model, step * world_size + mesh.dp_rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    def skip(model, i):
        if i != world_size + 1:
            backward(model, i)

    expected = plain(Case(backward=skip), world_size)
    for result in run_ranks(ranks, world_size):
        assert_same(result, expected)


@pytest.mark.parametrize("one_optimizer", [False, True])
@stages
def test_two_models(stage, one_optimizer):
    """Two engines in one process; the second model feeds on the first's output in backward too."""

    def losses(models, i):
        first = loss_of(models[0], i)
        second = loss_of(models[1], i + 30)
        return first + second * first.detach()

    def optimizers(models):
        sets = [[*models[0].parameters(), *models[1].parameters()]]
        if not one_optimizer:
            sets = [models[0].parameters(), models[1].parameters()]
        return [AdamW(params, **OPTIMIZER) for params in sets]

    def ranks():
        mesh = Mesh()
        models = [fill(Net(n_block=n)) for n in (2, 3)]
        for model, zero_stage in zip(models, (stage, 3 - stage)):
            parallelize(model, mesh, Parallel.of(zero_stage=zero_stage, **SMALL))
        steppers = optimizers(models)
        for step in range(STEPS):
            losses(models, step * 2 + mesh.dp_rank).backward()
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()
        return [{n: v.clone() for n, v in model.state_dict().items()} for model in models]

    models = [fill(Net(n_block=n)) for n in (2, 3)]
    steppers = optimizers(models)
    for step in range(STEPS):
        parts = []
        for rank in range(2):
            for model in models:
                model.zero_grad()
            losses(models, step * 2 + rank).backward()
            parts.append([gradients(model) for model in models])
        for k, model in enumerate(models):
            set_mean(model, [part[k] for part in parts])
        for optimizer in steppers:
            optimizer.step()
    for result in run_ranks(ranks, 2):
        for got, model in zip(result, models):
            assert_same(got, model.state_dict())
