"""The fused computations of transformers' Llama, Qwen3 and NanoChat; recognize.py finds them.

They are recognised by their classes, whose code must be the library's own. Settings are read in
every call. Rotary positions come from the model (cos and sin, each of two equal halves), so every
kind of them is right. A call with a mask, a filled cache or other arguments falls back (swap.py).

[Note: side by side] rope and swiglu read one packed projection, where these models have two or
three layers. Each writes its product to its place in one tensor, so that nothing is joined by
copies, of activations or of weights that backward would keep. Layers with a bias, hooks or
adapters, or under autocast or torch.compile, are called, and the rest is composed of torch's ops.
NanoChat turns by the negative angle, and its norm, which has no weight, may come first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpar.foreign.fused import head_dim_fits
from fastpar.foreign.swap import SILENT, Swapped
from fastpar.kernels import activation, attention, rms_norm, rope
from fastpar.kernels.linear import add_matmul_, matmul
from fastpar.nn.modules import autocast_dtype, has_hooks, is_plain, project

MODULES = {
    "transformers.models.llama.modeling_llama": "Llama",
    "transformers.models.qwen3.modeling_qwen3": "Qwen3",
    "transformers.models.nanochat.modeling_nanochat": "NanoChat",
}


def eps_of(norm: Any) -> float | None:
    """The eps of a family's RMSNorm; None: it has another form."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


def is_untouched(norm: Any) -> bool:
    """Whether a swapped norm is just its formula."""
    return not has_hooks(norm) and "forward" not in vars(norm) and norm.changed() is None


class RMSNorm(Swapped):
    """RMSNorm, with a weight or without."""

    does = "RMSNorm in one pass"
    falls_back = ("a weight of another dtype than x; fp64",)

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        x, weight = inputs.get(self.argument_names[0]), getattr(self, "weight", None)
        if not isinstance(x, Tensor) or x.element_size() > 4:
            return SILENT
        if weight is not None and weight.dtype != x.dtype:
            return self.falls_back[0]
        return super().refusal(inputs)

    def fused_forward(self, inputs: dict[str, Any]) -> Tensor:
        x = inputs[self.argument_names[0]]
        return rms_norm(x, getattr(self, "weight", None), eps_of(self) or 0.0)


