"""The trainer through pipeline stages: the bits of one process, checkpoints for any layout."""

import subprocess
import sys

import pytest
import torch
from train_runs import RANDOM, TINY, Runs, bits, curve, forget_after, losses

from fastpar.axes.pipeline import stage_layers
from fastpar.axes.step import Setup
from fastpar.checkpoint.restore import load_weights
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig, part_flops

RUN = {**TINY, "n_layer": 3, "grad_accum_steps": 4, "max_steps": 4, "eval_every": 2}
RUN |= {"save_every": 2, "deterministic": True}
run = Runs(RUN)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"pp": 2, "zero_stage": 2}),
        (3, {"pp": 3, "schedule": "gpipe", "pp_split": "1,1,1"}),
        (2, {"pp": 2, "on_nonfinite": "skip", "pp_split": "0,3"}),
        (2, {"pp": 2, "schedule": "zb-v", "pp_split": "0,1,1,1", "zero_stage": 3}),
        (2, {"pp": 2, "schedule": "zb-h1", "activation_checkpointing": "full"}),
        *(
            pytest.param(
                2,
                {"pp": 2, "schedule": schedule, "activation_checkpointing": mode},
                marks=pytest.mark.slow,
            )
            for schedule, mode in [
                ("zb-v", "full"),
                ("zb-h1", "selective"),
                ("zb-v", "selective"),
                ("interleaved", "selective"),
            ]
        ),
        pytest.param(5, {"pp": 5}, marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "schedule": "interleaved"}, marks=pytest.mark.slow),
        pytest.param(3, {"pp": 3, "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_one_process(here, ranks, changes):
    """Losses, norms, validations, weights and moments, with dropout and clipping."""
    run("alone", 1)
    run("stages", ranks, **changes)
    assert curve("stages") == curve("alone")
    for step in (2, 4):
        assert bits("stages", step) == bits("alone", step)


@pytest.mark.parametrize("storage", RANDOM)
def test_random_rounding_is_that_of_one_process(here, storage):
    """Both copies of the tied table, too, which the last stage would round otherwise."""
    run("alone", 1, **storage)
    run("stages", 2, pp=2, **storage)
    assert curve("stages") == curve("alone")
    assert bits("stages", 4) == bits("alone", 4)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((2, {"pp": 2}), (1, {})),
        ((1, {}), (3, {"pp": 3, "zero_stage": 1})),
        ((2, {"pp": 2, "schedule": "interleaved"}), (2, {"pp": 2, "schedule": "zb-v"})),
        pytest.param((3, {"pp": 3}), (2, {"pp": 2, "zero_stage": 3}), marks=pytest.mark.slow),
    ],
)
def test_resumes_at_another_number_of_stages(here, saved, resumed):
    run("alone", 1)
    run("moved", saved[0], **saved[1])
    forget_after("moved", 2)
    run("moved", resumed[0], **{"resume": True, **resumed[1]})
    assert bits("moved", 4) == bits("alone", 4)


def test_stages_beside_data_parallel_ranks_and_tp(here):
    run("alone", 2)
    run("both", 4, pp=2)
    assert curve("both") == curve("alone")
    assert bits("both", 4) == bits("alone", 4)
    run("tp", 4, pp=2, tp=2, max_steps=2, deterministic=False)
    assert losses("tp") == pytest.approx(losses("alone")[:2], rel=1e-5)


def test_files_of_stages_are_one_model(here, capsys):
    run("stages", 2, pp=2)
    printed = capsys.readouterr().out
    parts = part_flops(GPTConfig(3, 2, 16, 16, 256))  # RUN's, of bytes
    fast, slow = sorted((sum(parts[:3]), sum(parts[3:])))
    waits = 1 - 6 * (slow + fast) / (12 * slow + 3 * fast)  # both work 12 of their own a step
    line = f"stages   2 + 1 layers, 1f1b over 4 micro-batches: ranks wait for {waits:.0%} of a step"
    assert line in printed
    assert "ranks    dp 1, pp 2, stage 0" in printed
    model = load_weights("stages/latest")
    assert model.wte.weight.shape[1] == 16
    assert torch.isfinite(model.h[2].mlp.c_fc.weight).all()


def test_layers_of_stages_by_cost():
    def split(n_layer, n_embd, vocab_size, pp):
        shape = {"n_layer": n_layer, "n_embd": n_embd, "block_size": 1024}
        config = TrainConfig().replace({"pp": pp, **shape})
        return list(stage_layers(config.model_config(vocab_size), Setup(flags=config)))

    # The output layer of 124M weighs 4.9 layers, so the last of two stages has fewer layers.
    assert split(12, 768, 50304, 2) == [8, 4]
    assert split(12, 768, 50304, 4) == [4, 4, 4, 0]
    assert split(12, 768, 50304, 1) == [12]


@pytest.mark.slow
def test_processes(here):
    """Ranks of their own, started as a user does."""
    options = [f"--{k.replace('_', '-')}={v}" for k, v in RUN.items() if k != "deterministic"]
    options += ["--deterministic", "--out=stages", "--nproc=2", "--pp=2"]
    subprocess.run([sys.executable, "-m", "fastpar", "train", *options], check=True)
    run("alone", 1)
    assert bits("stages", 4) == bits("alone", 4)
