"""Linear + cross-entropy without the full logits.

    logits = x @ weight.T                             [N, V]
    loss_i, dlogits_i: as in cross_entropy.py, summed or averaged over the valid targets
    dx = dlogits @ weight,  dweight = dlogits.T @ x

For each chunk of rows the logits are computed into one workspace, turned into their gradient in
place and multiplied into dx and dweight, all in forward: logits are computed once and held for one
chunk at a time. Backward only multiplies by the incoming gradient. Saved for backward: dx, and
dweight in fp32, in which the chunks are summed. With reduction="none" the incoming gradient differs
by row: backward computes the logits of each chunk again (4 GEMMs instead of 3). Saved: the inputs.

[Note: chunk size]
A chunk reads weight twice and reads and writes the fp32 dweight, for 6 * R * V * C operations on
its R rows: the more rows, the smaller the share of this traffic. On a CPU (one EPYC 9005 core,
V = 50304, forward and backward of 1024 rows, ms for R = 64, 128, 256, 512, 1024)
    C = 384    1019   817   686   629   637      (F.linear + F.cross_entropy: 1284)
    C = 768    1959  1542  1373  1178  1199      (2529)
so R is at most 512, and for C < 512, where 341 rows are as fast, at most 352: 71 MB of logits.
On CUDA, derived, not measured: in 16 bits the traffic is 2 * F / (B * R) of the GEMM time on a
machine of F flop/s and B bytes/s (F / B is 150 to 230), at most 6 % for R = 8192, 22 % for 2048.
R is between these, as large as fits in 14 % of eager PyTorch's peak of 6 * N * V bytes (15 % when
rounded up to 256 rows, the GEMM's tile) with 2 * R * V of logits, 4 * V * C of dweight and
2 * N * C of dx: R = 0.42 * N - 2 * C - N * C / V.

[Note: dweight]
16-bit matrices are multiplied and added to the fp32 sum without a rounding to 16 bits and without a
temporary of dweight's size. On CUDA torch.addmm(dweight, a, b, out_dtype=torch.float32,
out=dweight) does so inside the GEMM, on CPUs with AMX our product of bf16. Elsewhere blocks of rows
are multiplied in fp32: V = 50304, R = 352, C = 384, one core of a Xeon, 80 to 130 ms; torch's own
product of bf16 takes 90 with AMX, 170 with AVX-512's bf16 instructions, 650 without, 1300 with
AVX2, of fp16 170, 5000, 9000 and 7000.
"""

import threading

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import FLOATS, use_cpp, use_triton, wide
from fastpar.kernels.linear import add_matmul_, matmul, wide_product
from fastpar.kernels.loss.cross_entropy import (
    check_loss,
    count_targets,
    cross_entropy_rows,
    gradient_scale,
    reduce_losses,
)
from fastpar.kernels.op import (
    check_dense,
    define_autograd,
    define_kernels,
    define_op,
    in_transform,
    is_plain,
    may_need_grad,
)

_local = threading.local()  # ranks may be threads of one process: one workspace each


def workspace(rows: int, columns: int, like: Tensor) -> Tensor:
    """[rows, columns] of like's dtype and device; on CPU the same memory in every call."""
    if like.device.type != "cpu":
        return like.new_empty(rows, columns)
    buffers = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get(like.dtype)
    if buffer is None or buffer.numel() < rows * columns:
        with torch.inference_mode(False):  # later calls may be in another mode than the first
            buffer = buffers[like.dtype] = like.new_empty(rows * columns)
    return buffer[: rows * columns].view(rows, columns)


def workspace_bytes() -> int:
    """Bytes that this thread keeps on the CPU between calls."""
    own = torch.ops.fastpar._workspace_bytes() if _C is not None else 0
    return own + sum(buffer.nbytes for buffer in _local.__dict__.get("buffers", {}).values())


def release_workspaces() -> None:
    """Frees the memory that this thread keeps between calls on a CPU."""
    _local.__dict__.clear()
    if _C is not None:
        torch.ops.fastpar._release_workspaces()


