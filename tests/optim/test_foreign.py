"""Optimizers of torch and others on engines have the bits of one process, at any stage and tp."""

import copy
import functools
import itertools
import math

import pytest
import torch
from cells import few, slow
from optimizers import BF16, FP32, assert_same
from test_optim_sharded import SMALL, Bag
from test_optim_sharded import gradients as gradients_of
from test_optim_sharded import train as train_by
from torch import optim

import fastpar
from fastpar import Mesh
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import Saver, save_checkpoint
from fastpar.engine.debug import Debug
from fastpar.engine.optimizers import NotElementwise, stepped
from fastpar.sharding.placements import Replicate, Shard
from fastpar.testing import run_ranks

SHAPES = {"weight": (64, 33), "bias": (34,), "table": (2, 704), "one": ()}
STATES = {"weight": Shard(0), "bias": Shard(0), "table": Shard(1), "one": Replicate()}
INNERS = {  # name -> class, options
    "SGD": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "SGD, plain": (optim.SGD, {}),
    "Adam": (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
    "AdamW, foreach": (optim.AdamW, {"foreach": True}),
    "AdamW, fused": (optim.AdamW, {"fused": True}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {}),
    "ASGD": (optim.ASGD, {"t0": 2}),
    "Rprop": (optim.Rprop, {}),
}


def bag(dtype=FP32):
    return Bag(dtype, shapes=SHAPES, states=STATES)


def on_ranks(stage, dtype=FP32, tp=1, weights=None, **options):
    model = bag(dtype)
    model.load_state_dict(weights or model.state_dict())
    options = {**SMALL, **options}
    asked = fastpar.Parallel.of(zero_stage=stage, **options)
    return fastpar.parallelize(model, Mesh(tp=tp), asked)


def gradients(step):
    grads = gradients_of(step, shapes=SHAPES)
    return {name: grad for name, grad in grads.items() if (step, name) != (1, "bias")}


train = functools.partial(train_by, gradients=gradients)


def groups(model, lr=1e-2):
    """By dimension, as most users do, with a learning rate of its own."""
    named = list(model.named_parameters())
    few = [(n, p) for n, p in named if p.dim() < 2]
    return [
        {"params": [(n, p) for n, p in named if p.dim() >= 2]},
        {"params": few, "lr": lr / 2, "weight_decay": 0.0},
    ]


@functools.cache
def alone(name, dtype):
    """In one process."""
    inner, options = INNERS[name]
    model = bag(dtype)
    optimizer = inner(groups(model), lr=1e-2, **options)
    train(model, optimizer, range(3))
    return model.state_dict(), optimizer.state_dict()


def of_ranks(name, stage, tp, dtype):
    inner, options = INNERS[name]
    model = on_ranks(stage, dtype, tp)
    optimizer = inner(groups(model), lr=1e-2, **options)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    sizes = {}  # elements of each entry that this rank has
    for state, whole in zip(optimizer.state.values(), saved["state"].values()):
        for entry, x in state.items():
            if isinstance(x, torch.Tensor) and whole[entry].dim() + whole[entry].numel() > 1:
                sizes[entry] = sizes.get(entry, 0) + x.numel()
    return model.state_dict(), saved, sizes


LAYOUTS = [(stage, 2, 1) for stage in range(4)] + [(3, 4, 1), (0, 1, 2), (1, 2, 2), (3, 2, 2)]
CELLS = [
    (name, layout, dtype)
    for name, layout, dtype in itertools.product(INNERS, LAYOUTS, [FP32, BF16])
    # Slices of tp may end anywhere: see engine/optimizers.py, One thread.
    if layout[2] == 1 or ("fused" not in name and dtype == FP32)
]
# What an optimizer keeps and what a rank has both meet each form of weights, each other in few.
QUICK = few(CELLS, lambda cell: {(cell[0], cell[2]), (cell[1], cell[2])})


@pytest.mark.parametrize(
    ("name", "layout", "dtype"), [cell if cell in QUICK else slow(*cell) for cell in CELLS]
)
def test_the_bits_of_one_process(name, layout, dtype):
    """One gradient is missing once; ranks together have every element of the state once."""
    stage, dp, tp = layout
    expected, state = alone(name, dtype)
    results = run_ranks(of_ranks, dp * tp, name, stage, tp, dtype)
    whole = sum(math.prod(shape) for shape in SHAPES.values() if shape)
    for entry in results[0][2]:
        held = sum(sizes[entry] for _, _, sizes in results)
        assert held == (dp if stage == 0 else 1) * whole, entry
    for got, saved, _ in results:
        assert_same(got, expected)
        assert_same(saved["state"], state["state"])
        assert saved["param_groups"] == state["param_groups"]


@pytest.mark.parametrize("name", ["Adam", "ASGD", "SGD", "SGD, plain", "Rprop"])
def test_checkpoints_and_state_dicts_go_both_ways_and_on_with_the_same_bits(name, tmp_path):
    inner, options = INNERS[name]
    whole = bag()
    plain = inner(groups(whole), lr=1e-2, **options)
    train(whole, plain, range(3))
    halfway, weights = copy.deepcopy((plain.state_dict(), whole.state_dict()))
    train(whole, plain, range(3, 5))

    def first():
        model = on_ranks(3)
        optimizer = inner(groups(model), lr=1e-2, **options)
        train(model, optimizer, range(3))
        return save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer)

    def second(stage, path, again=False):
        """again: the state is saved and loaded once more before a step has cut it."""
        model = on_ranks(stage, weights=None if path else weights)
        optimizer = inner(groups(model), lr=1e-2 if path else 1.0, **options)
        if path:
            load_checkpoint(path, model=model, optimizer=optimizer)
        else:
            optimizer.load_state_dict(copy.deepcopy(halfway))
        if again:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            folder = tmp_path / "again"
            path = save_checkpoint(folder, step=3, model=model, optimizer=optimizer)
            load_checkpoint(path, model=model, optimizer=optimizer)
        train(model, optimizer, range(3, 5))
        return model.state_dict(), optimizer.state_dict()

    path, *_ = run_ranks(first, 3)
    for world, *how in ((2, 2, None), (2, 2, None, True), (2, 2, path), (1, 0, path), (4, 1, path)):
        for got, saved in run_ranks(second, world, *how):
            assert_same(got, whole.state_dict())
            back = inner(groups(bag()), lr=1e-2, **options)
            back.load_state_dict(saved)
            assert_same(back.state_dict()["state"], plain.state_dict()["state"])


