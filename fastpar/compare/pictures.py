"""Pictures of a comparison: the five of the study arXiv 2405.15628, and what travels.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; every strategy has a
marker of its own too, and kinds have line styles and hatches: torch's are dashed, DeepSpeed's
dotted, fastpar's solid. Legends say so and stand beside the axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastpar.compare.results import Comparison, Run, allowed
from fastpar.compare.strategies import SINGLE, STRATEGIES
from fastpar.train.metrics import smoothed

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8B4513")
_MARKERS = "os^vDPX*<>hdp8H"
# Those that run by default have the eight colours; the rest share them.
_FIRST = ("ddp", "fsdp2", "fsdp2-no-reshard", "dp", "zero1", "zero2", "zero3", "tp")
_LINES = {"torch": "--", "deepspeed": ":", "fastpar": "-"}
_HATCHES = {"torch": "//", "deepspeed": "..", "fastpar": ""}
_OWNERS = {"torch": "torch's", "deepspeed": "DeepSpeed's", "fastpar": "fastpar's"}
_LINE_WORDS = {"torch": "dashed", "deepspeed": "dotted", "fastpar": "solid"}
_WIDTH, _HEIGHT, _DPI = 9.0, 4.4, 110
_MOST_TICKS = 12


def draw_all(comparison: Comparison, folder: Path) -> list[tuple[Path, str]]:
    """Writes the pictures; each file and, in words, what it shows.

    Raises:
        ImportError: matplotlib is not installed.
    """
    made = []
    for name, words, draw in _PICTURES:
        figure = _figure()
        draw(comparison, figure)
        figure.savefig(str(folder / name))
        made.append((folder / name, words))
    return made


def _figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"draw_all: expected matplotlib, got {error}; pip install matplotlib"
        ) from None
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def look(name: str) -> dict[str, Any]:
    """Colour, marker and line of a strategy, the same in every picture."""
    if name == SINGLE:
        return {"color": "black", "marker": "o", "linestyle": "-."}
    at = list(dict.fromkeys((SINGLE, *_FIRST, *STRATEGIES))).index(name) - 1
    return {
        "color": _COLOURS[at % len(_COLOURS)],
        "marker": _MARKERS[1:][at % (len(_MARKERS) - 1)],
        "linestyle": _LINES[STRATEGIES[name].package],
    }


def _finish(axes: Any, title: str, unit: str, xlabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _packages(comparison: Comparison) -> list[str]:
    """Whose strategies are shown."""
    return [p for p in _OWNERS if any(STRATEGIES[n].package == p for n in comparison.names)]


def _legend(comparison: Comparison, figure: Any, *axes: Any) -> None:
    """Beside the axes: it covers nothing."""
    lines = [f"{_LINE_WORDS[p]}: {_OWNERS[p]}" for p in _packages(comparison)]
    both = [ax.get_legend_handles_labels() for ax in axes]
    named = {label: handle for handles, labels in both for handle, label in zip(handles, labels)}
    figure.legend(
        named.values(),
        named.keys(),
        loc="outside right center",
        frameon=False,
        fontsize=9,
        title="\n".join(lines),
        title_fontsize=8,
    )


def _explain_bars(comparison: Comparison, figure: Any) -> None:
    """Below the axes: whose strategies are hatched and how."""
    from matplotlib.patches import Patch

    packages = _packages(comparison)
    patches = [
        Patch(
            facecolor="white" if _HATCHES[p] else "#666666", edgecolor="#666666", hatch=_HATCHES[p]
        )
        for p in packages
    ]
    names = [_OWNERS[p] for p in packages]
    figure.legend(
        patches, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9
    )


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
    _legend(comparison, figure, axes)


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
    """A bar a strategy with the range of its repeats; what is not known is said in its place."""
    names = comparison.names
    for at, name in enumerate(names):
        stat = comparison.stat(name, value)
        if stat is None:
            axes.text(0, at, " not known", va="center", fontsize=8, style="italic")
            continue
        axes.barh(
            at,
            stat.median,
            height=0.65,
            color="white" if _HATCHES[STRATEGIES[name].package] else look(name)["color"],
            edgecolor=look(name)["color"],
            hatch=_HATCHES[STRATEGIES[name].package],
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
    label = comparison.memory_label
    _bars(
        comparison,
        figure.subplots(),
        lambda run: comparison.memory(run) / 1e6,
        f"Peak memory per rank ({_repeats(comparison)})",
        f"MB: {label}",
    )
    _explain_bars(comparison, figure)


def draw_communication(comparison: Comparison, figure: Any) -> None:
    """Exposed communication, and bytes on the wire."""
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(comparison, left, lambda run: run.exposed_ms, "Exposed communication", "ms of a step")
    _bars(
        comparison,
        right,
        lambda run: None if run.wire_bytes is None else run.wire_bytes / 1e6,
        "Bytes on the wire",
        "MB a rank sends in a step",
    )
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
    names = comparison.names
    base = np.array(values(comparison.of(names[0])[0]))
    n = len(base)
    steps, every = np.arange(1, n + 1), max(1, n // 10)
    window = max(1.0, n / 60)
    nothing = True
    for at, name in enumerate(names):
        own = np.array(values(comparison.of(name)[0]))
        style = {**look(name), "markevery": (at * every // len(names), every)}
        top.plot(
            steps, smoothed(own, 1 - 1 / window), label=name, markersize=5, linewidth=1, **style
        )
        apart = np.abs(own - base)
        if at and apart.any():
            nothing = False
            below.semilogy(
                steps, np.where(apart > 0, apart, np.nan), markersize=4, linewidth=0.7, **style
            )
    if limit is not None:
        below.fill_between(steps, 0, limit, color="#dddddd", zorder=0, label="rounding")
        below.set_yscale("log")
    if nothing:
        below.text(0.5, 0.5, "no difference", transform=below.transAxes, ha="center")
    mean = f", mean over about {window:.0f} steps" if window >= 1.5 else ""
    _finish(top, f"{title} of the first runs{mean}", unit, "")
    _finish(below, f"Distance from {names[0]}, every step", unit, "step")
    _legend(comparison, figure, top, below)


def draw_grad_norm(comparison: Comparison, figure: Any) -> None:
    """The gradient's norm before clipping."""
    _curves(
        comparison, figure, lambda r: r.grad_norms, "Gradient norm before clipping", "norm", None
    )


def draw_loss(comparison: Comparison, figure: Any) -> None:
    """The loss, and what rounding allows."""
    limit = allowed(comparison)
    _curves(comparison, figure, lambda r: r.losses, "Loss", "nats per token", limit)


_PICTURES: tuple[tuple[str, str, Callable[[Comparison, Any], None]], ...] = (
    ("throughput.png", "Throughput of each epoch.", draw_throughput),
    ("epoch_time.png", "Training time of each epoch.", draw_time),
    ("memory.png", "Peak memory of the rank that has most.", draw_memory),
    ("grad_norm.png", "Norm of the gradient, and how far strategies lie apart.", draw_grad_norm),
    (
        "loss.png",
        "Training loss, and how far strategies lie apart; grey: what rounding alone does.",
        draw_loss,
    ),
    ("communication.png", "Exposed communication and bytes on the wire.", draw_communication),
)
