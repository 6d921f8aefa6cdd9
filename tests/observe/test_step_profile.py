"""Steps that are cut into phases, and the times that these have."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    GATHER,
    INPUT,
    OPTIMIZER,
    PHASES,
    REDUCE,
    TP,
    WAIT,
    Recorder,
    Span,
    window,
)
from fastpar.observe import profile
from fastpar.observe.profile import layer_bytes
from fastpar.observe.trace import TraceTimes
from fastpar.settings.config import TrainConfig
from fastpar.train.trainer import Trainer

TINY = {
    "data": "text.txt", "tokenizer": "bytes", "model": "micro", "n_layer": 1, "n_embd": 16,
    "n_head": 2, "block_size": 16, "batch_size": 4, "micro_batch_size": 2, "threads": 1,
    "device": "cpu",
}  # fmt: skip


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = random.Random(0)
    Path("text.txt").write_text(" ".join(rng.choices(("god", "lord", "unto", "sea"), k=2000)))
    mesh = Mesh(device="cpu")
    yield Trainer(TrainConfig().replace(TINY), mesh)
    mesh.close()


def test_steps_are_cut_into_phases_without_a_gap(trainer):
    marks = Recorder()
    marks.on = True
    trainer.engine.on_phase = marks.phase
    step_ms, edges = profile._steps(trainer, marks, 2)
    spans = [s for s in marks.spans if s.row == COMPUTE]
    one = [INPUT, INPUT, FORWARD, BACKWARD, INPUT, FORWARD, BACKWARD, OPTIMIZER]
    assert [s.name for s in spans] == one * 2
    assert sum(s.end_ms - s.begin_ms for s in spans) > 0.9 * 2 * step_ms
    assert len(edges) == 3
    assert all(a.end_ms <= b.begin_ms for a, b in pairwise(spans))


def test_phases_of_a_cpu_have_the_times_of_the_median_step():
    edges = [0.0, 10.0, 30.0, 41.0]
    spans = [
        Span(COMPUTE, FORWARD, 0.0, 10.0),
        Span(COMPUTE, FORWARD, 10.0, 30.0),
        Span(COMPUTE, FORWARD, 30.0, 41.0),
        Span(WAIT, GATHER, 1.0, 3.0),
        Span(WAIT, GATHER, 11.0, 12.0),
        Span(WAIT, GATHER, 31.0, 36.0),
    ]
    parts = {name: dict.fromkeys(("compute", "memory", "communication", "host"), 0.0)
             for name in PHASES}  # fmt: skip
    parts[FORWARD] |= {"compute": 6.0, "host": 12.0}
    steps = [window(spans, begin, end) for begin, end in pairwise(edges)]
    phases = profile._fit_to_spans(TraceTimes(parts), steps)
    forward = phases[1]
    assert forward.ms == pytest.approx(11.0)
    assert forward.communication_ms == pytest.approx(2.0)
    assert forward.compute_ms == pytest.approx(6.0)
    assert forward.host_ms == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("step_ms", "compute", "host"), [(10.0, 6.0, 2.0), (8.0, 6.0, 0.0), (4.0, 3.0, 0.0)]
)
def test_phases_of_a_gpu_are_fitted_to_a_step_without_the_profiler(step_ms, compute, host):
    kinds = dict.fromkeys(("compute", "memory", "communication", "host"), 0.0)
    parts = {name: dict(kinds) for name in PHASES}
    parts[FORWARD] |= {"compute": 6.0, "host": 4.0}
    parts[BACKWARD] |= {"memory": 1.0, "communication": 1.0}
    phases = profile._fit_to_step(TraceTimes(parts), step_ms)
    assert sum(p.ms for p in phases) == pytest.approx(step_ms)
    assert phases[1].compute_ms == pytest.approx(compute)
    assert phases[1].host_ms == pytest.approx(host)


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
