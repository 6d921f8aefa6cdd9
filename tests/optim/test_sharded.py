"""fastpar.Sharded has the bits of torch's optimizers in one process, at any stage and tp."""

import copy
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from cells import few, slow
from optimizers import BF16, FP16, FP32, assert_same
from test_optim_sharded import SMALL, Bag
from test_optim_sharded import gradients as gradients_of
from test_optim_sharded import train as train_by
from torch import optim

import fastpar
from fastpar import Mesh, Sharded
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.kernels.adamw import master_split
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
def alone(name, dtype, masters):
    """torch's own optimizer in one process: on fp32 copies, where there are masters."""
    inner, options = INNERS[name]
    model = bag(dtype)
    stepped = model.float() if masters else model
    optimizer = inner(groups(stepped), lr=1e-2, **options)
    train(stepped, optimizer, range(3))
    got = {n: master_split(x)[0] if masters else x for n, x in stepped.state_dict().items()}
    return got, optimizer.state_dict()["state"]


def of_ranks(name, stage, tp, dtype, masters):
    inner, options = INNERS[name]
    model = on_ranks(stage, dtype, tp)
    optimizer = Sharded(inner, groups(model), lr=1e-2, master_weights=masters, **options)
    train(model, optimizer, range(3))
    sizes = {}  # elements of each entry that this rank has
    for state in optimizer.state.values():
        for entry, x in state.items():
            if isinstance(x, torch.Tensor) and optimizer.entry_block(entry):
                sizes[entry] = sizes.get(entry, 0) + x.numel()
    return model.state_dict(), optimizer.state_dict()["state"], sizes


LAYOUTS = [(stage, 2, 1) for stage in range(4)] + [(3, 4, 1), (0, 1, 2), (1, 2, 2), (3, 2, 2)]
DTYPES = [(FP32, False), (BF16, True), (BF16, "remainder"), (BF16, False)]
CELLS = [
    (name, layout, kept)
    for name, layout, kept in itertools.product(INNERS, LAYOUTS, DTYPES)
    # Slices of tp may end anywhere: see optim/sharded.py, One thread.
    if layout[2] == 1 or ("fused" not in name and kept != (BF16, False))
]
# What an optimizer keeps and what a rank has both meet each form of weights, each other in few.
QUICK = few(CELLS, lambda cell: {(cell[0], cell[2]), (cell[1], cell[2])})


@pytest.mark.parametrize(
    ("name", "layout", "kept"), [cell if cell in QUICK else slow(*cell) for cell in CELLS]
)
def test_the_bits_of_one_process(name, layout, kept):
    """One gradient is missing once; ranks together have every element of the state once."""
    stage, dp, tp = layout
    dtype, masters = kept
    expected, state = alone(name, dtype, bool(masters))
    results = run_ranks(of_ranks, dp * tp, name, stage, tp, dtype, masters)
    whole = sum(math.prod(shape) for shape in SHAPES.values())
    for entry in results[0][2]:
        held = sum(sizes[entry] for _, _, sizes in results)
        copies = dp if stage == 0 else 1
        assert held == copies * (whole + tp - 1), entry  # "one" is on every rank of tp
    for got, saved, _ in results:
        assert_same(got, expected)
        masterless = {
            i: {n: x for n, x in s.items() if not n.startswith("master_")} for i, s in saved.items()
        }
        if masters is False:
            assert_same(saved, state)
        else:
            assert_same({i: s for i, s in masterless.items() if s}, state)


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
        optimizer = Sharded(inner, groups(model), lr=1e-2, **options)
        train(model, optimizer, range(3))
        return save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer)

    def second(stage, path):
        model = on_ranks(stage, weights=None if path else weights)
        optimizer = Sharded(inner, groups(model), lr=1e-2 if path else 1.0, **options)
        if path:
            load_checkpoint(path, model=model, optimizer=optimizer)
        else:
            optimizer.load_state_dict(copy.deepcopy(halfway))
        train(model, optimizer, range(3, 5))
        return model.state_dict(), optimizer.state_dict()

    path, *_ = run_ranks(first, 3)
    for stage, world, place in ((2, 2, None), (2, 2, path), (0, 1, path), (1, 4, path)):
        for got, saved in run_ranks(second, world, stage, place):
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


@pytest.mark.parametrize("inner", [Momentum, Counts, Anchored, Ahead, Replaced, Fused])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_it_steps_the_optimizer_that_was_given(inner, world, stage):
    """What a step keeps, wherever it keeps it, is there in the next one."""
    options = {"lr": 0.1, "momentum": 0.9} if inner is Momentum else {"lr": 0.1}
    whole = bag()
    plain = inner(list(whole.parameters()), **options)
    train(whole, plain, range(6))

    def ranks():
        model = on_ranks(stage)
        optimizer = Sharded(inner, model.parameters(), **options)
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
            Sharded(type(name, (inner,), {}), groups(model), lr=1e-2, **options)

    run_ranks(ranks, 2)