class Own(optim.Optimizer):
    """Plain steps; subclasses say what else an update does."""

    def __init__(self, params, lr=1e-2, **options):
        super().__init__(params, {"lr": lr, **options})
        for group in self.param_groups:
            for p in group["params"]:
                self.begin(p)

    def begin(self, p):
        """What the constructor does."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"], self.state[p])

    def update(self, p, grad, lr, state):
        p.sub_(grad, alpha=lr)


def own(update, name="Mine", **more):
    """A class of optimizers with this update."""
    return type(name, (Own,), {"update": staticmethod(update), **more})


class Momentum(optim.SGD):
    """torch's SGD, but tried, as every class that is not torch's own."""


class Counts(Own):
    """Counts in its groups, in its state of no parameter, and in numbers of parameters."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr, steps=0)
        self.state["k"] = torch.tensor(0)

    def step(self):
        super().step()
        self.state["k"] += 1
        for group in self.param_groups:
            group["steps"] += 1

    def update(self, p, grad, lr, state):
        state["n"] = state.get("n", 0) + 1
        p.sub_(
            grad, alpha=lr / (state["n"] + self.state["k"].item() + self.param_groups[0]["steps"])
        )


class Anchored(Own):
    """Makes its state in the constructor."""

    def begin(self, p):
        self.state[p]["anchor"] = p.detach().clone()

    def update(self, p, grad, lr, state):
        p.lerp_(state["anchor"], 0.1).sub_(grad, alpha=lr)


