"""Mixtures of experts: the router, its losses and counts, and the exchange of tokens over ep.

Experts are distributed over the ranks of ep, which compute different sequences. For an expert's
weights they act as one rank; the dp/ep ranks with the same expert reduce its gradients, and shard
its state at the stages of ZeRO.

Deterministic sums: in deterministic mode a sum of gradients is a tree over the
micro-batches of a rank, then over the ranks. An expert gets the rows of ep ranks in one backward.
To sum each rank's micro-batches first, gradients of different source ranks are kept separate,
[ep, P], until they are sent. That costs memory for the gradients of all experts instead of a rank's
own.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.axes import Axis, Making, Travel
from fastpar.axes.experts import mixture
from fastpar.axes.experts.balance import Losses
from fastpar.axes.experts.mixture import ExpertParallel
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.axes.tensor.declared import not_split
from fastpar.comm.mesh import Mesh
from fastpar.kernels.grouped_linear import summed
from fastpar.settings.mesh import divisors
from fastpar.settings.model import GPTConfig
from fastpar.sharding.layout import parameter_names
from fastpar.sharding.placements import State

SAME = ("replicas", "dp", "cp")  # axes whose ranks have the same experts


class Experts(Axis):
    """Experts distributed over the ranks of ep."""

    name = "experts"
    key = "ep"
    order = 30
    place = 4

    def plan(self, making: Making) -> None:
        """Refuse ep above 1 for a model without experts."""
        losses, ep = getattr(making.model, "experts", None), making.mesh.size("ep")
        if ep > 1 and not isinstance(losses, Losses):
            raise ValueError(
                f"parallelize: ep={ep} needs a fastpar.GPT with experts, got "
                f"{type(making.model).__name__} without; set GPTConfig(n_expert=), or drop ep from "
                "Mesh: experts of other libraries' models are not recognized"
            )

    def split(self, making: Making) -> None:
        """Keep the experts of this rank of ep."""
        mesh, model = making.mesh, making.model
        if mesh.size("ep") == 1:
            return
        ep = ExpertParallel(making.make(mesh.new_group("ep"), "ep"))
        states: dict[nn.Parameter, State] = {}
        for module in model.modules():
            if isinstance(module, mixture.Experts):
                params = dict(module.named_parameters())
                states |= {
                    params[name]: state for name, state in module.expert_parallel(ep).items()
                }
        mesh.broadcast_([p for p in states if not p.is_meta], "ep")
        mesh.group(*SAME)  # called by all ranks, though a pipeline stage may have no experts
        if making.declared is None:
            making.declared = not_split(parameter_names(model))
        making.declared.split_experts(states, ep.group)

    def travel(self, making: Making, n_shards: int) -> Travel | None:
        """Replicas of experts, each sharded over n_shards / ep ranks."""
        mesh, ep = making.mesh, making.mesh.size("ep")
        if ep == 1:
            return None
        shards, other = max(1, n_shards // ep), copy.copy(mesh)
        sizes = {"replicas": mesh.size(*SAME) // shards, "dp": shards, "cp": 1}
        vars(other)["sizes"] = {**mesh.sizes, **sizes}
        sources = functools.partial(Sources, ep) if making.parallel.deterministic else None
        share = functools.partial(_share, mesh)
        return Travel(other, mesh.rank_in(*SAME), share, ep, sources)

    def attach(self, making: Making, engine: Any) -> None:
        """Exchange the counts of a model's experts in each step."""
        losses = getattr(making.model, "experts", None)
        if isinstance(losses, Losses):
            losses.attached, engine.control.tally = True, losses

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """Rows to their experts and back, in forward and in backward, and their counts."""
        if setup.mesh.ep == 1:
            return
        shape, n_micro = workload.shape, setup.grad_accum_steps
        rows = setup.tokens_of_rank(workload) * shape.top_k
        n_bytes = float(rows * shape.n_embd * setup.weight_bytes)
        layers = n_micro * shape.expert_layers / setup.mesh.pp
        forwards = 2 if setup.recompute.activation_checkpointing == "full" else 1
        there_and_back, counts = 2 * (forwards + 1) * layers, 8.0 * shape.n_expert
        yield CommOp("all_to_all", "ep", n_bytes, setup.mesh.ep, setup.tp, there_and_back, "")
        yield CommOp("all_to_all", "ep", counts, setup.mesh.ep, setup.tp, forwards * layers, "")

    def header(self, setup: Setup, shape: GPTConfig) -> dict[str, str]:
        if not shape.n_expert:
            return {}
        count, layers = f"{shape.n_expert} experts (top {shape.top_k})", shape.expert_layers
        lines = {"model": f"{count} in {layers} layers"}
        ep = setup.mesh.ep
        return lines | ({"ranks": f"experts over {ep} of dp"} if ep > 1 else {})

    def describe(self, shards: Any) -> Iterator[str]:
        if "ep" not in shards.travels:
            return
        group, ep = shards.declared.groups["ep"], shards.travels["ep"].spread
        buckets = [b for b in shards.buckets if b.spec.key == "ep"]
        ranks = shards.mesh.dp_size // ep
        whole = sum(math.prod(shards.whole_shape(p)) for b in buckets for p in b.params)
        yield (
            f"experts: ep={ep}, {group.transport} ({group.why}); of {whole:,} parameters of "
            f"experts 1/{ep} here, in {len(buckets)} buckets that {ranks} ranks have"
        )

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        for ep in divisors(max(1, workload.shape.n_expert)):
            yield setup.change(ep=ep)

    def accepts(self, workload: Workload, setup: Setup) -> bool:
        return setup.dp % setup.mesh.ep == 0

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        return (setup.mesh.ep,)

    def text(self, setup: Setup) -> str:
        return f"ep {setup.mesh.ep}" * (setup.mesh.ep > 1)


