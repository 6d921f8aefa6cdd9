"""The roofline: every kernel's dot, arithmetic intensity against rate, under measured ceilings.

[Note: where a dot is] A row knows its rate by bytes or by FLOPs. The other one is counted here from
the sizes in the case's name: FLOPs of the formula for each element (transcendental functions count
one), bytes that must move at least. A case that does not name its sizes is left out, and said.

[Note: the roof] Each bench measures its ceilings in its own process (fastpar/predict/machine.py),
on a machine that others use too: the roof is a band between the lowest and the highest of them. A
dot above the slope belongs to tensors that stay in a cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.records import Row, machine_line
from bench.report.cells import OPS, bare, by_case, of_newest, pyplot, save

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
COUNTS = {"M": 1e6, "B": 1e9, "k": 1e3}
NAMES = {"forward": ", forward", "backward": ", backward", "forward+backward": ", fwd + bwd"}
OURS, STOCK, ROOF = "#D55E00", "#0072B2", "#444444"
FAR = 4  # candidates for the place of a number: rings around its dot


class Dot(NamedTuple):
    """One kernel at one shape."""

    bench: str
    case: str
    direction: str
    variant: str
    intensity: float  # FLOPs a byte
    tflop_per_s: float
    flops: float


class Ceiling(NamedTuple):
    """Lowest and highest that the processes of a machine measured."""

    copy_gb_per_s: tuple[float, float]
    matmul_tflop_per_s: tuple[float, float]


def elements(case: str) -> float | None:
    """That the sizes in a case's name multiply to: "N=2048 C=384", "fp32 50M"; None without."""
    sizes = [float(size) for size in re.findall(r"\b[A-Z]=(\d+)", case)]
    if sizes:
        return math.prod(sizes)
    found = re.search(r"\b(\d+(?:\.\d+)?)([MBk])\b", case)
    return float(found[1]) * COUNTS[found[2]] if found else None


def least_bytes(row: Row) -> float | None:
    """Reads of inputs and writes of results of a row with known FLOPs; None: not known."""
    size = {name: int(n) for name, n in re.findall(r"\b([A-Z])=(\d+)", row.case)}
    item = ITEM[row.dtype]
    if row.bench == "attention" and set("BHTD") <= set(size):
        times = {"forward": 4, "backward": 8, "forward+backward": 12}[row.direction]
        return float(times * size["B"] * size["H"] * size["T"] * size["D"] * item)
    if row.bench == "linear_cross_entropy" and set("NCV") <= set(size):
        one = (size["N"] + size["V"]) * size["C"] * item
        return float(one if row.direction == "forward" else 2 * one)
    found = re.search(r"N=(\d+) (\d+)->(\d+)", row.case)
    if row.bench == "linear" and found:
        n, k, m = map(int, found.groups())
        one = (n * k + k * m + n * m) * item
        return float(one if row.direction == "forward" else 3 * one)
    return None


def dot_of(row: Row) -> Dot | None:
    """The row's place; None where it cannot be known. See [Note: where a dot is]."""
    if row.median_ms is None:
        return None
    if row.tflop_per_s:
        flops, moved = row.tflop_per_s * row.median_ms * 1e9, least_bytes(row)
    elif row.gb_per_s:
        count = elements(row.case)
        each = PER_ELEMENT.get(row.bench, {}).get(row.direction)
        if count is None or each is None:
            return None
        flops, moved = each * count, row.gb_per_s * row.median_ms * 1e6
    else:
        return None
    if not moved:
        return None
    rate = flops / row.median_ms / 1e9
    return Dot(row.bench, row.case, row.direction, row.variant, flops / moved, rate, flops)


def dots_of(rows: Iterable[Row]) -> tuple[list[tuple[Dot, Dot | None]], list[str]]:
    """(fastpar, the fastest other one) of every case, and the benches of cases without a place."""
    pairs: list[tuple[Dot, Dot | None]] = []
    left: list[tuple[str, str]] = []
    for (case, _), group in by_case([r for r in rows if r.bench in OPS]).items():
        ours = next((r for r in group if r.variant == "fastpar" and r.median_ms), None)
        if ours is None or ours.bench == "shm":
            continue
        mine = dot_of(ours)
        if mine is None:
            left.append((ours.bench, case))
            continue
        peers = [r for r in group if not r.variant.startswith("fastpar") and r.median_ms]
        best = min(peers, key=lambda r: r.median_ms or 0.0, default=None)
        pairs.append((mine, dot_of(best) if best else None))
    return pairs, [bench for bench, _ in dict.fromkeys(left)]


def ceiling_of(rows: Iterable[Row]) -> Ceiling | None:
    """From what rows say of their own processes; None where either one is missing."""
    texts = {row.ceiling for row in rows if row.ceiling}
    copies = [float(f[1]) for t in texts if (f := re.match(r"copy ([\d.]+) GB/s", t))]
    products = [float(f[1]) for t in texts if (f := re.match(r"matmul .* ([\d.e+]+) TFLOP/s", t))]
    if not copies or not products:
        return None
    return Ceiling((min(copies), max(copies)), (min(products), max(products)))


def numbered(dots: Iterable[Dot]) -> list[Dot]:
    """The largest of each bench and direction: these get a number."""
    largest: dict[tuple[str, str], Dot] = {}
    for dot in dots:
        key = dot.bench, dot.direction
        if key not in largest or dot.flops > largest[key].flops:
            largest[key] = dot
    return sorted(largest.values(), key=lambda d: (d.intensity, d.tflop_per_s))


