"""`fastpar profile`: what it writes on one rank and on two, what it refuses, how steps are cut into
phases and their times found, the report and the picture; times from a trace."""

import importlib.util
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from test_verdict import PHASES as MEASURED
from test_verdict import measured

from fastpar.axes.step import Op
from fastpar.cli import main
from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    GATHER,
    HOST,
    INPUT,
    OPTIMIZER,
    PHASES,
    PP,
    REDUCE,
    TP,
    WAIT,
    Recorder,
    Span,
    window,
)
from fastpar.observe import pictures, profile
from fastpar.observe.profile import Report, layer_bytes, parse_profile
from fastpar.observe.trace import (
    COMMUNICATION,
    MEMORY,
    OpTime,
    TraceTimes,
    kind_of,
    product_flops,
    times_of,
)
from fastpar.predict.machine import Ceilings
from fastpar.settings.config import TrainConfig
from fastpar.train import launch, trainer

TINY = {
    "data": "text.txt", "tokenizer": "bytes", "model": "micro", "n_layer": 2, "n_embd": 32,
    "n_head": 2, "block_size": 16, "batch_size": 4, "threads": 1, "device": "cpu",
}  # fmt: skip
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = random.Random(0)
    Path("text.txt").write_text(" ".join(rng.choices(("god", "lord", "unto", "sea"), k=2000)))
    return tmp_path


def run(flags):
    return main(["profile", *FLAGS, *flags.split()])


def content():
    return json.loads(Path("p/profile.json").read_text())


def test_a_profile_is_a_trace_a_picture_and_a_verdict(here, monkeypatch, capsys):
    ceilings = Ceilings(10.0, 0.1, "fp32 256^3")
    monkeypatch.setattr(profile, "measure_ceilings", lambda device: ceilings)
    assert run("--steps 2 --out p --micro-batch-size 2") == 0
    files = ["profile.json", "timeline.png", "trace.json"]
    assert sorted(p.name for p in Path("p").iterdir()) == files
    out = capsys.readouterr().out
    assert all(words in out for words in ("The step is ", "-bound: ", "What to change:"))
    found = content()
    assert [p["name"] for p in found["phases"]] == list(PHASES)
    assert found["step_ms"] == pytest.approx(sum(p["ms"] for p in found["phases"]))
    assert len(found["steps_ms"]) == 2
    assert found["situation"]["grad_accum_steps"] == 2
    assert found["situation"]["world_size"] == 1
    assert found["phases"][1]["flops"] > 0
    assert [op["calls"] for op in found["ops"] if op["name"] == "linear_cross_entropy"] == [2]
    names = [e["name"] for e in json.loads(Path("p/trace.json").read_text())["traceEvents"]]
    assert names.count("fastpar forward") == 4  # two steps of two micro-batches
    assert names.count("fastpar optimizer") == 2
    assert not list(here.glob("runs"))  # it leaves no run


@pytest.mark.slow
def test_two_ranks_tell_of_their_exchanges(here):
    assert run("--steps 1 --out p --nproc 2 --zero 2") == 0
    found = content()["situation"]
    assert (found["world_size"], found["zero_stage"], found["transport"]) == (2, 2, "shm")
    assert found["moving_ms"] > 0
    assert found["sent_bytes"] >= 4 * found["n_parameters"]  # half of gradients and of weights
    assert sum(found["waited_ms"].values()) > 0
    assert Path("p/timeline.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_stages_are_lanes_and_the_bubble_is_a_number(here, capfd, schedule):
    flags = f"--steps 2 --out p --nproc 2 --pp 2 --schedule {schedule} --micro-batch-size 1"
    assert run(flags) == 0
    found = content()
    waits = found["bubble_of_ranks"]
    assert len(waits) == 2
    assert all(0 < wait < 1 for wait in waits)
    assert found["bubble"] == pytest.approx(sum(waits) / 2)
    assert found["phases"][1]["name"] == FORWARD
    assert all(phase["ms"] > 0 for phase in found["phases"])
    assert "Bubble: stages wait for messages of others " in capfd.readouterr().out
    assert Path("p/timeline.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "profile: expected steps >= 1, got steps=0; set --steps"),
        ("--resume --steps 1", "profile: expected a new run, got resume=True; leave --resume out"),
        ("--out taken", "profile: expected a new or empty folder, got out=taken; choose another"),
        ("--nproc 2 --out taken", "profile: expected a new or empty folder, got out=taken"),
        ("--batch-size 3 --micro-batch-size 2", "train: expected batch_size = dp"),
    ],
)
def test_refusals_are_one_line(here, capsys, flags, message):
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert run(flags) == 2
    assert message in capsys.readouterr().err
    assert not list(here.glob("p*"))


