"""debug.py: one flipped bit in anything that ranks have alike is found, and named."""

import random
import re

import pytest
import torch
from cells import slow
from torch import nn

from fastpar import AdamW, Mesh, engine_of, parallelize
from fastpar.engine import debug
from fastpar.engine.debug import Difference, checksum, differences
from fastpar.models.gpt import GPT
from fastpar.optim.adafactor import Adafactor
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.002, "first_bucket_mb": 0.001}


def flip(x, at=0, bit=0):
    """One bit of one byte, in place."""
    raw = x.detach().view(-1).view(torch.uint8)
    raw[at] = int(raw[at]) ^ (1 << bit)


# The checksum


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int16]
)
@pytest.mark.parametrize(("size", "offset"), [(1, 0), (3, 1), (8, 0), (37, 0), (40, 3)])
def test_every_single_flip_changes_the_sum(monkeypatch, dtype, size, offset):
    monkeypatch.setattr(debug, "_CHUNK", 64)
    x = torch.randn(size + offset).mul(50).to(dtype)[offset:]
    before = checksum(x)
    assert before.dtype == torch.int64
    for at in range(x.numel() * x.element_size()):
        for bit in range(8):
            flip(x, at, bit)
            assert checksum(x) != before, (at, bit)
            flip(x, at, bit)
    assert checksum(x) == before
    assert checksum(x.clone()) == before


def test_what_the_sum_sees_and_does_not(monkeypatch):
    x = torch.randn(1000)
    monkeypatch.setattr(debug, "_CHUNK", 256)
    y = x.clone()
    y[[10, 700]] = x[[700, 10]]
    assert checksum(y) != checksum(x)
    assert checksum(x.view(10, 100).t()) == checksum(x.view(10, 100).t().contiguous())
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(5)) == 0
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))


@pytest.mark.gpu
def test_a_gpu_has_the_sums_of_the_cpu():
    x = torch.randn(3_000_001)
    assert checksum(x.cuda()).item() == checksum(x).item()


def test_who_differs_from_whom():
    assert differences([(1, 5), (1, 5), (2, 6), (2, 6), (3, 7)]) == []
    assert differences([(1, 5), (1, 5), (1, 6)]) == [Difference([[0, 1], [2]])]
    assert differences([(1, 6), (2, 9), (1, 5), (2, 9)]) == [Difference([[0], [2]])]
    assert Difference([[0, 1], [2]]).is_clear
    assert Difference([[0, 1], [2], [3]]).is_clear
    assert not Difference([[0], [2]]).is_clear
    assert not Difference([[0, 1], [2, 3]]).is_clear


# Ranks


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 3), nn.Linear(3, 50))


def gpt():
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=130, dropout=0.0))


def trained(options, adamw):
    """Model, engine and optimizer of this rank after two steps, each rank on its own data."""
    options = dict(options)
    tp, dtype = options.pop("tp", 1), options.pop("dtype", torch.float32)
    mesh = Mesh(tp=tp)
    model = (net() if tp == 1 else gpt()).to(dtype)
    parallelize(model, mesh, Parallel.of(**SMALL, **options))
    optimizer = AdamW(model.parameters(), lr=0.01, **adamw)
    for step in range(2):
        generator = torch.Generator().manual_seed(100 * step + mesh.dp_rank)  # ranks are threads
        if tp == 1:
            model(torch.randn(4, 37, generator=generator).to(dtype)).square().mean().backward()
        else:
            idx = torch.randint(0, 130, (2, 8), generator=generator)
            model(idx, idx).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, engine_of(model), optimizer


def weight(name):
    """What this rank steps of a parameter."""
    return lambda model, engine, optimizer: (
        engine.shards.piece(dict(model.named_parameters())[name]).param
    )


def entry(name, key):
    """Of the optimizer's state."""
    return lambda model, engine, optimizer: optimizer.state[dict(model.named_parameters())[name]][
        key
    ]


