"""LayerNorm over the last dimension, plain and after a residual add."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.philox import Rng, dropout


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """y = (x - mean) * rstd * weight + bias over the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """residual_out = residual + dropout(x + x_bias); y = layer_norm(residual_out)."""
    if x_bias is not None:
        x = x + x_bias
    residual_out = residual + dropout(x, dropout_p, rng)
    return layer_norm(residual_out, weight, bias, eps), residual_out
