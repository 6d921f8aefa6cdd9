"""8-bit floats in Triton: casts with their scales, and products with a scale per 128 features.

With a given scale a cast reads x once (fused: the codes, their transpose, each tile's largest value
and count of overflows, which one launch per backward adds to the step's records); with row scales
it reads x twice, the second time from cache.
Formulas, formats and non-finite values: fp8.py; the codes and scales have its bits.

A product sums 128 features in the tensor cores, then adds them in fp32 with both operands' scales:
Hopper's tensor cores keep about 14 bits of their sums. Products with other scales are torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.linear.fp8 import BLOCK, LARGEST, Codes
from fastpar.kernels.triton_launch import cdiv, launch, meta

AOT_ARCHS = (90,)  # older architectures in the table have no such products
AOT_EXEMPT = {
    "_note_kernel *": {
        "16-byte loads": "a few thousand numbers, of which the second half begins anywhere"
    }
}
_ROWS = 16  # of a cast's tile
_TILE = 64  # of one that is transposed, each way


@triton.jit
def _power_of_two(top, LARGEST: tl.constexpr):
    bits = tl.div_rn(top, LARGEST).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 254)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(top < float("inf"), scale, float("nan"))


@triton.jit
def _round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, N, K, stride_row, stride_col, GROUP_TILES: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    cols = group * GROUP_TILES * COLS + tl.arange(0, COLS)
    x_ptrs = x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col
    top = tl.zeros([ROWS], tl.float32)
    for i in range(GROUP_TILES):
        inside = (rows < N)[:, None] & (cols + i * COLS < K)[None, :]
        x = tl.load(x_ptrs + i * COLS * stride_col, mask=inside, other=0.0).to(tl.float32)
        size = tl.where(x == x, tl.abs(x), float("inf"))
        top = tl.maximum(top, tl.max(size, 1))
    scale = _power_of_two(top, LARGEST)
    inverse = tl.div_rn(1.0, scale)
    for i in range(GROUP_TILES):
        inside = (rows < N)[:, None] & (cols + i * COLS < K)[None, :]
        x = tl.load(x_ptrs + i * COLS * stride_col, mask=inside, other=0.0).to(tl.float32)
        codes = (x * inverse[:, None]).to(codes_ptr.dtype.element_ty)
        at = rows[:, None] * K + (cols + i * COLS)[None, :]
        tl.store(codes_ptr + at, codes, mask=inside)
    tl.store(scales_ptr + rows * tl.num_programs(1) + group, scale, mask=rows < N)


@triton.jit
def _round_all_kernel(
    x_ptr, scale_ptr, codes_ptr, flipped_ptr, found_ptr, N, K, stride_row, stride_col,
    FLIP: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    x_ptrs = x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    scaled = x * tl.div_rn(1.0, tl.load(scale_ptr))
    size = tl.abs(scaled)
    finite = size < float("inf")
    clamped = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    codes = tl.where(finite, clamped, float("nan")).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + rows[:, None] * K + cols[None, :], codes, mask=inside)
    if FLIP:
        at = cols[:, None] * N + rows[None, :]
        tl.store(flipped_ptr + at, tl.trans(codes), mask=(cols < K)[:, None] & (rows < N)[None, :])
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    programs = tl.num_programs(0) * tl.num_programs(1)
    tl.store(found_ptr + part, tl.max(tl.where(finite, tl.abs(x), 0.0)))
    over = tl.sum((finite & (size > LARGEST)).to(tl.float32))
    tl.store(found_ptr + programs + part, over)


@triton.jit
def _note_one(noted_ptr, words, found_ptr, n, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    top, over = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.float64)
    for i in range(0, n, LANES):
        inside = i + lanes < n
        part = tl.load(found_ptr + i + lanes, mask=inside, other=0.0).to(tl.float64)
        top = tl.maximum(top, part)
        over += tl.load(found_ptr + n + i + lanes, mask=inside, other=0.0).to(tl.float64)
    tl.store(noted_ptr, tl.maximum(tl.load(noted_ptr), tl.max(top)))
    tl.store(noted_ptr + words, tl.load(noted_ptr + words) + tl.sum(over))


@triton.jit(do_not_specialize=["first", "words", "of_x", "of_weight", "of_dy"])
def _note_kernel(
    noted_ptr, x_ptr, weight_ptr, dy_ptr, first, words, of_x, of_weight, of_dy, LANES: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0)
    noted_ptr += first + which
    if which == 0:
        _note_one(noted_ptr, words, x_ptr, of_x, LANES)
    elif which == 1:
        _note_one(noted_ptr, words, weight_ptr, of_weight, LANES)
    else:
        _note_one(noted_ptr, words, dy_ptr, of_dy, LANES)


@triton.jit(do_not_specialize=["M"])
def _block_product_kernel(
    a_ptr, b_ptr, a_scales_ptr, b_scales_ptr, bias_ptr, y_ptr, M, N, K, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    # Bands of BAND rows of tiles, so that neighbouring programs share operands in the L2 cache.
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * tiles_n)
    rows = (band * BAND + place % height) * ROWS + tl.arange(0, ROWS)
    cols = place // height * COLS + tl.arange(0, COLS)
    # Rows behind the end read others again: nothing of them is stored.
    at_a, at_b = (rows % M).to(tl.int64), (cols % N).to(tl.int64)
    ks, blocks = tl.arange(0, BLOCK), tl.cdiv(K, BLOCK)
    a_ptrs = a_ptr + at_a[:, None] * K + ks[None, :]
    b_ptrs = b_ptr + at_b[None, :] * K + ks[:, None]
    a_scales_ptr += at_a * blocks
    b_scales_ptr += at_b * blocks
    total = tl.zeros([ROWS, COLS], tl.float32)
    for i in range(blocks):
        left = K - i * BLOCK
        a = tl.load(a_ptrs, mask=(ks < left)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(ks < left)[:, None], other=0.0)
        of_a, of_b = tl.load(a_scales_ptr + i), tl.load(b_scales_ptr + i)
        total += tl.dot(a, b) * of_a[:, None] * of_b[None, :]
        a_ptrs += BLOCK
        b_ptrs += BLOCK
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(
        y_ptr + rows[:, None].to(tl.int64) * N + cols[None, :],
        total.to(y_ptr.dtype.element_ty),
        inside,
    )


def round_rows(x: Tensor, dtype: torch.dtype, group: int) -> Codes:
    """As fp8.round_rows()."""
    n, k = x.shape
    groups = cdiv(k, group)
    codes = torch.empty(n, k, dtype=dtype, device=x.device)
    scales = torch.empty(n, groups, dtype=torch.float32, device=x.device)
    launch(
        _round_rows_kernel, (cdiv(n, _ROWS), groups),
        x, codes, scales, n, k, *x.stride(),
        GROUP_TILES=cdiv(group, BLOCK), LARGEST=LARGEST[dtype], ROWS=_ROWS, COLS=BLOCK, num_warps=4,
    )  # fmt: skip
    return Codes(codes, scales, group)


def round_all(
    x: Tensor, dtype: torch.dtype, scale: Tensor, flip: bool = False
) -> tuple[Codes, Tensor]:
    """As fp8.round_all(), with findings in parts: [2, P]."""
    n, k = x.shape
    codes = torch.empty(n, k, dtype=dtype, device=x.device)
    flipped = torch.empty(k, n, dtype=dtype, device=x.device) if flip else None
    grid = cdiv(n, _TILE), cdiv(k, _TILE)
    found = torch.empty(2, grid[0] * grid[1], dtype=torch.float32, device=x.device)
    launch(
        _round_all_kernel, grid,
        x, scale, codes, codes if flipped is None else flipped, found, n, k, *x.stride(),
        FLIP=flip, LARGEST=LARGEST[dtype], TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return Codes(codes, scale, flipped=flipped), found


def note_(noted: Tensor, layer: int, found: Sequence[Tensor]) -> None:
    """As fp8.note_()."""
    _, layers, which = noted.shape
    parts = [each.numel() // 2 for each in found]
    sizes = layer * which, layers * which, *parts
    launch(_note_kernel, (which,), noted, *found, *sizes, LANES=1024, num_warps=4)


def block_product(a: Codes, b: Codes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a[M, K] @ b[N, K].T + bias [N], both with a scale per BLOCK features."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    y = torch.empty(m, n, dtype=dtype, device=a.codes.device)
    rows, cols = 128, 128
    launch(
        _block_product_kernel, (cdiv(m, rows) * cdiv(n, cols),),
        a.codes, b.codes, a.scales, b.scales, a.scales if bias is None else bias.contiguous(), y, m,
        n, k,
        HAS_BIAS=bias is not None, ROWS=rows, COLS=cols, BLOCK=BLOCK, BAND=8, num_warps=8,
        num_stages=3,
    )  # fmt: skip
    return y


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """(label, call on meta tensors) of GPT-2 XL's MLP, for ahead-of-time checks."""
    n, c, f = 16384, 1600, 6400
    e4m3, e5m2 = LARGEST
    scale, noted = meta(dtype=torch.float32), meta(2, 192, 3, dtype=torch.float64)

    def of(rows: int, cols: int, dtype: torch.dtype = e4m3) -> Codes:
        return round_rows(meta(rows, cols), dtype, BLOCK)

    def product(a: Codes, b: Codes, bias: Tensor | None = None) -> Tensor:
        return block_product(a, b, bias, torch.bfloat16)

    weight = meta(f, c)
    return [
        (f"row e4m3 C={c}", lambda: round_rows(meta(n, c), e4m3, c)),
        (f"row e5m2 F={f}", lambda: round_rows(meta(n, f), e5m2, f)),
        (f"row of the transpose e4m3 C={c}", lambda: round_rows(weight.t(), e4m3, f)),
        (f"tensor e4m3 C={c}", lambda: round_all(meta(n, c), e4m3, scale)),
        (f"tensor of the transpose e4m3 C={c}", lambda: round_all(weight.t(), e4m3, scale)),
        (f"tensor both ways e5m2 F={f}", lambda: round_all(meta(n, f), e5m2, scale, True)),
        ("notes", lambda: note_(noted, 5, [meta(2, 640, dtype=torch.float32)] * 3)),
        (f"fwd block e4m3 {c}->{f}", lambda: product(of(n, c), of(f, c), meta(f))),
        (f"dx block e5m2 {c}->{f}", lambda: product(of(n, f, e5m2), of(c, f))),
    ]
