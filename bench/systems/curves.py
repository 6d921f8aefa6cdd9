"""Loss curves of `fastpar train` for every way in which an optimizer may store its numbers.

    python -m bench.systems.curves                     all modes and seeds: about ten minutes on
    two cores
    python -m bench.systems.curves --commit-results    into bench/results/curves, which is tracked
    python -m bench.systems.curves --draw              table and picture again, from the runs on
    disk

Each run is a process of `fastpar train` on its text, with a small GPT. A mode holds if its last
validation loss, in the mean over its seeds, is not above that of fp32 on the same seeds by more
than fp32's own runs lie apart. The 16-bit remainder must give the bits of the fp32 master.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.records import RESULTS, SCRATCH, machine, machine_line
from fastpar.checkpoint.manifest import read_manifest
from fastpar.config.config import TrainConfig, option
from fastpar.files.step_folders import checkpoint_folder
from fastpar.train.metrics import read_metrics

BASELINE = "fp32"
MASTER, REMAINDER = "bf16, fp32 master", "bf16, 16-bit remainder"
MODES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    MASTER: {"dtype": "bf16"},
    REMAINDER: {"dtype": "bf16", "master_weights": "remainder"},
    "bf16, stochastic rounding": {"dtype": "bf16", "stochastic_rounding": True},
    "fp32, bf16 moments": {"moment_dtype": "bf16"},
    "fp32, 8-bit moments": {"moment_dtype": "int8"},
    "bf16, stochastic rounding, 8-bit moments": {
        "dtype": "bf16",
        "stochastic_rounding": True,
        "moment_dtype": "int8",
    },
    "adafactor": {"optimizer": "adafactor", "lr": 0.03},
}
COLOURS = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#999999")
SETTINGS: dict[str, Any] = {
    "model": "micro",
    "batch_size": 16,
    "max_steps": 400,
    "eval_every": 50,
    "eval_batches": 32,
    "save_every": 0,
    "num_samples": 0,
    "device": "cpu",
    "dtype": "fp32",
}
QUICK = {**SETTINGS, "n_layer": 1, "n_embd": 32, "max_steps": 12, "eval_every": 6}
QUICK |= {"eval_batches": 1, "batch_size": 4, "block_size": 16, "tokenizer": "bytes"}
SEEDS, BASELINE_SEEDS = (1, 2), (1, 2, 3, 4)


@dataclass
class Run:
    """One training run."""

    mode: str
    seed: int
    losses: list[float]  # of each step
    val_losses: list[tuple[int, float]]  # (step, loss)
    tokens_per_s: float
    bytes_per_parameter: float  # weights and optimizer state in the checkpoint
    digest: str  # of the weights
    exact: list[float] = field(repr=False, default_factory=list)  # losses unrounded, not saved

    @property
    def val_loss(self) -> float:
        return self.val_losses[-1][1]


@dataclass
class Verdict:
    """What the runs of one mode say."""

    mode: str
    seeds: list[int]
    val_loss: float  # mean of the last ones
    difference: float  # from fp32 on the same seeds, mean
    bytes_per_parameter: float
    holds: bool


def train_once(
    mode: str, seed: int, settings: dict[str, Any], data: str | None, threads: int
) -> Run:
    """Runs `fastpar train` in a process and reads what it leaves."""
    settings = {**settings, **MODES[mode], "seed": seed, "threads": threads}
    if data is not None:
        settings["data"] = data
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fastpar", "train", "--out", str(out)]
        for name, value in settings.items():
            command += [option(name)] if value is True else [option(name), str(value)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"curves: expected a run of {mode} to end, got exit code {done.returncode}; "
                f"it said: {done.stderr[-2000:]}"
            )
        rows = read_metrics(out / "metrics.jsonl")
        folder_of_weights = checkpoint_folder(out, settings["max_steps"])
        manifest = read_manifest(folder_of_weights)
    steps = [row for row in rows if "loss" in row]
    exact = [row["loss"] for row in steps]
    parameters = sum(math.prod(tensor.shape) for tensor in manifest.weights)
    tensors = [entry for name, entry in manifest.files.items() if name.endswith(".safetensors")]
    bits = hashlib.sha256("".join(tensor.sha256 for tensor in manifest.weights).encode())
    return Run(
        mode,
        seed,
        [round(loss, 4) for loss in exact],
        [(row["step"], round(row["val_loss"], 5)) for row in rows if "val_loss" in row],
        round(statistics.median(row["tokens_per_s"] for row in steps), 1),
        round(sum(entry.size for entry in tensors) / parameters, 2),
        bits.hexdigest(),
        exact,
    )


def check_remainder(runs: Sequence[Run]) -> None:
    """The remainder runs are the master runs bit for bit.

    Raises:
        RuntimeError: losses or weights differ.
    """
    masters = {run.seed: run for run in runs if run.mode == MASTER}
    for run in runs:
        if run.mode == REMAINDER:
            master = masters[run.seed]
            if (run.exact, run.digest) != (master.exact, master.digest):
                raise RuntimeError(
                    f"curves: expected '{REMAINDER}' to give the bits of '{MASTER}', got others "
                    f"with seed={run.seed}: last losses {run.exact[-1]} and {master.exact[-1]}; "
                    "the remainder of the AdamW kernel is wrong"
                )


def spread(runs: Sequence[Run]) -> float:
    """How far apart the last validation losses of fp32 lie."""
    losses = [run.val_loss for run in runs if run.mode == BASELINE]
    return max(losses) - min(losses)


def judge(runs: Sequence[Run]) -> list[Verdict]:
    """Every mode beside fp32 on the same seeds."""
    baseline = {run.seed: run.val_loss for run in runs if run.mode == BASELINE}
    limit, verdicts = spread(runs), []
    for mode in dict.fromkeys(run.mode for run in runs):
        own = [run for run in runs if run.mode == mode]
        difference = statistics.fmean(run.val_loss - baseline[run.seed] for run in own)
        verdicts.append(
            Verdict(
                mode,
                [run.seed for run in own],
                round(statistics.fmean(run.val_loss for run in own), 5),
                round(difference, 5),
                own[0].bytes_per_parameter,
                difference <= limit,
            )
        )
    return verdicts


def table(runs: Sequence[Run]) -> str:
    """The verdicts as Markdown."""
    lines = [
        "| storage | bytes a parameter | seeds | validation loss | from fp32 | within the spread |",
        "|---|---|---|---|---|---|",
    ]
    for v in judge(runs):
        same = ", the master's bits" if v.mode == REMAINDER else ""
        lines.append(
            f"| {v.mode} | {v.bytes_per_parameter:.1f} | {len(v.seeds)} | {v.val_loss:.4f} | "
            f"{v.difference:+.4f} | {'yes' if v.holds else '**no**'}{same} |"
        )
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[Run], line: str, path: Path) -> None:
    """Validation curves on the left; on the right each run's last loss beside fp32's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = list(dict.fromkeys(run.mode for run in runs))
    colour = dict(zip(MODES, COLOURS))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4.6), layout="constrained", width_ratios=(1, 1)
    )
    for at, mode in enumerate(modes):
        own = [run for run in runs if run.mode == mode]
        curves = zip(*([loss for _, loss in run.val_losses] for run in own))
        steps = [step for step, _ in own[0].val_losses]
        style = "--" if mode == REMAINDER else "-"
        left.plot(
            steps,
            [statistics.fmean(c) for c in curves],
            style,
            color=colour[mode],
            label=mode,
            linewidth=1.4,
        )
        right.plot(
            [run.val_loss for run in own], [at] * len(own), "o", color=colour[mode], alpha=0.8
        )
    left.set_xlabel("step")
    left.set_ylabel("validation loss, mean over seeds")
    left.legend(fontsize=8, frameon=False)
    baseline = [run.val_loss for run in runs if run.mode == BASELINE]
    right.axvspan(min(baseline), max(baseline), color="#dddddd", zorder=0)
    right.set_yticks(range(len(modes)), modes, fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("last validation loss, a dot for each seed; grey: the spread of fp32")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(line, fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def save(folder: Path, about: dict[str, Any], settings: dict[str, Any], runs: list[Run]) -> None:
    """curves.json, curves.png and table.md."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{k: v for k, v in asdict(run).items() if k != "exact"} for run in runs]
    result = {
        "machine": about,
        "settings": settings,
        "modes": MODES,
        "spread": round(spread(runs), 5),
        "verdicts": [asdict(v) for v in judge(runs)],
    }
    head = json.dumps(result, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row) for row in rows)  # a run a line
    (folder / "curves.json").write_text(f'{head},\n "runs": [\n  {lines}\n ]\n}}\n')
    write_report(folder)


def write_report(folder: Path) -> None:
    """Table and picture from curves.json."""
    result = json.loads((folder / "curves.json").read_text())
    runs = [
        Run(**{**row, "val_losses": list(map(tuple, row["val_losses"]))}) for row in result["runs"]
    ]
    line = machine_line(result["machine"])
    (folder / "table.md").write_text(
        f"{table(runs)}\nSpread of fp32: {result['spread']}. {line}.\n"
    )
    draw(runs, line, folder / "curves.png")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.systems.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few steps: does the code run?")
    parser.add_argument("--commit-results", action="store_true", help="write to bench/results")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--draw", action="store_true", help="only table and picture, from there")
    parser.add_argument("--data", help="as of fastpar train")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    args = parser.parse_args(argv)
    if args.commit_results and (args.quick or args.out or args.data):
        raise ValueError(
            "curves: expected a full run on the own text with --commit-results, got quick="
            f"{args.quick} out={args.out} data={args.data}; leave these out"
        )
    scratch = SCRATCH / ("quick" if args.quick else "full") / "curves"
    args.out = args.out or (RESULTS / "curves" if args.commit_results else scratch)
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.draw:
        write_report(args.out)
        return 0
    settings, seeds = (QUICK, (1,)) if args.quick else (SETTINGS, SEEDS)
    todo = [
        (mode, seed)
        for mode in MODES
        for seed in (BASELINE_SEEDS[: 2 if args.quick else None] if mode == BASELINE else seeds)
    ]
    TrainConfig().replace(settings)  # a mistake here is said before anything runs
    begin = time.monotonic()

    def one(task: tuple[str, int]) -> Run:
        run = train_once(*task, settings, args.data, args.threads)
        seconds = time.monotonic() - begin
        print(f"{seconds:4.0f} s  {run.mode}, seed {run.seed}: {run.val_loss:.4f}", flush=True)
        return run

    first = [one(todo[0])]  # alone: it learns the tokenizer, which the others then find
    with ThreadPoolExecutor(args.processes) as pool:
        runs = first + list(pool.map(one, todo[1:]))
    check_remainder(runs)
    save(args.out, machine("cpu"), settings, runs)
    print(f"\n{table(runs)}spread of fp32: {spread(runs):.4f}\n{args.out}")
    return 0 if all(v.holds for v in judge(runs)) or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
