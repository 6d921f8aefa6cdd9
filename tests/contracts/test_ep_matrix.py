"""The matrix of experts: every layout is the run of a dense oracle, in deterministic mode bit for
bit that of one process.

[Note: the reference] dense_experts.py: every expert computes every token of the whole global batch,
and a mask chooses. fp64 runs must be within 1e-12 of the largest element of each tensor; runs in
deterministic mode must have the bits of one process with the same micro-batches.

The logits are spread wide, so that rounding changes nobody's choice.
"""

import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from cells import few, slow
from dense_experts import step

import fastpar
from fastpar.engine.debug import Debug
from fastpar.engine.pipeline_step import pipeline_step
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

STEPS, MICRO, ROWS, T, V = 3, 4, 2, 8, 41  # MICRO micro-batches a step, over all ranks


@dataclass(frozen=True)
class Cell:
    """One layout. accum: backward passes a step and rank; shard or full says what they do."""

    ep: int
    dp: int = 1
    stage: int = 0
    accum: str = "full"
    tp: int = 1
    pp: int = 1
    recompute: str = "none"
    kind: str = "balance"
    deterministic: bool = False
    precision: str = "fp64"
    optimizer: str = "adamw"
    shard_size: int | None = None
    n_embd: int = 16
    cp: int = 1
    method: str = "heads"
    offload: str | None = None

    KINDS: ClassVar = {
        "balance": {"balance_loss": 0.5, "router_z_loss": 0.02},
        "bias": {"balance_loss": 0.0, "balance_rate": 0.05, "expert_every": 2},
        "capacity": {"balance_loss": 0.5, "balance_rate": 0.01, "expert_capacity": 0.8},
        "Switch": {"top_k": 1, "balance_loss": 0.5},
        "all": {"top_k": 4},
    }

    def __str__(self):
        return "-".join(f"{name}={value}" for name, value in vars(self).items())

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp * self.cp

    @property
    def config(self):
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": self.n_embd, "block_size": T, "vocab_size": V}
        return GPTConfig(**sizes, dropout=0.0, n_expert=4, **self.KINDS[self.kind])


@functools.cache
def batches():
    generator = torch.Generator().manual_seed(5)

    def one(i):
        idx, targets = torch.randint(0, V, (2, ROWS, T), generator=generator)
        targets[0, : i % 3] = -100
        return idx, targets

    return [[one(i) for i in range(MICRO)] for _ in range(STEPS)]


def build(cell):
    model = GPT(cell.config, seed=3)
    model = model.to(torch.float64 if cell.precision == "fp64" else torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "router" in name:
                p *= 20 * (16 / cell.n_embd) ** 0.5
            if name.endswith("c_proj.bias") or name.endswith("c_fc.bias"):
                p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view(p.shape))
    return model


def optimizer_of(cell, model):
    if cell.optimizer == "muon":
        return fastpar.Muon(fastpar.muon_groups(model), lr=1e-2, max_grad_norm=0.5)
    return fastpar.AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=0.5)


