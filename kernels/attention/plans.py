"""What attention's launches get besides tensors: computed once for tensors of equal layouts.

A call would else spend more time on this than on the launch. Tiles and sections are arguments, so
that a table that is tuned is obeyed at once.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.attention_configs import Config

Layout = Any  # a descriptor of Triton's without memory


@functools.lru_cache(4096)
def layout_of(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, block: int, block_d: int
) -> Layout | None:
    """How a descriptor sees x [B, T, H, D] as [B, H, T, D] in boxes of [1, 1, block, block_d]; None
    where it cannot: it takes steps of 16 bytes (and addresses, which aligned() looks at), no
    broadcast. Triton checks a descriptor's fields at length: once for each layout."""
    B, T, H, D = shape
    b, t, h, _ = stride
    if min(*shape, b, t, h) <= 0 or (b | t | h) * dtype.itemsize % 16:  # a size is a power of 2
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = torch.empty(0, dtype=dtype, device="meta")
    return TensorDescriptor(base, [B, H, T, D], [b, h, t, 1], [1, 1, block, block_d])


def aligned(x: Tensor, y: Tensor) -> bool:
    """Whether both addresses are such that a descriptor can hold them."""
    return (x.data_ptr() | y.data_ptr()) % 16 == 0


def tma_reads(x: Tensor) -> bool:
    """Whether a descriptor can hold x [B, T, H, D]."""
    return layout_of(x.shape, x.stride(), x.dtype, 16, 16) is not None and aligned(x, x)


def heads_per_section(k: tuple[int, ...], itemsize: int, megabytes: int) -> int:
    """Key heads that fit in L2 with their values, of k [B, Tk, Hkv, D]; attention_triton.py
    [Note: order]."""
    return max(1, (megabytes << 20) // (2 * k[1] * k[3] * itemsize))


class FwdPlan(NamedTuple):
    """What a launch gets besides tensors, the scale and the mask; the same for equal layouts."""

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
    from fastpar.kernels.triton_launch import cdiv, next_power_of_2

    _, T, H, D = q
    block_d, group = max(16, next_power_of_2(D)), H // k[2]
    tiles = T // config.block_q + n if varlen else cdiv(T, config.block_q) * n
    boxed = config.load == "tma" and not drawn
    section = heads_per_section(k, dtype.itemsize, megabytes) * group
    numbers = (*q_stride[:3], *k_stride[:3], *v_stride[:3], n, T, k[1], H, group, section)
    constants = {
        "D": D,
        "BLOCK_D": block_d,
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "CAUSAL": causal,
        "DROPOUT": dropout,
        "VARLEN": varlen,
        "STEPS": n.bit_length() if varlen else 0,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    k_box, v_box = (
        layout_of(k, stride, dtype, config.block_k, block_d) if boxed else None
        for stride in (k_stride, v_stride)
    )
    return FwdPlan((tiles * H,), k_box, v_box, numbers, constants)


class BwdPlan(NamedTuple):
    """What the two launches get besides tensors, the scale and the mask; see FwdPlan."""

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
    from fastpar.kernels.triton_launch import cdiv, next_power_of_2

    _, T, H, D = q
    _, Tk, Hkv, _ = k
    group, block_d = H // Hkv, max(16, next_power_of_2(D))
    boxed = dq.load == "tma" and not drawn
    boxes = [layout_of(k, s, dtype, dq.block_k, block_d) if boxed else None for s in strides[2:4]]
    boxed = dkdv.load == "tma"
    boxes += [layout_of(q, s, dtype, dkdv.block_q, block_d) if boxed else None for s in strides[:2]]
    steps = [s[:3] for s in strides]
    tiles = T // dq.block_q + n if varlen else cdiv(T, dq.block_q) * n
    key_tiles = Tk // dkdv.block_k + n if varlen else cdiv(Tk, dkdv.block_k) * n
    sizes, section = (n, T, Tk, H, group), heads_per_section(k, dtype.itemsize, megabytes)
    constants = [
        {
            "D": D,
            "BLOCK_D": block_d,
            "BLOCK_Q": config.block_q,
            "BLOCK_K": config.block_k,
            "CAUSAL": causal,
            "DROPOUT": dropout,
            "VARLEN": varlen,
            "FP32": dtype == torch.float32,
            "STEPS": n.bit_length() if varlen else 0,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **more,
        }
        for config, more in (
            (dq, {}),
            (dkdv, {"EVEN": not varlen and T % dkdv.block_q == 0, "GROUPED": group != 1}),
        )
    ]
    return BwdPlan(
        tuple(boxes),
        ((tiles * H,), (key_tiles * Hkv,)),
        (
            (*itertools.chain(*steps[:5]), *sizes, section * group),
            (*itertools.chain(*steps[:4], *steps[5:]), *sizes, section),
        ),
        (constants[0], constants[1]),
    )
