"""Checks that make mistakes of a training step visible: replicas and inputs are compared, freed
memory is poisoned.

How replicas are found: by names and ranges, not by ranks. Each rank describes what it holds as
"parameter or entry, first element, elements, slice along tp"; ranks with the same description must
hold the same bits. One rule serves every stage, shards and tp. A rank sends three words for each of
four classes; only if they differ, a second round compares every tensor.

No single flipped bit keeps the checksum: the checksum is the sum of 64-bit words times odd weights,
modulo 2**64. A flipped bit k changes a word by 2**k and the sum by 2**k times an odd number: never
0. Chunks and tensors are combined by multiplying with an odd number, which is invertible. Weights
differ by position, so exchanged words are noticed too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastpar.comm.collectives import Collectives, capturing
from fastpar.comm.mesh import first_difference
from fastpar.engine.absent import Hook
from fastpar.engine.shards import Shards

_CHUNK = 1 << 23  # bytes of a checksum at a time
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed word
_CLASSES = 4  # whole or piece, split along tp or not
_FIRST = 2  # forwards whose inputs are compared without being asked


@dataclass(frozen=True)
class Debug:
    """Checks of parallelize(debug=...); each costs time.

    Args:
        check_replicas: after each step compare every parameter over the ranks, bit for bit.
        poison: fill buffers with nan before they are freed.
        check_inputs: before each forward, not only the first ones, compare the model's tensor
            arguments over the ranks of a tp or cp group, which must be equal.
        bus_gb_s: run offload without a GPU, over a simulated bus of this speed in each direction
            (see comm/host.py); 0: off.
        collectives: makes the collectives of (process group, role) instead of the transport.
        observe: is called with the collectives of each group that was made.
    Raises:
        ValueError: bus_gb_s below 0.
    """

    check_replicas: bool = False
    poison: bool = False
    check_inputs: bool = False
    bus_gb_s: float = 0.0
    collectives: Callable[[Any, str], Collectives] | None = None
    observe: Callable[[Collectives], None] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.bus_gb_s < float("inf"):
            raise ValueError(
                f"Debug: expected 0 <= bus_gb_s, got bus_gb_s={self.bus_gb_s}; 0 is off"
            )


class InputCheck:
    """Compares the inputs of one model over the ranks of a tp or cp group.

    With different ones their losses would be those of a mixture, and equal.

    Args:
        group: of these ranks; axis: their axis.
        most: number of forwards to compare.
    """

    def __init__(self, group: Collectives, axis: str = "tp", most: float = math.inf) -> None:
        self.group, self.axis, self._left = group, axis, most
        self._handle: Any = None

    @classmethod
    def attach_all(cls, engine: Any, model: nn.Module, groups: Mapping[str, Collectives]) -> None:
        """Attach one per axis whose ranks must have the same inputs."""
        most = math.inf if engine.debug.check_inputs else _FIRST
        for axis, group in groups.items():
            engine.input_checks.append(cls(group, axis, most))
            if engine.shards.stages is None:  # else pipeline_step() calls look()
                engine.input_checks[-1].attach(model)

    def attach(self, model: nn.Module) -> None:
        """Compare before forwards, as long as this object is referenced."""
        hook = Hook(weakref.ref(self), InputCheck.look)
        self._handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def look(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """compare(), until enough forwards were compared."""
        if self._left > 0 and not capturing(self.group.device):
            self._left -= 1
            self.compare(model, args, kwargs)
        if self._left <= 0 and self._handle is not None:
            self._handle.remove()

    @torch.no_grad()
    def compare(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise, on every rank of the group alike, unless all inputs are equal. Ranks: all.

        Wire: 8 bytes per rank; the tensors only if they differ.
        """
        named = _named_tensors(model, args, kwargs)
        lines = [f"{name}: {x.dtype} {list(x.shape)}" for name, x in named]
        raw = [x.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, x in named]
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8)
        for x in raw:
            digest.update(x.numpy().data)
        mine = int.from_bytes(digest.digest(), "little", signed=True)
        if {mine} == {each for [each] in self._numbers(mine)}:  # true on all ranks, or on none
            return
        found = self._unlike(lines) or self._first(named, raw)
        raise RuntimeError(
            f"parallelize: the ranks of a {self.axis} group got different inputs: argument "
            f"{found}; give them the same batch: choose it by mesh.dp_rank, not by mesh.rank"
        )

    def _unlike(self, lines: Sequence[str]) -> str | None:
        """The first argument with another shape, dtype or name."""
        text = "\n".join(lines).encode()
        longest = max(n for [n] in self._numbers(len(text)))
        padded = torch.frombuffer(bytearray(text.ljust(longest + 1)), dtype=torch.uint8)
        texts = [bytes(row.tolist()).decode().rstrip(" ") for row in self._gather(padded)]
        rank, mine, first = first_difference([text.split("\n") if text else [] for text in texts])
        if rank < 0:
            return None
        name = (mine if first == "nothing" else first).split(":")[0]
        return f"'{name}' on {self.axis} rank {rank}: {mine} where rank 0 has {first}"

    def _first(self, named: Sequence[tuple[str, Tensor]], raw: Sequence[Tensor]) -> str:
        """The first element that differs from rank 0's."""
        mine = len(named), 0
        for i, x in enumerate(raw):
            unequal = (self._gather(x)[0] != x).nonzero() if x.numel() else x
            if mine[0] == len(named) and unequal.numel():
                mine = i, int(unequal[0]) // named[i][1].element_size()
        i, rank, element = min((i, r, at) for r, (i, at) in enumerate(self._numbers(*mine)))
        name, x = named[i]
        index = [*map(int, np.unravel_index(element, x.shape))]
        return f"'{name}' first at index {index} on {self.axis} rank {rank}"

    def _gather(self, x: Tensor) -> Tensor:
        """[W, *x.shape]: the tensors of all ranks, on the host."""
        return self.group.gathered(x.to(self.group.device)).cpu()

    def _numbers(self, *mine: int) -> list[list[int]]:
        """Those of each rank."""
        return self._gather(torch.tensor(mine, dtype=torch.int64, device="cpu")).tolist()


