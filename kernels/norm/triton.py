"""LayerNorm and RMSNorm in Triton, alone and behind bias + dropout + residual add.

The formulas are those of layer_norm.py; saved are the normalized rows as stored, mean and rstd. All
kernels are bound by memory, so what counts is bytes under way and instructions an element.

[Note: tile] A tile is ROWS rows of K chunks of CHUNK columns, K a constant: any width is K chunks
and one masked end, so 768 = 3 x 256 wastes nothing. A thread holds SIDE neighbours of each chunk
(16 bytes of the widest tensor), a warp or more a row: few enough that forward keeps at most 64
elements of a row in a thread, backward 24. With one warp a row no barrier is met until the end.
Vectors [C] are read once for each row, from L1, in the rows' own layout: read as vectors they
would be exchanged through shared memory.

[Note: bytes under way] Little's law asks for about 30 KB on each SM of an H200 (4.8 TB/s, 0.8 us,
132 SMs). Registers of sm_90 allow, in bf16:
    forward 768          40 warps x 1536 bytes = 60 KB, 17 instructions an element
    forward 1600         24 warps x 3200 bytes = 77 KB, 16
    backward 768         12 rows x 3 KB = 37 KB, 20;  with three sums 8 rows x 4.6 KB = 37 KB, 23
    backward 1600        4 rows x 6.4 KB = 26 KB, 22; with three sums 3 rows x 9.6 KB = 29 KB, 27
Backward's are under way all the time: a program asks for its next rows before it works on these,
and holds them as they are stored.

[Note: backward] A fixed number of programs, as many as an SM holds at once, walks over the rows and
keeps its part of dweight, dbias and dx_bias in registers; a second kernel adds the programs' parts
in order. So the bits depend on the GPU's number of SMs, not on the run. Rows of more than 4096
columns do not fit: a first kernel makes the two means of each row, then programs share the columns.

[Note: mask in registers] One Philox call serves 16 neighbours, a thread holds SIDE = 8 (or 4).
Threads that share a group both make its call and take their own words: the same work as in a
warp with idle lanes (256 columns are 16 groups for 32 lanes), and no bit moves between threads.
"""

# Triton compiles a + (b,), not (*a, b), and lets a tuple grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.layer_norm_configs import TABLE, Config
from fastpar.kernels.philox import MaskBlock, mask_shape
from fastpar.kernels.philox_triton import philox_words
from fastpar.kernels.triton_launch import cdiv, device_key, gpu_arch, launch, next_power_of_2


@triton.jit
def load_rows(ptr, starts, cols, ok, C: tl.constexpr, EVEN: tl.constexpr):
    """[ROWS, CHUNK] of rows that begin at starts [ROWS, 1]; 0 outside."""
    if not EVEN:
        ok = ok & (cols < C)[None, :]
    return tl.load(ptr + starts + cols[None, :], mask=ok, other=0.0)


@triton.jit
def store_rows(ptr, starts, cols, ok, value, C: tl.constexpr, EVEN: tl.constexpr):
    """Writes [ROWS, CHUNK] where ok, within C columns, in the type of ptr."""
    if not EVEN:
        ok = ok & (cols < C)[None, :]
    tl.store(ptr + starts + cols[None, :], value.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def load_vector(ptr, rows, cols, C: tl.constexpr, EVEN: tl.constexpr):
    """A [C] vector's chunk in fp32, once for each row: in the rows' own layout, from L1."""
    at = ptr + (rows * 0)[:, None] + cols[None, :]
    if EVEN:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=(cols < C)[None, :], other=0.0)
    return value.to(tl.float32)


@triton.jit
def row_means(a, b, C: tl.constexpr, SIDE: tl.constexpr):
    """Sums of the rows of a and b over C, [ROWS, 1] each."""
    if a.shape[1] > 32 * SIDE:
        # Warps share a row: one exchange through shared memory for both sums.
        first, second = tl.split(tl.sum(tl.join(a, b), 1))
    else:
        first, second = tl.sum(a, 1), tl.sum(b, 1)
    return (first * (1.0 / C))[:, None], (second * (1.0 / C))[:, None]


