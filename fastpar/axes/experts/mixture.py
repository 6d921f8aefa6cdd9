"""Experts in the place of a GPT's MLP: each token's rows go through the K that its router chose.

    logits [N, E] = x @ router.T, in fp32            route, permute (kernels/)
    rows [M, C] -> c_fc[e] -> GELU -> c_proj[e]      grouped_linear, of this rank's experts
    y [N, C] = each token's weighted sum             combine

[Note: capacity] An expert takes at most ceil(capacity * N * K / E) of a micro-batch's choices, the
first ones in the order of the tokens; a token's dropped choices add 0. N is what one data rank
computes in one forward, so layouts with equal micro-batches drop the same. None drops nothing.

[Note: tp] Every rank of tp has all tokens and F/tp of each expert's features. From the input to the
sum of the ranks' parts of y all gradients are parts of a sum over tp; so is the router's, and that
of c_proj's bias, which one rank adds.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.axes.experts.balance import Choice, Losses, with_losses
from fastpar.axes.experts.exchange import Dispatch, ExpertParallel
from fastpar.axes.tensor.functional import TensorParallel, copy_to, gather, reduce_from, scatter
from fastpar.kernels import bias_gelu, combine, grouped_linear, permute, route
from fastpar.settings.model import GPTConfig
from fastpar.sharding.placements import Partial, Shard, State


class Stack(nn.Module):
    """The weights of one layer of all experts, [E, F, C], and biases, [E, F]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:-1]))

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}"


class Router(nn.Module):
    """Who goes where: logits of all experts, and what balances them (balance.py).

    Attributes:
        load: int64 [E], choices of each expert in the last step, over all ranks.
        steps: int64 [E], how often the bias went up, less how often down.
    """

    load: Tensor
    steps: Tensor

    def __init__(self, config: GPTConfig, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.top_k, self.rate = config.top_k, config.balance_rate
        self.weight = nn.Parameter(torch.empty(shape))
        for name in ("load", "steps"):  # integers: a model's .to(bfloat16) leaves them alone
            self.register_buffer(name, torch.zeros(config.n_expert, dtype=torch.int64))

    def forward(
        self, x: Tensor, losses: Losses | None, layer: int
    ) -> tuple[Tensor, Tensor, Choice | None]:
        """weights [N, K] and experts [N, K] of x [N, C]; losses: of a forward in training."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits, choice = F.linear(x.to(dtype), self.weight.to(dtype)), None
        if losses is not None:
            choice = Choice()
            logits = with_losses(logits, self._share(dtype), losses, layer, choice)
        bias = self.steps.to(dtype) * self.rate if self.rate else None
        weights, experts = route(logits, self.top_k, bias)
        if choice is not None:
            choice.experts = experts
        return weights, experts, choice

    def _share(self, dtype: torch.dtype) -> Tensor:
        """f_e: of the step before, or equal ones."""
        total = self.load.sum()
        equal = torch.full_like(self.load, 1.0 / len(self.load), dtype=torch.float64)
        return torch.where(total > 0, self.load.double() / total.clamp(min=1), equal).to(dtype)

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        """The counts of a step, [E] int64."""
        if self.rate:
            self.steps += torch.sign(counts.sum() - len(counts) * counts)
        self.load.copy_(torch.where(counts.sum() > 0, counts, self.load))


class Experts(nn.Module):
    """The experts of one layer, whose maker gives it its weights; see the top of the file.

    Args:
        losses: of the model; number: of this layer among those with experts.
    """

    router: Router
    c_fc: Stack
    c_proj: Stack

    tp: TensorParallel | None = None
    ep: ExpertParallel | None = None

    def __init__(self, config: GPTConfig, losses: Losses, number: int) -> None:
        super().__init__()
        _keep_out_of_graphs()
        self.n_expert, self.capacity = config.n_expert, config.expert_capacity
        self.losses, self.number = losses, number

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp = tp
        return {
            "router.weight": Partial(),
            "c_fc.weight": Shard(1),
            "c_fc.bias": Shard(1),
            "c_proj.weight": Shard(2),
            "c_proj.bias": Partial(),
        }

    def expert_parallel(self, ep: ExpertParallel) -> dict[str, State]:
        """Keeps it; the states of its parameters along ep."""
        self.ep = ep
        names = ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias")
        return dict.fromkeys(names, Shard(0))

    def forward(self, y: Tensor) -> Tensor:
        """[..., C] -> [..., C]; under sequence parallelism this rank's tokens, [N/tp, C]."""
        x, tp = y.reshape(-1, y.shape[-1]), self.tp
        if tp is not None:
            x = gather(x, 0, tp, partial=True) if tp.sequence_parallel else copy_to(x, tp)
        first = tp is None or tp.rank == 0
        counted = self.training and torch.is_grad_enabled() and first
        losses = self.losses if counted else None
        weights, experts, choice = self.router(x, losses, self.number)
        capacity = None
        if self.capacity is not None:
            slots = experts.numel()
            capacity = max(1, math.ceil(self.capacity * slots / self.n_expert))
        rows, order, counts = permute(x, experts, self.n_expert, capacity)
        if choice is not None:
            choice.dropped = experts.numel() - len(order)
        x = combine(self._layers(rows, counts), weights, order)
        if tp is not None:
            x = scatter(x, 0, tp, partial=True) if tp.sequence_parallel else reduce_from(x, tp)
        return x.view(y.shape)

    def _layers(self, rows: Tensor, counts: Tensor) -> Tensor:
        fc, proj, way = self.c_fc, self.c_proj, None
        if self.ep is not None:
            way = Dispatch(counts, self.ep)
            rows, counts = way.to_experts(rows), way.counts
        rows = bias_gelu(grouped_linear(rows, fc.weight, fc.bias, counts))
        bias: Tensor = proj.bias
        if self.tp is not None and self.tp.rank:  # see [Note: tp]
            bias = bias * 0.0
        rows = grouped_linear(rows, proj.weight, bias, counts)
        return rows if way is None else way.to_tokens(rows)


@functools.cache
def _keep_out_of_graphs() -> None:
    """No torch.compile traces experts, whose sizes depend on the data, nor what backward notes.

    Not decorators: that imports torch's compiler, for models without experts, too.
    """
    for kind, name in ((Experts, "forward"), (Losses, "note_scale")):
        setattr(kind, name, torch.compiler.disable(getattr(kind, name)))
