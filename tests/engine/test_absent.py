"""Steps of optimizers over parameters of which a rank has only a part: taken, or refused.

tests/contracts/test_by_hand.py has reads of such parameters and writes into them.
"""

import pytest
import torch
from torch import nn

import fastpar
from fastpar.comm.mesh import Mesh
from fastpar.optim import adamw as optim
from fastpar.optim.adafactor import Adafactor
from fastpar.optim.adamw import AdamW
from fastpar.testing import run_ranks


def step_with(stage, build, drive=lambda optimizer: optimizer.step()):
    """A backward and a step on two ranks, with the optimizer that build(model) makes."""

    def ranks():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        fastpar.parallelize(model, Mesh(), zero_stage=stage)
        optimizer = build(model)
        model(torch.ones(2, 3)).sum().backward()
        drive(optimizer)
        return torch.cat([p.flatten() for p in model.state_dict().values()])

    return run_ranks(ranks, 2)


def step(optimizer):
    optimizer.step()


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def told_of_overflows(optimizer):
    optimizer.found_inf = torch.zeros(1)
    optimizer.step()


def captured(optimizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "capturing", lambda device: True)
        optimizer.step()


STOCK = r"step: with zero_stage={stage} gradients exist only as shards, .* use fastpar\.AdamW, or"
SCALER = (  # it would find the nans of placeholders
    r"AdamW\.step: expected neither GradScaler nor found_inf with zero_stage >= 1 or tp > 1, got "
    r"one with zero_stage={stage}, .* set grad_scale from a fastpar\.optim\.schedule\.Dyn"
)
FACTORED = (
    r"Adafactor: expected parameters of an engine with zero_stage=0 and tp=1, got zero_stage="
    r"{stage}, tp=1; its row and column means need whole matrices of the whole model: use fastpar"
)
ZEROING = r"zero_stage >= 1 or offload, got True with zero_stage={stage}, "
CAPTURE = r"zero_stage=0 and tp=1 while a CUDA graph .*, got zero_stage={stage},"
REFUSED = [
    (torch.optim.SGD, {}, step, RuntimeError, r"SGD\." + STOCK),
    (torch.optim.AdamW, {}, step, RuntimeError, r"AdamW\." + STOCK),
    (torch.optim.Adagrad, {}, step, RuntimeError, r"Adagrad\." + STOCK),
    (Adafactor, {}, step, ValueError, FACTORED),
    (AdamW, {"zero_grad_in_step": True}, step, ValueError, ZEROING),
    (AdamW, {}, scaled, RuntimeError, SCALER),
    (AdamW, {}, told_of_overflows, RuntimeError, SCALER),
    (AdamW, {"capturable": True}, captured, RuntimeError, CAPTURE),
]


@pytest.mark.parametrize(("cls", "options", "drive", "error", "message"), REFUSED)
def test_what_no_rank_can_step_is_refused(cls, options, drive, error, message):
    for stage in (1, 2, 3):
        with pytest.raises(error, match=message.format(stage=stage)):
            step_with(stage, lambda model: cls(model.parameters(), **options), drive)


def test_stock_optimizers_step_at_stage_0_and_beside_engines():
    a, b = step_with(0, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(a, b)
    step_with(0, lambda model: AdamW(model.parameters(), zero_grad_in_step=True))
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    torch.optim.SGD([p], lr=0.5).step()
    assert p.tolist() == [0.5] * 3


@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_what_no_engine_reduces_is_refused_when_all_else_is_frozen(how):
    """An adapter on a base that was frozen after parallelize: each rank would train its own."""
    message = {
        "added": r"Engine: expected the model's parameters of fastpar\.parallelize, got 'a' beside",
        "unfrozen": r"Engine: expected parameter '1\.bias' to stay frozen, got requires_grad=True",
    }

    def ranks(stage, cls, mixed):
        mesh = Mesh()
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].bias.requires_grad_(False)
        fastpar.parallelize(model, mesh, zero_stage=stage)
        base = list(model.parameters())[:3]
        model.requires_grad_(False)
        if how == "added":
            model.register_parameter("a", nn.Parameter(torch.ones(3)))
        else:
            model[1].bias.requires_grad_(True)
        new = model.a if how == "added" else model[1].bias
        optimizer = cls([new, *base] if mixed else [new], lr=0.1)
        (model(torch.ones(2, 3)) * (new + mesh.dp_rank)).sum().backward()
        optimizer.step()

    for world_size, stage, cls, mixed in (
        (1, 0, AdamW, False),
        (2, 0, AdamW, True),
        (2, 0, AdamW, False),
        (2, 0, torch.optim.SGD, False),
        (2, 0, torch.optim.SGD, True),
        (2, 3, AdamW, False),
    ):
        with pytest.raises(RuntimeError, match=message[how]):
            run_ranks(ranks, world_size, stage, cls, mixed)


def test_main_gradients_need_an_optimizer_that_knows_them():
    """p.grad reads as nan."""
    model = nn.Linear(3, 3).bfloat16()
    fastpar.parallelize(model, Mesh(), grad_dtype=torch.float32)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"SGD\.step: main gradients .* fastpar\.Sharded\(SGD, params",
    ):
        torch.optim.SGD(model.parameters()).step()
    with pytest.raises(
        RuntimeError, match=r"p\.grad under GradScaler, got main gradients; paralleli"
    ):
        scaled(AdamW(model.parameters(), master_weights=True))


@pytest.mark.parametrize("cls", [AdamW, Adafactor])
def test_an_optimizer_older_than_the_engine_is_refused(cls):
    def ranks(stage):
        model = nn.Sequential(nn.Linear(3, 3))
        optimizer = cls(model.named_parameters())
        fastpar.parallelize(model, Mesh(), zero_stage=stage)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    message = (
        rf"{cls.__name__}\.step: expected parameters as they were when .* got parameter 0 of "
        r"group 0 \('0\.weight'\) with an engine since; build the optimizer after fastpar\.paralle"
    )
    for stage in (0, 3):
        with pytest.raises(RuntimeError, match=message):
            run_ranks(ranks, 2, stage)
