"""Cross-entropy of logits: loss and gradient from a single reading of them.

    lse_i = logsumexp(logits_i)
    loss_i = lse_i - (1 - s) * logits_i[t_i] - s * mean(logits_i) + z * lse_i^2
    dlogits_i = softmax(logits_i) * (1 + 2 * z * lse_i) - (1 - s) * onehot(t_i) - s / V
    with a softcap c these are of  y = c tanh(logits / c),  dlogits = dy * (1 - (y / c)^2)

s is the label smoothing, z the z-loss; means and sums are over the V real classes, padding columns
get the gradient 0. loss_i and its gradient are 0 in ignored rows. Forward computes the gradient
together with the loss, while the row is in cache, and keeps it; backward multiplies it by the
incoming gradient, in place and only if that is not 1. So a training step reads the logits once and
writes their gradient once; the usual three kernels move 3 times as much. linear_cross_entropy runs
cross_entropy_rows() on each chunk of its logits.

[Note: shards] If the vocabulary is sharded, each rank holds the logits of the classes from `first`
on. With an all-reduce MAX of m and two all-reduce SUMs, [N] numbers each,

    m, s, t = cross_entropy_shard(logits, targets, first=first)
    M = MAX(m),  lse = log(SUM(s * exp(m - M))) + M,  loss_i = lse_i - SUM(t)_i  where not ignored
    dlogits = cross_entropy_shard_grad(logits, targets, lse, scale, first=first)

the logits are never gathered, also chunk by chunk with linear_cross_entropy. The caller runs the
collectives. Neither function is differentiable: they are the forward and the backward of the
caller's own op.

[Note: fp16] A gradient divided by the number of targets underflows in fp16 before a loss scale
could save it. So fp16 gradients are kept undivided, and backward applies 1 / targets together with
the incoming gradient.

[Note: in place] With inplace=True the gradient overwrites the logits, which halves the memory. A
leaf and rows that share memory are refused; a node of the graph that kept the logits for its own
backward raises there, because their version counter changes.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import FLOATS, triton_module, use_cpp, use_triton, wide
from fastpar.kernels.op import (
    check_dense,
    define_autograd,
    define_kernels,
    define_op,
    is_plain,
    may_need_grad,
)

REDUCTIONS = ("mean", "sum", "none")


def _check_targets(op: str, targets: Tensor, shape: torch.Size, like: Tensor) -> None:
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


def check_loss(
    op: str, columns: int, shape: torch.Size, like: Tensor, targets: Tensor, vocab_size: int | None,
    reduction: str, label_smoothing: float, z_loss: float, softcap: float,
) -> int:  # fmt: skip
    """The checks that both losses share; returns vocab_size."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{op}: expected mean, sum or none, got reduction={reduction}; choose one of these"
        )
    check_dense(op, "targets", targets)
    _check_targets(op, targets, shape, like)
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
    check_softcap(op, softcap)
    return vocab_size


def check_softcap(op: str, softcap: float) -> None:
    """Refuses what logits cannot be capped by."""
    if not 0.0 <= softcap < math.inf:
        raise ValueError(
            f"{op}: expected a finite softcap >= 0, got softcap={softcap}; 0 is the plain loss"
        )


def _capped(logits: Tensor, v: int, softcap: float) -> tuple[Tensor, Tensor]:
    """The first v columns of softcap * tanh(logits / softcap), in the dtype of sums, and its
    slope."""
    y = torch.tanh(logits[:, :v].to(wide(logits.dtype)) / softcap)
    return softcap * y, 1.0 - y * y


def _uncap(grad: Tensor, slope: Tensor, out: Tensor) -> None:
    """out [N, Vp] = the gradient of logits, from that of the capped ones."""
    out[:, : slope.shape[1]].copy_(grad * slope)
    out[:, slope.shape[1] :].zero_()


