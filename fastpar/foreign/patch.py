"""fastpar.patch: swaps the layers of a foreign GPT-2 for fastpar's in place, and reports on it.

[Note: bound of a check] check=batch compares two runs that differ by roundings only. How far these
reach depends on the model, so it is measured: the unpatched model runs once more with every
weight moved by one rounding (eps of it, up or down), which moves every product by eps of it.
Either run rounds what it computes from a weight at most R times, each time by eps / 2, so the two
differ by at most 2 * R * eps / 2 = R * eps in each place where the moved weights differ by eps: the
bound is R times what moving them changed. In 16 bits sums are fp32, and a product, its activation
and what is added to it are rounded: R = 4. In fp32 and fp64 the sums themselves are rounded, of
up to 2^16 terms in lanes or trees: R = 16.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.doctor.doctor import Calls, expect
from fastpar.foreign import fused, modern
from fastpar.foreign.recognize import TORCH_CLASSES, features, plan, plan_losses
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
            lines.append("attention, MLPs and blocks are replaced in models of known classes only")
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


def patch(model: nn.Module, *, fused_loss: bool = False, check: Any = None) -> PatchReport:
    """Swaps the layers of a GPT-2-class model for fastpar's, in place.

    Parameters, state_dict, hooks and class names are unchanged; the model can be trained, copied,
    pickled, saved and compiled as before. Dropout of attention's probabilities and before ln_2 has
    different masks than torch's for the same seed, and rates in units of 1/256; torch.manual_seed
    and activation checkpointing control them as they do torch's. On a GPU that nobody has measured,
    the first call proves all kernels of the model at once (fastpar/doctor). A patched model does
    not support second derivatives, torch.func.vmap and forward-mode gradients: unpatch it first.

    Args:
        model: transformers' GPT2Model or GPT2LMHeadModel (4.45 or later; residual add and LayerNorm
            are fused if a block returns a tensor, as in 5), its Llama, Qwen3 and NanoChat, a model
            of nanoGPT's classes, or any module; in any module, parts that are exactly torch's
            LayerNorm, RMSNorm, GELU or Embedding are swapped.
        fused_loss: in training, compute the loss without logits, which are returned as None. For
            transformers' causal models called with labels, or nanoGPT's GPT called with targets.
        check: a batch of the model: a dict of keywords, a tuple of arguments, or a tensor. The
            model must give a loss for it: a number, .loss, or (..., loss). Its loss and gradients
            are computed before and after, in the model's dtype and without dropout; if they differ
            by more than roundings ([Note: bound of a check]), the patch is undone. It takes the
            time of three steps, and memory for three copies of the gradients and one of the
            weights. p.grad and the generators stay as they are.
    Returns:
        What was replaced, what was left and why, which calls fall back, and a running count of
        them; print it.
    Raises:
        ValueError: model is not a module, or is split along tp; fused_loss with any other model;
            check gives no loss, or other gradients than before.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"patch: expected a torch.nn.Module, got model={type(model).__name__}; pass the model"
        )
    before = None if check is None else (_observe(model, check), _observe(model, check, moved=True))
    swapped = {m for m in model.modules() if swap_of(m) is not None}
    report = _patch(model, fused_loss)
    weight = next(model.parameters(), None)
    if weight is not None:
        expect(calls_of(model), weight.device.type, weight.dtype)
    if before is not None:
        try:
            _compare(*before, _observe(model, check))
        except BaseException:
            for module in {*model.modules()} - swapped:
                restore(module)
            raise
    return report


def _observe(model: nn.Module, batch: Any, *, moved: bool = False) -> dict[str, Tensor]:
    """The loss of a batch, as "", and its gradients by parameter; moved: [Note: bound of a check].

    Parts are in evaluation, without dropout; the model itself trains, as a fused loss needs it.
    """
    trains = {module: module.training for module in model.modules()}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    devices = {p.device for p in named.values() if p.device.type == "cuda"}
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    args = () if kwargs else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    model.eval().training = True
    try:
        with torch.random.fork_rng([*devices]), torch.enable_grad():
            torch.manual_seed(0)
            weights = {name: _moved(p) if moved else p for name, p in named.items()}
            loss = _loss_of(torch.func.functional_call(model, weights, args, kwargs))
            gradients = torch.autograd.grad(loss, [*weights.values()], allow_unused=True)
    finally:
        for module, training in trains.items():
            module.training = training
    grads = zip(named.items(), gradients, strict=True)
    return {"": loss.detach()} | {
        name: torch.zeros_like(p) if grad is None else grad for (name, p), grad in grads
    }


def _moved(p: Tensor) -> Tensor:
    """A parameter with every element moved by one rounding, up or down."""
    sign = torch.randint_like(p, 2) * 2 - 1
    return (p.detach() * (1 + torch.finfo(p.dtype).eps * sign)).requires_grad_()


def _loss_of(output: Any) -> Tensor:
    """The loss in what a model returns."""
    value = getattr(output, "loss", None)
    if isinstance(output, Mapping):
        value = output.get("loss")
    elif isinstance(output, tuple) and value is None:
        value = output[-1]
    loss = output if isinstance(output, Tensor) else value
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.isfinite():
        said = loss.detach() if isinstance(loss, Tensor) else loss
        raise ValueError(
            "patch: expected a batch with targets as check, for which the model returns a finite "
            f"loss, got {type(output).__name__} with loss={said}; pass what a training step passes"
        )
    return loss.reshape(())


def _compare(stock: dict[str, Tensor], moved: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """Raises ValueError that names the first parameter whose gradients differ."""
    eps = max(torch.finfo(grad.dtype).eps for grad in stock.values())
    roundings = 4 if eps > 1e-5 else 16
    for name, want in stock.items():
        apart, usual = ((other[name] - want).double().norm().item() for other in (now, moved))
        bound = roundings * (usual + eps * want.double().norm().item())
        if not apart <= bound:
            raise ValueError(
                f"patch: expected the loss and gradients of check as before, got {apart:.3g} "
                f"between {f'the gradients of {name}' if name else 'the losses'}, where roundings "
                f"explain {bound:.3g}; the patch was undone: train the model as it is"
            )


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

    left: list[tuple[str, nn.Module, str]] = []
    # Parts come before the modules that contain them, whose plans depend on their parts' plans.
    for name, module in reversed(list(model.named_modules())):
        if swap_of(module) is not None:
            continue
        planned = losses.get(module) or plan(module, fused_loss)
        if isinstance(planned, str):
            left.append((name, module, planned))
        elif planned is not None:
            _swap(name, module, planned, report)
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
    (modern.RMSNorm, "rms_norm", lambda m: m.weight.numel() if hasattr(m, "weight") else 0),
    (modern.MLP, "relu2", lambda m: m.fc1.out_features if hasattr(m, "fc1") else 0),
    (modern.MLP, "swiglu", lambda m: 0 if hasattr(m, "fc1") else 2 * m.up_proj.out_features),
    (modern.Attention, "rope", lambda m: m.head_dim),
    (modern.Attention, "attention", lambda m: m.head_dim),
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


def _swap(name: str, module: nn.Module, swap: Swap, report: PatchReport) -> None:
    original, mixin = type(module), swap.mixin
    kind, kept = original.__name__, report.fallbacks
    swap_in(module, dataclasses.replace(swap, original=original, fallbacks=kept))
    report.replaced.setdefault(kind, []).append(name or "model")
    report.does[kind] = TORCH_CLASSES[original][1] if original in TORCH_CLASSES else mixin.does
    if getattr(mixin, "falls_back", ()):
        report.falls_back[kind] = mixin.falls_back
