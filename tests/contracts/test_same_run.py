"""Same answer: every layout of every program is the run of one process.

Rows are made by covering_array(): together they have every pair of values of two settings that
parallelize() does not refuse. `make test` runs one array of each family, `make test-slow` others.
"""

import functools
import itertools

import pytest
import torch
from cells import few, slow
from same_run import (
    OVERFLOW_STEP,
    STEPS,
    Layout,
    Loop,
    Program,
    _expected,
    assert_same_bits,
    assert_same_run,
    bounds,
    build,
    covering,
    covering_array,
    error,
    expected,
    of_row,
    parallel_model,
    passes,
    refused,
    run,
    same_numbers,
    same_run,
    train,
    values_of,
    whole_state,
)
from test_memory import assert_a_part, materialized

from fastpar.engine.engine import engine_of
from fastpar.optim.muon import Muon, muon_groups
from fastpar.testing import run_ranks

STAGES = (0, 1, 2, 3)
BOTH = (False, True)
RECOMPUTE = ("none", "full", "selective")
HOST = (None, "optimizer", "parameters")
FAMILIES = {
    # Compared bit for bit.
    "data": {
        "dp": (1, 2, 3, 4), "stage": STAGES, "shard_size": (None, 2),
        "accum": ("shard_1", "shard_2", "shard_4", "full_2", "full_4", "no_sync_2", "local_4"),
        "deterministic": BOTH, "model": ("gpt", "foreign", "foreign tied", *Program.BLOCKS),
        "precision": ("fp32", "bf16", "fp16"), "recompute": RECOMPUTE, "clip": BOTH, "frozen": BOTH,
        # 0.015 MiB: less than any rank keeps.
        "dropout": BOTH, "offload": HOST, "keep_mb": (0.0, 0.015),
        "buckets": ((0.015, 0.003), (1e-6, 1e-6), (0.005, 0.03), (None, 1.0)),
        "prefetch": (1, 0, 3), "units": (None, "layers", "blocks"), "watched": BOTH,
        "wire": (None, *Layout.WIRES), "inference": BOTH, "resumed": BOTH,
    },
    "split": {
        "tp": (1, 2, 4), "grid": (None, "1x2", "2x1", "2x2", "2x2x2"), "cp": (1, 2, 3),
        "method": ("heads", "keys"), "pp": (1, 2), "schedule": ("1f1b", "gpipe", "interleaved"),
        "dp": (1, 2, 4), "stage": STAGES, "shard_size": (None, 2), "sequence": (None, True, False),
        "accum": ("shard_1", "shard_2", "full_2", "no_sync_2", "local_2"), "deterministic": BOTH,
        "model": ("gpt", "foreign", "foreign tied", *Program.BLOCKS), "precision": ("fp32", "fp64"),
        "recompute": RECOMPUTE, "clip": BOTH, "dropout": BOTH, "documents": BOTH, "counted": BOTH,
        "loss": ("all", "some", "logits"),
        "n_head": (4, 5),  # a tp that does not divide them pads them
        "time": (6, 5), "offload": HOST, "wire": (None, "gradients", "weights"), "inference": BOTH,
        "resumed": BOTH,
    },
    "experts": {
        "ep": (1, 2, 4), "dp": (1, 2, 4), "stage": STAGES, "shard_size": (None, 2), "tp": (1, 2),
        "sequence": (None, True, False), "cp": (1, 2), "method": ("heads", "keys"), "pp": (1, 2),
        "accum": ("shard_1", "shard_2", "full_2"), "deterministic": BOTH,
        "model": tuple(Program.EXPERTS), "precision": ("fp64",), "time": (8,),
        "recompute": RECOMPUTE, "clip": BOTH, "counted": (True, False),
        "optimizer": ("adamw", "muon"), "offload": HOST,
    },
}  # fmt: skip
FIRST_SEED = {"experts": 3}  # 12 default rows; of the first seeds the fewest
PAIRED = {  # axes that default rows have together
    "split": set(itertools.combinations(("dp", "tp", "grid", "cp", "pp"), 2)),
    "experts": {*itertools.combinations(("dp", "tp", "cp", "ep"), 2), ("ep", "pp")},
}
AT_EVERY_STAGE = ("dp", "accum", "precision", "deterministic", "offload", "wire", "resumed")


