"""fastpar.Sharded has the bits of torch's optimizers in one process, at any stage and tp."""

import copy
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
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
from fastpar.optim.schedule import DynamicLossScale
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


def test_clipping_loss_scales_and_schedules():
    """The norm and the skipped steps are AdamW's, over all shards, at every stage alike."""

    def ranks(stage):
        model = on_ranks(stage, BF16, grad_dtype="fp32")
        options = {"lr": 1e-2, "max_grad_norm": 0.5, "master_weights": True}
        optimizer = Sharded(optim.RAdam, groups(model), **options)
        scale = DynamicLossScale(2.0**8)
        schedule = optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        seen = []
        for step in range(4):
            optimizer.grad_scale = scale.scale
            loss = model(gradients(step)) * scale.scale
            (loss * (float("inf") if step == 2 else 1.0)).backward()
            optimizer.step()
            scale.update(optimizer.skipped)
            schedule.step()
            optimizer.zero_grad()
            seen.append((float(optimizer.grad_norm), optimizer.skipped))
        return model.state_dict(), seen

    (expected, seen), *_ = run_ranks(ranks, 1, 0)
    assert [skipped for _, skipped in seen] == [False, False, True, False]
    norm = torch.cat([g.reshape(-1).double() for g in gradients(0).values()]).norm()
    assert seen[0][0] == pytest.approx(float(norm), rel=2**-22)
    for stage in (1, 3):
        for got, mine in run_ranks(ranks, 2, stage):
            assert_same(got, expected)
            assert str(mine) == str(seen)


class Blockwise(optim.Optimizer):
    """Momentum in 8 bits with a scale for each 256 elements; counts steps in its groups."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state, n = self.state[p], p.numel()
                padding = (0, -n % 256)
                blocks = F.pad(p.grad.reshape(-1), padding).view(-1, 256)
                if state:
                    old = F.pad(state["codes"].reshape(-1).float() - 128, padding).view(-1, 256)
                    blocks = blocks + 0.9 * old * state["absmax"][:, None]
                scale = blocks.abs().amax(1).clamp(min=1e-12) / 127
                codes = (blocks / scale[:, None]).round()
                p -= group["lr"] * (codes * scale[:, None]).view(-1)[:n].view(p.shape)
                state["absmax"], state["n"] = scale, group["steps"]
                state["codes"] = (codes + 128).to(torch.uint8).view(-1)[:n].view(p.shape)


def test_an_optimizer_with_blocks_and_counters_of_its_own(tmp_path):
    whole = bag()
    train(whole, optimizer := Blockwise(groups(whole)), [0, 2, 3])
    state = optimizer.state_dict()

    def ranks(stage, path=None):
        model = on_ranks(stage)
        optimizer = Sharded(Blockwise, groups(model))
        if path is None:
            train(model, optimizer, [0, 2])
            path = save_checkpoint(tmp_path, step=2, model=model, optimizer=optimizer)
        else:
            load_checkpoint(path, model=model, optimizer=optimizer)
            for group in optimizer.param_groups:
                group["steps"] = 2  # a checkpoint has no options of groups
        train(model, optimizer, [3])
        return path, model.state_dict(), optimizer.state_dict()

    before = run_ranks(ranks, 3, 2)
    for _, got, saved in [*before, *run_ranks(ranks, 2, 3, before[0][0])]:
        assert_same(got, whole.state_dict())
        assert_same(saved["state"], state["state"])
        assert [group["steps"] for group in saved["param_groups"]] == [3, 3]


class Lamb(optim.SGD):
    """Steps by the norm of the tensor."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad * p.norm() / p.grad.norm()


class Distance(optim.Optimizer):
    """Steps by how far all parameters of the optimizer have come, as Prodigy does."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "d": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            along = sum(float((p.grad.sign() * p.grad).sum()) for p in group["params"])
            group["d"] = max(group["d"], 1e-3 * along**0.5)
            for p in group["params"]:
                p -= group["lr"] * group["d"] * p.grad.sign()


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (optim.Adafactor, "Adafactor is not elementwise"),
        (Lamb, "Lamb is not elementwise"),
        (Distance, "Distance is not elementwise"),
        (optim.LBFGS, "LBFGS cannot step a part of a tensor"),
        (optim.Muon, "Muon cannot step a part of a tensor"),
        (lambda params: SimpleNamespace(), "expected a class of optimizers"),
    ],
)
def test_what_needs_whole_tensors_is_refused_where_ranks_share_them_out(inner, words):
    def ranks(stage):
        model = fastpar.parallelize(bag(), Mesh(), zero_stage=stage)
        with pytest.raises((ValueError, TypeError), match=words):
            Sharded(inner, [model.weight])

    run_ranks(ranks, 2, 1)
    if inner in (Lamb, Distance, optim.Adafactor):  # and not where they are whole
        model = fastpar.parallelize(bag(), Mesh(), zero_stage=0)
        train(model, Sharded(inner, model.parameters()), [0])


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
