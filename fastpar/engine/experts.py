"""Experts and the engine: who has which, over which ranks their weights travel, their counts.

The ranks of ep share out the experts and compute different sequences. Towards an expert's weights
they are one rank; the dp/ep ranks that have the same expert reduce its gradients, and share its
state at the stages of ZeRO.

[Note: sums in the order of one process] In deterministic mode a sum of gradients is a tree over the
micro-batches of a rank, then over the ranks. An expert gets the rows of ep ranks in one backward;
so that each rank's micro-batches are added up among themselves first, its weights' gradients of
different sources are kept apart, [ep, P], until they are sent. That costs the gradients of all
experts instead of a rank's own.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpar.axes.experts.balance import Losses
from fastpar.axes.experts.exchange import ExpertParallel
from fastpar.axes.experts.mixture import Experts
from fastpar.axes.tensor.declared import Declared, not_split
from fastpar.comm.collectives import Collectives, PairwiseSum
from fastpar.comm.mesh import Mesh
from fastpar.comm.wires import Encoders
from fastpar.engine.bucket import BucketGroups, BucketState
from fastpar.engine.engine import Engine
from fastpar.engine.stages import Settings
from fastpar.kernels import DelayedScales
from fastpar.kernels.grouped_linear import summed
from fastpar.sharding.layout import Bucket, Layout, parameter_names
from fastpar.sharding.placements import State

SAME = ("replicas", "dp", "cp")  # axes whose ranks have the same experts


def check_experts(model: nn.Module, mesh: Mesh) -> None:
    """Refuse ranks of ep that have nothing to share out."""
    losses, ep = getattr(model, "experts", None), mesh.size("ep")
    if ep > 1 and not isinstance(losses, Losses):
        raise ValueError(
            f"parallelize: expected a fastpar.GPT with experts for ep={ep}, got "
            f"{type(model).__name__} without; set GPTConfig(n_expert=), or leave ep out of Mesh: "
            "experts of other libraries' models are not recognized"
        )


def share_experts(
    model: nn.Module,
    mesh: Mesh,
    make: Callable[[Any, str], Collectives],
    declared: Declared | None,
) -> Declared | None:
    """Each rank of ep keeps its experts; with ep=1 nothing changes. Ranks: all."""
    if mesh.size("ep") == 1:
        return declared
    ep = ExpertParallel(make(mesh.new_group("ep"), "ep"))
    states: dict[nn.Parameter, State] = {}
    for module in model.modules():
        if isinstance(module, Experts):
            own = dict(module.named_parameters())
            states |= {own[name]: state for name, state in module.expert_parallel(ep).items()}
    values = [p for p in states if not p.is_meta]
    mesh.broadcast_(values, "ep")
    mesh.group(*SAME)  # of all ranks, though a pipeline stage may have no experts
    declared = not_split(parameter_names(model)) if declared is None else declared
    declared.share_out(states, ep.group)
    return declared


def mesh_of_experts(mesh: Mesh, n_shards: int) -> Mesh:
    """The same ranks as gradients of experts see them, in copies of which n_shards / ep share one.

    Args:
        n_shards: that share a copy of the other parameters.
    """
    shards, ranks = max(1, n_shards // mesh.size("ep")), mesh.size(*SAME)
    other = copy.copy(mesh)
    sizes = {"replicas": ranks // shards, "dp": shards, "cp": 1}
    vars(other)["sizes"] = {**mesh.sizes, **sizes}
    return other


def attach_experts(engine: Engine, model: nn.Module) -> None:
    """The counts of a model's experts, or what its delayed scales are of, are exchanged by step."""
    losses = getattr(model, "experts", None)
    if isinstance(losses, Losses):
        losses.attached, engine.control.tally = True, losses
    elif isinstance(scales := getattr(model, "fp8_scales", None), DelayedScales):
        engine.control.tally, scales.averaged = scales, engine.mesh.size(*SAME)


