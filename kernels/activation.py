"""The activations of MLPs by name: gelu (tanh form), relu2 and swiglu."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.gelu import bias_gelu


def activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The activation of x + bias.

        gelu    x / 2 * (1 + tanh(...)), as bias_gelu
        relu2   max(x, 0) ** 2
        swiglu  silu(gate) * up of x = [gate, up]

    Args:
        x: [..., F], with swiglu [..., 2 * F]: bf16 | fp16 | fp32 | fp64.
        bias: of x's last dimension, or None.
        kind: "gelu", "relu2" or "swiglu".
    Returns:
        [..., F], dtype of x.
    Raises:
        ValueError: another kind; an odd last dimension with swiglu.
    Source: So et al. 2021, arXiv 2109.08668; Shazeer 2020, arXiv 2002.05202
    """
    if kind == "gelu":
        return bias_gelu(x, bias)
    if bias is not None:
        x = x + bias
    if kind == "relu2":
        return torch.relu(x).square()
    if kind != "swiglu":
        raise ValueError(
            f"activation: expected gelu, relu2 or swiglu, got kind={kind}; choose one of these"
        )
    if x.shape[-1] % 2:
        raise ValueError(
            f"activation: expected x of shape [..., 2 * F] with swiglu, got x={list(x.shape)}; "
            "gate and up are its halves"
        )
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
