"""Bytes through each network adapter (NIC) of 8 nodes of 8 ranks: counted, and as planned.

Each rank is a thread that calls fastpar's collectives as they are on GPUs; the messages are sent
and counted by bench/systems/nodes.py. Rows with direction "bytes" have what was counted beside what
the planner's model says (fastpar/cost/network.py), which must agree, or the row is refused.
Before: a reduce-scatter was always an all-to-all and a local sum, which `deterministic` still asks
for. Rows with direction "step" have the layout that `fastpar plan` proposes for 64 GPUs, by the
links inside of nodes and between them. Nothing here is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import Bench
from bench.records import Row, machine_line
from bench.report.system_tables import nodes_table
from bench.systems.nodes import run_on_nodes
from fastpar.comm.collectives import Collectives
from fastpar.cost.devices import Cluster
from fastpar.cost.network import Network, Traffic, hierarchy, pairs, place, ring
from fastpar.plan.estimate import layout_text
from fastpar.plan.plan import PlanCommand, make_plan, nic_bytes

TIME_LIMIT_S = {"cpu": 300, "cuda": 300}
BEFORE = "all-to-all and a sum (deterministic)"
WAYS: dict[str, tuple[str | None, Callable[..., Traffic]]] = {
    BEFORE: (None, pairs), "ring": ("ring", ring), "hierarchy": ("hierarchy", hierarchy),
}  # fmt: skip
LINKS = {"ib-ndr": "an adapter for each GPU", "eth-100": "an adapter for each node"}


def scatter(numel: int) -> Callable[[Collectives], bool]:
    """What a rank does; whether it has the right sums."""

    def ask(c: Collectives) -> bool:
        x = torch.arange(numel, dtype=torch.float32) % 251 + c.rank
        right = x.chunk(c.world_size)[c.rank] - c.rank + (c.world_size - 1) / 2
        out = torch.empty(numel // c.world_size)
        c.reduce_scatter(out, x, mean=True)
        return torch.equal(out, right)

    return ask


def count_bytes(bench: Bench, network: Network, tp: int, variant: str, numel: int) -> Row:
    """One reduce-scatter of every group along dp."""
    dp = network.cluster.n_devices // tp
    way, traffic = WAYS[variant]
    nodes, right = run_on_nodes(
        network, scatter(numel), ranks=dp, stride=tp, in_rank_order=variant == BEFORE, way=way
    )
    counted, cluster = nodes.nic_bytes(), network.cluster
    link = cluster.inter.name
    planned = traffic(place(dp, tp, cluster.per_node), 4.0 * numel)
    planned_bytes = network.nic_bytes(planned)
    case = f"dp {dp}" + f" x tp {tp}" * (tp > 1)
    row = bench.row(f"{case}, {link}", "bytes", variant, torch.float32)
    if not all(right) or max(counted) != planned_bytes:
        row.refused = f"counted {max(counted)} bytes, planned {planned_bytes:.0f}"
    row.notes = {
        "link": link,
        "nodes": f"{cluster.n_devices // cluster.per_node} x {cluster.per_node}",
        "tensor_mb": 4e-6 * numel,
        "nic_mb": max(counted) / 1e6,
        "least_nic_mb": min(counted) / 1e6,
        "planned_mb": planned_bytes / 1e6,
        "planned_ms": 1e3 * (network.start_s + network.traffic_s(planned)),
    }
    return row


def plan_step(bench: Bench, model: str, intra: str, inter: str) -> Row:
    """What `fastpar plan` says of 64 GPUs behind these links."""
    plan = make_plan(
        PlanCommand(model=model, gpus=64, gpus_per_node=8, link=intra, inter_link=inter)
    )
    best = plan.estimates[0]
    assert best.time is not None
    row = bench.row(model, "step", f"{intra} in {inter}", torch.bfloat16)
    row.notes = {
        "layout": layout_text(best.setup),
        "tp": best.setup.tp,
        "planned_ms": 1e3 * best.time.step_s,
        "exposed_ms": 1e3 * best.time.exposed_s,
        "nic_mb": nic_bytes(plan, best.setup) / 1e6,
    }
    return row


def run(bench: Bench) -> None:
    n_nodes, per_node, numel = (2, 4, 1 << 10) if bench.quick else (8, 8, 1 << 20)
    for inter in LINKS:
        network = Network(Cluster.of("h100", n_nodes * per_node, per_node, inter=inter))
        for tp in (1, 2, per_node):
            for variant in WAYS:
                bench.add(count_bytes(bench, network, tp, variant, numel))
    models, intras = ("gpt2",) if bench.quick else ("gpt2", "gpt2-xl"), ("nvlink4", "pcie5")
    for model, intra, inter in itertools.product(models, intras, ("ib-ndr", "eth-400", "eth-100")):
        if not bench.quick or (intra, inter) == ("nvlink4", "ib-ndr"):
            bench.add(plan_step(bench, model, intra, inter))
    print(nodes_table(list(bench.results.rows.values())))


def draw(about: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Part of the tensor that leaves through each adapter, in each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.direction == "bytes" and not row.refused]
    colour = dict(zip(WAYS, ("#999999", "#D55E00", "#E69F00")))
    figure, panels = pyplot.subplots(1, len(LINKS), figsize=(11, 3.4), layout="constrained")
    for axes, (link, adapters) in zip(panels, LINKS.items()):
        own = [row for row in rows if row.notes["link"] == link]
        cases = list(dict.fromkeys(row.case for row in own))
        for at, row in enumerate(own):
            y = at + cases.index(row.case)
            part = row.notes["nic_mb"] / row.notes["tensor_mb"]
            axes.barh(y, part, 0.9, color=colour[row.variant], label=row.variant)
            axes.text(part, y, f" {part:.3g}", va="center", fontsize=8)
        middle = len(WAYS) // 2
        axes.set_yticks(
            [i * (len(WAYS) + 1) + middle for i in range(len(cases))],
            [case.partition(",")[0] for case in cases],
        )
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(f"{own[0].notes['nodes']} ranks, {link}: {adapters}", fontsize=10)
        axes.set_xlabel("bytes through it in a reduce-scatter, of the tensor's", fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    shown = dict(zip(labels, handles))
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel(machine_line(about), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
