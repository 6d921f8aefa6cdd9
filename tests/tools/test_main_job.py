"""bench.systems.main_job: a recipe becomes a row with its loss, its CPU time and its commit."""

import json

import pytest

from bench.systems import main_job


def test_a_row(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("in the beginning god created heaven and earth\n" * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = {"data": "text.txt", "tokenizer": "bytes", "n_layer": 1, "n_head": 2, "n_embd": 16}
    small |= {"block_size": 16, "nproc": 1, "max_steps": 9, "eval_batches": 1}
    monkeypatch.setitem(main_job.RECIPES, "muon, 16", {**main_job.RECIPES["muon, 16"], **small})
    into = tmp_path / "rows"
    arguments = ["muon, 16", "--steps-divided-by", "3", "--into", str(into)]
    arguments += ["--set", "muon_lr=0.04", "lr_schedule=wsd"]
    for seeds in (["1"], ["2"]):
        assert main_job.main([*arguments, "--seeds", *seeds]) == 0
    rows = [json.loads(line) for line in (into / "rows.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [1, 2]
    for row in rows:
        assert row["recipe"] == "muon, 16, muon_lr=0.04, lr_schedule=wsd"
        assert row["settings"]["max_steps"] == 3
        assert row["settings"]["muon_lr"] == 0.04
        assert row["tokens"] == 3 * 16 * 16
        assert row["bits_per_byte"] == pytest.approx(row["val_loss"] / 0.6931472, rel=1e-3)
        assert row["cpu_s"] >= 1
        assert row["machine"]
    assert rows[0]["val_loss"] != rows[1]["val_loss"]


def test_an_unknown_recipe(capsys):
    with pytest.raises(SystemExit, match="2"):
        main_job.main(["sgd"])
    assert "expected words of adamw, 8, adamw, 8, linear" in capsys.readouterr().err


def test_an_unknown_setting(capsys):
    with pytest.raises(SystemExit, match="2"):
        main_job.main(["--set", "muon_rl=1"])
    assert "did you mean muon_lr?" in capsys.readouterr().err
