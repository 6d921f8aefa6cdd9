"""bucket.py: parameters as views of a bucket, as placeholders, and with other memory."""

import copy

import pytest
import torch
from test_buffers import Tied, one, sharded
from torch import nn


@sharded
def test_stale_parameters_read_as_nan_and_come_back(stage):
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    bucket = one(model, stage)
    loss = model(torch.tensor([[1, 2]])).sum()
    bucket.make_stale()
    assert all(bucket.is_in_place(i) for i in range(3))
    assert model.wte.weight.shape == (91, 6)
    assert all(p.isnan().all() for p in bucket.params)
    assert bucket.flat.untyped_storage().nbytes() == (0 if stage == 3 else bucket.spec.numel * 4)
    bucket.allocate()
    whole = torch.zeros(bucket.spec.numel)
    for slot, view in zip(bucket.slots, [before[bucket.name(i)] for i in range(3)]):
        whole[slot.start : slot.stop] = view.flatten()
    bucket.flat.copy_(whole)
    bucket.make_live()
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    loss.backward()  # what autograd saved is the same memory, filled again


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writes_into_whole_parameters_reach_the_shard(stage):
    model = nn.Linear(8, 64)
    bucket = one(model, stage, rank=1)
    with torch.no_grad():
        model.weight.fill_(3.0)
    bucket.save_writes()
    values, _, start = bucket.piece(1)
    assert (start, values.numel()) == (256, 256)
    assert (values == 3.0).all()


def test_other_memory_is_named_or_taken_in():
    bucket = one(nn.Linear(4, 3))
    weight = bucket.params[1]
    assert bucket.new_memory() == []
    weight.data = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match=r"expected parameter 'weight' to stay in its flat buff"):
        bucket.check()
    ((position, new),) = bucket.new_memory()
    assert bucket.take_memory(position, new) is not None  # a parameter without an engine
    bucket.check()
    weight._fastpar_engine = None
    assert bucket.take_memory(position, new) is None
    assert torch.equal(bucket.views[1], new)
    message = bucket.take_memory(position, new.t())
    assert message.startswith("gathered: expected values for parameter 'weight' of shape [3, 4]")
    weight.data = weight.data[:, :2]  # the same memory, in another way
    assert not bucket.is_in_place(1)


def test_a_parameter_is_absent_while_it_is_stale():
    bucket = one(nn.Linear(4, 3), 2)
    kinds = [type(p) for p in bucket.params]
    bucket.make_stale()
    bucket.make_stale()
    assert all(isinstance(p, nn.Parameter) and type(p) is not nn.Parameter for p in bucket.params)
    bucket.make_live()
    assert [type(p) for p in bucket.params] == kinds == [nn.Parameter] * 2
