"""Compiles every Triton launch of kernels/ for sm_80 and sm_90, without a GPU, and judges it; of
RTX 40 and 50 (sm_89, sm_120) those that use most shared memory and registers.

    python -m bench.compiler.aot                 all modules, both Triton versions; writes
    bench/results/aot
    python -m bench.compiler.aot --check         writes nothing; 1 if the table lists other launches
    python -m bench.compiler.aot layer_norm      one module's rows on the console

A launch comes from the calls that each module of Triton kernels lists in aot_calls(), recorded as a
GPU of that kind would run them. The versions are the installed Triton and the copy of MINIMUM that
`make aot` puts into build/. A broken rule of aot_rules.py makes the exit status 1.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import io
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench.compiler import aot_table, sass
from bench.compiler.aot_rules import GPUS, WHOLE, Broken, Row, describe, judge, stale_exemptions
from bench.records import ROOT, commit, parser_of
from fastpar.comm.ranks import reason
from fastpar.doctor.trial import compile_launch

MINIMUM = "3.6.0"  # what torch 2.11 comes with
MINIMUM_FOLDER = ROOT / "build" / "triton-3.6"
TABLE = ROOT / "bench" / "results" / "aot"
LIMIT_S = 300.0  # for one kernel
RTX = tuple(sorted(GPUS.keys() - {*WHOLE}))
# Calls that are compiled for these, too, by the installed Triton.
ON_RTX = re.compile(
    r"D=(64|128) bf16 causal|D=128 bf16 causal dropout|bf16 768 residual|fp32 768 residual dropout|"
    r"padded (bf16|fp32)|bwd (tanh bfloat16 C=3072|swiglu float32 C=2\*3072)"
)


# What there is to compile


@dataclass
class Job:
    """One distinct launch on one architecture."""

    arch: int
    launch: Any
    calls: list[str] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Where the kernel is defined, which need not be the module that launches it."""
        return short(self.launch.kernel.__module__)

    @property
    def key(self) -> tuple[int, str, str, str]:
        row = self.row()
        return self.arch, row["module"], row["kernel"], row["launch"]

    def row(self) -> Row:
        """Everything known before compiling."""
        launch = self.launch
        constants = {k: v for k, v in launch.constants.items() if v is not None}
        named = [f"{k}={v}" for k, v in constants.items() if k.isupper()]
        warps, stages = (launch.options.get(k, d) for k, d in (("num_warps", 4), ("num_stages", 3)))
        types = re.findall(r"(?:\*|<)(\w+)", " ".join(launch.signature.values()))
        exact = [launch.signature, {k: repr(v) for k, v in constants.items()}, launch.divisible]
        text = json.dumps([*exact, launch.options], sort_keys=True, default=str)
        return {
            "module": self.module, "kernel": launch.name, "calls": self.calls,
            "config": " ".join([*named, f"w{warps}", f"s{stages}"]),
            "types": ",".join(dict.fromkeys(types)), "arch": self.arch,
            "launch": hashlib.sha256(text.encode()).hexdigest()[:10], "grid": list(launch.grid),
        }  # fmt: skip


def short(module: str) -> str:
    """fastpar.kernels.attention.bits_triton is attention_bits, fastpar.kernels.norm.triton norm."""
    dotted = module.removeprefix("fastpar.kernels.").replace(".", "_")
    return dotted.removesuffix("_triton")


@functools.cache
def modules() -> dict[str, str]:
    """Short name -> dotted name of every module of Triton kernels."""
    kernels = ROOT / "kernels"
    paths = sorted({*kernels.rglob("*_triton.py"), *kernels.rglob("triton.py")})
    dotted = [".".join(p.relative_to(kernels).with_suffix("").parts) for p in paths]
    return {short(name): f"fastpar.kernels.{name}" for name in dotted}


def imported(name: str) -> Any:
    return importlib.import_module(modules()[name])


def archs(module: Any) -> tuple[int, ...]:
    """What the module's kernels are for: AOT_ARCHS if it has that, WHOLE otherwise."""
    return getattr(module, "AOT_ARCHS", WHOLE)


def collect(calls: Sequence[tuple[str, Callable[[], Any]]], archs: Sequence[int]) -> list[Job]:
    """What these calls launch on each of these architectures."""
    from fastpar.kernels.triton_launch import record

    jobs = []
    for arch in archs:
        for label, call in calls:
            with record(arch) as launches:
                call()
            if not launches:
                raise ValueError(f"collect: expected a launch, got none of {label}; give it rows")
            jobs += [Job(arch, launch, [label]) for launch in launches]
    return jobs


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """One job for each key, with the calls of all and the largest grid."""
    found: dict[tuple[int, str, str, str], Job] = {}
    for job in jobs:
        known = found.setdefault(job.key, job)
        known.calls += [call for call in job.calls if call not in known.calls]
        known.launch.grid = tuple(map(max, known.launch.grid, job.launch.grid))
    return list(found.values())


