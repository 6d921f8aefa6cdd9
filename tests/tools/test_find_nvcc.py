"""Where a build looks for nvcc."""

import runpy
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "setup.py"


@pytest.fixture
def find_nvcc(monkeypatch):
    """setup.py's function, on a machine without nvcc on the PATH and without CUDA_HOME."""
    for name in ("CUDA_HOME", "CUDA_PATH", "FASTPAR_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("setuptools.setup", lambda **settings: None)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    found = runpy.run_path(str(SETUP))["find_nvcc"]
    monkeypatch.setenv("PATH", "")
    return found


def put(folder):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_the_newest_of_the_usual_folders(find_nvcc, tmp_path):
    assert find_nvcc(tmp_path) is None
    put(tmp_path / "usr/local/cuda-9.2")
    newest = put(tmp_path / "usr/local/cuda-13.0")
    assert find_nvcc(tmp_path) == newest
    chosen = put(tmp_path / "usr/local/cuda")  # the administrator's choice among them
    assert find_nvcc(tmp_path) == chosen


def test_cuda_home_comes_first_and_alone(find_nvcc, tmp_path, monkeypatch):
    put(tmp_path / "usr/local/cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "mine"))
    assert find_nvcc(tmp_path) is None
    mine = put(tmp_path / "mine")
    assert find_nvcc(tmp_path) == mine
