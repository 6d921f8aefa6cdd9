"""The picture of `fastpar plan --check`: predicted against measured, memory and step time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastpar.files.packages import import_package

# Okabe and Ito's colours, which the colour-blind can tell apart, and a shape each.
LOOKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
BANDS = ((0.15, "#EEEEEE"), (0.05, "#D5D5D5"))  # of errors: 15 %, and in it 5 %


def draw_check(
    points: Sequence[tuple[int, float, float, float, float]],
    path: str | Path,
    *,
    title: str = "fastpar plan: predicted against measured",
) -> None:
    """Draws a panel for memory and one for step time.

    Args:
        points: (ranks, predicted MB, measured MB, predicted ms, measured ms) of every layout.
    Raises:
        ImportError: matplotlib is not installed.
    """
    make_figure = import_package("matplotlib.figure", "draw_check").Figure
    figure = make_figure(figsize=(10, 5.2), dpi=120, layout="constrained")
    memory, step = figure.subplots(1, 2)
    ranks = sorted({point[0] for point in points})
    _panel(memory, [p[:3] for p in points], ranks, "peak memory of a rank (MB)")
    _panel(step, [(p[0], *p[3:]) for p in points], ranks, "step (ms)")
    figure.suptitle(title)
    figure.savefig(str(path))


def _panel(
    axes: Any, points: Sequence[tuple[int, float, float]], ranks: Sequence[int], what: str
) -> None:
    values = [value for _, *pair in points for value in pair]
    low, high = min(values) / 1.4, max(values) * 1.4
    ends = [low, high]
    for size, colour in BANDS:
        lower, upper = ([value * (1 + sign * size) for value in ends] for sign in (-1, 1))
        label = f"within {size:.0%}"
        axes.fill_between(ends, lower, upper, color=colour, linewidth=0, label=label)
    axes.plot(ends, ends, color="#555555", linewidth=1)
    for number, n in enumerate(ranks):
        colour, marker = LOOKS[number % len(LOOKS)]
        own = [(measured, predicted) for m, predicted, measured in points if m == n]
        axes.scatter(
            *zip(*own),
            s=34,
            color=colour,
            marker=marker,
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
            label=f"{n} rank{'s' * (n > 1)}",
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"measured {what}")
    axes.set_ylabel(f"predicted {what}")
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", fontsize=9)
