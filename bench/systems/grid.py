"""One model on 4 ranks: tensor parallel, with ZeRO-3, grids; what each sends, holds and takes.

    python -m bench.systems.grid [--mbit 1000]

One real rank of an emulated mesh trains for a step; its operations are counted, put on limited
links, and its peak of memory measured. Every row's bytes inside of layers, and its peak, are
compared with the formulas of fastpar/cost before it counts. With --mbit four ranks of a thread each
train behind real links of that rate (bench/systems/links.py), layout after layout, there and back;
their losses must agree. The last table is on paper: formulas alone, to 1,024 ranks, with what
`fastpar plan` says of each number of GPUs. The ratios of ColossalAI's authors are theirs (other
models, other machines, 16-bit, without sequence parallelism): nobody has published them beside
tensor parallelism x ZeRO-3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.records import RESULTS, machine, machine_line
from bench.systems import links
from bench.systems.emulated import (
    ETHERNET_25,
    NVLINK,
    EmulatedMesh,
    InlineCollectives,
    Link,
    emulated,
)
from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.config.axes import parse_grid
from fastpar.config.model import PRESETS
from fastpar.cost.datasheet import DatasheetRates
from fastpar.cost.devices import Cluster
from fastpar.cost.memory_model import predict_memory, predict_states
from fastpar.cost.operations import CommOp, comm_ops_of
from fastpar.cost.step_memory import StepMemory, held_bytes
from fastpar.cost.workload import Setup, Workload
from fastpar.kernels.linear_cross_entropy import release_workspaces
from fastpar.plan.grids import grids_text
from fastpar.plan.search import search

SHAPE = GPTConfig(4, 8, 256, 128, 4096, dropout=0.0)
B = 8  # sequences of a step
FACTORS = {"all_reduce": 2.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 4, sequence parallel": {"tp": 4},
    "TP 2 x ZeRO-3": {"tp": 2, "zero_stage": 3},
    "grid 2x2 (2-D)": {"tp": 2, "tp_grid": "2x2"},
    "grid 1x2x2 (2.5-D), ZeRO-3": {"tp": 2, "tp_grid": "1x2x2", "zero_stage": 3},
}
EIGHT = {"grid 2x2x2 (2.5-D)": {"tp": 2, "tp_grid": "2x2x2"}}
STEPS = 5  # on a real link, the first not timed, twice
LOSS_BOUND = 1e-5
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


def axes_of(layout: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Mesh."""
    grid = parse_grid(layout.get("tp_grid", "none"))
    return {"tp": layout["tp"]} if grid is None else {"tp_grid": grid}


