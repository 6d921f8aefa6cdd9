"""What the ranks tell each other outside of a step: numbers, errors, and whether copies are alike.

[Note: replicas]
What is a copy of what follows from names and ranges, not from ranks: each says of what it holds
"parameter or entry, first element, elements, slice along tp", and ranks that say the same must have
the same bits. So one rule serves every stage, copies of shards and tp. A rank sends three words for
each of four classes; only where they differ a second round asks for every tensor.

[Note: a checksum that no single flip survives] is the sum of 64-bit words times odd weights, modulo
2**64. A flipped bit k changes a word by 2**k, the sum by 2**k times an odd number: never 0. Chunks
and tensors are put together by multiplying with an odd number, which can be undone. Weights differ
by place, so that exchanged words are seen too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.parallel.shards import Shards

_TEXT_BYTES = 2048
_CHUNK = 1 << 23  # bytes at a time
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed word
_CLASSES = 4  # whole or a piece, split along tp or not


class Summing(Protocol):
    """An engine, as far as it adds up numbers of the ranks."""

    mesh: Mesh

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Their sum over the ranks."""


def everyone(engine: Summing | None, mine: float) -> list[float]:
    """A number of every rank, on all of them, in rank order. Ranks: all."""
    if engine is None:
        return [mine]
    mesh = engine.mesh
    values = torch.zeros(mesh.world_size, dtype=torch.float64, device=mesh.device)
    values[mesh.rank] = mine
    return engine.all_reduce_scalars(values).tolist()


def broadcast_text(engine: Summing | None, text: str) -> str:
    """What rank 0 says, on every rank. Ranks: all."""
    if engine is None:
        return text
    return _texts(engine, text if engine.mesh.is_main else "").get(0, "")


def everyones_errors(engine: Summing | None, mine: str | None) -> dict[int, str]:
    """Rank -> what went wrong there, of the ranks that have something to say. Ranks: all.

    Wire: 8 bytes a rank; 16 kB more where there is an error.
    """
    if not any(everyone(engine, float(mine is not None))):
        return {}
    return {0: str(mine)} if engine is None else _texts(engine, mine or "")


def _texts(engine: Summing, mine: str) -> dict[int, str]:
    mesh = engine.mesh
    rows = torch.zeros(mesh.world_size, _TEXT_BYTES, dtype=torch.float64)
    raw = mine.encode()[:_TEXT_BYTES]
    rows[mesh.rank, : len(raw)] = torch.tensor(list(raw), dtype=torch.float64)
    sums = engine.all_reduce_scalars(rows.to(mesh.device)).to("cpu", torch.uint8).numpy()
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in sums]
    return {rank: text for rank, text in enumerate(texts) if text}


class Held(NamedTuple):
    """Something that a rank holds."""

    what: str
    start: int  # -1: all elements
    split: bool  # along tp
    values: Tensor


class Difference(NamedTuple):
    """Ranks that should have the same, by what they have, the most frequent first."""

    groups: list[list[int]]

    @property
    def is_clear(self) -> bool:
        """Whether more ranks agree on one thing than on any other."""
        return len(self.groups[0]) > len(self.groups[1])