def damaged(options, adamw, rank, pick, seed):
    """Checks that it is fine, flips a bit on one rank, checks again; what the error said."""
    model, engine, optimizer = trained(options, adamw)
    engine.check_replicas(optimizer, step=7)
    if engine.mesh.rank == rank:
        x, rng = pick(model, engine, optimizer), random.Random(seed)
        assert x.numel()
        flip(x, rng.randrange(x.numel() * x.element_size()), rng.randrange(8))
    with pytest.raises(RuntimeError, match=r"expected the same bits on every rank") as caught:
        engine.check_replicas(optimizer, step=7)
    return str(caught.value)


BF16 = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
FULL, BITS = {"master_weights": True}, {"master_weights": "remainder"}
CLEAR = [  # ranks, the damaged one, who else has a copy
    (3, {}, {}, 1, weight("1.bias"), "0, 2"),
    (4, {}, {}, 3, weight("2.weight"), "0, 1, 2"),
    (3, {}, {}, 0, entry("0.weight", "exp_avg"), "1, 2"),
    (4, {}, {"moment_dtype": torch.uint8}, 2, entry("0.weight", "exp_avg_sq_codes"), "0, 1, 3"),
    (3, {}, {"moment_dtype": torch.bfloat16}, 2, entry("1.weight", "exp_avg_sq"), "0, 1"),
    (3, BF16, FULL, 1, entry("0.weight", "master_weight"), "0, 2"),
    (6, {"zero_stage": 1, "shard_size": 2}, {}, 3, entry("0.weight", "exp_avg"), "1, 5"),
    (6, {"zero_stage": 2, "shard_size": 2}, {}, 4, entry("0.weight", "exp_avg_sq"), "0, 2"),
    (6, {"zero_stage": 3, "shard_size": 2}, {}, 0, weight("0.weight"), "2, 4"),
    (6, {"zero_stage": 3, "shard_size": 2}, {}, 5, entry("0.weight", "exp_avg"), "1, 3"),
    (6, {"zero_stage": 3, "shard_size": 2, **BF16}, FULL, 4, entry("2.bias", "master_weight"),
     "0, 2"),
    (4, {"tp": 2}, {}, 1, weight("wpe.weight"), "0, 2, 3"),
    (4, {"tp": 2}, {}, 2, entry("h.0.ln_1.weight", "exp_avg"), "0, 1, 3"),
    (6, {"tp": 2}, {}, 3, weight("h.0.attn.c_attn.weight"), "1, 5"),
    (6, {"tp": 2}, {}, 4, entry("h.0.mlp.c_fc.bias", "exp_avg_sq"), "0, 2"),
    (4, {"tp": 4 // 2, "zero_stage": 0, **BF16}, FULL, 0, entry("ln_f.bias", "master_weight"),
     "1, 2, 3"),
]  # fmt: skip


@pytest.mark.parametrize("seeds", [range(1), slow(range(1, 4))], ids=["one bit", "more bits"])
@pytest.mark.parametrize(("ranks", "options", "adamw", "rank", "pick", "others"), CLEAR)
def test_the_rank_with_the_flipped_bit_is_named(ranks, options, adamw, rank, pick, others, seeds):
    for seed in seeds:
        said = run_ranks(damaged, ranks, options, adamw, rank, pick, seed)
        assert len(set(said)) == 1
        assert re.search(
            rf"got a difference on rank {rank} in .*parameter '.*' after step 7, where ranks "
            rf"{others} agree; something changed it there only: check",
            said[0],
        ), said[0]


PAIRS = [
    (2, {}, {}, 1, weight("1.bias"), "0 and rank 1"),
    (2, {}, {}, 0, entry("1.bias", "exp_avg"), "0 and rank 1"),
    (2, {"tp": 2}, {}, 1, weight("wpe.weight"), "0 and rank 1"),
    (2, {"tp": 2}, {}, 1, entry("ln_f.weight", "exp_avg"), "0 and rank 1"),
    (4, {"zero_stage": 3, "shard_size": 2}, {}, 3, weight("0.weight"), "1 and rank 3"),
    (4, {"zero_stage": 1, "shard_size": 2}, {}, 0, entry("0.weight", "exp_avg"), "0 and rank 2"),
    (4, {"tp": 2, "zero_stage": 1}, {}, 0, entry("ln_f.weight", "exp_avg"), "0 and rank 1"),
]


@pytest.mark.parametrize(("ranks", "options", "adamw", "rank", "pick", "pair"), PAIRS)
def test_of_two_copies_nobody_knows_which_is_right(ranks, options, adamw, rank, pick, pair):
    [said] = set(run_ranks(damaged, ranks, options, adamw, rank, pick, 0))
    assert re.search(
        rf"a difference between rank {pair} in .*parameter '.*' after step 7, and no majority", said
    ), said


def test_the_first_difference_is_named_by_parameter_and_entry():
    for name in ("0.weight", "2.bias"):
        [said] = set(run_ranks(damaged, 3, {}, {}, 1, weight(name), 0))
        assert f" in parameter '{name}' after" in said
        for key in ("exp_avg", "exp_avg_sq"):
            [said] = set(run_ranks(damaged, 3, {}, {}, 1, entry(name, key), 0))
            assert f" in {key} of parameter '{name}' after" in said


@pytest.mark.parametrize("stage", [1, 2])
def test_whole_parameters_that_were_gathered_are_compared(stage):
    def of_rank():
        model, engine, _ = trained({"zero_stage": stage}, {})
        with engine.gathered():
            if engine.mesh.rank == 2:
                flip(model[1].weight, 5)
            with pytest.raises(RuntimeError, match=r"difference on rank 2 in parameter '1.weight'"):
                engine.check_replicas()

    run_ranks(of_rank, 3)


def test_frozen_parameters_are_compared():
    def of_rank():
        model = net()
        model[1].weight.requires_grad_(False)
        engine = engine_of(parallelize(model, Mesh(), Parallel.of(zero_stage=3, **SMALL)))
        engine.check_replicas()
        if engine.mesh.rank == 0:
            flip(model[1].weight, 1)
        with pytest.raises(RuntimeError, match=r"difference on rank 0 in parameter '1.weight' aft"):
            engine.check_replicas()

    run_ranks(of_rank, 3)


@pytest.mark.parametrize(
    ("ranks", "options", "adamw"),
    [
        *((4, {"tp": 2, "zero_stage": stage}, {}) for stage in range(4)),
        *((4, {"zero_stage": stage, "shard_size": 2}, {}) for stage in (1, 2, 3)),
        (4, {"zero_stage": 3, "shard_size": 2, **BF16}, BITS),
        (4, {"tp": 2, **BF16}, {"stochastic_rounding": True, "moment_dtype": torch.bfloat16}),
        (2, {**BF16}, {"stochastic_rounding": True, "moment_dtype": torch.uint8}),
        (3, {"zero_stage": 3}, {}),
        (1, {}, {}),
    ],
)
def test_healthy_ranks_pass_and_stay_as_they_are(ranks, options, adamw):
    def of_rank():
        model, engine, optimizer = trained(options, adamw)
        with engine.gathered():
            before = [p.detach().clone() for p in model.parameters()]
        engine.check_replicas(optimizer)
        with engine.gathered():
            assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))

    run_ranks(of_rank, ranks)


def test_equal_pieces_of_one_parameter_are_no_copies():
    def of_rank():
        model = parallelize(nn.Linear(1024, 4, bias=False), Mesh(), zero_stage=3)
        engine = engine_of(model)
        assert engine.shards.piece(model.weight).param.numel() == 2048
        engine.check_replicas()

    run_ranks(of_rank, 2)


def test_adafactors_rows_and_columns_are_compared():
    def of_rank():
        model = parallelize(net(), Mesh(), Parallel.of(**SMALL))
        engine, optimizer = engine_of(model), Adafactor(model.parameters(), lr=0.01)
        model(torch.ones(2, 37)).square().mean().backward()
        optimizer.step()
        engine.check_replicas(optimizer)
        values = [
            v for v in optimizer.state[model[0].weight].values() if isinstance(v, torch.Tensor)
        ]
        if engine.mesh.rank == 1:
            flip(max(values, key=torch.Tensor.numel), 3)
        with pytest.raises(RuntimeError, match=r"difference on rank 1 in \w+ of parameter '0.wei"):
            engine.check_replicas(optimizer)

    run_ranks(of_rank, 3)
