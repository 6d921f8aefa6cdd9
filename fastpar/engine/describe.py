"""What an engine holds and sends, as text: units, buckets, bytes, collectives of a step."""

from __future__ import annotations

import torch

from fastpar.axes import every
from fastpar.comm.collectives import Collectives
from fastpar.engine.bucket import BucketState, Stage
from fastpar.engine.gathers import ROOT
from fastpar.engine.shards import Shards

_MIB = 2**20


def memory(shards: Shards) -> dict[str, int]:
    """Bytes that are alive on this rank, by kind; without the optimizer's state and activations."""
    kinds = dict.fromkeys(("parameters", "parameter shards", "gradients", "gradient shards"), 0)
    for bucket in shards.buckets:
        if bucket.apart:  # a storage of its own, at stage 3 empty while the unit is not used
            kinds["parameters"] += bucket.flat.untyped_storage().nbytes()
            kinds["parameter shards"] += bucket.shard.nbytes
        else:
            kinds["parameters"] += bucket.flat.nbytes
        for kind, x in (("gradients", bucket.grad), ("gradient shards", bucket.grad_shard)):
            if x is not None:
                kinds[kind] += x.numel() * x.element_size()
    for kind, n in shards.storage.memory().items():
        kinds[kind] = kinds.get(kind, 0) + n
    kinds["partial sums"] = sum(bucket.tree_bytes for bucket in shards.buckets)
    for axis in every():
        for kind, n_bytes in axis.memory(shards).items():
            kinds[kind] = kinds.get(kind, 0) + n_bytes
    kinds["frozen parameters"] = sum(p.numel() * p.element_size() for p in shards.frozen)
    return kinds


def wire_bytes(shards: Shards, last_unit: int) -> dict[str, int]:
    """Bytes that this rank sends for one backward and step, by kind of collective.

    Without evaluation, recomputed gathers, the control exchange, and tp's activations, which
    depend on the batch.

    Args:
        last_unit: that stays from forward to backward where parameters are freed.
    """
    sent = _between_copies(shards, last_unit)
    partial = _partial_bytes(shards)
    if partial:
        sent["all-reduce of partial gradients"] = partial
    return sent


