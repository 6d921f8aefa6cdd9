"""The cells of the matrix of experts: some steps of a small model, and what must come out.

[Note: the reference] dense_experts.py: every expert computes every token of the whole global batch,
and a mask chooses. fp64 runs must be within 1e-12 of the largest element of each tensor; runs in
deterministic mode must have the bits of one process with the same micro-batches.

The logits are spread wide, so that rounding changes nobody's choice.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from dense_experts import step

import fastpar
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.parallel.debug import Debug
from fastpar.parallel.pipeline import pipeline_step
from fastpar.settings.config import GPTConfig
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
