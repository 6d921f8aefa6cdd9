"""Rows as Markdown: one function for each table of a document, and a summary for the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bench.ops.errors import ErrorRow
from bench.records import Row
from bench.report.checkpoint_table import checkpoint_table
from bench.report.link_table import pp_link_table
from bench.report.plan_table import plan_table
from bench.targets import targets_of

ASIDE = "fastpar without dropout"  # what a row with dropout is compared with: no result by itself
NOT_OPS = {
    "train",
    "ceilings",
    "build",
    "zero",
    "tp",
    "emulated",
    "overlap",
    "checkpoint",
    "plan",
    "nodes",
    "bubble",
    "first_step",
    "offload",
    "cp",
    "pp",
    "wires",
}
ZERO_TARGETS = {"DDP": 1.2, "FSDP2": 1.6, "DeepSpeed": 1.6}  # of every stage of fastpar


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, plain notation."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


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
    """Side by side, torch's first; not those behind emulated links."""
    own = [r for r in rows if r.bench == "tp" and not r.notes.get("emulated")]
    return sorted(own, key=lambda r: (len(r.case), is_ours(r)))


def tp_table(rows: Sequence[Row]) -> str:
    """fastpar's tensor parallelism beside the fastest way of torch; or one rank behind links.

    Rates are compared by their speed-up over one way of torch, which took turns with all others.
    """
    if not tp_rows(rows):
        return emulated_table(rows, "tp")
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


def overlap_table(rows: Sequence[Row]) -> str:
    """Step time on the rate-limited link, and how much of the communication shows in it."""
    lines = []
    for (case, _), group in by_case([r for r in rows if r.bench == "overlap"]).items():
        medians = {row.variant: row.median_ms for row in group}
        for row in group:
            what = f"{case}, {row.variant}"
            if row.median_ms is None:
                lines.append([what, f"refused: {row.refused}", *[""] * 7])
                continue
            notes, fsdp2 = row.notes, medians.get("FSDP2")
            percent, waited = notes.get("exposed_percent"), notes.get("engine_exposed_ms")
            lines.append(
                [
                    what,
                    number(row.median_ms),
                    number(notes["sent_bytes"] / 1e6),
                    number(notes.get("comm_ms")),
                    number(notes.get("exposed_ms")),
                    "" if percent is None else f"{percent:.0f} %",
                    "" if waited is None else f"{100 * waited / notes['comm_ms']:.0f} %",
                    times(row.speedup),
                    times(fsdp2 and fsdp2 / row.median_ms),
                ]
            )
    head = ["step on a limited link", "ms", "MB sent", "communication ms", "exposed ms"]
    head += ["exposed, of communication", "waited, of communication"]
    return table([*head, "against DDP", "against FSDP2"], lines)


def wires_table(rows: Sequence[Row]) -> str:
    """Formats on the wire, on slow links."""
    lines = []
    for row in (r for r in rows if r.bench == "wires"):
        what, found = f"{row.case}, {row.variant}", row.notes
        if row.median_ms is None:
            lines.append([what, f"refused: {row.refused}", *[""] * 4])
            continue
        sent = number(found["sent_bytes"] / 1e6) if "sent_bytes" in found else ""
        cells = [number(row.median_ms), number(found["tokens_per_s"]), sent]
        lines.append([what, *cells, number(found.get("exposed_ms")), times(row.speedup)])
    return table(
        ["step on a slow link", "ms", "tokens/s", "MB sent", "exposed ms", "against FSDP2"], lines
    )


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(case, direction) -> its variants."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.direction), []).append(row)
    return groups


def is_ours(row: Row) -> bool:
    return row.variant.startswith("fastpar") and row.variant != ASIDE


def rate(row: Row) -> str:
    if row.tflop_per_s:
        return f"{number(row.tflop_per_s)} TFLOP/s"
    return f"{number(row.gb_per_s)} GB/s"


def ops_table(rows: Sequence[Row]) -> str:
    """fastpar beside eager and beside the fastest other variant; memory and host time where known.

    A row that is slower than the fastest other one says so.
    """
    rows = [r for r in rows if r.bench not in NOT_OPS]
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


def megabytes(row: Row | None) -> str:
    return "" if row is None or row.peak_bytes is None else number(row.peak_bytes / 1e6)


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


def ceilings_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.bench == "ceilings" and row.median_ms is not None:
            lines.append([row.case, row.dtype, number(row.median_ms), rate(row)])
    return table(["ceiling", "dtype", "ms", "rate"], lines)


def emulated_table(rows: Sequence[Row], bench: str = "emulated") -> str:
    """Steps behind emulated links: what communication takes, and what of it a step waits for."""
    lines = []
    for (case, _), group in by_case([r for r in rows if r.bench == bench]).items():
        base = next((r.median_ms for r in group if r.variant == r.baseline), None)
        for row in group:
            if row.refused:
                lines.append([case, row.variant, f"refused: {row.refused}", "", "", "", "", "", ""])
            elif row.variant != row.baseline:
                notes = row.notes
                lines.append(
                    [
                        case,
                        row.variant,
                        number(row.median_ms),
                        number(base),
                        number(notes["comm_ms"]),
                        number(notes["exposed_ms"]),
                        f"{100 * notes['exposed']:.0f} %",
                        number(notes["wire_mb"]),
                        number(notes.get("nic_mb")),
                    ]
                )
    head = ["one rank of many", "link", "step ms", "without link", "communication ms"]
    return table(
        [*head, "exposed ms", "exposed, of communication", "MB sent", "MB through each NIC"], lines
    )


