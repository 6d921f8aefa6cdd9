"""`fastpar profile`: what it writes on one rank and on two, what it refuses, how steps are cut into
phases and their times found, the report and the picture; times from a trace."""

import gzip
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from cells import sweep
from fault_runs import enter

from fastpar.axes.step import Op, Setup, Workload
from fastpar.cli import main
from fastpar.comm.recorder import (
    BACKWARD,
    COMPUTE,
    CONTROL,
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
    Span,
)
from fastpar.observe import profile, trace
from fastpar.observe.trace import COMMUNICATION, MEMORY, OpTime, TraceTimes, times_of
from fastpar.predict.machine import Ceilings
from fastpar.settings.model import GPTConfig
from fastpar.train import launch, trainer

TINY = {
    "data": "text.txt", "tokenizer": "bytes", "model": "micro", "n_layer": 2, "n_embd": 32,
    "n_head": 2, "block_size": 16, "batch_size": 4, "threads": 1, "device": "cpu",
}  # fmt: skip
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch)
    return tmp_path


def run(flags):
    return main(["profile", *FLAGS, *flags.split()])


def content():
    return json.loads(Path("p/profile.json").read_text())


def test_a_profile_is_a_trace_a_picture_and_a_verdict(here, monkeypatch, capsys):
    ceilings = Ceilings(10.0, 0.1, "fp32 256^3")
    monkeypatch.setattr(profile, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(profile, "_COMPRESSED_FROM", 10)  # as a large trace is
    assert run("--steps 2 --out p --micro-batch-size 2") == 0
    files = ["profile.json", "timeline.png", "trace.json.gz"]
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
    events = json.loads(gzip.decompress(Path("p/trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events]
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
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_bubble_of_stages_is_a_number(here, schedule):
    flags = f"--steps 2 --out p --nproc 2 --pp 2 --schedule {schedule} --micro-batch-size 1"
    assert run(flags) == 0
    found = content()
    waits = found["bubble_of_ranks"]
    assert len(waits) == 2
    assert all(0 < wait < 1 for wait in waits)
    assert found["bubble"] == pytest.approx(sum(waits) / 2)
    assert all(phase["ms"] > 0 for phase in found["phases"])


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--steps 0", 2, "profile: expected steps >= 1, got steps=0; set --steps"),
        ("--resume --steps 1", 2, "profile: expected a new run, got resume=True; drop --resume"),
        ("--nproc 2 --out taken", 2, "profile: expected a new or empty folder, got out=taken"),
        ("--batch-size 3 --micro-batch-size 2", 2, "train: expected batch_size = dp"),
        ("--steps 1", 1, "fastpar profile: expected the package matplotlib, got "),
    ],
)
def test_refusals_are_one_line(here, monkeypatch, capsys, flags, status, message):
    Path("taken").mkdir()
    Path("taken/file").touch()
    if "matplotlib" in message:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(flags) == status
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(here.glob("p*"))


def test_other_flags_are_trains(here, monkeypatch):
    options, left = profile.parse_profile(["--steps", "3", "--nproc", "2", "--out", "x"])
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


def parts_of(**phases):
    kinds = ("compute", "memory", "communication", "host")
    return TraceTimes({p: dict.fromkeys(kinds, 0.0) | phases.get(p, {}) for p in PHASES})


def test_phases_are_fitted_to_steps_without_the_profiler():
    """One phase, as on a CPU, and all of them, as on a GPU."""
    for ms, waited, expected in (
        (24.0, 4.0, (10.0, 6.0, 4.0, 4.0)),  # the host gives way first
        (12.0, 4.0, (5.0, 3.0, 4.0, 0.0)),  # then operations
        (64.0, 4.0, (20.0, 12.0, 4.0, 28.0)),  # another program: all grow alike
        (3.0, 5.0, (0.0, 0.0, 3.0, 0.0)),
    ):
        found = profile.fitted(profile.Phase(FORWARD, 10.0, 6.0, 9.0, 14.0, flops=1.0), ms, waited)
        assert tuple(found)[1:5] == pytest.approx(expected)
        assert (found.ms, found.flops) == pytest.approx((ms, 1.0))
    assert profile.fitted(profile.Phase(INPUT), 2.0, 0.5) == profile.Phase(
        INPUT, communication_ms=0.5, host_ms=1.5
    )
    parts = parts_of(forward={"compute": 6, "host": 4}, backward={"memory": 1, "communication": 1})
    for step_ms, compute, host in ((10.0, 6.0, 2.0), (8.0, 6.0, 0.0), (4.0, 3.0, 0.0)):
        phases = profile._fit_to_step(parts, step_ms)
        assert sum(p.ms for p in phases) == pytest.approx(step_ms)
        assert (phases[1].compute_ms, phases[1].host_ms) == pytest.approx((compute, host))


def test_waits_and_bytes_of_ranks_that_split_layers():
    """Waits of a stage are for messages alone; bytes are those of a ring."""
    cpu = [Span(COMPUTE, FORWARD, 0.0, 100.0), Span(WAIT, PP, 10.0, 20.0)]
    cpu += [Span(WAIT, GATHER, 30.0, 50.0), Span(PP, "recv", 5.0, 90.0)]
    gpu = [
        Span(HOST, FORWARD, 0.0, 100.0),
        Span(WAIT, "nccl", 10.0, 20.0),  # in it a message, the rest of it a reduction
        Span(WAIT, "nccl", 40.0, 50.0),
        Span(PP, PP, 0.0, 14.0),
        Span(PP, PP, 12.0, 15.0),
    ]
    assert [profile.waited_for_stages(step) for step in (cpu, gpu, [])] == [0.1, 0.05, 0.0]
    spans = [
        Span(TP, "all_reduce", 0, 1, 8000, 4),
        Span(TP, "all_gather", 0, 1, 8000, 4),
        Span(TP, "all_gather", 0, 1, 8000, 2),  # keys along cp
        Span(REDUCE, "all_reduce", 0, 1, 8000, 4),  # the engine counts these
        Span(WAIT, TP, 0, 1, 8000),
        Span(TP, "all_to_all", 0, 1, 8000, 2),  # along cp, in pairs
    ]
    assert profile.layer_bytes(spans) == 2 * 6000 + 6000 + 4000 + 4000


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
    report = profile.Report(**vars(measured()), ops=list(rates), work=work, profiled_step_ms=150.0,
                    steps_ms=[100.0, 104.0], about={"run": "a run"})  # fmt: skip
    assert {op: report.rate_of(op) for op in rates} == rates


def event(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def phase(name, ts, dur):
    return event(f"fastpar {name}", "user_annotation", ts, dur)


def op(name, ts, dur, dims=(), tid=1, **args):
    return event(name, "cpu_op", ts, dur, tid, **{"Input Dims": list(dims), **args})


def step(at):
    """1 ms: a tenth input, then forward, backward, optimizer; times in us."""
    dims = [[4, 8, 16], [32, 16], []]
    return [
        phase(INPUT, at, 100),
        op("aten::copy_", at + 10, 30),
        phase(FORWARD, at + 100, 400),
        op("fastpar::linear", at + 110, 200, dims),
        op("linear", at + 115, 150, dims),  # the same call, as torch.compile makes it
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


def parts(compute, memory, communication, host):
    kinds = {COMPUTE: compute, MEMORY: memory, COMMUNICATION: communication, HOST: host}
    return pytest.approx(kinds)


def test_own_times_go_to_phases_and_the_rest_is_the_host():
    found = times_of(step(5000) + step(6000) + [{"ph": "M", "name": "thread_name"}])
    assert found.step_ms == pytest.approx(1.0)
    assert found.parts == {
        INPUT: parts(0, 0.03, 0, 0.07),
        FORWARD: parts(0.15, 0.1, 0, 0.15),
        BACKWARD: parts(0.15, 0.02, 0.04, 0.09),
        OPTIMIZER: parts(0, 0.1, 0, 0.1),
    }
    assert {(o.name, o.phase, o.calls) for o in found.ops[:2]} == {
        *(("linear", FORWARD, 1), ("linear_bwd", BACKWARD, 1))
    }
    (linear,) = (o for o in found.ops if o.name == "linear")
    assert (linear.shape, linear.ms) == (((4, 8, 16), (32, 16)), pytest.approx(0.15))
    assert all(o.name not in ("aten::view", "linearBackward", "aten::mm") for o in found.ops)


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
    assert found.parts[FORWARD] == parts(0.3, 0, 0, 0.15)
    assert found.parts[BACKWARD] == parts(0, 0.2, 0.1, 0)  # the half that nothing hides
    assert found.parts[OPTIMIZER] == parts(0, 0.1, 0, 0.1)
    shape = ((32,), (8, 16), (16, 32))
    assert found.ops[0] == OpTime("aten::addmm", FORWARD, COMPUTE, shape, 1.0, pytest.approx(0.3))
    # Spans are those of the last step.
    rows = {row: [s for s in found.spans if s.row == row] for row in (HOST, COMPUTE, REDUCE, WAIT)}
    assert [s.name for s in rows[COMPUTE]] == [INPUT, FORWARD, BACKWARD, OPTIMIZER]
    (wait,) = rows[WAIT]
    assert (wait.begin_ms, wait.end_ms) == (pytest.approx(0.7), pytest.approx(0.8))
    assert rows[REDUCE] == [Span(REDUCE, REDUCE, pytest.approx(0.6), pytest.approx(0.8))]
    assert rows[HOST][0].begin_ms == pytest.approx(0.0)


def test_flops_of_products():
    for name, shape, flops in (
        ("linear", (), None),
        ("linear", ((2, 3, 5), (7, 5)), 2 * 6 * 5 * 7),
        ("linear_bwd", ((2, 3, 7), (2, 3, 5), (7, 5)), 4 * 6 * 5 * 7),
        ("aten::mm", ((3, 5), (5, 7)), 2 * 3 * 5 * 7),
        ("aten::bmm", ((2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        ("aten::addmm", ((7,), (3, 5), (5, 7)), 2 * 3 * 5 * 7),
        ("aten::mul", ((3,), (3,)), None),
    ):
        assert trace.product_flops(OpTime(name, FORWARD, COMPUTE, shape, 1, 1.0)) == flops, name
    with pytest.raises(ValueError, match="times_of: expected ranges of phases in the trace, got n"):
        times_of([op("aten::mm", 0, 5)])


# The verdict: constructed numbers in, words out
CEILINGS = Ceilings(10.0, 0.1, "fp32 1536^3")
# 100 ms: products at 80 % of 0.1 TFLOP/s, the rest at half of the copy.
GOOD = (
    profile.Phase(INPUT, host_ms=1.0),
    profile.Phase(FORWARD, 25.0, 4.0, 0.0, 1.0, flops=2.0e9, bytes=2e7),
    profile.Phase(BACKWARD, 50.0, 8.0, 2.0, 2.0, flops=4.0e9, bytes=4e7),
    profile.Phase(OPTIMIZER, 0.0, 6.0, 0.0, 1.0, bytes=3e7),
)
LARGE = {"micro_batch_size": 16, "dtype": "fp32", "device_type": "cpu", "transport": "none"}
SEEN = {field.name for field in fields(profile.Situation)}


def measured(phases=GOOD, batch_size=16, **known):
    situation = profile.Situation(**{name: known.pop(name) for name in SEEN & set(known)})
    setup = Setup(**{**LARGE, **known})
    return profile.Measured(phases, CEILINGS, Workload(GPTConfig(), batch_size), setup, situation)


def test_a_good_step_is_compute_bound_and_nothing_is_to_change():
    found = measured()
    assert (found.bound, [p.bound for p in GOOD]) == (COMPUTE, [INPUT, COMPUTE, COMPUTE, MEMORY])
    shares = {COMPUTE: 0.75, MEMORY: 0.18, COMMUNICATION: 0.02, HOST: 0.04, INPUT: 0.01}
    assert found.shares == pytest.approx(shares)
    assert profile.advise(found) == [
        "No rule applies: compute-bound, products at 80 % of the ceiling."
    ]
    for other in (exposed(REDUCE, ms=5.0), measured(world_size=2, waited_ms={})):
        assert profile.advise(other)[0].startswith("No rule applies")
    no_module = profile.advise(exposed(REDUCE, transport="gloo", forced_backend="none"))
    assert not any("gloo" in line for line in no_module)  # no shared memory without it
    sent = measured(world_size=2, transport="shm", moving_ms=8.0, sent_bytes=16e6)
    assert "8.0 ms (2 GB/s sent a rank over shm), 75 %" in profile.verdict(sent)[-1]
    # What is not known has no fraction.
    found = measured((profile.Phase(FORWARD, host_ms=5.0),))
    assert found.of_matmul(found.phases) is found.of_copy(found.phases) is None
    assert (found.bound, len(profile.verdict(found))) == (HOST, 1)


def on_host(share):
    """A step of 100 ms with this share of it on the host."""
    forward = GOOD[1]._replace(host_ms=100 * share, compute_ms=70.0 - 100 * share)
    return (GOOD[0], forward, *GOOD[3:])


def exposed(kind, ms=20.0, **situation):
    """Two ranks that wait so long."""
    waited = {REDUCE: 0.5, GATHER: 0.5, TP: 0.0, CONTROL: 0.5, kind: ms}
    phases = (*GOOD[:2], GOOD[2]._replace(communication_ms=ms), GOOD[3])
    return measured(phases, **{"world_size": 2, "waited_ms": waited, **situation})


def slow(factor):
    """The products take so much longer."""
    return tuple(p._replace(compute_ms=p.compute_ms * factor) for p in GOOD)


UPDATE = (*GOOD[:3], profile.Phase(OPTIMIZER, memory_ms=40.0, bytes=2e8))
LATE = (profile.Phase(INPUT, host_ms=20.0), *GOOD[1:])
GPU = {"device_type": "cuda", "dtype": "bf16"}
STAGES = {"pp": 2, "micro_batch_size": 1, "grad_accum_steps": 4}
CASES = [
    (measured(forced_backend="none"), "The compiled module is missing, so torch"),
    (measured(forced_backend="torch"), "FASTPAR_BACKEND=torch forces a backend: unset"),
    (measured(device_type="cuda"), "--dtype bf16 makes products several times"),
    (measured(LATE), "Fetching batches takes 17 % of the step: keep the token"),
    (measured(on_host(0.4), micro_batch_size=4, grad_accum_steps=4), "--micro-batch-size 8 does"),
    (measured(on_host(0.4), 12, micro_batch_size=4, grad_accum_steps=3), "--micro-batch-size 12"),
    (measured(on_host(0.4)), "a larger --batch-size (now 16)"),
    (measured(slow(4), micro_batch_size=1), "Products of 1024 rows reach 20 % of the ceiling"),
    (measured(on_host(0.4), **GPU), "The GPU waits for the host, here without CUDA graphs"),
    (measured(idle_cores=3), "3 cores of this machine are unused: drop --threads"),
    (exposed(REDUCE, transport="gloo"), "--transport auto uses shared memory"),
    (exposed(CONTROL), "20.0 ms a step wait for the slowest rank"),
    (exposed(TP, tp=2), "tensor-parallel exchanges: --tp 1 with a higher --zero stage"),
    (exposed(TP, cp=2), "context-parallel exchanges: --cp 1 with --activation-checkpointing full"),
    (exposed(TP, cp=2, cp_method="keys"), "--cp-method heads sends 67% as much"),
    (exposed(PP, **{**STAGES, "micro_batch_size": 4}), "--micro-batch-size 2 gives more"),
    (exposed(PP, **STAGES), "--schedule interleaved runs two"),
    (exposed(PP, **STAGES, schedule="interleaved", chunks=2), "--pp-split moves layers"),
    (exposed(GATHER, zero_stage=3), "--zero 2 keeps them whole, for 249 MB more a rank"),
    (exposed(GATHER, zero_stage=2), "wait for updated weights: --zero 0 keeps"),
    (exposed(REDUCE, grad_accum_steps=4, accumulate="shard"), "--accumulate full sends their sum"),
    (exposed(REDUCE, dtype="bf16"), "--reduce-dtype bf16 halves the bytes"),
    (exposed(REDUCE, n_buckets=1, bucket_mb=8.0), "in 1 buckets, .* sent late: --bucket-mb 2."),
    (exposed(REDUCE, n_buckets=40, bucket_mb=0.25), "in 40 buckets of 0.25 MB: --bucket-mb 1."),
    (exposed(REDUCE, n_buckets=5, bucket_mb=4.0), "with --grad-accum-steps sends them less often"),
    (exposed(REDUCE, deterministic=True), "drop --deterministic"),
    (measured(UPDATE, world_size=4), "30 % of the step: --zero 1 shards the update over 4 ranks"),
    (measured(UPDATE, **GPU), "--moment-dtype bf16 halves the bytes"),
    (measured(UPDATE), "--grad-accum-steps updates less often"),
    (measured(activation_checkpointing="full"), "(--activation-checkpointing full): selective"),
    (measured(activation_checkpointing="selective"), "none recomputes less"),
]


@sweep(("found", "words"), CASES)
def test_each_rule_speaks_where_its_numbers_say_so(found, words):
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), "\n".join(profile.advise(found)))


def test_work_goes_to_phases_by_direction():
    ops = [
        Op("matmul", (1, 1, 1), "forward", 10.0, 1.0, 2),
        Op("matmul", (1, 1, 1), "recompute", 10.0, 1.0, 1),
        Op("loss", (1, 1, 1), "forward", 5.0, 1.0, 1),
        Op("layer_norm", (1, 1), "backward", 3.0, 7.0, 2),
        Op("optimizer", (4,), "forward", 1.0, 9.0, 1),
        Op("orthogonalize", (4, 8), "forward", 100.0, 10.0, 3),
        Op("copy", (4,), "backward", 0.0, 2.0, 1),
    ]
    assert profile.work_of(ops) == {
        FORWARD: {"flops": 25.0, "bytes": 0.0},
        BACKWARD: {"flops": 10.0, "bytes": 16.0},
        OPTIMIZER: {"flops": 300.0, "bytes": 9.0},
    }