def test_options_and_groups_reach_the_inner_optimizer():
    def ranks(make):
        model = on_ranks(2) if make is Sharded else bag()
        first, last = [model.weight, model.one], [model.bias, model.table]
        made = Sharded(Momentum, first, lr=0.1) if make is Sharded else Momentum(first, lr=0.1)
        train(model, made, [0])
        made.add_param_group({"params": last, "momentum": 0.5})
        made.param_groups[0]["momentum"] = 0.9
        schedule = optim.lr_scheduler.ExponentialLR(made, 0.5)
        for step in range(2, 5):
            train(model, made, [step])
            schedule.step()
        return model.state_dict(), made.state_dict()["param_groups"]

    expected, groups = ranks(Momentum)
    for got, mine in run_ranks(ranks, 2, Sharded):
        assert_same(got, expected)
        assert mine == groups
    model = fastpar.parallelize(bag(), Mesh(), zero_stage=0)
    optimizer = Sharded(Momentum, [model.weight], lr=0.1)
    with pytest.raises(ValueError, match=r"Momentum cannot step a tensor .*; use an elementwise"):
        optimizer.add_param_group({"params": [model.bias], "momentum": "no"})
    train(model, optimizer, [0])


def test_a_step_spoils_a_graph_that_needs_the_weights():
    """As torch's in-place updates do: a second backward would have mixed old and new weights."""
    w = torch.nn.Parameter(torch.ones(3))
    w, optimizer = copy.deepcopy((w, Sharded(optim.SGD, [w], lr=0.1)))
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


def writes(lines):
    """An optimizer that is not elementwise in one line."""
    return own(eval(f"lambda p, grad, lr, state: {lines}", {"torch": torch}))


def with_hook(params, **options):
    """torch's own optimizer, with clipping by the norm of each gradient before a step."""
    optimizer = optim.SGD(params, **options)

    def clip(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.grad.div_(p.grad.norm().clamp(min=1e3))

    optimizer.register_step_pre_hook(clip)
    return optimizer


STEP = "is not elementwise, as its step is not the same for two halves"
NOT_ELEMENTWISE = [  # optimizer, options, what the refusal names
    (own(to_norm, "Lamb"), {"lr": 0.0}, "Lamb is not elementwise, as its step is not the same"),
    (own(to_norm, "Lamb"), {"lr": 1e-12}, "Lamb is not elementwise.*use an elementwise optimizer"),
    (optim.Adafactor, {"lr": 0.0}, "Adafactor is not elementwise"),
    (optim.LBFGS, {}, r"LBFGS cannot step a part of a tensor .*; use"),
    (optim.Muon, {}, "Muon cannot step a part of a tensor"),
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
    (with_hook, {}, "SGD is not elementwise, as its step"),
    (Neighbours, {}, "Neighbours cannot step a part of a tensor"),
    (Across, {}, "Across is not elementwise"),
    (Adapts, {}, "'distance' of its state is not the same"),
    (lambda params: SimpleNamespace(), {}, "expected a class of optimizers"),
]


@pytest.mark.parametrize(("inner", "options", "words"), NOT_ELEMENTWISE)
def test_what_needs_whole_tensors_is_refused_where_ranks_share_them_out(inner, options, words):
    """Also with lr=0, by sizes, rare values and other parameters."""

    def ranks(stage):
        model = fastpar.parallelize(bag(), Mesh(), zero_stage=stage)
        with pytest.raises(ValueError, match=words):
            train(model, Sharded(inner, [model.weight, model.table], **options), [0])

    run_ranks(ranks, 2, 1)


@pytest.mark.parametrize("inner", [own(to_norm), own(codes), optim.Adafactor, optim.Muon])
def test_it_is_not_refused_where_parameters_are_whole(inner):
    whole = bag()
    train(whole, inner([whole.weight, whole.table]), range(3))

    def ranks():
        model = on_ranks(0)
        train(model, Sharded(inner, [model.weight, model.table]), range(3))
        return model.state_dict()

    for got in run_ranks(ranks, 2):
        assert_same(got, whole.state_dict())


def test_an_entry_that_begins_later_is_refused_when_it_begins():
    def late_entry(p, grad, lr, state):
        state["n"] = state.get("n", 0) + 1
        if state["n"] > 40:
            state["mean"] = p.clone()
        p.sub_(grad, alpha=lr)

    def ranks():
        model = on_ranks(1)
        optimizer = Sharded(own(late_entry), model.parameters())
        train(model, optimizer, range(40))
        train(model, optimizer, [40])

    words = r"is not elementwise, as its state has 'mean', unlike in the trial"
    with pytest.raises(ValueError, match=words):
        run_ranks(ranks, 2)


def test_noise_is_refused_where_several_ranks_have_whole_parameters():
    def ranks():
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match=r"would step each rank otherwise.* random .*one rank"):
            Sharded(writes("p.add_(torch.randn_like(p), alpha=lr)"), on_ranks(0).parameters())
        assert torch.equal(torch.get_rng_state(), state)

    run_ranks(ranks, 2)


