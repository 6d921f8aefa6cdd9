"""Softmax attention on [B, T, H, D] tensors. Plain torch: SDPA without dropout, composed with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.philox import Rng, draw_key, keep_mask, quantize_p


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Tensor:
    """softmax(q k^T * softmax_scale) v per head; causal is aligned to the last query and the last key."""
    threshold = quantize_p(dropout_p)
    B, T, H, D = q.shape
    Tk = k.shape[1]
    qt, kt, vt = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = None
    if causal and T != Tk:
        mask = torch.ones(T, Tk, dtype=torch.bool, device=q.device).tril(Tk - T)
    if threshold == 0:
        o = F.scaled_dot_product_attention(
            qt,
            kt,
            vt,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=softmax_scale,
            enable_gqa=k.shape[2] != H,
        )
        return o.transpose(1, 2)
    if rng is None:
        rng = Rng(draw_key(q.device), 0)
    if k.shape[2] != H:
        kt, vt = (t.repeat_interleave(H // k.shape[2], dim=1) for t in (kt, vt))
    scores = (qt @ kt.mT).float() * (D**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        mask = torch.ones(T, Tk, dtype=torch.bool, device=q.device).tril(Tk - T)
        scores = scores.masked_fill(~mask, float("-inf"))
    keep = keep_mask(rng, dropout_p, scores.shape, q.device)
    probs = scores.softmax(-1) * keep * (256.0 / (256 - threshold))
    return (probs.to(q.dtype) @ vt).transpose(1, 2)


def attention_qkvpacked(
    qkv: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Tensor:
    """attention on the output of one projection: qkv [B, T, 3, H, D] -> o [B, T, H, D]."""
    q, k, v = qkv.unbind(2)
    return attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, dropout_p=dropout_p, rng=rng
    )
