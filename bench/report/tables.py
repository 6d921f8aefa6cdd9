"""Tables of results: their rows, columns and number formats.

A table is data: spec() takes the choice of rows and the headings of the columns; each heading names
a cell in CELLS. render() writes the table and the machine under it. The commit stands under the
table, or in a last column if rows are of several commits.
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.records import Row, homes, load, machine_line, slug

OPS = {"shm"} | {name for name, module in homes().items() if module.startswith("bench.ops.")}
ASIDE = "fastpar without dropout"  # the baseline of rows with dropout: no result by itself
PLAN_LIMIT = 0.05  # of the error of a layout's memory
Cell = Callable[[Row, Sequence[Row]], str]  # the text for a row, given all rows of its table


class NoResultsError(ValueError):
    """There is no result file of a device, or no row for a table."""


class Line(NamedTuple):
    cells: Sequence[str]
    rows: Sequence[Any]  # the source of the cells: records, or lines of a rows.jsonl


class Table(NamedTuple):
    head: Sequence[str]
    lines: Sequence[Line]
    after: str = ""  # a sentence under it


def machines_of(device: str, folder: Path) -> list[tuple[dict[str, Any], list[Row]]]:
    """Every machine with results of this device, newest first, and its newest row of every key."""
    files = [load(path) for path in sorted(folder.glob("*.json"))]
    files = [(about, rows) for about, rows in files if about["device"] == device]
    if not files:
        how = "make gpu" if device == "cuda" else "python -m bench --commit-results"
        raise NoResultsError(
            f"machines_of: expected results of device {device}, got none in {folder.name}; "
            f"run `{how}` first"
        )
    files.sort(key=lambda file: file[0]["date"])
    found: dict[str, tuple[dict[str, Any], dict[str, Row]]] = {}
    for about, rows in files:
        before = found.pop(slug(about), (about, {}))[1]
        found[slug(about)] = (about, before | {row.key: row for row in rows})
    return [(about, list(rows.values())) for about, rows in reversed(found.values())]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def commit_of(row: Any) -> str:
    found = row if isinstance(row, dict) else vars(row)
    return found["commit"][:12] + " + changes" * found["dirty"]


def origin(about: dict[str, Any], rows: Sequence[Any], several: str = "") -> str:
    """The machine, commit and days of these rows; several: the text for more than one commit."""
    commits = dict.fromkeys(map(commit_of, rows))
    dates = sorted({r["machine"]["date"] if isinstance(r, dict) else r.date for r in rows})
    commit = several if several and len(commits) > 1 else ", ".join(commits)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return machine_line({**about, "commit": commit, "dirty": False, "date": days})


def render(table: Table, about: dict[str, Any]) -> str:
    """The table as Markdown, and the machine; see the top of this file."""
    rows = [row for line in table.lines for row in line.rows]
    head, lines = list(table.head), [list(line.cells) for line in table.lines]
    if len(set(map(commit_of, rows))) > 1:
        head.append("commit")
        for cells, line in zip(lines, table.lines):
            cells.append(", ".join(dict.fromkeys(map(commit_of, line.rows))))
    after = f"\n\n{table.after}" if table.after else ""
    return f"{markdown(head, lines)}{after}\n\n{origin(about, rows, 'of each row')}.\n"


# Numbers


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, plain notation."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def rate(row: Row) -> str:
    if row.tflop_per_s:
        return f"{number(row.tflop_per_s)} TFLOP/s"
    return f"{number(row.gb_per_s)} GB/s" if row.gb_per_s else ""


def megabytes(row: Row | None) -> str:
    return "" if row is None or row.peak_bytes is None else number(row.peak_bytes / 1e6)


# Rows


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(case, direction) -> its variants."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.direction), []).append(row)
    return groups


def grouped(rows: Sequence[Row]) -> list[Row]:
    return [row for group in by_case(rows).values() for row in group]


def is_ours(row: Row) -> bool:
    return row.variant.startswith("fastpar") and row.variant != ASIDE


def peers(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The rows of the same case and direction, this one too."""
    return [r for r in rows if (r.case, r.direction) == (row.case, row.direction)]


