"""Decides which module of a foreign model gets which fused class, and why others are left.

transformers' GPT-2 is recognised by its classes, unless someone replaced one of their functions: a
forward, a function that a forward calls, or an entry of the registry of attention functions. A
function is the library's own if its code, and that of every wrapper around it, is in one of the
library's files. A model of nanoGPT's shape is recognised by the names and types of its parts, which
must then prove what they compute, see proof.py. In any other model nn.LayerNorm, nn.RMSNorm,
nn.GELU and nn.Embedding are swapped if they are exactly these classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.foreign import fused, modern, proof, swap
from fastpar.foreign.swap import Swap
from fastpar.kernels.attention import MAX_HEAD_DIM
from fastpar.kernels.norm import MAX_COLUMNS
from fastpar.nn import modules
from fastpar.nn.modules import embedding_options, is_linear

GPT2 = "transformers.models.gpt2.modeling_gpt2"
TORCH = os.path.dirname(torch.__file__)
# torch's classes: fastpar's replacement, and what it improves.
TORCH_CLASSES: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.LayerNorm: (modules.LayerNorm, "LayerNorm in one pass"),
    nn.RMSNorm: (modules.RMSNorm, "RMSNorm in one pass"),
    nn.GELU: (modules.GELU, "GELU in one pass"),
    nn.Embedding: (modules.Embedding, "deterministic backward without atomics"),
}
OURS = ("fastpar.nn", "fastpar.models.", "fastpar.axes.")  # fastpar's own modules


# A string says why a module is left; None if that is not worth reporting.
Plan = Swap | str | None


def is_own(function: Any, *roots: str) -> bool:
    """Whether the function and all that it wraps are defined in files below one of the folders."""
    while isinstance(function, FunctionType):
        if not function.__code__.co_filename.startswith(tuple(root + os.sep for root in roots)):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def torch_forward(kind: type[nn.Module]) -> str | None:
    """The name of a torch class whose forward was replaced."""
    return None if is_own(kind.forward, TORCH) else f"{kind.__name__}.forward"


def replaced_code(kind: type[nn.Module]) -> str | None:
    """The name of what was replaced in a transformers class or in what its methods call."""
    source = sys.modules[kind.__module__]
    root = os.path.dirname(sys.modules["transformers"].__file__ or "")
    methods = {"forward": kind.forward, "__call__": kind.__call__}
    for base in reversed(kind.__mro__):
        if base.__module__ == kind.__module__:
            methods |= {k: v for k, v in vars(base).items() if isinstance(v, FunctionType)}
    for name, method in methods.items():
        # A torch wrapper (no_grad) around a forward would be someone else's change.
        if not (is_own(method, root) or (name != "forward" and is_own(method, root, TORCH))):
            return f"{kind.__name__}.{name}"
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        for used in method.__code__.co_names:
            value = vars(source).get(used)
            if isinstance(value, FunctionType) and not is_own(value, root):
                return used
            if isinstance(value, type) and issubclass(value, nn.Module):
                at = TORCH if value.__module__.startswith("torch.") else root
                if not is_own(value.forward, at):
                    return f"{used}.forward"
    for part in (nn.Dropout, nn.LayerNorm, nn.Linear):
        if torch_forward(part) is not None:
            return torch_forward(part)
    registry = getattr(source, "ALL_ATTENTION_FUNCTIONS", None)
    if registry is not None and not is_own(registry["sdpa"], root):
        return "the attention function registered for sdpa"
    return None


def seen_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and its parts, without the parts of proven ones, which stand-ins replace."""
    closed: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if name.startswith(closed):
            continue
        yield name, part
        if part is not module and isinstance(part, fused.Attention | fused.MLP):
            closed += (f"{name}.",)


def look_of(module: nn.Module) -> Any:
    """A key that is equal for modules which differ only in the values of their tensors."""
    look: list[Any] = []
    for name, part in seen_parts(module):
        look += [name, type(part), swap.swap_of(part) is None, tuple(part._modules)]
        if part is not module and isinstance(part, fused.Attention | fused.MLP):
            continue
        by_layer = getattr(part, "scale_attn_by_inverse_layer_idx", False)
        in_cache = {"layer_idx"} if type(part).__module__ == GPT2 and not by_layer else set()
        for key, value in vars(part).items():
            if key not in swap.MODULE_FIELDS and key not in in_cache:
                known = isinstance(value, int | float | str | tuple | None)
                look += [key, repr(value) if known else id(value)]
        tensors = [*part._parameters.items(), *part._buffers.items()]
        look += [(k, t.shape, t.dtype, t.is_meta) for k, t in tensors if t is not None]
    return tuple(look)


