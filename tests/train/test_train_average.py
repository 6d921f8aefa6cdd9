"""--ema: the same average at every layout, saved, taken up again, validated and exported."""

import pytest
import torch
from train_runs import TINY, Runs, bits, curve, forget_after

from fastpar.checkpoint.commands import export_weights
from fastpar.checkpoint.restore import load_weights
from fastpar.cli import main
from fastpar.files.runs import checkpoint_folder
from fastpar.settings.config import TrainConfig
from fastpar.train.journal import read_metrics

RUN = {**TINY, "n_layer": 3, "micro_batch_size": 2, "max_steps": 4, "eval_every": 4}
RUN |= {"save_every": 1, "deterministic": True, "ema": 0.3}
run = Runs(RUN)


def exported(step, **options):
    folder = checkpoint_folder("alone", step)
    to = folder.parent / f"to{step}{len(options)}"
    export_weights(folder, to, **options)
    return dict(load_weights(to).named_parameters())


def averages(out):
    return [
        row["ema_val_loss"] for row in read_metrics(f"{out}/metrics.jsonl") if "ema_val_loss" in row
    ]


def test_it_is_the_average_of_the_weights_and_trains_the_same(here):
    run("alone", eval_every=2)
    run("plain", eval_every=2, ema=None)
    assert curve("alone") == curve("plain")  # validating the average leaves no trace
    weights = [exported(step) for step in range(1, 5)]
    expected = {name: p.detach().clone() for name, p in weights[0].items()}
    for step in (1, 2, 3):  # of the second step and later ones; young, it keeps less
        factor = min(0.3, (1 + step) / (10 + step))
        for name, p in weights[step].items():
            expected[name].lerp_(p.detach(), 1.0 - factor)
    got = exported(4, average=True)
    for name, p in got.items():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(p, weights[3][name]) for name, p in got.items())
    half = exported(4, average=True, dtype=torch.bfloat16)
    assert all(torch.equal(p, got[name].bfloat16()) for name, p in half.items())
    found = averages("alone")
    assert len(found) == 2
    assert found[-1] != curve("alone")[-1]["val_loss"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_bits_of_one_process(here, optimizer):
    run("alone", optimizer=optimizer)
    for i, (ranks, changes) in enumerate(
        [
            (2, {"zero_stage": 0}),
            (2, {"zero_stage": 1}),
            (4, {"zero_stage": 3, "shard_size": 2}),
            (2, {"pp": 2, "zero_stage": 2}),
        ]
    ):
        run(f"r{i}", ranks, optimizer=optimizer, **changes)
        assert bits(f"r{i}", 4) == bits("alone", 4), changes
        assert averages(f"r{i}") == pytest.approx(averages("alone"), rel=1e-9), changes
    run("tp", 2, tp=2, zero_stage=1, optimizer=optimizer)
    assert averages("tp") == pytest.approx(averages("alone"), rel=1e-6)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((2, {"zero_stage": 3}), (1, {})), ((1, {}), (2, {"zero_stage": 1, "pp": 1}))],
)
def test_goes_on_at_another_layout(here, saved, resumed):
    run("whole")
    run("cut", saved[0], **saved[1])
    forget_after("cut", 2)
    run("cut", resumed[0], **{"zero_stage": 0, **resumed[1], "resume": True})
    assert bits("cut", 4) == bits("whole", 4)


def test_16_bits_and_a_run_that_stops_averaging(here):
    half = {"dtype": "bf16", "master_weights": "remainder"}
    run("alone", **half)
    run("sharded", 2, zero_stage=3, **half)
    assert bits("sharded", 4) == bits("alone", 4)
    run("plain", ema=None, **half)
    assert bits("plain", 4) != bits("alone", 4)
    forget_after("sharded", 2)
    config = TrainConfig().settings()
    run("sharded", 1, zero_stage=0, resume=True, **{**half, "ema": config["ema"]})
    assert bits("sharded", 4) == bits("plain", 4)


def test_refused(here, capsys):
    run("plain", ema=None, max_steps=1)
    assert main(["export", "plain", "--to", "out", "--ema"]) == 2
    assert "expected averages of weights with --ema, got none in" in capsys.readouterr().err
