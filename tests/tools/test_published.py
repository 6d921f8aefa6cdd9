"""published.py: what others reported of Megatron's GPTs and llm.c's GPT-2 runs, and the planner."""

import math

import pytest

from bench.peers import published
from bench.peers.published import TOLERANCE, predict, table
from bench.records import RESULTS
from fastpar.predict import machine
from fastpar.predict.machine import GENERATIONS, find_device
from fastpar.predict.time import check

ROWS = list(published.published())
FAMILIES = sorted({row.family for row in ROWS})


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{row.setup.world_size} {row.device} {row.name}" for row in ROWS]
)
def test_within_a_fifth_of_reported(row):
    _, fraction = predict(row)
    assert abs(fraction / row.reported - 1) < TOLERANCE


def test_what_interleaving_gained_is_what_the_schedules_say():
    reported, predicted = published.schedules()
    assert reported == 1.28
    assert abs(predicted / reported - 1) < 0.05


def test_rows_are_as_their_sources_have_them():
    """Sizes by the parameters they give; the batch is whole micro-batches; fractions as printed."""
    assert len(ROWS) == 10 + 8 + 2 + 6
    for row in ROWS:
        check(row.workload, row.setup)
        size = row.name.split()[0]
        billions = float(size.strip("MB")) / (1000 if size.endswith("M") else 1)
        assert row.workload.n_parameters / 1e9 == pytest.approx(billions, rel=0.03)  # 1.7 is 1.65
    printed = {  # table 5 has MFU too
        "22B selective, sp": 0.415,
        "175B selective, sp": 0.514,
        "530B selective, sp": 0.560,
        "1000B selective, sp": 0.563,
    }
    for row in ROWS:
        if row.name in printed and row.setup.dp == 1:
            assert row.reported == pytest.approx(printed[row.name], abs=0.003)
    assert {row.device for row in ROWS if row.family == "llm.c"} == {"a100", "h100"}


@pytest.mark.slow  # a simulation of each pipeline and number
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_left_out_is_predicted_from_the_others(family, monkeypatch):
    """`reached` of A100 fitted to the other families' rows alone."""
    own = [row for row in ROWS if row.device == "a100" and row.family == family]
    others = [row for row in ROWS if row.device == "a100" and row.family != family]
    assert find_device("a100").generation == "ampere"

    def off(rows, reached):
        changed = GENERATIONS["ampere"]._replace(reached=reached)
        monkeypatch.setitem(machine.GENERATIONS, "ampere", changed)
        return [math.log(predict(row)[1] / row.reported) for row in rows]

    grid = [0.5 + 0.02 * i for i in range(25)]
    fitted = min(grid, key=lambda reached: sum(x * x for x in off(others, reached)))
    assert 0.6 < fitted < 0.95
    assert max(map(abs, off(own, fitted))) < math.log(1 + TOLERANCE)


def test_table_is_current():
    text = (RESULTS / "plan" / "published.md").read_text()
    marked = text.split("<!-- bench:published-cuda -->\n")[1].split("<!-- /bench:")[0]
    assert marked == table() + "\n", (
        "run `python -m bench.report.report bench/results/plan/published.md`"
    )