def plan_losses(model: nn.Module) -> dict[nn.Module, Plan]:
    """Plans for fused_loss of models of nanoGPT's shape; transformers' follow from their parts.

    Raises:
        ValueError: there is no such model, or one with another loss.
    """
    plans: dict[nn.Module, Plan] = {}
    heads = ("GPT2LMHeadModel", *(f"{name}ForCausalLM" for name in modern.MODULES.values()))
    kinds = map(type, model.modules())
    why, found = "", any(k.__name__ in heads and is_transformers(k) for k in kinds)
    for module in model.modules():
        known = is_transformers(type(module)) or type(module).__module__.startswith(OURS)
        norm = None if known else fused.loss_shape(module)
        if isinstance(module, fused.Loss):
            found = True
        elif norm is not None:
            try:
                fused.prove_loss(module, norm)
                conditions = proof.conditions_of(module, {}, tuple(module._modules), None)
                plans[module] = Swap(fused.Loss, {"norm": norm}, conditions)
            except Exception as error:
                why = f", which {proof.words_of(error)}"
    if why or not (found or plans):
        raise ValueError(
            "patch: expected transformers' GPT2LMHeadModel or nanoGPT's "
            f"forward(idx, targets=None) for fused_loss=True, got model={type(model).__name__}{why}"
            "; use fastpar.nn.LinearCrossEntropyLoss in its forward"
        )
    return plans


def is_transformers(kind: type) -> bool:
    """Whether a class is of a kind of model that is known by its code."""
    return kind.__module__ in (GPT2, *modern.MODULES)


def _is_gpt2(module: nn.Module, *names: str) -> bool:
    return type(module).__module__ == GPT2 and type(module).__name__ in names


def plan(name: str, module: nn.Module, fused_loss: bool, looks: Looks) -> Plan:
    """The plan for a module whose parts are swapped already."""
    method = swap.replaced_in(module)
    if method is not None:
        return f"its {method} was replaced"
    if type(module) in TORCH_CLASSES:
        return _plan_torch(module)
    ours = type(module).__module__.startswith(OURS)
    if ours and not isinstance(module, modules.CausalSelfAttention):
        return None
    found = looks.plan(name, module, fused_loss)
    if isinstance(found, Swap):
        kind: Any = type(module)
        if swap.swapped_class(found.mixin, kind).own_forward[0] is not kind.forward:
            return "its class's forward was replaced after it was first patched"
    if found is not None or module._modules:
        return found
    if isinstance(module, nn.Linear | nn.Dropout) or is_linear(module):
        return "torch's, fastpar has no faster one"
    return "unknown class" if any(True for _ in module.parameters()) else None


def _plan_torch(module: Any) -> Plan:
    replaced = torch_forward(type(module))
    if replaced is not None:
        return f"{replaced} was replaced"
    if isinstance(module, nn.Embedding):
        options = embedding_options(module)
        if options:
            return f"no kernel supports {', '.join(f'{k}={v}' for k, v in options.items())}"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        columns = math.prod(module.normalized_shape)
        if not 1 <= columns <= MAX_COLUMNS:
            return f"{columns} elements per row, the kernel supports 1 to {MAX_COLUMNS}"
    return Swap(TORCH_CLASSES[type(module)][0])


