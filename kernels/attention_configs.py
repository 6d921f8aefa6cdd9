"""Which tile each attention kernel uses on which GPU: attention_configs.json, read once.

The table is arch -> kernel -> head dim -> variant -> Config. Nothing is timed at a user's first
step; `python -m bench attention --tune` measures candidates() on a GPU and writes the winners back
with set_config(). A GPU without a table of its own uses that of table_for().
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("attention_configs.json")
KERNELS = ("fwd", "bwd_dq", "bwd_dkdv")
HEAD_DIMS = (16, 32, 64, 128)  # padded to a power of 2
VARIANTS = ("plain", "dropout", "fp32")  # fp32: with and without dropout
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


def variant_for(dropout: bool, fp32: bool) -> str:
    """The table's column for a call: fp32 tiles hold half as much, dropout needs registers."""
    return "fp32" if fp32 else "dropout" if dropout else "plain"


def _check(key: tuple[str, ...], entry: Any) -> Config:
    """entry as a Config, or a ValueError that names its place in the table."""

    def refuse(rule: str, name: str, value: Any) -> ValueError:
        return ValueError(
            f"attention_configs: expected {rule}, got {name}={value} at {' / '.join(key)}; correct "
            f"{PATH.name} or restore the one that was installed"
        )

    if not isinstance(entry, dict) or set(entry) != set(Config._fields):
        raise refuse(f"the fields {', '.join(Config._fields)}", "entry", entry)
    config = Config(**entry)
    for name in ("block_q", "block_k"):
        if entry[name] not in (16, 32, 64, 128, 256):
            raise refuse("a power of 2 in [16, 256]", name, entry[name])
    if config.num_warps not in (1, 2, 4, 8):
        raise refuse("1, 2, 4 or 8", "num_warps", config.num_warps)
    if config.num_stages not in (1, 2, 3, 4, 5):
        raise refuse("1 to 5", "num_stages", config.num_stages)
    if config.load not in LOADS or (config.load == "tma" and key[0] != "90"):
        raise refuse("ptr, or tma in the table 90", "load", config.load)
    return config


@functools.cache
def load_configs(path: Path) -> dict[tuple[int, str, int, str], Config]:
    """(arch, kernel, padded head dim, variant) -> Config, all of them, checked.

    Raises:
        ValueError: a missing, unknown or impossible entry, named.
    """
    table = json.loads(path.read_text())
    configs = {}
    for arch in SHARED_BYTES:
        for kernel in KERNELS:
            for head_dim in HEAD_DIMS:
                for variant in VARIANTS:
                    key = (str(arch), kernel, str(head_dim), variant)
                    entry: Any = table
                    for name in key:
                        entry = entry.get(name) if isinstance(entry, dict) else None
                    configs[arch, kernel, head_dim, variant] = _check(key, entry)
    return configs


@functools.cache
def get_config(arch: int, kernel: str, head_dim: int, variant: str) -> Config:
    """The Config of a kernel on a GPU of this compute capability; head_dim already padded."""
    config = load_configs(PATH)[table_for(arch), kernel, head_dim, variant]
    return config if arch == 90 else config._replace(load="ptr")


def set_config(
    arch: int, kernel: str, head_dim: int, variant: str, config: Config, path: Path | None = None
) -> None:
    """Writes one entry of the table (of PATH by default); calls from now on use it.

    Raises:
        ValueError: no such place in the table, or an impossible config.
    """
    key = (str(table_for(arch)), kernel, str(head_dim), variant)
    if kernel not in KERNELS or head_dim not in HEAD_DIMS or variant not in VARIANTS:
        raise ValueError(
            f"set_config: expected a kernel of {KERNELS}, a head dim of {HEAD_DIMS} and a variant "
            f"of {VARIANTS}, got place={' / '.join(key)}; choose one of these"
        )
    _check(key, config._asdict())
    path = PATH if path is None else path
    table = json.loads(path.read_text())
    table[key[0]][kernel][str(head_dim)][variant] = config._asdict()
    path.write_text(_render(table))
    load_configs.cache_clear()
    get_config.cache_clear()


def _render(table: dict[str, Any], depth: int = 3) -> str:
    """JSON with one Config a line, so that a re-tuned table is a readable difference."""

    def render(node: dict[str, Any], level: int) -> str:
        if level > depth:
            return json.dumps(node)
        pad = "  " * (level + 1)
        items = (f"{pad}{json.dumps(k)}: {render(v, level + 1)}" for k, v in node.items())
        return "{\n" + ",\n".join(items) + "\n" + "  " * level + "}"

    return render(table, 0) + "\n"


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
        score_rows = block_q if variant == "dropout" else owned
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
