"""Norm and rotation of heads in Triton; formulas and what is saved: rope.py.

A tile is HEADS heads, each as two halves of D features, of any rows: flat numbers row * S + slot of
the packed projection [N, S = (R + 2) * G, D]. Both passes move each element once. A head goes to q,
k or v; what is masked off in the other two costs no traffic. Backward with weights walks over a
range of tiles and keeps the sums of both weights' gradients in registers: each program writes one
row of partials, added in order.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.triton_launch import cdiv, launch, meta, next_power_of_2, sm_count

_TILE = 1024  # pairs of features that a program has in flight, 8 in a thread
_PROGRAMS_PER_SM = 4


@triton.jit
def _places(heads, S, R, G, D):
    """The row of each flat number; offsets in q, k and v; whether it is q's, k's or v's."""
    row, slot = heads // S, (heads % S).to(tl.int32)
    r, g = slot // G, slot % G
    in_q = (row * (R * G) + g * R + r) * D
    in_k = (row * G + g) * D
    return row, in_q, in_k, r < R, r == R, r == R + 1


@triton.jit
def _weights(q_ptr, k_ptr, cols, inside, is_q):
    q = tl.load(q_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    k = tl.load(k_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q[:, None], q, k)


@triton.jit
def _inside(there, cols, size, D: tl.constexpr, HALF: tl.constexpr):
    """The mask of a half: of whole rows where the tile has no other columns, so that accesses are
    of 16 bytes."""
    inside = there
    if 2 * HALF != D:
        inside = there & (cols < size)[None, :]
    return inside


@triton.jit
def _rstd(x1, x2, D, eps):
    return tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]


@triton.jit(do_not_specialize=["P", "eps"])
def _rope_fwd_kernel(
    qkv_ptr, turns_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr, P, M, eps,
    R: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    heads = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    row, in_q, in_k, is_q, is_k, is_v = _places(heads, (R + 2) * G, R, G, D)
    half: tl.constexpr = (D + 1) // 2
    cols, there = tl.arange(0, HALF), (heads < P)[:, None]
    first, second = cols < half, cols < D - half
    in_1 = _inside(there, cols, half, D, HALF)
    in_2 = _inside(there, cols, D - half, D, HALF)
    at = heads[:, None] * D + cols[None, :]
    x1 = tl.load(qkv_ptr + at, mask=in_1, other=0.0).to(tl.float32)
    x2 = tl.load(qkv_ptr + half + at, mask=in_2, other=0.0).to(tl.float32)
    y1, y2 = x1, x2
    if NORM:
        rstd = _rstd(x1, x2, D, eps)
        y1, y2 = x1 * rstd, x2 * rstd
        if WEIGHTS:
            y1 *= _weights(q_weight_ptr, k_weight_ptr, cols, first, is_q)
            y2 *= _weights(q_weight_ptr + half, k_weight_ptr + half, cols, second, is_q)
    if TURN:
        turn = turns_ptr + (row % M)[:, None] * D + cols[None, :]
        c = tl.load(turn, mask=in_1, other=0.0)
        s = tl.load(turn + half, mask=in_1, other=0.0)
        y1, y2 = y1 * c - y2 * s, y2 * c + y1 * s
    y1, y2 = tl.where(is_v[:, None], x1, y1), tl.where(is_v[:, None], x2, y2)
    y1, y2 = y1.to(q_ptr.dtype.element_ty), y2.to(q_ptr.dtype.element_ty)
    for i in tl.static_range(2):
        y = y1 if i == 0 else y2
        inside = in_1 if i == 0 else in_2
        col = (cols + i * half)[None, :]
        tl.store(q_ptr + in_q[:, None] + col, y, mask=inside & is_q[:, None])
        tl.store(k_ptr + in_k[:, None] + col, y, mask=inside & is_k[:, None])
        tl.store(v_ptr + in_k[:, None] + col, y, mask=inside & is_v[:, None])


@triton.jit
def _load_gradient(dq_ptr, dk_ptr, dv_ptr, in_q, in_k, is_q, is_k, is_v, inside):
    dq = tl.load(dq_ptr + in_q, mask=inside & is_q[:, None], other=0.0).to(tl.float32)
    dk = tl.load(dk_ptr + in_k, mask=inside & is_k[:, None], other=0.0).to(tl.float32)
    dv = tl.load(dv_ptr + in_k, mask=inside & is_v[:, None], other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], dq, tl.where(is_k[:, None], dk, dv))


