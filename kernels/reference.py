"""Oracles: every op in plain torch, no code shared with the kernels.

Each computes in the dtype of its inputs, so that fp64 inputs give the truth that a kernel's error
is measured against. Shape legend: B batch, T time, C n_embd, H heads, D head dim, F 4*C,
V vocabulary, N rows (B*T), P flat parameters, S shard of P.
"""

import math

import torch
from torch import Tensor


def bias_gelu_ref(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(x + bias), written out."""
    u = x if bias is None else x + bias
    if approximate == "tanh":
        return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def linear_cross_entropy_ref(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of softmax(x @ weight[:vocab_size].T), all logits at once."""
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    logits = x.reshape(-1, x.shape[-1]) @ weight[:vocab_size].T  # [N, V]
    targets = targets.reshape(-1)
    valid = targets != ignore_index
    picked = torch.where(valid, targets, torch.zeros_like(targets))
    losses = logits.logsumexp(-1) - logits.gather(1, picked[:, None])[:, 0]  # [N]
    total = torch.where(valid, losses, torch.zeros_like(losses)).sum()
    return total / valid.sum() if reduction == "mean" else total


def adamw_step_ref(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    maximize: bool = False,
) -> None:
    """One AdamW step in place, as in the paper: decay, moments, corrected update."""
    for p, grad, m, v in zip(params, grads, exp_avgs, exp_avg_sqs):
        g = grad.to(p.dtype) * (-grad_scale if maximize else grad_scale)
        p.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g * (1 - beta1))
        v.mul_(beta2).add_(g * g * (1 - beta2))
        m_hat = m / (1 - beta1**step)
        v_hat = v / (1 - beta2**step)
        p.sub_(lr * m_hat / (v_hat.sqrt() + eps))
