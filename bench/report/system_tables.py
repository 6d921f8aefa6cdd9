"""Tables of rows about systems: links, nodes, pipelines, the bus to the host, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.records import Row
from bench.report.cells import by_case, megabytes, number, rate, table, times
from bench.targets import targets_of


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


def ps_table(rows: Sequence[Row]) -> str:
    """Parameter servers beside all-reduce."""
    lines = []
    for row in (r for r in rows if r.bench == "ps"):
        what, found = f"{row.case}: {row.variant}", row.notes
        if row.median_ms is None:
            lines.append([what, f"refused: {row.refused}", *[""] * 5])
            continue
        sent = [number(found[name] / 1e6) for name in ("sent_bytes", "worker_bytes")]
        late = f"{found['staleness']:.1f}" if "staleness" in found else ""
        loss = f"{found['bits_per_byte']:.3f}"
        lines.append(
            [what, number(row.median_ms), number(found["tokens_per_s"]), *sent, late, loss]
        )
    head = ["step", "ms", "tokens/s", "MB sent by the busiest", "by a worker", "staleness"]
    return table([*head, "bits a byte"], lines)


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


def pp_link_table(rows: Sequence[Row], base: str = "fastpar ZeRO-0") -> str:
    """Steps behind a link by their tokens: milliseconds, and how much faster than dp in turn."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in rows:
        shape = re.search(r"T=(\d+) B=(\d+), .* Mbit/s", row.case)
        if row.bench == "pp" and shape and row.median_ms:
            n_rows, length = int(shape[2]), int(shape[1])
            faster = f" ({times(row.speedup)})" if row.baseline == base != row.variant else ""
            found.setdefault((n_rows * length, n_rows), {})[row.variant] = (
                f"{number(row.median_ms)}{faster}"
            )
    names = sorted({name for each in found.values() for name in each}, key=lambda n: (n != base, n))
    lines = [
        [f"{tokens} in {n_rows} rows", *(each.get(name, "") for name in names)]
        for (tokens, n_rows), each in sorted(found.items())
    ]
    return table(["tokens a step", *names], lines)


def checkpoint_table(rows: Sequence[Row]) -> str:
    """Every contender of every direction; a fastpar row that misses a target says so."""
    lines = []
    for (case, direction), group in by_case([r for r in rows if r.bench == "checkpoint"]).items():
        for row in group:
            what = [f"{case}: {direction}", row.variant]
            if row.median_ms is None:
                lines.append([*what, f"refused: {row.refused}", "", "", "", ""])
                continue
            found = [(t, t.reached(row, group)) for t in targets_of(row)]
            short = [str(t) for t, reached in found if reached is not None and not t.met(reached)]
            against = f"{times(row.speedup)} {row.baseline}" if row.baseline else ""
            lines.append(
                [
                    *what,
                    number(row.median_ms),
                    rate(row) if row.gb_per_s else "",
                    against,
                    megabytes(row),
                    "; ".join(f"not {text}" for text in short),
                ]
            )
    head = ["checkpoint", "variant", "ms", "rate", "speed-up over", "extra MB", "target missed"]
    return table(head, lines)


def first_step_table(rows: Sequence[Row]) -> str:
    """Seconds to the end of a first step, and their parts."""
    parts = ("import_s", "build_s", "first_step_s", "second_step_s")
    lines = []
    for row in (row for row in rows if row.bench == "first_step"):
        what = f"{row.case.removeprefix('first_step ')}: {row.variant}"
        if row.median_ms is None:
            lines.append([what, f"refused: {row.refused}", *[""] * (len(parts) + 1)])
            continue
        cells = [number(row.notes[part]) if part in row.notes else "" for part in parts]
        lines.append([what, number(row.median_ms / 1e3), *cells, times(row.speedup)])
    head = ["until the first step is done", "s", "import", "build", "first step", "second step"]
    return table([*head, "against torch.compile"], lines)
