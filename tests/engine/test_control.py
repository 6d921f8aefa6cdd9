"""control.py: what the exchange of a step carries, and what it notices."""

from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.mesh import Mesh
from fastpar.comm.transports import make_collectives
from fastpar.engine import control as control_module
from fastpar.engine.control import Control, _sum_rows
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins, norm_from_bins
from fastpar.testing import run_ranks

CPU = torch.device("cpu")


def control(n_params=3, shard_size=None):
    mesh = Mesh()
    size = shard_size or mesh.dp_size
    first = mesh.dp_rank // size * size
    return Control(make_collectives(), n_params, range(first, first + size), CPU), mesh.dp_rank


def exchange(c, bins=None, hashes=(1, 2), backwards=1, used=(True, True, True)):
    return c.exchange(bins, hashes=hashes, backwards=backwards, used=used)


def test_values_are_summed_in_rank_order():
    def ranks():
        c, rank = control()
        c.contribute(torch.tensor([[1.0, 0.1], [rank, 1e-17]]))
        c.contribute(torch.tensor(rank * 0.3, dtype=torch.float64))
        exchange(c)
        first = c.contributed
        exchange(c)
        return first, c.contributed

    for values, nothing in run_ranks(ranks, 3):
        tenth = torch.tensor(0.1).double().item()
        assert values.tolist() == [3.0, tenth + tenth + tenth, 3.0, values[3], 0.3 + 0.6]
        assert nothing.tolist() == []


def test_bins_are_those_of_the_ranks_that_share_a_copy():
    x = torch.arange(1.0, 9.0)

    def ranks():
        c, rank = control(shard_size=2)
        return exchange(c, norm_bins([x[rank % 2 :: 2]]))

    for bins in run_ranks(ranks, 4):
        assert norm_from_bins(bins).norm == x.norm()
        assert bins.shape == (NORM_WORDS,)


class Ops(TorchDispatchMode):
    """Names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_gpu_sums_the_ranks_in_one_kernel():
    """Not in one a rank."""
    rows = torch.empty(64, 3, dtype=torch.float64, device="meta")
    with Ops() as ops:
        total = _sum_rows(rows)
    assert (total.shape, total.device.type) == ((3,), "meta")
    assert ops.names == ["aten.sum.dim_IntList"]


@pytest.mark.parametrize("n_params", [1, 62, 63, 200])
def test_who_used_what(n_params):
    def ranks():
        c, rank = control(n_params)
        exchange(c, used=[i % 4 == rank for i in range(n_params)])
        return [c.used_anywhere(i) for i in range(n_params)]

    assert run_ranks(ranks, 2) == [[i % 4 < 2 for i in range(n_params)]] * 2


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_tokens_become_the_mean_over_the_ranks(kind):
    def ranks():
        c, rank = control()
        c.count_tokens(kind(10 * rank))
        c.count_tokens(kind(3))
        exchange(c)
        counted = c.token_scale
        exchange(c)
        return counted, c.token_scale

    for counted, nothing in run_ranks(ranks, 3):
        assert counted.item() == (10 + 20 + 9) / 3
        assert nothing is None


def test_nobody_has_a_token():
    def ranks():
        c, _ = control()
        c.count_tokens(0)
        exchange(c)
        return c.token_scale.item()

    assert run_ranks(ranks, 2) == [0.5, 0.5]  # gradients are zero: no division by zero


@pytest.mark.parametrize(
    ("of_rank_1", "message"),
    [
        ({"backwards": 2}, "as many backward passes on every rank, got 2 on rank 1 .* 0 has 1"),
        ({"hashes": (1, 3)}, "same collectives in the same order .* on rank 1 than on rank 0"),
    ],
)
def test_ranks_out_of_step_are_told(of_rank_1, message):
    def ranks():
        c, rank = control()
        with pytest.raises(RuntimeError, match=message):
            exchange(c, **(of_rank_1 if rank == 1 else {}))

    run_ranks(ranks, 2)


def test_a_rank_without_a_batch_is_not_out_of_step():
    def ranks():
        c, rank = control()
        exchange(c, **({"backwards": 0, "hashes": (0, 0)} if rank == 0 else {}))

    run_ranks(ranks, 3)


def test_tokens_on_some_ranks_only():
    def ranks():
        c, rank = control()
        if rank == 0:
            c.count_tokens(5)
        with pytest.raises(RuntimeError, match=r"count_tokens\(\) on every rank .* on rank 1"):
            exchange(c)

    run_ranks(ranks, 2)


def test_one_rank_talks_to_itself():
    c = Control(None, 2, range(1), CPU)
    c.contribute(torch.tensor([2.5]))
    c.count_tokens(8)
    bins = norm_bins([torch.ones(4)])
    assert torch.equal(exchange(c, bins, used=(True, False)), bins)
    assert c.contributed.tolist() == [2.5]
    assert c.token_scale.item() == 8
    assert (c.used_anywhere(0), c.used_anywhere(1)) == (True, False)


class LateEvent:
    """Recorded on a device whose host is two steps ahead."""

    now = 0
    waits = 0

    def __init__(self):
        self.at = LateEvent.now

    def query(self):
        return LateEvent.now - self.at >= 2

    def synchronize(self):
        LateEvent.waits += 1


class OnGpu(NamedTuple):
    """Words of a step, as far as the check looks at them on a GPU."""

    words: torch.Tensor
    device: torch.device = torch.device("cuda", 0)


@pytest.mark.parametrize("wrong_step", [0, 3, 9])
def test_every_step_is_compared_on_a_device_that_lags(monkeypatch, wrong_step):
    monkeypatch.setattr(LateEvent, "now", 0)
    monkeypatch.setattr(control_module, "_copied", lambda heads: (heads.words, LateEvent()))
    one = Control(None, 3, [0], CPU)
    same = torch.tensor([[7, 7, 1, 0, 0]] * 2)
    other = same + torch.tensor([[0] * 5, [0, 1, 0, 0, 0]])
    for step in range(wrong_step + 2):
        one._check(OnGpu(other if step == wrong_step else same))
        LateEvent.now += 1
    with pytest.raises(RuntimeError, match="expected the same collectives in the same order"):
        one._check(OnGpu(same))


def test_the_host_waits_for_the_oldest_words_when_it_is_far_ahead(monkeypatch):
    monkeypatch.setattr(LateEvent, "query", lambda self: False)
    monkeypatch.setattr(LateEvent, "waits", 0)
    monkeypatch.setattr(control_module, "_copied", lambda heads: (heads.words, LateEvent()))
    one = Control(None, 3, [0], CPU)
    for _ in range(control_module.MOST_LATE):
        one._check(OnGpu(torch.zeros(2, 5, dtype=torch.int64)))
    assert LateEvent.waits == 0
    one._check(OnGpu(torch.zeros(2, 5, dtype=torch.int64)))
    assert LateEvent.waits == 1
