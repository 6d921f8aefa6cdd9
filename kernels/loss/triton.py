"""Cross-entropy in Triton: the rows of cross_entropy.py, complete or of a vocabulary shard.

    sweep 1   m = max(x), s = sum(exp(x - m)), online and per lane; with smoothing also sum(x)
    loss      log(s) + (1 - a) * (m - x_t) + a * (m - mean(x)) + z * lse^2,  lse = log(s) + m
    sweep 2   dx = exp(x - m) * scale * (1 + 2 * z * lse) / s - scale * a / V, at t another scalar

Only dx is saved, and one program does both sweeps of a row, so that the second reads from L2: HBM
moves each logit once and each gradient once. Sweep 2 goes backwards, from what was read last. exp
is exp2((x - m) * log2(e)): the difference first, because at logits of 1e4 a product before it would
lose what the difference holds exactly.

[Note: lanes] A tile is [U, W], and W is one 16-byte access of each thread. So the maximum and the
sums over U stay in the registers of a thread, the W lanes are merged once per row, and the loop has
neither barrier nor shuffle. The rescaling costs 1 / U of an exp2 per element: with U = 2 a logit
takes 2.5 in both sweeps, 13 for the 5 logits per clock that HBM gives a multiprocessor of an H200,
which does 16. U = 4 spills with 64 registers. Sweep 2 has nothing to merge and uses U / 2.

[Note: bytes under way] Sweep 1 needs 19 KB in flight on each multiprocessor of an H200. While the
other row is in sweep 2 it would have 16 KB for two thirds of the time, so it copies its next tile
to shared memory while it works (num_stages=3): 169 instructions instead of 147, but its 24
exponentials take longer than these. Sweep 2 reads from L2, where one access of 16 warps is enough.

[Note: any alignment] Rows of V = 50257 start at odd addresses. Sweeps start at the 16-byte boundary
at or before the row, so all tiles except the first and the last are loaded and stored by 16 bytes
for any V and stride. Only those two are masked, and so accessed element by element.

[Note: rows in flight] Rows of 100 KB (bf16, V = 50304) must stay in L2 (40 MB A100, 50 MB H200)
between the sweeps. With 16 warps of 64 registers per thread two rows are in flight on a
multiprocessor, 22 and 26 MB; with 8 warps it would be four. Rows of fp32 have 32 warps: one.

[Note: bad targets] A target that is neither ignored nor a class is found by comparison: its row
gets the loss nan and the gradient 0, and it is never used as an address.

[Note: shards] Forward is sweep 1 of a row, backward sweep 2, with lse instead of the row's own
maximum and sum. Nothing is saved. A target in another shard equals no column here and is never an
address.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.loss import TABLE, Config
from fastpar.kernels.triton_launch import cdiv, gpu_arch, launch, meta, next_power_of_2

_LOG2E = tl.constexpr(math.log2(math.e))
# Initial maximum: lower than all logits, and unlike -inf its difference to itself is 0.
LOWEST = tl.constexpr(-2.0e38)


@triton.jit
def exp_fast(x):
    """exp by the hardware's exp2."""
    return tl.exp2(x * _LOG2E)


@triton.jit
def _capped(x, cap):
    """cap * tanh(x / cap) and its derivative. Near 0 by Cephes' tanhf, whose relative error is
    small there, too; 1 - t^2 is r (2 - r) where t = 1 - r is near 1."""
    u = x / cap
    z = u * u
    p = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
    p = (p + 1.33314422036e-1) * z - 3.33332819422e-1
    near = p * z * u + u
    r = 2.0 / (exp_fast(2.0 * tl.abs(u)) + 1.0)
    t = tl.where(tl.abs(u) < 0.625, near, tl.where(u < 0.0, r - 1.0, 1.0 - r))
    return cap * t, tl.where(tl.abs(u) < 0.625, 1.0 - near * near, r * (2.0 - r))


@triton.jit
def _cap(x, cap, CAP: tl.constexpr):
    """x, under the cap if there is one."""
    if CAP:
        x, _ = _capped(x, cap)
    return x


@triton.jit
def _bounds(shift, columns, U: tl.constexpr, W: tl.constexpr):
    """Where the tiles [U, W], the tiles [1, W] and the masked tail of a row start."""
    wide = tl.where(shift > 0, W, 0)
    single = wide + tl.maximum(shift + columns - wide, 0) // (U * W) * (U * W)
    tail = single + tl.maximum(shift + columns - single, 0) // W * W
    return wide, single, tail


