"""Pictures: the timeline of a profiled step, and those of a comparison.

A timeline has a panel per rank, with rows for compute and communication. A comparison has the five
pictures of the study arXiv 2405.15628, and one of communication.

Most colours are those of Okabe and Ito, which colour-blind readers can distinguish; every strategy
also has its own marker, and strategies of torch and DeepSpeed have dashed lines.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastpar.comm.recorder import COMPUTE, GATHER, HOST, PHASES, PP, REDUCE, TP, WAIT, Span, busy_ms
from fastpar.files.packages import import_package
from fastpar.files.runs import smoothed
from fastpar.observe.results import Comparison, Run, allowed
from fastpar.observe.strategies import SINGLE, STRATEGIES

# Of Okabe and Ito.
_SPAN_COLOURS = {
    **dict(zip(PHASES, ("#F0E442", "#56B4E9", "#0072B2", "#009E73"))),
    **{REDUCE: "#E69F00", GATHER: "#CC79A7", TP: "#000000", PP: "#999999", WAIT: "#D55E00"},
}
LINE_LENGTH = 170  # fits below the picture
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8B4513"),
    *("#332288", "#BBBB00", "#AA4499"),
)
_MARKERS = "s^vDPX*<>hdp8H"
# Strategies that run on two ranks by default have a colour each; the rest share them.
_FIRST = (
    *("ddp", "fsdp2", "fsdp2-no-reshard", "dp", "zero1", "zero2", "zero3", "tp", "cp", "cp-keys"),
    "pp",
)
_MOST_TICKS = 12


def _figure(caller: str = "draw_all", size_inches: tuple[float, float] = (9.0, 4.4)) -> Any:
    make_figure = import_package("matplotlib.figure", caller).Figure
    return make_figure(figsize=size_inches, dpi=110, layout="constrained")


# The timeline


def draw_timeline(panels: Mapping[str, Sequence[Span]], lines: Sequence[str], path: Path) -> None:
    """Draws a panel per variant, with a row for phases and one per kind of collective.

    Args:
        panels: variant -> the spans of one step, from window().
        lines: text below the picture.
    """
    make_patch = import_package("matplotlib.patches", "fastpar profile").Patch
    rows = rows_of(panels.values())
    size_inches = 11, 0.9 + (0.55 + 0.3 * len(rows)) * len(panels)
    figure = _figure("fastpar profile", size_inches)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for (variant, spans), axes in zip(panels.items(), all_axes):
        for y, row in enumerate(rows):
            _draw_row(axes, y, spans, row)
        end = max((s.end_ms for s in spans if s.row in (HOST, COMPUTE)), default=0.0)
        waits, moving = busy_ms(spans, [WAIT]), busy_ms(spans, [REDUCE, GATHER, TP])
        title = f"{variant}: step {end:.0f} ms; collectives under way {moving:.0f} ms, "
        axes.set_title(f"{title}waited for {waits:.0f} ms", fontsize=9, loc="left")
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("ms since the step began", fontsize=8)
    all_axes[-1].set_xlim(left=0)
    names = {WAIT: "waits for communication", TP: "tp or cp exchange", PP: "message of a stage"}
    drawn = {s.name if s.row in (HOST, COMPUTE) else s.row for p in panels.values() for s in p}
    colours = {name: colour for name, colour in _SPAN_COLOURS.items() if name in drawn}
    keys = [make_patch(color=colour, label=names.get(n, n)) for n, colour in colours.items()]
    figure.legend(
        handles=keys, loc="outside upper center", ncols=max(1, len(keys)), fontsize=8, frameon=False
    )
    wrapped = [part for line in lines for part in textwrap.wrap(line, LINE_LENGTH)]
    figure.supxlabel("\n".join(wrapped), fontsize=7)
    figure.savefig(path)


def rows_of(panels: Iterable[Sequence[Span]]) -> list[str]:
    """The rows with content, from the top."""
    present = {span.row for spans in panels for span in spans}
    return [row for row in (HOST, COMPUTE, REDUCE, GATHER, TP, PP) if row in present]


def _draw_row(axes: Any, y: int, spans: Sequence[Span], row: str) -> None:
    """Phases or collectives as bars; waits for other ranks are narrower."""
    for span in spans:
        if span.row == row or (span.row == WAIT and row == COMPUTE):
            name = span.name if row in (HOST, COMPUTE) and span.row != WAIT else span.row
            width, height = span.end_ms - span.begin_ms, 0.45 if span.row == WAIT else 0.8
            edge = {"edgecolor": "white", "linewidth": 0.4 * (row not in (HOST, COMPUTE))}
            axes.barh(y, width, height, span.begin_ms, color=_SPAN_COLOURS[name], **edge)


# A comparison


def draw_all(comparison: Comparison, folder: Path) -> None:
    """Writes the pictures.

    Raises:
        ImportError: matplotlib is not installed.
    """
    for name, draw in PICTURES.items():
        figure = _figure()
        draw(comparison, figure)
        figure.savefig(str(folder / name))


def look(name: str) -> dict[str, Any]:
    """Colour, marker and line style of a strategy, the same in every picture."""
    if name == SINGLE:
        return {"color": "black", "marker": "o", "linestyle": "-."}
    i = [n for n in dict.fromkeys((*_FIRST, *STRATEGIES)) if n != SINGLE].index(name)
    return {
        "color": _COLOURS[i % len(_COLOURS)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "linestyle": "-" if STRATEGIES[name].package == "fastpar" else "--",
    }


def _finish(axes: Any, title: str, unit: str, xlabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _explain_lines(figure: Any, *axes: Any) -> None:
    """A legend next to the axes, where it covers nothing."""
    both = [ax.get_legend_handles_labels() for ax in axes]
    named = {label: handle for handles, labels in both for handle, label in zip(handles, labels)}
    place = {"loc": "outside right center", "frameon": False, "fontsize": 9}
    figure.legend(named.values(), named.keys(), **place)


def _repeats(comparison: Comparison) -> str:
    n = comparison.settings["repeats"]
    return f"median and range of {n} runs" if n > 1 else "one run each"


def _per_epoch(
    value: Callable[[Comparison, Run, int], float],
    title: str,
    unit: str,
    comparison: Comparison,
    figure: Any,
) -> None:
    """A point per strategy and epoch, with the range of its repeats."""
    axes = figure.subplots()
    names, epochs = comparison.names, comparison.settings["epochs"]
    for i, name in enumerate(names):
        shift = 0.6 * ((i + 0.5) / len(names) - 0.5)
        runs = comparison.of(name)
        values = np.array([[value(comparison, run, e) for e in range(epochs)] for run in runs])
        middle = np.median(values, axis=0)
        at_epochs = np.arange(1, epochs + 1) + shift
        ranges = [middle - values.min(0), values.max(0) - middle]
        style = {**look(name), "markersize": 6, "linewidth": 1.2, "capsize": 2, "elinewidth": 1}
        axes.errorbar(at_epochs, middle, yerr=ranges, label=name, **style)
    axes.set_xticks(range(1, epochs + 1, math.ceil(epochs / _MOST_TICKS)))
    axes.set_xlim(0.5, epochs + 0.5)
    axes.set_ylim(bottom=0)
    steps = comparison.settings["epoch_steps"]
    _finish(axes, f"{title} ({_repeats(comparison)})", unit, f"epoch of {steps} steps")
    _explain_lines(figure, axes)


def _bars(
    comparison: Comparison, axes: Any, value: Callable[[Run], float | None], title: str, unit: str
) -> None:
    """A bar per strategy with the range of its repeats, or "not known"."""
    names = comparison.names
    for y, name in enumerate(names):
        stat = comparison.stat(name, value)
        if stat is None:
            axes.text(0, y, " not known", va="center", fontsize=8, style="italic")
            continue
        colour, xerr = look(name)["color"], None
        if stat.n > 1:
            xerr = [[stat.median - stat.low], [stat.high - stat.median]]
        how = {"xerr": xerr, "error_kw": {"elinewidth": 1.2, "capsize": 3}}
        axes.barh(y, stat.median, 0.65, color=colour, **how)
        text = f"{stat.median:.3g}" if stat.median < 1000 else f"{stat.median:,.0f}"
        offset = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (stat.high, y), fontsize=8, **offset)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    _finish(axes, title, "", unit)
    axes.grid(axis="y", visible=False)


def draw_memory(comparison: Comparison, figure: Any) -> None:
    """Peak memory of the rank with the most."""
    title = f"Peak memory per rank ({_repeats(comparison)})"
    _bars(comparison, figure.subplots(), comparison.memory_mb, title, "MB allocated in a step")


def draw_communication(comparison: Comparison, figure: Any) -> None:
    """Exposed communication, and bytes on the wire."""
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(comparison, left, lambda run: run.exposed_ms, "Exposed communication", "ms per step")
    _bars(comparison, right, Run.sent_mb, "Bytes on the wire", "MB sent per rank and step")
    left.set_ylim(len(comparison.names) - 0.5, -0.5)


def _curves(
    values: Callable[[Run], Sequence[float]],
    limit_of: Callable[[Comparison], np.ndarray | None],
    title: str,
    unit: str,
    comparison: Comparison,
    figure: Any,
) -> None:
    """Every step of the first runs, and below it the distance of each from the first strategy."""
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    curves = {name: np.array(values(comparison.of(name)[0])) for name in comparison.names}
    first, base = next(iter(curves.items()))
    steps, every = np.arange(1, len(base) + 1), max(1, len(base) // 10)
    reach = len(base) // 60
    for i, (name, curve) in enumerate(curves.items()):
        style = {**look(name), "markevery": (i * every // len(curves), every)}
        smooth = smoothed(curve.tolist(), reach)
        top.plot(steps, smooth, label=name, markersize=5, linewidth=1, **style)
        distance = np.abs(curve - base)
        if distance.any():
            shown = np.where(distance > 0, distance, np.nan)
            below.semilogy(steps, shown, markersize=4, linewidth=0.7, **style)
    if not below.lines:
        below.text(0.5, 0.5, "no difference", transform=below.transAxes, ha="center")
    limit = limit_of(comparison)
    if limit is not None:
        below.fill_between(steps, 0, limit, color="#dddddd", zorder=0, label="rounding")
        below.set_yscale("log")
    mean = f", mean over {2 * reach + 1} steps" if reach else ""
    _finish(top, f"{title} of the first runs{mean}", unit, "")
    _finish(below, f"Distance from {first}, every step", unit, "step")
    _explain_lines(figure, top, below)


PICTURES: dict[str, Callable[[Comparison, Any], None]] = {
    "throughput.png": partial(
        _per_epoch, Comparison.tokens_per_s, "Throughput per epoch", "tokens/s, all ranks"
    ),
    "epoch_time.png": partial(_per_epoch, Comparison.epoch_s, "Training time per epoch", "seconds"),
    "memory.png": draw_memory,
    "grad_norm.png": partial(
        _curves, lambda run: run.grad_norms, lambda _: None, "Gradient norm before clipping", "norm"
    ),
    "loss.png": partial(_curves, lambda run: run.losses, allowed, "Loss", "nats per token"),
    "communication.png": draw_communication,
}