def _plan_gpt2(module: Any, fused_loss: bool) -> Plan:
    names = {"GPT2Attention", "GPT2SdpaAttention", "GPT2MLP", "GPT2Block", "GPT2Model"}
    if not _is_gpt2(module, *names, "GPT2LMHeadModel"):
        return None
    replaced = replaced_code(type(module))
    if replaced is not None:
        return f"{replaced} was replaced"
    if _is_gpt2(module, "GPT2Attention", "GPT2SdpaAttention"):
        return _plan_gpt2_attention(module)
    if _is_gpt2(module, "GPT2MLP"):
        return _plan_mlp(module, "act", long=False)
    if _is_gpt2(module, "GPT2Block"):
        returns = type(module).forward.__annotations__.get("return")
        if returns not in (Tensor, "torch.Tensor"):
            return "returns a tuple (transformers 4): residual add and LayerNorm are not fused"
        if not isinstance(module.attn, fused.GPT2Attention):
            return "its attention was left unchanged"
        return Swap(fused.Block)
    if _is_gpt2(module, "GPT2Model"):
        takers = [type(module), *(swap.swap_of(b.attn) for b in module.h), *map(type, module.h)]
        return Swap(fused.Model) if all(map(_takes_hints, takers)) else None
    return _plan_head(module, fused_loss, "CausalLMOutputWithCrossAttentions")


def _plan_head(module: Any, fused_loss: bool, output: str) -> Plan:
    """The plan of a causal model; output: the class of what it returns."""
    if not fused_loss:
        return "computes its own logits and loss; fused_loss=True computes the loss without logits"
    from transformers import modeling_outputs

    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:  # up to 4.45
        ForCausalLMLoss: Any = None  # type: ignore[no-redef]
    kind = getattr(modeling_outputs, output)
    options = {
        "output": kind,
        "kept": [f.name for f in dataclasses.fields(kind) if f.name not in ("loss", "logits")],
        "asks": "loss_function" in inspect.unwrap(type(module).forward).__code__.co_names,
        "loss": ForCausalLMLoss,
    }
    return Swap(fused.LMHead, options)


def _plan_modern(module: Any, fused_loss: bool) -> Plan:
    """The plan for a module of Llama, Qwen3 or NanoChat, recognised by its code."""
    kind: Any = type(module)
    family = modern.MODULES[kind.__module__]
    part = kind.__name__.removeprefix(family)
    if part not in ("RMSNorm", "MLP", "Attention", "ForCausalLM"):
        return None
    replaced = replaced_code(kind)
    if replaced is not None:
        return f"{replaced} was replaced"
    if part == "ForCausalLM":
        return _plan_head(module, fused_loss, "CausalLMOutputWithPast")
    names: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    if part == "RMSNorm":
        names = ("variance_epsilon" if hasattr(module, "variance_epsilon") else "eps",)
        options = {"eps": getattr(module, names[0])}
    elif part == "MLP":
        options = {"part": "act_fn" if hasattr(module, "act_fn") else "activation_fn"}
        act = getattr(module, options["part"])
        if type(act).__name__ not in ("SiLU", "SiLUActivation", "ReLUSquaredActivation"):
            return f"its {options['part']} ({type(act).__name__}) is not SiLU or relu2"
        if (type(act).__name__ == "ReLUSquaredActivation") is (options["part"] == "act_fn"):
            return f"its {options['part']} is {type(act).__name__}, another than its class has"
        options |= {"kind": type(act)}
    else:
        if getattr(module, "sliding_window", None) is not None:
            return "a window of attention has no kernel"
        names = "head_dim", "scaling", "attention_dropout"
        turn = vars(sys.modules[kind.__module__])["apply_rotary_pos_emb"]
        options = {"norms": hasattr(module, "q_norm"), "late": family == "NanoChat", "turn": turn}
    settings = {"": {name: getattr(module, name) for name in names}}
    return Swap(getattr(modern, part), options, swap.Conditions(settings=settings))


