"""The harness, its gate, the result files, the report, and the stock model they compare with."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import __main__ as door
from bench import bench_adamw, bench_train, report, stock, worker
from bench.harness import (
    CYCLES_PER_US,
    Bench,
    Case,
    Ceilings,
    CpuClock,
    CudaClock,
    Timing,
    bind,
    interleave,
    stopwatch,
)
from bench.records import ResultFile, Row, load, machine, machine_line, reason, slug
from fastpar.config import GPTConfig
from fastpar.kernels.reference import bias_gelu_ref
from fastpar.model import GPT

ROOT = Path(__file__).resolve().parent.parent
ABOUT = {
    "device": "cpu",
    "cpu": "Test CPU (R) 9000",
    "cores": 2,
    "python": "3.11.0",
    "torch": "2.13.0",
    "triton": None,
    "commit": "abc",
    "dirty": False,
    "date": "2026-01-02",
}
TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)


def make_bench(tmp_path, name="gelu", **kwargs):
    results = ResultFile(tmp_path / "rows.json", ABOUT)
    ceilings = Ceilings(100.0, 1.0, "fp32 64^3")
    return Bench(name, "cpu", True, results, clock=CpuClock(), ceilings=ceilings, **kwargs)


def make_row(**changes):
    values = {
        "bench": "gelu",
        "case": "bias_gelu N=1 F=2",
        "direction": "forward",
        "variant": "eager",
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
        "median_ms": 2.0,
        "p20_ms": 1.5,
        "p80_ms": 3.0,
        "runs": 9,
        "gb_per_s": 12.0,
        "percent_of_ceiling": 34.5,
        "baseline": "eager",
        "speedup": 1.0,
    }
    return Row(**{**values, **changes})


# The timer


def test_timing_is_median_and_quantiles():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert timing.median_ms == 3.5
    assert timing.p20_ms == 2.0
    assert timing.p80_ms == 5.0
    assert timing.runs == 6


class ScriptedClock:
    """Returns what the call returns, and keeps the order of calls."""

    def __init__(self):
        self.order = []

    def sample(self, call):
        name, ms = call()
        self.order.append(name)
        return ms


def test_interleave_takes_turns_and_rotates_inputs():
    clock = ScriptedClock()
    variants = {
        "a": [lambda: ("a0", 1.0), lambda: ("a1", 3.0)],
        "b": [lambda: ("b0", 10.0), lambda: ("b1", 30.0)],
    }
    timings = interleave(variants, clock, budget_s=0.0, min_runs=4, max_runs=9)
    assert clock.order[:4] == ["a0", "a1", "b0", "b1"]  # warm-up, not counted
    assert clock.order[4:] == ["a0", "b0", "a1", "b1"] * 2
    assert timings["a"].median_ms == 2.0
    assert timings["b"].median_ms == 20.0
    assert timings["a"].runs == 4


def test_interleave_stays_within_its_budget():
    calls = {"a": [lambda: time.sleep(0.005)]}
    assert 2 <= interleave(calls, CpuClock(), budget_s=0.05, min_runs=2)["a"].runs <= 11


class FakeCuda:
    """A stream and its clock: an operation starts when the host enqueues it, or after the last."""

    def __init__(self):
        self.free_at, self.log = 0.0, []

    def enqueue(self, name, seconds):
        self.free_at = max(self.free_at, time.perf_counter()) + seconds
        self.log.append(name)
        return self.free_at

    def synchronize(self):
        time.sleep(max(0.0, self.free_at - time.perf_counter()))

    def _sleep(self, cycles):
        self.enqueue("sleep", cycles / CYCLES_PER_US / 1e6)

    def Event(self, enable_timing):  # noqa: N802
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.at = self.cuda.enqueue("event", 0.0)

    def synchronize(self):
        self.cuda.synchronize()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def test_cuda_sample_hides_the_host():
    """Two kernels of 1 ms whose launches take 4 ms each are timed as 2 ms."""
    cuda = FakeCuda()
    clock = CudaClock(cuda, flush=lambda: cuda.enqueue("flush", 0.0))

    def call():
        for _ in range(2):
            time.sleep(0.004)
            cuda.enqueue("kernel", 0.001)

    ms = min(clock.sample(call) for _ in range(5))  # a stalled host may starve one of them
    assert 1.99 < ms < 2.5
    assert cuda.log[-6:] == ["flush", "sleep", "event", "kernel", "kernel", "event"]


def test_cuda_host_time_is_the_enqueueing_alone():
    cuda = FakeCuda()
    clock = CudaClock(cuda, flush=lambda: None)

    def call():
        time.sleep(0.002)
        cuda.enqueue("kernel", 0.05)

    assert 1900 < clock.host_us(call, runs=3) < 40_000


def test_stopwatch_returns_time_and_result():
    ms, result = stopwatch(lambda: time.sleep(0.01) or 7, "cpu")
    assert result == 7
    assert 9 < ms < 500


def test_bind_forward_has_no_graph_and_backward_gives_every_gradient():
    w = torch.randn(3, requires_grad=True)
    x = torch.randn(4, 3)
    (call,) = bind(lambda x, w: x * w, [(x, w)], "forward")
    assert not call().requires_grad
    (call,) = bind(lambda x, w: (x * w).sum(), [(x, w)], "forward+backward")
    (dw,) = call()
    torch.testing.assert_close(dw, x.sum(0))  # the cotangent of a loss is 1


# The gate


def gelu_case(ours, **changes):
    def make_inputs(generator, small):
        x = torch.randn(8, 16, generator=generator)
        return x.requires_grad_(), torch.randn(16, generator=generator).requires_grad_()

    case = Case(
        "bias_gelu",
        make_inputs,
        {
            "eager": lambda x, b: torch.nn.functional.gelu(x + b, approximate="tanh"),
            "fastpar": ours,
        },
        bias_gelu_ref,
        torch.float32,
        bytes_moved={"forward": 1e3, "forward+backward": 2e3},
        compiled=False,
    )
    return replace(case, **changes)


def test_right_variant_gets_a_row_with_rates(tmp_path):
    bench = make_bench(tmp_path)
    bench.run([gelu_case(bias_gelu_ref)])
    _, rows = load(tmp_path / "rows.json")
    assert [(r.direction, r.variant) for r in rows] == [
        (direction, variant)
        for direction in ("forward", "forward+backward")
        for variant in ("eager", "fastpar")
    ]
    for row in rows:
        assert row.refused is None
        assert row.median_ms > 0
        assert row.gb_per_s == pytest.approx(
            (1e3 if row.direction == "forward" else 2e3) / row.median_ms / 1e6, rel=1e-4
        )
        assert row.percent_of_ceiling == pytest.approx(row.gb_per_s, rel=1e-4)  # of 100 GB/s
        assert row.ceiling == "copy 100 GB/s"
        assert row.baseline == "eager"
        assert row.threads == torch.get_num_threads()


def test_wrong_output_is_refused_and_said(tmp_path, capsys):
    make_bench(tmp_path).run([gelu_case(lambda x, b: bias_gelu_ref(x, b) * 1.001)])
    _, rows = load(tmp_path / "rows.json")
    ours = [r for r in rows if r.variant == "fastpar"]
    assert len(ours) == 2
    for row in ours:
        assert row.median_ms is None
        assert row.refused.startswith("AssertionError: output 0: expected error <=")
    assert all(r.median_ms for r in rows if r.variant == "eager")
    assert "refused: AssertionError: output 0" in capsys.readouterr().out


def test_wrong_gradient_is_refused_in_the_direction_that_shows_it(tmp_path):
    def ours(x, b):
        return bias_gelu_ref(x, b.detach())

    make_bench(tmp_path).run([gelu_case(ours)])
    _, rows = load(tmp_path / "rows.json")
    refused = {r.direction: r.refused for r in rows if r.variant == "fastpar"}
    assert refused["forward"] is None
    assert "results: expected" in refused["forward+backward"]


def test_exception_refuses_one_variant_only(tmp_path):
    def ours(x, b):
        raise RuntimeError("no kernel image at /some/where/lib.so")

    make_bench(tmp_path).run([gelu_case(ours, directions=("forward",))])
    _, rows = load(tmp_path / "rows.json")
    assert rows[1].refused == "RuntimeError: no kernel image at <path>"
    assert rows[0].median_ms > 0


def test_peers_may_round_worse_but_not_compute_something_else(tmp_path):
    def coarse(x, b):  # more than twice eager's error
        y = bias_gelu_ref(x, b)
        return y + 2 * torch.finfo(y.dtype).eps * y.detach().abs().max()

    case = gelu_case(coarse, directions=("forward",))
    make_bench(tmp_path).run([case])
    case.variants = {"eager": case.variants["eager"], "peer": coarse}
    make_bench(tmp_path).run([case])
    case.variants = {"eager": case.variants["eager"], "other": lambda x, b: x * b}
    make_bench(tmp_path).run([case])
    refused = {r.variant: r.refused for r in load(tmp_path / "rows.json")[1]}
    assert refused["fastpar"]
    assert refused["peer"] is None
    assert refused["other"]


def test_only_runs_the_named_cases(tmp_path):
    bench = make_bench(tmp_path, only="N=7")
    bench.run([gelu_case(bias_gelu_ref)])
    assert not bench.results.rows


def test_adamw_check_sees_a_wrong_step(monkeypatch):
    bench_adamw.check("fastpar", "cpu")
    bench_adamw.check("fastpar adamw_step_", "cpu")
    right = bench_adamw.adamw_step_
    monkeypatch.setattr(
        bench_adamw, "adamw_step_", lambda *a, **k: right(*a, **{**k, "weight_decay": 0.11})
    )
    with pytest.raises(AssertionError, match="output 0: expected error"):
        bench_adamw.check("fastpar adamw_step_", "cpu")


def test_judge_refuses_wrong_gradients():
    good = {"error": 2.4e-7, "stock_error": 1.5e-7, "eps": 1.2e-7}
    bench_train.judge([good, good])
    for error in (1e-6, math.nan):
        with pytest.raises(worker.WorkerError, match="gradients: expected an error against fp64"):
            bench_train.judge([good, {**good, "error": error}])


# Result files


def test_rows_merge_by_key_and_survive_a_round_trip(tmp_path):
    path = tmp_path / "new" / "rows.json"
    ResultFile(path, ABOUT).add(make_row(), make_row(variant="fastpar", host_us=1.23456789))
    later = {**ABOUT, "date": "2026-01-03", "commit": "def", "dirty": True}
    ResultFile(path, later).add(make_row(median_ms=1.0))
    about, rows = load(path)
    assert about == later
    assert [(r.variant, r.median_ms, r.commit, r.dirty) for r in rows] == [
        ("eager", 1.0, "def", True),
        ("fastpar", 2.0, "abc", False),
    ]
    assert rows[1].host_us == 1.23457
    assert not list(path.parent.glob("*.tmp"))


def test_result_file_schema(tmp_path):
    path = tmp_path / "rows.json"
    ResultFile(path, ABOUT).add(make_row(refused="why"))
    stored = json.loads(path.read_text())
    assert set(stored) == {"schema", "machine", "rows"}
    assert stored["schema"] == 1
    (row,) = stored["rows"]
    assert row["key"] == "gelu/bias_gelu N=1 F=2/forward/eager/cpu"
    assert "host_us" not in row  # not measured
    assert {"bench", "case", "direction", "variant", "device", "dtype", "threads"} <= set(row)
    assert {"commit", "dirty", "date", "refused"} <= set(row)


def test_rows_of_another_machine_are_refused(tmp_path):
    ResultFile(tmp_path / "rows.json", ABOUT).add(make_row())
    with pytest.raises(ValueError, match="ResultFile: expected rows of cpu-other-2-cores, got"):
        ResultFile(tmp_path / "rows.json", {**ABOUT, "cpu": "other"})


def test_foreign_and_damaged_files_are_refused(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="load: expected schema=1, got schema=99"):
        load(path)
    path.write_text('{"schema": 1, ')
    with pytest.raises(ValueError, match=r"load: expected a result file, got path=rows\.json"):
        load(path)
    row = {**make_row().to_json(), "watts": 3}
    path.write_text(json.dumps({"schema": 1, "machine": ABOUT, "rows": [row]}))
    with pytest.raises(ValueError, match=r"Row.from_json: expected .*, got fields=\['watts'\]"):
        load(path)


def test_machine_names_what_a_reader_needs():
    about = machine("cpu")
    assert {"cpu", "cores", "python", "torch", "triton", "commit", "dirty", "date"} <= set(about)
    line = machine_line(about)
    for part in (about["cpu"], f"{about['cores']} cores", torch.__version__, about["commit"]):
        assert part in line
    assert slug(ABOUT) == "cpu-test-cpu-r-9000-2-cores"
    gpu = {**ABOUT, "device": "cuda", "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"}
    assert slug(gpu) == "nvidia-h200"
    assert machine_line({**gpu, "dirty": True}).startswith(
        "NVIDIA H200, driver 580.1, CUDA 13.0; torch 2.13.0, triton none; commit abc + changes"
    )


def test_reason_is_one_line_without_paths():
    error = RuntimeError("failed in /tmp/x/y.cpp:3\n  because\n" + "z" * 999)
    assert reason(error).startswith("RuntimeError: failed in <path>:3 because z")
    assert len(reason(error)) <= 300


# The report


@pytest.fixture
def results(tmp_path):
    """A folder with two files of one machine and one of an older machine."""
    folder = tmp_path / "results"
    old = {**ABOUT, "cpu": "Old CPU", "date": "2025-12-31"}
    ResultFile(folder / "z.json", old).add(
        make_row(median_ms=77.0), make_row(case="gone", variant="fastpar")
    )
    first = {**ABOUT, "date": "2026-01-01"}
    ResultFile(folder / "b.json", first).add(
        make_row(median_ms=55.0),
        make_row(bench="train", case="6x384", direction="step", tokens_per_s=600.0),
    )
    ResultFile(folder / "a.json", ABOUT).add(
        make_row(),
        make_row(variant="fastpar", median_ms=0.5, speedup=4.0),
        make_row(variant="torch.compile", median_ms=1.0),
        make_row(case="other", variant="fastpar", median_ms=None, refused="red check"),
        make_row(
            bench="train",
            case="char 4x128",
            direction="step",
            variant="fastpar",
            notes={"total_s": 90.25, "val_loss": 1.23456, "max_loss_difference": 2e-6},
        ),
    )
    return folder


def test_report_writes_between_markers_only(results):
    text = "before\n<!-- bench:ops-cpu -->\nold\n<!-- /bench:ops-cpu -->\nafter\n"
    new = report.update(text, results)
    assert new.startswith("before\n<!-- bench:ops-cpu -->\n| op |")
    assert new.endswith("<!-- /bench:ops-cpu -->\nafter\n")
    assert "old" not in new
    assert "| bias_gelu N=1 F=2, forward | 2 (eager) | 1 (torch.compile) | 0.5 | 2.00x |" in new
    assert "refused: red check" in new
    assert "CPU: Test CPU (R) 9000, 2 cores" in new
    assert "77" not in new
    assert "gone" not in new  # another machine's
    assert report.update(new, results) == new


def test_report_takes_each_key_from_its_newest_file(results):
    text = report.render("train-cpu", results)  # only the older file of this machine has it
    assert "| 6x384 | eager | 1 x 2 | 2 | 600 | 1.00x |" in text
    assert "55" not in report.render("ops-cpu", results)


def test_report_of_the_char_run(results):
    text = report.render("char-cpu", results)
    assert "| char 4x128 | fastpar | 90.2 | 2 | 1.00x | 1.2346 | 2.0e-06 |" in text


def test_report_refuses_what_it_cannot_fill(results):
    with pytest.raises(ValueError, match=r"render: expected one of train-cpu, .*, got name=nope"):
        report.update("<!-- bench:nope -->\n<!-- /bench:nope -->\n", results)
    with pytest.raises(ValueError, match="update: expected <!-- /bench:ops-cpu --> after"):
        report.update("<!-- bench:ops-cpu -->\n", results)
    with pytest.raises(ValueError, match="newest: expected results of device cuda, got none"):
        report.update("<!-- bench:ops-cuda -->\n<!-- /bench:ops-cuda -->\n", results)
    with pytest.raises(ValueError, match="render: expected rows for the table ceilings-cpu"):
        report.update("<!-- bench:ceilings-cpu -->\n<!-- /bench:ceilings-cpu -->\n", results)


def test_report_check_tells_a_stale_file(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report.update, "__defaults__", (results,))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:ops-cpu -->\n<!-- /bench:ops-cpu -->\n")
    assert report.main([str(readme), "--check"]) == 1
    assert report.main([str(readme)]) == 0
    assert report.main([str(readme), "--check"]) == 0
    readme.write_text("<!-- bench:ops-cpu -->\n")
    assert report.main([str(readme)]) == 2
    assert "update: expected" in capsys.readouterr().err


def test_summary_has_a_line_for_each_case():
    text = report.summary([make_row(), make_row(variant="fastpar", refused="x", median_ms=None)])
    assert text == "bias_gelu N=1 F=2, fwd, ms: eager 2 (34 %) | fastpar refused"


# What is compared


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


def test_every_op_has_a_bench_that_can_be_run():
    found = door.names()
    assert found[0] == "ceilings"
    assert found[-1] == "train"
    ops = {p.stem for p in (ROOT / "kernels").glob("*.py")}
    assert ops - {"__init__", "backend", "reference"} <= set(found)
    for name in found:
        module = importlib.import_module(f"bench.bench_{name}")
        assert set(module.TIME_LIMIT_S) == {"cpu", "cuda"}
        assert callable(module.run)


# The door


def run(*command, **env):
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
    )


def test_bench_refuses_bad_arguments_in_one_line(capsys):
    assert door.main(["nope"]) == 2
    assert "bench: expected one of ceilings, adamw, " in capsys.readouterr().err
    assert door.main(["gelu", "--quick", "--commit-results"]) == 2
    assert "bench: expected full shapes and no --out" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert door.main(["gelu", "--device", "cuda"]) == 2
        assert "bench: expected a GPU, got device=cuda" in capsys.readouterr().err


def test_one_bench_that_runs_out_of_time_does_not_stop_the_next(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []
    apart = door.run_apart

    def run_apart(name, args, left_s):
        args.time_limit = 0.2 if name == "gelu" else 60.0
        started.append(name)
        return apart(name, args, left_s)

    monkeypatch.setattr(door, "run_apart", run_apart)
    out = tmp_path / "rows.json"
    arguments = ["gelu", "ceilings", "--device", "cpu", "--quick", "--out", str(out)]
    assert door.main(arguments) == 1
    assert started == ["gelu", "ceilings"]
    printed = capfd.readouterr().out
    assert "== gelu: stopped after 0 s; its rows so far are kept" in printed
    assert "failed: gelu" in printed
    assert {row.bench for row in load(out)[1]} == {"ceilings"}


def test_gpu_script_refuses_bad_arguments():
    failed = run("bash", "bench/gpu.sh", "--part", "nope")
    assert failed.returncode == 2
    assert "gpu.sh: expected --part tests|ops|train" in failed.stderr
    if not torch.cuda.is_available():
        failed = run("bash", "bench/gpu.sh", PYTHON=sys.executable)
        assert failed.returncode == 2
        assert "gpu.sh: expected a GPU that torch can use, got none" in failed.stderr


@pytest.mark.slow
def test_gpu_script_runs_without_a_gpu(tmp_path):
    done = run(
        *("bash", "bench/gpu.sh", "--device", "cpu", "--quick", "--part", "ops", "--part", "train"),
        PYTHON=sys.executable,
        FASTPAR_GPU_BUILD="none",
        OUT=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bench ops: done" in done.stdout
    assert "bench train: done" in done.stdout
    (results,) = tmp_path.glob("*.json")
    assert {row.bench for row in load(results)[1]} == set(door.names())
    assert (tmp_path / "bench_ops.log").exists()


@pytest.mark.slow
def test_the_gpu_training_bench_runs_on_a_cpu(tmp_path):
    bench = make_bench(tmp_path, "train")
    bench_train.run_gpu(bench)
    _, rows = load(tmp_path / "rows.json")
    best = {r.variant: r for r in rows if r.case.endswith("best batch")}
    assert set(best) == {"eager", "fastpar", "torch.compile"}
    assert all(r.refused is None for r in rows), [r.refused for r in rows]
    assert len([r for r in rows if " B=" in r.case]) >= 5
