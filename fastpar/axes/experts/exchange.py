"""Rows sent to the ranks that have their experts, and the results back.

Of E experts each of the ep ranks has E/ep, consecutive ones. Rows are sorted by expert, so what
goes to a rank is one piece of them:

    rows [M, C] -> all_to_all, exact sizes -> [S, C], by source and expert -> layers
         [M, C] <- all_to_all              <- [S, C]

The numbers of rows, E of them, are exchanged first; the host waits for them.

[Note: gradients of experts] A rank's experts see the tokens of ep ranks, and their gradients are
reduced as the mean over the dp/ep ranks that have the same ones. Everything else takes the mean
over dp. So gradients are divided by ep on their way to the experts and multiplied again on their
way back: both are exact for powers of two, and no loop, count of tokens or learning rate has to
know of ep.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward

_numbers = itertools.count(1)
_places: weakref.WeakValueDictionary[int, ExpertParallel] = weakref.WeakValueDictionary()


class ExpertParallel:
    """One rank's place in the axis ep. Made by parallelize(), kept by the modules that use it.

    Args:
        group: of the ranks along ep.
    Attributes:
        rank, size: along ep.
        number: names it in calls of ops, so that selective recomputation keeps what was received.
        sent_bytes: of rows and their gradients, to other ranks, since somebody set it to 0.
    """

    def __init__(self, group: Collectives) -> None:
        self.group, self.rank, self.size = group, group.rank, group.world_size
        self.sent_bytes, self.number = 0, next(_numbers)
        _places[self.number] = self

    def __deepcopy__(self, memo: dict) -> ExpertParallel:
        return self

    def __reduce__(self) -> tuple:
        raise RuntimeError(
            "ExpertParallel: expected a model's state_dict() to be saved, got the model itself on "
            f"rank {self.rank} of {self.size}; save model.state_dict()"
        )

    def counts(self, counts: Tensor) -> Tensor:
        """[E] rows for each expert -> [ep, E/ep], what each rank sends to this one's experts."""
        out = torch.empty_like(counts)
        self.group.all_to_all(out, counts)
        return out.view(self.size, -1)

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows x[M, C], so many to each rank -> rows from each. Ranks: all of ep."""
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
_exchange_op = define_op(  # factor: of the gradient, which goes back the same way
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
    """The way of some rows to their experts and back; see the top of the file.

    Args:
        counts: [E] rows of each expert, of this rank's.
    Attributes:
        counts: [ep, E/ep] rows that this rank gets, by source.
    """

    def __init__(self, counts: Tensor, ep: ExpertParallel) -> None:
        self.ep, self.counts = ep, _counts_op(counts, ep.number)
        both = torch.stack((counts.view(ep.size, -1).sum(1), self.counts.sum(1)))
        self._sent, self._received = both.tolist()

    def to_experts(self, rows: Tensor) -> Tensor:
        """Ranks: all of ep. Wire: the rows of other ranks' experts, forward and backward."""
        return _exchange_op(rows, self._sent, self._received, float(self.ep.size), self.ep.number)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The way back."""
        return _exchange_op(rows, self._received, self._sent, 1.0 / self.ep.size, self.ep.number)
