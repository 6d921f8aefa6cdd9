"""PowerSGD: gradients of matrices as products of two thin ones, for slow links.

Of a matrix v = gradient + error, [m, n], two messages are averaged: p = v q, [m, r], made
orthonormal on every rank, and q = v^T p, [n, r], from which the next step starts (warm start). All
ranks take p q^T as the mean; error = v - p q^T stays, on every rank for every element, so that it
is given to later steps. Vectors, and matrices that are not larger than their factors, travel with
the first message as they are.

[Note: two messages] They are small, and the second waits for the first: bucket by bucket a slow
link's latency would decide. So a bucket only says that it is there, and the first wait sends what
all buckets of the group have, in two messages. Ranks must wait at the same places, as a stage that
keeps whole gradients does at the end of a backward.

What is not finite in one matrix of a rank makes p q^T nan on all; error and q stay as they were.
Source: Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle
from fastpar.comm.wires import Wire


class Matrix(NamedTuple):
    """A parameter in a bucket, as a matrix."""

    place: slice
    rows: int
    columns: int

    def pays(self, rank: int) -> bool:
        """Whether its factors are smaller."""
        return rank * (self.rows + self.columns) < self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """Its part of a bucket."""
        return flat[self.place].view(self.rows, self.columns)


def as_matrix(place: slice, shape: Sequence[int]) -> Matrix:
    """A parameter of two dimensions or more, cut between those where its factors are smallest."""
    numel = math.prod(shape)
    cuts = itertools.accumulate(shape[:-1], operator.mul)
    rows = min(cuts, key=lambda rows: rows + numel // rows)
    return Matrix(place, rows, numel // rows)


class LowRankSums(Wire):
    """The gradients of one bucket.

    Args:
        messages: those of all buckets of the group.
        matrices: all parameters with two dimensions or more; rank: r.
        error: fp32, as long as x.
        key: the first q are random numbers of it.
    Attributes:
        factors: q of each matrix that is sent as factors, by the place where it starts.
    Wire: of two all-reduces of the group, r * m and r * n fp32 numbers of each matrix; the rest
        with the first.
    """

    def __init__(
        self, messages: Messages, matrices: Sequence[Matrix], rank: int, *, error: Tensor, key: int
    ) -> None:
        super().__init__(messages.inner, f"rank {rank}")
        self.error: Tensor = error
        self.messages = messages
        self.matrices = [m for m in matrices if m.pays(rank)]
        generator = torch.Generator().manual_seed(key)
        self.factors = {}
        for m in self.matrices:
            q = torch.randn(m.columns, rank, generator=generator, dtype=torch.float32, device="cpu")
            self.factors[m.place.start] = q.t().contiguous().to(error.device).t()
        ends = [0, *(e for m in self.matrices for e in (m.place.start, m.place.stop)), len(error)]
        self.rest = [slice(a, b) for a, b in zip(ends[::2], ends[1::2]) if a < b]
        rest = sum(s.stop - s.start for s in self.rest)
        self._sent = rest + sum(rank * (m.rows + m.columns) for m in self.matrices)

    def sent_bytes(self, op: str, n_bytes: int, numel: int) -> int:
        return self.inner.sent_bytes("all_reduce", 4 * self._sent, self._sent)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        return self.messages.add(_Sum(self, x.view(-1), x.view(-1), mean))

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        return self.messages.add(_Sum(self, out.view(-1), x.view(-1), mean))

    def begin(self, x: Tensor) -> Tensor:
        """v: x and what was left of earlier ones; in the memory of x where that is fp32."""
        self.calls += 1
        return x.add_(self.error) if x.dtype == self.error.dtype else x + self.error

    def keep(self, m: Matrix, v: Tensor, p: Tensor, q: Tensor, finite: bool) -> None:
        """v = p q^T, of p[r, m] and q[r, n], and what that has lost is the error."""
        mean = p.t() @ q
        if finite:
            torch.sub(v, mean, out=m.of(self.error))
            self.factors[m.place.start] = q.t()
        v.copy_(mean)


class _Sum(Handle):
    """One reduction of a bucket: out = this rank's part of the mean of x, which is overwritten."""

    def __init__(self, of: LowRankSums, out: Tensor, x: Tensor, mean: bool) -> None:
        self.of, self.out, self.x, self.mean = of, out, x, mean
        self.over = False

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.over:
            self.of.messages.send()

    def is_completed(self) -> bool:
        return self.over

    def end(self, v: Tensor) -> None:
        of, whole = self.of, self.out.numel() == v.numel()
        share = v if whole else v.view(of.world_size, -1)[of.rank]
        self.out.copy_(share if self.mean else share * of.world_size)
        self.over = True


class Messages:
    """Of all buckets of a group; see [Note: two messages]."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self._sums: list[_Sum] = []

    def add(self, new: _Sum) -> Handle:
        self._sums.append(new)
        return new

    @torch.no_grad()
    def send(self) -> None:
        """Both of what has come; afterwards it is over."""
        sums, self._sums = self._sums, []
        flats = [s.of.begin(s.x) for s in sums]
        rest = [v[part] for s, v in zip(sums, flats) for part in s.of.rest]
        thin = [(s.of, m, m.of(v)) for s, v in zip(sums, flats) for m in s.of.matrices]
        # Factors lie as [r, m] and [r, n]: MKL takes three times as long for a few columns.
        p = self._mean([of.factors[m.place.start].t() @ v.t() for of, m, v in thin], rest)
        p = [_orthonormal(x) if fine else x for x, fine in zip(p, _finite(p))]
        q = self._mean([x @ v for x, (*_, v) in zip(p, thin)], [])
        # The elements of p are at most 1: where these sums are finite p q^T is.
        finite = _finite([x.abs().sum(0) + y.sum() for x, y in zip(q, p)])
        for (of, m, v), left, right, fine in zip(thin, p, q, finite):
            of.keep(m, v, left, right, fine)
        for s, v in zip(sums, flats):
            s.end(v)

    def _mean(self, parts: list[Tensor], rest: list[Tensor]) -> list[Tensor]:
        """Of all ranks, as one message; rest is overwritten."""
        whole = [*parts, *rest]
        if not whole:
            return parts
        flat = torch.cat([x.reshape(-1) for x in whole])
        self.inner.all_reduce(flat, mean=True)
        pieces = [y.view_as(x) for x, y in zip(whole, flat.split([x.numel() for x in whole]))]
        for mine, mean in zip(rest, pieces[len(parts) :]):
            mine.copy_(mean)
        return pieces[: len(parts)]


def _orthonormal(p: Tensor) -> Tensor:
    """Of p[r, m], its rows."""
    return torch.linalg.qr(p.t()).Q.t().contiguous()


def _finite(parts: list[Tensor]) -> list[bool]:
    """Which have neither inf nor nan; the host waits once."""
    return torch.stack([x.isfinite().all() for x in parts]).tolist() if parts else []
