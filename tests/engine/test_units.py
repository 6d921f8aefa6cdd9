"""gathers.py: the order in which units are gathered."""

import weakref

import pytest
import torch
from torch import nn

from fastpar import Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

C = 8


class Net(nn.Module):
    """Blocks called in the order of `path`, an embedding and a norm outside of them."""

    def __init__(self, n=4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the default one is shared by threads
        self.first = nn.Linear(C, C)
        self.h = nn.ModuleList(nn.Linear(C, C) for _ in range(n))
        self.last = nn.LayerNorm(C)
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, x, path=(0, 1, 2, 3)):
        x = self.first(x)
        for i in path:
            x = x + self.h[i](x).tanh()
        return self.last(x)


def sgd_step(engine):
    engine.before_step()
    engine.exchange(None)
    for p in engine.shards.params:
        piece = engine.shards.piece(p)
        piece.param.detach().sub_(piece.grad, alpha=0.1)
    engine.after_step()
    engine.zero_grad()


def gathers_of(paths, *, prefetch=1, ranks=2, evaluate=False):
    """What a rank gathered in each pass, given one path per step, and the parameters at the end."""

    def rank_of():
        model, mesh = Net(), Mesh()
        small = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}
        parallelize(model, mesh, Parallel.of(zero_stage=3, prefetch=prefetch, **small))
        engine, log = engine_of(model), []
        launch = engine.gathers._launch
        engine.gathers._launch = lambda index: (log.append(index), launch(index))
        x = torch.randn(3, C, generator=torch.Generator().manual_seed(mesh.rank))
        for path in paths(mesh.rank):
            log.append("forward")
            if evaluate:
                with torch.no_grad():
                    model(x, path)
                continue
            y = model(x, path)
            log.append("backward")
            y.square().sum().backward()
            sgd_step(engine)
        with engine.gathered():
            return log, [p.detach().clone() for p in model.parameters()]

    return run_ranks(rank_of, ranks)


def test_order_of_a_forward_and_backward():
    first, second = (0, 1, 2, 3), (0, 1, 2, 3)
    for log, _ in gathers_of(lambda rank: [first, second]):
        # The last unit stays for the backward.
        assert log == ["forward", 0, 1, 2, 3, 4, "backward", 3, 2, 1] * 2


def test_evaluation_has_an_order_of_its_own():
    for log, _ in gathers_of(lambda rank: [(0, 1, 2, 3)] * 2, evaluate=True):
        assert log == ["forward", 0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_prefetch_depth_changes_no_bit(prefetch):
    paths = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)]
    expected = gathers_of(lambda rank: paths, prefetch=0)[0][1]
    for _, params in gathers_of(lambda rank: paths, prefetch=prefetch):
        assert all(map(torch.equal, params, expected))


@pytest.mark.parametrize("path", [(3, 2, 1, 0), (0, 1, 0, 2, 3), (1, 3), ()])
def test_other_paths_are_gathered_in_one_order_on_every_rank(path):
    logs = [log for log, _ in gathers_of(lambda rank: [(0, 1, 2, 3), path, (0, 1, 2, 3)])]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_a_rank_may_skip_a_block(skipped):
    """The others need its slices: it takes part in the gather, and sends no gradient."""
    rest = tuple(i for i in range(4) if i != skipped)
    whole = (0, 1, 2, 3)

    def mean_of_two():
        models = [Net(), Net()]
        for step in range(4):
            for rank, model in enumerate(models):
                x = torch.randn(3, C, generator=torch.Generator().manual_seed(rank))
                model.zero_grad()
                model(x, rest if rank == 1 and step in (0, 2) else whole).square().sum().backward()
            for pair in zip(*(m.parameters() for m in models), strict=True):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in pair]
                for p in pair:
                    p.data.sub_((grads[0] + grads[1]) / 2, alpha=0.1)
        return list(models[0].parameters())

    def paths(rank):
        skips = rest if rank == 1 else whole
        return [skips, whole, skips, whole]

    for _, params in gathers_of(paths):
        assert all(map(torch.equal, params, mean_of_two()))


class Pair(nn.Module):
    """Two weights, of which one can be left out."""

    def __init__(self, generator):
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.rand(C, C, generator=generator) - 0.5) for _ in range(2)
        )

    def forward(self, x, left_out):
        return (x @ self.a if left_out else x @ self.a @ self.b).tanh()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.h = nn.ModuleList(Pair(generator) for _ in range(8))

    def forward(self, x, left_out):
        for i, block in enumerate(self.h):
            x = block(x, i == left_out)
        return x.square().sum()


@pytest.mark.parametrize("left_out", [7, 5])
def test_a_rank_that_leaves_out_a_late_weight_stops_nobody(left_out, monkeypatch):
    """It sends its gradients at the end of its backward, and needs gathers before: the others must
    come to them, though more of their gradients are under way than usual."""
    monkeypatch.setattr("fastpar.engine.gradients._PATIENCE_S", 0.05)

    def mean_of_two():
        models = [Branches(), Branches()]
        for _ in range(2):
            for rank, model in enumerate(models):
                model.zero_grad()
                model(torch.ones(2, C) + rank, left_out if rank else -1).backward()
            for pair in zip(*(m.parameters() for m in models), strict=True):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in pair]
                for p in pair:
                    p.data.sub_((grads[0] + grads[1]) / 2, alpha=0.1)
        return list(models[0].parameters())

    def train():
        model, mesh = Branches(), Mesh()
        model = parallelize(
            model, mesh, Parallel.of(zero_stage=3, bucket_mb=1e-4, first_bucket_mb=1e-4)
        )
        engine = engine_of(model)
        for _ in range(2):
            model(torch.ones(2, C) + mesh.rank, left_out if mesh.rank else -1).backward()
            sgd_step(engine)
        with engine.gathered():
            return [p.detach().clone() for p in model.parameters()]

    for params in run_ranks(train, 2, timeout_s=30):
        assert all(map(torch.equal, params, mean_of_two()))


def test_a_deep_block_that_a_rank_skips_costs_no_patience(monkeypatch):
    """From the second time on: units that a forward did not call send zeros at once."""
    monkeypatch.setattr("fastpar.engine.gradients._PATIENCE_S", 60.0)

    def train():
        model, mesh = Net(12), Mesh()
        model = parallelize(
            model, mesh, Parallel.of(zero_stage=3, bucket_mb=1e-4, first_bucket_mb=1e-4)
        )
        for path in (range(12), range(11) if mesh.rank else range(12)):
            model(torch.ones(2, C), path).square().sum().backward()
            sgd_step(engine_of(model))

    run_ranks(train, 2, timeout_s=30)


def test_a_model_that_nobody_uses_is_gone_at_once():
    """Its modules are in no cycle with the engine, which would wait for a garbage collection."""

    def train():
        model = parallelize(Net(), Mesh(), zero_stage=3)
        engine = engine_of(model)
        for _ in range(2):
            model(torch.ones(2, C)).square().sum().backward()
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
