"""One small GPT-2 on every layout: is it one run? Beside it torch's and DeepSpeed's layouts.

    python -m bench matrix fastpar    every layout, as threads of this process
    python -m bench matrix peers      torch's and DeepSpeed's, as processes
    python -m bench matrix table --into bench/results/matrix    the page, from the rows of both

Each layout has a line; `--only "tp 2"` runs a few. Rows and page go to build/bench/matrix; those
that are committed need `--into`. Without the checkout, `fastpar train` shows the same:
fastpar/train/README.md has the lines to compare.

A layout is a number of ranks and settings of `fastpar train`; its own run of one process has the
same optimizer and experts and nothing else. Dropout, clipping and gradient accumulation are on; a
step is 16 sequences in micro-batches of two. Every layout runs in deterministic mode and without.
The others train bench/peers' plain GPT-2 of the same size on the same text, each beside its own run
of one process, without dropout and with it.
"""

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench.peers import contenders, pipeline, tensor_parallel
from bench.records import SCRATCH, machine, machine_line, parser_of, version_of
from bench.report import tables
from fastpar.comm.mesh import Mesh
from fastpar.comm.ranks import reason
from fastpar.data.batches import load_data, sample_batch
from fastpar.engine.debug import Debug
from fastpar.models import set_up
from fastpar.observe.strategies import STRATEGIES, Settings
from fastpar.settings.config import TrainConfig
from fastpar.settings.mesh import axes_of
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer

Layout = tuple[int, dict[str, Any]]
AT = (10, 20)  # steps whose losses are compared
BATCH, LENGTH = 16, 32
SETTINGS: dict[str, Any] = {
    **{"model": "micro", "n_layer": 4, "n_head": 4, "n_embd": 32, "block_size": LENGTH},
    **{"tokenizer": "bytes", "batch_size": BATCH, "micro_batch_size": 2, "max_steps": AT[-1]},
    **{"eval_every": 0, "save_every": 0, "num_samples": 0, "eval_batches": 1, "threads": 1},
    **{"device": "cpu", "lr": 2e-3, "warmup_steps": 2, "dropout": 0.1, "logger": "none"},
}
ALONE = {"outer_every": 5, "outer_lr": 1.0, "outer_momentum": 0.0}  # one replica: a plain run
EXPERTS = {"n_expert": 4, "balance_loss": 0.1, "router_z_loss": 0.01, "balance_rate": 0.01}
LAYOUTS: tuple[Layout, ...] = (
    (1, {}), *((1, {"activation_checkpointing": kept}) for kept in ("full", "selective")),
    *((ranks, {"zero_stage": stage}) for ranks in (2, 4, 8) for stage in (0, 1, 2, 3)),
    *((4, {"zero_stage": stage, "shard_size": 2}) for stage in (2, 3)),
    *((2, {"zero_stage": stage, "accumulate": "full"}) for stage in (2, 3)),
    *((2, {"pp": 2, "schedule": s}) for s in ("gpipe", "1f1b", "interleaved")),
    *((4, {"pp": 2, "zero_stage": stage}) for stage in (1, 2, 3)),
    *((4, {"pp": 4}), (8, {"pp": 4, "zero_stage": 1})),
    (2, {"zero_stage": 2, "offload": "optimizer"}),
    (4, {"zero_stage": 3, "offload": "parameters", "activation_checkpointing": "full"}),
    *((ranks, {"cp": ranks, "cp_method": m}) for ranks in (2, 4) for m in ("heads", "keys")),
    (4, {"cp": 2, "cp_method": "keys", "zero_stage": 3}),
    *((ranks, {"tp": ranks}) for ranks in (2, 4)), (2, {"tp": 2, "sequence_parallel": False}),
    (4, {"tp": 2, "zero_stage": 2, "activation_checkpointing": "selective"}),
    *((8, {"tp": 2, "zero_stage": 3}), (8, {"tp": 2, "cp": 2, "zero_stage": 1})),
    (8, {"tp": 2, "pp": 2, "zero_stage": 2}),
    *((ranks, {"optimizer": "muon", "zero_stage": ranks - 1}) for ranks in (1, 2, 4)),
    *((4, {"optimizer": "muon", **split}) for split in ({"pp": 2}, {"tp": 2}, {"cp": 2})),
    *((ranks, {"optimizer": "adafactor", "lr": 0.03}) for ranks in (1, 4)), (1, EXPERTS),
    *((2, {**EXPERTS, "ep": 2, "zero_stage": stage}) for stage in (0, 3)),
    *((4, {**EXPERTS, "ep": ep, "zero_stage": stage}) for ep, stage in ((4, 1), (2, 2))),
    (4, {**EXPERTS, "ep": 2, "pp": 2}), (4, {**EXPERTS, "ep": 2, "tp": 2}),
    *((ranks, {"tp_grid": grid}) for ranks, grid in ((2, "2x1"), (2, "1x2"), (4, "2x2"))),
    (8, {"tp_grid": "2x2x2", "micro_batch_size": 4}), (8, {"tp_grid": "2x2", "zero_stage": 3}),
    (4, {"zero_stage": 3, "node_size": 2, "secondary_shards": True}),
    *((2, {**ALONE, "zero_stage": stage}) for stage in (0, 2)),
)  # fmt: skip
ANOTHER_RUN = {"optimizer", "lr", *EXPERTS}  # settings that a run of one process has, too


