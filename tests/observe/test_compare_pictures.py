"""Pictures of constructed runs: what they show, and that nothing covers it."""

import sys

import pytest
from test_compare_results import make_comparison, make_run, orders

from fastpar.observe.compare import DEFAULT
from fastpar.observe.pictures import PICTURES, draw_all, look
from fastpar.observe.strategies import STRATEGIES

pytest.importorskip("matplotlib", reason="needs matplotlib")

NAMES = ["single", "ddp", "fsdp2", "dp", "zero3"]


def some(repeats=2, **more):
    runs = [
        make_run(name, n + 1, step_s=0.1 + 0.01 * n, nudge=1e-6 * at)
        for n in range(repeats)
        for at, name in enumerate(NAMES)
    ]
    return make_comparison(*runs, *orders(1e-6), **more)


def figure_of(name, comparison):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from fastpar.observe.pictures import _figure

    figure = _figure()
    FigureCanvasAgg(figure)
    PICTURES[name](comparison, figure)
    figure.canvas.draw()
    return figure


def test_all_pictures_are_made_small_and_readable(tmp_path):
    draw_all(some(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(PICTURES)
    for name in PICTURES:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert 5_000 < len(data) < 150_000
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert (width, height) == (990, 484)


@pytest.mark.parametrize("name", ["throughput.png", "loss.png"])
def test_the_legend_stands_beside_the_axes(name):
    figure = figure_of(name, some())
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[: len(NAMES)] == NAMES
    box = legend.get_window_extent()
    for axes in figure.axes:
        assert not axes.get_window_extent().overlaps(box)
        assert axes.get_legend() is None
        assert axes.get_title(loc="left")
        assert axes.get_ylabel()


@pytest.mark.parametrize("name", ["memory.png", "communication.png"])
def test_hatches_are_explained_below_the_bars(name):
    figure = figure_of(name, some())
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["torch's", "fastpar's"]
    hatches = {
        text.get_text(): patch.get_hatch() or ""
        for text, patch in zip(legend.get_texts(), legend.get_patches())
    }
    assert hatches == {"torch's": "//", "fastpar's": ""}
    box = legend.get_window_extent()
    assert not any(axes.get_tightbbox().overlaps(box) for axes in figure.axes)
    bars = {bar.get_hatch() or "" for axes in figure.axes for bar in axes.patches}
    assert bars == set(hatches.values())


def test_line_styles_are_explained():
    (legend,) = figure_of("throughput.png", some()).legends
    assert legend.get_title().get_text() == "dashed: torch's\nsolid: fastpar's"


def test_a_point_is_the_median_and_its_bar_the_range():
    figure = figure_of("throughput.png", some())
    (axes,) = figure.axes
    line = axes.containers[NAMES.index("dp")]
    low, high = 512 / 0.11, 512 / 0.10
    assert line[0].get_ydata() == pytest.approx([(low + high) / 2] * 2)
    (bar,) = line[2][0].get_segments()[:1]
    assert bar[:, 1] == pytest.approx([low, high])


def test_what_is_not_known_is_no_bar_of_zero():
    figure = figure_of("communication.png", some())
    left, right = figure.axes
    assert [text.get_text() for text in left.texts].count(" not known") == 1
    assert len(left.patches) == len(NAMES) - 1
    assert len(right.patches) == len(NAMES)


def test_curves_are_drawn_with_what_rounding_allows():
    top, below = figure_of("loss.png", some()).axes
    assert len(top.get_lines()) == len(NAMES)
    assert len(below.get_lines()) == len(NAMES) - 1, "distances from the first"
    assert len(below.collections) == 1, "the grey of rounding"
    assert below.get_yscale() == "log"


def test_curves_that_agree_bit_for_bit_say_so():
    same = make_comparison(make_run("single"), make_run("dp"))
    _, below = figure_of("loss.png", same).axes
    assert [text.get_text() for text in below.texts] == ["no difference"]


def test_no_two_strategies_look_alike():
    looks = [(s["color"], s["marker"], s["linestyle"]) for s in map(look, STRATEGIES)]
    assert len(set(looks)) == len(STRATEGIES)
    default = [look(name) for name in DEFAULT if not name.startswith(("deepspeed", "tp-", "dp-"))]
    for part in ("color", "marker"):
        assert len({style[part] for style in default}) == len(default) == 12


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError,
        match=r"draw_all: expected the package matplotlib, got ",
    ):
        draw_all(some(), tmp_path)
