"""`fastpar plan --check`: small layouts are predicted, run for real on this machine, and compared.

For every number of ranks one group of processes measures a cell's rates (measure.py) and trains
it for a few steps (run.py), by turns: step time is the median over steps of the slowest rank's,
memory the peak of one step of the fullest rank (step_memory.py). What is reported is the
distribution of the errors, predicted / measured - 1, of all cells; none is left out.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastpar.config.config import PRESETS, GPTConfig
from fastpar.cost.measured_rates import MeasuredRates
from fastpar.cost.memory_model import predict_memory
from fastpar.cost.step_memory import StepMemory, held_bytes
from fastpar.cost.step_time import StepTime, predict_step
from fastpar.cost.workload import Setup, Workload
from fastpar.kernels.linear_cross_entropy import release_workspaces
from fastpar.measure.measure import Cell, keep_rates, measure_cells
from fastpar.measure.rank_pool import Rank, RankPool
from fastpar.measure.short_run import ShortRun, slowest
from fastpar.plan.check_picture import draw_check
from fastpar.train.launch import available_cores

OUT = "runs/plan-check"
TURNS = 3  # of measuring rates and running steps, for each cell
MEASURE_S, QUICK_MEASURE_S = 60.0, 4.0
WARM_UP, STEPS_S, FEWEST, MOST = 2, 4.0, 4, 20  # steps of a cell: for so long, so many
SIZES = {
    "XS": GPTConfig(4, 4, 128, 64, 512, dropout=0.0),
    "S": GPTConfig(4, 4, 256, 128, 1024, dropout=0.0),
    "M": GPTConfig(6, 6, 384, 128, 2048, dropout=0.0),
}
TINY = GPTConfig(2, 2, 32, 16, 128, dropout=0.0)
# Ranks -> (sizes, tp, stage, checkpointing, micro-batch, accumulation).
_EVERY = tuple(SIZES)
CPU_GRID: dict[int, tuple[tuple[Sequence[str], int, int, str, int, int], ...]] = {
    1: (
        (_EVERY, 1, 0, "none", 2, 1),
        (_EVERY, 1, 0, "full", 4, 1),
        (_EVERY, 1, 0, "selective", 2, 2),
    ),
    2: (
        (_EVERY, 1, 0, "none", 2, 1),
        (_EVERY, 1, 1, "none", 1, 4),
        (_EVERY, 1, 2, "full", 2, 2),
        (_EVERY, 1, 3, "none", 4, 1),
        (_EVERY, 2, 0, "none", 2, 1),
        (_EVERY, 2, 0, "selective", 4, 2),
    ),
    4: (
        (["S"], 1, 0, "none", 1, 1),
        (["S"], 1, 3, "full", 2, 1),
        (["S"], 2, 1, "none", 2, 2),
    ),
}
GPU_GRID: dict[int, tuple[tuple[Sequence[str], int, int, str, int, int], ...]] = {
    1: tuple(
        ([size], 1, 0, *more)
        for size, most in (("gpt2", 16), ("gpt2-medium", 8), ("gpt2-large", 4), ("gpt2-xl", 2))
        for more in (
            ("none", most, 1),
            ("none", most // 2, 2),
            ("selective", most, 1),
            ("full", 2 * most, 1),
        )
    ),
}


@dataclass(frozen=True)
class Row:
    """One cell: what was predicted and what was measured."""

    title: str
    world_size: int
    threads: int
    predicted_bytes: int
    measured_bytes: int
    predicted_s: float
    measured_s: float  # median of the steps
    p20_s: float
    p80_s: float
    steps: int
    parts: dict[str, float]  # of the predicted seconds
    memory_parts: dict[str, int]

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Errors:
    """How errors are distributed: of their sizes median, nine tenths, worst; and their bias."""

    count: int
    median: float
    p90: float
    worst: float
    bias: float  # median with its sign

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        sizes = sorted(abs(e) for e in errors)
        rank = min(len(sizes) - 1, -(-9 * len(sizes) // 10) - 1)  # nine tenths are no larger
        middle, bias = statistics.median(sizes), statistics.median(errors)
        return cls(len(sizes), middle, sizes[rank], sizes[-1], bias)

    def __str__(self) -> str:
        return (
            f"median {self.median:.1%}, nine tenths within {self.p90:.1%}, worst {self.worst:.1%}, "
            f"bias {self.bias:+.1%} ({self.count} layouts)"
        )


@dataclass(frozen=True)
class Check:
    """All rows of a check; about: of the rates, by ranks."""

    rows: tuple[Row, ...]
    about: dict[int, dict[str, Any]]

    @property
    def memory(self) -> Errors:
        return Errors.of([row.memory_error for row in self.rows])

    @property
    def time(self) -> Errors:
        return Errors.of([row.time_error for row in self.rows])

    @property
    def busy(self) -> list[str]:
        """Which rates were measured while the machine was at work for others."""
        return [
            f"{n} rank{'s' * (n > 1)}: {about['busy']}"
            for n, about in self.about.items()
            if about.get("busy")
        ]


def cells_of(device: str = "cpu", *, quick: bool = False) -> dict[int, list[Cell]]:
    """The grid: ranks -> cells."""
    found: dict[int, list[Cell]] = {}
    for ranks, rows in (CPU_GRID if device == "cpu" else GPU_GRID).items():
        if quick and ranks > 2:
            continue
        cells: list[Any] = [(size, *rest) for sizes, *rest in rows for size in sizes]
        for size, *layout in cells[:: len(cells) // 2] if quick else cells:
            shape = TINY if quick else {**PRESETS, **SIZES}[size]
            found.setdefault(ranks, []).append(cell(shape, ranks, *(*layout, device)))
    return found


def cell(
    shape: GPTConfig,
    ranks: int,
    tp: int,
    stage: int,
    mode: str,
    micro: int,
    accum: int,
    device: str = "cpu",
) -> Cell:
    """A workload with the batch that this setup makes of it."""
    on_gpu = device == "cuda"
    setup = Setup(
        world_size=ranks,
        tp=tp,
        zero_stage=stage,
        micro_batch_size=micro,
        grad_accum_steps=accum,
        activation_checkpointing=mode,
        accumulate="full" if stage < 2 else "shard",
        dtype="bf16" if on_gpu else "fp32",
        master_weights="full" if on_gpu else "none",
        device_type=device,
        transport="nccl" if on_gpu else "shm",
    )
    return Workload(shape, setup.dp * micro * accum), setup


def title_of(workload: Workload, setup: Setup) -> str:
    """A cell in a few words."""
    shape, s = workload.shape, setup
    layout = f"tp {s.tp}" if s.tp > 1 else ""
    layout += (" x " if layout and s.dp > 1 else "") + (f"ZeRO-{s.zero_stage}" if s.dp > 1 else "")
    return (
        f"{shape.n_layer}x{shape.n_embd} T={shape.block_size}, "
        f"{s.world_size} rank{'s' * (s.world_size > 1)}{': ' * bool(layout)}{layout}, "
        f"micro-batch {s.micro_batch_size} x {s.grad_accum_steps}, "
        f"checkpointing {s.activation_checkpointing}"
    )


def check_cells(
    ranks: int,
    cells: Sequence[Cell],
    *,
    device: str = "cpu",
    threads: int = 1,
    seconds: float = MEASURE_S,
    steps_s: float = STEPS_S,
    turns: int = TURNS,
    say: Callable[[str], None] = print,
) -> tuple[list[Row], MeasuredRates]:
    """Measure rates, predict and run each cell, in one group of processes.

    What a machine does drifts by tens of percent within minutes where others use it too. So a
    cell's rates are measured and its steps are run by turns, and medians over the turns are
    compared. Returned are the rates of all cells' last turns, too.
    """
    with RankPool(ranks, threads=threads, device=device) as pool:
        say(f"{ranks} rank{'s' * (ranks > 1)}: {len(cells)} layouts")
        kept: MeasuredRates | None = None
        spreads, rows = [], []
        for workload, setup in cells:
            found = []
            for _ in range(turns):
                rates = measure_cells(
                    pool, [(workload, setup)], seconds=seconds / len(cells) / turns
                )
                answers = pool.call(run_cell, workload, setup, steps_s / turns)
                found.append((predict_step(workload, setup, rates), answers))
                kept = kept or MeasuredRates(rates.about)
                was_busy = kept.about["busy"]
                kept.update(rates)
                kept.about["busy"] = was_busy or rates.about["busy"]
                spreads.append(rates.about["spread"])
            rows.append(make_row(workload, setup, found, threads))
            say(f"  {describe_row(rows[-1])}")
    assert kept is not None
    kept.about["spread"] = statistics.median(spreads)
    return rows, kept


def run_cell(
    rank: Rank, workload: Workload, setup: Setup, seconds: float
) -> tuple[list[float], int]:
    """On a rank: seconds of steps, and the peak of bytes in a further one."""
    release_workspaces()  # those of a larger model before
    run = ShortRun(workload, setup, rank.mesh(setup.tp))
    run.seconds(WARM_UP)
    rank.barrier()
    start = time.perf_counter()
    run.seconds(1)
    count = rank.of_first(seconds / (time.perf_counter() - start))
    times = run.seconds(max(FEWEST, min(MOST, int(count))))
    gc.collect()
    rank.barrier()
    held = held_bytes(run.engine, run.optimizer)
    with StepMemory(rank.mesh(setup.tp).device, alive_bytes=held) as memory:
        run.step()
    del run
    gc.collect()
    return times, memory.peak_bytes


def make_row(
    workload: Workload,
    setup: Setup,
    turns: Sequence[tuple[StepTime, Sequence[tuple[list[float], int]]]],
    threads: int,
) -> Row:
    """The row of a cell from each turn's prediction and what its ranks answered."""
    memory = predict_memory(workload, setup)
    step = sorted((step for step, _ in turns), key=lambda s: s.step_s)[len(turns) // 2]
    times = [t for _, answers in turns for t in slowest([seconds for seconds, _ in answers])]
    p20, *_, p80 = statistics.quantiles(times, n=5)
    kinds = {name: int(value) for name, value in asdict(memory).items() if value}
    return Row(
        title_of(workload, setup),
        setup.world_size,
        threads,
        memory.total,
        max(peak for _, answers in turns for _, peak in answers),
        step.step_s,
        statistics.median(times),
        p20,
        p80,
        len(times),
        dict(step.parts),
        kinds,
    )


def describe_row(row: Row) -> str:
    """A line for the terminal."""
    return (
        f"{row.title}: memory {row.predicted_bytes / 1e6:.1f} / {row.measured_bytes / 1e6:.1f} MB "
        f"({row.memory_error:+.1%}), step {row.predicted_s * 1e3:.1f} / {row.measured_s * 1e3:.1f} "
        f"ms ({row.time_error:+.1%})"
    )


def run_all(
    *, device: str = "cpu", quick: bool = False, say: Callable[[str], None] = print
) -> Iterator[tuple[list[Row], MeasuredRates]]:
    """The cells of one number of ranks after the other."""
    for ranks, cells in cells_of(device, quick=quick).items():
        threads = 1 if device == "cpu" else max(1, available_cores() // ranks)
        seconds, steps_s = (QUICK_MEASURE_S, 0.2) if quick else (MEASURE_S, STEPS_S)
        yield check_cells(
            ranks,
            cells,
            device=device,
            threads=threads,
            seconds=seconds,
            steps_s=steps_s,
            turns=1 if quick else TURNS,
            say=say,
        )


def run_check(
    *,
    quick: bool = False,
    device: str = "cpu",
    out: str | Path = OUT,
    say: Callable[[str], None] = print,
) -> int:
    """Predicts and runs the grid; prints the distribution of the errors; keeps it in a folder.

    Args:
        quick: few and tiny layouts: does it run?
        out: folder for results.json and errors.png.
    Returns:
        The exit status: 0.
    Raises:
        RuntimeError: a rank died.
    """
    rows: list[Row] = []
    about: dict[int, dict[str, Any]] = {}
    for some, rates in run_all(device=device, quick=quick, say=say):
        rows += some
        about[some[0].world_size] = rates.about
        if not quick:
            keep_rates(rates)
            if not rates.steady:
                say(f"rates   {rates}")
    check, folder = Check(tuple(rows), about), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_check(check, folder / "results.json")
    files = ["results.json"]
    with contextlib.suppress(ImportError):  # matplotlib is optional
        draw_check(points_of(check.rows), folder / "errors.png")
        files.append("errors.png")
    say(f"memory  error {check.memory}")
    say(f"step    error {check.time}")
    for line in check.busy:
        say(f"measured on a busy machine: {line}; a quiet one gives other step times")
    say(f"all layouts: {', '.join(str(folder / name) for name in files)}")
    return 0


def points_of(rows: Sequence[Row]) -> list[tuple[int, float, float, float, float]]:
    """Ranks, then predicted and measured MB and ms of every row, for the picture."""
    return [
        (
            row.world_size,
            row.predicted_bytes / 1e6,
            row.measured_bytes / 1e6,
            row.predicted_s * 1e3,
            row.measured_s * 1e3,
        )
        for row in rows
    ]


def write_check(check: Check, path: Path) -> None:
    """All rows and their errors as JSON."""
    content = {
        "memory": asdict(check.memory),
        "time": asdict(check.time),
        "rates": check.about,
        "rows": [
            {**asdict(row), "memory_error": row.memory_error, "time_error": row.time_error}
            for row in check.rows
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
