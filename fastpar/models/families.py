"""Llama, Qwen3 and NanoChat as transformers stores them: fields of config.json, names of weights.

    theirs                                       ours
    q_proj, k_proj, v_proj                       attn.c_attn, rows in the order of gpt.py
    gate_proj, up_proj; fc1                      mlp.c_fc
    o_proj, down_proj; fc2                       attn.c_proj, mlp.c_proj
    input_layernorm, post_attention_layernorm    ln_1, ln_2
    q_norm, k_norm                               attn.q_norm, attn.k_norm
    embed_tokens, norm, lm_head                  wte, ln_f, lm_head

[Note: order of heads] Their query head g * R + r uses the key head g; our rows have all heads r = 0
first (gpt.py, [Note: grouped heads]).

[Note: the other direction] NanoChat rotates by the negative angle. That is the usual rotation with
the two halves of each head of queries and keys swapped, so their rows are swapped here. It rotates
before it normalizes, without weights: the same, because a rotation keeps lengths.

A field that changes the function and is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.files.plain_files import printable
from fastpar.settings.model import BLOCK_FIELDS, GPTConfig


class Family(NamedTuple):
    """One kind of model.

    Attributes:
        architecture: transformers' class.
        block: fields of GPTConfig that all its models have.
        mlp: names of the weights of c_fc, and of c_proj.
        turns_back: it rotates by the negative angle.
        fields: further fields of config.json: value -> the only one that is supported.
    """

    architecture: str
    block: dict[str, Any]
    mlp: tuple[tuple[str, ...], str]
    turns_back: bool
    fields: dict[str, Any]


_MODERN = {"norm": "rms", "bias": False}
_GATED = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", {**_MODERN, "activation": "swiglu"}, _GATED, False,
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", {**_MODERN, "activation": "swiglu", "qk_norm": True}, _GATED, False,
        {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        {**_MODERN, "norm_weight": False, "norm_embedding": True, "qk_norm": True,
         "activation": "relu2"},
        (("mlp.fc1",), "mlp.fc2"), True, {"hidden_act": "relu2", "attention_bias": False},
    ),
}  # fmt: skip

# config.json's names of GPTConfig's sizes.
_SIZES = {
    "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd",
    "intermediate_size": "n_inner", "max_position_embeddings": "block_size",
    "vocab_size": "vocab_size", "rms_norm_eps": "layer_norm_eps",
}  # fmt: skip
_FREE = {  # others that are read, or do not change the function
    "architectures", "bos_token_id", "cache_implementation", "dtype", "eos_token_id",
    "final_logit_softcapping", "head_dim", "initializer_range", "layer_types",
    "max_window_layers", "model_type", "num_key_value_heads", "pad_token_id", "rope_parameters",
    "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
# Dropout rates. The last two are GPT-2's, which transformers keeps here, but does not apply.
_RATES = ("attention_dropout", "embd_pdrop", "resid_pdrop")


def _unsupported(source: str, name: str, got: object, expected: str) -> ValueError:
    return ValueError(
        f"load_hf: expected {expected}, got {name}={printable(str(got))} in {source}; this variant "
        "is not supported, as its logits would differ"
    )


def config_of(raw: Mapping[str, Any], source: str, dropout: float | None) -> GPTConfig:
    """The shape that the config.json of a model of FAMILIES describes.

    Args:
        source: the file, for messages.
        dropout: replaces the config's three rates, which must be equal otherwise; a missing one
            is 0.
    Raises:
        ValueError: a field that changes the function and is not supported; a missing number.
    """
    family = FAMILIES[raw["model_type"]]
    for name, value in raw.items():
        if name in family.fields:
            if value not in (family.fields[name], None):
                raise _unsupported(source, name, value, f"{name}={family.fields[name]}")
        elif name not in (*_SIZES, *_FREE, *_RATES) and value not in (None, False):
            raise _unsupported(source, name, value, f"no field {name}")
    windows = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    if windows:
        raise _unsupported(source, "layer_types", windows[0], "layers of full_attention")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", None) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(source, "rope_parameters", rope, "rope_type=default of whole heads")
    rates = {name: raw.get(name) or 0.0 for name in _RATES}
    if dropout is None:
        dropout = rates["attention_dropout"]
        if any(rate != dropout for rate in rates.values()):
            got = ", ".join(f"{name}={rate}" for name, rate in rates.items())
            raise ValueError(
                f"load_hf: expected one dropout rate, got {got} in {source}; choose one with "
                "dropout="
            )
    given: dict[str, Any] = {ours: raw.get(theirs) for theirs, ours in _SIZES.items()}
    given |= {"rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0))}
    given |= {"n_kv_head": raw.get("num_key_value_heads") or given["n_head"]}
    for name, value in given.items():
        if type(value) not in (int, float):
            raise ValueError(
                f"load_hf: expected numbers of sizes, got {name}={printable(str(value))} in "
                f"{source}; write the file again"
            )
    if given["n_kv_head"] == given["n_head"]:
        given["n_kv_head"] = None
    head_dim = raw.get("head_dim")
    plain = head_dim is None or head_dim * given["n_head"] == given["n_embd"]
    return GPTConfig(
        **given,
        **family.block,
        head_dim=None if plain else head_dim,
        tied=bool(raw.get("tie_word_embeddings", False)),
        logit_softcap=raw.get("final_logit_softcapping") or 0.0,
        dropout=dropout,
    )


def family_of(config: GPTConfig) -> str | None:
    """The model_type of transformers that has this block, None if none has."""
    free = {"rope_theta", "n_kv_head", "head_dim", "n_inner", "tied", "logit_softcap"}
    for name, family in FAMILIES.items():
        wanted = {k: family.block.get(k, v) for k, v in BLOCK_FIELDS.items() if k not in free}
        same = all(getattr(config, key) == value for key, value in wanted.items())
        softcap = not config.logit_softcap or name == "nanochat"
        if same and config.rope_theta and softcap and not config.n_expert:
            return name
    return None


def config_json(
    config: GPTConfig, name: str, dtype: str, bos: int | None, eos: int | None
) -> dict[str, Any]:
    """The config.json of a model of this family."""
    family = FAMILIES[name]
    sizes = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **sizes,
        "intermediate_size": config.inner,
        "num_key_value_heads": config.n_head // config.queries_per_key,
        "head_dim": config.head_size,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **dict.fromkeys(_RATES if config.dropout else _RATES[:1], config.dropout),
        "tie_word_embeddings": config.tied,
        **({"final_logit_softcapping": config.logit_softcap} if name == "nanochat" else {}),
        **family.fields,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def _names(config: GPTConfig, name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(our name, theirs) of each weight."""
    parts, proj = FAMILIES[name].mlp
    yield "wte.weight", ("model.embed_tokens.weight",)
    for i in range(config.n_layer):
        ours, theirs = f"h.{i}.", f"model.layers.{i}."
        found = [
            ("attn.c_attn", tuple(f"self_attn.{x}_proj" for x in "qkv")),
            ("attn.c_proj", ("self_attn.o_proj",)),
            ("mlp.c_fc", parts),
            ("mlp.c_proj", (proj,)),
        ]
        if config.norm_weight:
            found += [("ln_1", ("input_layernorm",)), ("ln_2", ("post_attention_layernorm",))]
            if config.qk_norm:
                found += [(f"attn.{x}_norm", (f"self_attn.{x}_norm",)) for x in "qk"]
        for a, several in found:
            yield f"{ours}{a}.weight", tuple(f"{theirs}{b}.weight" for b in several)
    if config.norm_weight:
        yield "ln_f.weight", ("model.norm.weight",)
    if not config.tied:
        yield "lm_head.weight", ("lm_head.weight",)