def only(
    bench: str, keep: Callable[[Row], bool] = lambda row: True, *, together: bool = False
) -> Callable[[Sequence[Row]], list[Row]]:
    """The rows of a bench; together: those of a case are neighbours."""
    order = grouped if together else list
    return lambda rows: order([row for row in rows if row.bench == bench and keep(row)])


def tp_rows(rows: Sequence[Row]) -> list[Row]:
    """Side by side, torch's first."""
    return grouped(sorted(only("tp")(rows), key=lambda r: (len(r.case), is_ours(r))))


# Cells


def note(name: str, scale: float = 1.0, form: str = "") -> Cell:
    """A number of the row's notes, with three digits unless form is given; empty if missing."""

    def cell(row: Row, rows: Sequence[Row]) -> str:
        value = row.notes.get(name)
        if value is None:
            return ""
        return form.format(scale * value) if form else number(scale * value)

    return cell


def of(cell: Callable[[Row], str]) -> Cell:
    return lambda row, rows: cell(row)


def turns(row: Row) -> str:
    """The baseline of the row's speed-up: its median in the same turns, and its name."""
    return "" if row.baseline == row.variant else f"{number(row.baseline_ms)}, {row.baseline}"


def beside(variant: str) -> Cell:
    """The speed-up over this variant of the same case."""

    def cell(row: Row, rows: Sequence[Row]) -> str:
        ms = next((r.median_ms for r in peers(row, rows) if r.variant == variant), None)
        ratio = ms / row.median_ms if ms and row.median_ms else None
        return times(ratio) + ", slower" * (is_ours(row) and (ratio or 1.0) < 0.995)

    return cell


def waited(row: Row, rows: Sequence[Row]) -> str:
    ms = row.notes.get("engine_exposed_ms")
    return "" if ms is None else f"{100 * ms / row.notes['comm_ms']:.0f} %"


def speedup(row: Row) -> str:
    """The speed-up over the baseline; a fastpar row that is slower than a peer says so."""
    is_slower = is_ours(row) and not (row.baseline or "").startswith("fastpar")
    return row.times + ", slower" * (is_slower and (row.speedup or 1.0) < 0.995)


CELLS: dict[str, Cell] = {  # heading -> cell, unless a table has its own
    "case": of(lambda row: row.case), "variant": of(lambda row: row.variant),
    "case, variant": of(lambda row: f"{row.case}, {row.variant}"),
    "case: variant": of(lambda row: f"{row.case}: {row.variant}"),
    "case: direction": of(lambda row: f"{row.case}: {row.direction}"),
    "ranks x threads": of(lambda row: f"{row.notes.get('ranks', 1)} x {row.threads}"),
    "ms": of(lambda row: number(row.median_ms)),
    "tokens/s": of(lambda row: number(row.tokens_per_s)), "rate": of(rate),
    "of the ceiling": of(lambda row: f"{number(row.percent_of_ceiling)} %"),
    "host us": of(lambda row: number(row.host_us)),
    "host ms": of(lambda row: number(row.host_us and row.host_us / 1e3)),
    "compile s": of(lambda row: number(row.compile_s)), "peak MB": of(megabytes),
    "live MB": note("live_bytes", 1e-6), "wire MB": note("wire_bytes", 1e-6),
    "MB sent": note("sent_bytes", 1e-6), "MB sent a step": note("sent_mb"),
    "communication ms": note("comm_ms"), "exposed ms": note("exposed_ms"),
    "exposed, of communication": note("exposed_percent", form="{:.0f} %"),
    "waited, of communication": waited, "speed-up": of(speedup),
    "took turns with, ms": of(lambda row: turns(row) if row.baseline else ""),
    "speed-up over": of(lambda row: f"{speedup(row)} {row.baseline}" * bool(row.baseline)),
    "memory": of(lambda row: times(row.notes.get("memory_ratio"))),
    "loss differs by": note("loss_difference", form="{:.0e}"), "over FSDP2": beside("FSDP2"),
    "over torch DCP": beside("torch DCP"),
}  # fmt: skip


