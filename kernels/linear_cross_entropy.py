"""Linear + cross-entropy without the full logits.

    logits = x @ weight.T            [N, V]
    loss_i = logsumexp(logits_i) - logits_i[target_i],  summed or averaged over the valid targets
    dlogits = (softmax(logits) - onehot(targets)) * scale,  0 in ignored rows and padding columns
    dx = dlogits @ weight,  dweight = dlogits.T @ x

The rows are cut into chunks. For each chunk the logits are computed into one workspace, turned into
their gradient in place and multiplied into dx and dweight, all in forward: logits are computed once
and never held for more than one chunk. Backward only multiplies by the incoming gradient. Saved for
backward: dx, and dweight in fp32, in which the chunks are summed.

[Note: chunk size]
Every chunk reads weight twice and reads and writes the fp32 dweight: for fp32 16 * V * C bytes
next to 6 * R * V * C operations for R rows. Against a machine of F flop/s and B bytes/s the extra
traffic is 16 * F / (6 * B * R) of the GEMM time, whatever V and C are. One EPYC 9005 core (F / B
is 9 flop a byte), V = 50304, forward and backward of 1024 rows, ms for R = 64, 128, 256, 512, 1024:
    C = 384    1019   817   686   629   637      (F.linear + F.cross_entropy: 1284)
    C = 768    1959  1542  1373  1178  1199      (2529)
So R is at most 512 on CPU: 103 MB of logits; for C < 512, where 341 rows are as fast as 512 (2048
rows, two threads: 692 and 697 ms; at C = 768 1419 and 1300), at most 352: 71 MB. On CUDA F / B is
about 230 in bf16 and a chunk moves 20 bytes an element of dweight: 8192 rows keep the extra below a
tenth (derived, not measured).

[Note: fp16]
A gradient divided by the number of targets underflows in fp16 before a loss scale could save it. So
fp16 tiles hold the undivided gradient, dx and dweight are kept undivided, and backward applies
1 / targets together with the incoming gradient, in fp32 for dweight.
"""

import threading

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import (
    DTYPE_CODES,
    define_autograd,
    define_op,
    refuse_double_backward,
    use_cpp,
)
from fastpar.kernels.linear import add_matmul_, matmul

_local = threading.local()  # ranks may be threads of one process: one workspace each


