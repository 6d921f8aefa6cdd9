"""The predicted memory of a step against the measured one, and against figures of published work.

States are compared to the byte. Nine in ten peaks are predicted within 5 %, and none more than 10 %
too low. Every pair of settings is somewhere in the slow rows; what `make test` runs has each axis
once.
"""

from functools import partial
from itertools import combinations, product
from unittest import mock

import pytest
import torch
from cells import few, slow
from memory_cells import (
    BLOCKS,
    SHAPES,
    measure,
    measure_alive,
    measure_all,
    measure_first_rank,
    mesh_of,
    setup,
    workload,
)

from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import Mesh
from fastpar.engine.debug import Debug
from fastpar.kernels.linear import fp8 as linear_fp8
from fastpar.kernels.linear.fp8 import Codes, Fp8
from fastpar.models import set_up
from fastpar.predict.measure import ShortRun
from fastpar.predict.memory import host_bytes, predict_memory, predict_states
from fastpar.settings.mesh import parse_grid
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks


def rank_states(one, s):
    """Bytes of weights, gradients and the optimizer's state of this rank; those on its host."""
    debug = Debug(bus_gb_s=5.0) if s.parallel.offload.what else Debug()
    make = partial(set_up.parallelize, debug=debug)
    with mock.patch.object(set_up, "parallelize", make):
        run = ShortRun(one, s, mesh_of(s))
        run.step()
    run.engine.shards.settle()
    held = run.engine.memory()
    states = [x for state in run.optimizer.state.values() for x in state.values()]
    state = sum(x.nbytes for x in states if torch.is_tensor(x) and x.dim())
    # At stage 3 the units that the next forward begins with may be whole.
    weights = held.get("parameter shards", 0) + (held["parameters"] if s.stage < 3 else 0)
    grads = held.get("gradients", 0) + held.get("gradient shards", 0)
    host = held.get("host weights", 0) + held.get("host gradients", 0)
    return (
        (weights, grads, 0, host + state)
        if s.parallel.offload.what
        else (weights, grads, state, host)
    )


