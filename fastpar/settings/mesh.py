"""The axes of a mesh and the ranks along each axis: arithmetic only.

[Note: grid] tp_grid=(r, c) arranges the tensor-parallel ranks in r rows and c columns: the axis tp
then has c ranks and the axis rows has r. A third number, depth, is the number of such grids that
hold the same weights and split a batch. See fastpar/axes/grid.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastpar.settings.parallel import MeshSettings

# See [Note: order of the axes] in comm/mesh.py.
AXES = ("pp", "replicas", "dp", "cp", "ep", "depth", "rows", "tp")
DATA_AXES = ("replicas", "dp", "ep")  # their ranks compute different sequences
TP_AXES = ("rows", "tp")  # their ranks split each layer
CHUNKS = {"interleaved": range(1, 65)}  # stages per rank; other schedules: 1


def parse_grid(text: str | None) -> tuple[int, ...] | None:
    """Parse ROWSxCOLUMNS or ROWSxCOLUMNSxDEPTH into numbers; None without a grid."""
    return None if text is None else tuple(map(int, text.split("x")))


def pp_split(text: str | None) -> list[int] | None:
    """Layers of each stage from the setting pp_split; None: balanced by cost."""
    return None if text is None else [int(number) for number in text.split(",")]


def pp_chunks(schedule: str, chunks: int | None) -> int:
    """Stages per rank of a pipeline; chunks None: 2 for schedules that have several, else 1."""
    return (2 if 2 in CHUNKS.get(schedule, ()) else 1) if chunks is None else chunks


def divisors(n: int) -> list[int]:
    """The divisors of n in ascending order."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def axes_of(mesh: MeshSettings) -> dict[str, Any]:
    """The arguments of Mesh for these settings."""
    return {**vars(mesh), "tp_grid": parse_grid(mesh.tp_grid)}


def ranks_of_batch(mesh: MeshSettings) -> dict[str, int]:
    """Setting -> number of ranks along axes whose ranks get the same batch."""
    grid = parse_grid(mesh.tp_grid)
    split = {"tp": mesh.tp} if grid is None else {"tp_grid": math.prod(grid)}
    return {**split, "cp": mesh.cp, "pp": mesh.pp}


def ranks_of_depth(mesh: MeshSettings) -> int:
    """Depth of the grid: number of grids with the same weights."""
    return (*(parse_grid(mesh.tp_grid) or (1, 1)), 1)[2]


def ranks_of_samples(mesh: MeshSettings) -> int:
    """Number of ranks that split the samples of a micro-batch: rows * depth of a grid."""
    return (parse_grid(mesh.tp_grid) or (1,))[0] * ranks_of_depth(mesh)


def sizes_of_grid(grid: Any) -> dict[str, int]:
    """Ranks along depth, rows and tp; see [Note: grid]. Without a grid, tp is not included."""
    if grid is None:
        return {"depth": 1, "rows": 1}
    numbers = tuple(grid) if isinstance(grid, Sequence) and not isinstance(grid, str) else ()
    fits = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers)
    if len(numbers) not in (2, 3) or not fits or math.prod(numbers) == 1:
        raise ValueError(
            "Mesh: expected tp_grid of two or three positive integers (rows, columns, depth) with "
            f"at least two ranks, got tp_grid={grid!r}; pass (2, 2), for example, or drop tp_grid"
        )
    rows, columns, depth = (*numbers, 1)[:3]
    return {"depth": depth, "rows": rows, "tp": columns}


def ranks_along(sizes: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """All ranks of a mesh, in groups whose ranks differ along the given axes only.

    Args:
        sizes: ranks along each axis, outermost first.
    """
    groups: dict[tuple[int, ...], list[int]] = {}  # by coordinates along the other axes
    for rank, place in enumerate(itertools.product(*map(range, sizes.values()))):
        others = tuple(i for axis, i in zip(sizes, place) if axis not in axes)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def check_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raise ValueError for numbers of ranks below 1."""
    for axis, size in sizes.items():
        if size is None and axis == "dp":
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            way_out = {"dp": "use all ranks"}.get(axis, "use one rank")
            raise ValueError(
                f"Mesh: expected {axis} to be a positive integer{' or None' * (axis == 'dp')}, "
                f"got {axis}={size}; drop {axis} to {way_out}"
            )


def complete_sizes(sizes: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    """The size of each axis; dp=None: world_size divided by the others."""
    dp, ep = sizes["dp"], sizes["ep"] or 1
    others = math.prod(n for a, n in sizes.items() if a not in ("dp", "ep") and n is not None)
    ranks = world_size // others if dp is None else dp
    product = others * ranks
    if product == world_size:
        if ranks % ep:
            raise ValueError(f"Mesh: expected ep to divide dp={ranks}, got ep={ep}; choose another")
        return {**{a: n or 1 for a, n in sizes.items()}, "dp": ranks // ep}
    named = {a: n for a, n in sizes.items() if a != "ep" and n and (n > 1 or a == "dp")}
    got = ", ".join(f"{axis}={size}" for axis, size in named.items())
    if dp is None:
        rule = f"{' * '.join(named)} to divide"
        way_out = f"start a multiple of {others} ranks"
    else:
        rule = f"{' * '.join(named)} equal to"
        way_out = f"start {product} ranks (torchrun --nproc-per-node {product}) or drop dp"
    raise ValueError(
        f"Mesh: expected {rule} the number of ranks, got {got} with "
        f"world_size={world_size}; {way_out}"
    )
