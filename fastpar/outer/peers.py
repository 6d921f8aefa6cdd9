"""Collectives of replicas: a gloo group of their own, which may be made and lost at any time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.fixed_sum import sum_rows_in_tree
from fastpar.comm.handles import DONE, Handle

CONNECT_S = 20.0  # for ranks that have all just said that they are there


class Peers(Collectives):
    """Ranks at the same place of some replicas, in host memory; operations run in the caller.

    A sum is the tree in rank order, so that what several ranks of a replica have alike stays so.

    Args:
        store: of this group alone.
    Attributes:
        sent: bytes that this rank has sent.
    Raises:
        RuntimeError: from the constructor and any operation, when another rank is gone.
    """

    transport, in_caller = "gloo", True
    why = "replicas that come and go"

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        wait = timedelta(seconds=min(CONNECT_S, timeout_s))
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, wait)
        self._group.set_timeout(timedelta(seconds=timeout_s))
        self.sent = 0

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        size = -(-x.numel() // self.world_size)
        rows = x.new_zeros(self.world_size, size)
        rows.view(-1)[: x.numel()] = x.view(-1)
        part = rows.new_empty(size)
        self._reduce_scatter(part, rows.view(-1), mean, tag)
        self._all_gather(rows.view(-1), part, tag)
        x.view(-1).copy_(rows.view(-1)[: x.numel()])
        return DONE

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        received = torch.empty_like(x)
        self._all_to_all(received, x, [], [], tag)
        sum_rows_in_tree(received.view(self.world_size, -1), out, mean)
        return DONE

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        self.sent += x.nbytes * (self.world_size - 1)
        self._group._allgather_base(out, x).wait()
        return DONE

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        self.sent += x.nbytes * (self.world_size - 1) * (self.rank == src)
        how = dist.BroadcastOptions()
        how.rootRank = src
        self._group.broadcast([x], how).wait()
        return DONE

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], tag: int
    ) -> Handle:
        own = x_sizes[self.rank] * x.itemsize if x_sizes else x.nbytes // self.world_size
        self.sent += x.nbytes - own
        self._group.alltoall_base(out, x, out_sizes, x_sizes).wait()
        return DONE

    def _send(self, x: Tensor, dst: int, tag: int) -> Handle:
        raise AssertionError("replicas exchange sums and copies alone")

    def _recv(self, out: Tensor, src: int, tag: int) -> Handle:
        raise AssertionError("replicas exchange sums and copies alone")
