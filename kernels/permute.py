"""Sorts tokens by expert, and combines them again.

Slot n * K + k is the k-th choice of token n. The slots are sorted by expert, stably: slots of one
expert stay in token order.

    permute   rows[j] = x[order[j] // K]               dx[n] = sum over k of drows[j of n, k]
    combine   y[n] = sum over k of weights[n, k] * rows[j of n, k]
              drows[j] = weights of order[j] * dy[order[j] // K]
              dweights[n, k] = dy[n] . rows[j of n, k]

With a capacity an expert keeps only its first slots; dropped slots have no row, and count as 0.
Sums go over k in order, in fp32, and are rounded once: no atomics, and no index_add, which does not
guarantee an order for equal indices.
Saved for backward: order; combine: also rows and weights.
Source: Lepikhin et al. 2020, arXiv 2006.16668
"""

import functools

import torch
from torch import Tensor

from fastpar.kernels.backend import wide
from fastpar.kernels.op import define_autograd, define_op


def _places(order: Tensor, slots: int) -> Tensor:
    """The row of each slot; len(order) if it was dropped."""
    places = order.new_full((slots,), len(order))
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _row(rows: Tensor, places: Tensor) -> Tensor:
    """rows[places], 0 for dropped slots, in the dtype of sums."""
    there = (places < len(rows))[:, None]
    if not len(rows):
        return rows.new_zeros(len(places), rows.shape[1], dtype=wide(rows.dtype))
    found = rows[places.clamp(max=len(rows) - 1)].to(wide(rows.dtype))
    return torch.where(there, found, found.new_zeros(()))


def permute_fwd(
    x: Tensor, experts: Tensor, n_expert: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [M, C], order [M] and counts [E] of x [N, C] and experts [N, K]."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(n_expert, dtype=torch.int64, device=x.device)
    counts += (flat[:, None] == torch.arange(n_expert, device=x.device)).sum(0)
    if capacity is not None:
        first = counts.cumsum(0) - counts
        place = torch.arange(len(order), device=x.device) - first[flat[order]]
        order, counts = order[place < capacity], counts.clamp(max=capacity)
    return x[order // experts.shape[1]], order, counts


def permute_bwd(drows: Tensor, order: Tensor, n: int, k: int) -> Tensor:
    """dx [N, C]."""
    places = _places(order, n * k).view(n, k)
    return functools.reduce(Tensor.add_, (_row(drows, at) for at in places.T)).to(drows.dtype)


def combine_fwd(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """y [N, C]."""
    places = _places(order, weights.numel()).view(weights.shape)
    parts = (_row(rows, at) * weight[:, None] for at, weight in zip(places.T, weights.T))
    return functools.reduce(Tensor.add_, parts).to(rows.dtype)


def combine_bwd(
    dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor, need_rows: bool, need_weights: bool
) -> tuple[Tensor, Tensor]:
    """drows [M, C] and dweights [N, K]; [0] for those not needed."""
    n, k = weights.shape
    grad = dy.to(wide(dy.dtype))
    drows, dweights = rows.new_empty(0), weights.new_empty(0)
    if need_rows:
        drows = (weights.flatten()[order, None] * grad[order // k]).to(rows.dtype)
    if need_weights:
        places = _places(order, n * k).view(n, k)
        products = [(grad * _row(rows, places[:, choice])).sum(1) for choice in range(k)]
        dweights = torch.stack(products, 1).to(weights.dtype)
    return drows, dweights


def _permute_fake(x, experts, n_expert, capacity):
    slots = experts.shape[0] * experts.shape[1]
    if capacity is not None:
        slots = torch.library.get_ctx().new_dynamic_size()
    order = experts.new_empty(slots)
    return x.new_empty(slots, x.shape[1]), order, experts.new_empty(n_expert)


def _combine_bwd_fake(dy, rows, weights, order, *needed):
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((rows, weights), needed))


_permute = define_op(
    "permute(Tensor x, Tensor experts, int n_expert, SymInt? capacity) -> (Tensor, Tensor, Tensor)",
    permute_fwd,
    _permute_fake,
)
_permute_bwd = define_op(
    "permute_bwd(Tensor drows, Tensor order, SymInt n, int k) -> Tensor",
    permute_bwd,
    lambda drows, order, n, k: drows.new_empty(n, drows.shape[1]),
)
_combine = define_op(
    "combine(Tensor rows, Tensor weights, Tensor order) -> Tensor",
    combine_fwd,
    lambda rows, weights, order: rows.new_empty(weights.shape[0], rows.shape[1]),
)
_combine_bwd = define_op(
    "combine_bwd(Tensor dy, Tensor rows, Tensor weights, Tensor order, bool need_rows, "
    "bool need_weights) -> (Tensor, Tensor)",
    combine_bwd,
    _combine_bwd_fake,
)


def _permute_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.shape = tuple(inputs[1].shape)


def _permute_backward(ctx, drows, *_):
    return _permute_bwd(drows, *ctx.saved_tensors, *ctx.shape), None, None, None


def _combine_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx, dy):
    need = ctx.needs_input_grad[:2]
    grads = _combine_bwd(dy, *ctx.saved_tensors, *need)
    return *(grad if needed else None for grad, needed in zip(grads, need)), None


define_autograd(_permute, _permute_setup, _permute_backward, once="permute")
define_autograd(_combine, _combine_setup, _combine_backward, once="combine")


def permute(
    x: Tensor, experts: Tensor, n_expert: int, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes a row for each choice of each token, sorted by expert; see the top of the file.

    Args:
        x: [N, C]; experts: [N, K] int64 in [0, n_expert).
        capacity: most slots of an expert, the first ones; None: all.
    Returns:
        rows: [M, C], M = N * K if nothing is dropped; order: [M] int64, the slot of each row;
        counts: [E] int64, rows of each expert.
    Raises:
        ValueError: shapes that do not fit; a capacity below 1.
        RuntimeError: a second derivative is requested.
    Traffic: x K times, and rows once, forward and backward.
    Deterministic: yes, bitwise, forward and backward.
    Oracle: fastpar.kernels.reference.permute_ref
    """
    if x.dim() != 2 or experts.dim() != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"permute: expected x [N, C] and experts [N, K], got x={list(x.shape)} "
            f"experts={list(experts.shape)}; pass the experts of each row"
        )
    if capacity is not None and capacity < 1:
        raise ValueError(
            f"permute: expected capacity >= 1, got capacity={capacity}; None drops nothing"
        )
    return _permute(x, experts, n_expert, capacity)


def combine(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Computes the weighted sum of each token's rows: the inverse of permute().

    Args:
        rows: [M, C]; weights: [N, K], fp32 (fp64 with fp64 rows); order: [M], from permute().
    Returns:
        y: [N, C], dtype of rows; a slot without a row adds 0.
    Raises:
        ValueError: shapes that do not fit.
        RuntimeError: a second derivative is requested.
    Traffic: rows once and y once; in backward rows twice, dy K + 1 times.
    Deterministic: yes, bitwise, forward and backward.
    Oracle: fastpar.kernels.reference.combine_ref
    """
    if rows.dim() != 2 or weights.dim() != 2 or order.shape != rows.shape[:1]:
        raise ValueError(
            f"combine: expected rows [M, C], weights [N, K] and order [M], got "
            f"rows={list(rows.shape)} weights={list(weights.shape)} order={list(order.shape)}; "
            "pass what permute() returned"
        )
    return _combine(rows, weights, order)
