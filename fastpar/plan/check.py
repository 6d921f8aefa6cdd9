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
from typing import Any, NamedTuple

from fastpar.config.config import PRESETS, GPTConfig
from fastpar.cost.measured_rates import MeasuredRates
from fastpar.cost.memory_model import predict_memory
from fastpar.cost.step_memory import StepMemory, held_bytes
from fastpar.cost.step_time import StepTime, predict_step
from fastpar.cost.workload import Setup, Workload, default_accumulate
from fastpar.kernels.linear_cross_entropy import release_workspaces
from fastpar.measure.measure import Cell, keep_rates, measure_cells
from fastpar.measure.rank_pool import Rank, RankPool
from fastpar.measure.short_run import ShortRun, slowest
from fastpar.plan.check_picture import draw_check
from fastpar.train.launch import threads_per_rank

OUT = "runs/plan-check"
WARM_UP, FEWEST, MOST = 2, 4, 20  # steps of a cell
SIZES = {
    "XS": GPTConfig(4, 4, 128, 64, 512, dropout=0.0),
    "S": GPTConfig(4, 4, 256, 128, 1024, dropout=0.0),
    "M": GPTConfig(6, 6, 384, 128, 2048, dropout=0.0),
}


class Effort(NamedTuple):
    """Seconds of measuring the rates of all cells, of running one cell's steps; turns of both."""

    rates_s: float
    steps_s: float
    turns: int


