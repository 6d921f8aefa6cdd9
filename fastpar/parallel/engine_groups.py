"""The process groups of an engine, and which collectives run on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.comm.transport import make_collectives
from fastpar.comm.watchdog import waiting
from fastpar.parallel.debug import Debug
from fastpar.parallel.shards import Groups

Factory = Callable[[Any, str], Collectives]


class GroupMaker:
    """Makes collectives of process groups, the same way for every role.

    Args:
        transport: of make_collectives; factory: makes collectives of (process group, role) instead.
        deterministic: sums in rank order.
    """

    def __init__(
        self,
        mesh: Mesh,
        transport: str,
        factory: Factory | None,
        *,
        deterministic: bool,
        debug: Debug,
    ) -> None:
        self.mesh, self.transport, self.factory = mesh, transport, factory
        self.deterministic, self.debug = deterministic, debug

    def make(self, group: Any, role: str, transport: str | None = None) -> Collectives:
        """Collectives of a process group. Ranks: all of the group."""
        if self.factory is not None:
            return self.debug.delayed(self.factory(group, role))
        return self.debug.delayed(
            make_collectives(
                group,
                device=self.mesh.device,
                transport=transport or self.transport,
                timeout_s=self.mesh.timeout_s,
                in_rank_order=self.deterministic,
            )
        )

    def of_tp(self) -> Collectives:
        """Of the ranks along tp, for activations. Ranks: all."""
        mesh = self.mesh
        alone = mesh.tp_group is not None and mesh.dp_size > 1  # nobody else uses it
        group = mesh.tp_group if alone or self.factory is not None else self._new(1, mesh.tp_size)
        return self.make(group, "tp")

    def of_engine(self, stage: int, n_shards: int) -> Groups:
        """Of each role; gather and reduce never queue behind each other. Ranks: all."""
        mesh = self.mesh
        if mesh.world_size == 1:
            return Groups(None, None, None, None)
        if mesh.dp_size == 1:
            return Groups(None, None, None, self.make(dist.group.WORLD, "control"))
        whole = self.make(mesh.dp_group, "reduce")
        kind = "shm" if whole.transport == "shm" else self.transport
        # The norm, the flags and the loss are those of all ranks.
        control = whole if mesh.tp_size == 1 else self.make(dist.group.WORLD, "control", kind)
        if stage == 0:
            return Groups(whole, None, None, control)
        tp = mesh.tp_size
        new = self.factory is None and whole.transport != "shm"  # shared memory only meets in one
        if n_shards == mesh.dp_size:
            group = self._new(tp, n_shards) if new else mesh.dp_group
            return Groups(whole, self.make(group, "gather", kind), None, control)
        shard = self._new(tp, n_shards)
        gather = self._new(tp, n_shards) if new else shard
        replicate = self._new(tp * n_shards, mesh.dp_size // n_shards)
        return Groups(
            self.make(shard, "reduce", kind),
            self.make(gather, "gather", kind),
            self.make(replicate, "replicate", kind),
            control,
        )

    def _new(self, stride: int, size: int) -> Any:
        """This rank's group of `size` ranks that are `stride` apart; every rank makes all of them.

        With rank = dp_rank * tp + tp_rank: stride 1 runs along tp, tp along dp, tp * n_shards along
        the copies of a shard.
        """
        mine = None
        for members in _strided(self.mesh.world_size, stride, size):
            with waiting("making a group"):
                group = dist.new_group(members, timeout=timedelta(seconds=self.mesh.timeout_s))
            if self.mesh.rank in members:
                mine = group
        return mine


def _strided(world_size: int, stride: int, size: int) -> Sequence[list[int]]:
    """All ranks in groups of `size`, `stride` apart."""
    span = stride * size
    return [
        list(range(block + first, block + span, stride))
        for block in range(0, world_size, span)
        for first in range(stride)
    ]
