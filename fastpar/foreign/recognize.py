"""Decides which module of a foreign model gets which fused class, and why others are left.

transformers' classes are recognised by their names, unless someone replaced one of their functions:
a forward, or a function that a forward calls. A function is the library's own if its code, and that
of every wrapper around it, is in one of the library's files. nanoGPT's classes (NANOGPT) are
recognised by their names, wherever they are defined, and by what their modules hold: the same parts
and attributes, no others, of fitting shapes. What their forward does is not looked at:
patch(check=batch) compares it. In any other model nn.LayerNorm, nn.RMSNorm, nn.GELU and
nn.Embedding are swapped if they are exactly these classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.foreign import fused, modern, swap
from fastpar.foreign.swap import Swap
from fastpar.kernels.attention import MAX_HEAD_DIM
from fastpar.kernels.norm import MAX_COLUMNS
from fastpar.nn import modules
from fastpar.nn.modules import embedding_options, is_conv1d, is_linear

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
# Classes of nanoGPT: the parts that their modules have, may have, and their attributes.
NANOGPT: dict[str, tuple[set[str], set[str], set[str]]] = {
    "LayerNorm": (set(), set(), {"bias", "eps"}),
    "CausalSelfAttention": (
        {"c_attn", "c_proj"},
        {"attn_dropout", "resid_dropout"},
        {"n_head", "n_embd", "dropout", "flash"},
    ),
    "MLP": ({"c_fc", "gelu", "c_proj"}, {"dropout"}, set()),
    "Block": ({"ln_1", "attn", "ln_2", "mlp"}, set(), set()),
    "GPT": ({"transformer", "lm_head"}, set(), {"config"}),
}
# The form of activations that are GELU.
_FORMS = {
    "GELUActivation": "none",
    **dict.fromkeys(("NewGELUActivation", "GELUTanh", "PytorchGELUTanh"), "tanh"),
    "FastGELUActivation": "tanh",
}


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
                package = TORCH if value.__module__.startswith("torch.") else root
                if not is_own(value.forward, package):
                    return f"{used}.forward"
    for part in (nn.Dropout, nn.LayerNorm, nn.Linear):
        if torch_forward(part) is not None:
            return torch_forward(part)
    return None


def plan_losses(model: nn.Module) -> dict[nn.Module, Plan]:
    """Plans for fused_loss of nanoGPT's GPT; transformers' follow from their parts.

    Raises:
        ValueError: there is no such model.
    """
    plans: dict[nn.Module, Plan] = {}
    heads = ("GPT2LMHeadModel", *(f"{name}ForCausalLM" for name in modern.MODULES.values()))
    kinds = map(type, model.modules())
    why, has_loss = "", any(k.__name__ in heads and is_transformers(k) for k in kinds)
    for module in model.modules():
        has_loss = has_loss or isinstance(module, fused.Loss)
        if nanogpt_class(module) == "GPT" and swap.swap_of(module) is None:
            norm, less = fused.loss_shape(module), unlike_nanogpt(module)
            if norm is None or less is not None:
                why = f", which {less or 'has another forward or lm_head'}"
            else:
                plans[module] = Swap(fused.Loss, {"norm": norm})
    if why or not (has_loss or plans):
        raise ValueError(
            "patch: expected transformers' GPT2LMHeadModel or nanoGPT's GPT with "
            f"forward(idx, targets=None) for fused_loss=True, got model={type(model).__name__}{why}"
            "; use fastpar.nn.LinearCrossEntropyLoss in its forward"
        )
    return plans


def nanogpt_class(module: nn.Module) -> str | None:
    """The class of nanoGPT that a module's class is named after."""
    kind = type(module)
    if kind.__module__.startswith((*OURS, "torch.", "transformers.")):
        return None
    return kind.__name__ if kind.__name__ in NANOGPT else None