# Compiling


def compile_one(job: Job) -> Row:
    """What the compiler made of a launch."""
    compiled = compile_launch(job.launch, (job.arch, 0))
    said = warnings(compiled.asm["ptx"], job.arch, job.launch.options)
    return {**measure(job, compiled), "warnings": said}


def warnings(ptx: str, arch: int, options: dict[str, Any]) -> list[str]:
    """["C7513"] and the like: why ptxas, called once more as Triton does, serializes products."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    if "wgmma" not in ptx:
        return []
    backend = make_backend(GPUTarget("cuda", arch, 32))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, backend.parse_options(options), arch)
    return sorted(set(re.findall(r"\bC751\d\b", said.getvalue())))


def _tiles(ttir: str, what: str, threads: int) -> int:
    """Loads or stores with an element for every thread, unlike those of a row's statistics."""
    shapes = re.findall(rf"tt\.{what} .* : tensor<([\dx]+)x!tt\.ptr", ttir)
    descriptors = ttir.count(f"tt.descriptor_{what}")
    return descriptors + sum(math.prod(map(int, s.split("x"))) >= threads for s in shapes)


_DOT = re.compile(
    r"(?:tt\.|warp_group_)dot(?:_scaled)? .*? : (?:tensor|!ttg\.memdesc)<[\dx]*x(\w+)"
)


def measure(job: Job, compiled: Any) -> Row:
    code, registers, stack_bytes = sass.disassemble(compiled.asm["cubin"])
    ttir = compiled.asm.get("ttir") or compiled.asm["ttgir"]  # Gluon begins with the latter
    dots = _DOT.findall(ttir)
    kind = "matrix" if dots else "memory"
    loop = sass.main_loop(code)
    # Where a memory kernel's traffic is: its main loop, if that loads.
    path = loop if kind == "memory" and sass.count(loop, "LDG", "LDGSTS") else code
    overlapped, _ = sass.in_flight(loop, "MUFU")
    shared_bytes, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return {
        **job.row(),
        "kind": kind,
        "dots": sorted(set(dots)),
        "registers": registers,
        "stack_bytes": stack_bytes,
        "spill_instructions": sass.count(code, "LDL", "STL"),
        "loop_spills": sass.count(loop, "LDL", "STL"),
        "shared_bytes": shared_bytes,
        "warps": warps,
        "ctas_per_sm": GPUS[job.arch].ctas_per_sm(registers, shared_bytes, warps),
        "instructions": len(code),
        "loop_instructions": len(loop),
        "tile_loads": _tiles(ttir, "load", 32 * warps),
        "tile_stores": _tiles(ttir, "store", 32 * warps),
        **sass.accesses(path, path),
        "hmma": sass.count(code, *sass.WARP_PRODUCTS),
        "hgmma": sass.count(code, *sass.GROUP_PRODUCTS),
        "waits": sum(i.opcode.startswith("WARPGROUP.DEPBAR") for i in code),
        "groups": compiled.asm["ptx"].count("wgmma.commit_group"),
        "e4m3_products": len(re.findall(r"mma(?:_async)?\.sync\S*\.e4m3", compiled.asm["ptx"])),
        "staged": ttir.count("tt.num_stages"),  # loops that ask for copies ahead
        "ldgsts": sass.count(code, "LDGSTS"),
        "tma": sass.count(code, "UTMALDG", "UTMASTG", "UBLKCP"),
        "mufu": sass.count(code, "MUFU"),
        "loop_mufu": sass.count(loop, "MUFU"),
        "overlapped_mufu": overlapped,
        "product_writes": sass.in_flight(code, "MUFU")[1],
        "float_atomics": sass.float_atomics(code),
    }


