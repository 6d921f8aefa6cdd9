"""What settings do to the loss of a small GPT: python -m bench study NAME [words of cells]

    python -m bench study main_job --steps-divided-by 5    shorter runs of the same shape
    python -m bench study main_job muon --seeds 1 2 3 --set muon_lr=0.04 n_layer=3
    python -m bench study wires int8                       cells that have this in their name

A study is a table of cells, name -> settings, and a run that makes a row of one. Rows are added to
bench/results/<folder>/rows.jsonl; what is there already is not run again. `python -m bench report`
writes their tables.

main_job, experts, storage: recipes of `make train`, dense layers beside 8 experts, and the ways to
store weights and moments, each run a process of `fastpar train` with one thread. Recipes take as
much CPU time on a quiet machine; the CPU time that a run took stands beside its loss.

wires, fp8: formats on the wire and products in 8-bit floats, emulated, of a GPT that learns the
bytes of the text of `make train`; ranks are threads. A row has the loss of fixed sequences of the
end of the text in bits a byte at 20 moments, by the weights that the optimizer has.

muon: milliseconds of a step of fastpar.Muon shared out over ranks of one thread each, and of the
same step repeated by every rank, in turns; medians of the slowest rank, their ratio, that of the
least ones, and the bytes that ranks sent beside the formula's.
"""

import itertools
import json
import math
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import stopwatch
from bench.records import RESULTS, commit, machine, parser_of
from fastpar import GPT, AdamW, Mesh, Muon, Outer, engine_of, muon_groups, parallelize
from fastpar.axes.step import Setup, Workload
from fastpar.data.sources import TextSource, open_source
from fastpar.models.gpt import use_fp8
from fastpar.predict.time import comm_ops_of
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import option
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

Settings = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """cells: name -> settings; run(cell) -> what is measured; word: of cells, in the rows; steps:
    the setting that --steps-divided-by divides; common: settings of all cells."""

    folder: str
    word: str
    cells: Mapping[str, Settings]
    run: Callable[[Settings], Settings]
    common: Mapping[str, Any]
    seeds: Sequence[int] = (1, 2, 3)
    steps: str = "max_steps"


# Processes of `fastpar train`


def by_command(cell: Settings) -> Settings:
    """The last validation of a run and its CPU time."""
    settings = cell["settings"]
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


QUIET = {"threads": 1, "eval_every": 0, "save_every": 0, "num_samples": 0, "device": "cpu"}
LINEAR = {"batch_size": 8, "lr_schedule": "linear"}
_MUON = {"optimizer": "muon", **LINEAR}
NARROW = {"max_steps": 1310, **_MUON, "batch_size": 16, "lr": 0.015, "n_embd": 192}
RECIPES: dict[str, Settings] = {
    "adamw, 8": {"max_steps": 2000, "batch_size": 8, "optimizer": "adamw"},
    "adamw, 8, linear": {"max_steps": 2000, **LINEAR},
    "muon, 8": {"max_steps": 1200, **_MUON},
    "muon, 16": {"max_steps": 764, **_MUON, "batch_size": 16},
    "muon, narrow": NARROW,
    "muon, narrow, NanoChat's block": {**NARROW, "model": "nanochat-tiny", "block_size": 128},
}
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


# Bytes of a text


def read_bytes(n: int) -> Tensor:
    """The first n bytes of the text."""
    source = open_source("bible")
    assert isinstance(source, TextSource)
    whole = b"".join(d for d in source.documents() if isinstance(d, bytes))
    return torch.frombuffer(bytearray(whole[:n]), dtype=torch.uint8).long()


