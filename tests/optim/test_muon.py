"""Muon against its formulas in fp64, against torch's, and the same bits at every layout."""

import copy
import math

import pytest
import torch
from cells import covering, sweep
from optimizers import BF16, FP32, FP64, assert_same
from test_optim_sharded import SMALL, Bag
from test_optim_sharded import gradients as gradients_of
from torch import nn

import fastpar
from fastpar import Mesh
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.kernels.orthogonalize import POLAR_EXPRESS, QUINTIC
from fastpar.kernels.reference import orthogonalize_ref
from fastpar.optim import muon as muon_module
from fastpar.optim.muon import assign
from fastpar.sharding.placements import Replicate, Shard
from fastpar.testing import run_ranks

# shape and how tp splits it
PARTS = {
    "qkv": ((48, 16), Shard(0, groups=3)),
    "proj": ((16, 32), Shard(1)),
    "wide": ((10, 40), Shard(0, pad_to=4)),  # 10 rows: padded at tp=2
    "tall": ((40, 6), Replicate()),
    "table": ((8, 30), Shard(0)),
    "bias": ((33,), Replicate()),
}
SHAPES = {name: shape for name, (shape, _) in PARTS.items()}


def bag(dtype=FP32):
    return Bag(dtype, shapes=SHAPES, states={name: state for name, (_, state) in PARTS.items()})


def gradients(step, rank=0):
    return gradients_of(step, rank, SHAPES)


def muon(model, **options):
    masters = {"master_weights": True} if model.bias.dtype == BF16 else {}
    groups = [
        {"params": [model.qkv], "matrices": 3},
        {"params": [model.proj, model.wide]},
        {"params": [model.tall], "transposed": True},
        {"params": [model.table, model.bias], "adamw": True},
    ]
    return fastpar.Muon(groups, lr=0.05, **{**masters, "max_grad_norm": 3.0, **options})


def split(dp=1, tp=1, stage=0, dtype=FP32, **options):
    mesh = Mesh(dp, tp)
    shards = 2 if dp == 4 and stage else None  # four share out over two
    asked = fastpar.Parallel.of(zero_stage=stage, shard_size=shards, **SMALL)
    model = fastpar.parallelize(bag(dtype), mesh, asked)
    return model, muon(model, **options), mesh


