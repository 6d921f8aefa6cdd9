"""What settings do to the loss of a small GPT: python -m bench study NAME [words of cells]

    python -m bench study main_job --steps-divided-by 5    shorter runs of the same shape
    python -m bench study main_job muon --seeds 1 2 3 --set muon_lr=0.04 n_layer=3
    python -m bench study wires int8                       cells that have this in their name

A study is a table of cells, name -> settings, and a run that makes a row of one. Rows are added to
bench/results/<folder>/rows.jsonl; what is there already is not run again. `python -m bench report`
writes their tables.

A run is a process of `fastpar train`, each of its ranks with one thread. main_job, experts,
storage: recipes of `make train`, dense layers beside 8 experts, the ways to store weights and
moments; recipes take as much CPU time on a quiet machine, which stands beside the loss. wires, fp8:
formats on the wire and products in 8-bit floats, emulated, of a GPT that learns the bytes of the
text of `make train`.
"""

import itertools
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.records import RESULTS, commit, machine, parser_of
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import option

Settings = dict[str, Any]


class Study(NamedTuple):
    """cells: name -> settings; word: of cells, in the rows; common: settings of all cells."""

    word: str
    cells: Mapping[str, Settings]
    common: Mapping[str, Any]
    seeds: Sequence[int] = (1, 2, 3)


