"""The trainer on a grid of ranks: the curve of one process, resume at another layout, refusals."""

import math

import numpy as np
import pytest
from cells import slow
from train_runs import TINY, Runs, forget_after, losses

from fastpar import GPT, GPTConfig, engine_of, parallelize
from fastpar.comm.mesh import Mesh
from fastpar.testing import run_ranks
from fastpar.train.trainer import validation_loss

FEW = {**TINY, "n_head": 4, "n_layer": 2, "micro_batch_size": 2, "max_steps": 4, "save_every": 2}
run = Runs(FEW)
ROUNDING = 2.0 ** -(24 - 5)  # as in test_train_tp.py


@pytest.mark.parametrize(
    ("grid", "ranks", "changes"),
    [
        ("2x2", 4, {"zero_stage": 1, "activation_checkpointing": "full"}),
        slow("1x2", 4, {"zero_stage": 3}),
        slow("2x1x2", 4, {"zero_stage": 2, "micro_batch_size": 4}),
        slow("2x2x2", 8, {"micro_batch_size": 4, "activation_checkpointing": "selective"}),
    ],
)
def test_the_curve_is_that_of_one_process_and_goes_on_at_other_layouts(here, grid, ranks, changes):
    one, many = "one", "many"
    run(one, 1)
    assert len(losses(one)) == 4
    run(many, ranks, tp_grid=grid, **changes)
    for got, expected in zip(losses(many), losses(one), strict=True):
        assert abs(got - expected) <= ROUNDING * expected
    forget_after(many, 2)
    run(many, 2, tp=2, resume=True)
    for got, expected in zip(losses(many), losses(one), strict=True):
        assert abs(got - expected) <= ROUNDING * expected


def validated(axes, stage=0):
    tokens = np.random.default_rng(0).integers(64, size=5 * 8 + 1).astype(np.uint16)
    model = GPT(GPTConfig(2, 2, 16, 8, 64, dropout=0.0), seed=0).double()
    engine = engine_of(parallelize(model, Mesh(**axes, device="cpu"), zero_stage=stage))
    return validation_loss(model, engine, tokens, rows=2, block_size=8, n_batches=4)


@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 1, 2), slow((2, 2, 2))])
def test_a_validation_of_any_number_of_windows(grid):
    """Three batches, the last one of a single window, which rows and depth cannot share."""
    expected = run_ranks(validated, 1, {})[0]
    for dp, stage in ((1, 0), (2, 3)):
        found = run_ranks(validated, dp * math.prod(grid), {"tp_grid": grid}, stage)
        assert found == pytest.approx([expected] * len(found), rel=1e-12)
