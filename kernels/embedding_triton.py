"""Token plus position embedding in Triton; formulas and what is saved: embedding.py.

Forward is one pass: a program gathers ROWS rows of wte, adds those of wpe, draws the mask and
stores, with 16 elements per thread.

[Note: gradient of wte] The ids are sorted (stable, on the device), so that equal ones are
adjacent: a run. Runs are cut at the multiples of PIECE in the sorted list, which gives at most
N / PIECE + V pieces of at most PIECE rows each, however frequent a token is:
    sorted ids   7 7 7 7 7 7 | 7 7 9 9 12 12 | 12 12 12 12 12 12 | 12 13 15 15 15 17
    pieces       ----------- | --- --- ----- | ----------------- | -- -- -------- --
_embedding_bwd_tokens_kernel sums each piece in order, in fp32. A piece that is a whole run is a row
of the gradient. The others can only be the first or the last of their stretch of PIECE, so their
sums go to partial[2 * stretch] and partial[2 * stretch + 1], and _embedding_bwd_runs_kernel adds
those of each run in order. The data only decides what programs skip: a fixed number of programs
stride over the list, so the host never waits. Each row of the gradient is written by one program.

The gradient of wpe is the sum over the batch, one row per program. Both read dx once, under the
mask, drawn again. One warp per program: the sum over rows stays inside a thread, without barriers.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.activation.triton import block_columns
from fastpar.kernels.philox_triton import keep_tile
from fastpar.kernels.triton_launch import cdiv, device_key, launch, meta, sm_count

_PIECE = 64
_PROGRAMS_PER_SM = 20  # all resident: one warp each, at most 96 registers per thread


@triton.jit(do_not_specialize=["N", "T", "V", "first_position", "site", "threshold", "scale"])
def _embedding_fwd_kernel(
    idx_ptr, wte_ptr, wpe_ptr, x_ptr, key_ptr, N, T, V, C, stride_wte, stride_wpe, first_position,
    site, threshold, scale, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, HAS_WPE: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (n < N)[:, None] & (cols < C)[None, :]
    token = tl.load(idx_ptr + n, mask=n < N, other=0).to(tl.int64)
    known = ((token >= 0) & (token < V))[:, None]
    row = wte_ptr + token[:, None] * stride_wte
    x = tl.load(row + cols[None, :], mask=inside & known, other=0.0).to(tl.float32)
    x = tl.where(known, x, float("nan"))
    if HAS_WPE:
        row = wpe_ptr + (first_position + n % T).to(tl.int64)[:, None] * stride_wpe
        x += tl.load(row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        keep = keep_tile(
            key_ptr, (n // T)[:, None], site * 65536, n % T, block * (BLOCK_C // 16), threshold,
            BLOCK_C,
        )  # fmt: skip
        x = tl.where(keep, x * scale, 0.0)
    offset = n.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(x_ptr + offset, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _masked_rows(
    dx_ptr, key_ptr, n, inside, block, T, C, site, threshold, scale, BLOCK_C: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Rows n of dx under the mask, in fp32; 0 where not inside."""
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    offset = n.to(tl.int64)[:, None] * C + cols[None, :]
    dx = tl.load(dx_ptr + offset, mask=inside[:, None] & (cols < C)[None, :], other=0.0)
    dx = dx.to(tl.float32)
    if DROPOUT:
        n = n.to(tl.int32)
        keep = keep_tile(
            key_ptr, (n // T)[:, None], site * 65536, n % T, block * (BLOCK_C // 16), threshold,
            BLOCK_C,
        )  # fmt: skip
        dx = tl.where(keep, dx * scale, 0.0)
    return dx


@triton.jit
def _write_row(dwte_ptr, token, total, block, C, BLOCK_C: tl.constexpr):
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    at = dwte_ptr + token.to(tl.int64) * C + cols
    tl.store(at, total.to(dwte_ptr.dtype.element_ty), mask=cols < C)


@triton.jit(do_not_specialize=["N", "T", "V", "site", "threshold", "scale"])
def _embedding_bwd_tokens_kernel(
    dx_ptr, token_ptr, order_ptr, key_ptr, dwte_ptr, partial_ptr, N, T, V, C, site, threshold,
    scale, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    block = tl.program_id(0) % blocks
    first = tl.program_id(0) // blocks
    for step in range(0, N - first, tl.num_programs(0) // blocks):
        i = first + step
        token = tl.load(token_ptr + i)
        begins = tl.load(token_ptr + i - 1, mask=i > 0, other=-2) != token
        known = (token >= 0) & (token < V)
        if (begins | (i % PIECE == 0)) & known:
            stretch = i // PIECE
            window = i + tl.arange(0, PIECE)
            within = window < tl.minimum((stretch + 1) * PIECE, N)
            same = tl.load(token_ptr + window, mask=within, other=-2) == token
            last = i + tl.sum(same.to(tl.int32), 0)
            total = tl.zeros([ROWS, BLOCK_C], tl.float32)
            for start in range(i, last, ROWS):
                place = start + tl.arange(0, ROWS)
                n = tl.load(order_ptr + place, mask=place < last, other=0)
                total += _masked_rows(
                    dx_ptr, key_ptr, n, place < last, block, T, C, site, threshold, scale,
                    BLOCK_C, DROPOUT,
                )  # fmt: skip
            piece = tl.sum(total, 0)
            ends = tl.load(token_ptr + last, mask=last < N, other=-2) != token
            if begins & ends:
                _write_row(dwte_ptr, token, piece, block, C, BLOCK_C)
            else:
                slot = 2 * stretch + (i % PIECE != 0).to(tl.int32)
                cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
                tl.store(partial_ptr + slot.to(tl.int64) * C + cols, piece, mask=cols < C)


@triton.jit(do_not_specialize=["N", "V"])
def _embedding_bwd_runs_kernel(
    token_ptr, partial_ptr, dwte_ptr, N, V, C, PIECE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The run that begins in this program's stretch and extends beyond it, if there is one."""
    blocks = tl.cdiv(C, BLOCK_C)
    block = tl.program_id(0) % blocks
    stretch = tl.program_id(0) // blocks
    first = stretch * PIECE
    beyond = first + PIECE
    if beyond < N:
        token = tl.load(token_ptr + beyond)
        goes_on = tl.load(token_ptr + beyond - 1) == token
        begins = tl.load(token_ptr + first - 1, mask=first > 0, other=-2) != token
        if goes_on & begins & (token >= 0) & (token < V):
            cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
            slot = 2 * stretch + (tl.load(token_ptr + first) != token).to(tl.int32)
            head = tl.load(partial_ptr + slot.to(tl.int64) * C + cols, mask=cols < C, other=0.0)
            total = tl.zeros([ROWS, BLOCK_C], tl.float32)
            found = tl.full([], ROWS, tl.int32)
            next_one = stretch + 1
            while found == ROWS:
                stretches = next_one + tl.arange(0, ROWS)
                inside = stretches < tl.cdiv(N, PIECE)
                same = tl.load(token_ptr + stretches * PIECE, mask=inside, other=-2) == token
                at = partial_ptr + (2 * stretches).to(tl.int64)[:, None] * C + cols[None, :]
                total += tl.load(at, mask=same[:, None] & (cols < C)[None, :], other=0.0)
                found = tl.sum(same.to(tl.int32), 0)
                next_one += ROWS
            total_row = head + tl.sum(total, 0)
            _write_row(dwte_ptr, token, total_row, block, C, BLOCK_C)


@triton.jit(do_not_specialize=["B", "T", "first_position", "site", "threshold", "scale"])
def _embedding_bwd_positions_kernel(
    dx_ptr, key_ptr, dwpe_ptr, B, T, C, first_position, site, threshold, scale, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    block = tl.program_id(0) % blocks
    position = tl.program_id(0) // blocks
    t = position - first_position
    samples = tl.where((t >= 0) & (t < T), B, 0)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(0, samples, ROWS):
        b = start + tl.arange(0, ROWS)
        total += _masked_rows(
            dx_ptr, key_ptr, b * T + t, b < B, block, T, C, site, threshold, scale,
            BLOCK_C, DROPOUT,
        )  # fmt: skip
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    at = dwpe_ptr + position.to(tl.int64) * C + cols
    tl.store(at, tl.sum(total, 0).to(dwpe_ptr.dtype.element_ty), mask=cols < C)


def _rows_of(table: Tensor) -> Tensor:
    return table if table.stride(1) == 1 else table.contiguous()


def embedding_fwd(
    idx: Tensor, wte: Tensor, wpe: Tensor | None, first_position: int, key: Tensor | None,
    site: int, threshold: int,
) -> Tensor:  # fmt: skip
    """x [B, T, C], masked if there is a key."""
    T, C = idx.shape[1], wte.shape[1]
    x = wte.new_empty(*idx.shape, C)
    wte, table = _rows_of(wte), _rows_of(wte if wpe is None else wpe)
    width = block_columns(C)
    rows = 2048 // width
    launch(
        _embedding_fwd_kernel, (cdiv(idx.numel(), rows) * cdiv(C, width),),
        idx.contiguous(), wte, table, x, x if key is None else device_key(key, x.device),
        idx.numel(), T, wte.shape[0], C, wte.stride(0), table.stride(0), first_position, site,
        threshold, 256.0 / (256 - threshold),
        ROWS=rows, BLOCK_C=width, HAS_WPE=wpe is not None, DROPOUT=key is not None, num_warps=4,
    )  # fmt: skip
    return x


def embedding_bwd_wte(
    dx: Tensor, idx: Tensor, key: Tensor | None, site: int, threshold: int, dwte: Tensor
) -> None:
    """Writes the rows of dwte [V, C] whose ids occur; [Note: gradient of wte]."""
    N, C, V = idx.numel(), dx.shape[-1], dwte.shape[0]
    # Clamped first: in 32 bits some ids outside would wrap to valid ones.
    tokens, order = torch.sort(idx.reshape(-1).clamp(-1, V).int(), stable=True)
    width = block_columns(C)
    blocks, stretches = cdiv(C, width), cdiv(N, _PIECE)
    partial = dx.new_empty(2 * stretches, C, dtype=torch.float32)
    programs = max(1, min(N, _PROGRAMS_PER_SM * sm_count(dx.device) // max(1, blocks)))
    launch(
        _embedding_bwd_tokens_kernel, (programs * blocks if N else 0,),
        dx, tokens, order, dx if key is None else device_key(key, dx.device), dwte, partial, N,
        idx.shape[1], V, C, site, threshold, 256.0 / (256 - threshold),
        PIECE=_PIECE, ROWS=1024 // width, BLOCK_C=width, DROPOUT=key is not None, num_warps=1,
    )  # fmt: skip
    launch(
        _embedding_bwd_runs_kernel, (stretches * blocks,),
        tokens, partial, dwte, N, V, C, PIECE=_PIECE, ROWS=1024 // width, BLOCK_C=width,
        num_warps=1,
    )  # fmt: skip


def embedding_bwd_wpe(
    dx: Tensor, idx: Tensor, key: Tensor | None, site: int, threshold: int, positions: int,
    first_position: int,
) -> Tensor:  # fmt: skip
    """dwpe [positions, C], every row of it."""
    C = dx.shape[-1]
    dwpe = dx.new_empty(positions, C)
    width = block_columns(C)
    launch(
        _embedding_bwd_positions_kernel, (positions * cdiv(C, width),),
        dx, dx if key is None else device_key(key, dx.device), dwpe, *idx.shape, C, first_position,
        site, threshold, 256.0 / (256 - threshold),
        ROWS=1024 // width, BLOCK_C=width, DROPOUT=key is not None, num_warps=1,
    )  # fmt: skip
    return dwpe


AOT_EXEMPT = {
    "_embedding_bwd_runs_kernel bwd wte float16 C=1600 dropout": {
        "spills": "16 bytes before and after the loop, once for a token that many positions hold"
    }
}


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """(label, call on meta tensors) of the variants that GPT-2 uses, for ahead-of-time checks."""
    B, T, V = 16, 1024, 50304
    idx, key = meta(B, T, dtype=torch.int64), meta(2, dtype=torch.int64)

    def calls(C: int, dtype: torch.dtype, p: bool) -> list[tuple[str, Callable[[], Any]]]:
        wte, wpe, dx = (meta(*shape, C, dtype=dtype) for shape in ((V,), (T,), (B, T)))
        mask: tuple[Tensor | None, int, int] = (key, 0, 26) if p else (None, 0, 0)
        about = f"{str(dtype).removeprefix('torch.')} C={C}{' dropout' if p else ''}"
        return [
            (f"fwd {about}", lambda: embedding_fwd(idx, wte, wpe, 0, *mask)),
            (f"bwd wte {about}", lambda: embedding_bwd_wte(dx, idx, *mask, wte)),
            (f"bwd wpe {about}", lambda: embedding_bwd_wpe(dx, idx, *mask, T, 0)),
        ]

    return [
        *calls(768, torch.bfloat16, False),
        *calls(768, torch.bfloat16, True),
        *calls(1600, torch.float16, True),
        *calls(1600, torch.float32, False),
    ]