def count_targets(op: str, targets: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Number of targets that are not ignored, [] fp32; on CPU a target out of range is an error."""
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
    return torch.full((), float(valid), dtype=torch.float32, device="cpu")


def gradient_scale(count: Tensor, reduction: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(factor of gradients now, factor applied in backward), see [Note: fp16]."""
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
    logits: Tensor, targets: Tensor, grad: Tensor | None, vocab_size: int, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, scale: Tensor,
) -> Tensor:  # fmt: skip
    if softcap:
        y, slope = _capped(logits, vocab_size, softcap)
        how = vocab_size, ignore_index, label_smoothing, z_loss, 0.0, scale
        losses = _rows_torch(y, targets, None if grad is None else y, *how)
        if grad is not None:
            _uncap(y, slope, grad)
        return losses
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
    # Neither ignored nor a class: the loss becomes nan, nothing is accessed out of bounds.
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
    op: str, logits: Tensor, targets: Tensor, grad: Tensor | None, *options: Any
) -> Tensor:
    """The loss of each row, [N] fp32 (fp64 for fp64); its gradient times scale ([] or [N]) in
    `grad`: like logits [N, Vp] with contiguous rows, or logits themselves, or None. targets [N]
    contiguous, checked on CPU. options: vocab_size to scale, as in _rows_torch()."""
    if use_triton(op, logits):
        return triton_module("loss.triton").cross_entropy_rows(logits, targets, grad, *options)
    if not use_cpp(op, logits):
        return _rows_torch(logits, targets, grad, *options)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device="cpu")
    *others, scale = options
    _C.cross_entropy_rows(logits, targets, scale, grad, losses, *others, torch.get_num_threads())
    return losses


