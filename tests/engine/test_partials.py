"""gradients.py: gradients that are a sum over tp are whole once, and counted once."""

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
CELLS = [(1, 2, 0), (2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3)]


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


def accumulates(dp, tp, stage, look, no_sync, set_to_none, micros=3, steps=2):
    """Gradients and parameters of a rank; between backwards it may look at p.grad."""
    model = split(tp, stage)
    engine, mesh = engine_of(model), engine_of(model).mesh
    optimizer, grads = AdamW(model.parameters(), **HYPER), []
    for step in range(steps):
        for micro in range(micros):
            idx = batch(step, micro, mesh.dp_rank)
            if no_sync and micro < micros - 1:
                with engine.no_sync():
                    model(idx, idx).backward()
            else:
                model(idx, idx).backward()
            if look:
                seen = whole_grads(model)
                if not no_sync:
                    assert_same(seen, reference(dp, micro + 1)[0][0] if step == 0 else seen)
        grads.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return grads, model.state_dict()


@covering(
    2,
    (("dp", "tp", "stage"), CELLS),
    ("look", [False, True]),
    ("no_sync", [False, True]),
    ("set_to_none", [True, False]),
)
def test_several_backwards_add_up(dp, tp, stage, look, no_sync, set_to_none):
    expected, parameters = reference(dp, 3, 2)
    for grads, state in run_ranks(accumulates, dp * tp, dp, tp, stage, look, no_sync, set_to_none):
        for got, want in zip(grads, expected, strict=True):
            assert_same(got, want)
        assert_same(state, parameters)


def looks_at_grad():
    """p.grad itself, after each backward; None as long as there is none."""
    model = split(2)
    seen = []
    for micro in range(3):
        idx = batch(0, micro, 0)
        model(idx, idx).backward()
        seen.append({n: p.grad.clone() for n, p in model.named_parameters() if "ln_" in n})
    return seen


def test_stage_0_shows_whole_sums_in_grad():
    results = run_ranks(looks_at_grad, 2)
    for micros in range(3):
        expected = reference(1, micros + 1)[0][0]
        for seen in results:
            for name, grad in seen[micros].items():
                assert_same({name: grad}, {name: expected[name]})


# What is summed, and when


def sums_of(stage, backwards, look=False):
    """Elements of each sum along tp of partial gradients, in a step."""
    model = split(2, stage)
    engine, sums = engine_of(model), []
    group = engine.declared.tp.group
    inner = group._all_reduce

    def noted(x, mean, tag):
        if x.dim() == 1:  # those of activations have the shape of activations
            sums.append(x.numel())
        return inner(x, mean, tag)

    group._all_reduce = noted
    optimizer = AdamW(model.parameters(), **HYPER)
    for micro in range(backwards):
        idx = batch(0, micro, 0)
        model(idx, idx).backward()
    optimizer.step()
    return sums


@pytest.mark.parametrize(("stage", "expected"), [(0, 3), (1, 1), (2, 1), (3, 1)])
def test_one_sum_for_a_step(stage, expected):
    """At stage 0 one for a backward: p.grad can be read after it."""
    numel = (8 + 6 + 2) * 16  # wpe, three norms, two biases
    own = numel if stage == 0 else None
    totals = []
    for sums in run_ranks(sums_of, 4, stage, 3):
        assert len(sums) == expected
        assert own is None or sums == [own] * 3
        totals.append(sums[0])
    if stage:  # two ranks of dp share the elements
        assert totals[0] == totals[1]
        assert totals[0] + totals[2] == numel


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
        grads = None
        state = model.state_dict()
        return grads, {name: value.tolist() for name, value in state.items()}

    for _, state in run_ranks(rank, 4):
        first_step = [pytest.approx(1.9, abs=1e-5)] * 3
        assert state["a"][1:] == first_step
        assert state["b"][1:] == first_step
        assert state["c"] == [2.0] * 4


def test_a_gradient_that_only_one_rank_of_tp_has():
    """It is a part like any other; the other's is 0."""

    def rank():
        mesh = Mesh(tp=2)
        model = parallelize(Net(), mesh, zero_stage=1)
        model(mesh.tp_rank == 1).backward()
        return {n: g.tolist() for n, g in whole_grads(model).items()}

    for grads in run_ranks(rank, 4):
        assert grads["b"] == [1.0, 2.0, 3.0, 4.0]
        assert grads["a"] == [1.0, 3.0, 5.0, 7.0]


def two_optimizers(stage):
    model = split(2, stage)
    norms = [p for n, p in model.named_parameters() if "ln_" in n]
    rest = [p for n, p in model.named_parameters() if "ln_" not in n]
    optimizers = [AdamW(norms, **HYPER), AdamW(rest, **HYPER)]
    for step in range(2):
        for micro in range(2):
            idx = batch(step, micro, engine_of(model).mesh.dp_rank)
            model(idx, idx).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_optimizers_step_with_the_same_sums(stage):
    expected = reference(2, 2, 2)[1]
    for state in run_ranks(two_optimizers, 4, stage):
        assert_same(state, expected)


# Stock optimizers, and clipping by hand


def steps_with_stock(foreach):
    model = split(2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach, **HYPER)
    for step in range(3):
        idx = batch(step, 0, engine_of(model).mesh.dp_rank)
        model(idx, idx).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine_of(model).check_replicas()
    return model.state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("foreach", [False, True])
def test_stock_adamw_at_stage_0(ranks, foreach):
    """What it does to an element depends on that element only."""
    expected = reference(ranks // 2, 1, 3, torch.optim.AdamW)[1]
    for state in run_ranks(steps_with_stock, ranks, foreach):
        assert_same(state, expected)


def clip_by_value(parameters):
    nn.utils.clip_grad_value_(parameters, 1e-6)


def clip_by_norm(parameters):
    nn.utils.clip_grad_norm_(parameters, 1e-3)


@pytest.mark.parametrize("clip", [clip_by_value, clip_by_norm])
@pytest.mark.parametrize("optimizer_of", [AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_clipping_by_hand_is_refused(optimizer_of, clip):
    def rank():
        model = split(2)
        optimizer = optimizer_of(model.parameters(), lr=0.1)
        idx = batch(0, 0, 0)
        model(idx, idx).backward()
        optimizer.step()  # not changed: taken
        optimizer.zero_grad()
        model(idx, idx).backward()
        clip(model.parameters())
        message = (
            r"Engine: expected gradients as backward left them with tp=2, got p\.grad of '.*' "
            r"changed in place; a rank sees its part of the norm only: clip with fastpar\.AdamW\("
            r"max_grad_norm=\.\.\.\)"
        )
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        optimizer.zero_grad()
        model(idx, idx).backward()
        optimizer.step()  # new gradients: taken

    run_ranks(rank, 2)


def test_clipping_by_hand_is_fine_without_tp():
    def rank():
        model = parallelize(gpt(), Mesh())
        optimizer = AdamW(model.parameters(), lr=0.1)
        idx = batch(0, 0, 0)
        model(idx, idx).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    run_ranks(rank, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_counts_each_element_once(stage):
    def rank():
        model = split(2, stage)
        optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=0.1)
        idx = batch(0, 0, engine_of(model).mesh.dp_rank)
        model(idx, idx).backward()
        optimizer.step()
        return optimizer.grad_norm.item()

    grads = reference(2, 1)[0][0].values()
    expected = torch.stack([g.norm() for g in grads]).norm().item()
    for norm in run_ranks(rank, 4):
        assert norm == pytest.approx(expected, rel=1e-6)
