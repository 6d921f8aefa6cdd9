"""Two checkouts of fastpar side by side: the training step and start-up, in one interleaved run.

    python -m bench.systems.checkouts OLD_PYTHON            the other checkout's interpreter
        [--rounds 9] [--mbit 1000] [--vocab 4096] [--only step,link,start]
        [--out bench/results/checkouts/checkouts.json]

Both checkouts must be built, each in its own environment. Every cell starts the ranks of both,
which then take turns of a few steps each; start-up commands take turns, too. Printed and written:
the medians, and the median of old over new round by round (above 1: new is faster), which is what
counts on a machine whose speed drifts. Only names that both checkouts have are used by the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.records import RESULTS, machine, machine_line
from bench.systems.links import Link, NoLinkError
from fastpar.doctor.clocks import CpuClock

STEPS = 4  # of one turn
_RANK = """
import sys, torch, fastpar
stage, vocab = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
config = fastpar.GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, vocab_size=vocab)
model = fastpar.GPT(config)
model = fastpar.parallelize(model, fastpar.Mesh(), zero_stage=stage)
optimizer = fastpar.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
tokens = torch.randint(0, vocab, (2, 129))
for line in sys.stdin:
    for _ in range(int(line)):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item(), flush=True)
"""


class Ranks:
    """The ranks of one checkout, which train when they are told to."""

    def __init__(self, python: str, n_ranks: int, stage: int, vocab: int, link: Link | None):
        port = _free_port()
        self._processes: list[Any] = []  # Popen: its pipes are there
        for rank in range(n_ranks):
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [python, "-c", _RANK, str(stage), str(vocab)]
            if link is not None:
                env.update(link.environment(rank, port))
                command = link.enter(rank, *command)
            elif n_ranks > 1:
                env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks))
                env.update(LOCAL_WORLD_SIZE=str(n_ranks), MASTER_ADDR="127.0.0.1")
                env.update(MASTER_PORT=str(port))
            pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = subprocess.Popen(command, env=env, cwd=tempfile.gettempdir(), **pipe)
            self._processes.append(process)

    def train(self, steps: int = STEPS) -> str:
        """All ranks take so many steps; the last loss of rank 0."""
        for process in self._processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        said = [process.stdout.readline().strip() for process in self._processes]
        if not all(said):
            raise RuntimeError("checkouts: expected losses of all ranks, got a rank that ended")
        return said[0]

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(60)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def _both(
    pythons: Sequence[str], n: int, stage: int, vocab: int, link: Link | None
) -> Iterator[list[Ranks]]:
    ranks: list[Ranks] = []
    try:
        for python in pythons:
            ranks.append(Ranks(python, n, stage, vocab, link))
            ranks[-1].train(2)
        yield ranks
    finally:
        for each in ranks:
            each.close()


def _turns(calls: Sequence[Any], rounds: int) -> dict[str, float]:
    """Times of old and new in turns, the order reversed every round."""
    clock = CpuClock()
    ms: list[list[float]] = [[], []]
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            ms[which].append(clock.sample(calls[which]))
    ratios = sorted(old / new for old, new in zip(*ms))
    return {
        "old_ms": statistics.median(ms[0]),
        "new_ms": statistics.median(ms[1]),
        "old_over_new": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def steps(
    pythons: Sequence[str], rounds: int, mbit: float | None, vocab: int
) -> dict[str, dict[str, float]]:
    """One process, then two ranks at each stage; behind a link of so many Mbit/s if given."""
    found = {}
    link = None if mbit is None else Link(mbit)
    cells = [(1, 0)] if link is None else []
    try:
        for n_ranks, stage in [*cells, *((2, stage) for stage in range(4))]:
            where = "shared memory" if link is None else f"{mbit:g} Mbit/s"
            name = "1 process" if n_ranks == 1 else f"2 ranks, stage {stage}, {where}"
            with _both(pythons, n_ranks, stage, vocab, link) as ranks:
                losses = {each.train(1) for each in ranks}
                found[name] = _turns([each.train for each in ranks], rounds)
                found[name]["same_loss"] = len(losses) == 1
            print(f"{name:32}", _line(found[name]), flush=True)
    finally:
        if link is not None:
            link.close()
    return found


def starts(pythons: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """`fastpar train --help`, and a training run of one step."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tiny = "--model micro --block-size 16 --batch-size 2 --max-steps 1 --tokenizer bytes"
        commands = {"train --help": ["--help"], "a run of one step": tiny.split()}
        for name, arguments in commands.items():

            def call(python: str, arguments: list[str] = arguments) -> None:
                command = [python, "-m", "fastpar", "train", *arguments]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(done.stderr[-2000:])

            calls = [lambda python=python: call(python) for python in pythons]
            for each in calls:
                each()
            found[name] = _turns(calls, rounds)
            print(f"{name:32}", _line(found[name]), flush=True)
    return found


def _line(row: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.4g}" for key, value in row.items())


def _commit(python: str) -> str:
    where = "import fastpar, os; print(os.path.dirname(os.path.dirname(fastpar.__file__)))"
    options: Any = {"capture_output": True, "text": True, "check": True}
    root = subprocess.run([python, "-c", where], cwd="/", **options).stdout.strip()
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, **options).stdout.strip()[:12]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old_python")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--vocab", type=int, default=4096, help="rows of the tied table")
    parser.add_argument("--only", default="step,link,start")
    parser.add_argument("--out", type=Path, default=RESULTS / "checkouts" / "checkouts.json")
    args = parser.parse_args()
    pythons = [args.old_python, sys.executable]
    print("old", _commit(pythons[0]), "new", _commit(pythons[1]), machine_line(machine("cpu")))
    found: dict[str, Any] = {}
    only = args.only.split(",")
    if "step" in only:
        found |= steps(pythons, args.rounds, None, args.vocab)
    if "link" in only:
        try:
            found |= steps(pythons, args.rounds, args.mbit, args.vocab)
        except NoLinkError as error:
            print(error)
    if "start" in only:
        found |= starts(pythons, args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": machine("cpu"),
        "vocab": args.vocab,
        "old": _commit(pythons[0]),
        "new": _commit(pythons[1]),
    }
    args.out.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
