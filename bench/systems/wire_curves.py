"""Loss after training with each format on the wire: python -m bench.systems.wire_curves

Two ranks, as threads of one process, train a small GPT on the bytes of the text that ships with a
dependency; all else is equal. A row has the loss over fixed sequences of the end of the text, in
bits a byte, at 20 moments of the run. The weights are those that the optimizer has. Rows are added
to bench/results/wires/rows.jsonl; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.records import RESULTS, commit, machine
from bench.systems.main_job import keep
from fastpar import GPT, AdamW, Mesh, Outer, engine_of, parallelize
from fastpar.config.config import GPTConfig
from fastpar.data.sources import TextSource, open_source
from fastpar.testing import run_ranks

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 256}
RANKS, ROWS, STEPS, LR, VALIDATE, EVALS = 2, 16, 2000, 3e-3, 512, 20
INT4 = {"wire_gradients": "int4"}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"wire_gradients": "bf16"},
    "int8": {"wire_gradients": "int8"},
    "int8, fed back": {"wire_gradients": "int8", "error_feedback": True},
    "int4": INT4,
    "int4, fed back": {**INT4, "error_feedback": True},
    "fp8": {"wire_gradients": "fp8"},
    "int8, weights too": {"wire_gradients": "int8", "wire_weights": "int8"},
    "DiLoCo, every 10": {"outer": {"every": 10}},
    "DiLoCo, every 50": {"outer": {"every": 50}},
    "DiLoCo, every 200": {"outer": {"every": 200}},
    "local SGD, every 50": {"outer": {"every": 50, "lr": 1.0, "momentum": 0.0}},
    "DiLoCo, every 50, momentum 0.5": {"outer": {"every": 50, "momentum": 0.5}},
}


def read_bytes(n: int) -> torch.Tensor:
    """The first n bytes of the text."""
    source = open_source("bible")
    assert isinstance(source, TextSource)
    whole = b"".join(d for d in source.documents() if isinstance(d, bytes))
    return torch.frombuffer(bytearray(whole[:n]), dtype=torch.uint8).long()


def train(text: torch.Tensor, options: dict[str, Any], seed: int, steps: int) -> list[list[float]]:
    """[step, loss in bits a byte] of EVALS moments, the last step among them."""
    torch.set_num_threads(1)
    config, rank = GPTConfig(**SHAPE, dropout=0.0), dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer, ranks = options.get("outer"), dist.get_world_size()
        mesh = Mesh(replicas=ranks if outer else 1, device="cpu")
        options = {name: value for name, value in options.items() if name != "outer"}
        model = parallelize(GPT(config, seed=seed), mesh, zero_stage=1, **options)
    optimizer = AdamW(model.parameters(), lr=LR, max_grad_norm=1.0)
    if outer:  # each rank is a replica; the loss is the first one's
        Outer(optimizer, **outer)
    time_, held = config.block_size, VALIDATE * (config.block_size + 1)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(time_ + 1)
    curve: list[list[float]] = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - held - time_ - 1, (ROWS,), generator=generator)
        rows = text[starts[rank :: dist.get_world_size(), None] + offsets]
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 20, 2 * (1 - (step - 1) / steps))
        model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // EVALS) == 0:
            curve.append([step, validation(model, config, text[-held:].view(VALIDATE, -1))])
    return curve


def validation(model: torch.nn.Module, config: GPTConfig, rows: torch.Tensor) -> float:
    """The loss of rows in bits a byte, by the weights that the optimizer has."""
    with engine_of(model).gathered(), torch.no_grad():
        if dist.get_rank():
            return math.nan
        whole = GPT(config)
        whole.load_state_dict({name: p.clone() for name, p in model.state_dict().items()})
        loss = whole(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).item()
    return round(loss / math.log(2), 4)


def known(folder: Path) -> list[dict[str, Any]]:
    """The rows that there are."""
    path = folder / "rows.jsonl"
    return [json.loads(r) for r in path.read_text().splitlines()] if path.exists() else []


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.systems.wire_curves", description=__doc__
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--into", type=Path, default=RESULTS / "wires")
    args = parser.parse_args(argv)
    about, (code, dirty) = machine("cpu"), commit()
    text = read_bytes(2_000_000)
    for seed, name in itertools.product(args.seeds, args.formats):
        cell = {"format": name, "settings": FORMATS[name], "seed": seed, "steps": args.steps}
        cell |= {"ranks": RANKS, "shape": SHAPE, "rows": ROWS, "validated": VALIDATE}
        if any(cell.items() <= row.items() for row in known(args.into)):
            continue
        began = time.process_time()
        found = run_ranks(train, RANKS, text, FORMATS[name], seed, args.steps, timeout_s=900)
        row = {**cell, "bits_per_byte": found[0][-1][1], "curve": found[0]}
        row |= {"cpu_s": round(time.process_time() - began), "machine": about}
        keep({**row, "commit": code, "dirty": dirty}, args.into)
        print(json.dumps({k: row[k] for k in ("format", "seed", "bits_per_byte")}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
