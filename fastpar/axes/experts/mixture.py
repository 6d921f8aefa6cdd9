"""Experts instead of a GPT's MLP: each token's rows go through the K experts of its router.

    logits [N, E] = x @ router.T, in fp32            route, permute (kernels/)
    rows [M, C] -> c_fc[e] -> GELU -> c_proj[e]      grouped_linear, of this rank's experts; or
                                                     relu2 or swiglu, as in the dense MLP
    y [N, C] = each token's weighted sum             combine

Capacity: an expert takes at most ceil(capacity * N * K / E) of a micro-batch's choices, the
first ones in the order of the tokens; a token's dropped choices add 0. N is what one data rank
computes in one forward, so layouts with equal micro-batches drop the same. None drops nothing.

tp: every rank of tp has all tokens and F/tp of each expert's features. Between the input and the
sum of y over the ranks all gradients are partial over tp, also the router's, and that of c_proj's
bias, which only one rank adds.

ep: of E experts each of the ep ranks has E/ep consecutive ones. Rows are sorted by expert, so the
rows for a rank are contiguous:

    rows [M, C] -> all_to_all, exact sizes -> [S, C], by source and expert -> layers
         [M, C] <- all_to_all              <- [S, C]

The numbers of rows, E of them, are exchanged first; the host waits for them. A rank's experts see
the tokens of ep ranks, and their gradients are averaged over the dp/ep ranks with the same experts,
all others over dp. So gradients are divided by ep on their way to the experts and multiplied on
their way back: both are exact for powers of two, and no loop, token count or learning rate depends
on ep.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.axes.experts.balance import Choice, Losses, with_losses
from fastpar.axes.tensor.functional import TensorParallel, copy_to, gather, reduce_from, scatter
from fastpar.comm.collectives import Collectives
from fastpar.kernels import activation, combine, grouped_linear, permute, route
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward
from fastpar.settings.model import GPTConfig
from fastpar.sharding.placements import Partial, Shard, State


class Stack(nn.Module):
    """Weights of one layer of all experts, [E, F, C], and biases, [E, F].

    Attributes:
        matrices: heights of the matrices that an expert's weight holds, as gpt.py's Weights.
    """

    def __init__(self, shape: tuple[int, ...], bias: bool, matrices: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:-1])) if bias else None
        self.matrices = matrices

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}"


class Router(nn.Module):
    """Logits of all experts, and the state that balances them (balance.py).

    Attributes:
        load: int64 [E], choices of each expert in the last step, over all ranks.
        steps: int64 [E], how often the bias went up, minus how often down.
    """

    load: Tensor
    steps: Tensor

    def __init__(self, config: GPTConfig, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.top_k, self.rate = config.top_k, config.balance_rate
        self.weight = nn.Parameter(torch.empty(shape))
        for name in ("load", "steps"):  # integers: a model's .to(bfloat16) does not change them
            self.register_buffer(name, torch.zeros(config.n_expert, dtype=torch.int64))

    def forward(
        self, x: Tensor, losses: Losses | None, layer: int
    ) -> tuple[Tensor, Tensor, Choice | None]:
        """(weights [N, K], experts [N, K]) of x [N, C]; losses: only of a forward in training."""
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
        """f_e: of the previous step, or equal ones."""
        total = self.load.sum()
        equal = torch.full_like(self.load, 1.0 / len(self.load), dtype=torch.float64)
        return torch.where(total > 0, self.load.double() / total.clamp(min=1), equal).to(dtype)

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        """Set the counts of a step, [E] int64."""
        if self.rate:
            self.steps += torch.sign(counts.sum() - len(counts) * counts)
        self.load.copy_(torch.where(counts.sum() > 0, counts, self.load))


class Experts(nn.Module):
    """The experts of one layer; their creator sets the weights; see the top of the file.

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
        self.activation = config.activation
        self.losses, self.number = losses, number

    def tensor_parallel(self, tp: TensorParallel) -> dict[str, State]:
        self.tp, first = tp, Shard(1, groups=len(self.c_fc.matrices))
        states: dict[str, State] = {"router.weight": Partial(), "c_fc.weight": first}
        states |= {"c_fc.bias": first, "c_proj.weight": Shard(2), "c_proj.bias": Partial()}
        return {name: states[name] for name, _ in self.named_parameters()}

    def expert_parallel(self, ep: ExpertParallel) -> dict[str, State]:
        """Store ep; returns the states of its parameters along ep."""
        self.ep = ep
        names = (name for name, _ in self.named_parameters() if not name.startswith("router"))
        return dict.fromkeys(names, Shard(0))

    def forward(self, y: Tensor) -> Tensor:
        """[..., C] -> [..., C]; with sequence parallelism this rank's tokens, [N/tp, C]."""
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
        rows = activation(grouped_linear(rows, fc.weight, fc.bias, counts), None, self.activation)
        bias: Tensor | None = proj.bias
        if bias is not None and self.tp is not None and self.tp.rank:  # one rank adds it
            bias = bias * 0.0
        rows = grouped_linear(rows, proj.weight, bias, counts)
        return rows if way is None else way.to_tokens(rows)


