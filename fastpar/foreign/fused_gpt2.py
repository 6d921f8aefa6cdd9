"""What the swapped modules of transformers' GPT-2 compute, by kernels; see fused_modules.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastpar.foreign.fused_modules import MASK_HINT, Attention, is_observed
from fastpar.foreign.swap import SILENT, Swapped, swap_of
from fastpar.kernels import linear_cross_entropy
from fastpar.nn.modules import autocast_dtype, has_hooks, is_plain, project, with_weights
from fastpar.nn.tp_layers import VocabParallelLinear, cp_of, tp_of

# Arguments of GPT-2's blocks and attention that do not change what they compute, or are looked at.
HARMLESS = {
    "cache_position", "encoder_attention_mask", "encoder_hidden_states", "num_items_in_batch",
    "output_hidden_states", "position_ids", "return_dict", "use_cache", "attention_mask",
    "layer_past", "head_mask", "output_attentions", MASK_HINT, "shift_labels", "ignore_index",
}  # fmt: skip


def implementation_of(attn: Any) -> str:
    """What computes transformers' attention: up to 4.47 the class says it, then the config."""
    kind = type(attn)
    if kind.__name__ == "GPT2SdpaAttention":
        return "sdpa"
    if hasattr(kind, "_attn"):
        return "eager"
    return getattr(attn.config, "_attn_implementation", None) or "eager"


def scale_of(attn: Any) -> float:
    """The factor of a GPT2Attention's scores.

    Up to 5.0 transformers' sdpa takes no notice of the two settings, and its cached decoding
    neither; whoever trained with it has such a model.
    """
    if "scaling" in vars(attn):
        return attn.scaling
    scale = attn.head_dim**-0.5
    if implementation_of(attn) == "sdpa":
        return scale
    scale = scale if attn.scale_attn_weights else 1.0
    return scale / (attn.layer_idx + 1) if attn.scale_attn_by_inverse_layer_idx else scale


def cache_in(given: dict[str, Any]) -> Any:
    """The key/value cache among arguments: each version of transformers has its own name for it."""
    return next((v for v in given.values() if hasattr(v, "get_seq_length")), None)


class GPT2Attention(Attention):
    """transformers' GPT2Attention with sdpa or eager attention."""

    falls_back = (
        "an attention_mask (padding); leave it out when no token is padding",
        "a key/value cache that holds tokens already (generation after the first step)",
        "output_attentions=True, head_mask, encoder_hidden_states, reorder_and_upcast_attn",
        "an attn_implementation other than sdpa and eager, or a function registered for sdpa",
        "eager attention called alone without a mask, which is not causal",
        "a dropout rate of 1, or of 1/512 and less; heads of a size that no kernel takes",
    )

    def refusal(self, given: dict[str, Any]) -> str | None:
        config: Any = self.config
        implementation = implementation_of(self)
        if implementation not in ("sdpa", "eager"):
            return f"attn_implementation={implementation}"
        registry, function = type(self).registered
        if implementation == "sdpa" and registry and registry["sdpa"] is not function:
            return "another function is registered for sdpa"
        hint = given.get(MASK_HINT)
        if given.get("output_attentions") or hint == "attentions":
            return "output_attentions=True"
        # A hook may want the probabilities, which only the eager implementation returns.
        causal = hint == "causal" and not is_observed(self)
        if given.get("attention_mask") is not None and not causal:
            return "attention_mask"
        for name in ("head_mask", "encoder_hidden_states"):
            if given.get(name) is not None:
                return name
        for name in ("reorder_and_upcast_attn", "is_cross_attention"):
            if getattr(self, name, False):
                return name
        if not (getattr(self, "is_causal", True) and getattr(config, "is_causal", True)):
            return "is_causal=False"
        cache = cache_in(given)
        for name, value in given.items():
            if name in self.argument_names[:1] or name in HARMLESS or value is cache:
                continue
            if value is not None and value is not False:
                return f"the argument {name}"
        # Older versions have the causal mask in a buffer; newer ones leave it to the caller.
        masked = "bias" in self._buffers or given.get("attention_mask") is not None
        if implementation == "eager" and not masked:
            return "eager attention without a mask, which is not causal"
        x = {self.argument_names[0]: given.get(self.argument_names[0])}
        if given.get("layer_past") is not None:
            return "layer_past"
        if cache is not None and type(cache).__name__ != "DynamicCache":
            return f"a cache of type {type(cache).__name__}"
        if cache is not None and cache.get_seq_length(self.layer_idx):
            return "a cache with tokens"
        return super().refusal(x)

    def fused_heads(self, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any]:
        qkv = project(self.c_attn, x).unflatten(-1, (3, self.num_heads, self.head_dim))
        _, k, v = qkv.transpose(1, 3).unbind(2)  # [B, H, T, D]
        cache, present = cache_in(given), None
        before_4_53 = "layer_past" in self.argument_names
        if cache is not None:
            cache.update(k, v, self.layer_idx)
        elif before_4_53 and given.get("use_cache"):
            present = (k, v)
        return self.fused_attention(qkv, scale_of(self)), present

    def fused_output(self, y: Tensor, present: Any) -> Any:
        return y, present


