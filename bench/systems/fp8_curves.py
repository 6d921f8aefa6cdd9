"""Loss after training with products in 8-bit floats: python -m bench.systems.fp8_curves

A small GPT in bf16 learns the bytes of the text that ships with a dependency, in one process on a
CPU, where fp8 is emulated; all else is equal. A row has the loss over fixed sequences of the end of
the text and the mean training loss of every 100 steps, in bits a byte, and how many values
overflowed. Rows are added to bench/results/fp8/rows.jsonl, and the table is written from them; what
is there already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.records import RESULTS, commit, machine, machine_line
from bench.systems.main_job import keep
from bench.systems.wire_curves import known, read_bytes
from fastpar import GPT, AdamW, Mesh, parallelize
from fastpar.config.config import GPTConfig
from fastpar.models.fp8 import use_fp8

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 256}
ROWS, STEPS, LR, VALIDATE, EVERY = 4, 2000, 3e-3, 512, 100
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"layers": "none"},
    "mlp, scales of rows": {"layers": "mlp"},
    "all, scales of rows": {"layers": "all"},
    "all, delayed scales, weight gradients too": {
        "layers": "all",
        "scaling": "tensor",
        "weight_gradient": "fp8",
    },
}


def train(text: torch.Tensor, options: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """What a row says of one run."""
    config = GPTConfig(**SHAPE, dropout=0.0)
    model = GPT(config, seed=seed).bfloat16()
    use_fp8(model, **options, emulate=True)
    parallelize(model, Mesh(device="cpu"), grad_dtype=torch.float32)
    optimizer = AdamW(model.parameters(), lr=LR, max_grad_norm=1.0, master_weights=True)
    length, held = config.block_size, VALIDATE * (config.block_size + 1)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    offsets, overflows = torch.arange(length + 1), 0
    for step in range(steps):
        starts = torch.randint(len(text) - held - length - 1, (ROWS, 1), generator=generator)
        rows = text[starts + offsets]
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / math.log(2))
        if model.fp8_scales is not None:
            overflows += int(model.fp8_scales.overflows.sum())
    rows = text[-held:].view(VALIDATE, -1)
    with torch.no_grad():
        last = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).item() / math.log(2)
    means = [statistics.fmean(losses[i : i + EVERY]) for i in range(0, steps, EVERY)]
    curve = [round(mean, 4) for mean in means]
    return {"bits_per_byte": round(last, 4), "curve": curve, "overflows": overflows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Every kind beside bf16 on the same seeds."""
    lines = [
        "| products | seeds | bits a byte | from bf16, mean (each) | within the spread of bf16 | "
        "values that overflowed |",
        "|---|---|---|---|---|---|",
    ]
    base = {r["seed"]: r["bits_per_byte"] for r in rows if r["products"] == "bf16"}
    spread = max(base.values()) - min(base.values())
    for kind in KINDS:
        own = {r["seed"]: r for r in rows if r["products"] == kind and r["seed"] in base}
        if not own:
            continue
        apart = [r["bits_per_byte"] - base[seed] for seed, r in sorted(own.items())]
        mean = statistics.fmean(apart)
        each = ", ".join(f"{x:+.4f}" for x in apart)
        last = statistics.fmean(r["bits_per_byte"] for r in own.values())
        cells = [kind, str(len(own)), f"{last:.4f}", f"{mean:+.4f} ({each})"]
        cells += ["yes" if abs(mean) <= spread else "**no**"]
        lines.append(f"| {' | '.join(cells)} | {sum(r['overflows'] for r in own.values()):,} |")
    return "\n".join(lines) + f"\n\nSpread of bf16 over its seeds: {spread:.4f}.\n"


def write_table(folder: Path) -> None:
    """table.md of the rows that there are."""
    rows = known(folder)
    line = machine_line(rows[-1]["machine"])
    steps = rows[-1]["steps"]
    (folder / "table.md").write_text(
        f"# Products in 8-bit floats, emulated on a CPU: {steps} steps of a small GPT\n\n"
        f"{table(rows)}\n{line}. Written by `python -m bench.systems.fp8_curves`.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.fp8_curves", description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--into", type=Path, default=RESULTS / "fp8")
    args = parser.parse_args(argv)
    about, (code, dirty) = machine("cpu"), commit()
    text = read_bytes(2_000_000)
    torch.set_num_threads(1)
    for seed, name in itertools.product(args.seeds, args.kinds):
        cell = {"products": name, "settings": KINDS[name], "seed": seed, "steps": args.steps}
        cell |= {"shape": SHAPE, "rows": ROWS, "validated": VALIDATE}
        if any(cell.items() <= row.items() for row in known(args.into)):
            continue
        began = time.process_time()
        row = {**cell, **train(text, KINDS[name], seed, args.steps)}
        row |= {"cpu_s": round(time.process_time() - began), "machine": about}
        keep({**row, "commit": code, "dirty": dirty}, args.into)
        print(json.dumps({k: row[k] for k in ("products", "seed", "bits_per_byte")}), flush=True)
        write_table(args.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
