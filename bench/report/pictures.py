"""Pictures, drawn by `python -m bench report` from committed rows only.

<op>.png: the rate of every variant at every shape, beside the machine's ceiling; a row of panels
for each device that has results, a column for each direction. zero.png and tp_<ranks>.png: tokens/s
and memory of the data-parallel engines and of the tensor-parallel ones.

roofline.png: fastpar's kernels and the fastest others, arithmetic intensity against rate. A row
knows its rate by bytes or by FLOPs. The other one is counted here from the sizes in the case's
name: FLOPs of the formula for each element (transcendental functions count one), bytes that must
move at least. A case that does not name its sizes is left out. Each bench measures its ceilings in
its own process (fastpar/predict/machine.py), on a machine that others use too: the roof is a band
between the lowest and the highest of them. A dot above the slope: tensors that stay in a cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.records import Row
from bench.report import tables
from bench.report.tables import ASIDE, OPS, NoResultsError, by_case, is_ours, newest, number

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
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
# FLOPs of an element, by direction. Of layer_norm: mean 1, variance 3, normalized 2, affine 2;
# backward again normalized 2, dy*w 1, two means 3, dx 5, dw and db 3.
PER_ELEMENT = {
    "layer_norm": {"forward": 8, "forward+backward": 24},
    "gelu": {"forward": 9, "forward+backward": 29},
    "cross_entropy": {"forward": 4, "forward+backward": 7},
    "adamw": {"step": 15},
    "global_norm": {"call": 2},
    "quantize": {"call": 3},
}
STOCK = ", stock model"  # of `bench zero`: fastpar's engine alone


def pyplot() -> Any:
    """matplotlib, which needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def bare(axes: Any, *sides: str) -> None:
    for side in sides or ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


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
    bare(axes)
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
    figure, panels = pyplot().subplots(
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
    lines = [tables.origin(about, rows) for about, rows in kept]
    lines += ["dashed: the ceiling that the same process measured"] * dashed
    figure.supxlabel("\n".join(lines), fontsize=7)
    save(figure, path)


def draw_steps(about: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Tokens/s and peak memory a rank of every contender of one case, one under another."""
    figure, panels = pyplot().subplots(
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
        bare(axes)
    panels[0].set_yticks(range(len(rows)), [r.variant for r in rows], fontsize=9)
    panels[0].invert_yaxis()
    device = "CPU" if about["device"] == "cpu" else about["gpu"]
    figure.suptitle(f"{rows[0].case} ({device})", fontsize=11)
    figure.supxlabel(tables.origin(about, rows), fontsize=7)
    save(figure, path)


# The roofline

Dot = tuple[float, float]  # FLOPs a byte, TFLOP/s


def elements(case: str) -> float | None:
    """That the sizes in a case's name multiply to: "N=2048 C=384", "fp32 50M"; None without."""
    sizes = [float(size) for size in re.findall(r"\b[A-Z]=(\d+)", case)]
    if sizes:
        return math.prod(sizes)
    found = re.search(r"\b(\d+(?:\.\d+)?)([MBk])\b", case)
    return float(found[1]) * {"M": 1e6, "B": 1e9, "k": 1e3}[found[2]] if found else None


def least_bytes(row: Row) -> float | None:
    """Reads of inputs and writes of results of a row with known FLOPs; None: not known."""
    size = {name: int(n) for name, n in re.findall(r"\b([A-Z])=(\d+)", row.case)}
    item, backward = ITEM[row.dtype], row.direction != "forward"
    if row.bench == "attention" and set("BHTD") <= set(size):
        times = {"forward": 4, "backward": 8, "forward+backward": 12}[row.direction]
        return float(times * size["B"] * size["H"] * size["T"] * size["D"] * item)
    if row.bench == "linear_cross_entropy" and set("NCV") <= set(size):
        return float((1 + backward) * (size["N"] + size["V"]) * size["C"] * item)
    found = re.search(r"N=(\d+) (\d+)->(\d+)", row.case)
    if row.bench == "linear" and found:
        n, k, m = map(int, found.groups())
        return float((1 + 2 * backward) * (n * k + k * m + n * m) * item)
    return None


def dot_of(row: Row) -> Dot | None:
    """The row's place; None where it cannot be known."""
    if row.median_ms is None:
        return None
    if row.tflop_per_s:
        flops, moved = row.tflop_per_s * row.median_ms * 1e9, least_bytes(row)
    else:
        each = PER_ELEMENT.get(row.bench, {}).get(row.direction, 0)
        flops, moved = each * (elements(row.case) or 0.0), (row.gb_per_s or 0) * row.median_ms * 1e6
    return (flops / moved, flops / row.median_ms / 1e9) if flops and moved else None


def dots_of(rows: Iterable[Row]) -> list[tuple[str, Dot, Dot | None]]:
    """The bench, fastpar's dot and the fastest other one's, of every case that has a place."""
    found: list[tuple[str, Dot, Dot | None]] = []
    for group in by_case([r for r in rows if r.bench in OPS and r.median_ms]).values():
        ours = next((r for r in group if r.variant == "fastpar"), None)
        mine = None if ours is None or ours.bench == "shm" else dot_of(ours)
        if ours is not None and mine is not None:
            others = [r for r in group if not r.variant.startswith("fastpar")]
            best = min(others, key=lambda r: r.median_ms or 0.0, default=None)
            found.append((ours.bench, mine, dot_of(best) if best else None))
    return found


def ceilings_of(rows: Iterable[Row]) -> list[tuple[float, float]] | None:
    """The lowest and the highest GB/s of a copy and TFLOP/s of a product, by what rows say of their
    own processes; None where either one is missing."""
    texts = {row.ceiling for row in rows if row.ceiling}
    found = [
        [float(f[1]) for text in texts if (f := re.match(rf"{what} ([\d.e+]+) {unit}/s", text))]
        for what, unit in (("copy", "GB"), (r"matmul .*", "TFLOP"))
    ]
    return [(min(some), max(some)) for some in found] if all(found) else None


def draw_roofline(results: Sequence[tuple[dict[str, Any], Sequence[Row]]], path: Path) -> None:
    """A panel for each machine that has rows of ops; a colour for each op."""
    height = 5.6 * len(results) + 0.6
    figure, panels = pyplot().subplots(
        len(results), 1, figsize=(11.5, height), squeeze=False, layout="constrained"
    )
    for (about, rows), axes in zip(results, panels[:, 0]):
        dots, roof = dots_of(rows), ceilings_of(rows)
        at = [dot[0] for _, *pair in dots for dot in pair if dot is not None]
        low, high = min(at) / 2, max(at) * 2
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        if roof is not None:
            (slow, fast), (least, most) = roof
            xs = [low * (high / low) ** (i / 200) for i in range(201)]
            band = [[min(x * c / 1e3, p) for x in xs] for c, p in ((slow, least), (fast, most))]
            axes.fill_between(xs, *band, color="#444444", alpha=0.15, linewidth=0)
            axes.plot(xs, band[1], color="#444444", linewidth=1.2, label="ceilings")
        colour = dict(zip(dict.fromkeys(bench for bench, *_ in dots), (OURS, *OURS_TOO, *OTHERS)))
        for bench, mine, other in dots:
            if other is not None:
                axes.plot(*zip(mine, other), color="#BBBBBB", linewidth=0.7, zorder=1)
                axes.plot(*other, "s", color="#999999", markersize=5, markerfacecolor="none")
            axes.plot(*mine, "o", color=colour[bench], markersize=5, zorder=3)
        for bench, one in colour.items():
            axes.plot([], [], "o", color=one, label=f"fastpar, {bench}")
        axes.plot([], [], "s", color="#999999", markerfacecolor="none", label="the fastest other")
        axes.set_xlabel("arithmetic intensity, FLOP a byte moved", fontsize=9)
        axes.set_ylabel("TFLOP/s", fontsize=9)
        axes.grid(True, which="major", color="#EEEEEE")
        axes.set_axisbelow(True)
        bare(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
        where = about["gpu"] if about["device"] == "cuda" else f"CPU, {rows[0].threads} threads"
        axes.set_title(f"Roofline of every kernel ({where})", fontsize=11, loc="left")
    ops = [(about, [row for row in rows if row.bench in OPS]) for about, rows in results]
    lines = [tables.origin(about, rows, "of each row") for about, rows in ops]
    figure.supxlabel("\n".join(lines), fontsize=7)
    save(figure, path)


def draw_all(folder: Path) -> list[Path]:
    """<folder>/<op>.png for every op with rows there, of the newest machine of each device.

    And roofline.png; zero.png and tp_<ranks>.png, of the first machine that has such rows.
    """
    machines = []
    for device in ("cuda", "cpu"):
        try:
            machines.append(newest(device, folder))
        except NoResultsError:
            continue
    drawn = []
    with_dots = [machine for machine in machines if dots_of(machine[1])]
    if with_dots:
        drawn.append(folder / "roofline.png")
        draw_roofline(with_dots, drawn[-1])
    for bench in sorted(OPS):
        parts = [(about, [r for r in rows if r.bench == bench]) for about, rows in machines]
        parts = [part for part in parts if part[1]]
        if parts:
            draw(bench, parts, folder / f"{bench}.png")
            drawn.append(folder / f"{bench}.png")
    for name, choose in (("zero", tables.zero_rows), ("tp", tables.tp_rows)):
        for about, rows in machines:
            for own in by_case(choose(rows)).values():
                file = name if name == "zero" else f"tp_{own[0].notes.get('ranks', 1)}"
                if folder / f"{file}.png" not in drawn:
                    drawn.append(folder / f"{file}.png")
                    draw_steps(about, own, drawn[-1])
    return drawn
