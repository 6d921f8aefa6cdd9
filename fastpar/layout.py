"""Where each parameter lives: offsets, padding and buckets of the flat buffers. Arithmetic only.

Parameters lie in reverse registration order, which is about the order in which backward finishes
their gradients. There is one flat buffer per dtype; a parameter has the same offset in the
parameter buffer and in the gradient buffer.

    bucket = | param | pad | param | pad | ... | used | pad to world_size * ALIGN |
                 starts are multiples of ALIGN     one element per parameter

`used` carries, in the same collective as the gradients, which parameters took part in a step on any
rank. The end of a bucket is padded so that it splits into world_size equal slices that start at
multiples of ALIGN: rank r owns slice r. Nothing depends on whether sizes are divisible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 64  # elements; 128 bytes in bf16: vector loads, and AdamW's bits do not depend on the cut


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it; names has more than one entry when it is tied."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements [start, stop) of the flat buffer of its dtype."""

    spec: ParamSpec
    registered: int  # position in registration order
    bucket: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True)
class Bucket:
    """The unit of one collective: elements [start, stop) of the flat buffer of its dtype."""

    index: int  # launch order
    dtype: torch.dtype
    slots: tuple[int, ...]  # indices into Layout.slots
    start: int
    used_start: int  # one element per slot from here, see the top of the file
    stop: int
    world_size: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def shard(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) that rank owns."""
        size = self.numel // self.world_size
        return self.start + rank * size, self.start + (rank + 1) * size


@dataclass(frozen=True)
class Layout:
    """All places of a model. slots and buckets are in launch order."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    buffer_numel: dict[torch.dtype, int]
    world_size: int


def build_layout(
    specs: Sequence[ParamSpec],
    *,
    world_size: int = 1,
    bucket_bytes: float = 25 * 2**20,
    first_bucket_bytes: float = 2**20,
    grad_dtype: torch.dtype | None = None,
) -> Layout:
    """Place parameters, given in registration order, into buckets of at most bucket_bytes.

    A bucket is closed before it would exceed its cap (in bytes of gradient); a parameter above the
    cap has a bucket of its own. The first bucket of each dtype has its own cap: small, so that
    communication starts early. Buckets are numbered by their last parameter, the one that makes
    them ready.

    Args:
        specs: each parameter once, tied ones with all their names.
        grad_dtype: of the gradient buffer; None is each parameter's own.
    Raises:
        ValueError: world_size below 1; a cap that is not above 0.
    """
    if world_size < 1:
        raise ValueError(
            f"build_layout: expected world_size >= 1, got world_size={world_size}; "
            "pass the number of data-parallel ranks"
        )
    caps = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
    for name, value in caps.items():
        if not value > 0:
            raise ValueError(
                f"build_layout: expected {name} > 0, got {name}={value}; "
                "use a large value for one bucket"
            )
    closed: list[tuple[torch.dtype, list[int]]] = []
    for dtype in dict.fromkeys(spec.dtype for spec in specs):
        itemsize = (grad_dtype or dtype).itemsize
        group: list[int] = []
        cap, size = first_bucket_bytes, 0
        for i in reversed(range(len(specs))):
            if specs[i].dtype != dtype:
                continue
            n_bytes = _round_up(specs[i].numel, ALIGN) * itemsize
            if group and size + n_bytes > cap:
                closed.append((dtype, group))
                group, cap, size = [], bucket_bytes, 0
            group.append(i)
            size += n_bytes
        closed.append((dtype, group))
    closed.sort(key=lambda entry: -entry[1][-1])

    slots: list[Slot] = []
    buckets: list[Bucket] = []
    filled: dict[torch.dtype, int] = {}
    for index, (dtype, group) in enumerate(closed):
        start = offset = filled.get(dtype, 0)
        first_slot = len(slots)
        for i in group:
            slots.append(Slot(specs[i], i, index, offset))
            offset = _round_up(offset + specs[i].numel, ALIGN)
        stop = start + _round_up(offset + len(group) - start, world_size * ALIGN)
        indices = tuple(range(first_slot, len(slots)))
        buckets.append(Bucket(index, dtype, indices, start, offset, stop, world_size))
        filled[dtype] = stop
    return Layout(tuple(slots), tuple(buckets), filled, world_size)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Every parameter of a model once, in registration order, with all the names it goes by."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), name)
    return names


def inventory(model: nn.Module) -> list[str]:
    """One line per parameter and buffer: what must be the same on every rank."""
    lines = [
        f"parameter {'='.join(names)} {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for p, names in parameter_names(model).items()
    ]
    return lines + [f"buffer {n} {list(b.shape)} {b.dtype}" for n, b in model.named_buffers()]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