def cross_entropy_fwd(
    logits: Tensor, targets: Tensor, *options: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(loss, dlogits if needed, the factor still to be applied to them). options: vocab_size to
    softcap, as in _fwd_into(), and need_grad."""
    *others, need_grad = options
    grad = logits.new_empty(logits.shape) if need_grad else None
    loss, factor = _fwd_into(grad, logits, targets, *others)
    return loss, grad, factor


def _fwd_into(
    grad: Tensor | None, logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int,
    reduction: str, label_smoothing: float, z_loss: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    targets = targets.contiguous()
    if logits.stride(1) != 1 and logits.shape[1] != 1:
        logits = logits.contiguous()
    count = count_targets("cross_entropy", targets, vocab_size, ignore_index)
    scale, factor = gradient_scale(count, reduction, logits.dtype)
    options = vocab_size, ignore_index, label_smoothing, z_loss, softcap, scale
    losses = cross_entropy_rows("cross_entropy", logits, targets, grad, *options)
    return reduce_losses(losses, count, reduction), factor


def cross_entropy_fwd_(logits: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """(loss, the factor still to be applied to the gradient); the gradient overwrites logits."""
    outputs = _fwd_into(logits, logits, targets, *options)
    torch.autograd.graph.increment_version(logits)
    return outputs


def multiply_rows(grad: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """out = grad [N, Vp] * by ([] or [N]); out may be grad."""
    if use_triton("cross_entropy", grad):
        return triton_module("loss.triton").multiply_rows(grad, by, out)
    if out is grad and by.dim() == 0 and by.device.type == "cpu" and by.item() == 1.0:
        return out
    return torch.mul(grad, by if by.dim() == 0 else by[:, None], out=out)


def _scaled(dlogits: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """multiply_rows() of logits of any dimensions."""
    columns = dlogits.shape[-1]
    by = by.reshape(-1) if by.dim() else by
    multiply_rows(dlogits.view(-1, columns), by, out.view(-1, columns))
    return out


def _fake_(logits, targets, vocab_size, ignore_index, reduction, *_):
    shapes = logits.shape[:1] if reduction == "none" else (), ()
    return tuple(logits.new_empty(shape, dtype=wide(logits.dtype)) for shape in shapes)


def _fake(logits, *args):
    loss, factor = _fake_(logits, *args)
    return loss, logits.new_empty(logits.shape if args[-1] else (0,)), factor


_OPTIONS = (
    "Tensor targets, SymInt vocab_size, int ignore_index, str reduction, float label_smoothing, "
    "float z_loss, float softcap"
)
_composed = define_op(
    f"cross_entropy_composed(Tensor logits, {_OPTIONS}, bool need_grad)"
    " -> (Tensor, Tensor, Tensor)",
    cross_entropy_fwd,
    _fake,
)
_cross_entropy_ = define_op(
    f"cross_entropy_(Tensor(a!) logits, {_OPTIONS}) -> (Tensor, Tensor)", cross_entropy_fwd_, _fake_
)
_cross_entropy_bwd = define_op(
    "cross_entropy_bwd(Tensor dlogits, Tensor by) -> Tensor",
    lambda dlogits, by: _scaled(dlogits, by, torch.empty_like(dlogits)),
    lambda dlogits, by: torch.empty_like(dlogits),
)


def _scale_(dlogits: Tensor, by: Tensor) -> None:
    _scaled(dlogits, by, dlogits)


define_op("cross_entropy_bwd_(Tensor(a!) dlogits, Tensor by) -> ()", _scale_)
# The loss of cross_entropy_, as a function of the logits that it has overwritten.
_attach = define_op(
    "cross_entropy_attach(Tensor dlogits, Tensor loss, Tensor factor) -> Tensor",
    lambda dlogits, loss, factor: loss.clone(),
    lambda dlogits, loss, factor: torch.empty_like(loss),
)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])


def _backward(ctx, dloss, *_):
    dlogits, factor = ctx.saved_tensors
    by = dloss * factor
    # The gradient is this node's own memory: it is scaled in place unless it is needed again.
    keep = torch._C._autograd._get_current_graph_task_keep_graph
    if not (is_plain(dlogits) and is_plain(by)) or keep():
        dlogits = _cross_entropy_bwd(dlogits, by)
    else:
        multiply_rows(dlogits, by, dlogits)
    return dlogits, *[None] * (len(ctx.needs_input_grad) - 1)


def _attach_setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0].detach(), inputs[2])


define_autograd(_composed, _setup_context, _backward, by_products=2, once="cross_entropy")
define_autograd(_attach, _attach_setup_context, _backward, once="cross_entropy")


def _run(
    logits, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss, softcap,
    need_grad,
):  # fmt: skip
    """Triton's kernel; kernels/op.py define_kernels says for which calls."""
    v = _check(logits, targets, vocab_size, reduction, label_smoothing, z_loss, softcap)
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    how = v, ignore_index, reduction, label_smoothing, z_loss, softcap, need_grad
    loss, grad, factor = cross_entropy_fwd(rows, flat, *how)
    grad = logits.new_empty(0) if grad is None else grad.view(logits.shape)
    return loss.view(targets.shape) if reduction == "none" else loss, grad, factor


def _fake_of_any(
    logits, targets, vocab_size, ignore_index, reduction, label_smoothing, z_loss, softcap,
    need_grad,
):  # fmt: skip
    _check(logits, targets, vocab_size, reduction, label_smoothing, z_loss, softcap)
    dtype = wide(logits.dtype)
    loss = logits.new_empty(targets.shape if reduction == "none" else (), dtype=dtype)
    grad = logits.new_empty(logits.shape if need_grad else (0,))
    return loss, grad, logits.new_empty((), dtype=dtype)


_cross_entropy = define_kernels("cross_entropy", _run, _fake_of_any)


def _check(
    logits: Tensor, targets: Tensor, vocab_size: int | None, reduction: str, label_smoothing: float,
    z_loss: float, softcap: float,
) -> int:  # fmt: skip
    """The checks of a call; returns vocab_size. csrc/torch/loss.cpp is_usual() allows the same."""
    _check_logits("cross_entropy", logits)
    return check_loss(
        "cross_entropy", logits.shape[-1], logits.shape[:-1], logits, targets, vocab_size,
        reduction, label_smoothing, z_loss, softcap,
    )  # fmt: skip


def _check_logits(op: str, logits: Tensor) -> None:
    check_dense(op, "logits", logits)
    if logits.dim() < 1 or logits.dtype not in FLOATS:
        raise ValueError(
            f"{op}: expected logits [..., V] in bf16, fp16, fp32 or fp64, got "
            f"logits={list(logits.shape)} {logits.dtype}; cast them"
        )


def _even_rows(x: Tensor) -> Tensor | None:
    """x as an [N, Vp] view that can be overwritten, None if its rows are not evenly spaced."""
    columns = x.shape[-1]
    if x.numel() and x.stride(-1) != 1 and columns != 1:
        return None
    try:
        rows = x.detach().view(-1, columns) if columns else x.detach().flatten(0, -2)
    except RuntimeError:
        return None
    return None if rows.shape[0] > 1 and rows.stride(0) < columns else rows


def _check_inplace(logits: Tensor) -> Tensor:
    """logits as an [N, Vp] view that can be overwritten, outside the graph."""
    if logits.is_leaf:
        raise ValueError(
            "cross_entropy: expected logits that were computed for this loss only, got "
            "inplace=True with a leaf; pass inplace=False"
        )
    rows = _even_rows(logits)
    if rows is None:
        raise ValueError(
            "cross_entropy: expected logits whose rows are evenly spaced in memory, got "
            f"inplace=True with strides={list(logits.stride())}; pass inplace=False"
        )
    return rows


def cross_entropy(
    logits: Tensor, targets: Tensor, *, vocab_size: int | None = None, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float = 0.0, inplace: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy over the last dimension, like F.cross_entropy on [N, V] logits.

    Args:
        logits: [..., Vp], bf16 | fp16 | fp32 | fp64 (by torch ops). Rows that are not evenly spaced
            or not contiguous are copied.
        targets: [...], int64, in [0, vocab_size) or ignore_index. Checked on CPU; on a GPU the loss
            of a row with any other target is nan and its gradient 0.
        vocab_size: V <= Vp, None: Vp; columns from V on are padding: in no sum, gradient 0.
        ignore_index: targets whose rows count neither in the loss nor in its mean.
        reduction: "mean" over the targets that are not ignored (nan if there are none, like torch;
            the gradient is 0 then), "sum", or "none" for the loss of each row.
        label_smoothing: share of the target that is spread evenly over the V classes.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of each row.
        softcap: the loss is that of softcap * tanh(logits / softcap), in fp32; 0: none.
        inplace: the gradient overwrites the logits (not without gradients); [Note: in place].
    Returns:
        loss: [], or targets' shape for "none", fp32 (fp64 for fp64). The gradient is kept.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a target out of range (CPU), options
            outside their range, inplace if the logits may be needed or share memory.
        RuntimeError: a second derivative is requested.
    Traffic: N * Vp elements read and as many written (none under no_grad); backward as much again
        only if the incoming gradient is not 1.
    Deterministic: yes, bitwise, forward and backward.
    Oracle: fastpar.kernels.reference.cross_entropy_ref
    Source: Szegedy et al. 2015, arXiv 1512.00567 (smoothing); Chowdhery et al. 2022,
        arXiv 2204.02311 (z-loss)
    """
    need_grad = may_need_grad(logits)
    if not inplace and (use_cpp("cross_entropy", logits) or use_triton("cross_entropy", logits)):
        how = ignore_index, reduction, label_smoothing, z_loss, softcap, need_grad
        return _cross_entropy(logits, targets, vocab_size, *how)[0]
    vocab_size = _check(logits, targets, vocab_size, reduction, label_smoothing, z_loss, softcap)
    flat = targets.reshape(-1)
    factors = float(label_smoothing), float(z_loss), float(softcap)
    options = vocab_size, ignore_index, reduction, *factors
    if need_grad and inplace and not torch.jit.is_tracing():
        loss, factor = _cross_entropy_(_check_inplace(logits), flat, *options)
        # Taken afterwards: autograd gives a view whose base has changed a backward that copies.
        loss = _attach(logits.view(-1, logits.shape[-1]), loss, factor)
    else:
        rows = logits.reshape(-1, logits.shape[-1])
        loss = _composed(rows, flat, *options, need_grad)[0]
    return loss.view(targets.shape) if reduction == "none" else loss


# A shard of the vocabulary; see [Note: shards].


def cross_entropy_shard_fwd(
    logits: Tensor, targets: Tensor, first: int, v: int, ignore_index: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum_exp, target_logit) of logits [N, Vp] whose first v columns are classes."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    targets = targets.contiguous()
    if use_triton("cross_entropy_shard", logits):
        how = first, v, ignore_index, softcap
        return triton_module("loss.triton").shard_fwd(logits, targets, *how)
    if use_cpp("cross_entropy_shard", logits):
        top, total, target_logit = (
            torch.empty(logits.shape[0], dtype=torch.float32, device="cpu") for _ in range(3)
        )
        options = (first, v, ignore_index, softcap, torch.get_num_threads())
        _C.cross_entropy_shard(logits, targets, top, total, target_logit, *options)
        return top, total, target_logit
    valid, local = targets != ignore_index, targets - first
    here = valid & (local >= 0) & (local < v)
    x = logits[:, :v].to(wide(logits.dtype))
    if softcap:
        x, _ = _capped(logits, v, softcap)
    if v == 0:
        top = torch.full_like(targets, -torch.inf, dtype=x.dtype)
        total, target_logit = torch.zeros_like(top), torch.zeros_like(top)
    else:
        top = x.amax(-1)
        total = (x - torch.where(top == -torch.inf, 0.0, top)[:, None]).exp().sum(-1)
        picked = x.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
        target_logit = torch.where(here, picked, 0.0)
    return torch.where(valid, top, 0.0), torch.where(valid, total, 1.0), target_logit


def _write_gradient(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, first: int, v: int,
    ignore_index: int, z_loss: float, softcap: float,
) -> Tensor:  # fmt: skip
    """grad, in which dlogits [N, Vp] are written; it may be logits. lse [N], scale [] or [N]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    targets, lse, scale = targets.contiguous(), lse.contiguous(), scale.to(lse.dtype)
    if use_triton("cross_entropy_shard_grad", logits):
        triton_module("loss.triton").shard_bwd(
            logits, targets, lse, scale, grad, first, v, ignore_index, z_loss, softcap
        )
    elif use_cpp("cross_entropy_shard_grad", logits):
        options = (first, v, ignore_index, z_loss, softcap, torch.get_num_threads())
        _C.cross_entropy_shard_grad(logits, targets, lse, scale, grad, *options)
    elif softcap:
        y, slope = _capped(logits, v, softcap)
        how = first, v, ignore_index, z_loss, 0.0
        _uncap(_write_gradient(torch.empty_like(y), y, targets, lse, scale, *how), slope, grad)
    else:
        valid, local = targets != ignore_index, targets - first
        x = (logits[:, :v] - lse[:, None]).exp() * (1.0 + 2.0 * z_loss * lse[:, None])
        x -= (torch.arange(v, device=local.device) == local[:, None]).to(x.dtype)
        x *= scale if scale.dim() == 0 else scale[:, None]
        grad[:, :v].copy_(x.masked_fill_(~valid[:, None], 0.0))
        grad[:, v:].zero_()
    return grad


_cross_entropy_shard = define_op(
    "cross_entropy_shard(Tensor logits, Tensor targets, SymInt first, SymInt v, int ignore_index, "
    "float softcap) -> (Tensor, Tensor, Tensor)",
    cross_entropy_shard_fwd,
    lambda x, *_: tuple(x.new_empty(x.shape[:1], dtype=wide(x.dtype)) for _ in range(3)),
)
_cross_entropy_shard_grad = define_op(
    "cross_entropy_shard_grad(Tensor logits, Tensor targets, Tensor lse, Tensor scale, "
    "SymInt first, SymInt v, int ignore_index, float z_loss, float softcap) -> Tensor",
    lambda logits, *how: _write_gradient(logits.new_empty(logits.shape), logits, *how),
    lambda logits, *_: logits.new_empty(logits.shape),
)
_cross_entropy_shard_grad_ = define_op(
    "cross_entropy_shard_grad_(Tensor(a!) out, Tensor logits, Tensor targets, Tensor lse, "
    "Tensor scale, SymInt first, SymInt v, int ignore_index, float z_loss, float softcap) -> ()",
    lambda out, *how: torch.autograd.graph.increment_version(_write_gradient(out, *how)),
)


def _columns(
    op: str, logits: Tensor, targets: Tensor, first: int, vocab_size: int | None, softcap: float
) -> int:
    """The number of columns that are classes."""
    check_softcap(op, softcap)
    _check_logits(op, logits)
    _check_targets(op, targets, logits.shape[:-1], logits)
    if first < 0:
        raise ValueError(
            f"{op}: expected first >= 0, got first={first}; pass the class of column 0"
        )
    columns = logits.shape[-1]
    return columns if vocab_size is None else max(0, min(columns, vocab_size - first))


def cross_entropy_shard(
    logits: Tensor, targets: Tensor, *, first: int = 0, vocab_size: int | None = None,
    ignore_index: int = -100, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One shard's part of the loss: max, sum of exponentials, logit of the target.

    Args:
        logits: [..., Vp], bf16 | fp16 | fp32 | fp64: the classes first .. first + Vp - 1.
        targets: [...], int64, classes of the full vocabulary or ignore_index.
        first: the class of column 0.
        vocab_size: classes of the full vocabulary: columns from vocab_size - first on are padding
            (possibly all of them). None: there is no padding.
        ignore_index: targets of rows that do not count.
        softcap: as in cross_entropy.
    Returns:
        max [N], sum_exp [N] of exp(logits - max), target_logit [N], 0 where another shard holds the
        target; all fp32 (fp64 for fp64). In ignored rows 0, 1, 0; if all columns are padding -inf,
        0, 0.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, first < 0.
    Traffic: N * Vp elements read.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.cross_entropy_shard_ref
    """
    v = _columns("cross_entropy_shard", logits, targets, first, vocab_size, softcap)
    rows = logits.detach().reshape(targets.numel(), logits.shape[-1])
    return _cross_entropy_shard(rows, targets.reshape(-1), first, v, ignore_index, float(softcap))


def cross_entropy_shard_grad(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, *, first: int = 0,
    vocab_size: int | None = None, ignore_index: int = -100, z_loss: float = 0.0,
    softcap: float = 0.0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One shard's dlogits = scale * (softmax * (1 + 2 * z_loss * lse) - onehot).

    Args:
        logits, targets, first, vocab_size, ignore_index: as for cross_entropy_shard.
        lse: [N], fp32 (fp64 for fp64), logsumexp over the full vocabulary.
        scale: [] or [N], the incoming gradient, divided by the number of targets for a mean.
        z_loss, softcap: as in cross_entropy, for a loss that adds z_loss * lse^2; lse is that of
            capped logits.
        out: shape, dtype and device of logits, rows contiguous and evenly spaced: the memory to
            write and return. It may be logits itself; other overlaps give a wrong result.
    Returns:
        dlogits: [..., Vp], dtype of logits; 0 in padding columns and ignored rows.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, first < 0.
    Traffic: N * Vp elements read and as many written.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.cross_entropy_shard_grad_ref
    """
    op = "cross_entropy_shard_grad"
    v = _columns(op, logits, targets, first, vocab_size, softcap)
    n = targets.numel()
    dtype = wide(logits.dtype)
    if lse.shape != (n,) or lse.dtype != dtype or scale.shape not in ((), (n,)):
        raise ValueError(
            f"{op}: expected {dtype} lse [{n}] and scale [] or [{n}], got lse={list(lse.shape)} "
            f"{lse.dtype} scale={list(scale.shape)}; pass one value for each row"
        )
    if lse.device != logits.device or scale.device != logits.device:
        raise ValueError(
            f"{op}: expected lse and scale on {logits.device}, got lse.device={lse.device} "
            f"scale.device={scale.device}; move them"
        )
    rows = logits.detach().reshape(n, logits.shape[-1])
    tensors = (rows, targets.reshape(-1), lse.detach(), scale.detach())
    options = (first, v, ignore_index, float(z_loss), float(softcap))
    if out is None:
        return _cross_entropy_shard_grad(*tensors, *options).view(logits.shape)
    _cross_entropy_shard_grad_(_out_rows(op, out, logits), *tensors, *options)
    return out


def _out_rows(op: str, out: Tensor, logits: Tensor) -> Tensor:
    """out as the [N, Vp] view that is written."""
    if out.shape != logits.shape or out.dtype != logits.dtype or out.device != logits.device:
        raise ValueError(
            f"{op}: expected out like logits ({list(logits.shape)}, {logits.dtype}, "
            f"{logits.device}), got out={list(out.shape)} {out.dtype} on {out.device}; "
            "make it with torch.empty_like(logits)"
        )
    rows = _even_rows(out)
    if rows is None:
        raise ValueError(
            f"{op}: expected out with contiguous, evenly spaced rows, got out.stride()="
            f"{out.stride()}; make it with torch.empty_like(logits)"
        )
    return rows