def name_of(ranks: int, changes: dict[str, Any]) -> str:
    """2 ranks, zero 3, tp 2."""
    shown = {n: v for n, v in changes.items() if n not in {*EXPERTS, "lr"}}
    words = [f"{n.removesuffix('_stage').replace('_', ' ')} {v}" for n, v in shown.items()]
    return ", ".join([f"{ranks} ranks", *["experts"] * ("n_expert" in changes), *words])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One thread a rank, and nothing of what a run prints."""
    threads = torch.get_num_threads()
    torch.set_num_threads(SETTINGS["threads"])
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def _rank(settings: dict[str, Any]) -> int:
    config = TrainConfig().replace(settings)
    return Trainer(config, Mesh(device="cpu", **axes_of(config.mesh))).run()


def losses_of(layout: Layout, **more: Any) -> list[float]:
    """The training losses of the steps AT."""
    ranks, changes = layout
    with tempfile.TemporaryDirectory() as folder, _bus():
        out = Path(folder) / "run"
        settings = {**SETTINGS, **changes, **more, "out": str(out)}
        with quiet():
            run_ranks(_rank, ranks, settings, timeout_s=600.0)
        rows = read_metrics(out / "metrics.jsonl")
    found = {row["step"]: row["loss"] for row in rows if "loss" in row}
    return [float(found[step]) for step in AT]


@contextlib.contextmanager
def _bus() -> Iterator[None]:
    """A stand-in for the bus between a GPU and its host, for runs with offload."""
    real = set_up.parallelize

    def made(model: Any, mesh: Any, settings: Any, **options: Any) -> Any:
        debug = Debug(bus_gb_s=1.0, poison=True) if settings.offload.what else None
        return real(model, mesh, settings, debug=debug, **options)

    with mock.patch.object(set_up, "parallelize", made):
        yield


def fastpar_rows(layouts: Sequence[Layout] = LAYOUTS) -> list[dict[str, Any]]:
    """A row for each layout: losses, and those of its run of one process, in both modes."""
    known: dict[str, list[float]] = {}
    rows = []
    for ranks, changes in layouts:
        row: dict[str, Any] = {"layout": name_of(ranks, changes), "ranks": ranks}
        row["settings"] = {n: v for n, v in changes.items() if n not in EXPERTS}
        of_one = {n: v for n, v in changes.items() if n in ANOTHER_RUN}
        for mode, deterministic in (("deterministic", True), ("default", False)):
            key = json.dumps([of_one, deterministic])
            run = partial(losses_of, deterministic=deterministic)
            if key not in known:
                known[key] = run((1, of_one))
            _measure(row, mode, partial(run, (ranks, changes)), known[key])
        rows.append(row)
        say(rows, len(layouts), "deterministic", "default")
    return rows


def _measure(row: dict[str, Any], mode: str, run: Callable[[], Any], beside: list[float]) -> None:
    """Adds a mode's losses to a row, or why there are none."""
    try:
        row[mode] = {"losses": run(), "beside": beside}
    except Exception as error:
        row["refused"] = reason(error)


