"""Backward of the kernels in layer_norm_triton.py, whose notes explain the tiles."""

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
from fastpar.kernels.layer_norm_triton import (
    UNSPECIALIZED,
    Tile,
    drop,
    flat_rows,
    load_rows,
    load_vector,
    places_of,
    row_means,
    store_rows,
    tile_of,
)
from fastpar.kernels.triton_launch import cdiv, device_key, gpu_arch, launch, sm_count


@triton.jit
def _bwd_rows(
    dy_ptr,
    given_ptr,
    x_ptr,
    stats_ptr,
    stride_dy_row,
    stride_given_row,
    stride_x_row,
    rows,
    n,
    first_col,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    RMS: tl.constexpr,
):
    """What backward reads of these rows, by chunks, in the types it is stored in."""
    inside = rows < n
    starts = rows.to(tl.int64)[:, None]
    dys, given, xs = (), (), ()
    for k in tl.static_range(K):
        cols = first_col + k * CHUNK + tl.arange(0, CHUNK)
        ok = inside[:, None]
        if not (WHOLE and (k + 1) * CHUNK <= C):
            ok = ok & (cols < C)[None, :]
        cols = cols[None, :]
        dys = dys + (tl.load(dy_ptr + starts * stride_dy_row + cols, mask=ok, other=0.0),)
        xs = xs + (tl.load(x_ptr + starts * stride_x_row + cols, mask=ok, other=0.0),)
        if given_ptr is not None:
            at = given_ptr + starts * stride_given_row + cols
            given = given + (tl.load(at, mask=ok, other=0.0),)
    rstd = tl.load(stats_ptr + rows, mask=inside, other=0.0)[:, None]
    mean = rstd
    if not RMS:
        mean = tl.load(stats_ptr + (n + rows), mask=inside, other=0.0)[:, None]
    return dys, given, xs, mean, rstd


@triton.jit(do_not_specialize=["n"])
def _layer_norm_bwd_rows_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    slope_ptr,
    offset_ptr,
    stride_dy_row,
    stride_x_row,
    n,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    RMS: tl.constexpr,
):
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
        normal = load_rows(x_ptr, starts * stride_x_row, cols, ok, C, (k + 1) * CHUNK <= C).to(
            tl.float32
        )
        if not RMS:
            normal = normal - mean
        g = load_rows(dy_ptr, starts * stride_dy_row, cols, ok, C, (k + 1) * CHUNK <= C).to(
            tl.float32
        )
        g *= load_vector(weight_ptr, rows, cols, C, (k + 1) * CHUNK <= C)
        slope += g * (normal * rstd)
        offset += g
    slope, offset = row_means(slope, offset, C, SIDE)
    tl.store(slope_ptr + rows[:, None], slope, mask=ok)
    if not RMS:
        tl.store(offset_ptr + rows[:, None], offset, mask=ok)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _layer_norm_bwd_kernel(
    dy_ptr,
    given_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    slope_ptr,
    offset_ptr,
    key_ptr,
    dsum_ptr,
    dx_ptr,
    partial_ptr,
    stride_dy_row,
    stride_given_row,
    stride_x_row,
    n,
    plane_rows,
    heads,
    first_row,
    low,
    high,
    site,
    threshold,
    scale,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    RMS: tl.constexpr,
    DBIAS: tl.constexpr,
    DX_BIAS: tl.constexpr,
):
    first_col = tl.program_id(1) * (K * CHUNK)
    WHOLE: tl.constexpr = slope_ptr is None
    dweight, dbias, dx_bias = (), (), ()
    for _k in tl.static_range(K):
        dweight = dweight + (tl.zeros([ROWS, CHUNK], tl.float32),)
        dbias = dbias + (tl.zeros([ROWS, CHUNK], tl.float32),)
        dx_bias = dx_bias + (tl.zeros([ROWS, CHUNK], tl.float32),)

    step = tl.num_programs(0) * ROWS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dys, given, xs, mean, rstd = _bwd_rows(
        dy_ptr,
        given_ptr,
        x_ptr,
        stats_ptr,
        stride_dy_row,
        stride_given_row,
        stride_x_row,
        rows,
        n,
        first_col,
        C,
        CHUNK,
        K,
        WHOLE,
        RMS,
    )
    for first in range(tl.program_id(0) * ROWS, n, step):
        rows = first + tl.arange(0, ROWS)
        next_dys, next_given, next_xs, next_mean, next_rstd = _bwd_rows(
            dy_ptr,
            given_ptr,
            x_ptr,
            stats_ptr,
            stride_dy_row,
            stride_given_row,
            stride_x_row,
            rows + step,
            n,
            first_col,
            C,
            CHUNK,
            K,
            WHOLE,
            RMS,
        )
        ok = (rows < n)[:, None]
        starts = rows.to(tl.int64)[:, None]
        slope = tl.zeros([ROWS, CHUNK], tl.float32)
        offset = tl.zeros([ROWS, CHUNK], tl.float32)
        normals, gs, new_dweight, new_dbias = (), (), (), ()
        for k in tl.static_range(K):
            cols = first_col + k * CHUNK + tl.arange(0, CHUNK)
            normal = xs[k].to(tl.float32)
            if not RMS:
                normal = normal - mean
            normal = normal * rstd
            dy = dys[k].to(tl.float32)
            new_dweight = new_dweight + (dweight[k] + dy * normal,)
            if DBIAS:
                new_dbias = new_dbias + (dbias[k] + dy,)
            g = dy * load_vector(weight_ptr, rows, cols, C, WHOLE and (k + 1) * CHUNK <= C)
            slope += g * normal
            offset += g
            normals = normals + (normal,)
            gs = gs + (g,)
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
                d += given[k].to(tl.float32)
            store_rows(dsum_ptr, starts * C, cols, ok, d, C, WHOLE and (k + 1) * CHUNK <= C)
            if key_ptr is not None:
                d = drop(
                    d,
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
                    first_col + k * CHUNK,
                    CHUNK,
                    SIDE,
                )
            if dx_ptr is not None:
                store_rows(dx_ptr, starts * C, cols, ok, d, C, WHOLE and (k + 1) * CHUNK <= C)
            if DX_BIAS:
                new_dx_bias = new_dx_bias + (dx_bias[k] + d,)
        if DX_BIAS:
            dx_bias = new_dx_bias
        dys, given, xs, mean, rstd = next_dys, next_given, next_xs, next_mean, next_rstd

    programs = tl.num_programs(0)
    at = partial_ptr + tl.program_id(0) * C
    for k in tl.static_range(K):
        cols = first_col + k * CHUNK + tl.arange(0, CHUNK)
        tl.store(at + cols, tl.sum(dweight[k], 0), mask=cols < C)
        if DBIAS:
            tl.store(at + programs * C + cols, tl.sum(dbias[k], 0), mask=cols < C)
        if DX_BIAS:
            out = at + (1 + DBIAS) * programs * C + cols
            tl.store(out, tl.sum(dx_bias[k], 0), mask=cols < C)