def effort(row):
    """About its time. The reference has fp64, whose dropout torch computes op by op, and whose
    attention takes documents one by one."""
    layout, program = row
    return layout.ranks * (layout.micro + 2) + (6 + 20 * program.documents) * program.dropout


@functools.cache
def rows(family):
    """`make test` runs those that together have every value, every pair of PAIRED axes, each loss
    on each axis, and where data alone is split some settings at every stage: each value, of accum
    each kind."""
    axes = ("dp", "tp", "grid", "cp", "ep", "pp")
    beside = AT_EVERY_STAGE if family == "data" else ()

    def groups(row):
        values = {**vars(row[0]), **vars(row[1])}
        items = {item for item in values.items() if item[0] in FAMILIES[family]}
        on = [n for n in axes if values[n] not in (None, 1)]
        items |= PAIRED.get(family, set()).intersection(itertools.combinations(on, 2))
        items |= {(n, "loss", values["loss"]) for n in on if family == "split"}
        kinds = {**values, "accum": row[0].accum.rsplit("_", 1)[0]}
        return items | {(name, kinds[name], values["stage"]) for name in beside}

    seed = FIRST_SEED.get(family, 0)
    near, found = (covering(FAMILIES[family], seed, most) for most in (2, 4))
    quick = few([*near, *found], groups, effort)
    return [
        pytest.param(*row, id=f"{row[0]}|{row[1]}", marks=[pytest.mark.slow] * (row not in quick))
        for row in dict.fromkeys([*quick, *found])
    ]


def pytest_generate_tests(metafunc):
    """The arrays take a second, and ranks that are processes import this file, too."""
    if metafunc.function is test_same_run:
        metafunc.parametrize(("layout", "program"), [r for f in FAMILIES for r in rows(f)])


def test_same_run(layout, program):
    same_run(layout, program)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_more_arrays(family, part):
    for layout, program in covering(FAMILIES[family], seed=1)[part::4]:
        try:
            same_run(layout, program)
        except Exception as error:
            raise AssertionError(f"{layout}|{program}: {error}") from error


def test_an_array_has_every_pair_that_is_not_refused():
    values = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3), "d": (0, 1)}

    def never(row):
        return (row["a"], row["b"]) == (2, 0) or (row["c"], row["d"]) == (3, 0)

    array = covering_array(values, never)
    assert not any(map(never, array))
    items = [(name, v) for name, of in values.items() for v in of]
    found = {pair for row in array for pair in itertools.combinations(row.items(), 2)}
    wanted = {p for p in itertools.combinations(items, 2) if p[0][0] != p[1][0]}
    assert wanted - found == {(("a", 2), ("b", 0)), (("c", 3), ("d", 0))}
    assert len(array) <= 16
    for family in FAMILIES.values():  # each value is in a row
        array = covering_array(family, lambda row: refused(*of_row(row)))
        found = set().union(*(row.items() for row in array))
        assert found == {(name, v) for name, of in family.items() for v in of}
    default = [row.values[0] for row in rows("experts") if not row.marks]
    assert any(layout.ep > 1 and layout.pp > 1 for layout in default)


# What families leave alone
def told_row(row):
    return "-".join(f"{k}={v}" for k, v in row.items())


