"""The picture of the README: a step of GPT-2 124M in fastpar and in what people use instead.

    python -m bench report --picture      bench/results/steps.png

A bar is the least median of all committed machines, a thin line ends at the largest. CPUs whose
instruction set was not recorded are left out.
"""

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
    "DeepSpeed ZeRO-2": "DeepSpeed",
    "FSDP2, no reshard": "FSDP2",
    "DDP + ZeRO optimizer": "DDP + ZeRO",
    "fastpar ZeRO-2": "fastpar",
}
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
    figure = import_package("matplotlib.figure", "bench report").Figure(
        figsize=(11.0, 2.3), dpi=110, layout="constrained"
    )
    for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS):
        _draw_panel(axes, panel.title, values(panel, rows))
    path = folder / "steps.png"
    figure.savefig(path)
    return path


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
