"""A vocabulary split over the ranks of tp: the embedding, and the loss of the tied head.

Rank r has the rows [r * Vp/tp, (r + 1) * Vp/tp) of wte[Vp, C].

    embedding   each rank looks up the tokens in its rows, 0 for the others; the sum is x
    loss        logits[N, Vp/tp] = x @ wte.T; each row's maximum, sum of exponentials and target's
                logit of every rank, 3 numbers each, give all ranks the logsumexp of the whole row

Logits are never gathered, and exist only for a chunk of the rows, as in linear_cross_entropy: the
chunk's gradients are computed in forward, in place of its logits. Saved for backward: dx of all N
tokens and dweight of this rank's rows in fp32 (fp64 of fp64).

Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (Korthikanti et al. 2022 for the tokens)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar.axes.tensor.functional import (
    TensorParallel,
    copy_to,
    gather,
    handle_of,
    reduce_from,
    scatter,
)
from fastpar.kernels import cross_entropy_shard, cross_entropy_shard_grad, embedding, linear
from fastpar.kernels.linear import matmul
from fastpar.kernels.loss.cross_entropy import count_targets, gradient_scale, reduce_losses
from fastpar.kernels.loss.linear_cross_entropy import (
    accumulate,
    default_chunk_rows,
    scaled,
    workspace,
)
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward


def vocab_embedding(idx: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """The embedding, with a weight whose rows are split over tp.

    Args:
        idx: [B, T] int64, the same on all ranks.
        weight: [Vp/tp, C], this rank's rows.
    Returns:
        x: [B, T, C]; with sequence parallelism this rank's tokens, [N/tp, C].
    Ranks: all of tp.
    Wire: a sum of [N, C] in forward; with sequence parallelism half of that, and half in backward.
    Raises:
        ValueError: tp does not divide the tokens.
    """
    weight = tp.table(weight)
    rows = weight.shape[0]
    local = idx - tp.rank * rows
    here = (local >= 0) & (local < rows)
    x = embedding(local.where(here, 0), weight) * here[..., None]
    if tp.shared_dim is None:
        return reduce_from(x, tp)
    return scatter(x.flatten(0, 1) if tp.sequence_parallel else x, tp.shared_dim, tp, partial=True)


def vocab_linear(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """Logits of all classes, the same on all ranks.

    Args:
        x: [..., C]; with sequence parallelism this rank's tokens, [N/tp, C].
        weight: [Vp/tp, C], this rank's rows.
    Returns:
        logits: [..., Vp], [N, Vp] with sequence parallelism.
    Ranks: all of tp.
    """
    if tp.shared_dim is None:
        x = copy_to(x, tp)
    else:
        x = gather(x, -2 if tp.sequence_parallel else tp.shared_dim, tp, partial=True)
    return gather(linear(x, tp.table(weight)), -1, tp, partial=False)


def _loss_fwd(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    ignore_index: int,
    reduction: str,
    softcap: float,
    chunk_rows: int,
    need_dx: bool,
    need_dweight: bool,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, this rank's part of dx, dweight in fp32, the factor that both still need)."""
    tp = handle_of(number)
    n, first = targets.shape[0], tp.rank * weight.shape[0]
    if tp.shared_dim is not None:
        x = tp.all_gather(x, tp.shared_dim)
    x, targets = x.contiguous(), targets.contiguous()
    op = "vocab_linear_cross_entropy"
    count = count_targets(op, targets, vocab_size, ignore_index)
    scale, factor = gradient_scale(count, reduction, x.dtype)
    rows = chunk_rows or default_chunk_rows(n, x.shape[1], weight.shape[0], x.device.type)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    losses = torch.empty(n, dtype=wide, device=x.device)
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    dweight = None
    of_classes: dict[str, Any] = {"first": first, "vocab_size": vocab_size}
    of_classes |= {"ignore_index": ignore_index, "softcap": softcap}
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        out = workspace(x[part].shape[0], weight.shape[0], x)
        logits = matmul(x[part], weight.t(), out=out)
        lse, target_logit = _join(cross_entropy_shard(logits, targets[part], **of_classes), tp)
        losses[part] = torch.where(targets[part] == ignore_index, 0.0, lse - target_logit)
        if need_dx or need_dweight:
            cross_entropy_shard_grad(logits, targets[part], lse, scale, out=logits, **of_classes)
        if need_dx:
            matmul(logits, weight, out=dx[part])
        if need_dweight:
            dweight = accumulate(dweight, logits.t(), x[part])
    if dweight is None:  # no rows, or not needed
        dweight = weight.new_zeros(weight.shape if need_dweight else 0, dtype=wide)
    return reduce_losses(losses, count, reduction), dx, dweight, factor


