"""fastpar.patch: swaps the layers of a foreign GPT-2 for fastpar's, in place, and says what it did.

transformers' GPT-2 is known by its classes and their library's own code, see patch_known.py. A
model of nanoGPT's shape is found by the names and kinds of its parts, which have to prove what they
compute, see patch_probe.py. In any other model nn.LayerNorm, nn.RMSNorm, nn.GELU and nn.Embedding
are swapped where they are exactly that. What is neither is left, and the report says why.

The file is not called patch.py because fastpar.patch is the function: importing a submodule of that
name would put the module in its place.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.kernels.attention import MAX_HEAD_DIM
from fastpar.kernels.layer_norm import MAX_COLUMNS
from fastpar.nn import modules
from fastpar.nn.modules import embedding_options, is_conv1d
from fastpar.patching import gpt2_blocks as patched_gpt2
from fastpar.patching import layers as patched
from fastpar.patching.known import (
    GPT2,
    look_of,
    replaced_code,
    replaced_in,
    seen_parts,
    torch_forward,
)
from fastpar.patching.layers import Swap, swap_of, swapped_class
from fastpar.patching.loss import Loss, loss_shape, prove_loss
from fastpar.patching.probe import (
    Formula,
    features,
    one_thread,
    places_of_dropout,
    prove,
    restore,
    settings_of,
    words_of,
)
from fastpar.patching.report import PatchReport

TORCH_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: modules.LayerNorm,
    nn.RMSNorm: modules.RMSNorm,
    nn.GELU: modules.GELU,
    nn.Embedding: modules.Embedding,
}
OURS = ("fastpar.nn.modules", "fastpar.models.gpt")
TORCH_DOES = {
    nn.LayerNorm: "LayerNorm in one pass",
    nn.RMSNorm: "RMSNorm in one pass",
    nn.GELU: "GELU in one pass",
    nn.Embedding: "deterministic backward without atomics",
}
# A mixin with its options, why a module is left, or None for what is not worth a word.
_Plan = tuple[type[nn.Module], dict[str, Any]] | str | None


@one_thread()
def patch(model: nn.Module, *, fused_loss: bool = False) -> PatchReport:
    """Swaps the layers of a GPT-2-class model for fastpar's, in place.

    Parameters, state_dict, hooks and class names stay as they are; the model can be trained,
    copied, pickled, saved and compiled as before. Dropout of attention's probabilities and before
    ln_2 has other masks than torch's from the same seed, in units of 1/256; torch.manual_seed and
    activation checkpointing rule them as they do torch's. Not available in a patched model: second
    derivatives, torch.func.vmap and forward-mode gradients: unpatch it for these.

    Args:
        model: transformers' GPT2Model or GPT2LMHeadModel (4.45 or later; residual add and LayerNorm
            are fused where a block returns a tensor, as in 5), a model of nanoGPT's shape, or any
            module, of which the parts that are exactly torch's LayerNorm, RMSNorm, GELU or
            Embedding are swapped.
        fused_loss: in training, a GPT2LMHeadModel that is given labels, or a model with nanoGPT's
            forward(idx, targets=None) that is given targets, computes its loss without logits:
            the logits returned are None then.
    Returns:
        What was replaced, what was left and why, what falls back for a call, and a running count of
        the calls that did; print it.
    Raises:
        ValueError: model is not a module, or split along tp; fused_loss with neither of the two,
            or with one whose loss is another.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"patch: expected a torch.nn.Module, got model={type(model).__name__}; pass the model"
        )
    split = next((name for name, m in model.named_modules() if getattr(m, "tp", None)), None)
    if split is not None:
        raise ValueError(
            f"patch: expected a model before parallelize(), got '{split}' split over ranks of tp; "
            "call fastpar.patch(model) first"
        )
    losses = _plan_losses(model) if fused_loss else {}
    report = PatchReport(type(model).__name__)
    earlier = [swap for m in model.modules() if (swap := swap_of(m)) is not None]
    if earlier:
        report.fallbacks = earlier[0].fallbacks
    report.already = len(earlier)

    looks = _Looks(model)
    left: list[tuple[str, nn.Module, str]] = []
    # Parts come before what holds them, which asks what became of its parts.
    for name, module in reversed(list(model.named_modules())):
        if swap_of(module) is not None:
            continue
        plan = losses.get(module) or _plan(name, module, fused_loss, looks)
        if isinstance(plan, str):
            left.append((name, module, plan))
        elif plan is not None:
            mixin, options = plan
            _swap(module, mixin, options, report, name)
    inside = {
        part
        for module in model.modules()
        if isinstance(module, patched.Attention | patched.MLP)
        for part in module.children()
    }
    for name, module, why in reversed(left):
        if module not in inside:
            report.left.setdefault((type(module).__name__, why), []).append(name or "model")
    for names in report.replaced.values():
        names.reverse()
    report.replaced = dict(reversed(report.replaced.items()))
    report.falls_back = dict(reversed(report.falls_back.items()))
    return report


