"""Pictures of a comparison: the five of the study arXiv 2405.15628, and what travels.

Most colours are those of Okabe and Ito, which colour-blind readers tell apart; every strategy has a
marker of its own too, and kinds have line styles and hatches: torch's are dashed, DeepSpeed's
dotted, fastpar's solid. Legends say so and stand beside the axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastpar.files.packages import import_package
from fastpar.files.progress import smoothed
from fastpar.observe.results import Comparison, Run, allowed
from fastpar.observe.strategies import SINGLE, STRATEGIES

_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8B4513"),
    *("#332288", "#BBBB00", "#AA4499"),
)
_MARKERS = "s^vDPX*<>hdp8H"
# Those that run on two ranks by default have a colour each; the rest share them.
_FIRST = (
    "ddp",
    "fsdp2",
    "fsdp2-no-reshard",
    "dp",
    "zero1",
    "zero2",
    "zero3",
    "tp",
    "cp",
    "cp-keys",
    "pp",
)
_SIZE_INCHES, _DPI = (9.0, 4.4), 110
_MOST_TICKS = 12


class _Owner(NamedTuple):
    """How the strategies of a package look."""

    title: str
    line: str
    line_name: str
    hatch: str


_OWNERS = {
    "torch": _Owner("torch's", "--", "dashed", "//"),
    "deepspeed": _Owner("DeepSpeed's", ":", "dotted", ".."),
    "fastpar": _Owner("fastpar's", "-", "solid", ""),
}


def draw_all(comparison: Comparison, folder: Path) -> None:
    """Writes the pictures.

    Raises:
        ImportError: matplotlib is not installed.
    """
    for name, draw in PICTURES.items():
        figure = _figure()
        draw(comparison, figure)
        figure.savefig(str(folder / name))


def _figure() -> Any:
    make_figure = import_package("matplotlib.figure", "draw_all").Figure
    return make_figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")


def look(name: str) -> dict[str, Any]:
    """Colour, marker and line of a strategy, the same in every picture."""
    if name == SINGLE:
        return {"color": "black", "marker": "o", "linestyle": "-."}
    at = [n for n in dict.fromkeys((*_FIRST, *STRATEGIES)) if n != SINGLE].index(name)
    return {
        "color": _COLOURS[at % len(_COLOURS)],
        "marker": _MARKERS[at % len(_MARKERS)],
        "linestyle": _OWNERS[STRATEGIES[name].package].line,
    }


def _finish(axes: Any, title: str, unit: str, xlabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _owners(comparison: Comparison) -> list[_Owner]:
    """Whose strategies are shown."""
    shown = {STRATEGIES[name].package for name in comparison.names}
    return [owner for package, owner in _OWNERS.items() if package in shown]


def _explain_lines(comparison: Comparison, figure: Any, *axes: Any) -> None:
    """The legend stands beside the axes, where it covers nothing."""
    both = [ax.get_legend_handles_labels() for ax in axes]
    named = {label: handle for handles, labels in both for handle, label in zip(handles, labels)}
    title = "\n".join(f"{owner.line_name}: {owner.title}" for owner in _owners(comparison))
    figure.legend(
        named.values(), named.keys(), loc="outside right center", frameon=False, fontsize=9,
        title=title, title_fontsize=8,
    )  # fmt: skip


def _explain_bars(comparison: Comparison, figure: Any) -> None:
    """The legend below the axes: whose strategies are hatched and how."""
    from matplotlib.patches import Patch

    grey = "#666666"
    patches = {
        owner.title: Patch(fc="white" if owner.hatch else grey, ec=grey, hatch=owner.hatch)
        for owner in _owners(comparison)
    }
    figure.legend(
        patches.values(), patches.keys(), loc="outside lower center", ncols=len(patches),
        frameon=False, fontsize=9,
    )  # fmt: skip


def _repeats(comparison: Comparison) -> str:
    n = comparison.settings["repeats"]
    return f"median and range of {n} runs" if n > 1 else "one run each"


def _per_epoch(
    comparison: Comparison, figure: Any, value: Callable[[Run, int], float], title: str, unit: str
) -> None:
    """A point a strategy and epoch with the range of its repeats; names side by side."""
    axes = figure.subplots()
    names, epochs = comparison.names, comparison.settings["epochs"]
    for at, name in enumerate(names):
        shift = 0.6 * ((at + 0.5) / len(names) - 0.5)
        values = np.array([[value(run, e) for e in range(epochs)] for run in comparison.of(name)])
        middle = np.median(values, axis=0)
        axes.errorbar(
            np.arange(1, epochs + 1) + shift,
            middle,
            yerr=[middle - values.min(0), values.max(0) - middle],
            label=name,
            markersize=6,
            linewidth=1.2,
            capsize=2,
            elinewidth=1,
            **look(name),
        )
    axes.set_xticks(range(1, epochs + 1, math.ceil(epochs / _MOST_TICKS)))
    axes.set_xlim(0.5, epochs + 0.5)
    axes.set_ylim(bottom=0)
    steps = comparison.settings["epoch_steps"]
    _finish(axes, f"{title} ({_repeats(comparison)})", unit, f"epoch of {steps} steps")
    _explain_lines(comparison, figure, axes)


def draw_throughput(comparison: Comparison, figure: Any) -> None:
    """Tokens a second of each epoch."""
    value = comparison.epoch_tokens_per_s
    _per_epoch(comparison, figure, value, "Throughput per epoch", "tokens/s, all ranks")


def draw_time(comparison: Comparison, figure: Any) -> None:
    """Seconds of each epoch."""
    _per_epoch(comparison, figure, comparison.epoch_s, "Training time per epoch", "seconds")


def _bars(
    comparison: Comparison, axes: Any, value: Callable[[Run], float | None], title: str, unit: str
) -> None:
    """A bar a strategy with the range of its repeats; "not known" in its place where it is not."""
    names = comparison.names
    for at, name in enumerate(names):
        stat, hatch = comparison.stat(name, value), _OWNERS[STRATEGIES[name].package].hatch
        if stat is None:
            axes.text(0, at, " not known", va="center", fontsize=8, style="italic")
            continue
        axes.barh(
            at,
            stat.median,
            height=0.65,
            color="white" if hatch else look(name)["color"],
            edgecolor=look(name)["color"],
            hatch=hatch,
            xerr=[[stat.median - stat.low], [stat.high - stat.median]] if stat.n > 1 else None,
            error_kw={"elinewidth": 1.2, "capsize": 3},
        )
        axes.annotate(
            f"{stat.median:.3g}" if stat.median < 1000 else f"{stat.median:,.0f}",
            (stat.high, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    _finish(axes, title, "", unit)
    axes.grid(axis="y", visible=False)


def draw_memory(comparison: Comparison, figure: Any) -> None:
    """Peak memory of the rank that has most."""
    title, unit = f"Peak memory per rank ({_repeats(comparison)})", f"MB: {comparison.memory_label}"
    _bars(comparison, figure.subplots(), comparison.memory_mb, title, unit)
    _explain_bars(comparison, figure)


def draw_communication(comparison: Comparison, figure: Any) -> None:
    """Exposed communication, and bytes on the wire."""
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(comparison, left, lambda run: run.exposed_ms, "Exposed communication", "ms of a step")
    _bars(comparison, right, Run.sent_mb, "Bytes on the wire", "MB a rank sends in a step")
    left.set_ylim(len(comparison.names) - 0.5, -0.5)
    _explain_bars(comparison, figure)


def _curves(
    comparison: Comparison,
    figure: Any,
    values: Callable[[Run], Sequence[float]],
    title: str,
    unit: str,
    limit: np.ndarray | None,
) -> None:
    """Every step of the first runs, and below it how far each lies from the first strategy."""
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    curves = {name: np.array(values(comparison.of(name)[0])) for name in comparison.names}
    first, base = next(iter(curves.items()))
    steps, every = np.arange(1, len(base) + 1), max(1, len(base) // 10)
    window = max(1.0, len(base) / 60)
    for at, (name, own) in enumerate(curves.items()):
        style = {**look(name), "markevery": (at * every // len(curves), every)}
        smooth = smoothed(own, 1 - 1 / window)
        top.plot(steps, smooth, label=name, markersize=5, linewidth=1, **style)
        apart = np.abs(own - base)
        if apart.any():
            shown = np.where(apart > 0, apart, np.nan)
            below.semilogy(steps, shown, markersize=4, linewidth=0.7, **style)
    if not below.lines:
        below.text(0.5, 0.5, "no difference", transform=below.transAxes, ha="center")
    if limit is not None:
        below.fill_between(steps, 0, limit, color="#dddddd", zorder=0, label="rounding")
        below.set_yscale("log")
    mean = f", mean over about {window:.0f} steps" if window >= 1.5 else ""
    _finish(top, f"{title} of the first runs{mean}", unit, "")
    _finish(below, f"Distance from {first}, every step", unit, "step")
    _explain_lines(comparison, figure, top, below)


def draw_grad_norm(comparison: Comparison, figure: Any) -> None:
    """The gradient's norm before clipping."""
    title = "Gradient norm before clipping"
    _curves(comparison, figure, lambda run: run.grad_norms, title, "norm", None)


def draw_loss(comparison: Comparison, figure: Any) -> None:
    """The loss, and what rounding allows."""
    limit = allowed(comparison)
    _curves(comparison, figure, lambda run: run.losses, "Loss", "nats per token", limit)


PICTURES: dict[str, Callable[[Comparison, Any], None]] = {
    "throughput.png": draw_throughput,
    "epoch_time.png": draw_time,
    "memory.png": draw_memory,
    "grad_norm.png": draw_grad_norm,
    "loss.png": draw_loss,
    "communication.png": draw_communication,
}
