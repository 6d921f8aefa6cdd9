"""Mixtures of experts: the router, its losses and counts, and tokens sent to where experts are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fastpar.axes import Axis
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.settings import block
from fastpar.settings.block import count_elements, widths
from fastpar.settings.config import GPTConfig


def expert_elements(shape: GPTConfig, setup: Setup) -> tuple[int, int]:
    """Parameters of the experts of a rank of tp and pp, of all ep; of routers, less their MLPs'."""
    sizes, layers = widths(shape, setup.tp), -(-shape.expert_layers // setup.pp)
    routers = count_elements(block.EXPERTS, {**sizes, "S": 0})
    experts = count_elements(block.EXPERTS, sizes) - routers
    return layers * experts, layers * (routers - count_elements(block.MLP, sizes))


class Experts(Axis):
    """Experts shared out over ranks of ep."""

    name = "experts"
    order = 30

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """Rows to their experts and back, in forward and in backward, and their numbers."""
        experts, _ = expert_elements(workload.shape, setup)
        if experts and setup.data > 1:
            yield from _sums(setup, experts // setup.ep)
        if setup.ep == 1:
            return
        shape, n_micro = workload.shape, setup.grad_accum_steps
        rows = setup.tokens_of_rank(workload) * shape.top_k
        n_bytes = float(rows * shape.n_embd * setup.weight_bytes)
        layers = n_micro * shape.expert_layers / setup.pp
        forwards = 2 if setup.activation_checkpointing == "full" else 1
        there_and_back, counts = 2 * (forwards + 1) * layers, 8.0 * shape.n_expert
        yield CommOp("all_to_all", "ep", n_bytes, setup.ep, setup.tp, there_and_back, "")
        yield CommOp("all_to_all", "ep", counts, setup.ep, setup.tp, forwards * layers, "")

    def header(self, known: Mapping[str, Any], shape: GPTConfig) -> Iterator[str]:
        if known["ep"] > 1:
            yield f"experts over {known['ep']} of dp"

    def describe(self, shards: Any) -> Iterator[str]:
        if shards.ep == 1:
            return
        group, buckets = shards.declared.groups["ep"], [b for b in shards.buckets if b.spec.experts]
        whole = sum(math.prod(shards.whole_shape(p)) for b in buckets for p in b.params)
        ranks = shards.mesh.dp_size // shards.ep
        yield (
            f"experts: ep={shards.ep}, {group.transport} ({group.why}); of {whole:,} parameters of "
            f"experts 1/{shards.ep} here, in {len(buckets)} buckets that {ranks} ranks have"
        )


def _sums(setup: Setup, numel: int) -> Iterator[CommOp]:
    """Experts' gradients and weights, over the ranks that have the same ones."""
    stage, stride, ranks = setup.stage, setup.tp * setup.ep, setup.data // setup.ep
    reductions = setup.grad_accum_steps if setup.accumulate == "shard" else 1
    many = max(1, round(numel * setup.wire_bytes / setup.bucket_bytes))
    n_bytes = float(numel * setup.wire_bytes) / many
    shards = max(1, setup.n_shards // setup.ep)
    if stage == 0:
        yield CommOp("all_reduce", "dp", n_bytes, ranks, stride, reductions * many, "backward")
        return
    yield CommOp("reduce_scatter", "shard", n_bytes, shards, stride, reductions * many, "backward")
    part, copies = n_bytes / shards, ranks // shards
    yield CommOp("all_reduce", "copies", part, copies, stride * shards, many, "backward")
    weights = n_bytes / setup.wire_bytes * setup.weight_bytes
    for under in ("forward", "backward") if stage == 3 else ("forward",):
        passes = many * (setup.grad_accum_steps if stage == 3 else 1)
        yield CommOp("all_gather", "shard", weights, shards, stride, passes, under)


AXIS = Experts()
