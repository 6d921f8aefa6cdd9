"""The engine around its gradients: what stops, breaks, copies, dies; reports and measurements."""

import copy
import gc
import io
import os
import re
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from test_engine import (
    SMALL,
    Net,
    assert_same,
    batch,
    gradients,
    loss_of,
    mean_of,
    one_rank,
    reduced,
    stages,
)
from torch import nn

from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of, engine_of_parameter
from fastpar.engine.parallelize import parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


@stages
def test_parameters_buffers_and_frozen_ones_come_from_rank_0(stage):
    def build(seed):
        model = nn.ModuleDict({"net": Net(seed=seed), "norm": nn.BatchNorm1d(3)})
        model["net"].extra.requires_grad_(False)
        model["norm"].running_mean.fill_(float(seed))
        model["norm"].num_batches_tracked.fill_(seed)
        return model

    def ranks():
        mesh = Mesh()
        return parallelize(build(mesh.rank), mesh, zero_stage=stage).state_dict()

    for state in run_ranks(ranks, 3):
        assert_same(state, build(0).state_dict())


def test_models_that_differ_between_ranks_are_refused():
    def ranks(options):
        mesh = Mesh()
        model = nn.Linear(3, 2 + mesh.rank) if options is None else nn.Linear(3, 2)
        parallelize(model, mesh, Parallel.of(**options or {}))

    message = r"got 'parameter weight \[3, 3\] .* on rank 1 where rank 0 has '.* \[2, 3\] "
    with pytest.raises(ValueError, match=message):
        run_ranks(ranks, 2, None)

    def other_buckets():
        ranks({"bucket_mb": 1.0 + dist.get_rank()})

    with pytest.raises(
        ValueError, match=r"got 'bucket_mb=2\.0' on rank 1 where rank 0 has 'bucket_mb=1\.0'"
    ):
        run_ranks(other_buckets, 2)


def test_two_models_in_one_process():
    def ranks():
        mesh = Mesh()
        models = [parallelize(Net(seed=s), mesh, Parallel.of(**SMALL)) for s in range(2)]
        for _ in range(2):
            for model in models:
                model.zero_grad()
            (loss_of(models[0], mesh.dp_rank) + loss_of(models[1], mesh.dp_rank)).backward()
        return [gradients(model) for model in models]

    first, second = run_ranks(ranks, 2)
    for seed in range(2):
        expected = mean_of([(Net(seed=seed), [r]) for r in range(2)])
        assert_same(first[seed], expected)
        assert_same(second[seed], expected)


def test_hooks_run_in_the_thread_of_their_rank():
    """What the threaded tests rely on: CPU backward stays in the thread that called it."""
    seen = []
    model = parallelize(Net(), one_rank())
    model.wte.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(threading.get_ident())
    )
    loss_of(model, 0).backward()
    assert seen == [threading.get_ident()]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("broken")


def test_a_backward_that_stopped_is_forgotten_if_nothing_was_sent():
    plain, model = Net(), parallelize(Net(), one_rank(), Parallel.of(**SMALL))
    with pytest.raises(ArithmeticError):
        model.head(Broken.apply(model.wte(batch(0)))).sum().backward()
    for m in (plain, model):
        m.zero_grad()
        loss_of(m, 0).backward()
    assert_same(gradients(plain), gradients(model))


@stages
def test_ranks_go_on_after_a_backward_that_stopped_before_sending(stage):
    """The hooks that fired in it must not count towards the next one's buckets."""

    def ranks():
        mesh = Mesh()
        model = parallelize(Net(), mesh, zero_stage=stage)  # one bucket, or one unit
        result = []
        for step in range(3):
            model.zero_grad()
            if step == 1:
                x = Broken.apply(torch.ones(8, requires_grad=True))
                with pytest.raises(ArithmeticError):
                    (x + model.wte(batch(0))).sum().backward()
                if stage == 0:
                    assert model.wte.weight.grad is not None  # fires last otherwise
            model.zero_grad()
            loss_of(model, 2 * step + mesh.dp_rank).backward()
            result.append(reduced(model))
        return result

    results = run_ranks(ranks, 2)
    for step in range(3):
        expected = mean_of([(Net(), [2 * step + r]) for r in range(2)])
        assert_same(results[0][step], expected)


