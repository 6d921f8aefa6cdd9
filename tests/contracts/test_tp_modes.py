"""Tensor parallelism composed with what else an engine does: accumulation, HSDP, recomputation,
fp16 with an overflow, token counts, and deterministic mode.

The cells and the run that they are compared with are those of tp_cells.py.
"""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cells import covering, slow
from tp_cells import ACCUM, OVERFLOW_STEP, Cell, assert_same_run, batch, build, run, whole_state

from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import make_key
from fastpar.nn.recompute import recompute
from fastpar.optim.adamw import AdamW
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

ACCUMULATION = [
    Cell(2, 1, 0, True, "tied", dropout=True, accum="shard"),
    Cell(2, 2, 0, True, "untied", clip=True, accum="shard"),
    Cell(4, 1, 0, False, "untied", dropout=True, accum="full"),
    Cell(2, 2, 1, False, "tied", dropout=True, accum="no_sync"),
]
MORE_ACCUMULATION = [
    Cell(2, 2, 3, True, "tied", dropout=True, clip=True, accum="shard"),
    Cell(2, 2, 2, True, "tied", clip=True, accum="full"),
    Cell(2, 2, 0, True, "untied", accum="no_sync"),
]
MORE_ACCUMULATION += [
    Cell(tp, dp, stage, sequence, model, dropout=True, clip=stage > 1, accum=accum)
    for accum in ("shard", "full", "no_sync")
    for tp, dp in ((2, 2), (4, 1), (2, 1))
    for stage in ((0, 1, 2, 3) if dp > 1 else (0,))
    for sequence in (True, False)
    for model in ("tied", "untied")
]
HSDP = [
    Cell(2, 4, stage, sequence, dropout=True, clip=clip, shard_size=2, accum=accum)
    for stage in (1, 2, 3)
    for sequence, clip, accum in (
        (True, True, "once"),
        (False, False, "shard"),
        (True, True, "full"),
        (True, False, "no_sync"),
    )
]
HALF = [
    Cell(tp, dp, stage, sequence, model, dropout=True, clip=stage % 2 > 0, precision="fp16")
    for model in ("tied", "untied")
    for tp, dp, stage, sequence in (
        (2, 2, 3, True),
        (2, 1, 0, True),
        (4, 1, 0, False),
        (2, 2, 1, False),
        (2, 2, 2, True),
        (2, 2, 0, True),
        (4, 2, 3, True),
    )
]


