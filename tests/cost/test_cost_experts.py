"""What experts take and send, beside an engine's own numbers."""

import re

import pytest
import torch

import fastpar
from fastpar.cli import main
from fastpar.config.config import GPTConfig
from fastpar.cost.experts import count_experts, predict_experts
from fastpar.cost.workload import Setup, Workload
from fastpar.models.gpt import GPT
from fastpar.testing import run_ranks

SHAPE = GPTConfig(2, 2, 128, 16, 256, dropout=0.0, n_expert=4, top_k=4, expert_hidden=256)


def measured(ep, stage):
    """Bytes of weights and gradients on a rank, and of rows that it sent, in a step."""
    model = fastpar.parallelize(GPT(SHAPE), fastpar.Mesh(ep=ep), zero_stage=stage)
    engine, opt = fastpar.engine_of(model), fastpar.AdamW(model.parameters())
    x = torch.randint(0, 256, (3, 16))
    model(x, x).backward()
    way = model.h[0].mlp.ep
    sent = 0 if way is None else way.sent_bytes
    opt.step()
    memory = engine.memory()
    state = sum(
        t.nbytes for s in opt.state.values() for n, t in s.items() if n.startswith("exp_avg")
    )
    if stage == 3:
        return memory["parameter shards"], memory["gradient shards"], state, sent
    grads = "gradients" if stage < 2 else "gradient shards"
    return memory["parameters"], memory[grads], state, sent


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_states_and_rows_are_those_of_an_engine(ep):
    """With top_k = n_expert every expert is chosen equally often; buckets are padded."""
    for stage in range(4):
        setup = Setup(
            **{"world_size": 4, "zero_stage": stage, "micro_batch_size": 3, "dtype": "fp32"},
            **{"master_weights": "none", "device_type": "cpu", "transport": "shm"},
        )
        want = predict_experts(Workload(SHAPE, 12), setup, ep)
        for parameters, gradients, state, sent in run_ranks(measured, 4, ep, stage):
            assert parameters == pytest.approx(want.parameters, rel=0.04)
            assert gradients == pytest.approx(want.gradients, rel=0.04)
            assert sent == want.all_to_all
            assert state == pytest.approx(want.optimizer, rel=0.15)  # a rank's part of small ones
    assert count_experts(SHAPE) == sum(
        p.numel() for n, p in GPT(SHAPE).named_parameters() if "mlp.c_" in n
    )


def test_plan_shows_every_ep_and_stage(capsys):
    assert main(["plan", "--n-expert", "8", "--gpus", "4"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[:2] for line in printed.splitlines() if line[:4].strip().isdecimal()]
    assert [row for row in rows if len(row) == 2][:12] == [
        [str(ep), str(stage)] for ep in (1, 2, 4) for stage in range(4)
    ]
    assert "Times of experts are not predicted" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pp=2"], "no pp with n_expert=8, .* got pp=2"),
        (["--optimizer=muon"], "no optimizer with n_expert=8, .* got optimizer=muon"),
        (["--batch-size=3"], "batch_size that the 4 ranks divide, got batch_size=3; .* 4"),
        (["--expert-top-k=9"], "top_k of at most n_expert=8, got top_k=9"),
    ],
)
def test_bad_plans(capsys, flags, message):
    assert main(["plan", "--n-expert=8", "--gpus=4", *flags]) != 0

    assert re.search(message, capsys.readouterr().err)
