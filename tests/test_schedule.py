"""schedule.py: who is decayed, and the learning rate over a run."""

import pytest
from torch import nn

from fastpar.schedule import cosine_lr, param_groups


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_lr": 2.0}, r"expected 0 <= min_lr <= lr=1\.0, got min_lr=2\.0"),
        ({"min_lr": -0.1}, r"got min_lr=-0\.1"),
        ({"warmup_steps": 11}, r"expected 0 <= warmup_steps <= max_steps=10, got warmup_steps=11"),
    ],
)
def test_bad_schedule(options, message):
    options = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 1, "max_steps": 10, **options}
    with pytest.raises(ValueError, match=message):
        cosine_lr(0, **options)