@functools.cache
def _keep_out_of_graphs() -> None:
    """Keep torch.compile from tracing experts, whose sizes depend on the data.

    Not by decorators, which would import torch's compiler, for models without experts, too.
    """
    for kind, name in ((Experts, "forward"), (Losses, "note_scale")):
        setattr(kind, name, torch.compiler.disable(getattr(kind, name)))


# Exchange over ep

_numbers = itertools.count(1)
_places: weakref.WeakValueDictionary[int, ExpertParallel] = weakref.WeakValueDictionary()


class ExpertParallel:
    """One rank's position in the axis ep. Made by parallelize(), used by the experts.

    Args:
        group: the ranks along ep.
    Attributes:
        rank, size: along ep.
        number: its number in calls of ops, so that selective recomputation keeps received rows.
        sent_bytes: of rows and their gradients, to other ranks, since it was set to 0.
    """

    def __init__(self, group: Collectives) -> None:
        self.group, self.rank, self.size = group, group.rank, group.world_size
        self.sent_bytes, self.number = 0, next(_numbers)
        _places[self.number] = self

    def __deepcopy__(self, memo: dict) -> ExpertParallel:
        return self

    def __reduce__(self) -> tuple:
        raise RuntimeError(
            f"ExpertParallel: cannot save the model itself, of which rank {self.rank} of "
            f"{self.size} has some experts; save model.state_dict()"
        )

    def counts(self, counts: Tensor) -> Tensor:
        """[E] rows per expert -> [ep, E/ep] rows that each rank sends to this rank's experts."""
        out = torch.empty_like(counts)
        self.group.all_to_all(out, counts)
        return out.view(self.size, -1)

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows of x[M, C], sent[r] of them to rank r; returns the received rows. Ranks: ep."""
        width = x.shape[1]
        out = x.new_empty(sum(received), width)
        sizes = [[n * width for n in counts] for counts in (received, sent)]
        self.group.all_to_all(out.view(-1), x.contiguous().view(-1), *sizes)
        self.sent_bytes += (len(x) - sent[self.rank]) * width * x.element_size()
        return out


def _all_to_all(x: Tensor, sent: list[int], got: list[int], factor: float, ep: int) -> Tensor:
    return _places[ep].all_to_all(x, sent, got)


_DEVICES = ("CPU", "CUDA")
_counts_op = define_op(
    "ep_counts(Tensor counts, int ep) -> Tensor",
    lambda counts, ep: _places[ep].counts(counts),
    lambda counts, ep: torch.empty_like(counts).view(_places[ep].size, -1),
    _DEVICES,
)
_exchange_op = define_op(  # factor: of the gradient, which takes the same way back
    "ep_exchange(Tensor x, int[] sent, int[] got, float factor, int ep) -> Tensor",
    _all_to_all,
    lambda x, sent, got, factor, ep: x.new_empty(sum(got), x.shape[1]),
    _DEVICES,
)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, *ctx.given = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple:
    refuse_double_backward("expert_parallel")
    sent, got, factor, ep = ctx.given
    return _exchange_op(grad * factor, got, sent, 1.0, ep), None, None, None, None


define_autograd(_exchange_op, _setup_context, _backward)


class Dispatch:
    """The exchange of rows with the ranks that have their experts; see "ep" above.

    Args:
        counts: [E] rows for each expert, of this rank.
    Attributes:
        counts: [ep, E/ep] rows that this rank gets, by source.
    """

    def __init__(self, counts: Tensor, ep: ExpertParallel) -> None:
        self.ep, self.counts = ep, _counts_op(counts, ep.number)
        both = torch.stack((counts.view(ep.size, -1).sum(1), self.counts.sum(1)))
        self._sent, self._received = both.tolist()

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send rows to their experts. Ranks: all of ep. Wire: the rows of other ranks' experts,
        forward and backward."""
        return _exchange_op(rows, self._sent, self._received, float(self.ep.size), self.ep.number)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Send results back."""
        return _exchange_op(rows, self._received, self._sent, 1.0 / self.ep.size, self.ep.number)