def test_the_picture_needs_matplotlib(here, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert run("--steps 1") == 1
    error = capsys.readouterr().err
    assert "fastpar profile: expected matplotlib, got no such package; pip install" in error
    assert "Traceback" not in error


def test_other_flags_are_trains(here, monkeypatch):
    options, left = parse_profile(["--steps", "3", "--nproc", "2", "--out", "x"])
    assert vars(options) == {"steps": 3, "out": "x"}
    assert left == ["--nproc", "2"]
    # Ranks get the first free folder, and steps are no replays, which would have no phases.
    started, seen = [], []
    monkeypatch.setattr(launch, "launch", lambda words, nproc, threads: started.append(words) or 0)
    for made, out in (("runs", "profile"), ("runs/profile", "profile-2")):
        Path(made).mkdir()
        assert run("--nproc 2 --steps 3") == 0
        own = ["--nproc", "2", "--steps", "3", "--out", f"runs/{out}"]
        assert started.pop() == ["profile", *FLAGS, *own]
    monkeypatch.setattr(trainer, "train", lambda config, run: seen.append(config) or 0)
    for flags in (["--cuda-graphs"], []):
        assert main(["profile", "--device", "auto", *flags]) == 0
    assert [config.system.cuda_graphs for config in seen] == [False, False]


# Phases and their times


def test_steps_are_cut_into_phases_without_a_gap(here):
    mesh, marks = Mesh(device="cpu"), Recorder()
    cut = trainer.Trainer(TrainConfig().replace({**TINY, "micro_batch_size": 2}), mesh)
    marks.on = True
    cut.engine.on_phase = marks.phase
    step_ms, edges = profile._steps(cut, marks, 2)
    spans = [s for s in marks.spans if s.row == COMPUTE]
    one = [INPUT, INPUT, FORWARD, BACKWARD, INPUT, FORWARD, BACKWARD, OPTIMIZER]
    assert [s.name for s in spans] == one * 2
    assert sum(s.end_ms - s.begin_ms for s in spans) > 0.9 * 2 * step_ms
    assert len(edges) == 3
    assert all(a.end_ms <= b.begin_ms for a, b in pairwise(spans))
    mesh.close()


def parts_of(**phases):
    kinds = ("compute", "memory", "communication", "host")
    return TraceTimes({p: dict.fromkeys(kinds, 0.0) | phases.get(p, {}) for p in PHASES})


def test_phases_of_a_cpu_have_the_times_of_the_median_step():
    edges = [0.0, 10.0, 30.0, 41.0]
    spans = [Span(COMPUTE, FORWARD, *edge) for edge in pairwise(edges)]
    spans += [Span(WAIT, GATHER, *edge) for edge in ((1.0, 3.0), (11.0, 12.0), (31.0, 36.0))]
    steps = [window(spans, begin, end) for begin, end in pairwise(edges)]
    forward = profile._fit_to_spans(parts_of(forward={"compute": 6.0, "host": 12.0}), steps)[1]
    times = (forward.ms, forward.communication_ms, forward.compute_ms, forward.host_ms)
    assert times == pytest.approx((11.0, 2.0, 6.0, 3.0))
    shown = [[Span(COMPUTE, FORWARD, 0, end)] for end in (9.0, 3.0, 5.0)]
    assert profile._median_step(shown) == 2


@pytest.mark.parametrize(
    ("step_ms", "compute", "host"), [(10.0, 6.0, 2.0), (8.0, 6.0, 0.0), (4.0, 3.0, 0.0)]
)
def test_phases_of_a_gpu_are_fitted_to_a_step_without_the_profiler(step_ms, compute, host):
    parts = parts_of(
        forward={"compute": 6.0, "host": 4.0}, backward={"memory": 1.0, "communication": 1.0}
    )
    phases = profile._fit_to_step(parts, step_ms)
    assert sum(p.ms for p in phases) == pytest.approx(step_ms)
    assert phases[1].compute_ms == pytest.approx(compute)
    assert phases[1].host_ms == pytest.approx(host)


def test_waits_of_a_stage_are_for_messages_alone():
    cpu = [
        Span(COMPUTE, FORWARD, 0.0, 100.0),
        Span(WAIT, PP, 10.0, 20.0),
        Span(WAIT, GATHER, 30.0, 50.0),
        Span(PP, "recv", 5.0, 90.0),
    ]
    gpu = [
        Span(HOST, FORWARD, 0.0, 100.0),
        Span(WAIT, "nccl", 10.0, 20.0),  # in it a message, the rest of it a reduction
        Span(WAIT, "nccl", 40.0, 50.0),
        Span(PP, PP, 0.0, 14.0),
        Span(PP, PP, 12.0, 15.0),
    ]
    assert [profile.waited_for_stages(step) for step in (cpu, gpu, [])] == [0.1, 0.05, 0.0]


def test_bytes_of_layers_that_are_split_are_those_of_a_ring():
    spans = [
        Span(TP, "all_reduce", 0, 1, 8000, 4),
        Span(TP, "all_gather", 0, 1, 8000, 4),
        Span(TP, "all_gather", 0, 1, 8000, 2),  # keys along cp
        Span(REDUCE, "all_reduce", 0, 1, 8000, 4),  # the engine counts these
        Span(WAIT, TP, 0, 1, 8000),
        Span(TP, "all_to_all", 0, 1, 8000, 2),  # along cp, in pairs
    ]
    assert layer_bytes(spans) == 2 * 6000 + 6000 + 4000 + 4000


def test_large_traces_are_compressed(tmp_path, monkeypatch):
    class Profiler:
        def export_chrome_trace(self, path):
            event = {"ph": "X", "name": "fastpar optimizer", "cat": "user_annotation",
                     "ts": 0, "dur": 5, "tid": 1}  # fmt: skip
            Path(path).write_text(json.dumps({"traceEvents": [event]}))

    assert profile._trace(Profiler(), tmp_path).parts[OPTIMIZER]["host"] == 0.005
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    monkeypatch.setattr(profile, "_COMPRESSED_FROM", 10)
    profile._trace(Profiler(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json.gz"]


# The report and the picture


def test_rates_of_a_report_are_of_what_a_step_needs():
    work = (
        Op("matmul", (6, 5, 7), "forward", 420.0, 1.0, 2),
        Op("layer_norm", (8, 4), "forward", 1.0, 3e6, 2),
        Op("layer_norm", (8, 4), "recompute", 1.0, 3e6, 1),
        Op("layer_norm", (8, 4), "backward", 1.0, 5e6, 2),
        Op("attention", (1, 2, 4, 8), "backward", 4e9, 1.0, 3),
        Op("optimizer", (100,), "forward", 1.0, 2e6, 1),
    )
    rates = {
        OpTime("linear", FORWARD, COMPUTE, ((600, 500), (700, 500)), 2, 4.0): "0.21 TFLOP/s",
        OpTime("layer_norm", FORWARD, MEMORY, ((8, 4),), 2, 2.0): "3 GB/s",  # three of 3 MB in 3 ms
        OpTime("layer_norm", FORWARD, MEMORY, ((4, 4),), 1, 1.0): "3 GB/s",  # whatever their shapes
        OpTime("attention_bwd", BACKWARD, COMPUTE, (), 3, 6.0): "2 TFLOP/s",
        OpTime("adamw_step_", OPTIMIZER, MEMORY, (), 1, 0.5): "4 GB/s",
        OpTime("aten::mul", FORWARD, MEMORY, ((3,),), 9, 0.25): "",
    }
    report = Report(**vars(measured()), ops=list(rates), work=work, profiled_step_ms=150.0,
                    steps_ms=[100.0, 104.0], about={"run": "a run"})  # fmt: skip
    assert {op: report.rate_of(op) for op in rates} == rates
    assert len(report.lines()) > 1 + len(rates)
    found = json.loads(json.dumps(report.as_json()))
    assert (found["run"], found["bound"]) == ("a run", "compute")
    assert [p["name"] for p in found["phases"]] == [p.name for p in MEASURED]
    assert found["phases"][1]["of_matmul"] == pytest.approx(0.8)
    assert found["phases"][0]["of_matmul"] is None
    assert found["ops"][1]["rate"] == "3 GB/s"
    assert found["situation"]["batch_size"] == 16
    assert found["advice"] == report.as_json()["advice"]


def test_a_timeline_says_what_each_panel_shows(monkeypatch, tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    shown, save = [], figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, path: shown.append(self) or save(self, path)
    )
    panels = {
        "fastpar ZeRO-0": [
            Span(COMPUTE, "forward", 0, 10),
            Span(COMPUTE, "backward", 10, 30),
            Span(REDUCE, "all_reduce", 15, 28, 4096),
            Span(WAIT, "all_reduce", 26, 28),
        ],
        "fastpar ZeRO-3": [Span(COMPUTE, "optimizer", 0, 3), Span(GATHER, "all_gather", 0, 2)],
    }
    pictures.draw_timeline(panels, ["a line", "long " * 60], tmp_path / "x.png")
    (figure,) = shown
    first, second = (axes.get_title(loc="left") for axes in figure.axes)
    assert first == "fastpar ZeRO-0: step 30 ms; collectives under way 13 ms, waited for 2 ms"
    assert second.startswith("fastpar ZeRO-3: step 3 ms")
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["compute", "reduce", "gather"]
    lines = figure.get_supxlabel().split("\n")
    assert lines[0] == "a line"
    assert len(lines) == 3
    assert max(map(len, lines)) <= pictures.LINE_LENGTH
    waits = [Span(COMPUTE, "forward", 0, 1), Span(WAIT, "nccl", 0, 1)]
    assert pictures.rows_of([waits, [Span(GATHER, "", 0, 1)]]) == [COMPUTE, GATHER]
    assert pictures.rows_of([[Span(HOST, "forward", 0, 1)]]) == [HOST]


# Times from a trace


def event(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def phase(name, ts, dur):
    return event(f"fastpar {name}", "user_annotation", ts, dur)


def op(name, ts, dur, dims=(), tid=1, **args):
    return event(name, "cpu_op", ts, dur, tid, **{"Input Dims": list(dims), **args})


def step(at):
    """1 ms: a tenth input, then forward, backward, optimizer; times in us."""
    return [
        phase(INPUT, at, 100),
        op("aten::copy_", at + 10, 30),
        phase(FORWARD, at + 100, 400),
        op("linear", at + 110, 200, [[4, 8, 16], [32, 16], []]),
        op("aten::view", at + 120, 50),  # inside of linear, and no work
        op("aten::add", at + 320, 100, [[32]]),
        phase(BACKWARD, at + 500, 300),
        op("linearBackward", at + 500, 250),
        op("fastpar::linear_bwd", at + 520, 150, [[4, 8, 32], [4, 8, 16], [32, 16]]),
        event("fastpar wait", "user_annotation", at + 680, 60),
        op("aten::mul", at + 700, 20),  # of the waiting thread
        op("aten::mm", at + 520, 200, tid=2),  # another thread's
        phase(OPTIMIZER, at + 800, 200),
        event("Optimizer.step#AdamW.step", "user_annotation", at + 800, 200),
        op("fastpar::adamw_step_", at + 850, 100),
    ]


def test_own_times_go_to_phases_and_the_rest_is_the_host():
    found = times_of(step(5000) + step(6000) + [{"ph": "M", "name": "thread_name"}])
    assert found.step_ms == pytest.approx(1.0)

    def parts(compute, memory, communication, host):
        kinds = {COMPUTE: compute, MEMORY: memory, COMMUNICATION: communication, HOST: host}
        return {kind: pytest.approx(ms) for kind, ms in kinds.items()}

    assert found.parts == {
        INPUT: parts(0, 0.03, 0, 0.07),
        FORWARD: parts(0.15, 0.1, 0, 0.15),
        BACKWARD: parts(0.15, 0.02, 0.04, 0.09),
        OPTIMIZER: parts(0, 0.1, 0, 0.1),
    }
    told = {(o.name, o.phase, o.calls): o for o in found.ops[:2]}
    assert set(told) == {("linear", FORWARD, 1), ("linear_bwd", BACKWARD, 1)}
    linear = told["linear", FORWARD, 1]
    assert linear.shape == ((4, 8, 16), (32, 16))
    assert linear.ms == pytest.approx(0.15)
    assert all(o.name not in ("aten::view", "linearBackward", "aten::mm") for o in found.ops)


def test_an_op_inside_of_itself_is_one_call():
    """torch.compile calls it so: through the dispatcher, autograd, and the dispatcher again."""
    dims = [[2, 3, 5], [7, 5]]
    events = [
        phase(FORWARD, 0, 100),
        op("fastpar::linear", 10, 60, dims),
        op("linear", 20, 40, dims),
        op("fastpar::linear", 30, 20, dims),
        op("fastpar::linear", 80, 10, dims),
        phase(OPTIMIZER, 100, 10),
    ]
    (found,) = times_of(events).ops
    assert (found.name, found.calls, found.ms) == ("linear", 2, pytest.approx(0.07))


def kernel(name, launch, ts, dur, number):
    return [
        event("cudaLaunchKernel", "cuda_runtime", launch, 1, tid=7, correlation=number),
        event(name, "kernel", ts, dur, tid=9, correlation=number, **{"External id": number}),
    ]


def gpu_step(at):
    """1000 us on the device: 100 us wait for NCCL, 250 us wait for the host."""
    return [
        phase(INPUT, at, 50),
        *kernel("Memcpy", at + 10, at + 20, 30, at + 1),
        phase(FORWARD, at + 50, 100),
        op("aten::addmm", at + 60, 20, [[32], [8, 16], [16, 32]], **{"External id": at + 2}),
        *kernel("ampere_gemm", at + 70, at + 200, 300, at + 2),  # 150 us of nothing before
        phase(BACKWARD, at + 150, 100),
        *kernel("vectorized_elementwise", at + 160, at + 500, 200, at + 3),
        *kernel("ncclDevKernel_AllReduce", at + 170, at + 600, 200, at + 4),
        phase(OPTIMIZER, at + 250, 50),
        *kernel("adamw", at + 260, at + 900, 100, at + 5),
    ]


def test_on_a_gpu_kernels_belong_to_the_phase_that_launched_them():
    found = times_of(gpu_step(0) + gpu_step(1000))
    assert found.step_ms == pytest.approx(1.0)
    forward, backward = found.parts[FORWARD], found.parts[BACKWARD]
    assert forward[COMPUTE] == pytest.approx(0.3)
    assert forward[HOST] == pytest.approx(0.15)
    assert backward[MEMORY] == pytest.approx(0.2)
    assert backward[COMMUNICATION] == pytest.approx(0.1)  # the half that nothing hides
    assert found.parts[OPTIMIZER][MEMORY] == pytest.approx(0.1)
    assert found.parts[OPTIMIZER][HOST] == pytest.approx(0.1)
    assert found.ops[0] == OpTime(
        "aten::addmm", FORWARD, COMPUTE, ((32,), (8, 16), (16, 32)), 1.0, pytest.approx(0.3)
    )
    # Spans are those of the last step.
    rows = {row: [s for s in found.spans if s.row == row] for row in (HOST, COMPUTE, REDUCE, WAIT)}
    assert [s.name for s in rows[COMPUTE]] == [INPUT, FORWARD, BACKWARD, OPTIMIZER]
    (wait,) = rows[WAIT]
    assert (wait.begin_ms, wait.end_ms) == (pytest.approx(0.7), pytest.approx(0.8))
    assert rows[REDUCE] == [Span(REDUCE, REDUCE, pytest.approx(0.6), pytest.approx(0.8))]
    assert rows[HOST][0].begin_ms == pytest.approx(0.0)


def test_kinds_and_flops_of_operations():
    for name, kernel, kind in (
        ("linear", "", COMPUTE),
        ("fastpar::attention_bwd", "", COMPUTE),
        ("aten::mm", "", COMPUTE),
        ("aten::mul", "", MEMORY),
        ("aten::sum", "", MEMORY),
        ("aten::new_empty", "", HOST),
        ("autograd::engine::evaluate_function: linearBackward", "", HOST),
        ("linearBackward", "", HOST),
        ("", "_attention_fwd_kernel", COMPUTE),
        ("aten::linear", "nvjet_hsh_128x256", COMPUTE),
        ("c10d::allreduce_", "ncclDevKernel_AllReduce_Sum", COMMUNICATION),
    ):
        assert kind_of(name, kernel) == kind, name
    for name, shape, flops in (
        ("linear", ((2, 3, 5), (7, 5)), 2 * 6 * 5 * 7),
        ("linear_bwd", ((2, 3, 7), (2, 3, 5), (7, 5)), 4 * 6 * 5 * 7),
        ("aten::mm", ((3, 5), (5, 7)), 2 * 3 * 5 * 7),
        ("aten::bmm", ((2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        ("aten::addmm", ((7,), (3, 5), (5, 7)), 2 * 3 * 5 * 7),
        ("aten::mul", ((3,), (3,)), None),
        ("linear", (), None),
    ):
        assert product_flops(OpTime(name, FORWARD, COMPUTE, shape, 1, 1.0)) == flops, name
    with pytest.raises(ValueError, match="times_of: expected ranges of phases in the trace, got n"):
        times_of([op("aten::mm", 0, 5)])