STATES = [
    {"world_size": 1, "dtype": "bf16"},
    *({"world_size": 2, "zero_stage": stage, "dtype": "bf16"} for stage in range(4)),
    *({"world_size": 2, "zero_stage": stage, "optimizer": "muon"} for stage in (1, 3)),
    {"world_size": 4, "zero_stage": 2, "shard_size": 2},
    {"world_size": 4, "zero_stage": 3, "tp": 2},
    {"world_size": 2, "tp_grid": "2x1"},
    {"world_size": 8, "tp_grid": "2x2", "zero_stage": 3},
    {"world_size": 4, "ep": 2, "zero_stage": 1},
    *(
        {"world_size": 1 + stage // 3, "zero_stage": stage, "offload": mode, "dtype": "bf16"}
        for mode, stage in (("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("parameters", 3))
    ),
]
MORE_STATES = [
    *({"world_size": 2, "zero_stage": stage, "optimizer": "muon"} for stage in (0, 2)),
    *({"world_size": 4, "tp": tp, "zero_stage": s} for tp, s in ((2, 1), (4, 0), (2, 2))),
    *(
        {"world_size": ranks * (1 + (stage > 0)), "tp_grid": grid, "zero_stage": stage}
        for grid, ranks, stage in (("1x2", 2, 0), ("2x1", 2, 2), ("4x2", 8, 3), ("2x2x2", 8, 1))
    ),
    *({"world_size": 4, "ep": ep, "zero_stage": s} for ep, s in ((2, 0), (2, 2), (4, 1), (4, 3))),
]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [STATES, slow(MORE_STATES)], ids=["each axis", "more"])
def test_states_are_those_of_real_engines(rows):
    """On average over the ranks. Pieces of buckets end at multiples of 256 elements, of which a
    bucket of 0.2 MB has 52,400: at most 0.5 % of it is padding."""
    for settings in rows:
        s = setup(micro_batch_size=8 if "tp_grid" in settings else 1, bucket_mb=0.2, **settings)
        experts = {"n_expert": 4, "top_k": 4, "expert_hidden": 256} if s.mesh.ep > 1 else {}
        rows_of_step = s.dp * s.micro_batch_size
        one = workload(n_layer=2, tokens=8, batch=rows_of_step, **experts)
        found = zip(*run_ranks(rank_states, s.world_size, one, s))
        p = predict_states(one, s)
        on_host = host_bytes(one, s) if s.parallel.offload.what else 0
        for of_ranks, told in zip(found, (p.parameters, p.gradients, p.optimizer, on_host)):
            mean = sum(of_ranks) / len(of_ranks)
            assert mean == pytest.approx(told, rel=5e-3), settings
            assert max(of_ranks) <= 1.03 * told, settings


def of_row(shape, ranks, stage, tp, mode, micro_batch, dtype, steps, sp=True, **more):
    """What is trained, and how; sp: sequence_parallel, where tp is 2."""
    how = {"activation_checkpointing": mode, "micro_batch_size": micro_batch, "dtype": dtype}
    how |= {"zero_stage": stage, "tp": tp, "sequence_parallel": sp, "grad_accum_steps": steps}
    return workload(**SHAPES[shape]), setup(world_size=ranks, **how, **more)


LAYOUTS = [(1, 0, 1, True), *((2, stage, 1, True) for stage in range(4)), (2, 0, 2, True)]
LAYOUTS += [(2, 0, 2, False)]  # ranks, stage, tp, sequence parallel
MODES = ("none", "selective", "full")
PAIRS = few(
    product(("balanced", "deep", "wide"), LAYOUTS, MODES, (1, 8), ("fp32", "bf16"), (1, 2)),
    lambda cell: set(combinations(enumerate(cell), 2)),
)


def of_muon(ranks, stage, tp, layers, shard_size):
    """So few tokens that the update is the peak, where gradients are whole."""
    how = {"zero_stage": stage, "tp": tp, "optimizer": "muon", "shard_size": shard_size}
    one = workload(n_layer=layers, width=128, tokens=8, batch=ranks // tp, vocab=256)
    return one, setup(world_size=ranks, **how)


MUON = [of_muon(*x) for x in ((2, 0, 1, 4, None), (3, 2, 1, 5, None), (2, 0, 2, 3, None))]
MUON.append(of_muon(4, 3, 1, 2, 2))


def assert_close(cells, predicted, measured, near=0.9):
    """No prediction is off by more than 10 %, and of ten at most one by more than 5 %; near 1: no
    one. Of ten in bf16 only with bf16 instructions: without, oneDNN copies a product's result to
    fp32 (2 MB of 32), which a prediction for any CPU does not count."""
    errors = [told / peak - 1 for told, peak in zip(predicted, measured, strict=True)]
    exact = torch.cpu._is_avx512_bf16_supported()
    for error, (_, s) in zip(errors, cells, strict=True):
        assert abs(error) <= (0.05 if near == 1 else 0.1), (error, s.in_effect())
    rows = zip(errors, cells, strict=True)
    far = sum(abs(error) > 0.05 for error, (_, s) in rows if exact or s.dtype != "bf16")
    assert far <= max(1, round((1 - near) * len(cells))), sorted(errors)


def check(cells, measured=None, near=0.9):
    """Measured by ranks that are processes, which cells of a size share."""
    predicted, peaks_of = [], []
    for ranks in sorted({s.world_size for _, s in cells}):
        some = [cell for cell in cells if cell[1].world_size == ranks]
        if measured is None:
            peaks = run_ranks(measure_all, ranks, some, backend="gloo", timeout_s=900)
            found = [max(of_ranks) for of_ranks in zip(*peaks, strict=True)]
        else:
            found = [measured(*cell) for cell in some]
        predicted += [predict_memory(one, s).total for one, s in some]
        peaks_of += found
    order = sorted(cells, key=lambda cell: cell[1].world_size)
    assert_close(order, predicted, peaks_of, near)


# "pairs", and what the runtime can also be asked for. Adafactor's update needs more than backward
# where activations are few; cp 3 pads 4 heads to 6; where experts are not chosen equally often, the
# fullest rank of ep needs more.
KINDS = {
    "pairs": [of_row(shape, *at[:3], *rest, at[3]) for shape, at, *rest in PAIRS],
    "special": [
        of_row("balanced", 2, 2, 1, "none", 2, "fp32", 1, bucket_mb=1.0),
        of_row("wide", 2, 2, 1, "none", 2, "fp32", 2, accumulate="full"),
        of_row("deep", 2, 1, 1, "none", 1, "fp32", 3, accumulate="shard"),
        of_row("split", 2, 0, 1, "none", 4, "fp32", 1),
        of_row("split", 2, 3, 1, "full", 4, "bf16", 2, bucket_mb=1.0),
        of_row("balanced", 1, 0, 1, "none", 4, "bf16", 1, moment_dtype="int8"),
        of_row("balanced", 1, 0, 1, "none", 4, "bf16", 1, master_weights="remainder"),
    ],
    "adafactor": [
        of_row(shape, ranks, 0, 1, mode, 1, dtype, 1, optimizer="adafactor", **more)
        for shape, ranks, mode, dtype, more in (
            ("wide", 1, "none", "fp32", {}),
            ("wide", 2, "full", "bf16", {"master_weights": "remainder"}),
            ("balanced", 2, "full", "bf16", {"grad_dtype": "bf16", "reduce_dtype": "bf16"}),
        )
    ],
    "sequences": [
        of_row("long", 2, 0, 1, "none", 1, "fp32", 1, cp=2, cp_method="heads"),
        of_row("wide", 2, 2, 1, "full", 2, "bf16", 2, cp=2, cp_method="heads"),
        of_row("long", 3, 0, 1, "none", 1, "fp32", 1, cp=3, cp_method="heads"),
        of_row("wide", 2, 2, 1, "full", 2, "bf16", 2, cp=2, cp_method="keys"),
        of_row("long", 4, 0, 2, "none", 1, "fp32", 1, cp=2, cp_method="keys"),
    ],
    "experts": [
        of_row("experts", 2, 0, 1, "none", 4, "fp32", 1, ep=2),
        of_row("experts", 2, 1, 1, "selective", 4, "bf16", 1, ep=2),
        of_row("experts", 4, 3, 1, "selective", 4, "bf16", 1, ep=2),
        of_row("experts", 4, 0, 2, "full", 8, "fp32", 1, ep=2),
        of_row("mixed", 2, 0, 2, "full", 8, "fp32", 1),
        of_row("experts", 4, 2, 1, "full", 1, "fp32", 1, ep=2, optimizer="muon"),
    ],
    "four_ranks": [
        of_row("balanced", 4, 3, 1, "none", 4, "fp32", 1, shard_size=2),
        of_row("deep", 4, 2, 2, "none", 4, "fp32", 1),
        of_row("wide", 4, 3, 2, "selective", 4, "fp32", 1),
    ],
    "muon": MUON,
}
SOME = [
    of_row("wide", 2, 3, 1, "selective", 1, "fp32", 1),
    of_row("balanced", 2, 0, 1, "full", 1, "fp32", 1, cp=2, cp_method="keys"),
    KINDS["experts"][0],
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cells", [SOME, *map(slow, KINDS.values())], ids=["some", *KINDS])
def test_peaks_are_predicted(cells):
    check(cells)


TODAYS = few(  # at tp 4 two ranks share a head of keys
    product(BLOCKS, [*LAYOUTS, (4, 0, 4, True)], MODES, (1, 8), ("fp32", "bf16"), (1, 2)),
    lambda cell: set(combinations(enumerate(cell), 2)),
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_peaks_of_todays_blocks_are_predicted():
    rows = [(shape, *at[:3], *rest, at[3]) for shape, at, *rest in TODAYS]
    check([of_row(*row) for row in rows], near=1)


GRIDS = [
    cell
    for cell in product(
        ("balanced", "deep", "wide", "short"), ("1x2", "2x1", "2x2", "2x2x2"), range(4),
        MODES, ("fp32", "bf16"), (1, 2),
    )
    if cell[5] == 1 or cell[0] != "short"
]  # fmt: skip
GRID_PAIRS = few(GRIDS, lambda cell: set(combinations(enumerate(cell), 2)))
FEW_GRIDS = few(GRIDS, lambda cell: set(enumerate(cell)))


def of_grid(shape, grid, stage, mode, dtype, steps):
    """On two such grids where a stage shares out anything."""
    dp = 1 + (stage > 0)
    ranks = dp * torch.Size(parse_grid(grid)).numel()
    how = {"activation_checkpointing": mode, "micro_batch_size": 8, "grad_accum_steps": steps}
    s = setup(world_size=ranks, tp_grid=grid, zero_stage=stage, dtype=dtype, **how)
    return workload(**SHAPES[shape], batch=8 * dp * steps), s


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("grids", [FEW_GRIDS, GRID_PAIRS], ids=["few", "pairs"])
def test_peaks_of_grids_are_predicted(grids):
    """Of the first rank, alone; all ranks of a few as processes, where forward keeps what it
    sends: of all else a thread of the transport can be the last to let go, which StepMemory does
    not see."""
    check([of_grid(*cell) for cell in grids], measure_first_rank, near=0.75)
    if grids is GRID_PAIRS:
        check([of_grid("balanced", "1x2", 0, "none", "fp32", 1)])
        check([of_grid("deep", "2x2", 0, "selective", "fp32", 1)])


# Products in 8-bit floats: what a GPU's casts and products allocate is what they leave; on a CPU
# emulation has temporaries of its own. So here they leave codes and outputs of zeros, and
# everything around them is real.
def rounded_rows(x, form, group):
    n, k = x.shape
    return Codes(torch.zeros(n, k, dtype=form), torch.ones(n, -(-k // group)), group)


def rounded(x, form, scale, flip=False):
    n, k = x.shape
    flipped = torch.zeros(k, n, dtype=form) if flip else None
    found = torch.zeros(2, dtype=torch.float64)
    return Codes(torch.zeros(n, k, dtype=form), scale, flipped=flipped), found


def of_zeros(how, a, b, bias, like, own, product=Fp8._product):
    if a.scales is None or b.scales is None:  # the first step of delayed scales
        return product(how, a, b, bias, like, own)
    return like.new_zeros(len(a.codes), len(b.codes))


FP8 = list(
    product(
        ("balanced", "deep", "wide"), ("mlp", "all"), ("row", "block", "tensor"), ("none", "full"),
        ("fp32", "bf16"),
    )
)  # fmt: skip
FP8_PAIRS = few(FP8, lambda cell: set(combinations(enumerate(cell), 2)))
ROW, TENSOR = ("mlp", "row", "none", "fp32"), ("all", "tensor", "full", "bf16")
FEW_FP8 = [("balanced", *ROW), ("balanced", *TENSOR)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kinds", [FEW_FP8, FP8_PAIRS], ids=["few", "pairs"])
def test_peaks_of_8_bit_products_are_predicted(kinds, monkeypatch):
    monkeypatch.setattr(linear_fp8, "round_rows", rounded_rows)
    monkeypatch.setattr(linear_fp8, "round_all", rounded)
    monkeypatch.setattr(Fp8, "_product", of_zeros)
    found = []
    for shape, layers, scaling, mode, dtype in kinds:
        how = {"fp8": layers, "fp8_scaling": scaling, "fp8_emulate": True, "micro_batch_size": 8}
        s = setup(activation_checkpointing=mode, dtype=dtype, **how)
        found.append((workload(**SHAPES[shape], batch=8), s))
    check(found, lambda one, s: measure(one, s, Mesh(device="cpu")))


MICRO_BATCHES = {"micro_batch_size": 2, "grad_accum_steps": 8}
PIPELINES = [
    # ranks, stage, schedule, vocabulary, dropout, recomputation, experts
    (2, 0, "1f1b", 4096, 0.0),
    (2, 0, "interleaved", 512, 0.1),
    (2, 0, "gpipe", 4096, 0.0),
    (2, 0, "interleaved", 4096, 0.0, "full"),
    (2, 0, "1f1b", 4096, 0.1, "selective"),
    (4, 0, "interleaved", 512, 0.1),
    (4, 3, "1f1b", 4096, 0.0),
    (4, 1, "interleaved", 512, 0.0),
    (4, 2, "1f1b", 512, 0.0, "full"),
    (4, 3, "interleaved", 512, 0.0),
]


def of_pipeline(ranks, stage, schedule, vocab, dropout, mode="none"):
    pp, chunks = ranks // 2 if stage else ranks, 1 + (schedule == "interleaved")
    how = {"schedule": schedule, "chunks": chunks, "activation_checkpointing": mode}
    s = setup(world_size=ranks, pp=pp, zero_stage=stage, **MICRO_BATCHES, **how)
    return workload(n_layer=8, vocab=vocab, dropout=dropout, batch=16 * ranks // pp), s


def of_experts_in_stages(shape, ep):
    s = setup(world_size=2 * ep, ep=ep, pp=2, **MICRO_BATCHES)
    return workload(**SHAPES[shape], batch=16 * ep), s


STAGES = [of_pipeline(*row) for row in PIPELINES]
STAGES += [of_experts_in_stages(*row) for row in (("experts", 2), ("mixed", 1))]


def measure_stages(cells):
    return [measure_alive(*cell) for cell in cells]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_stages_are_predicted():
    ranks_of, told, measured = [], [], []
    for ranks in sorted({s.world_size for _, s in STAGES}):
        some = [cell for cell in STAGES if cell[1].world_size == ranks]
        peaks = run_ranks(measure_stages, ranks, some, backend="gloo", timeout_s=900)
        for (one, s), *of_ranks in zip(some, *peaks, strict=True):
            each = ranks // s.mesh.pp
            found = [max(of_ranks[i * each : (i + 1) * each]) for i in range(s.mesh.pp)]
            told += [predict_memory(one, s, stage).total for stage in range(s.mesh.pp)]
            measured += found
            ranks_of += [(one, s)] * s.mesh.pp
    assert_close(ranks_of, told, measured)


GPUS = [
    ("gpt2", "none", 8), ("gpt2", "selective", 1), ("gpt2-medium", "none", 4),
    ("gpt2-large", "full", 4), ("gpt2-xl", "none", 2), ("gpt2-xl", "full", 8),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mode", "micro_batch"), GPUS)
def test_predicted_within_ten_percent_of_a_gpus_allocator(name, mode, micro_batch):
    s = Setup(activation_checkpointing=mode, micro_batch_size=micro_batch)  # bf16, fp32 masters
    one = Workload(GPTConfig.preset(name), micro_batch)
    predicted = predict_memory(one, s)
    assert predicted.total == pytest.approx(measure(one, s, Mesh()), rel=0.1), str(predicted)


def test_the_example_of_the_zero_paper():
    """7.5 billion parameters on 64 GPUs, 2 + 2 + 12 bytes (arXiv 1910.02054, figure 1)."""
    one = Workload(GPTConfig(36, 32, 4096, block_size=1024, vocab_size=60_000), 64)
    assert one.n_parameters == pytest.approx(7.5e9, rel=0.005)
    for stage, published_gb in enumerate((120, 31.4, 16.6, 1.9)):
        s = Setup(world_size=64, zero_stage=stage, grad_dtype="bf16", reduce_dtype="bf16")
        assert predict_states(one, s).total == pytest.approx(published_gb * 1e9, rel=0.015), stage
