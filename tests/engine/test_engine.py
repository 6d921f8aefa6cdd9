"""The engine: when it reduces, in which order, what it refuses, and sums of few numbers.

tests/contracts/ has whole runs of every stage, way of accumulating and number of ranks.
"""

import contextlib

import pytest
import torch
from programs import SMALL, Net, assert_same, batch, fill, gradients, loss_of
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, engine_of, parallelize
from fastpar.comm.mesh import Mesh
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def one_rank():
    return Mesh(device="cpu")


def parallel(stage=0, **options):
    """A model on this rank, and its engine."""
    asked = Parallel.of(zero_stage=stage, **SMALL, **options)
    model = parallelize(fill(Net()), Mesh(device="cpu"), asked)
    return model, engine_of(model)


@stages
def test_a_micro_batch_of_several_forwards(stage):
    """Three of two forwards and two backward passes each: only the last one reduces."""

    def ranks():
        model, engine = parallel(stage)
        for micro in range(3):
            engine.begin_micro_batch(last=micro == 2)
            first = 6 * engine.mesh.rank + 2 * micro
            for loss in [loss_of(model, first), loss_of(model, first + 1)]:
                before = engine.log.hashes[0]
                loss.backward()
                assert (engine.log.hashes[0] != before) == (micro == 2)
            assert engine.micro_batches.begun == micro + 1
        return [g.clone() for _, g in engine.grads()]

    model = fill(Net())
    for i in range(12):
        (loss_of(model, i) / 2).backward()
    for result in run_ranks(ranks, 2):
        for grad, p in zip(result, model.parameters(), strict=True):
            # Twelve sums of values of at most 4 in another order: as many roundings on each side.
            assert (grad - p.grad).abs().max() <= 24 * 2**-24 * 4.0


def test_an_engine_refuses_to_step_with_gradients_that_are_not_reduced():
    model, engine = parallel()
    message = "from 'empty' to 'stepped', only to 'backward' or 'empty' or 'reduced'"
    with pytest.raises(RuntimeError, match=message):
        engine.after_step()
    with engine.no_sync():
        loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"cannot go from 'local' to 'stepped', only to"):
        engine.after_step()
    next(model.parameters()).register_post_accumulate_grad_hook(
        lambda p: engine.begin_micro_batch(last=True)
    )
    with pytest.raises(RuntimeError, match="called during a backward"):
        loss_of(model, 0).backward()


# Reports and checks


def test_grads_are_listed_in_registration_order():
    model, engine = parallel()
    model(batch(0)).sum().backward(inputs=[p for p in model.parameters() if p.dim() == 2])
    expected = [p for p in model.parameters() if p.dim() == 2]
    pairs = engine.grads()
    assert [id(p) for p, _ in pairs] == [id(p) for p in expected]
    assert all(p.grad is g for p, g in pairs)


def test_scalars_are_summed_in_rank_order():
    """2**53 + 1 is 2**53: in rank order only the last one may be more."""

    def ranks(deterministic):
        mesh = Mesh()
        engine = engine_of(parallelize(nn.Linear(2, 2), mesh, deterministic=deterministic))
        mine = torch.where(torch.arange(3) == mesh.rank, 2.0**53, 1.0).double()
        kept = mine.clone()
        total = engine.all_reduce_scalars(mine) - 2.0**53
        assert torch.equal(mine, kept)
        return total.tolist()

    for deterministic in (False, True):
        assert run_ranks(ranks, 3, deterministic) == [[0.0, 0.0, 2.0]] * 3
    engine = engine_of(parallelize(nn.Linear(2, 2), one_rank()))
    assert engine.all_reduce_scalars(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"expected fp32 or fp64, got dtype=torch\.int64"):
        engine.all_reduce_scalars(torch.ones(2, dtype=torch.int64))


def gloo_ranks_on_one_gpu():
    mesh = Mesh(device="cuda:0")
    model = parallelize(fill(Net()).to(mesh.device), mesh, Parallel.of(**SMALL))
    engine = engine_of(model)
    for step in range(3):
        model(batch(step * 2 + mesh.dp_rank).to(mesh.device)).square().mean().backward()
        engine.before_step()
        engine.after_step()
        result = {n: g.cpu() for n, g in gradients(model).items()}
        engine.zero_grad()
    torch.cuda.synchronize()
    assert engine.report.exposed_ms > 0
    engine.check_replicas()
    return result


@pytest.mark.gpu
def test_two_ranks_share_a_gpu_through_gloo():
    """NCCL refuses two ranks on one GPU; gloo runs the engine's CUDA path there."""
    first, second = run_ranks(gloo_ranks_on_one_gpu, 2, backend="gloo")
    assert_same(first, second)


# Gradients that are a sum over tp


class Scaled(nn.Module):
    """A norm that one rank may leave out, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.full((4,), 2.0)) for _ in range(3))
        self.tp = None

    def tensor_parallel(self, tp):
        self.tp = tp
        return dict.fromkeys("abc", tp.per_token)

    def forward(self, with_b):
        mine = torch.arange(4.0) + (self.tp.rank if self.tp else 0)
        loss = (self.a * mine).sum()
        return loss + (self.b * mine).sum() if with_b else loss


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("users", [(0,), (1,), (0, 1)])
def test_parameters_that_some_ranks_leave_out(users, stage):
    """Ranks of a tp group run the same model, but ranks of dp need not use the same of it."""

    def rank():
        mesh = Mesh(tp=2)
        model = parallelize(Scaled(), mesh, zero_stage=stage)
        optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        model(mesh.dp_rank in users).backward()
        optimizer.step()
        return {name: value.tolist() for name, value in model.state_dict().items()}

    for state in run_ranks(rank, 4):
        first_step = [pytest.approx(1.9, abs=1e-5)] * 3
        assert (state["a"][1:], state["b"][1:]) == (first_step, first_step)
        assert state["c"] == [2.0] * 4

    def part():
        """What only one rank of tp has is a part like any other; the other's is 0."""
        mesh = Mesh(tp=2)
        model = parallelize(Scaled(), mesh, zero_stage=1)
        model(mesh.tp_rank == 1).backward()
        names = {p: name for name, p in model.named_parameters()}
        return {names[p]: g.tolist() for p, g in engine_of(model).grads()}

    for grads in run_ranks(part, 4):
        assert grads["b"] == [1.0, 2.0, 3.0, 4.0]
        assert grads["a"] == [1.0, 3.0, 5.0, 7.0]


CHANGED = (
    r"Engine: p\.grad of '.*' was changed in place with tp=2, where a rank sees only its part "
    r"of the norm; clip with fastpar\.AdamW\(max_grad_norm=\.\.\.\)"
)


@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.parametrize("optimizer_of", [AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_clipping_by_hand_is_refused_with_tp(optimizer_of, tp):
    def rank(clip, limit):
        config = GPTConfig(1, 2, 16, 8, 30, dropout=0.0)
        model, idx = parallelize(GPT(config), Mesh(tp=tp)), torch.arange(8)[None]
        optimizer = optimizer_of(model.parameters(), lr=0.1)
        for clips in (False, True, False):  # not changed, changed, new gradients
            model(idx, idx).backward()
            if clips:
                clip(model.parameters(), limit)
            refused = clips and tp > 1
            with (
                pytest.raises(RuntimeError, match=CHANGED) if refused else contextlib.nullcontext()
            ):
                optimizer.step()
            optimizer.zero_grad()

    for clip, limit in ((nn.utils.clip_grad_value_, 1e-6), (nn.utils.clip_grad_norm_, 1e-3)):
        run_ranks(rank, 2, clip, limit)