def head_fits(head: Any) -> bool:
    """Whether head_loss() takes this head: nothing but a product, with a weight that it can use."""
    if isinstance(head, VocabParallelLinear) and tp_of(head) is not None:
        return head.bias is None and not has_hooks(head)
    plain = type(head) is nn.Linear and is_plain(head) and head.bias is None
    return plain and head.weight.dtype != torch.float64


def head_loss(head: Any, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The cross-entropy of a linear layer's logits, without the logits."""

    def compute() -> Tensor:
        if tp_of(head) is not None:
            return head.loss(x, labels, **options)
        dtype = autocast_dtype(x) or x.dtype
        weight = head.weight if dtype == x.dtype else head.weight.to(dtype)
        return linear_cross_entropy(x.to(dtype), weight, labels, **options)

    return with_weights(compute, head)


class Model(Swapped):
    """transformers' GPT2Model: tells attention when the mask it gets is the causal one."""

    does = "knows a causal mask without looking at it"

    def refusal(self, given: dict[str, Any]) -> str | None:
        return None if self.changed() is None else SILENT

    def fused_forward(self, given: dict[str, Any]) -> Any:
        default = getattr(self.config, "output_attentions", False)
        if given.get("output_attentions", default):
            given[MASK_HINT] = "attentions"
        elif cp_of(self) is not None:
            # A mask of this rank's tokens would be made, and not looked at; this one is made.
            given[MASK_HINT] = "causal"
            given["attention_mask"] = given["position_ids"].new_zeros(1, 1, 1, 1)
        elif given.get("attention_mask") is None and given.get("position_ids") is None:
            # With position_ids transformers looks for several documents in a row.
            given[MASK_HINT] = "causal"
        return self.own_forward[0](self, **given)


class LMHead(Swapped):
    """transformers' GPT2LMHeadModel: in training, the loss of labels without logits."""

    does = "loss without logits in training (fused_loss=True): the output's logits are None"
    falls_back = ("logits_to_keep, another loss_function, fp64, hooks on or another lm_head",)

    def refusal(self, given: dict[str, Any]) -> str | None:
        if not self.training or given.get("labels") is None or swap_of(self) is None:
            return SILENT
        keep = [given.get(name, 0) for name in ("logits_to_keep", "num_logits_to_keep")]
        # Versions without it in their forward take no notice of it.
        own = not self.option("asks") or self.loss_function is self.option("loss")
        whole = not any(isinstance(k, Tensor) or k for k in keep)
        fits = whole and own and head_fits(self.lm_head) and self.changed() is None
        return None if fits else self.falls_back[0]

    def fused_forward(self, given: dict[str, Any]) -> Any:
        labels, return_dict = given.pop("labels"), given.pop("return_dict", None)
        for name in ("logits_to_keep", "num_logits_to_keep"):
            given.pop(name, None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        outputs = self.transformer(**given, return_dict=True)
        x = outputs.last_hidden_state
        ignore_index = given.get("ignore_index", -100)
        shift_labels = given.get("shift_labels")
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        items = given.get("num_items_in_batch")
        options = {"ignore_index": ignore_index, "reduction": "mean" if items is None else "sum"}
        loss = head_loss(self.lm_head, x, shift_labels.to(x.device), **options)
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        kept = {name: getattr(outputs, name) for name in self.option("kept")}
        output = self.option("output")(loss=loss, logits=None, **kept)
        return output if return_dict else output.to_tuple()
