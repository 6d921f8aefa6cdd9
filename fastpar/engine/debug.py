"""Checks that make mistakes of a training step visible: replicas and inputs are compared, freed
memory is poisoned.

How replicas are found: by names and ranges, not by ranks. Each rank describes what it holds as
"parameter or entry, first element, elements, slice along tp"; ranks with the same description must
hold the same bits. One rule serves every stage, shards and tp. A rank sends two words for each.

No single flipped bit keeps the checksum: the checksum is the sum of 64-bit words times odd weights,
modulo 2**64. A flipped bit k changes a word by 2**k and the sum by 2**k times an odd number: never
0. Chunks and tensors are combined by multiplying with an odd number, which is invertible. Weights
differ by position, so exchanged words are noticed too.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastpar.comm.collectives import Collectives, capturing
from fastpar.engine.absent import Hook
from fastpar.engine.shards import Shards

_CHUNK = 1 << 23  # bytes of a checksum at a time
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed word
_NAME = 200  # bytes of a name in a message
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
        always: compare every forward, not only the first ones.
        model: compare before its forwards, as long as this object is referenced; None: in look().
    """

    def __init__(
        self, group: Collectives, axis: str, *, always: bool, model: nn.Module | None
    ) -> None:
        self.group, self.axis = group, axis
        self._handle: Any = None
        self._left = math.inf if always else _FIRST
        if model is not None:
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

        Wire: 8 bytes per rank; if they differ 8 for each input.
        """
        named = _named_tensors(model, args, kwargs)
        words = [_word(f"{name} {x.dtype} {list(x.shape)} {int(checksum(x))}") for name, x in named]
        if len({each for [each] in _numbers(self.group, [_word(str(words))])}) == 1:
            return
        columns = enumerate(zip(*_numbers(self.group, words, several=True)))
        i, rank = next((i, r) for i, c in columns for r, word in enumerate(c) if word != c[0])
        name = f"argument '{named[i][0]}'" if i < len(named) else "a further argument"
        raise RuntimeError(
            f"parallelize: the ranks of a {self.axis} group got different inputs: {name} on "
            f"{self.axis} rank {rank} is not that of rank 0; give them the same batch: choose it "
            "by mesh.dp_rank, not by mesh.rank"
        )


def _numbers(group: Collectives, mine: Sequence[int], *, several: bool = False) -> list[list[int]]:
    """The numbers of each rank; several: of ranks with fewer than others, zeros follow."""
    if several:
        most = max(n for [n] in _numbers(group, [len(mine)]))
        mine = [*mine, *[0] * (most - len(mine))]
    given = torch.tensor(mine, dtype=torch.int64, device=group.device)
    return group.gathered(given).tolist()


def _word(text: str) -> int:
    """A hash of a text, a signed 64-bit word."""
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


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
    Wire: 16 bytes per rank for each parameter and entry.
    """
    mesh = shards.mesh
    if group is None:
        return
    with contextlib.nullcontext() if shards.stage.frees_parameters else shards.gathered():
        held = [*_held(shards, optimizer)]
        sums = torch.stack([checksum(each.values).to(mesh.device) for each in held]).tolist()
    keys = [_word(f"{x.what} {x.start} {x.values.numel()} {x.split}") for x in held]
    found: dict[int, dict[int, list[int]]] = {}  # key -> checksum -> ranks
    pairs = [number for pair in zip(keys, sums) for number in pair]
    for rank, theirs in enumerate(_numbers(group, pairs, several=True)):
        for key, total in zip(theirs[::2], theirs[1::2]):
            found.setdefault(key, {}).setdefault(total, []).append(rank)
    differing = [
        (key, sorted(by.values(), key=len, reverse=True))
        for key, by in found.items()
        if len(by) > 1
    ]
    if differing:  # on all ranks, which choose the same
        key, groups = min(differing, key=lambda each: len(each[1][0]) == len(each[1][1]))
        name = held[keys.index(key)].what if key in keys else ""  # only its ranks know it
        text = [*name.encode()[:_NAME].ljust(_NAME)]
        letters = group.gathered(torch.tensor(text, dtype=torch.uint8, device=mesh.device))
        what = bytes(letters[groups[0][0]].tolist()).decode(errors="ignore").rstrip()
        raise RuntimeError(_message(groups, what, step))


def _held(shards: Shards, optimizer: Any) -> Iterator[Held]:
    """Whole parameters, pieces, then the optimizer's state of them, in launch order."""
    whole = {} if shards.stage.frees_parameters else {p: shards.name_of(p) for p in shards.params}
    for p, name in (whole | shards.frozen).items():
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


def _message(groups: Sequence[Sequence[int]], what: str, step: int) -> str:
    """groups: ranks that hold the same, the largest first."""
    rule, first, others = "Engine.check_replicas: replicas differ", groups[0], groups[1:]
    if len(first) > len(others[0]):
        wrong = sorted(rank for each in others for rank in each)
        return (
            f"{rule} on {_ranks(wrong)} in {what} after step {step}, where {_ranks(first)} agree; "
            "check that machine's memory and device, and resume from the last checkpoint without it"
        )
    return (
        f"{rule} between {' and '.join(map(_ranks, groups))} in {what} after step {step}, without "
        "a majority; check these machines' memory and devices, and resume from the last checkpoint"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