def _compile(job: Job, pipe: Connection) -> None:
    """Sends the row; of an error the innermost one in a line, without the source between."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Triton prints what ptxas refuses
            pipe.send(compile_one(job))
    except Exception as caught:
        error: BaseException = caught
        while error.__cause__ is not None:
            error = error.__cause__
        lines = str(error).strip().splitlines()
        text = " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
        why = reason(RuntimeError(text)).replace("RuntimeError", type(error).__name__, 1)
        pipe.send({**job.row(), "error": why})


def compile_all(jobs: Sequence[Job], processes: int) -> list[Row]:
    """A row for every job, in any order; each in a process of its own, which may die or hang."""
    context = multiprocessing.get_context("fork")  # the modules and their launches are there
    todo, rows = list(reversed(jobs)), list[Row]()
    busy: dict[Connection, tuple[Job, Any, float]] = {}
    while todo or busy:
        while todo and len(busy) < processes:
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_compile, args=(todo[-1], theirs), daemon=True)
            process.start()
            theirs.close()  # so that a process that dies is an end of file here
            busy[pipe] = todo.pop(), process, time.monotonic()
        ready = wait(list(busy), timeout=1.0)
        for pipe, (job, process, since) in list(busy.items()):
            if pipe in ready:
                try:
                    rows.append(pipe.recv())
                except EOFError:
                    process.join()
                    error = f"the compiler ended with exit code {process.exitcode}"
                    rows.append({**job.row(), "error": error})
            elif time.monotonic() - since > LIMIT_S:
                rows.append({**job.row(), "error": f"it took more than {LIMIT_S:.0f} s"})
            else:
                continue
            process.kill()
            process.join()
            del busy[pipe]
            pipe.close()
    return rows


def work(names: Sequence[str], processes: int) -> Row:
    """In a process of one Triton version: all rows and exemptions of these modules."""
    import triton

    jobs, errors, exempt = list[Job](), list[str](), dict[str, Any]()
    for name in names:
        try:
            module = imported(name)
            exempt[name] = getattr(module, "AOT_EXEMPT", {})
            calls = module.aot_calls()
            jobs += collect(calls, archs(module))
            if archs(module) == WHOLE and triton.__version__ != MINIMUM:
                jobs += collect([call for call in calls if ON_RTX.fullmatch(call[0])], RTX)
        except Exception as error:
            errors.append(f"{name} triton {triton.__version__}: records: {reason(error)}")
    for job in jobs:
        source = sys.modules[job.launch.kernel.__module__]
        exempt.setdefault(job.module, getattr(source, "AOT_EXEMPT", {}))
    rows = compile_all(distinct(jobs), processes)
    for row in rows:
        row["triton"] = triton.__version__
    return {"triton": triton.__version__, "rows": rows, "exempt": exempt, "errors": errors}


def run_version(folder: Path | None, names: Sequence[str], processes: int) -> Row:
    """work() in a process that imports the Triton of this folder, or the installed one."""
    dropped = ("TRITON_INTERPRET", "FASTPAR_BACKEND")
    env = {k: v for k, v in os.environ.items() if k not in dropped}
    env["OMP_NUM_THREADS"] = "1"
    env["TRITON_CACHE_DIR"] = str(ROOT / "build" / "aot" / (folder.name if folder else "triton"))
    if folder is not None:
        env["PYTHONPATH"] = str(folder)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        command = [sys.executable, "-m", "bench.compiler.aot", "--worker", str(out), "--jobs"]
        subprocess.run([*command, str(processes), *names], cwd=ROOT, env=env, check=True)
        return json.loads(out.read_text())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.compiler.aot", __doc__)
    parser.add_argument("modules", nargs="*", metavar="module", help=", ".join(modules()))
    parser.add_argument("--check", action="store_true", help="write nothing; compare the launches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--installed", action="store_true", help="only the installed Triton")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.modules:
        if name not in modules():
            raise ValueError(f"aot: expected one of {', '.join(modules())}, got module={name}")
    if args.check and (args.modules or args.installed):
        raise ValueError("aot: expected neither modules nor --installed with --check; drop one")
    if not args.installed and not args.worker and not (MINIMUM_FOLDER / "triton").is_dir():
        raise ValueError(
            f"aot: expected Triton {MINIMUM} in build/{MINIMUM_FOLDER.name}, got "
            "folder=missing; run `make aot`, or add --installed"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    names = args.modules or list(modules())
    if args.worker:
        args.worker.write_text(json.dumps(work(names, args.jobs)))
        return 0
    rows, problems, broken = list[Row](), list[str](), list[Broken]()
    needed, exempt = set[tuple[str, str, str]](), dict[str, Any]()
    for folder in (None,) if args.installed else (MINIMUM_FOLDER, None):
        start = time.monotonic()
        found = run_version(folder, names, args.jobs)
        problems += found["errors"]
        exempt = found["exempt"]
        for row in found["rows"]:
            wrong, used = judge(row, exempt[row["module"]])
            broken += wrong
            needed |= {(row["module"], *pair) for pair in used}
        seconds, many = time.monotonic() - start, len(found["rows"])
        print(f"triton {found['triton']}: {many} launches in {seconds:.0f} s", flush=True)
        rows += found["rows"]
    problems += describe(broken)
    if not args.installed:
        problems += stale_exemptions({name: exempt.get(name, {}) for name in names}, needed)
    rows.sort(key=aot_table.order)
    if args.check:
        problems += aot_table.differences(TABLE, rows)
    elif args.modules or args.installed:
        print(aot_table.markdown(rows))
    else:
        aot_table.write(TABLE, rows, *commit())
    for problem in problems:
        print(f"broken: {problem}")
    print(f"{len(problems)} broken rules in {len(rows)} rows")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
