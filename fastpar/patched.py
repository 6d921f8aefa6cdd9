"""What the modules of a foreign GPT-2 do once patching.py has swapped them.

[Note: how a module is swapped] The instance gets another class: a subclass of its own class, made
from a mixin of this file, with the same name. Parameters, hooks, state_dict keys, isinstance and
code that goes by class names (transformers' save_pretrained, FSDP's wrapping) see no difference.
Such a class cannot be imported by name, so an instance is pickled and copied as its mixin and its
own class.

[Note: falling back] A call that asks for something the kernels do not have goes to the module's own
forward as a whole. It warns once for each reason and model, and is counted in the report. What
torch.compile traces is not counted, and warns when it is traced.

[Note: split parts] parallelize() may split the parts, see tp_layers.py: a rank then has some of the
heads, and draws their part of the masks. A call with dropout in attention that would fall back is
refused: torch would draw the same mask on every rank, for other heads.

[Note: parts that are not called] A swapped module uses the weights of its plain parts directly. A
part with hooks, a wrapped forward or another class than it had is called instead, and what would
have been fused with it is not (test_hooks_run_in_a_patched_model).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastpar.kernels import attention_qkvpacked, layer_norm, linear_cross_entropy
from fastpar.modules import (
    LayerNorm,
    autocast_dtype,
    autocast_norm,
    has_hooks,
    is_plain,
    linear_gelu,
    project,
)
from fastpar.tp_layers import (
    TokenDropout,
    VocabParallelLinear,
    gives_product,
    head_dropout,
    residual_norm,
    tp_of,
)

# Set by Model for the attention of its blocks: "causal" (whatever mask comes with it is the causal
# one) or "attentions" (the caller wants the probabilities).
MASK_HINT = "fastpar_mask"
# Arguments of GPT-2's blocks and attention that do not change what they compute, or are looked at.
HARMLESS = {
    "cache_position", "encoder_attention_mask", "encoder_hidden_states", "num_items_in_batch",
    "output_hidden_states", "position_ids", "return_dict", "use_cache", "attention_mask",
    "layer_past", "past_key_value", "past_key_values", "head_mask", "output_attentions", MASK_HINT,
}  # fmt: skip


class Swap:
    """What a swapped module remembers: its own class, its mixin, what was found out about it."""

    def __init__(self, mixin: Any, original: Any, fallbacks: Counter[str], options: dict[str, Any]):
        self.mixin, self.original = mixin, original
        self.fallbacks, self.options = fallbacks, options


def swap_of(module: nn.Module) -> Swap | None:
    """The Swap of a swapped module."""
    return vars(module).get("_fastpar_swap")


def _announce(name: str, reason: str) -> None:
    warnings.warn(
        f"fastpar.patch: {name} falls back to its own forward for this call: {reason}",
        stacklevel=4,
    )


# torch.compile calls it while tracing; torch.compiler.assume_constant_result would set the same
# mark, but imports the compiler.
_announce._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fall_back(module: nn.Module, reason: str) -> None:
    """Warns and counts; see [Note: falling back]."""
    name = type(module).__name__
    if torch.compiler.is_compiling():
        _announce(name, reason)
        return
    swap = swap_of(module)
    if swap is None:  # another instance of a swapped class
        return
    key = f"{name}: {reason}"
    if key not in swap.fallbacks:
        _announce(name, reason)
    swap.fallbacks[key] += 1


class Swapped(nn.Module):
    """Base of the mixins; see [Note: how a module is swapped]."""

    names: tuple[str, ...] = ()  # of the original forward's positional arguments
    does = ""  # for the report: what is faster
    falls_back: tuple[str, ...] = ()  # for the report: when

    if TYPE_CHECKING:  # the original's attributes

        def __getattr__(self, name: str) -> Any: ...

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name."""
        return {**dict(zip(self.names, args)), **kwargs}

    def option(self, name: str) -> Any:
        return vars(self)["_fastpar_swap"].options[name]

    def _get_name(self) -> str:
        return f"fastpar.{type(self).__name__}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        swap = swap_of(self)
        if swap is None or type(self) is not swapped_class(swap.mixin, swap.original):
            return super().__reduce_ex__(protocol)
        # Python 3.10 has no object.__getstate__.
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _new, (swap.mixin, swap.original), state


