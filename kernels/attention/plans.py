"""Tiles of each attention kernel per GPU, and the other launch arguments besides tensors.

Two tables hold the share of L2 for keys and the tiles: attention_configs.json is arch -> kernel ->
head dim -> variant -> Config, attention_sections.json arch -> Section; config_table.py reads them,
`python -m bench tune` writes them.

Plans are computed once for tensors of equal layouts: otherwise a call would spend more time on this
than on the launch. Tiles and sections are arguments, so that a tuned table takes effect at once.
"""

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.config_table import SHARED_BYTES, ConfigTable, section_of

KERNELS = ("fwd", "bwd_dq", "bwd_dkdv")
HEAD_DIMS = (16, 32, 64, 128)  # padded to a power of 2
VARIANTS = ("plain", "dropout", "bits", "fp32")  # bits: of the mask, kept; fp32: any mask or none


class Config(NamedTuple):
    """A tile of block_q queries and block_k keys, and how it is run."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    load: str  # "tma": K, V (Q, dO) by Hopper's tensor memory accelerator if alignment allows


def padded(D: int) -> int:
    """The head dim of tiles, a power of 2."""
    return max(16, 1 << (D - 1).bit_length())


def variant_for(dropout: bool, fp32: bool, bits: Tensor | None = None) -> str:
    """The table's column for a call: fp32 tiles hold half as much, drawing needs registers."""
    if fp32 or not dropout:
        return "fp32" if fp32 else "plain"
    return "dropout" if bits is None else "bits"


def candidates(arch: int, kernel: str, head_dim: int, variant: str) -> list[Config]:
    """Configs worth timing: tiles that fit registers and shared memory by arithmetic.

    More than 160 values of scores and accumulators per thread spill; on sm_90, whose products read
    from shared memory, 192 of dK and dV spill 16 bytes at most, outside the loop. More warps than
    16-row slices of the scores compute the same rows twice.
    """
    wide = (arch, kernel, head_dim, variant) == (90, "bwd_dkdv", 128, "plain")
    element_bytes = 4 if variant == "fp32" else 2
    n_scores, n_outputs = {"fwd": (1, 1), "bwd_dq": (2, 1), "bwd_dkdv": (2, 2)}[kernel]
    ordered = variant == "dropout" and kernel != "bwd_dkdv"  # an order of keys without descriptors
    loads = ("tma", "ptr") if arch == 90 and variant != "fp32" and not ordered else ("ptr",)
    found = []
    for block_q, block_k, num_warps in itertools.product((32, 64, 128), (32, 64, 128), (4, 8)):
        owned, walked = (block_k, block_q) if kernel == "bwd_dkdv" else (block_q, block_k)
        score_rows = owned if variant == "plain" else block_q
        if num_warps * 16 > score_rows and variant != "fp32":
            continue
        values = n_scores * block_q * block_k + n_outputs * owned * head_dim
        if values > (192 if wide else 160) * 32 * num_warps:
            continue
        for num_stages in (1, 2, 3):
            rows = owned * n_scores + 2 * walked * num_stages
            if rows * head_dim * element_bytes <= SHARED_BYTES[section_of(arch)]:
                found += [Config(block_q, block_k, num_warps, num_stages, x) for x in loads]
    return found


TABLE = ConfigTable(
    "attention_configs", Config, candidates,
    list(itertools.product(KERNELS, HEAD_DIMS, VARIANTS)),
    lambda arch, config: config if arch == 90 else config._replace(load="ptr"),
)  # fmt: skip
get_config = TABLE.get  # (arch, kernel, padded head dim, variant) -> Config


class Section(NamedTuple):
    """Keys and values that L2 holds besides the rest; see triton.py [Note: order]."""

    megabytes: int


SECTIONS = ConfigTable(
    "attention_sections", Section, lambda arch: [Section(n) for n in (4, 8, 16, 32, 64)]
)

Layout = Any  # a descriptor of Triton's without memory


@functools.lru_cache(4096)
def layout_of(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, block: int, block_d: int
) -> Layout | None:
    """How a descriptor sees x [B, T, H, D] as [B, H, T, D] in boxes of [1, 1, block, block_d]; None
    if it cannot: it requires steps of 16 bytes (and addresses, which aligned() checks), and no
    broadcast. Made once per layout, because Triton's checks of a descriptor are slow."""
    B, T, H, D = shape
    b, t, h, _ = stride
    if min(*shape, b, t, h) <= 0 or (b | t | h) * dtype.itemsize % 16:  # a size is a power of 2
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = torch.empty(0, dtype=dtype, device="meta")
    return TensorDescriptor(base, [B, H, T, D], [b, h, t, 1], [1, 1, block, block_d])


def aligned(x: Tensor, y: Tensor) -> bool:
    """Whether a descriptor can hold both addresses."""
    return (x.data_ptr() | y.data_ptr()) % 16 == 0


