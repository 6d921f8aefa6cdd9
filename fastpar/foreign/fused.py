"""The fused computations of swapped modules; patch.py puts them in place.

[Note: split parts] parallelize() may split the parts, see tp_layers.py: a rank then has some of the
heads, and draws their masks. A fallback call with dropout in attention is refused, because torch
would draw the same mask on every rank, for different heads. With SharedRows a rank has some of the
tokens: then no call may fall back, because the module's own forward would not see the others.

[Note: parts that are not called] A swapped module uses the weights of its plain parts directly. A
part with hooks, a wrapped forward or a changed class is called instead, and is not fused
(test_hooks_run_in_a_patched_model). Hooks that only gather weights do not count, see
fastpar.nn.modules.has_hooks.

[Note: the loss without logits] fused_loss=True, for nanoGPT's GPT:
forward(idx, targets=None) -> (logits, loss). Without targets it computes logits for the last token
only. So a patched model runs its own forward without targets, takes the output of its last
LayerNorm, and computes the loss of all tokens from that and lm_head's weight: the mean
cross-entropy of the targets that are not -1.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.axes.context.keys import attend_rows
from fastpar.foreign.swap import SILENT, Swapped, swap_of
from fastpar.kernels import attention_qkvpacked, layer_norm, linear_cross_entropy
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
)
from fastpar.nn.tp_layers import (
    TokenDropout,
    VocabParallelLinear,
    cp_of,
    gives_product,
    head_dropout,
    residual_norm,
    tp_of,
)

# Set by Model for the attention of its blocks: "causal" (the accompanying mask, if any, is the
# causal one) or "attentions" (the caller wants the probabilities).
MASK_HINT = "fastpar_mask"


def probs_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the probabilities' dropout, read from an nn.Dropout or a number; 0 for None."""
    if name is None or not attn.training:
        return 0.0
    source: Any = getattr(attn, name)
    return source.p if isinstance(source, nn.Dropout) else source


def drop(module: nn.Module, name: str | None, y: Tensor) -> Tensor:
    """y after the module's dropout of this name, if any."""
    return y if name is None else getattr(module, name)(y)


def resid_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the output's dropout, an nn.Dropout whose mode may differ from attn's."""
    dropout: Any = None if name is None else getattr(attn, name)
    return dropout.p if dropout is not None and dropout.training else 0.0


def rate_fits(p: float) -> bool:
    """Whether the kernels' masks support this rate; see kernels.quantize_p."""
    return p == 0.0 or 1.0 / 512 < p < 1.0


def head_dim_fits(x: Tensor, D: int) -> bool:
    """Whether an attention kernel supports heads of D elements for a tensor like x."""
    least, most, step = TRITON_HEAD_DIM
    if D % step == 0 and least <= D <= most:
        return True
    return 1 <= D <= MAX_HEAD_DIM and not use_triton("attention", x)


def _is_one_of(part: nn.Module, *kinds: type) -> bool:
    return type(part) in kinds and not has_hooks(part) and "forward" not in vars(part)


def is_observed(attn: nn.Module) -> bool:
    """Whether attn has hooks, apart from transformers' recorder of probabilities.

    The recorder stays after the first call with output_hidden_states. When it does record, attn
    has a mask or MASK_HINT that makes it fall back.
    """
    return has_hooks(attn, besides="output_capturing_hook")


class Norm(Swapped):
    """A custom LayerNorm: weight, bias and a fixed eps."""

    does = "LayerNorm in one pass"

    def fused_forward(self, inputs: dict[str, Any]) -> Tensor:
        x = autocast_norm(inputs[self.argument_names[0]])
        return layer_norm(x, self.weight, self.bias, self.option("eps"))


def _norm_weights(norm: nn.Module) -> tuple[Any, Any, float] | None:
    """weight, bias and eps of a norm that residual_layer_norm can replace."""
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
    falls_back = ("hooks on the activation, or a replaced activation",)

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        kind = self.option("kind")
        # patch() also swaps an nn.GELU.
        kinds = (kind, GELU) if kind is nn.GELU else (kind,)
        if not _is_one_of(getattr(self, self.option("activation")), *kinds):
            return self.falls_back[0]
        return super().refusal(inputs)

    def fused_forward(self, inputs: dict[str, Any]) -> Tensor:
        act = getattr(self, self.option("activation"))
        form = getattr(act, "approximate", self.option("approximate"))
        y = linear_gelu(self.c_fc, inputs[self.argument_names[0]], form)
        return drop(self, self.option("dropout"), project(self.c_proj, y))


