"""Load balancing of experts: a loss, or a bias, from the counts of the global batch.

    balance   a * E * sum over e of f_e * p_e     f_e: fraction of the choices, p_e: softmax(logits)
    z         b * logsumexp(logits)^2
    bias      of the choice alone: + rate for an expert below the mean count, - above it

f_e, and the counts of the bias, are those of the whole previous step: of all data ranks and all
micro-batches, summed as integers. A sum over one rank's tokens would give every layout another loss
(the mean of products is not the product of means), and the present step's counts are known only
after all its forwards, too late for the first backward passes. So each token's part depends only on
that token, the loss is a sum over tokens like the cross-entropy, and any split of a batch into
ranks and micro-batches gives the same one. In the first step f_e is 1/E. The counts are buffers of
the model and so in checkpoints.

No added value: these losses are added to the gradient of the logits and not to the loss that a
model returns, so recomputed blocks and pipeline stages need not pass them on. Their scale is the
gradient of the returned loss (reduction, loss scale, count of tokens), which the backward of that
loss stores before it reaches any block: Losses. Counts are noted in backward too: once, whatever is
recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PARTS = 2  # numbers of a layer besides counts and probabilities: dropped choices, sum of z


@dataclass
class Losses:
    """State that all experts of a model share.

    Args:
        n_layer, n_expert: layers with experts, and experts in each.
        balance, z: the factors of both losses; rate: of the bias.
    Attributes:
        scale: factor of a token's losses, a tensor: the gradient of the returned loss.
        attached: an engine sums the counts of a step.
        layers: this rank's routers, by number, which get the counts.
        last: fp64 [n_layer, 2E + 2], the sums of the last step over all ranks: counts, sums of
            probabilities, dropped choices, sum of squared logsumexp; None before the first.
    """

    n_layer: int
    n_expert: int
    balance: float
    z: float
    rate: float
    scale: Tensor | None = None
    attached: bool = False
    last: Tensor | None = None
    layers: dict[int, Any] = field(default_factory=dict)
    _sums: Tensor | None = None

    def add(self, layer: int, values: Tensor) -> None:
        """Add a backward's sums of one layer."""
        if self._sums is None or self._sums.device != values.device:
            self._sums = values.new_zeros(self.n_layer, values.numel())
        self._sums[layer] += values

    def take(self, device: torch.device) -> Tensor:
        """This rank's sums of the step; the next step begins."""
        sums, self._sums = self._sums, None
        if sums is None:
            width = 2 * self.n_expert + PARTS
            sums = torch.zeros(self.n_layer, width, dtype=torch.float64, device=device)
        return sums.flatten()

    def give(self, total: Tensor, rows: Tensor) -> None:
        """Receive the sums of all ranks: the counts of the next step."""
        self.last = total.view(self.n_layer, -1)
        for number, layer in self.layers.items():
            layer.update(self.last[number, : self.n_expert].round().long())

    def forget(self) -> None:
        """Drop the sums of gradients that were dropped."""
        self._sums = None

    def note_scale(self, loss: Tensor, tokens: Tensor | int) -> Tensor:
        """The loss; its backward notes the scale. tokens: by which it was divided already."""
        return _NoteScale.apply(loss, self, tokens)

    def check(self) -> None:
        """Refuse to train without an engine that sums the counts."""
        if not self.attached and (self.balance or self.rate):
            raise ValueError(
                "GPT: training with experts needs fastpar.parallelize, which sums the counts of a "
                f"step (one process: fastpar.Mesh()), got balance_loss={self.balance} "
                f"balance_rate={self.rate} without; call it, or set both to 0"
            )


class _NoteScale(torch.autograd.Function):
    """The identity; backward stores the scale of the losses."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, losses: Losses, tokens: Tensor | int) -> Tensor:
        ctx.losses, ctx.tokens = losses, tokens
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.losses.scale = grad / ctx.tokens
        return grad, None, None


class Choice:
    """The experts chosen from the logits of one forward; set when they are known."""

    experts: Tensor  # [N, K]
    dropped = 0


class _WithLosses(torch.autograd.Function):
    """The identity of logits[N, E]; adds the losses' gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, share: Tensor, losses: Losses, layer: int, choice: Choice
    ) -> Tensor:
        ctx.save_for_backward(logits, share)
        ctx.given = losses, layer, choice
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, share = ctx.saved_tensors
        losses, layer, choice = ctx.given
        assert losses.scale is not None, "the loss's backward comes first"
        p, lse = logits.softmax(-1), logits.logsumexp(-1, keepdim=True)
        numbers = torch.arange(losses.n_expert, device=logits.device)
        counts = (choice.experts.flatten()[:, None] == numbers).sum(0)
        parts = [counts, p.double().sum(0), lse.double().square().sum(0)]
        parts.insert(2, counts.new_full((1,), choice.dropped))
        losses.add(layer, torch.cat([part.double() for part in parts]))
        scale = losses.scale.to(logits.dtype)
        if losses.balance:
            slope = share - (p * share).sum(-1, keepdim=True)
            grad = grad + scale * (losses.balance * losses.n_expert) * p * slope
        if losses.z:
            grad = grad + scale * (2.0 * losses.z) * lse * p
        return grad, None, None, None, None


def with_losses(
    logits: Tensor, share: Tensor, losses: Losses, layer: int, choice: Choice
) -> Tensor:
    """logits[N, E], whose gradient includes that of the losses of a layer's tokens.

    Args:
        share: [E], f_e; layer: its number; choice: counted in backward.
    """
    return _WithLosses.apply(logits, share, losses, layer, choice)


def sums_of(model: Any, like: Tensor) -> Tensor:
    """The sums of a model's experts in the last step, flat; empty without experts."""
    losses: Losses | None = model.experts
    return like.new_empty(0) if losses is None or losses.last is None else losses.last.flatten()


def report_of(model: Any, sums: Tensor) -> dict[str, Any]:
    """Columns of a row of metrics, from sums_of() a step.

    expert_load: fraction of the choices of each expert, by layer; expert_dropped: of all choices;
    balance, router_z: a token's mean losses without their factors, over the layers.
    """
    losses: Losses | None = model.experts
    if losses is None or not len(sums):
        return {}
    rows, n_expert = sums.view(losses.n_layer, -1), losses.n_expert
    counts, p = rows[:, :n_expert], rows[:, n_expert : 2 * n_expert]
    chosen, tokens = (x.sum(1, keepdim=True).clamp(min=1e-9) for x in (counts, p))
    load = counts / chosen
    return {
        "expert_load": [[round(x, 4) for x in row] for row in load.tolist()],
        "expert_dropped": float(rows[:, -2].sum() / chosen.sum()),
        "balance": float((n_expert * load * p / tokens).sum(1).mean()),
        "router_z": float((rows[:, -1:] / tokens).mean()),
    }
