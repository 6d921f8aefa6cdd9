"""The trainer on a grid of ranks: the curve of one process, resume at another layout, refusals."""

import math

import numpy as np
import pytest
from cells import slow
from train_runs import TINY, Runs, curve, forget_after

from fastpar import GPT, GPTConfig, engine_of, parallelize
from fastpar.cli import main
from fastpar.comm.mesh import Mesh
from fastpar.testing import run_ranks
from fastpar.train.trainer import validation_loss

FEW = {**TINY, "n_head": 4, "n_layer": 2, "micro_batch_size": 2, "max_steps": 4, "save_every": 2}
ROUNDING = 2.0 ** -(24 - 5)  # as in test_train_tp.py


run = Runs(FEW)


def losses(out):
    return [row["train_loss"] for row in curve(out) if "train_loss" in row]


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp-grid 2", "expected tp_grid as ROWSxCOLUMNS or ROWSxCOLUMNSxDEPTH of ranks, got tp_"),
        ("--tp-grid 1x1", "expected tp_grid of two or three positive integers"),
        ("--tp-grid 2x2 --nproc 2", "expected nproc to be a multiple of tp_grid=4, got nproc=2"),
        (
            "--tp-grid 2x2 --tp 2 --nproc 4",
            "expected no tp beside tp_grid, got",
        ),
        ("--tp-grid 2x2 --pp 2 --nproc 8", "expected no pp beside tp_grid"),
        ("--tp-grid 2x2 --cp 2 --nproc 8", "expected no cp beside tp_grid"),
        ("--tp-grid 2x2 --ep 2 --n-expert 2 --nproc 8", "expected no ep beside tp_grid"),
        ("--tp-grid 2x2 --nproc 4 --optimizer muon", "expected optimizer=adamw with tp_grid=2x2"),
        ("--tp-grid 2x2 --nproc 4 --compile", "expected compile=False with tp_grid=2x2, got comp"),
        ("--tp-grid 2x2 --nproc 4 --offload optimizer --zero 2", "expected offload=none with tp_g"),
        ("--tp-grid 2x2 --nproc 4 --fp8 mlp", "expected fp8=none with tp_grid=2x2, got fp8=mlp"),
        ("--tp-grid 2x2 --nproc 4 --n-expert 4", "expected n_expert=0 with tp_grid=2x2, got n_e"),
        ("--tp-grid 2x2 --nproc 8 --replicas 2 --outer-every 2", "expected replicas=1 with tp_g"),
        ("--tp-grid 2x2 --nproc 4 --no-sequence-parallel", "expected sequence_parallel=True with"),
        ("--tp-grid 2x2 --nproc 4 --pack documents", "expected pack=stream with tp_grid=2x2"),
        ("--tp-grid 2x2 --nproc 4 --moment-dtype int8", "expected moment_dtype fp32 or bf16 with"),
        ("--tp-grid 3x1 --nproc 3", "expected rows and columns of tp_grid to divide n_embd="),
        (
            "--tp-grid 1x4 --nproc 4 --n-head 2",
            "expected at most n_head=2 columns, which split the heads, got tp_grid=1x4; change",
        ),
        (
            "--tp-grid 2x1 --nproc 2 --micro-batch-size 3 --batch-size 6",
            "expected micro_batch_size as a multiple of the 2 rows and depth of tp_grid",
        ),
    ],
)
def test_what_the_command_line_refuses(capsys, flags, message):
    assert main(["train", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
