"""What gpu.sh profiles: random tokens, without tokenizer, tyro or, if need be, matplotlib."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from bench.systems import profile_gpt2
from fastpar.measure.ceilings import Ceilings
from fastpar.profile import step_profile


@pytest.fixture
def quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ceilings = Ceilings(10.0, 0.1, "fp32 256^3")
    monkeypatch.setattr(step_profile, "measure_ceilings", lambda device: ceilings)


def test_tokens_fill_the_vocabulary(tmp_path):
    profile_gpt2.write_tokens(tmp_path, 50257, 1000)
    for name in ("train", "val"):
        tokens = np.fromfile(tmp_path / f"{name}.bin", dtype=np.uint16)
        assert (tokens.size, tokens.max()) == (1000, 50256)


def test_a_tiny_profile_without_the_command_lines_packages(quick, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    command = ["--device", "cpu", "--quick", "--steps", "1", "--out", "p"]
    assert profile_gpt2.main(command) == 0
    assert sorted(p.name for p in Path("p").iterdir()) == ["profile.json", "trace.json"]
    assert json.loads(Path("p/profile.json").read_text())["situation"]["grad_accum_steps"] == 2
    assert "no picture: matplotlib is missing" in capsys.readouterr().out
    assert profile_gpt2.main(command) == 2
    assert "profile: expected a new or empty folder, got out=p" in capsys.readouterr().err