def _plan_gpt2_attention(module: Any) -> Plan:
    """Recognised by its code, and also run, to cover later versions of transformers."""
    if module.is_cross_attention:
        return "cross-attention has no kernel"
    implementation = fused.implementation_of(module)
    if implementation not in ("sdpa", "eager"):
        return f"attn_implementation={implementation}: set sdpa or eager and patch again"

    def own(m: Any, x: Tensor) -> Tensor:
        mask = None
        if implementation == "eager":  # newer versions rely on the mask for causality
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cpu").tril()
            mask = torch.zeros(causal.shape, dtype=x.dtype, device="cpu")
            mask = mask.masked_fill(~causal, torch.finfo(x.dtype).min)[None, None]
        return type(m).forward(m, x, attention_mask=mask)[0]

    def formula(m: Any, x: Tensor) -> Tensor:
        p = m.attn_dropout.p if m.training else 0.0
        o = _heads(m, x, m.num_heads, dropout_p=p, scale=fused.scale_of(m))
        return m.resid_dropout(m.c_proj(o))

    if not 1 <= module.head_dim <= MAX_HEAD_DIM:
        return f"heads of {module.head_dim} elements, the kernels support 1 to {MAX_HEAD_DIM}"
    options = {"probs": "attn_dropout", "resid": "resid_dropout", "head_dim": module.head_dim}
    conditions = swap.Conditions()
    causal = module._buffers.get("bias")
    if causal is not None:
        if not torch.equal(causal, torch.ones_like(causal).tril()):
            return "its buffer bias is not the causal mask"
        conditions.buffers["bias"] = causal.cpu().clone()
    positions = module.config.max_position_embeddings
    limits: dict[str, Any] = {"positions": positions, "long": False, "brief": True}
    proof.prove(module, module.embed_dim, formula, own=own, **limits, keep=[module.config])
    return Swap(fused.GPT2Attention, options, conditions)


def _takes_hints(taker: Any) -> bool:
    """Whether it passes on unknown arguments, as transformers does since 4.53."""
    kind = taker.original if isinstance(taker, swap.Swap) else taker
    if kind is None:
        return False
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


