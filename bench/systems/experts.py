"""The loss of a small GPT with experts at step 10 on many layouts, and beside a dense one.

    python -m bench.systems.experts layouts    every layout, as threads of this process
    python -m bench.systems.experts table      the table of layouts and curves, from their rows

Layouts run in deterministic mode on the text of `make train`, in micro-batches of two sequences,
eight a step; the 18 layouts of torchtitan's own matrix lie from 9.73 to 9.97. Curves are rows of
bench.systems.main_job: two shapes that take as many flops a token, the experts' hidden width being
4 * n_embd / top_k. Rows go to bench/results/experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import RESULTS, commit, machine
from fastpar.comm.mesh import Mesh
from fastpar.config.config import TrainConfig
from fastpar.testing import run_ranks
from fastpar.train.metrics import read_metrics
from fastpar.train.trainer import Trainer

STEPS = 10
SETTINGS: dict[str, Any] = {
    **{"model": "micro", "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32},
    **{"tokenizer": "bytes", "batch_size": 8, "micro_batch_size": 2, "max_steps": STEPS},
    **{"n_expert": 4, "balance_loss": 0.1, "router_z_loss": 0.01, "balance_rate": 0.01},
    **{"eval_every": 0, "save_every": 0, "num_samples": 0, "eval_batches": 1, "threads": 1},
    **{"device": "cpu", "deterministic": True, "lr": 2e-3, "dropout": 0.1},
}
LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (1, {"activation_checkpointing": "full"}),
    *((2, {"zero_stage": stage}) for stage in (0, 3)),
    *((2, {"ep": 2, "zero_stage": stage}) for stage in (0, 1, 2, 3)),
    (2, {"ep": 2, "zero_stage": 2, "accumulate": "full"}),
    (2, {"ep": 2, "activation_checkpointing": "selective"}),
    *((4, {"ep": ep, "zero_stage": stage}) for ep in (2, 4) for stage in (0, 3)),
    (4, {"ep": 2, "zero_stage": 2, "shard_size": 2}),
    (4, {"ep": 2, "pp": 2, "zero_stage": 1}),
)


def name_of(ranks: int, changes: dict[str, Any]) -> str:
    return ", ".join([f"{ranks} ranks", *(f"{n}={v}" for n, v in changes.items())])


def _rank(settings: dict[str, Any]) -> int:
    config = TrainConfig().replace(settings)
    parallel = config.parallel
    return Trainer(config, Mesh(ep=parallel.ep, pp=parallel.pp, tp=parallel.tp, device="cpu")).run()


def last_loss(ranks: int, changes: dict[str, Any], **more: Any) -> float:
    """The training loss of the last step on one layout."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        run_ranks(_rank, ranks, {**SETTINGS, **changes, **more, "out": out}, timeout_s=300.0)
        return float(
            [row for row in read_metrics(Path(out) / "metrics.jsonl") if "loss" in row][-1]["loss"]
        )


def layouts(into: Path) -> int:
    """All of them; the exit status."""
    code, dirty = commit()
    rows: list[dict[str, Any]] = []
    for ranks, changes in LAYOUTS:
        loss = last_loss(ranks, changes)
        rows.append({"layout": name_of(ranks, changes), "loss": loss})
        print(f"{rows[-1]['layout']:60} {loss!r}", flush=True)
    spread = max(row["loss"] for row in rows) - min(row["loss"] for row in rows)
    found = {"machine": machine("cpu"), "commit": code, "dirty": dirty, "step": STEPS}
    into.mkdir(parents=True, exist_ok=True)
    found |= {"spread": spread, "layouts": rows, "settings": SETTINGS}
    (into / "layouts.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} layouts, spread {spread!r}")
    return int(spread != 0)


def table(folder: Path) -> int:
    """layouts.json and rows.jsonl as text, into README.md."""
    lines = ["# Experts", "", "Written by `python -m bench.systems.experts table`; see there."]
    if (folder / "layouts.json").exists():
        found = json.loads((folder / "layouts.json").read_text())
        lines += [
            "",
            f"Loss at step {found['step']} in deterministic mode, CPU, commit {found['commit']}:",
        ]
        lines += [f"{len(found['layouts'])} layouts, spread {found['spread']}.", ""]
        lines += ["| layout | loss |", "| --- | ---: |"]
        lines += [f"| {row['layout']} | {row['loss']!r} |" for row in found["layouts"]]
    if (folder / "rows.jsonl").exists():
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        lines += ["", "Dense and 8 experts, top 2, as many flops a token; one CPU thread:", ""]
        lines += [
            "| settings | tokens | seeds | validation loss | CPU s a run |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for recipe in dict.fromkeys(row["recipe"] for row in rows):
            own = [row for row in rows if row["recipe"] == recipe]
            losses = [row["val_loss"] for row in own]
            cells = (
                recipe.removeprefix("adamw, 8, linear, "),
                f"{own[0]['tokens']:,}",
                len(own),
                f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
                f"{statistics.mean(row['cpu_s'] for row in own):.0f}",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines += [
            "",
            f"Commit {rows[-1]['commit']}, {rows[-1]['machine']['cpu']}."
            if "cpu" in rows[-1]["machine"]
            else "",
        ]
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.experts", description=__doc__)
    parser.add_argument("what", choices=("layouts", "table"))
    parser.add_argument("--into", type=Path, default=RESULTS / "experts")
    args = parser.parse_args(argv)
    return layouts(args.into) if args.what == "layouts" else table(args.into)


if __name__ == "__main__":
    sys.exit(main())
