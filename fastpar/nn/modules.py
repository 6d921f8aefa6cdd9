"""Drop-in nn.Modules on the ops of fastpar.kernels: torch's constructors, parameters and keys.

Under torch.autocast they compute and return what torch's do: products and attention in the autocast
dtype, LayerNorm and RMSNorm on CUDA in fp32, GELU and embedding in their input's dtype.

[Note: parts that are called] MLP and CausalSelfAttention contain nn.Linear parts for their names
and state_dict keys, and use the parts' weights directly. A part that is more than its weights
(hooks, a wrapped forward, or another class, as adapters and quantizers have) is called instead
(test_parts_with_hooks_or_another_forward_are_called).

[Note: gathered weights] Under ZeRO a part's weights are not always present: the engine's forward
hooks gather them with those of the whole block. Such a hook has gathers_weights = True; it is no
reason to call the part (test_a_patched_model_stays_fused_at_every_stage).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.kernels import (
    attention_qkvpacked,
    bias_gelu,
    embedding,
    layer_norm,
    linear,
    linear_cross_entropy,
    rms_norm,
)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which torch.autocast casts a product's operands on x's device; None: no cast."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_norm(x: Tensor) -> Tensor:
    """x as torch.autocast passes it to a norm: in fp32 on CUDA, unchanged on CPU."""
    return x.float() if x.is_cuda and autocast_dtype(x) is not None else x


def has_hooks(module: nn.Module, besides: str = "") -> bool:
    """Whether a call of the module runs more than its forward and hooks that gather its weights.

    Args:
        besides: the name of another hook that does not count.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    if not (before or after):
        return False
    hooks = (*before.values(), *after.values())
    others = (hook for hook in hooks if not getattr(hook, "gathers_weights", False))
    return any(getattr(hook, "__name__", None) != besides for hook in others)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, a linear layer with weight [in, out]."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(layer: nn.Module) -> bool:
    """Whether this is exactly torch's nn.Linear or transformers' Conv1D, not a subclass."""
    return type(layer) is nn.Linear or is_conv1d(layer)


def is_plain(layer: nn.Module) -> bool:
    """Whether the layer is just x @ weight + bias; see [Note: parts that are called]."""
    return is_linear(layer) and not has_hooks(layer) and "forward" not in vars(layer)


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), on kernels.linear if the layer is plain."""
    return product(layer, x, layer.bias) if is_plain(layer) else layer(x)


def product(layer: nn.Module, x: Tensor, bias: Any = None) -> Tensor:
    """x @ weight + bias of a plain layer."""
    weight: Any = layer.weight
    multiply = linear if autocast_dtype(x) is None else F.linear
    return multiply(x, weight.t() if is_conv1d(layer) else weight, bias)


def linear_gelu(layer: nn.Module, x: Tensor, approximate: str) -> Tensor:
    """gelu(layer(x)); for a plain layer the GELU's kernel adds the bias."""
    if not is_plain(layer):
        return bias_gelu(layer(x), approximate=approximate)
    bias: Any = layer.bias
    return bias_gelu(product(layer, x), bias, approximate=approximate)


