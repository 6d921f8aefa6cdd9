"""Cross-entropy of logits; loss and gradient from one reading of them.

    lse_i = logsumexp(logits_i)
    loss_i = lse_i - (1 - s) * logits_i[t_i] - s * mean(logits_i) + z * lse_i^2
    dlogits_i = softmax(logits_i) * (1 + 2 * z * lse_i) - (1 - s) * onehot(t_i) - s / V

s is the label smoothing, z the z-loss; both means and sums are over the V real classes, padding
columns are left out and get the gradient 0. loss_i and its gradient are 0 in ignored rows. Forward
computes the gradient next to the loss, while the row is in cache, and keeps it; backward multiplies
it by the incoming gradient, in place and only where that is not 1. So a training step reads the
logits once and writes their gradient once, where the usual three kernels move 3 times as much.

cross_entropy_rows() is also what linear_cross_entropy runs on each chunk of its logits.

[Note: fp16]
A gradient divided by the number of targets underflows in fp16 before a loss scale could save it. So
fp16 gradients are kept undivided, and backward applies 1 / targets together with the incoming
gradient.

[Note: in place]
With inplace=True the gradient overwrites the logits, which halves the memory. Nothing else may need
them afterwards. A leaf and rows that share memory are refused; a node of the graph that has kept
the logits for its own backward raises there, because their version counter moves.
"""

import math

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import FLOATS, triton_module, use_cpp, use_triton, wide
from fastpar.kernels.op import (
    check_dense,
    define_autograd,
    define_op,
    in_transform,
    is_plain,
    refuse_double_backward,
)

REDUCTIONS = ("mean", "sum", "none")