@triton.jit(do_not_specialize=["programs"])
def _layer_norm_bwd_sum_kernel(
    partial_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    programs,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
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
    C: int, itemsize: int, sums: int, tensors: int, rms: bool, how: Config
) -> tuple[Tile, int, int]:
    """(tile, programs that an SM holds at once, registers a thread may have for that).

    The limits on what is live come from ptxas's reports: with them nothing spills.
    """
    # The sums; what is made of x and dy; the next row, most of it packed as it is stored.
    each = sums + (3.1 if rms else 2) + 1.2 * tensors * itemsize / 4
    tile = tile_of(C, itemsize, min(how.bwd_values, int(164 / each)), how.num_warps)
    if C % tile.chunk:  # the mask of the last chunk is live, too
        tile = tile_of(C, itemsize, min(how.bwd_values, int(160 / each)), how.num_warps)
    live = cdiv(C, tile.chunk) * tile.side * each
    groups, registers = (4, 128) if live <= 89 else (3, 168) if live <= 125 else (2, 255)
    return tile, max(1, groups * 4 // tile.num_warps), registers


class BwdPlan(NamedTuple):
    """What the launches get besides tensors, their steps and the mask; see Plan."""

    n: int
    grid: tuple[int, int]  # programs, parts of wide rows
    wide: Tile | None  # of the kernel that reads these first
    places: tuple[int | None, ...]
    constants: dict[str, Any]
    sum_grid: tuple[int, int]


@functools.lru_cache(4096)
def _bwd_plan(
    shape: tuple[int, ...], itemsize: int, bias: bool, x_bias: bool, given: bool, rms: bool,
    masked: bool, sample_rows: int | None, place: tuple[int, ...], how: Config, sms: int,
) -> BwdPlan:  # fmt: skip
    """bias, x_bias: whether their gradients are asked for; given: whether dtotal is."""
    *rows, C = shape
    n, sums, blocks = math.prod(rows), 1 + bias + x_bias, cdiv(C, _WIDE)
    width = cdiv(C, blocks)
    tile, programs, registers = bwd_tile_of(width, itemsize, sums, 2 + given, rms, how)
    programs = min(cdiv(n, tile.rows), cdiv(programs * sms, blocks))
    wide = None if blocks == 1 else tile_of(C, itemsize, how.fwd_values, how.num_warps)
    constants = {"C": C, "CHUNK": tile.chunk, "K": cdiv(width, tile.chunk), "ROWS": tile.rows}
    constants |= {"SIDE": tile.side, "RMS": rms, "DBIAS": bias, "DX_BIAS": x_bias}
    constants |= {"maxnreg": registers, "num_warps": tile.num_warps}
    places = places_of(shape, n, masked, sample_rows, place)
    return BwdPlan(n, (programs, blocks), wide, places, constants, (cdiv(C, 16), sums))


def layer_norm_bwd(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, stats: Tensor,
    key: Tensor | None,
    site: int,
    threshold: int,
    sample_rows: int | None,
    place: Sequence[int],
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    x_bias_dtype: torch.dtype | None,
    rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dtotal, dx, dweight, dbias, dx_bias); see fastpar.kernels.layer_norm."""
    device, C = x.device, x.shape[-1]
    plan = _bwd_plan(
        x.shape, x.element_size(), bias_dtype is not None, x_bias_dtype is not None,
        dtotal is not None, rms, key is not None, sample_rows, tuple(place),
        TABLE.get(gpu_arch(device)), sm_count(device),
    )  # fmt: skip
    n = plan.n
    dsum = torch.empty_like(x, memory_format=torch.contiguous_format)
    writes_dx = key is not None or x_dtype != x.dtype
    dx = torch.empty_like(dsum, dtype=x_dtype) if writes_dx else None
    weight = weight.contiguous()
    dweight = torch.empty_like(weight)
    dbias = None if bias_dtype is None else torch.empty_like(weight, dtype=bias_dtype)
    dx_bias = None if x_bias_dtype is None else torch.empty_like(weight, dtype=x_bias_dtype)
    sums = [t for t in (dweight, dbias, dx_bias) if t is not None]
    if not n:
        for t in sums:
            t.zero_()
        return dsum, dx, dweight, dbias, dx_bias
    (dy, dy_step), (x, x_step) = flat_rows(dy, n, C), flat_rows(x, n, C)
    given, given_step = (None, 0) if dtotal is None else flat_rows(dtotal, n, C)
    slope, offset, wide = None, None, plan.wide
    if wide is not None:
        slope = x.new_empty(n, dtype=torch.float32)
        offset = None if rms else torch.empty_like(slope)
        launch(
            _layer_norm_bwd_rows_kernel,
            (cdiv(n, wide.rows),),
            dy,
            x,
            weight,
            stats,
            slope,
            offset,
            dy_step,
            x_step,
            n,
            C=C,
            CHUNK=wide.chunk,
            ROWS=wide.rows,
            SIDE=wide.side,
            RMS=rms,
            num_warps=wide.num_warps,
        )
    partials = stats.new_empty((len(sums), plan.grid[0], C))
    launch(
        _layer_norm_bwd_kernel,
        plan.grid,
        dy,
        given,
        x,
        weight,
        stats,
        slope,
        offset,
        None if key is None else device_key(key, device),
        dsum,
        dx,
        partials,
        dy_step,
        given_step,
        x_step,
        n,
        *plan.places,
        site,
        threshold,
        256.0 / (256 - threshold),
        **plan.constants,
    )
    launch(
        _layer_norm_bwd_sum_kernel,
        plan.sum_grid,
        partials,
        *sums,
        *(None, None, None)[len(sums) :],
        plan.grid[0],
        C=C,
        BLOCK_P=128,
        BLOCK_C=16,
        num_warps=4,
    )
    return dsum, dx, dweight, dbias, dx_bias


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
        x = torch.empty((8, 1024, C), dtype=dtype, device="meta")
        weight, stats = x.new_empty(C), x.new_empty((2 - rms, 8 * 1024), dtype=torch.float32)
        key, threshold = (x.new_empty(2, dtype=torch.int64), 26) if dropout else (None, 0)
        given, x_bias = (x, narrow) if residual else (None, None)
        bias = None if rms else dtype
        options = (key, 1, threshold, sample_rows, (0, *moved), narrow, bias, x_bias, rms)
        return lambda: layer_norm_bwd(x, given, x, weight, stats, *options)

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