def _new(mixin: Any, original: Any) -> nn.Module:
    kind = swapped_class(mixin, original)
    return kind.__new__(kind)


@functools.cache
def swapped_class(mixin: Any, original: Any) -> Any:
    """The class of a swapped module: made from a mixin, or fastpar's own in place of torch's."""
    if not issubclass(mixin, Swapped):
        return mixin
    names = [
        p.name
        for p in inspect.signature(original.forward).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(original.forward)  # transformers reads its signature
    def forward(self, *args, **kwargs):
        return mixin.forward(self, *args, **kwargs)

    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "names": tuple(names[1:]),
        "forward": forward,
    }
    return type(original)(original.__name__, (mixin, original), body)


def probs_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the probabilities' dropout, read from an nn.Dropout or a number; None is 0."""
    if name is None or not attn.training:
        return 0.0
    source: Any = getattr(attn, name)
    return source.p if isinstance(source, nn.Dropout) else source


def resid_rate(attn: nn.Module, name: str | None) -> float:
    """Rate of the output's dropout, an nn.Dropout that may be in another mode than attn."""
    dropout: Any = None if name is None else getattr(attn, name)
    return dropout.p if dropout is not None and dropout.training else 0.0


def rate_fits(p: float) -> bool:
    """Whether the kernels' masks have this rate; see kernels.quantize_p."""
    return p == 0.0 or 1.0 / 512 < p < 1.0


def _is_one_of(part: nn.Module, *kinds: type) -> bool:
    return type(part) in kinds and not has_hooks(part) and "forward" not in vars(part)


def _is_observed(attn: nn.Module) -> bool:
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

    def forward(self, *args, **kwargs):
        if len(args) != 1 or kwargs:
            fall_back(self, "arguments besides x")
            return super().forward(*args, **kwargs)
        x = autocast_norm(args[0])
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

    def forward(self, *args, **kwargs):
        activation = getattr(self, self.option("activation"))
        reason = None
        if len(args) != 1 or kwargs:
            reason = "arguments besides x"
        elif not _is_one_of(activation, self.option("kind")):
            reason = "hooks on the activation, or another one in its place"
        if reason is not None:
            fall_back(self, reason)
            return super().forward(*args, **kwargs)
        y = linear_gelu(self.c_fc, args[0], self.option("approximate"))
        y = project(self.c_proj, y)
        dropout = self.option("dropout")
        return y if dropout is None else getattr(self, dropout)(y)


class Attention(Swapped):
    """Self-attention of nanoGPT's shape, read in place from c_attn's output."""

    does = "attention on the packed projection"
    falls_back: tuple[str, ...] = (
        "arguments besides x",
        "a dropout rate of 1, or of 1/512 and less",
    )

    def refusal(self, given: dict[str, Any]) -> str | None:
        """Why the call falls back, if it does."""
        for name, value in given.items():
            if name != self.names[0] and value is not None and value is not False:
                return f"the argument {name}"
        return self.misfit(given)

    def misfit(self, given: dict[str, Any]) -> str | None:
        x = given.get(self.names[0])
        if not isinstance(x, Tensor) or x.dim() != 3:
            return "x is not [B, T, C]"
        if not rate_fits(probs_rate(self, self.option("probs"))):
            return "a dropout rate of 1, or of 1/512 and less"
        return None

    def heads(self, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any]:
        """[B, T, C] -> the heads' outputs, [B, T, C], for c_proj; and what result() wants."""
        qkv = project(self.c_attn, x).unflatten(-1, (3, self.n_head, -1))  # [B, T, 3, H, D]
        p = probs_rate(self, self.option("probs"))
        dropout = head_dropout(self.c_attn, qkv, p)
        return attention_qkvpacked(qkv, **dropout).flatten(2), None

    def forward(self, *args, **kwargs):
        given = self.given(args, kwargs)
        reason = self.refusal(given)
        if reason is not None:
            if tp_of(self.c_attn) is not None and probs_rate(self, self.option("probs")) > 0.0:
                raise ValueError(
                    f"{type(self).__name__}: expected a call that needs no fallback while dropout "
                    f"is on in split attention, got {reason}; see fastpar.patch's report, or set "
                    "attention's dropout to 0"
                )
            fall_back(self, reason)
            kwargs.pop(MASK_HINT, None)
            return super().forward(*args, **kwargs)
        y, present = self.heads(given[self.names[0]], given)
        y = project(self.c_proj, y)
        dropout = self.option("resid")
        return self.result(y if dropout is None else getattr(self, dropout)(y), present)

    def result(self, y: Tensor, present: Any) -> Any:
        return y


