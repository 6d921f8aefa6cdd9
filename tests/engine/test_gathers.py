"""gathers.py: which modules form a unit, and what units do whose order differs between steps and
ranks. tests/contracts/test_collective_schedules.py has the order in which they are gathered."""

import weakref

import pytest
import torch
from programs import SMALL, C, Case, Net, check, loss_of
from torch import nn

from fastpar import AdamW, Mesh, engine_of, parallelize
from fastpar.engine.gathers import find_units, unit_of_parameters
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

WHOLE = (0, 1, 2, 3)
TINY = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}


class Block(nn.Linear):
    """One that may leave its bias out, which is then complete at the end of the backward."""

    without_bias = False

    def forward(self, x):
        return x + (x @ self.weight if self.without_bias else super().forward(x)).tanh()


class Paths(Net):
    """Blocks in the order of calls(step, rank), the second result of which has no bias."""

    def __init__(self, calls, n_block=4):
        super().__init__()
        self.blocks, self.calls = nn.ModuleList(Block(C, C) for _ in range(n_block)), calls

    def forward(self, idx):
        path, late = self.calls(*divmod(self.i, 2))
        x = self.wte(idx)
        for k in path:
            self.blocks[k].without_bias = k == late
            x = self.blocks[k](x)
        return self.head(self.norm(x))


def check_paths(calls, steps=3, n_block=4, prefetch=1):
    def loss(model, i):
        model.i = i
        return loss_of(model, i)

    options = {**TINY, "prefetch": prefetch}
    check(Case(lambda: Paths(calls, n_block), loss, options=options), 2, 3, steps)


@pytest.mark.parametrize("path", [(3, 2, 1, 0), (0, 1, 0, 2, 3), (1, 3), ()])
def test_paths_and_prefetch_change_no_bit(path):
    """What is gathered ahead is what the last pass called."""
    for prefetch in (0, 1, 2, 9):
        check_paths(lambda step, rank: (path if step == 1 else WHOLE, None), prefetch=prefetch)


SKIPS = {
    # The others need its slices: it takes part in the gather, and sends no gradient.
    "a block": [((0, 1, 2), None), ((1, 2, 3), None), (WHOLE, None), ((0, 2, 3), None)],
    # It sends its gradients at the end of its backward, and needs gathers before: the others must
    # come to them, though more of their gradients are under way than usual.
    "a late weight": [(WHOLE, 3), (WHOLE, 2), (WHOLE, 3)],
}


@pytest.mark.parametrize("skips", SKIPS.values(), ids=SKIPS)
def test_a_rank_may_skip_what_others_use(skips, monkeypatch):
    monkeypatch.setattr("fastpar.engine.gradients._PATIENCE_S", 0.05)
    check_paths(lambda step, rank: skips[step] if rank else (WHOLE, None), len(skips))


def test_a_deep_block_that_a_rank_skips_costs_no_patience(monkeypatch):
    """From the second time on: units that a forward did not call send zeros at once."""
    monkeypatch.setattr("fastpar.engine.gradients._PATIENCE_S", 60.0)
    check_paths(lambda step, rank: (range(11 if step and rank else 12), None), 2, n_block=12)


def test_a_model_that_nobody_uses_is_gone_at_once():
    """Its modules are in no cycle with the engine, which would wait for a garbage collection."""

    def train():
        model = parallelize(Net(), Mesh(), Parallel.of(zero_stage=3, **SMALL))
        optimizer = AdamW(model.parameters())
        for i in range(2):
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        parts = [weakref.ref(part) for part in model.modules()]
        del model, optimizer
        assert not any(part() for part in parts)

    run_ranks(train, 2)


def test_gathered_frees_what_it_has_gathered_and_no_more():
    """Between forward and backward the root and the last block stay."""

    def run():
        engine = engine_of(model := parallelize(Net(), Mesh(), Parallel.of(zero_stage=3, **SMALL)))
        loss = loss_of(model, 0)
        before = engine.memory()["parameters"]
        with engine.gathered():
            with engine.gathered():
                assert engine.memory()["parameters"] > before
            assert engine.memory()["parameters"] > before > 0
        assert engine.memory()["parameters"] == before
        loss.backward()

    run_ranks(run, 2)


@pytest.mark.filterwarnings("error")
def test_what_a_failed_forward_says_is_not_drowned():
    """A rank that lost its peer fails in the forward, and again where the root cleans up."""

    def gone(*args, **options):
        raise RuntimeError("the end of rank 1")

    def run():
        fails = ((9,), IndexError, "out of range"), ((0,), RuntimeError, "the end of rank 1")
        for path, error, message in fails:
            model = parallelize(Paths(lambda *_, path=path: (path, None)), Mesh(), zero_stage=3)
            engine_of(model).gathers.end, model.i = gone, 0
            with pytest.raises(error, match=message):
                model(torch.zeros(1, 5, dtype=torch.int64))

    run_ranks(run, 2)


def test_what_several_units_use_belongs_to_the_root():
    model = Paths(None)
    shared = model.blocks[3].bias = model.blocks[1].bias
    units = unit_of_parameters(find_units(model, None, merge_bytes=0.0))
    assert list(map(units.get, (shared, model.blocks[1].weight, model.norm.bias))) == [0, 2, 0]


def test_small_neighbours_are_one_unit():
    model = Paths(None)
    size = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    for merge_bytes, n in ((2 * size, [1, 2, 2]), (3 * size, [1, 3, 1]), (2 * size - 1, [1] * 5)):
        assert [len(unit) for unit in find_units(model, None, merge_bytes=merge_bytes)] == n
