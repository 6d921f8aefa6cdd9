"""The equivalence matrix: every stage, cut into ranks and micro-batches, is the run of one process.

zero_cells.py has the cells and the run that they are compared with: bit for bit, everywhere.
"""

import contextlib
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from cells import covering, few, slow
from zero_cells import (
    ACCUM,
    DTYPES,
    LAYOUTS,
    MATRIX_ACCUM,
    OVERFLOW_STEP,
    REST,
    STEPS,
    Block,
    Cell,
    Module,
    all_cells,
    assert_same_run,
    expected,
    micro_batch,
    run,
)

from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.optim.adamw import AdamW
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def matrix():
    """make test runs every pair of options, and every number of ranks once with each stage."""

    def pairs(cell):
        layout = (cell.stage, cell.world_size, cell.shard_size)
        options = {n: v for n, v in vars(cell).items() if n not in ("world_size", "shard_size")}
        return {layout, *itertools.combinations(options.items(), 2)}

    quick = few(all_cells(), pairs, lambda c: (c.world_size * ACCUM[c.accum][0] + 2) ** 0.1)
    return [c if c in quick else slow(c) for c in all_cells()]


@pytest.mark.parametrize("cell", matrix(), ids=str)
def test_cell(cell):
    assert_same_run(cell, run(cell))


def test_every_pair_of_options_is_in_a_cell():
    factors = {
        "layout": LAYOUTS,
        "accum": MATRIX_ACCUM,
        "precision": tuple(DTYPES),
        **REST,
    }
    seen = set()
    for c in all_cells():
        layout = (c.stage, c.world_size, c.shard_size)
        values = {"layout": layout, **{n: getattr(c, n) for n in factors if n != "layout"}}
        seen |= set(itertools.combinations(values.items(), 2))
    for (a, of_a), (b, of_b) in itertools.combinations(factors.items(), 2):
        for x, y in itertools.product(of_a, of_b):
            assert ((a, x), (b, y)) in seen


def test_the_reference_trains_clips_and_overflows():
    """Otherwise cells could agree on nothing."""
    cell = Cell(world_size=4, accum="shard", precision="fp16", clip=True)
    truth = expected(cell)
    first, last = (sum(truth["losses"][step, i] for i in range(16)) for step in (0, STEPS - 1))
    assert last < first - 16 * 0.3
    assert truth["norms"][0] > 0.25
    assert not torch.tensor(truth["norms"][OVERFLOW_STEP]).isfinite()
    assert truth["scales"][OVERFLOW_STEP + 1] == truth["scales"][OVERFLOW_STEP] / 2
    assert truth["scales"][OVERFLOW_STEP] == 2 * truth["scales"][0]


def test_the_reference_sees_the_order_of_sums():
    """Bits tell pairwise from sequential, and ranks first from micro-batches first."""
    cell = Cell(world_size=3, accum="shard", deterministic=True)
    cells = [
        cell,
        replace(cell, deterministic=False),
        replace(cell, accum="full"),
        replace(cell, accum="full", deterministic=False),
    ]
    for a, b in itertools.combinations(cells, 2):
        p, q = (expected(c)["parameters"]["wte.weight"] for c in (a, b))
        assert not torch.equal(p, q), (str(a), str(b))


OPTIONS = {
    "tiny buckets": {"bucket_mb": 1e-6, "first_bucket_mb": 1e-6},
    "first bucket above the others": {"bucket_mb": 0.005, "first_bucket_mb": 0.03},
    "one bucket": {"bucket_mb": 100.0, "first_bucket_mb": 100.0},
    "default buckets": {"bucket_mb": None, "first_bucket_mb": 1.0},
    "no prefetch": {"prefetch": 0},
    "prefetch 3": {"prefetch": 3},
    "linear layers as units": {"units": torch.nn.Linear, "first_bucket_mb": 1e-6},
    "units of somebody's choice": {"units": Block, "prefetch": 2, "first_bucket_mb": 1e-6},
}


@covering(
    1,
    ("options", OPTIONS.values()),
    (
        "cell",
        [
            Cell(0, 3, accum="shard_2", deterministic=False),
            Cell(1, 3, accum="shard_no_sync", precision="bf16"),
            Cell(2, 4, accum="full_2", checkpoint="non-reentrant", clip=True),
            Cell(3, 3, accum="shard_2", model="untied", clip=True, deterministic=False),
            Cell(3, 4, 2, "shard_2", "bf16", checkpoint="non-reentrant"),
        ],
    ),
)
def test_buckets_units_and_prefetch_change_no_bit(cell, options):
    assert_same_run(cell, run(cell, **options))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fewer_backward_passes_than_announced(stage):
    """step() reduces what waits for backward number grad_accum_steps."""
    cell = Cell(stage, 2, accum="full_2", clip=True)
    assert_same_run(cell, run(cell, grad_accum_steps=7))


