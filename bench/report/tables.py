"""Rows as Markdown: the columns of each table of a document, and a summary for the console."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.ops.errors import ErrorRow
from bench.records import Row
from bench.report.cells import OPS, by_case, is_ours, megabytes, number, rate, table, times
from bench.targets import targets_of

ZERO_TARGETS = {"DDP": 1.2, "FSDP2": 1.6, "DeepSpeed": 1.6}  # of every stage of fastpar
PLAN_LIMITS = {"peak memory": 0.05, "step time": 0.15}  # of a layout's error
Cell = Callable[[Row, Sequence[Row]], str]  # what a row says, beside the others of its table


def note(name: str, scale: float = 1.0, form: str = "") -> Cell:
    """A number of the row's notes in a format, else with three digits; empty without one."""

    def cell(row: Row, rows: Sequence[Row]) -> str:
        value = row.notes.get(name)
        if value is None:
            return ""
        return form.format(scale * value) if form else number(scale * value)

    return cell


def of(cell: Callable[[Row], str]) -> Cell:
    return lambda row, rows: cell(row)


def peers(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The rows of the same case and direction, this one too."""
    return [r for r in rows if (r.case, r.direction) == (row.case, row.direction)]


def against(family: str, target: float) -> Cell:
    """Over the fastest of a family, by speed-ups over DDP, which took turns with each of them."""

    def cell(row: Row, rows: Sequence[Row]) -> str:
        found = (r.speedup for r in rows if r.variant.startswith(family) and r.speedup)
        best = max(found, default=None)
        ratio = row.speedup / best if row.speedup and best else None
        short = row.variant.startswith("fastpar") and ratio is not None and ratio < target
        return times(ratio) + f", short of {target}x" * short

    return cell


def against_dtensor(row: Row, rows: Sequence[Row]) -> str:
    """By their speed-up over one way of torch, which took turns with all others."""
    found = (r.speedup for r in peers(row, rows) if not is_ours(r) and r.speedup)
    best = max(found, default=None)
    ratio = row.speedup / best if row.speedup and best else None
    return times(ratio) + ", loses" * (is_ours(row) and ratio is not None and ratio < 1)


def against_fsdp2(row: Row, rows: Sequence[Row]) -> str:
    fsdp2 = next((r.median_ms for r in peers(row, rows) if r.variant == "FSDP2"), None)
    return times(fsdp2 / row.median_ms if fsdp2 and row.median_ms else None)


def waited(row: Row, rows: Sequence[Row]) -> str:
    ms = row.notes.get("engine_exposed_ms")
    return "" if ms is None else f"{100 * ms / row.notes['comm_ms']:.0f} %"


def missed(row: Row, rows: Sequence[Row]) -> str:
    found = [(t, t.reached(row, peers(row, rows))) for t in targets_of(row)]
    short = [t for t, reached in found if reached is not None and not t.met(reached)]
    return "; ".join(f"not {target}" for target in short)


SPEEDUP = of(lambda row: times(row.speedup))
CONTENDER = of(lambda row: f"{row.case}: {row.variant}")
CELLS: dict[str, Cell] = {  # heading -> cell, in every table that says nothing else
    "case": of(lambda row: row.case),
    "variant": of(lambda row: row.variant),
    "case, variant": of(lambda row: f"{row.case}, {row.variant}"),
    "case: variant": CONTENDER,
    "ranks x threads": of(lambda row: f"{row.notes.get('ranks', 1)} x {row.threads}"),
    "ms": of(lambda row: number(row.median_ms)),
    "s": of(lambda row: number((row.median_ms or 0.0) / 1e3)),
    "tokens/s": of(lambda row: number(row.tokens_per_s or row.notes.get("tokens_per_s"))),
    "rate": of(lambda row: rate(row) if row.gb_per_s or row.tflop_per_s else ""),
    "peak MB": of(megabytes),
    "extra MB": of(megabytes),
    "live MB": note("live_bytes", 1e-6),
    "wire MB": note("wire_bytes", 1e-6),
    "MB sent": note("sent_bytes", 1e-6),
    "MB sent by the busiest": note("sent_bytes", 1e-6),
    "MB sent a step": note("sent_mb"),
    "by a worker": note("worker_bytes", 1e-6),
    "communication ms": note("comm_ms"),
    "exposed ms": note("exposed_ms"),
    "exposed, of communication": note("exposed_percent", form="{:.0f} %"),
    "waited, of communication": waited,
    "speed-up": SPEEDUP,
    "speed-up of a step": SPEEDUP,
    "against the case's first": SPEEDUP,
    "against torch.compile": SPEEDUP,
    "speed-up over": of(lambda row: f"{times(row.speedup)} {row.baseline}" * bool(row.baseline)),
    "memory": of(lambda row: times(row.notes.get("memory_ratio"))),
    "time": of(lambda row: times(row.notes.get("time_ratio"))),
    "seconds": note("total_s"),
    "validation loss": note("val_loss", form="{:.4f}"),
    "largest loss difference in 200 steps": note("max_loss_difference", form="{:.1e}"),
    "loss differs by": note("loss_difference", form="{:.0e}"),
    "bits a byte": note("bits_per_byte", form="{:.3f}"),
    "staleness": note("staleness", form="{:.1f}"),
    "import": note("import_s"),
    "build": note("build_s"),
    "first step": note("first_step_s"),
    "second step": note("second_step_s"),
    "against the fastest DTensor": against_dtensor,
    "target missed": missed,
    **{
        f"against {'the fastest ' * (family != 'DDP')}{family}": against(family, target)
        for family, target in ZERO_TARGETS.items()
    },
}


def zero_rows(rows: Sequence[Row]) -> list[Row]:
    """One process, DDP, FSDP2, DeepSpeed, fastpar, fastpar's engine on the stock model."""
    families = ("one process", "DDP", "FSDP2", "DeepSpeed", "fastpar")

    def place(row: Row) -> tuple[int, bool, str]:
        family = next((i for i, f in enumerate(families) if row.variant.startswith(f)), -1)
        return family, row.variant.endswith("stock model"), row.variant

    return sorted((row for row in rows if row.bench == "zero"), key=place)


def tp_rows(rows: Sequence[Row]) -> list[Row]:
    """Side by side, torch's first."""
    return sorted((r for r in rows if r.bench == "tp"), key=lambda r: (len(r.case), is_ours(r)))


def grouped(rows: Sequence[Row]) -> list[Row]:
    return [row for group in by_case(rows).values() for row in group]


def by_cases(bench: str) -> Callable[[Sequence[Row]], list[Row]]:
    """The rows of a bench, those of a case together."""
    return lambda rows: grouped([r for r in rows if r.bench == bench])


def only(
    bench: str, keep: Callable[[Row], bool] = lambda row: True
) -> Callable[[Sequence[Row]], list[Row]]:
    return lambda rows: [row for row in rows if row.bench == bench and keep(row)]


def spec(
    choose: Callable[[Sequence[Row]], Sequence[Row]],
    names: str,
    values: str,
    own: Mapping[str, Cell] | None = None,
) -> Callable[[Sequence[Row]], str]:
    """A table: its rows, the headings of what names a row, and those of what it says.

    A heading "text = case" shows CELLS["case"] under another text; own: cells of this table alone.
    """
    headings = [h.partition(" = ") for h in f"{names} | {values}".split(" | ")]
    cells = [{**CELLS, **(own or {})}[key or text] for text, _, key in headings]
    count = names.count(" | ") + 1

    def make(every: Sequence[Row]) -> str:
        rows, lines = choose(every), []
        for row in rows:
            line = [cell(row, rows) for cell in (cells[:count] if row.refused else cells)]
            line += [f"refused: {row.refused}"] * bool(row.refused)
            lines.append(line + [""] * (len(cells) - len(line)))
        return table([text for text, _, _ in headings], lines)

    return make


PP = "case: contender = case: variant | ranks x threads"
PP_SAYS = "ms | tokens/s | against the case's first | peak MB | loss differs by | MB sent a step"


def pp_link_table(rows: Sequence[Row], base: str = "fastpar ZeRO-0") -> str:
    """Steps behind a link by their tokens: milliseconds, and how much faster than dp in turn."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in only("pp")(rows):
        shape = re.search(r"T=(\d+) B=(\d+), .* Mbit/s", row.case)
        if shape and row.median_ms:
            n_rows, length = int(shape[2]), int(shape[1])
            faster = f" ({times(row.speedup)})" if row.baseline == base != row.variant else ""
            of_tokens = found.setdefault((n_rows * length, n_rows), {})
            of_tokens[row.variant] = f"{number(row.median_ms)}{faster}"
    names = sorted({name for each in found.values() for name in each}, key=lambda n: (n != base, n))
    lines = [
        [f"{tokens} in {n_rows} rows", *(each.get(name, "") for name in names)]
        for (tokens, n_rows), each in sorted(found.items())
    ]
    return table(["tokens a step", *names], lines)


def plan_table(rows: Sequence[Row]) -> str:
    """Errors of memory and step time, of all layouts and of those of each number of ranks."""
    own = [row for row in only("plan")(rows) if row.median_ms is not None]
    ranks = sorted({row.notes["ranks"] for row in own})
    lines = []
    for kind, limit in PLAN_LIMITS.items():
        for n in (None, *ranks) if len(ranks) > 1 else (None,) * bool(own):
            errors = [_error(kind, row) for row in own if n in (None, row.notes["ranks"])]
            sizes = sorted(map(abs, errors))
            ninth = sizes[-(-9 * len(sizes) // 10) - 1]  # nine tenths are no larger
            which = "all layouts" if n is None else f"{n} rank{'s' * (n > 1)}"
            within = sum(size <= limit for size in sizes)
            spread = [f"{value:.1%}" for value in (statistics.median(sizes), ninth, sizes[-1])]
            bias = f"{statistics.median(errors):+.1%}"
            target = f"{within} of {len(sizes)} within {limit:.0%}"
            lines.append([f"{kind}, {which}", str(len(sizes)), *spread, bias, target])
    head = ["predicted against measured", "layouts", "median error", "nine tenths within"]
    text = table([*head, "worst", "bias", "target"], lines)
    busy = sorted({row.notes["busy"] for row in own if row.notes.get("busy")})
    return text + (f"\n\nMeasured on a busy machine ({'; '.join(busy)})." if busy else "")


def _error(kind: str, row: Row) -> float:
    if kind == "peak memory":
        return row.notes["predicted_bytes"] / (row.peak_bytes or 1) - 1
    return row.notes["predicted_ms"] / (row.median_ms or 1.0) - 1


def _base(row: Row, rows: Sequence[Row]) -> Row | None:
    return next((r for r in _stock(row, rows) if r.variant == r.baseline), None)


def _best(row: Row, rows: Sequence[Row]) -> Row | None:
    return min(_stock(row, rows), key=lambda r: r.median_ms or 0.0, default=None)


def _stock(row: Row, rows: Sequence[Row]) -> list[Row]:
    timed = [r for r in peers(row, rows) if r.median_ms is not None]
    return [r for r in timed if not r.variant.startswith("fastpar")]


def ops_table(rows: Sequence[Row]) -> str:
    """fastpar beside eager and beside the fastest other variant; memory and host time where known.

    A row that is slower than the fastest other one says so.
    """
    every = [r for r in rows if r.bench in OPS]
    own = list(filter(is_ours, grouped(every)))

    def shown(find: Callable[[Row, Sequence[Row]], Row | None]) -> Cell:
        def cell(row: Row, _: Sequence[Row]) -> str:
            peer = find(row, every)
            return f"{number(peer.median_ms)} ({peer.variant})" if peer else ""

        return cell

    def fastest(row: Row, _: Sequence[Row]) -> str:
        best = _best(row, every)
        ratio = (
            best.median_ms / row.median_ms if best and best.median_ms and row.median_ms else None
        )
        return times(ratio) + ", loses" * (ratio is not None and ratio < 1)

    def name(row: Row) -> str:
        aside = "" if row.variant == "fastpar" else f" ({row.variant})"
        return f"{row.case}{aside}, {row.direction}"

    values = "fastpar ms = ms | against fastest | rate | of the ceiling"
    values += " | peak MB | stock peak MB" * any(r.peak_bytes is not None for r in every)
    values += " | host us" * any(r.host_us is not None for r in every)
    cells = {
        "op": of(name),
        "stock ms": shown(_base),
        "fastest stock ms": shown(_best),
        "against fastest": fastest,
        "rate": of(rate),
        "of the ceiling": of(lambda row: f"{number(row.percent_of_ceiling)} %"),
        "stock peak MB": of(lambda row: megabytes(_base(row, every))),
        "host us": of(lambda row: number(row.host_us)),
    }
    return spec(lambda rows: own, "op | stock ms | fastest stock ms", values, cells)(rows)


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
    for names, group in groups.items():
        ratios = [
            (worst, rms, f"{result}, {row.shape}")
            for row in group
            for result, (worst, rms) in row.ratios().items()
        ]
        cells = ["", "", ""]
        if ratios:
            worst, _, where = max(ratios)
            cells = [f"{worst:.2f}x", where, f"{max(rms for _, rms, _ in ratios):.2f}x"]
        held = sum(not row.fails for row in group)
        lines.append([*names, *cells, f"{held} of {len(group)} shapes"])
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
    "train": spec(
        only("train", lambda row: not row.case.startswith("char")),
        "training step = case | variant | ranks x threads",
        "ms | tokens/s | speed-up | peak MB | memory",
    ),
    "char": spec(
        only("train", lambda row: row.case.startswith("char")),
        "run = case | variant",
        "seconds | ms a step = ms | speed-up of a step | time | validation loss"
        " | largest loss difference in 200 steps",
    ),
    "zero": spec(
        zero_rows,
        "contender = variant | ranks x threads",
        "ms | tokens/s | against DDP | against the fastest FSDP2 | against the fastest DeepSpeed"
        " | peak MB | live MB | exposed ms | wire MB",
    ),
    "tp": spec(
        lambda rows: grouped(tp_rows(rows)),
        "training step = case: variant | ranks x threads",
        "ms | tokens/s | against the fastest DTensor | peak MB",
    ),
    "ops": ops_table,
    "targets": targets_table,
    "overlap": spec(
        by_cases("overlap"),
        "step on a limited link = case, variant",
        "ms | MB sent | communication ms | exposed ms | exposed, of communication"
        " | waited, of communication | against DDP | against FSDP2",
        {"against DDP": SPEEDUP, "against FSDP2": against_fsdp2},
    ),
    "wires": spec(
        only("wires"),
        "step on a slow link = case, variant",
        "ms | tokens/s | MB sent | exposed ms | against FSDP2",
        {"against FSDP2": SPEEDUP},
    ),
    "ps": spec(
        only("ps"),
        "step = case: variant",
        "ms | tokens/s | MB sent by the busiest | by a worker | staleness | bits a byte",
    ),
    "checkpoint": spec(
        by_cases("checkpoint"),
        "checkpoint | variant",
        "ms | rate | speed-up over | extra MB | target missed",
        {"checkpoint": of(lambda row: f"{row.case}: {row.direction}")},
    ),
    "plan": plan_table,
    "first_step": spec(
        only("first_step"),
        "until the first step is done",
        "s | import | build | first step | second step | against torch.compile",
        {
            "until the first step is done": of(
                lambda row: f"{row.case.removeprefix('first_step ')}: {row.variant}"
            )
        },
    ),
    "pp": spec(only("pp"), PP, PP_SAYS),
    "cp": spec(only("cp"), PP, PP_SAYS),
    "pp-link": pp_link_table,
    "offload": spec(
        only("offload"),
        "case: contender = case: variant",
        "ms | tokens/s | against the case's first | exposed ms",
    ),
}