# Others

_STRATEGIES = ("ddp", "fsdp2", "fsdp2-no-reshard", "deepspeed1", "deepspeed2", "deepspeed3")
DTENSOR = "torch DTensor"  # its model has no dropout here
PEERS: tuple[tuple[str, int], ...] = (
    *((STRATEGIES[name].title, ranks) for name in _STRATEGIES for ranks in (2, 4)),
    *((DTENSOR, 2), (DTENSOR, 4)),
    *((pipeline.TORCH, 2), (pipeline.TORCH, 4), (pipeline.DEEPSPEED, 2)),
)


def _peer_rank(title: str, dropout: float) -> list[float]:
    """Losses of the global batch at the steps AT."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = load_data("bible", "bytes", progress=False)
    config = GPTConfig(4, 4, 32, LENGTH, 256, dropout=dropout)
    settings = Settings(lr=SETTINGS["lr"], eps=1e-8)
    if title in pipeline.WAYS:
        settings = replace(settings, parallel=Parallel(grad_accum_steps=BATCH))
    if title == DTENSOR:
        made = tensor_parallel.build(title, config, settings, tp=ranks)
    else:
        made = contenders.build(title, config, settings)
    torch.manual_seed(1 + rank)  # of dropout, as nanoGPT seeds its ranks
    losses = []
    for step in range(AT[-1]):
        at: Any = {"seed": 1, "first_sample": step * BATCH, "n_samples": BATCH}
        x, y = sample_batch(data.train, block_size=LENGTH, **at)
        rows = BATCH // made.dp_size
        mine = slice(made.dp_rank * rows, (made.dp_rank + 1) * rows)
        loss = made.step(x[mine], y[mine]).double().reshape(())
        if made.dp_size > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / made.dp_size)
    return [losses[step - 1] for step in AT]


def peer_rows(peers: Sequence[tuple[str, int]] = PEERS) -> list[dict[str, Any]]:
    """A row for each: losses without dropout and with it; refused: why it has none."""
    known: dict[float, list[float]] = {}
    rows = []
    for title, ranks in peers:
        row: dict[str, Any] = {"layout": f"{title}, {ranks} ranks", "ranks": ranks, "who": title}
        for mode, dropout in (("no dropout", 0.0), ("dropout", SETTINGS["dropout"])):
            if dropout and title == DTENSOR:
                continue
            if dropout not in known:
                known[dropout] = _peer(contenders.SINGLE, 1, dropout)
            _measure(row, mode, partial(_peer, title, ranks, dropout), known[dropout])
        rows.append(row)
        say(rows, len(peers), "no dropout", "dropout")
    return rows


def _peer(title: str, ranks: int, dropout: float) -> list[float]:
    return run_ranks(_peer_rank, ranks, title, dropout, backend="gloo", timeout_s=300.0)[-1]


def say(rows: Sequence[dict[str, Any]], many: int, *modes: str) -> None:
    """A line for the last row."""
    found = "  ".join(_difference(rows[-1].get(mode)) for mode in modes)
    print(f"[{len(rows)}/{many}] {rows[-1]['layout']:60} {found}", flush=True)


def difference(mode: dict[str, Any]) -> float:
    """The largest distance to the run beside it, over the steps AT."""
    return max(abs(a - b) for a, b in zip(mode["losses"], mode["beside"], strict=True))


def _difference(mode: dict[str, Any] | None) -> str:
    if mode is None:
        return "-"
    found = difference(mode)
    return f"{found:.1e}" if found else "0"


# What is shown


def table(folder: Path) -> None:
    """README.md of the rows in a folder."""
    own, others = (json.loads((folder / f"{n}.json").read_text()) for n in ("fastpar", "peers"))
    quoted = ["torchtitan, published (its issue 3029): 18 layouts", "9.73 to 9.97, one GPU 9.815"]
    quoted += ["-", "-", "0.155"]
    lines = [
        "# One run on every layout\n",
        "Written by `python -m bench matrix table`; how it was run: `bench/systems/matrix.py`.",
        "Distance: how far the training loss is from that of one process with the same settings,",
        f"the larger one of steps {AT[0]} and {AT[1]}; 0: the same bits.\n",
        f"## fastpar: {len(own['rows'])} layouts, dropout 0.1\n",
        _table(own["rows"], "deterministic", "default"),
        f"\n{machine_line(own['machine'])}\n\n## torch and DeepSpeed, a plain GPT-2\n",
        "The same size, text and learning rate, without clipping; dropout draws from torch's",
        "generator, seeded by 1 + rank.\n",
        _table(others["rows"], "no dropout", "dropout", quoted),
        f"\n{machine_line(others['machine'])};\n{others['versions']}.\n",
        "torchtitan's row is quoted: a larger model on GPUs; it does not mention dropout.\n",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _table(rows: Sequence[dict[str, Any]], first: str, second: str, *more: list[str]) -> str:
    lines = []
    for row in rows:
        found = row.get(first)
        losses = [f"{loss:.7g}" for loss in found["losses"]] if found else ["-", row["refused"]]
        far = [_difference(row.get(mode)) for mode in (first, second)]
        lines.append([row["layout"], *losses, *far])
    titles = [first, "dropout 0.1" if second == "dropout" else second]
    head = [*(f"loss at step {step}" for step in AT), *(f"distance, {mode}" for mode in titles)]
    return tables.markdown(["layout", *head], [*lines, *more])


def _wrong(row: dict[str, Any]) -> bool:
    """Whether it did not run, or is another run in deterministic mode: of sums whose terms lie on
    several ranks the order cannot be that of one."""
    bound = 1e-5 if {"tp", "cp", "tp_grid"} & {*row["settings"]} else 0.0
    return "refused" in row or difference(row["deterministic"]) > bound


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 1 if a layout in deterministic mode is another run."""
    parser = parser_of("bench matrix", __doc__)
    parser.add_argument("what", choices=("fastpar", "peers", "table"))
    parser.add_argument("--into", type=Path, default=SCRATCH / "matrix", help="folder of results")
    parser.add_argument("--only", default="", help="layouts whose name contains this; shown alone")
    args = parser.parse_args(argv)
    if args.what == "table":
        table(args.into)
        return 0
    versions = ", ".join(f"{n} {version_of(n) or 'none'}" for n in ("torch", "deepspeed"))
    found: dict[str, Any] = {"machine": machine("cpu"), "steps": AT, "versions": versions}
    if args.what == "fastpar":
        chosen = [layout for layout in LAYOUTS if args.only in name_of(*layout)]
        found |= {"settings": SETTINGS, "rows": fastpar_rows(chosen)}
    else:
        chosen_peers = [peer for peer in PEERS if args.only in f"{peer[0]}, {peer[1]} ranks"]
        found |= {"rows": peer_rows(chosen_peers)}
    if not args.only:
        args.into.mkdir(parents=True, exist_ok=True)
        (args.into / f"{args.what}.json").write_text(json.dumps(found, indent=1) + "\n")
    wrong = [r["layout"] for r in found["rows"] if args.what == "fastpar" and _wrong(r)]
    if not args.only:
        print(f"rows are in {args.into / args.what}.json")
    print(f"distances are those of the losses at steps {AT[0]} and {AT[1]}; deterministic, default")
    for name in wrong:
        print(f"another run: {name}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
