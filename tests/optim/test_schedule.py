"""The optimizer that settings describe, who is decayed, learning rates, the loss scale."""

import math

import pytest
import torch
from torch import nn

from fastpar.optim.adafactor import Adafactor
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import (
    DynamicLossScale,
    cosine_lr,
    make_optimizer,
    param_groups,
    scheduled_lr,
    set_lr,
)
from fastpar.settings.config import TrainConfig
from fastpar.settings.options import OptimSettings


def test_param_groups_decay_matrices_only_and_tied_ones_once():
    model = nn.ModuleDict({"wte": nn.Embedding(5, 3), "norm": nn.LayerNorm(3)})
    model["head"] = nn.Linear(3, 5)
    model["head"].weight = model["wte"].weight
    model["frozen"] = nn.Linear(3, 3).requires_grad_(False)
    decay, rest = param_groups(model, 0.1)
    assert [id(p) for p in decay["params"]] == [id(model["wte"].weight)]
    assert decay["weight_decay"] == 0.1
    assert [p.dim() for p in rest["params"]] == [1, 1, 1]
    assert rest["weight_decay"] == 0.0
    assert len(param_groups(nn.Embedding(5, 3), 0.1)) == 1


@pytest.mark.parametrize(
    ("dtype", "settings", "entries"),
    [
        (torch.float32, {}, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}),
        (torch.float32, {"master_weights": "remainder", "moment_dtype": "bf16"},
         {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}),
        (torch.bfloat16, {}, {"master_weight": torch.float32}),
        (torch.float16, {"master_weights": "full"}, {"master_weight": torch.float32}),
        (torch.bfloat16, {"master_weights": "remainder"}, {"master_remainder": torch.int16}),
        (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": "int8"},
         {"exp_avg_codes": torch.uint8, "exp_avg_sq_codes": torch.uint8}),
        (torch.float32, {"optimizer": "adafactor"}, {"row_var": torch.float32}),
        (torch.bfloat16, {"optimizer": "adafactor", "master_weights": "remainder"},
         {"col_var": torch.float32, "master_remainder": torch.int16}),
    ],
)  # fmt: skip
def test_settings_choose_what_the_optimizer_keeps(dtype, settings, entries):
    model = nn.Linear(4, 3).to(dtype)
    settings = OptimSettings(lr=0.25, betas=(0.5, 0.75), weight_decay=0.125, **settings)
    optimizer = make_optimizer(model, settings, dtype=dtype, seed=7)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state[model.weight]
    assert {name: state[name].dtype for name in entries} == entries
    assert {name for name in state if "master" in name} == {n for n in entries if "master" in n}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.125, 0.0]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.max_grad_norm == 1.0
    if isinstance(optimizer, AdamW):
        assert (optimizer.seed, optimizer.param_groups[0]["betas"]) == (7, (0.5, 0.75))
    else:
        assert isinstance(optimizer, Adafactor)
        assert optimizer.param_groups[0]["add_eps"]


def fp32(number):
    """As a kernel reads it from a GPU's memory: groups have such numbers."""
    return torch.tensor(number).item()


def test_muon_and_its_learning_rates():
    config = TrainConfig().replace(
        {"optimizer": "muon", "muon_lr": 0.5, "lr": 0.25, "weight_decay": 0.125, "max_steps": 20}
    )
    model = nn.ModuleDict({"wte": nn.Embedding(5, 3), "h": nn.ModuleList([nn.Linear(3, 3)])})
    optimizer = make_optimizer(model, config.optim, dtype=torch.bfloat16, seed=7)
    assert optimizer.max_grad_norm == 1.0
    assert optimizer.master_weights
    groups = {(g["adamw"], g["weight_decay"]): g for g in optimizer.param_groups}
    assert set(groups) == {(True, 0.125), (True, 0.0), (False, 0.125)}
    assert groups[True, 0.0]["betas"] == (0.9, 0.95)
    for step, part in ((0, 0.5), (2, 1.0), (20, 0.1)):
        assert set_lr(optimizer, step, config) == 0.25 * part
        rates = {(g["adamw"], g["lr"]) for g in optimizer.param_groups}
        assert rates == {(True, fp32(0.25 * part)), (False, fp32(0.5 * part))}