class Looks:
    """Plans of modules; equal modules are examined once."""

    def __init__(self, model: nn.Module):
        self.plans: dict[Any, list[tuple[list[Tensor], Plan]]] = {}
        positions = [
            m.num_embeddings
            for name, m in model.named_modules()
            if isinstance(m, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
        ]
        self.positions = max(positions, default=None)

    def plan(self, name: str, module: nn.Module, fused_loss: bool) -> Plan:
        parts = [part for _, part in seen_parts(module)]
        buffers = [b for p in parts for b in p._buffers.values() if b is not None and not b.is_meta]
        known = self.plans.setdefault(look_of(module), [])
        for others, found in known:
            if all(a is b or torch.equal(a, b) for a, b in zip(others, buffers)):
                return found
        try:
            if type(module).__module__ in modern.MODULES:
                found = _plan_modern(module, fused_loss)
            elif type(module).__module__ == GPT2:
                found = _plan_gpt2(module, fused_loss)
            else:
                found = _plan_nanogpt(name, module, self.positions)
        except Exception as error:
            found = proof.words_of(error)
        known.append((buffers, found))
        return found


def _plan_nanogpt(name: str, module: Any, positions: int | None) -> Plan:
    parts = dict(module.named_children())
    long = {"positions": positions}
    if {"c_attn", "c_proj"} <= set(parts) and isinstance(getattr(module, "n_head", None), int):
        return _plan_attention(module, parts, positions)
    if {"c_fc", "c_proj"} <= set(parts):
        activations = [p for p in ("gelu", "act", "activation") if p in parts]
        return _plan_mlp(module, activations[0], **long) if activations else "no GELU part found"
    if {"ln_1", "attn", "ln_2", "mlp"} <= set(parts):
        if not isinstance(module.attn, fused.Attention):
            return "its attention was left unchanged"
        if not isinstance(module.ln_2, fused.Norm | modules.LayerNorm):
            return "its ln_2 was left unchanged"
        used = ("ln_1", "attn", "ln_2", "mlp")
        proven = ["attn", *(["mlp"] if isinstance(module.mlp, fused.MLP) else [])]
        return _checked(module, _block, fused.Block, {}, used, stand_ins=proven, **long)
    if name.split(".")[-1].startswith("ln") and not parts:
        return _plan_norm(module, positions)
    return None


def _plan_attention(module: Any, parts: dict[str, nn.Module], positions: int | None) -> Plan:
    if type(module) is modules.CausalSelfAttention and module.softmax_scale is None:
        D = module.n_embd // module.n_head
        known = {"probs": "attn_dropout", "resid": "resid_dropout", "head_dim": D}
        conditions = proof.conditions_of(module, known, ("c_attn", "c_proj"), None)
        return Swap(fused.Attention, known, conditions)
    c_attn, c_proj = parts["c_attn"], parts["c_proj"]
    if type(c_attn) is not nn.Linear or type(c_proj) is not nn.Linear:
        return "c_attn or c_proj is not an nn.Linear"
    C, heads = c_attn.in_features, module.n_head
    if (c_attn.out_features, c_proj.in_features) != (3 * C, C) or heads < 1 or C % heads:
        return f"c_attn maps {C} to {c_attn.out_features}, not to q, k and v of {C} each"
    if C // heads > MAX_HEAD_DIM:
        return f"heads of {C // heads} elements, the kernels support 1 to {MAX_HEAD_DIM}"
    places: dict[str, Any] = {"head_dim": C // heads}

    def formula(m: Any, x: Tensor) -> Tensor:
        p = fused.probs_rate(m, places["probs"])
        y = m.c_proj(_heads(m, x, heads, dropout_p=p))
        return y if places["resid"] is None else getattr(m, places["resid"])(y)

    places.update(proof.places_of_dropout(module, C, heads))
    used = ("c_attn", "c_proj")
    limits: dict[str, Any] = {"positions": positions, "heads": heads, "rate": places["probs"]}
    return _checked(module, formula, fused.Attention, places, used, **limits)


def _heads(m: Any, x: Tensor, heads: int, **options: Any) -> Tensor:
    qkv = m.c_attn(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True, **options)
    return o.transpose(1, 2).flatten(2)  # [B, T, C]


def _plan_mlp(module: Any, activation: str, **how: Any) -> Plan:
    part = getattr(module, activation)
    replaced = torch_forward(nn.GELU) if type(part) is nn.GELU else swap.replaced_in(part)
    if replaced is not None:
        return f"{replaced} was replaced"
    dropouts = [name for name, p in module.named_children() if isinstance(p, nn.Dropout)]
    if len(dropouts) > 1:
        return f"more than one dropout, in unknown positions: {', '.join(dropouts)}"
    options = {
        "activation": activation,
        "kind": type(part),
        "dropout": dropouts[0] if dropouts else None,
    }
    used = ("c_fc", "c_proj", activation)
    found: Plan = None
    for form in ("tanh", "none"):

        def formula(m: Any, x: Tensor, form: str = form) -> Tensor:
            y = m.c_proj(F.gelu(m.c_fc(x), approximate=form))
            return getattr(m, dropouts[0])(y) if dropouts else y

        known = {**options, "approximate": form}
        found = _checked(module, formula, fused.MLP, known, used, **how)
        if not isinstance(found, str):
            return found
    return f"its {activation} ({type(part).__name__}) is not GELU, or {found}"


def _plan_norm(module: Any, positions: int | None) -> Plan:
    tensors = dict(module.named_parameters())
    weight = tensors.pop("weight", None)
    bias = tensors.pop("bias", None)
    if weight is None or weight.dim() != 1 or tensors or list(module.buffers()):
        return None
    if bias is None and not hasattr(module, "bias"):
        return "without a bias attribute it is not a LayerNorm of nanoGPT's kind"
    if not 1 <= weight.shape[0] <= MAX_COLUMNS:
        return f"{weight.shape[0]} elements per row, the kernel supports 1 to {MAX_COLUMNS}"
    eps = getattr(module, "eps", 1e-5)

    def formula(m: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, m.weight.shape, m.weight, m.bias, eps)

    # Rows whose variance is below eps, so that a different eps shows.
    limits: dict[str, Any] = {"positions": positions, "small": 1e-3}
    return _checked(module, formula, fused.Norm, {"eps": eps}, **limits)


def _block(m: Any, x: Tensor) -> Tensor:
    x = x + m.attn(m.ln_1(x))
    return x + m.mlp(m.ln_2(x))


def _checked(
    module: Any,
    formula: proof.Formula,
    mixin: Any,
    options: dict[str, Any],
    used: tuple[str, ...] = (),
    **how: Any,
) -> Plan:
    """The plan, if the module computes the formula; `used` are the parts that the mixin calls."""
    first = getattr(module, "c_attn", None) or getattr(module, "c_fc", None)
    if first is None:
        width = module.attn.c_attn.in_features if used else module.weight.shape[0]
    else:
        width = proof.features(first)[0]
    try:
        reached = proof.prove(module, width, formula, **how)
        return Swap(mixin, options, proof.conditions_of(module, options, used, reached))
    except Exception as error:
        return proof.words_of(error)
