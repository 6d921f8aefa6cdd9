"""deterministic=True: the bits of a run depend on the global batch, and not on how it is cut.

Eight micro-batches a step, numbered as zero_cells.py says, on 1, 2, 4 and 8 ranks, at every stage.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from cells import covering, slow
from zero_cells import Cell, assert_same_run, expected, run, same

CUTS = [(1, "shard_8"), (2, "shard"), (4, "shard_2"), (8, "once")]
CUTS += [(1, "full_8"), (2, "full"), (4, "full_2"), (2, "shard_no_sync")]
WHOLE = Cell(0, 1, None, "shard_8", clip=True)


def assert_same_parameters(a, b):
    for name, p in a["parameters"].items():
        assert torch.equal(p, b["parameters"][name]), name
    assert same(a["norms"], b["norms"])


@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
def test_the_promised_orders_are_one_tree(precision):
    """Of the references; test_cuts then shows that the engine keeps them. (Not of fp16: dividing
    the loss by the accumulation is not exact in its subnormal numbers.)"""
    whole = replace(WHOLE, precision=precision)
    for world_size, accum in CUTS:
        other = replace(whole, world_size=world_size, accum=accum)
        assert_same_parameters(expected(whole), expected(other))


@covering(1, (("world_size", "accum"), CUTS), ("stage", [0, 1, 2, 3]))
def test_cuts(world_size, accum, stage):
    """All of them are the run of one process without an engine."""
    cell = replace(WHOLE, stage=stage, world_size=world_size, accum=accum)
    results = run(cell)
    assert_same_run(cell, results)
    assert_same_parameters(results[0], expected(WHOLE))


@pytest.mark.parametrize(
    ("stage", "world_size", "shard_size", "accum"),
    [
        (1, 4, 2, "shard_2"),
        (3, 4, 2, "full_2"),
        slow(2, 8, 4, "once"),
        slow(3, 8, 2, "once"),
    ],
)
def test_cuts_with_copies(stage, world_size, shard_size, accum):
    cell = replace(WHOLE, stage=stage, world_size=world_size, shard_size=shard_size, accum=accum)
    assert_same_parameters(run(cell)[0], expected(WHOLE))


@pytest.mark.parametrize("cuts", [CUTS[1::3], slow(CUTS)], ids=["few", "all"])
def test_bf16_and_dropout_too(cuts):
    whole = replace(WHOLE, precision="bf16", model="gpt")
    for stage, (world_size, accum) in zip(itertools.cycle([3, 1, 2, 0]), cuts):
        cell = replace(whole, stage=stage, world_size=world_size, accum=accum)
        assert_same_parameters(run(cell)[0], expected(whole))


def test_the_ordinary_order_has_other_bits():
    """So that the tests above can fail."""
    ordinary = expected(replace(WHOLE, deterministic=False))["parameters"]
    names = [n for n, p in expected(WHOLE)["parameters"].items() if not torch.equal(p, ordinary[n])]
    assert "wte.weight" in names


@pytest.mark.parametrize("deterministic", [False, True])
def test_ranks_and_repetitions_agree(deterministic):
    """Also on a number of ranks that divides nothing."""
    cell = Cell(3, 3, accum="shard_2", precision="bf16", deterministic=deterministic)
    first = run(cell)
    for result in [*first[1:], *run(cell)]:
        assert_same_parameters(result, first[0])
        assert result["scales"] == first[0]["scales"]