def unlike_nanogpt(module: nn.Module) -> str | None:
    """What a module that is named after nanoGPT's lacks, or has besides."""
    has, may_have, attributes = NANOGPT[type(module).__name__]
    lacks = sorted(has - module._modules.keys())
    more = sorted(module._modules.keys() - has - may_have)
    more += sorted(vars(module).keys() - swap.MODULE_FIELDS - attributes)
    if lacks:
        return f"has no {lacks[0]}, which nanoGPT's has"
    return f"has {more[0]}, which nanoGPT's has not" if more else None


def features(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    rows, columns = layer.weight.shape
    return (rows, columns) if is_conv1d(layer) else (columns, rows)


def is_transformers(kind: type) -> bool:
    """Whether a class is of a kind of model that is known by its code."""
    return kind.__module__ in (GPT2, *modern.MODULES)


def _is_gpt2(module: nn.Module, *names: str) -> bool:
    return type(module).__module__ == GPT2 and type(module).__name__ in names


def plan(module: nn.Module, fused_loss: bool) -> Plan:
    """The plan for a module whose parts are swapped already."""
    method = swap.replaced_in(module)
    if method is not None:
        return f"its {method} was replaced"
    if type(module) in TORCH_CLASSES:
        return _plan_torch(module)
    if type(module).__name__.startswith("FSDP"):
        return "fully_shard has changed its class: call patch before fully_shard"
    ours = type(module).__module__.startswith(OURS)
    if ours and not isinstance(module, modules.CausalSelfAttention):
        return None
    if type(module).__module__ in modern.MODULES:
        planned = _plan_modern(module, fused_loss)
    elif type(module).__module__ == GPT2:
        planned = _plan_gpt2(module, fused_loss)
    else:
        planned = _plan_nanogpt(module)
    if isinstance(planned, Swap):
        kind: Any = type(module)
        if swap.swapped_class(planned.mixin, kind).own_forward[0] is not kind.forward:
            return "its class's forward was replaced after it was first patched"
    if planned is not None or module._modules:
        return planned
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
        return _plan_mlp(module, "act")
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
    options: dict[str, Any] = {}
    if part == "RMSNorm":
        if modern.eps_of(module) is None:
            return "has no eps"
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
        turn = vars(sys.modules[kind.__module__])["apply_rotary_pos_emb"]
        options = {"norms": hasattr(module, "q_norm"), "late": family == "NanoChat", "turn": turn}
    return Swap(getattr(modern, part), options)


def _plan_gpt2_attention(module: Any) -> Plan:
    if module.is_cross_attention:
        return "cross-attention has no kernel"
    implementation = fused.implementation_of(module)
    if implementation not in ("sdpa", "eager"):
        return f"attn_implementation={implementation}: set sdpa or eager and patch again"
    if not 1 <= module.head_dim <= MAX_HEAD_DIM:
        return f"heads of {module.head_dim} elements, the kernels support 1 to {MAX_HEAD_DIM}"
    options = {"probs": "attn_dropout", "resid": "resid_dropout", "head_dim": module.head_dim}
    return _unlike_causal(module) or Swap(fused.GPT2Attention, options)


def _unlike_causal(module: nn.Module) -> str | None:
    """Why the mask that an attention holds is not the causal one."""
    mask = module._buffers.get("bias")
    if mask is None:
        return None
    if mask.is_meta:
        return "is on the meta device: load its weights first"
    return None if torch.equal(mask, torch.ones_like(mask).tril()) else "has a mask of its own"


def _takes_hints(taker: Any) -> bool:
    """Whether it passes on unknown arguments, as transformers does since 4.53."""
    kind = taker.original if isinstance(taker, swap.Swap) else taker
    if kind is None:
        return False
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _plan_nanogpt(module: Any) -> Plan:
    if type(module) is modules.CausalSelfAttention:
        D = module.n_embd // module.n_head
        known = {"probs": "attn_dropout", "resid": "resid_dropout", "head_dim": D}
        return Swap(fused.Attention, known) if module.softmax_scale is None else None
    kind = nanogpt_class(module)
    if kind is None or kind == "GPT":
        return None
    return unlike_nanogpt(module) or {
        "LayerNorm": _plan_norm,
        "CausalSelfAttention": _plan_attention,
        "MLP": lambda mlp: _plan_mlp(mlp, "gelu"),
        "Block": _plan_block,
    }[kind](module)


def _plan_attention(module: Any) -> Plan:
    c_attn, c_proj = module.c_attn, module.c_proj
    if type(c_attn) is not nn.Linear or type(c_proj) is not nn.Linear:
        return "c_attn or c_proj is not an nn.Linear"
    C, heads = c_attn.in_features, getattr(module, "n_head", None)
    if (c_attn.out_features, features(c_proj)) != (3 * C, (C, C)):
        return f"c_attn maps {C} to {c_attn.out_features}, not to q, k and v of {C} each"
    if not isinstance(heads, int) or heads < 1 or C % heads:
        return f"n_head={heads} does not divide {C}"
    if C // heads > MAX_HEAD_DIM:
        return f"heads of {C // heads} elements, the kernels support 1 to {MAX_HEAD_DIM}"
    if module._buffers.keys() - {"bias"}:
        return "has buffers besides a mask"
    parts, own = module._modules, vars(module)
    by_number = "dropout" in own and own.get("flash", "attn_dropout" not in parts)
    probs = "dropout" if by_number else "attn_dropout" if "attn_dropout" in parts else None
    resid = "resid_dropout" if "resid_dropout" in parts else None
    options = {"probs": probs, "resid": resid, "head_dim": C // heads}
    return _unlike_causal(module) or Swap(fused.Attention, options)


def _plan_mlp(module: Any, activation: str) -> Plan:
    more = module._modules.keys() - {"c_fc", activation, "c_proj", "dropout"}
    if more or not (is_linear(module.c_fc) and is_linear(module.c_proj)):
        return f"has {min(more)}, whose use is unknown" if more else "has other layers than GPT-2's"
    if features(module.c_fc)[1] != features(module.c_proj)[0]:
        return "c_proj does not take what c_fc gives"
    part = getattr(module, activation)
    kind = type(part)
    replaced = torch_forward(nn.GELU) if kind is nn.GELU else swap.replaced_in(part)
    if replaced is not None:
        return f"{replaced} was replaced"
    known = kind in (nn.GELU, modules.GELU) or kind.__module__ == "transformers.activations"
    form = getattr(part, "approximate", None) or _FORMS.get(kind.__name__)
    if not known or form is None:
        return f"its {activation} ({kind.__name__}) is not GELU"
    dropout = "dropout" if "dropout" in module._modules else None
    options = {"activation": activation, "kind": kind, "dropout": dropout, "approximate": form}
    return Swap(fused.MLP, options)


def _plan_norm(module: Any) -> Plan:
    tensors = dict(module.named_parameters(recurse=False))
    weight, bias = tensors.pop("weight", None), tensors.pop("bias", None)
    if weight is None or weight.dim() != 1 or tensors or module._buffers:
        return "has other tensors than nanoGPT's"
    if not hasattr(module, "bias") or (bias is not None and bias.shape != weight.shape):
        return "has another bias than nanoGPT's"
    if not 1 <= len(weight) <= MAX_COLUMNS:
        return f"{len(weight)} elements per row, the kernel supports 1 to {MAX_COLUMNS}"
    return Swap(fused.Norm, {"eps": getattr(module, "eps", 1e-5)})


def _plan_block(module: Any) -> Plan:
    if not isinstance(module.attn, fused.Attention):
        return "its attention was left unchanged"
    if not isinstance(module.ln_2, fused.Norm | modules.LayerNorm):
        return "its ln_2 was left unchanged"
    return Swap(fused.Block)