class GPT2Attention(Attention):
    """transformers' GPT2Attention with sdpa or eager attention."""

    falls_back = (
        "an attention_mask (padding); leave it out when no token is padding",
        "a past_key_values that holds tokens already (generation after the first step)",
        "output_attentions=True, head_mask, encoder_hidden_states, reorder_and_upcast_attn",
        "an attn_implementation other than sdpa and eager",
        "a dropout rate of 1, or of 1/512 and less",
    )

    def refusal(self, given: dict[str, Any]) -> str | None:
        config: Any = self.config
        implementation = getattr(config, "_attn_implementation", "eager")
        if implementation not in ("sdpa", "eager"):
            return f"attn_implementation={implementation}"
        hint = given.get(MASK_HINT)
        if given.get("output_attentions") or hint == "attentions":
            return "output_attentions=True"
        # A hook may want the probabilities, which only the eager implementation returns.
        causal = hint == "causal" and not _is_observed(self)
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
        for name, value in given.items():
            if name in self.names[:1] or name in HARMLESS:
                continue
            if value is not None and value is not False:
                return f"the argument {name}"
        return self.cache_misfit(given) or self.misfit(given)

    def cache_misfit(self, given: dict[str, Any]) -> str | None:
        if given.get("layer_past") is not None:
            return "layer_past"
        cache = self.cache(given)
        if cache is None:
            return None
        if type(cache).__name__ != "DynamicCache" or not hasattr(cache, "update"):
            return f"past_key_values of type {type(cache).__name__}"
        return "past_key_values with tokens" if cache.get_seq_length(self.layer_idx) else None

    def cache(self, given: dict[str, Any]) -> Any:
        cache = given.get("past_key_values")
        return given.get("past_key_value") if cache is None else cache

    def scale(self) -> float:
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (self.layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale

    def heads(self, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any]:
        qkv = project(self.c_attn, x).unflatten(-1, (3, self.num_heads, self.head_dim))
        _, k, v = qkv.transpose(1, 3).unbind(2)  # [B, H, T, D]
        cache, present = self.cache(given), None
        if cache is not None:
            cache.update(k, v, self.layer_idx)
        elif "layer_past" in self.names and given.get("use_cache"):  # transformers before 4.53
            present = (k, v)
        p = probs_rate(self, "attn_dropout")
        dropout = head_dropout(self.c_attn, qkv, p)
        return attention_qkvpacked(qkv, softmax_scale=self.scale(), **dropout).flatten(2), present

    def result(self, y: Tensor, present: Any) -> Any:
        return y, present


class Block(Swapped):
    """x + attn(ln_1(x)), then x + mlp(ln_2(x)); ln_2 in one pass with what comes before it."""

    does = "c_proj's bias + dropout + residual add + LayerNorm in one pass"
    falls_back = ("hooks on attn or its parts or on ln_2, or others in their places",)

    def forward(self, *args, **kwargs):
        given = self.given(args, kwargs)
        x: Any = given.get(self.names[0])
        attn = self.attn
        norm = _norm_weights(self.ln_2)
        fused = (
            isinstance(attn, Attention)
            and not _is_observed(attn)
            and "forward" not in vars(attn)
            and (is_plain(attn.c_proj) or gives_product(attn.c_proj))
            and self._dropout_fits(attn)
        )
        if not fused or norm is None:
            fall_back(self, self.falls_back[0])
            return super().forward(*args, **kwargs)
        if given.get("encoder_hidden_states") is not None:
            fall_back(self, "encoder_hidden_states")
            return super().forward(*args, **kwargs)
        rest = {name: value for name, value in given.items() if name != self.names[0]}
        rest[attn.names[0]] = x
        if attn.refusal(rest) is not None:  # attn will say so
            return super().forward(*args, **kwargs)
        # Under autocast torch's LayerNorm returns fp32 where the residual stream has 16 bits.
        if x.dtype != torch.float32 and (autocast_dtype(x) or attn.c_proj.weight.dtype != x.dtype):
            fall_back(self, "a 16-bit residual stream with autocast or weights of another dtype")
            return super().forward(*args, **kwargs)
        y, _ = attn.heads(self.ln_1(x), rest)
        p = resid_rate(attn, attn.option("resid"))
        y, x = residual_norm(attn.c_proj, y, x, norm, p)
        return x + self.mlp(y)

    def _dropout_fits(self, attn: Any) -> bool:
        name = attn.option("resid")
        if name is None:
            return True
        plain = _is_one_of(getattr(attn, name), nn.Dropout, TokenDropout)
        return plain and rate_fits(resid_rate(attn, name))


class Model(Swapped):
    """transformers' GPT2Model: tells attention when the mask it gets is the causal one."""

    does = "knows a causal mask without looking at it"

    def forward(self, *args, **kwargs):
        given, config = self.given(args, kwargs), self.config
        default = getattr(config, "output_attentions", False)
        if given.get("output_attentions", default):
            kwargs[MASK_HINT] = "attentions"
        elif given.get("attention_mask") is None and given.get("position_ids") is None:
            # With position_ids transformers looks for several documents in a row.
            kwargs[MASK_HINT] = "causal"
        return super().forward(*args, **kwargs)


class LMHead(Swapped):
    """transformers' GPT2LMHeadModel: in training, the loss of labels without logits."""

    does = "loss without logits in training (fused_loss=True): the output's logits are None"
    falls_back = ("logits_to_keep, another loss_function, fp64, hooks on or another lm_head",)

    def forward(self, *args, **kwargs):
        given = self.given(args, kwargs)
        labels = given.pop("labels", None)
        if not self.training or labels is None or swap_of(self) is None:
            return super().forward(*args, **kwargs)
        shift_labels = given.get("shift_labels")
        keep = [given.pop(name, 0) for name in ("logits_to_keep", "num_logits_to_keep")]
        loss_function = getattr(self, "loss_function", None)
        head: Any = self.lm_head
        split = isinstance(head, VocabParallelLinear) and tp_of(head) is not None
        if (
            any(isinstance(k, Tensor) or k for k in keep)
            or getattr(loss_function, "__name__", "ForCausalLMLoss") != "ForCausalLMLoss"
            or not (split or (is_plain(head) and type(head) is nn.Linear))
            or head.bias is not None
            or (head.weight.dtype == torch.float64 and not split)
        ):
            fall_back(self, self.falls_back[0])
            return super().forward(*args, **kwargs)

        return_dict = given.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        outputs = self.transformer(**given, return_dict=True)
        x = outputs.last_hidden_state
        ignore_index = given.get("ignore_index", -100)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        items = given.get("num_items_in_batch")
        options = {
            "ignore_index": ignore_index,
            "reduction": "mean" if items is None else "sum",
        }
        if split:
            loss = head.loss(x, shift_labels.to(x.device), **options)
        else:
            dtype = autocast_dtype(x) or x.dtype
            weight = head.weight if dtype == x.dtype else head.weight.to(dtype)
            loss = linear_cross_entropy(x.to(dtype), weight, shift_labels.to(x.device), **options)
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        output = self.option("output")(
            loss=loss,
            logits=None,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )
        return output if return_dict else output.to_tuple()
