"""What is asked of every compiled launch: RULES on the rows that aot.py makes.

A launch with tl.dot is a matrix kernel, every other a memory kernel. A kernel that rightly breaks a
rule says so where it lives, and the table shows it:
AOT_EXEMPT = {"<kernel> <call>": {"<rule>": "<reason>"}}, the key an fnmatch pattern. An exemption
that nothing needs is an error too.
"""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Gpu:
    """What one streaming multiprocessor has."""

    shared_per_cta: int
    shared_per_sm: int
    registers: int = 65536
    warps: int = 64
    ctas: int = 32
    shared_reserved: int = 1024  # by the system, for each CTA

    def ctas_per_sm(self, registers: int, shared_bytes: int, warps: int) -> int:
        """How many CTAs of a kernel are resident at once."""
        per_warp = -(-registers * 32 // 256) * 256
        scheduler = self.registers // 4 // per_warp  # warps that each of the four can hold
        shared = -(-(shared_bytes + self.shared_reserved) // 128) * 128
        in_fours = -(-warps // 4) * 4
        by_registers = scheduler * 4 // in_fours
        return min(self.ctas, self.warps // warps, by_registers, self.shared_per_sm // shared)


GPUS = {
    80: Gpu(shared_per_cta=163 * 1024, shared_per_sm=164 * 1024),
    90: Gpu(shared_per_cta=227 * 1024, shared_per_sm=228 * 1024),
    **dict.fromkeys((89, 120), Gpu(99 * 1024, 100 * 1024, warps=48, ctas=24)),
}
WHOLE = (80, 90)  # every launch is compiled for these

EIGHT_BITS = ("f8E4M3FN", "f8E5M2")  # dots of these

# Rules: what is wrong with a row, or None.


def spills(row: Row) -> str | None:
    if row["spill_instructions"] or row["stack_bytes"]:
        inner = f", {row['loop_spills']} of them in the main loop;" if "loop_spills" in row else ","
        count, stack = row["spill_instructions"], row["stack_bytes"]
        return f"{count} LDL/STL{inner} {stack} bytes of stack a thread"
    return None


def shared_memory(row: Row) -> str | None:
    limit = GPUS[row["arch"]].shared_per_cta
    return f"{row['shared_bytes']} bytes, limit {limit}" if row["shared_bytes"] > limit else None


def grid(row: Row) -> str | None:
    limits = (2**31 - 1, 65535, 65535)
    beyond = any(size > limit for size, limit in zip(row["grid"], limits))
    return f"{row['grid']}, limit {limits}" if beyond else None


def atomics(row: Row) -> str | None:
    n = row["float_atomics"]
    return f"{n} floating-point atomics: sums in no fixed order" if n else None


def tensor_cores(row: Row) -> str | None:
    if not set(row["dots"]) & {"bf16", "f16", *EIGHT_BITS}:
        return None  # fp32 products stay exact: FFMA
    wanted = "hgmma" if 90 <= row["arch"] < 120 else "hmma"
    return None if row[wanted] else f"tl.dot of {'/'.join(row['dots'])} without {wanted.upper()}"


def eight_bits(row: Row) -> str | None:
    """Triton can turn them into fp16 first, where a GPU's products cannot read them."""
    if not set(row["dots"]) & set(EIGHT_BITS) or row["e4m3_products"]:
        return None
    return "no wgmma, or mma, of e4m3 in the PTX"


def products(row: Row) -> str | None:
    """What a product that runs on its own reads and sums up must stay as it is until it ends."""
    n = row["product_writes"]
    return f"{n} instructions write registers of a product in flight" if n else None


def pipelined(row: Row) -> str | None:
    """ptxas gives up on a whole kernel whose registers it cannot keep from a product in flight."""
    said = ", ".join(row["warnings"])
    return f"ptxas waits for each product, and says {said}" if said else None


def waits(row: Row) -> str | None:
    n, groups = row["waits"], row["groups"]
    return f"{n} waits for {groups} groups of products" if n > groups else None


def copies_ahead(row: Row) -> str | None:
    """Triton leaves the loads of a loop with num_stages as they are where it cannot copy them."""
    lost = row["staged"] and not row["ldgsts"] + row["tma"]
    return f"{row['staged']} loops with num_stages, but no asynchronous copy" if lost else None


def _mostly_narrow(row: Row, what: str) -> str | None:
    """Where a memory kernel moves tiles; single numbers (a key, a row's mean) are as they are."""
    wide, narrow = row[f"wide_{what}_bytes"], row[f"narrow_{what}_bytes"]
    if row["kind"] == "matrix" or not row[f"tile_{what}s"] or narrow < max(wide, 1):
        return None
    few = f"{row[f'narrow_{what}s']} narrower ones ({narrow} bytes a thread)"
    return f"{few} against {row[f'wide_{what}s']} of 16 bytes"


RULES: dict[str, Callable[[Row], str | None]] = {
    "spills": spills, "shared memory": shared_memory,
    "resident": lambda row: None if row["ctas_per_sm"] else "no CTA fits on a multiprocessor",
    "grid": grid, "atomics": atomics, "tensor cores": tensor_cores, "8-bit products": eight_bits,
    "products in flight": products, "pipelined products": pipelined, "waits for products": waits,
    "copies ahead": copies_ahead, "16-byte loads": lambda row: _mostly_narrow(row, "load"),
    "16-byte stores": lambda row: _mostly_narrow(row, "store"),
}  # fmt: skip


@dataclass(frozen=True)
class Broken:
    row: Row
    rule: str
    detail: str


def judge(
    row: Row,
    exempt: dict[str, dict[str, str]],
    rules: dict[str, Callable[[Row], str | None]] = RULES,
    names: Sequence[str] = (),
) -> tuple[list[Broken], set[tuple[str, str]]]:
    """(broken rules, exemptions that were needed); row["exempt"] gets the reasons of the latter.
    names: that exemptions are for; empty: the kernel with each of its calls."""
    if "error" in row:
        return [Broken(row, "compiles", row["error"])], set()
    broken: list[Broken] = []
    needed: set[tuple[str, str]] = set()
    row["exempt"] = {}
    names = names or [f"{row['kernel']} {call}" for call in row["calls"]]
    for rule, check in rules.items():
        wrong = check(row)
        if wrong is None:
            continue
        patterns = [p for p in exempt if rule in exempt[p]]
        allowed = [p for p in patterns if all(fnmatch.fnmatchcase(n, p) for n in names)]
        if allowed:
            row["exempt"][rule] = exempt[allowed[0]][rule]
            needed.update((p, rule) for p in allowed)
        else:
            broken.append(Broken(row, rule, wrong))
    return broken, needed


def describe(broken: Iterable[Broken]) -> list[str]:
    """A line for each kernel, call and rule, with the GPUs and versions where it is broken."""
    groups: dict[tuple[str, ...], list[Broken]] = {}
    for b in broken:
        row = b.row
        key = (row["module"], row["kernel"], row["calls"][0], row["types"], b.rule)
        groups.setdefault(key, []).append(b)
    lines = []
    for (module, kernel, call, types, rule), group in sorted(groups.items()):
        where = sorted({f"sm_{b.row['arch']} triton {b.row['triton']}" for b in group})
        what = f"{module} {kernel} ({call}; {types}; {group[0].row['config']})"
        lines.append(f"{what}: {rule}: {group[0].detail} [{', '.join(where)}]")
    return lines


def stale_exemptions(exempt: dict[str, Any], needed: Iterable[tuple[str, str, str]]) -> list[str]:
    used = set(needed)
    return [
        f"{name}: exemption: nothing breaks {rule!r} under {pattern!r}; delete it"
        for name, patterns in exempt.items()
        for pattern, rules in patterns.items()
        for rule in rules
        if (name, pattern, rule) not in used
    ]
