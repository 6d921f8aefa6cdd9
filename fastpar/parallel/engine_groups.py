"""The process groups of an engine, and which collectives run on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import AXES, Mesh
from fastpar.comm.transport import make_collectives
from fastpar.parallel.bucket_parameters import BucketGroups
from fastpar.parallel.debug import Debug
from fastpar.parallel.stages import Stage

Factory = Callable[[Any, str], Collectives]


class Groups(NamedTuple):
    """What the buckets travel over, and what the control exchange does: all ranks of the mesh."""

    of_buckets: BucketGroups
    control: Collectives | None


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
        """For activations of the ranks along tp. Ranks: all."""
        mesh = self.mesh
        shared = mesh.size("tp") == mesh.world_size  # the control exchange has all ranks' group
        own = shared and self.factory is None
        return self.make(mesh.new_group("tp") if own else mesh.group("tp"), "tp")

    def of_engine(self, stage: Stage, n_shards: int) -> Groups:
        """One group for each role; gather and reduce never queue behind each other. Ranks: all.

        Parameters are replicated along dp and replicas: their gradients are reduced there, and
        their shards gathered along dp.
        """
        mesh = self.mesh.with_replicas(self.mesh.dp_size // n_shards)
        if mesh.world_size == 1:
            return Groups(BucketGroups(), None)
        if mesh.dp_size == 1:
            return Groups(BucketGroups(), self.make(mesh.group(*AXES), "control"))
        whole = self.make(mesh.dp_group, "reduce")
        kind = "shm" if whole.transport == "shm" else self.transport
        # The norm, the flags and the loss are those of all ranks.
        control = whole
        if mesh.world_size > mesh.dp_size:
            control = self.make(mesh.group(*AXES), "control", kind)
        if not stage.shards:
            return Groups(BucketGroups(whole), control)
        new = self.factory is None and whole.transport != "shm"  # shared memory only meets in one
        gather = self.make(mesh.new_group("dp") if new else mesh.group("dp"), "gather", kind)
        if mesh.size("replicas") == 1:
            return Groups(BucketGroups(whole, gather), control)
        reduce = self.make(mesh.group("dp"), "reduce", kind)
        copies = self.make(mesh.group("replicas"), "replicate", kind)
        return Groups(BucketGroups(reduce, gather, copies), control)
