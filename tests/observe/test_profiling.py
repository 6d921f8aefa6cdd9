"""`fastpar profile`: what it writes, on one rank and on two, and what it refuses."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

from fastpar.cli import main
from fastpar.comm.recorder import COMPUTE, FORWARD, GATHER, HOST, PHASES, PP, WAIT, Span
from fastpar.observe import profile as profiling
from fastpar.observe.profile import parse_profile
from fastpar.predict.machine import Ceilings
from fastpar.train import launch, trainer

TINY = (
    "--data text.txt --tokenizer bytes --model micro --n-layer 2 --n-embd 32 --n-head 2 "
    "--block-size 16 --batch-size 4 --threads 1 --device cpu"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = random.Random(0)
    Path("text.txt").write_text(" ".join(rng.choices(("god", "lord", "unto", "sea"), k=2000)))
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    ceilings = Ceilings(10.0, 0.1, "fp32 256^3")
    monkeypatch.setattr(profiling, "measure_ceilings", lambda device: ceilings)


def profile(flags):
    return main(["profile", *TINY.split(), *flags.split()])


def test_a_profile_is_a_trace_a_picture_and_a_verdict(here, quick, capsys):
    assert profile("--steps 2 --out p --micro-batch-size 2") == 0
    assert sorted(p.name for p in Path("p").iterdir()) == [
        "profile.json",
        "timeline.png",
        "trace.json",
    ]
    out = capsys.readouterr().out
    assert "The step is " in out
    assert "-bound: " in out
    assert "What to change:" in out
    found = json.loads(Path("p/profile.json").read_text())
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
    assert profile("--steps 1 --out p --nproc 2 --zero 2") == 0
    found = json.loads(Path("p/profile.json").read_text())["situation"]
    assert (found["world_size"], found["zero_stage"], found["transport"]) == (2, 2, "shm")
    assert found["moving_ms"] > 0
    assert found["sent_bytes"] >= 4 * found["n_parameters"]  # half of gradients and of weights
    assert sum(found["waited_ms"].values()) > 0
    assert Path("p/timeline.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_stages_are_lanes_and_the_bubble_is_a_number(here, capfd, schedule):
    flags = f"--steps 2 --out p --nproc 2 --pp 2 --schedule {schedule} --micro-batch-size 1"
    assert profile(flags) == 0
    found = json.loads(Path("p/profile.json").read_text())
    waits = found["bubble_of_ranks"]
    assert len(waits) == 2
    assert all(0 < wait < 1 for wait in waits)
    assert found["bubble"] == pytest.approx(sum(waits) / 2)
    assert found["phases"][1]["name"] == FORWARD
    assert all(phase["ms"] > 0 for phase in found["phases"])
    assert "Bubble: stages wait for messages of others " in capfd.readouterr().out
    assert Path("p/timeline.png").stat().st_size > 5000


def test_waits_of_a_stage_are_for_messages_alone():
    step = [
        Span(COMPUTE, FORWARD, 0.0, 100.0),
        Span(WAIT, PP, 10.0, 20.0),
        Span(WAIT, GATHER, 30.0, 50.0),
        Span(PP, "recv", 5.0, 90.0),
    ]
    assert profiling.waited_for_stages(step) == 0.1
    gpu = [
        Span(HOST, FORWARD, 0.0, 100.0),
        Span(WAIT, "nccl", 10.0, 20.0),  # in it a message, the rest of it a reduction
        Span(WAIT, "nccl", 40.0, 50.0),
        Span(PP, PP, 0.0, 14.0),
        Span(PP, PP, 12.0, 15.0),
    ]
    assert profiling.waited_for_stages(gpu) == 0.05
    assert profiling.waited_for_stages([]) == 0.0


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
    assert profile(flags) == 2
    assert message in capsys.readouterr().err
    assert not list(here.glob("p*"))


def test_the_picture_needs_matplotlib(here, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert profile("--steps 1") == 1
    error = capsys.readouterr().err
    assert "fastpar profile: expected matplotlib, got no such package; pip install" in error
    assert "Traceback" not in error


def test_other_flags_are_trains(here):
    options, left = parse_profile(["--steps", "3", "--nproc", "2", "--out", "x"])
    assert vars(options) == {"steps": 3, "out": "x"}
    assert left == ["--nproc", "2"]


def test_ranks_are_started_with_the_first_free_folder(here, monkeypatch):
    started = []
    monkeypatch.setattr(
        launch, "launch", lambda arguments, nproc, threads: started.append(arguments) or 0
    )
    for made, out in (("runs", "runs/profile"), ("runs/profile", "runs/profile-2"),
                      ("runs/profile-2", "runs/profile-3")):  # fmt: skip
        Path(made).mkdir()
        assert profile("--nproc 2 --steps 3") == 0
        own = ["--nproc", "2", "--steps", "3", "--out", out]
        assert started.pop() == ["profile", *TINY.split(), *own]


def test_profiled_steps_are_no_replays(here, monkeypatch):
    """Which would have no phases."""
    seen = []
    monkeypatch.setattr(trainer, "train", lambda config, run: seen.append(config) or 0)
    for flags in (["--cuda-graphs"], []):
        assert main(["profile", "--device", "auto", *flags]) == 0
    assert [config.system.cuda_graphs for config in seen] == [False, False]


def test_the_median_step_is_shown():
    steps = [[Span(COMPUTE, FORWARD, 0, end)] for end in (9.0, 3.0, 5.0)]
    assert profiling._median_step(steps) == 2
