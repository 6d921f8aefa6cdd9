"""Layouts whose layers are split over a grid of ranks (--tp-grid): which there are, where they pay.

A grid holds what tensor parallelism x ZeRO-3 holds on as many ranks. It has no gathers of weights
ahead of their layers, so its exchanges along rows and columns are all waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastpar.axes.step import Setup, Workload
from fastpar.predict.estimate import Estimate, divisors, layout_text, tp_sizes
from fastpar.settings.mesh import parse_grid
from fastpar.settings.rules import DEFAULTS, check, of_shape

MOST_ROWS = 16


def check_grid(command: Any, workload: Workload) -> None:
    """Refuse a grid that a PlanCommand asks for and the trainer, or this search, does not have."""
    if command.tp_grid in (None, "none"):
        return
    if command.measure:
        raise ValueError(
            f"plan: expected no measure with tp_grid={command.tp_grid}, whose exchanges it does "
            "not time, got measure=True; leave one of them out"
        )
    asked = {n: getattr(command, n) for n in ("optimizer", "moment_dtype", "fp8", "tp_grid")}
    values = {**DEFAULTS, **asked, "pp": command.pp or 1, **of_shape(workload.shape)}
    check("plan", values, ("tp_grid",))


def grids_of(workload: Workload, template: Setup, per_node: int) -> list[tuple[int, ...]]:
    """Of two rows and columns or more; those of a row share a node."""
    shape, world = workload.shape, template.world_size
    columns = [c for c in tp_sizes(workload, template, per_node) if c > 1 and shape.n_embd % c == 0]
    return [
        (rows, c)
        for c in columns
        for rows in divisors(world // c)
        if 1 < rows <= MOST_ROWS and shape.n_embd % rows == 0
    ]


def grid_splits(
    workload: Workload, template: Setup, per_node: int, asked: str | None = None
) -> Iterator[Setup]:
    """Every grid and stage that divides ranks and batch; asked: of this one alone.

    Raises:
        ValueError: a grid that was asked for and does not.
    """
    beside = template.moment_dtype == "int8" or template.optimizer != "adamw"
    if asked == "none" or template.offload is not None or template.fp8 != "none" or beside:
        return
    one = None if asked is None else parse_grid(asked)
    for grid in grids_of(workload, template, per_node) if one is None else [one]:
        rows, columns, depth = (*grid, 1)[:3]
        data = template.world_size // (rows * columns)
        if data % depth or template.world_size % (rows * columns) or not data:
            if one is None:
                continue
            raise ValueError(
                f"plan: expected {rows * columns * depth} ranks of a grid to divide gpus="
                f"{template.world_size}, got tp_grid={asked}; change --gpus or --tp-grid"
            )
        if workload.batch_size % (data * rows):
            if one is None:
                continue
            raise ValueError(
                f"plan: expected batch_size as a multiple of {data * rows}, which data-parallel "
                f"ranks and rows of tp_grid={asked} share, got batch_size={workload.batch_size}; "
                "change --batch-size or --tp-grid"
            )
        for stage in range(4) if data > 1 else range(1):
            yield template.change(tp_grid="x".join(map(str, grid)), zero_stage=stage)


def grids_text(estimates: Sequence[Estimate]) -> str:
    """Whether a grid of ranks is worth it, in a sentence."""
    fits = [e for e in estimates if e.time is not None]
    grid = next((e for e in fits if e.setup.tp_grid is not None), None)
    other = next((e for e in fits if e.setup.tp_grid is None), None)
    if grid is None or grid.time is None:
        return "none: no grid fits"
    if other is None or other.time is None:
        return f"{grid.setup.tp_grid}: without one nothing fits"
    times = grid.time, other.time
    if fits[0] is grid:
        slower = times[1].step_s / times[0].step_s - 1
        return f"{grid.setup.tp_grid}: {layout_text(other.setup)} is {slower:.1%} slower"
    slower, more = times[0].step_s / times[1].step_s - 1, times[0].exposed_s - times[1].exposed_s
    waits = f"waits {abs(more) * 1e3:.3g} ms {'more' if more > 0 else 'less'} for communication"
    return f"none: the best, {layout_text(grid.setup)}, is {slower:.1%} slower; it {waits}"
