"""The training step: the stock model it is compared with, its workers, its gate."""

import math
from dataclasses import replace

import pytest
import torch
from test_bench import make_bench

from bench.peers import stock
from bench.records import load
from bench.systems import bench_first_step, bench_train, worker
from fastpar.config.config import GPTConfig
from fastpar.models.gpt import GPT

TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)


def test_stock_and_fastpar_are_one_model():
    """Loss and every gradient, an odd vocabulary (fastpar pads it), the same weights."""
    model = GPT(TINY, seed=3)
    plain = stock.GPT(TINY).load_fastpar(model.state_dict())
    exact = stock.GPT(TINY).load_fastpar(model.state_dict()).double()
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]
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
    assert 0 < stock_error < 1e-5


def test_relative_error_refuses_other_names():
    with pytest.raises(ValueError, match="relative_error: expected the tensors"):
        worker.relative_error({"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_a_variant_judges_its_own_gradients():
    variant = worker.Variant(worker.Spec("fastpar", TINY, 4), rank=0)
    first = variant.steps(0, 3)
    assert len(first["ms"]) == len(first["losses"]) == 3
    bench_train.judge([variant.check()])
    plain = worker.Variant(worker.Spec("stock", TINY, 4), rank=0)
    for ours, theirs in zip(first["losses"], plain.steps(0, 3)["losses"]):
        assert abs(ours - theirs) < 1e-4  # same weights, same batches, same optimizer
    right = variant._gradients
    variant._gradients = lambda: {n: g * 1.001 for n, g in right().items()}
    with pytest.raises(worker.WorkerError, match="gradients"):
        bench_train.judge([variant.check()])


def test_gpu_steps_are_timed_as_one_stretch_without_the_first_two(monkeypatch):
    """The GPU's path with the CPU's data and clock: one time for steps 2..7, all eight losses."""
    variant = worker.Variant(worker.Spec("fastpar", TINY, 4), rank=0)
    batches = [variant._batch(i, 4) for i in range(8)]
    done, begun = [], []

    def timed(call, device):
        begun.append(len(done))
        call()
        return 60.0, None

    step = variant._step
    monkeypatch.setattr(variant, "spec", replace(variant.spec, device="cuda"))
    monkeypatch.setattr(variant, "_batch", lambda index, size: batches[index])
    monkeypatch.setattr(variant, "_step", lambda i, x, y: done.append(i) or step(i, x, y))
    monkeypatch.setattr(worker, "stopwatch", timed)
    answer = variant.steps(0, 8)
    assert answer["ms"] == [10.0]
    assert done == list(range(8))
    assert begun == [2]
    assert len(answer["losses"]) == 8


@pytest.mark.slow
def test_two_ranks_take_turns_and_a_failure_stops_only_its_own(tmp_path):
    two = worker.Spec("fastpar", TINY, 4, world_size=2)
    specs = {"DDP": two, "broken": replace(two, kind="stock", world_size=1, device="nowhere")}
    logs = bench_train.take_turns(specs, rounds=2, steps=2, warmup=1)
    assert logs["broken"].refused.startswith("RuntimeError")
    assert logs["DDP"].refused is None
    assert len(logs["DDP"].ms) == len(logs["DDP"].exposed_comm_ms) == 4
    assert len(logs["DDP"].losses) == 5
    assert logs["DDP"].peak_bytes > 100e6
    rows = bench_train.to_rows(make_bench(tmp_path, "train"), "tiny", specs, logs, "DDP")
    assert [r.refused is None for r in rows] == [True, False]
    assert rows[0].tokens_per_s == pytest.approx(1e3 * 64 / rows[0].median_ms)
    assert rows[0].notes["ranks"] == 2
    assert rows[0].notes["memory_ratio"] == 1.0


def test_judge_refuses_wrong_gradients():
    good = {"error": 2.4e-7, "stock_error": 1.5e-7, "eps": 1.2e-7}
    bench_train.judge([good, good])
    for error in (1e-6, math.nan):
        with pytest.raises(worker.WorkerError, match="gradients: expected an error against fp64"):
            bench_train.judge([good, {**good, "error": error}])


@pytest.mark.slow
def test_the_gpu_training_bench_runs_on_a_cpu(tmp_path):
    bench = make_bench(tmp_path, "train")
    bench_train.run_gpu(bench)
    _, rows = load(tmp_path / "rows.json")
    best = {r.variant: r for r in rows if r.case.endswith("best batch")}
    assert set(best) == {"eager", "fastpar", "torch.compile"}
    assert all(r.refused is None for r in rows), [r.refused for r in rows]
    assert len([r for r in rows if " B=" in r.case]) >= 5


@pytest.mark.slow
def test_the_first_step_has_its_parts(tmp_path):
    """In real processes; DeepSpeed may be missing, which is told."""
    bench = make_bench(tmp_path, "first_step")
    bench_first_step.run(bench)
    _, rows = load(tmp_path / "rows.json")
    found = {row.variant: row for row in rows}
    assert set(found) == set(bench_first_step.VARIANTS)
    for name in ("eager", "torch.compile, cached", "fastpar", "fastpar.patch"):
        parts = found[name].notes
        whole = sum(parts[n] for n in ("import_s", "build_s", "first_step_s"))
        assert found[name].median_ms == pytest.approx(whole * 1e3, rel=1e-3)
        assert 0 < parts["second_step_s"] < whole
    assert found["fastpar train"].median_ms > 0
