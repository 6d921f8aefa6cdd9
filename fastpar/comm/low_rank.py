"""PowerSGD: gradients of matrices as products of two thin ones, for slow links.

Of a matrix v = gradient + error, [m, n], two messages are averaged: p = v q, [m, r], made
orthonormal on every rank, and q = v^T p, [n, r], from which the next step starts (warm start). All
ranks take p q^T as the mean; error = v - p q^T stays, on every rank for every element, so that it
is given to later steps. Vectors, and matrices that are not larger than their factors, travel with
the first message as they are.

What is not finite in one matrix of a rank makes p q^T nan on all; error and q stay as they were.
Source: Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle, Rest, started
from fastpar.comm.wires import Wire, Worker


class Matrix(NamedTuple):
    """A parameter in a bucket, as a matrix."""

    place: slice
    rows: int
    columns: int

    def pays(self, rank: int) -> bool:
        """Whether its factors are smaller."""
        return rank * (self.rows + self.columns) < self.rows * self.columns


class LowRankSums(Wire):
    """The gradients of one bucket.

    Args:
        inner: sends the messages; worker: a thread in which they follow one another.
        matrices: all parameters with two dimensions or more; rank: r.
        error: fp32, as long as x.
        key: the first q are random numbers of it.
    Attributes:
        factors: q of each matrix that is sent as factors, by the place where it starts.
    Wire: two all-reduces, of r * m and r * n fp32 numbers of each matrix; the rest with the first.
    """

    def __init__(
        self,
        inner: Collectives,
        worker: Worker,
        matrices: Sequence[Matrix],
        rank: int,
        *,
        error: Tensor,
        key: int,
    ) -> None:
        super().__init__(inner, f"rank {rank}", worker)
        self.error: Tensor = error
        self._matrices = [m for m in matrices if m.pays(rank)]
        generator = torch.Generator().manual_seed(key)
        self.factors = {
            m.place.start: torch.randn(m.columns, rank, generator=generator).to(error.device)
            for m in self._matrices
        }
        ends = [0, *(e for m in self._matrices for e in (m.place.start, m.place.stop)), len(error)]
        self._rest = [slice(a, b) for a, b in zip(ends[::2], ends[1::2]) if a < b]
        rest = sum(s.stop - s.start for s in self._rest)
        self._sent = rest + sum(rank * (m.rows + m.columns) for m in self._matrices)

    def sent_bytes(self, op: str, n_bytes: int, numel: int) -> int:
        return self.inner.sent_bytes("all_reduce", 4 * self._sent, self._sent)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        call = functools.partial(self._reduce, x.view(-1), x.view(-1), mean, tag)
        return self._worker.submit("all_reduce", call, x, later=True)

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        call = functools.partial(self._reduce, out.view(-1), x.view(-1), mean, tag)
        return self._worker.submit("reduce_scatter", call, out, x, later=True)

    def _reduce(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Rest:
        self.calls += 1
        total = torch.add(x, self.error)  # v; then its mean
        v = [total[m.place].view(m.rows, m.columns) for m in self._matrices]
        p = self._mean([a @ q for a, q in zip(v, self.factors.values())], total, tag)
        p = [torch.linalg.qr(a).Q if a.isfinite().all() else a for a in p]
        q = self._mean([a.t() @ b for a, b in zip(v, p)], None, tag)
        for m, a, left, right in zip(self._matrices, v, p, q):
            mean_of = left @ right.t()
            error = self.error[m.place].view(m.rows, m.columns)
            if mean_of.isfinite().all():
                torch.sub(a, mean_of, out=error)
                self.factors[m.place.start] = right.clone()
            a.copy_(mean_of)
        share = total if out.numel() == x.numel() else total.view(self.world_size, -1)[self.rank]
        out.copy_(share if mean else share * self.world_size)
        return None

    def _mean(self, parts: list[Tensor], total: Tensor | None, tag: int) -> list[Tensor]:
        """Of all ranks, as one message; with the rest of total where that is given."""
        rest = [] if total is None else [total[s] for s in self._rest]
        flat = torch.cat([x.reshape(-1) for x in (*parts, *rest)]) if parts or rest else None
        if flat is None or not flat.numel():
            return parts
        started(self.inner.all_reduce(flat, mean=True, async_op=True, tag=tag)).wait()
        pieces = flat.split([x.numel() for x in (*parts, *rest)])
        for mine, whole in zip(rest, pieces[len(parts) :]):
            mine.copy_(whole)
        return [whole.view_as(mine) for mine, whole in zip(parts, pieces)]