@pytest.mark.parametrize("cell", ACCUMULATION, ids=str)
def test_accumulation(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE_ACCUMULATION, ids=str)
def test_more_accumulation(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize("cell", [HSDP[8], *map(slow, HSDP[:8] + HSDP[9:])], ids=str)
def test_hsdp(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize("cell", [HALF[0], *map(slow, HALF[1:])], ids=str)
def test_fp16_skips_the_overflow_and_goes_on(cell):
    results = run(cell)
    assert_same_run(cell, results)
    for result in results:
        assert result["scales"][OVERFLOW_STEP + 1] < result["scales"][OVERFLOW_STEP]
        assert not torch.tensor(result["norms"][OVERFLOW_STEP]).isfinite()


@pytest.mark.parametrize(
    ("cell", "mode"),
    [
        (Cell(2, 1, 0, False, dropout=True), "full"),
        (Cell(2, 2, 3, True, dropout=True, clip=True), "selective"),
        slow(Cell(2, 1, 0, False, dropout=True), "selective"),
        slow(Cell(2, 2, 3, True, dropout=True, clip=True), "full"),
        *(
            slow(cell, mode)
            for cell in (
                Cell(2, 2, 2, True, "untied", dropout=True, accum="full"),
                Cell(4, 1, 0, True, dropout=True),
                Cell(4, 2, 3, False, "untied"),
            )
            for mode in ("full", "selective")
        ),
    ],
)
def test_recomputation_changes_no_bit(cell, mode):
    """And nothing else does: the run without it is one process'."""
    for stored, again in zip(plain_run(cell), run(replace(cell, recompute=mode))):
        assert again["losses"] == stored["losses"]
        assert again["norms"] == stored["norms"]
        for name, p in stored["parameters"].items():
            assert torch.equal(again["parameters"][name], p), name


@functools.cache
def plain_run(cell):
    results = run(cell)
    assert_same_run(cell, results)
    return results


@pytest.mark.parametrize("sequence", [True, False])
def test_selective_recomputation_sends_nothing_again(sequence):
    """Full does: the two blocks' forward once more."""
    cell = Cell(2, 1, 0, sequence, dropout=True)
    modes = ("none", "selective", "full")
    none, selective, full = (
        run_ranks(functools.partial(count_collectives, replace(cell, recompute=mode)), 2)[0]
        for mode in modes
    )
    assert selective == none
    forward = {"all_gather": 4, "reduce_scatter": 4} if sequence else {"all_reduce": 4}
    assert full == none + Counter(forward)


def count_collectives(cell):
    mesh = Mesh(dp=cell.dp, tp=cell.tp)
    model = build(cell, 0)
    parallelize(model, mesh, Parallel.of(sequence_parallel=cell.sequence))
    recompute(model, cell.recompute)
    group, seen = engine_of(model).declared.tp.group, Counter()
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(group, name, functools.partial(counting, seen, name, getattr(group, name)))
    model(*batch(cell, 0)).backward()
    return seen


def counting(seen, name, method, *args, **kwargs):
    seen[name] += 1
    return method(*args, **kwargs)


# Deterministic mode: the same bits however four micro-batches are cut

CUTS = [
    (stage, dp, accum)
    for dp, accums in (
        (1, ("shard_4", "full_4")),
        (2, ("shard", "full", "no_sync")),
        (4, ("once",)),
    )
    for accum in accums
    for stage in ((0,) if dp == 1 else (0, 1, 2, 3))
]


def cuts():
    """Three of them run in `make test`."""
    default = {(0, 1, "shard_4", True, 2), (0, 2, "shard", False, 2), (3, 2, "shard", True, 2)}
    every = [(*cut, *rest) for cut in CUTS for rest in itertools.product((True, False), (2, 4))]
    return [values if values in default else slow(*values) for values in every]


@pytest.mark.parametrize(("stage", "dp", "accum", "sequence", "tp"), cuts())
def test_deterministic_mode_has_the_same_bits_for_every_cut(stage, dp, accum, sequence, tp):
    cell = Cell(tp, 2, 1, sequence, dropout=True, clip=True, deterministic=True, precision="fp32")
    expected = plain_run(replace(cell, accum="full"))[0]
    for result in run(replace(cell, dp=dp, stage=stage, accum=accum)):
        assert result["norms"] == expected["norms"]
        for key, grad in expected["grads"].items():
            assert torch.equal(result["grads"][key], grad), key
        for name, p in expected["parameters"].items():
            assert torch.equal(result["parameters"][name], p), name


def test_two_deterministic_runs_have_the_same_bits():
    cell = Cell(2, 2, 2, deterministic=True, dropout=True, accum="shard", precision="fp32")
    first, second = run(cell), run(cell)
    for name, p in first[0]["parameters"].items():
        assert torch.equal(second[3]["parameters"][name], p), name


# What one rank sees, all have to know


@covering(
    1,
    ("name", ["h.1.mlp.c_fc.weight", "h.0.ln_1.weight", "h.1.mlp.c_proj.bias"]),
    ("stage", [0, 2, 3]),
    ("sequence", [True, False]),
)
def test_an_overflow_on_one_rank_skips_everywhere(name, sequence, stage):
    """In a slice, in a part of a sum, or in what all have: only tp rank 1 sees it."""
    cell = Cell(2, 2, stage, sequence, precision="fp32", clip=True)
    for skipped, unchanged, norm in run_ranks(functools.partial(overflow, cell, name), 4):
        assert (skipped, unchanged) == ([True, False], [True, False])
        assert not norm[0] < float("inf")
        assert 0 < norm[1] < float("inf")


def overflow(cell, name):
    mesh = Mesh(dp=cell.dp, tp=cell.tp)
    model = build(cell, 0)
    parallelize(model, mesh, Parallel.of(zero_stage=cell.stage, sequence_parallel=cell.sequence))
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    optimizer.grad_scale = 8.0
    bad = [mesh.rank == 3]  # dp rank 1, tp rank 1

    def make_infinite(grad):
        return grad * float("inf") if bad[0] else grad

    dict(model.named_parameters())[name].register_hook(make_infinite)
    skipped, unchanged, norms = [], [], []
    for step in range(2):
        before = whole_state(model)
        x, y = batch(cell, step)
        (model(x, y) * 8.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.skipped)
        norms.append(optimizer.grad_norm.item())
        unchanged.append(all(torch.equal(p, before[n]) for n, p in whole_state(model).items()))
        bad[0] = False
    return skipped, unchanged, norms


@pytest.mark.parametrize("stage", [0, 3])
def test_counted_tokens_make_the_mean_over_all_ranks(stage):
    """Ranks of dp have 4 and 12 targets: with 8 each in the mean, the fp32 divisor is exact."""
    cell = Cell(2, 2, stage)
    results = run_ranks(functools.partial(train_on_sums, cell), 4)
    model = build(cell, 0)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=1.0)
    for step in range(3):
        x, y = with_few_targets(cell, step)
        model(x, y, rng_key=make_key(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        for name, p in model.named_parameters():
            off = (result[name] - p).abs().max()
            assert off <= 1e-12 * p.abs().max(), name


def with_few_targets(cell, step):
    x, y = (t.clone() for t in batch(cell, step))
    y[:2].view(-1)[4:] = -100
    return x, y


def train_on_sums(cell):
    mesh = Mesh(dp=cell.dp, tp=cell.tp)
    model = build(cell, 0)
    parallelize(model, mesh, zero_stage=cell.stage)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=1.0)
    for step in range(3):
        x, y = (t[mesh.dp_rank * 2 : mesh.dp_rank * 2 + 2] for t in with_few_targets(cell, step))
        engine_of(model).count_tokens(int((y >= 0).sum()))
        model(x, y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


def test_every_way_to_accumulate_is_in_a_cell():
    assert {c.accum for c in (*ACCUMULATION, *HSDP)} | {a for *_, a in CUTS} == set(ACCUM)
