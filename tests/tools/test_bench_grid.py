"""bench.systems.grid: counted bytes are those of the formulas, or there is no page."""

import pytest

from bench.systems import grid


def test_a_row_is_counted_as_the_formula_says(monkeypatch):
    layout = grid.LAYOUTS["grid 2x2 (2-D)"]
    row = grid.measured(layout)
    assert row["of_layers_bytes"] == pytest.approx(row["formula_bytes"], rel=0.01)
    assert row["held_bytes"] == pytest.approx(row["held_formula_bytes"], rel=0.03)
    monkeypatch.setattr(grid, "sent", lambda comm: 0.5 * comm.bytes)
    with pytest.raises(AssertionError, match=r"bench grid: .* counted .*, by formula"):
        grid.measured(layout)


def test_the_same_shapes_at_the_same_sizes_hold_the_same_on_paper():
    rows = grid.on_paper(64)
    assert rows["grid 8x8"]["states_bytes"] == pytest.approx(
        rows["TP 8 x ZeRO-3"]["states_bytes"], rel=0.03
    )