@pytest.mark.parametrize("grad_accum_steps", [2, slow(1), slow(3)])
def test_more_backward_passes_than_announced(grad_accum_steps):
    """Every backward from number grad_accum_steps on is reduced. The order of the sums is another
    than that of any cell: the stages have to agree on it."""
    cell = Cell(1, 2, accum="full", clip=True, deterministic=False)
    first = run(cell, grad_accum_steps=grad_accum_steps)
    for stage in (2, 3):
        results = run(replace(cell, stage=stage), grad_accum_steps=grad_accum_steps)
        assert [r["losses"] for r in results] == [r["losses"] for r in first]
        assert [r["norms"] for r in results] == [r["norms"] for r in first]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(2, 2, precision="bf16", model="gpt"),
        Cell(3, 3, precision="fp16", frozen=True),
        slow(Cell(1, 3, accum="shard", clip=True)),
        slow(Cell(3, 4, 2, "full")),
    ],
    ids=str,
)
def test_optimizer_state_is_whole_and_the_same(cell):
    truth = expected(cell)["state"]
    for result in run(cell, with_state=True):
        assert result["state"].keys() == truth.keys()
        for key, entries in truth.items():
            for name, value in entries.items():
                other = result["state"][key][name]
                assert torch.equal(other.reshape(value.shape), value), (key, name)


# fp64 against plain PyTorch on the whole batch


def train_fp64(stage, shard_size, accumulate, n_accum, tied):
    mesh = Mesh(device="cpu")
    model = fp64_model(mesh.rank, tied)
    options = {"zero_stage": stage, "shard_size": shard_size, "accumulate": accumulate}
    parallelize(
        model,
        mesh,
        Parallel.of(
            **options,
            grad_accum_steps=n_accum if accumulate == "full" else 1,
            bucket_mb=0.02,
            first_bucket_mb=0.005,
        ),
    )
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for step in range(STEPS):
        for j in range(n_accum):
            x, y, _ = micro_batch(step, j * mesh.dp_size + mesh.dp_rank)
            (model(x, y) / n_accum).backward()
        optimizer.step()
        optimizer.zero_grad()
    with engine_of(model).gathered():
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def fp64_model(seed, tied=False):
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = Module("none", tied=False)
    model.to_empty(device="cpu").double()
    if tied:
        model.head.weight = model.wte.weight
    model.forward = functools.partial(fp64_forward, model)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.5 if p.dim() == 1 else 0.0, 0.1, generator=generator)
    return model


def fp64_forward(model, idx, targets, rng_key=None):
    x = model.wte(idx) + model.wpe.weight[: idx.shape[1]]
    for block in model.blocks:
        x = block(x)
    logits = model.head(model.ln_f(x)).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.flatten())


@functools.lru_cache
def plain_fp64(n, tied):
    """The whole batch at once, torch's AdamW.

    Clipping is not compared here: fastpar's factor is fp32. eps: the exact gradient of a key bias
    is 0, what rounding leaves of it must not become movement.
    """
    model = fp64_model(0, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for step in range(STEPS):
        x, y = (torch.cat(t) for t in zip(*(micro_batch(step, i)[:2] for i in range(n))))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


FP64_LAYOUTS = [(0, 3, None), (1, 2, None), (2, 3, None), (3, 4, None), (3, 4, 2)]


@covering(
    1,
    (("stage", "world_size", "shard_size"), FP64_LAYOUTS),
    (("n_accum", "accumulate"), [(1, "shard"), (4, "shard"), (4, "full")]),
    ("tied", [False, True]),
)
def test_fp64_is_plain_pytorch(stage, world_size, shard_size, n_accum, accumulate, tied):
    truth = plain_fp64(world_size * n_accum, tied)
    fn = functools.partial(train_fp64, stage, shard_size, accumulate, n_accum, tied)
    for result in run_ranks(fn, world_size):
        for name, p in truth.items():
            assert (result[name] - p).abs().max().item() <= 1e-12, name


# Processes


@pytest.mark.parametrize(
    ("cell", "transport"),
    [
        slow(Cell(1, 2, accum="full", precision="bf16", model="gpt", clip=True), "torch"),
        (Cell(3, 2, precision="fp16", model="untied", deterministic=False), "shm"),
        slow(Cell(2, 4, accum="shard", clip=True, checkpoint="non-reentrant"), "shm"),
        slow(Cell(2, 4, accum="shard", precision="bf16", deterministic=False), "torch"),
        slow(Cell(3, 4, 2, "shard", model="gpt", clip=True), "torch"),
    ],
    ids=str,
)
def test_processes(cell, transport):
    assert_same_run(cell, run(cell, backend="gloo", transport=transport))


def test_no_sync_and_plain_loops_can_be_mixed():
    """Micro-batches 0 and 1 stay local in odd steps."""
    first = run_ranks(functools.partial(train_mixed, 1, None), 4)
    for stage, shard_size in [(2, None), (3, None), (3, 2)]:
        assert run_ranks(functools.partial(train_mixed, stage, shard_size), 4) == first
    for result, other in zip(run_ranks(functools.partial(train_mixed, 0, None), 4), first):
        assert result == pytest.approx(other, abs=1e-12)  # DDP's order of sums


def train_mixed(stage, shard_size):
    mesh = Mesh(device="cpu")
    model = fp64_model(mesh.rank)
    parallelize(
        model, mesh, Parallel.of(zero_stage=stage, shard_size=shard_size, first_bucket_mb=0.01)
    )
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    losses = []
    for step in range(4):
        for j in range(3):
            local = step % 2 and j < 2
            with engine_of(model).no_sync() if local else contextlib.nullcontext():
                x, y, _ = micro_batch(step, j * 4 + mesh.dp_rank)
                loss = model(x, y)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
