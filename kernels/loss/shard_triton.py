"""The shards of cross_entropy_shard.py in Triton, with the sweeps of cross_entropy_triton.py.

Forward is sweep 1 of a row, backward sweep 2, with lse in place of the row's own maximum and sum.
Nothing is saved. A target of another shard equals no column here and is never an address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.cross_entropy_triton import (
    LOWEST,
    config_of,
    exp_fast,
    row_statistics,
    rows_of,
    same_row_alignment,
    scale_stride_of,
    write_gradient,
    write_zeros,
)
from fastpar.kernels.triton_launch import launch

AOT_EXEMPT = {
    "_cross_entropy_shard_grad_kernel bf16": {
        "16-byte loads": "only the masked first and last tile of a row are loaded by element"
    }
}


@triton.jit(do_not_specialize=["ignore_index", "first"])
def _cross_entropy_shard_kernel(
    logits_ptr,
    targets_ptr,
    top_ptr,
    total_ptr,
    hit_ptr,
    stride,
    first,
    v,
    ignore_index,
    U: tl.constexpr,
    W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target != ignore_index:
        ptr, _, shift = rows_of(logits_ptr, logits_ptr, row, stride, stride, True)
        top, total, _ = row_statistics(ptr, shift, v, U, W, False)
        local = target - first
        here = (local >= 0) & (local < v)
        hit = tl.load(logits_ptr + row * stride + local, mask=here, other=0.0).to(tl.float32)
        tl.store(top_ptr + row, tl.where(top == LOWEST, -float("inf"), top))
        tl.store(total_ptr + row, total)
        tl.store(hit_ptr + row, hit)
    else:
        tl.store(top_ptr + row, 0.0)
        tl.store(total_ptr + row, 1.0)
        tl.store(hit_ptr + row, 0.0)


@triton.jit(do_not_specialize=["ignore_index", "first"])
def _cross_entropy_shard_grad_kernel(
    logits_ptr,
    grad_ptr,
    targets_ptr,
    lse_ptr,
    scale_ptr,
    stride,
    grad_stride,
    scale_stride,
    first,
    v,
    width,
    ignore_index,
    z_loss,
    INPLACE: tl.constexpr,
    ALIGNED: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target != ignore_index:
        ptr, out_ptr, shift = rows_of(logits_ptr, grad_ptr, row, stride, grad_stride, ALIGNED)
        local = target - first
        here = (local >= 0) & (local < v)
        hit = tl.load(logits_ptr + row * stride + local, mask=here, other=0.0).to(tl.float32)
        if INPLACE:  # every warp reads hit, and none may have written over it before
            tl.debug_barrier()
        lse = tl.load(lse_ptr + row)
        scale = tl.load(scale_ptr + row * scale_stride)
        p = exp_fast(hit - lse)
        extra = 2.0 * z_loss * lse
        chosen = scale * ((p - 1.0) + extra * p)
        factor = scale * (1.0 + extra)
        column = tl.where(here, local, -1).to(tl.int32)
        write_gradient(ptr, out_ptr, shift, v, width, lse, factor, 0.0, column, chosen, U, W)
    else:
        write_zeros(grad_ptr + row * grad_stride, width, W)


def shard_fwd(
    logits: Tensor, targets: Tensor, first: int, v: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum_exp, target_logit), [N] fp32."""
    top, total, hit = (
        torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    launch(
        _cross_entropy_shard_kernel,
        (logits.shape[0],),
        logits,
        targets,
        top,
        total,
        hit,
        logits.stride(0),
        first,
        v,
        ignore_index,
        **config_of(logits),
    )
    return top, total, hit


def shard_bwd(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    scale: Tensor,
    grad: Tensor,
    first: int,
    v: int,
    ignore_index: int,
    z_loss: float,
) -> None:
    """Fills grad [N, Vp], which may be logits."""
    launch(
        _cross_entropy_shard_grad_kernel,
        (logits.shape[0],),
        logits,
        grad,
        targets,
        lse,
        scale,
        logits.stride(0),
        grad.stride(0),
        scale_stride_of(scale),
        first,
        v,
        logits.shape[1],
        ignore_index,
        z_loss,
        INPLACE=grad is logits or grad.data_ptr() == logits.data_ptr() != 0,
        ALIGNED=same_row_alignment(logits, grad),
        **config_of(logits),
    )


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """The calls that `make aot` compiles: half of GPT-2's padded vocabulary."""

    def shard(dtype: torch.dtype) -> Any:
        def call() -> None:
            logits = torch.empty(8, 25216, dtype=dtype, device="meta")
            targets = torch.empty(8, dtype=torch.int64, device="meta")
            lse = torch.empty(8, device="meta", dtype=torch.float32)
            shard_fwd(logits, targets, 25216, 25041, -100)
            out = torch.empty_like(logits)
            for grad in (out, logits):
                shard_bwd(logits, targets, lse, lse, grad, 25216, 25041, -100, 0.0)

        return call

    return [("bf16", shard(torch.bfloat16)), ("fp32", shard(torch.float32))]