class Training:
    """One rank of a layout that trains on random tokens."""

    def __init__(self, layout: dict[str, Any], mesh: Mesh, **options: Any) -> None:
        self.mesh, self.model = mesh, GPT(SHAPE)
        stage = layout.get("zero_stage", 0)
        parallelize(self.model, mesh, zero_stage=stage, **options)
        self.optimizer = AdamW(self.model.parameters())

    def step(self, number: int) -> float:
        """Of the same batch of all ranks in every layout; the loss."""
        generator = torch.Generator().manual_seed(number)
        idx = torch.randint(SHAPE.vocab_size, (B, SHAPE.block_size + 1), generator=generator)
        mine = idx.chunk(self.mesh.dp_size)[self.mesh.dp_rank]
        loss = self.model(mine[:, :-1], mine[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class LinkedRank:
    """A rank in a network namespace; public methods are called from outside."""

    def __init__(self, layout: dict[str, Any]) -> None:
        mesh = Mesh(**axes_of(layout), device="cpu")
        self.training = Training(layout, mesh, transport="torch")

    def step(self, number: int) -> tuple[float, float]:
        """ms and loss."""
        start = time.perf_counter()
        loss = self.training.step(number)
        return (time.perf_counter() - start) * 1e3, loss


def on_link(mbit: float) -> dict[str, dict[str, Any]]:
    """Steps of every layout on 4 real ranks: ms of the slowest rank, bytes that it sent."""
    rows: dict[str, dict[str, list[float]]]
    rows = {name: {"ms": [], "losses": [], "sent": []} for name in LAYOUTS}
    with links.Link(mbit, 4) as link:
        for name in (*LAYOUTS, *reversed(LAYOUTS)):  # there and back, whatever becomes slower
            row, target = rows[name], "bench.systems.grid:LinkedRank"
            with links.Ranks(link, target, LAYOUTS[name]) as ranks:
                for step in range(STEPS):
                    before = link.sent_bytes()
                    answers = ranks.call("step", step)
                    if step:  # the first one makes the connections
                        after = link.sent_bytes()
                        row["sent"].append(max(b - a for a, b in zip(before, after)))
                        row["ms"].append(max(took for took, _ in answers))
                    row["losses"].append(statistics.fmean(loss for _, loss in answers))
    first = rows[next(iter(LAYOUTS))]["losses"]
    apart = max(abs(a - b) / b for row in rows.values() for a, b in zip(row["losses"], first))
    if not apart <= LOSS_BOUND:
        raise AssertionError(f"bench grid: losses of layouts are {apart:.1e} apart")
    return {
        name: {"ms": statistics.median(row["ms"]), "all_ms": row["ms"], "sent": max(row["sent"])}
        for name, row in rows.items()
    }


def peak_of(layout: dict[str, Any], ranks: int) -> tuple[int, int]:
    """The peak of a step on one rank, measured and predicted."""
    setup, workload = setup_of(ranks, layout), Workload(SHAPE, B)
    link = Link(None)
    release_workspaces()
    with EmulatedMesh(ranks, 0, **axes_of(layout)) as mesh:
        make = emulated(link, InlineCollectives)
        training = Training(layout, mesh, collectives=make)
        training.step(0)
        held = held_bytes(engine_of(training.model), training.optimizer)
        with StepMemory(mesh.device, alive_bytes=held) as memory:
            training.step(1)
    link.close()
    predicted = predict_memory(workload, setup).total
    if abs(predicted - memory.peak_bytes) > 0.03 * memory.peak_bytes:
        raise AssertionError(
            f"bench grid: {layout}: a peak of {memory.peak_bytes}, by formula {predicted}"
        )
    return memory.peak_bytes, predicted


def measured(layout: dict[str, Any], ranks: int = 4) -> dict[str, Any]:
    """A step of one rank."""
    setup, workload = setup_of(ranks, layout), Workload(SHAPE, B)
    peak, predicted = peak_of(layout, ranks)
    link = Link(None)
    with EmulatedMesh(ranks, 0, **axes_of(layout)) as mesh:
        training = Training(layout, mesh, collectives=emulated(link))
        for number in range(2):  # the first step has no state yet
            link.ops.clear()
            training.step(number)
        states = training.optimizer.state.values()
        moments = [v for s in states for v in s.values() if torch.is_tensor(v)]
        engine = engine_of(training.model)
        held = engine.memory()["parameter shards" if engine.zero_stage == 3 else "parameters"]
        held += sum(v.nbytes for v in moments)
        ops = [op for op in link.ops if op.role != "control" and op.wire_bytes]
    link.close()
    of_layers = sum(op.wire_bytes for op in ops if op.role == "tp")
    comms = [c for c in comm_ops_of(workload, setup) if c.axis != "control"]
    paper = sum(sent(c) for c in comms if c.axis == "tp")
    if abs(of_layers - paper) > 0.01 * paper:
        raise AssertionError(f"bench grid: {layout}: counted {of_layers}, by formula {paper}")
    predicted_states = predict_states(workload, setup)
    profiles = (NVLINK, ETHERNET_25)
    return {
        "sent_bytes": sum(op.wire_bytes for op in ops),
        "of_layers_bytes": of_layers,
        "formula_bytes": sum(map(sent, comms)),
        "messages": len(ops),
        "held_bytes": held,
        "held_formula_bytes": predicted_states.parameters + predicted_states.optimizer,
        "peak_bytes": peak,
        "peak_formula_bytes": predicted,
        "link_ms": {p.name: sum(p.ms(op.wire_bytes, 1) for op in ops) for p in profiles},
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


def planned(ranks: int) -> str:
    """What `fastpar plan` says of grids on so many H100s, for the batch of on_paper()."""
    cluster, batch = Cluster.of("h100", ranks), 4 * ranks
    template = Setup(world_size=ranks)
    rates = DatasheetRates(cluster, template)
    workload = Workload(PRESETS["gpt2-xl"], batch)
    limits: dict[str, Any] = {
        "limit_bytes": 70e9,
        "per_node": cluster.per_node,
        "checkpointing": ("none",),
    }
    return grids_text(search(workload, template, rates=rates, stages=1, **limits))


def table(found: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# Tensor parallelism on a grid, beside what replaced it",
        "",
        f"Written by `python -m bench.systems.grid`. {(__doc__ or '').split(chr(10) * 2, 2)[2]}",
        "",
        f"4 ranks (one grid on 8), {SHAPE.n_layer} layers of {SHAPE.n_embd}, T={SHAPE.block_size}, "
        f"{B} sequences, fp32, AdamW; times of NVLink and 25 GbE are emulated: bytes and latency "
        "of messages one after another, nothing hidden.",
        "",
        "| layout | sent, MB a step and rank | by formula | of it inside of layers | messages | "
        "weights and moments, MB | by formula | peak, MB | by formula | "
        + " | ".join(found["links"])
        + " |",
        "|---|" + "---:|" * (8 + len(found["links"])),
    ]
    for name, row in found["ranks"].items():
        mb = [f"{row[key] / 1e6:.2f}" for key in ("sent_bytes", "formula_bytes", "of_layers_bytes")]
        keys = ("held_bytes", "held_formula_bytes", "peak_bytes", "peak_formula_bytes")
        held = [f"{row[key] / 1e6:.2f}" for key in keys]
        times = [f"{ms:.2f} ms" for ms in row["link_ms"].values()]
        lines.append(f"| {' | '.join([name, *mb, str(row['messages']), *held, *times])} |")
    if real := found.get("real"):
        lines += [
            "",
            f"4 real ranks in network namespaces, each behind a link of {real['mbit']:g} Mbit/s, "
            f"one thread each on {found['machine']['cores']} cores, gloo; "
            f"medians of {2 * (STEPS - 1)} steps:",
            "",
            "| layout | ms a step | of the fastest | MB sent a step, headers included |",
            "|---|---:|---:|---:|",
        ]
        fastest = min(row["ms"] for row in real["rows"].values())
        for name, row in real["rows"].items():
            ms = f"{row['ms']:.0f} | {row['ms'] / fastest:.2f}"
            lines.append(f"| {name} | {ms} | {row['sent'] / 1e6:.1f} |")
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
    lines += ["", "What `fastpar plan` says of the same model and batch on H100s, 8 a node:", ""]
    lines += [f"- {ranks} GPUs: grids {text}" for ranks, text in found["planned"].items()]
    return "\n".join([*lines, "", f"{machine_line(found['machine'])}.", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes grid.json and README.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.grid", description=__doc__)
    parser.add_argument("--into", type=Path, default=RESULTS / "grid")
    parser.add_argument("--mbit", type=float, help="rate of real links; unset: no such rows")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {
        "machine": machine("cpu"),
        "links": [p.name for p in (NVLINK, ETHERNET_25)],
        "ranks": {name: measured(layout) for name, layout in LAYOUTS.items()},
        "paper": {str(ranks): on_paper(ranks) for ranks in PAPER},
        "planned": {str(ranks): planned(ranks) for ranks in PAPER},
    }
    found["ranks"] |= {name: measured(layout, 8) for name, layout in EIGHT.items()}
    if args.mbit is not None:
        found["real"] = {"mbit": args.mbit, "rows": on_link(args.mbit)}
    args.into.mkdir(parents=True, exist_ok=True)
    (args.into / "grid.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.into / "README.md").write_text(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