def train(cell):
    """What a rank has after STEPS steps, and saw in between."""
    mesh = fastpar.Mesh(dp=cell.dp, ep=cell.ep, tp=cell.tp, pp=cell.pp, cp=cell.cp)
    model = build(cell)
    here = MICRO // mesh.dp_size
    fastpar.parallelize(
        model,
        mesh,
        fastpar.Parallel.of(
            zero_stage=cell.stage,
            shard_size=cell.shard_size,
            deterministic=cell.deterministic,
            accumulate=cell.accum,
            grad_accum_steps=here,
            cp_method=cell.method,
            offload=cell.offload,
        ),
        debug=Debug(bus_gb_s=12.0) if cell.offload else None,
    )
    recompute(model, cell.recompute)
    engine, opt = fastpar.engine_of(model), optimizer_of(cell, model)
    shards = engine.shards
    result = {"losses": [], "grads": [], "norms": [], "counts": []}
    for number, data in enumerate(batches()):
        total = torch.zeros((), dtype=torch.float64)
        full = cell.accum == "full" or cell.pp > 1
        mine = [
            data[mesh.dp_rank * here + j if full else j * mesh.dp_size + mesh.dp_rank]
            for j in range(here)
        ]
        engine.count_tokens(sum(int((y != -100).sum()) for _, y in mine))
        if cell.pp > 1:
            x, y = (torch.cat(t) for t in zip(*mine))
            total += pipeline_step(model, x, y, micro_batches=here, reduction="sum") / cell.pp
        else:
            for x, y in mine:
                loss = model(x, y, reduction="sum")
                loss.backward()
                total += loss.detach()
        if cell.pp == 1 and number % 2 == 0:
            tokens = sum(int((y != -100).sum()) for _, y in data) / mesh.dp_size
            found = engine.grads()
            grads = {shards.name_of(p): (g / tokens).clone() for p, g in found}
            result["grads"].append(grads)
        engine.contribute(total / cell.tp / cell.cp)
        opt.step()
        tokens = sum(int((y != -100).sum()) for _, y in data)
        result["losses"].append(float(engine.control.contributed[0]) / tokens)
        result["norms"].append(opt.grad_norm.clone())
        result["counts"].append(model.experts.last.clone())
        opt.zero_grad()
    if cell.pp == 1:
        result["parameters"] = {n: p.clone() for n, p in model.state_dict().items()}
    else:
        with engine.gathered():
            result["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


def run(cell, **options):
    return run_ranks(train, cell.ranks, cell, **options)


@functools.cache
def reference(cell):
    """One process, and the dense oracle beside it: the same losses, gradients and norms."""
    model = build(cell)
    fastpar.parallelize(model, fastpar.Mesh())
    opt, engine = optimizer_of(cell, model), fastpar.engine_of(model)
    result = {"losses": [], "grads": [], "norms": [], "counts": []}
    for data in batches():
        weights = {n: p.clone() for n, p in model.state_dict().items()}
        loss, grads, counts, dropped = step(weights, cell.config, data)
        for x, y in data:
            engine.count_tokens(int((y != -100).sum()))
            model(x, y, reduction="sum").backward()
        opt.step()
        opt.zero_grad()
        result["losses"].append(float(loss))
        result["grads"].append(grads)
        result["norms"].append(torch.stack([g.norm() for g in grads.values()]).norm())
        result["counts"].append((counts, dropped))
    result["parameters"] = {n: p.clone() for n, p in model.state_dict().items()}
    return result


def near(found, want, what):
    distance = (found - want).abs().max().item() if found.numel() else 0.0
    assert distance <= 1e-12 * max(1.0, want.abs().max().item()), (what, distance)


def assert_same_run(cell, results):
    """Every rank's losses, gradients, norms, counts and parameters are those of the oracle."""
    plain = Cell(ep=1, kind=cell.kind, optimizer=cell.optimizer, n_embd=cell.n_embd)
    want = reference(plain)
    E = cell.config.n_expert
    for result in results:
        for i in range(STEPS):
            near(torch.tensor(result["losses"][i]), torch.tensor(want["losses"][i]), "loss")
            torch.testing.assert_close(
                result["norms"][i].double(), want["norms"][i], rtol=1e-6, atol=0
            )
            counts, dropped = want["counts"][i]
            assert torch.equal(result["counts"][i][:, :E].long(), counts)
            assert int(result["counts"][i][:, 2 * E].sum()) == dropped
        for i, grads in enumerate(result["grads"]):
            assert grads.keys() == want["grads"][2 * i].keys()
            for name, grad in grads.items():
                near(grad, want["grads"][2 * i][name], f"{name} of step {2 * i}")
        for name, p in result["parameters"].items():
            if cell.pp > 1:
                continue  # a stage's; experts of one rank
            near(p, want["parameters"][name], name)


def assert_same_bits(result, expected):
    """Norms, counts and parameters."""
    assert all(map(torch.equal, result["norms"], expected["norms"]))
    for found, want in zip(result["counts"], expected["counts"]):
        assert torch.equal(found[:, :4], want[:, :4])
    for name, p in result["parameters"].items():
        assert torch.equal(p, expected["parameters"][name]), name


AXES = {
    "ep": (1, 2, 4),
    "dp": (1, 2, 4),
    "stage": (0, 1, 2, 3),
    "accum": ("full", "shard"),
    "tp": (1, 2),
    "pp": (1, 2),
    "recompute": ("none", "full", "selective"),
    "kind": tuple(Cell.KINDS),
}


@functools.cache
def all_cells():
    every = [Cell(**dict(zip(AXES, values))) for values in itertools.product(*AXES.values())]
    left = [c for c in every if c.dp % c.ep == 0 and c.ranks <= 8 and (c.pp == 1 or c.tp == 1)]
    random.Random(0).shuffle(left)
    quick = few(left[:600], pairs, lambda c: c.ranks**0.5)
    return [*quick, *(slow(c) for c in left[:160] if c not in quick)]


def pairs(cell):
    return set(itertools.combinations([(n, getattr(cell, n)) for n in AXES], 2))


@pytest.mark.parametrize("cell", all_cells(), ids=str)
def test_cell(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    ("cell", "transport"),
    [(Cell(2, 2, 3, "shard"), None), slow(Cell(2, 4, 2, tp=1), None), slow(Cell(2, 2, tp=2), None)],
    ids=str,
)
def test_processes(cell, transport):
    assert_same_run(cell, run(cell, backend="gloo"))


@pytest.mark.parametrize(
    "cell", [Cell(2, 4, 2, shard_size=2), slow(Cell(2, 4, 3, "shard", shard_size=2))], ids=str
)
def test_copies_of_shards(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(2, 2, 2, optimizer="muon"),
        slow(Cell(2, 4, 3, optimizer="muon")),
        slow(Cell(4, 4, 0, optimizer="muon")),
        slow(Cell(2, 2, 1, tp=2, optimizer="muon")),
    ],
    ids=str,
)
def test_muon_at_every_layout(cell):
    assert_same_run(cell, run(cell))