class Attention(Swapped):
    """Self-attention like nanoGPT's, reading c_attn's output in place."""

    does = "attention on the packed projection"
    falls_back: tuple[str, ...] = (
        "arguments besides x",
        "a dropout rate of 1, or of 1/512 and less; a head size without a kernel",
    )
    added_arguments = (MASK_HINT,)

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        for name, value in inputs.items():
            if name != self.argument_names[0] and value is not None and value is not False:
                return f"the argument {name}"
        x = inputs.get(self.argument_names[0])
        if not isinstance(x, Tensor) or x.dim() != 3:
            return "x is not [B, T, C]"
        name = self.option("probs")
        if not rate_fits(probs_rate(self, name)):
            return "a dropout rate of 1, or of 1/512 and less"
        part = None if name is None else getattr(self, name)
        if isinstance(part, nn.Module):
            if part.training != self.training:
                return f"{name} has a different training mode"
            if not _is_one_of(part, nn.Dropout):
                return f"hooks on {name}, or a replaced {name}"
        if not head_dim_fits(x, self.option("head_dim")):
            return f"heads of {self.option('head_dim')} elements, for which there is no kernel"
        return self.changed()

    def fall_back(self, reason: str) -> None:
        cp = cp_of(self)
        if cp is not None:
            raise ValueError(
                f"{type(self).__name__}: expected a call without fallback with cp={cp.size}, "
                f"because only fastpar's attention sees the other ranks' tokens, got {reason}; see "
                "fastpar.patch's report, or leave cp out of Mesh"
            )
        if tp_of(self.c_attn) is not None and probs_rate(self, self.option("probs")) > 0.0:
            raise ValueError(
                f"{type(self).__name__}: expected a call without fallback while split attention "
                f"has dropout, got {reason}; see fastpar.patch's report, or set attention's "
                "dropout to 0"
            )
        super().fall_back(reason)

    def fused_forward(self, inputs: dict[str, Any]) -> Any:
        y, present = self.fused_heads(inputs[self.argument_names[0]], inputs)
        return self.fused_output(drop(self, self.option("resid"), project(self.c_proj, y)), present)

    def fused_heads(self, x: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """[B, T, C] -> the heads' outputs, [B, T, C], for c_proj; and the input of fused_output."""
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
    """x + attn(ln_1(x)), then x + mlp(ln_2(x)); ln_2 is fused with the residual add before it."""

    does = "c_proj's bias + dropout + residual add + LayerNorm in one pass"
    falls_back = ("hooks on attn, its resid_dropout or ln_2, or replacements of them",)

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        x: Any = inputs.get(self.argument_names[0])
        attn, reason = self.attn, self.changed()
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
        if inputs.get("encoder_hidden_states") is not None:
            return "encoder_hidden_states"
        if attn.refusal(self._for_attention(inputs)) is not None:
            return SILENT  # attn reports it
        # Under autocast torch's LayerNorm returns fp32 where the residual stream has 16 bits.
        weight = getattr(attn.c_proj, "weight", None)
        if weight is None:  # an adapter around a layer
            weight = next(attn.c_proj.parameters(), x)
        if x.dtype != torch.float32 and (autocast_dtype(x) or weight.dtype != x.dtype):
            return "a 16-bit residual stream with autocast or weights of another dtype"
        return None

    def fused_forward(self, inputs: dict[str, Any]) -> Tensor:
        x, attn = inputs[self.argument_names[0]], self.attn
        norm: Any = _norm_weights(self.ln_2)
        y, _ = attn.fused_heads(self.ln_1(x), self._for_attention(inputs))
        p = resid_rate(attn, attn.option("resid"))
        y, x = residual_norm(attn.c_proj, y, x, norm, p, cp_of(attn))
        return x + self.mlp(y)

    def _for_attention(self, inputs: dict[str, Any]) -> dict[str, Any]:
        first = self.argument_names[0]
        rest = {name: value for name, value in inputs.items() if name != first}
        return {**rest, self.attn.argument_names[0]: inputs.get(first)}

    def _dropout_fits(self, attn: Any) -> bool:
        name = attn.option("resid")
        if name is None:
            return True
        split = tp_of(attn.c_proj) is not None or cp_of(attn) is not None
        kinds = (nn.Dropout, TokenDropout) if split else (nn.Dropout,)
        plain = _is_one_of(getattr(attn, name), *kinds)
        return plain and rate_fits(resid_rate(attn, name))


# Arguments of GPT-2's blocks and attention that do not change the result, or are checked.
HARMLESS = {
    "cache_position", "encoder_attention_mask", "encoder_hidden_states", "num_items_in_batch",
    "output_hidden_states", "position_ids", "return_dict", "use_cache", "attention_mask",
    "layer_past", "head_mask", "output_attentions", MASK_HINT, "shift_labels", "ignore_index",
}  # fmt: skip


def implementation_of(attn: Any) -> str:
    """What computes transformers' attention: the class says it up to 4.47, then the config."""
    kind = type(attn)
    if kind.__name__ == "GPT2SdpaAttention":
        return "sdpa"
    if hasattr(kind, "_attn"):
        return "eager"
    return getattr(attn.config, "_attn_implementation", None) or "eager"


def scale_of(attn: Any) -> float:
    """The factor of a GPT2Attention's scores.

    Up to transformers 5.0, sdpa and cached decoding ignore the two settings, and so do models that
    were trained with them.
    """
    if "scaling" in vars(attn):
        return attn.scaling
    scale = attn.head_dim**-0.5
    if implementation_of(attn) == "sdpa":
        return scale
    scale = scale if attn.scale_attn_weights else 1.0
    return scale / (attn.layer_idx + 1) if attn.scale_attn_by_inverse_layer_idx else scale


def cache_in(inputs: dict[str, Any]) -> Any:
    """The key/value cache among the arguments, whose name depends on transformers' version."""
    return next((v for v in inputs.values() if hasattr(v, "get_seq_length")), None)


class GPT2Attention(Attention):
    """transformers' GPT2Attention with sdpa or eager attention."""

    falls_back = (
        "an attention_mask (padding); omit it if no token is padding",
        "a key/value cache that already holds tokens (generation after the first step)",
        "output_attentions=True, head_mask, encoder_hidden_states, reorder_and_upcast_attn",
        "an attn_implementation other than sdpa and eager, or a function registered for sdpa",
        "eager attention called alone without a mask, which is not causal",
        "a dropout rate of 1, or of 1/512 and less; a head size without a kernel",
    )

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        config: Any = self.config
        implementation = implementation_of(self)
        if implementation not in ("sdpa", "eager"):
            return f"attn_implementation={implementation}"
        registry, function = type(self).registered
        if implementation == "sdpa" and registry and registry["sdpa"] is not function:
            return "another function is registered for sdpa"
        hint = inputs.get(MASK_HINT)
        if inputs.get("output_attentions") or hint == "attentions":
            return "output_attentions=True"
        # A hook may want the probabilities, which only the eager implementation returns.
        causal = hint == "causal" and not is_observed(self)
        if inputs.get("attention_mask") is not None and not causal:
            return "attention_mask"
        for name in ("head_mask", "encoder_hidden_states"):
            if inputs.get(name) is not None:
                return name
        for name in ("reorder_and_upcast_attn", "is_cross_attention"):
            if getattr(self, name, False):
                return name
        if not (getattr(self, "is_causal", True) and getattr(config, "is_causal", True)):
            return "is_causal=False"
        cache = cache_in(inputs)
        for name, value in inputs.items():
            if name in self.argument_names[:1] or name in HARMLESS or value is cache:
                continue
            if value is not None and value is not False:
                return f"the argument {name}"
        # Older versions have the causal mask in a buffer; newer ones require it from the caller.
        masked = "bias" in self._buffers or inputs.get("attention_mask") is not None
        if implementation == "eager" and not masked:
            return "eager attention without a mask, which is not causal"
        x = {self.argument_names[0]: inputs.get(self.argument_names[0])}
        if inputs.get("layer_past") is not None:
            return "layer_past"
        if cache is not None and type(cache).__name__ != "DynamicCache":
            return f"a cache of type {type(cache).__name__}"
        if cache is not None and cache.get_seq_length(self.layer_idx):
            return "a cache with tokens"
        return super().refusal(x)

    def fused_heads(self, x: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        qkv = project(self.c_attn, x).unflatten(-1, (3, self.num_heads, self.head_dim))
        _, k, v = qkv.transpose(1, 3).unbind(2)  # [B, H, T, D]
        cache, present = cache_in(inputs), None
        before_4_53 = "layer_past" in self.argument_names
        if cache is not None:
            cache.update(k, v, self.layer_idx)
        elif before_4_53 and inputs.get("use_cache"):
            present = (k, v)
        return self.fused_attention(qkv, scale_of(self)), present

    def fused_output(self, y: Tensor, present: Any) -> Any:
        return y, present


def head_fits(head: Any) -> bool:
    """Whether head_loss() supports this head: a plain product with a usable weight."""
    if isinstance(head, VocabParallelLinear) and tp_of(head) is not None:
        return head.bias is None and not has_hooks(head)
    plain = type(head) is nn.Linear and is_plain(head) and head.bias is None
    return plain and head.weight.dtype != torch.float64


def head_loss(head: Any, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The cross-entropy of a linear layer's logits, without the logits."""
    if tp_of(head) is not None:
        return head.loss(x, labels, **options)
    dtype = autocast_dtype(x) or x.dtype
    weight = head.weight if dtype == x.dtype else head.weight.to(dtype)
    return linear_cross_entropy(x.to(dtype), weight, labels, **options)


class Model(Swapped):
    """transformers' GPT2Model: tells attention if its mask is the causal one."""

    does = "recognises a causal mask without reading it"

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        return None if self.changed() is None else SILENT

    def fused_forward(self, inputs: dict[str, Any]) -> Any:
        default = getattr(self.config, "output_attentions", False)
        if inputs.get("output_attentions", default):
            inputs[MASK_HINT] = "attentions"
        elif cp_of(self) is not None:
            # transformers would make a mask of this rank's tokens that nobody reads; pass a dummy.
            inputs[MASK_HINT] = "causal"
            inputs["attention_mask"] = inputs["position_ids"].new_zeros(1, 1, 1, 1)
        elif inputs.get("attention_mask") is None and inputs.get("position_ids") is None:
            # With position_ids transformers looks for several documents in a row.
            inputs[MASK_HINT] = "causal"
        return self.own_forward[0](self, **inputs)


class LMHead(Swapped):
    """A causal model of transformers: in training, the loss of labels without logits."""

    does = "loss without logits in training (fused_loss=True): the output's logits are None"
    falls_back = ("logits_to_keep, another loss_function, fp64, hooks on or a replaced lm_head",)

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        if not self.training or inputs.get("labels") is None or swap_of(self) is None:
            return SILENT
        keep = [inputs.get(name, 0) for name in ("logits_to_keep", "num_logits_to_keep")]
        # Versions without it in their forward ignore it.
        own = not self.option("asks") or self.loss_function is self.option("loss")
        whole = not any(isinstance(k, Tensor) or k for k in keep)
        fits = whole and own and head_fits(self.lm_head) and self.changed() is None
        return None if fits else self.falls_back[0]

    def fused_forward(self, inputs: dict[str, Any]) -> Any:
        labels, return_dict = inputs.pop("labels"), inputs.pop("return_dict", None)
        for name in ("logits_to_keep", "num_logits_to_keep"):
            inputs.pop(name, None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        outputs = getattr(self, self.base_model_prefix)(**inputs, return_dict=True)
        x = outputs.last_hidden_state
        ignore_index = inputs.get("ignore_index", -100)
        shift_labels = inputs.get("shift_labels")
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        items = inputs.get("num_items_in_batch")
        options: dict[str, Any] = {"ignore_index": ignore_index}
        options["reduction"] = "mean" if items is None else "sum"
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            options["softcap"] = cap
        loss = head_loss(self.lm_head, x, shift_labels.to(x.device), **options)
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        kept = {name: getattr(outputs, name) for name in self.option("kept")}
        output = self.option("output")(loss=loss, logits=None, **kept)
        return output if return_dict else output.to_tuple()


IGNORED = -1


class Loss(Swapped):
    """nanoGPT's GPT: in training, the loss of targets without logits."""

    does = "loss without logits in training (fused_loss=True): the logits are None"
    falls_back = ("torch.compile, fp64, hooks on or a replaced lm_head",)

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        idx, targets = (inputs.get(name) for name in self.argument_names)
        if not self.training or targets is None or swap_of(self) is None:
            return SILENT
        fits = (
            not torch.compiler.is_compiling()
            and isinstance(idx, Tensor)
            and isinstance(targets, Tensor)
            and idx.dim() == 2
            and targets.shape == idx.shape
            and head_fits(self.lm_head)
            and self.changed() is None
        )
        return None if fits else self.falls_back[0]

    def fused_forward(self, inputs: dict[str, Any]) -> tuple[None, Tensor]:
        idx, targets = (inputs[name] for name in self.argument_names)
        x = _last(self, self.option("norm"), lambda: self.own_forward[0](self, idx))
        loss = head_loss(self.lm_head, x, targets, ignore_index=IGNORED, reduction="mean")
        return None, loss if autocast_dtype(x) else loss.to(x.dtype)


def _last(model: Any, norm: str, forward: Any) -> Tensor:
    """The output of the model's last LayerNorm in a call of forward."""
    tensors: list[Tensor] = []
    hook = model.get_submodule(norm).register_forward_hook(lambda m, args, y: tensors.append(y))
    try:
        forward()
    finally:
        hook.remove()
    if len(tensors) != 1:
        raise RuntimeError(
            f"{type(model).__name__}: expected one call of {norm} a forward, got {len(tensors)}; "
            "call fastpar.unpatch(model) and patch it without fused_loss"
        )
    return tensors[0]


def loss_shape(model: Any) -> str | None:
    """The name of the last LayerNorm of a model with nanoGPT's forward and head; None: others."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    if len(parameters) != 2 or parameters[1].default is not None:
        return None
    head = getattr(model, "lm_head", None)
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    return "transformer.ln_f" if hasattr(model.transformer, "ln_f") else None
