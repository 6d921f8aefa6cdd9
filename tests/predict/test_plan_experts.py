"""What experts take and send, beside an engine's own numbers."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

import fastpar
from fastpar.axes.experts import expert_elements
from fastpar.axes.step import Setup, Workload
from fastpar.cli import main
from fastpar.models.gpt import GPT
from fastpar.predict.memory import predict_memory
from fastpar.predict.time import comm_ops_of, ops_of
from fastpar.settings.model import GPTConfig
from fastpar.sharding.layout import ALIGN
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
            **{"device_type": "cpu", "transport": "shm", "ep": ep},
        )
        workload = Workload(SHAPE, 12)
        want = predict_memory(workload, setup)
        rows = [c for c in comm_ops_of(workload, setup) if c.axis == "ep" and c.bytes > 1000]
        want_sent = sum(c.bytes * c.count for c in rows) * (ep - 1) / ep
        for parameters, gradients, state, sent in run_ranks(measured, 4, ep, stage):
            assert parameters == pytest.approx(want.parameters, rel=0.04)
            assert gradients == pytest.approx(want.gradients, rel=0.04)
            assert sent == want_sent
            assert state == pytest.approx(want.optimizer, rel=0.15)  # a rank's part of small ones
    assert expert_elements(SHAPE) == sum(
        p.numel() for n, p in GPT(SHAPE).named_parameters() if "mlp.c_" in n
    )


def of(ep=1, tp=1, stage=0, shape=SHAPE, **more):
    setup = Setup(8, tp=tp, ep=ep, zero_stage=stage, **more)
    return Workload(shape, setup.dp), setup


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 2)])
def test_a_step_has_the_flops_of_its_tokens(ep, tp):
    """Top 4 of half of the features: twice the products of an MLP, and the router's."""
    dense = replace(SHAPE, n_expert=0)
    router = 6 * SHAPE.n_layer * SHAPE.n_embd * SHAPE.n_expert * 16
    found, mlps = (
        sum(op.flops * op.count for op in ops_of(*of(ep, tp, shape=shape)) if op.name == "matmul")
        for shape in (SHAPE, dense)
    )
    of_mlp = 6 * SHAPE.n_layer * 8 * SHAPE.n_embd**2 * 16 / tp
    assert found - router == mlps + of_mlp


def test_rows_travel_and_gradients_of_experts_do_not():
    """Along ep four all-to-alls a layer, of a token's rows; over dp/ep the experts' gradients."""
    sent = [c for c in comm_ops_of(*of(4)) if c.axis == "ep" and c.bytes > 1000]
    assert [(c.kind, c.ranks, c.count) for c in sent] == [("all_to_all", 4, 4 * SHAPE.n_layer)]
    assert sent[0].bytes == 16 * SHAPE.top_k * SHAPE.n_embd * 2
    experts = expert_elements(SHAPE)
    padding = 4 * 8 * ALIGN * 4 * SHAPE.n_layer  # of a bucket's 8 shards, fp32, 4 buckets a layer
    reduced = Counter()
    for ep in (1, 2, 4):
        for c in comm_ops_of(*of(ep, stage=1)):
            if c.kind == "reduce_scatter":
                reduced[ep, c.ranks] += c.bytes * c.count
    rest = reduced[1, 8] - experts * 4  # attention, routers, tables
    assert rest > 0
    for ep in (2, 4):
        assert reduced[ep, 8 // ep] == pytest.approx(experts // ep * 4, abs=padding)
        assert reduced[ep, 8] == pytest.approx(rest, abs=2 * padding)


def test_plan_has_the_layouts_of_other_models_and_ep(capsys, tmp_path):
    words = "plan --n-expert 8 --gpus 4 --optimizer muon --json"
    assert main([*words.split(), f"{tmp_path}/p.json"]) == 0
    printed = capsys.readouterr().out
    layouts = json.loads((tmp_path / "p.json").read_text())["layouts"]
    seen = {(row["tp"], row["ep"]) for row in layouts if row["pp"] == row["cp"] == 1}
    assert seen == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert {row["pp"] for row in layouts} > {1}
    assert {row["tp_grid"] for row in layouts} == {None}
    assert "\nexperts  453,353,472 parameters; a token goes through 181,182,720 of all" in printed
    assert " --n-expert 8 " in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus=13", "--batch-size=3"], "batch_size that the ranks divide, got batch_size=3"),
        (["--tp-grid=2x2"], "--tp-grid does not run with --n-expert"),
        (["--expert-top-k=9"], "top_k of at most n_expert=8, got top_k=9"),
    ],
)
def test_bad_plans(capsys, flags, message):
    assert main(["plan", "--n-expert=8", "--gpus=4", *flags]) != 0

    assert re.search(message, capsys.readouterr().err)
