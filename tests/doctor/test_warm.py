"""Kernels compiled before they are needed: those that calls launch, by several processes."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from fastpar.doctor.warm import launches_of, warm
from fastpar.kernels import backend, bias_gelu
from fastpar.kernels.choice import Case

DROPOUT = Case("cuda", "dropout", torch.bfloat16, 0)


def test_a_proof_launches_forward_and_backward_kernels_and_runs_none():
    names = {
        launch.name for launch in launches_of(Case("cuda", "bias_gelu", torch.bfloat16, 96), 90)
    }
    assert any("fwd" in name for name in names)
    assert any("bwd" in name for name in names)
    assert (backend.choice, backend.recording) == ("auto", False)
    assert bias_gelu(torch.ones(2, 96)).isfinite().all()  # by C++ again


@pytest.mark.slow
def test_processes_fill_tritons_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert warm([DROPOUT], 90, processes=2) == []
    names = {launch.name for launch in launches_of(DROPOUT, 90)}
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == names
