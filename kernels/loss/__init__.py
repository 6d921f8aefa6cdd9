"""Losses of logits, of hidden states, and of a shard of the vocabulary.

Tuning of the Triton kernels per GPU: cross_entropy_configs.json is arch -> Config; see
config_table.py. The bits of a result may differ between configs, by the order of sums.
"""

from typing import NamedTuple

from fastpar.kernels.config_table import ConfigTable


class Config(NamedTuple):
    """The settings of one architecture; see the notes of triton.py."""

    unroll: int  # 16-byte accesses that a thread has in flight
    kb_per_warp: int  # of a row, which 4 to 32 warps read
    registers: int  # per thread, of 2048 / warps


# Four accesses spill with 64 registers.
_CANDIDATES = [*(Config(2, kb, 64) for kb in (4, 8, 16)), Config(4, 8, 128), Config(4, 16, 128)]
TABLE = ConfigTable("cross_entropy_configs", Config, lambda arch: _CANDIDATES)
