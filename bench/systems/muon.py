"""The step of sharded Muon beside "every rank repeats it": python -m bench.systems.muon

Ranks of one thread each take turns: a step of fastpar.Muon on a model that is shared out at a ZeRO
stage, then one of the same optimizer on a plain module, which orthogonalizes every matrix on every
rank. A row has the medians over rounds of the slowest rank's milliseconds, their ratio, that of the
least ones, which other work on the machine disturbs less, and the bytes that a rank sent in its
last step beside the formula's. Rows are added to
bench/results/muon/rows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.records import RESULTS, commit, machine
from fastpar import GPT, Mesh, Muon, muon_groups, parallelize
from fastpar.config.config import GPTConfig
from fastpar.cost.buckets import buckets_of
from fastpar.cost.matrix_updates import product_bytes, updates_of
from fastpar.cost.workload import Setup, Workload
from fastpar.doctor.clocks import stopwatch
from fastpar.testing import run_ranks

SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 32, "vocab_size": 4096}


def time_rank(shape: dict[str, Any], stage: int, rounds: int) -> tuple[list[float], ...]:
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
    (homes,) = sharded._known_homes.values()  # type: ignore[attr-defined]
    return times[0][1:], times[1][1:], [float(homes.sent_bytes)]


def measure(ranks: int, stage: int, rounds: int, shape: dict[str, Any]) -> dict[str, Any]:
    """A row."""
    found = run_ranks(time_rank, ranks, shape, stage, rounds, backend="gloo", timeout_s=600)
    slowest = [[max(each) for each in zip(*(times[i] for times in found))] for i in (0, 1)]
    sharded, repeated = map(statistics.median, slowest)
    setup = Setup(world_size=ranks, zero_stage=stage, optimizer="muon", dtype="fp32",
                  device_type="cpu", transport="shm", master_weights="none")  # fmt: skip
    workload = Workload(GPTConfig(**shape, dropout=0.0), ranks)
    homes = updates_of(workload.shape, buckets_of(workload, setup), setup)
    return {
        "ranks": ranks,
        "zero_stage": stage,
        "shape": shape,
        "rounds": rounds,
        "sharded_ms": round(sharded, 1),
        "repeated_ms": round(repeated, 1),
        "ratio": round(sharded / repeated, 3),
        "least_ratio": round(min(slowest[0]) / min(slowest[1]), 3),
        "sent_bytes": [int(times[2][0]) for times in found],
        "formula_bytes": [product_bytes(setup) * sent.dp for sent in homes.sent],
    }


def main(argv: Sequence[str] | None = None, shape: dict[str, Any] = SHAPE) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.muon", description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--into", type=Path, default=RESULTS / "muon")
    args = parser.parse_args(argv)
    about, (code, dirty) = machine("cpu"), commit()
    args.into.mkdir(parents=True, exist_ok=True)
    for ranks in args.ranks:
        for stage in args.stages:
            row = measure(ranks, stage, args.rounds, shape)
            row |= {"machine": about, "commit": code, "dirty": dirty}
            with (args.into / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            says = f"{row['sharded_ms']} ms, repeated {row['repeated_ms']} ms: {row['ratio']}x, "
            says += f"of the least times {row['least_ratio']}x"
            print(f"{ranks} ranks, stage {stage}: {says}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
