"""What the swapped modules of a foreign GPT-2 compute, by kernels; patch.py puts them in place.

[Note: split parts] parallelize() may split the parts, see tp_layers.py: a rank then has some of the
heads, and draws their part of the masks. A call with dropout in attention that would fall back is
refused: torch would draw the same mask on every rank, for other heads. Or it gives a rank some of
the tokens (context.py): then no call falls back, as the module's own forward knows of no others.

[Note: parts that are not called] A swapped module uses the weights of its plain parts directly. A
part with hooks, a wrapped forward or another class than it had is called instead, and what would
have been fused with it is not (test_hooks_run_in_a_patched_model). Hooks that only gather weights
do not count, see fastpar.nn.modules.with_weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastpar.axes.context.keys import attend_rows
from fastpar.foreign.swap import SILENT, Swapped
from fastpar.kernels import attention_qkvpacked, layer_norm
from fastpar.kernels.attention import MAX_HEAD_DIM, TRITON_HEAD_DIM
from fastpar.kernels.backend import use_triton
from fastpar.nn.modules import (
    GELU,
    LayerNorm,
    autocast_dtype,
    autocast_norm,
    has_hooks,
    is_plain,
    linear_gelu,
    project,
    with_weights,
)
from fastpar.nn.tp_layers import (
    TokenDropout,
    cp_of,
    gives_product,
    head_dropout,
    residual_norm,
    tp_of,
)

# Set by Model for the attention of its blocks: "causal" (whatever mask comes with it is the causal
# one) or "attentions" (the caller wants the probabilities).
MASK_HINT = "fastpar_mask"


def probs_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the probabilities' dropout, read from an nn.Dropout or a number; None is 0."""
    if name is None or not attn.training:
        return 0.0
    source: Any = getattr(attn, name)
    return source.p if isinstance(source, nn.Dropout) else source


def drop(module: nn.Module, name: str | None, y: Tensor) -> Tensor:
    """y after the module's dropout of this name, if there is one."""
    return y if name is None else getattr(module, name)(y)


def resid_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the output's dropout, an nn.Dropout that may be in another mode than attn."""
    dropout: Any = None if name is None else getattr(attn, name)
    return dropout.p if dropout is not None and dropout.training else 0.0


def rate_fits(p: float) -> bool:
    """Whether the kernels' masks have this rate; see kernels.quantize_p."""
    return p == 0.0 or 1.0 / 512 < p < 1.0


def head_dim_fits(x: Tensor, D: int) -> bool:
    """Whether there is a kernel of attention for heads of D elements and a tensor like x."""
    least, most, step = TRITON_HEAD_DIM
    if D % step == 0 and least <= D <= most:
        return True
    return 1 <= D <= MAX_HEAD_DIM and not use_triton("attention", x)


def _is_one_of(part: nn.Module, *kinds: type) -> bool:
    return type(part) in kinds and not has_hooks(part) and "forward" not in vars(part)


def is_observed(attn: nn.Module) -> bool:
    """Whether attn has hooks, apart from transformers' recorder of probabilities.

    That stays in place after the first call with output_hidden_states. When it does record, attn
    has a mask or MASK_HINT that makes it fall back.
    """
    if attn._forward_pre_hooks or attn._backward_hooks or attn._backward_pre_hooks:
        return True
    names = [getattr(hook, "__name__", "") for hook in attn._forward_hooks.values()]
    return any(name != "output_capturing_hook" for name in names)


class Norm(Swapped):
    """A LayerNorm of someone's own: weight, bias and a fixed eps."""

    does = "LayerNorm in one pass"

    def fused_forward(self, given: dict[str, Any]) -> Tensor:
        x = autocast_norm(given[self.argument_names[0]])
        return layer_norm(x, self.weight, self.bias, self.option("eps"))


def _norm_weights(norm: nn.Module) -> tuple[Any, Any, float] | None:
    """weight, bias and eps of a norm that residual_layer_norm can stand in for."""
    if has_hooks(norm) or "forward" in vars(norm):
        return None
    if isinstance(norm, Norm):
        return norm.weight, norm.bias, norm.option("eps")
    if type(norm) is LayerNorm and len(norm.normalized_shape) == 1 and norm.weight is not None:
        return norm.weight, norm.bias, norm.eps
    return None


class MLP(Swapped):
    """c_fc, GELU and c_proj; the GELU adds c_fc's bias."""

    does = "bias + GELU in one pass"
    falls_back = ("hooks on the activation, or another one in its place",)

    def refusal(self, given: dict[str, Any]) -> str | None:
        kind = self.option("kind")
        # patch() has swapped an nn.GELU as well.
        kinds = (kind, GELU) if kind is nn.GELU else (kind,)
        if not _is_one_of(getattr(self, self.option("activation")), *kinds):
            return self.falls_back[0]
        return super().refusal(given)

    def fused_forward(self, given: dict[str, Any]) -> Tensor:
        y = linear_gelu(self.c_fc, given[self.argument_names[0]], self.option("approximate"))
        return drop(self, self.option("dropout"), project(self.c_proj, y))