def run(settings: Settings) -> Settings:
    """The last validation of a run and its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fastpar", "train", f"--out={folder}/run"]
        for name, value in settings.items():
            command += [option(name) if value is True else f"{option(name)}={value}"]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = "validation loss", "bits per byte of text"
    loss, bits = (re.search(rf"^{each} ([\d.]+)", printed, re.MULTILINE) for each in words)
    if loss is None or bits is None:
        raise RuntimeError(f"study: expected a last validation, got {printed[-500:]!r}")
    config = TrainConfig().replace(settings)
    shape = config.model_config(vocab_size=1)
    tokens = config.run.max_steps * config.text.batch_size * shape.block_size
    seconds = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    found = {"val_loss": float(loss[1]), "bits_per_byte": float(bits[1])}
    return {"tokens": tokens, **found, "cpu_s": seconds}


LINEAR = {"batch_size": 8, "lr_schedule": "linear"}
_MUON = {"optimizer": "muon", **LINEAR}
NARROW = {"max_steps": 1310, **_MUON, "batch_size": 16, "lr": 0.015, "n_embd": 192}
RECIPES: dict[str, Settings] = {
    "adamw, 8": {"max_steps": 2000, "batch_size": 8, "optimizer": "adamw"},
    "adamw, 8, linear": {"max_steps": 2000, **LINEAR}, "muon, 8": {"max_steps": 1200, **_MUON},
    "muon, 16": {"max_steps": 764, **_MUON, "batch_size": 16}, "muon, narrow": NARROW,
    "muon, narrow, NanoChat's block": {**NARROW, "model": "nanochat-tiny", "block_size": 128},
}  # fmt: skip
EXPERTS: dict[str, Settings] = {  # as many floating-point operations a token, or seconds
    "dense": {"max_steps": 1000},
    "8 experts, top 2": {"max_steps": 1000, "n_expert": 8, "expert_hidden": 256},
    "dense, as long": {"max_steps": 1390},
}
STORAGE: dict[str, Settings] = {
    "fp32": {"dtype": "fp32"},
    "bf16, fp32 master": {"dtype": "bf16"},
    "bf16, 16-bit remainder": {"dtype": "bf16", "master_weights": "remainder"},
    "bf16, stochastic rounding": {"dtype": "bf16", "stochastic_rounding": True},
    "fp32, bf16 moments": {"dtype": "fp32", "moment_dtype": "bf16"},
    "fp32, 8-bit moments": {"dtype": "fp32", "moment_dtype": "int8"},
    "bf16, stochastic rounding, 8-bit moments": {
        **{"dtype": "bf16", "stochastic_rounding": True, "moment_dtype": "int8"}
    },
    "adafactor": {"dtype": "fp32", "optimizer": "adafactor", "lr": 0.03},
}


_NO_MOMENTUM = {"outer_lr": 1.0, "outer_momentum": 0.0}
FORMATS: dict[str, Settings] = {
    "fp32": {}, "bf16": {"wire_gradients": "bf16"}, "int8": {"wire_gradients": "int8"},
    "int8, weights too": {"wire_gradients": "int8", "wire_weights": "int8"},
    **{f"DiLoCo, every {n}": {"replicas": 2, "outer_every": n} for n in (10, 50, 200)},
    "local SGD, every 50": {"replicas": 2, "outer_every": 50, **_NO_MOMENTUM},
    "DiLoCo, every 50, momentum 0.5": {"replicas": 2, "outer_every": 50, "outer_momentum": 0.5},
}  # fmt: skip
PRODUCTS: dict[str, Settings] = {
    "bf16": {},
    "mlp, scales of rows": {"fp8": "mlp", "fp8_emulate": True},
    "all, scales of rows": {"fp8": "all", "fp8_emulate": True},
    "all, delayed scales, weight gradients too": {
        **{"fp8": "all", "fp8_emulate": True},
        **{"fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"},
    },
}

QUIET = {"threads": 1, "eval_every": 0, "save_every": 0, "num_samples": 0, "device": "cpu"}
_BYTES = {**QUIET, "eval_batches": 32, "model": "micro", "tokenizer": "bytes", "lr": 3e-3}
_BYTES |= {"lr_schedule": "linear", "n_head": 2, "n_embd": 64, "max_steps": 2000}
_STORAGE = {**QUIET, "eval_every": 50, "eval_batches": 32, "model": "micro"}
_STORAGE |= {"batch_size": 16, "max_steps": 400}
_WIRES, _FP8 = {"nproc": 2, "zero_stage": 1, "n_layer": 2}, {"dtype": "bf16", "n_layer": 1}
STUDIES = {
    "main_job": Study("recipe", RECIPES, {**QUIET, "eval_batches": 1000}, (1,)),
    "experts": Study("recipe", EXPERTS, {**QUIET, "eval_batches": 50, **LINEAR, "model": "micro"}),
    "storage": Study("recipe", STORAGE, _STORAGE, (1, 2, 3, 4)),
    "wires": Study("format", FORMATS, {**_BYTES, **_WIRES, "block_size": 64, "batch_size": 16}),
    "fp8": Study("products", PRODUCTS, {**_BYTES, **_FP8, "block_size": 32, "batch_size": 4}),
}


def cell_of(study: Study, name: str, seed: int, divisor: int, given: Settings) -> Settings:
    """What a row says of a run before it."""
    settings = {**study.common, **study.cells[name], **given, "seed": seed}
    settings["max_steps"] = max(1, settings["max_steps"] // divisor)
    TrainConfig().replace(settings, "--set")
    return {
        study.word: ", ".join([name, *(f"{n}={v}" for n, v in given.items())]),
        **{"seed": seed, "settings": settings},
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # a word


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status."""
    parser = parser_of("bench study", __doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("words", nargs="*", help="cells that have one of these in their name")
    parser.add_argument("--seeds", nargs="+", type=int, help="unset: the study's own")
    parser.add_argument("--steps-divided-by", type=int, default=1, metavar="N")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--into", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    study = STUDIES[args.study]
    names = [n for n in study.cells if not args.words or any(word in n for word in args.words)]
    if not names:
        parser.error(f"expected words of {', '.join(study.cells)}, got {' '.join(args.words)}")
    given = {name: _value(text) for name, text in (each.split("=", 1) for each in args.set)}
    path = args.into / args.study / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    about, (code, dirty) = machine("cpu"), commit()
    for seed, name in itertools.product(args.seeds or study.seeds, names):
        try:
            cell = cell_of(study, name, seed, args.steps_divided_by, given)
        except ValueError as error:
            parser.error(str(error))
        known = path.read_text().splitlines() if path.exists() else []
        if any(cell.items() <= json.loads(row).items() for row in known):
            continue
        row = {**cell, **run(cell["settings"]), "machine": about, "commit": code, "dirty": dirty}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = {n: v for n, v in row.items() if isinstance(v, float | int) or n == study.word}
        print(json.dumps(shown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