def _join(sums: tuple[Tensor, Tensor, Tensor], tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """(logsumexp [N], target's logit [N]) of the whole rows, from every rank's three numbers.

    One exchange instead of a maximum and two sums, as latency dominates here.
    """
    top, total, target_logit = tp.all_gather(torch.stack(sums)[None], 0).unbind(1)  # [tp, N] each
    highest = top.amax(0)
    total = (total * (top - highest).exp()).sum(0)
    return total.log() + highest, target_logit.sum(0)


def _loss_fake(x, weight, targets, *options):
    need_dx, need_dweight = options[5:7]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = targets.shape[0]
    dx = x.new_empty((rows, weight.shape[1]) if need_dx else (0,))
    dweight = weight.new_empty(weight.shape if need_dweight else (0,), dtype=wide)
    return x.new_empty((), dtype=wide), dx, dweight, x.new_empty((), dtype=wide)


_loss = define_op(
    "vocab_linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size, "
    "int ignore_index, str reduction, float softcap, SymInt chunk_rows, bool need_dx, "
    "bool need_dweight, int tp)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _loss_fwd,
    _loss_fake,
    ("CPU", "CUDA"),
)


def _sum_dx(dx: Tensor, by: Tensor, number: int) -> Tensor:
    """dx of this rank's tokens from every rank's part of it."""
    tp = handle_of(number)
    dx = scaled(dx, by, dx.dtype)
    return tp.all_reduce(dx) if tp.shared_dim is None else tp.reduce_scatter(dx, tp.shared_dim)


def _sum_dx_fake(dx, by, number):
    tp, shape = handle_of(number), list(dx.shape)
    if tp.shared_dim is not None:
        shape[tp.shared_dim] //= tp.size
    return dx.new_empty(shape)


_sum_dx_op = define_op(
    "vocab_linear_cross_entropy_dx(Tensor dx, Tensor by, int tp) -> Tensor",
    _sum_dx,
    _sum_dx_fake,
    ("CPU", "CUDA"),
)


def _setup_context(ctx, inputs, output):
    ctx.need_dx, ctx.need_dweight, ctx.number = inputs[8:]
    _, dx, dweight, factor = output
    ctx.mark_non_differentiable(dx, dweight, factor)
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[1].dtype
    ctx.save_for_backward(dx, dweight, factor)


def _backward(ctx, dloss, *_):
    refuse_double_backward("linear_cross_entropy")
    dx, dweight, factor = ctx.saved_tensors
    by = dloss * factor
    grad_x = _sum_dx_op(dx, by, ctx.number) if ctx.need_dx else None
    grad_weight = None
    if ctx.need_dweight:
        grad_weight = scaled(dweight, by, ctx.dtype, saved=True)
    return grad_x, grad_weight, *[None] * 9


define_autograd(_loss, _setup_context, _backward)


def vocab_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp: TensorParallel,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """linear_cross_entropy with a weight whose rows are split over tp; see the top of the file.

    Args:
        x: [..., C], the same on all ranks; with sequence parallelism this rank's tokens, [N/tp, C].
        weight: [Vp/tp, C], this rank's rows.
        targets: [...] of all tokens, int64, in [0, vocab_size) or ignore_index; the same on all.
        vocab_size: V <= Vp, of the whole vocabulary.
        reduction: "mean" over the targets that are not ignored, or "sum".
        softcap: as in kernels.cross_entropy.
        chunk_rows: rows whose logits exist at once. Default: chosen by traffic.
    Returns:
        loss: [] fp32 (fp64 of fp64), the same on all ranks.
    Ranks: all of tp.
    Wire: 12 bytes per row and rank; a sum of [N, C] in backward. With sequence parallelism x is
        gathered, and half of the sum is sent.
    Raises:
        ValueError: shapes that do not match; another reduction; a target out of range (CPU).
        RuntimeError: a second derivative is requested.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"vocab_linear_cross_entropy: expected reduction mean or sum, got reduction={reduction}"
            "; compute losses of single rows from vocab_linear's logits"
        )
    rows = x.numel() // max(1, x.shape[-1]) * (tp.size if tp.sequence_parallel else 1)
    width = x.shape[-1] * (tp.size if tp.shared_dim == -1 else 1)
    weight = tp.table(weight)
    if weight.dim() != 2 or width != weight.shape[1] or targets.numel() != rows:
        raise ValueError(
            "vocab_linear_cross_entropy: expected x [..., C], weight [Vp/tp, C] and a target for "
            f"each of {rows} tokens, got x={list(x.shape)} weight={list(weight.shape)} "
            f"targets={list(targets.shape)}; pass this rank's rows of the weight and all targets"
        )
    grad = torch.is_grad_enabled()
    return _loss(
        x.reshape(-1, x.shape[-1]),
        weight,
        targets.reshape(-1),
        vocab_size,
        ignore_index,
        reduction,
        float(softcap),
        chunk_rows or 0,
        grad and x.requires_grad,
        grad and weight.requires_grad,
        tp.number,
    )[0]