def test_a_backward_that_stopped_after_sending_is_an_error():
    def ranks():
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        parallelize(model, Mesh(), Parallel.of(bucket_mb=0.0025, first_bucket_mb=0.0025))
        x = torch.ones(2, 16)
        model(x).sum().backward()
        with pytest.raises(ArithmeticError):
            model[1](Broken.apply(model[0](x))).sum().backward()
        model(x).sum().backward()

    message = r"expected backward to run to its end, got a new one .* with 1 of 2 buckets sent on"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(ranks, 2)


def test_views_broken_after_parallelize_are_seen_in_backward():
    model = parallelize(Net(), one_rank())
    model.double()
    with pytest.raises(RuntimeError, match=r"to stay in its flat buffer, got other memory"):
        loss_of(model, 0).backward()
    model = parallelize(Net(), one_rank())
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"to keep its parameter 'wte\.weight', got another"):
        loss_of(model, 0).backward()


# The engine and its model


def test_parallelize_twice_is_refused():
    model = parallelize(Net(), one_rank())
    with pytest.raises(
        ValueError, match=r"expected a model without an engine, got .*'0\.wte\.weight'"
    ):
        parallelize(nn.Sequential(model, nn.Linear(2, 2)), one_rank())


def test_engine_of_needs_parallelize():
    with pytest.raises(ValueError, match=r"expected a module that went through fastpar\.parallel"):
        engine_of(nn.Linear(2, 2))


def test_copies_and_pickles_leave_the_engine_behind():
    model = parallelize(Net(), one_rank())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(engine_of_parameter(p) is None for p in other.parameters())
        assert_same(other.state_dict(), model.state_dict())
        other.zero_grad()
        loss_of(other, 0).backward()
        assert model.wte.weight.grad is None
        parallelize(other, one_rank())
        assert engine_of(other) is not engine_of(model)


def test_an_engine_lives_as_long_as_a_parameter():
    model = parallelize(Net(), one_rank())
    parameters = list(model.parameters())
    engine = weakref.ref(engine_of(model))
    del model
    gc.collect()
    assert engine() is not None
    del parameters
    gc.collect()
    assert engine() is None


def test_grads_are_listed_in_registration_order():
    model = parallelize(Net(), one_rank())
    loss_of(model, 0, use_extra=False).backward()
    expected = [p for n, p in model.named_parameters() if not n.startswith("extra")]
    pairs = engine_of(model).grads()
    assert [id(p) for p, _ in pairs] == [id(p) for p in expected]
    assert all(p.grad is g for p, g in pairs)


