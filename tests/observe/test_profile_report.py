"""The report of a profile: rates of operations, lines, JSON."""

import json

import pytest
from test_verdict import PHASES, measured

from fastpar.axes.step import Op
from fastpar.comm.recorder import BACKWARD, COMPUTE, FORWARD, OPTIMIZER
from fastpar.observe.profile import Report
from fastpar.observe.trace import MEMORY, OpTime

WORK = (
    Op("matmul", (6, 5, 7), "forward", 420.0, 1.0, 2),
    Op("layer_norm", (8, 4), "forward", 1.0, 3e6, 2),
    Op("layer_norm", (8, 4), "recompute", 1.0, 3e6, 1),
    Op("layer_norm", (8, 4), "backward", 1.0, 5e6, 2),
    Op("attention", (1, 2, 4, 8), "backward", 4e9, 1.0, 3),
    Op("optimizer", (100,), "forward", 1.0, 2e6, 1),
)
OPS = [
    OpTime("linear", FORWARD, COMPUTE, ((600, 500), (700, 500)), 2, 4.0),
    OpTime("layer_norm", FORWARD, MEMORY, ((8, 4),), 2, 2.0),
    OpTime("layer_norm", FORWARD, MEMORY, ((4, 4),), 1, 1.0),
    OpTime("attention_bwd", BACKWARD, COMPUTE, (), 3, 6.0),
    OpTime("adamw_step_", OPTIMIZER, MEMORY, (), 1, 0.5),
    OpTime("aten::mul", FORWARD, MEMORY, ((3,),), 9, 0.25),
]


@pytest.mark.parametrize(
    ("which", "rate"),
    [
        (0, f"{2 * 2 * 600 * 500 * 700 / 4.0 / 1e9:.3g} TFLOP/s"),
        (1, "3 GB/s"),  # three of 3 MB in 3 ms, whatever their shapes
        (3, "2 TFLOP/s"),
        (4, "4 GB/s"),
        (5, ""),
    ],
)
def test_rates_are_of_what_a_step_needs(which, rate):
    assert report().rate_of(OPS[which]) == rate


def report(steps_ms=(100.0, 104.0)):
    return Report(**vars(measured()), ops=OPS, work=WORK, profiled_step_ms=150.0,
                  steps_ms=list(steps_ms), about={"run": "a run"})  # fmt: skip


def test_the_report_is_text():
    assert len(report((60.0, 100.0)).lines()) > 1 + len(OPS)


def test_the_report_is_json():
    found = json.loads(json.dumps(report().as_json()))
    assert found["run"] == "a run"
    assert found["bound"] == "compute"
    assert [p["name"] for p in found["phases"]] == [p.name for p in PHASES]
    assert found["phases"][1]["of_matmul"] == pytest.approx(0.8)
    assert found["phases"][0]["of_matmul"] is None
    assert found["ops"][1]["rate"] == "3 GB/s"
    assert found["situation"]["batch_size"] == 16
    assert found["advice"] == report().as_json()["advice"]