def tma_reads(x: Tensor) -> bool:
    """Whether a descriptor can hold x [B, T, H, D]."""
    return layout_of(x.shape, x.stride(), x.dtype, 16, 16) is not None and aligned(x, x)


def heads_per_section(k: tuple[int, ...], itemsize: int, megabytes: int) -> int:
    """Number of key heads that fit in L2 with their values, for k [B, Tk, Hkv, D]; triton.py
    [Note: order]."""
    return max(1, (megabytes << 20) // (2 * k[1] * k[3] * itemsize))


def _tiles(rows: int, block: int, n: int, varlen: bool) -> int:
    """Of all samples or documents; see triton.py [Note: documents]."""
    return rows // block + n if varlen else -(-rows // block) * n


def _constants(
    D: int, config: Config, causal: bool, dropout: bool, varlen: bool, n: int, **more: Any
) -> dict[str, Any]:
    """Constants of all three kernels, and how they are run; more: inserted in between."""
    tile = {"BLOCK_Q": config.block_q, "BLOCK_K": config.block_k}
    how = {"CAUSAL": causal, "DROPOUT": dropout, "VARLEN": varlen, **more}
    how |= {"STEPS": n.bit_length() if varlen else 0}
    run = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return {"D": D, "BLOCK_D": padded(D), **tile, **how, **run}


class FwdPlan(NamedTuple):
    """Launch arguments besides tensors, the scale and the mask; the same for equal layouts."""

    grid: tuple[int, ...]
    k: Layout | None
    v: Layout | None
    numbers: tuple[int, ...]
    constants: dict[str, Any]


@functools.lru_cache(4096)
def fwd_plan(
    q: tuple[int, ...], q_stride: tuple[int, ...], k: tuple[int, ...], k_stride: tuple[int, ...],
    v_stride: tuple[int, ...], dtype: torch.dtype, causal: bool, dropout: bool, drawn: bool,
    n: int, varlen: bool, config: Config, megabytes: int,
) -> FwdPlan:  # fmt: skip
    """q, k: shapes; megabytes: of a section."""
    _, T, H, D = q
    block_d, group = padded(D), H // k[2]
    tiles = _tiles(T, config.block_q, n, varlen)
    boxed = config.load == "tma" and not drawn
    section = heads_per_section(k, dtype.itemsize, megabytes) * group
    numbers = (*q_stride[:3], *k_stride[:3], *v_stride[:3], n, T, k[1], H, group, section)
    constants = _constants(D, config, causal, dropout, varlen, n)
    k_box, v_box = (
        layout_of(k, stride, dtype, config.block_k, block_d) if boxed else None
        for stride in (k_stride, v_stride)
    )
    return FwdPlan((tiles * H,), k_box, v_box, numbers, constants)


class BwdPlan(NamedTuple):
    """Arguments of the two launches besides tensors, the scale and the mask; see FwdPlan."""

    boxes: tuple[Layout | None, ...]  # of dq's k and v, of dk and dv's do and q
    grids: tuple[tuple[int, ...], tuple[int, ...]]
    numbers: tuple[tuple[int, ...], tuple[int, ...]]
    constants: tuple[dict[str, Any], dict[str, Any]]


@functools.lru_cache(4096)
def bwd_plan(
    q: tuple[int, ...], k: tuple[int, ...], strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype, causal: bool, dropout: bool, drawn: bool, n: int, varlen: bool,
    dq: Config, dkdv: Config, megabytes: int,
) -> BwdPlan:  # fmt: skip
    """q, k: shapes; strides: of do, q, k, v, dq, dk, dv; see fwd_plan()."""
    _, T, H, D = q
    _, Tk, Hkv, _ = k
    group, block_d = H // Hkv, padded(D)
    boxed = dq.load == "tma" and not drawn
    boxes = [layout_of(k, s, dtype, dq.block_k, block_d) if boxed else None for s in strides[2:4]]
    boxed = dkdv.load == "tma"
    boxes += [layout_of(q, s, dtype, dkdv.block_q, block_d) if boxed else None for s in strides[:2]]
    tiles, key_tiles = _tiles(T, dq.block_q, n, varlen), _tiles(Tk, dkdv.block_k, n, varlen)
    steps = [s[:3] for s in strides]
    sizes, section = (n, T, Tk, H, group), heads_per_section(k, dtype.itemsize, megabytes)
    numbers = (
        (*itertools.chain(*steps[:5]), *sizes, section * group),
        (*itertools.chain(*steps[:4], *steps[5:]), *sizes, section),
    )
    fp32, even = dtype == torch.float32, not varlen and T % dkdv.block_q == 0
    of_dq, of_dkdv = (
        _constants(D, config, causal, dropout, varlen, n, FP32=fp32) for config in (dq, dkdv)
    )
    of_dkdv |= {"EVEN": even, "GROUPED": group != 1}
    grids = (tiles * H,), (key_tiles * Hkv,)
    return BwdPlan(tuple(boxes), grids, numbers, (of_dq, of_dkdv))
