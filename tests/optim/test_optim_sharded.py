"""Optimizers on parameters of engines: the bits, the state and the decisions of one process."""

import functools
import math
import threading

import pytest
import torch
from cells import cells, covering, sweep
from optimizers import (
    FP32,
    HYPER,
    MODES,
    UINT8,
    adafactor,
    adamw,
    assert_same,
    assert_same_state,
    build,
    put_gradients,
    run,
    step_counts,
)
from torch import nn

import fastpar
from fastpar import AdamW, Mesh, Muon
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.engine import control
from fastpar.optim import adamw as optim
from fastpar.optim.schedule import AveragedWeights
from fastpar.sharding.placements import Placement, Shard
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 4e-3, "first_bucket_mb": 1e-3}  # several buckets; pieces of a few blocks
SHAPES = {"weight": (40, 33), "bias": (33,), "table": (2, 700), "one": ()}


class Bag(nn.Module):
    """Each parameter gets the gradient that forward is told; without one it is unused.

    Some have several blocks of 256 elements, some end within one, some have one rank as owner.
    With states, ranks of tp have slices of parameters and of the gradients that are told.
    """

    def __init__(self, dtype=FP32, seed=0, shapes=SHAPES, states=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))
        self.states, self.tp = states, None

    def tensor_parallel(self, tp):
        self.tp = tp
        return self.states

    def forward(self, grads):
        used = []
        for name, p in self.named_parameters():
            if name in grads:
                grad = grads[name]
                if self.tp is not None:
                    placement = Placement({"tp": self.states[name]}, {"tp": self.tp.size})
                    grad = placement.cut(grad, {"tp": self.tp.rank})
                used.append((p * grad.to(p.dtype)).sum())
        return torch.stack(used).sum()


