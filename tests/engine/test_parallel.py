"""parallel.py: groups, state dicts, models without memory."""

import copy
import pickle
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpar import Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Replicate
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.001, "first_bucket_mb": 0.0001}


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.wte = nn.Embedding(7, 8)
        self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.wte.weight
        self.frozen = nn.Parameter(torch.empty(3), requires_grad=False)
        self.register_buffer("seen", torch.empty(2))
        if not self.wte.weight.is_meta:
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                fill(name, tensor.data, seed)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x).tanh()
        return self.head(x)


def fill(name, tensor, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    with torch.no_grad():
        tensor.uniform_(-0.5, 0.5, generator=generator)


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Split(Net):
    """With a buffer that is another one on each rank of tp."""

    tp_states: ClassVar = {
        name: Replicate() for name in ("wte.weight", "head.weight", "frozen", "h.0.weight",
                                       "h.0.bias", "h.1.weight", "h.1.bias")
    }  # fmt: skip

    def tensor_parallel(self, tp):
        self.register_buffer("first_row", torch.tensor([tp.rank]))
        return {}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_all_ranks_begin_with_the_values_of_the_first(tp):
    def ranks():
        model = Split(seed=dist.get_rank())
        parallelize(model, Mesh(tp=tp))
        return values(model)

    first = Split(seed=0)
    for rank, found in enumerate(run_ranks(ranks, 4)):
        if tp > 1:
            assert found.pop("first_row") == rank % tp
        assert_same(found, values(first))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_of_copies(stage):
    def ranks():
        engine = engine_of(parallelize(Net(), Mesh(), zero_stage=stage, shard_size=2))
        groups, control = engine.buckets[-1].groups, engine.control_group
        rank = torch.tensor([dist.get_rank()])
        found = []
        for group in (groups.reduce, groups.gather, groups.copies, control):
            everyone = torch.empty(group.world_size, dtype=torch.int64)
            group.all_gather(everyone, rank)
            found.append(everyone.tolist())
        assert len({id(g) for g in (groups.reduce, groups.gather, control)}) == 3
        return found

    for rank, found in enumerate(run_ranks(ranks, 4)):
        mine = [0, 1] if rank < 2 else [2, 3]
        assert found == [mine, mine, [rank % 2, rank % 2 + 2], [0, 1, 2, 3]]


def test_gathers_and_reductions_do_not_share_a_group():
    def ranks():
        engine = engine_of(parallelize(Net(), Mesh(), zero_stage=2))
        groups = engine.buckets[0].groups
        return groups.gather is groups.reduce, engine.control_group is groups.reduce, groups.copies

    assert run_ranks(ranks, 2) == [(False, True, None)] * 2


def test_a_stage_without_anybody_to_share_with_is_stage_0():
    assert engine_of(parallelize(Net(), Mesh(), zero_stage=3)).stage.number == 0
    stages = run_ranks(
        lambda: engine_of(parallelize(Net(), Mesh(), zero_stage=2, shard_size=1)).stage.number, 2
    )
    assert stages == [0, 0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_has_the_values_of_rank_0(stage):
    def ranks():
        return values(
            parallelize(Net(seed=dist.get_rank()), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        )

    expected = values(Net())
    for got in run_ranks(ranks, 3):
        assert_same(got, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_dicts_are_copies_of_whole_parameters(stage):
    def ranks():
        model = parallelize(Net(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        saved = model.state_dict()
        saved["h.0.weight"].zero_()
        assert model.state_dict()["h.0.weight"].any()
        other = values(Net(seed=5))
        model.load_state_dict(other)
        assert_same(values(model), other)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        assert_same(values(model), other)
        with engine_of(model).gathered():
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert_same(values(copied), other)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_without_memory_is_filled(stage):
    def ranks():
        with torch.device("meta"):
            model = Net()
        parallelize(
            model, Mesh(device="cpu"), Parallel.of(zero_stage=stage, **SMALL), materialize=fill
        )
        assert model.head.weight is model.wte.weight
        assert isinstance(model.wte.weight, nn.Parameter)
        logits = model(torch.arange(7))
        logits.square().sum().backward()
        return values(model), logits.detach()

    expected = values(Net())
    for got, logits in run_ranks(ranks, 2):
        assert_same(got, expected)
        assert torch.equal(logits, Net()(torch.arange(7)))


def test_materialize_and_the_meta_device_go_together():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match="got device=meta for 'frozen'; pass materialize="):
        parallelize(model, Mesh(device="cpu"))
    with pytest.raises(ValueError, match="every parameter on meta, got device=cpu for 'frozen'"):
        parallelize(Net(), Mesh(device="cpu"), materialize=fill)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writing_into_a_placeholder_spoils_no_other(stage):
    """Gradients may be set to zero, which others do not see; parameters refuse it."""

    def ranks():
        model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1), nn.Linear(1, 4))
        parallelize(model, Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            assert all(p.grad.isnan().all() for p in model.parameters())
            model[1].bias.grad.zero_()
            assert all(p.grad.isnan().all() for p in model.parameters())
            engine = engine_of(model)
            engine.before_step()
            engine.exchange(None)
            engine.after_step()
            assert all(p.isnan().all() for p in model.parameters())
            with pytest.raises(
                RuntimeError, match=r"p\.zero_: expected a whole parameter, got '1\.b"
            ):
                model[1].bias.data.zero_()
            model.zero_grad()

    run_ranks(ranks, 2)
