"""fastpar train --fp8: the same bits on every layout, a resume with its scales, what is refused."""

import json

import pytest
import torch
from train_runs import TINY, Runs, bits, curve, forget_after

from fastpar.checkpoint.restore import read_run_state
from fastpar.cli import main
from fastpar.files.runs import checkpoint_folder
from fastpar.settings.config import TrainConfig
from fastpar.train.journal import read_metrics
from fastpar.train.start import pick_dtype

FEW = {
    **TINY, "n_layer": 2, "micro_batch_size": 2, "max_steps": 4, "save_every": 2,
    "deterministic": True, "fp8": "all", "fp8_emulate": True,
}  # fmt: skip
run = Runs(FEW)
DELAYED = {"fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"}


LAYOUTS = [
    (2, {"zero_stage": 3}),
    (4, {"zero_stage": 3, "wire_weights": "fp8"}),
    (
        4,
        {"zero_stage": 3, "wire_weights": "fp8", "pp": 2, "pp_split": "2,0"},
    ),  # no layers: no codes
    (4, {"zero_stage": 1, "accumulate": "shard", "micro_batch_size": 2}),
    (2, {"pp": 2}),
    (2, {"zero_stage": 2, "activation_checkpointing": "full"}),
]


@pytest.mark.parametrize(
    "how",
    [{}, DELAYED, pytest.param({"fp8_scaling": "block", "dtype": "bf16"}, marks=pytest.mark.slow)],
)
def test_every_layout_has_the_bits_of_one_process(here, how):
    run("one", 1, **how)
    run("plain", 1, fp8="none", fp8_emulate=False)
    assert curve("plain") != curve("one")
    for i, (ranks, changes) in enumerate(LAYOUTS):
        if "wire_weights" in changes and how is not DELAYED:
            continue
        run(f"r{i}", ranks, **how, **changes)
        assert curve(f"r{i}") == curve("one"), changes
        assert bits(f"r{i}", 4) == bits("one", 4), changes
        states = [read_run_state(checkpoint_folder(name, 4))["fp8"] for name in ("one", f"r{i}")]
        assert states[0] == states[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, {"tp": 2, "n_embd": 32}),
        (4, {"cp": 2}),
        (4, {"shard_size": 2}),
        (2, {"optimizer": "muon"}),
        (2, {"activation_checkpointing": "full", "micro_batch_size": 1}),
    ],
)
def test_codes_on_the_wire_change_no_other_layout(here, ranks, changes):
    how = {**DELAYED, **changes, "zero_stage": 3, "dropout": 0.0}
    run("plain", ranks, **how)
    run("codes", ranks, **how, wire_weights="fp8")
    assert curve("codes") == curve("plain")
    assert bits("codes", 4) == bits("plain", 4)


def test_values_of_a_sequence_that_ranks_share_are_those_of_one_process(here):
    """Sums have another order with cp: the largest values differ by a few roundings in fp32."""
    run("one", 1, dropout=0.0, **DELAYED)
    run("r", 2, cp=2, dropout=0.0, **DELAYED)
    tops = [read_run_state(checkpoint_folder(n, 4))["fp8"]["history"] for n in ("one", "r")]
    rounding = 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(*map(torch.tensor, tops), rtol=rounding, atol=0.0)


def test_a_run_goes_on_with_its_scales_on_another_layout(here):
    run("whole", 1, save_every=1, **DELAYED)
    run("cut", 1, save_every=1, **DELAYED)
    coded = {"zero_stage": 3, "wire_weights": "fp8"}
    for step, (ranks, changes) in enumerate([(4, coded), (2, {"pp": 2}), (2, coded)], 1):
        forget_after("cut", step)
        run("cut", ranks, save_every=1, resume=True, **DELAYED, **changes)
    assert curve("cut") == curve("whole")
    assert bits("cut", 4) == bits("whole", 4)
    state = read_run_state(checkpoint_folder("cut", 4))
    assert state["fp8"] == read_run_state(checkpoint_folder("whole", 4))["fp8"]
    tops = torch.tensor(state["fp8"]["history"])
    assert tops.shape == (16, 8, 3)
    assert (tops[:4] > 0).all()
    assert not tops[4:].any()


def test_metrics_say_how_much_overflowed(here):
    run("r", 2, lr=0.3, max_steps=6, save_every=0, **DELAYED)
    rows = [row for row in read_metrics("r/metrics.jsonl") if "loss" in row]
    assert rows[0]["fp8_overflows"] == 0  # nothing is rounded yet
    assert sum(row["fp8_overflows"] for row in rows) > 0  # such a rate makes weights grow


def test_devices_that_are_refused(here, capsys, monkeypatch):
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in TINY.items() if k != "out"]
    assert main(["train", *flags, "--fp8", "mlp", "--out", "r"]) == 2
    said = capsys.readouterr().err
    assert "newer with fp8=mlp, got device=cpu dtype=fp32; drop --fp8, or add --fp8-emul" in said
    assert not (here / "r").exists()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    mesh = type("OfGpus", (), {"device": torch.device("cuda")})
    config = TrainConfig().replace({"fp8": "mlp"})
    with pytest.raises(ValueError, match=r"got compute capability 8\.6 dtype=bf16"):
        pick_dtype(config, mesh, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert pick_dtype(config, mesh, None) == "bf16"
    with pytest.raises(ValueError, match=r"got compute capability 9\.0 dtype=fp32"):
        pick_dtype(config.replace({"dtype": "fp32"}), mesh, None)
    assert json.dumps(config.settings())  # what config.json holds
