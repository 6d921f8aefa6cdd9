"""Starts on a folder that has something of a run: refused, reused, or somebody else's."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import TRAIN, fastpar, here  # noqa: F401

from fastpar.data.tokenizer import ByteTokenizer
from fastpar.files.runs import check_free, hold, release
from fastpar.settings.config import TrainConfig
from fastpar.train.journal import check_out, read_metrics
from fastpar.train.trainer import Trainer


@pytest.fixture(autouse=True)
def given_back():
    yield
    release()


def refuse(self):
    raise ValueError("train: expected a step, got none; try again")


def test_a_start_that_failed_in_its_first_step_leaves_the_folder_free(here, monkeypatch, capsys):  # noqa: F811
    Path("r").mkdir()
    Path("r/notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", refuse)
        assert fastpar(f"{TRAIN} --out r") == 2
    assert [row["step"] for row in read_metrics("r/metrics.jsonl")] == [0]
    rule = "expected a run with a checkpoint to go on from, got out=r without one; leave out --resu"
    for more, status, words in (
        ("--resume", 2, f"{rule}me to start it again\n"),
        ("--max-steps 3", 0, ""),
    ):
        capsys.readouterr()
        assert fastpar(f"{TRAIN} --out r {more}") == status
        assert capsys.readouterr().err.endswith(words)
    assert Path("r/notes.txt").read_text() == "mine"
    steps = [row["step"] for row in read_metrics("r/metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3]
    assert [row["step"] for row in read_metrics("r/metrics.jsonl") if "val_loss" in row] == [0, 3]
    content = json.loads(Path("r/config.json").read_text())
    assert (len(content["starts"]), content["settings"]["max_steps"]) == (1, 3)

    # What has made steps is a run's, with a checkpoint or without.
    assert fastpar(f"{TRAIN} --out r") == 2
    assert capsys.readouterr().err.endswith(
        "; add --resume to go on with it, or choose another folder\n"
    )
    shutil.rmtree("r/checkpoints")
    for name in ("latest", "samples.txt", "loss.png"):
        Path("r", name).unlink()
    assert fastpar(f"{TRAIN} --out r") == 2
    assert capsys.readouterr().err.endswith(
        "; there is no checkpoint to go on from: choose another folder\n"
    )
    assert fastpar(f"{TRAIN} --out r --resume") == 2
    assert capsys.readouterr().err.endswith("leave out --resume to start one in another folder\n")


@pytest.mark.parametrize("text", ["{}", '{"settings": 1, "starts": []}', "[", "null"])
def test_a_config_of_somebody_else_is_not_overwritten(here, text):  # noqa: F811
    Path("r").mkdir()
    Path("r/config.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"an --out without a run, got out=r with config\.json; th"
    ):
        check_out(TrainConfig().replace({"out": "r"}))


def test_a_warm_up_longer_than_the_run_is_refused_at_once(here, capsys):  # noqa: F811
    assert fastpar(f"{TRAIN} --warmup-steps 50 --out r") == 2
    [line] = capsys.readouterr().err.splitlines()
    rule = "train: expected warmup_steps <= max_steps=2, got warmup_steps=50; lower --warmup-steps"
    assert line.startswith(rule)
    assert not Path("r").exists()


HOLD = """
import sys
from fastpar.files.runs import hold
hold("r")
print("held", flush=True)
sys.stdin.read()
"""


def test_who_starts_beside_another_start_is_told_so(here):  # noqa: F811
    """The settings of --auto-resume were read when the folder was free."""
    settings = TrainConfig().replace({"out": "r", "auto_resume": True})
    Path("r").mkdir()
    Path("r/config.json").write_text(json.dumps({"settings": {}, "model": {}, "starts": []}))
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        rule = (
            f"expected a run that no other process writes, got out=.*/r, which process {other.pid}"
        )
        for config in (settings, TrainConfig().replace({"out": "r"})):
            with pytest.raises(ValueError, match=rule):
                check_out(config)
    check_free("r")
    check_out(settings)  # the other one has failed before its first step
    Path("r/checkpoints/step_000002").mkdir(parents=True)
    with pytest.raises(ValueError, match="another start has just made it: give the same command a"):
        check_out(settings)
    hold("r")
    check_free("r")
    check_free("none")


def saved(**settings):
    Path("r").mkdir(exist_ok=True)
    whole = TrainConfig().replace({"out": "r", **settings}).settings()
    content = {"settings": whole, "model": {}, "starts": []}
    Path("r/config.json").write_text(json.dumps(content))
    os.makedirs("r/checkpoints/step_000002", exist_ok=True)


@pytest.mark.parametrize(
    ("settings", "flags", "words"),
    [
        (
            {"micro_batch_size": 4},
            "--nproc 4 --batch-size 8",
            "; micro_batch_size=4 of r/config.json: set it anew, or add --unset micro-batch-size\n",
        ),
        (
            {"micro_batch_size": 4, "grad_accum_steps": 2},
            "--batch-size 6",
            "; micro_batch_size=4, grad_accum_steps=2 of r/config.json: set it anew, or add "
            "--unset micro-batch-size grad-accum-steps\n",
        ),
        (
            {"zero_stage": 2, "shard_size": 2},
            "--zero 0",
            "; shard_size=2 of r/config.json: set it anew, or add --unset shard-size\n",
        ),
        (
            {"shard_size": None},
            "--shard-size 2",
            "--shard-size needs --zero 1, 2 or 3; add --zero 1, or drop --shard-size\n",
        ),
        (
            {"stochastic_rounding": True},
            "--master-weights full",
            "; stochastic_rounding=True of r/config.json: set it anew, or add --unset stochastic-"
            "rounding\n",
        ),
        (
            {},
            "--unset xyzzy",
            "train --help-all` in --unset, got key=xyzzy; remove it\n",
        ),
    ],
)
def test_advice_names_only_what_was_given(here, capsys, settings, flags, words):  # noqa: F811
    saved(**settings)
    assert fastpar(f"train --out r --resume --device cpu --data text.txt {flags}") == 2
    assert capsys.readouterr().err.endswith(words)


def test_unset_takes_the_default_of_what_a_run_or_a_file_has_set(here):  # noqa: F811
    from fastpar.cli import parse_train

    saved(zero_stage=2, shard_size=2, lr=0.5)
    Path("a.toml").write_text("seed = 5\n")
    flags = "--out r --resume --config a.toml --zero 0 --unset shard-size --seed seed"
    config = parse_train(flags.replace("--seed seed", "seed").split())
    assert config.parallel.shard_size is None
    assert (config.parallel.zero_stage, config.run.seed, config.optim.lr) == (0, 1, 0.5)
    config = parse_train(["--config", "a.toml", "--unset=seed", "--lr", "0.25"])
    assert (config.run.seed, config.optim.lr) == (1, 0.25)


def test_a_run_of_another_version_goes_on_without_settings_that_are_gone(here, capsys):  # noqa: F811
    assert fastpar(f"{TRAIN} --out r") == 0
    content = json.loads(Path("r/config.json").read_text())
    content["settings"] |= {"batch_ramp": 4, "wire_rank": 4}
    Path("r/config.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert fastpar("train --resume --out r --max-steps 3") == 0
    found = capsys.readouterr()
    said = "train: settings of another version are left out: batch_ramp=4, wire_rank=4"
    assert said in found.err.splitlines()
    assert "batch_ramp" not in json.loads(Path("r/config.json").read_text())["settings"]


def test_a_run_goes_on_from_another_folder(here, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Its text and tokenizer are named by where they are, not from where it was started."""
    ByteTokenizer().save("t")
    train = TRAIN.replace("--tokenizer bytes", "--tokenizer t")
    assert fastpar(f"{train} --out r") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert fastpar(f"train --resume --out {tmp_path}/r --max-steps 3") == 0
    assert set(re.findall(r"changed  (\w+)", capsys.readouterr().out)) == {"out", "max_steps"}


