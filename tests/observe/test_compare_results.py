"""Constructed runs of a comparison: their statistics, what counts as rounding, the file that keeps
them, the table, what is claimed of them, and pictures."""

import sys
from dataclasses import asdict

import numpy as np
import pytest
from compared import LOSSES, make_comparison, make_run, orders, read, repeats

from fastpar.observe.compare import DEFAULT
from fastpar.observe.pictures import PICTURES, draw_all, look
from fastpar.observe.report import head, listed, markdown, number, rows, summary
from fastpar.observe.results import (
    EPS,
    FACTOR,
    FLOOR,
    RESULTS,
    Run,
    Stat,
    allowed,
    judge_losses,
    yardstick,
)
from fastpar.observe.strategies import STRATEGIES

NAMES = ["single", "ddp", "fsdp2", "dp", "zero3"]
FAILED = Run("hsdp", 1, 2, 1, 4, 1, error="rank 0: <b>RuntimeError</b>: no | room")


def some(*others, **more):
    """Two repeats of five strategies, each a little slower and in need of less memory."""
    runs = [
        make_run(name, n + 1, step_s=0.1 + 0.01 * (n + at), memory=(60 - at) * 1e6, nudge=1e-6 * at)
        for n in range(2)
        for at, name in enumerate(NAMES)
    ]
    return make_comparison(*runs, *others, *orders(1e-6), **more)


# Numbers


def test_numbers_are_medians_with_their_range_and_untimed_steps_do_not_count():
    runs = repeats("dp", 0.1, 0.3, 0.2)
    run = runs[0]
    found = make_comparison(*runs)
    assert found.tokens_per_s(run) == pytest.approx(512 / 0.1)
    assert [found.epoch_s(run, e) for e in range(2)] == pytest.approx([0.5, 0.5])
    assert found.tokens_per_s(run, 0) == pytest.approx(5120)
    stat = found.stat("dp", lambda run: found.epoch_s(run, 1))
    assert stat == Stat(pytest.approx(1.0), pytest.approx(0.5), pytest.approx(1.5), 3)
    assert make_comparison(make_run("fsdp2")).stat("fsdp2", lambda run: run.exposed_ms) is None
    assert Stat(2, 1, 3, 3).touches(Stat(4, 3, 5, 3))
    assert not Stat(2, 1, 3, 3).touches(Stat(4, 3.1, 5, 3))
    assert Stat(2, 2, 2, 1).touches(Stat(9, 9, 9, 1)), "one run each"


def test_memory_is_of_one_kind_for_all():
    counted = make_run("dp", step_bytes=[7, 9])
    both = make_comparison(counted, make_run("zero1", step_bytes=[5, 5]))
    assert both.memory_mb(counted) == 9e-6
    assert "allocated in a step" in both.memory_label
    mixed = make_comparison(counted, make_run("zero1"))
    assert mixed.memory_mb(counted) == 50
    assert "resident" in mixed.memory_label


def test_yardsticks_and_failed_runs_are_no_repeats():
    found = make_comparison(make_run("single"), FAILED, *orders(1e-6))
    assert found.names == ["single"]
    assert len(found.of("single")) == 1
    assert found.failed == {"hsdp": FAILED.error}
    assert len(found.orders) == 2


def test_the_yardstick_grows_and_has_a_floor():
    single, other = make_run("single"), make_run("single", yardstick=True, micro_batch_size=1)
    other.losses = [loss + (1e-4 if at == 3 else 0.0) for at, loss in enumerate(LOSSES)]
    found = make_comparison(single, make_run("dp"), other)
    np.testing.assert_allclose(yardstick(found), [0] * 3 + [1e-4] * 7, rtol=1e-6)
    limit = allowed(found)
    assert limit[0] == pytest.approx(FLOOR * EPS * 8.0)
    assert limit[5] == pytest.approx(FACTOR * 1e-4)
    assert yardstick(make_comparison(single, make_run("dp"))) is None