@pytest.mark.parametrize(
    "cell",
    [Cell(2, 4, 1, pp=2, kind="bias"), slow(Cell(2, 4, 3, "shard", pp=2, kind="bias"))],
    ids=str,
)
def test_a_stage_without_experts_makes_the_groups_of_the_others(cell):
    """Every other layer has experts: all of them are in one of two stages."""
    assert_same_run(cell, run(cell))


def test_muon_has_a_matrix_for_each_expert():
    """Each is orthogonal by itself, and the router is AdamW's."""
    model = build(Cell(1))
    groups = fastpar.muon_groups(model)
    adamw = {id(p) for g in groups if g.get("adamw") for p in g["params"]}
    assert id(model.h[0].mlp.router.weight) in adamw
    opt = fastpar.Muon(groups, lr=1.0, weight_decay=0.0)
    weight = model.h[0].mlp.c_fc.weight
    before = weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    for moved in (before - weight.detach()) / 2:  # sqrt(64 / 16), of each expert
        s = torch.linalg.svdvals(moved)
        assert s.min() > 0.8
        assert s.max() < 1.2


BITS = [
    Cell(2, 2, 0),
    Cell(2, 4, 3, "shard"),
    Cell(4, 4, 2, kind="capacity"),
    *(
        slow(Cell(ep, dp, stage, accum))
        for ep, dp in ((1, 4), (2, 2), (2, 4), (4, 4))
        for stage in (0, 1, 2, 3)
        for accum in ("full", "shard")
    ),
    slow(Cell(2, 2, 2, recompute="full", kind="bias")),
    slow(Cell(2, 2, 2, optimizer="muon")),
    slow(Cell(2, 4, 1, precision="fp32", n_embd=96)),
    slow(Cell(2, 4, 3, "shard", kind="Switch")),
]


@functools.cache
def one_process(cell):
    return run(replace(cell, ep=1, dp=1, stage=0, accum="full", recompute="none"))[0]


@pytest.mark.parametrize("cell", BITS, ids=str)
def test_deterministic_mode_has_the_bits_of_one_process(cell):
    cell = replace(cell, deterministic=True)
    for result in run(cell):
        assert_same_bits(result, one_process(cell))


def test_a_pipeline_has_them_too():
    cell = Cell(2, 2, 0, pp=2, deterministic=True)
    expected = one_process(replace(cell, pp=1))
    for result in run(cell):
        assert all(map(torch.equal, result["norms"], expected["norms"]))


SEQUENCES = [
    Cell(1, 1, 2, cp=2, kind="bias"),
    Cell(2, 2, 0, cp=2, method="keys"),
    slow(Cell(2, 2, 3, "shard", cp=2)),
    slow(Cell(2, 2, 1, tp=2, cp=2, method="keys", kind="Switch")),
    slow(Cell(1, 2, 3, pp=2, cp=2)),
    slow(Cell(2, 2, 2, pp=2, cp=2, method="keys", recompute="full")),
    slow(Cell(4, 4, 2, cp=2, recompute="selective", method="keys", kind="all")),
    slow(Cell(1, 1, 0, cp=4, method="keys", optimizer="muon")),
    *(slow(Cell(1, 2, stage, accum, cp=2)) for stage in range(4) for accum in ("full", "shard")),
]


@pytest.mark.parametrize("cell", SEQUENCES, ids=str)
def test_ranks_that_share_out_sequences_too(cell):
    assert_same_run(cell, run(cell))


OFFLOADED = [
    Cell(2, 2, 2, offload="optimizer"),
    slow(Cell(4, 4, 3, offload="parameters")),
    slow(Cell(2, 4, 0, offload="optimizer", kind="bias")),
    slow(Cell(2, 4, 1, offload="optimizer", deterministic=True, kind="capacity")),
    slow(Cell(2, 4, 3, offload="parameters", shard_size=2)),
]


@pytest.mark.parametrize("cell", OFFLOADED, ids=str)
def test_states_on_the_host(cell):
    """Over a stand-in for the bus."""
    assert_same_run(cell, run(cell))
