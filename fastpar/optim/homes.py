"""Matrices whose ranks have pieces of them, made whole on one rank each: their homes.

An update that needs a whole matrix is computed once, at the matrix's home, in three hops:

    pieces along dp --all_to_all--> slices along tp --all_to_all--> whole, at the home: compute
    pieces along dp <--all_to_all-- slices along tp <--all_to_all-- its result

What is computed is a function of the whole matrix alone, so its bits are those of one process at
any stage, dp and tp. At stage 0 every rank has the gradient: the first hop falls away. Copies of a
sharded model (replicas) and stages of a pipeline work for themselves.

[Note: overlap] All first hops are launched before any is waited for, bucket after bucket, and each
result is sent while the next matrix is computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle, started
from fastpar.engine.engine import Engine

# (parameter, whole matrix) -> its result of the same shape, and [R] numbers for every rank.
Compute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Home(NamedTuple):
    """A rank, by its number along dp and along tp."""

    dp: int
    tp: int


class _Message(NamedTuple):
    """What is on its way in an all_to_all; sent: kept until it is over."""

    received: Tensor
    handle: Handle | None
    sent: Tensor


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """A rank for each job: the longest first, to the rank with least to do (Graham 1969)."""
    loads, places = [(0.0, rank) for rank in range(ranks)], [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, places[job] = loads[0]
        heapq.heapreplace(loads, (load + costs[job], places[job]))
    return places


class Homes:
    """The homes of some matrices of one engine.

    Args:
        params: the matrices, the same on every rank.
        costs: of computing each.
        extra: numbers that compute returns beside each result.
    Attributes:
        sent_bytes: of the last run, to other ranks.
    """

    def __init__(
        self, engine: Engine, params: Sequence[Tensor], costs: Sequence[float], extra: Sequence[int]
    ) -> None:
        self.shards = shards = engine.shards
        self.sharded, mesh = shards.stage.shards, shards.mesh
        self.extra = dict(zip(params, extra))
        groups = shards.bucket_of(params[0]).groups  # type: ignore[arg-type]
        dp = groups.gather if self.sharded else groups.reduce
        self.dp = None if dp is None else dp.exact
        declared = shards.declared
        if mesh.tp_grid is not None:
            raise ValueError(
                "Muon: expected matrices that one axis splits, got tp_grid="
                f"{'x'.join(map(str, mesh.tp_grid))}; use fastpar.AdamW, or Mesh(tp=)"
            )
        self.tp = None if declared is None or declared.tp is None else declared.tp.group
        self.n_dp, self.n_tp = (1 if g is None else g.world_size for g in (self.dp, self.tp))
        self.me = Home(0 if self.dp is None else self.dp.rank, mesh.tp_rank)
        places = assign(costs, self.n_dp * self.n_tp)
        self.home = {p: Home(*divmod(place, self.n_tp)) for p, place in zip(params, places)}
        self.batches: list[list[Tensor]] = [
            [p for p in bucket.params if p in self.home]
            for bucket in shards.buckets
            if any(p in self.home for p in bucket.params)
        ]
        self.sent_bytes = 0

    def run(
        self, pieces: dict[Tensor, Tensor], compute: Compute
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(parameter, this rank's piece of its result, [R] numbers) of every matrix.

        Args:
            pieces: what this rank has of each matrix, of one dtype; taken out one after another.
        Ranks: all of the engine's mesh, with the same parameters.
        """
        self.sent_bytes, self._like = 0, next(iter(pieces.values())).new_empty(0)
        given = [[p for p in batch if p in pieces] for batch in self.batches]
        incoming = [self._gather(batch, pieces, i) for i, batch in enumerate(given)]
        outgoing = []
        for i, batch in enumerate(given):
            whole = self._join(batch, self._whole_along_dp(batch, pieces, incoming), i)
            results = {p: compute(p, whole.pop(p)) for p in list(whole)}
            message = self._send_slices(batch, results, i)
            del results
            if self.n_tp == 1:
                message = self._send_pieces(batch, self._slices(batch, message), i)
            outgoing.append(message)
        if self.n_tp > 1:
            slices = [self._slices(batch, m) for batch, m in zip(given, outgoing)]
            outgoing = [self._send_pieces(b, s, i) for i, (b, s) in enumerate(zip(given, slices))]
        for batch, message in zip(given, outgoing):
            yield from self._pieces(batch, message)

    # Where what is

    def _range(self, p: Tensor, rank: int) -> tuple[int, int]:
        """The elements of p, of this rank's slice along tp, that a rank along dp has."""
        if not self.sharded:
            return 0, p.numel()
        return self.shards.layout.piece(self.shards.index[p], rank)  # type: ignore[index]

    def _size(self, p: Tensor, rank: int) -> int:
        start, stop = self._range(p, rank)
        return stop - start

    def _in_column(self, batch: list[Tensor]) -> list[Tensor]:
        """Those whose home has this rank's number along dp."""
        return [p for p in batch if self.home[p].dp == self.me.dp]

    # To the homes

    def _gather(self, batch: list[Tensor], pieces: dict[Tensor, Tensor], tag: int) -> Any:
        if not self.sharded:
            return None
        parts = [
            [pieces.pop(p) for p in batch if self.home[p].dp == rank] for rank in range(self.n_dp)
        ]
        mine = self._in_column(batch)
        sizes = [sum(self._size(p, rank) for p in mine) for rank in range(self.n_dp)]
        return self._launch(self.dp, parts, sizes, tag)

    def _whole_along_dp(
        self, batch: list[Tensor], pieces: dict[Tensor, Tensor], incoming: list[_Message | None]
    ) -> dict[Tensor, Tensor]:
        mine, message = self._in_column(batch), incoming.pop(0)
        if message is None:
            given = {p: pieces.pop(p) for p in batch}
            return {p: given[p].reshape(p.shape) for p in mine}
        parts = _split(message, [[self._size(p, rank) for p in mine] for rank in range(self.n_dp)])
        return {p: torch.cat([row[i] for row in parts]).view(p.shape) for i, p in enumerate(mine)}

    def _join(self, batch: list[Tensor], slices: dict[Tensor, Tensor], tag: int) -> dict:
        """The whole matrices whose home is this rank."""
        mine = [p for p in slices if self.home[p] == self.me]
        declared = self.shards.declared
        if self.tp is None or declared is None:
            return {p: slices[p] for p in mine}
        split = [p for p in slices if declared.along_tp(p)[0].gather_axes]
        parts = [[slices[p] for p in split if self.home[p].tp == t] for t in range(self.n_tp)]
        joined = [p for p in split if self.home[p] == self.me]
        sizes = [sum(p.numel() for p in joined)] * self.n_tp
        message = self._launch(self.tp, parts, sizes, tag)
        rows = _split(message, [[p.numel() for p in joined]] * self.n_tp)
        whole = {p: slices[p] for p in mine}
        for i, p in enumerate(joined):
            columns = [row[i].view(p.shape) for row in rows]
            placement, shape = declared.along_tp(p)
            whole[p] = placement.join(columns, shape)
        return whole

    # And back

    def _send_slices(self, batch: list[Tensor], results: dict, tag: int) -> _Message:
        declared = self.shards.declared

        def slice_of(p: Tensor, rank: int) -> Tensor:
            whole = results[p][0]
            if declared is None:
                return whole
            placement, shape = declared.along_tp(p)
            return placement.cut(whole.view(shape), {"tp": rank})

        parts = [
            [x for p in results for x in (slice_of(p, rank), results[p][1])]
            for rank in range(self.n_tp)
        ]
        sizes = [
            sum(p.numel() + self.extra[p] for p in self._in_column(batch) if self.home[p].tp == t)
            for t in range(self.n_tp)
        ]
        return self._launch(self.tp, parts, sizes, tag)

    def _slices(self, batch: list[Tensor], message: _Message) -> dict:
        """Result and extra numbers, of this rank's slice along tp, of its column's matrices."""
        mine = self._in_column(batch)
        by_home = [[p for p in mine if self.home[p].tp == t] for t in range(self.n_tp)]
        return self._unpacked(by_home, message, lambda p: p.numel())

    def _send_pieces(self, batch: list[Tensor], slices: dict, tag: int) -> _Message:
        mine = self._in_column(batch)
        parts = [
            [x for p in mine for x in (slices[p][0][slice(*self._range(p, r))], slices[p][1])]
            for r in range(self.n_dp)
        ]
        sizes = [
            sum(self._size(p, self.me.dp) + self.extra[p] for p in batch if self.home[p].dp == r)
            for r in range(self.n_dp)
        ]
        return self._launch(self.dp, parts, sizes, tag)

    def _pieces(self, batch: list[Tensor], message: _Message) -> Iterator:
        by_home = [[p for p in batch if self.home[p].dp == r] for r in range(self.n_dp)]
        found = self._unpacked(by_home, message, lambda p: self._size(p, self.me.dp))
        for p, (piece, extra) in found.items():
            yield p, piece, extra

    def _unpacked(
        self, senders: list[list[Tensor]], message: _Message, size: Callable[[Tensor], int]
    ) -> dict[Tensor, tuple[Tensor, Tensor]]:
        sizes = [[n for p in ps for n in (size(p), self.extra[p])] for ps in senders]
        rows = _split(message, sizes)
        return {
            p: (row[2 * i], row[2 * i + 1])
            for ps, row in zip(senders, rows)
            for i, p in enumerate(ps)
        }

    # Messages

    def _launch(
        self, group: Collectives | None, parts: list[list[Tensor]], sizes: list[int], tag: int
    ) -> _Message:
        """Begin to send parts[r] to rank r, and to receive sizes[r] elements from it."""
        flat = [x.reshape(-1) for part in parts for x in part]
        x = torch.cat(flat) if flat else self._like
        if group is None:
            return _Message(x, None, x)
        counts = [sum(t.numel() for t in part) for part in parts]
        self.sent_bytes += (sum(counts) - counts[group.rank]) * x.element_size()
        out = x.new_empty(sum(sizes))
        handle = group.all_to_all(out, x, sizes, counts, async_op=True, tag=tag)
        return _Message(out, started(handle), x)


def _split(message: _Message, sizes: list[list[int]]) -> list[list[Tensor]]:
    """What was received from each rank, in parts of these sizes."""
    if message.handle is not None:
        message.handle.wait()
    rows = message.received.split([sum(row) for row in sizes])
    return [list(row.split(each)) for row, each in zip(rows, sizes)]
