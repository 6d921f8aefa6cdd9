"""One picture for each op: the rate of every variant at every shape, beside the machine's ceiling.

Drawn by `python -m bench report` from committed rows only: a row of panels for each device that has
results, a column for each direction. roofline.png is roofline.py's. zero.png and tp_<ranks>.png:
tokens/s and memory of the data-parallel engines and of the tensor-parallel ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import Row, machine_line
from bench.report import cells, roofline
from bench.report.cells import ASIDE, OPS, NoResultsError, by_case, is_ours, newest, number
from bench.report.tables import tp_rows, zero_rows

# Okabe and Ito's colours first, which the colour-blind can tell apart; fastpar's are warm ones, and
# others never get them.
OURS = "#D55E00"
OURS_TOO = ("#E69F00", "#F0E442", "#8C2D04", "#FDC086", "#C9A227", "#F4A582", "#5B3A00")
OTHERS = (
    "#999999", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#666666", "#BBBBBB", "#000000",
    "#44AA99", "#882255",
)  # fmt: skip
DIRECTIONS = ("forward", "backward", "forward+backward", "step")
BAR_INCHES = 0.17
STOCK = ", stock model"  # of `bench zero`: fastpar's engine alone


def colours(variants: Sequence[str]) -> dict[str, str]:
    """The same colour for a variant in every panel."""
    ours = [v for v in variants if v.startswith("fastpar") and v != "fastpar"]
    others = [v for v in variants if not v.startswith("fastpar")]
    found = {v: OTHERS[i % len(OTHERS)] for i, v in enumerate(others)}
    found |= {v: OURS_TOO[i % len(OURS_TOO)] for i, v in enumerate(ours)}
    return found | {"fastpar": OURS}


def _rate(row: Row) -> tuple[float, str]:
    """In TFLOP/s or GB/s; larger is faster, at any shape."""
    if row.tflop_per_s is not None:
        return row.tflop_per_s, "TFLOP/s"
    return row.gb_per_s or 0.0, "GB/s"


def _panel(
    axes: Any, rows: Sequence[Row], colour: dict[str, str], bench: str, *, labelled: bool
) -> bool:
    """Horizontal bars in groups, one for each case; whether the ceiling is drawn too."""
    cases = list(dict.fromkeys(r.case for r in rows))
    prefix = f"{bench} " if all(case.startswith(f"{bench} ") for case in cases) else ""
    ticks, labels = [], []
    at, unit, ceilings = 0.0, "", []
    for case in cases:
        group = [r for r in rows if r.case == case]
        start = at
        for row in sorted(group, key=lambda r: list(colour).index(r.variant)):
            if row.median_ms is None:
                axes.text(0, at, f" {row.variant}: refused", va="center", fontsize=7)
            else:
                rate, unit = _rate(row)
                axes.barh(at, rate, 0.9, color=colour[row.variant])
                axes.text(rate, at, f" {row.median_ms:.3g} ms", va="center", fontsize=7)
                if row.percent_of_ceiling:
                    ceilings.append(100 * rate / row.percent_of_ceiling)
            at += 1
        ticks.append((start + at - 1) / 2)
        labels.append(case.removeprefix(prefix))
        at += 1
    axes.set_yticks(ticks, labels if labelled else [""] * len(labels), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} (longer is faster; the numbers are medians)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    cells.bare(axes)
    right = axes.get_xlim()[1] * 1.18
    ceiling = max(ceilings, default=float("inf"))
    near = bool(ceiling <= 1.5 * right)  # far away, the line would only shrink the bars
    if near:
        axes.axvline(ceiling, color="#444444", linestyle="--", linewidth=1)
        right = max(right, 1.05 * ceiling)
    axes.set_xlim(0, right)
    return near


def draw(bench: str, results: Sequence[tuple[dict[str, Any], Sequence[Row]]], path: Path) -> None:
    """Draw the rows of one bench on one or several machines into path.

    Args:
        results: (machine, its rows of this bench), each with at least one row.
    """
    from matplotlib.patches import Patch

    kept = [(about, [r for r in rows if r.variant != ASIDE]) for about, rows in results]
    variants = dict.fromkeys(r.variant for _, rows in kept for r in rows)
    colour = {v: c for v, c in colours(list(variants)).items() if v in variants}
    found = {r.direction for _, rows in kept for r in rows}
    directions = [d for d in DIRECTIONS if d in found] + sorted(found - {*DIRECTIONS})
    heights = []
    for _, rows in kept:
        bars = max(len([r for r in rows if r.direction == d]) for d in directions)
        groups = len({r.case for r in rows})
        heights.append(BAR_INCHES * (bars + groups) + 0.9)
    figure, panels = cells.pyplot().subplots(
        len(kept),
        len(directions),
        figsize=(1.6 + 4.8 * len(directions), sum(heights) + 0.8),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    dashed = False
    for (about, rows), line in zip(kept, panels):
        before: list[str] = []
        for direction, axes in zip(directions, line):
            part = [r for r in rows if r.direction == direction]
            if not part:
                axes.set_axis_off()
                continue
            cases = list(dict.fromkeys(r.case for r in part))
            dashed |= _panel(axes, part, colour, bench, labelled=cases != before)
            before = cases
            where = about["gpu"] if about["device"] == "cuda" else "CPU"
            dtypes = " and ".join(dict.fromkeys(r.dtype for r in part))
            axes.set_title(f"{bench}, {direction}, {dtypes} ({where})", fontsize=10)
    keys = [Patch(color=c, label=v) for v, c in colour.items()]
    figure.legend(
        handles=keys,
        loc="outside upper center",
        ncols=min(3 * len(directions), len(keys)),
        fontsize=8,
        frameon=False,
    )
    lines = [machine_line(about) for about, _ in kept]
    lines += ["dashed: the ceiling that the same process measured"] * dashed
    figure.supxlabel("\n".join(lines), fontsize=7)
    cells.save(figure, path)


def draw_steps(about: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Tokens/s and peak memory a rank of every contender of one case, one under another."""
    figure, panels = cells.pyplot().subplots(
        1, 2, figsize=(11, 1.4 + 1.6 * BAR_INCHES * len(rows)), sharey=True, layout="constrained"
    )
    measures = (
        ("tokens/s over all ranks (longer is faster)", [r.tokens_per_s for r in rows]),
        ("peak MB a rank (shorter is better)", [r.peak_bytes and r.peak_bytes / 1e6 for r in rows]),
    )
    colour = [OURS if is_ours(r) and STOCK not in r.variant else "" for r in rows]
    colour = [c or (OURS_TOO[0] if is_ours(r) else OTHERS[0]) for c, r in zip(colour, rows)]
    for (label, values), axes in zip(measures, panels):
        for at, (row, value) in enumerate(zip(rows, values)):
            text = " refused" if row.refused else f" {number(value)}"
            axes.barh(at, 0.0 if row.refused else value or 0.0, 0.8, color=colour[at])
            axes.text(0.0 if row.refused else value or 0.0, at, text, va="center", fontsize=8)
        axes.set_xlabel(label, fontsize=9)
        axes.margins(x=0.12)
        cells.bare(axes)
    panels[0].set_yticks(range(len(rows)), [r.variant for r in rows], fontsize=9)
    panels[0].invert_yaxis()
    device = "CPU" if about["device"] == "cpu" else about["gpu"]
    figure.suptitle(f"{rows[0].case} ({device})", fontsize=11)
    figure.supxlabel(machine_line(about), fontsize=7)
    cells.save(figure, path)


