"""The picture of the README: a step of GPT-2 124M in fastpar and in what people use instead.

    python -m bench report --picture      bench/results/steps.png

A bar is the least median of all committed machines, a thin line ends at the largest. CPUs whose
instruction set was not recorded are left out. Below, where they were measured, models of other
sizes and kinds: how many times as fast fastpar is, with the 95 % interval.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.records import RESULTS, Row, is_known, load
from fastpar.files.packages import import_package

OURS, OTHERS = "#D55E00", "#56B4E9"  # of Okabe and Ito


class Panel(NamedTuple):
    title: str
    bench: str
    case: str
    bars: dict[str, str]  # variant of a row -> label
    is_memory: bool = False


_ONE = {"eager": "PyTorch", "torch.compile": "torch.compile", "fastpar": "fastpar"}
_TWO = {
    "DeepSpeed ZeRO-2": "DeepSpeed", "FSDP2, no reshard": "FSDP2",
    "DDP + ZeRO optimizer": "DDP + ZeRO", "fastpar ZeRO-2": "fastpar",
}  # fmt: skip
_GPU, _CPU = "124M T=1024 B=32", "GPT-2 124M T=256 B=1 a rank, 2 ranks"
PANELS = (
    Panel("one H200: ms a step", "train", _GPU, _ONE),
    Panel("one H200: peak memory, GB", "train", _GPU, _ONE, is_memory=True),
    Panel("ZeRO-2 on two CPU ranks: ms a step", "zero", _CPU, _TWO),
)


def values(panel: Panel, rows: Sequence[Row]) -> dict[str, list[float]]:
    """Label -> what each machine measured, in ascending order."""
    found: dict[str, list[float]] = {}
    for variant, label in panel.bars.items():
        wanted = panel.bench, variant, "step"
        own = [r for r in rows if (r.bench, r.variant, r.direction) == wanted]
        own = [r for r in own if r.case.endswith(panel.case) and r.median_ms is not None]
        numbers = [(r.peak_bytes or 0) / 1e9 if panel.is_memory else r.median_ms for r in own]
        found[label] = sorted(filter(None, numbers))
    return found


def draw(folder: Path = RESULTS) -> Path:
    """Writes steps.png; all of its numbers are rows of the result files."""
    machines = map(load, sorted(folder.glob("*.json")))
    rows = [row for about, own in machines if is_known(about) for row in own]
    found = {device: models([r for r in rows if r.device == device]) for device in ("cuda", "cpu")}
    found = {device: own for device, own in found.items() if own}
    count = 1 + len(found)
    figure = import_package("matplotlib.figure", "bench report").Figure(
        figsize=(11.0, 2.3 * count), dpi=110, layout="constrained"
    )
    top, *below = figure.subfigures(count, 1, squeeze=False)[:, 0]
    for axes, panel in zip(top.subplots(1, len(PANELS)), PANELS):
        _draw_panel(axes, panel.title, values(panel, rows))
    for part, (device, own) in zip(below, found.items()):
        _draw_models(part.subplots(), device, own)
    path = folder / "steps.png"
    figure.savefig(path)
    return path


def models(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Model and batch -> the baseline of fastpar's newest row beside it -> that row."""
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row.date):
        name = re.fullmatch(r"model (.*?)(, compiled)?", row.case)
        if name and row.variant == "fastpar" and row.speedup:
            found.setdefault(name[1], {})[row.baseline or ""] = row
    return found


def _draw_models(axes: Any, device: str, found: dict[str, dict[str, Row]]) -> None:
    labels = {"eager": "PyTorch", "torch.compile": "torch.compile"}
    bases = [base for base in labels if any(base in by for by in found.values())]
    for i, base in enumerate(bases):
        own = [(x, by[base]) for x, by in enumerate(found.values()) if base in by]
        for x, row in own:
            low, high = row.interval or (row.speedup, row.speedup)
            place, colour = x + 0.3 * (i - (len(bases) - 1) / 2), (OURS, OTHERS)[i]
            label = labels[base] if x == own[0][0] else ""
            axes.bar(place, row.speedup, 0.28, color=colour, label=label)
            axes.plot([place] * 2, [low, high], color="black", linewidth=1.2)
            axes.text(place, high, f"{row.speedup:.2f}", ha="center", va="bottom", fontsize=9)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(found)), [n.replace(" T=", "\nT=") for n in found], fontsize=9)
    axes.margins(y=0.15)
    where = "one H200" if device == "cuda" else "one CPU, fp32"
    axes.set_title(f"{where}: a step of fastpar, times as fast as", fontsize=10, loc="left")
    axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_panel(axes: Any, title: str, found: dict[str, list[float]]) -> None:
    longest = max(numbers[-1] for numbers in found.values())
    for y, (label, numbers) in enumerate(found.items()):
        least, most = numbers[0], numbers[-1]
        colour = OURS if label == "fastpar" else OTHERS
        axes.barh(y, least, 0.7, color=colour)
        text = _text(least)
        if most > 1.02 * least:
            axes.plot([least, most], [y, y], color=colour, linewidth=1.5)
            text += f" to {_text(most)}"
        axes.text(most + 0.02 * longest, y, text, va="center", fontsize=9)
    axes.set_yticks(range(len(found)), found, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * longest)
    axes.set_xticks([])
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
