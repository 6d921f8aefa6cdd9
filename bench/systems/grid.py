"""One model on many ranks: tensor parallel, with ZeRO-3, grids; what each sends, holds and takes.

    python -m bench grid                the page, from formulas and the rows of before
    python -m bench grid --mbit 1000    steps of four ranks behind links of this rate, too

Bytes, messages and memory are predicted (fastpar/axes, fastpar/predict); tests/predict and
tests/contracts compare them with real ranks. With --mbit four ranks of one thread each train behind
real links (bench/systems/links.py), all layouts twice, the second time in reverse order; their
losses must agree. What grids cost on many GPUs says `fastpar plan`.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

from bench.records import RESULTS, machine, machine_line, parser_of
from bench.report.tables import markdown
from bench.systems import links
from bench.systems.steps import batch
from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.predict.memory import predict_memory, predict_states
from fastpar.predict.time import comm_ops_of
from fastpar.settings.mesh import parse_grid
from fastpar.settings.parallel import Parallel

SHAPE, B = GPTConfig(4, 8, 256, 128, 4096, dropout=0.0), 8  # sequences of a step
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 4, sequence parallel": {"tp": 4},
    "TP 2 x ZeRO-3": {"tp": 2, "zero_stage": 3},
    "grid 2x2 (2-D)": {"tp": 2, "tp_grid": "2x2"},
    "grid 1x2x2 (2.5-D), ZeRO-3": {"tp": 2, "tp_grid": "1x2x2", "zero_stage": 3},
}
STEPS = 5  # on a link, the first not timed, twice
LOSS_BOUND = 1e-5


class LinkedRank:
    """A rank in a network namespace; public methods are called from outside."""

    def __init__(self, layout: dict[str, Any]) -> None:
        grid = parse_grid(layout.get("tp_grid"))
        axes: Any = {"tp": layout["tp"]} if grid is None else {"tp_grid": grid}
        self.mesh, self.model = Mesh(**axes, device="cpu"), GPT(SHAPE)
        stage = layout.get("zero_stage", 0)
        parallelize(self.model, self.mesh, Parallel.of(zero_stage=stage, transport="torch"))
        self.optimizer = AdamW(self.model.parameters())

    def step(self, number: int) -> tuple[float, float]:
        """ms and loss, of the same batch of all ranks in every layout."""
        start = time.perf_counter()
        loss = self.model(*batch(SHAPE, number, self.mesh.dp_rank, self.mesh.dp_size, B))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (time.perf_counter() - start) * 1e3, loss.item()


def on_link(mbit: float) -> dict[str, dict[str, Any]]:
    """Steps of every layout on 4 real ranks: ms of the slowest rank, bytes that it sent."""
    rows: dict[str, Any] = {name: {"ms": [], "losses": [], "sent": []} for name in LAYOUTS}
    with links.Link(mbit, 4) as link:
        for name in (*LAYOUTS, *reversed(LAYOUTS)):  # there and back, whatever becomes slower
            row, target = rows[name], "bench.systems.grid:LinkedRank"
            with links.Ranks(link, target, LAYOUTS[name]) as ranks:
                for step in range(STEPS):
                    before = link.sent_bytes()
                    answers = ranks.ask("step", step)
                    if step:  # the first one makes the connections
                        after = link.sent_bytes()
                        row["sent"].append(max(b - a for a, b in zip(before, after)))
                        row["ms"].append(max(took for took, _ in answers))
                    row["losses"].append(statistics.fmean(loss for _, loss in answers))
    first = rows[next(iter(LAYOUTS))]["losses"]
    apart = max(abs(a - b) / b for row in rows.values() for a, b in zip(row["losses"], first))
    if not apart <= LOSS_BOUND:
        raise AssertionError(f"bench grid: losses of layouts are {apart:.1e} apart")
    for row in rows.values():
        row |= {"ms": statistics.median(row["ms"]), "all_ms": row["ms"], "sent": max(row["sent"])}
        del row["losses"]
    return rows


def on_paper(layout: dict[str, Any]) -> list[str]:
    """MB sent inside of layers and in all, messages; MB of weights and moments, and of the peak."""
    workload = Workload(SHAPE, B)
    made: Any = {"device_type": "cpu", "transport": "shm", "dtype": "fp32", **layout}
    dp = Setup(world_size=4, **made).dp
    setup = Setup(world_size=4, micro_batch_size=B // dp, **made)
    comms = [c for c in comm_ops_of(workload, setup) if c.axis != "control"]
    states = predict_states(workload, setup)
    sizes = [sum(sent(c) for c in comms if c.axis == "tp"), sum(map(sent, comms))]
    held = [states.parameters + states.optimizer, predict_memory(workload, setup).total]
    n = f"{sum(c.count for c in comms):,.0f}"
    return [*(f"{b / 1e6:,.1f}" for b in sizes), n, *(f"{b / 1e6:,.1f}" for b in held)]


def sent(comm: CommOp) -> float:
    """Bytes that a rank of a ring sends for it, over all its calls."""
    ways = 2.0 if comm.kind == "all_reduce" else 1.0
    return ways * (comm.ranks - 1) / comm.ranks * comm.bytes * comm.count


def page(found: dict[str, Any]) -> str:
    """README.md of the rows on a link and of the formulas."""
    mb = ["sent inside of layers, MB", "sent, MB", "messages"]
    mb += ["weights and moments, MB", "peak, MB"]
    real, about = found["real"], found["machine"]
    fastest = min(row["ms"] for row in real["rows"].values())
    four = []
    for name, layout in LAYOUTS.items():
        row = real["rows"][name]
        cells = [f"{row['ms']:.0f}", f"{row['ms'] / fastest:.2f}", f"{row['sent'] / 1e6:.1f}"]
        four.append([name, *cells, *on_paper(layout)])
    about_page = (__doc__ or "").split("\n\n", 2)[2]
    link = f"behind a link of {real['mbit']:g} Mbit/s, one thread each on {about['cores']} cores"
    return "\n".join(
        [
            "# Tensor parallelism on a grid, beside what replaced it\n",
            f"Written by `python -m bench grid`.\n\n{about_page}",
            f"4 ranks in network namespaces, each {link}, gloo;",
            f"{SHAPE.n_layer} layers of {SHAPE.n_embd}, T={SHAPE.block_size}, {B} sequences, fp32,",
            f"AdamW; medians of {2 * (STEPS - 1)} steps; bytes of a step and rank, those on the",
            "right by formula:\n",
            markdown(["layout", "ms a step", "of the fastest", "MB sent, with headers", *mb], four),
            f"\n{machine_line(about)}.\n",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Measures if asked to, and writes grid.json and README.md."""
    parser = parser_of("bench grid", __doc__)
    parser.add_argument("--into", type=Path, default=RESULTS / "grid")
    parser.add_argument("--mbit", type=float, help="measure steps behind links of this rate")
    args = parser.parse_args(argv)
    file = args.into / "grid.json"
    if args.mbit is not None:
        args.into.mkdir(parents=True, exist_ok=True)
        real = {"mbit": args.mbit, "rows": on_link(args.mbit)}
        file.write_text(json.dumps({"machine": machine("cpu"), "real": real}, indent=1) + "\n")
    (args.into / "README.md").write_text(page(json.loads(file.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
