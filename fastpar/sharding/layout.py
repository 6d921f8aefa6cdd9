"""The layout of parameters in buckets: offsets, padding and shards. Arithmetic only.

Parameters are placed in reverse registration order, which is about the order in which backward
finishes their gradients. A bucket is the unit of one collective; it has one dtype, and a parameter
has the same range in the parameters and in the gradients of its bucket.

    bucket = | param | pad | param | pad | ... | used | pad to n_shards * ALIGN |
                 starts are multiples of ALIGN     stage 0: one element per parameter

A bucket is padded so that it splits into n_shards equal shards that start at multiples of ALIGN:
rank r owns shard r. Sizes need not be divisible. A parameter lies in one bucket, so a rank owns one
range of its elements (its piece), maybe an empty one.

Buckets are cut by size; at the sharded stages also where a unit ends (the modules whose parameters
are gathered together), so that a forward waits only for what it needs.

`used` says which parameters had a gradient on any rank, in the same collective as the gradients;
sharded stages use the control exchange for that, because one rank would own its shard.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 256  # elements: vector loads, AdamW's bits, and blocks of 8-bit moments are not cut


@dataclass(frozen=True)
class ParamSpec:
    """A parameter for the layout; a tied one has several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The range of one parameter: elements [start, stop) of its bucket."""

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
    key: str = ""  # of parameters with the same groups of ranks, see axes/__init__.py, Travel

    @property
    def shard_numel(self) -> int:
        return self.numel // self.n_shards

    def shard(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) that rank owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


_Kind = tuple[int, int, str]  # unit, part, key: equal in a bucket


@dataclass(frozen=True)
class Layout:
    """The ranges of all parameters of a model; slots and buckets are in launch order."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

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
    spread: Mapping[str, int] | None = None,
    flags: bool = True,
) -> Layout:
    """Assign parameters, given in registration order, to buckets.

    A bucket is closed before it would exceed its cap (in bytes of gradient) by more than an eighth,
    unless it is smaller than a quarter of it: two weights of half a cap and their biases go
    together, and a bias is never alone. A parameter above the cap is joined only by such a small
    rest. The first bucket of each dtype has its own, small cap, so that communication starts early.
    A bucket also ends with its unit; a rest below a quarter of the first cap is joined with the
    unit's next parameters, if there are any. Buckets are numbered by their last parameter, which
    completes them.

    Args:
        specs: each parameter once, tied ones with all their names.
        n_shards: ranks that shard one replica.
        grad_dtype: of the gradients. Default: each parameter's own.
        unit_of: the unit of each parameter.
        alone: parameters with a bucket of their own.
        part_of: the part of the model of each parameter; parts share no bucket.
        keys: of parameters that are replicated over other ranks than the rest: in separate buckets.
        spread: by key: number of ranks over which its parameters are split; n_shards / spread ranks
            shard their buckets.
        flags: whether buckets have `used`, see the top of the file.
    """
    units = [-1] * len(specs) if unit_of is None else unit_of
    parts = [0] * len(specs) if part_of is None else part_of
    keys, spread = keys or {}, spread or {}
    kinds = [(units[i], parts[i], keys.get(i, "")) for i in range(len(specs))]
    closed: list[tuple[torch.dtype, _Kind, list[int]]] = []
    for dtype in dict.fromkeys(spec.dtype for spec in specs):
        itemsize = (grad_dtype or dtype).itemsize
        cap, before = first_bucket_bytes, (-1, 0, "")
        groups: dict[_Kind, list[int]] = {}  # not closed yet, by kind
        sizes: dict[_Kind, int] = {}  # their bytes
        for i in reversed(range(len(specs))):
            if specs[i].dtype != dtype:
                continue
            kind = kinds[i]
            if i in alone:
                closed.append((dtype, kind, [i]))
                continue
            n_bytes = _round_up(specs[i].numel, ALIGN) * itemsize
            ended = [k for k in groups if k == before != kind]
            ended = [k for k in ended if sizes[k] >= first_bucket_bytes / 4]
            full = sizes.get(kind, 0) >= cap / 4 and sizes[kind] + n_bytes > cap * 9 / 8
            for other in ended + [kind] * full:
                closed.append((dtype, other, groups.pop(other)))
                sizes[other], cap = 0, bucket_bytes
            groups.setdefault(kind, []).append(i)
            sizes[kind] = sizes.get(kind, 0) + n_bytes
            before = kind[:3]
        closed.extend((dtype, kind, group) for kind, group in groups.items())
    closed.sort(key=lambda entry: -entry[2][-1])

    slots: list[Slot] = []
    buckets: list[Bucket] = []
    for index, (dtype, kind, group) in enumerate(closed):
        first_slot, offset = len(slots), 0
        for i in group:
            slots.append(Slot(specs[i], i, index, offset))
            offset = _round_up(offset + specs[i].numel, ALIGN)
        ranks = max(1, n_shards // spread.get(kind[2], 1))
        numel = _round_up(offset + (len(group) if flags else 0), ranks * ALIGN)
        indices = tuple(range(first_slot, len(slots)))
        buckets.append(Bucket(index, dtype, indices, offset, numel, ranks, *kind))
    return Layout(tuple(slots), tuple(buckets))


def default_bucket_mb(n_ranks: int, transport: str) -> float:
    """The default cap of a bucket, in MiB.

    It hides a collective's latency without a long exposed last bucket. Latency grows with the
    ranks: small buckets win on slow links (gloo over 1 Gbit/s: 5 to 8 MiB), while on fast ones
    latency dominates a small bucket. From 64 ranks on the cap is constant: at stages 2 and 3 three
    buckets are in memory.
    """
    base = {"gloo": 8.0, "shm": 16.0}.get(transport, 25.0)
    return base * min(8.0, max(1.0, n_ranks / 8))


def parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Every parameter of a model once, in registration order, with all its names."""
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