def _reordered(x: Tensor, config: GPTConfig, name: str, *, queries: bool, inward: bool) -> Tensor:
    """The rows of queries or keys in the other order; see the notes above."""
    many, size = config.queries_per_key if queries else 1, config.head_size
    groups = config.n_head // config.queries_per_key
    sides = (groups, many) if inward else (many, groups)
    heads = x.view(*sides, size, *x.shape[1:]).transpose(0, 1)
    if FAMILIES[name].turns_back:
        heads = heads.unflatten(2, (2, size // 2)).flip(2).flatten(2, 3)
    return heads.reshape(x.shape)


def weights_in(config: GPTConfig, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their weights by our names, [out, in]; unknown tensors keep their names.

    Raises:
        ValueError: a weight is missing, or has another size.
    """
    left, found = dict(tensors), dict[str, Tensor]()
    if config.tied and (head := left.pop("lm_head.weight", None)) is not None:
        table = left.get("model.embed_tokens.weight")
        if table is None or not torch.equal(head, table):
            raise ValueError(
                "load_hf: expected lm_head.weight equal to model.embed_tokens.weight with "
                "tie_word_embeddings, got other values; set tie_word_embeddings to false"
            )
    for ours, theirs in _names(config, name):
        missing = [key for key in theirs if key not in left]
        if missing:
            raise ValueError(
                f"load_hf: expected a tensor {missing[0]}, got none of this name; pass the weights "
                f"of a {FAMILIES[name].architecture} of the config's sizes"
            )
        parts = [left.pop(key) for key in theirs]
        if ours.endswith("c_attn.weight"):
            q, k, v = parts
            rows, keys = (
                config.n_head // n * config.head_size for n in (1, config.queries_per_key)
            )
            if (len(q), len(k), len(v)) != (rows, keys, keys):
                raise ValueError(
                    f"load_hf: expected {theirs[0]} of {rows} rows and {theirs[1]} of {keys}, got "
                    f"{len(q)} and {len(k)}; the config does not fit the weights"
                )
            parts = [_reordered(x, config, name, queries=x is q, inward=True) for x in (q, k)]
            parts.append(v)
        found[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return {**found, **{key: x for key, x in left.items() if not key.endswith("inv_freq")}}


def weights_out(config: GPTConfig, name: str, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of weights_in()."""
    found: dict[str, Tensor] = {}
    for key, theirs in _names(config, name):
        x = ours[key]
        if len(theirs) == 3:
            rows, keys = (
                config.n_head // n * config.head_size for n in (1, config.queries_per_key)
            )
            q, k, v = x.split((rows, keys, keys))
            q, k = (_reordered(y, config, name, queries=y is q, inward=False) for y in (q, k))
            parts = [q, k, v]
        else:
            parts = list(x.chunk(len(theirs)))
        found.update(zip(theirs, (part.contiguous() for part in parts)))
    return found
