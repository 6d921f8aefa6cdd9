"""Compiles every csrc/*_cuda.cu for sm_80 and sm_90a, without a GPU, and judges the machine code.

    python -m bench.compiler.cuda_check            writes bench/results/cuda
    python -m bench.compiler.cuda_check --check    writes nothing; 1 if the table has other kernels
    python -m bench.compiler.cuda_check adamw      one source's rows on the console

Asked of every kernel: no spills and no stack; 16-byte loads and stores on its main path; no
floating-point atomics. EXEMPT says which kernels rightly break a rule, and why; an exemption that
nothing needs is an error too. Without nvcc nothing is checked, which is said and is no failure.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.compiler import aot_rules, aot_table, sass
from bench.records import ROOT, commit, parser_of, write_rows

Row = dict[str, Any]
TABLE = ROOT / "bench" / "results" / "cuda"
ARCHS = {"80": "arch=compute_80,code=sm_80", "90a": "arch=compute_90a,code=sm_90a"}
LEGEND = """\
Compiled, not run. Registers and bytes of stack are of one thread, shared memory of a block. Loads
and stores: global ones of 16 bytes + narrower ones, on the main path: the innermost loop with most
16-byte traffic, or the whole kernel. Instructions: main path of whole kernel."""
# kernel pattern -> rule -> why the rule does not fit
EXEMPT = {
    "adamw_kernel<(Moment)1*": dict.fromkeys(
        ("16-byte loads", "16-byte stores"),
        "16-bit arrays go by 8 bytes, so that a warp fills whole sectors of all",
    ),
    "dequantize_kernel*": {
        "16-byte loads": "16 codes of a byte each are one load; the others are the unaligned path's"
    },
    "norm_finish_kernel": {
        "16-byte loads": "one block adds a few kilobytes of partial sums",
        "16-byte stores": "the result is a dozen words",
    },
    "norm_partials_kernel": {"16-byte stores": "a block writes its partial sums once"},
}


def _narrow(row: Row, what: str) -> str | None:
    if row[f"wide_{what}_bytes"] >= row[f"narrow_{what}_bytes"]:
        return None
    return f"{row[f'narrow_{what}s']} narrower ones against {row[f'wide_{what}s']} of 16 bytes"


RULES: dict[str, Callable[[Row], str | None]] = {
    "spills": aot_rules.spills, "16-byte loads": lambda row: _narrow(row, "load"),
    "16-byte stores": lambda row: _narrow(row, "store"), "atomics": aot_rules.atomics,
}  # fmt: skip


def sources() -> list[str]:
    return sorted(p.name.removesuffix("_cuda.cu") for p in (ROOT / "csrc").glob("*_cuda.cu"))


def find_nvcc() -> tuple[str | None, str]:
    """setup.py's nvcc and flags."""
    import setuptools  # type: ignore[import-untyped]

    real, setuptools.setup = setuptools.setup, lambda **options: None
    try:
        names = runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = real
    return names["find_nvcc"](), names["NVCC_FLAGS"]


def main_path(code: Sequence[sass.Instruction]) -> Sequence[sass.Instruction]:
    """The innermost loop with most 16-byte traffic; a kernel without one as a whole."""

    def wide(body: Sequence[sass.Instruction]) -> int:
        return sum(i.bytes for i in body if i.name in ("LDG", "STG") and i.bytes == 16)

    bodies = [[code[at] for at in body] for body in sass.loops(code)]
    best = max(bodies, key=lambda body: (wide(body), -len(body)), default=code)
    return best if wide(best) else code


def short_name(demangled: str) -> str:
    """global_kernel<float, BFloat16> of a demangled signature."""
    name = re.sub(r"\(anonymous namespace\)::|fastpar::", "", demangled)
    name = re.sub(r"^(void|[\w:]+) (?=\w+[<(])", "", name)
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name


def measure(source: str, arch: str, name: str, kernel: sass.Kernel) -> Row:
    path = main_path(kernel.code)
    # Of a loop that only reads the result comes after it.
    stores = path if sass.count(path, *sass.STORES) else kernel.code
    return {
        "source": source, "kernel": name, "arch": arch, "registers": kernel.registers,
        "stack_bytes": kernel.stack_bytes, "shared_bytes": kernel.shared_bytes,
        "spill_instructions": sass.count(kernel.code, "LDL", "STL"),
        "instructions": len(kernel.code), "path_instructions": len(path),
        **sass.accesses(path, stores), "float_atomics": sass.float_atomics(kernel.code),
    }  # fmt: skip


