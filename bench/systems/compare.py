"""Two commits side by side: is the second one faster?

    python -m bench compare HEAD~3 HEAD                    a step of GPT-2 (train:6x384)
    python -m bench compare v0.3.0 HEAD layer_norm:C=768 attention --rounds 40

A commit is a git worktree in build/compare, built there once, in minutes. A process of each holds
fastpar's variants of a case as that commit's own bench makes them, or a training step. They take
turns, call by call; who is first changes with each round. A line has both medians, the CPU time of
the thread that calls, and how many times as fast the second commit is: the median over the rounds
and its 95 % interval.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WARM = 2  # rounds that are not counted


# In a process of a worktree: only what every commit has is imported


def hold(name: str, device: str, quick: bool) -> None:
    """Serve each case of a bench: a line with its name, then a line of times for each line read."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    import fastpar.kernels
    from bench import harness, records
    from fastpar.predict.machine import Ceilings

    found, here = Path(fastpar.kernels.__file__).resolve(), Path.cwd().resolve()
    if here not in found.parents:
        raise RuntimeError(f"compare: expected fastpar of {here}, got {found}; remove that folder")

    def serve(title: str, sample: Callable[[int], float]) -> None:
        print(json.dumps(title), file=out, flush=True)
        for index, line in enumerate(iter(sys.stdin.readline, "next\n")):
            if not line:
                sys.exit()
            cpu = time.thread_time()
            ms = sample(index)
            cpu = 1e3 * (time.thread_time() - cpu)
            print(json.dumps([ms, cpu]), file=out, flush=True)

    class Cases(harness.Bench):
        def run_calls(self, case: Any, direction: str, makers: Any, *judge: Any) -> None:
            for variant in (name for name in makers if name.startswith("fastpar")):
                calls = makers[variant]()
                for each in judge:
                    each(variant)
                title = f"{case.name}, {direction}" + f", {variant}" * (variant != "fastpar")
                serve(title, lambda i: self.clock.sample(calls[i % len(calls)]))  # noqa: B023

    stem, _, only = name.partition(":")
    if stem != "train":
        results: Any = None
        bench = Cases(stem, device, quick, results, only=only, ceilings=Ceilings(1.0, 1.0, ""))
        __import__(records.homes()[stem], fromlist=["run"]).run(bench)
    else:
        import torch

        from bench.systems import bench_train as train

        config, rows = (train.QUICK, 4) if quick else train.CONFIGS[only]
        how: Any = {"device": device, "threads": torch.get_num_threads(), "keep_memory": True}
        step = train.Variant(train.Spec("fastpar", config, rows, **how))
        serve(f"train {only}, step", lambda i: step.steps(1)["ms"][0])
    print("null", file=out, flush=True)


# Here


def tree(commit: str) -> Path:
    """A worktree of the commit, built."""
    from bench.records import ROOT

    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--verify", "--short=12", f"{commit}^{{commit}}"],
        capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode:
        raise ValueError(
            f"compare: expected a commit of this repository, got {commit}; see git log"
        )
    folder = ROOT / "build" / "compare" / found.stdout.strip()
    if not (folder / "built").exists():
        print(f"compare: building {commit} in {os.path.relpath(folder)}, minutes", flush=True)
        if not folder.exists():
            subprocess.run(
                [*git, "worktree", "add", "--quiet", "--detach", folder, commit], check=True
            )
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        log = folder / "build.log"
        with log.open("w") as file:
            if subprocess.run(build, cwd=folder, stdout=file, stderr=file).returncode:
                raise RuntimeError(
                    f"compare: {commit} was not built; {os.path.relpath(log)} says why"
                )
        (folder / "fastpar" / "kernels").symlink_to("../kernels")  # not those of the environment
        (folder / "built").touch()
    return folder


class Holder:
    """The process of a worktree that runs hold()."""

    def __init__(self, folder: Path, *words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command, pipe = [sys.executable, __file__, *words], subprocess.PIPE
        how: Any = {"stdin": pipe, "stdout": pipe, "text": True, "cwd": folder, "env": environment}
        self.process: Any = subprocess.Popen(command, **how)

    def read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"compare: {self.process.args[2:]} ended; its error is above")
        return json.loads(line)

    def ask(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


def cases(holders: Sequence[Holder], rounds: int) -> Iterator[tuple[str, list[list[Any]]]]:
    """Each case, and the (ms, CPU ms) of both commits in all rounds."""
    while True:
        titles = [holder.read() for holder in holders]
        if titles[0] != titles[1]:
            raise ValueError(
                f"compare: expected the same cases in both commits, got {titles[0]} and "
                f"{titles[1]}; name a case that both have"
            )
        if titles[0] is None:
            return
        times: list[list[Any]] = [[], []]
        for index in range(WARM + rounds):
            for who in (0, 1) if index % 2 else (1, 0):
                holders[who].ask("once")
                times[who].append(holders[who].read())
        for holder in holders:
            holder.ask("next")
        yield titles[0], [one[WARM:] for one in times]


def main(argv: list[str] | None = None) -> int:
    import statistics

    from bench.records import Row, device_of, machine, machine_line, parser_of
    from bench.report.tables import markdown, number

    parser = parser_of("bench compare", __doc__, device=True)
    parser.add_argument("commits", nargs=2, metavar="commit")
    parser.add_argument("names", nargs="*", metavar="name[:case]", default=["train:6x384"])
    parser.add_argument("--rounds", type=int, default=20, help="of each case; 6 at least")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the code run?")
    args, lines = parser.parse_args(argv), []
    try:
        device = device_of(args, "compare")
        folders = [tree(commit) for commit in args.commits]
        for name in args.names or parser.get_default("names"):
            words = "hold", name, device, *["quick"] * args.quick
            holders = [Holder(folder, *words) for folder in folders]
            try:
                for title, times in cases(holders, args.rounds):
                    (old, new), cpu = ([list(zip(*one))[i] for one in times] for i in (0, 1))
                    row = Row(name, title, "", args.commits[1], device, "")
                    row.compare(args.commits[0], old, new)
                    medians = map(statistics.median, (old, new, *cpu))
                    lines.append([title, *map(number, medians), row.times])
                    print(*lines[-1], sep="  ", flush=True)
            finally:
                for holder in holders:
                    holder.process.kill()
                    holder.process.communicate()
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    first, second = args.commits
    head = ["ms", first, second, f"CPU {first}", f"CPU {second}", f"{second}, times as fast"]
    print(f"\n{machine_line(machine(device))}\n\n{markdown(head, lines)}")
    return 0


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # the worktree, instead of the folder of this file
    hold(sys.argv[2], sys.argv[3], "quick" in sys.argv[4:])
