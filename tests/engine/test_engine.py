"""The engine: when it reduces, in which order; how models begin, are saved and copied; what breaks.

tests/contracts/ has whole runs of every stage, way of accumulating and number of ranks.
"""

import contextlib
import copy
import gc
import os
import pickle
import time
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from cells import covering, slow, sweep
from programs import SMALL, Net, assert_same, batch, fill, gradients, loss_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Partial, Replicate, Shard
from fastpar.testing import run_ranks

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


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
    p = next(model.parameters())
    p.register_post_accumulate_grad_hook(lambda p: engine.begin_micro_batch(last=True))
    with pytest.raises(RuntimeError, match="called during a backward"):
        loss_of(model, 0).backward()


def test_grads_are_listed_in_registration_order():
    model, engine = parallel()
    with engine.gathered():  # where a forward uses the parameters themselves
        model(batch(0)).sum().backward(inputs=[p for p in model.parameters() if p.dim() == 2])
    expected = [p for p in model.parameters() if p.dim() == 2]
    pairs = engine.grads()
    assert [id(p) for p, _ in pairs] == [id(p) for p in expected]
    assert all(p.grad is g for p, g in pairs)


class Collecting(nn.Linear):
    """Its forward runs when the garbage collector does."""

    def forward(self, x):
        gc.collect()
        return super().forward(x)


def test_nobody_but_the_model_need_hold_its_engine():
    """While a forward runs, modules do not have their parameters, which hold the engine."""

    def of_rank(stage):
        model = parallelize(Collecting(4, 4), Mesh(device="cpu"), Parallel.of(zero_stage=stage))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        return len(engine_of(model).grads())

    for stage in (0, 3):
        assert run_ranks(of_rank, 2, stage) == [2, 2]


def test_autograd_of_parameters_is_for_gathered():
    """A forward's graph ends at the nodes of the buckets, but in gathered() at the parameters."""
    model, engine = parallel()
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(batch(0)).sum(), params)
    with engine.gathered():
        found = torch.autograd.grad(model(batch(0)).sum(), params)
    model(batch(0)).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, found, strict=True))


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
    engine = engine_of(parallelize(nn.Linear(2, 2), Mesh(device="cpu")))
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


class Reads(TorchDispatchMode):
    """Counts waits of the host for one number of a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


def test_unused_parameters_are_not_asked_for_one_by_one():
    """At stage 0 with several ranks each was a wait for the GPU in every step."""

    def rank(n_unused):
        model = nn.ModuleList(nn.Linear(2, 2) for _ in range(1 + n_unused))
        model.forward = lambda x: model[0](x).sum()
        model = parallelize(model, Mesh(device="cpu"), zero_stage=0)
        with Reads() as reads:
            model(torch.ones(1, 2)).backward()
        assert [p.grad is None for p in model.parameters()] == [False] * 2 + [True] * 2 * n_unused
        return reads.count

    assert run_ranks(lambda: rank(9), 2) == run_ranks(lambda: rank(1), 2)


CHANGED = r"p\.grad of '.*' was changed in place with tp=2, .* clip with fastpar\.AdamW\(max_grad"


@pytest.mark.slow
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
            refused = pytest.raises(RuntimeError, match=CHANGED)
            with refused if clips and tp > 1 else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()

    for clip, limit in ((nn.utils.clip_grad_value_, 1e-6), (nn.utils.clip_grad_norm_, 1e-3)):
        run_ranks(rank, 2, clip, limit)


class Normed(nn.BatchNorm1d):
    """Buffers are rank 0's, but for one that is another one on each rank of tp."""

    def __init__(self, seed):
        super().__init__(3)
        self.running_mean.fill_(float(seed))
        self.num_batches_tracked.fill_(seed)
        self.tp_states = {"weight": Replicate(), "bias": Replicate()}

    def tensor_parallel(self, tp):
        self.register_buffer("first_row", torch.tensor([tp.rank]))
        return {}


