"""The trainer with experts: any ep is the same run, also after a resume; dense models to start."""

import json
import subprocess
import sys

import pytest
import torch
from train_runs import RANDOM, TINY, Runs, bits, curve, forget_after, losses

from fastpar.checkpoint.restore import load_weights
from fastpar.cli import main
from fastpar.files.runs import checkpoint_folder
from fastpar.models.gpt import GPT, upcycled
from fastpar.models.hf import load_hf, save_hf
from fastpar.settings.model import GPTConfig
from fastpar.train.journal import read_metrics

FEW = {
    **TINY, "n_layer": 2, "micro_batch_size": 2, "max_steps": 4, "save_every": 2, "n_expert": 4,
    "balance_loss": 0.1, "router_z_loss": 0.01, "balance_rate": 0.01, "deterministic": True,
}  # fmt: skip
run = Runs(FEW)


MORE = [
    *((4, {"ep": 4, "zero_stage": stage}) for stage in (0, 2, 3)),
    (2, {"ep": 2, "zero_stage": 1, "accumulate": "shard"}),
    (4, {"ep": 2, "pp": 2, "zero_stage": 1}),
    (4, {"ep": 2, "zero_stage": 2, "activation_checkpointing": "full"}),
]


@pytest.mark.parametrize(
    "changes", [{"ep": 2, "cp_method": "keys"}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_sequences_are_shared_out_too(here, changes):
    """Their sums have another order than in one process: the losses are equal to rounding."""
    run("one", 1)
    run("r", 2 * changes.get("ep", 1), cp=2, zero_stage=2, **changes)
    rows = [[row for row in curve(name) if "loss" in row] for name in ("r", "one")]
    for found, want in zip(*rows, strict=True):
        assert found["loss"] == pytest.approx(want["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "meshes", [[(2, {"ep": 2, "zero_stage": 3})], pytest.param(MORE, marks=pytest.mark.slow)]
)
def test_every_ep_has_the_bits_of_one_process(here, meshes):
    run("one", 1)
    for i, (ranks, changes) in enumerate(meshes):
        run(f"r{i}", ranks, **changes)
        assert curve(f"r{i}") == curve("one"), changes
        assert bits(f"r{i}", 4) == bits("one", 4), changes


@pytest.mark.parametrize("storage", [RANDOM[0], {"dtype": "bf16", "stochastic_rounding": True}])
def test_random_rounding_is_that_of_one_process(here, storage):
    run("one", 1, **storage)
    run("two", 2, ep=2, **storage)
    assert curve("two") == curve("one")
    assert bits("two", 4) == bits("one", 4)


def test_a_run_goes_on_at_any_other_ep(here):
    run("whole", 1, save_every=1)
    run("cut", 4, ep=4, zero_stage=2, save_every=1)
    for step, (ranks, changes) in enumerate([(2, {"ep": 2, "zero_stage": 3}), (1, {})], 1):
        forget_after("cut", step)
        run("cut", ranks, save_every=1, resume=True, **changes)
    assert curve("cut") == curve("whole")
    assert bits("cut", 4) == bits("whole", 4)


def test_metrics_say_what_experts_do(here, capsys):
    run("r", 2, ep=2, expert_capacity=0.5)
    printed = capsys.readouterr().out
    assert "4 experts (top 2) in 2 layers" in printed
    assert "ranks    experts over 2 of dp, stage 0" in printed
    rows = [row for row in read_metrics("r/metrics.jsonl") if "loss" in row]
    for row in rows:
        load = torch.tensor(row["expert_load"])
        assert load.shape == (2, 4)
        torch.testing.assert_close(load.sum(1), torch.ones(2), atol=1e-3, rtol=0)
        assert 0.5 <= row["expert_dropped"] < 0.7  # at most half fits
        assert row["balance"] >= 0.99
        assert row["router_z"] > 0


def test_samples_come_from_a_checkpoint_of_experts(here, capsys):
    run("r", 2, ep=2, zero_stage=3)
    assert main(["sample", "r", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out


def test_transformers_cannot_read_experts(here, capsys):
    run("r", 1, max_steps=1)
    assert main(["export", "r", "--to", "hf"]) != 0
    said = capsys.readouterr().err
    assert "expected a GPT-2 that transformers has, got one with n_expert=4" in said
    assert "use the checkpoint itself" in said
    config = json.loads((checkpoint_folder("r", 1) / "config.json").read_text())
    assert config["model_type"] == "fastpar-gpt2-experts"
    model = load_hf(checkpoint_folder("r", 1))
    assert model.config.n_expert == 4
    with pytest.raises(ValueError, match="save_hf: expected a GPT-2 that transformers has"):
        save_hf(model, "again")
    del config["top_k"]
    (checkpoint_folder("r", 1) / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expected the numbers of experts in .*'top_k'"):
        load_hf(checkpoint_folder("r", 1))


# Dense models


def dense(**changes):
    return GPT(GPTConfig(2, 2, 16, 16, 50, **{"dropout": 0.0, **changes}), seed=1)


def test_an_upcycled_model_has_the_loss_of_the_dense_one():
    model = dense().double()
    sparse = upcycled(model, {"n_expert": 4, "top_k": 2}, seed=5)
    idx = torch.randint(0, 50, (3, 16))
    assert abs(model(idx, idx) - sparse.eval()(idx, idx)) < 1e-12
    router = sparse.h[0].mlp.router.weight
    assert router.std() > 0.01  # equal logits would never differ


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"n_expert": 4, "top_k": 1}, "top_k >= 2, .* got top_k=1"),
        (
            {"n_expert": 4, "expert_hidden": 8},
            "top_k >= 2, .* as wide as the MLP, got .* expert_hidden=8",
        ),
    ],
)
def test_what_cannot_be_upcycled(experts, message):
    with pytest.raises(ValueError, match=f"upcycled: expected {message}"):
        upcycled(dense(), experts)
    sparse = upcycled(dense(), {"n_expert": 4})
    with pytest.raises(
        ValueError, match="a dense model to make experts of, got one with n_expert=4"
    ):
        upcycled(sparse, {"n_expert": 4})


def test_a_run_starts_from_a_dense_checkpoint(here):
    run("dense", 1, n_expert=0, max_steps=2)
    run("sparse", 2, ep=2, init_from=str(checkpoint_folder("dense", 2)), max_steps=2)
    last, first = curve("dense")[-1], curve("sparse")[0]
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert load_weights(checkpoint_folder("sparse", 2)).config.n_expert == 4


@pytest.mark.slow
def test_processes(here):
    """Ranks of their own, started as a user does."""
    values = {**FEW, "out": "r", "nproc": 2, "ep": 2, "zero_stage": 2}
    values.pop("deterministic")
    options = [f"--{k.replace('_', '-')}={v}" for k, v in values.items()]
    command = [sys.executable, "-m", "fastpar", "train", *options, "--deterministic"]
    subprocess.run(command, check=True)
    run("threads", 2, ep=2, zero_stage=2)
    assert bits("r", 4) == bits("threads", 4)


LAYOUTS = (
    (1, {}),
    (1, {"activation_checkpointing": "full"}),
    *((2, {"zero_stage": stage}) for stage in (0, 3)),
    *((2, {"ep": 2, "zero_stage": stage}) for stage in (0, 1, 2, 3)),
    (2, {"ep": 2, "zero_stage": 2, "accumulate": "full"}),
    (2, {"ep": 2, "activation_checkpointing": "selective"}),
    *((4, {"ep": ep, "zero_stage": stage}) for ep in (2, 4) for stage in (0, 3)),
    (4, {"ep": 2, "zero_stage": 2, "shard_size": 2}),
    (4, {"ep": 2, "pp": 2, "zero_stage": 1}),
)
FEW_LAYOUTS = (LAYOUTS[0], (2, {"ep": 2, "zero_stage": 3}))


@pytest.mark.parametrize("layouts", [FEW_LAYOUTS, pytest.param(LAYOUTS, marks=pytest.mark.slow)])
def test_the_loss_of_step_10_has_no_spread(here, layouts):
    last = set()
    for number, (ranks, changes) in enumerate(layouts):
        run(f"r{number}", ranks, max_steps=10, save_every=0, **changes)
        last.add(losses(f"r{number}")[-1])
    assert len(last) == 1