class ExpertBucket(BucketState):
    """A bucket of experts' weights, of several sources in deterministic mode; see the note.

    Args:
        ep: ranks whose rows these experts get.
    """

    def __init__(self, *args: Any, ep: int, **where: Any) -> None:
        super().__init__(*args, **where)
        self._ep, self._apart = ep, self.deterministic
        self._arrived: list[deque[tuple[int, Tensor]]] = [deque() for _ in self.params]
        self._sources: Tensor | None = None  # [ep, P]
        for position, p in enumerate(self.params) if self._apart else ():
            p.apart = _Taker(self._arrived[position])  # type: ignore[attr-defined]

    def take(self, position: int, given: Tensor | None = None) -> bool:
        """Also the gradients of each source, in the order of the backward passes."""
        if self._apart:
            slot, arrived = self.slots[position], self._arrived[position]
            if self._sources is None:
                shape = (self._ep, self.spec.numel)
                self._sources = torch.zeros(shape, dtype=self.grad_dtype, device=self.device)
            place = self._sources[:, slot.start : slot.stop]
            if position not in self.has:
                place.zero_()
            while arrived:
                task, parts = arrived.popleft()
                place += parts.reshape(self._ep, -1)
                if not arrived or arrived[0][0] != task:
                    break
        return super().take(position, given)

    def _take_sources(self) -> Tensor:
        """This micro-batch's [ep, P]; zeros where no gradient came."""
        sources, self._sources = self._sources, None
        if sources is None:
            shape = (self._ep, self.spec.numel)
            return torch.zeros(shape, dtype=self.grad_dtype, device=self.device)
        for position, slot in enumerate(self.slots):
            if position not in self.has:
                sources[:, slot.start : slot.stop].zero_()
        return sources

    def keep_local(self) -> None:
        """The sources stay apart, for the tree."""
        if not self._apart:
            return super().keep_local()
        self.fill_missing(flags=False)
        if self.unreduced is None:
            self.unreduced = PairwiseSum()
        with self._summing():
            self.unreduced.push(self._take_sources())
        if self.stage.frees_gradients:
            self.grad = None
        self._forget_local()

    def add_local(self) -> None:
        """The tree over the micro-batches of each source, then that over the sources."""
        if not self._apart:
            return super().add_local()
        assert self.grad is not None
        with self._summing():
            sources = self._take_sources()
            if self.unreduced is not None:
                self.unreduced.push(sources)
                sources = self.unreduced.total()
                self.unreduced = None
            self.grad[: self.spec.used_start] = summed(sources)[: self.spec.used_start]


class _Taker:
    """Is given the gradients of each source, and remembers in which backward."""

    def __init__(self, arrived: deque[tuple[int, Tensor]]) -> None:
        self._arrived = arrived

    def __call__(self, parts: Tensor) -> None:
        self._arrived.append((torch._C._current_graph_task_id(), parts))


class Travel(NamedTuple):
    """Over which ranks parameters travel: most of them, and experts.

    Args:
        mesh: as gradients see it; given: the user's.
    """

    mesh: Mesh
    given: Mesh
    groups: BucketGroups
    of_experts: BucketGroups | None
    settings: Settings
    poison: bool

    def bucket(
        self, layout: Layout, spec: Bucket, params: list[nn.Parameter], wires: Encoders
    ) -> BucketState:
        """A bucket over its ranks."""
        where: dict[str, Any] = {"device": self.mesh.device, "poison": self.poison}
        stage, slots = self.settings.stage, [layout.slots[i] for i in spec.slots]
        if not spec.experts:
            rank, groups = self.mesh.dp_rank % spec.n_shards, self.groups
            groups = groups.on_wires(wires, spec, slots, stage)
            return BucketState(layout, spec, params, self.settings, groups, rank=rank, **where)
        assert self.of_experts is not None
        rank, ep = self.given.rank_in(*SAME) % spec.n_shards, self.given.size("ep")
        groups = self.of_experts.on_wires(wires, spec, slots, stage)
        return ExpertBucket(layout, spec, params, self.settings, groups, ep=ep, rank=rank, **where)

    def share(self, tensors: Sequence[Tensor], *, experts: bool = False) -> None:
        """Give all that have them the values of the first."""
        self.given.broadcast_(tensors, *SAME) if experts else self.mesh.broadcast_(tensors)
