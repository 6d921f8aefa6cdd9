"""Sequences split over the ranks of cp, and attention over all of them.

Each rank has N/cp of a batch's N = B*T tokens; "Chunks" below says which. Work on single tokens
needs nothing else. Attention works in one of two ways. By keys: keys.py. By heads: to_heads() gives
a rank all tokens of some of the heads, and to_tokens() returns the result (Ulysses):

    q, k, v [N/cp, 3, H, D]  -> to_heads ->  [N, 3, H/cp, D]  -> attention ->  [N, 1, H/cp, D]
                                                      -> to_tokens ->  [N/cp, 1, H, D]

Heads are independent, so every row of attention has the bits of one process, with its dropout.
Backward is the same two exchanges reversed.

Chunks: a sequence is cut into equal chunks, of which each rank has some. By heads the sequence is
the whole batch, row after row, and rank r has chunk r of cp: consecutive tokens. By keys each row
is cut into 2 * cp chunks, and rank r has chunks r and 2 * cp - 1 - r: with a causal mask a query's
work grows with its position, and so every rank has the same sum of positions. Models that take only
rows (foreign/tp_plan.py) get rows cut like that by heads, too, with chunks 2 * r and 2 * r + 1.
All other code learns from ContextParallel which tokens a rank has.

Padding: cp need not divide the heads; padding heads are zeros, which attention maps to unused
zeros. A batch is padded after its last position, where attention does not look and targets do not
count.

One loss: the ranks of cp get the same batch and return the same loss, that of all its tokens, like
the ranks of tp. A rank's gradients of parameters are its own tokens' part, and cp is one of the
data axes, over which the engine averages; so operators that sum over cp here multiply their
gradient by cp. No loop, token count or learning rate depends on cp.

Handles: as in axes/tensor/functional.py, an op gets the number of the ContextParallel.

Source: Jacobs et al. 2023, arXiv 2309.14509
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward

_DEVICES = ("CPU", "CUDA")
_numbers = itertools.count(1)
_handles: weakref.WeakValueDictionary[int, ContextParallel] = weakref.WeakValueDictionary()


class ContextParallel:
    """One rank's position in the axis cp. Made by parallelize(), used by the model.

    Args:
        group: the ranks along cp.
        method: "heads" or "keys".
        by_row: cut each row, with either method.
    Attributes:
        rank, size: along cp.
        n_chunks, chunks: number of chunks of a sequence, and those of this rank.
        number: its number in calls of ops.
    """

    def __init__(self, group: Collectives, method: str = "heads", *, by_row: bool = False) -> None:
        self.group, self.rank, self.size = group, group.rank, group.world_size
        self.by_keys = method == "keys"
        self.by_row = by_row or self.by_keys
        self.n_chunks = 2 * self.size if self.by_row else self.size
        self.chunks = self._chunks_of(self.rank)
        every = [chunk for rank in range(self.size) for chunk in self._chunks_of(rank)]
        self._of_ranks = every  # the chunks in the order of the ranks that have them
        self._in_order = sorted(range(self.n_chunks), key=every.__getitem__)
        self.number = next(_numbers)
        _handles[self.number] = self

    def _chunks_of(self, rank: int) -> list[int]:
        if self.by_row:
            return [rank, self.n_chunks - 1 - rank] if self.by_keys else [2 * rank, 2 * rank + 1]
        return [rank]

    def __deepcopy__(self, memo: dict) -> ContextParallel:
        return self

    def __reduce__(self) -> tuple:
        raise RuntimeError(
            f"ContextParallel: cannot save the model itself on rank {self.rank} of {self.size}; "
            "save model.state_dict()"
        )

    def first_head(self, heads: int) -> int:
        """The first of so many heads that this rank attends."""
        return 0 if self.by_keys else self.rank * -(-heads // self.size)

    def padding(self, batch: int, time: int, shares: int) -> int:
        """Positions to add to each row so that ranks have equal numbers of its tokens.

        Args:
            shares: number of ranks that split tokens, including those of cp.
        """
        if self.by_row:
            return -time % math.lcm(self.n_chunks, shares)
        return -time % shares if batch * time % shares else 0

    def runs(self, batch: int, time: int) -> tuple[int, int, tuple[int, int]]:
        """Positions of this rank's tokens: (first, rows, moved) of kernels.Rng."""
        if not self.by_row:
            return self.rank * (batch * time // self.size), time, (0, 0)
        length = time // self.n_chunks
        first, second = (chunk * length for chunk in self.chunks)
        return 0, 2 * length, (first, second - length)

    def slice(self, x: Tensor) -> Tensor:
        """This rank's tokens of all tokens, [B, T] -> [N/cp]."""
        return self._cut(x)[:, self.chunks].flatten()

    def slice_rows(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B, T/cp, ...], if each row is cut."""
        return self._cut(x)[:, self.chunks].flatten(1, 2)

    def of_ranks(self, x: Tensor) -> Tensor:
        """[B, T, ...] of all tokens -> [cp, N/cp, ...], those of each rank."""
        parts = self._cut(x)[:, self._of_ranks].unflatten(1, (self.size, -1))
        return parts.movedim(1, 0).flatten(1, 3)

    def in_order(self, parts: Tensor, batch: int) -> Tensor:
        """[cp, N/cp, ...] of each rank -> [N, ...], all tokens: the inverse of of_ranks()."""
        if not self.by_row:
            return parts.flatten(0, 1)
        chunks = parts.unflatten(1, (batch, len(self.chunks), -1)).movedim(0, 1).flatten(1, 2)
        return chunks[:, self._in_order].flatten(0, 2)

    def _cut(self, x: Tensor) -> Tensor:
        """[sequences, chunks, tokens, ...]; see "Chunks" above."""
        x = x if self.by_row else x.flatten(0, 1)[None]
        return x.unflatten(1, (self.n_chunks, -1))


def context_of(number: int) -> ContextParallel:
    """The ContextParallel of this number."""
    cp = _handles.get(number)
    assert cp is not None, "the model keeps it"
    return cp


# Exchanges


def _to_heads(x: Tensor, number: int) -> Tensor:
    """[n, K, H, D] of this rank's tokens -> [cp * n, K, H/cp, D], all tokens of its heads."""
    cp = context_of(number)
    n_heads = -(-x.shape[2] // cp.size)
    x = F.pad(x, (0, 0, 0, n_heads * cp.size - x.shape[2]))
    sent = x.unflatten(2, (cp.size, n_heads)).movedim(2, 0).contiguous()
    out = torch.empty_like(sent)
    cp.group.all_to_all(out.view(-1), sent.view(-1))
    return out.flatten(0, 1)


def _to_tokens(x: Tensor, heads: int, number: int) -> Tensor:
    """The inverse: [cp * n, K, H/cp, D] -> [n, K, heads, D]."""
    cp = context_of(number)
    sent = x.unflatten(0, (cp.size, -1)).contiguous()
    out = torch.empty_like(sent)
    cp.group.all_to_all(out.view(-1), sent.view(-1))
    return out.movedim(0, 2).flatten(2, 3)[:, :, :heads].contiguous()


def _sum(x: Tensor, number: int) -> Tensor:
    total = x.clone()
    context_of(number).group.all_reduce(total.view(-1))
    return total


def _gather(x: Tensor, batch: int, number: int) -> Tensor:
    cp = context_of(number)
    return cp.in_order(cp.group.gathered(x), batch)


def _heads_fake(x: Tensor, number: int) -> Tensor:
    size = context_of(number).size
    return x.new_empty(x.shape[0] * size, x.shape[1], -(-x.shape[2] // size), x.shape[3])


_to_heads_op = define_op(
    "cp_to_heads(Tensor x, int cp) -> Tensor", _to_heads, _heads_fake, _DEVICES
)
_to_tokens_op = define_op(
    "cp_to_tokens(Tensor x, SymInt heads, int cp) -> Tensor",
    _to_tokens,
    lambda x, heads, number: x.new_empty(
        x.shape[0] // context_of(number).size, x.shape[1], heads, x.shape[3]
    ),
    _DEVICES,
)
_sum_op = define_op(
    "cp_sum(Tensor x, int cp) -> Tensor", _sum, lambda x, number: torch.empty_like(x), _DEVICES
)
_gather_op = define_op(
    "cp_gather(Tensor x, SymInt batch, int cp) -> Tensor",
    _gather,
    lambda x, batch, number: x.new_empty(x.shape[0] * context_of(number).size, *x.shape[1:]),
    _DEVICES,
)


def _keep_heads(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.heads, ctx.number = inputs[0].shape[2], inputs[-1]


def _keep_number(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.number = inputs[-1]


def _backward(of: Callable[[Any, Tensor], Tensor], n_inputs: int) -> Callable[..., Any]:
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward("context_parallel")
        return of(ctx, grad), *[None] * (n_inputs - 1)

    return backward


def _keep_batch(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.batch, ctx.number = inputs


def _own_part(ctx: Any, grad: Tensor) -> Tensor:
    cp = context_of(ctx.number)
    return cp.of_ranks(grad.unflatten(0, (ctx.batch, -1)))[cp.rank] * cp.size


define_autograd(
    _to_heads_op, _keep_heads, _backward(lambda c, g: _to_tokens_op(g, c.heads, c.number), 2)
)
define_autograd(_to_tokens_op, _keep_number, _backward(lambda c, g: _to_heads_op(g, c.number), 3))
define_autograd(_sum_op, _keep_number, _backward(lambda c, g: g * context_of(c.number).size, 2))
define_autograd(_gather_op, _keep_batch, _backward(_own_part, 3))


def to_heads(x: Tensor, cp: ContextParallel) -> Tensor:
    """All tokens of this rank's heads, from its tokens of all heads; see the top of the file.

    Args:
        x: [N/cp, K, H, D].
    Returns:
        [N, K, H/cp, D], H rounded up to a multiple of cp.
    Ranks: all of cp. Wire: (cp - 1) / cp of x, forward and backward.
    """
    return _to_heads_op(x, cp.number)


def to_tokens(x: Tensor, heads: int, cp: ContextParallel) -> Tensor:
    """All heads of this rank's tokens, from all tokens of its heads: the inverse of to_heads().

    Args:
        x: [N, K, H/cp, D]; heads: H.
    Returns:
        [N/cp, K, H, D].
    Ranks: all of cp. Wire: (cp - 1) / cp of x, forward and backward.
    """
    return _to_tokens_op(x, heads, cp.number)


def sum_of_parts(x: Tensor, cp: ContextParallel) -> Tensor:
    """The sum of every rank's part of a loss; see "One loss" above. Ranks: all of cp."""
    return _sum_op(x, cp.number)


def gather_tokens(x: Tensor, batch: int, cp: ContextParallel) -> Tensor:
    """[N/cp, ...] of this rank's tokens -> [N, ...], on every rank, for equal computations.

    Args:
        batch: rows of these N tokens.
    Ranks: all of cp. Wire: (cp - 1) times x.
    """
    return _gather_op(x, batch, cp.number)


def first_of(x: Tensor, cp: ContextParallel) -> Tensor:
    """The x of the first rank. Ranks: all of cp."""
    return _sum_op(x if cp.rank == 0 else torch.zeros_like(x), cp.number)