def compile_source(nvcc: str, flags: str, source: str, arch: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        path = ROOT / "csrc" / f"{source}_cuda.cu"
        command = [nvcc, *flags.split(), f"-gencode={ARCHS[arch]}", "-cubin", "-o", str(cubin)]
        run = subprocess.run([*command, str(path)], capture_output=True, text=True)
        if run.returncode:
            last = run.stderr.strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(
                f"cuda_check: expected {path.name} to compile for sm_{arch}, got: {last[0]}; "
                "see `python setup.py build_ext --inplace`"
            )
        found = sass.kernels(cubin)
    readable = names = list(found)
    if shutil.which("c++filt"):
        text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
        readable = [short_name(line) for line in text.stdout.splitlines()]
    rows = [measure(source, arch, r, found[n]) for n, r in zip(names, readable)]
    return sorted(rows, key=lambda row: row["kernel"])


def judge(rows: Sequence[Row], exempt: dict[str, dict[str, str]]) -> list[str]:
    """A line for each broken rule and each exemption without use."""
    problems: list[str] = []
    needed: set[tuple[str, str, str]] = set()
    for row in rows:
        broken, found = aot_rules.judge(row, exempt, RULES, [row["kernel"]])
        problems += [f"{row['kernel']} sm_{row['arch']}: {b.rule}: {b.detail}" for b in broken]
        needed |= {("cuda", *pair) for pair in found}
        if not row["exempt"]:
            del row["exempt"]
    return problems + aot_rules.stale_exemptions({"cuda": exempt}, needed)


def markdown(rows: Sequence[Row]) -> str:
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        spilled = row["spill_instructions"] or row["stack_bytes"]
        spills = f"{row['spill_instructions']}, {row['stack_bytes']} B" if spilled else "0"
        cells = [f"`{row['kernel']}`", row["arch"], str(row["registers"]), spills]
        cells += [str(row["shared_bytes"])]
        cells += [f"{row[f'wide_{w}']} + {row[f'narrow_{w}']}" for w in ("loads", "stores")]
        cells.append(f"{row['path_instructions']} of {row['instructions']}")
        found.setdefault(row["source"], []).append(cells)
    head = ["kernel", "sm", "regs", "spills", "shared B", "loads", "stores", "instructions"]
    return aot_table.sections(head, found, rows, "`{kernel}`")


def write(rows: Sequence[Row], version: str) -> None:
    name, dirty = commit()
    write_rows(TABLE / "table.json", {"commit": name, "dirty": dirty, "nvcc": version}, rows)
    about = f"{LEGEND}\n{version}; commit {name}{' + changes' * dirty}. "
    about += "Written by `make cuda-check`.\n"
    aot_table.write_page(TABLE, "table.md", "Every CUDA kernel", about, markdown(rows))


def differences(rows: Sequence[Row]) -> list[str]:
    """Kernels that the committed table lacks, and those that are no more."""
    names = ("source", "kernel", "arch")
    return aot_table.differences(TABLE, rows, names, "make cuda-check")


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("bench.compiler.cuda_check", __doc__)
    parser.add_argument("sources", nargs="*", metavar="source", help=", ".join(sources()))
    parser.add_argument("--check", action="store_true", help="write nothing; compare the kernels")
    args = parser.parse_args(argv)
    for source in sorted(set(args.sources) - set(sources())):
        known = ", ".join(sources())
        print(f"cuda_check: expected one of {known}, got {source=!s}; choose one", file=sys.stderr)
        return 2
    nvcc, flags = find_nvcc()
    if nvcc is None:
        print("cuda-check: skip: no nvcc found; the CUDA kernels were not compiled")
        return 0
    jobs = [(source, arch) for source in args.sources or sources() for arch in ARCHS]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts = pool.map(lambda job: compile_source(nvcc, flags, *job), jobs)
        rows = [row for part in parts for row in part]
    problems = judge(rows, {} if args.sources else EXEMPT)
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release [\d.]+, V[\d.]+", version)
    if args.check:
        problems += differences(rows)
    elif args.sources:
        print(markdown(rows))
    else:
        write(rows, f"nvcc {release[0] if release else 'unknown'}")
    for problem in problems:
        print(f"broken: {problem}")
    print(f"cuda-check: {len(problems)} broken rules in {len(rows)} rows")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
