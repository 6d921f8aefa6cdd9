"""Rows as Markdown: one function for each table of a document, and a summary for the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.ops.errors import ErrorRow
from bench.records import Row
from bench.report.cells import by_case, is_ours, megabytes, number, rate, table, times
from bench.report.plan_table import plan_table
from bench.report.system_tables import (
    checkpoint_table,
    first_step_table,
    offload_table,
    overlap_table,
    pp_link_table,
    pp_table,
    ps_table,
    wires_table,
)
from bench.targets import targets_of

OPS = {p.stem.removeprefix("bench_") for p in Path(__file__).parents[1].glob("ops/bench_*.py")}
OPS |= {"shm"}
ZERO_TARGETS = {"DDP": 1.2, "FSDP2": 1.6, "DeepSpeed": 1.6}  # of every stage of fastpar


def train_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.bench != "train" or row.case.startswith("char"):
            continue
        what = [row.case, row.variant, f"{row.notes.get('ranks', 1)} x {row.threads}"]
        if row.refused:
            lines.append([*what, f"refused: {row.refused}", "", "", "", ""])
            continue
        peak = row.peak_bytes and row.peak_bytes / 1e6
        ratio = row.notes.get("memory_ratio")
        lines.append(
            [
                *what,
                number(row.median_ms),
                number(row.tokens_per_s),
                times(row.speedup),
                number(peak),
                times(ratio),
            ]
        )
    head = ["training step", "variant", "ranks x threads", "ms", "tokens/s", "speed-up"]
    return table([*head, "peak MB", "memory"], lines)


def char_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.bench != "train" or not row.case.startswith("char"):
            continue
        if row.refused:
            refusal = f"refused: {row.refused}"
            lines.append([row.case, row.variant, refusal, "", "", "", "", ""])
            continue
        notes = row.notes
        alike = notes.get("max_loss_difference")
        lines.append(
            [
                row.case,
                row.variant,
                number(notes["total_s"]),
                number(row.median_ms),
                times(row.speedup),
                times(notes.get("time_ratio")),
                f"{notes['val_loss']:.4f}",
                f"{alike:.1e}" if alike is not None else "",
            ]
        )
    head = [
        "run",
        "variant",
        "seconds",
        "ms a step",
        "speed-up of a step",
        "time",
        "validation loss",
    ]
    return table([*head, "largest loss difference in 200 steps"], lines)


def zero_rows(rows: Sequence[Row]) -> list[Row]:
    """One process, DDP, FSDP2, DeepSpeed, fastpar, fastpar's engine on the stock model."""
    families = ("one process", "DDP", "FSDP2", "DeepSpeed", "fastpar")

    def place(row: Row) -> tuple[int, bool, str]:
        family = next((i for i, f in enumerate(families) if row.variant.startswith(f)), -1)
        return family, row.variant.endswith("stock model"), row.variant

    return sorted((row for row in rows if row.bench == "zero"), key=place)


def zero_table(rows: Sequence[Row]) -> str:
    """fastpar's stages beside DDP and the fastest FSDP2 and DeepSpeed; what falls short says so.

    Rates are compared by their speed-up over DDP, which took turns with each of them.
    """
    rows = zero_rows(rows)
    best = {
        family: max(
            (r.speedup for r in rows if r.variant.startswith(family) and r.speedup), default=None
        )
        for family in ZERO_TARGETS
    }
    lines = []
    for row in rows:
        what = [row.variant, f"{row.notes.get('ranks', 1)} x {row.threads}"]
        if row.refused:
            lines.append([*what, f"refused: {row.refused}", *[""] * 8])
            continue
        cells = [*what, number(row.median_ms), number(row.tokens_per_s)]
        for family, target in ZERO_TARGETS.items():
            peer = best[family]
            ratio = row.speedup / peer if row.speedup and peer else None
            short = row.variant.startswith("fastpar") and ratio is not None and ratio < target
            cells.append(times(ratio) + f", short of {target}x" * short)
        notes = row.notes
        wire = notes.get("wire_bytes")
        live = notes.get("live_bytes")
        cells += [
            megabytes(row),
            "" if live is None else number(live / 1e6),
            number(notes.get("exposed_ms")),
            "" if wire is None else number(wire / 1e6),
        ]
        lines.append(cells)
    head = ["contender", "ranks x threads", "ms", "tokens/s"]
    head += [f"against {'the fastest ' * (f != 'DDP')}{f}" for f in ZERO_TARGETS]
    return table([*head, "peak MB", "live MB", "exposed ms", "wire MB"], lines)


def tp_rows(rows: Sequence[Row]) -> list[Row]:
    """Side by side, torch's first."""
    return sorted((r for r in rows if r.bench == "tp"), key=lambda r: (len(r.case), is_ours(r)))


def tp_table(rows: Sequence[Row]) -> str:
    """fastpar's tensor parallelism beside the fastest way of torch.

    Rates are compared by their speed-up over one way of torch, which took turns with all others.
    """
    lines = []
    for (case, _), group in by_case(tp_rows(rows)).items():
        best = max((r.speedup for r in group if not is_ours(r) and r.speedup), default=None)
        for row in group:
            what = [f"{case}: {row.variant}", f"{row.notes.get('ranks', 1)} x {row.threads}"]
            if row.refused:
                lines.append([*what, f"refused: {row.refused}", "", "", ""])
                continue
            ratio = row.speedup / best if row.speedup and best else None
            lost = ", loses" * (is_ours(row) and ratio is not None and ratio < 1)
            cells = [number(row.median_ms), number(row.tokens_per_s), times(ratio) + lost]
            lines.append([*what, *cells, megabytes(row)])
    head = ["training step", "ranks x threads", "ms", "tokens/s", "against the fastest DTensor"]
    return table([*head, "peak MB"], lines)


