"""Adafactor refuses options and parameters that it cannot serve."""

import math

import pytest
import torch
from test_adafactor import build, put_gradients, run
from torch import nn

from fastpar.optim.adafactor import Adafactor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"Adafactor: expected 0\.0 <= lr < inf, got lr=-1\.0; correct"),
        ({"lr": math.nan}, r"got lr=nan"),
        ({"beta2_decay": 0.1}, r"expected -inf <= beta2_decay <= 0\.0, got beta2_decay=0\.1"),
        ({"eps": (-1.0, 1e-3)}, r"got eps\[0\]=-1\.0"),
        ({"eps": (None, -1e-3)}, r"got eps\[1\]=-0\.001"),
        ({"d": 0.9}, r"expected 1\.0 <= d < inf, got d=0\.9"),
        ({"weight_decay": -0.1}, r"got weight_decay=-0\.1"),
        ({"beta1": 1.0}, r"expected 0\.0 <= beta1 < 1\.0, got beta1=1\.0"),
        ({"max_grad_norm": 0.0}, r"Adafactor: expected max_grad_norm > 0 or None, got"),
        ({"master_weights": "full"}, r"to be False, True or 'remainder', got .*='full'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Adafactor(build(), **options)


def test_options_at_their_limits_are_accepted():
    """With lr = 0 and no decay nothing moves, and nothing is divided by zero."""
    params = build()
    before = [p.detach().clone() for p in params]
    run(params, Adafactor(params, lr=0.0, beta2_decay=0.0, eps=(0.0, 0.0), d=1.0, beta1=0.0), 2)
    assert all(torch.equal(p, q) for p, q in zip(params, before))


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.bfloat16, {}, r"dtype=torch.bfloat16 with master_weights=False; pass"),
        (torch.float64, {"master_weights": True}, r"expected fp32 parameters, .*torch.float64"),
        (torch.complex64, {}, r"got a parameter of dtype=torch.complex64"),
        (torch.float16, {"master_weights": "remainder"}, r"expected fp16 parameters with master"),
    ],
)
def test_bad_parameters(dtype, options, message):
    optimizer = Adafactor(build(), **options)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=dtype))]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"Adafactor.step: expected dense gradients, got layout"):
        Adafactor(model.parameters()).step()


def test_closures_schedulers_and_tensor_rates_work():
    params = build()
    optimizer = Adafactor(params, lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    put_gradients(params, 0)
    assert optimizer.step(lambda: 3.0) == 3.0
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(5e-3)
    put_gradients(params, 1)
    optimizer.step()
