"""One model on 4 ranks: tensor parallel, with ZeRO-3, grids; what each sends and holds.

    python -m bench.systems.grid

One real rank of an emulated mesh trains for a step; its operations are counted and put on limited
links. Every row's bytes inside of layers are compared with the formula of fastpar/cost before it
counts. The second table is on paper: formulas alone, to 1,024 ranks. Memory is what stays between
steps. The ratios of ColossalAI's authors are theirs (other models, other machines, 16-bit, without
sequence parallelism): nobody has published them beside tensor parallelism x ZeRO-3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.records import RESULTS, machine, machine_line
from bench.systems.emulated import ETHERNET_25, NVLINK, EmulatedMesh, Link, emulated
from fastpar import GPT, AdamW, GPTConfig, engine_of, parallelize
from fastpar.config.model import PRESETS
from fastpar.cost.memory_model import predict_states
from fastpar.cost.operations import CommOp, comm_ops_of
from fastpar.cost.workload import Setup, Workload

SHAPE = GPTConfig(4, 8, 256, 128, 4096, dropout=0.0)
B = 8  # sequences of a step
FACTORS = {"all_reduce": 2.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 4, sequence parallel": {"tp": 4},
    "TP 2 x ZeRO-3": {"tp": 2, "zero_stage": 3},
    "grid 2x2 (2-D)": {"tp": 2, "tp_grid": "2x2"},
    "grid 1x2x2 (2.5-D), ZeRO-3": {"tp": 2, "tp_grid": "1x2x2", "zero_stage": 3},
}
PAPER = (16, 64, 256, 1024)
PUBLISHED = (
    "Optimus, 64 GPUs: training 1.48x Megatron without sequence parallelism (arXiv 2104.05343)",
    "Tesseract, 64 GPUs: 1.38x Megatron, 1.53x Optimus, strong scaling (arXiv 2105.14500)",
)


def sent(comm: CommOp) -> float:
    """Bytes that a rank of a ring sends for it, over all its calls."""
    share = (comm.ranks - 1) / comm.ranks
    return FACTORS.get(comm.kind, 1.0) * share * comm.bytes * comm.count


def setup_of(ranks: int, layout: dict[str, Any], batch: int = B, dtype: str = "fp32") -> Setup:
    formats: dict[str, Any] = {
        "dtype": dtype,
        "master_weights": "full" if dtype == "bf16" else "none",
    }
    setup = Setup(world_size=ranks, device_type="cpu", transport="shm", **formats, **layout)
    return Setup(**{**vars(setup), "micro_batch_size": batch // setup.dp})


def measured(layout: dict[str, Any]) -> dict[str, Any]:
    """A step of one rank of 4."""
    setup, workload = setup_of(4, layout), Workload(SHAPE, B)
    grid = layout.get("tp_grid")
    axes: dict[str, Any] = {"tp": layout["tp"]}
    if grid is not None:
        axes = {"tp_grid": tuple(map(int, grid.split("x")))}
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(EmulatedMesh(4, 0, **axes))
        link = Link(None)
        stack.callback(link.close)
        model = GPT(SHAPE)
        stage = layout.get("zero_stage", 0)
        parallelize(model, mesh, collectives=emulated(link), zero_stage=stage)
        optimizer = AdamW(model.parameters())
        idx = torch.arange(B // setup.dp * 128).view(-1, 128) % 4096
        for _ in range(2):  # the first step has no state yet
            link.ops.clear()
            model(idx, idx).backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        kinds, stage = engine_of(model).memory(), engine_of(model).zero_stage
        held = kinds["parameter shards" if stage == 3 else "parameters"]
        held += sum(v.nbytes for v in moments)
        ops = [op for op in link.ops if op.role != "control" and op.wire_bytes]
    of_layers = sum(op.wire_bytes for op in ops if op.role == "tp")
    comms = [c for c in comm_ops_of(workload, setup) if c.axis != "control"]
    paper = sum(sent(c) for c in comms if c.axis == "tp")
    if abs(of_layers - paper) > 0.01 * paper:
        raise AssertionError(f"bench grid: {layout}: counted {of_layers}, by formula {paper}")
    states = predict_states(workload, setup)
    total = sum(op.wire_bytes for op in ops)
    links = {p.name: sum(p.ms(op.wire_bytes, 1) for op in ops) for p in (NVLINK, ETHERNET_25)}
    return {
        "sent_bytes": total,
        "of_layers_bytes": of_layers,
        "formula_bytes": sum(map(sent, comms)),
        "messages": len(ops),
        "held_bytes": held,
        "held_formula_bytes": states.parameters + states.optimizer,
        "link_ms": links,
    }


def on_paper(ranks: int) -> dict[str, dict[str, float]]:
    """GPT-2 XL in bf16, 4 sequences a rank: bytes and messages of a step, states of a rank."""
    q = int(ranks**0.5)
    q_deep = q // 2
    batch, shape = 4 * ranks, PRESETS["gpt2-xl"]
    layouts: dict[str, dict[str, Any]] = {
        "TP 8 x ZeRO-3, groups of 8": {"tp": min(8, q), "zero_stage": 3, "shard_size": 8},
        f"TP {min(q, 16)} x ZeRO-3": {"tp": min(q, 16), "zero_stage": 3},
    }
    if q <= 16:
        layouts[f"grid {q}x{q}"] = {"tp": q, "tp_grid": f"{q}x{q}"}
    layouts[f"grid {q_deep}x{q_deep}x4"] = {"tp": q_deep, "tp_grid": f"{q_deep}x{q_deep}x4"}
    found = {}
    for name, layout in layouts.items():
        setup, workload = setup_of(ranks, layout, batch, "bf16"), Workload(shape, batch)
        comms = [c for c in comm_ops_of(workload, setup) if c.axis != "control"]
        states = predict_states(workload, setup)
        found[name] = {
            "sent_bytes": sum(map(sent, comms)),
            "messages": sum(c.count for c in comms),
            "states_bytes": states.total,
        }
    return found


def table(found: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# Tensor parallelism on a grid, beside what replaced it",
        "",
        "Written by `python -m bench.systems.grid`. " + (__doc__ or "").split("\n\n", 2)[2].strip(),
        "",
        f"4 ranks, {SHAPE.n_layer} layers of {SHAPE.n_embd}, T={SHAPE.block_size}, {B} sequences, "
        "fp32, AdamW; times are emulated: bytes and latency of messages one after another, nothing "
        "hidden.",
        "",
        "| layout | sent, MB a step and rank | by formula | of it inside of layers | messages | "
        "weights and moments, MB | by formula | " + " | ".join(found["links"]) + " |",
        "|---|" + "---:|" * (6 + len(found["links"])),
    ]
    for name, row in found["ranks_4"].items():
        mb = [f"{row[key] / 1e6:.2f}" for key in ("sent_bytes", "formula_bytes", "of_layers_bytes")]
        held = [f"{row[key] / 1e6:.2f}" for key in ("held_bytes", "held_formula_bytes")]
        times = [f"{ms:.2f} ms" for ms in row["link_ms"].values()]
        lines.append(f"| {' | '.join([name, *mb, str(row['messages']), *held, *times])} |")
    lines += ["", "Published by the authors of ColossalAI's layers:", ""]
    lines += [f"- {text}" for text in PUBLISHED]
    lines += [
        "",
        "On paper: GPT-2 XL, bf16, 4 sequences a rank and step (grids with stage 0):",
        "",
        "| ranks | layout | sent, GB a step and rank | messages | states, GB a rank |",
        "|---:|---|---:|---:|---:|",
    ]
    for ranks, rows in found["paper"].items():
        for name, row in rows.items():
            numbers = f"{row['sent_bytes'] / 1e9:.1f} | {row['messages']:,.0f}"
            lines.append(f"| {ranks} | {name} | {numbers} | {row['states_bytes'] / 1e9:.2f} |")
    return "\n".join([*lines, "", f"{machine_line(found['machine'])}.", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes grid.json and README.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.grid", description=__doc__)
    parser.add_argument("--into", type=Path, default=RESULTS / "grid")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {
        "machine": machine("cpu"),
        "links": [p.name for p in (NVLINK, ETHERNET_25)],
        "ranks_4": {name: measured(layout) for name, layout in LAYOUTS.items()},
        "paper": {str(ranks): on_paper(ranks) for ranks in PAPER},
    }
    args.into.mkdir(parents=True, exist_ok=True)
    (args.into / "grid.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.into / "README.md").write_text(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