@covering(1, ("tp", [1, 2, 4]), ("stage", [0, 1, 2, 3]))
def test_all_ranks_begin_with_the_buffers_of_the_first(tp, stage):
    """tests/contracts/test_same_run.py has parameters."""

    def ranks():
        model = parallelize(Normed(dist.get_rank()), Mesh(tp=tp), zero_stage=stage)
        return dict(model.state_dict())

    for rank, found in enumerate(run_ranks(ranks, 4)):
        assert tp == 1 or found.pop("first_row") == rank % tp
        assert_same(found, Normed(0).state_dict())


# A model whose ranks have parts of it saves and loads whole tensors
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30}


CELLS = [(tp, stage) for tp in (1, 2) for stage in range(4) if (tp, stage) != (1, 0)]


def gpt(seed=0, **changes):
    return GPT(GPTConfig(**{**SIZES, **changes}), seed=seed)


@sweep(("tp", "stage"), CELLS)
def test_a_state_dict_has_whole_tensors(tp, stage):
    """A copy that outlives a step; what is loaded is cut, or refused and changes nothing."""
    first, other = gpt().state_dict(), gpt(seed=1).state_dict()

    def split():
        return parallelize(gpt(), Mesh(tp=tp), Parallel.of(zero_stage=stage, bucket_mb=0.01))

    def rank():
        model, idx = split(), torch.arange(8)[None]
        saved = model.state_dict()
        assert_same(saved, first)
        optimizer = AdamW(model.parameters(), lr=0.1)
        model(idx, idx).backward()
        optimizer.step()
        assert_same(saved, first)
        for value in saved.values():
            value.fill_(7.0)
        assert all((v != 7.0).all() for v in model.state_dict().values())
        assert model.load_state_dict(other) == ([], [])
        engine_of(model).check_replicas()
        assert_same(model.state_dict(), other)
        # A wrong shape, also one that is a slice's: each rank would take the same for its own.
        name = "h.0.mlp.c_fc.weight"
        for n in (63, 32):
            message = rf"size mismatch for {name}: .*\[{n}, 16\]"
            if tp > 1:
                message = rf"{name}: expected .* whole .* shape \[64, 16\], got \[{n}, 16\]; load"
            with pytest.raises(RuntimeError, match=message):
                model.load_state_dict({**first, name: torch.zeros(n, 16)}, strict=False)
        short = {n: v for n, v in other.items() if n != "h.0.ln_1.bias"}
        short["extra"] = torch.zeros(1)
        message = r'(?s)Missing key.*"h\.0\.ln_1\.bias".*Unexpected key.*"extra"'
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(short)
        missing = model.load_state_dict(short, strict=False)
        assert missing == (["h.0.ln_1.bias"], ["extra"])
        assert_same(model.state_dict(), other)

    run_ranks(rank, 4)


class Tied(nn.Module):
    tp_states: ClassVar = {"a": Shard(0), "b": Shard(0), "scale": Partial(), "frozen": Shard(0)}

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(8.0).view(4, 2))
        self.b = self.a
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))


def test_tied_frozen_and_buffers_inside_of_another_module():
    """Tied names share their whole tensor, as in one process; a copy of this rank's part is a plain
    module, for which nothing is gathered."""

    def rank():
        inner = parallelize(Tied(), Mesh(tp=2))
        outer = nn.ModuleDict({"x": inner})
        saved, plain = outer.state_dict(), nn.ModuleDict({"x": Tied()})
        assert_same(saved, plain.state_dict())
        assert saved["x.a"].data_ptr() == saved["x.b"].data_ptr()
        loaded = {name: value + 1 for name, value in saved.items()}
        outer.load_state_dict(loaded)
        assert_same(outer.state_dict(), loaded)
        twins = copy.deepcopy(inner), pickle.loads(pickle.dumps(inner)), inner
        return inner.frozen.numel(), [list(m.state_dict()["a"].shape) for m in twins]

    assert run_ranks(rank, 2) == [(2, [[2, 2], [2, 2], [4, 2]])] * 2