def _named_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """(name of forward's parameter, tensor), also those in lists and dicts."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in by_place]
    names += [f"*{i}" for i in range(len(names), len(args))]
    given = [*zip(names, args), *sorted(kwargs.items())]
    return [
        (name + keystr(path), leaf)
        for name, value in given
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor)
    ]


# Replicas


class Held(NamedTuple):
    """Something that a rank holds."""

    what: str
    start: int  # -1: all elements
    split: str  # which part of it along tp and ep; "" where it is whole
    values: Tensor


class Difference(NamedTuple):
    """Ranks that should hold the same, grouped by what they hold, largest group first."""

    groups: list[list[int]]

    @property
    def is_clear(self) -> bool:
        """Whether more ranks agree on one content than on any other."""
        return len(self.groups[0]) > len(self.groups[1])


def checksum(x: Tensor) -> Tensor:
    """int64 [] of x's bits, on its device; see the top of this file."""
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if not x.numel():
        return total
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    n_words = -(-min(_CHUNK, raw.numel()) // 8)
    weights = torch.arange(n_words, device=x.device) * _ODD | 1
    for chunk in raw.split(_CHUNK):
        n = chunk.numel() // 8 * 8
        if n < chunk.numel() or chunk.storage_offset() % 8:
            padded = chunk.new_zeros(-(-chunk.numel() // 8) * 8)
            padded[: chunk.numel()] = chunk
            chunk = padded
        words = chunk.view(torch.int64)
        total = total * _ODD + (words * weights[: words.numel()]).sum()
    return total


@torch.no_grad()
def check_replicas(
    shards: Shards, group: Collectives | None, optimizer: Any = None, *, step: int
) -> None:
    """Raise unless replicas hold the same bits. Ranks: all.

    Args:
        group: all ranks of the mesh, None if there is one.
        optimizer: its state is compared too: at stage 0 along dp, else among equal shards.
        step: for the message.
    Raises:
        RuntimeError: names rank, parameter and step; without a majority it says that it cannot
            tell which ranks are right.
    Wire: 96 bytes per rank; if they differ 8 for each parameter and entry.
    """
    mesh = shards.mesh
    if group is None:
        return
    with contextlib.nullcontext() if shards.stage.frees_parameters else shards.gathered():
        classes: list[list[Held]] = [[] for _ in range(_CLASSES)]
        for held in _held(shards, optimizer):
            classes[2 * (held.start < 0) + bool(held.split)].append(held)
        sums = [[checksum(held.values).to(mesh.device) for held in each] for each in classes]
    zero = torch.zeros((), dtype=torch.int64, device=mesh.device)
    said = [[len(each), _key(each)] for each in classes]
    totals = [functools.reduce(lambda a, b: a * _ODD + b, each, zero) for each in sums]
    mine = torch.cat(
        [torch.tensor(said, device=mesh.device, dtype=torch.int64), torch.stack(totals)[:, None]], 1
    )
    differing: list[tuple[int, Difference]] = []
    rows = group.gathered(mine).tolist()  # [ranks, classes, 3]
    for i in range(_CLASSES):
        differing += [(i, each) for each in differences([(row[i][1], row[i][2]) for row in rows])]
    if not differing:
        return
    # All ranks know the difference now and choose the same class.
    i, difference = min(differing, key=lambda each: (not each[1].is_clear, each[0]))
    most = max(row[i][0] for row in rows)
    parts = group.gathered(torch.stack([*sums[i], *[zero] * (most - len(sums[i]))]))
    ranks = [rank for each in difference.groups for rank in each]
    first = int((parts[ranks] != parts[ranks[0]]).any(0).nonzero()[0])
    raise RuntimeError(_message(difference, classes[i][first].what, step))


def differences(everyone: Sequence[tuple[int, int]]) -> list[Difference]:
    """Where (key, sum) of the ranks differ: equal keys must have equal sums."""
    unlike = []
    for key in dict.fromkeys(key for key, _ in everyone):
        groups: dict[int, list[int]] = {}
        for rank, (theirs, total) in enumerate(everyone):
            if theirs == key:
                groups.setdefault(total, []).append(rank)
        if len(groups) > 1:
            unlike.append(Difference(sorted(groups.values(), key=len, reverse=True)))
    return unlike


def _held(shards: Shards, optimizer: Any) -> Iterator[Held]:
    """Whole parameters, pieces, then the optimizer's state of them, in launch order."""
    whole = not shards.stage.frees_parameters
    frozen = [(p, name) for p, name in shards.frozen.items()]
    for p, name in [*((p, shards.name_of(p)) for p in shards.params), *frozen]:
        if whole or p in shards.frozen:
            yield Held(f"parameter '{name}'", -1, shards.part_of(p), p)
    for p in shards.params:
        name, piece, split = shards.name_of(p), shards.piece(p), shards.part_of(p)
        start = piece.start if shards.stage.shards else -1
        if shards.stage.shards:
            yield Held(f"parameter '{name}'", start, split, piece.param)
        for entry, value in sorted(optimizer.state.get(p, {}).items()) if optimizer else ():
            if not isinstance(value, Tensor):
                value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
            yield Held(f"{entry} of parameter '{name}'", start, split, value)


def _key(held: Sequence[Held]) -> int:
    """A hash of the descriptions of what a rank holds, a signed word; slices differ."""
    lines = [f"{each.what} {each.start} {each.values.numel()} {each.split}" for each in held]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _message(difference: Difference, what: str, step: int) -> str:
    rule = "Engine.check_replicas: replicas differ"
    first, *others = difference.groups
    if difference.is_clear:
        wrong = sorted(rank for each in others for rank in each)
        return (
            f"{rule} on {_ranks(wrong)} in {what} after step {step}, where {_ranks(first)} agree; "
            "check that machine's memory and device, and resume from the last checkpoint without it"
        )
    between = " and ".join(map(_ranks, difference.groups))
    return (
        f"{rule} between {between} in {what} after step {step}, without a majority; check these "
        "machines' memory and devices, and resume from the last checkpoint"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