def ops_table(rows: Sequence[Row]) -> str:
    """fastpar beside eager and beside the fastest other variant; memory and host time where known.

    A row that is slower than the fastest other one says so.
    """
    rows = [r for r in rows if r.bench in OPS]
    with_peak = any(r.peak_bytes is not None for r in rows)
    with_host = any(r.host_us is not None for r in rows)
    extra = ["peak MB", "stock peak MB"] * with_peak + ["host us"] * with_host
    lines = []
    for (case, direction), group in by_case(rows).items():
        timed = [r for r in group if r.median_ms is not None]
        peers = [r for r in timed if not r.variant.startswith("fastpar")]
        best = min(peers, key=lambda r: r.median_ms or 0.0, default=None)
        base = next((r for r in peers if r.variant == r.baseline), None)
        for row in filter(is_ours, group):
            name = case if row.variant == "fastpar" else f"{case} ({row.variant})"
            cells = [f"{name}, {direction}"]
            cells.append(f"{number(base.median_ms)} ({base.variant})" if base else "")
            cells.append(f"{number(best.median_ms)} ({best.variant})" if best else "")
            if row.median_ms is None:
                lines.append([*cells, f"refused: {row.refused}", "", "", "", *([""] * len(extra))])
                continue
            against = best.median_ms / row.median_ms if best and best.median_ms else None
            lost = ", loses" if against is not None and against < 1 else ""
            cells += [number(row.median_ms), times(against) + lost, rate(row)]
            cells.append(f"{number(row.percent_of_ceiling)} %")
            if with_peak:
                cells += [megabytes(row), megabytes(base)]
            if with_host:
                cells.append(number(row.host_us))
            lines.append(cells)
    head = ["op", "stock ms", "fastest stock ms", "fastpar ms", "against fastest", "rate"]
    return table([*head, "of the ceiling", *extra], lines)


def targets_table(rows: Sequence[Row]) -> str:
    """Every target of every row: what it reached, and whether that is enough."""
    lines = []
    for (case, direction), group in by_case(rows).items():
        for row in group:
            for target in targets_of(row):
                cells = [f"{case}, {direction}", str(target)]
                reached = target.reached(row, group)
                if row.refused:
                    cells += [f"refused: {row.refused}", "no"]
                elif reached is None:
                    cells += ["nothing to compare with", "open"]
                else:
                    cells += [target.show(reached), "yes" if target.met(reached) else "**no**"]
                lines.append(cells)
    return table(["op", "target", "reached", "met"], lines)


def errors_table(rows: Sequence[ErrorRow]) -> str:
    """A line for each op, implementation and dtype: the worst ratios over shapes and results."""
    groups: dict[tuple[str, str, str], list[ErrorRow]] = {}
    for row in rows:
        interpreted = row.implementation == "triton" and row.device == "cpu"
        name = "triton, interpreted" if interpreted else row.implementation
        groups.setdefault((row.op, name, row.dtype), []).append(row)
    lines = []
    for (op, implementation, dtype), group in groups.items():
        ratios = [
            (worst, rms, f"{result}, {row.shape}")
            for row in group
            for result, (worst, rms) in row.ratios().items()
        ]
        cells = [op, implementation, dtype]
        if ratios:
            worst, _, where = max(ratios)
            cells += [f"{worst:.2f}x", where, f"{max(rms for _, rms, _ in ratios):.2f}x"]
        else:
            cells += ["", "", ""]
        held = sum(not row.fails for row in group)
        lines.append([*cells, f"{held} of {len(group)} shapes"])
    head = ["op", "implementation", "dtype", "largest error / PyTorch's, worst", "where"]
    return table([*head, "RMS error / PyTorch's, worst", "2x rule holds"], lines)


def summary(rows: Sequence[Row]) -> str:
    """For the console: a line for each case and direction with all its variants that took time."""
    rows, lines = [row for row in rows if row.refused or row.median_ms is not None], []
    if any(row.percent_of_ceiling is not None for row in rows):
        lines.append("%: of the rate of a plain copy or matrix product in the same process")
    for (case, direction), group in by_case(rows).items():
        cells = []
        for row in group:
            if row.refused:
                cells.append(f"{row.variant} refused")
                continue
            text = f"{row.variant} {number(row.median_ms)}"
            if row.percent_of_ceiling is not None:
                text += f" ({row.percent_of_ceiling:.0f} %)"
            if row.tokens_per_s is not None:
                text += f" ({row.tokens_per_s:.0f} tokens/s)"
            cells.append(text)
        short = {"forward": "fwd", "forward+backward": "fwd+bwd"}.get(direction, direction)
        lines.append(f"{case}, {short}, ms: {' | '.join(cells)}")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "train": train_table,
    "char": char_table,
    "zero": zero_table,
    "tp": tp_table,
    "ops": ops_table,
    "targets": targets_table,
    "overlap": overlap_table,
    "wires": wires_table,
    "ps": ps_table,
    "checkpoint": checkpoint_table,
    "plan": plan_table,
    "first_step": first_step_table,
    "pp": pp_table,
    "pp-link": pp_link_table,
    "offload": offload_table,
    "cp": partial(pp_table, of_bench="cp"),
}
