"""Benches of whole steps: their gates tell wrong weights, losses and gradients, and each runs."""

import importlib
import json
import math
import re

import pytest
import torch
from test_bench import make_bench
from test_records import make_row

from bench.peers import engines, stock
from bench.records import load
from bench.report import tables
from bench.systems import bench_overlap, bench_train, bench_zero, matrix, red_rows, worker
from fastpar.comm.ranks import RankFailed
from fastpar.models.gpt import GPT
from fastpar.settings.model import GPTConfig

TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)
SYSTEMS = ("zero", "tp", "pp", "cp", "checkpoint", "train", "offload", "plan", "shm", "first_step")
SYSTEMS += ("overlap", "wires")
# What a machine may lack.
MISSING = re.compile(r"not installed|No module named|NoLinkError|Ninja|C\+\+|g\+\+")


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_quick_run_has_rows_that_no_gate_refuses(tmp_path, name):
    only = "1000 Mbit/s, fastpar" if name == "wires" else ""
    bench = make_bench(tmp_path, name, only=only)
    importlib.import_module(f"bench.systems.bench_{name}").run(bench)
    _, rows = load(tmp_path / "rows.json")
    red = {row.variant: row.refused for row in rows if row.refused}
    assert rows
    assert all(MISSING.search(why) for why in red.values()), red
    assert any(row.variant.startswith("fastpar") for row in rows) or red


def test_weights_and_losses_of_another_run_are_refused():
    reference = {"error": 4e-6, "loss_error": 1e-7, "loss": 5.5}
    good = {"error": 7e-6, "first_loss": 5.5}
    assert bench_zero.judge([good, good], reference) == 7e-6
    for error in (1e-5, math.nan):
        with pytest.raises(RankFailed, match="weights after 2 steps: expected an error of the up"):
            bench_zero.judge([{**good, "error": error}, good], reference)
    for loss in (5.50001, math.nan):
        with pytest.raises(RankFailed, match=r"first loss: expected 5\.5000000 within"):
            bench_zero.judge([good, {**good, "first_loss": loss}], reference)


def test_update_error_counts_every_tensor_once():
    start = {"a": torch.zeros(2), "b": torch.zeros(3)}
    exact = {n: torch.ones(t.shape, dtype=torch.float64) for n, t in start.items()}
    padded = [("a", torch.tensor([1.0, 1.5])), ("b", torch.ones(5))]
    assert engines.update_error(iter(padded), exact, start) == pytest.approx(math.sqrt(0.05))
    with pytest.raises(ValueError, match=r"update_error: expected the tensors \['a', 'b'\], got n"):
        engines.update_error(iter(padded[:1]), exact, start)


def test_stock_and_fastpar_are_one_model():
    """Loss and every gradient, an odd vocabulary (fastpar pads it), the same weights."""
    model = GPT(TINY, seed=3)
    plain = stock.GPT(TINY).load_fastpar(model.state_dict())
    exact = stock.GPT(TINY).load_fastpar(model.state_dict()).double()
    tokens = torch.randint(200, (3, 17), generator=torch.Generator().manual_seed(0))
    losses, grads = [], []
    for m in (model, plain, exact):
        loss = m(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.double()[:200] for n, p in m.named_parameters()})
    eps = torch.finfo(torch.float32).eps
    assert abs(losses[0] - losses[2]) <= 2 * abs(losses[1] - losses[2]) + eps * losses[2]
    error, stock_error = (worker.relative_error(g, grads[2]) for g in grads[:2])
    assert error <= 2 * stock_error + eps


def test_a_variant_judges_its_own_gradients():
    variant = worker.Variant(worker.Spec("fastpar", TINY, 4))
    variant.steps(0, 1)
    bench_train.judge([variant.check()])
    right = variant._gradients
    variant._gradients = lambda: {n: g * 1.001 for n, g in right().items()}
    with pytest.raises(RankFailed, match="gradients: expected an error against fp64 of at most"):
        bench_train.judge([variant.check()])


@pytest.mark.parametrize("loss", [4.001, math.nan])
def test_other_losses_than_those_of_ddp_are_refused(loss):
    logs = {name: bench_overlap.Log(losses=[5.0, 4.0]) for name in (bench_overlap.DDP, "FSDP2")}
    logs["FSDP2"].losses[1] = loss
    bench_overlap.judge(logs)
    assert "losses: expected those of DDP within 0.0001, got" in logs["FSDP2"].refused


def test_a_table_compares_through_ddp():
    def row(variant, ms, speedup):
        return make_row(bench="zero", direction="step", variant=variant, median_ms=ms,
                        tokens_per_s=512e3 / ms, speedup=speedup, threads=1)  # fmt: skip

    rows = [row("FSDP2", 6000.0, 0.5), row("FSDP2, no reshard", 5000.0, 0.8), row("DDP", 4e3, 1.0)]
    text = tables.TABLES["zero"]([*rows, row("fastpar ZeRO-0", 2000.0, 2.0)])
    assert "| fastpar ZeRO-0 | 1 x 1 | 2000 | 256 | 2.00x | 2.50x |" in text


# Layouts side by side


def test_a_layout_is_compared_with_its_own_run_of_one_process(monkeypatch, tmp_path, capsys):
    """Another seed of its weights is another run."""
    monkeypatch.setattr(matrix, "AT", (2, 4))
    monkeypatch.setitem(matrix.SETTINGS, "max_steps", 4)
    changes = {"optimizer": "muon", "zero_stage": 1}
    (row,) = matrix.fastpar_rows([(2, changes)])
    assert matrix.difference(row["deterministic"]) == 0.0
    assert matrix.difference(row["default"]) < 1e-5
    real = matrix.losses_of
    monkeypatch.setattr(
        matrix,
        "losses_of",
        lambda at, **more: real(at, **more, **({"seed": 2} if at[0] == 2 else {})),
    )
    assert matrix.main(["fastpar", "--only", "2 ranks, zero 1", "--into", str(tmp_path)]) == 1
    assert "another run: 2 ranks, zero 1" in capsys.readouterr().out


def test_a_step_that_is_right_and_one_that_is_wrong(monkeypatch, tmp_path):
    """Means are averaged over unequal numbers of targets."""
    counted, averaged = (
        next(p for p in red_rows.PROGRAMS if p.name.startswith(name))
        for name in ("unequal targets, counted", red_rows.AVERAGED)
    )
    way = next(w for w in red_rows.WAYS if w.name == "fastpar ZeRO-2")
    assert red_rows.error_of(counted, way) < 1e-4
    programs = (red_rows.replace(averaged, ways=red_rows.WAYS[:1]),)
    monkeypatch.setattr(red_rows, "PROGRAMS", programs)
    monkeypatch.setattr(red_rows, "LAYOUTS", ())
    assert red_rows.main(["--into", str(tmp_path)]) == 0
    (wrong,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert wrong["verdict"] == "wrong"
