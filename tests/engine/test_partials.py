"""gradients.py: gradients that are a sum over tp are whole once, and counted once.

tests/contracts/test_tp_modes.py has every way to accumulate them.
"""

import contextlib
import functools

import pytest
import torch
from cells import covering
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, engine_of, parallelize
from fastpar.comm.mesh import Mesh
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30, "dropout": 0.0}


# eps well above the rounding of gradients that are 0 in exact arithmetic (those of the keys' bias).
HYPER = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}


def gpt():
    return GPT(GPTConfig(**SIZES)).double()


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 30, (2, 8), generator=generator)


def split(tp, stage=0, **options):
    return parallelize(gpt(), Mesh(tp=tp), Parallel.of(zero_stage=stage, bucket_mb=0.01, **options))


def whole_grads(model):
    engine = engine_of(model)
    return {
        engine.shards.layout.slots[engine.shards.index[p]].spec.names[0]: g
        for p, g in engine.grads()
    }


def reference(dp, micros, steps=1, optimizer_of=AdamW):
    """Gradients before each step and parameters after all, of one process."""
    model = gpt()
    optimizer, grads = optimizer_of(model.parameters(), **HYPER), []
    for step in range(steps):
        for micro in range(micros):
            for rank in range(dp):
                idx = batch(step, micro, rank)
                (model(idx, idx) / dp).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return grads, model.state_dict()


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        bound = 1e-12 * want.abs().max().item() + 1e-18
        assert (got[name] - want).abs().max().item() <= bound, name


def accumulates(stage, look, no_sync):
    """Gradients and parameters of a rank of two steps; between backwards it may look at p.grad."""
    model = split(2, stage)
    engine, mesh = engine_of(model), engine_of(model).mesh
    optimizer, grads = AdamW(model.parameters(), **HYPER), []
    for step in range(2):
        for micro in range(3):
            idx = batch(step, micro, mesh.dp_rank)
            quiet = no_sync and micro < 2
            with engine.no_sync() if quiet else contextlib.nullcontext():
                model(idx, idx).backward()
            if look:
                seen = whole_grads(model)
                if stage == 0 and not quiet:  # p.grad itself can be read
                    named = dict(model.named_parameters())
                    assert all(torch.equal(named[n].grad, g) for n, g in seen.items() if "ln_" in n)
                if not no_sync and step == 0:
                    assert_same(seen, reference(mesh.dp_size, micro + 1)[0][0])
        grads.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not look)
    return grads, model.state_dict()


@covering(
    2,
    (("dp", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]),
    ("look", [False, True]),
    ("no_sync", [False, True]),
)
def test_several_backwards_add_up(dp, stage, look, no_sync):
    expected, parameters = reference(dp, 3, 2)
    for grads, state in run_ranks(accumulates, dp * 2, stage, look, no_sync):
        for got, want in zip(grads, expected, strict=True):
            assert_same(got, want)
        assert_same(state, parameters)


class Net(nn.Module):
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
        model = parallelize(Net(), mesh, zero_stage=stage)
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
        model = parallelize(Net(), mesh, zero_stage=1)
        model(mesh.tp_rank == 1).backward()
        return {n: g.tolist() for n, g in whole_grads(model).items()}

    for grads in run_ranks(part, 4):
        assert grads["b"] == [1.0, 2.0, 3.0, 4.0]
        assert grads["a"] == [1.0, 3.0, 5.0, 7.0]


# Other optimizers, and clipping by hand


@pytest.mark.parametrize(
    ("ranks", "stage", "foreach"),
    [*((4, stage, None) for stage in (0, 1, 3)), (2, 0, False), (4, 0, True)],
)
def test_other_optimizers_step_with_the_same_sums(ranks, stage, foreach):
    """Two of one model; torch's at stage 0: what it does to an element depends on that alone."""
    stock = functools.partial(torch.optim.AdamW, foreach=foreach)

    def rank():
        model = split(2, stage)
        names = dict(model.named_parameters())
        of = [[p for n, p in names.items() if ("ln_" in n) == norm] for norm in (True, False)]
        optimizers = [
            AdamW(part, **HYPER) if foreach is None else stock(part, **HYPER) for part in of
        ]
        for step in range(2):
            for micro in range(2):
                idx = batch(step, micro, engine_of(model).mesh.dp_rank)
                model(idx, idx).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        engine_of(model).check_replicas()
        return model.state_dict()

    expected = reference(ranks // 2, 2, 2, AdamW if foreach is None else torch.optim.AdamW)[1]
    for state in run_ranks(rank, ranks):
        assert_same(state, expected)


CHANGED = (
    r"Engine: expected gradients as backward left them with tp=2, got p\.grad of '.*' "
    r"changed in place; a rank sees its part of the norm only: clip with fastpar\.AdamW\("
    r"max_grad_norm=\.\.\.\)"
)


@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.parametrize("optimizer_of", [AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_clipping_by_hand_is_refused_with_tp(optimizer_of, tp):
    def rank(clip, limit):
        model = split(tp)
        optimizer, idx = optimizer_of(model.parameters(), lr=0.1), batch(0, 0, 0)
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
