"""AdamW on parameters of sharded engines: the bits, the state and the decisions of one process."""

import math
import threading

import pytest
import torch
from cells import cells
from test_optim_state import MODES, assert_same_state
from torch import nn

import fastpar
from fastpar.comm.mesh import Mesh
from fastpar.engine import control
from fastpar.optim import adamw as optim
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import DynamicLossScale
from fastpar.testing import run_ranks

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SMALL = {"bucket_mb": 4e-3, "first_bucket_mb": 1e-3}  # several buckets; pieces of a few blocks
stages = pytest.mark.parametrize("stage", [1, 2, 3])


class Bag(nn.Module):
    """Each parameter gets the gradient that forward is told; without one it is unused.

    Some have several blocks of 256 elements, some end within one, some have one rank as owner.
    """

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"weight": (40, 33), "bias": (33,), "table": (2, 700), "one": ()}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def forward(self, grads):
        used = [(p * grads[n].to(p.dtype)).sum() for n, p in self.named_parameters() if n in grads]
        return torch.stack(used).sum()


def gradients(step, rank=0):
    """The gradients of one rank: sixteenths, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shapes = {n: p.shape for n, p in Bag().named_parameters()}
    return {n: torch.randint(-64, 65, s, generator=generator) / 16 for n, s in shapes.items()}


LATER = ("weight", "one")


def groups(model):
    """With names, by which random bits go: the engine knows them without."""
    fast, slow = ([(n, getattr(model, n)) for n in names] for names in (("bias", "table"), LATER))
    return [{"params": fast}, {"params": slow, "lr": 1e-3, "weight_decay": 0.0, "eps": 1e-3}]


def sharded(stage, dtype=torch.float32, seed=0, **options):
    return fastpar.parallelize(
        Bag(dtype, seed), Mesh(), fastpar.Parallel.of(zero_stage=stage, **SMALL, **options)
    )


def values(model):
    """Whole parameters. Ranks: all."""
    with fastpar.engine_of(model).gathered():
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_same_values(model, expected):
    for n, p in model.named_parameters():
        assert torch.equal(p, expected[n]), n


def put(model, grads):
    for n, p in model.named_parameters():
        p.grad = grads[n].to(p.dtype) if n in grads else None


def train(model, optimizer, steps, rank=0):
    """With gradients of rank 0 on every rank."""
    for step in steps:
        model(gradients(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_alone(model, optimizer, steps):
    for step in steps:
        put(model, gradients(step))
        optimizer.step()


def some_unused(step, rank):
    grads = gradients(step, rank)
    if step == 1:
        del grads["table"]  # on all ranks
    if step == 2 and rank == 0:
        del grads["bias"], grads["weight"]
    return grads


@pytest.mark.parametrize(("mode", "stage", "world"), cells(MODES, [1, 2, 3], [2, 3]))
def test_steps_are_those_of_one_process(mode, stage, world):
    """With clipping, groups of other options, and parameters that some or all do not use."""
    dtype, options = mode
    options = {**HYPER, **options, "max_grad_norm": 2.0, "seed": 5}

    def ranks():
        model = sharded(stage, dtype)
        engine = fastpar.engine_of(model)
        assert engine.stage.number == stage
        optimizer = AdamW(groups(model), **options)
        seen = []
        for step in range(4):
            model(some_unused(step, engine.mesh.rank)).backward()
            names = {p: n for n, p in model.named_parameters()}
            grads = {names[p]: grad for p, grad in engine.grads()}
            optimizer.step()
            seen.append((grads, optimizer.grad_norm))
            optimizer.zero_grad()
        owned = {n: optimizer.state[p] for n, p in model.named_parameters()}
        return seen, values(model), optimizer.state_dict(), owned

    results = run_ranks(ranks, world)
    model = Bag(dtype)
    alone = AdamW(groups(model), **options)
    for step, (grads, norm) in enumerate(results[0][0]):
        put(model, {n: g for n, g in grads.items() if not (step == 1 and n == "table")})
        alone.step()
        assert torch.equal(norm, alone.grad_norm)
    for seen, mine, state, _ in results:
        assert all(torch.equal(a[1], b[1]) for a, b in zip(seen, results[0][0]))
        assert_same_values(model, mine)
        assert_same_state(alone.state_dict(), state)
        assert state.get("seed") == alone.state_dict().get("seed")
    for n, p in model.named_parameters():
        for name, whole in alone.state[p].items():
            parts = [owned[n][name] for _, _, _, owned in results]
            if name != "step":
                assert sum(part.numel() for part in parts) == whole.numel()


def test_ranks_may_own_nothing_and_count_all_the_same():
    def ranks():
        model = sharded(2)
        optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=1.0)
        train(model, optimizer, range(3))
        state = optimizer.state[model.one]
        return state["step"].item(), state["exp_avg"].numel()

    assert sorted(run_ranks(ranks, 3)) == [(3.0, 0), (3.0, 0), (3.0, 1)]


def test_all_pieces_are_one_call(monkeypatch):
    """The same number of launches as without shards, also for groups with other options."""
    calls = []

    def spy(*args, **kwargs):
        calls.append(len(args[0]))
        return step_(*args, **kwargs)

    step_ = optim.adamw_step_
    monkeypatch.setattr(optim, "adamw_step_", spy)

    def ranks():
        model = sharded(3)
        train(model, AdamW(groups(model), **HYPER, max_grad_norm=1.0), range(2))

    run_ranks(ranks, 2)
    assert len(calls) == 4
    assert all(0 < n <= 4 for n in calls)


def test_a_step_reads_nothing_on_the_host(monkeypatch):
    """Where counters are tensors; of the engine's own checks one reads a step later on a GPU, the
    other (control.py, [Note: what begins]) is there between CPU ranks only."""

    def refuse(*args):
        raise AssertionError("a value was read on the host")

    barrier = threading.Barrier(2)

    def ranks():
        model = sharded(3)
        engine = fastpar.engine_of(model)
        options = {"lr": torch.tensor(1e-2), "capturable": True, "max_grad_norm": 1.0}
        optimizer = AdamW(model.parameters(), **options)
        optimizer.grad_scale = torch.tensor(4.0)
        train(model, optimizer, range(1))
        model(gradients(1)).backward()
        engine.count_tokens(torch.tensor(3))
        counts = [s["step"] for s in optimizer.state.values()]
        if barrier.wait() == 0:
            for name in ("item", "tolist", "__bool__", "__float__"):
                monkeypatch.setattr(torch.Tensor, name, refuse)
        barrier.wait()
        optimizer.step()
        if barrier.wait() == 0:
            monkeypatch.undo()
        barrier.wait()
        return {count.item() for count in counts}

    for check in ("_check", "begin"):
        monkeypatch.setattr(control.Control, check, lambda *args: None)
    monkeypatch.setattr(optim, "adamw_step_", lambda *args, **kwargs: None)
    assert run_ranks(ranks, 2) == [{2.0}, {2.0}]


@stages
def test_main_gradients_are_used(stage):
    """fp32 gradients of bf16 parameters, two micro-batches added up."""

    def steps(model):
        optimizer = AdamW(groups(model), **HYPER, master_weights="remainder", max_grad_norm=1.0)
        for step in range(3):
            for half in range(2):
                grads = gradients(2 * step + half)
                model({n: g / 2**half / 64 for n, g in grads.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model), optimizer.grad_norm

    def ranks():
        return steps(sharded(stage, torch.bfloat16, grad_dtype=torch.float32))

    expected, alone_norm = steps(sharded(0, torch.bfloat16, grad_dtype=torch.float32))
    for mine, norm in run_ranks(ranks, 2):
        assert torch.equal(norm, alone_norm)
        for n, value in mine.items():
            assert torch.equal(value, expected[n]), n


def test_hsdp_counts_each_element_once():
    options = {**HYPER, "max_grad_norm": 1.0}

    def ranks():
        model = sharded(3, shard_size=2)
        optimizer = AdamW(groups(model), **options)
        train(model, optimizer, range(3))
        return values(model), optimizer.grad_norm, optimizer.state_dict()

    model = Bag()
    alone = AdamW(groups(model), **options)
    train_alone(model, alone, range(3))
    for mine, norm, state in run_ranks(ranks, 4):
        assert_same_values(model, mine)
        assert torch.equal(norm, alone.grad_norm)
        assert_same_state(state, alone.state_dict())


# Several engines, several optimizers


@stages
def test_one_optimizer_for_two_models_and_a_parameter_alone(stage):
    """One norm over all: stages differ, and one parameter has no engine."""
    options = {**HYPER, "max_grad_norm": 1.0}

    def build(parallel):
        a, b, c = Bag(seed=1), Bag(seed=2), nn.Parameter(torch.ones(300))
        if parallel:
            fastpar.parallelize(a, Mesh(), fastpar.Parallel.of(zero_stage=stage, **SMALL))
            fastpar.parallelize(b, Mesh(), fastpar.Parallel.of(zero_stage=(stage + 1) % 4, **SMALL))
        return a, b, c, AdamW([*a.parameters(), c, *b.parameters()], **options)

    def ranks():
        a, b, c, optimizer = build(parallel=True)
        for step in range(3):
            (a(gradients(step)) + b(gradients(step + 10)) + (c * step).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(a), values(b), c, optimizer.grad_norm

    a, b, c, alone = build(parallel=False)
    for step in range(3):
        put(a, gradients(step))
        put(b, gradients(step + 10))
        c.grad = torch.full((300,), float(step))
        alone.step()
    for of_a, of_b, of_c, norm in run_ranks(ranks, 2):
        assert_same_values(a, of_a)
        assert_same_values(b, of_b)
        assert torch.equal(c, of_c)
        assert torch.equal(norm, alone.grad_norm)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_optimizers_for_one_model(stage):
    """Each has its own norm; the second does not reduce again. One rank has no batch once."""

    def optimizers(model):
        first, second = ([model.weight, model.bias], [model.table, model.one])
        return AdamW(first, lr=0.1, max_grad_norm=1.0), AdamW(second, lr=0.01, max_grad_norm=2.0)

    def ranks():
        model = sharded(stage)
        engine, pair = fastpar.engine_of(model), optimizers(model)
        for step in range(3):
            batch = engine.mesh.rank == 0 or step != 1
            engine.count_tokens(4 * batch)
            engine.contribute(torch.tensor([float(step)]))
            if batch:
                model({n: 8 * g for n, g in gradients(step).items()}).backward()
            for optimizer in pair:
                optimizer.step()
            assert engine.log.n_reductions == step + 1
            assert engine.control.contributed.tolist() == [2.0 * step]
            for optimizer in pair:
                optimizer.zero_grad()
        return values(model), [o.grad_norm for o in pair]

    model = Bag()
    pair = optimizers(model)
    for step in range(3):
        put(model, {n: 2 * g for n, g in gradients(step).items()})
        for optimizer in pair:
            optimizer.step()
    for mine, norms in run_ranks(ranks, 2):
        assert_same_values(model, mine)
        assert all(torch.equal(a, o.grad_norm) for a, o in zip(norms, pair))


@stages
def test_parameters_that_are_not_the_optimizers_do_not_count(stage):
    def ranks():
        model = sharded(stage)
        optimizer = AdamW([model.table], lr=0.1, max_grad_norm=1.0)
        train(model, optimizer, range(2))
        return values(model), optimizer.grad_norm

    model = Bag()
    alone = AdamW([model.table], lr=0.1, max_grad_norm=1.0)
    train_alone(model, alone, range(2))
    for mine, norm in run_ranks(ranks, 2):
        assert_same_values(model, mine)
        assert torch.equal(norm, alone.grad_norm)


# Tokens


@pytest.mark.parametrize(
    ("stage", "max_grad_norm", "scale"), cells([0, 1, 2, 3], [None, 1.0, math.inf], [None, 1024.0])
)
def test_gradients_are_divided_by_the_count_of_tokens(stage, max_grad_norm, scale):
    """Losses are sums; their gradients, the norm and the clip are those of the mean per token."""

    def ranks():
        model = sharded(stage)
        engine = fastpar.engine_of(model)
        optimizer = AdamW(groups(model), **HYPER, max_grad_norm=max_grad_norm)
        for step in range(3):
            if scale:
                optimizer.grad_scale = scale
            for half in range(2):
                engine.count_tokens(5 + engine.mesh.rank + half)
                grads = gradients(2 * step + half, engine.mesh.rank)
                model({n: g * (scale or 1.0) for n, g in grads.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model), optimizer.grad_norm, optimizer.skipped

    model = Bag()
    alone = AdamW(groups(model), **HYPER, max_grad_norm=max_grad_norm)
    for step in range(3):
        alone.grad_scale = 5 + 6 + 6 + 7
        parts = [gradients(2 * step + half, rank) for half in range(2) for rank in range(2)]
        put(model, {n: sum(part[n] for part in parts) for n in parts[0]})
        alone.step()
    for mine, norm, skipped in run_ranks(ranks, 2):
        assert_same_values(model, mine)
        assert not skipped
        if max_grad_norm or scale:
            assert torch.equal(norm, alone.grad_norm)
        else:
            assert norm is None


@pytest.mark.parametrize("stage", [0, 2])
def test_counting_tokens_skips_nothing(stage):
    def ranks():
        model = sharded(stage)
        optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=1.0)
        fastpar.engine_of(model).count_tokens(3)
        model({n: g * math.nan for n, g in gradients(0).items()}).backward()
        optimizer.step()
        return optimizer.skipped, values(model)

    for skipped, mine in run_ranks(ranks, 2):
        assert not skipped
        assert mine["table"].isnan().all()


def test_tokens_of_two_models_in_one_optimizer_are_refused():
    def ranks():
        a, b = sharded(1), sharded(1)
        fastpar.engine_of(b).count_tokens(3)
        AdamW([*a.parameters(), *b.parameters()]).step()

    with pytest.raises(RuntimeError, match=r"expected one engine where tokens are counted, got 2"):
        run_ranks(ranks, 2)


# Loss scale


@pytest.mark.parametrize(
    ("stage", "dtype", "world"), cells([0, 1, 2, 3], [torch.float16, torch.float32], [2, 3])
)
def test_all_ranks_skip_or_none(stage, dtype, world):
    """One element of one rank overflows: it lies in the piece of one rank."""
    options = {**HYPER, "master_weights": True} if dtype == torch.float16 else HYPER

    def ranks():
        model = sharded(stage, dtype)
        engine = fastpar.engine_of(model)
        optimizer = AdamW(groups(model), **options)
        scale = DynamicLossScale(init=16.0, growth_interval=2)
        seen = []
        for step in range(6):
            grads = {n: g * scale.scale for n, g in gradients(step % 2).items()}
            if step in (0, 3) and engine.mesh.rank == world - 1:
                grads["table"][1, 600 * (step > 0)] = math.inf if step else math.nan
            before = values(model)
            optimizer.grad_scale = scale.scale
            model(grads).backward()
            optimizer.step()
            optimizer.zero_grad()
            same = all(torch.equal(x, before[n]) for n, x in values(model).items())
            seen.append((optimizer.skipped, same, scale.scale, optimizer.grad_norm.isfinite()))
            scale.update(optimizer.skipped)
        return seen, {s["step"].item() for s in optimizer.state.values()}

    for seen, counts in run_ranks(ranks, world):
        assert [row[0] for row in seen] == [row[1] for row in seen]
        assert [row[0] for row in seen] == [True, False, False, True, False, False]
        assert [row[2] for row in seen] == [16.0, 8.0, 8.0, 16.0, 8.0, 8.0]
        assert [bool(row[3]) for row in seen] == [not row[0] for row in seen]
        assert counts == {4.0}
