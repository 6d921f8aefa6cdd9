import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from fastpar.plan.check_picture import _panel, draw_check

POINTS = [(1, 10.0, 11.0, 5.0, 4.0), (2, 100.0, 90.0, 50.0, 55.0), (4, 300.0, 310.0, 90.0, 85.0)]


def test_every_point_and_both_bands_are_drawn(tmp_path):
    path = tmp_path / "picture.png"
    draw_check(POINTS, path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    axes = Figure().subplots()
    _panel(
        axes, [(n, predicted, measured) for n, predicted, measured, *_ in POINTS], [1, 2, 4], "x"
    )
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["within 15%", "within 5%", "1 rank", "2 ranks", "4 ranks"]
    drawn = [tuple(point) for c in axes.collections[2:] for point in c.get_offsets().data]
    assert drawn == [(11.0, 10.0), (90.0, 100.0), (310.0, 300.0)]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    low, high = axes.get_xlim()
    assert low < 10.0
    assert high > 310.0