def check_loss(
    op: str,
    columns: int,
    shape: torch.Size,
    like: Tensor,
    targets: Tensor,
    vocab_size: int | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> int:
    """The checks that both losses share; returns vocab_size."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{op}: expected mean, sum or none, got reduction={reduction}; choose one of these"
        )
    check_dense(op, "targets", targets)
    if targets.shape != shape or targets.dtype != torch.int64:
        raise ValueError(
            f"{op}: expected int64 targets of shape {list(shape)}, got "
            f"targets={list(targets.shape)} {targets.dtype}; pass one target for each row"
        )
    if targets.device != like.device:
        raise ValueError(
            f"{op}: expected targets on {like.device}, got targets.device={targets.device}; "
            "move them"
        )
    vocab_size = columns if vocab_size is None else vocab_size
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"{op}: expected vocab_size in 1..{columns} (columns of the logits), "
            f"got vocab_size={vocab_size}; pad the weight or correct vocab_size"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"{op}: expected label_smoothing in [0, 1], got label_smoothing={label_smoothing}; "
            "0 is the plain loss"
        )
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(
            f"{op}: expected a finite z_loss >= 0, got z_loss={z_loss}; 0 is the plain loss"
        )
    return vocab_size


def count_targets(op: str, targets: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Targets that are not ignored, [] fp32; on CPU a target out of range is an error."""
    if targets.device.type != "cpu":
        return (targets != ignore_index).sum().float()
    if _C is not None:
        valid = _C.count_targets(targets, vocab_size, ignore_index)
    else:
        used = targets != ignore_index
        wrong = (used & ((targets < 0) | (targets >= vocab_size))).nonzero()
        valid = -int(wrong[0]) - 1 if wrong.numel() else int(used.sum())
    if valid < 0:
        i = -valid - 1
        raise ValueError(
            f"{op}: expected targets in [0, {vocab_size}) or ignore_index={ignore_index}, "
            f"got targets[{i}]={targets[i].item()}; check the tokenizer against vocab_size"
        )
    return torch.tensor(float(valid), dtype=torch.float32, device="cpu")


def gradient_scale(count: Tensor, reduction: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(what gradients are multiplied by at once, what they still lack), see [Note: fp16]."""
    count = count.to(wide(dtype))
    one = torch.ones_like(count)
    if reduction != "mean":
        return one, one
    inverse = 1.0 / count.clamp(min=1.0)
    return (one, inverse) if dtype == torch.float16 else (inverse, one)


def reduce_losses(losses: Tensor, count: Tensor, reduction: str) -> Tensor:
    """The loss [] of losses [N]; losses themselves for "none"."""
    if reduction == "none":
        return losses
    loss = losses.sum(dtype=torch.float64)
    return (loss / count if reduction == "mean" else loss).to(losses.dtype)


def _rows_torch(
    logits: Tensor,
    targets: Tensor,
    grad: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: Tensor,
) -> Tensor:
    valid = (targets != ignore_index)[:, None]
    inside = (targets >= 0) & (targets < vocab_size)
    picked = torch.where(inside, targets, 0)[:, None]
    real = logits[:, :vocab_size]
    x = real.to(wide(real.dtype))  # [R, V]
    top = x.amax(-1, keepdim=True)
    distance = top - x.gather(1, picked)  # of the target from the top
    if label_smoothing:
        distance = (1.0 - label_smoothing) * distance
        distance = distance + label_smoothing * (top - x.mean(-1, keepdim=True))
    fresh = x.data_ptr() != real.data_ptr() or (
        grad is not None and grad.data_ptr() == logits.data_ptr()
    )
    softmax = x.sub_(top).exp_() if fresh else (x - top).exp_()
    total = softmax.sum(-1, keepdim=True, dtype=torch.float64).to(x.dtype)
    lse = total.log() + top
    losses = total.log() + distance
    if z_loss:
        losses = losses + z_loss * lse * lse
    # Neither ignored nor a class: the loss says so, nothing is read or written out of bounds.
    losses = torch.where(inside[:, None], losses, math.nan)
    losses = torch.where(valid, losses, 0.0)[:, 0]
    if grad is not None:
        spread = label_smoothing / vocab_size
        softmax.div_(total)
        chosen = softmax.gather(1, picked)
        chosen = (chosen - 1.0) + (2.0 * z_loss * lse * chosen + (label_smoothing - spread))
        if z_loss:
            softmax.mul_(1.0 + 2.0 * z_loss * lse)
        if spread:
            softmax.sub_(spread)
        softmax.scatter_(1, picked, chosen)
        softmax.mul_(scale if scale.dim() == 0 else scale[:, None])
        softmax.masked_fill_(~(valid & inside[:, None]), 0.0)
        if softmax.data_ptr() != grad.data_ptr():
            grad[:, :vocab_size].copy_(softmax)
        grad[:, vocab_size:].zero_()
    return losses


def cross_entropy_rows(
    op: str,
    logits: Tensor,
    targets: Tensor,
    grad: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: Tensor,
) -> Tensor:
    """The loss of each row, [N] fp32 (fp64 for fp64); its gradient times scale ([] or [N]) in
    `grad`.

    logits [N, Vp], last dimension contiguous; grad the same, or logits themselves, or None.
    targets [N] contiguous, checked on CPU.
    """
    if use_triton(op, logits):
        cross_entropy_triton = triton_module("cross_entropy_triton")
        return cross_entropy_triton.cross_entropy_rows(
            logits, targets, grad, vocab_size, ignore_index, label_smoothing, z_loss, scale
        )
    if not use_cpp(op, logits):
        return _rows_torch(
            logits, targets, grad, vocab_size, ignore_index, label_smoothing, z_loss, scale
        )
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device="cpu")
    options = (vocab_size, ignore_index, label_smoothing, z_loss)
    _C.cross_entropy_rows(logits, targets, scale, grad, losses, *options, torch.get_num_threads())
    return losses


def _rows_contiguous(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def cross_entropy_fwd(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dlogits, the factor that dlogits still lack); dlogits [0] if not needed."""
    grad = logits.new_empty(logits.shape) if need_grad else None
    loss, factor = _fwd_into(
        grad, logits, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss
    )
    return loss, logits.new_empty(0) if grad is None else grad, factor


def _fwd_into(
    grad, logits, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss
) -> tuple[Tensor, Tensor]:
    targets, logits = targets.contiguous(), _rows_contiguous(logits)
    count = count_targets("cross_entropy", targets, vocab_size, ignore_index)
    scale, factor = gradient_scale(count, reduction, logits.dtype)
    losses = cross_entropy_rows(
        "cross_entropy",
        logits,
        targets,
        grad,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        scale,
    )
    return reduce_losses(losses, count, reduction), factor


def cross_entropy_fwd_(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """(loss, the factor that the gradient still lacks); the gradient overwrites logits."""
    outputs = _fwd_into(
        logits, logits, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss
    )
    torch.autograd.graph.increment_version(logits)
    return outputs


def cross_entropy_bwd(dlogits: Tensor, by: Tensor) -> Tensor:
    """dlogits [N, Vp] * by, which is [] or [N]."""
    return multiply_rows(dlogits, by, torch.empty_like(dlogits))


def multiply_rows(grad: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """out = grad [N, Vp] * by ([] or [N]); out may be grad."""
    if use_triton("cross_entropy", grad):
        cross_entropy_triton = triton_module("cross_entropy_triton")
        return cross_entropy_triton.multiply_rows(grad, by, out)
    if out is grad and by.dim() == 0 and by.device.type == "cpu" and by.item() == 1.0:
        return out
    return torch.mul(grad, by if by.dim() == 0 else by[:, None], out=out)


def _fake_loss(logits: Tensor, reduction: str) -> Tensor:
    shape = logits.shape[:1] if reduction == "none" else ()
    return logits.new_empty(shape, dtype=wide(logits.dtype))


def _fake(logits, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss, need_grad):
    grad = logits.new_empty(logits.shape if need_grad else (0,))
    return _fake_loss(logits, reduction), grad, logits.new_empty((), dtype=wide(logits.dtype))


def _fake_(logits, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss):
    return _fake_loss(logits, reduction), logits.new_empty((), dtype=wide(logits.dtype))


_OPTIONS = (
    "Tensor targets, SymInt vocab_size, int ignore_index, str reduction, float label_smoothing, "
    "float z_loss"
)
_cross_entropy = define_op(
    f"cross_entropy(Tensor logits, {_OPTIONS}, bool need_grad) -> (Tensor, Tensor, Tensor)",
    cross_entropy_fwd,
    _fake,
    ("CPU", "CUDA"),
)
_cross_entropy_ = define_op(
    f"cross_entropy_(Tensor(a!) logits, {_OPTIONS}) -> (Tensor, Tensor)",
    cross_entropy_fwd_,
    _fake_,
    ("CPU", "CUDA"),
)
_cross_entropy_bwd = define_op(
    "cross_entropy_bwd(Tensor dlogits, Tensor by) -> Tensor",
    cross_entropy_bwd,
    lambda dlogits, by: torch.empty_like(dlogits),
    ("CPU", "CUDA"),
)
# The loss that cross_entropy_ has computed, as a function of the logits that it has overwritten.
_attach = define_op(
    "cross_entropy_attach(Tensor dlogits, Tensor loss, Tensor factor) -> Tensor",
    lambda dlogits, loss, factor: loss.clone(),
    lambda dlogits, loss, factor: torch.empty_like(loss),
    ("CPU", "CUDA"),
)


def _setup_context(ctx, inputs, output):
    _, dlogits, factor = output
    ctx.save_for_backward(dlogits, factor)


def _times_incoming(ctx, dloss: Tensor) -> Tensor:
    refuse_double_backward("cross_entropy")
    dlogits, factor = ctx.saved_tensors
    by = dloss * factor
    # The gradient is this node's own memory: it is scaled there unless it will be asked for again.
    keep = torch._C._autograd._get_current_graph_task_keep_graph
    if not (is_plain(dlogits) and is_plain(by)) or keep():
        return _cross_entropy_bwd(dlogits, by)
    return multiply_rows(dlogits, by, dlogits)


def _backward(ctx, dloss, *_):
    return _times_incoming(ctx, dloss), None, None, None, None, None, None, None


define_autograd(_cross_entropy, _setup_context, _backward, by_products=2)


def _attach_setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0].detach(), inputs[2])


def _attach_backward(ctx, dloss):
    return _times_incoming(ctx, dloss), None, None


define_autograd(_attach, _attach_setup_context, _attach_backward)


def _check_logits(op: str, logits: Tensor) -> None:
    check_dense(op, "logits", logits)
    if logits.dim() < 1 or logits.dtype not in FLOATS:
        raise ValueError(
            f"{op}: expected logits [..., V] in bf16, fp16, fp32 or fp64, got "
            f"logits={list(logits.shape)} {logits.dtype}; cast them"
        )


def _check_inplace(logits: Tensor) -> Tensor:
    """logits as the [N, Vp] view that can be overwritten, outside the graph."""
    if logits.is_leaf:
        raise ValueError(
            "cross_entropy: expected logits that were computed for this loss only, got "
            "inplace=True with a leaf; pass inplace=False"
        )
    columns = logits.shape[-1]
    rows: Tensor | None = None
    if logits.numel() == 0 or (logits.stride(-1) == 1 or columns == 1):
        try:
            rows = logits.detach().view(-1, columns)
        except RuntimeError:
            rows = None
    if rows is None or (rows.shape[0] > 1 and rows.stride(0) < columns):
        raise ValueError(
            "cross_entropy: expected logits whose rows are evenly apart in memory, got "
            f"inplace=True with strides={list(logits.stride())}; pass inplace=False"
        )
    return rows


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy over the last dimension, for F.cross_entropy on [N, V] logits.

    Args:
        logits: [..., Vp], bf16 | fp16 | fp32 | fp64. Rows are read where they are if they are
            evenly apart and their elements contiguous; others are copied. fp64 is computed in fp64
            throughout, by torch ops.
        targets: [...], int64, in [0, vocab_size) or ignore_index. Checked on CPU; on a GPU the loss
            of a row with any other target is nan and its gradient 0.
        vocab_size: V <= Vp; columns from V on are padding: left out of every sum, gradient 0.
            None means Vp.
        ignore_index: targets whose rows count neither in the loss nor in its mean.
        reduction: "mean" over the targets that are not ignored (nan if there are none, like torch;
            the gradient is 0 then), "sum", or "none" for the loss of each row.
        label_smoothing: share of the target that is spread evenly over the V classes.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of each row.
        inplace: the gradient overwrites the logits, see [Note: in place]; without gradients
            (torch.no_grad) they are left alone.
    Returns:
        loss: [], or targets' shape for "none", fp32 (fp64 for fp64). The gradient is kept for
            backward.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a target out of range (CPU), options
            outside their range, inplace where the logits may be needed or share memory.
        RuntimeError: a second derivative is asked for.
    Traffic: N * Vp elements read and as many written (none under no_grad); backward as much again
        only where the incoming gradient is not 1.
    Deterministic: yes, bitwise, forward and backward.
    Oracle: fastpar.kernels.reference.cross_entropy_ref
    Source: Szegedy et al. 2015, arXiv 1512.00567 (smoothing); Chowdhery et al. 2022,
        arXiv 2204.02311 (z-loss)
    """
    _check_logits("cross_entropy", logits)
    vocab_size = check_loss(
        "cross_entropy",
        logits.shape[-1],
        logits.shape[:-1],
        logits,
        targets,
        vocab_size,
        reduction,
        label_smoothing,
        z_loss,
    )
    flat = targets.reshape(-1)
    options = (vocab_size, ignore_index, reduction, float(label_smoothing), float(z_loss))
    need_grad = torch.is_grad_enabled() and (logits.requires_grad or in_transform())
    if need_grad and inplace:
        loss, factor = _cross_entropy_(_check_inplace(logits), flat, *options)
        # Taken afterwards: autograd gives a view whose base has changed a backward that copies.
        loss = _attach(logits.view(-1, logits.shape[-1]), loss, factor)
    else:
        rows = logits.reshape(-1, logits.shape[-1])
        loss = _cross_entropy(rows, flat, *options, need_grad)[0]
    return loss.view(targets.shape) if reduction == "none" else loss
