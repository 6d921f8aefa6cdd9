"""What the exchange of a step carries, and what it notices."""

import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpar import parallelize
from fastpar.comm.mesh import Mesh
from fastpar.comm.transports import make_collectives
from fastpar.engine import control as control_module
from fastpar.engine.control import Control, broadcast_text, gather_errors, gather_numbers
from fastpar.engine.engine import engine_of
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins, norm_from_bins
from fastpar.testing import run_ranks


def test_every_rank_learns_of_all():
    def rank():
        model = nn.Linear(4, 4)
        parallelize(model, Mesh())
        engine, here = engine_of(model), dist.get_rank()
        said = {1: "no room, n\u00e4mlich", 2: "x" * 9999}.get(here)
        return (
            gather_numbers(engine, here + 0.5),
            gather_errors(engine, None),
            gather_errors(engine, said),
            broadcast_text(engine, f"from {here}"),
        )

    errors = {1: "no room, n\u00e4mlich", 2: "x" * 9999}
    assert run_ranks(rank, 3) == [([0.5, 1.5, 2.5], {}, errors, "from 0")] * 3
    assert gather_numbers(None, 3.0) == [3.0]
    assert [gather_errors(None, said) for said in (None, "x")] == [{}, {0: "x"}]
    assert broadcast_text(None, "mine") == "mine"


CPU = torch.device("cpu")


def control(n_params=3, shard_size=None):
    mesh = Mesh()
    size = shard_size or mesh.dp_size
    first = mesh.dp_rank // size * size
    return Control(make_collectives(), n_params, range(first, first + size), CPU), mesh.dp_rank


def exchange(c, bins=None, hashes=(1, 2), backwards=1, used=(True, True, True)):
    return c.exchange(bins, hashes=hashes, backwards=backwards, used=used)


def test_one_rank_alone_keeps_its_numbers_too():
    model = nn.Linear(2, 1)
    parallelize(model, Mesh(device="cpu"))
    engine = engine_of(model)
    for tokens, scale, values in (
        (4, 4, [2.0, 3.0]), (None, None, []), (None, None, [5.0]), (0, 1, [])  # never by zero
    ):  # fmt: skip
        if tokens is not None:
            engine.count_tokens(tokens)
        if values:
            engine.contribute(torch.tensor(values))
        engine.exchange(None)
        assert engine.control.contributed.tolist() == values
        assert engine.control.token_scale == scale
    engine.count_tokens(4)
    engine.zero_grad()
    with pytest.raises(RuntimeError, match="the token count does not match the gradients"):
        engine.exchange(None)


def test_what_a_step_carries():
    """Values in rank order; the norm's bins of ranks that share a copy; tokens as the mean over the
    ranks; and nothing of it in the next step."""
    x, tenth = torch.arange(1.0, 9.0), torch.tensor(0.1).double().item()

    def ranks(kind):
        c, rank = control(shard_size=2)
        c.contribute(torch.tensor([[1.0, 0.1], [rank, 1e-17]]))
        c.contribute(torch.tensor(rank * 0.3, dtype=torch.float64))
        c.count_tokens(kind(10 * rank))
        c.count_tokens(kind(3))
        bins = exchange(c, norm_bins([x[rank % 2 :: 2]]))
        first, tokens = c.contributed, c.token_scale
        exchange(c)
        assert (c.contributed.tolist(), c.token_scale) == ([], None)
        return bins, first, tokens

    for kind in (int, torch.tensor):
        for bins, values, tokens in run_ranks(ranks, 4, kind):
            assert norm_from_bins(bins).norm == x.norm()
            assert bins.shape == (NORM_WORDS,)
            of_ranks = [sum([tenth] * 4), 0.0 + 0.3 + 0.6 + 3 * 0.3]
            assert values.tolist() == [4.0, of_ranks[0], 6.0, values[3], of_ranks[1]]
            assert tokens.item() == (10 + 20 + 30 + 12) / 4


def test_a_rank_without_a_backward_is_told_unless_it_counts_its_tokens():
    def ranks(tokens):
        c, rank = control()
        if tokens is not None:
            c.count_tokens(tokens[rank])
        exchange(c, **({"backwards": 0, "hashes": (0, 0)} if rank == 1 else {}))

    words = r"rank 1 ran no backward before a step, .* counts as 0 in the mean .* all 2 ranks; give"
    for tokens in (None, (4, 4)):
        with pytest.warns(UserWarning, match=words):
            run_ranks(ranks, 2, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(ranks, 2, (4, 0))


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


def test_every_step_is_compared_on_a_device_that_lags(monkeypatch):
    """The host waits for the oldest words only when it is far ahead."""
    monkeypatch.setattr(control_module, "_copied", lambda heads: (heads.words, LateEvent()))
    same = torch.tensor([[7, 7, 1, 0, 0]] * 2)
    other = same + torch.tensor([[0] * 5, [0, 1, 0, 0, 0]])
    for wrong_step in (0, 3, 9):
        one = Control(None, 3, [0], CPU)
        for step in range(wrong_step + 2):
            one._check(OnGpu(other if step == wrong_step else same))
            LateEvent.now += 1
        with pytest.raises(RuntimeError, match="launched different collectives"):
            one._check(OnGpu(same))
    monkeypatch.setattr(LateEvent, "query", lambda self: False)
    one, waits = Control(None, 3, [0], CPU), LateEvent.waits
    for _ in range(control_module.MOST_LATE):
        one._check(OnGpu(same))
    assert LateEvent.waits == waits
    one._check(OnGpu(same))
    assert LateEvent.waits == waits + 1
