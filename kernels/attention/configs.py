"""Which tile each attention kernel uses on which GPU, and how much it keeps in L2: two tables.

attention_configs.json is arch -> kernel -> head dim -> variant -> Config, attention_sections.json
arch -> Section; config_table.py reads them, `python -m bench tune` writes them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from fastpar.kernels.config_table import ConfigTable

KERNELS = ("fwd", "bwd_dq", "bwd_dkdv")
HEAD_DIMS = (16, 32, 64, 128)  # padded to a power of 2
VARIANTS = ("plain", "dropout", "bits", "fp32")  # bits: of the mask, kept; fp32: any mask or none
LOADS = ("ptr", "tma")
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}  # a program may use


class Config(NamedTuple):
    """A tile of block_q queries and block_k keys, and how it is run."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    load: str  # "tma": K, V (Q, dO) by Hopper's tensor memory accelerator where alignment allows


def table_for(arch: int) -> int:
    """The table that serves a compute capability (80 for 8.0).

    86 is for 100 KB of shared memory: 8.6, 8.9 and 12.x, and for anything older than 8.0.
    """
    if 90 <= arch < 120:
        return 90
    return 80 if arch in (80, 87) else 86


def variant_for(dropout: bool, fp32: bool, bits: Tensor | None = None) -> str:
    """The table's column for a call: fp32 tiles hold half as much, drawing needs registers."""
    if fp32 or not dropout:
        return "fp32" if fp32 else "plain"
    return "dropout" if bits is None else "bits"


def _wrong(arch: int, config: Config) -> tuple[str, str] | None:
    for name in ("block_q", "block_k"):
        if getattr(config, name) not in (16, 32, 64, 128, 256):
            return "a power of 2 in [16, 256]", name
    if config.num_warps not in (1, 2, 4, 8):
        return "1, 2, 4 or 8", "num_warps"
    if config.num_stages not in (1, 2, 3, 4, 5):
        return "1 to 5", "num_stages"
    if config.load not in LOADS or (config.load == "tma" and arch != 90):
        return "ptr, or tma in the table 90", "load"
    return None


def candidates(arch: int, kernel: str, head_dim: int, variant: str) -> list[Config]:
    """Configs worth timing: tiles that fit registers and shared memory by arithmetic.

    More than 160 values of scores and accumulators a thread spill, and more warps than 16-row
    slices of the scores compute the same rows twice.
    """
    element_bytes = 4 if variant == "fp32" else 2
    n_scores, n_outputs = {"fwd": (1, 1), "bwd_dq": (2, 1), "bwd_dkdv": (2, 2)}[kernel]
    ordered = variant == "dropout" and kernel != "bwd_dkdv"  # keys in an order no descriptor has
    loads = ("tma", "ptr") if arch == 90 and variant != "fp32" and not ordered else ("ptr",)
    found = []
    for block_q, block_k, num_warps in itertools.product((32, 64, 128), (32, 64, 128), (4, 8)):
        owned, walked = (block_k, block_q) if kernel == "bwd_dkdv" else (block_q, block_k)
        score_rows = owned if variant == "plain" else block_q
        if num_warps * 16 > score_rows and variant != "fp32":
            continue
        values = n_scores * block_q * block_k + n_outputs * owned * head_dim
        if values > 160 * 32 * num_warps:
            continue
        for num_stages in (1, 2, 3):
            rows = owned * n_scores + 2 * walked * num_stages
            if rows * head_dim * element_bytes <= SHARED_BYTES[table_for(arch)]:
                found += [Config(block_q, block_k, num_warps, num_stages, x) for x in loads]
    return found


TABLE = ConfigTable(
    "attention_configs",
    Config,
    tuple(SHARED_BYTES),
    list(itertools.product(KERNELS, HEAD_DIMS, VARIANTS)),
    _wrong,
    table_for,
    candidates,
    lambda arch, config: config if arch == 90 else config._replace(load="ptr"),
)
get_config = TABLE.get  # (arch, kernel, padded head dim, variant) -> Config


class Section(NamedTuple):
    """Keys and values that L2 holds beside the rest; see attention_triton.py [Note: order]."""

    megabytes: int


SECTIONS = ConfigTable(
    "attention_sections",
    Section,
    (80, 90),
    [()],
    lambda arch, s: None if 1 <= s.megabytes <= 1024 else ("1 to 1024", "megabytes"),
    lambda arch: 90 if arch >= 90 else 80,
    lambda arch: [Section(n) for n in (4, 8, 16, 32, 64)],
)