def _share(mesh: Mesh, tensors: Sequence[Tensor]) -> None:
    mesh.broadcast_(tensors, *SAME)


class Sources:
    """Gradients of a bucket, separate for each source rank of ep; see the top of the file.

    Args:
        ep: number of ranks whose rows these experts get.
        bucket: an engine.bucket.BucketState.
    """

    def __init__(self, ep: int, bucket: Any) -> None:
        self._shape, self._slots = (ep, bucket.spec.numel), bucket.slots
        self._dtype, self._device = bucket.grad_dtype, bucket.device
        self._arrived: list[deque[tuple[int, Tensor]]] = [deque() for _ in bucket.params]
        self._sums: Tensor | None = None  # [ep, P]
        for p, arrived in zip(bucket.params, self._arrived):
            p.apart = _Taker(arrived)

    def collect(self, position: int, *, first: bool) -> None:
        """Add a parameter's gradients of the oldest backward; first: of this micro-batch."""
        slot, arrived = self._slots[position], self._arrived[position]
        if self._sums is None:
            self._sums = self._zeros()
        place = self._sums[:, slot.start : slot.stop]
        if first:
            place.zero_()
        while arrived:
            task, parts = arrived.popleft()
            place += parts.reshape(len(place), -1)
            if not arrived or arrived[0][0] != task:
                break

    def micro_batch(self, has: Container[int]) -> Tensor:
        """This micro-batch's [ep, P]; zero for all parameters but those at these positions."""
        sums, self._sums = self._sums, None
        if sums is None:
            return self._zeros()
        for position, slot in enumerate(self._slots):
            if position not in has:
                sums[:, slot.start : slot.stop].zero_()
        return sums

    def _zeros(self) -> Tensor:
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def sum_into(self, grad: Tensor, sources: Tensor) -> None:
        """Sum over the sources as a tree: [ep, P] -> grad, the first elements of [P]."""
        grad.copy_(summed(sources)[: len(grad)])


class _Taker:
    """Stores the gradients of each source, with the number of their backward."""

    def __init__(self, arrived: deque[tuple[int, Tensor]]) -> None:
        self._arrived = arrived

    def __call__(self, parts: Tensor) -> None:
        self._arrived.append((torch._C._current_graph_task_id(), parts))


AXIS = Experts()
