"""`python -m bench [name[:case] ...]`: runs benches, each in a process of its own.

    python -m bench                          all of them on the GPU if there is one, or on the CPU
    python -m bench layer_norm train:6x384   one bench; one case of one
    python -m bench --commit-results         rows go to bench/results, which the README shows
    python -m bench tune                     tables that a GPU decides (bench/ops/tune.py)
    python -m bench compare HEAD~3 HEAD      two commits in turns (bench/systems/compare.py)
    python -m bench host                     host time of a step (bench/systems/host.py)
    python -m bench matrix fastpar           one run on every layout (bench/systems/matrix.py)
    python -m bench study wires              what settings do to a loss (bench/systems/study.py)
    python -m bench report                   tables from results (bench/report/report.py)
    python -m bench ingest ARCHIVE           what make gpu brought back (bench/ingest.py)
    python -m bench report --results build/bench/full    of your own rows, into that folder

Without --commit-results or --out, rows go to build/bench. With --quick the shapes are tiny: what
ran is said, but no time, rate or ratio, which would be those of the overhead. A bench that fails,
is killed or runs out of its time loses neither its own earlier rows nor the others.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench import records
from bench.records import RESULTS, SCRATCH, ResultFile, device_of, homes, machine, machine_line
from fastpar.comm.ranks import reason

COMMANDS = {  # which are no benches: module with a main()
    "compare": "bench.systems.compare", "host": "bench.systems.host", "ingest": "bench.ingest",
    "matrix": "bench.systems.matrix", "report": "bench.report.report",
    "study": "bench.systems.study", "tune": "bench.ops.tune",
}  # fmt: skip


def names() -> list[str]:
    """Benches in the order they run."""
    return sorted(homes(), key=lambda name: (name == "train", name))


def limit_of(name: str, device: str) -> float:
    """Seconds that a bench may take."""
    limits = importlib.import_module(homes()[name]).TIME_LIMIT_S
    return limits.get(name, limits)[device]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = records.parser_of("bench", __doc__, device=True)
    parser.add_argument("names", nargs="*", metavar="name[:case]", help=", ".join(names()))
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the code run?")
    parser.add_argument("--out", type=Path, help="JSON file the rows are merged into")
    parser.add_argument("--commit-results", action="store_true", help="write to bench/results")
    parser.add_argument("--time-limit", type=float, help="seconds for each bench")
    parser.add_argument("--here", action="store_true", help="in this process, without a limit")
    args = parser.parse_args(argv)
    args.device = device_of(args, "bench")
    args.names = args.names or names()
    for name in args.names:
        if name.partition(":")[0] not in names():
            raise ValueError(f"bench: expected one of {', '.join(names())}, got name={name}")
    if args.commit_results and (args.quick or args.out):
        raise ValueError(
            "bench: expected full shapes and no --out with --commit-results, got "
            f"quick={args.quick} out={args.out}; tiny shapes are no results"
        )
    if args.out is None:
        folder = RESULTS if args.commit_results else SCRATCH / ("quick" if args.quick else "full")
        args.out = records.default_path(machine(args.device), folder)
    return args


def run_here(name: str, args: argparse.Namespace) -> None:
    from bench.harness import Bench

    stem, _, case = name.partition(":")
    module = importlib.import_module(homes()[stem])
    results = ResultFile(args.out, machine(args.device))
    module.run(Bench(stem, args.device, args.quick, results, only=case))


def run_apart(name: str, args: argparse.Namespace) -> str | None:
    """Run one bench in its own process group; why it failed, or None."""
    stem = name.partition(":")[0]
    limit = args.time_limit
    if limit is None:
        try:
            limit = limit_of(stem, args.device)
        except Exception as error:  # a bench that cannot be imported fails alone
            return reason(error)
    command = [sys.executable, "-m", "bench", name, "--here", "--device", args.device]
    command += ["--out", str(args.out), *(["--quick"] if args.quick else [])]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s; its rows so far are kept"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers it started
            process.wait()
    return f"exit code {status}" if status else None


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        command = importlib.import_module(COMMANDS[argv[0]])
        return int(command.main(argv[1:]))
    try:
        args = parse(argv)
        ResultFile(args.out, machine(args.device))  # refuses a file of another machine now
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.here:
        run_here(args.names[0], args)
        return 0
    print(machine_line(machine(args.device)), flush=True)
    # Without a handler SIGTERM would leave the bench that runs behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failures = {}
    try:
        for name in args.names:
            start = time.monotonic()
            print(f"== {name}", flush=True)
            if failure := run_apart(name, args):
                failures[name] = failure
            print(f"== {name}: {failure or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
    results = ResultFile(args.out, machine(args.device))  # what the benches wrote
    ran = {name.partition(":")[0] for name in args.names}
    rows = [row for row in results.rows.values() if row.bench in ran]
    red = [row for row in rows if row.refused and "fastpar" in row.variant]
    for row in red:
        print(f"refused: {row.key}: {row.refused}")
    for name, failure in failures.items():
        print(f"failed: {name}: {failure}")
    if args.quick:
        print(f"{sum(not row.refused for row in rows)} of {len(rows)} rows ran")
    draw = ""
    if not args.quick and args.out.parent != RESULTS:
        folder = os.path.relpath(args.out.parent)
        draw = f"; tables: python -m bench report --results {folder}"
    print(f"{len(results.rows)} rows in {os.path.relpath(args.out)}{draw}")
    return 1 if failures or red else 0


if __name__ == "__main__":
    sys.exit(main())
