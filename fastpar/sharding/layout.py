"""Where each parameter lives: buckets, offsets, padding and shards. Arithmetic only.

Parameters lie in reverse registration order, which is about the order in which backward finishes
their gradients. A bucket is the unit of one collective; it has a dtype, and a parameter has the
same place in the parameters and in the gradients of its bucket.

    bucket = | param | pad | param | pad | ... | used | pad to n_shards * ALIGN |
                 starts are multiples of ALIGN     stage 0: one element per parameter

The end of a bucket is padded so that it splits into n_shards equal slices that start at multiples
of ALIGN: rank r owns slice r. Nothing depends on whether sizes are divisible. A parameter lies in
one bucket, so what a rank owns of it is one range of its elements (piece), maybe empty.

Buckets are cut by size, at the sharded stages also where a unit ends (the modules whose parameters
are gathered together): a forward then waits for nothing that it does not need.

`used` carries, in the same collective as the gradients, which parameters took part in a step on any
rank; sharded stages tell it in the control exchange, because one rank would own the slice.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 256  # elements: vector loads, AdamW's bits, and blocks of 8-bit moments do not see cuts


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
    """The place of one parameter: elements [start, stop) of its bucket."""

    spec: ParamSpec
    registered: int  # position in registration order
    bucket: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True)
class Bucket:
    """The unit of one collective."""

    index: int  # launch order
    dtype: torch.dtype
    slots: tuple[int, ...]  # indices into Layout.slots
    used_start: int  # one element per slot from here if there are flags, see the top of the file
    numel: int
    n_shards: int
    unit: int  # -1 without units
    part: int = 0  # chunk of a pipeline's rank
    key: str = ""  # of those that travel over the same ranks, see axes/__init__.py, Travel
    rounded: bool = False  # of weights that are gathered as the codes of 8-bit products

    @property
    def shard_numel(self) -> int:
        return self.numel // self.n_shards

    def shard(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) that rank owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


_Home = tuple[int, int, str, bool]  # what parameters of one bucket have in common: see Bucket


@dataclass(frozen=True)
class Layout:
    """All places of a model. slots and buckets are in launch order."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    n_shards: int

    def piece(self, slot: int, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of a flattened parameter that rank owns; start == stop: none."""
        place = self.slots[slot]
        start, stop = self.buckets[place.bucket].shard(rank)
        first = min(max(start - place.start, 0), place.spec.numel)
        return first, max(first, min(stop - place.start, place.spec.numel))


def build_layout(
    specs: Sequence[ParamSpec],
    *,
    n_shards: int = 1,
    bucket_bytes: float = 25 * 2**20,
    first_bucket_bytes: float = 2**20,
    grad_dtype: torch.dtype | None = None,
    unit_of: Sequence[int] | None = None,
    alone: Container[int] = (),
    part_of: Sequence[int] | None = None,
    keys: Mapping[int, str] | None = None,
    rounded: Container[int] = (),
    spread: Mapping[str, int] | None = None,
    flags: bool = True,
) -> Layout:
    """Place parameters, given in registration order, into buckets.

    A bucket is closed before it would exceed its cap (in bytes of gradient) by more than an eighth,
    unless it is below a quarter of it: two weights of half a cap and their biases go together, and
    a bias never goes alone. A parameter above the cap is joined by such a rest only. The first
    bucket of each dtype has its own cap: small, so that communication starts early. A bucket also
    ends with its unit; a rest below a quarter of the first cap goes to the unit's next parameters,
    if there are any. Buckets are numbered by their last parameter, which makes them ready.

    Args:
        specs: each parameter once, tied ones with all their names.
        n_shards: ranks that share one copy.
        grad_dtype: of the gradients; None is each parameter's own.
        unit_of: the unit of each parameter.
        alone: parameters that have a bucket of their own, the same wherever they are trained.
        part_of: the part of the model that each belongs to; parts share no bucket.
        keys: of parameters that travel over other ranks than the rest: in buckets of their own.
        spread: ranks that have shared out all that have a key: of n_shards / spread, each has a
            shard of its buckets.
        rounded: parameters that are gathered in another format: in buckets of their own.
        flags: whether `used` has room, see the top of the file.
    Raises:
        ValueError: n_shards below 1; a cap that is not above 0.
    """
    if n_shards < 1:
        raise ValueError(
            f"build_layout: expected n_shards >= 1, got n_shards={n_shards}; "
            "pass the number of ranks that share one copy"
        )
    caps = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
    for name, value in caps.items():
        if not value > 0:
            raise ValueError(
                f"build_layout: expected {name} > 0, got {name}={value}; "
                "use a large value for one bucket"
            )
    units = [-1] * len(specs) if unit_of is None else unit_of
    parts = [0] * len(specs) if part_of is None else part_of
    keys, spread = keys or {}, spread or {}
    homes = [(units[i], parts[i], keys.get(i, ""), i in rounded) for i in range(len(specs))]
    closed: list[tuple[torch.dtype, _Home, list[int]]] = []
    for dtype in dict.fromkeys(spec.dtype for spec in specs):
        itemsize = (grad_dtype or dtype).itemsize
        cap, before = first_bucket_bytes, (-1, 0, "")
        groups: dict[_Home, list[int]] = {}  # open, of each unit and part
        sizes: dict[_Home, int] = {}  # their bytes
        for i in reversed(range(len(specs))):
            if specs[i].dtype != dtype:
                continue
            home = homes[i]
            if i in alone:
                closed.append((dtype, home, [i]))
                continue
            n_bytes = _round_up(specs[i].numel, ALIGN) * itemsize
            ended = [h for h in groups if h[:3] == before != home[:3]]
            ended = [h for h in ended if sizes[h] >= first_bucket_bytes / 4]
            full = sizes.get(home, 0) >= cap / 4 and sizes[home] + n_bytes > cap * 9 / 8
            for other in ended + [home] * full:
                closed.append((dtype, other, groups.pop(other)))
                sizes[other], cap = 0, bucket_bytes
            groups.setdefault(home, []).append(i)
            sizes[home] = sizes.get(home, 0) + n_bytes
            before = home[:3]
        closed.extend((dtype, home, group) for home, group in groups.items())
    closed.sort(key=lambda entry: -entry[2][-1])

    slots: list[Slot] = []
    buckets: list[Bucket] = []
    for index, (dtype, home, group) in enumerate(closed):
        first_slot, offset = len(slots), 0
        for i in group:
            slots.append(Slot(specs[i], i, index, offset))
            offset = _round_up(offset + specs[i].numel, ALIGN)
        ranks = max(1, n_shards // spread.get(home[2], 1))
        numel = _round_up(offset + (len(group) if flags else 0), ranks * ALIGN)
        indices = tuple(range(first_slot, len(slots)))
        buckets.append(Bucket(index, dtype, indices, offset, numel, ranks, *home))
    return Layout(tuple(slots), tuple(buckets), n_shards)


def default_bucket_mb(n_ranks: int, transport: str) -> float:
    """The cap of a bucket that hides a collective's latency without a long tail.

    Latency grows with the ranks, the last bucket is exposed whole: on slow links small ones win
    (gloo over 1 Gbit/s: 5 to 8 MiB), on fast ones latency is most of a small one. From 64 ranks on
    it stays: three buckets wait at stages 2 and 3, and of thousands of ranks' they would be most of
    a rank's memory.
    """
    base = {"gloo": 8.0, "shm": 16.0}.get(transport, 25.0)
    return base * min(8.0, max(1.0, n_ranks / 8))


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
