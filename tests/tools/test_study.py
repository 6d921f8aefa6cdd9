"""python -m bench study: a cell of each kind becomes a row, once."""

import json

import pytest

from bench.systems import study
from bench.systems.study import STUDIES

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 256}


def rows_of(tmp_path, *arguments):
    assert study.main([*arguments, "--into", str(tmp_path)]) == 0
    path = tmp_path / STUDIES[arguments[0]].folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("in the beginning god created heaven and earth\n" * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = ["data=text.txt", "tokenizer=bytes", "n_layer=1", "n_head=2", "n_embd=16"]
    small += ["block_size=16", "eval_batches=1", "muon_lr=0.04"]
    arguments = ["main_job", "muon, 16", "--steps-divided-by", "254", "--set", *small]
    for _ in range(2):  # the second time it is there
        (row,) = rows_of(tmp_path, *arguments)
    assert row["recipe"].endswith("muon_lr=0.04")
    assert (row["settings"]["max_steps"], row["settings"]["muon_lr"]) == (3, 0.04)
    assert row["tokens"] == 3 * 16 * 16
    assert row["bits_per_byte"] == pytest.approx(row["val_loss"] / 0.6931472, rel=1e-3)
    assert row["cpu_s"] >= 1


@pytest.mark.parametrize(("name", "cell"), [("wires", "int8"), ("fp8", "all, delayed")])
def test_bytes_of_a_text(tmp_path, monkeypatch, name, cell):
    monkeypatch.setattr(study, "read_bytes", lambda n: study.torch.arange(5000) % 251)
    for each in ("shape", "validated"):
        monkeypatch.setitem(STUDIES[name].common, each, {"shape": SHAPE, "validated": 4}[each])
    rows = rows_of(tmp_path, name, cell, "--seeds", "1", "--steps-divided-by", "100")
    assert all(len(row["curve"]) == 20 for row in rows)
    assert all(0 < row["bits_per_byte"] < row["curve"][0][1] for row in rows)


def test_muons_bytes_are_the_formulas(tmp_path, monkeypatch):
    monkeypatch.setitem(STUDIES["muon"].common, "shape", {**SHAPE, "n_layer": 2})
    rows = rows_of(tmp_path, "muon", "2 ranks", "--steps-divided-by", "3")
    assert [row["zero_stage"] for row in rows] == [0, 1]
    for row in rows:
        assert row["sent_bytes"] == row["formula_bytes"]
        assert min(row["sent_bytes"]) > 0