def default_chunk_rows(n: int, c: int, v: int, device: str) -> int:
    """Rows of a chunk, see [Note: chunk size]: the fewest equal chunks of at most the limit."""
    if device == "cpu":
        limit = 512 if c >= 512 else 352
    else:
        limit = min(8192, max(2048, int(0.42 * n - 2 * c - n * c / v)))
    chunks = max(1, -(-n // limit))
    rows = max(1, -(-n // chunks))
    if device != "cpu" and chunks > 1:
        rows = -(-rows // 256) * 256
    return rows


def _run_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, vocab_size: int, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, chunk_rows: int, need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(losses [N], dx, dweight in fp32), the gradients times scale ([] or [N])."""
    n, c = x.shape
    rows = chunk_rows or default_chunk_rows(n, c, weight.shape[0], x.device.type)
    losses = torch.empty(n, dtype=wide(x.dtype), device=x.device)
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    dweight = None
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        out = workspace(x[part].shape[0], weight.shape[0], x)
        logits = matmul(x[part], weight.t(), out=out)  # [R, Vp]
        losses[part] = cross_entropy_rows(
            "linear_cross_entropy", logits, targets[part],
            logits if need_dx or need_dweight else None, vocab_size, ignore_index, label_smoothing,
            z_loss, softcap, scale if scale.dim() == 0 else scale[part],
        )  # fmt: skip
        if need_dx:
            matmul(logits, weight, out=dx[part])
        if need_dweight:
            dweight = accumulate(dweight, logits.t(), x[part])
    if dweight is None:  # no rows, or not needed
        dweight = weight.new_zeros(weight.shape if need_dweight else 0, dtype=wide(x.dtype))
    return losses, dx, dweight


def accumulate(dweight: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """dweight + a @ b in fp32 (fp64 for fp64), in place; None stands for 0; [Note: dweight]."""
    if a.dtype == wide(a.dtype):
        return matmul(a, b) if dweight is None else add_matmul_(dweight, a, b)
    return wide_product(a, b, dweight)


def linear_cross_entropy_fwd(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, reduction: str,
    label_smoothing: float, z_loss: float, softcap: float, chunk_rows: int, need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, dx, dweight in fp32, the factor still to be applied to dx and dweight). Gradients that
    are not needed are [0], with reduction "none" both. chunk_rows 0: chosen here."""
    x, targets = x.contiguous(), targets.contiguous()
    count = count_targets("linear_cross_entropy", targets, vocab_size, ignore_index)
    scale, factor = gradient_scale(count, reduction, x.dtype)
    now = reduction != "none"
    losses, dx, dweight = _run_chunks(
        x, weight, targets, scale, vocab_size, ignore_index, label_smoothing, z_loss, softcap,
        chunk_rows, need_dx and now, need_dweight and now,
    )  # fmt: skip
    return reduce_losses(losses, count, reduction), dx, dweight, factor


def linear_cross_entropy_bwd(
    dlosses: Tensor, x: Tensor, weight: Tensor, targets: Tensor, *options
) -> tuple[Tensor, Tensor]:
    """dx and dweight (fp32) for the gradients dlosses [N]; [0] for those not needed. options:
    vocab_size to need_dweight of linear_cross_entropy_fwd, without reduction."""
    x, targets = x.contiguous(), targets.contiguous()
    scale = dlosses.to(wide(x.dtype)).contiguous()
    if x.dtype != torch.float16:
        return _run_chunks(x, weight, targets, scale, *options)[1:]
    # As in [Note: fp16] of cross_entropy.py: the stored gradients of the logits stay near 1.
    largest = scale.abs().amax() if scale.numel() else scale.new_ones(())
    largest = torch.where(largest > 0, largest, 1.0)
    _, dx, dweight = _run_chunks(x, weight, targets, scale / largest, *options)
    return dx.mul_(largest), dweight.mul_(largest)


def _fake(
    x, weight, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss, softcap,
    chunk_rows, need_dx, need_dweight,
):  # fmt: skip
    none = reduction == "none"
    loss = x.new_empty(x.shape[:1] if none else (), dtype=wide(x.dtype))
    dx, dweight = _fake_gradients(x, weight, need_dx and not none, need_dweight and not none)
    return loss, dx, dweight, x.new_empty((), dtype=wide(x.dtype))


def _fake_gradients(x, weight, need_dx, need_dweight):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else x.new_empty(0)
    return dx, weight.new_empty(weight.shape if need_dweight else (0,), dtype=wide(x.dtype))


def _bwd_fake(dlosses, x, weight, targets, *options):
    return _fake_gradients(x, weight, *options[-2:])


_OPTIONS = (
    "float label_smoothing, float z_loss, float softcap, SymInt chunk_rows, bool need_dx, "
    "bool need_dweight"
)
_composed = define_op(
    "linear_cross_entropy_composed(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size, "
    f"int ignore_index, str reduction, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    linear_cross_entropy_fwd,
    _fake,
)
_composed_bwd = define_op(
    "linear_cross_entropy_composed_bwd(Tensor dlosses, Tensor x, Tensor weight, Tensor targets, "
    f"SymInt vocab_size, int ignore_index, {_OPTIONS}) -> (Tensor, Tensor)",
    linear_cross_entropy_bwd,
    _bwd_fake,
)


def _setup_context(ctx, inputs, output):
    x, weight, targets, vocab_size, ignore_index, reduction, *factors = inputs[:9]
    chunk_rows, ctx.need_dx, ctx.need_dweight = inputs[9:]
    _, dx, dweight, factor = output
    ctx.none = reduction == "none"
    ctx.dtype = weight.dtype
    if ctx.none:
        ctx.save_for_backward(x, weight, targets)
        ctx.options = (vocab_size, ignore_index, *factors, chunk_rows)
    else:
        ctx.save_for_backward(dx, dweight, factor)


def scaled(grad: Tensor, by: Tensor, dtype: torch.dtype, *, saved: bool = False) -> Tensor:
    """grad * by, as dtype; grad itself if that is the same (on CPU, where checking is free). saved:
    without retain_graph grad is not read again, so the result is written there; an earlier backward
    must therefore have returned other memory."""
    kept = saved and torch._C._autograd._get_current_graph_task_keep_graph()
    if by.device.type == "cpu" and is_plain(by) and by.item() == 1.0:
        return grad.to(dtype, copy=kept)
    once = saved and not kept
    # On a CPU torch.mul(out=) of another dtype would compute in a temporary of grad's size.
    here = grad.dtype == dtype or grad.device.type == "cpu"
    if once and here and type(grad) is Tensor and not in_transform():
        return grad.mul_(by).to(dtype)
    if grad.dtype == dtype or not (is_plain(grad) and is_plain(by)):
        return (grad * by).to(dtype)
    # Rounded as it is written: no product of dweight's size in fp32 besides dweight.
    return torch.mul(grad, by, out=torch.empty_like(grad, dtype=dtype))


def _backward(ctx, dloss, *_):
    wanted = ctx.needs_input_grad[0] > ctx.need_dx, ctx.needs_input_grad[1] > ctx.need_dweight
    if any(wanted):
        raise RuntimeError(
            "linear_cross_entropy: expected a call that was recorded with gradients, got a backward"
            " of one recorded without; record it where gradients are enabled and required"
        )
    if ctx.none:
        needed = (ctx.need_dx, ctx.need_dweight)
        dx, dweight = _composed_bwd(dloss, *ctx.saved_tensors, *ctx.options, *needed)
        by = torch.ones((), device=dloss.device, dtype=torch.float32)
    else:
        dx, dweight, factor = ctx.saved_tensors
        by = dloss * factor
    grad_x = scaled(dx, by, dx.dtype, saved=True) if ctx.need_dx else None
    grad_weight = scaled(dweight, by, ctx.dtype, saved=True) if ctx.need_dweight else None
    return grad_x, grad_weight, *[None] * 10


define_autograd(_composed, _setup_context, _backward, by_products=3, once="linear_cross_entropy")


# The op of csrc/torch, whose backward returns its gradients.


def _run(x, weight, targets, vocab_size, ignore_index, reduction, smoothing, z_loss, cap, *how):
    """On a GPU; kernels/op.py define_kernels says for which calls."""
    v = _check(x, weight, targets, vocab_size, reduction, smoothing, z_loss, cap)
    rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    options = ignore_index, reduction, smoothing, z_loss, cap, *how
    loss, dx, dweight, factor = linear_cross_entropy_fwd(rows, weight, flat, v, *options)
    loss = loss.view(targets.shape) if reduction == "none" else loss
    return loss, dx.view(x.shape) if dx.numel() else dx, dweight, factor


def _run_bwd(dlosses, x, weight, targets, vocab_size, *options):
    v = weight.shape[0] if vocab_size is None else vocab_size
    rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    dx, dweight = linear_cross_entropy_bwd(dlosses.reshape(-1), rows, weight, flat, v, *options)
    return dx.view(x.shape) if dx.numel() else dx, dweight


def _fake_of_any(
    x, weight, targets, vocab_size, ignore_index, reduction, smoothing, z_loss, cap, chunk_rows,
    *need,
):  # fmt: skip
    _check(x, weight, targets, vocab_size, reduction, smoothing, z_loss, cap)
    none = reduction == "none"
    loss = x.new_empty(targets.shape if none else (), dtype=wide(x.dtype))
    gradients = _fake_gradients(x, weight, *(n and not none for n in need))
    return loss, *gradients, x.new_empty((), dtype=wide(x.dtype))


_linear_cross_entropy = define_kernels("linear_cross_entropy", _run, _fake_of_any)
define_kernels("linear_cross_entropy_bwd", _run_bwd, _bwd_fake)


def _check(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int | None, reduction: str,
    label_smoothing: float, z_loss: float, softcap: float,
) -> int:  # fmt: skip
    """The checks of a call; returns vocab_size. csrc/torch/loss.cpp allows the same."""
    check_dense("linear_cross_entropy", "x", x)
    check_dense("linear_cross_entropy", "weight", weight)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy: expected x [..., C] and weight [Vp, C], got "
            f"x={list(x.shape)} weight={list(weight.shape)}; pass the weight as F.linear takes it"
        )
    if x.dtype != weight.dtype or x.dtype not in FLOATS:
        raise ValueError(
            "linear_cross_entropy: expected x and weight of one dtype, bf16, fp16, fp32 or fp64, "
            f"got x={x.dtype} weight={weight.dtype}; cast one of them"
        )
    if x.device != weight.device:
        raise ValueError(
            "linear_cross_entropy: expected x and weight on one device, got "
            f"x.device={x.device} weight.device={weight.device}; move one of them"
        )
    return check_loss(
        "linear_cross_entropy", weight.shape[0], x.shape[:-1], x, targets, vocab_size, reduction,
        label_smoothing, z_loss, softcap,
    )  # fmt: skip


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, chunk_rows: int | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits x @ weight.T, which are never in memory all at once.

    Like F.cross_entropy(F.linear(x, weight)[..., :vocab_size].flatten(0, -2), targets.flatten()).

    Args:
        x: [..., C], bf16 | fp16 | fp32 | fp64. For fp64, everything that is fp32 below is fp64.
        weight: [Vp, C], dtype of x. Rows from vocab_size on are padding: excluded from the softmax,
            their gradient is 0. They must be finite.
        targets, vocab_size, ignore_index, label_smoothing, z_loss, softcap: as in cross_entropy().
        reduction: as there; the backward of "none" computes the logits once more.
        chunk_rows: rows whose logits exist at once; None chooses by traffic. Other sizes sum
            dweight in another order.
    Returns:
        loss: [], or targets' shape for "none", fp32. Gradients are kept for backward: dx (x's size)
            and dweight (fp32).
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a target out of range (CPU), options
            outside their range.
        RuntimeError: a second derivative is requested.
    Traffic: per chunk of R rows 3 GEMMs, about 5 * R * Vp elements of logits, weight read twice,
        dweight (fp32) read and written once. Memory: R * Vp elements, dx and dweight.
    Deterministic: yes, bitwise, for a given chunk_rows.
    Oracle: fastpar.kernels.reference.linear_cross_entropy_ref
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(
            f"linear_cross_entropy: expected chunk_rows >= 1, got chunk_rows={chunk_rows}; "
            "drop it to use the default"
        )
    need = may_need_grad(x), may_need_grad(weight)
    op = "linear_cross_entropy"
    if use_cpp(op, x) or use_triton(op, x):
        loss, *_ = _linear_cross_entropy(
            x, weight, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss,
            softcap, chunk_rows or 0, *need,
        )  # fmt: skip
        return loss
    factors = float(label_smoothing), float(z_loss), float(softcap)
    vocab_size = _check(x, weight, targets, vocab_size, reduction, *factors)
    options = reduction, *factors, chunk_rows or 0
    tensors = x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1)
    loss, *_ = _composed(*tensors, vocab_size, ignore_index, *options, *need)
    return loss.view(targets.shape) if reduction == "none" else loss
