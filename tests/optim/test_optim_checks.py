"""optim_checks.py: options, parameters and gradients that AdamW refuses."""

import math

import pytest
import torch
from test_optim import build, put_gradients, run, vector
from torch import nn

from fastpar.optim.adamw import AdamW
from fastpar.optim.base import check_overlap


def parameter(*shape):
    return nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"expected 0\.0 <= lr < inf, got lr=-1\.0"),
        ({"lr": math.nan}, r"expected 0\.0 <= lr < inf, got lr=nan"),
        ({"lr": torch.tensor(-1.0)}, r"expected 0\.0 <= lr < inf, got lr=-1\.0"),
        ({"lr": torch.ones(2)}, r"a tensor of one element, got lr of shape=\[2\]"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] < 1\.0, got betas\[0\]=1\.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] < 1\.0, got betas\[1\]=-0\.1"),
        ({"betas": (torch.tensor(1.5), 0.9)}, r"betas\[0\] < 1\.0, got betas\[0\]=1\.5"),
        ({"eps": -1.0}, r"got eps=-1\.0"),
        ({"weight_decay": -0.1}, r"got weight_decay=-0\.1"),
        ({"max_grad_norm": 0.0}, r"expected max_grad_norm > 0 or None, got max_grad_norm=0\.0"),
        ({"max_grad_norm": math.nan}, r"expected max_grad_norm > 0 or None, got max_grad_norm=nan"),
        ({"seed": -1}, r"expected 0 <= seed < 2\*\*63, got seed=-1"),
        ({"differentiable": True}, r"expected differentiable=False, got .*=True; use torch\.optim"),
        ({"foreach": True, "fused": True}, r"expected at most one of foreach and fused"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(build().parameters(), **options)


def test_options_of_a_group_are_checked_and_the_group_is_not_kept():
    optimizer = AdamW(build().parameters())
    with pytest.raises(ValueError, match=r"AdamW: expected 0\.0 <= lr < inf, got lr=-2\.0"):
        optimizer.add_param_group({"params": [parameter(2)], "lr": -2.0})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = -2.0
    with pytest.raises(ValueError, match=r"AdamW.load_state_dict: expected 0\.0 <= lr < inf, got"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("master_weights", True),
        ("stochastic_rounding", False),
        ("seed", 1),
        ("moment_dtype", torch.uint8),
        ("max_grad_norm", 1.0),
        ("zero_grad_in_step", True),
    ],
)
def test_options_of_the_optimizer_are_none_of_a_group(name, value):
    with pytest.raises(ValueError, match=rf"expected {name} as an option .*Redundancy"):
        AdamW([{"params": [parameter(2)], name: value}])


# Memory that two parameters share


def test_overlapping_parameters_are_refused():
    flat = torch.zeros(100)
    a, b = nn.Parameter(flat[:60].view(6, 10)), nn.Parameter(flat[59:])
    with pytest.raises(ValueError, match=r"got parameter 1 of group 0 overlapping parameter 0 of"):
        AdamW([a, b])
    optimizer = AdamW([("a", a)])
    with pytest.raises(ValueError, match=r"got parameter 0 of group 1 \('b'\) overlapping .*'a'"):
        optimizer.add_param_group({"params": [("b", b)]})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_inside_of_another_is_refused():
    flat = torch.zeros(100)
    parts = [nn.Parameter(flat), nn.Parameter(flat[1:3]), nn.Parameter(flat[50:60])]
    for order in ((0, 1), (1, 0), (1, 2, 0), (2, 0)):
        with pytest.raises(ValueError, match=r"expected parameters in memory of their own, got"):
            AdamW([parts[i] for i in order])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_given_twice_is_refused():
    p = parameter(3)
    with pytest.raises(ValueError, match=r"got parameter 1 of group 0 overlapping parameter 0"):
        AdamW([p, p])
    with pytest.raises(ValueError, match=r"appear in more than one parameter group"):
        AdamW([{"params": [p]}, {"params": [p]}])


def test_neighbours_and_transposed_views_are_accepted():
    flat = torch.zeros(100)
    parts = [flat[:20].view(4, 5).t(), flat[20:20], flat[20:100], torch.empty(0), torch.empty(0)]
    params = [nn.Parameter(t) for t in parts]
    optimizer = AdamW([*params, nn.Parameter(torch.empty(3, device="meta"))])
    check_overlap(optimizer.param_groups)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (flat < 0).all()


# Gradients


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"expected dense gradients, got layout=torch\.sparse"):
        AdamW(model.parameters()).step()


def test_a_gradient_of_another_dtype_is_refused_before_anything_changes():
    """fp32 gradients of 16-bit parameters are main gradients and allowed; others are not."""
    model = build()
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    run(model, optimizer, 1)
    before = vector(model)
    put_gradients(model, 1)
    p = model[3].weight
    p.grad = None
    if hasattr(p, "grad_dtype"):
        p.grad_dtype = torch.bfloat16
        p.grad = torch.ones_like(p, dtype=torch.bfloat16)
    else:
        pytest.skip("torch < 2.13 refuses such a gradient itself")
    with pytest.raises(ValueError, match=r"adamw_step_: expected .*grads\[4\]=torch\.bfloat16"):
        optimizer.step()
    assert torch.equal(vector(model), before)
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}


def test_state_on_another_device_is_refused():
    model = build()
    optimizer = AdamW(model.parameters())
    run(model, optimizer, 1)
    optimizer.state[model[0].weight]["exp_avg"] = torch.empty(33, 7, device="meta")
    put_gradients(model, 1)
    with pytest.raises(ValueError, match=r"adamw_step_: expected .*device.*meta"):
        optimizer.step()
