"""Chooses the experts of a token, and their weights.

    chosen   the k largest of logits + bias in a row; of equal values the lower index first
    weights  k = 1: softmax(logits) of the chosen one (Switch); k > 1: softmax over the chosen ones

    dlogits, k > 1: weights * (dweights - sum of weights * dweights), 0 where not chosen
             k = 1: dweight * weight * (1 at the chosen one - softmax(logits))

The bias affects only the choice: it balances the experts without a loss (Wang et al. 2024, arXiv
2408.15664). Everything is torch's ops; a row has as many numbers as there are experts.
Saved for backward: logits, chosen.
Source: Fedus et al. 2021, arXiv 2101.03961; Lepikhin et al. 2020, arXiv 2006.16668
"""

import torch
from torch import Tensor

from fastpar.kernels.backend import wide
from fastpar.kernels.op import check_float, define_autograd, define_op


def _weights(logits: Tensor, experts: Tensor) -> Tensor:
    if experts.shape[1] > 1:
        return logits.gather(1, experts).softmax(-1)
    return logits.softmax(-1).gather(1, experts)


def route_fwd(logits: Tensor, k: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """weights [N, K], fp32 or fp64, and experts [N, K] of logits [N, E]."""
    scores = logits = logits.to(wide(logits.dtype))
    if bias is not None:
        scores = logits + bias
    # A stable sort keeps the lower index first; topk guarantees no order of equal values.
    experts = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    return _weights(logits, experts), experts


def route_bwd(dweights: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
    """dlogits [N, E], in the dtype of logits."""
    scores = logits.to(wide(logits.dtype))
    if experts.shape[1] > 1:
        weights = _weights(scores, experts)
        of_chosen = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        grad = torch.zeros_like(scores).scatter_(1, experts, of_chosen)
    else:
        p = scores.softmax(-1)
        of_chosen = p.gather(1, experts) * dweights  # one element per row
        grad = (p * -of_chosen).scatter_add_(1, experts, of_chosen)
    return grad.to(logits.dtype)


def _fake(logits, k, bias):
    dtypes = wide(logits.dtype), torch.int64
    return tuple(logits.new_empty((logits.shape[0], k), dtype=dtype) for dtype in dtypes)


_route = define_op(
    "route(Tensor logits, int k, Tensor? bias) -> (Tensor, Tensor)", route_fwd, _fake
)
_route_bwd = define_op(
    "route_bwd(Tensor dweights, Tensor logits, Tensor experts) -> Tensor",
    route_bwd,
    lambda dweights, logits, experts: torch.empty_like(logits),
)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])


def _backward(ctx, dweights, _):
    return _route_bwd(dweights, *ctx.saved_tensors), None, None


define_autograd(_route, _setup_context, _backward, once="route")


def route(logits: Tensor, k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k experts of each token, and their weights; see the top of the file.

    Args:
        logits: [N, E], fp32 or fp64; other dtypes are computed in fp32.
        k: 1 to E.
        bias: [E], added to the logits for the choice only; no gradient.
    Returns:
        weights: [N, K], fp32 (fp64 for fp64), and experts: [N, K] int64, the largest first.
        A non-finite row has weights of nan, and experts in the order of the sort.
    Raises:
        ValueError: k outside 1 to E; shapes that do not fit.
        RuntimeError: a second derivative is requested.
    Traffic: logits three times, they are small.
    Deterministic: yes, bitwise, forward and backward.
    Oracle: fastpar.kernels.reference.route_ref
    """
    check_float("route", "logits", logits)
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(
            f"route: expected logits [N, E] and 1 <= k <= E, got logits={list(logits.shape)} "
            f"k={k}; choose at most as many experts as there are"
        )
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(
            f"route: expected bias [E] with logits [N, E], got bias={list(bias.shape)} "
            f"logits={list(logits.shape)}; pass one number for each expert"
        )
    return _route(logits, k, bias)
