"""fastpar.patch: swaps the layers of a foreign GPT-2 for fastpar's in place, and reports on it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastpar.doctor.doctor import Calls, expect
from fastpar.foreign import fused
from fastpar.foreign.proof import features, on_the_cpu
from fastpar.foreign.recognize import TORCH_CLASSES, Looks, plan, plan_losses
from fastpar.foreign.swap import Swap, restore, swap_in, swap_of, swapped_class
from fastpar.nn import modules


@dataclass
class PatchReport:
    """What patch did; print it. `fallbacks` keeps counting while the model runs."""

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
            lines[0] += f", {self.already} were replaced before"
        for kind, names in self.replaced.items():
            lines.append(f"  {len(names):>4} {kind}: {self.does[kind]}")
        if self.replaced and not (self.falls_back or self.already):
            lines.append("attention, MLPs and blocks are replaced in models of GPT-2's shape only")
        if self.left:
            lines.append("left unchanged:")
        for (kind, why), names in self.left.items():
            shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
            lines.append(f"  {len(names):>4} {kind} ({shown}): {why}")
        if self.falls_back:
            lines.append("a call uses the module's own forward, with one warning, for:")
        for kind, reasons in self.falls_back.items():
            lines += [f"       {kind}: {reason}" for reason in reasons]
        if self.replaced or self.already:
            lines.append("fallback calls so far:" + ("" if self.fallbacks else " none"))
        lines += [f"  {count:>4} {reason}" for reason, count in self.fallbacks.items()]
        if self.replaced:
            lines.append(
                "dropout in attention and before LayerNorm: masks follow torch.manual_seed, but "
                "differ from torch's"
            )
        return "\n".join(lines)


def patch(model: nn.Module, *, fused_loss: bool = False) -> PatchReport:
    """Swaps the layers of a GPT-2-class model for fastpar's, in place.

    Parameters, state_dict, hooks and class names are unchanged; the model can be trained, copied,
    pickled, saved and compiled as before. Dropout of attention's probabilities and before ln_2 has
    different masks than torch's for the same seed, and rates in units of 1/256; torch.manual_seed
    and activation checkpointing control them as they do torch's. On a GPU that nobody has measured,
    the first call proves all kernels of the model at once (fastpar/doctor). A patched model does
    not support second derivatives, torch.func.vmap and forward-mode gradients: unpatch it first.

    Args:
        model: transformers' GPT2Model or GPT2LMHeadModel (4.45 or later; residual add and LayerNorm
            are fused if a block returns a tensor, as in 5), a model of nanoGPT's shape, or any
            module; in any module, parts that are exactly torch's LayerNorm, RMSNorm, GELU or
            Embedding are swapped.
        fused_loss: in training, compute the loss without logits, which are returned as None. For a
            GPT2LMHeadModel called with labels, or a model with nanoGPT's
            forward(idx, targets=None) called with targets.
    Returns:
        What was replaced, what was left and why, which calls fall back, and a running count of
        them; print it.
    Raises:
        ValueError: model is not a module, or is split along tp; fused_loss with any other model,
            or with a model that computes another loss.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"patch: expected a torch.nn.Module, got model={type(model).__name__}; pass the model"
        )
    report = _patch(model, fused_loss)
    weight = next(model.parameters(), None)
    if weight is not None:
        expect(calls_of(model), weight.device.type, weight.dtype)
    return report


@on_the_cpu()
def _patch(model: nn.Module, fused_loss: bool) -> PatchReport:
    split = next((name for name, m in model.named_modules() if getattr(m, "tp", None)), None)
    if split is not None:
        raise ValueError(
            f"patch: expected a model before parallelize(), got '{split}' split over tp ranks; "
            "call fastpar.patch(model) first"
        )
    losses = plan_losses(model) if fused_loss else {}
    report = PatchReport(type(model).__name__)
    earlier = [swap for m in model.modules() if (swap := swap_of(m)) is not None]
    if earlier:
        report.fallbacks = earlier[0].fallbacks
    report.already = len(earlier)

    looks = Looks(model)
    left: list[tuple[str, nn.Module, str]] = []
    # Parts come before the modules that contain them, whose plans depend on their parts' plans.
    for name, module in reversed(list(model.named_modules())):
        if swap_of(module) is not None:
            continue
        found = losses.get(module) or plan(name, module, fused_loss, looks)
        if isinstance(found, str):
            if type(module).__name__.startswith("FSDP"):
                found = "fully_shard has changed its class: call patch before fully_shard"
            left.append((name, module, found))
        elif found is not None:
            _swap(name, module, found, report)
    inside = {
        part
        for module in model.modules()
        if isinstance(module, fused.Attention | fused.MLP)
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


# A patched module's class, the op that it calls, and that op's last dimension (0: none).
_CALLS: tuple[tuple[type[nn.Module], str, Callable[[Any], int]], ...] = (
    (modules.LayerNorm, "layer_norm", lambda m: m.normalized_shape[-1]),
    (modules.RMSNorm, "rms_norm", lambda m: m.normalized_shape[-1]),
    (modules.Embedding, "embedding", lambda m: m.embedding_dim),
    (fused.Norm, "layer_norm", lambda m: m.weight.numel()),
    (fused.MLP, "bias_gelu", lambda m: features(m.c_fc)[1]),
    (fused.Block, "residual_layer_norm", lambda m: features(m.attn.c_proj)[1]),
    (fused.Attention, "attention", lambda m: m.option("head_dim")),
    (
        fused.Attention,
        "attention_masked",
        lambda m: m.option("head_dim") if m.option("probs") else 0,
    ),
    (fused.LMHead, "linear_cross_entropy", lambda m: m.lm_head.weight.shape[0]),
    (fused.Loss, "linear_cross_entropy", lambda m: m.lm_head.weight.shape[0]),
)


def calls_of(model: nn.Module) -> Calls:
    """The ops that a model of fastpar's modules calls; without ops whose size depends on the data,
    such as a stand-alone GELU."""
    return {
        (op, size(module))
        for module in model.modules()
        for kind, op, size in _CALLS
        if isinstance(module, kind) and size(module)
    }


def unpatch(model: nn.Module) -> int:
    """Restores the original class of every module that patch swapped; returns how many.

    Raises:
        ValueError: model is not a module; a swapped module was given yet another class since.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"unpatch: expected a torch.nn.Module, got model={type(model).__name__}; pass the model"
        )
    swapped = [(name, m, swap_of(m)) for name, m in model.named_modules()]
    for name, module, swap in swapped:
        if swap is not None and type(module) is not swapped_class(swap.mixin, swap.original):
            raise ValueError(
                f"unpatch: expected the classes that patch set, got {name}={type(module)}; first "
                "undo what changed it (a parametrization, FSDP)"
            )
    return sum(restore(module) for _, module, _ in swapped)


def _swap(name: str, module: nn.Module, found: Swap, report: PatchReport) -> None:
    original, mixin = type(module), found.mixin
    kind, kept = original.__name__, report.fallbacks
    conditions = dataclasses.replace(found.conditions)  # found for all equal modules
    own = dataclasses.replace(found, conditions=conditions, original=original, fallbacks=kept)
    swap_in(module, own)
    report.replaced.setdefault(kind, []).append(name or "model")
    report.does[kind] = TORCH_CLASSES[original][1] if original in TORCH_CLASSES else mixin.does
    if getattr(mixin, "falls_back", ()):
        report.falls_back[kind] = mixin.falls_back