@pytest.mark.parametrize(("nudge", "beyond"), [(3.9e-5, None), (4.1e-5, (1, "zero2"))])
def test_losses_apart_by_more_than_rounding_are_found_and_said(nudge, beyond):
    runs = [make_run("single"), make_run("dp"), make_run("zero2", nudge=nudge), *orders(1e-5)]
    verdict = judge_losses(make_comparison(*runs))
    assert verdict.difference == pytest.approx(nudge)
    assert verdict.high == "zero2"
    assert verdict.low in ("single", "dp")
    assert (verdict.beyond, verdict.orders) == (beyond, 2)
    assert verdict.yardstick == pytest.approx(1e-5)
    text = "\n".join(summary(make_comparison(*runs)))
    assert ("MORE THAN ROUNDING, from step 1 on, where" in text) == (beyond is not None)
    assert ("In every step that is within rounding" in text) == (beyond is None)
    assert f"two strategies is {nudge:.2g}, in step" in text


def test_the_largest_difference_is_between_two_strategies():
    """Repeats of one strategy are not compared with each other, but one may go astray."""
    for nudge, difference, high, low in ((0.4, 0.4, "single", "dp"), (0.2, 0.3, "dp", "single")):
        runs = [make_run("dp"), make_run("dp", 2, nudge=0.5), make_run("single", nudge=nudge)]
        verdict = judge_losses(make_comparison(*runs))
        assert verdict.difference == pytest.approx(difference)
        assert (verdict.high, verdict.low) == (high, low)
        assert verdict.yardstick is verdict.beyond is None
    assert judge_losses(make_comparison(make_run("dp"))) is None
    runs = [make_run("single"), make_run("dp"), make_run("dp", 2, nudge=1.0), *orders(1e-5)]
    assert judge_losses(make_comparison(*runs)).beyond == (1, "dp")


def test_the_file_keeps_everything(tmp_path):
    """No digit of an fp32 is lost."""
    loss = float(np.float32(8.123456789))
    make_comparison(make_run("dp", losses=[loss] * 10)).save(tmp_path / RESULTS)
    assert np.float32(read(tmp_path / RESULTS).runs[0].losses[0]) == np.float32(loss)
    runs = [make_run("single"), make_run("dp")]
    found = make_comparison(*runs, skipped={"tp": "needs 4 ranks, got 2"}, complete=False)
    found.save(tmp_path / RESULTS)
    again = read(tmp_path / RESULTS)
    assert asdict(again) == asdict(found)
    assert [p.name for p in tmp_path.iterdir()] == [RESULTS]
    lines = (tmp_path / RESULTS).read_text().splitlines()
    assert sum('"strategy": ' in line for line in lines) == 2, "a run a line"


# The table


def test_a_row_is_what_the_runs_say_and_markdown_is_a_table_and_words():
    skipped = {"deepspeed1": "deepspeed is not installed", "tp-zero1": "needs 4 ranks, got 2"}
    found = some(FAILED, skipped=skipped)
    cells = {row[0]: row for row in rows(found)}
    assert cells["dp"][1] == "2"
    assert cells["dp"][2] == "3,798 (3,657-3,938)"  # 512 tokens in 0.13 and 0.14 s
    assert cells["dp"][5:7] == ["57", "0.97"]  # MB, and beside those of ddp
    assert cells["fsdp2"][8] == "not known"
    assert cells["deepspeed1"] == ["deepspeed1", "skipped: deepspeed is not installed"]
    assert cells["hsdp"][1].startswith("failed: rank 0")
    assert list(cells)[-2:] == ["deepspeed1", "tp-zero1"]
    text = markdown(found)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(head(found)) + 1}, "no cell breaks the table"
    assert len(table) == 2 + len(NAMES) + 3
    assert all(f"- {line}\n" in text for line in summary(found))
    assert "1,325,824 parameters" in text
    assert "2 ranks with 1 thread each" in text
    assert text.isascii()