@triton.jit
def drop(
    value,
    key_ptr,
    site,
    threshold,
    scale,
    rows,
    first_row,
    low,
    high,
    plane_rows,
    heads,
    first_col,
    CHUNK: tl.constexpr,
    SIDE: tl.constexpr,
):
    """value [ROWS, CHUNK] under the mask; see [Note: mask in registers]. first_row None is 0, and
    costs no register: backward at C = 16384 has none left. So do low and high: Rng.moved."""
    ROWS: tl.constexpr = rows.shape[0]
    if first_row is not None:
        rows = rows + first_row
    inside = rows % plane_rows
    if low is not None:
        inside += tl.where(2 * inside < plane_rows, low, high)
    run = first_col // SIDE + tl.arange(0, CHUNK // SIDE)[None, :]
    plane = (rows // plane_rows)[:, None]
    w0, w1, w2, w3 = philox_words(
        key_ptr,
        plane // heads,
        site * 65536 + plane % heads,
        inside[:, None],
        run // (16 // SIDE),
    )
    if SIDE == 8:
        words = tl.join(tl.where(run % 2 == 0, w0, w2), tl.where(run % 2 == 0, w1, w3))
    else:
        low, high = tl.where(run % 2 == 0, w0, w1), tl.where(run % 2 == 0, w2, w3)
        words = tl.where(run % 4 < 2, low, high)[:, :, None]
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    drawn = (words[:, :, :, None] >> shifts[None, None, None, :]) & 0xFF
    keep = drawn.reshape(ROWS, CHUNK) >= threshold
    return tl.where(keep, value * scale, 0.0)


UNSPECIALIZED = ("n", "plane_rows", "heads", "first_row", "low", "high", "site", "threshold")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _layer_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    x_bias_ptr,
    key_ptr,
    total_ptr,
    y_ptr,
    stats_ptr,
    stride_x_row,
    stride_residual_row,
    n,
    plane_rows,
    heads,
    first_row,
    low,
    high,
    site,
    threshold,
    scale,
    eps,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    RMS: tl.constexpr,
):
    K: tl.constexpr = (C + CHUNK - 1) // CHUNK
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = (rows < n)[:, None]
    starts = rows.to(tl.int64)[:, None]
    values = ()
    for k in tl.static_range(K):
        cols = k * CHUNK + tl.arange(0, CHUNK)
        value = load_rows(x_ptr, starts * stride_x_row, cols, ok, C, (k + 1) * CHUNK <= C)
        if residual_ptr is not None:
            added = load_rows(
                residual_ptr, starts * stride_residual_row, cols, ok, C, (k + 1) * CHUNK <= C
            )
            value = value.to(tl.float32)
            if x_bias_ptr is not None:
                value += load_vector(x_bias_ptr, rows, cols, C, (k + 1) * CHUNK <= C)
            if key_ptr is not None:
                value = drop(
                    value,
                    key_ptr,
                    site,
                    threshold,
                    scale,
                    rows,
                    first_row,
                    low,
                    high,
                    plane_rows,
                    heads,
                    k * CHUNK,
                    CHUNK,
                    SIDE,
                )
            value = (added.to(tl.float32) + value).to(total_ptr.dtype.element_ty)
            store_rows(total_ptr, starts * C, cols, ok, value, C, (k + 1) * CHUNK <= C)
        values = values + (value.to(tl.float32),)

    along = tl.zeros([ROWS, CHUNK], tl.float32)
    if not RMS:
        for k in tl.static_range(K):
            along += values[k]
        center = (tl.sum(along, 1) * (1.0 / C))[:, None]
        along = tl.zeros([ROWS, CHUNK], tl.float32)
        square = tl.zeros([ROWS, CHUNK], tl.float32)
        centered = ()
        for k in tl.static_range(K):
            value = values[k] - center
            if (k + 1) * CHUNK > C:
                value = tl.where((k * CHUNK + tl.arange(0, CHUNK) < C)[None, :], value, 0.0)
            centered = centered + (value,)
            along += value
            square += value * value
        rest, square = row_means(along, square, C, SIDE)
        variance = tl.maximum(square - rest * rest, 0.0)
        tl.store(stats_ptr + (n + rows)[:, None], center + rest, mask=ok)
        values = centered
    else:
        for k in tl.static_range(K):
            along += values[k] * values[k]
        variance = (tl.sum(along, 1) * (1.0 / C))[:, None]
        rest = 0.0
    rstd = tl.rsqrt(variance + eps)
    tl.store(stats_ptr + rows[:, None], rstd, mask=ok)

    for k in tl.static_range(K):
        cols = k * CHUNK + tl.arange(0, CHUNK)
        y = values[k] * rstd - rest * rstd
        y *= load_vector(weight_ptr, rows, cols, C, (k + 1) * CHUNK <= C)
        if bias_ptr is not None:
            y += load_vector(bias_ptr, rows, cols, C, (k + 1) * CHUNK <= C)
        store_rows(y_ptr, starts * C, cols, ok, y, C, (k + 1) * CHUNK <= C)


class Tile(NamedTuple):
    """How a row of C elements lies in registers; see [Note: tile]."""

    chunk: int
    rows: int
    side: int
    num_warps: int


