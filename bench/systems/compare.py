"""Two commits side by side: is the second one faster?

    python -m bench compare HEAD~3 HEAD                    a step of GPT-2 (train:6x384)
    python -m bench compare v0.3.0 HEAD layer_norm:C=768 attention --rounds 40

A commit is a git worktree in build/compare, built there once, in minutes. A process of each holds
fastpar's variants of a case as that commit's own bench makes them, or a training step. They take
turns, call by call; who is first changes with each round. A line has both medians, the CPU time of
the thread that calls, and how many times as fast the second commit is: the median over the rounds
and its 95 % interval.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WARM = 2  # rounds that are not counted
Pair = tuple[Any, Any]  # of the first commit, of the second one


def hold(name: str, device: str, *quick: str) -> None:
    """In a worktree: a line with the name of each case, then one of times for each line read."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    import torch

    import fastpar.kernels
    from bench import harness, records  # of that commit, as all that is imported here
    from fastpar.predict.machine import Ceilings

    found, here = Path(fastpar.kernels.__file__).resolve(), Path.cwd().resolve()
    if here not in found.parents:
        raise RuntimeError(f"compare: expected fastpar of {here}, got {found}; remove that folder")

    def serve(title: str | None, sample: Callable[[int], float] = lambda index: 0.0) -> None:
        print(json.dumps(title), file=out, flush=True)
        for index, _ in enumerate(iter(sys.stdin.readline, "next\n")):
            cpu = time.thread_time()
            ms = sample(index)
            print(json.dumps([ms, 1e3 * (time.thread_time() - cpu)]), file=out, flush=True)

    class Cases(harness.Bench):
        def run_calls(self, case: Any, direction: str, makers: Any, *judges: Any) -> None:
            for variant in (name for name in makers if name.startswith("fastpar")):
                calls = makers[variant]()
                for judge in judges:
                    judge(variant)
                title = f"{case.name}, {direction}" + f", {variant}" * (variant != "fastpar")
                serve(title, lambda i: self.clock.sample(calls[i % len(calls)]))  # noqa: B023

    stem, _, only = name.partition(":")
    if stem == "train":
        train: Any = importlib.import_module("bench.systems.bench_train")
        config, rows = (train.QUICK, 4) if quick else train.CONFIGS[only]
        how = {"device": device, "threads": torch.get_num_threads(), "keep_memory": True}
        variant = train.Variant(train.Spec("fastpar", config, rows, **how))
        serve(f"train {'quick' if quick else only}, step", lambda index: variant.steps(1)["ms"][0])
    else:
        none: Any = None
        bench = Cases(stem, device, bool(quick), none, only, None, Ceilings(1.0, 1.0, ""))
        importlib.import_module(records.homes()[stem]).run(bench)
    serve(None)


def tree(commit: str) -> Path:
    """A worktree of the commit, built."""
    git = ["git", "-C", str(Path(__file__).parent)]
    says = subprocess.run([*git, "rev-parse", "--short=12", f"{commit}^0"], capture_output=True)
    if says.returncode:
        raise ValueError(f"compare: expected a commit, got {commit}; `git log` shows them")
    folder = Path(__file__).parents[2] / "build" / "compare" / says.stdout.decode().strip()
    if not (folder / "built").exists():
        print(f"compare: building {commit} in {os.path.relpath(folder)}, minutes", flush=True)
        if not folder.exists():
            subprocess.run([*git, "worktree", "add", "-q", "--detach", folder, commit], check=True)
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        log = folder / "build.log"
        to = log.open("w")
        if subprocess.run(build, cwd=folder, stdout=to, stderr=to).returncode:
            raise RuntimeError(f"compare: expected {commit} to build; see {os.path.relpath(log)}")
        (folder / "fastpar" / "kernels").symlink_to("../kernels")  # not those of the environment
        (folder / "built").touch()
    return folder


def start(folder: Path, *words: str) -> Any:
    """The process of a worktree in which hold(*words) runs."""
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    environment, command = {**os.environ, "PYTHONPATH": str(folder)}, [sys.executable, __file__]
    return subprocess.Popen([*command, *words], cwd=folder, env=environment, text=True, **pipes)


def read(process: Any) -> Any:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"compare: {' '.join(process.args[2:])} ended; its error is above")
    return json.loads(line)


def cases(processes: list[Any], rounds: int) -> Iterator[tuple[str, Pair, Pair]]:
    """Each case: milliseconds of all rounds, and those of CPU time."""
    while (titles := list(map(read, processes))) != [None, None]:
        if titles[0] != titles[1]:
            both = f"got {titles[0]} and {titles[1]}; name a case that both have"
            raise ValueError(f"compare: expected the same cases in both commits, {both}")
        times: Pair = ([], [])
        for index in range(WARM + rounds):
            for who in (0, 1) if index % 2 else (1, 0):
                print("once", file=processes[who].stdin, flush=True)
                times[who].append(read(processes[who]))
        for process in processes:
            print("next", file=process.stdin, flush=True)
        (old, old_cpu), (new, new_cpu) = (list(zip(*one[WARM:])) for one in times)
        yield titles[0], (old, new), (old_cpu, new_cpu)


def main(argv: list[str] | None = None) -> int:
    from bench.records import Row, device_of, machine, machine_line, parser_of
    from bench.report.tables import markdown, number

    parser = parser_of("bench compare", __doc__, device=True)
    parser.add_argument("commits", nargs=2, metavar="commit")
    parser.add_argument("names", nargs="*", metavar="name[:case]", default=["train:6x384"])
    parser.add_argument("--rounds", type=int, default=20, help="of each case; 6 at least")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the code run?")
    args, lines = parser.parse_args(argv), list[list[str]]()
    first, second = args.commits
    try:
        device = device_of(args, "compare")
        folders = [tree(commit) for commit in args.commits]
        for name in args.names:
            words = [name, device, *["quick"] * args.quick]
            known = len(lines)
            processes = [start(folder, *words) for folder in folders]
            try:
                for title, ms, cpu in cases(processes, args.rounds):
                    row = Row(name, title, "", second, device, "")
                    row.compare(first, *ms)
                    medians = [number(statistics.median(each)) for each in (*ms, *cpu)]
                    lines.append([title, *medians, row.times])
                    print(*lines[-1], sep="  ", flush=True)
                if len(lines) == known:
                    raise ValueError(f"compare: expected a case of a bench, got {name}; name less")
            finally:
                for process in processes:
                    process.kill()
                    process.communicate()
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    head = ["ms", first, second, f"CPU, {first}", f"CPU, {second}", f"{second}, times as fast"]
    print(f"\n{machine_line(machine(device))}\n\n{markdown(head, lines)}")
    return 0


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # the worktree, instead of the folder of this file
    hold(*sys.argv[1:])