def _partial_bytes(shards: Shards) -> int:
    """Bytes of the sum along tp; see gradients.py."""
    if shards.declared is None:
        return 0
    sizes = dict[tuple[int, torch.dtype], int]()
    for p in shards.params:
        for axis in shards.declared.placement(p).reduce_axes:
            bucket, start, stop = shards.place(p)
            key = shards.declared.groups[axis].world_size, bucket.grad_dtype
            sizes[key] = sizes.get(key, 0) + stop - start
    return sum(n * dtype.itemsize // ranks * (ranks - 1) * 2 for (ranks, dtype), n in sizes.items())


def _between_copies(shards: Shards, last_unit: int) -> dict[str, int]:
    sent: dict[str, int] = {}
    for key, travel in shards.travels.items():
        buckets = [bucket for bucket in shards.buckets if bucket.spec.key == key]
        ranks = shards.mesh.dp_size // travel.spread
        for kind, n in _sent_of(shards.stage, buckets, ranks, last_unit).items():
            sent[kind] = sent.get(kind, 0) + n
    return sent


def _sent_of(
    stage: Stage, buckets: list[BucketState], ranks: int, last_unit: int
) -> dict[str, int]:
    """Of buckets that so many ranks have."""
    sent: dict[str, int] = {}

    def add(kind: str, group: Collectives | None, numel: int, dtype: torch.dtype) -> None:
        op = "all_reduce" if kind.startswith("all-reduce") else "reduce_scatter"
        if group is not None:
            n_bytes = group.sent_bytes(op, numel * dtype.itemsize, numel)
            sent[kind] = sent.get(kind, 0) + n_bytes

    for bucket in buckets if ranks > 1 else ():
        numel, groups = bucket.spec.numel, bucket.groups
        if not stage.shards:
            add("all-reduce", groups.reduce, numel, bucket.wire_dtype)
            continue
        add("reduce-scatter", groups.reduce, numel, bucket.wire_dtype)
        # The root stays from forward to backward, and so does the last unit.
        stays = not stage.frees_parameters or bucket.spec.unit in (ROOT, last_unit)
        add("all-gather", groups.gather, numel, bucket.spec.dtype)
        if not stays and groups.node is not None:
            add("all-gather in the node", groups.node, numel, bucket.spec.dtype)
        elif not stays:
            add("all-gather", groups.gather, numel, bucket.spec.dtype)
        add("all-reduce of shards", groups.copies, bucket.spec.shard_numel, bucket.wire_dtype)
    return sent


def describe(shards: Shards, last_unit: int, tree_ms: float) -> str:
    """One line on the engine, one on memory and wire, a table of buckets, and the schedule."""
    settings, ranks = shards.settings, shards.mesh.dp_size
    parameters = sum(slot.spec.numel for slot in shards.layout.slots)
    reduce = shards.buckets[0].groups.reduce
    how = f"{reduce.transport} ({reduce.why})" if reduce is not None else "no communication"
    lines = [
        f"engine: stage {shards.stage.number}, dp={ranks}, {settings.n_shards} shards, {how}, "
        f"{parameters:,} trained parameters, {len(shards.buckets)} buckets"
        + (", deterministic" if settings.deterministic else ""),
        *(line for axis in every() for line in axis.describe(shards)),
        *([_cost_of_fixed_sums(shards, tree_ms)] if settings.deterministic else []),
        "memory: " + _mib(memory(shards)),
        "wire per rank and step: " + (_mib(wire_bytes(shards, last_unit)) or "nothing"),
        "bucket  unit  dtype     params      MiB  shard MiB  parameters",
    ]
    for bucket in shards.buckets:
        spec, dtype = bucket.spec, str(bucket.grad_dtype).removeprefix("torch.")
        size = spec.numel * bucket.grad_dtype.itemsize / _MIB
        names = dict.fromkeys((bucket.name(0), bucket.name(len(bucket.params) - 1)))
        unit = "root" if spec.unit == ROOT else str(spec.unit)
        unit = unit if shards.stage.shards else "-"
        lines.append(
            f"{spec.index:6d}  {unit:>4s}  {dtype:8s}  {len(bucket.params):6d}  {size:7.2f}  "
            f"{size / spec.n_shards:9.2f}  {' .. '.join(names)}"
        )
    return "\n".join([*lines, "schedule: " + _schedule(shards)])


def _cost_of_fixed_sums(shards: Shards, tree_ms: float) -> str:
    held = memory(shards)["partial sums"] / _MIB
    return f"deterministic: {tree_ms:.1f} ms of the last step, {held:.1f} MiB held now"


def _schedule(shards: Shards) -> str:
    if shards.mesh.world_size == 1:
        return "nothing to send"
    control = "; one control exchange before the update"
    if _partial_bytes(shards):
        when = "the last backward" if shards.stage.shards else "each backward"
        control = f"; all-reduce partial gradients along tp after {when}{control}"
    if shards.mesh.dp_size == 1:
        return control.removeprefix("; ")
    first, last = 0, len(shards.buckets) - 1
    span = f"buckets {first} to {last}"
    tree = ", sums in a fixed tree" if shards.settings.deterministic else ""
    if not shards.stage.shards:
        return f"all-reduce {span} while backward runs{tree}{control}"
    copies = shards.mesh.dp_size // shards.settings.n_shards
    reduce = f"reduce-scatter {span} while backward runs{tree}"
    if copies > 1:
        reduce += f", then all-reduce each shard with its {copies} copies"
    if not shards.stage.frees_parameters:
        return f"{reduce}{control}; all-gather {span} under the next forward"
    ahead = shards.settings.asked.prefetch
    return f"all-gather each unit before its forward and backward, {ahead} ahead; {reduce}{control}"


def _mib(kinds: dict[str, int]) -> str:
    return ", ".join(f"{kind} {n / _MIB:.1f} MiB" for kind, n in kinds.items() if n)