@triton.jit(do_not_specialize=["P", "heads_per_program", "eps"])
def _rope_bwd_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, turns_ptr, q_weight_ptr, k_weight_ptr, dqkv_ptr, partial_ptr,
    P, heads_per_program, M, eps, R: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * heads_per_program
    end = tl.minimum(begin + heads_per_program, P)
    half: tl.constexpr = (D + 1) // 2
    cols = tl.arange(0, HALF)
    first, second = cols < half, cols < D - half
    if WEIGHTS:
        sum_q1 = tl.zeros([HEADS, HALF], tl.float32)
        sum_q2 = tl.zeros([HEADS, HALF], tl.float32)
        sum_k1 = tl.zeros([HEADS, HALF], tl.float32)
        sum_k2 = tl.zeros([HEADS, HALF], tl.float32)
    for start in range(begin, end, HEADS):
        heads = start + tl.arange(0, HEADS)
        row, in_q, in_k, is_q, is_k, is_v = _places(heads, (R + 2) * G, R, G, D)
        there = (heads < end)[:, None]
        in_1 = _inside(there, cols, half, D, HALF)
        in_2 = _inside(there, cols, D - half, D, HALF)
        q_at, k_at = in_q[:, None] + cols[None, :], in_k[:, None] + cols[None, :]
        dy1 = _load_gradient(dq_ptr, dk_ptr, dv_ptr, q_at, k_at, is_q, is_k, is_v, in_1)
        dy2 = _load_gradient(
            dq_ptr + half, dk_ptr + half, dv_ptr + half, q_at, k_at, is_q, is_k, is_v, in_2
        )
        g1, g2 = dy1, dy2
        if TURN:
            turn = turns_ptr + (row % M)[:, None] * D + cols[None, :]
            c = tl.load(turn, mask=in_1, other=0.0)
            s = tl.load(turn + half, mask=in_1, other=0.0)
            g1, g2 = g1 * c + g2 * s, g2 * c - g1 * s
        at = heads[:, None] * D + cols[None, :]
        if NORM:
            x1 = tl.load(qkv_ptr + at, mask=in_1, other=0.0).to(tl.float32)
            x2 = tl.load(qkv_ptr + half + at, mask=in_2, other=0.0).to(tl.float32)
            rstd = _rstd(x1, x2, D, eps)
            n1, n2 = x1 * rstd, x2 * rstd
            if WEIGHTS:
                sum_q1 += tl.where(is_q[:, None], g1 * n1, 0.0)
                sum_q2 += tl.where(is_q[:, None], g2 * n2, 0.0)
                sum_k1 += tl.where(is_k[:, None], g1 * n1, 0.0)
                sum_k2 += tl.where(is_k[:, None], g2 * n2, 0.0)
                g1 *= _weights(q_weight_ptr, k_weight_ptr, cols, first, is_q)
                g2 *= _weights(q_weight_ptr + half, k_weight_ptr + half, cols, second, is_q)
            slope = ((tl.sum(g1 * n1, 1) + tl.sum(g2 * n2, 1)) / D)[:, None]
            g1, g2 = rstd * (g1 - n1 * slope), rstd * (g2 - n2 * slope)
        g1, g2 = tl.where(is_v[:, None], dy1, g1), tl.where(is_v[:, None], dy2, g2)
        tl.store(dqkv_ptr + at, g1.to(dqkv_ptr.dtype.element_ty), mask=in_1)
        tl.store(dqkv_ptr + half + at, g2.to(dqkv_ptr.dtype.element_ty), mask=in_2)
    if WEIGHTS:
        to = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * D + cols
        tl.store(to, tl.sum(sum_q1, 0), mask=first)
        tl.store(to + half, tl.sum(sum_q2, 0), mask=second)
        tl.store(to + D, tl.sum(sum_k1, 0), mask=first)
        tl.store(to + D + half, tl.sum(sum_k2, 0), mask=second)