def test_the_fastest_stands_first_and_ratios_name_their_baseline():
    runs = [make_run("dp", step_s=0.1), make_run("zero1", step_s=0.05), make_run("ddp", step_s=0.2)]
    found = make_comparison(*runs, strategies=["hsdp", "dp", "zero1", "ddp"])
    assert [row[0] for row in rows(found)] == ["zero1", "dp", "ddp", "hsdp"]
    assert rows(found)[3] == ["hsdp", "stopped before its first run"]
    assert [row[3] for row in rows(found)[:3]] == ["4.00", "2.00", "1.00"]
    assert {"speed, ddp = 1", "memory, ddp = 1"} <= set(head(found))
    assert "to those of ddp." in markdown(found)
    found.runs.pop()
    assert "speed, dp = 1" in head(found), "the first that was asked for and ran"
    assert rows(found)[0][3] == "2.00"
    found.runs.append(make_run("single", step_s=0.4))
    assert "speed, single = 1" in head(found)


# Claims: each is made only where the numbers prove it


SAME = repeats("single", 0.1, 0.1)
OTHER = [make_run("dp"), make_run("dp", 2, nudge=1e-6)]
CLAIMS = [
    # A clear margin, no difference beyond the spread, and one run each, which proves no order.
    ([*repeats("dp", 0.1, 0.101, 0.102), *repeats("ddp", 0.2, 0.201, 0.19)],
     ("Fastest: dp, 5,069 tokens/s (5,020 to 5,120 in 3 repeats); next is ddp with 2,560, 49.5 %",),
     ()),
    ([*repeats("dp", 0.1, 0.11, 0.12), *repeats("ddp", 0.105, 0.115, 0.125),
      *repeats("zero1", 0.12, 0.13, 0.14), *repeats("zero3", 0.2, 0.2, 0.2)],
     ("Fastest: no difference beyond the spread of repeats between dp, ddp and zero1.",), ()),
    ([make_run("dp"), make_run("ddp", step_s=0.2)],
     ("Fastest in one run each, which proves no order: dp, 5,120",), ("Fastest: dp",)),
    ([*repeats("dp", 0.1, 0.1, memory=60e6), *repeats("zero3", 0.1, 0.1, memory=40e6)],
     ("Smallest: zero3, 40 MB (40 to 40 in 2 repeats); next is dp with 60, 50.0 % more",), ()),
    ([make_run("dp")], ("Only dp was measured: 5,120 tokens/s (one run).",),
     ("difference of loss", "experts in the place")),
    ([make_run("single", step_s=0.15), make_run("dp"), make_run("zero1", step_s=0.2)],
     ("With 2 ranks dp trains 1.50 times as fast as single, which is one rank",), ()),
    ([make_run("dp"), make_run("zero1")], (), ("times as fast",)),
    ([make_run("single"), make_run("dp", nudge=1.0)],
     ("Whether that is rounding is not known: single was not run",), ("within rounding",)),
    (SAME, ("Repeats of one strategy gave the same losses to the last bit.",), ()),
    ([*SAME, *OTHER], ("Repeats of dp differed in their losses, by 1e-06 at most; those",), ()),
    ([FAILED], ("No run ended well: nothing was measured.",), ()),
    # 20 steps each; the dense one is twice as fast, and done when the other has done ten. Means of
    # the last two of 20 steps: 4 - 0.1 * 18.5, 4 - 0.12 * 18.5; after ten 4 - 0.12 * 8.5.
    ([make_run("dp", step_s=0.1, losses=[4.0 - 0.1 * i for i in range(20)]),
      make_run("experts", step_s=0.2, losses=[4.0 - 0.12 * i for i in range(20)])],
     ("At equal tokens the loss of experts is 1.7800 beside 2.1500, 0.3700 lower (m",
      "after 10 steps of experts and 20 of dp, it is 2.9800 beside 2.1500, 0.8300 high"),
     ("difference of loss between two strategies",)),  # they are different models
]  # fmt: skip