class Ahead(optim.Optimizer):
    """Lookahead over another optimizer, whose groups it shares."""

    def __init__(self, params, lr=1e-2):
        self.base = optim.Adam(params, lr=lr)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.param_groups, self.steps = self.base.param_groups, 0

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.steps += 1
        for p in self.param_groups[0]["params"] if self.steps % 2 == 0 else ():
            slow = self.state[p].setdefault("slow", p.detach().clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class Replaced(Own):
    """Replaces p.data, and leaves steps of 8 or more to a list of tensors."""

    @torch.no_grad()
    def step(self):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads = torch._foreach_mul([p.grad for p in params], 0.5)
        torch._foreach_clamp_max_(grads, 1.0)
        for p, grad in zip(params, grads):
            p.data = torch.where(grad > 0, p.data - 0.01 * grad.abs_(), p.data)


class Fused(Own):
    """A step that torch's dispatcher does not see, as a kernel of another package."""

    def update(self, p, grad, lr, state):
        p.numpy()[...] -= lr * grad.numpy()


class Needs(Own):
    """Has an argument that is no option of groups, and no default."""

    def __init__(self, params, half, lr=1e-2):
        self.factor = torch.tensor(0.5 if half else 1.0)
        super().__init__(params, lr)
        self.state["all"] = torch.ones(())

    def update(self, p, grad, lr, state):
        p.sub_(grad * self.factor * self.state["all"], alpha=lr)


GIVEN = [Momentum, Counts, Anchored, Ahead, Replaced, Fused, functools.partial(Needs, half=True)]


WORLDS = [(1, 0), (2, 0), (2, 1), (2, 3)]


@pytest.mark.parametrize(
    ("inner", "world", "stage"),
    # Parameters that are whole must stay in their memory.
    [(i, *at) for i, at in itertools.product(GIVEN, WORLDS) if i is not Replaced or at[1]],
)
def test_it_steps_the_optimizer_that_was_given(inner, world, stage):
    """What a step keeps, wherever it keeps it, is there in the next one."""
    options = {"lr": 0.1, "momentum": 0.9} if inner is Momentum else {"lr": 0.1}
    whole = bag()
    plain = inner(list(whole.parameters()), **options)
    train(whole, plain, range(6))

    def ranks():
        model = on_ranks(stage)
        with fastpar.engine_of(model).gathered():  # for those that read weights when they are made
            optimizer = inner(model.parameters(), **options)
        train(model, optimizer, range(6))
        return model.state_dict()

    for got in run_ranks(ranks, world):
        assert_same(got, whole.state_dict())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_torchs_own_optimizers_pass_the_trial(dtype):
    """A subclass is tried, its base is not."""

    def ranks():
        model = on_ranks(3, dtype)
        for name, (inner, options) in INNERS.items():
            train(model, type(name, (inner,), {})(groups(model), lr=1e-2, **options), [0])

    run_ranks(ranks, 2)


def by_their_norms(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.div_(torch.linalg.vector_norm(p.grad, 2))


def test_groups_schedules_closures_and_hooks_are_torchs():
    """A hook of a step sees whole parameters and gradients: it may clip by a norm of each."""

    def ranks(stage=None):
        model = bag() if stage is None else on_ranks(stage)
        first, last = [model.weight, model.table], [model.bias, model.one]
        made = Momentum(first, lr=0.1)
        train(model, made, [0])
        made.add_param_group({"params": last, "momentum": 0.5})
        made.param_groups[0]["momentum"] = 0.9
        schedule = optim.lr_scheduler.ExponentialLR(made, 0.5)

        def closure():
            made.zero_grad()
            loss = model(gradients(2))
            loss.backward()
            return loss

        assert made.step(closure).grad_fn is not None
        made.zero_grad()
        made.register_step_pre_hook(by_their_norms)
        for step in range(3, 5):
            schedule.step()
            train(model, made, [step])
        seen = [p for group in made.param_groups for p in group["params"]]
        assert [*map(id, seen)] == [*map(id, [*first, *last])]
        return model.state_dict(), made.state_dict()["param_groups"]

    expected, groups = ranks()
    for stage in (1, 3):
        for got, mine in run_ranks(ranks, 2, stage):
            for name, x in got.items():
                # The norm of the shards' norms is off by 3 roundings, so two updates by less than
                # 2**-25 together, and each new weight by one place more.
                torch.testing.assert_close(x, expected[name], rtol=2**-22, atol=2**-25)
            assert mine == groups


def scaled(model, optimizer, steps, scaler):
    for step in steps:
        grads = gradients(step)
        if step == 1:
            grads["table"] = torch.full(SHAPES["table"], 1.0).index_fill(
                1, torch.tensor(3), math.inf
            )
        scaler.scale(model(grads)).backward()
        if step == 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "make",
    [optim.AdamW, functools.partial(optim.AdamW, fused=True), fastpar.AdamW],
    ids=["torch's", "torch's, in its kernel", "fastpar's"],
)
def test_a_loss_scale_of_torch(make):
    """An overflow skips the step on all ranks, also where none of it is on a rank."""

    def ranks(stage=None):
        model = bag() if stage is None else on_ranks(stage)
        optimizer = make(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaled(model, optimizer, range(4), scaler)
        assert scaler.get_scale() == 32.0
        return model.state_dict()

    expected = ranks()
    for stage in (1, 2, 3):
        for got in run_ranks(ranks, 2, stage):
            assert_same(got, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_that_one_rank_was_told_of_skips_the_step_on_all(stage):
    def ranks():
        model = on_ranks(stage)
        optimizer = fastpar.AdamW(model.parameters(), lr=0.1)
        before = {n: x.clone() for n, x in model.state_dict().items()}
        model(gradients(0)).backward()
        optimizer.found_inf = torch.tensor([float(fastpar.engine_of(model).mesh.rank)])
        optimizer.step()
        assert optimizer.skipped
        assert_same(dict(model.state_dict()), before)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("make", [functools.partial(optim.AdamW, fused=True), fastpar.AdamW])
def test_a_loss_scale_of_torch_is_refused_with_tp(make):
    """A rank sees the overflows of its slices."""

    def ranks():
        model = on_ranks(0, tp=2)
        scaler = torch.amp.GradScaler("cpu")
        scaled(model, make(model.parameters()), [0], scaler)

    words = "GradScaler and found_inf do not work with zero_stage=0, tp=2, where no ranks together"
    with pytest.raises(RuntimeError, match=words):
        run_ranks(ranks, 2)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("options", [{}, {"grad_dtype": "fp32"}], ids=["", "main gradients"])
def test_tokens_are_counted_and_main_gradients_are_cast(stage, tokens, options):
    def ranks(stage=None):
        model = bag(BF16) if stage is None else on_ranks(stage, BF16, **options)
        optimizer = Momentum(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(gradients(step))
            (loss / 4 if tokens and stage is None else loss).backward()
            if tokens and stage is not None:
                fastpar.engine_of(model).count_tokens(4)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected = ranks()
    for got in run_ranks(ranks, 2, stage):
        assert_same(got, expected)


def test_a_step_that_fails_ends_the_run():
    """It may have stepped some of the weights, or those of some ranks."""

    class Fails(Own):
        fails = False

        def update(self, p, grad, lr, state):
            if self.fails:
                raise MemoryError
            p.sub_(grad, alpha=lr)

    def ranks(stage):
        model = on_ranks(stage)
        optimizer = Fails(model.parameters())
        train(model, optimizer, [0])
        model(gradients(1)).backward()
        if fastpar.engine_of(model).mesh.rank:
            optimizer.step()
            return
        optimizer.fails = True
        with pytest.raises(MemoryError):
            optimizer.step()
        for again in (optimizer.step, lambda: model(gradients(0)).backward()):
            with pytest.raises(RuntimeError, match=r"step of an optimizer failed, .* restart"):
                again()

    for stage in (2, 3):
        run_ranks(ranks, 2, stage)


def to_norm(p, grad, lr, state):
    p.sub_(grad * (p.norm() / grad.norm()), alpha=lr)


def codes(p, grad, lr, state):
    """Momentum in 8 bits with one scale."""
    old = state["codes"].float() * state["absmax"] if state else 0.0
    new = old * 0.9 + grad
    state["absmax"] = new.abs().amax() / 127
    state["codes"] = (new / state["absmax"]).round().to(torch.int8)
    p.sub_(new, alpha=lr)


class Across(Own):
    """Steps by the gradients of all parameters, as Prodigy does."""

    def step(self):
        with torch.no_grad():
            first, second, *_ = self.param_groups[0]["params"]
            second[:1] -= first[:1]


class Adapts(Own):
    """Adds up a number of the whole model, which it may use later, as D-Adaptation does."""

    def update(self, p, grad, lr, state):
        group = self.param_groups[0]
        group["distance"] = group.get("distance", 0.0) + float(grad.abs().sum())
        p.sub_(grad, alpha=lr)


class Neighbours(Own):
    """Steps a parameter by another one of its size, which it keeps."""

    kept = None

    def update(self, p, grad, lr, state):
        p.sub_(grad if self.kept is None else self.kept, alpha=lr)
        self.kept = p


class Trusts(Own):
    """Steps by a norm only if it was told to, which no group shows."""

    def __init__(self, params, lr=1e-2, trust=False):
        self.trust = trust
        super().__init__(params, lr)

    def update(self, p, grad, lr, state):
        p.sub_(grad * (p.norm() if self.trust else 1.0), alpha=lr)


def writes(lines):
    """An optimizer that is not elementwise in one line."""
    return own(eval(f"lambda p, grad, lr, state: {lines}", {"torch": torch}))


STEP = "is not elementwise, as its step is not the same for two halves"
NOT_ELEMENTWISE = [  # optimizer, options, what the refusal names
    (own(to_norm, "Lamb"), {"lr": 0.0}, "Lamb is not elementwise, as its step is not the same"),
    (own(to_norm, "Lamb"), {"lr": 1e-12}, "Lamb is not elementwise.*use an elementwise optimizer"),
    (optim.Adafactor, {"lr": 0.0}, "Adafactor is not elementwise"),
    (optim.LBFGS, {}, r"as it cannot step a part of a tensor .*; use"),
    (optim.Muon, {}, "Muon is not elementwise, as it cannot step a part"),
    (writes("p.sub_(grad * ((mask := grad * p > 0) / mask.float().mean()))"), {}, STEP),
    (writes("p.sub_(grad.clamp(max=p.numel() ** -0.5))"), {}, STEP),
    (writes("p.mul_(0.9 if p.dim() > 1 else 1.0)"), {}, STEP),
    (writes("p.mul_(0.9 if p.shape[0] > 100 else 1.0)"), {}, STEP),
    (writes("p.data.mul_(1 / len(p.grad.data))"), {}, STEP),
    (writes("p.add_(torch.randn_like(p), alpha=lr)"), {}, STEP),
    (writes("p.add_(torch.randn(5)[0], alpha=lr)"), {}, STEP),
    (writes("p.sub_(grad.max() * lr)"), {}, STEP),
    (writes("p.sub_(grad.flatten().roll(1).view_as(p))"), {}, STEP),
    (writes("p.mul_(0.5) if grad.any() else p.add_(1)"), {}, STEP),
    (writes("torch._foreach_div_([p], torch._foreach_norm([p]))"), {}, STEP),
    (writes("p.copy_(torch.from_numpy(p.numpy() - p.numpy().mean()))"), {}, STEP),
    (writes("state.setdefault('history', []).append(grad)"), {}, "keeps a list as 'history'"),
    (writes("state.update(norm=grad.norm())"), {}, "'norm' of its state is not the same"),
    (own(codes, "AdamW8bit"), {}, "AdamW8bit is not elementwise"),
    (Neighbours, {}, "it cannot step a part of a tensor"),
    (Across, {}, "Across is not elementwise"),
    (Adapts, {}, "'distance' of its state is not the same"),
    (writes("p.sub_(grad * p.norm(), alpha=lr)"), {"lr": 0.0}, STEP),
    (functools.partial(Trusts, trust=True), {}, STEP),
]


@pytest.mark.parametrize(("inner", "options", "words"), NOT_ELEMENTWISE)
def test_what_needs_whole_tensors_is_refused_where_ranks_share_them_out(inner, options, words):
    """Also with lr=0, by sizes, rare values and other parameters."""

    def ranks(stage):
        model = fastpar.parallelize(bag(), Mesh(), zero_stage=stage)
        with pytest.raises(RuntimeError, match=words):
            train(model, inner([model.weight, model.table], **options), [0])

    run_ranks(ranks, 2, 1)


def test_a_trial_draws_no_random_numbers():
    state = torch.get_rng_state()
    noise = writes("p.add_(torch.randn_like(p), alpha=lr)")(bag().parameters())
    with pytest.raises(NotElementwise):
        stepped(noise).learn(noise, in_pieces=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_saver_has_tried_whole_is_tried_in_pieces(tmp_path):
    def ranks():
        model = on_ranks(1)
        optimizer = optim.Adafactor(model.parameters())
        Saver(tmp_path, model=model, optimizer=optimizer)
        with pytest.raises(RuntimeError, match="Adafactor is not elementwise"):
            train(model, optimizer, [0])

    run_ranks(ranks, 2)


def test_an_option_that_is_changed_later_brings_its_entries():
    def ranks(stage=None):
        model = bag() if stage is None else on_ranks(stage)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, [0])
        optimizer.param_groups[0]["momentum"] = 0.9
        train(model, optimizer, range(2, 5))
        return model.state_dict()

    expected = ranks()
    for got in run_ranks(ranks, 2, 2):
        assert_same(got, expected)


def test_offload_needs_an_optimizer_that_steps_on_the_host():
    """Also at stage 0, where p and p.grad are whole, but not what is stepped."""
    model = fastpar.parallelize(
        bag(), Mesh(), offload=fastpar.Offload("optimizer"), debug=Debug(bus_gb_s=12.0)
    )
    with pytest.raises(
        RuntimeError, match=r"SGD\.step: offload='optimizer' needs .* fastpar.AdamW"
    ):
        train(model, optim.SGD(model.parameters()), [0])


def test_16_bit_pieces_are_stepped_by_one_thread():
    """One that counts tokens steps what an engine gives it, on one rank too."""
    before, seen = torch.get_num_threads(), []
    noting = own(lambda p, grad, lr, state: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        for dtype, threads in ((FP32, 2), (BF16, 1)):
            model = fastpar.parallelize(bag(dtype), Mesh())
            model(gradients(0)).backward()
            fastpar.engine_of(model).count_tokens(1)
            noting(model.parameters()).step()
            assert seen == [threads] * len(SHAPES)
            assert torch.get_num_threads() == 2
            seen.clear()
    finally:
        torch.set_num_threads(before)


def test_an_entry_that_begins_later_is_refused_when_it_begins():
    def late_entry(p, grad, lr, state):
        state["n"] = state.get("n", 0) + 1
        if state["n"] > 40:
            state["mean"] = p.clone()
        p.sub_(grad, alpha=lr)

    def ranks():
        model = on_ranks(1)
        optimizer = own(late_entry)(model.parameters())
        train(model, optimizer, range(40))
        train(model, optimizer, [40])

    words = r"is not elementwise, as its state has 'mean', unlike in the trial"
    with pytest.raises(RuntimeError, match=words):
        run_ranks(ranks, 2)


def test_an_optimizer_without_torchs_constructor_is_refused():
    class Wraps(optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups
            self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}
            self._patch_step_function()

        def step(self):
            self.inner.step()

    def ranks():
        model = on_ranks(1)
        with pytest.raises(RuntimeError, match=r"Wraps did not call .*__init__, .* that it wraps"):
            train(model, Wraps(optim.SGD(model.parameters())), [0])

    run_ranks(ranks, 2)


class Sixteen(Own):
    def update(self, p, grad, lr, state):
        state["momentum_buffer"], state["absmax"] = grad.clone(), 1.0


class Eight(Own):
    """Keeps codes under a name of torch's values."""

    def update(self, p, grad, lr, state):
        state["momentum_buffer"] = (grad * 8).to(torch.int8)


def test_state_that_is_not_the_optimizers_is_refused(tmp_path):
    """Where it is loaded from a checkpoint; that of state dicts in the step that cuts it."""

    def ranks(inner, refused):
        model = on_ranks(2)
        optimizer = inner(model.parameters())
        train(model, optimizer, [0])
        folder = tmp_path / inner.__name__
        path = save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
        saved = optimizer.state_dict()
        other = Momentum(model.parameters(), momentum=0.9)
        train(model, other, [0])
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=refused):
            load_checkpoint(path, model=model, optimizer=other)
        assert_same(other.state_dict()["state"], before["state"])
        saved["param_groups"] = before["param_groups"]
        if inner is Eight:
            saved["state"][1]["momentum_buffer"] = torch.zeros(3)
        other.load_state_dict(saved)
        what = "momentum_buffer of shape=.3" if inner is Eight else "absmax"
        with pytest.raises(RuntimeError, match=f"expected the state of Momentum .* got {what}"):
            train(model, other, [1])

    run_ranks(ranks, 2, Eight, r"momentum_buffer of dtype torch.float32 .* got dtype=torch.int8")
    run_ranks(ranks, 2, Sixteen, r"entries of Momentum for .*, got absmax, which it did not make")


def test_groups_with_other_entries_are_saved_and_resumed(tmp_path):
    def groups_of(model):
        return [
            {"params": [model.weight], "momentum": 0.9},
            {"params": [model.bias, model.table, model.one], "centered": True},
        ]

    def ranks():
        model = on_ranks(1)
        optimizer = optim.RMSprop(groups_of(model))
        train(model, optimizer, range(2))
        path = save_checkpoint(tmp_path, step=2, model=model, optimizer=optimizer)
        again = optim.RMSprop(groups_of(model))
        load_checkpoint(path, model=model, optimizer=again)
        assert_same(again.state_dict()["state"], optimizer.state_dict()["state"])

    run_ranks(ranks, 2)


def test_counters_of_groups_are_in_state_dicts_and_not_in_checkpoints(tmp_path):
    whole = bag()
    train(whole, Counts(whole.parameters()), range(4))

    def ranks(stage):
        model = on_ranks(stage)
        optimizer = Counts(model.parameters())
        train(model, optimizer, range(2))
        with pytest.raises(
            ValueError, match=r"Saver: Counts changes options .*\(steps\).*save its"
        ):
            save_checkpoint(tmp_path, step=2, model=model, optimizer=optimizer)
        again = Counts(model.parameters())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, again, range(2, 4))
        assert again.state_dict()["state"]["k"] == again.param_groups[0]["steps"] == 4
        return model.state_dict()

    for got in [*run_ranks(ranks, 2, 3), *run_ranks(ranks, 1, 0)]:
        assert_same(got, whole.state_dict())


class Keyed(Own):
    """Has state that belongs to no parameter."""

    def step(self):
        self.state["k"] = 1


class Listed(Own):
    def update(self, p, grad, lr, state):
        state["history"] = [1]


class Late(Own):
    def update(self, p, grad, lr, state):
        if p.dim() == 1:
            state["flat"] = 1


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (Keyed, r"Saver: Keyed keeps state of no parameter \(k\)"),
        (Listed, r"Listed keeps entries that are no numbers \(history\)"),
        (Late, r"Late keeps entries that differ between parameters \(flat\)"),
        (Ahead, r"Saver: Ahead wraps another optimizer, whose state"),
        (type("Odd", (Own,), {"state_dict": lambda self: {}}), "Odd has a state_dict of its own"),
    ],
)
def test_what_a_checkpoint_would_lack_is_refused(inner, words, tmp_path):
    model = bag()
    optimizer = inner(model.parameters())
    train(model, optimizer, [0])
    with pytest.raises(ValueError, match=words):
        save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
