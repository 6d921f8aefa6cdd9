"""How far the memory that `fastpar plan` predicts is off here: small layouts are trained.

For every number of ranks one group of processes trains each layout for a few steps. A row's time is
the median over steps of the slowest rank's, its memory the peak of a further step of the fullest
rank; the predicted one stands in its notes.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.harness import Bench
from bench.records import Row
from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import gather_objects
from fastpar.comm.ranks import Rank, Ranks, threads_per_rank
from fastpar.kernels.loss.linear_cross_entropy import release_workspaces
from fastpar.predict.measure import ShortRun, StepMemory, held_bytes, mesh_of, slowest
from fastpar.predict.memory import predict_memory
from fastpar.settings.model import PRESETS, GPTConfig

TIME_LIMIT_S = {"cpu": 1200, "cuda": 500}
WARM_UP, FEWEST, MOST = 2, 4, 20  # steps
STEPS_S = 4.0  # of the steps of a layout
Cell = tuple[Workload, Setup]
S = GPTConfig(4, 4, 256, 128, 1024, dropout=0.0)
SMALLER = GPTConfig(4, 4, 128, 64, 512, dropout=0.0)
EVERY = (SMALLER, S, GPTConfig(6, 6, 384, 128, 2048, dropout=0.0))
# Ranks, sizes, tp, stage, checkpointing, micro-batch, accumulation.
CPU_GRID: tuple[tuple[int, Sequence[GPTConfig], int, int, str, int, int], ...] = (
    (1, EVERY, 1, 0, "none", 2, 1), (1, EVERY, 1, 0, "full", 4, 1),
    (1, EVERY, 1, 0, "selective", 2, 2), (2, EVERY, 1, 0, "none", 2, 1),
    (2, EVERY, 1, 1, "none", 1, 4), (2, EVERY, 1, 2, "full", 2, 2), (2, EVERY, 1, 3, "none", 4, 1),
    (2, EVERY, 2, 0, "none", 2, 1), (2, EVERY, 2, 0, "selective", 4, 2),
    (4, [S], 1, 0, "none", 1, 1), (4, [S], 1, 3, "full", 2, 1), (4, [S], 2, 1, "none", 2, 2),
)  # fmt: skip
GPU_GRID = tuple(
    (1, [PRESETS[size]], 1, 0, mode, max(1, int(most * part)), accum)
    for size, most in (("gpt2", 16), ("gpt2-medium", 8), ("gpt2-large", 4), ("gpt2-xl", 2))
    for mode, part, accum in (("none", 1, 1), ("none", 0.5, 2), ("selective", 1, 1), ("full", 2, 1))
)
QUICK = ((2, [GPTConfig(2, 2, 32, 16, 128, dropout=0.0)], 1, 3, "none", 2, 1),)


def cell_of(shape: GPTConfig, device: str, layout: Sequence[Any]) -> Cell:
    """A workload with the batch that its setup makes of it."""
    ranks, tp, stage, mode, micro, accum = layout
    cpu: Any = {"dtype": "fp32", "device_type": "cpu", "transport": "shm"}
    made: Any = {"micro_batch_size": micro, "grad_accum_steps": accum, "zero_stage": stage}
    made |= {"activation_checkpointing": mode, **(cpu if device == "cpu" else {})}
    setup = Setup(world_size=ranks, tp=tp, **made)
    return Workload(shape, setup.dp * micro * accum), setup


def title_of(workload: Workload, setup: Setup) -> str:
    shape, s = workload.shape, setup
    parts = [f"tp {s.tp}"] * (s.tp > 1) + [f"ZeRO-{s.parallel.zero_stage}"] * (s.dp > 1)
    return (
        f"{shape.n_layer}x{shape.n_embd} T={shape.block_size}, "
        f"{s.world_size} rank{'s' * (s.world_size > 1)}{': ' * bool(parts)}{' x '.join(parts)}, "
        f"micro-batch {s.micro_batch_size} x {s.grad_accum_steps}, "
        f"checkpointing {s.recompute.activation_checkpointing}"
    )


def train(rank: Rank, workload: Workload, setup: Setup, seconds: float) -> tuple[list[float], int]:
    """On a rank: seconds of steps, and the peak of bytes in a further one."""
    release_workspaces()  # those of a larger model before
    device = rank.mesh.device
    run = ShortRun(workload, setup, mesh_of(setup, device))
    run.seconds(WARM_UP)
    rank.barrier()
    start = time.perf_counter()
    run.seconds(1)
    count = seconds / (time.perf_counter() - start)
    if rank.world_size > 1:
        count = gather_objects(count)[0]
    times = run.seconds(max(FEWEST, min(MOST, int(count))))
    gc.collect()
    rank.barrier()
    held = held_bytes(run.engine, run.optimizer)
    with StepMemory(device, alive_bytes=held) as memory:
        run.step()
    del run
    gc.collect()
    return times, memory.peak_bytes


def measure(bench: Bench, pool: Ranks, cell: Cell) -> Row:
    """A row of one layout."""
    answers = pool.call(train, *cell, 0.1 if bench.quick else STEPS_S)
    how: dict[str, Any] = {"ranks": cell[1].world_size, "threads": pool.threads}
    how["dtype"] = torch.float32 if bench.device == "cpu" else torch.bfloat16
    how["predicted_bytes"] = predict_memory(*cell).total
    ms = [1e3 * s for s in slowest([seconds for seconds, _ in answers])]
    row = bench.timed_row(title_of(*cell), "step", "fastpar", ms, **how)
    row.peak_bytes = max(peak for _, peak in answers)
    return row


def run(bench: Bench) -> None:
    grid = QUICK if bench.quick else CPU_GRID if bench.device == "cpu" else GPU_GRID
    for ranks in dict.fromkeys(n for n, *_ in grid):
        cells = [
            cell_of(shape, bench.device, (n, *layout))
            for n, shapes, *layout in grid
            if n == ranks
            for shape in shapes
        ]
        cells = [cell for cell in cells if bench.only in title_of(*cell)]
        threads = 1 if bench.device == "cpu" else threads_per_rank(None, ranks)
        if cells:
            with Ranks(ranks, threads=threads, device=bench.device) as pool:
                for cell in cells:
                    bench.add(measure(bench, pool, cell))