MORE = [
    {"tp": 2, "dp": 2, "stage": 3, "sequence": True, "precision": "fp16", "dropout": True},
    {"tp": 4, "sequence": True, "vocab_size": 100},  # 128 rows a rank: three have padding only
    {"tp": 4, "sequence": True, "model": "qwen3", "dp": 2, "stage": 3, "resumed": True}  # two ranks
    | {"clip": True, "dropout": True},  # share a head of keys
    {"grid": "2x2", "dp": 2, "stage": 2, "precision": "bf16", "clip": True},
    {"tp": 4, "sequence": True, "dp": 2, "stage": 2, "time": 7, "clip": True, "n_head": 5},
    {"tp": 3, "sequence": True, "dp": 2, "stage": 3, "n_head": 3, "time": 7, "dropout": True},
    {"pp": 2, "dp": 2, "stage": 2, "accum": "full_2", "precision": "bf16", "deterministic": True},
    {"ep": 2, "dp": 2, "pp": 2, "accum": "full_2", "model": "balance"}  # experts' mean losses
    | {"precision": "fp64", "time": 8},
]
MORE_SLOW = [
    *(
        {"tp": tp, "dp": 8 // tp, "sequence": True, "stage": stage, "time": time, "dropout": True}
        for tp, stage, time in ((4, 2, 1), (2, 3, 5), (4, 3, 11), (2, 1, 7), (2, 2, 11), (4, 1, 3))
    ),
    *(
        {"tp": 2, "sequence": sequence, "precision": precision, "model": model, "dropout": True}
        | {"stage": stage, "dp": 2, "clip": stage % 2 > 0}
        for sequence, stage in ((True, 3), (False, 1), (True, 0))
        for precision in ("fp16", "bf16")
        for model in ("gpt", "foreign")
    ),
    {"tp": 4, "sequence": True, "precision": "fp16", "n_head": 5},
    {"tp": 3, "sequence": False, "n_head": 6, "dp": 2, "stage": 1, "clip": True},
    {"tp": 2, "sequence": True, "n_head": 25, "clip": True},  # GPT-2 XL's heads
    {"tp": 4, "sequence": True, "n_head": 25, "stage": 3, "dropout": True},
    {"tp": 2, "dp": 2, "sequence": False, "stage": 3, "vocab_size": 100},
    {"tp": 2, "dp": 2, "sequence": True, "stage": 2, "vocab_size": 129},
    {"grid": "2x2", "vocab_size": 300},
    {"grid": "4x1", "stage": 1, "dropout": True},
    {"grid": "1x4", "stage": 1, "dropout": True},
    {"grid": "1x2x2", "accum": "no_sync_2", "stage": 1},
    {"grid": "2x1x2", "stage": 3, "shard_size": 2, "dp": 2},
    {"grid": "2x2", "stage": 1, "precision": "fp16"},
    {"cp": 4, "n_head": 4, "time": 5, "dropout": True},
    {"cp": 4, "method": "keys", "pp": 2, "stage": 1, "accum": "full_2"},
    {"cp": 5, "method": "keys", "time": 6},
    {"pp": 3, "accum": "full_4", "deterministic": True, "clip": True},
    {"pp": 4, "accum": "full_4", "deterministic": True, "dp": 2, "stage": 2},
    {"dp": 8, "stage": 2, "shard_size": 4, "deterministic": True},
    {"dp": 8, "stage": 3, "shard_size": 2, "deterministic": True},
]


@pytest.mark.parametrize(
    ("layout", "program"),
    [pytest.param(*of_row(row), id=told_row(row)) for row in MORE]
    + [pytest.param(*of_row(row), id=told_row(row), marks=pytest.mark.slow) for row in MORE_SLOW],
)
def test_odd_sizes_and_formats(layout, program):
    same_run(layout, program)


PROCESSES = {
    2: [
        ({"dp": 2, "stage": 3, "precision": "fp16", "model": "foreign"}, "shm"),
        ({"tp": 2, "sequence": True, "dropout": True, "clip": True}, "torch"),
        ({"cp": 2, "method": "keys", "documents": True, "dropout": True}, "torch"),
        ({"ep": 2, "dp": 2, "stage": 3, "model": "capacity", "precision": "fp64"}, "auto"),
        ({"pp": 2, "accum": "full_2", "precision": "fp64"}, "auto"),
    ],
    4: [
        ({"dp": 4, "stage": 2, "accum": "shard_2", "deterministic": True, "clip": True}, "shm"),
        ({"dp": 4, "stage": 3, "shard_size": 2, "precision": "bf16", "accum": "full_2"}, "torch"),
        ({"tp": 2, "sequence": False, "dp": 2, "stage": 2, "dropout": True}, "shm"),
        ({"tp": 2, "sequence": True, "cp": 2, "dropout": True, "method": "keys"}, "torch"),
        ({"tp": 4, "sequence": True, "model": "foreign", "dropout": True}, "shm"),
        ({"ep": 2, "dp": 4, "stage": 2, "model": "bias", "precision": "fp64"}, "auto"),
        ({"grid": "2x2", "stage": 1, "dropout": True}, "auto"),
    ],
}


def train_each(rows):
    return materialized(), *(train(*of_row(r), {"transport": where}) for r, where in rows)


@pytest.mark.parametrize("n_ranks", [2, slow(4)])
def test_processes(n_ranks):
    rows = PROCESSES[n_ranks]
    peaks, *results = zip(*run_ranks(train_each, n_ranks, rows, backend="gloo", timeout_s=200.0))
    assert_a_part(peaks)
    for (row, _), of_ranks in zip(rows, results, strict=True):
        assert_same_run(*of_row(row), list(of_ranks))


# The references, without which cells could agree on nothing
def test_the_reference_trains_clips_overflows_and_draws_masks():
    layout, program = Layout(dp=4, accum="shard_2"), Program(precision="fp16")
    truth, clipped, dropped = (
        expected(layout, Program(precision="fp16", **more))
        for more in ({}, {"clip": True}, {"dropout": True})
    )
    first, last = (sum(truth["losses"][step, i] for i in range(8)) for step in (0, STEPS - 1))
    assert last < first - 8 * 0.03
    assert min(truth["norms"][:OVERFLOW_STEP]) > 0.5  # twice the limit
    assert not torch.tensor(truth["norms"][OVERFLOW_STEP]).isfinite()
    scales = truth["scales"]
    assert scales[OVERFLOW_STEP + 1] == scales[OVERFLOW_STEP] / 2
    assert scales[OVERFLOW_STEP] == 2 * scales[0]
    for name, p in truth["parameters"].items():
        for other in (truth["start"][name], clipped["parameters"][name]):
            assert (p - other).abs().max() > 0.005 * p.abs().max(), name
        assert not torch.equal(p, dropped["parameters"][name]), name
    assert same_numbers(truth["norms"], expected(layout, program)["norms"])


def test_the_reference_sees_the_order_of_sums():
    """Bits tell pairwise from sequential, and ranks first from micro-batches first."""
    cuts = [
        Layout(dp=3, stage=1, accum=accum, deterministic=deterministic)
        for accum in ("shard_4", "full_4")
        for deterministic in (True, False)
    ]
    for a, b in itertools.combinations(cuts, 2):
        p, q = (expected(c, Program())["parameters"]["wte.weight"] for c in (a, b))
        assert not torch.equal(p, q), (str(a), str(b))


@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
def test_the_promised_deterministic_orders_are_one_tree(precision):
    """The families show that the engine keeps them. (Not of fp16: dividing the loss by the
    accumulation is not exact in its subnormal numbers.)"""
    program = Program(precision=precision, dropout=True, clip=True)
    cuts = [(1, "shard_8"), (2, "shard_4"), (4, "shard_2"), (8, "shard_1"), (1, "full_8")]
    cuts += [(2, "full_4"), (4, "full_2"), (2, "no_sync_4"), (4, "local_2")]
    whole, *others = (
        expected(Layout(dp=dp, accum=accum, deterministic=True), program) for dp, accum in cuts
    )
    for other in others:
        for name, p in whole["parameters"].items():
            assert torch.equal(p, other["parameters"][name]), name
        assert same_numbers(whole["norms"], other["norms"])


def test_masks_and_samples_follow_the_global_index():
    """1 x 8 samples are 2 x 4 and 8 x 1: the same terms in other sums."""
    program = Program(precision="fp64", dropout=True)
    truth = values_of(program, expected(Layout(tp=2), program))
    for n in (2, 8):
        other = values_of(program, expected(Layout(tp=2, accum=f"full_{n}"), program))
        for key, value in truth.items():
            assert (value - other[key]).abs().max() <= 1e-12 * value.abs().max() + 1e-16, key


@pytest.mark.parametrize(
    ("precision", "at_most"), [("fp32", 1e-3), ("fp16", 0.1), slow("bf16", 0.5)]
)
def test_one_lost_sample_is_far_outside_of_the_bound(monkeypatch, precision, at_most):
    """And no bound is near a wrong factor."""
    layout, program = Layout(tp=2, accum="full_4"), Program(precision=precision)
    truth = expected(layout, program)
    exact, limits = values_of(program, truth), bounds(layout.micro_batches, program)
    for key, bound in limits.items():
        assert 0 < bound < at_most * exact[key].abs().max(), key
    given = Loop.given

    def lost(self, step, index):
        return given(self, step, index - (step == 0 and index == 3))

    monkeypatch.setattr(Loop, "given", lost)
    other = values_of(program, _expected.__wrapped__(Layout(accum="full_4"), program, True))
    off = {key: error(other[key], value, precision) for key, value in exact.items()}
    assert sum(off[key] > limits[key] for key in limits if key[0] == "parameter") > 10


def test_backward_passes_that_were_not_announced():
    """step() reduces what waits for number grad_accum_steps; every one from there on is reduced, in
    an order of sums that no layout has: the stages have to agree on it."""
    program = Program(clip=True)
    for stage in STAGES:
        same_run(Layout(dp=2, stage=stage, accum="full_2"), program, grad_accum_steps=7)
    for number in (1, 2):
        first, *others = (
            run(Layout(dp=2, stage=stage, accum="full_3"), program, grad_accum_steps=number)[0]
            for stage in (1, 2, 3)
        )
        for other in others:
            assert_same_bits(other, first, f"grad_accum_steps={number}")


@pytest.mark.parametrize("row", [{"dp": 4, "stage": 3}, {"tp": 2, "sequence": True, "dp": 2}])
def test_models_from_the_meta_device(row):
    same_run(*of_row({**row, "n_head": 5, "precision": "fp64"}), meta=True)


def test_an_overflow_on_one_rank_skips_everywhere():
    """In a slice, in a part of a sum, or in what all have: only tp rank 1 of dp rank 1 sees it."""
    names = ("h.1.mlp.c_fc.weight", "h.0.ln_1.weight", "h.1.mlp.c_proj.bias")
    for name, (stage, sequence) in zip(names, ((0, True), (2, False), (3, True)), strict=True):
        layout = Layout(tp=2, dp=2, stage=stage, sequence=sequence)
        for skipped, unchanged, norm in run_ranks(overflow, 4, layout, name):
            assert (skipped, unchanged) == ([True, False], [True, False])
            assert not norm[0] < float("inf")
            assert 0 < norm[1] < float("inf")


def overflow(layout, name):
    program = Program(clip=True)
    model = parallel_model(layout, program, {}, 0)
    loop, rank = Loop(program, layout, model, model), engine_of(model).mesh.rank
    loop.scale = loop.optimizer.grad_scale = 8.0
    factors = [float("inf") if rank == 3 else 1.0, 1.0]
    dict(model.named_parameters())[name].register_hook(lambda grad: grad * factors[0])
    skipped, unchanged = [], []
    for step in range(2):
        before = whole_state(model)
        passes(loop, step)
        loop.step()
        skipped.append(loop.optimizer.skipped)
        unchanged.append(all(torch.equal(p, before[n]) for n, p in model.state_dict().items()))
        del factors[0]
    return skipped, unchanged, loop.norms


def test_padding_stays_zero():
    """Weights behind the last of 5 heads and of 300 tokens; rows are multiples of 128 a rank."""
    layout, program = Layout(tp=4), Program(precision="fp64", n_head=5, vocab_size=300)

    def one():
        model = parallel_model(layout, program, {}, 0)
        loop, mesh = Loop(program, layout, model, model), engine_of(model).mesh
        for step in range(2):
            passes(loop, step)
            loop.step()
        qkv, proj = (model.get_parameter(f"h.0.attn.{n}.weight") for n in ("c_attn", "c_proj"))
        heads = min(2, max(0, 5 - 2 * mesh.tp_rank))
        behind = qkv.unflatten(0, (3, 8))[:, 4 * heads :], proj[:, 4 * heads :]
        assert [x.numel() for x in behind] == [3 * 4 * (2 - heads) * 20, 20 * 4 * (2 - heads)]
        wte = model.wte.weight
        assert wte.shape[0] == 128
        behind += (wte[max(0, 300 - mesh.tp_rank * 128) :],)
        assert not any(x.any() for x in behind)

    run_ranks(one, 4)


def test_muon_has_a_matrix_for_each_expert():
    """Each is orthogonal by itself, and the router is AdamW's."""
    model = build(Program("balance"), 3)
    groups = muon_groups(model)
    adamw = {id(p) for g in groups if g.get("adamw") for p in g["params"]}
    assert id(model.h[0].mlp.router.weight) in adamw
    optimizer, weight = Muon(groups, lr=1.0, weight_decay=0.0), model.h[0].mlp.c_fc.weight
    before = weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for moved in (before - weight.detach()) / 2:  # sqrt(64 / 16), of each expert
        s = torch.linalg.svdvals(moved)
        assert s.min() > 0.8
        assert s.max() < 1.2