def of_wires(config: GPTConfig, seed: int, options: Settings) -> tuple[torch.nn.Module, AdamW]:
    """Two ranks at stage 1, or two replicas."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer, ranks = options.get("outer"), dist.get_world_size()
        mesh = Mesh(replicas=ranks if outer else 1, device="cpu")
        options = {name: value for name, value in options.items() if name != "outer"}
        model = parallelize(GPT(config, seed=seed), mesh, Parallel.of(zero_stage=1, **options))
    optimizer = AdamW(model.parameters(), lr=LR, max_grad_norm=1.0)
    if outer:  # each rank is a replica; the loss is the first one's
        Outer(optimizer, **outer)
    return model, optimizer


def of_fp8(config: GPTConfig, seed: int, options: Settings) -> tuple[torch.nn.Module, AdamW]:
    """One rank in bf16."""
    model = GPT(config, seed=seed).bfloat16()
    use_fp8(model, **options, emulate=True)
    parallelize(model, Mesh(device="cpu"), grad_dtype=torch.float32)
    return model, AdamW(model.parameters(), lr=LR, max_grad_norm=1.0, master_weights=True)


def learn(make: Callable[..., Any], cell: Settings) -> Settings:
    """Train on this rank; what a row says of it."""
    torch.set_num_threads(1)
    text, steps, n_rows = read_bytes(2_000_000), cell["steps"], cell["rows"]
    config = GPTConfig(**cell["shape"], dropout=0.0)
    model, optimizer = make(config, cell["seed"], cell["settings"])
    length, held = config.block_size, cell["validated"] * (config.block_size + 1)
    generator = torch.Generator().manual_seed(cell["seed"])
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if cell["ranks"] > 1 else (0, 1)
    offsets, overflows, curve = torch.arange(length + 1), 0, []
    last = text[-held:].view(cell["validated"], -1)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - held - length - 1, (n_rows,), generator=generator)
        rows = text[starts[rank::ranks, None] + offsets]
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 20, 2 * (1 - (step - 1) / steps))
        model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (scales := getattr(model, "fp8_scales", None)) is not None:
            overflows += int(scales.overflows.sum())
        if step % max(1, steps // EVALS) == 0:
            curve.append([step, validation(model, config, last, alone=ranks == 1)])
    return {"bits_per_byte": curve[-1][1], "curve": curve, "overflows": overflows}


@torch.no_grad()
def validation(model: torch.nn.Module, config: GPTConfig, rows: Tensor, *, alone: bool) -> float:
    """The loss of rows in bits a byte; of several ranks by whole weights, on the first one."""
    whole = model
    if not alone:
        with engine_of(model).gathered():
            if dist.get_rank():
                return math.nan
            state = {name: p.clone() for name, p in model.state_dict().items()}
        whole = GPT(config)
        whole.load_state_dict(state)
    loss = whole(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).item()
    return round(loss / math.log(2), 4)


def in_threads(make: Callable[..., Any], cell: Settings) -> Settings:
    """A run of so many ranks, and its CPU time."""
    began = time.process_time()
    if cell["ranks"] == 1:
        found = learn(make, cell)
    else:
        found = run_ranks(learn, cell["ranks"], make, cell, timeout_s=900)[0]
    return {**found, "cpu_s": round(time.process_time() - began)}


LR, EVALS = 3e-3, 20
OF_WIRES = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 256}
OF_FP8 = {**OF_WIRES, "n_layer": 1, "block_size": 32}
INT8 = {"wire_gradients": "int8"}
FORMATS: dict[str, Settings] = {
    "fp32": {},
    "bf16": {"wire_gradients": "bf16"},
    "int8": INT8,
    "int8, weights too": {**INT8, "wire_weights": "int8"},
    "DiLoCo, every 10": {"outer": {"every": 10}},
    "DiLoCo, every 50": {"outer": {"every": 50}},
    "DiLoCo, every 200": {"outer": {"every": 200}},
    "local SGD, every 50": {"outer": {"every": 50, "lr": 1.0, "momentum": 0.0}},
    "DiLoCo, every 50, momentum 0.5": {"outer": {"every": 50, "momentum": 0.5}},
}
PRODUCTS: dict[str, Settings] = {
    "bf16": {"layers": "none"},
    "mlp, scales of rows": {"layers": "mlp"},
    "all, scales of rows": {"layers": "all"},
    "all, delayed scales, weight gradients too": {
        **{"layers": "all", "scaling": "tensor", "weight_gradient": "fp8"}
    },
}


# Muon's step


def time_rank(shape: Settings, stage: int, rounds: int) -> tuple[list[float], ...]:
    """This rank's milliseconds, sharded and repeated, and [bytes that it sent]."""
    torch.set_num_threads(1)
    config = GPTConfig(**shape, dropout=0.0)
    model = parallelize(GPT(config), Mesh(device="cpu"), zero_stage=stage)
    alone = GPT(config)
    idx = torch.arange(config.block_size)[None]
    sharded, repeated = Muon(muon_groups(model)), Muon(muon_groups(alone))
    alone(idx, idx).backward()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        model(idx, idx).backward()
        for each, optimizer in zip(times, (sharded, repeated)):
            dist.barrier()
            each += stopwatch(optimizer.step, "cpu")[:1]
        sharded.zero_grad()
    (homes,) = sharded._known_owners.values()  # type: ignore[attr-defined]
    return times[0][1:], times[1][1:], [float(homes.sent_bytes)]