def nodes_table(rows: Sequence[Row]) -> str:
    """Bytes through each adapter of 8 nodes of 8 ranks, counted and planned; then planned steps."""
    own = [row for row in rows if row.bench == "nodes"]
    lines = []
    for row in (row for row in own if row.direction == "bytes"):
        notes = row.notes
        if row.refused:
            lines.append([row.case, row.variant, f"refused: {row.refused}", "", "", ""])
            continue
        cells = [number(notes[name], 4) for name in ("nic_mb", "planned_mb")]
        part = f"{notes['nic_mb'] / notes['tensor_mb']:.3f}"
        lines.append([row.case, row.variant, *cells, part, number(notes["planned_ms"])])
    size = next((f"{row.notes['tensor_mb']:.2f} MB" for row in own if "tensor_mb" in row.notes), "")
    head = [f"reduce-scatter of {size}", "as", "counted MB through each NIC", "planned MB"]
    text = table([*head, "of the tensor", "planned ms"], lines)
    steps = [
        [
            f"{row.case}, {row.variant}",
            row.notes["layout"],
            *(number(row.notes[name]) for name in ("nic_mb", "exposed_ms", "planned_ms")),
        ]
        for row in own
        if row.direction == "step"
    ]
    head = ["64 x h100, links", "planned layout", "MB through each NIC", "exposed ms", "step ms"]
    return f"{text}\n\n{table(head, steps)}"


def bubble_table(rows: Sequence[Row]) -> str:
    """The part of all ranks' time in which they wait, by schedule: measured and simulated."""
    lines = []
    for row in (row for row in rows if row.bench == "bubble" and not row.refused):
        notes = row.notes
        parts = [f"{100 * notes[name]:.1f} %" for name in ("bubble", "simulated")]
        times_ms = [number(notes[name], 4) for name in ("step_ms", "simulated_ms")]
        lines.append(
            [f"{row.case}, {row.variant}", *parts, times(notes["of_simulated"]), *times_ms]
        )
    head = ["four processes that sleep", "waiting", "simulated", "ratio", "step ms", "simulated ms"]
    return table(head, lines)


def offload_table(rows: Sequence[Row]) -> str:
    """What a step waits for the host, measured and by the formula; steps beside DeepSpeed's."""
    grid, lines = [], []
    for row in (row for row in rows if row.bench == "offload"):
        notes = row.notes
        if row.variant == "exposed":
            grid.append([row.case, *(number(notes[n]) for n in ("exposed_ms", "formula_ms"))])
        elif row.refused:
            lines.append([f"{row.case}: {row.variant}", f"refused: {row.refused}", "", "", ""])
        else:
            cells = [number(row.median_ms), number(row.tokens_per_s), times(row.speedup)]
            waits = notes.get("exposed_ms")
            cells.append("" if waits is None else number(waits))
            lines.append([f"{row.case}: {row.variant}", *cells])
    first = table(["a rank that sleeps", "exposed ms", "formula ms"], grid)
    head = ["case: contender", "ms", "tokens/s", "against the case's first", "exposed ms"]
    return f"{first}\n\n{table(head, lines)}"


def pp_table(rows: Sequence[Row], of_bench: str = "pp") -> str:
    """Pipelines of others beside fastpar's, and other ways to split the same step."""
    lines = []
    for row in (row for row in rows if row.bench == of_bench):
        what = [f"{row.case}: {row.variant}", f"{row.notes.get('ranks', 1)} x {row.threads}"]
        if row.refused:
            lines.append([*what, f"refused: {row.refused}", *[""] * 5])
            continue
        apart, sent = row.notes.get("loss_difference"), row.notes.get("sent_mb")
        cells = [number(row.median_ms), number(row.tokens_per_s), times(row.speedup)]
        cells += [megabytes(row), "" if apart is None else f"{apart:.0e}", number(sent)]
        lines.append([*what, *cells])
    head = ["case: contender", "ranks x threads", "ms", "tokens/s", "against the case's first"]
    return table([*head, "peak MB", "loss differs by", "MB sent a step"], lines)


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
    "ceilings": ceilings_table,
    "emulated": emulated_table,
    "targets": targets_table,
    "overlap": overlap_table,
    "wires": wires_table,
    "checkpoint": checkpoint_table,
    "plan": plan_table,
    "nodes": nodes_table,
    "bubble": bubble_table,
    "pp": pp_table,
    "pp-link": lambda rows: pp_link_table(rows, table, number, times),
    "offload": offload_table,
    "cp": partial(pp_table, of_bench="cp"),
}
