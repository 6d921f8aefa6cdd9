"""bench.systems.grid: counted bytes are those of the formulas, or there is no page."""

import pytest

from bench.systems import grid
from fastpar.cost.memory_model import Memory


def test_a_row_is_counted_as_the_formula_says(monkeypatch):
    layout = grid.LAYOUTS["grid 2x2 (2-D)"]
    row = grid.measured(layout)
    assert row["of_layers_bytes"] == pytest.approx(row["formula_bytes"], rel=0.01)
    assert row["held_bytes"] == pytest.approx(row["held_formula_bytes"], rel=0.03)
    assert row["peak_bytes"] == pytest.approx(row["peak_formula_bytes"], rel=0.03)
    monkeypatch.setattr(grid, "sent", lambda comm: 0.5 * comm.bytes)
    with pytest.raises(AssertionError, match=r"bench grid: .* counted .*, by formula"):
        grid.measured(layout)


def test_a_peak_that_no_formula_has_makes_no_row(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(grid, "predict_memory", lambda *_: Memory(1, 1, 1))
        with pytest.raises(AssertionError, match=r"bench grid: .*: a peak of .*, by formula 3"):
            grid.peak_of(grid.LAYOUTS["TP 2 x ZeRO-3"], 4)


def test_the_same_shapes_at_the_same_sizes_hold_the_same_on_paper():
    rows = grid.on_paper(64)
    assert rows["grid 8x8"]["states_bytes"] == pytest.approx(
        rows["TP 8 x ZeRO-3"]["states_bytes"], rel=0.03
    )