class _SideBySide(torch.autograd.Function):
    """x [N, C] @ weight.T of several weights, [N, sum of their rows].

    The first has its D rows of each of G groups of R heads in the order [G, R, D]; its product is
    in the order [R, G, D].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: tuple[int, int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.heads = heads
        y = x.new_empty(len(x), sum(map(len, weights)))
        for part, weight in zip(y.split([*map(len, weights)], -1), _swapped(heads, weights)):
            matmul(x, weight.t(), out=part)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        parts = dy.split([*map(len, weights)], -1)
        dx = None
        for part, weight in (
            zip(parts, _swapped(ctx.heads, weights)) if ctx.needs_input_grad[0] else ()
        ):
            dx = matmul(part, weight) if dx is None else add_matmul_(dx, part, weight)
        needed = ctx.needs_input_grad[2:]
        grads = [matmul(part.t(), x) if need else None for part, need in zip(parts, needed)]
        return dx, None, *_swapped(ctx.heads[::-1], grads)


def _swapped(heads: tuple[int, int], weights: Any) -> Any:
    """The weights, the first with its rows [G, R, D] in the order [R, G, D]."""
    first, *others = weights
    if first is not None and min(heads) > 1:
        first = first.unflatten(0, (*heads, -1)).transpose(0, 1).flatten(0, 2)
    return first, *others


def side_by_side(x: Tensor, *layers: Any, heads: tuple[int, int] = (1, 1)) -> Tensor | None:
    """The outputs of linear layers in one tensor; None: see [Note: side by side]."""
    fits = autocast_dtype(x) is None and not torch.compiler.is_compiling()
    for layer in layers:
        fits = fits and is_plain(layer) and layer.bias is None and layer.weight.dtype == x.dtype
    if not fits:
        return None
    y: Tensor = _SideBySide.apply(x.flatten(0, -2), heads, *(layer.weight for layer in layers))
    return y.view(*x.shape[:-1], -1)


class MLP(Swapped):
    """The activation between the products: gate and up, or relu2."""

    does = "the activation in one pass"
    falls_back = ("hooks on the activation, or a replaced activation",)

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        part = getattr(self, self.option("part"))
        if type(part) is not self.option("kind") or has_hooks(part) or "forward" in vars(part):
            return self.falls_back[0]
        return super().refusal(inputs)

    def fused_forward(self, inputs: dict[str, Any]) -> Tensor:
        x = inputs[self.argument_names[0]]
        if self.option("part") == "activation_fn":
            return project(self.fc2, activation(project(self.fc1, x), None, "relu2"))
        both = side_by_side(x, self.gate_proj, self.up_proj)
        if both is None:
            y = F.silu(project(self.gate_proj, x)) * project(self.up_proj, x)
        else:
            y = activation(both, None, "swiglu")
        return project(self.down_proj, y)


class Attention(Swapped):
    """Causal self-attention with grouped heads, rotary positions and norms of queries and keys."""

    does = "norm and rotation of heads in one pass, attention without copies of grouped heads"
    falls_back = (
        "a mask, a filled cache or output_attentions; dropout; heads without a kernel; an "
        "attn_implementation other than sdpa",
    )

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        x, positions = inputs.get("hidden_states"), inputs.get("position_embeddings")
        if not isinstance(x, Tensor) or x.dim() != 3 or positions is None:
            return SILENT
        cache = inputs.get("past_key_values")
        handled = {"hidden_states", "position_embeddings", "past_key_values", *_IGNORED}
        if any(inputs.get(name) is not None for name in inputs.keys() - handled):
            return self.falls_back[0]
        if cache is not None and (
            type(cache).__name__ != "DynamicCache" or cache.get_seq_length(self.layer_idx)
        ):
            return self.falls_back[0]
        dropped = self.training and self.attention_dropout
        fits = head_dim_fits(x, self.head_dim) and self.config._attn_implementation == "sdpa"
        window = getattr(self, "sliding_window", None) is not None
        if dropped or window or not fits or x.element_size() > 4:
            return self.falls_back[0]
        return self.changed()

    def fused_forward(self, inputs: dict[str, Any]) -> Any:
        x = inputs["hidden_states"]
        q, k, v = self.fused_heads(x, *inputs["position_embeddings"])
        cache = inputs.get("past_key_values")
        if cache is not None:  # an empty one, as transformers makes in training, too
            cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
        if (dtype := autocast_dtype(x)) is not None:  # rotation may have widened q and k
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        o = attention(q, k, v, causal=True, softmax_scale=self.scaling)
        return project(self.o_proj, o.flatten(2)), None

    def fused_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads, D], normalized and turned."""
        many, size = self.num_key_value_groups, self.head_dim
        groups = self.k_proj.out_features // size
        norms = [self.q_norm, self.k_norm] if self.option("norms") else []
        plain = all(isinstance(n, RMSNorm) and is_untouched(n) for n in norms)
        if plain and len({eps_of(norm) for norm in norms}) < 2:
            layers = self.q_proj, self.k_proj, self.v_proj
            qkv = side_by_side(x, *layers, heads=(groups, many))
            if qkv is not None:
                sign = -1.0 if self.option("late") else 1.0
                turns = torch.cat([cos[..., : size // 2], sign * sin[..., : size // 2]], -1)
                more: dict[str, Any] = {"norm": bool(norms)}
                for letter, norm in zip("qk", norms):
                    more |= {f"{letter}_weight": getattr(norm, "weight", None), "eps": eps_of(norm)}
                return rope(qkv.unflatten(-1, (many + 2, groups, size)), turns, **more)
        heads = (*x.shape[:-1], -1, size)
        q, k, v = (project(p, x).view(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        norms, late = self.option("norms"), self.option("late")
        if norms and not late:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.option("turn")(q, k, cos, sin, unsqueeze_dim=2)
        if norms and late:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


# What transformers passes on to attention functions, which a causal kernel does not need.
_IGNORED = {"position_ids", "cache_position", "use_cache", "output_router_logits", "is_causal"}
