"""Layers on a grid of ranks: masks, operators and what they hold, refusals.

tests/contracts/test_same_run.py has whole runs, test_split_schedules.py what they send.
"""

import itertools
import math

import pytest
import torch
from cells import sweep
from lone_rank import LoneMesh, heard
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, Muon, parallelize
from fastpar.axes.grid import Grid
from fastpar.comm.collectives import OneRank
from fastpar.comm.transports import TorchCollectives
from fastpar.engine.debug import Debug
from fastpar.kernels.reference import layer_norm_ref
from fastpar.models.gpt import use_fp8
from fastpar.optim.muon import muon_groups
from fastpar.predict.measure import StepMemory
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12}


def build(dtype=torch.float64, seed=0, **changes):
    options = {**SIZES, "vocab_size": 37, "dropout": 0.0, **changes}
    return GPT(GPTConfig(**options), seed=seed).to(dtype)


def batch(samples=4, time=6):
    idx = torch.arange(samples * time).view(samples, time) % 37
    return idx, idx.roll(1, 1)


def gridded(model, grid, debug=None, plan=None, **options):
    mesh = Mesh(tp_grid=grid)
    return parallelize(model, mesh, Parallel.of(**options), debug=debug, tp_plan=plan)


def test_ranks_draw_one_mask():
    """When no key is given, of torch's generators, which differ, the first rank's counts."""

    def rank():
        return gridded(build(torch.float32, dropout=0.25), (2, 2))(*batch()).item()

    assert len(set(run_ranks(rank, 4))) == 1


@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_the_norm_of_split_rows(mean):
    """Statistics of parts joined, also of rows far from 0."""
    generator = torch.Generator().manual_seed(0)
    x = mean + torch.randn(3, 8, dtype=torch.float64, generator=generator)
    w, b = torch.randn(2, 8, dtype=torch.float64, generator=generator)

    def rank():
        alone = OneRank(torch.device("cpu"))
        grid = Grid(TorchCollectives(), alone, alone)
        part = [grid.slice(t, -1) for t in (x, w, b)]
        return torch.ops.fastpar.grid_norm(*part, 1e-5, grid.number)[0]

    expected = layer_norm_ref(x, w, b, 1e-5)
    assert (torch.cat(run_ranks(rank, 2), -1) - expected).abs().max() < 1e-14 * max(1, mean)


def alone():
    one = OneRank(torch.device("cpu"))
    return Grid(one, one, one)


@pytest.mark.slow
def test_opcheck():
    grid, of = alone(), torch.ops.fastpar
    x, w, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 8), (6, 8), (6,)))
    for linear, backward in ((of.grid_column, of.grid_column_bwd), (of.grid_row, of.grid_row_bwd)):
        for bias in (b, None):
            args = [t if t is None else t.clone().requires_grad_() for t in (x, w, bias)]
            torch.library.opcheck(linear.default, (*args, grid.number))
        for needed in itertools.product([True, False], repeat=3):
            args = (torch.randn(4, 6, dtype=torch.float64), x, w, *needed, grid.number)
            torch.library.opcheck(backward.default, args)
    args = [t.clone().requires_grad_() for t in (x, x[0], x[1])]
    torch.library.opcheck(of.grid_norm.default, (*args, 1e-5, grid.number))
    args = (x, x, x[0], x[:, 0].clone(), x[:, 1].clone(), grid.number)
    torch.library.opcheck(of.grid_norm_bwd.default, args)


N, C, F = 64, 64, 512  # of a product of tokens, in and out of the wide side, over all ranks
GATHERED = 4 * N * C  # x or dy of all columns
WIDE, WEIGHT = 4 * N * F // 2, 4 * F * C // 2  # by columns; the weight of all rows


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        # The weight joined, x gathered, y. Then x of all columns gone, dx's half beside dweight,
        # which is cut in a copy.
        ("column", GATHERED + WEIGHT + WIDE, GATHERED // 2 + 2.5 * WEIGHT),
        # The weight and y of all columns. Then dy gathered, dx, and dweight, of which a half stays.
        ("row", GATHERED + WEIGHT, GATHERED + WIDE + 1.5 * WEIGHT),
    ],
)
def test_gathered_blocks_are_let_go_of_within_an_op(op, forward, backward):
    """On 2x2 ranks, measured: nothing gathered stays until the op is over, or for backward."""
    narrow, wide = torch.randn(N, C // 2), torch.randn(N, F // 2)
    x, dy = (narrow, wide) if op == "column" else (wide, narrow)
    shape = (F // 2, C // 2) if op == "column" else (C // 2, F // 2)
    x, w = x.requires_grad_(), torch.randn(*shape).requires_grad_()
    with LoneMesh(4, 0, tp_grid=(2, 2)) as mesh:
        model = parallelize(build(torch.float32), mesh, debug=Debug(collectives=heard([])))
        number = model.h[0].attn.tp.number
        with StepMemory(mesh.device, alive_bytes=0) as memory:
            y = getattr(torch.ops.fastpar, f"grid_{op}")(x, w, None, number)
        assert memory.left_bytes == pytest.approx(y.nbytes, abs=64)
        assert memory.peak_bytes == pytest.approx(forward, rel=0.01)
        with StepMemory(mesh.device, alive_bytes=0) as memory:
            y.backward(dy)
        assert memory.peak_bytes == pytest.approx(backward, rel=0.01)


class Own(nn.Linear):
    def tensor_parallel(self, tp):
        return {"weight": None}


REFUSED = [
    (
        lambda: Own(4, 4),
        (2, 1),
        {},
        r"tp_grid=2x1 needs a fastpar.GPT of GPT-2's block, got Own; u",
    ),
    (lambda: build(n_expert=2, top_k=1), (2, 1), {}, "^tp_grid does not support n_expert; drop"),
    (build, (2, 1), {"plan": "gpt2"}, "expected no tp_plan for GPT"),
    (lambda: build(n_head=3, n_embd=15), (2, 1), {}, "divide n_embd=15, got tp_grid=2x1; chang"),
]


@sweep(("make", "grid", "options", "message"), REFUSED)
def test_what_a_grid_refuses(make, grid, options, message):
    def rank():
        model = make()
        with pytest.raises(ValueError, match=message):
            gridded(model, grid, Debug(bus_gb_s=12), **options)
        assert all(vars(module).get("tp") is None for module in model.modules())

    run_ranks(rank, math.prod(grid))


def test_what_a_model_on_a_grid_refuses():
    def divided():
        model = gridded(build(), (2, 1, 2))
        message = r"batch of a multiple of 4 samples with tp_grid=2x1x2, got B=3; pass another mic"
        with pytest.raises(ValueError, match=message):
            model(*batch(3))
        message = r"positions do not work with tp_grid=2x1x2, got positions.shape=\[4, 6\]; let"
        with pytest.raises(ValueError, match=message):
            model(*batch(4), positions=torch.arange(6).expand(4, 6))

    def rows():
        model = gridded(build(torch.float32), (2, 1))
        optimizer = Muon(muon_groups(model))
        model(*batch()).backward()
        with pytest.raises(ValueError, match=r"Muon: does not support tp_grid=2x1; use fastpar"):
            optimizer.step()
        use_fp8(model, "mlp", emulate=True)
        message = r"linear: fp8 does not work with tp_grid=2x1, got .*; dr"
        with pytest.raises(ValueError, match=message):
            model(*batch())

    run_ranks(divided, 4)
    run_ranks(rows, 2)