@sweep("stage", [0, 2, 3])
def test_a_model_with_experts_on_ranks_of_ep(stage):
    """Frozen experts stay what they were; no rank's experts are those of another."""
    sizes = {"n_layer": 2, "n_expert": 4, "top_k": 2}

    def rank():
        model, mesh = gpt(**sizes), Mesh(ep=2)
        frozen = model.h[1].mlp.c_fc.weight.requires_grad_(False)
        whole, mine = frozen.detach().clone(), 2 * mesh.rank_in("ep")
        parallelize(model, mesh, zero_stage=stage)
        assert torch.equal(model.h[1].mlp.c_fc.weight, whole[mine : mine + 2])
        assert copy.deepcopy(model.h[0].mlp.ep) is model.h[0].mlp.ep
        with pytest.raises(RuntimeError, match=r"ExpertParallel: .* save model.state_dict\(\)"):
            model.h[0].mlp.ep.__reduce__()
        engine, optimizer = engine_of(model), AdamW(model.parameters())
        other = gpt(1, **sizes).state_dict()
        model.load_state_dict(other)
        assert_same(model.state_dict(), other)
        x = torch.zeros(2, 8, dtype=torch.int64)
        model(x, x).backward()
        optimizer.step()
        engine.check_replicas(optimizer)
        with engine.gathered():
            own = model.h[0].mlp.c_fc.weight
            assert own.shape == (2, 64, 16)
            if engine.mesh.rank == 2:
                own.data[0, 0, 0] += 1.0  # as rank 0's own experts
        if stage < 3:
            with pytest.raises(RuntimeError, match=r"replicas differ .*rank.*c_fc.weight"):
                engine.check_replicas(optimizer)

    run_ranks(rank, 4)


def test_a_lone_rank_is_at_stage_0():
    for options in ({}, {"zero_stage": 3}, {"zero_stage": 2, "shard_size": 1}):
        engine = engine_of(parallelize(Net(), Mesh(device="cpu"), Parallel.of(**options)))
        assert engine.describe().startswith("engine: stage 0, dp=1")


def wait_for_a_slow_rank():
    mesh = Mesh()
    model = parallelize(Net(), mesh)
    engine, waited = engine_of(model), []
    for step in range(3):
        dist.barrier()
        if step == 1 and mesh.rank == 1:
            time.sleep(0.5)
        loss_of(model, step).backward()
        engine.before_step()
        engine.exchange(None)
        engine.after_step()
        waited.append(engine.report.exposed_ms)
        engine.zero_grad()
    return waited


def test_exposed_communication_is_the_time_spent_waiting():
    """A lower bound only: rank 0 cannot have waited less than rank 1 slept after the barrier."""
    fast, slow = run_ranks(wait_for_a_slow_rank, 2)
    assert fast[1] > 400
    assert fast[1] > slow[1]
    assert fast[1] > fast[2]  # each step has its own
    assert all(ms > 0 for ms in (*fast, *slow))
    assert run_ranks(wait_for_a_slow_rank, 1) == [[0.0] * 3]


def lose_a_rank(when, stage, transport):
    mesh = Mesh()
    model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, transport=transport, **SMALL))
    optimizer = AdamW(model.parameters())
    for step in range(3):
        if mesh.rank == 1 and step == 2:
            if when == "in backward":
                model.norm.weight.register_hook(lambda _: os._exit(9))
            else:
                os._exit(9)
        if step == 2 and when == "before scalars":
            engine_of(model).all_reduce_scalars(torch.ones(1))
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("when", "stage", "transport", "what"),
    [
        ("in backward", 3, "auto", r"(starting|waiting for|gathering) bucket \d+"),
        slow("between steps", 0, "torch", r"(starting|waiting for|gathering) bucket \d+"),
        slow("before scalars", 0, "auto", r"summing scalars after bucket \d"),
    ],
)
def test_a_dead_rank_is_reported_with_rank_bucket_and_step(when, stage, transport, what):
    how = {"backend": "gloo", "timeout_s": 30, "return_exceptions": True}
    gone = r" .*; rank 1 has ended after step 2; unless its own message says why, give every rank"
    survivor, dead = run_ranks(lose_a_rank, 2, when, stage, transport, **how)
    with pytest.raises(RuntimeError, match=rf"Engine: rank 0 failed while {what} of step 2{gone}"):
        raise survivor
    with pytest.raises(RuntimeError, match=r"rank 1: exit status 9"):
        raise dead