def test_describe_shows_every_bucket():
    text = engine_of(parallelize(Net(), one_rank(), Parallel.of(**SMALL))).describe()
    assert text.startswith("engine: stage 0, dp=1, 1 shards, no communication, 408 trained param")
    rows = re.findall(r"^ +(\d+) +- +float32 +(\d+) +[\d.]+ +[\d.]+  (.+)$", text, re.MULTILINE)
    assert [int(r[0]) for r in rows] == list(range(7))  # the embedding has one of its own
    assert rows[0][2] == "extra.bias"
    assert rows[-1][2] == "wte.weight"

    def ranks():
        return engine_of(parallelize(nn.Linear(2**9, 2**9), Mesh(), deterministic=True)).describe()

    text = run_ranks(ranks, 2)[0]
    assert "dp=2, 1 shards, shm" in text
    assert "1 buckets, deterministic" in text
    assert "all-reduce 1.0 MiB" in text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_check_replicas_names_the_first_difference(stage):
    """With shards each rank has its own part: copies are those of another group of ranks."""

    def ranks():
        mesh = Mesh()
        model = parallelize(
            Net(), mesh, Parallel.of(zero_stage=stage, shard_size=2 if stage else None, **SMALL)
        )
        engine = engine_of(model)
        engine.check_replicas()
        with engine.gathered(), torch.no_grad():
            if mesh.rank >= 2:
                model.blocks[1].weight[2, 3] += 1e-7
        engine.check_replicas()

    # Which ranks have the changed element, of those that have it as one piece.
    pair = r"rank 0 and rank 2|rank 1 and rank 3" if stage else "ranks 0, 1 and ranks 2, 3"
    message = rf"difference between ({pair}) in parameter 'blocks\.1\.weight' after step 0"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(ranks, 4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_reduce_scalars(deterministic):
    def ranks():
        mesh = Mesh()
        engine = engine_of(parallelize(nn.Linear(2, 2), mesh, deterministic=deterministic))
        values = torch.tensor([mesh.rank + 1.0, 0.5], dtype=torch.float64)
        total = engine.all_reduce_scalars(values)
        assert values.tolist() == [mesh.rank + 1.0, 0.5]
        return total.tolist(), total.dtype

    assert run_ranks(ranks, 3) == [([6.0, 1.5], torch.float64)] * 3
    engine = engine_of(parallelize(nn.Linear(2, 2), one_rank()))
    assert engine.all_reduce_scalars(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"expected fp32 or fp64, got dtype=torch\.int64"):
        engine.all_reduce_scalars(torch.ones(2, dtype=torch.int64))


def test_exposed_communication_is_zero_on_one_rank():
    model = parallelize(Net(), one_rank())
    engine = engine_of(model)
    assert engine.report is None
    loss_of(model, 0).backward()
    engine.before_step()
    engine.after_step()
    assert engine.report.exposed_ms == 0.0


def wait_for_a_slow_rank():
    mesh = Mesh()
    model = parallelize(Net(), mesh)
    engine = engine_of(model)
    waited = []
    for step in range(3):
        dist.barrier()
        if step == 1 and mesh.rank == 1:
            time.sleep(0.5)
        loss_of(model, step).backward()
        engine.before_step()
        engine.exchange(None)
        engine.after_step()
        waited.append(engine.report.exposed_ms)
        engine.zero_grad()
    return waited


def test_exposed_communication_is_the_time_spent_waiting():
    """A lower bound only: rank 0 cannot have waited less than rank 1 slept after the barrier."""
    fast, slow = run_ranks(wait_for_a_slow_rank, 2, backend="gloo")
    assert fast[1] > 400
    assert fast[1] > slow[1]
    assert fast[1] > fast[2]  # each step has its own
    assert all(ms > 0 for ms in (*fast, *slow))


def lose_a_rank(when, stage):
    mesh = Mesh()
    model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
    for step in range(3):
        if mesh.rank == 1 and step == 2:
            if when == "between steps":
                os._exit(9)
            model.norm.weight.register_hook(lambda _: os._exit(9))
        loss_of(model, step).backward()


@pytest.mark.parametrize(
    ("when", "stage"), [("between steps", 0), ("in backward", 0), ("in backward", 3)]
)
def test_a_dead_rank_is_reported_with_rank_bucket_and_step(when, stage):
    survivor, dead = run_ranks(
        lose_a_rank, 2, when, stage, backend="gloo", timeout_s=30, return_exceptions=True
    )
    message = r"error on rank 0 while (starting|waiting for|gathering) bucket \d+ of step 2 "
    with pytest.raises(RuntimeError, match=message):
        raise survivor
    with pytest.raises(RuntimeError, match=r"rank 1: exit status 9"):
        raise dead


def lose_a_rank_before_scalars():
    mesh = Mesh()
    engine = engine_of(parallelize(Net(), mesh))
    if mesh.rank == 1:
        os._exit(9)
    engine.all_reduce_scalars(torch.ones(1))


def test_a_dead_rank_is_reported_by_the_control_all_reduce():
    survivor, _ = run_ranks(
        lose_a_rank_before_scalars, 2, backend="gloo", timeout_s=30, return_exceptions=True
    )
    with pytest.raises(
        RuntimeError, match=r"error on rank 0 while summing scalars after bucket \d of step 0"
    ):
        raise survivor
