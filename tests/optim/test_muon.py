"""Muon against its formulas in fp64, against torch's, and the same bits at every layout."""

import copy
import math

import pytest
import torch
from cells import covering, sweep
from torch import nn

import fastpar
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.comm.mesh import Mesh
from fastpar.kernels.orthogonalize import POLAR_EXPRESS, QUINTIC
from fastpar.kernels.reference import orthogonalize_ref
from fastpar.optim.muon import assign
from fastpar.sharding.placements import Placement, Replicate, Shard
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 4e-3, "first_bucket_mb": 1e-3}  # several buckets
STATES = {
    "qkv": Shard(0, groups=3),
    "proj": Shard(1),
    "wide": Shard(0, pad_to=4),  # 10 rows: padded at tp=2
    "tall": Replicate(),
    "table": Shard(0),
    "bias": Replicate(),
}
SHAPES = {
    "qkv": (48, 16), "proj": (16, 32), "wide": (10, 40), "tall": (40, 6), "table": (8, 30),
    "bias": (33,),
}  # fmt: skip


class Bag(nn.Module):
    """Each parameter gets the gradient that forward is told, also where tp splits it."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))
        self.tp = None

    def tensor_parallel(self, tp):
        self.tp = tp
        return STATES

    def forward(self, grads):
        total = torch.zeros((), dtype=self.bias.dtype)
        for name, p in self.named_parameters():
            if name in grads:
                grad = grads[name]
                if self.tp is not None:
                    placement = Placement({"tp": STATES[name]}, {"tp": self.tp.size})
                    grad = placement.cut(grad, {"tp": self.tp.rank})
                total = total + (p * grad.to(p.dtype)).sum()
        return total


def gradients(step, rank=0):
    """The gradients of one rank: sixteenths, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {n: torch.randint(-64, 65, s, generator=generator) / 16 for n, s in SHAPES.items()}


def groups(model, **options):
    return [
        {"params": [model.qkv], "matrices": 3, **options},
        {"params": [model.proj, model.wide], **options},
        {"params": [model.tall], "transposed": True, "row_beta": 0.9, **options},
        {"params": [model.table, model.bias], "adamw": True},
    ]


def muon(model, **options):
    dtype = model.bias.dtype
    masters = {"master_weights": True} if dtype == torch.bfloat16 else {}
    return fastpar.Muon(groups(model), lr=0.05, **{**masters, "max_grad_norm": 3.0, **options})


