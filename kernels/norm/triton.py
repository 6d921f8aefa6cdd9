"""LayerNorm and RMSNorm in Triton, alone or after bias + dropout + residual add.

The formulas are those of __init__.py; saved are the normalized rows as stored, mean and rstd. All
kernels are bound by memory, so what counts is bytes in flight and instructions per element.

[Note: tile] A tile is ROWS rows of K chunks of CHUNK columns, K a constant: any width is K chunks
and one masked end, so 768 = 3 x 256 wastes nothing. A thread holds SIDE neighbours of each chunk
(16 bytes of the widest tensor), with one or more warps per row: so many that forward keeps at most
64 elements of a row in a thread, backward 24. With one warp per row there is no barrier until the
end. Vectors [C] are read once per row, from L1, in the rows' own layout: in a vector's layout they
would be exchanged through shared memory.

[Note: bytes under way] By Little's law each SM of an H200 needs about 30 KB in flight (4.8 TB/s,
0.8 us, 132 SMs). Registers of sm_90 allow, in bf16, with instructions per element:
    forward 768          40 warps x 1536 bytes = 60 KB, 17
    forward 1600         24 warps x 3200 bytes = 77 KB, 16
    backward 768         12 rows x 3 KB = 37 KB, 20;  with three sums 8 rows x 4.6 KB = 37 KB, 23
    backward 1600        4 rows x 6.4 KB = 26 KB, 22; with three sums 3 rows x 9.6 KB = 29 KB, 27
Backward's bytes are in flight all the time: a program copies its next rows to shared memory while
it works on the current ones (num_stages=3: of two turns, the copies of one are under way).

[Note: backward] A fixed number of programs, as many as an SM holds at once, walks over the rows and
keeps its partials of dweight, dbias and dx_bias in registers; a second kernel adds them in order.
So the bits depend on the GPU's number of SMs, not on the run. Rows of more than 4096 columns do not
fit: a first kernel computes the two means of each row, then programs divide the columns.

[Note: mask in registers] One Philox call serves 16 neighbours, a thread holds SIDE = 8 (or 4).
Threads that share a group both make its call and use their own words: no bit moves between them.
"""

# Triton compiles a + (b,), not (*a, b), and lets a tuple grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.config_table import SHARED_BYTES, section_of
from fastpar.kernels.norm import TABLE, Config
from fastpar.kernels.philox import MaskBlock, mask_shape
from fastpar.kernels.philox_triton import philox_words
from fastpar.kernels.triton_launch import (
    cdiv,
    device_key,
    gpu_arch,
    launch,
    meta,
    next_power_of_2,
    sm_count,
)


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
    value, key_ptr, site, threshold, scale, rows, first_row, low, high, plane_rows, heads,
    first_col, CHUNK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
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
        key_ptr, plane // heads, site * 65536 + plane % heads, inside[:, None], run // (16 // SIDE)
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
    x_ptr, residual_ptr, weight_ptr, bias_ptr, x_bias_ptr, key_ptr, total_ptr, y_ptr, stats_ptr,
    stride_x_row, stride_residual_row, n, plane_rows, heads, first_row, low, high, site, threshold,
    scale, eps, C: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
    RMS: tl.constexpr,
):  # fmt: skip
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
                    value, key_ptr, site, threshold, scale, rows, first_row, low, high, plane_rows,
                    heads, k * CHUNK, CHUNK, SIDE,
                )  # fmt: skip
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
        if weight_ptr is not None:
            y *= load_vector(weight_ptr, rows, cols, C, (k + 1) * CHUNK <= C)
        if bias_ptr is not None:
            y += load_vector(bias_ptr, rows, cols, C, (k + 1) * CHUNK <= C)
        store_rows(y_ptr, starts * C, cols, ok, y, C, (k + 1) * CHUNK <= C)


class Tile(NamedTuple):
    """The layout of a row of C elements in registers; see [Note: tile]."""

    chunk: int
    rows: int
    side: int
    num_warps: int


