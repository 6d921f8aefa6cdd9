"""Training steps as a picture: compute and communication side by side, a panel for each variant."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastpar.comm.recorder import COMPUTE, GATHER, HOST, PP, REDUCE, TP, WAIT, Span, busy_ms
from fastpar.files.packages import import_package

COLOURS = {  # Okabe and Ito
    "input": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    REDUCE: "#E69F00",
    GATHER: "#CC79A7",
    TP: "#000000",
    PP: "#999999",
    WAIT: "#D55E00",
}
LINE_LENGTH = 170  # that fits below the picture


def _bars(axes: Any, y: int, spans: Sequence[Span], colour: str) -> None:
    """Pale while queued behind others of the row."""
    free = float("-inf")
    for span in sorted(spans, key=lambda s: (s.begin_ms, s.end_ms)):
        start = min(max(span.begin_ms, free), span.end_ms)
        free = max(free, span.end_ms)
        if start > span.begin_ms:
            width = start - span.begin_ms
            axes.barh(y, width, 0.8, span.begin_ms, color=colour, alpha=0.25, linewidth=0)
        if span.end_ms > start:
            width = span.end_ms - start
            axes.barh(y, width, 0.8, start, color=colour, edgecolor="white", linewidth=0.4)


def draw(
    panels: Mapping[str, Sequence[Span]],
    lines: Sequence[str],
    path: Path,
    rows: Sequence[str] = (COMPUTE, REDUCE, GATHER),
) -> None:
    """A panel for each variant: its compute row, then a row for each kind of collective.

    Args:
        panels: variant -> the spans of one step, from window().
        lines: below the picture.
        rows: of each panel, from above; HOST and COMPUTE show phases.
    """
    make_figure = import_package("matplotlib.figure", "fastpar profile").Figure
    make_patch = import_package("matplotlib.patches", "fastpar profile").Patch
    size = 11, 0.9 + (0.55 + 0.3 * len(rows)) * len(panels)
    figure = make_figure(figsize=size, dpi=110, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for (variant, spans), axes in zip(panels.items(), all_axes):
        for y, row in enumerate(rows):
            if row not in (HOST, COMPUTE):
                _bars(axes, y, [s for s in spans if s.row == row], COLOURS[row])
                continue
            for span in spans:
                if span.row == row or (span.row == WAIT and row == COMPUTE):
                    name, height = (WAIT, 0.45) if span.row == WAIT else (span.name, 0.8)
                    width = span.end_ms - span.begin_ms
                    axes.barh(y, width, height, span.begin_ms, color=COLOURS[name], linewidth=0)
        end = max((s.end_ms for s in spans if s.row in (HOST, COMPUTE)), default=0.0)
        waits, moving = busy_ms(spans, [WAIT]), busy_ms(spans, [REDUCE, GATHER, TP])
        axes.set_title(
            f"{variant}: step {end:.0f} ms; collectives under way {moving:.0f} ms, "
            f"waited for {waits:.0f} ms",
            fontsize=9,
            loc="left",
        )
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("ms since the step began", fontsize=8)
    all_axes[-1].set_xlim(left=0)
    names = {WAIT: "waits for communication", TP: "tp or cp exchange", PP: "message of a stage"}
    drawn = {s.name if s.row in (HOST, COMPUTE) else s.row for p in panels.values() for s in p}
    keys = [make_patch(color=c, label=names.get(n, n)) for n, c in COLOURS.items() if n in drawn]
    if drawn & {REDUCE, GATHER, TP}:
        keys.append(make_patch(color="#999999", alpha=0.4, label="queued (pale)"))
    figure.legend(
        handles=keys, loc="outside upper center", ncols=max(1, len(keys)), fontsize=8, frameon=False
    )
    wrapped = [part for line in lines for part in textwrap.wrap(line, LINE_LENGTH)]
    figure.supxlabel("\n".join(wrapped), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