class Attention(Swapped):
    """Self-attention of nanoGPT's shape, read in place from c_attn's output."""

    does = "attention on the packed projection"
    falls_back: tuple[str, ...] = (
        "arguments besides x; more tokens, other settings or buffers than when it was patched",
        "a dropout rate of 1, or of 1/512 and less; heads of a size that no kernel takes",
    )
    added_arguments = (MASK_HINT,)

    def refusal(self, given: dict[str, Any]) -> str | None:
        for name, value in given.items():
            if name != self.argument_names[0] and value is not None and value is not False:
                return f"the argument {name}"
        x = given.get(self.argument_names[0])
        if not isinstance(x, Tensor) or x.dim() != 3:
            return "x is not [B, T, C]"
        name = self.option("probs")
        if not rate_fits(probs_rate(self, name)):
            return "a dropout rate of 1, or of 1/512 and less"
        part = None if name is None else getattr(self, name)
        if isinstance(part, nn.Module):
            if part.training != self.training:
                return f"{name} is in another mode"
            if not _is_one_of(part, nn.Dropout):
                return f"hooks on {name}, or another one in its place"
        if not head_dim_fits(x, self.option("head_dim")):
            return f"heads of {self.option('head_dim')} elements, which no kernel takes"
        return self.changed(x)

    def fall_back(self, reason: str) -> None:
        cp = cp_of(self)
        if cp is not None:
            raise ValueError(
                f"{type(self).__name__}: expected a call that needs no fallback with cp={cp.size}, "
                f"whose other tokens only fastpar's attention sees, got {reason}; see "
                "fastpar.patch's report, or leave cp out of Mesh"
            )
        if tp_of(self.c_attn) is not None and probs_rate(self, self.option("probs")) > 0.0:
            raise ValueError(
                f"{type(self).__name__}: expected a call that needs no fallback while dropout "
                f"is on in split attention, got {reason}; see fastpar.patch's report, or set "
                "attention's dropout to 0"
            )
        super().fall_back(reason)

    def fused_forward(self, given: dict[str, Any]) -> Any:
        y, present = self.fused_heads(given[self.argument_names[0]], given)
        return self.fused_output(drop(self, self.option("resid"), project(self.c_proj, y)), present)

    def fused_heads(self, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any]:
        """[B, T, C] -> the heads' outputs, [B, T, C], for c_proj; and what fused_output() wants."""
        qkv = project(self.c_attn, x).unflatten(-1, (3, self.n_head, -1))  # [B, T, 3, H, D]
        return self.fused_attention(qkv), None

    def fused_attention(self, qkv: Tensor, softmax_scale: float | None = None) -> Tensor:
        """[B, T, 3, H, D] -> [B, T, C]"""
        cp = cp_of(self)
        dropout = head_dropout(self.c_attn, qkv, probs_rate(self, self.option("probs")), cp)
        if cp is not None:
            return attend_rows(qkv, cp, softmax_scale, **dropout).flatten(2)
        return attention_qkvpacked(qkv, softmax_scale=softmax_scale, **dropout).flatten(2)

    def fused_output(self, y: Tensor, present: Any) -> Any:
        return y


class Block(Swapped):
    """x + attn(ln_1(x)), then x + mlp(ln_2(x)); ln_2 in one pass with what comes before it."""

    does = "c_proj's bias + dropout + residual add + LayerNorm in one pass"
    falls_back = ("hooks on attn, its resid_dropout or ln_2, or others in their places",)

    def refusal(self, given: dict[str, Any]) -> str | None:
        x: Any = given.get(self.argument_names[0])
        attn, reason = self.attn, self.changed(x)
        if reason is not None:
            return reason
        if not (
            isinstance(attn, Attention)
            and not is_observed(attn)
            and "forward" not in vars(attn)
            and (tp_of(attn.c_proj) is None or gives_product(attn.c_proj))
            and self._dropout_fits(attn)
            and _norm_weights(self.ln_2) is not None
        ):
            return self.falls_back[0]
        if given.get("encoder_hidden_states") is not None:
            return "encoder_hidden_states"
        if attn.refusal(self._for_attention(given)) is not None:
            return SILENT  # attn will say so
        # Under autocast torch's LayerNorm returns fp32 where the residual stream has 16 bits.
        weight = getattr(attn.c_proj, "weight", None)
        if weight is None:  # an adapter around a layer
            weight = next(attn.c_proj.parameters(), x)
        if x.dtype != torch.float32 and (autocast_dtype(x) or weight.dtype != x.dtype):
            return "a 16-bit residual stream with autocast or weights of another dtype"
        return None

    def fused_forward(self, given: dict[str, Any]) -> Tensor:
        x, attn = given[self.argument_names[0]], self.attn
        norm: Any = _norm_weights(self.ln_2)
        y, _ = attn.fused_heads(self.ln_1(x), self._for_attention(given))
        p = resid_rate(attn, attn.option("resid"))
        called = tp_of(attn.c_proj) is None and not is_plain(attn.c_proj)
        used = [self.ln_2] if called else [attn.c_proj, self.ln_2]
        y, x = with_weights(lambda: residual_norm(attn.c_proj, y, x, norm, p, cp_of(attn)), *used)
        return x + self.mlp(y)

    def _for_attention(self, given: dict[str, Any]) -> dict[str, Any]:
        first = self.argument_names[0]
        rest = {name: value for name, value in given.items() if name != first}
        return {**rest, self.attn.argument_names[0]: given.get(first)}

    def _dropout_fits(self, attn: Any) -> bool:
        name = attn.option("resid")
        if name is None:
            return True
        split = tp_of(attn.c_proj) is not None or cp_of(attn) is not None
        kinds = (nn.Dropout, TokenDropout) if split else (nn.Dropout,)
        plain = _is_one_of(getattr(attn, name), *kinds)
        return plain and rate_fits(resid_rate(attn, name))
