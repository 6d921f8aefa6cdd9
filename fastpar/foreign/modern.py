"""The fused computations of transformers' Llama, Qwen3 and NanoChat; recognize.py finds them.

They are recognised by their classes, whose code must be the library's own. Settings are read in
every call. Rotary positions come from the model (cos and sin), so every kind of them
is right. A call with a mask, a filled cache or other arguments falls back (swap.py).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastpar.foreign.fused import head_dim_fits
from fastpar.foreign.swap import SILENT, Swapped
from fastpar.kernels import activation, attention, rms_norm
from fastpar.nn.modules import has_hooks, project

MODULES = {
    "transformers.models.llama.modeling_llama": "Llama",
    "transformers.models.qwen3.modeling_qwen3": "Qwen3",
    "transformers.models.nanochat.modeling_nanochat": "NanoChat",
}


def eps_of(norm: Any) -> float | None:
    """The eps of a family's RMSNorm; None: it has another form."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


class RMSNorm(Swapped):
    """RMSNorm, with a weight or without."""

    does = "RMSNorm in one pass"
    falls_back = ("a weight of another dtype than x; fp64",)

    def refusal(self, given: dict[str, Any]) -> str | None:
        x, weight = given.get(self.argument_names[0]), getattr(self, "weight", None)
        if not isinstance(x, Tensor) or x.element_size() > 4:
            return SILENT
        if weight is not None and weight.dtype != x.dtype:
            return self.falls_back[0]
        return super().refusal(given)

    def fused_forward(self, given: dict[str, Any]) -> Tensor:
        x = given[self.argument_names[0]]
        return rms_norm(x, getattr(self, "weight", None), eps_of(self) or 0.0)


class MLP(Swapped):
    """The activation between the products: gate and up, or relu2."""

    does = "the activation in one pass"
    falls_back = ("hooks on the activation, or a replaced activation",)

    def refusal(self, given: dict[str, Any]) -> str | None:
        part = getattr(self, self.option("part"))
        if type(part) is not self.option("kind") or has_hooks(part) or "forward" in vars(part):
            return self.falls_back[0]
        return super().refusal(given)

    def fused_forward(self, given: dict[str, Any]) -> Tensor:
        x = given[self.argument_names[0]]
        if self.option("part") == "activation_fn":
            return project(self.fc2, activation(project(self.fc1, x), None, "relu2"))
        y = F.silu(project(self.gate_proj, x)) * project(self.up_proj, x)
        return project(self.down_proj, y)


class Attention(Swapped):
    """Causal self-attention with grouped heads, rotary positions and norms of queries and keys."""

    does = "attention without copies of grouped heads"
    falls_back = (
        "a mask, a filled cache or output_attentions; dropout; heads without a kernel; an "
        "attn_implementation other than sdpa",
    )

    def refusal(self, given: dict[str, Any]) -> str | None:
        x, positions = given.get("hidden_states"), given.get("position_embeddings")
        if not isinstance(x, Tensor) or x.dim() != 3 or positions is None:
            return SILENT
        cache = given.get("past_key_values")
        known = {"hidden_states", "position_embeddings", "past_key_values", *_IGNORED}
        if any(given.get(name) is not None for name in given.keys() - known):
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

    def fused_forward(self, given: dict[str, Any]) -> Any:
        x, (cos, sin) = given["hidden_states"], given["position_embeddings"]
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (project(p, x).view(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        norms, late = self.option("norms"), self.option("late")
        if norms and not late:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.option("turn")(q, k, cos, sin, unsqueeze_dim=2)
        if norms and late:
            q, k = self.q_norm(q), self.k_norm(k)
        cache = given.get("past_key_values")
        if cache is not None:  # an empty one, as transformers makes in training, too
            cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
        o = attention(q, k, v, causal=True, softmax_scale=self.scaling)
        return project(self.o_proj, o.flatten(2)), None


# What transformers passes on to attention functions, which a causal kernel does not need.
_IGNORED = {"position_ids", "cache_position", "use_cache", "output_router_logits", "is_causal"}
