"""Choosing the tiles of attention: wrong ones are refused, the fastest right one is written."""

import json
import shutil
import time

import pytest
import torch

from bench import __main__ as door
from bench.ops import tune
from bench.ops.tune import Place
from fastpar.doctor.clocks import CpuClock
from fastpar.kernels import attention_configs
from fastpar.kernels.attention_configs import PATH, Config, get_config

FWD = Place("fwd", 16, "fp32")
GOOD = Config(16, 16, 4, 1, "ptr")
OTHER = Config(32, 16, 4, 1, "ptr")


class ScriptedClock:
    """Runs the call and tells the time that its config is given."""

    def __init__(self, ms):
        self.ms, self.active = ms, None

    def sample(self, call):
        call()
        return self.ms[self.active]


@pytest.fixture
def table(tmp_path, monkeypatch, triton_device):
    """A copy of the table, two candidates, and a clock by which OTHER is the fastest."""
    if triton_device == "cuda":
        pytest.skip("needs Triton's interpreter: times are scripted")
    path = tmp_path / PATH.name
    shutil.copy(PATH, path)
    monkeypatch.setattr(tune, "candidates", lambda *place: [GOOD, OTHER])
    present = get_config(90, "fwd", 16, "fp32")
    clock = ScriptedClock({present: 3.0, GOOD: 2.0, OTHER: 1.0})
    entered = tune.forced

    def forced(place, config):
        clock.active = config
        return entered(place, config)

    monkeypatch.setattr(tune, "forced", forced)
    return path, clock


SMALL = {"device": "cpu", "shape": (1, 20, 1), "check_length": 20}


def written(path):
    return Config(**json.loads(path.read_text())["90"]["fwd"]["16"]["fp32"])


@pytest.mark.slow
def test_the_fastest_is_written_and_only_when_asked(table, capsys):
    path, clock = table
    before = path.read_text()
    found = tune.run(clock, places=[FWD], path=path, **SMALL)
    assert found == {"fwd D=16 fp32": "q32  k16  warps 4 stages 1 ptr"}
    assert path.read_text() == before
    tune.run(clock, places=[FWD], path=path, write=True, **SMALL)
    assert written(path) == OTHER
    printed = capsys.readouterr().out
    assert "final q32  k16  warps 4 stages 1 ptr    1.0000 ms best" in printed
    assert "ms present" in printed


def test_a_wrong_tile_is_refused_however_fast(table, monkeypatch, capsys):
    path, clock = table
    right = tune.attention_qkvpacked

    def wrong_with_other(qkv, **settings):
        return right(qkv, **settings) * (1.01 if clock.active == OTHER else 1.0)

    monkeypatch.setattr(tune, "attention_qkvpacked", wrong_with_other)
    tune.run(clock, places=[FWD], path=path, write=True, **SMALL)
    assert written(path) == GOOD
    assert "stages 1 ptr refused: AssertionError: output 0: expected" in capsys.readouterr().out


@pytest.mark.slow
def test_the_present_entry_stays_for_less_than_a_percent(table):
    path, clock = table
    clock.ms = dict.fromkeys(clock.ms, 1.0) | {OTHER: 0.995}
    before = path.read_text()
    found = tune.run(clock, places=[FWD], path=path, write=True, **SMALL)
    assert found["fwd D=16 fp32"].endswith("(as before)")
    assert path.read_text() == before


def test_out_of_time_is_said(table, capsys):
    path, clock = table
    present = get_config(90, "fwd", 16, "fp32")
    best = tune.tune_place(FWD, 90, clock, deadline=time.monotonic() - 1, **SMALL)
    assert best == present
    assert "fwd D=16 fp32: out of time after 1 configs" in capsys.readouterr().out
    found = tune.run(clock, places=[FWD], path=path, limit_s=-1.0, **SMALL)
    assert found == {"fwd D=16 fp32": "not tuned: out of time"}


def test_nothing_that_runs_is_an_error(table, monkeypatch):
    def broken(qkv, **settings):
        raise RuntimeError("no")

    monkeypatch.setattr(tune, "attention_qkvpacked", broken)
    with pytest.raises(RuntimeError, match="tune: expected a config of fwd D=16 fp32 that runs"):
        tune.tune_place(FWD, 90, CpuClock(), **SMALL)


def test_forced_reaches_the_launch_and_is_undone(triton_device, monkeypatch):
    from fastpar.kernels import attention_bwd_triton, attention_triton

    seen = []
    for module in (attention_triton, attention_bwd_triton):
        launch = module.launch
        monkeypatch.setattr(
            module,
            "launch",
            lambda kernel, *args, _launch=launch, **kwargs: (
                seen.append((kernel.__name__, kwargs["BLOCK_Q"], kwargs["BLOCK_K"])),
                _launch(kernel, *args, **kwargs),
            ),
        )
    qkv = torch.randn(1, 20, 3, 1, 16, device=triton_device).requires_grad_()
    place = Place("bwd_dkdv", 16, "fp32")
    with tune.forced(place, GOOD):
        tune.attention_qkvpacked(qkv).sum().backward()
    by_name = {name: tile for name, *tile in seen}
    assert by_name["_attention_bwd_dkdv_kernel"] == [16, 16]
    assert by_name["_attention_bwd_dq_kernel"] != [16, 16]
    assert attention_triton.get_config is attention_bwd_triton.get_config is get_config


def test_places_are_those_of_the_table():
    for place in tune.PLACES:
        assert place.kernel in attention_configs.KERNELS
        assert place.head_dim in attention_configs.HEAD_DIMS
        assert place.variant in attention_configs.VARIANTS


def test_bad_calls_are_one_line(capsys):
    assert door.main(["gelu", "--tune", "--device", "cpu"]) == 2
    assert "bench: expected attention alone with --tune, got names=gelu" in capsys.readouterr().err
    assert door.main(["attention", "--tune", "--device", "cpu"]) == 2
    assert "bench: expected a GPU with --tune, got device=cpu" in capsys.readouterr().err