def norm_rows(module: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with its normalized dimensions flattened, and the flattened weight."""
    dims = tuple(module.normalized_shape)
    if x.shape[x.dim() - len(dims) :] != dims:
        raise ValueError(
            f"{type(module).__name__}: expected x of shape [..., {', '.join(map(str, dims))}], got "
            f"x={list(x.shape)}; build the module with x's last dimensions"
        )
    x = autocast_norm(x)
    if len(dims) > 1:
        x = x.flatten(-len(dims))
    return x, None if module.weight is None else module.weight.flatten()


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm on kernels.layer_norm; at most 16384 normalized elements per row."""

    def forward(self, input: Tensor) -> Tensor:
        x, weight = norm_rows(self, input)
        bias = None if self.bias is None else self.bias.flatten()
        return layer_norm(x, weight, bias, self.eps).view(input.shape)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm on kernels.rms_norm; at most 16384 normalized elements per row.

    As in torch, eps=None is the machine epsilon of the dtype of the statistics: fp32's for 16-bit
    inputs.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = norm_rows(self, x)
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps if self.eps is None else self.eps
        return rms_norm(rows, weight, eps).view(x.shape)


class GELU(nn.GELU):
    """torch.nn.GELU on kernels.bias_gelu."""

    def forward(self, input: Tensor) -> Tensor:
        return bias_gelu(input, approximate=self.approximate)


class Embedding(nn.Embedding):
    """torch.nn.Embedding on kernels.embedding, whose backward is deterministic on every device.

    Raises:
        ValueError: padding_idx, max_norm, scale_grad_by_freq or sparse, which only
            torch.nn.Embedding supports.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name, value in embedding_options(self).items():
            raise ValueError(
                f"Embedding: expected no {name}, got {name}={value}; use torch.nn.Embedding, which "
                "supports it"
            )

    def forward(self, input: Tensor) -> Tensor:
        if embedding_options(self):  # set after construction
            return super().forward(input)
        idx = input if input.dim() == 2 else input.reshape(1, -1)
        return embedding(idx, self.weight).view(*input.shape, self.embedding_dim)


def embedding_options(module: nn.Embedding) -> dict[str, Any]:
    """The options in use that kernels.embedding does not support."""
    options = {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "scale_grad_by_freq": module.scale_grad_by_freq or None,
        "sparse": module.sparse or None,
    }
    return {name: value for name, value in options.items() if value is not None}


class MLP(nn.Module):
    """GPT-2's feed-forward layer, dropout(c_proj(gelu(c_fc(x)))), with nanoGPT's parameter names.

    Args:
        n_embd: width of x.
        hidden: width between the two layers; 4 * n_embd when None.
        bias: of both layers.
        dropout: of the output, by torch.
        approximate: "tanh" (GPT-2's) or "none", as torch.nn.GELU.
    """

    def __init__(
        self,
        n_embd: int,
        hidden: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        approximate: str = "tanh",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        hidden = 4 * n_embd if hidden is None else hidden
        self.c_fc = nn.Linear(n_embd, hidden, bias, device=device, dtype=dtype)
        self.gelu = GELU(approximate)
        self.c_proj = nn.Linear(hidden, n_embd, bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if type(self.gelu) is not GELU or has_hooks(self.gelu):
            y = self.gelu(project(self.c_fc, x))
        else:
            y = linear_gelu(self.c_fc, x, self.gelu.approximate)  # [B, T, F]
        return self.dropout(project(self.c_proj, y))  # [B, T, C]


class CausalSelfAttention(nn.Module):
    """GPT-2's self-attention with its two projections, with nanoGPT's parameter names.

    Args:
        n_embd: width of x.
        n_head: heads; divides n_embd.
        bias: of both projections.
        dropout: of the attention's probabilities (rounded to a multiple of 1/256) and of the
            output, in training mode.
        softmax_scale: head_dim ** -0.5 when None.
    Raises:
        ValueError: n_embd is not a multiple of n_head; x is not [B, T, n_embd].
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if n_head < 1 or n_embd % n_head:
            raise ValueError(
                f"CausalSelfAttention: expected n_embd to be a multiple of n_head, got "
                f"n_embd={n_embd} n_head={n_head}; change one of them"
            )
        self.n_embd, self.n_head, self.softmax_scale = n_embd, n_head, softmax_scale
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias, device=device, dtype=dtype)
        self.c_proj = nn.Linear(n_embd, n_embd, bias, device=device, dtype=dtype)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; with cu_seqlens [total, C], as kernels.attention_qkvpacked."""
        dims = 3 if cu_seqlens is None else 2
        if x.dim() != dims or x.shape[-1] != self.n_embd:
            raise ValueError(
                f"CausalSelfAttention: expected x [B, T, {self.n_embd}], or [total, {self.n_embd}] "
                f"with cu_seqlens, got x={list(x.shape)}; reshape it"
            )
        qkv = project(self.c_attn, x).unflatten(-1, (3, self.n_head, -1))  # [B, T, 3, H, D]
        o = attention_qkvpacked(
            qkv,
            softmax_scale=self.softmax_scale,
            dropout_p=self.attn_dropout.p if self.training else 0.0,
            cu_seqlens=cu_seqlens,
        )
        return self.resid_dropout(project(self.c_proj, o.flatten(-2)))


_LOSS_OPTIONS = (
    *("vocab_size", "ignore_index", "reduction"),
    *("label_smoothing", "z_loss", "chunk_rows"),
)


class LinearCrossEntropyLoss(nn.Module):
    """torch.nn.CrossEntropyLoss of the logits x @ weight.T, which are never in memory all at once.

    Has no parameters: forward takes the head's weight, which GPT-2 shares with its embedding.

    Args:
        weight: must be None; class weights are not supported.
        ignore_index, reduction, label_smoothing: as in nn.CrossEntropyLoss.
        z_loss, vocab_size, chunk_rows: as in kernels.linear_cross_entropy.
    Raises:
        ValueError: weight is given.
    """

    def __init__(
        self,
        weight: None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        vocab_size: int | None = None,
        chunk_rows: int | None = None,
    ):
        super().__init__()
        if weight is not None:
            raise ValueError(
                f"LinearCrossEntropyLoss: expected weight=None, got weight={type(weight).__name__} "
                "(class weights); use torch.nn.CrossEntropyLoss on the logits; the head's matrix "
                "is an argument of forward(x, weight, targets)"
            )
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.vocab_size, self.chunk_rows = vocab_size, chunk_rows

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """x [..., C], weight [Vp, C], targets [...] -> loss [] in fp32 ([...] for "none")."""
        dtype = autocast_dtype(x)
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
        options = {name: getattr(self, name) for name in _LOSS_OPTIONS}
        return self.compute(x, weight, targets, **options)

    def compute(self, x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """The loss of operands in their final dtypes."""
        return linear_cross_entropy(x, weight, targets, **options)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction}"
