"""What parallelize() refuses of experts, and what an engine says of them."""

import copy
from dataclasses import replace

import pytest
import torch

import fastpar
from fastpar.models.gpt import GPT
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

SHAPE = GPTConfig(2, 2, 16, 16, 64, dropout=0.0, n_expert=4, top_k=2)


def make(mesh, shape=SHAPE, **options):
    return fastpar.parallelize(GPT(shape), fastpar.Mesh(**mesh), fastpar.Parallel.of(**options))


@pytest.mark.parametrize(
    ("ranks", "mesh", "options", "message"),
    [
        (3, {"ep": 3}, {}, "ep to divide n_expert=4, got ep=3; change n_expert"),
        (8, {"ep": 4}, {"zero_stage": 2, "shard_size": 2}, "shard_size to be a multiple of ep=4"),
    ],
)
def test_what_is_refused(ranks, mesh, options, message):
    with pytest.raises(ValueError, match=f"parallelize: expected {message}"):
        run_ranks(lambda: make(mesh, **options), ranks)


def test_a_capacity_is_of_whole_sequences():
    shape = replace(SHAPE, expert_capacity=1.0)
    with pytest.raises(ValueError, match=r"^expert_capacity does not run with cp: its ranks"):
        run_ranks(lambda: make({"cp": 2}, shape), 2)


def test_a_dense_model_has_nothing_to_share_out():
    dense = GPTConfig(2, 2, 16, 16, 64)
    with pytest.raises(ValueError, match=r"ep to divide n_expert=0, got ep=2; change n_exp"):
        run_ranks(lambda: make({"ep": 2}, dense), 2)


def test_tokens_that_sequence_parallelism_would_pad_are_refused():
    for ranks, mesh, shape, options, rule in (
        (2, {"tp": 2}, (1, 15), {"sequence_parallel": True}, r"B \* T divisible by 2 with"),
        (4, {"tp": 2, "cp": 2}, (2, 10), {"cp_method": "keys"}, "T divisible by 4 with"),
        (4, {"cp": 4}, (2, 12), {"cp_method": "keys"}, "T divisible by 8 with"),
    ):

        def rank(mesh=mesh, shape=shape, options=options):
            model = make(mesh, **options)
            model(torch.zeros(shape, dtype=torch.int64))

        with pytest.raises(ValueError, match=rf"{rule} experts .* got idx=\[{shape[0]}, "):
            run_ranks(rank, ranks)


def test_a_model_on_ranks_of_ep_is_saved_by_its_state_dict():
    def rank():
        model = make({"ep": 2})
        assert copy.deepcopy(model.h[0].mlp.ep) is model.h[0].mlp.ep
        with pytest.raises(RuntimeError, match=r"ExpertParallel: .* save model.state_dict\(\)"):
            model.h[0].mlp.ep.__reduce__()
        state = model.state_dict()
        assert state["h.0.mlp.c_fc.weight"].shape == (4, 64, 16)
        again = GPT(SHAPE, seed=1)
        again.load_state_dict(state)
        model.load_state_dict(again.state_dict())

    run_ranks(rank, 2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_tells_of_experts(stage):
    def rank():
        model = make({"ep": 2}, zero_stage=stage)
        engine = fastpar.engine_of(model)
        text = engine.describe()
        assert "experts: ep=2" in text
        assert "2 ranks have" in text
        opt = fastpar.AdamW(model.parameters())
        x = torch.zeros(2, 16, dtype=torch.int64)
        model(x, x).backward()
        opt.step()
        engine.check_replicas(opt)
        with engine.gathered():
            own = model.h[0].mlp.c_fc.weight
            assert own.shape == (2, 64, 16)
            if engine.mesh.rank == 2:
                own.data[0, 0, 0] += 1.0  # as rank 0's own experts
        if stage < 3:
            with pytest.raises(RuntimeError, match=r"difference .*rank.*c_fc.weight"):
                engine.check_replicas(opt)

    run_ranks(rank, 4)


def test_frozen_experts_stay_what_they_were():
    def rank():
        model = GPT(SHAPE, seed=2)
        whole = model.h[1].mlp.c_fc.weight.detach().clone()
        model.h[1].mlp.c_fc.weight.requires_grad_(False)
        mesh = fastpar.Mesh(ep=2)
        model = fastpar.parallelize(model, mesh, zero_stage=1)
        mine = 2 * mesh.rank_in("ep")
        assert torch.equal(model.h[1].mlp.c_fc.weight, whole[mine : mine + 2])

    run_ranks(rank, 4)