def gradients(step, rank=0, shapes=SHAPES):
    """The gradients of one rank: sixteenths, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {n: torch.randint(-64, 65, s, generator=generator) / 16 for n, s in shapes.items()}


def groups(model):
    """With names, by which random bits go: the engine knows them without."""
    fast = [(n, getattr(model, n)) for n in ("bias", "table")]
    slow = [(n, getattr(model, n)) for n in ("weight", "one")]
    return [{"params": fast}, {"params": slow, "lr": 1e-3, "weight_decay": 0.0, "eps": 1e-3}]


def sharded(stage, dtype=FP32, seed=0, **options):
    asked = fastpar.Parallel.of(zero_stage=stage, **SMALL, **options)
    return fastpar.parallelize(Bag(dtype, seed), Mesh(), asked)


LATE = {  # optimizer of some parameters, and options of the group that is added
    "AdamW": (adamw, {"lr": 1e-3}),
    "AdamW, 8-bit": (functools.partial(adamw, moment_dtype=UINT8), {}),
    "Muon": (functools.partial(Muon, adamw={"lr": 1e-2}), {"adamw": True}),
    "Muon, a matrix later": (lambda params: Muon([{"params": params, "adamw": True}]), {}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-4}),
}


@pytest.mark.parametrize("name", LATE)
def test_a_group_added_later_is_stepped_averaged_and_saved_as_in_one_process(name, tmp_path):
    make, options = LATE[name]

    def ranks(stage):
        model = sharded(stage)
        now, later = [model.weight], [model.bias, model.table, model.one]
        if name == "Muon":
            now, later = [model.weight, model.table], [model.bias, model.one]
        elif name == "Muon, a matrix later":
            now, later = [model.bias, model.table, model.one], [model.weight]
        optimizer = make(now)
        average = AveragedWeights(optimizer, 0.5)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": later, **options})
            train(model, optimizer, [step])
            average.update(step)
        with average.in_the_model():
            averages = {n: x.clone() for n, x in model.state_dict().items()}
        path = save_checkpoint(tmp_path, step=4, model=model, optimizer=optimizer)
        state = optimizer.state_dict()
        load_checkpoint(path, model=model, optimizer=optimizer)
        assert_same(optimizer.state_dict()["state"], state["state"])
        return model.state_dict(), averages, state["state"]

    expected, *_ = run_ranks(ranks, 1, 0)
    for stage in (0, 2, 3):
        for got in run_ranks(ranks, 2, stage):
            for mine, theirs in zip(got, expected, strict=True):
                assert_same(mine, theirs)


def put(model, grads):
    for n, p in model.named_parameters():
        p.grad = grads[n].to(p.dtype) if n in grads else None


def train(model, optimizer, steps, gradients=gradients):
    for step in steps:
        model(gradients(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@sweep(("mode", "rows", "columns"), [("stochastic", 6, 3), ("8-bit-stochastic", 4, 128)])
def test_random_bits_of_a_slice_are_those_of_its_place_in_the_whole(mode, rows, columns):
    """One that begins at an odd element, and one at a whole block of 8-bit moments."""
    dtype, _, options = MODES[mode]
    shapes = {"weight": (rows, columns)}

    def train_bag(mesh=None):
        model = Bag(dtype, shapes=shapes, states={"weight": Shard(0)} if mesh else None)
        if mesh is not None:
            fastpar.parallelize(model, mesh)
        optimizer = adamw(model.named_parameters(), seed=5, lr=0.1, **options)
        for step in range(3):
            model(gradients(step, shapes=shapes)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    parts = run_ranks(lambda: train_bag(Mesh(tp=2, device="cpu")), 2)
    assert torch.equal(torch.cat(parts), train_bag())


def test_all_groups_and_all_pieces_are_one_call(monkeypatch):
    calls, step_, again = [], optim.adamw_step_, optim.CountedSteps.step
    monkeypatch.setattr(
        optim, "adamw_step_", lambda *a, **k: calls.append(len(a[0])) or step_(*a, **k)
    )
    monkeypatch.setattr(
        optim.CountedSteps, "step",
        lambda self, used, *a: again(self, used, *a) and (calls.append(len(used) // 2) or True),
    )  # fmt: skip
    model = build()
    optimizer = adamw([{"params": [p], "lr": 10.0**-i} for i, p in enumerate(model.parameters())])
    put_gradients(model, 0)
    model[3].bias.grad = None
    optimizer.step()
    run(model, optimizer, 1)
    assert calls == [5, 6]
    assert step_counts(optimizer) == [1, 2, 2, 2, 2, 2]
    calls.clear()

    def ranks():
        model = sharded(3)
        train(model, adamw(groups(model), max_grad_norm=1.0), range(2))

    run_ranks(ranks, 2)
    assert len(calls) == 4
    assert all(0 < n <= 6 for n in calls)  # the second step's with pieces that are empty


def test_a_step_reads_nothing_on_the_host(monkeypatch):
    """Where counters are tensors; of the engine's own checks one reads a step later on a GPU, the
    other (control.py, [Note: begin]) is there between CPU ranks only."""

    def refuse(*args):
        raise AssertionError("a value was read on the host")

    barrier = threading.Barrier(2)

    def ranks():
        model = sharded(3)
        numbers = {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.9), torch.tensor(0.99))}
        options = {**numbers, "capturable": True, "max_grad_norm": 1.0}
        optimizer = AdamW(model.parameters(), **options)
        optimizer.grad_scale = torch.tensor(4.0)
        train(model, optimizer, range(1))
        model(gradients(1)).backward()
        fastpar.engine_of(model).count_tokens(torch.tensor(3))
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


def test_adafactor_on_ranks():
    def ranks():
        model = sharded(0)
        optimizer = adafactor(model.parameters(), max_grad_norm=1.0)
        train(model, optimizer, range(3))
        return model.state_dict(), optimizer.grad_norm

    model = Bag()
    alone = adafactor(model.parameters(), max_grad_norm=1.0)
    train(model, alone, range(3))
    for mine, norm in run_ranks(ranks, 2):
        assert_same(model.state_dict(), mine)
        assert torch.equal(norm, alone.grad_norm)


@pytest.mark.parametrize("only", [False, True], ids=["two", "one of a part"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizers_of_a_part_of_the_model(stage, only):
    """Each has its own norm. One rank has no batch once; one parameter is of no engine."""

    def optimizers(model):
        lone = nn.Parameter(torch.ones(300))
        first, second = [model.weight, model.bias], [model.table, lone, model.one]
        pair = AdamW(first, lr=0.1, max_grad_norm=1.0), AdamW(second, lr=0.01, max_grad_norm=2.0)
        return pair[only:], lone

    def step(pair, lone, number, tokens=1):
        """A step divides the gradient of the lone one, too, by the tokens of a rank."""
        lone.grad = torch.full((300,), float(number * tokens))
        for optimizer in pair:
            optimizer.step()

    def ranks():
        model = sharded(stage)
        engine, (pair, lone) = fastpar.engine_of(model), optimizers(model)
        for number in range(3):
            batch = engine.mesh.rank == 0 or number != 1
            engine.count_tokens(4 * batch)
            engine.contribute(torch.tensor([float(number)]))
            if batch:
                model({n: 8 * g for n, g in gradients(number).items()}).backward()
            step(pair, lone, number, tokens=2 if number == 1 else 4)
            assert engine.log.n_reductions == number + 1
            assert engine.control.contributed.tolist() == [2.0 * number]
            for optimizer in pair:
                optimizer.zero_grad()
        return model.state_dict(), lone, [o.grad_norm for o in pair]

    model = Bag()
    pair, lone = optimizers(model)
    for number in range(3):
        put(model, {n: 2 * g for n, g in gradients(number).items()})
        step(pair, lone, number)
    for mine, of_lone, norms in run_ranks(ranks, 2):
        assert_same(model.state_dict(), mine)
        assert torch.equal(lone, of_lone)
        assert all(torch.equal(a, o.grad_norm) for a, o in zip(norms, pair))


@covering(
    1, ("stage", [0, 1, 2, 3]), ("max_grad_norm", [None, 1.0, math.inf]), ("scale", [None, 1024.0])
)
def test_gradients_are_divided_by_the_count_of_tokens(stage, max_grad_norm, scale):
    """Losses are sums; their gradients, the norm and the clip are those of the mean per token."""

    def ranks():
        model = sharded(stage)
        engine = fastpar.engine_of(model)
        optimizer = adamw(groups(model), max_grad_norm=max_grad_norm)
        for step in range(3):
            if scale:
                optimizer.grad_scale = scale
            for half in range(2):
                engine.count_tokens(5 + engine.mesh.rank + half)
                grads = gradients(2 * step + half, engine.mesh.rank)
                model({n: g * (scale or 1.0) for n, g in grads.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), optimizer.grad_norm, optimizer.skipped

    model = Bag()
    alone = adamw(groups(model), max_grad_norm=max_grad_norm)
    for step in range(3):
        alone.grad_scale = 5 + 6 + 6 + 7
        parts = [gradients(2 * step + half, rank) for half in range(2) for rank in range(2)]
        put(model, {n: sum(part[n] for part in parts) for n in parts[0]})
        alone.step()
    for mine, norm, skipped in run_ranks(ranks, 2):
        assert_same(model.state_dict(), mine)
        assert not skipped
        assert torch.equal(norm, alone.grad_norm) if max_grad_norm or scale else norm is None


def test_counting_tokens_skips_nothing_and_is_refused_for_two_models_in_one_optimizer():
    def ranks(both):
        models = [sharded(2) for _ in range(1 + both)]
        optimizer = AdamW([p for model in models for p in model.parameters()], max_grad_norm=1.0)
        fastpar.engine_of(models[-1]).count_tokens(3)
        if not both:
            models[0]({n: g * math.nan for n, g in gradients(0).items()}).backward()
        optimizer.step()
        return optimizer.skipped, models[0].state_dict()["table"].isnan().all().item()

    assert run_ranks(ranks, 2, False) == [(False, True)] * 2
    with pytest.raises(RuntimeError, match=r"counting tokens needs one engine, got 2 engines"):
        run_ranks(ranks, 2, True)


def some(step):
    """Whole numbers: sums of three are exact in bf16, too. In step 1 nobody uses the table."""
    return {n: g.round() for n, g in gradients(step).items() if (step, n) != (1, "table")}


def go_on(place, dtype, options, model_state, state, steps):
    """Of each rank: values, states (ours, torch's), norm, elements of each entry that it has."""
    stage, world, shard_size = place

    def run():
        model = Bag(dtype, seed=9)
        if stage is not None:
            model = sharded(stage, dtype, seed=9, shard_size=shard_size)
        optimizer = adamw(groups(model), **options, max_grad_norm=2.0, seed=5)
        model.load_state_dict(model_state)
        if state is not None:
            optimizer.load_state_dict(state)
        train(model, optimizer, steps, some)
        states = optimizer.state_dict(), optimizer.torch_state_dict()
        return model.state_dict(), states, optimizer.grad_norm, elements(optimizer)

    return [run()] if stage is None else run_ranks(run, world)


def elements(optimizer):
    states = optimizer.state.values()
    return {n: sum(s[n].numel() for s in states) for n in set().union(*states) - {"step"}}


# stage (None: one process without an engine), ranks, ranks that share out
PATHS = [
    ((1, 2, None), (3, 4, 2)),
    ((2, 4, None), (None, 1, None)),
    ((None, 1, None), (1, 3, None)),
    ((3, 3, None), (0, 2, None)),
    ((3, 2, None), (2, 3, None)),
]


@pytest.mark.parametrize(("mode", "path"), cells(MODES, PATHS, strength=1))
def test_steps_and_states_are_those_of_one_process(mode, path):
    """With clipping and groups; half way the state goes to another stage and other ranks."""
    dtype, _, options = mode
    model, model_state, state = Bag(dtype), Bag(dtype).state_dict(), None
    alone = adamw(groups(model), **options, max_grad_norm=2.0, seed=5)
    for place, steps in zip(path, (range(2), range(2, 4))):
        ranks = go_on(place, dtype, options, model_state, state, steps)
        train(model, alone, steps, some)
        for model_state, (state, torchs), norm, _ in ranks:
            assert_same(model.state_dict(), model_state)
            assert_same_state(state, alone.state_dict())
            assert_same_state(torchs, alone.torch_state_dict())
            assert state.get("seed") == alone.state_dict().get("seed")
            assert torch.equal(norm, alone.grad_norm)
        stage, world, shard_size = place
        copies = world // (shard_size or world) if stage else world
        for name, n in elements(alone).items():
            assert sum(mine[name] for *_, mine in ranks) == n * copies, name


@sweep(("stage", "form"), [(1, {}), (2, {"moment_dtype": UINT8}), (3, {"amsgrad": True})])
def test_state_of_torch_loads_into_any_stage_and_goes_back(stage, form):
    model = Bag()
    theirs = torch.optim.AdamW(groups(model), **HYPER, amsgrad="amsgrad" in form)
    train(model, theirs, range(2))
    saved, model_state = theirs.state_dict(), {n: p.clone() for n, p in model.state_dict().items()}
    alone = adamw(groups(model), **form, max_grad_norm=2.0, seed=5)
    alone.load_state_dict(saved)
    train(model, alone, range(2, 4), some)
    found = go_on((stage, 2, None), FP32, form, model_state, saved, range(2, 4))
    for mine, (state, torchs), *_ in found:
        assert_same(model.state_dict(), mine)
        assert_same_state(state, alone.state_dict())
        torch.optim.AdamW(groups(model)).load_state_dict(torchs)


def test_states_are_checked_and_seen_in_their_whole_shapes():
    def ranks():
        model, seen = sharded(3), []
        optimizer = AdamW(model.parameters())
        train(model, optimizer, range(1))
        optimizer.register_state_dict_post_hook(
            lambda _, state: seen.append(state["state"][0]["exp_avg"].shape)
        )
        state = optimizer.state_dict()
        assert seen == [(40, 33)]
        assert optimizer.state[model.weight]["exp_avg"].dim() == 1
        state["state"][0]["exp_avg"] = torch.zeros(40, 34)
        optimizer.load_state_dict(state)

    with pytest.raises(ValueError, match=r"expected exp_avg of shape \[40, 33\] for parameter 0 "):
        run_ranks(ranks, 2)
