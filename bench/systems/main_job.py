"""What `make train` should be: recipes at equal CPU time, each a process of `fastpar train`.

    python -m bench.systems.main_job                        every recipe, seed 1: half an hour each
    python -m bench.systems.main_job muon --seeds 1 2 3     some of them, more seeds
    python -m bench.systems.main_job --steps-divided-by 5   shorter runs of the same shape
    python -m bench.systems.main_job muon --set muon_lr=0.04 n_layer=3        with other settings

Steps of a recipe are so many that all take as much CPU time as 2000 steps of adamw on a quiet
machine; beside the loss, which is that of the whole validation text, stands the CPU time that the
run really took, so that a busy machine tells on nothing but the wait. A run is one process of one
thread; `make train` has two ranks, and their losses to rounding. Rows are added to
bench/results/main_job/rows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import RESULTS, commit, machine
from fastpar.config.config import TrainConfig, option

RECIPES: dict[str, dict[str, Any]] = {
    "adamw, 8": {"max_steps": 2000, "batch_size": 8, "optimizer": "adamw"},
    "adamw, 8, linear": {"max_steps": 2000, "batch_size": 8, "lr_schedule": "linear"},
    "muon, 8": {"max_steps": 1200, "batch_size": 8, "optimizer": "muon", "lr_schedule": "linear"},
    "muon, 16": {"max_steps": 764, "batch_size": 16, "optimizer": "muon", "lr_schedule": "linear"},
    "muon, narrow": {
        "max_steps": 1310,
        "batch_size": 16,
        "optimizer": "muon",
        "lr_schedule": "linear",
        "lr": 0.015,
        "n_embd": 192,
    },
}
COMMON = {"threads": 1, "eval_every": 0, "save_every": 0, "num_samples": 0, "device": "cpu"}
COMMON["eval_batches"] = 1000  # more than there are


def train_once(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """One run: its settings, last validation and CPU time."""
    settings = {**COMMON, **settings, "seed": seed}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fastpar", "train", f"--out={folder}/run"]
        command += [f"{option(name)}={value}" for name, value in settings.items()]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loss = re.search(r"^validation loss ([\d.]+)", printed, re.MULTILINE)
    bits = re.search(r"^bits per byte of text ([\d.]+)", printed, re.MULTILINE)
    if loss is None or bits is None:
        raise RuntimeError(f"main_job: expected a last validation, got {printed[-500:]!r}")
    shape = TrainConfig().replace(settings).model_config(vocab_size=1)
    return {
        "settings": settings,
        "tokens": settings["max_steps"] * settings["batch_size"] * shape.block_size,
        "val_loss": float(loss[1]),
        "bits_per_byte": float(bits[1]),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # a word


def keep(row: dict[str, Any], folder: Path) -> None:
    """Add a row to the file of the results."""
    path = folder / "rows.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.main_job", description=__doc__)
    parser.add_argument("words", nargs="*", help="recipes that have one of these in their name")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps-divided-by", type=int, default=1, metavar="N")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--into", type=Path, default=RESULTS / "main_job")
    args = parser.parse_args(argv)
    names = [n for n in RECIPES if not args.words or any(word in n for word in args.words)]
    if not names:
        parser.error(f"expected words of {', '.join(RECIPES)}, got {' '.join(args.words)}")
    try:
        given = {name: _value(text) for name, text in (each.split("=", 1) for each in args.set)}
        TrainConfig().replace(given, "--set")
    except ValueError as error:
        parser.error(str(error))
    about, (code, dirty) = machine("cpu"), commit()
    for seed in args.seeds:
        for name in names:
            recipe = {**RECIPES[name], **given}
            recipe["max_steps"] = max(1, recipe["max_steps"] // args.steps_divided_by)
            row = {"recipe": ", ".join((name, *args.set)), "seed": seed}
            row |= train_once(recipe, seed)
            keep({**row, "machine": about, "commit": code, "dirty": dirty}, args.into)
            says = f"{row['bits_per_byte']} bits a byte, {row['cpu_s']} CPU s"
            print(f"{row['recipe']}, seed {seed}: {says}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
