"""gathers.py: which modules form a unit, and what units do whose order differs between steps and
ranks. tests/contracts/test_collective_schedules.py has the order in which they are gathered."""

import weakref

import pytest
import torch
from torch import nn

from fastpar import Mesh, engine_of, parallelize
from fastpar.engine.gathers import find_units
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

C = 8
SMALL = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}
WHOLE = (0, 1, 2, 3)


class Block(nn.Linear):
    def forward(self, x, without_bias=False):
        return x @ self.weight if without_bias else super().forward(x)


class Net(nn.Module):
    """Blocks called in the order of `path`, one of them maybe without its bias."""

    def __init__(self, n=4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the default one is shared by threads
        self.first = nn.Linear(C, C)
        self.h = nn.ModuleList(Block(C, C) for _ in range(n))
        self.last = nn.LayerNorm(C)
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, x, path=WHOLE, without_bias=None):
        x = self.first(x)
        for i in path:
            x = x + self.h[i](x, i == without_bias).tanh()
        return self.last(x).square().sum()


def sgd_step(engine):
    engine.before_step()
    engine.exchange(None)
    for p in engine.shards.params:
        piece = engine.shards.piece(p)
        piece.param.detach().sub_(piece.grad, alpha=0.1)
    engine.after_step()
    engine.zero_grad()


def x_of(rank):
    return torch.randn(3, C, generator=torch.Generator().manual_seed(rank))


def trained(calls, n=4, prefetch=1):
    """calls(rank): arguments of a rank's forward in each step. What it gathered, and weights."""

    def rank_of():
        model, mesh = Net(n), Mesh()
        parallelize(model, mesh, Parallel.of(zero_stage=3, prefetch=prefetch, **SMALL))
        engine, log = engine_of(model), []
        launch = engine.gathers._launch
        engine.gathers._launch = lambda index: (log.append(index), launch(index))
        for args in calls(mesh.rank):
            model(x_of(mesh.rank), *args).backward()
            sgd_step(engine)
        with engine.gathered():
            return log, [p.detach().clone() for p in model.parameters()]

    return run_ranks(rank_of, 2, timeout_s=30)


def by_hand(calls, n=4):
    """The weights of one process with the batches of two ranks."""
    models = [Net(n), Net(n)]
    for of_ranks in zip(calls(0), calls(1)):
        for rank, (model, args) in enumerate(zip(models, of_ranks)):
            model.zero_grad()
            model(x_of(rank), *args).backward()
        for pair in zip(*(m.parameters() for m in models), strict=True):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in pair]
            for p in pair:
                p.data.sub_((grads[0] + grads[1]) / 2, alpha=0.1)
    return list(models[0].parameters())


@pytest.mark.parametrize("path", [(3, 2, 1, 0), (0, 1, 0, 2, 3), (1, 3), ()])
def test_paths_and_prefetch_change_no_bit(path):
    """What is gathered ahead is what the last pass called; both ranks gather in one order."""
    calls = [(WHOLE,), (path,), (WHOLE,)]
    for prefetch in (0, 1, 2, 9):
        (log, params), (other, _) = trained(lambda rank: calls, prefetch=prefetch)
        assert log == other
        assert all(map(torch.equal, params, by_hand(lambda rank: calls)))


SKIPS = {
    # The others need its slices: it takes part in the gather, and sends no gradient.
    "a block": [((0, 1, 2),), ((1, 2, 3),), (WHOLE,), ((0, 2, 3),)],
    # It sends its gradients at the end of its backward, and needs gathers before: the others must
    # come to them, though more of their gradients are under way than usual.
    "a late weight": [(WHOLE, 3), (WHOLE, 2), (WHOLE, 3)],
}


@pytest.mark.parametrize("calls", SKIPS.values(), ids=SKIPS)
def test_a_rank_may_skip_what_others_use(calls, monkeypatch):
    monkeypatch.setattr("fastpar.engine.gradients._PATIENCE_S", 0.05)

    def of_rank(rank):
        return calls if rank == 1 else [(WHOLE,)] * len(calls)

    for _, params in trained(of_rank):
        assert all(map(torch.equal, params, by_hand(of_rank)))


def test_a_deep_block_that_a_rank_skips_costs_no_patience(monkeypatch):
    """From the second time on: units that a forward did not call send zeros at once."""
    monkeypatch.setattr("fastpar.engine.gradients._PATIENCE_S", 60.0)
    trained(lambda rank: [(range(12),), (range(11) if rank else range(12),)], n=12)


def test_a_model_that_nobody_uses_is_gone_at_once():
    """Its modules are in no cycle with the engine, which would wait for a garbage collection."""

    def train():
        model = parallelize(Net(), Mesh(), zero_stage=3)
        engine = engine_of(model)
        for _ in range(2):
            model(torch.ones(2, C)).backward()
            sgd_step(engine)
        parts = [weakref.ref(part) for part in (model, model.first, model.last, *model.h)]
        del model, engine
        assert [part() for part in parts] == [None] * 7

    run_ranks(train, 2)


@pytest.mark.filterwarnings("error")
def test_what_a_failed_forward_says_is_not_drowned():
    """A rank that lost its peer fails in the forward, and again where the root cleans up."""

    def gone(*args):
        raise RuntimeError("the end of rank 1")

    def run():
        for path, error, message in (
            ((9,), IndexError, "out of range"),
            ((0,), RuntimeError, "the end of rank 1"),
        ):
            model = parallelize(Net(), Mesh(), zero_stage=3)
            engine_of(model).gathers.end = gone
            with pytest.raises(error, match=message):
                model(torch.zeros(1, C), path)

    run_ranks(run, 2)


def test_cells_that_ranks_call_differently_often():
    """Recurrent layers over sequences of a rank's own length: every stage is stage 0."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList((nn.GRUCell(C, C), nn.RNNCell(C, C)))

        def forward(self, x):
            first = second = torch.zeros(1, C)
            for row in x:
                first = self.cells[0](row[None], first)
                second = self.cells[1](first, second)
            return second.square().sum()

    def rank(stage):
        mesh, model = Mesh(), Recurrent()
        with torch.no_grad():  # not drawn: ranks are threads, and share the generator
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).roll(i).view(p.shape))
        parallelize(model, mesh, Parallel.of(zero_stage=stage, first_bucket_mb=1e-4))
        losses = []
        for lengths in ((2, 3), (3, 1), (1, 4)):
            loss = model(torch.ones(lengths[mesh.rank], C) / 3)
            loss.backward()
            sgd_step(engine_of(model))
            losses.append(loss.item())
        return losses

    expected = run_ranks(rank, 2, 0)
    for stage in (1, 2, 3):
        assert run_ranks(rank, 2, stage, timeout_s=20) == expected


def test_small_neighbours_are_one_unit():
    model, size = Net(), 4 * (C * C + C)
    for merge_bytes, n in ((2 * size, [1, 2, 2]), (3 * size, [1, 3, 1]), (2 * size - 1, [1] * 5)):
        assert [len(unit) for unit in find_units(model, None, merge_bytes=merge_bytes)] == n


def test_units_that_are_named_by_hand():
    model = Net()
    for chosen, message in (
        ([nn.Linear(2, 2)], r"units contains a Linear that is not inside the model; pass"),
        ([model.h, model.h[0]], "units contains a Block inside another unit; leave"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(model, Mesh(), zero_stage=3, units=chosen)