@functools.cache
def tile_of(C: int, itemsize: int, values: int, least_warps: int) -> Tile:
    """At most `values` elements of a row in a thread; 16 contiguous bytes of each tensor."""
    side = 16 // itemsize
    warps_per_row = 1
    while cdiv(C, 32 * side * warps_per_row) * side > values:
        warps_per_row *= 2
    chunk = min(32 * side * warps_per_row, max(16, next_power_of_2(C)))
    num_warps = max(least_warps, warps_per_row)
    return Tile(chunk, num_warps * 32 * side // chunk, side, num_warps)


def flat_rows(x: Tensor, n: int, C: int) -> tuple[Tensor, int]:
    """x as n rows of C contiguous elements, and their stride; a copy only if strides require
    it."""
    if x.is_contiguous():
        return x, C
    x = x.reshape(n, C)
    x = x if C == 1 or x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


class Plan(NamedTuple):
    """Launch arguments besides tensors, their strides and the mask; the same for equal layouts."""

    n: int  # rows
    grid: tuple[int, ...]
    places: tuple[int | None, ...]  # plane_rows, heads, first_row, low, high
    constants: dict[str, Any]


def places_of(
    shape: tuple[int, ...], n: int, masked: bool, sample_rows: int | None, place: Sequence[int]
) -> tuple[int | None, ...]:
    """How kernels find the mask's rows; None if nothing is added to them."""
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
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None, key: Tensor | None, site: int, threshold: int, sample_rows: int | None,
    place: Sequence[int], eps: float, rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(y, residual_out, stats); see fastpar.kernels.norm."""
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
        _layer_norm_fwd_kernel, plan.grid,
        x, residual, *(None if v is None else v.contiguous() for v in (weight, bias, x_bias)),
        device_key(key, device), total, y, stats,
        x_step, residual_step, n, *plan.places, site, threshold, 256.0 / (256 - threshold), eps,
        **plan.constants,
    )  # fmt: skip
    return y, total, stats


@triton.jit(do_not_specialize=["n"])
def _layer_norm_bwd_rows_kernel(
    dy_ptr, x_ptr, weight_ptr, stats_ptr, slope_ptr, offset_ptr, stride_dy_row, stride_x_row, n,
    C: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    """mean(g * n) and mean(g) of each row, for rows too wide for _layer_norm_bwd_kernel."""
    K: tl.constexpr = (C + CHUNK - 1) // CHUNK
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = (rows < n)[:, None]
    starts = rows.to(tl.int64)[:, None]
    rstd = tl.load(stats_ptr + rows, mask=rows < n, other=0.0)[:, None]
    if not RMS:
        mean = tl.load(stats_ptr + (n + rows), mask=rows < n, other=0.0)[:, None]
    slope = tl.zeros([ROWS, CHUNK], tl.float32)
    offset = tl.zeros([ROWS, CHUNK], tl.float32)
    for k in tl.static_range(K):
        cols = k * CHUNK + tl.arange(0, CHUNK)
        x = load_rows(x_ptr, starts * stride_x_row, cols, ok, C, (k + 1) * CHUNK <= C)
        normal = x.to(tl.float32)
        if not RMS:
            normal = normal - mean
        dy = load_rows(dy_ptr, starts * stride_dy_row, cols, ok, C, (k + 1) * CHUNK <= C)
        g = dy.to(tl.float32)
        if weight_ptr is not None:
            g *= load_vector(weight_ptr, rows, cols, C, (k + 1) * CHUNK <= C)
        slope += g * (normal * rstd)
        offset += g
    slope, offset = row_means(slope, offset, C, SIDE)
    tl.store(slope_ptr + rows[:, None], slope, mask=ok)
    if not RMS:
        tl.store(offset_ptr + rows[:, None], offset, mask=ok)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _layer_norm_bwd_kernel(
    dy_ptr, given_ptr, x_ptr, weight_ptr, stats_ptr, slope_ptr, offset_ptr, key_ptr, dsum_ptr,
    dx_ptr, partial_ptr, stride_dy_row, stride_given_row, stride_x_row, n, plane_rows, heads,
    first_row, low, high, site, threshold, scale, C: tl.constexpr, CHUNK: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, RMS: tl.constexpr, DBIAS: tl.constexpr,
    DX_BIAS: tl.constexpr,
):  # fmt: skip
    first_col = tl.program_id(1) * (K * CHUNK)
    WHOLE: tl.constexpr = slope_ptr is None
    dweight, dbias, dx_bias = (), (), ()
    for _k in tl.static_range(K):
        dweight = dweight + (tl.zeros([ROWS, CHUNK], tl.float32),)
        dbias = dbias + (tl.zeros([ROWS, CHUNK], tl.float32),)
        dx_bias = dx_bias + (tl.zeros([ROWS, CHUNK], tl.float32),)

    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, n, step, num_stages=3):
        rows = first + tl.arange(0, ROWS)
        ok = (rows < n)[:, None]
        starts = rows.to(tl.int64)[:, None]
        rstd = tl.load(stats_ptr + rows, mask=rows < n, other=0.0)[:, None]
        if not RMS:
            mean = tl.load(stats_ptr + (n + rows), mask=rows < n, other=0.0)[:, None]
        slope = tl.zeros([ROWS, CHUNK], tl.float32)
        offset = tl.zeros([ROWS, CHUNK], tl.float32)
        normals, gs, new_dweight, new_dbias = (), (), (), ()
        for k in tl.static_range(K):
            cols = first_col + k * CHUNK + tl.arange(0, CHUNK)
            x = load_rows(x_ptr, starts * stride_x_row, cols, ok, C, WHOLE and (k + 1) * CHUNK <= C)
            normal = x.to(tl.float32)
            if not RMS:
                normal = normal - mean
            normal = normal * rstd
            dy = load_rows(
                dy_ptr, starts * stride_dy_row, cols, ok, C, WHOLE and (k + 1) * CHUNK <= C
            ).to(tl.float32)
            if weight_ptr is not None:
                new_dweight = new_dweight + (dweight[k] + dy * normal,)
            if DBIAS:
                new_dbias = new_dbias + (dbias[k] + dy,)
            g = dy
            if weight_ptr is not None:
                weight = tl.zeros([ROWS, CHUNK], tl.float32)
                if first < n:  # always; what is in an `if` the pipeline leaves in L1
                    weight = load_vector(weight_ptr, rows, cols, C, WHOLE and (k + 1) * CHUNK <= C)
                g = dy * weight
            slope += g * normal
            offset += g
            normals = normals + (normal,)
            gs = gs + (g,)
        if weight_ptr is not None:
            dweight = new_dweight
        if DBIAS:
            dbias = new_dbias
        if slope_ptr is None:
            slope, offset = row_means(slope, offset, C, SIDE)
        else:
            slope = tl.load(slope_ptr + rows, mask=rows < n, other=0.0)[:, None]
            if not RMS:
                offset = tl.load(offset_ptr + rows, mask=rows < n, other=0.0)[:, None]

        new_dx_bias = ()
        for k in tl.static_range(K):
            cols = first_col + k * CHUNK + tl.arange(0, CHUNK)
            d = gs[k] - normals[k] * slope
            if not RMS:
                d = d - offset
            d = d * rstd
            if given_ptr is not None:
                d += load_rows(
                    given_ptr, starts * stride_given_row, cols, ok, C,
                    WHOLE and (k + 1) * CHUNK <= C,
                ).to(tl.float32)  # fmt: skip
            store_rows(dsum_ptr, starts * C, cols, ok, d, C, WHOLE and (k + 1) * CHUNK <= C)
            if key_ptr is not None:
                d = drop(
                    d, key_ptr, site, threshold, scale, rows, first_row, low, high, plane_rows,
                    heads, first_col + k * CHUNK, CHUNK, SIDE,
                )  # fmt: skip
            if dx_ptr is not None:
                store_rows(dx_ptr, starts * C, cols, ok, d, C, WHOLE and (k + 1) * CHUNK <= C)
            if DX_BIAS:
                new_dx_bias = new_dx_bias + (dx_bias[k] + d,)
        if DX_BIAS:
            dx_bias = new_dx_bias

    programs = tl.num_programs(0)
    WEIGHT: tl.constexpr = weight_ptr is not None
    at = partial_ptr + tl.program_id(0) * C
    for k in tl.static_range(K):
        cols = first_col + k * CHUNK + tl.arange(0, CHUNK)
        if WEIGHT:
            tl.store(at + cols, tl.sum(dweight[k], 0), mask=cols < C)
        if DBIAS:
            out = at + (0 + WEIGHT) * programs * C + cols
            tl.store(out, tl.sum(dbias[k], 0), mask=cols < C)
        if DX_BIAS:
            out = at + (WEIGHT + DBIAS) * programs * C + cols
            tl.store(out, tl.sum(dx_bias[k], 0), mask=cols < C)


@triton.jit(do_not_specialize=["programs"])
def _layer_norm_bwd_sum_kernel(
    partial_ptr, first_ptr, second_ptr, third_ptr, programs, C: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of the programs' partials, in an order that C and their number fix."""
    which = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, programs, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        at = partial_ptr + ((which * programs + p) * C)[:, None] + cols[None, :]
        total += tl.load(at, mask=(p < programs)[:, None] & (cols < C)[None, :], other=0.0)
    out = tl.sum(total, 0)
    if which == 0:
        tl.store(first_ptr + cols, out, mask=cols < C)
    elif which == 1 and second_ptr is not None:
        tl.store(second_ptr + cols, out, mask=cols < C)
    elif third_ptr is not None:
        tl.store(third_ptr + cols, out, mask=cols < C)


_WIDE = 4096  # rows that backward reads twice


@functools.cache
def bwd_tile_of(
    C: int, itemsize: int, sums: int, tensors: int, masked: bool, arch: int, how: Config
) -> tuple[Tile, int, int]:
    """(tile, programs that an SM holds at once, registers per thread for that). The limits on live
    values, the sums and what is made of x and dy, come from ptxas's reports: nothing spills."""
    limit = min(how.bwd_values, 192 // (itemsize * tensors))  # 48 KB for two turns of four warps
    tile = tile_of(C, itemsize, limit, how.num_warps)
    if C % tile.chunk:  # the mask of the last chunk is live, too
        tile = tile_of(C, itemsize, min(limit, 116 // (sums + 2)), how.num_warps)
    values = cdiv(C, tile.chunk) * tile.side
    groups = (4 if values * (sums + 2) <= 96 else 3) - masked  # of four warps
    groups = min(
        groups, SHARED_BYTES[section_of(arch)] // (256 * values * itemsize * tensors + 1280)
    )
    return tile, max(1, groups * 4 // tile.num_warps), {4: 128, 3: 168}.get(groups, 255)


class BwdPlan(NamedTuple):
    """Arguments of the launches besides tensors, their strides and the mask; see Plan."""

    n: int
    grid: tuple[int, int]  # programs, parts of wide rows
    wide: Tile | None  # of the kernel that reads these first
    places: tuple[int | None, ...]
    constants: dict[str, Any]
    sum_grid: tuple[int, int]


@functools.lru_cache(4096)
def _bwd_plan(
    shape: tuple[int, ...], itemsize: int, weight: bool, bias: bool, x_bias: bool, given: bool,
    rms: bool, masked: bool, sample_rows: int | None, place: tuple[int, ...], arch: int, sms: int,
) -> BwdPlan:  # fmt: skip
    """weight, bias, x_bias: whether their gradients are requested; given: whether dtotal is."""
    *rows, C = shape
    n, sums, blocks = math.prod(rows), weight + bias + x_bias, cdiv(C, _WIDE)
    width = cdiv(C, blocks)
    how = TABLE.get(arch)
    tile, programs, registers = bwd_tile_of(width, itemsize, sums, 2 + given, masked, arch, how)
    programs = min(cdiv(n, tile.rows), cdiv(programs * sms, blocks))
    wide = None if blocks == 1 else tile_of(C, itemsize, how.fwd_values, how.num_warps)
    constants = {"C": C, "CHUNK": tile.chunk, "K": cdiv(width, tile.chunk), "ROWS": tile.rows}
    constants |= {"SIDE": tile.side, "RMS": rms, "DBIAS": bias, "DX_BIAS": x_bias}
    constants |= {"maxnreg": registers, "num_warps": tile.num_warps}
    places = places_of(shape, n, masked, sample_rows, place)
    return BwdPlan(n, (programs, blocks), wide, places, constants, (cdiv(C, 16), sums))


def layer_norm_bwd(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    key: Tensor | None, site: int, threshold: int, sample_rows: int | None, place: Sequence[int],
    x_dtype: torch.dtype, bias_dtype: torch.dtype | None, x_bias_dtype: torch.dtype | None,
    rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dtotal, dx, dweight, dbias, dx_bias); see fastpar.kernels.norm."""
    device, C = x.device, x.shape[-1]
    plan = _bwd_plan(
        x.shape, x.element_size(), weight is not None, bias_dtype is not None,
        x_bias_dtype is not None, dtotal is not None, rms, key is not None, sample_rows,
        tuple(place), gpu_arch(device), sm_count(device),
    )  # fmt: skip
    n = plan.n
    dsum = torch.empty_like(x, memory_format=torch.contiguous_format)
    writes_dx = key is not None or x_dtype != x.dtype
    dx = torch.empty_like(dsum, dtype=x_dtype) if writes_dx else None
    new, given_dtype = x.new_empty if n else x.new_zeros, None if weight is None else weight.dtype
    dweight, dbias, dx_bias = (
        None if dtype is None else new(C, dtype=dtype)
        for dtype in (given_dtype, bias_dtype, x_bias_dtype)
    )
    sums = [t for t in (dweight, dbias, dx_bias) if t is not None]
    if not n:
        return dsum, dx, dweight, dbias, dx_bias
    (dy, dy_step), (x, x_step) = flat_rows(dy, n, C), flat_rows(x, n, C)
    given, given_step = (None, 0) if dtotal is None else flat_rows(dtotal, n, C)
    vector = None if weight is None else weight.contiguous()
    slope, offset, wide = None, None, plan.wide
    if wide is not None:
        slope = x.new_empty(n, dtype=torch.float32)
        offset = None if rms else torch.empty_like(slope)
        launch(
            _layer_norm_bwd_rows_kernel, (cdiv(n, wide.rows),),
            dy, x, vector, stats, slope, offset, dy_step, x_step, n,
            C=C, CHUNK=wide.chunk, ROWS=wide.rows, SIDE=wide.side, RMS=rms,
            num_warps=wide.num_warps,
        )  # fmt: skip
    partials = stats.new_empty((len(sums), plan.grid[0], C))
    launch(
        _layer_norm_bwd_kernel, plan.grid,
        dy, given, x, vector, stats, slope, offset, device_key(key, device), dsum, dx, partials,
        dy_step, given_step, x_step, n, *plan.places, site, threshold, 256.0 / (256 - threshold),
        **plan.constants,
    )  # fmt: skip
    launch(
        _layer_norm_bwd_sum_kernel, plan.sum_grid,
        partials, *sums, *(partials, None, None)[len(sums) :], plan.grid[0],
        C=C, BLOCK_P=128, BLOCK_C=16, num_warps=4,
    )  # fmt: skip
    return dsum, dx, dweight, dbias, dx_bias


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """Every kernel, in the variants for GPT-2's shapes and options."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16

    def call(
        C: int, dtype: torch.dtype = bf16, x_dtype: torch.dtype | None = None,
        residual: bool = False, dropout: bool = False, rms: bool = False,
        sample_rows: int | None = None, moved: tuple[int, int] = (0, 0), weighted: bool = True,
    ) -> Callable[[], Any]:  # fmt: skip
        """Forward and backward; residual: with x_bias."""
        narrow = x_dtype or dtype
        x, dy = (meta(8, 1024, C, dtype=d) for d in (narrow, dtype))
        weight = dy.new_empty(C) if weighted else None
        stats = dy.new_empty((2 - rms, 8 * 1024), dtype=torch.float32)
        key, threshold = (x.new_empty(2, dtype=torch.int64), 26) if dropout else (None, 0)
        stream, x_bias = (dy, x.new_empty(C)) if residual else (None, None)
        mask = key, 1, threshold, sample_rows, (0, *moved)
        dtypes = narrow, None if rms else dtype, narrow if residual else None

        def run() -> None:
            layer_norm_fwd(x, stream, weight, None if rms else weight, x_bias, *mask, 1e-5, rms)
            layer_norm_bwd(dy, stream, dy, weight, stats, *mask, *dtypes, rms)

        return run

    of_rows = functools.partial(call, 768, residual=True, dropout=True, sample_rows=1024)
    return [
        ("bf16 768", call(768)),
        ("bf16 1024", call(1024)),
        ("bf16 1280 residual", call(1280, residual=True)),
        ("bf16 1600", call(1600)),
        ("bf16 768 residual", call(768, residual=True)),
        ("bf16 768 residual dropout", call(768, residual=True, dropout=True)),
        ("bf16 1600 residual dropout", call(1600, residual=True, dropout=True)),
        ("fp16 768 rms", call(768, f16, rms=True)),
        ("bf16 1600 rms residual", call(1600, residual=True, rms=True)),
        ("bf16 1600 rms no weight", call(1600, rms=True, weighted=False)),
        ("fp32 768 residual dropout", call(768, f32, residual=True, dropout=True)),
        ("bf16 on fp32 1600 residual", call(1600, f32, bf16, residual=True)),
        ("bf16 16384 residual dropout", call(16384, residual=True, dropout=True)),
        ("bf16 768 dropout of rows", of_rows()),
        ("bf16 768 dropout of two runs of rows", of_rows(moved=(1, 2))),
    ]
