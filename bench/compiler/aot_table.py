"""The table of ahead-of-time compilation: bench/results/aot/table.json and, for reading, table.md.

A row is one launch on one architecture by one Triton version. Nothing in it depends on the machine
that compiled it; counts of nothing are left out.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.compiler.aot_rules import GPUS, Row
from bench.records import read_rows, write_rows

# Which launch a row is of, whatever compiled it.
LAUNCH = ("module", "kernel", "arch", "types", "config", "launch")
COUNTS = (
    "stack_bytes", "spill_instructions", "loop_spills", "shared_bytes", "ctas_per_sm",
    "loop_instructions", "tile_loads", "tile_stores", "wide_loads", "narrow_loads",
    "wide_load_bytes", "narrow_load_bytes", "wide_stores", "narrow_stores", "wide_store_bytes",
    "narrow_store_bytes", "hmma", "hgmma", "waits", "groups", "e4m3_products", "staged", "ldgsts",
    "tma", "mufu", "loop_mufu", "overlapped_mufu", "product_writes", "float_atomics",
)  # fmt: skip
LEGEND = """\
Compiled, not run. Registers, bytes of stack and of accesses are of one thread. Spills: LDL + STL
instructions, those in the main loop among them, stack. CTA/SM: how many fit by registers, shared
memory and warps. MUFU: exponentials and the like (of those in the main loop, how many run while an
HGMMA is in flight). Loads and stores: global ones of 16 bytes + narrower ones; in a kernel without
matrix products those of its main loop, if that loads. Instructions: main loop of whole kernel.
HMMA and HGMMA: also QMMA and QGMMA, of 8-bit floats. Waits: for an HGMMA (groups of HGMMA in the
PTX), and what ptxas says where it waits for each. a / b: the two versions differ."""


def order(row: Row) -> tuple[Any, ...]:
    names = ("module", "kernel", "types", "config", "arch", "launch", "triton")
    return tuple(row[name] for name in names)


def _tensor(row: Row) -> str:
    if "dots" not in row or not row["dots"]:
        return ""
    used = [f"{row[k]} {k.upper()}" for k in ("hmma", "hgmma") if row.get(k)]
    eights = row.get("e4m3_products", 0)
    used += [f"{eights} of e4m3"] * bool(eights)
    return ", ".join(used) or f"FMA ({'/'.join(row['dots'])})"


def _waits(row: Row) -> str:
    if not row.get("groups"):
        return ""
    return " ".join((f"{row.get('waits', 0)} ({row['groups']})", *row.get("warnings", ())))


def _copies(row: Row) -> str:
    return ", ".join(f"{row[k]} {k.upper()}" for k in ("ldgsts", "tma") if row.get(k))


def _both(what: str) -> Callable[[Row], str]:
    return lambda row: f"{row.get(f'wide_{what}', 0)} + {row.get(f'narrow_{what}', 0)}"


def _mufu(row: Row) -> str:
    loop = row.get("loop_mufu", 0) if row.get("hgmma") else 0
    inner = f" ({row.get('overlapped_mufu', 0)} of {loop})" if loop else ""
    return f"{row.get('mufu', 0)}{inner}"


def _spills(row: Row) -> str:
    count, stack = row.get("spill_instructions", 0), row.get("stack_bytes", 0)
    inner = row.get("loop_spills", 0)
    return f"{count} ({inner} in the loop; {stack} B)" if count or stack else "0"


CELLS = {
    "regs": lambda row: str(row["registers"]), "spills": _spills,
    "shared B": lambda row: str(row.get("shared_bytes", 0)),
    "CTA/SM": lambda row: str(row.get("ctas_per_sm", 0)), "loads": _both("loads"),
    "stores": _both("stores"), "tensor cores": _tensor, "waits": _waits, "async": _copies,
    "MUFU": _mufu,
    "instructions": lambda row: f"{row.get('loop_instructions', 0)} of {row['instructions']}",
}  # fmt: skip


def _line(versions: Sequence[Row]) -> list[str]:
    first = versions[0]
    call, *others = first["calls"]
    call += f" (+{len(others)})" * bool(others)
    cells = [first["kernel"].strip("_"), call, first["types"], first["config"], str(first["arch"])]
    if any("error" in row for row in versions):
        return [*cells, "does not compile", *[""] * (len(CELLS) - 1)]
    return cells + [" / ".join(dict.fromkeys(map(cell, versions))) for cell in CELLS.values()]


def write_page(folder: Path, name: str, title: str, *parts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join([f"# {title}, compiled ahead of time\n", *parts]))


def sections(head: Sequence[str], found: dict[str, Any], rows: Sequence[Row], whose: str) -> str:
    """A heading and a table for each part; then what is exempt from which rule and why."""
    text = []
    for part, lines in found.items():
        table = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]
        text += [f"## {part}\n", *table, ""]
    exempt = {
        f"* {whose.format(**row)}: {rule}: {why}"
        for row in rows
        for rule, why in row.get("exempt", {}).items()
    }
    return "\n".join(text + (["## Exempt, and why\n", *sorted(exempt), ""] if exempt else []))


def markdown(rows: Sequence[Row]) -> str:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=order):
        groups.setdefault(tuple(row[name] for name in LAUNCH), []).append(row)
    found: dict[str, list[list[str]]] = {}
    for key, group in groups.items():
        found.setdefault(key[0], []).append(_line(group))
    head = ["kernel", "call", "types", "configuration", "sm", *CELLS]
    return sections(head, found, rows, "{module} {kernel}")


def write(folder: Path, rows: Sequence[Row], commit: str, dirty: bool) -> None:
    versions = sorted({row["triton"] for row in rows})
    head = {"commit": commit, "dirty": dirty, "triton": versions}
    empty: tuple[Any, ...] = (0, [], {})
    kept = [{k: v for k, v in row.items() if v not in empty} for row in sorted(rows, key=order)]
    write_rows(folder / "table.json", head, kept)
    limits = ", ".join(f"sm_{arch}: {gpu.shared_per_cta} B" for arch, gpu in GPUS.items())
    about = (
        f"{LEGEND}\nTriton {' and '.join(versions)}; commit {commit}{' + changes' * dirty}; "
        f"shared memory limits {limits}. Written by `make aot`.\n"
    )
    write_page(folder, "table.md", "Every Triton launch", about, markdown(rows))


def load(folder: Path) -> dict[str, Any]:
    stored = read_rows(folder / "table.json", "run `make aot`")
    nothing = {"dots": [], "warnings": [], "exempt": {}, **dict.fromkeys(COUNTS, 0)}
    stored["rows"] = [{**nothing, **row} for row in stored["rows"]]
    return stored


def differences(
    folder: Path, rows: Sequence[Row], names: Sequence[str] = LAUNCH, target: str = "make aot"
) -> list[str]:
    """What the stored table lacks, and what is no more. names: what a row is known by, its file
    first; target: what writes the table."""
    try:
        stored = read_rows(folder / "table.json", f"run `{target}`")["rows"]
    except ValueError as error:
        return [str(error)]
    listed, current = ({tuple(row[n] for n in names) for row in part} for part in (stored, rows))
    found = []
    for keys, what in ((current - listed, "lacks"), (listed - current, "still has")):
        for module, some in itertools.groupby(sorted(keys), key=lambda key: key[0]):
            first, *others = some
            found.append(
                f"{module}: table: {what} {1 + len(others)} rows, such as "
                f"{' '.join(map(str, first[1:]))}; run `{target}` and commit it"
            )
    return found