def muon_step(cell: Settings) -> Settings:
    ranks, stage, shape = cell["ranks"], cell["zero_stage"], cell["shape"]
    found = run_ranks(time_rank, ranks, shape, stage, cell["rounds"], backend="gloo", timeout_s=600)
    slowest = [[max(each) for each in zip(*(times[i] for times in found))] for i in (0, 1)]
    sharded, repeated = map(statistics.median, slowest)
    on_cpu: Any = {"dtype": "fp32", "device_type": "cpu", "transport": "shm"}
    setup = Setup(world_size=ranks, zero_stage=stage, optimizer="muon", **on_cpu)
    workload = Workload(GPTConfig(**shape, dropout=0.0), ranks)
    sends = [c for c in comm_ops_of(workload, setup) if c.kind == "all_to_all"]
    row: Settings = {"sharded_ms": round(sharded, 1), "repeated_ms": round(repeated, 1)}
    row["ratio"] = round(sharded / repeated, 3)
    row["least_ratio"] = round(min(slowest[0]) / min(slowest[1]), 3)
    row["sent_bytes"] = [int(times[2][0]) for times in found]
    formula = sum(c.count * c.bytes * (c.ranks - 1) / c.ranks for c in sends)
    return row | {"formula_bytes": formula}


OF_MUON = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 32, "vocab_size": 4096}
STEPS = {f"{n} ranks, stage {z}": {"ranks": n, "zero_stage": z} for n in (2, 4) for z in (0, 1)}
_BYTES = {"steps": 2000, "validated": 512}
_OF_MAIN_JOB = {**QUIET, "eval_batches": 1000}
_OF_EXPERTS = {**QUIET, "eval_batches": 50, **LINEAR, "model": "micro"}
_OF_STORAGE = {**QUIET, "eval_every": 50, "eval_batches": 32, "model": "micro"}
_OF_STORAGE |= {"batch_size": 16, "max_steps": 400}
_WIRES = {"ranks": 2, "shape": OF_WIRES, "rows": 16, **_BYTES}
_FP8 = {"ranks": 1, "shape": OF_FP8, "rows": 4, **_BYTES}
_MUONS = {"shape": OF_MUON, "rounds": 7}
STUDIES = {
    "main_job": Study("main_job", "recipe", RECIPES, by_command, _OF_MAIN_JOB, (1,)),
    "experts": Study("experts", "recipe", EXPERTS, by_command, _OF_EXPERTS),
    "storage": Study("storage", "recipe", STORAGE, by_command, _OF_STORAGE, (1, 2, 3, 4)),
    "wires": Study(
        "wires", "format", FORMATS, partial(in_threads, of_wires), _WIRES, steps="steps"
    ),
    "fp8": Study("fp8", "products", PRODUCTS, partial(in_threads, of_fp8), _FP8, steps="steps"),
    "muon": Study("muon", "step", STEPS, muon_step, _MUONS, (1,), "rounds"),
}


def cell_of(study: Study, name: str, seed: int, divisor: int, given: Settings) -> Settings:
    """What a row says of a run before it."""
    settings = {**study.cells[name], **given}
    cell = {**study.common, study.word: ", ".join([name, *(f"{n}={v}" for n, v in given.items())])}
    if study.run is by_command:  # all of it is a setting
        settings = {**study.common, **settings, "seed": seed}
        settings[study.steps] = max(1, settings[study.steps] // divisor)
        TrainConfig().replace(settings, "--set")
        return {study.word: cell[study.word], "seed": seed, "settings": settings}
    cell[study.steps] = max(1, cell[study.steps] // divisor)
    return cell | (settings if study.run is muon_step else {"seed": seed, "settings": settings})


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
    path = args.into / study.folder / "rows.jsonl"
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
        row = {**cell, **study.run(cell), "machine": about, "commit": code, "dirty": dirty}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = {n: v for n, v in row.items() if isinstance(v, float | int) or n == study.word}
        print(json.dumps(shown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