def draw_all(folder: Path) -> list[Path]:
    """<folder>/<op>.png for every op with rows there, of the newest machine of each device.

    And roofline.png; zero.png and tp_<ranks>.png, of the first machine that has such rows.
    """
    machines = []
    for device in ("cuda", "cpu"):
        try:
            machines.append(newest(device, folder, Row))
        except NoResultsError:
            continue
    drawn = []
    with_ops = [m for m in machines if roofline.dots_of(m[1])[0]]
    if with_ops:
        drawn.append(folder / "roofline.png")
        roofline.draw(with_ops, drawn[-1])
    for bench in sorted(OPS):
        parts = [(about, [r for r in rows if r.bench == bench]) for about, rows in machines]
        parts = [part for part in parts if part[1]]
        if parts:
            draw(bench, parts, folder / f"{bench}.png")
            drawn.append(folder / f"{bench}.png")
    for name, choose in (("zero", zero_rows), ("tp", tp_rows)):
        for about, rows in machines:
            for own in by_case(choose(rows)).values():
                file = name if name == "zero" else f"tp_{own[0].notes.get('ranks', 1)}"
                if folder / f"{file}.png" not in drawn:
                    drawn.append(folder / f"{file}.png")
                    draw_steps(about, own, drawn[-1])
    return drawn