def test_settings_of_ranks_that_are_not_there(here, capsys):  # noqa: F811
    """They do nothing: refused where they are asked for, dropped and said where a run had them."""
    assert fastpar(f"{TRAIN} --out r --schedule zb-v") == 2
    line = "--schedule does nothing without --pp; add --pp, or drop --schedule\n"
    assert capsys.readouterr().err == line
    assert fastpar(f"{TRAIN} --out r") == 0
    content = json.loads(Path("r/config.json").read_text())
    content["settings"] |= {"pp": 2, "schedule": "gpipe", "cp": 2, "cp_method": "keys"}
    content["settings"] |= {"muon_lr": 0.1, "router_z_loss": 0.5}
    Path("r/config.json").write_text(json.dumps(content))
    capsys.readouterr()
    alone = f"{TRAIN.replace('--max-steps 2', '--max-steps 3')} --out r --resume --pp 1 --cp 1"
    assert fastpar(f"{alone} --schedule gpipe") == 2
    assert capsys.readouterr().err == line
    assert fastpar(alone) == 0
    printed = capsys.readouterr().out
    changes = ("schedule gpipe -> 1f1b", "cp_method keys -> heads", "pp 2 -> 1")
    for change in (*changes, "muon_lr 0.1 -> 0.02", "router_z_loss 0.5 -> 0.0"):
        assert f"changed  {change}\n" in printed
