"""The engine around its gradients: how models begin, are saved and copied; what breaks; reports."""

import copy
import gc
import io
import os
import pickle
import time
import weakref
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from cells import covering, slow, sweep
from programs import SMALL, Net, assert_same, loss_of
from test_engine import one_rank
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Partial, Replicate, Shard
from fastpar.testing import run_ranks


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


def test_an_engine_lives_as_long_as_a_parameter():
    model = parallelize(Net(), one_rank())
    parameters, engine = list(model.parameters()), weakref.ref(engine_of(model))
    del model
    gc.collect()
    assert engine() is not None
    del parameters
    gc.collect()
    assert engine() is None


# A model whose ranks have parts of it saves and loads whole tensors


SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30}


@sweep("stage", [1, 2, 3])
def test_a_printed_shard_says_what_it_is_and_where_to_look(stage):
    def ranks():
        model = parallelize(nn.Sequential(nn.Linear(6, 4)), Mesh(), zero_stage=stage)
        p, shown = model[0].weight, []
        model(torch.ones(2, 6)).sum().backward()
        shown += [repr(p.grad), f"{p.grad.T}"]
        AdamW(model.parameters()).step()
        shown += [repr(p), str(p.data)]
        with engine_of(model).gathered():
            assert repr(p).startswith("Parameter containing:\ntensor([[")
        return shown

    for rank, shown in enumerate(run_ranks(ranks, 4)):
        weight = f"shard of [4, 6], rank {rank} of 4; engine_of(model).gathered() shows it"
        grad = f"gradient shard of [%s], rank {rank} of 4; engine_of(model).grads() shows it"
        containing = f"Parameter containing:\n{weight}"
        assert shown == [grad % "4, 6", grad % "6, 4", containing, weight]
    model = parallelize(nn.Linear(6, 4).bfloat16(), Mesh(), grad_dtype=torch.float32)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    elsewhere = "gradient of [4, 6], kept elsewhere; engine_of(model).grads() shows it"
    assert repr(model.weight.grad) == elsewhere


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
        model, idx, file = split(), torch.arange(8)[None], io.BytesIO()
        saved = model.state_dict()
        torch.save(saved, file)
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
        again = split()
        again.load_state_dict(model.state_dict())
        assert_same(again.state_dict(), other)
        file.seek(0)
        plain = gpt(seed=2)
        plain.load_state_dict(torch.load(file, weights_only=True))
        assert_same(plain.state_dict(), first)
        # A wrong shape, also one that is a slice's: each rank would take the same for its own.
        name = "h.0.mlp.c_fc.weight"
        for n in (63, 32):
            message = rf"size mismatch for {name}: .*\[{n}, 16\]"
            if tp > 1:
                message = (
                    rf"{name}: expected the whole tensor's shape \[64, 16\], got \[{n}, 16\]; l"
                )
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
    assert_same(first, gpt().state_dict())
    assert_same(other, gpt(seed=1).state_dict())


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
    """Saved by its state_dict; frozen experts stay what they were; replicas are compared."""
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
        assert "experts: ep=2" in engine.describe()
        assert "2 ranks have" in engine.describe()
        assert_same(model.state_dict(), gpt(**sizes).state_dict())
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


# Reports


def test_a_lone_rank_is_at_stage_0():
    for options in ({}, {"zero_stage": 3}, {"zero_stage": 2, "shard_size": 1}):
        engine = engine_of(parallelize(Net(), one_rank(), Parallel.of(**options)))
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


def lose_a_rank(when, stage):
    mesh = Mesh()
    model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
    for step in range(3):
        if mesh.rank == 1 and step == 2:
            if when == "in backward":
                model.norm.weight.register_hook(lambda _: os._exit(9))
            else:
                os._exit(9)
        if step == 2 and when == "before scalars":
            engine_of(model).all_reduce_scalars(torch.ones(1))
        loss_of(model, step).backward()


@pytest.mark.parametrize(
    ("when", "stage", "what"),
    [
        ("in backward", 3, r"(starting|waiting for|gathering) bucket \d+"),
        slow("between steps", 0, r"(starting|waiting for|gathering) bucket \d+"),
        slow("before scalars", 0, r"summing scalars after bucket \d"),
    ],
)
def test_a_dead_rank_is_reported_with_rank_bucket_and_step(when, stage, what):
    survivor, dead = run_ranks(
        lose_a_rank, 2, when, stage, backend="gloo", timeout_s=30, return_exceptions=True
    )
    with pytest.raises(RuntimeError, match=rf"Engine: rank 0 failed while {what} of step 2"):
        raise survivor
    with pytest.raises(RuntimeError, match=r"rank 1: exit status 9"):
        raise dead