FULL, QUICK = Effort(60.0, 4.0, 3), Effort(4.0, 0.2, 1)
TINY = GPTConfig(2, 2, 32, 16, 128, dropout=0.0)
# Ranks -> (sizes, tp, stage, checkpointing, micro-batch, accumulation).
_EVERY = tuple(SIZES)
CPU_GRID: dict[int, Sequence[tuple[Sequence[str], int, int, str, int, int]]] = {
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
GPU_GRID: dict[int, Sequence[tuple[Sequence[str], int, int, str, int, int]]] = {
    1: [
        ([size], 1, 0, mode, int(most * micro), accum)
        for size, most in (("gpt2", 16), ("gpt2-medium", 8), ("gpt2-large", 4), ("gpt2-xl", 2))
        for mode, micro, accum in (
            ("none", 1, 1),
            ("none", 0.5, 2),
            ("selective", 1, 1),
            ("full", 2, 1),
        )
    ],
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

    @property
    def point(self) -> tuple[int, float, float, float, float]:
        """Ranks, then predicted and measured MB and ms."""
        sizes = self.predicted_bytes / 1e6, self.measured_bytes / 1e6
        return self.world_size, *sizes, self.predicted_s * 1e3, self.measured_s * 1e3

    def __str__(self) -> str:
        _, *sizes, predicted_ms, measured_ms = self.point
        return (
            f"{self.title}: memory {sizes[0]:.1f} / {sizes[1]:.1f} MB ({self.memory_error:+.1%}), "
            f"step {predicted_ms:.1f} / {measured_ms:.1f} ms ({self.time_error:+.1%})"
        )


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


def cells_of(device: str = "cpu", *, quick: bool = False) -> dict[int, list[Cell]]:
    """The grid: ranks -> cells."""
    shapes, found = {**PRESETS, **SIZES}, dict[int, list[Cell]]()
    for ranks, rows in (CPU_GRID if device == "cpu" else GPU_GRID).items():
        cells: list[Any] = [(shapes[size], *layout) for sizes, *layout in rows for size in sizes]
        if quick:
            cells = [(TINY, *layout) for _, *layout in cells[:: len(cells) // 2]]
        if ranks <= 2 or not quick:
            found[ranks] = [cell(shape, ranks, *layout, device=device) for shape, *layout in cells]
    return found


def cell(shape: GPTConfig, ranks: int, *layout: Any, device: str = "cpu") -> Cell:
    """A workload with the batch that a setup makes of it; layout: as in the grids."""
    tp, stage, mode, micro, accum = layout
    on_cpu: dict[str, Any] = {"dtype": "fp32", "master_weights": "none"}
    on_cpu |= {"device_type": "cpu", "transport": "shm"}
    setup = Setup(
        world_size=ranks,
        tp=tp,
        zero_stage=stage,
        micro_batch_size=micro,
        grad_accum_steps=accum,
        activation_checkpointing=mode,
        accumulate=default_accumulate(stage),
        **(on_cpu if device == "cpu" else {}),
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
    effort: Effort = FULL,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> tuple[list[Row], MeasuredRates]:
    """Measure rates, predict and run each cell, in one group of processes.

    What a machine does drifts by tens of percent within minutes where others use it too. So a
    cell's rates are measured and its steps are run by turns, and medians over the turns are
    compared. Returned are the rates of all cells' last turns, too.
    """
    threads = 1 if device == "cpu" else threads_per_rank(None, ranks)
    rows, measured = [], []
    with RankPool(ranks, threads=threads, device=device) as pool:
        say(f"{ranks} rank{'s' * (ranks > 1)}: {len(cells)} layouts")
        for workload, setup in cells:
            found = []
            for _ in range(effort.turns):
                seconds = effort.rates_s / len(cells) / effort.turns
                rates = measure_cells(pool, [(workload, setup)], seconds=seconds)
                answers = pool.call(run_cell, workload, setup, effort.steps_s / effort.turns)
                found.append((predict_step(workload, setup, rates), answers))
                measured.append(rates)
            rows.append(make_row(workload, setup, found, threads))
            say(f"  {rows[-1]}")
    kept = MeasuredRates({})
    for rates in measured:
        kept.update(rates)
    was_busy = [rates.about["busy"] for rates in measured if rates.about["busy"]]
    spread = statistics.median(rates.about["spread"] for rates in measured)
    kept.about = {**kept.about, "busy": (was_busy or [""])[0], "spread": spread}
    return rows, kept


def run_cell(
    rank: Rank, workload: Workload, setup: Setup, seconds: float
) -> tuple[list[float], int]:
    """On a rank: seconds of steps, and the peak of bytes in a further one."""
    release_workspaces()  # those of a larger model before
    run = ShortRun(workload, setup, rank.mesh(setup.tp, setup.cp))
    run.seconds(WARM_UP)
    rank.barrier()
    start = time.perf_counter()
    run.seconds(1)
    count = rank.of_first(seconds / (time.perf_counter() - start))
    times = run.seconds(max(FEWEST, min(MOST, int(count))))
    gc.collect()
    rank.barrier()
    held = held_bytes(run.engine, run.optimizer)
    with StepMemory(rank.mesh(setup.tp, setup.cp).device, alive_bytes=held) as memory:
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


def run_all(
    *, device: str = "cpu", quick: bool = False, say: Callable[[str], None] = print
) -> Iterator[tuple[list[Row], MeasuredRates]]:
    """The cells of one number of ranks after the other."""
    for ranks, cells in cells_of(device, quick=quick).items():
        yield check_cells(ranks, cells, QUICK if quick else FULL, device=device, say=say)


def run_check(
    *, quick: bool = False, out: str | Path = OUT, say: Callable[[str], None] = print
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
    for some, rates in run_all(quick=quick, say=say):
        rows += some
        about[some[0].world_size] = rates.about
        if not quick:
            keep_rates(rates)
            if not rates.steady:
                say(f"rates   {rates}")
    memory = Errors.of([row.memory_error for row in rows])
    step = Errors.of([row.time_error for row in rows])
    folder, files = Path(out), ["results.json"]
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "memory": asdict(memory),
        "time": asdict(step),
        "rates": about,
        "rows": [
            {**asdict(row), "memory_error": row.memory_error, "time_error": row.time_error}
            for row in rows
        ],
    }
    text = json.dumps(content, indent=1) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")
    with contextlib.suppress(ImportError):  # matplotlib is optional
        draw_check([row.point for row in rows], folder / "errors.png")
        files.append("errors.png")
    say(f"memory  error {memory}")
    say(f"step    error {step}")
    for ranks, of_rates in about.items():
        if of_rates["busy"]:
            say(
                f"measured on a busy machine: {ranks} rank{'s' * (ranks > 1)}: {of_rates['busy']}; "
                "a quiet one gives other step times"
            )
    say(f"all layouts: {', '.join(str(folder / name) for name in files)}")
    return 0