def _workspace(name: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """[rows, columns] of like's dtype and device; on CPU the same memory in every call."""
    if like.device.type != "cpu":
        return like.new_empty(rows, columns)
    buffers = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((name, like.dtype))
    if buffer is None or buffer.numel() < rows * columns:
        buffer = buffers[name, like.dtype] = like.new_empty(rows * columns)
    return buffer[: rows * columns].view(rows, columns)


def default_chunk_rows(n: int, x: Tensor) -> int:
    """Rows of a chunk, see [Note: chunk size]: the fewest equal chunks of at most the limit."""
    limit = 8192
    if x.device.type == "cpu":
        limit = 512 if x.shape[-1] >= 512 else 352
    chunks = max(1, -(-n // limit))
    return max(1, -(-n // chunks))


def _tile_torch(
    logits: Tensor, vocab_size: int, targets: Tensor, ignore_index: int, scale: Tensor, grad: bool
) -> Tensor:
    """The loss of each row; with `grad`, logits become their gradient. Composed of torch ops."""
    valid = targets != ignore_index
    picked = torch.where(valid, targets, 0)[:, None]
    wide = logits[:, :vocab_size].float()  # [R, V]
    lse = wide.logsumexp(-1, keepdim=True)
    losses = torch.where(valid, (lse - wide.gather(1, picked))[:, 0], 0.0)
    if grad:
        if wide.data_ptr() == logits.data_ptr():
            wide.sub_(lse).exp_()
        else:
            wide = wide.sub_(lse).exp_()
        wide.scatter_add_(1, picked, torch.full_like(lse, -1.0))
        wide.mul_(scale)
        wide.masked_fill_(~valid[:, None], 0.0)
        logits[:, :vocab_size].copy_(wide)
        logits[:, vocab_size:].zero_()
    return losses


def linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    ignore_index: int,
    mean: bool,
    chunk_rows: int,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dx, dweight in fp32, the factor that dx and dweight still lack).

    x [N, C], weight [Vp, C], targets [N]. What is not needed is [0]. chunk_rows 0: chosen here.
    """
    n = x.shape[0]
    x, targets = x.contiguous(), targets.contiguous()
    cpp = use_cpp("linear_cross_entropy", x)
    if x.device.type == "cpu":
        valid = _C.count_targets(targets.data_ptr(), n, vocab_size, ignore_index)
        if valid < 0:
            i = -valid - 1
            raise ValueError(
                f"linear_cross_entropy: expected targets in [0, {vocab_size}) or "
                f"ignore_index={ignore_index}, got targets[{i}]={targets[i].item()}; "
                "check the tokenizer against vocab_size"
            )
        count = torch.tensor(float(valid))
    else:
        count = (targets != ignore_index).sum().float()
    # [Note: fp16]
    deferred = mean and x.dtype == torch.float16
    one = torch.ones_like(count)
    inverse = 1.0 / count.clamp(min=1.0) if mean else one
    scale, factor = (one, inverse) if deferred else (inverse, one)

    grad = need_dx or need_dweight
    losses = torch.empty(n, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    dweight = None
    rows = chunk_rows or default_chunk_rows(n, x)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        out = _workspace("logits", x[part].shape[0], weight.shape[0], x)
        logits = matmul(x[part], weight.t(), out=out)  # [R, Vp]
        if cpp:
            _C.cross_entropy_tile(
                logits.data_ptr(),
                DTYPE_CODES[x.dtype],
                logits.shape[0],
                vocab_size,
                logits.shape[1],
                targets[part].data_ptr(),
                ignore_index,
                scale.item(),
                losses[part].data_ptr(),
                grad,
                torch.get_num_threads(),
            )
        else:
            losses[part] = _tile_torch(logits, vocab_size, targets[part], ignore_index, scale, grad)
        if need_dx:
            matmul(logits, weight, out=dx[part])
        if need_dweight:
            dweight = _accumulate(dweight, logits.t(), x[part])
    if dweight is None:  # no rows, or not needed
        dweight = weight.new_zeros(weight.shape if need_dweight else 0, dtype=torch.float32)
    loss = losses.sum(dtype=torch.float64)
    if mean:
        loss = loss / count
    return loss.float(), dx, dweight, factor


def _accumulate(dweight: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """dweight + a @ b in fp32, in place; None stands for 0."""
    if a.dtype == torch.float32:
        return matmul(a, b) if dweight is None else add_matmul_(dweight, a, b)
    if a.device.type == "cuda":
        product = torch.mm(a, b, out_dtype=torch.float32)
    else:
        product = torch.mm(a, b, out=_workspace("dweight", a.shape[0], b.shape[1], a))
    return product.float() if dweight is None else dweight.add_(product)


def _fake(x, weight, targets, vocab_size, ignore_index, mean, chunk_rows, need_dx, need_dweight):
    scalar = x.new_empty((), dtype=torch.float32)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else x.new_empty(0)
    dweight = weight.new_empty(weight.shape if need_dweight else (0,), dtype=torch.float32)
    return scalar, dx, dweight, torch.empty_like(scalar)


_linear_cross_entropy = define_op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size, "
    "int ignore_index, bool mean, SymInt chunk_rows, bool need_dx, bool need_dweight)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    linear_cross_entropy_fwd,
    _fake,
    ("CPU", "CUDA"),
)


def _setup_context(ctx, inputs, output):
    _, dx, dweight, factor = output
    ctx.mark_non_differentiable(dx, dweight, factor)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dx, dweight, factor)
    ctx.need_dx, ctx.need_dweight = inputs[7], inputs[8]
    ctx.dtype = inputs[1].dtype


def _scaled(grad: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * by, as dtype; grad itself where that is the same (on CPU, where looking is free)."""
    if by.device.type == "cpu" and type(by) is Tensor and by.item() == 1.0:
        return grad.to(dtype)
    return (grad * by).to(dtype)


def _backward(ctx, dloss, *_):
    refuse_double_backward("linear_cross_entropy")
    dx, dweight, factor = ctx.saved_tensors
    by = dloss * factor
    grad_x = _scaled(dx, by, dx.dtype) if ctx.need_dx else None
    grad_weight = _scaled(dweight, by, ctx.dtype) if ctx.need_dweight else None
    return grad_x, grad_weight, None, None, None, None, None, None, None


define_autograd(_linear_cross_entropy, _setup_context, _backward)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """Cross-entropy of the logits x @ weight.T, which never exist at once.

    For F.cross_entropy(F.linear(x, weight)[..., :vocab_size].flatten(0, -2), targets.flatten()).

    Args:
        x: [..., C], bf16 | fp16 | fp32.
        weight: [Vp, C], dtype of x. Rows from vocab_size on are padding: left out of the softmax,
            their gradient is 0. They must be finite.
        targets: [...], int64, in [0, vocab_size) or ignore_index (checked on CPU).
        vocab_size: V <= Vp; None means Vp.
        ignore_index: targets that count neither in the loss nor in its mean.
        reduction: "mean" over the targets that are not ignored (nan if there are none, like torch;
            the gradients are 0 then), or "sum".
        chunk_rows: rows whose logits exist at once; None chooses by traffic. Other sizes sum
            dweight in another order.
    Returns:
        loss: [], fp32. Gradients are kept for backward: dx (x's size) and dweight (fp32).
    Raises:
        ValueError: shapes or dtypes that do not fit, a target out of range, an unknown reduction.
        RuntimeError: a second derivative is asked for.
    Traffic: per chunk of R rows 3 GEMMs, about 5 * R * Vp elements of logits, weight read twice,
        dweight (fp32) read and written once. Memory: R * Vp elements, dx and dweight.
    Deterministic: yes, bitwise, for a given chunk_rows.
    Oracle: fastpar.kernels.reference.linear_cross_entropy_ref
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"linear_cross_entropy: expected mean or sum, got reduction={reduction}; "
            "per-token losses would need all logits at once"
        )
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy: expected x [..., C] and weight [Vp, C], got "
            f"x={list(x.shape)} weight={list(weight.shape)}; pass the weight as F.linear takes it"
        )
    if x.dtype != weight.dtype or x.dtype not in DTYPE_CODES:
        raise ValueError(
            "linear_cross_entropy: expected x and weight of one dtype, bf16, fp16 or fp32, got "
            f"x={x.dtype} weight={weight.dtype}; cast one of them"
        )
    if targets.shape != x.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"linear_cross_entropy: expected int64 targets of shape {list(x.shape[:-1])}, got "
            f"targets={list(targets.shape)} {targets.dtype}; pass one target for each row of x"
        )
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(
            f"linear_cross_entropy: expected vocab_size in 1..{weight.shape[0]} (rows of weight), "
            f"got vocab_size={vocab_size}; pad weight or correct vocab_size"
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(
            f"linear_cross_entropy: expected chunk_rows >= 1, got chunk_rows={chunk_rows}; "
            "leave it out to have it chosen"
        )
    grad = torch.is_grad_enabled()
    loss, _, _, _ = _linear_cross_entropy(
        x.reshape(-1, x.shape[-1]),
        weight,
        targets.reshape(-1),
        vocab_size,
        ignore_index,
        reduction == "mean",
        chunk_rows or 0,
        grad and x.requires_grad,
        grad and weight.requires_grad,
    )
    return loss