def unpatch(model: nn.Module) -> int:
    """Gives every module that patch swapped its own class back; returns how many.

    Raises:
        ValueError: model is not a module; a swapped module got yet another class since.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"unpatch: expected a torch.nn.Module, got model={type(model).__name__}; pass the model"
        )
    swapped = [(name, m, swap_of(m)) for name, m in model.named_modules()]
    for name, module, swap in swapped:
        if swap is not None and type(module) is not swapped_class(swap.mixin, swap.original):
            raise ValueError(
                f"unpatch: expected the classes that patch set, got {name}={type(module)}; undo "
                "what was put on top of it (a parametrization, FSDP) first"
            )
    return sum(restore(module) for _, module, _ in swapped)


def _swap(
    module: nn.Module,
    mixin: Any,
    options: dict[str, Any],
    report: PatchReport,
    name: str,
) -> None:
    original: Any = type(module)
    vars(module)["_fastpar_swap"] = Swap(mixin, original, report.fallbacks, options)
    module.__class__ = swapped_class(mixin, original)
    kind = original.__name__
    report.replaced.setdefault(kind, []).append(name or "model")
    report.does[kind] = TORCH_DOES.get(original) or mixin.does
    if getattr(mixin, "falls_back", ()):
        report.falls_back[kind] = mixin.falls_back


def _plan_losses(model: nn.Module) -> dict[nn.Module, _Plan]:
    """For fused_loss: the models of nanoGPT's shape; transformers' are planned as their parts are.

    Raises:
        ValueError: there is neither, or one with another loss.
    """
    plans: dict[nn.Module, _Plan] = {}
    why, found = "", any(_is_gpt2(m, "GPT2LMHeadModel") for m in model.modules())
    for module in model.modules():
        norm = None if type(module).__module__ in (GPT2, *OURS) else loss_shape(module)
        if isinstance(module, Loss):
            found = True
        elif norm is not None:
            try:
                prove_loss(module, norm)
                options = settings_of(module, {}, tuple(module._modules))
                plans[module] = Loss, {"norm": norm, **options}
            except Exception as error:
                why = f", which {words_of(error)}"
    if why or not (found or plans):
        raise ValueError(
            "patch: expected transformers' GPT2LMHeadModel or nanoGPT's "
            f"forward(idx, targets=None) for fused_loss=True, got model={type(model).__name__}{why}"
            "; use fastpar.LinearCrossEntropyLoss in its forward"
        )
    return plans


def _is_gpt2(module: nn.Module, *names: str) -> bool:
    return type(module).__module__ == GPT2 and type(module).__name__ in names


def _plan(name: str, module: nn.Module, fused_loss: bool, looks: _Looks) -> _Plan:
    method = replaced_in(module)
    if method is not None:
        return f"its {method} was replaced by someone else's"
    if type(module) in TORCH_CLASSES:
        return _plan_torch(module)
    if type(module).__module__ in OURS and not isinstance(module, modules.CausalSelfAttention):
        return None
    plan = looks.plan(name, module, fused_loss)
    if isinstance(plan, tuple):
        kind: Any = type(module)
        mixin: Any = plan[0]
        if swapped_class(mixin, kind).own_forward[0] is not kind.forward:
            return "its class got another forward since it was patched first"
    if plan is not None or any(True for _ in module.children()):
        return plan
    if isinstance(module, nn.Linear | nn.Dropout) or is_conv1d(module):
        return "torch's, no faster one here"
    return "not known" if any(True for _ in module.parameters()) else None


def _plan_torch(module: Any) -> _Plan:
    replaced = torch_forward(type(module))
    if replaced is not None:
        return f"{replaced} was replaced by someone else's"
    if isinstance(module, nn.Embedding):
        options = embedding_options(module)
        if options:
            return f"{', '.join(f'{k}={v}' for k, v in options.items())} has no kernel"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        columns = 1
        for size in module.normalized_shape:
            columns *= size
        if not 1 <= columns <= MAX_COLUMNS:
            return f"{columns} elements a row, the kernel takes 1 to {MAX_COLUMNS}"
    return TORCH_CLASSES[type(module)], {}


def _plan_gpt2(module: Any, fused_loss: bool) -> _Plan:
    names = {"GPT2Attention", "GPT2SdpaAttention", "GPT2MLP", "GPT2Block", "GPT2Model"}
    if not _is_gpt2(module, *names, "GPT2LMHeadModel"):
        return None
    replaced = replaced_code(type(module))
    if replaced is not None:
        return f"{replaced} was replaced by someone else's"
    if _is_gpt2(module, "GPT2Attention", "GPT2SdpaAttention"):
        return _plan_gpt2_attention(module)
    if _is_gpt2(module, "GPT2MLP"):
        return _plan_mlp(module, "act", long=False)
    if _is_gpt2(module, "GPT2Block"):
        returns = type(module).forward.__annotations__.get("return")
        if returns not in (Tensor, "torch.Tensor"):
            return "returns a tuple (transformers 4): residual add and LayerNorm stay apart"
        if not isinstance(module.attn, patched_gpt2.GPT2Attention):
            return "its attention was left"
        return patched.Block, {}
    if _is_gpt2(module, "GPT2Model"):
        takers = [type(module), *(swap_of(b.attn) for b in module.h), *map(type, module.h)]
        return (patched_gpt2.Model, {}) if all(map(_takes_hints, takers)) else None
    if fused_loss:
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

        try:
            from transformers.loss.loss_utils import ForCausalLMLoss
        except ImportError:  # up to 4.45
            ForCausalLMLoss: Any = None  # type: ignore[no-redef]
        names = inspect.unwrap(type(module).forward).__code__.co_names
        return patched_gpt2.LMHead, {
            "output": CausalLMOutputWithCrossAttentions,
            "asks": "loss_function" in names,
            "loss": ForCausalLMLoss,
        }
    return "logits and loss are its own; fused_loss=True computes the loss without logits"


def _plan_gpt2_attention(module: Any) -> _Plan:
    """Known by its code; run as well, for versions of transformers that came later."""
    if module.is_cross_attention:
        return "cross-attention has no kernel"
    implementation = patched_gpt2.implementation_of(module)
    if implementation not in ("sdpa", "eager"):
        return f"attn_implementation={implementation}: set sdpa or eager and patch again"

    def own(m: Any, x: Tensor) -> Tensor:
        mask = None
        if implementation == "eager":  # newer versions leave being causal to the mask
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mask = torch.zeros(causal.shape, dtype=x.dtype)
            mask = mask.masked_fill(~causal, torch.finfo(x.dtype).min)[None, None]
        return type(m).forward(m, x, attention_mask=mask)[0]

    def formula(m: Any, x: Tensor) -> Tensor:
        p = m.attn_dropout.p if m.training else 0.0
        o = _heads(m, x, m.num_heads, dropout_p=p, scale=patched_gpt2.scale_of(m))
        return m.resid_dropout(m.c_proj(o))

    if not 1 <= module.head_dim <= MAX_HEAD_DIM:
        return f"heads of {module.head_dim} elements, the kernels take 1 to {MAX_HEAD_DIM}"
    options: dict[str, Any] = {"probs": "attn_dropout", "resid": "resid_dropout"}
    causal = module._buffers.get("bias")
    if causal is not None:
        if not torch.equal(causal, torch.ones_like(causal).tril()):
            return "its buffer bias is not the causal mask"
        options["buffers"] = {"bias": causal.cpu().clone()}
    positions = module.config.max_position_embeddings
    limits: dict[str, Any] = {"positions": positions, "long": False, "brief": True}
    try:
        prove(module, module.embed_dim, formula, own=own, **limits, keep=[module.config])
    except Exception as error:
        return words_of(error)
    return patched_gpt2.GPT2Attention, options


def _takes_hints(taker: Any) -> bool:
    """Whether it hands on arguments that it does not know, as transformers does from 4.53 on."""
    kind = taker.original if isinstance(taker, Swap) else taker
    if kind is None:
        return False
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


class _Looks:
    """Plans of modules; equal ones are looked at once."""

    def __init__(self, model: nn.Module):
        self.plans: dict[Any, list[tuple[list[Tensor], _Plan]]] = {}
        positions = [
            m.num_embeddings
            for name, m in model.named_modules()
            if isinstance(m, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
        ]
        self.positions = max(positions, default=None)

    def plan(self, name: str, module: nn.Module, fused_loss: bool) -> _Plan:
        parts = [part for _, part in seen_parts(module)]
        buffers = [b for p in parts for b in p._buffers.values() if b is not None and not b.is_meta]
        known = self.plans.setdefault(look_of(module), [])
        for others, plan in known:
            if all(a is b or torch.equal(a, b) for a, b in zip(others, buffers)):
                return plan
        if type(module).__module__ == GPT2:
            plan = _plan_gpt2(module, fused_loss)
        else:
            plan = _plan_nanogpt(name, module, self.positions)
        known.append((buffers, plan))
        return plan


def _plan_nanogpt(name: str, module: Any, positions: int | None) -> _Plan:
    parts = dict(module.named_children())
    long = {"positions": positions}
    if {"c_attn", "c_proj"} <= set(parts) and isinstance(getattr(module, "n_head", None), int):
        return _plan_attention(module, parts, positions)
    if {"c_fc", "c_proj"} <= set(parts):
        activations = [p for p in ("gelu", "act", "activation") if p in parts]
        return _plan_mlp(module, activations[0], **long) if activations else "no GELU part found"
    if {"ln_1", "attn", "ln_2", "mlp"} <= set(parts):
        if not isinstance(module.attn, patched.Attention):
            return "its attention was left"
        if not isinstance(module.ln_2, patched.Norm | modules.LayerNorm):
            return "its ln_2 was left"
        used = ("ln_1", "attn", "ln_2", "mlp")
        proven = ["attn", *(["mlp"] if isinstance(module.mlp, patched.MLP) else [])]
        return _checked(module, _block, patched.Block, {}, used, stand_ins=proven, **long)
    if name.split(".")[-1].startswith("ln") and not parts:
        return _plan_norm(module, positions)
    return None


def _plan_attention(module: Any, parts: dict[str, nn.Module], positions: int | None) -> _Plan:
    if type(module) is modules.CausalSelfAttention and module.softmax_scale is None:
        D = module.n_embd // module.n_head
        known = {"probs": "attn_dropout", "resid": "resid_dropout", "head_dim": D}
        return patched.Attention, {**known, **settings_of(module, known, ("c_attn", "c_proj"))}
    c_attn, c_proj = parts["c_attn"], parts["c_proj"]
    if type(c_attn) is not nn.Linear or type(c_proj) is not nn.Linear:
        return "c_attn or c_proj is not an nn.Linear"
    C, heads = c_attn.in_features, module.n_head
    if (c_attn.out_features, c_proj.in_features) != (3 * C, C) or heads < 1 or C % heads:
        return f"c_attn maps {C} to {c_attn.out_features}, not to q, k and v of {C} each"
    if C // heads > MAX_HEAD_DIM:
        return f"heads of {C // heads} elements, the kernels take 1 to {MAX_HEAD_DIM}"
    places: dict[str, Any] = {"head_dim": C // heads}

    def formula(m: Any, x: Tensor) -> Tensor:
        p = patched.probs_rate(m, places["probs"])
        y = m.c_proj(_heads(m, x, heads, dropout_p=p))
        return y if places["resid"] is None else getattr(m, places["resid"])(y)

    try:
        places.update(places_of_dropout(module, C, heads))
    except Exception as error:
        return words_of(error)
    used = ("c_attn", "c_proj")
    limits: dict[str, Any] = {"positions": positions, "heads": heads, "rate": places["probs"]}
    return _checked(module, formula, patched.Attention, places, used, **limits)


def _heads(m: Any, x: Tensor, heads: int, **options: Any) -> Tensor:
    qkv = m.c_attn(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True, **options)
    return o.transpose(1, 2).flatten(2)  # [B, T, C]


def _plan_mlp(module: Any, activation: str, **how: Any) -> _Plan:
    part = getattr(module, activation)
    replaced = torch_forward(nn.GELU) if type(part) is nn.GELU else replaced_in(part)
    if replaced is not None:
        return f"{replaced} was replaced by someone else's"
    dropouts = [name for name, p in module.named_children() if isinstance(p, nn.Dropout)]
    if len(dropouts) > 1:
        return f"dropouts of unknown places: {', '.join(dropouts)}"
    options = {
        "activation": activation,
        "kind": type(part),
        "dropout": dropouts[0] if dropouts else None,
    }
    used = ("c_fc", "c_proj", activation)
    plan: _Plan = None
    for form in ("tanh", "none"):

        def formula(m: Any, x: Tensor, form: str = form) -> Tensor:
            y = m.c_proj(F.gelu(m.c_fc(x), approximate=form))
            return getattr(m, dropouts[0])(y) if dropouts else y

        known = {**options, "approximate": form}
        plan = _checked(module, formula, patched.MLP, known, used, **how)
        if not isinstance(plan, str):
            return plan
    return f"its {activation} ({type(part).__name__}) is not GELU, or {plan}"


def _plan_norm(module: Any, positions: int | None) -> _Plan:
    tensors = dict(module.named_parameters())
    weight = tensors.pop("weight", None)
    bias = tensors.pop("bias", None)
    if weight is None or weight.dim() != 1 or tensors or list(module.buffers()):
        return None
    if bias is None and not hasattr(module, "bias"):
        return "without a bias attribute it is not a LayerNorm of nanoGPT's kind"
    if not 1 <= weight.shape[0] <= MAX_COLUMNS:
        return f"{weight.shape[0]} elements a row, the kernel takes 1 to {MAX_COLUMNS}"
    eps = getattr(module, "eps", 1e-5)

    def formula(m: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, m.weight.shape, m.weight, m.bias, eps)

    # Rows whose variance is below eps, so that another eps shows.
    limits: dict[str, Any] = {"positions": positions, "small": 1e-3}
    return _checked(module, formula, patched.Norm, {"eps": eps}, **limits)


def _block(m: Any, x: Tensor) -> Tensor:
    x = x + m.attn(m.ln_1(x))
    return x + m.mlp(m.ln_2(x))


def _checked(
    module: Any,
    formula: Formula,
    mixin: Any,
    options: dict[str, Any],
    used: tuple[str, ...] = (),
    **how: Any,
) -> Any:
    """The plan, if the module computes the formula; `used` are the parts that the mixin calls."""
    first = getattr(module, "c_attn", None) or getattr(module, "c_fc", None)
    if first is None:
        width = module.attn.c_attn.in_features if used else module.weight.shape[0]
    else:
        width = features(first)[0]
    try:
        reached = prove(module, width, formula, **how)
        limit = {} if reached is None else {"tokens": reached}
        return mixin, {**options, **limit, **settings_of(module, options, used)}
    except Exception as error:
        return words_of(error)
