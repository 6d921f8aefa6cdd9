"""What compressed gradients go on from: entries beside the optimizer's, see comm/wires.py.

    PARAMETER/wire_calls                  []     reductions so far: the step of the random bits
    PARAMETER/wire_copy_calls             []     those of ranks that have copies of a shard
    PARAMETER/wire_error_LAYOUT_RANK      local  what a rank has not sent of its gradients

Errors belong to a rank of the mesh, whatever its axes, and to the cut into buckets. LAYOUT is a
checksum of both: a run with others drops them, and says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fastpar.engine.engine import Engine

PREFIX, CALLS, COPY_CALLS = "wire_", "wire_calls", "wire_copy_calls"
COMMON = (CALLS, COPY_CALLS)  # of all ranks; errors are a rank's own


def error_entry(engine: Engine) -> str:
    """The name of this rank's errors."""
    known: list[object] = [engine.stage.number, engine.mesh.sizes, engine.settings.n_shards]
    known += [(b.spec.numel, b.spec.slots) for b in engine.buckets]
    return f"wire_error_{zlib.crc32(repr(known).encode()):08x}_{engine.mesh.rank}"


def wire_state(engine: Engine, p: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """(entry, this rank's values): the calls, and what is left of p where errors are kept."""
    bucket, position = engine.shards.places[p]
    group, slot = bucket.groups.reduce, bucket.slots[position]
    if group is None or engine.settings.asked.wires.gradients == "fp32":
        return
    for name, counted in ((CALLS, group), (COPY_CALLS, bucket.groups.copies)):
        if counted is not None:
            yield name, torch.tensor(float(counted.calls), dtype=torch.float32, device="cpu")
    lost = bucket.unsent.of(bucket.grad, slice(slot.start, slot.stop))
    if lost is not None:
        yield error_entry(engine), lost.view(p.shape)


def load_wire_state(engine: Engine, p: nn.Parameter, entries: Mapping[str, Tensor]) -> None:
    """Go on from what wire_state() had; entries of others are not looked at."""
    bucket, position = engine.shards.places[p]
    group, slot = bucket.groups.reduce, bucket.slots[position]
    for name, counted in ((CALLS, group), (COPY_CALLS, bucket.groups.copies)):
        if counted is not None and name in entries:
            counted.calls = int(entries[name])
    lost = entries.get(error_entry(engine))
    if lost is not None:
        bucket.unsent.restore(bucket.grad, slice(slot.start, slot.stop), lost.view(-1))
