"""State of parameters of sharded engines: whole in state dicts and checkpoints, cut when loaded."""

import pytest
import torch
from cells import cells
from test_optim_sharded import (
    HYPER,
    SMALL,
    Bag,
    assert_same_values,
    groups,
    sharded,
    stages,
    train,
    train_alone,
    values,
)
from test_optim_state import MODES, assert_same_state

import fastpar
from fastpar import GPT, GPTConfig
from fastpar.comm.mesh import Mesh
from fastpar.optim.adamw import AdamW
from fastpar.testing import run_ranks

OPTIONS = {"master_weights": "remainder", "moment_dtype": torch.uint8, "max_grad_norm": 2.0}


def train_in_a_process(transport):
    model = sharded(3, torch.bfloat16, transport=transport)
    optimizer = AdamW(groups(model), **HYPER, **OPTIONS)
    train(model, optimizer, range(3))
    return values(model), optimizer.state_dict()


@pytest.mark.parametrize("transport", [pytest.param("torch", marks=pytest.mark.slow), "shm"])
def test_processes_have_the_state_of_one(transport):
    model = Bag(torch.bfloat16)
    alone = AdamW(groups(model), **HYPER, **OPTIONS)
    train_alone(model, alone, range(3))
    for mine, state in run_ranks(train_in_a_process, 2, transport, backend="gloo"):
        assert_same_values(model, mine)
        assert_same_state(state, alone.state_dict())


def resume(stage, world, dtype, options, model_state, state, steps):
    """Values and state after a run on other ranks; stage None: one process without engine."""

    def run():
        model = Bag(dtype, seed=9)
        if stage is not None:
            fastpar.parallelize(model, Mesh(), fastpar.Parallel.of(zero_stage=stage, **SMALL))
        optimizer = AdamW(groups(model), **HYPER, **options, max_grad_norm=2.0, seed=5)
        if state is None:
            model.load_state_dict(Bag(dtype).state_dict())
        else:
            model.load_state_dict(model_state)
            optimizer.load_state_dict(state)
        train(model, optimizer, steps)
        return model.state_dict(), optimizer.state_dict()

    return run() if stage is None else run_ranks(run, world)[world - 1]


PATHS = [((1, 2), (3, 4)), ((2, 4), (None, 1)), ((None, 1), (2, 4)), ((3, 2), (0, 2))]


@pytest.mark.parametrize(("mode", "path"), cells(MODES, PATHS, strength=1))
def test_state_goes_to_other_stages_and_ranks(mode, path):
    dtype, options = mode
    model_state, state = None, None
    for (stage, world), steps in zip(path, (range(2), range(2, 4))):
        model_state, state = resume(stage, world, dtype, options, model_state, state, steps)
    model = Bag(dtype)
    alone = AdamW(groups(model), **HYPER, **options, max_grad_norm=2.0, seed=5)
    train_alone(model, alone, range(4))
    assert_same_values(model, model_state)
    assert_same_state(state, alone.state_dict())


@stages
@pytest.mark.parametrize("form", [{}, {"moment_dtype": torch.uint8}, {"amsgrad": True}], ids=str)
def test_state_of_torch_loads_into_any_stage_and_goes_back(stage, form):
    model = Bag()
    theirs = torch.optim.AdamW(groups(model), **HYPER, amsgrad="amsgrad" in form)
    train_alone(model, theirs, range(2))
    saved = theirs.state_dict()
    model_state = {n: p.clone() for n, p in model.state_dict().items()}

    def ranks():
        mine = sharded(stage)
        optimizer = AdamW(groups(mine), **HYPER, **form, seed=5)
        mine.load_state_dict(model_state)
        optimizer.load_state_dict(saved)
        train(mine, optimizer, range(2, 4))
        return values(mine), optimizer.torch_state_dict()

    alone = AdamW(groups(model), **HYPER, **form, seed=5)
    alone.load_state_dict(saved)
    train_alone(model, alone, range(2, 4))
    for mine, state in run_ranks(ranks, 2):
        assert_same_values(model, mine)
        assert_same_state(state, alone.torch_state_dict())
        torch.optim.AdamW(groups(model)).load_state_dict(state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_taken_over_in_place(stage, dtype):
    """What a checkpoint does with this rank's part of every entry."""
    options = {"moment_dtype": torch.uint8, "seed": 5}
    if dtype == torch.bfloat16:
        options["master_weights"] = "remainder"

    def ranks():
        model = sharded(stage, dtype)
        optimizer = AdamW(groups(model), **HYPER, **options)
        train(model, optimizer, range(1))
        saved = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
        whole, state = values(model), optimizer.state_dict()
        places = {p: s["exp_avg_codes"].data_ptr() for p, s in optimizer.state.items()}
        train(model, optimizer, range(1, 3))
        model.load_state_dict(whole)
        [engine] = optimizer.engines()
        for name, p in model.named_parameters():
            target = engine.shards.piece(p).param.detach()
            optimizer.load_piece(p, target, {**saved[p], "mine": torch.tensor(3)}, where=name)
            assert optimizer.state[p].pop("mine") == 3
            assert optimizer.state[p]["exp_avg_codes"].data_ptr() == places[p]
        assert_same_state(optimizer.state_dict(), state)
        return True

    assert run_ranks(ranks, 2) == [True, True]


def test_saved_entries_are_checked_by_their_whole_shapes():
    model = Bag()
    optimizer = AdamW(model.parameters())
    train_alone(model, optimizer, range(1))
    saved = {**optimizer.state[model.bias], "exp_avg": torch.zeros(34, device="meta")}
    with pytest.raises(
        ValueError, match=r"expected exp_avg of shape \[33\] for its bias, got shape"
    ):
        optimizer.check_saved(model.bias, saved, where="its bias")
    optimizer.check_saved(model.bias, optimizer.state[model.bias], where="its bias")


@stages
def test_a_wrong_state_is_refused_by_its_whole_shape(stage):
    def ranks():
        model = sharded(stage)
        optimizer = AdamW(model.parameters())
        train(model, optimizer, range(1))
        state = optimizer.state_dict()
        state["state"][0]["exp_avg"] = torch.zeros(40, 34)
        optimizer.load_state_dict(state)

    with pytest.raises(ValueError, match=r"expected exp_avg of shape \[40, 33\] for parameter 0 "):
        run_ranks(ranks, 2)


@stages
def test_hooks_see_the_whole_state(stage):
    def ranks():
        model = sharded(stage)
        optimizer = AdamW(model.parameters())
        train(model, optimizer, range(1))
        seen = []
        optimizer.register_state_dict_post_hook(
            lambda _, state: seen.append(state["state"][0]["exp_avg"].shape)
        )
        optimizer.state_dict()
        return seen, optimizer.state[model.weight]["exp_avg"].dim()

    for seen, dim in run_ranks(ranks, 2):
        assert seen == [(40, 33)]
        assert dim == 1


def test_a_state_of_split_parameters_comes_back():
    """At stage 0 a parameter of tp ranks is its own piece, and smaller than its state on disk."""

    def ranks():
        config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=131)
        model = fastpar.parallelize(GPT(config), Mesh(tp=2, device="cpu"))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        x = torch.arange(8)[None]
        model(x, x).backward()
        optimizer.step()
        before = optimizer.state_dict()
        optimizer.load_state_dict(before)
        assert_same_state(optimizer.state_dict(), before)
        return True

    assert run_ranks(ranks, 2) == [True, True]
