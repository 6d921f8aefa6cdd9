"""The measured ceilings: units, and the fastest product counts."""

import pytest

from fastpar.doctor.trial import Timing
from fastpar.predict import machine
from fastpar.predict.machine import measure_ceilings


def test_ceilings_of_this_machine_are_plausible():
    found = measure_ceilings("cpu", quick=True)
    assert found.matmul == "fp32 256^3"
    assert 0.1 < found.copy_gb_per_s < 1e5
    assert 1e-4 < found.matmul_tflop_per_s < 1e3


def test_units_and_the_faster_of_two_products(monkeypatch):
    ms = {"copy": 2.0, "torch": 4.0, "linear": 1.0}

    def interleave(variants, clock, *, budget_s):
        assert set(variants) == set(ms)
        return {name: Timing(ms[name], 0.0, 0.0, 1) for name in variants}

    monkeypatch.setattr(machine, "interleave", interleave)
    found = measure_ceilings("cpu", quick=True)
    assert found.copy_gb_per_s == pytest.approx(8 * 2**20 / 2e6)  # read and written, in 2 ms
    assert found.matmul_tflop_per_s == pytest.approx(2 * 256**3 / 1e9)
