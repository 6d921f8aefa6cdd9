"""How rows lie in threads of the norms' kernels on which GPU: layer_norm_configs.json is arch ->
Config; see config_table.py. The bits of a result may differ between configs, by the order of sums.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from fastpar.kernels.config_table import ConfigTable


class Config(NamedTuple):
    """Of one architecture; see [Note: tile] of layer_norm_triton.py."""

    fwd_values: int  # of a row that a thread holds at most: forward
    bwd_values: int  # backward, where more are live for each, so that fewer may be left of these
    num_warps: int  # of a program at least, which has several rows then


def _wrong(arch: int, config: Config) -> tuple[str, str] | None:
    if not 8 <= config.fwd_values <= 64:
        return "8 to 64", "fwd_values"
    if not 8 <= config.bwd_values <= 24:  # more spill
        return "8 to 24", "bwd_values"
    return None if config.num_warps in (1, 2, 4, 8) else ("1, 2, 4 or 8", "num_warps")


TABLE = ConfigTable(
    "layer_norm_configs",
    Config,
    (80, 90),
    [()],
    _wrong,
    lambda arch: 90 if arch >= 90 else 80,
    lambda arch: list(
        itertools.starmap(Config, itertools.product((16, 32, 64), (16, 24), (2, 4, 8)))
    ),
)