@pytest.mark.parametrize(("runs", "said", "unsaid"), CLAIMS)
def test_claims(runs, said, unsaid):
    text = "\n".join(summary(make_comparison(*runs)))
    assert all(words in text for words in said), text
    assert not any(words in text for words in unsaid), text


def test_what_is_missing_is_said_and_numbers_are_readable():
    skipped = {"deepspeed1": "deepspeed is not installed"}
    text = "\n".join(summary(some(FAILED, skipped=skipped, complete=False)))
    assert "Skipped: deepspeed1 (deepspeed is not installed)." in text
    assert "Failed: hsdp (rank 0: " in text
    assert "The comparison was stopped before all of its runs." in text
    assert [number(x) for x in (21300.4, 481.23, 48.12, 0.01234, 0.0)] == [
        *("21,300", "481.2", "48.1", "0.0123", "0"),
    ]
    assert [listed(list(x)) for x in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]


# Pictures


def figure_of(name, comparison):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from fastpar.observe.pictures import _figure

    figure = _figure()
    FigureCanvasAgg(figure)
    PICTURES[name](comparison, figure)
    figure.canvas.draw()
    return figure


def test_all_pictures_are_made_small_and_readable(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    draw_all(some(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(PICTURES)
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert 5_000 < len(data) < 150_000
        assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [990, 484]
    looks = [(s["color"], s["marker"], s["linestyle"]) for s in map(look, STRATEGIES)]
    assert len(set(looks)) == len(STRATEGIES), "no two strategies look alike"
    default = [look(name) for name in DEFAULT if not name.startswith(("deepspeed", "tp-", "dp-"))]
    for part in ("color", "marker"):
        assert len({style[part] for style in default}) == len(default) == 12
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"draw_all: expected the package matplotlib, got "):
        draw_all(some(), tmp_path)


@pytest.mark.parametrize("name", ["throughput.png", "loss.png", "memory.png", "communication.png"])
def test_nothing_covers_what_a_picture_shows(name):
    """Legends stand beside the axes or below the bars, and explain lines and hatches."""
    figure = figure_of(name, some())
    (legend,) = figure.legends
    box, labels = legend.get_window_extent(), [text.get_text() for text in legend.get_texts()]
    bars = name in ("memory.png", "communication.png")
    assert labels[: len(NAMES)] == (["torch's", "fastpar's"] if bars else NAMES)
    assert not any(axes.get_window_extent().overlaps(box) for axes in figure.axes)
    if bars:
        assert [patch.get_hatch() or "" for patch in legend.get_patches()] == ["//", ""]
        assert {bar.get_hatch() or "" for axes in figure.axes for bar in axes.patches} == {"//", ""}
    if name == "throughput.png":
        line = figure.axes[0].containers[NAMES.index("dp")]  # medians, and bars of the range
        low, high = 512 / 0.14, 512 / 0.13
        assert line[0].get_ydata() == pytest.approx([(low + high) / 2] * 2)
        (bar,) = line[2][0].get_segments()[:1]
        assert bar[:, 1] == pytest.approx([low, high])
    if name == "communication.png":  # what is not known is no bar of zero
        left, right = figure.axes
        assert [text.get_text() for text in left.texts].count(" not known") == 1
        assert (len(left.patches), len(right.patches)) == (len(NAMES) - 1, len(NAMES))
    if name == "loss.png":
        top, below = figure.axes
        assert (len(top.get_lines()), len(below.get_lines())) == (len(NAMES), len(NAMES) - 1)
        assert len(below.collections) == 1, "the grey of rounding"
        same = make_comparison(make_run("single"), make_run("dp"))
        _, below = figure_of(name, same).axes
        assert [text.get_text() for text in below.texts] == ["no difference"]