def checksum(x: Tensor) -> Tensor:
    """int64 [] on x's device, of its bits; see [Note: a checksum that no single flip survives]."""
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
    """Raise unless the ranks hold the same bits in what they should have alike. Ranks: all.

    Args:
        group: of all ranks of the mesh, None if there is one.
        optimizer: whose state is compared too: at stage 0 along dp, else among copies of a shard.
        step: for the message.
    Raises:
        RuntimeError: names rank, parameter and step; with as many copies of one kind as of the
            other it says that it cannot tell which are right.
    Wire: 96 bytes a rank; where they differ 8 for each parameter and entry.
    """
    mesh = shards.mesh
    if group is None:
        return
    with contextlib.nullcontext() if shards.stage.frees_parameters else shards.gathered():
        classes: list[list[Held]] = [[] for _ in range(_CLASSES)]
        for held in _held(shards, optimizer):
            classes[2 * (held.start < 0) + held.split].append(held)
        sums = [[checksum(held.values).to(mesh.device) for held in each] for each in classes]
    zero = torch.zeros((), dtype=torch.int64, device=mesh.device)
    said = [[len(each), _key(each, mesh.tp_rank)] for each in classes]
    totals = [functools.reduce(lambda a, b: a * _ODD + b, each, zero) for each in sums]
    mine = torch.cat([torch.tensor(said, device=mesh.device), torch.stack(totals)[:, None]], 1)
    found: list[tuple[int, Difference]] = []
    rows = _gathered(group, mine).tolist()  # [ranks, classes, 3]
    for i in range(_CLASSES):
        found += [(i, each) for each in differences([(row[i][1], row[i][2]) for row in rows])]
    if not found:
        return
    # Every rank knows it now, and asks for the same class.
    i, difference = min(found, key=lambda each: (not each[1].is_clear, each[0]))
    most = max(row[i][0] for row in rows)
    parts = _gathered(group, torch.stack([*sums[i], *[zero] * (most - len(sums[i]))]))
    ranks = [rank for each in difference.groups for rank in each]
    first = int((parts[ranks] != parts[ranks[0]]).any(0).nonzero()[0])
    raise RuntimeError(_message(difference, classes[i][first].what, step))


def differences(everyone: Sequence[tuple[int, int]]) -> list[Difference]:
    """Where (key, sum) of the ranks differ: ranks with the same key must have the same sum."""
    found = []
    for key in dict.fromkeys(key for key, _ in everyone):
        groups: dict[int, list[int]] = {}
        for rank, (theirs, total) in enumerate(everyone):
            if theirs == key:
                groups.setdefault(total, []).append(rank)
        if len(groups) > 1:
            found.append(Difference(sorted(groups.values(), key=len, reverse=True)))
    return found


def _held(shards: Shards, optimizer: Any) -> Iterator[Held]:
    """Wholes and pieces of parameters, then what the optimizer knows of them, in launch order."""
    whole = not shards.stage.frees_parameters
    frozen = [(p, name) for p, name in shards.frozen.items()]
    for p, name in [*((p, shards.name_of(p)) for p in shards.params), *frozen]:
        if whole or p in shards.frozen:
            yield Held(f"parameter '{name}'", -1, shards.is_split(p), p)
    for p in shards.params:
        name, piece, split = shards.name_of(p), shards.piece(p), shards.is_split(p)
        start = piece.start if shards.stage.shards else -1
        if shards.stage.shards:
            yield Held(f"parameter '{name}'", start, split, piece.param)
        for entry, value in sorted(optimizer.state.get(p, {}).items()) if optimizer else ():
            if not isinstance(value, Tensor):
                value = torch.tensor(float(value), dtype=torch.float64)
            yield Held(f"{entry} of parameter '{name}'", start, split, value)


def _key(held: Sequence[Held], tp_rank: int) -> int:
    """A hash of what a rank says it holds, a signed word; slices along tp are told apart."""
    lines = [
        f"{each.what} {each.start} {each.values.numel()} {tp_rank if each.split else -1}"
        for each in held
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _gathered(group: Collectives, mine: Tensor) -> Tensor:
    """[ranks, *mine.shape]"""
    rows = mine.new_empty((group.world_size, *mine.shape))
    group.all_gather(rows.view(-1), mine.contiguous().view(-1))
    return rows


def _message(difference: Difference, what: str, step: int) -> str:
    rule = "Engine.check_replicas: expected the same bits on every rank, got a difference"
    first, *others = difference.groups
    if difference.is_clear:
        wrong = sorted(rank for each in others for rank in each)
        return (
            f"{rule} on {_ranks(wrong)} in {what} after step {step}, where {_ranks(first)} agree; "
            "something changed it there only: check that machine's memory and device, and go on "
            "from the last checkpoint without it"
        )
    between = " and ".join(map(_ranks, difference.groups))
    return (
        f"{rule} between {between} in {what} after step {step}, and no majority that tells which "
        "is right; check these machines' memory and devices, and go on from the last checkpoint"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
