"""How bias + GELU is cut on which GPU: gelu_configs.json is arch -> Config; see config_table.py."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from fastpar.kernels.config_table import ConfigTable


class Config(NamedTuple):
    """Tile and occupancy of one architecture.

    Bandwidth times latency, by the data sheets: an H200 needs about 25 KB in flight a
    multiprocessor, an A100 12 KB. A program of backward loads 8 KB at a time with 2048 elements;
    its 80 to 96 registers a thread let five be resident.
    """

    tile: int  # elements a program has in flight
    num_warps: int
    programs_per_sm: int  # of backward, all resident at once


def _wrong(arch: int, config: Config) -> tuple[str, str] | None:
    if config.tile not in (512, 1024, 2048, 4096, 8192):
        return "a power of 2 in [512, 8192]", "tile"
    if config.num_warps not in (1, 2, 4, 8):
        return "1, 2, 4 or 8", "num_warps"
    return None if 1 <= config.programs_per_sm <= 16 else ("1 to 16", "programs_per_sm")


def candidates(arch: int) -> list[Config]:
    """Configs worth timing: 8 to 32 elements a thread."""
    found = itertools.starmap(Config, itertools.product((1024, 2048, 4096), (4, 8), (3, 4, 5, 6)))
    return [config for config in found if 8 <= config.tile // (32 * config.num_warps) <= 32]


TABLE = ConfigTable(
    "gelu_configs",
    Config,
    (80, 90),
    [()],
    _wrong,
    lambda arch: 90 if arch >= 90 else 80,
    candidates,
)