def spec(
    choose: Callable[[Sequence[Row]], Sequence[Row]], names: str, values: str,
    own: Mapping[str, Cell] | None = None,
    also: Callable[[Row], Sequence[Row | None]] = lambda row: (),
) -> Callable[[Sequence[Row]], Table]:  # fmt: skip
    """A table: its rows, the headings that name a row, and the headings of its values. A heading
    "text = case" shows CELLS["case"] under another text; own: cells of this table only; also: other
    rows that a line is made of. Columns that no row fills are left out."""
    headings = [h.partition(" = ") for h in f"{names} | {values}".split(" | ")]
    cells = [{**CELLS, **(own or {})}[key or text] for text, _, key in headings]
    count = names.count(" | ") + 1

    def make(every: Sequence[Row]) -> Table:
        rows, lines = choose(every), []
        for row in rows:
            line = [cell(row, rows) for cell in (cells[:count] if row.refused else cells)]
            line += [f"refused: {row.refused}"] * bool(row.refused)
            others = [r for r in also(row) if r is not None]
            lines.append(Line(line + [""] * (len(cells) - len(line)), [row, *others]))
        full = [i for i in range(len(cells)) if any(line.cells[i] for line in lines)]
        lines = [Line([cells[i] for i in full], rows) for cells, rows in lines]
        return Table([headings[i][0] for i in full], lines)

    return make