def test_noise_runs_where_there_is_one_rank():
    model, noise = bag(), writes("p.add_(torch.randn_like(p), alpha=lr)")
    train(model, Sharded(noise, model.parameters()), range(2))


def test_state_that_is_not_the_optimizers_is_refused_when_it_is_loaded(tmp_path):
    """Also that of a checkpoint: codes are no values, and no entry is dropped."""

    class Eight(Own):
        """Keeps codes, and a scale of its own name."""

        def update(self, p, grad, lr, state):
            state["momentum_buffer"] = (grad * 8).to(torch.int8)

    class Sixteen(Own):
        def update(self, p, grad, lr, state):
            state["momentum_buffer"], state["absmax"] = grad.clone(), 1.0

    def ranks(inner, refused):
        model = on_ranks(2)
        optimizer = Sharded(inner, model.parameters())
        train(model, optimizer, [0])
        folder = tmp_path / inner.__name__
        path = save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
        saved = optimizer.state_dict()
        other = Sharded(Momentum, model.parameters(), momentum=0.9)
        train(model, other, [0])
        before = copy.deepcopy(other.state_dict())
        saved["param_groups"] = before["param_groups"]
        for load in (
            lambda: other.load_state_dict(saved),
            lambda: load_checkpoint(path, model=model, optimizer=other),
        ):
            with pytest.raises(ValueError, match=refused):
                load()
            assert_same(other.state_dict()["state"], before["state"])

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
        optimizer = Sharded(optim.RMSprop, groups_of(model))
        train(model, optimizer, range(2))
        path = save_checkpoint(tmp_path, step=2, model=model, optimizer=optimizer)
        again = Sharded(optim.RMSprop, groups_of(model))
        load_checkpoint(path, model=model, optimizer=again)
        assert_same(again.state_dict()["state"], optimizer.state_dict()["state"])

    run_ranks(ranks, 2)


def test_counters_of_groups_are_in_state_dicts_and_not_in_checkpoints(tmp_path):
    whole = bag()
    train(whole, Counts(whole.parameters()), range(4))

    def ranks(stage):
        model = on_ranks(stage)
        optimizer = Sharded(Counts, model.parameters())
        train(model, optimizer, range(2))
        with pytest.raises(
            ValueError, match=r"Saver: Counts changes options .*\(steps\).*save its"
        ):
            save_checkpoint(tmp_path, step=2, model=model, optimizer=optimizer)
        again = Sharded(Counts, model.parameters())
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
    optimizer = Sharded(inner, model.parameters())
    train(model, optimizer, [0])
    with pytest.raises(ValueError, match=words):
        save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    if inner is Ahead or "own" in words:
        with pytest.raises(ValueError, match=words.removeprefix("Saver: ")):
            optimizer.state_dict()
        with pytest.raises(ValueError, match="it can train, but not be saved or resumed"):
            optimizer.load_state_dict(
                optim.Adam(bag().parameters()).state_dict() | {"state": {0: {"n": 1}}}
            )


def test_an_optimizer_that_makes_groups_of_its_own_is_refused():
    class Splits(Own):
        def __init__(self, params, lr=1e-2):
            params = [p for group in optim.SGD(params).param_groups for p in group["params"]]
            super().__init__([{"params": [p]} for p in params], lr)

    with pytest.raises(ValueError, match=r"Splits to keep its groups of \[4\] .* \[1, 1, 1, 1\]"):
        Sharded(Splits, bag().parameters())


def test_options_are_the_inner_ones():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        Sharded(optim.Adam, bag().parameters(), lr=-1.0)
    with pytest.raises(TypeError, match="momentum"):
        Sharded(optim.Adam, bag().parameters(), momentum=0.9)
    model = bag(FP16)
    with pytest.raises(ValueError, match="remainder"):
        Sharded(optim.Adam, model.parameters(), master_weights="remainder")
    optimizer = Sharded(optim.Adam, bag().parameters(), lr=0.5)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    copy.deepcopy(optimizer).step()
