"""The axes of a mesh and the ranks along each: arithmetic only.

[Note: grid] tp_grid=(r, c) puts the ranks of tensor parallelism in r rows and c columns: the axis
tp is then a row of c ranks, and rows has the r rows. A third number, depth, is how many such grids
have the same weights and share out a batch. See fastpar/axes/grid.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastpar.settings.parallel import MeshSettings

# See mesh.py, [Note: order of the axes].
AXES = ("pp", "replicas", "dp", "cp", "ep", "depth", "rows", "tp")
DATA_AXES = ("replicas", "dp", "ep")  # whose ranks compute different sequences
TP_AXES = ("rows", "tp")  # whose ranks split each layer
CHUNKS = {"interleaved": range(1, 65), "zb-v": range(2, 3)}  # stages on a rank; of others: one


def parse_grid(text: str | None) -> tuple[int, ...] | None:
    """(rows, columns), with depth if it is there, of a setting; None without a grid."""
    return None if text is None else tuple(map(int, text.split("x")))


def pp_split(text: str | None) -> list[int] | None:
    """Layers of each stage as the setting pp_split says; None: by cost."""
    return None if text is None else [int(number) for number in text.split(",")]


def pp_chunks(schedule: str, chunks: int | None) -> int:
    """Stages on each rank of a pipeline; None: the fewest that make a schedule differ from 1f1b."""
    return (2 if 2 in CHUNKS.get(schedule, ()) else 1) if chunks is None else chunks


def divisors(n: int) -> list[int]:
    """In rising order."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def axes_of(mesh: MeshSettings) -> dict[str, Any]:
    """The arguments of Mesh that settings stand for."""
    return {**vars(mesh), "tp_grid": parse_grid(mesh.tp_grid)}


def ranks_of_batch(mesh: MeshSettings) -> dict[str, int]:
    """Ranks that are given the same batch, by the setting that says how many."""
    grid = parse_grid(mesh.tp_grid)
    split = {"tp": mesh.tp} if grid is None else {"tp_grid": math.prod(grid)}
    return {**split, "cp": mesh.cp, "pp": mesh.pp}


def ranks_of_depth(mesh: MeshSettings) -> int:
    """Grids that have the same weights."""
    return (*(parse_grid(mesh.tp_grid) or (1, 1)), 1)[2]


def ranks_of_samples(mesh: MeshSettings) -> int:
    """Ranks that share out the samples of a micro-batch."""
    return (parse_grid(mesh.tp_grid) or (1,))[0] * ranks_of_depth(mesh)


def sizes_of_grid(grid: Any) -> dict[str, int]:
    """Ranks along depth, rows and tp; see [Note: grid]. Without a grid, none of tp."""
    if grid is None:
        return {"depth": 1, "rows": 1}
    numbers = tuple(grid) if isinstance(grid, Sequence) and not isinstance(grid, str) else ()
    fits = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers)
    if len(numbers) not in (2, 3) or not fits or math.prod(numbers) == 1:
        raise ValueError(
            "Mesh: expected tp_grid of two or three positive integers, rows, columns and depth, "
            f"for two ranks or more, got tp_grid={grid!r}; pass (2, 2), or leave tp_grid out"
        )
    rows, columns, depth = (*numbers, 1)[:3]
    return {"depth": depth, "rows": rows, "tp": columns}


def ranks_along(sizes: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """All ranks of a mesh in groups: those of one group differ along these axes only.

    Args:
        sizes: ranks along each axis, outermost first.
    """
    groups: dict[tuple[int, ...], list[int]] = {}  # by the places along the other axes
    for rank, place in enumerate(itertools.product(*map(range, sizes.values()))):
        others = tuple(at for axis, at in zip(sizes, place) if axis not in axes)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def check_sizes(asked: Mapping[str, int | None]) -> None:
    """Refuse numbers of ranks below 1."""
    for axis, size in asked.items():
        if size is None and axis == "dp":
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            way_out = {"dp": "use every rank", "tp": "split no model"}.get(
                axis, "have one rank there"
            )
            raise ValueError(
                f"Mesh: expected {axis} to be a positive integer{' or None' * (axis == 'dp')}, "
                f"got {axis}={size}; leave {axis} out to {way_out}"
            )


def complete_sizes(asked: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    """The size of each axis, dp's from what the others leave if it is None."""
    dp, ep = asked["dp"], asked["ep"] or 1
    others = math.prod(n for a, n in asked.items() if a not in ("dp", "ep") and n is not None)
    ranks = world_size // others if dp is None else dp
    product = others * ranks
    if product == world_size:
        if ranks % ep:
            raise ValueError(f"Mesh: expected ep to divide dp={ranks}, got ep={ep}; choose another")
        return {**{a: n or 1 for a, n in asked.items()}, "dp": ranks // ep}
    named = {a: n for a, n in asked.items() if a != "ep" and n and (n > 1 or a == "dp")}
    got = ", ".join(f"{axis}={size}" for axis, size in named.items())
    if dp is None:
        rule = f"{' * '.join(named)} to divide"
        way_out = f"start a multiple of {others} ranks"
    else:
        rule = f"{' * '.join(named)} equal to"
        way_out = f"start {product} ranks (torchrun --nproc-per-node {product}) or leave dp out"
    raise ValueError(
        f"Mesh: expected {rule} the number of ranks, got {got} with "
        f"world_size={world_size}; {way_out}"
    )