@triton.jit
def _step(x, top, total, logit_sum, SMOOTH: tl.constexpr):
    """The tile x [U, W] joins the statistics [W]."""
    new = tl.maximum(top, tl.max(x, 0))
    total = total * exp_fast(top - new) + tl.sum(exp_fast(x - new[None, :]), 0)
    if SMOOTH:
        logit_sum += tl.sum(x, 0)
    return new, total, logit_sum


@triton.jit
def _masked_step(
    ptr, j, shift, v, cap, top, total, logit_sum, W: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    cols = j + tl.arange(0, W)[None, :] - shift
    inside = (cols >= 0) & (cols < v)
    x = tl.load(ptr + j + tl.arange(0, W)[None, :], mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    if CAP:
        x = tl.where(inside, _cap(x, cap, CAP), -float("inf"))
    if SMOOTH:
        logit_sum += tl.sum(tl.where(inside, x, 0.0), 0)
    top, total, _ = _step(x, top, total, logit_sum, False)
    return top, total, logit_sum


@triton.jit
def row_statistics(
    ptr, shift, v, cap, U: tl.constexpr, W: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr
):
    """max, sum of exp(x - max), sum of x over the v columns of the row at ptr + shift."""
    top = tl.full([W], LOWEST, tl.float32)
    total = tl.zeros([W], tl.float32)
    logit_sum = tl.zeros([W], tl.float32)
    wide, single, tail = _bounds(shift, v, U, W)
    lanes = tl.arange(0, W)[None, :]
    unrolled = tl.arange(0, U)[:, None] * W + lanes
    for j in range(0, wide, W):
        top, total, logit_sum = _masked_step(
            ptr, j, shift, v, cap, top, total, logit_sum, W, SMOOTH, CAP
        )
    for j in tl.range(wide, single, U * W, num_stages=3):
        x = _cap(tl.load(ptr + tl.multiple_of(j, 16) + unrolled).to(tl.float32), cap, CAP)
        top, total, logit_sum = _step(x, top, total, logit_sum, SMOOTH)
    for j in range(single, tail, W):
        x = _cap(tl.load(ptr + tl.multiple_of(j, 16) + lanes).to(tl.float32), cap, CAP)
        top, total, logit_sum = _step(x, top, total, logit_sum, SMOOTH)
    for j in range(tail, shift + v, W):
        top, total, logit_sum = _masked_step(
            ptr, j, shift, v, cap, top, total, logit_sum, W, SMOOTH, CAP
        )
    row_top = tl.max(top, 0)
    return row_top, tl.sum(total * exp_fast(top - row_top), 0), tl.sum(logit_sum, 0)


@triton.jit
def _gradient(x, cols, top, factor, spread, target, chosen, cap, CAP: tl.constexpr):
    slope = 1.0
    if CAP:
        x, slope = _capped(x, cap)
    return slope * tl.where(cols == target, chosen, exp_fast(x - top) * factor - spread)


@triton.jit
def _masked_gradient(
    ptr, out_ptr, j, shift, v, width, top, factor, spread, target, chosen, cap, W: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    at = j + tl.arange(0, W)[None, :]
    cols = at - shift
    inside = (cols >= 0) & (cols < width)
    x = tl.load(ptr + at, mask=inside & (cols < v), other=0.0).to(tl.float32)
    g = _gradient(x, cols, top, factor, spread, target, chosen, cap, CAP)
    g = tl.where(cols < v, g, 0.0)
    tl.store(out_ptr + at, g.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def write_gradient(
    ptr, out_ptr, shift, v, width, top, factor, spread, target, chosen, cap, U: tl.constexpr,
    W: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The gradient of the row, from its end to its start; chosen is that of the target.

    target: int32, as columns are: a comparison of 64 bits takes two instructions more."""
    wide, single, tail = _bounds(shift, v, U, W)
    lanes = tl.arange(0, W)[None, :]
    unrolled = tl.arange(0, U)[:, None] * W + lanes
    for j in range(tail, shift + width, W):
        _masked_gradient(
            ptr, out_ptr, j, shift, v, width, top, factor, spread, target, chosen, cap, W, CAP
        )
    for i in range(0, tail - single, W):
        at = tl.multiple_of(tail - W - i, 16) + lanes
        x = tl.load(ptr + at).to(tl.float32)
        g = _gradient(x, at - shift, top, factor, spread, target, chosen, cap, CAP)
        tl.store(out_ptr + at, g.to(out_ptr.dtype.element_ty))
    for i in range(0, single - wide, U * W):
        at = tl.multiple_of(single - U * W - i, 16) + unrolled
        x = tl.load(ptr + at).to(tl.float32)
        g = _gradient(x, at - shift, top, factor, spread, target, chosen, cap, CAP)
        tl.store(out_ptr + at, g.to(out_ptr.dtype.element_ty))
    for j in range(0, wide, W):
        _masked_gradient(
            ptr, out_ptr, j, shift, v, width, top, factor, spread, target, chosen, cap, W, CAP
        )


@triton.jit
def write_zeros(out_ptr, width, W: tl.constexpr):
    """The gradient of a row that does not count."""
    for j in range(0, width, W):
        cols = j + tl.arange(0, W)
        tl.store(out_ptr + cols, tl.zeros([W], out_ptr.dtype.element_ty), mask=cols < width)


@triton.jit
def rows_of(ptr, out_ptr, row, stride, out_stride, ALIGNED: tl.constexpr):
    """(row of ptr less shift, the same of out_ptr, shift), see [Note: any alignment]."""
    start = row * stride
    shift = (start % 8).to(tl.int32)
    out_start = row * out_stride - shift
    if ALIGNED:  # otherwise the two rows do not stand alike
        out_start = tl.multiple_of(out_start, 8)
    return ptr + tl.multiple_of(start - shift, 8), out_ptr + out_start, shift


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_kernel(
    logits_ptr, grad_ptr, targets_ptr, scale_ptr, loss_ptr, stride, grad_stride, scale_stride, v,
    width, ignore_index, label_smoothing, z_loss, cap, GRAD: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, ALIGNED: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    counts = target != ignore_index
    known = (target >= 0) & (target < v)
    if counts & known:
        ptr, out_ptr, shift = rows_of(logits_ptr, grad_ptr, row, stride, grad_stride, ALIGNED)
        hit = _cap(tl.load(logits_ptr + row * stride + target).to(tl.float32), cap, CAP)
        top, total, logit_sum = row_statistics(ptr, shift, v, cap, U, W, SMOOTH, CAP)
        # A few scalars a row, in fp64: their roundings would be most of the loss's error.
        log_total = tl.log(total).to(tl.float64)
        lse = log_total + top
        loss = log_total + (top - hit.to(tl.float64)) * (1.0 - label_smoothing)
        if SMOOTH:
            loss += (top - logit_sum.to(tl.float64) / v) * label_smoothing
        tl.store(loss_ptr + row, (loss + z_loss * lse * lse).to(tl.float32))
        if GRAD:
            scale = tl.load(scale_ptr + row * scale_stride)
            p = exp_fast(hit - top) / total
            extra = (2.0 * z_loss * lse).to(tl.float32)
            spread = label_smoothing / v
            chosen = (p - 1.0) + (extra * p + (label_smoothing - spread))
            write_gradient(
                ptr, out_ptr, shift, v, width, top, scale * (1.0 + extra) / total, scale * spread,
                target.to(tl.int32), scale * chosen, cap, U // 2, W, CAP,
            )  # fmt: skip
    else:
        tl.store(loss_ptr + row, tl.where(counts, float("nan"), 0.0))
        if GRAD:
            write_zeros(grad_ptr + row * grad_stride, width, W)


@triton.jit
def _cross_entropy_bwd_kernel(
    grad_ptr, by_ptr, out_ptr, stride, out_stride, by_stride, width, INPLACE: tl.constexpr,
    ALIGNED: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    by = tl.load(by_ptr + row * by_stride)
    if (by != 1.0) | (not INPLACE):
        ptr, to_ptr, shift = rows_of(grad_ptr, out_ptr, row, stride, out_stride, ALIGNED)
        wide, single, _ = _bounds(shift, width, U, W)
        lanes = tl.arange(0, W)[None, :]
        unrolled = tl.arange(0, U)[:, None] * W + lanes
        for j in range(0, wide, W):
            inside = (j + lanes >= shift) & (j + lanes < shift + width)
            x = tl.load(ptr + j + lanes, mask=inside, other=0.0).to(tl.float32)
            tl.store(to_ptr + j + lanes, (x * by).to(out_ptr.dtype.element_ty), mask=inside)
        for j in range(wide, single, U * W):
            at = tl.multiple_of(j, 16) + unrolled
            x = tl.load(ptr + at).to(tl.float32)
            tl.store(to_ptr + at, (x * by).to(out_ptr.dtype.element_ty))
        for j in range(single, shift + width, W):
            inside = j + lanes < shift + width
            x = tl.load(ptr + j + lanes, mask=inside, other=0.0).to(tl.float32)
            tl.store(to_ptr + j + lanes, (x * by).to(out_ptr.dtype.element_ty), mask=inside)


def config(row_bytes: int, element_size: int, how: Config) -> dict[str, int]:
    """Constants and options for rows of this size; see the notes above."""
    least = 4 if row_bytes <= 16 << 10 else 8
    num_warps = min(32, max(least, next_power_of_2(cdiv(row_bytes, how.kb_per_warp << 10))))
    lanes = num_warps * 32 * (16 // element_size)
    registers = min(how.registers, 2048 // num_warps)
    return {"U": how.unroll, "W": lanes, "num_warps": num_warps, "maxnreg": registers}


def config_of(logits: Tensor) -> dict[str, int]:
    """config() for rows like those of logits."""
    size = logits.element_size()
    return config(logits.shape[1] * size, size, TABLE.get(gpu_arch(logits.device)))


def same_row_alignment(a: Tensor, b: Tensor) -> bool:
    """Whether rows of the same index have the same offset from a 16-byte boundary."""
    return (a.stride(0) - b.stride(0)) % 8 == 0


def scale_stride_of(scale: Tensor) -> int:
    """0 for a single factor, which every row then reads."""
    return scale.stride(0) if scale.dim() else 0


def cross_entropy_rows(
    logits: Tensor, targets: Tensor, grad: Tensor | None, vocab_size: int, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, scale: Tensor,
) -> Tensor:  # fmt: skip
    """The loss of each row, [N] fp32; its gradient times scale ([] or [N]) in `grad`."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    out = logits if grad is None else grad
    launch(
        _cross_entropy_kernel, (logits.shape[0],),
        logits, out, targets, scale, losses, logits.stride(0), out.stride(0),
        scale_stride_of(scale), vocab_size, logits.shape[1], ignore_index, label_smoothing, z_loss,
        softcap, GRAD=grad is not None, SMOOTH=label_smoothing != 0.0, CAP=softcap != 0.0,
        ALIGNED=same_row_alignment(logits, out), **config_of(logits),
    )  # fmt: skip
    return losses


def multiply_rows(grad: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """out = grad [N, Vp] * by ([] or [N]); out may be grad, and does not change where by is 1."""
    launch(
        _cross_entropy_bwd_kernel, (grad.shape[0],),
        grad, by, out, grad.stride(0), out.stride(0), scale_stride_of(by), grad.shape[1],
        INPLACE=out is grad, ALIGNED=same_row_alignment(grad, out), **config_of(grad),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["ignore_index", "first"])
def _cross_entropy_shard_kernel(
    logits_ptr, targets_ptr, top_ptr, total_ptr, hit_ptr, stride, first, v, ignore_index, cap,
    CAP: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target != ignore_index:
        ptr, _, shift = rows_of(logits_ptr, logits_ptr, row, stride, stride, True)
        top, total, _ = row_statistics(ptr, shift, v, cap, U, W, False, CAP)
        local = target - first
        here = (local >= 0) & (local < v)
        hit = tl.load(logits_ptr + row * stride + local, mask=here, other=0.0).to(tl.float32)
        hit = _cap(hit, cap, CAP)
        tl.store(top_ptr + row, tl.where(top == LOWEST, -float("inf"), top))
        tl.store(total_ptr + row, total)
        tl.store(hit_ptr + row, hit)
    else:
        tl.store(top_ptr + row, 0.0)
        tl.store(total_ptr + row, 1.0)
        tl.store(hit_ptr + row, 0.0)


@triton.jit(do_not_specialize=["ignore_index", "first"])
def _cross_entropy_shard_grad_kernel(
    logits_ptr, grad_ptr, targets_ptr, lse_ptr, scale_ptr, stride, grad_stride, scale_stride, first,
    v, width, ignore_index, z_loss, cap, CAP: tl.constexpr, INPLACE: tl.constexpr,
    ALIGNED: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target != ignore_index:
        ptr, out_ptr, shift = rows_of(logits_ptr, grad_ptr, row, stride, grad_stride, ALIGNED)
        local = target - first
        here = (local >= 0) & (local < v)
        hit = tl.load(logits_ptr + row * stride + local, mask=here, other=0.0).to(tl.float32)
        hit = _cap(hit, cap, CAP)
        if INPLACE:  # every warp reads hit, and none may have written over it before
            tl.debug_barrier()
        lse = tl.load(lse_ptr + row)
        scale = tl.load(scale_ptr + row * scale_stride)
        p = exp_fast(hit - lse)
        extra = 2.0 * z_loss * lse
        chosen = scale * ((p - 1.0) + extra * p)
        factor = scale * (1.0 + extra)
        column = tl.where(here, local, -1).to(tl.int32)
        write_gradient(
            ptr, out_ptr, shift, v, width, lse, factor, 0.0, column, chosen, cap, U, W, CAP
        )
    else:
        write_zeros(grad_ptr + row * grad_stride, width, W)


def shard_fwd(
    logits: Tensor, targets: Tensor, first: int, v: int, ignore_index: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum_exp, target_logit), [N] fp32."""
    top, total, hit = (
        torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    launch(
        _cross_entropy_shard_kernel, (logits.shape[0],),
        logits, targets, top, total, hit, logits.stride(0), first, v, ignore_index, softcap,
        CAP=softcap != 0.0, **config_of(logits),
    )  # fmt: skip
    return top, total, hit


def shard_bwd(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, grad: Tensor, first: int, v: int,
    ignore_index: int, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """Fills grad [N, Vp], which may be logits."""
    launch(
        _cross_entropy_shard_grad_kernel, (logits.shape[0],),
        logits, grad, targets, lse, scale, logits.stride(0), grad.stride(0), scale_stride_of(scale),
        first, v, logits.shape[1], ignore_index, z_loss, softcap, CAP=softcap != 0.0,
        INPLACE=grad is logits or grad.data_ptr() == logits.data_ptr() != 0,
        ALIGNED=same_row_alignment(logits, grad), **config_of(logits),
    )  # fmt: skip


AOT_EXEMPT = {
    f"_cross_entropy_shard_grad_kernel {label}": {
        "16-byte loads": "only the masked first and last tile of a row are loaded by element"
    }
    for label in ("bf16", "bf16 softcap")
}


def aot_calls() -> list[tuple[str, Callable[[], Any]]]:
    """The calls that `make aot` compiles: GPT-2's vocabulary, padded, not, halved; a small one."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    targets, scale, numbers = meta(8, dtype=torch.int64), meta(dtype=fp32), meta(8, dtype=fp32)

    def rows(
        v: int, width: int, dtype: torch.dtype, smoothing: float, grad: bool, cap: float = 0.0
    ) -> Any:
        logits = meta(8, width, dtype=dtype)
        how = logits if grad else None, v, -100, smoothing, 0.0, cap, scale
        return lambda: cross_entropy_rows(logits, targets, *how)

    def multiply(width: int, dtype: torch.dtype) -> Any:
        grad = meta(8, width, dtype=dtype)
        return lambda: multiply_rows(grad, scale, grad)

    def shard(dtype: torch.dtype, cap: float = 0.0) -> Any:
        logits = meta(8, 25216, dtype=dtype)

        def call() -> None:
            shard_fwd(logits, targets, 25216, 25041, -100, cap)
            for grad in (torch.empty_like(logits), logits):
                shard_bwd(logits, targets, numbers, numbers, grad, 25216, 25041, -100, 0.0, cap)

        return call

    return [
        ("padded bf16", rows(50257, 50304, bf16, 0.0, True)),
        ("padded bf16 smoothed", rows(50257, 50304, bf16, 0.1, True)),
        ("padded bf16 loss only", rows(50257, 50304, bf16, 0.0, False)),
        ("odd bf16", rows(50257, 50257, bf16, 0.0, True)),
        ("padded bf16 softcap", rows(50257, 50304, bf16, 0.0, True, 15.0)),
        ("padded fp16", rows(50257, 50304, fp16, 0.0, True)),
        ("padded fp32", rows(50257, 50304, fp32, 0.0, True)),
        ("V=4096 bf16", rows(4096, 4096, bf16, 0.0, True)),
        ("multiply bf16", multiply(50304, bf16)),
        ("multiply odd bf16", multiply(50257, bf16)),
        ("bf16", shard(bf16)),
        ("fp32", shard(fp32)),
        ("bf16 softcap", shard(bf16, 15.0)),
    ]
