"""fastpar.patch: swaps the layers of a foreign GPT-2 for fastpar's, in place, and says what it did.

transformers' GPT-2 is known by its classes. A model of nanoGPT's shape is known by the names and
kinds of its parts, and by what it computes, see [Note: seen to compute]. In any other model
nn.LayerNorm, nn.RMSNorm, nn.GELU and nn.Embedding are swapped where they are exactly that.

[Note: seen to compute] Names do not tell whether an attention is causal or rotates its queries. So
a part that looks like nanoGPT's is copied, given random weights, and run in fp64 beside the formula
it should be. Equal formulas differ by rounding; a part that rounds to fp32 inside stays far below
the bound of 1e-4 of the largest value, another formula far above. What dropout does cannot be seen
this way: its rate is read from nn.Dropout parts and numbers by their usual names.

The file is not called patch.py because fastpar.patch is the function: importing a submodule of that
name would put the module in its place.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar import modules, patched
from fastpar.kernels.layer_norm import MAX_COLUMNS
from fastpar.modules import embedding_options, is_conv1d
from fastpar.patched import Swap, swap_of, swapped_class

GPT2 = "transformers.models.gpt2.modeling_gpt2"
TORCH_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: modules.LayerNorm,
    nn.RMSNorm: modules.RMSNorm,
    nn.GELU: modules.GELU,
    nn.Embedding: modules.Embedding,
}
OURS = ("fastpar.modules", "fastpar.model")
TORCH_DOES = {
    nn.LayerNorm: "LayerNorm in one pass",
    nn.RMSNorm: "RMSNorm in one pass",
    nn.GELU: "GELU in one pass",
    nn.Embedding: "deterministic backward without atomics",
}
_MODULE_FIELDS = frozenset({*vars(nn.Module()), "training"})
# A mixin with its options, why a module is left, or None for what is not worth a word.
_Plan = tuple[type[nn.Module], dict[str, Any]] | str | None


@dataclass
class PatchReport:
    """What patch did; print it. `fallbacks` goes on counting while the model runs."""

    model: str
    # class -> names of the modules; what makes the class faster; when its calls fall back
    replaced: dict[str, list[str]] = field(default_factory=dict)
    does: dict[str, str] = field(default_factory=dict)
    falls_back: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # (class, why) -> names of the modules
    left: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    already: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        n = sum(map(len, self.replaced.values()))
        lines = [f"fastpar.patch({self.model}): {n} modules replaced"]
        if self.already:
            lines[0] += f", {self.already} were before"
        for kind, names in self.replaced.items():
            lines.append(f"  {len(names):>4} {kind}: {self.does[kind]}")
        if self.left:
            lines.append("left as they are:")
        for (kind, why), names in self.left.items():
            shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
            lines.append(f"  {len(names):>4} {kind} ({shown}): {why}")
        if self.falls_back:
            lines.append("back to the module's own forward for a call, with one warning, for:")
        for kind, reasons in self.falls_back.items():
            lines += [f"       {kind}: {reason}" for reason in reasons]
        if self.replaced or self.already:
            lines.append("calls that fell back so far:" + ("" if self.fallbacks else " none"))
        lines += [f"  {count:>4} {reason}" for reason, count in self.fallbacks.items()]
        if self.replaced:
            lines.append(
                "dropout in attention and before LayerNorm: torch.manual_seed rules its masks, "
                "which are not torch's"
            )
        return "\n".join(lines)


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
        fused_loss: in training, a GPT2LMHeadModel that is given labels computes its loss without
            logits: the output's logits are None then.
    Returns:
        What was replaced, what was left and why, what falls back for a call, and a running count of
        the calls that did; print it.
    Raises:
        ValueError: model is not a module, or split along tp; fused_loss without a
            GPT2LMHeadModel.
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
    if fused_loss and not any(_is_gpt2(m, "GPT2LMHeadModel") for m in model.modules()):
        raise ValueError(
            f"patch: expected a transformers GPT2LMHeadModel for fused_loss=True, got "
            f"model={type(model).__name__}; use fastpar.LinearCrossEntropyLoss in its forward"
        )
    report = PatchReport(type(model).__name__)
    earlier = [swap for m in model.modules() if (swap := swap_of(m)) is not None]
    if earlier:
        report.fallbacks = earlier[0].fallbacks
    report.already = len(earlier)

    looks: dict[Any, _Plan] = {}
    left: list[tuple[str, nn.Module, str]] = []
    # Parts come before what holds them, which asks what became of its parts.
    for name, module in reversed(list(model.named_modules())):
        if swap_of(module) is not None:
            continue
        plan = _plan(name, module, fused_loss, looks)
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
    return sum(_restore(module) for _, module, _ in swapped)


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


def _restore(module: nn.Module) -> bool:
    swap = vars(module).pop("_fastpar_swap", None)
    if swap is not None:
        module.__class__ = swap.original
    return swap is not None


def _is_gpt2(module: nn.Module, *names: str) -> bool:
    return type(module).__module__ == GPT2 and type(module).__name__ in names


def _plan(name: str, module: nn.Module, fused_loss: bool, looks: dict[Any, _Plan]) -> _Plan:
    if "forward" in vars(module):
        return "its forward was replaced by someone else's"
    if type(module) in TORCH_CLASSES:
        return _plan_torch(module)
    if type(module).__module__ in OURS and not isinstance(module, modules.CausalSelfAttention):
        return None
    key = _look(module)
    if key not in looks:
        known = type(module).__module__ == GPT2
        looks[key] = _plan_gpt2(module, fused_loss) if known else _plan_nanogpt(name, module)
    plan = looks[key]
    if plan is not None or any(True for _ in module.children()):
        return plan
    if isinstance(module, nn.Linear | nn.Dropout) or is_conv1d(module):
        return "torch's, no faster one here"
    return "not known" if any(True for _ in module.parameters()) else None


def _plan_torch(module: Any) -> _Plan:
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
    if _is_gpt2(module, "GPT2Attention", "GPT2SdpaAttention"):
        if module.is_cross_attention:
            return "cross-attention has no kernel"
        resid = {"probs": "attn_dropout", "resid": "resid_dropout"}
        return patched.GPT2Attention, resid
    if _is_gpt2(module, "GPT2MLP"):
        return _plan_mlp(module, "act")
    if _is_gpt2(module, "GPT2Block"):
        returns = type(module).forward.__annotations__.get("return")
        if returns not in (Tensor, "torch.Tensor"):
            return "returns a tuple (transformers 4): residual add and LayerNorm stay apart"
        if not isinstance(module.attn, patched.GPT2Attention):
            return "its attention was left"
        return patched.Block, {}
    if _is_gpt2(module, "GPT2Model"):
        takers = [type(module), *(swap_of(b.attn) for b in module.h), *map(type, module.h)]
        return (patched.Model, {}) if all(map(_takes_hints, takers)) else None
    if _is_gpt2(module, "GPT2LMHeadModel"):
        if fused_loss:
            from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

            return patched.LMHead, {"output": CausalLMOutputWithCrossAttentions}
        return "logits and loss are its own; fused_loss=True computes the loss without logits"
    return None


def _takes_hints(taker: Any) -> bool:
    """Whether it hands on arguments that it does not know, as transformers does from 4.53 on."""
    kind = taker.original if isinstance(taker, Swap) else taker
    if kind is None:
        return False
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _look(module: nn.Module) -> Any:
    """Equal for modules that differ in the values of their tensors only."""
    look: list[Any] = []
    for name, part in module.named_modules():
        look += [name, type(part), swap_of(part) is None, tuple(part._modules)]
        for key, value in vars(part).items():
            if key not in _MODULE_FIELDS and key != "_fastpar_swap":
                known = isinstance(value, int | float | str | tuple | None)
                look += [key, repr(value) if known else id(value)]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    look += [(name, tuple(t.shape), t.is_meta) for name, t in tensors]
    return tuple(look)


def _plan_nanogpt(name: str, module: Any) -> _Plan:
    parts = dict(module.named_children())
    if {"c_attn", "c_proj"} <= set(parts) and isinstance(getattr(module, "n_head", None), int):
        return _plan_attention(module, parts)
    if {"c_fc", "c_proj"} <= set(parts):
        activations = [p for p in ("gelu", "act", "activation") if p in parts]
        return _plan_mlp(module, activations[0]) if activations else "no GELU part found"
    if {"ln_1", "attn", "ln_2", "mlp"} <= set(parts):
        if not isinstance(module.attn, patched.Attention):
            return "its attention was left"
        if not isinstance(module.ln_2, patched.Norm | modules.LayerNorm):
            return "its ln_2 was left"
        width = module.attn.c_attn.in_features
        return _checked(module, width, _block, patched.Block, {})
    if name.split(".")[-1].startswith("ln") and not parts:
        return _plan_norm(module)
    return None


def _plan_attention(module: Any, parts: dict[str, nn.Module]) -> _Plan:
    c_attn, c_proj = parts["c_attn"], parts["c_proj"]
    if not isinstance(c_attn, nn.Linear) or not isinstance(c_proj, nn.Linear):
        return "c_attn or c_proj is not an nn.Linear"
    C = c_attn.in_features
    if (c_attn.out_features, c_proj.in_features) != (3 * C, C):
        return f"c_attn maps {C} to {c_attn.out_features}, not to q, k and v of {C} each"
    dropouts = [name for name, part in parts.items() if isinstance(part, nn.Dropout)]
    resid = [name for name in dropouts if name != "attn_dropout"]
    if len(resid) > 1:
        return f"dropouts of unknown places: {', '.join(resid)}"
    numbers = [n for n in ("dropout", "p", "dropout_p", "attn_pdrop") if _is_number(module, n)]
    probs = ["attn_dropout"] if "attn_dropout" in dropouts else numbers[:1]
    options = {"resid": resid[0] if resid else None, "probs": probs[0] if probs else None}
    return _checked(module, C, _attention, patched.Attention, options)


def _is_number(module: nn.Module, name: str) -> bool:
    return isinstance(vars(module).get(name), float | int)


def _plan_mlp(module: Any, activation: str) -> _Plan:
    part = getattr(module, activation)
    width = module.c_fc.weight.shape[0 if is_conv1d(module.c_fc) else 1]
    dropouts = [name for name, p in module.named_children() if isinstance(p, nn.Dropout)]
    if len(dropouts) > 1:
        return f"dropouts of unknown places: {', '.join(dropouts)}"
    options = {
        "activation": activation,
        "kind": type(part),
        "dropout": dropouts[0] if dropouts else None,
    }
    plan: _Plan = None
    for form in ("tanh", "none"):

        def formula(m: Any, x: Tensor, form: str = form) -> Tensor:
            return m.c_proj(F.gelu(m.c_fc(x), approximate=form))

        plan = _checked(module, width, formula, patched.MLP, {**options, "approximate": form})
        if not isinstance(plan, str):
            return plan
    return f"its {activation} ({type(part).__name__}) is not GELU, or {plan}"


def _plan_norm(module: Any) -> _Plan:
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
    return _checked(module, weight.shape[0], formula, patched.Norm, {"eps": eps}, scale=1e-3)


def _attention(m: Any, x: Tensor) -> Tensor:
    qkv = m.c_attn(x).unflatten(-1, (3, m.n_head, -1)).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)  # [B, H, T, D]
    return m.c_proj(o.transpose(1, 2).flatten(2))


def _block(m: Any, x: Tensor) -> Tensor:
    x = x + m.attn(m.ln_1(x))
    return x + m.mlp(m.ln_2(x))


def _checked(
    module: nn.Module,
    width: int,
    formula: Callable[[Any, Tensor], Tensor],
    mixin: type[nn.Module],
    options: dict[str, Any],
    scale: float = 1.0,
) -> _Plan:
    """(mixin, options) if the module computes the formula; see [Note: seen to compute]."""
    if any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        return "on the meta device: load its weights first"
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        twin = copy.deepcopy(module)
        for part in twin.modules():
            _restore(part)
            for hooks in _hooks(part):
                hooks.clear()
        twin = twin.cpu().double().eval()
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
            for p in twin.parameters():
                p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
            x = torch.randn(2, 5, width, dtype=torch.float64, generator=generator) * scale + scale
            got, want = type(twin).forward(twin, x), formula(twin, x)
    except Exception as error:
        return f"could not be checked: {type(error).__name__}: {str(error).splitlines()[0]}"
    same = isinstance(got, Tensor) and got.shape == want.shape
    if not same or not (got - want).abs().max() <= 1e-4 * want.abs().max():
        return "computes something else than its parts' names say"
    return mixin, options


def _hooks(module: nn.Module) -> Iterable[Any]:
    return (v for k, v in vars(module).items() if k.endswith("_hooks") and hasattr(v, "clear"))
