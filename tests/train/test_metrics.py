"""metrics.jsonl, the picture, MFU."""

import json
import math
import sys

import pytest

from fastpar.train.journal import (
    MetricsLog,
    check_log,
    mfu,
    plot_loss,
    read_metrics,
)


def test_rows_are_json_lines_that_read_back(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "loss": 2.5, "grad_norm": math.inf, "exposed_comm_ms": None})
    log.write({"step": 1, "val_loss": 2.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # on disk before close
    log.close()
    assert [json.loads(line) for line in lines] == read_metrics(tmp_path / "metrics.jsonl")
    assert json.loads(lines[0]) == {
        "step": 1, "loss": 2.5, "grad_norm": None, "exposed_comm_ms": None,
    }  # fmt: skip


def test_resume_drops_later_rows_and_a_line_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1.0 * step})
    log.write({"step": 3, "val_loss": 3.5})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    log = MetricsLog(path, resume_step=3)
    log.write({"step": 4, "loss": 40.0})
    log.close()
    rows = read_metrics(path)
    assert [r["step"] for r in rows] == [1, 2, 3, 3, 4]
    assert rows[-2:] == [{"step": 3, "val_loss": 3.5}, {"step": 4, "loss": 40.0}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_tensorboard_is_fed_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    log = MetricsLog(tmp_path / "metrics.jsonl", log="tensorboard")
    log.write({"step": 1, "loss": 2.5, "grad_norm": None})
    log.write({"step": 1, "numbers": [8, 16], "reason": "words"})  # no curves
    log.close()
    assert any((tmp_path / "tensorboard").iterdir())


def test_wandb_without_a_key_keeps_its_run_in_the_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no key of this user's
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    log = MetricsLog(path, log="wandb", settings={"lr": 0.5})
    log.write({"step": 1, "loss": 2.5, "grad_norm": None})
    log.write({"step": 2, "loss": 2.25})
    log.close()
    log = MetricsLog(path, resume_step=1, log="wandb")  # step 2 comes again: in a run of its own
    log.write({"step": 2, "loss": 2.0})
    log.close()
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(kept) == 2
    assert b"loss" in kept[0].read_bytes()
    assert "wandb: no key, so curves stay on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_for_curves_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    words = f"train: expected the package {name} for --log {name}, .* run pip install {name}, or"
    with pytest.raises(ImportError, match=words):
        check_log(name)
    check_log("auto")


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": 2.0}], "both"])
def test_picture(tmp_path, rows):
    if rows == "both":
        rows = [{"step": s, "loss": 8 / s**0.2} for s in range(1, 200)]
        rows += [{"step": 100, "val_loss": 3.4}, {"step": 199, "val_loss": 3.0}]
        rows += [{"step": 150, "loss": None}]
    plot_loss(rows, tmp_path / "loss.png", title="a run")
    from matplotlib.image import imread

    image = imread(tmp_path / "loss.png")
    assert image.shape[:2] == (540, 960)
    assert image[..., :3].min() < 0.5 < image[..., :3].max()


def test_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    message = r"plot_loss: expected the package matplotlib.*; run pip install matplotlib"
    with pytest.raises(ImportError, match=message):
        plot_loss([], tmp_path / "loss.png", title="")


def test_mfu():
    assert mfu("NVIDIA H100 80GB HBM3", 989e12 / 1e9, 1e9) == pytest.approx(1.0)
    assert mfu("NVIDIA H100 PCIe", 378e12 / 1e9, 1e9) == pytest.approx(0.5)
    assert mfu("NVIDIA A100-SXM4-80GB", 1.0, 312e12) == pytest.approx(1.0)
    assert mfu("NVIDIA L40S", 1.0, 362e12) == mfu("NVIDIA L4", 1.0, 121e12) == 1.0
    assert mfu("GeForce 8800 GT", 1.0, 1.0) is None
