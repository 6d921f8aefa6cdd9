"""Collectives of a group of one rank: nothing is sent, a result is the rank's own tensor.

For an engine that shares out what it has with nobody: see fastpar/parallel/offload.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import DONE, Handle


class OneRank(Collectives):
    """Every operation is a copy, or nothing, in the current stream."""

    rank, world_size, in_caller = 0, 1, True
    transport, why = "none", "one rank"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        return DONE

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        return self._copied(out, x)

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        return self._copied(out, x)

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        return DONE

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], tag: int
    ) -> Handle:
        return self._copied(out, x)

    def _send(self, x: Tensor, dst: int, tag: int) -> Handle:
        raise AssertionError("there is no other rank")

    def _recv(self, out: Tensor, src: int, tag: int) -> Handle:
        raise AssertionError("there is no other rank")

    def _copied(self, out: Tensor, x: Tensor) -> Handle:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return DONE