@functools.cache
def tile_of(C: int, itemsize: int, values: int, least_warps: int) -> Tile:
    """At most `values` elements of a row in a thread; 16 bytes of each tensor side by side."""
    side = 16 // itemsize
    warps_per_row = 1
    while cdiv(C, 32 * side * warps_per_row) * side > values:
        warps_per_row *= 2
    chunk = min(32 * side * warps_per_row, max(16, next_power_of_2(C)))
    num_warps = max(least_warps, warps_per_row)
    return Tile(chunk, num_warps * 32 * side // chunk, side, num_warps)


def flat_rows(x: Tensor, n: int, C: int) -> tuple[Tensor, int]:
    """x as n rows of C neighbours, and how far these are apart; a copy only where strides ask for
    it."""
    if x.is_contiguous():
        return x, C
    x = x.reshape(n, C)
    x = x if C == 1 or x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


class Plan(NamedTuple):
    """What a launch gets besides tensors, their steps and the mask; the same for equal layouts."""

    n: int  # rows
    grid: tuple[int, ...]
    places: tuple[int | None, ...]  # plane_rows, heads, first_row, low, high
    constants: dict[str, Any]


def places_of(
    shape: tuple[int, ...], n: int, masked: bool, sample_rows: int | None, place: Sequence[int]
) -> tuple[int | None, ...]:
    """How kernels find the mask's rows; None where nothing is added to them."""
    first_row, *moved = place
    at = MaskBlock(n, 1, sample_rows or 1, shape[-1])
    if masked and sample_rows is None:
        at = mask_shape(shape)
    first = None if sample_rows is None else first_row
    return at.rows, at.heads, first, *(moved if any(moved) else (None, None))


@functools.lru_cache(4096)
def _fwd_plan(
    shape: tuple[int, ...], itemsize: int, rms: bool, masked: bool,
    sample_rows: int | None, place: tuple[int, ...], how: Config,
) -> Plan:  # fmt: skip
    C = shape[-1]
    n = math.prod(shape[:-1])
    tile = tile_of(C, itemsize, how.fwd_values, how.num_warps)
    constants = {"C": C, "CHUNK": tile.chunk, "ROWS": tile.rows, "SIDE": tile.side}
    constants |= {"RMS": rms, "num_warps": tile.num_warps}
    places = places_of(shape, n, masked, sample_rows, place)
    return Plan(n, (cdiv(n, tile.rows),), places, constants)


def layer_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    key: Tensor | None,
    site: int,
    threshold: int,
    sample_rows: int | None,
    place: Sequence[int],
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, residual_out, stats); see fastpar.kernels.layer_norm."""
    device, C = x.device, x.shape[-1]
    wide = x if residual is None else residual
    plan = _fwd_plan(
        x.shape, wide.element_size(), rms, key is not None, sample_rows, tuple(place),
        TABLE.get(gpu_arch(device)),
    )  # fmt: skip
    n = plan.n
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(y)
    stats = x.new_empty((1 if rms else 2, n), dtype=torch.float32)
    x, x_step = flat_rows(x, n, C)
    residual, residual_step = (None, 0) if residual is None else flat_rows(residual, n, C)
    launch(
        _layer_norm_fwd_kernel,
        plan.grid,
        x,
        residual,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        None if x_bias is None else x_bias.contiguous(),
        None if key is None else device_key(key, device),
        total,
        y,
        stats,
        x_step,
        residual_step,
        n,
        *plan.places,
        site,
        threshold,
        256.0 / (256 - threshold),
        eps,
        **plan.constants,
    )
    return y, total, stats


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """Every kernel, in the variants that GPT-2's shapes and options lead to."""

    def call(
        C: int,
        dtype: torch.dtype = torch.bfloat16,
        x_dtype: torch.dtype | None = None,
        residual: bool = False,
        dropout: bool = False,
        rms: bool = False,
        sample_rows: int | None = None,
        moved: tuple[int, int] = (0, 0),
    ) -> Callable[[], Any]:
        """residual: with x_bias."""
        narrow = x_dtype or dtype
        x = torch.empty((8, 1024, C), dtype=narrow, device="meta")
        weight = x.new_empty(C, dtype=dtype)
        key, threshold = (x.new_empty(2, dtype=torch.int64), 26) if dropout else (None, 0)
        stream, x_bias = (x.to(dtype), x.new_empty(C)) if residual else (None, None)
        bias = None if rms else weight
        options = (key, 1, threshold, sample_rows, (0, *moved), 1e-5, rms)
        return lambda: layer_norm_fwd(x, stream, weight, bias, x_bias, *options)

    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    return [
        ("bf16 768", call(768)),
        ("bf16 1024", call(1024)),
        ("bf16 1280 residual", call(1280, residual=True)),
        ("bf16 1600", call(1600)),
        ("bf16 768 residual dropout", call(768, residual=True, dropout=True)),
        ("bf16 1600 residual dropout", call(1600, residual=True, dropout=True)),
        ("fp16 768 rms", call(768, f16, rms=True)),
        ("bf16 1600 rms residual", call(1600, residual=True, rms=True)),
        ("fp32 768 residual dropout", call(768, f32, residual=True, dropout=True)),
        ("bf16 on fp32 1600 residual", call(1600, f32, bf16, residual=True)),
        ("bf16 16384 residual dropout", call(16384, residual=True, dropout=True)),
        ("bf16 768 dropout of rows", call(768, residual=True, dropout=True, sample_rows=1024)),
        (
            "bf16 768 dropout of two runs of rows",
            call(768, residual=True, dropout=True, sample_rows=1024, moved=(1, 2)),
        ),
    ]