def _rows_of(turns: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
    """turns [M, D], contiguous, of which row i of qkv has row i modulo M."""
    if turns is None:
        return None
    D, rows = turns.shape[-1], list(turns.shape[:-1])
    while rows and rows[0] == 1:
        rows = rows[1:]
    if rows != list(lead[len(lead) - len(rows) :]):
        turns = turns.expand(*lead, D)
    return turns.contiguous().view(-1, D)


def _tile(D: int) -> tuple[int, int]:
    """(HEADS, HALF)"""
    half = next_power_of_2(cdiv(D, 2))
    return max(1, _TILE // half), half


def rope_fwd(
    qkv: Tensor, turns: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, norm: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v."""
    qkv = qkv.contiguous()
    *lead, many, G, D = qkv.shape
    q, k, v = (qkv.new_empty((*lead, n * G, D)) for n in (many - 2, 1, 1))
    rows, weights = _rows_of(turns, (*lead,)), (q_weight, k_weight)
    w_q, w_k = (qkv if w is None else w.contiguous() for w in weights)
    heads, half = _tile(D)
    P = qkv.numel() // D
    launch(
        _rope_fwd_kernel, (cdiv(P, heads),),
        qkv, qkv if rows is None else rows, w_q, w_k, q, k, v,
        P, 1 if rows is None else len(rows), float(eps),
        R=many - 2, G=G, D=D, HEADS=heads, HALF=half, NORM=norm, TURN=rows is not None,
        WEIGHTS=q_weight is not None, num_warps=4,
    )  # fmt: skip
    return q, k, v


def rope_bwd(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, turns: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, norm: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dqkv and the gradients of both weights ([0] fp32 without)."""
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    *lead, G, D = dv.shape
    R = dq.shape[-2] // G
    dqkv = dv.new_empty((*lead, R + 2, G, D))
    rows, weighted = _rows_of(turns, (*lead,)), q_weight is not None
    w_q, w_k = (dqkv if w is None else w.contiguous() for w in (q_weight, k_weight))
    heads, half = _tile(D)
    P = dqkv.numel() // D
    tiles = cdiv(P, heads)
    programs = min(tiles, _PROGRAMS_PER_SM * sm_count(dv.device)) if weighted else tiles
    per_program = cdiv(tiles, max(1, programs)) * heads
    programs = cdiv(P, per_program) if P else 0
    partial = dv.new_empty((programs, 2, D) if weighted else (0,), dtype=torch.float32)
    launch(
        _rope_bwd_kernel, (programs,),
        dq, dk, dv, dqkv if qkv is None else qkv.contiguous(), dqkv if rows is None else rows,
        w_q, w_k, dqkv, partial,
        P, per_program, 1 if rows is None else len(rows), float(eps),
        R=R, G=G, D=D, HEADS=heads, HALF=half, NORM=norm, TURN=rows is not None, WEIGHTS=weighted,
        num_warps=4,
    )  # fmt: skip
    if q_weight is None or k_weight is None:
        return dqkv, partial, dv.new_empty(0, dtype=torch.float32)
    sums = partial.sum(0)
    return dqkv, sums[0].to(q_weight.dtype, copy=True), sums[1].to(k_weight.dtype, copy=True)


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """(label, call on meta tensors) of the variants that models use, for ahead-of-time checks."""

    def calls(label: str, R: int, G: int, D: int, dtype: torch.dtype, norm: bool, weighted: bool):
        qkv, turns = meta(8, 1024, R + 2, G, D, dtype=dtype), meta(1024, D, dtype=torch.float32)
        w = meta(D, dtype=dtype) if weighted else None
        dq, dk = meta(8, 1024, R * G, D, dtype=dtype), meta(8, 1024, G, D, dtype=dtype)
        kept = qkv if norm else None
        return [
            (f"fwd {label}", lambda: rope_fwd(qkv, turns, w, w, norm, 1e-6)),
            (f"bwd {label}", lambda: rope_bwd(dq, dk, dk, kept, turns, w, w, norm, 1e-6)),
        ]

    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        *calls("NanoChat bfloat16 D=128", 1, 6, 128, bf16, True, False),
        *calls("Llama bfloat16 D=64", 4, 8, 64, bf16, False, False),
        *calls("Qwen3 bfloat16 D=128", 2, 8, 128, bf16, True, True),
        *calls("Qwen3 float32 D=128", 2, 8, 128, fp32, True, True),
    ]
