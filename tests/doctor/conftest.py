import pytest

from fastpar.doctor import doctor
from fastpar.kernels import backend, choice


@pytest.fixture(autouse=True)
def no_proofs(monkeypatch, tmp_path):
    """An empty folder of proofs, and none in this process."""
    monkeypatch.setenv("FASTPAR_PROOFS", str(tmp_path / "proofs"))
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())
    monkeypatch.setattr(doctor, "_expected", set())
    monkeypatch.setattr(choice, "proofs", {})
    monkeypatch.setattr(backend, "keep_freed_memory", lambda: True)  # for the whole process
    return tmp_path / "proofs"
