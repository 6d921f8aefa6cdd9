"""What a rank of a grid says in a step, literally: kind, bytes and order; and what it keeps.

One real rank of a lone mesh, as in test_tp_schedules.py. On r x c ranks a layer's products
gather or scatter [N/r, C] along the row, twice forward and three times backward of each pair of
layers, as tensor parallelism with sequence parallelism does with [N, C]; each gathers its weight
along the column forward and backward, and sums its gradient there. A norm exchanges two numbers
of a token and rank, forward and backward.
"""

import math

import pytest
import torch
from cells import covering, slow
from lone_rank import LoneRun, of_tp

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.comm.recorder import WireMeter
from fastpar.testing import run_ranks

LAYERS, C, B, T, V = 2, 32, 4, 8, 128
N = B * T
SIZES = {"n_layer": LAYERS, "n_head": 4, "n_embd": C, "block_size": T, "vocab_size": 100}
grids = pytest.mark.parametrize("grid", [(2, 2), (1, 4), (4, 1), slow((2, 2, 2)), slow((2, 4))])


def run_of(grid, *, dp=1, **options):
    """A rank that trains, see LoneRun."""
    config, idx = GPTConfig(**SIZES, dropout=0.0), torch.arange(N).view(B, T) % 100
    world_size = math.prod(grid) * dp
    return LoneRun(config, idx, world_size, 1, {"tp_grid": grid}, **options)


def expected(grid, mode):
    """Forward and backward of one micro-batch, and the partial sums of stage 0."""
    r, c, d = (*grid, 1)[:3]
    n = N // (r * d)

    def along(ranks, *messages):
        return [message for message in messages if ranks > 1]

    gather, scatter = (f"{kind} {4 * n * C}" for kind in ("all_gather", "reduce_scatter"))
    norm = along(c, f"all_gather {4 * 2 * n * c}")

    def weight(numel, kind="all_gather"):
        return along(r, f"{kind} {4 * numel // c}")

    def column(numel):
        return weight(numel) + along(c, gather)

    def row(numel):
        return weight(numel) + along(c, scatter)

    def backward(numel, column):
        moved = along(c, gather)
        if column:
            moved = weight(numel) + moved + along(c, scatter)
        else:
            moved = weight(numel) + moved
        return moved + weight(numel, "reduce_scatter")

    sizes = (3 * C * C, C * C, 4 * C * C, 4 * C * C)
    layer = norm + column(sizes[0]) + row(sizes[1]) + norm + column(sizes[2]) + row(sizes[3])
    layer_back = backward(sizes[3], False) + backward(sizes[2], True) + norm
    layer_back += backward(sizes[1], False) + backward(sizes[0], True) + norm
    vocabulary = V * c * C  # each column has V rows, some of padding
    table, of_rows = weight(vocabulary), along(c, f"all_gather {12 * n * c}")
    sum_of_loss = along(r * d, "all_reduce 4")
    forward = table + along(c, scatter) + layer * LAYERS + norm
    forward += table + along(c, gather) + of_rows + sum_of_loss
    back = along(c, scatter) + weight(vocabulary, "reduce_scatter") + norm
    again = {"none": [], "selective": norm * 2, "full": layer}[mode]  # of norms, also selective
    back += (again + layer_back) * LAYERS + along(c, gather) + weight(vocabulary, "reduce_scatter")
    # Positions; weight and bias of norms; biases.
    partial = (T * C + (4 * LAYERS + 2) * C + LAYERS * 9 * C) // c
    return forward, back, along(r, f"all_reduce {4 * partial}")


@covering(
    1,
    ("grid", [(2, 2), (1, 4), (4, 1), (2, 2, 2), (2, 4)]),
    ("mode", ["none", "selective", "full"]),
    ("stage", [0, 1, 2, 3]),
)
def test_schedule_of_a_step(grid, mode, stage):
    forward, backward, partial = expected(grid, mode)
    with run_of(grid, mode=mode, zero_stage=stage, dp=2) as run:
        for _ in range(2):
            said = [of_tp(ops) for ops in run.train()]
            assert said[0] == forward
            if stage == 0:
                assert sorted(said[1]) == sorted(backward + partial)
                assert said[2] == []
            else:
                assert sorted(said[1]) == sorted(backward)
                shards = engine_of(run.model).shards
                mine = sum(
                    shards.piece(p).param.numel()
                    for p in shards.params
                    if shards.declared.is_partial(p)
                )
                assert said[2] == [f"all_reduce {4 * mine}"] * (grid[0] > 1)


def counted(grid):
    """Bytes that a real rank counts in forward and backward."""
    model = GPT(GPTConfig(**SIZES, dropout=0.0))
    parallelize(model, Mesh(tp_grid=grid))
    idx, meter = torch.arange(N).view(B, T) % 100, WireMeter()
    with meter.of_fastpar():
        model(idx, idx).backward()
    return meter.sent_bytes


@pytest.mark.parametrize("grid", [(2, 2), slow((1, 4)), slow((4, 1))])
def test_counters_of_real_ranks_are_the_schedule(grid):
    r, c = grid
    with run_of(grid) as run:
        run.train()
        idx = torch.arange(N).view(B, T) % 100
        run.ops.clear()
        run.model(idx, idx).backward()
        wire = sum(op.wire_bytes for op in run.ops)
    forward, backward, partial = expected(grid, "none")
    n_said = len(forward) + len(backward) + len(partial)
    assert n_said == len([op for op in run.ops if op.role == "tp"])
    found = run_ranks(counted, r * c, grid, backend="gloo", timeout_s=120)
    assert found == [wire] * (r * c)
