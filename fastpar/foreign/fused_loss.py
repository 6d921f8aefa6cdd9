"""fused_loss=True for models of nanoGPT's shape: forward(idx, targets=None) -> (logits, loss).

[Note: the loss without logits] Without targets such a model computes logits for the last token
only. So a patched one runs its own forward without targets, takes what its last LayerNorm returns,
and computes the loss of all tokens from that and lm_head's weight. A copy has to prove that this is
the loss which its forward with targets returns: values and gradients, for one token up to as many
as it has positions, with targets of -1, with small and large logits.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.foreign import proof
from fastpar.foreign.fused_gpt2 import head_fits, head_loss
from fastpar.foreign.swap import SILENT, Swapped, replaced_in, swap_of
from fastpar.nn.modules import autocast_dtype

IGNORED = -1
ROWS = 61  # of a copy's vocabulary and positions


class Loss(Swapped):
    """A model of nanoGPT's shape: in training, the loss of targets without logits."""

    does = "loss without logits in training (fused_loss=True): the logits are None"
    falls_back = ("torch.compile, fp64, hooks on or another lm_head, settings changed since",)

    def refusal(self, given: dict[str, Any]) -> str | None:
        idx, targets = (given.get(name) for name in self.argument_names)
        if not self.training or targets is None or swap_of(self) is None:
            return SILENT
        fits = (
            not torch.compiler.is_compiling()
            and isinstance(idx, Tensor)
            and isinstance(targets, Tensor)
            and idx.dim() == 2
            and targets.shape == idx.shape
            and head_fits(self.lm_head)
            and self.changed() is None
        )
        return None if fits else self.falls_back[0]

    def fused_forward(self, given: dict[str, Any]) -> tuple[None, Tensor]:
        idx, targets = (given[name] for name in self.argument_names)
        x = _last(self, self.option("norm"), lambda: self.own_forward[0](self, idx))
        loss = head_loss(self.lm_head, x, targets, ignore_index=IGNORED, reduction="mean")
        return None, loss if autocast_dtype(x) else loss.to(x.dtype)


def _last(model: Any, norm: str, forward: Any) -> Tensor:
    """What the model's last LayerNorm returns in a call of forward."""
    found: list[Tensor] = []
    hook = model.get_submodule(norm).register_forward_hook(lambda m, args, y: found.append(y))
    try:
        forward()
    finally:
        hook.remove()
    if len(found) != 1:
        raise proof.UnprovenError(f"calls {norm} {len(found)} times")
    return found[0]


class _Rows(nn.Module):
    """An embedding of few rows in the place of one of any size."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, width))

    def forward(self, idx: Tensor) -> Tensor:
        return F.embedding(idx % ROWS, self.weight)


def loss_shape(model: nn.Module) -> str | None:
    """The name of the last LayerNorm of a model that has nanoGPT's parts; None for others."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    if len(parameters) != 2 or parameters[1].default is not None:
        return None
    if not isinstance(getattr(model, "lm_head", None), nn.Linear):
        return None
    names = dict(model.named_modules())
    return next((name for name in ("transformer.ln_f", "ln_f") if name in names), None)


def prove_loss(model: nn.Module, norm: str) -> None:
    """Checks that the model computes the loss this room knows: [Note: the loss without logits].

    Raises:
        UnprovenError: it returns something else, draws random numbers or changes itself.
    """
    head: Any = model.lm_head
    replaced = replaced_in(model)
    if replaced is not None:
        raise proof.UnprovenError(f"has another {replaced} of someone else's")
    if type(head) is not nn.Linear or head.bias is not None:
        raise proof.UnprovenError("has an lm_head that is not an nn.Linear without bias")
    width, positions = head.in_features, proof.LONGEST
    # Not initialized: that would draw numbers of the run; twin_of draws its weights.
    rows_of_head = nn.utils.skip_init(nn.Linear, width, ROWS, bias=False)
    instead: dict[nn.Module, nn.Module] = {head: rows_of_head}
    blocks = model.get_submodule(norm.replace("ln_f", "h"))
    instead |= {block: proof.StandIn("block", width) for block in blocks.children()}
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding):
            instead[part] = _Rows(part.embedding_dim)
            if name.endswith("wpe"):
                positions = part.num_embeddings
    twin = proof.twin_of(model, instead).train().requires_grad_(True)
    proof.set_rates(twin)
    settings = proof.attributes(twin)
    for scale in (1.0, 1e4):
        with torch.no_grad():
            twin.lm_head.weight *= scale
        for B, T in ((2, 9), (1, 1), (3, 17), (1, positions)):
            _compare(twin, norm, B, min(T, positions))
    if proof.attributes(twin) != settings:
        raise proof.UnprovenError("changes its own attributes")


def _compare(twin: Any, norm: str, B: int, T: int) -> None:
    generator = torch.Generator().manual_seed(B * 10_007 + T)
    idx = torch.randint(ROWS, (B, T), generator=generator, device="cpu")
    targets = torch.randint(ROWS, (B, T), generator=generator, device="cpu")
    targets[:, 1::3] = IGNORED
    forward = type(twin).forward
    rows: list[torch.Size] = []

    def without_targets() -> Tensor:
        rows.clear()
        return _last(twin, norm, lambda: forward(twin, idx))

    own, _ = proof.without_draws(lambda: forward(twin, idx, targets))
    hook = twin.lm_head.register_forward_hook(lambda m, args, y: rows.append(args[0].shape))
    x, _ = proof.without_draws(without_targets)
    hook.remove()
    if not (isinstance(own, tuple) and len(own) == 2 and isinstance(own[1], Tensor)):
        raise proof.UnprovenError("returns something else than (logits, loss)")
    width = twin.lm_head.in_features
    if x.shape != (B, T, width) or [shape.numel() for shape in rows] != [B * width]:
        raise proof.UnprovenError("computes logits of all tokens when it is given no targets")
    loss = F.cross_entropy(twin.lm_head(x).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    weights = list(twin.parameters())
    grads = [torch.autograd.grad(y, weights, allow_unused=True) for y in (own[1], loss)]
    for got, want in zip((own[1], *grads[0]), (loss, *grads[1])):
        if (got is None) != (want is None) or (got is not None and proof.differ(got, want)):
            raise proof.UnprovenError("returns another loss than the mean cross-entropy without -1")