def train(model, optimizer, steps, ranks=4, mesh=None):
    """`ranks` data-parallel parts of each step, of which this rank computes its share."""
    data = 1 if mesh is None else mesh.dp_size
    first = 0 if mesh is None else mesh.dp_rank * (ranks // data)
    for step in steps:
        for rank in range(first, first + ranks // data):
            (model(gradients(step, rank)) / (ranks // data)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, dict):
            assert_same(got[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(got[key], value), key


def alone(dtype=torch.float32, steps=range(4), **options):
    model = Bag(dtype)
    optimizer = muon(model, **options)
    train(model, optimizer, steps)
    return model, optimizer


@covering(
    1,
    ("stage", [0, 1, 2, 3]),
    (("dp", "tp"), [(2, 1), (4, 1), (1, 2), (2, 2)]),
    ("dtype", [torch.float32, torch.bfloat16, torch.float64]),
    ("options", [{}, {"cautious": True, "row_beta": 0.9}, {"momentum_dtype": torch.bfloat16}]),
)
def test_the_bits_of_one_process(stage, dp, tp, dtype, options):
    def one():
        mesh = Mesh(dp, tp)
        model = fastpar.parallelize(
            Bag(dtype), mesh, fastpar.Parallel.of(zero_stage=stage, **SMALL)
        )
        optimizer = muon(model, **options)
        train(model, optimizer, range(4), mesh=mesh)
        return model.state_dict(), optimizer.state_dict()

    model, optimizer = alone(dtype, **options)
    for state, saved in run_ranks(one, dp * tp):
        assert_same(state, model.state_dict())
        assert_same(saved["state"], optimizer.state_dict()["state"])


@sweep("stage", [0, 1, 2, 3])
def test_three_ranks_are_one_process_in_fp64(stage):
    """Whose third is no power of two: sums are rounded otherwise. eps is above what cancels."""
    smooth = {"adamw": {"eps": 1e-3}}

    def one():
        mesh = Mesh(3)
        model = fastpar.parallelize(
            Bag(torch.float64), mesh, fastpar.Parallel.of(zero_stage=stage, **SMALL)
        )
        optimizer = muon(model, **smooth)
        train(model, optimizer, range(4), ranks=6, mesh=mesh)
        return model.state_dict()

    model = Bag(torch.float64)
    train(model, muon(model, **smooth), range(4), ranks=6)
    for state in run_ranks(one, 3):
        for name, w in model.state_dict().items():
            torch.testing.assert_close(state[name], w, rtol=1e-12, atol=1e-14)


def test_copies_of_shards():
    def one():
        mesh = Mesh(4)
        model = fastpar.parallelize(
            Bag(), mesh, fastpar.Parallel.of(zero_stage=3, shard_size=2, **SMALL)
        )
        optimizer = muon(model)
        train(model, optimizer, range(4), mesh=mesh)
        return model.state_dict()

    for state in run_ranks(one, 4):
        assert_same(state, alone()[0].state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("coefficients", [None, QUINTIC[0]])
def test_the_formulas(dtype, coefficients):
    """In fp64, with every option of one matrix; fp32 within what orthogonalize may err."""
    lr, decay, momentum, beta = 0.05, 0.3, 0.9, 0.8
    p = nn.Parameter(torch.randn(12, 20, dtype=torch.float64).to(dtype))
    w = p.detach().double().clone()
    options = {"row_beta": beta, "cautious": True, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = fastpar.Muon(
        [p], lr, decay, momentum, ns_coefficients=coefficients, matrices=2, **options
    )
    steps = (coefficients,) * 5 if coefficients else POLAR_EXPRESS
    buffer, squares = torch.zeros_like(w), torch.zeros(12, dtype=torch.float64)
    for _ in range(4):
        p.grad = torch.randn(12, 20, dtype=torch.float64).to(dtype)
        optimizer.step()
        grad = p.grad.double()
        buffer = momentum * buffer + (1 - momentum) * grad
        moved = momentum * buffer + (1 - momentum) * grad
        halves = [orthogonalize_ref(x, coefficients=steps) for x in moved.chunk(2)]
        o = torch.cat(halves)
        squares = beta * squares + (1 - beta) * o.square().mean(1)
        scaled = [x / s.sqrt()[:, None] for x, s in zip(halves, squares.chunk(2))]
        o = torch.cat([x * h.norm() / x.norm() for x, h in zip(scaled, halves)])
        w = w - lr * decay * w * (o * w > 0) - lr * 0.2 * math.sqrt(20) * o
    bound = 1e-10 if dtype == torch.float64 else 2e-3
    assert (p.double() - w).abs().max() <= bound
    state = optimizer.state[p]
    torch.testing.assert_close(state["momentum_buffer"].double(), buffer, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["row_second_moment"].double(), squares, rtol=0, atol=bound)


@pytest.mark.parametrize("nesterov", [True, False])
def test_torchs_muon_and_its_state_dict_both_ways(nesterov):
    """torch's products are in bf16, so one step may differ by that; the state is exact."""
    ours = nn.Linear(24, 40, bias=False)
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.02, "nesterov": nesterov}
    a = fastpar.Muon(ours.parameters(), ns_coefficients=QUINTIC[0], **options)
    b = torch.optim.Muon(theirs.parameters(), **options)
    for _ in range(3):
        grad = torch.randn(40, 24)
        for layer, optimizer in ((ours, a), (theirs, b)):
            layer.weight.grad = grad.clone()
            optimizer.step()
    # Three updates of norm sqrt(24 * 40 / 24), each in bf16 (2^-8), amplified by the slopes.
    assert (ours.weight - theirs.weight).norm() <= 3 * 0.02 * 40**0.5 * 2**-4
    for mine, other in ((a, b), (b, a)):
        mine.load_state_dict(other.state_dict())
    kept = [o.state[w]["momentum_buffer"] for o, w in ((a, ours.weight), (b, theirs.weight))]
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6)
    a.step()


def test_goes_on_from_a_saved_state_at_another_layout():
    def begin():
        mesh = Mesh(2, 2)
        model = fastpar.parallelize(
            Bag(torch.bfloat16), mesh, fastpar.Parallel.of(zero_stage=3, **SMALL)
        )
        optimizer = muon(model)
        train(model, optimizer, range(2), mesh=mesh)
        return model.state_dict(), optimizer.state_dict()

    weights, saved = run_ranks(begin, 4)[0]

    def go_on():
        mesh = Mesh(4)
        model = fastpar.parallelize(
            Bag(torch.bfloat16), mesh, fastpar.Parallel.of(zero_stage=1, **SMALL)
        )
        model.load_state_dict(weights)
        optimizer = muon(model)
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(2, 4), mesh=mesh)
        return model.state_dict()

    want = alone(torch.bfloat16)[0].state_dict()
    for state in run_ranks(go_on, 4):
        assert_same(state, want)


def test_an_overflow_is_skipped_on_every_rank():
    def one():
        mesh = Mesh(2)
        model = fastpar.parallelize(Bag(), mesh, fastpar.Parallel.of(zero_stage=2, **SMALL))
        optimizer = muon(model)
        optimizer.grad_scale = 1.0
        train(model, optimizer, range(1), mesh=mesh)
        before = model.state_dict()
        grads = gradients(1, mesh.rank)
        if mesh.rank:
            grads["qkv"][3, 4] = math.inf
        model(grads).backward()
        optimizer.step()
        assert optimizer.skipped
        assert_same(model.state_dict(), before)

    run_ranks(one, 2)


@sweep("row_beta", [None, 0.9])
def test_zero_gradients_only_decay(row_beta):
    p = nn.Parameter(torch.randn(6, 5))
    before = p.detach().clone()
    optimizer = fastpar.Muon([p], lr=0.1, weight_decay=0.5, row_beta=row_beta)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before * 0.95)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_lost_alone(value):
    """As torch's, and on all ranks; with q, k and v in one parameter, that one of them."""

    def one():
        mesh = Mesh(2)
        model = fastpar.parallelize(Bag(), mesh, fastpar.Parallel.of(zero_stage=2, **SMALL))
        optimizer = muon(model, max_grad_norm=None)
        grads = gradients(0, mesh.rank)
        grads["qkv"] = grads["qkv"].clone()
        grads["qkv"][20, 3] = value if mesh.rank else 0.0
        model(grads).backward()
        optimizer.step()
        return model.state_dict()

    for state in run_ranks(one, 2):
        lost = {name: ~w.isfinite() for name, w in state.items() if not w.isfinite().all()}
        assert lost.keys() == {"qkv"}
        assert [part.all().item() for part in lost["qkv"].chunk(3)] == [False, True, False]
        assert [part.any().item() for part in lost["qkv"].chunk(3)] == [False, True, False]
    theirs = nn.Parameter(torch.randn(16, 16))
    theirs.grad = torch.randn(16, 16)
    theirs.grad[4, 3] = value
    torch.optim.Muon([theirs]).step()
    assert theirs.isnan().all()


def test_homes_are_balanced():
    costs = [9, 1, 1, 5, 5, 4, 3, 2]
    places = assign(costs, 3)
    assert sorted(sum(c for c, r in zip(costs, places) if r == rank) for rank in range(3)) == [
        *(10, 10, 10)
    ]
    assert assign([1.0], 4) == [0]


def test_muon_groups():
    config = fastpar.GPTConfig(2, 4, 16, block_size=8, vocab_size=37)
    model = fastpar.GPT(config)
    found = fastpar.muon_groups(model)
    assert sum(len(group["params"]) for group in found) == len(list(model.parameters()))
    names = {p: name for name, p in model.named_parameters()}
    by_kind = {
        (g.get("adamw", False), g.get("matrices")): {names[p] for p in g["params"]} for g in found
    }
    assert by_kind[False, 3] == {f"h.{i}.attn.c_attn.weight" for i in range(2)}
    assert {n.split(".", 2)[2] for n in by_kind[False, 1]} == {
        "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
    }  # fmt: skip
    assert {"wte.weight", "wpe.weight"} == {names[p] for p in found[0]["params"]}
    with pytest.raises(ValueError, match="linear layers in a list of blocks, got Linear without"):
        fastpar.muon_groups(nn.Linear(3, 3))


def test_groups_of_a_model_whose_tp_ranks_have_slices():
    def one():
        config = fastpar.GPTConfig(2, 4, 16, block_size=8, vocab_size=37)
        model = fastpar.parallelize(fastpar.GPT(config), Mesh(tp=2))
        return [
            [len(g["params"]), g.get("matrices"), g.get("adamw")]
            for g in fastpar.muon_groups(model)
        ]

    alone = fastpar.muon_groups(fastpar.GPT(fastpar.GPTConfig(2, 4, 16, 8, 37)))
    expected = [[len(g["params"]), g.get("matrices"), g.get("adamw")] for g in alone]
    assert run_ranks(one, 2) == [expected] * 2


MATRIX, VECTOR = torch.zeros(6, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([MATRIX, VECTOR], {}, r"\[M, N\], got parameter 1 of its group of shape=\[4\]; put it in"),
        ([torch.zeros(2, 2, 2)], {}, r"shape=\[2, 2, 2\]; .* adamw=True, or take fastpar.muon_gr"),
        (
            [MATRIX],
            {"matrices": 4},
            r"outputs of parameter 0 .*=\[6, 4\], got matrices=4",
        ),
        ([MATRIX], {"ns_steps": 6}, "1 <= ns_steps <= 5, got ns_steps=6; 5 steps will do"),
        ([MATRIX], {"adjust_lr_fn": "x"}, "'match_rms_adamw', got adjust_lr_fn='x'"),
        ([MATRIX], {"momentum": 1.0}, "0.0 <= momentum < 1.0, got momentum=1.0"),
        ([MATRIX], {"row_beta": -0.1}, "0.0 <= row_beta < 1.0, got row_beta=-0.1"),
        ([MATRIX], {"momentum_dtype": torch.float16}, "got momentum_dtype=torch.float16"),
        ([MATRIX.bfloat16()], {}, "master_weights=True"),
    ],
)
def test_bad_options(params, options, message):
    with pytest.raises(ValueError, match=message):
        fastpar.Muon([nn.Parameter(p) for p in params], **options)


def test_a_wrong_parameter_is_named():
    named = [("h.0.weight", nn.Parameter(MATRIX)), ("h.0.bias", nn.Parameter(VECTOR))]
    with pytest.raises(ValueError, match=r"got 'h.0.bias' of shape=\[4\]; put it into a group"):
        fastpar.Muon(named)


def test_another_optimizers_state_is_refused():
    p = nn.Parameter(MATRIX.clone())
    p.grad = torch.ones_like(p)
    other = fastpar.AdamW([p])
    other.step()
    with pytest.raises(
        ValueError, match=r"expected momentum_buffer for parameter 0 of group 0, go"
    ):
        fastpar.Muon([p]).load_state_dict(other.state_dict())


def test_a_checkpoint_goes_on_at_another_layout_bit_for_bit(tmp_path):
    config = fastpar.GPTConfig(2, 5, 40, block_size=16, vocab_size=61, dropout=0.0)

    def build(dp, tp, stage):
        mesh = Mesh(dp, tp)
        torch.manual_seed(0)
        model = fastpar.GPT(config)
        fastpar.parallelize(
            model, mesh, fastpar.Parallel.of(zero_stage=stage, deterministic=True, **SMALL)
        )
        options = {"row_beta": 0.9, "cautious": True, "max_grad_norm": 1.0}
        return mesh, model, fastpar.Muon(fastpar.muon_groups(model), lr=0.02, **options)

    def steps(mesh, model, optimizer, numbers):
        for step in numbers:
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(61, (4, 17), generator=generator).chunk(mesh.dp_size)[mesh.dp_rank]
            model(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin():
        mesh, model, optimizer = build(2, 2, 3)  # three heads and two of five, padded
        steps(mesh, model, optimizer, range(3))
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3)
        steps(mesh, model, optimizer, range(3, 5))
        return model.state_dict()

    def go_on(stage):
        mesh, model, optimizer = build(2, 2, stage)
        load_checkpoint(tmp_path / "latest", model=model, optimizer=optimizer)
        steps(mesh, model, optimizer, range(3, 5))
        return model.state_dict()

    want = run_ranks(begin, 4)[0]
    for stage in (0, 1):
        assert_same(run_ranks(lambda stage=stage: go_on(stage), 4)[0], want)


def test_a_copy_takes_more_groups():
    p = nn.Parameter(MATRIX.clone())
    twin = copy.deepcopy(fastpar.Muon([p], lr=0.3))
    twin.add_param_group({"params": [nn.Parameter(MATRIX.clone())]})
    assert [group["lr"] for group in twin.param_groups] == [0.3, 0.3]