def train(model, optimizer, mesh=None, steps=range(4), ranks=4):
    """`ranks` data-parallel parts of each step, of which this rank computes its share."""
    data = 1 if mesh is None else mesh.dp_size
    first = 0 if mesh is None else mesh.dp_rank * (ranks // data)
    for step in steps:
        for rank in range(first, first + ranks // data):
            (model(gradients(step, rank)) / (ranks // data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def alone(dtype=FP32, ranks=4, **options):
    model = bag(dtype)
    return train(model, muon(model, **options), ranks=ranks)


PATHS = [  # dp, tp, stage; from tp to none and back
    ((2, 2, 3), (4, 1, 1)),
    ((4, 1, 2), (2, 2, 0)),
    ((1, 2, 0), (2, 1, 3)),
    ((2, 1, 1), (2, 2, 2)),
]


@covering(
    1,
    ("path", PATHS),
    ("dtype", [FP32, BF16, FP64]),
    ("options", [{}, {"nesterov": False}]),
    ("way", ["state dict", "checkpoint"]),
)
def test_the_bits_of_one_process_also_where_another_layout_goes_on(
    path, dtype, options, way, tmp_path
):
    def half(place, saved, steps):
        model, optimizer, mesh = split(*place, dtype, **options)
        held = {"model": model, "optimizer": optimizer}
        if saved and way == "checkpoint" and dtype != FP64:  # which no checkpoint has
            load_checkpoint(tmp_path / "latest", **held)
        elif saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        found = train(model, optimizer, mesh, steps)
        if way == "checkpoint" and dtype != FP64 and not saved:
            save_checkpoint(tmp_path, step=2, **held)
        return found

    saved, (want, state) = None, alone(dtype, **options)
    for place, steps in zip(path, (range(2), range(2, 4))):
        found = run_ranks(half, place[0] * place[1], place, saved, steps)
        saved = found[0]
    for weights, moments in found:
        assert_same(weights, want)
        assert_same(moments["state"], state["state"])


@sweep("stage", [0, 3])
def test_three_ranks_are_one_process_in_fp64(stage):
    """Whose third is no power of two: sums are rounded otherwise. eps is above what cancels."""
    smooth = {"adamw": {"eps": 1e-3}}
    want = alone(FP64, ranks=6, **smooth)[0]
    for weights, _ in run_ranks(lambda: train(*split(3, 1, stage, FP64, **smooth), ranks=6), 3):
        for name, w in want.items():
            torch.testing.assert_close(weights[name], w, rtol=1e-12, atol=1e-14)


def test_matrices_that_a_gpu_takes_together_step_as_one_by_one(monkeypatch):
    """On a CPU their products are single ones: the same bits."""

    def all_at_once(items, of):
        return iter([list(items)])

    for dp, dtype in ((None, FP32), (None, BF16), (1, FP32)):
        made = []
        for how in (muon_module._some, all_at_once):
            monkeypatch.setattr(muon_module, "_some", how)
            made.append(alone(dtype) if dp is None else train(*split(dp, dtype=dtype)))
        (weights, state), (found, of_found) = made
        assert_same(found, weights)
        assert_same(of_found["state"], state["state"])


@pytest.mark.parametrize("dtype", [FP64, FP32])
@pytest.mark.parametrize("coefficients", [None, QUINTIC[0]])
def test_the_formulas(dtype, coefficients):
    lr, decay, momentum = 0.05, 0.3, 0.9
    p = nn.Parameter(torch.randn(12, 20, dtype=FP64).to(dtype))
    w = p.detach().double().clone()
    options = {"matrices": 2, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = fastpar.Muon([p], lr, decay, momentum, ns_coefficients=coefficients, **options)
    steps = (coefficients,) * 5 if coefficients else POLAR_EXPRESS
    buffer = torch.zeros_like(w)
    for _ in range(4):
        p.grad = torch.randn(12, 20, dtype=FP64).to(dtype)
        optimizer.step()
        grad = p.grad.double()
        buffer = momentum * buffer + (1 - momentum) * grad
        moved = momentum * buffer + (1 - momentum) * grad
        o = torch.cat([orthogonalize_ref(x, coefficients=steps) for x in moved.chunk(2)])
        w = w - lr * decay * w - lr * 0.2 * math.sqrt(20) * o
    bound = 1e-10 if dtype == FP64 else 2e-3
    assert (p.double() - w).abs().max() <= bound
    state = optimizer.state[p]
    torch.testing.assert_close(state["momentum_buffer"].double(), buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_torchs_muon_and_its_state_dict_both_ways(nesterov):
    """torch's products are in bf16, so one step may differ by that; the state is exact."""
    ours, theirs = (nn.Parameter(torch.ones(40, 24)) for _ in range(2))
    options = {"lr": 0.02, "nesterov": nesterov}
    a = fastpar.Muon([ours], ns_coefficients=QUINTIC[0], **options)
    b = torch.optim.Muon([theirs], **options)
    for _ in range(3):
        ours.grad = torch.randn(40, 24)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    # Three updates of norm sqrt(24 * 40 / 24), each in bf16 (2^-8), amplified by the slopes.
    assert (ours - theirs).norm() <= 3 * 0.02 * 40**0.5 * 2**-4
    for mine, other in ((a, b), (b, a)):
        mine.load_state_dict(other.state_dict())
    kept = [o.state[w]["momentum_buffer"] for o, w in ((a, ours), (b, theirs))]
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6)
    a.step()


def test_zero_gradients_only_decay_and_a_copy_takes_more_groups():
    p = nn.Parameter(torch.randn(6, 5))
    before = p.detach().clone()
    optimizer = fastpar.Muon([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before * 0.95)
    twin = copy.deepcopy(optimizer)
    twin.add_param_group({"params": [nn.Parameter(torch.zeros(6, 4))]})
    assert [group["lr"] for group in twin.param_groups] == [0.1, 0.1]


@sweep("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_lost_alone(value):
    """Of q, k and v in one parameter one is lost; under a loss scale all ranks skip the step."""

    def one(scale):
        model, optimizer, mesh = split(2, 1, 2, max_grad_norm=None)
        if scale:
            optimizer.grad_scale = scale
        before = model.state_dict()
        grads = gradients(0, mesh.rank)
        grads["qkv"][20, 3] = value if mesh.rank else 0.0
        model(grads).backward()
        optimizer.step()
        return before, model.state_dict(), optimizer.skipped

    for before, state, skipped in run_ranks(one, 2, 1.0):
        assert skipped
        assert_same(state, before)
    for _, state, _ in run_ranks(one, 2, None):
        lost = {name: ~w.isfinite() for name, w in state.items() if not w.isfinite().all()}
        assert lost.keys() == {"qkv"}
        for every in (torch.all, torch.any):
            assert [every(part).item() for part in lost["qkv"].chunk(3)] == [False, True, False]


def test_muon_groups():
    """Also of a model whose tp ranks have slices; who orthogonalizes what is balanced."""
    costs = [9, 1, 1, 5, 5, 4, 3, 2]
    places = assign(costs, 3)
    assert [sum(c for c, r in zip(costs, places) if r == rank) for rank in range(3)] == [10] * 3

    def groups(mesh=None):
        model = fastpar.GPT(fastpar.GPTConfig(2, 4, 16, block_size=8, vocab_size=37))
        if mesh is not None:
            fastpar.parallelize(model, mesh)
        names = {p: name for name, p in model.named_parameters()}
        found = fastpar.muon_groups(model)
        return [({names[p] for p in g["params"]}, g.get("matrices"), g.get("adamw")) for g in found]

    found = groups()
    assert sum(len(names) for names, *_ in found) == 2 + 2 * 12 + 2
    assert found[0] == ({"wte.weight", "wpe.weight"}, None, True)
    kinds = {(adamw or False, matrices): names for names, matrices, adamw in found}
    assert kinds[False, 3] == {f"h.{i}.attn.c_attn.weight" for i in range(2)}
    others = ("attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    assert kinds[False, 1] == {f"h.{i}.{name}" for i in range(2) for name in others}
    with pytest.raises(ValueError, match="Linear has no linear layers in a list of blocks; make"):
        fastpar.muon_groups(nn.Linear(3, 3))
    assert run_ranks(lambda: groups(Mesh(tp=2)), 2) == [found] * 2