@pytest.mark.parametrize(
    ("schedule", "changes", "expected"),
    [
        ("linear", {}, {0: 0.5, 2: 1.0, 6: 0.5, 9: 0.125, 10: 0.0, 99: 0.0}),
        ("linear", {"min_lr": 0.5}, {0: 0.5, 2: 1.0, 6: 0.75, 10: 0.5}),
        ("wsd", {}, {1: 1.0, 2: 1.0, 6: 1.0, 7: 0.75, 8: 0.5, 10: 0.0}),
        ("wsd", {"lr_decay_fraction": 1.0}, {0: 0.5, 2: 1.0, 6: 0.5, 10: 0.0}),
        ("wsd", {"lr_decay_fraction": 0.01}, {2: 1.0, 9: 1.0, 10: 0.0}),
        ("cosine", {"min_lr": 0.0}, {0: 0.5, 2: 1.0, 6: 0.5, 10: 0.0}),
        ("cosine", {}, {10: 0.1}),
    ],
)
def test_schedules(schedule, changes, expected):
    changes = {"lr": 1.0, "max_steps": 10, "warmup_steps": 2, **changes}
    config = TrainConfig().replace({"lr_schedule": schedule, **changes})
    assert {step: scheduled_lr(step, config) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_has_the_weight_decay_of_the_settings(name):
    """Also where a run goes on from a checkpoint with another one."""
    config = TrainConfig().replace({"optimizer": name, "weight_decay": 0.25})
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = make_optimizer(model, config.optim, dtype=torch.float32, seed=0)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    set_lr(optimizer, 0, config)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]


def test_no_limit_still_measures_the_norm():
    for name in ("adamw", "adafactor", "muon"):
        settings = OptimSettings(optimizer=name, max_grad_norm=0)
        model = nn.Sequential(nn.Linear(2, 2))
        optimizer = make_optimizer(model, settings, dtype=torch.float32, seed=0)
        assert optimizer.max_grad_norm == math.inf


def test_cosine_lr():
    def lr(step):
        return cosine_lr(step, lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=110)

    assert [lr(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert lr(10) == 1.0
    assert lr(60) == pytest.approx(0.55)
    assert lr(109) > lr(110) == lr(10**6) == 0.1
    steps = [lr(s) for s in range(10, 111)]
    assert steps == sorted(steps, reverse=True)
    assert cosine_lr(0, lr=1.0, min_lr=1.0, warmup_steps=0, max_steps=0) == 1.0


def test_the_loss_scale_grows_after_finite_steps_halves_on_overflow_and_has_limits():
    scale = DynamicLossScale(init=8.0, growth_interval=3)
    seen = []
    for overflow in (False, False, True, False, False, False, False):
        scale.update(overflow)
        seen.append(scale.scale)
    assert seen == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    scale = DynamicLossScale(init=8.0, growth_interval=1, min_scale=3.0, max_scale=20.0)
    for _ in range(5):
        scale.update(False)
    assert scale.scale == 20.0
    for _ in range(3):
        scale.update(True)
    assert scale.scale == 3.0
    with pytest.raises(RuntimeError, match=r"got an overflow at scale=3\.0; the run diverges"):
        scale.update(True)


def test_a_saved_loss_scale_continues():
    a, b = DynamicLossScale(init=8.0, growth_interval=3), DynamicLossScale(growth_interval=3)
    for overflow in (True, False, False):
        a.update(overflow)
    b.load_state_dict(a.state_dict())
    a.update(False)
    b.update(False)
    assert a.scale == b.scale == 8.0
    assert a.state_dict() == b.state_dict()
    for value in (0.0, math.nan, 2.0**40):
        words = r"expected a scale in \[1\.0, 16777216\.0\], got scale="
        with pytest.raises(ValueError, match=words):
            b.load_state_dict({"scale": value, "finite_steps": 0})