def _place(
    taken: list[tuple[float, float]], x: float, y: float, apart: float
) -> tuple[float, float]:
    """A place near (x, y), in pixels, that keeps its distance from those taken."""
    for ring in range(1, FAR + 1):
        for step in range(12):
            angle = math.pi / 2 - step * math.pi / 6
            at = x + ring * apart * math.cos(angle), y + ring * apart * math.sin(angle)
            if all(math.dist(at, other) >= apart for other in taken):
                return at
    return x, y + apart


def _panel(axes: Any, about: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """One machine; the benches of cases that were left out."""
    pairs, left = dots_of(rows)
    roof = ceiling_of(rows)
    shown = [dot for pair in pairs for dot in pair if dot is not None]
    low, high = min(d.intensity for d in shown), max(d.intensity for d in shown)
    span = low / 2, high * 2
    axes.set_xscale("log")
    axes.set_yscale("log")
    if roof is not None:
        xs = [span[0] * (span[1] / span[0]) ** (i / 200) for i in range(201)]
        lines = [
            [min(x * roof.copy_gb_per_s[i] / 1e3, roof.matmul_tflop_per_s[i]) for x in xs]
            for i in (0, 1)
        ]
        axes.fill_between(xs, *lines, color=ROOF, alpha=0.15, linewidth=0)
        axes.plot(xs, lines[1], color=ROOF, linewidth=1.2)
    for mine, other in pairs:
        if other is not None:
            axes.plot(
                [mine.intensity, other.intensity],
                [mine.tflop_per_s, other.tflop_per_s],
                color="#BBBBBB", linewidth=0.7, zorder=1,
            )  # fmt: skip
            axes.plot(other.intensity, other.tflop_per_s, "s", color=STOCK, markersize=5,
                      markerfacecolor="none", zorder=2)  # fmt: skip
        axes.plot(mine.intensity, mine.tflop_per_s, "o", color=OURS, markersize=5, zorder=3)
    axes.set_xlim(*span)
    axes.set_xlabel("arithmetic intensity, FLOP a byte moved", fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=9)
    axes.grid(True, which="major", color="#EEEEEE")
    axes.set_axisbelow(True)
    bare(axes)
    where = about["gpu"] if about["device"] == "cuda" else f"CPU, {rows[0].threads} threads"
    axes.set_title(f"Roofline of every kernel ({where})", fontsize=11, loc="left")
    return left


def _number(axes: Any, dots: Sequence[Dot], every: Sequence[Dot]) -> None:
    """Numbers beside dots, with a thin line each; what they mean goes to the right."""
    axes.figure.canvas.draw()  # places are in pixels of the layout that is drawn
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    taken = [tuple(to_pixels((d.intensity, d.tflop_per_s))) for d in every]
    for number, dot in enumerate(dots, 1):
        x, y = to_pixels((dot.intensity, dot.tflop_per_s))
        at = _place(taken, x, y, 14.0)
        taken.append(at)
        axes.annotate(
            str(number), (dot.intensity, dot.tflop_per_s), xytext=tuple(to_data(at)), fontsize=8,
            ha="center", va="center", zorder=4,
            arrowprops={"arrowstyle": "-", "color": "#777777", "linewidth": 0.6, "shrinkB": 2},
        )  # fmt: skip


def _counted(benches: Sequence[str]) -> str:
    found = {bench: benches.count(bench) for bench in benches}
    return ", ".join(f"{bench} ({n} cases)" for bench, n in found.items())


def draw(results: Sequence[tuple[dict[str, Any], Sequence[Row]]], path: Path) -> None:
    """A panel for each machine that has rows of ops.

    Args:
        results: (machine, its rows).
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, panels = pyplot().subplots(
        len(results),
        1,
        figsize=(11.5, 5.6 * len(results) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    named, lines = [], []
    for (about, rows), axes in zip(results, panels[:, 0]):
        left = _panel(axes, about, rows)
        shown = [dot for pair in dots_of(rows)[0] for dot in pair if dot is not None]
        chosen = numbered(pair[0] for pair in dots_of(rows)[0])
        named.append((axes, chosen, shown))
        keys: list[Any] = [
            Line2D([], [], marker="o", linestyle="", color=OURS, label="fastpar"),
            Line2D([], [], marker="s", linestyle="", color=STOCK, markerfacecolor="none",
                   label="the fastest other one"),
            Patch(color=ROOF, alpha=0.3, label="ceilings, lowest to highest"),
        ]  # fmt: skip
        keys += [
            Line2D([], [], linestyle="", label=f"{n}  {d.case}{NAMES.get(d.direction, '')}")
            for n, d in enumerate(chosen, 1)
        ]
        axes.legend(
            handles=keys, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7.5,
            frameon=False, handlelength=1.2,
        )  # fmt: skip
        lines.append(machine_line(of_newest(about, [r for r in rows if r.bench in OPS])))
        if left:
            lines.append("left out, no sizes in their names or no arithmetic: " + _counted(left))
    lines.append(
        "small dots without a number: the same ops at other shapes; above the slope: in caches; "
        "bytes and FLOPs not measured are counted from the case, see bench/report/roofline.py"
    )
    figure.supxlabel("\n".join(lines), fontsize=7)
    for axes, chosen, shown in named:
        _number(axes, chosen, shown)
    save(figure, path)
