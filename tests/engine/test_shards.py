"""shards.py: what a rank owns of a parameter, and whole tensors made of it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpar import Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.002, "first_bucket_mb": 0.001}


def model_of():
    model = nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 3), nn.Linear(3, 50))
    for i, p in enumerate(model.parameters()):
        p.data = torch.arange(p.numel(), dtype=torch.float32).view(p.shape) + 1000 * i
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_make_up_each_parameter(ranks, stage):
    def of_rank():
        engine = engine_of(parallelize(model_of(), Mesh(), Parallel.of(zero_stage=stage, **SMALL)))
        found = []
        for p in engine.shards.params:
            piece = engine.shards.piece(p)
            found.append((piece.start, piece.param.detach().clone().view(-1)))
            assert piece.start % 256 == 0 or not piece.param.numel()  # blocks of 8-bit moments fit
        return [
            (s.names[0], *f) for s, f in zip((x.spec for x in engine.shards.layout.slots), found)
        ]

    everyone = run_ranks(of_rank, ranks)
    expected = dict(model_of().named_parameters())
    for rows in zip(*everyone, strict=True):
        name = rows[0][0]
        whole = torch.cat([values for _, _, values in rows])
        if stage == 0:
            whole = rows[0][2]
        assert torch.equal(whole, expected[name].detach().view(-1))


@pytest.mark.parametrize("block", [1, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float64])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_whole_tensors_of_parts_and_back(stage, dtype, block):
    def of_rank():
        engine = engine_of(parallelize(model_of(), Mesh(), Parallel.of(zero_stage=stage, **SMALL)))
        for p in engine.shards.params:
            shape = p.shape if block == 1 else (-(-p.numel() // block),)
            whole = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(1))
            whole = whole.to(dtype)
            part = engine.shards.shard_of(whole, p, block=block)
            assert torch.equal(engine.shards.full(part, p, block=block), whole)

    run_ranks(of_rank, 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_into_whole_parameters_stays(stage):
    def of_rank():
        model = parallelize(model_of(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        engine = engine_of(model)
        with engine.gathered(), torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        if stage == 3:
            assert all(p.isnan().all() for p in model.parameters())
        with engine.gathered():
            return [p.detach().clone() for p in model.parameters()]

    for params in run_ranks(of_rank, 2):
        for p, expected in zip(params, model_of().parameters(), strict=True):
            assert torch.equal(p, expected * 2)


def test_replicas_that_differ_are_named():
    def of_rank():
        model = parallelize(model_of(), Mesh(), Parallel.of(zero_stage=1, shard_size=2, **SMALL))
        engine = engine_of(model)
        engine.check_replicas()
        if dist.get_rank() == 3:
            engine.shards.piece(model[0].weight).param.detach().add_(1)
        with pytest.raises(RuntimeError, match=r"difference on rank 3 in parameter .0.weight."):
            engine.check_replicas()

    run_ranks(of_rank, 4)


def test_scalars_are_summed_in_rank_order():
    def of_rank():
        engine = engine_of(parallelize(model_of(), Mesh(), Parallel.of(**SMALL)))
        with pytest.raises(ValueError, match=r"expected fp32 or fp64, got dtype=torch.int64"):
            engine.all_reduce_scalars(torch.ones(2, dtype=torch.int64))
        return engine.all_reduce_scalars(torch.tensor([0.1 * (dist.get_rank() + 1), 1.0]))

    expected = torch.tensor([0.1]) + torch.tensor([0.2]) + torch.tensor([0.1 * 3])
    for total in run_ranks(of_rank, 3):
        assert total.tolist() == [expected.item(), 3.0]