def plan_table(rows: Sequence[Row]) -> Table:
    """Errors of predicted memory, of all layouts and of those of each number of ranks."""
    own = [row for row in only("plan")(rows) if row.peak_bytes is not None]
    ranks = sorted({row.notes["ranks"] for row in own})
    lines = []
    for n in (None, *ranks) if len(ranks) > 1 else (None,) * bool(own):
        some = [row for row in own if n in (None, row.notes["ranks"])]
        errors = [r.notes["predicted_bytes"] / (r.peak_bytes or 1) - 1 for r in some]
        sizes = sorted(map(abs, errors))
        ninth = sizes[-(-9 * len(sizes) // 10) - 1]  # nine tenths are at most this
        which = "all layouts" if n is None else f"{n} rank{'s' * (n > 1)}"
        within = sum(size <= PLAN_LIMIT for size in sizes)
        spread = [f"{value:.1%}" for value in (statistics.median(sizes), ninth, sizes[-1])]
        bias = f"{statistics.median(errors):+.1%}"
        target = f"{within} of {len(sizes)} within {PLAN_LIMIT:.0%}"
        cells = [f"peak memory, {which}", str(len(sizes)), *spread, bias, target]
        lines.append(Line(cells, some))
    head = ["predicted against measured", "layouts", "median error", "nine tenths within"]
    return Table([*head, "worst", "bias", "target"], lines)


def ops_table(rows: Sequence[Row]) -> Table:
    """fastpar beside eager and the fastest other variant, with memory and host time if known. A row
    that is slower than the fastest other one says so."""
    every = [r for r in rows if r.bench in OPS]
    own = list(filter(is_ours, grouped(every)))

    def stock(row: Row) -> list[Row]:
        timed = [r for r in peers(row, every) if r.median_ms is not None]
        return [r for r in timed if not r.variant.startswith("fastpar")]

    def base(row: Row) -> Row | None:
        return next((r for r in stock(row) if r.variant == r.baseline), None)

    def best(row: Row) -> Row | None:
        return min(stock(row), key=lambda r: r.median_ms or 0.0, default=None)

    def shown(peer: Row | None) -> str:
        return f"{number(peer.median_ms)} ({peer.variant})" if peer else ""

    def fastest(row: Row) -> str:
        other = best(row)
        ratio = other.median_ms / row.median_ms if other and row.median_ms else None  # type: ignore[operator]
        return times(ratio) + ", loses" * (ratio is not None and ratio < 1)

    def name(row: Row) -> str:
        aside = "" if row.variant == "fastpar" else f" ({row.variant})"
        return f"{row.case}{aside}, {row.direction}"

    values = "fastpar ms = ms | against fastest | rate | of the ceiling | peak MB | stock peak MB"
    values += " | host us | compile s"
    cells = {
        "op": of(name), "stock ms": of(lambda row: shown(base(row))),
        "fastest stock ms": of(lambda row: shown(best(row))), "against fastest": of(fastest),
        "stock peak MB": of(lambda row: megabytes(base(row))),
    }  # fmt: skip
    names = "op | stock ms | fastest stock ms"
    return spec(lambda rows: own, names, values, cells, lambda row: (base(row), best(row)))(rows)


# A baseline of several groups was measured again in each: its own row is of other turns.
BESIDE = "took turns with, ms | speed-up"
PP = "case: contender = case: variant | ranks x threads"
PP_SAYS = f"ms | tokens/s | {BESIDE} | peak MB | loss differs by | MB sent a step"
TABLES: dict[str, Callable[[Sequence[Row]], Table]] = {
    "train": spec(
        only("train", lambda row: row.direction == "step" and not row.case.startswith("char")),
        "training step = case | variant | ranks x threads",
        "ms | tokens/s | speed-up | peak MB | memory | host ms | compile s"),
    "zero": spec(
        only("zero", together=True), "training step = case: variant | ranks x threads",
        f"ms | tokens/s | {BESIDE} | peak MB | live MB | exposed ms | wire MB | host ms"),
    "tp": spec(tp_rows, "training step = case: variant | ranks x threads",
               f"ms | tokens/s | {BESIDE} | peak MB"),
    "ops": ops_table,
    "overlap": spec(
        only("overlap", together=True), "step on a limited link = case, variant",
        "ms | MB sent | communication ms | exposed ms | exposed, of communication"
        " | waited, of communication | against DDP = speed-up | against FSDP2 = over FSDP2"),
    "wires": spec(only("wires"), "step on a slow link = case, variant",
                  f"ms | tokens/s | MB sent | exposed ms | {BESIDE}"),
    "checkpoint": spec(
        only("checkpoint", together=True), "checkpoint = case: direction | variant",
        "ms | rate | speed-up over | over torch DCP | extra MB = peak MB"),
    "plan": plan_table, "pp": spec(only("pp"), PP, PP_SAYS), "cp": spec(only("cp"), PP, PP_SAYS),
}  # fmt: skip


# The first table: what a user would swap or run, beside the fastest other way to do it


class Shown(NamedTuple):
    """A line of the first table and where its rows are. case: a regular expression for a row's
    whole case, because a GPU measures other sizes than a CPU; its group is the size that is shown.
    The first case with a fastpar row that passed its check counts. others: the fastest of each of
    these families is shown, whose names begin so."""

    what: str
    bench: str
    case: str
    direction: str = "step"
    variant: str = "fastpar"
    others: tuple[str, ...] = ("",)


_ZERO = r"(?:ZeRO-{}, )?(GPT-2 124M T=\d+ B=\d+ a rank, 2 ranks)"
_CHECKPOINT = "(GPT-2 124M and AdamW), one process"
_BOTH = "forward+backward"
_LN = r"(N=\d+ C=768)"
_CLIP = r"norm \+ clip \+ adamw {} (GPT-2, \d+.*M) .*"
_CE = "linear_cross_entropy"
HEADLINE = (
    Shown("`AdamW` step, fp32", "adamw", r"adamw fp32 (\d{3,}M)", variant="fastpar AdamW"),
    Shown("`AdamW` step with clipping, fp32", "adamw", _CLIP.format("fp32"), "step",
          "fastpar AdamW"),
    Shown("clipping and step, bf16 with fp32 masters", "adamw", _CLIP.format("bf16")),
    Shown("`LayerNorm`", "layer_norm", f"layer_norm {_LN}", _BOTH),
    Shown("bias + dropout + residual + `LayerNorm`", "layer_norm",
          rf"bias \+ dropout \+ residual_layer_norm {_LN}", _BOTH),
    Shown("`attention`", "attention", r"attention (B=\d+ H=12 T=1024 D=64)", _BOTH),
    Shown("bias + GELU", "gelu", r"bias_gelu (N=\d+ F=3072)", _BOTH),
    Shown("`cross_entropy`", "cross_entropy", r"cross_entropy (N=\d+ V=50304)", _BOTH),
    Shown(f"`{_CE}`", _CE, r".* (N=.* V=50304)", "forward"),
    Shown("training step, one process", "train", r"(12x768 T=\d+ B=\d+|124M T=1024 B=32)"),
    Shown("training step, one process", "train", r"(12x768 T=\d+ B=\d+, bf16)"),
    *(Shown(f"training step, ZeRO-{n}", "zero", _ZERO.format(n), "step", f"fastpar ZeRO-{n}",
            ("FSDP2", f"DeepSpeed ZeRO-{n}", "DDP")) for n in (1, 2, 3)),
    Shown("training step, tensor parallel", "tp", r"tp=2, (.*, 2 ranks)", variant="fastpar, shm"),
    Shown("checkpoint save to disk", "checkpoint", _CHECKPOINT, "save",
          others=("torch DCP", "torch.save, ")),
    Shown("pause of a checkpoint save", "checkpoint", _CHECKPOINT, "pause of a save"),
    Shown("checkpoint load", "checkpoint", _CHECKPOINT, "load"),
)  # fmt: skip


def headline(machines: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """A line for each of HEADLINE with rows on some machine; machines: name and rows."""
    lines = []
    for line in HEADLINE:
        found = [_find(line, rows) for _, rows in machines]
        some = next(filter(None, found), None)
        if some is not None:
            size = re.sub(line.case, r"\1", some[0].case)
            direction = f", {line.direction}" if "forward" in line.direction else ""
            lines.append([f"{line.what}: {size}{direction}", *(_cell(each) for each in found)])
    return markdown(["ms of a call or step", *(name for name, _ in machines)], lines)


def _cell(found: Sequence[Row]) -> str:
    """Milliseconds of fastpar, those of others in the same turns, and the ratios."""
    if not found:
        return ""
    ours, *others = found
    ms, text = ours.median_ms or 0.0, []
    for other in others:
        ratio = _other_ms(ours, other) / ms
        slower = "slower, " * (ratio < 0.995)
        text.append(f"{other.variant} {number(_other_ms(ours, other))} ({slower}{times(ratio)})")
    return f"{number(ms)}; {'; '.join(text)}"


def _other_ms(ours: Row, other: Row) -> float:
    """Milliseconds of the other one, in the turns of both if they took turns."""
    in_turn = ours.baseline_ms if ours.baseline == other.variant else None
    return in_turn or other.median_ms or 0.0


def _find(line: Shown, rows: Sequence[Row]) -> list[Row]:
    """fastpar's row and the fastest other one of each family; empty where either is missing."""
    ran = [r for r in rows if r.median_ms is not None and r.refused is None]
    alike = [r for r in ran if (r.bench, r.direction) == (line.bench, line.direction)]
    timed = [r for r in alike if re.fullmatch(line.case, r.case)]
    for ours in (row for row in timed if row.variant == line.variant):
        others = [r for r in timed if r.case == ours.case and not r.variant.startswith("fastpar")]
        others.sort(key=lambda other: _other_ms(ours, other))
        families = ([r for r in others if r.variant.startswith(name)] for name in line.others)
        found = [family[0] for family in families if family]
        if found:
            return [ours, *sorted(found, key=lambda other: _other_ms(ours, other))]
    return []
