"""What makes mistakes of a training step loud: replicas and inputs compared, freed memory poisoned,
and collectives that start late.

[Note: late collectives] A buffer that is written before its collective has read it, or read before
the collective has written it, mostly goes unseen: the collective is under way at once and wins the
race. Delays let it lose: each operation starts after a random delay, in a thread (on a GPU a
stream) of its own, in the order of the calls. The same seed gives the same delays.

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
import inspect
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastpar.comm.collectives import (
    Collectives,
    FutureHandle,
    Handle,
    StreamHandle,
    TaskThread,
    run_task,
)
from fastpar.comm.mesh import first_difference
from fastpar.engine.absent import Hook
from fastpar.engine.shards import Shards

_CHUNK = 1 << 23  # bytes of a checksum at a time
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed word
_CLASSES = 4  # whole or a piece, split along tp or not
_CYCLES_PER_MS = 1_500_000  # of a GPU, about


@dataclass(frozen=True)
class Debug:
    """Checks of parallelize(debug=...); each costs time.

    Args:
        check_replicas: after each step compare every parameter over the ranks, bit for bit.
        poison: fill buffers with NaN before they are freed.
        delay_ms: every collective starts after a random delay of up to this; 0: at once.
        seed: of the delays.
        check_inputs: before each forward compare the model's tensor arguments over the ranks of a
            tp group, which must have the same.
        bus_gb_s: offload without a GPU, over a stand-in for its bus of this speed in each direction
            (see comm/host.py); 0: none.
        collectives: makes the collectives of (process group, role) instead of the transport.
    Raises:
        ValueError: delay_ms or bus_gb_s below 0.
    """

    check_replicas: bool = False
    poison: bool = False
    delay_ms: float = 0.0
    seed: int = 0
    check_inputs: bool = False
    bus_gb_s: float = 0.0
    collectives: Callable[[Any, str], Collectives] | None = None

    def __post_init__(self) -> None:
        for name, value in (("delay_ms", self.delay_ms), ("bus_gb_s", self.bus_gb_s)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"Debug: expected 0 <= {name}, got {name}={value}; 0 is off")

    def delayed(self, collectives: Collectives) -> Collectives:
        """The collectives, late from now on if delay_ms asks for it. Ranks: each for itself."""
        if self.delay_ms:
            Delays(collectives, self.delay_ms, self.seed)
        return collectives


class Delays:
    """An observer that begins every operation of one group late; see the note.

    Args:
        group: whose operations; nobody else may use what carries them.
        delay_ms: the longest delay; each is drawn from seed and rank.
    """

    def __init__(self, group: Collectives, delay_ms: float, seed: int = 0) -> None:
        self._longest_ms, self._random = delay_ms, random.Random(f"{seed} {group.rank}")
        on_gpu = group.device.type == "cuda"
        self._stream = torch.cuda.Stream(group.device) if on_gpu else None
        self._thread = None if on_gpu or group.in_caller else TaskThread()
        group.why += f"; delayed by up to {delay_ms} ms"
        group.observers += (self,)

    def __call__(
        self, group: Collectives, op: str, n_bytes: int, begin: Callable[[], Handle]
    ) -> Handle:
        delay_ms = self._random.uniform(0.0, self._longest_ms)
        if self._stream is not None:

            def on_stream() -> None:
                torch.cuda._sleep(int(delay_ms * _CYCLES_PER_MS))
                begin().wait()

            return StreamHandle(self._stream, on_stream, (begin,))  # which has the tensors

        inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own

        def late() -> None:
            time.sleep(delay_ms / 1e3)
            with torch.inference_mode(inference):
                begin().wait()

        future: Future = Future()
        task = (future, late, (), ())
        self._thread.put(task) if self._thread is not None else run_task(task)
        return FutureHandle(op, future, group)


class InputCheck:
    """Compares what the ranks of a tp or cp group give to their parts of one model.

    Args:
        group: of these ranks; axis: along which they lie.
    """

    def __init__(self, group: Collectives, axis: str = "tp") -> None:
        self.group, self.axis = group, axis

    @classmethod
    def attach_all(cls, engine: Any, model: nn.Module, groups: Mapping[str, Collectives]) -> None:
        """One for each axis whose ranks are given the same inputs, where they are asked for."""
        for axis, group in groups.items() if engine.debug.check_inputs else ():
            engine.input_checks.append(cls(group, axis))
            engine.input_checks[-1].attach(model)

    def attach(self, model: nn.Module) -> None:
        """From now on before each forward, as long as somebody keeps this object."""
        hook = Hook(weakref.ref(self), InputCheck.compare)
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    @torch.no_grad()
    def compare(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise, on every rank of the group alike, unless all have the same. Ranks: all.

        Wire: 8 bytes a rank; the tensors only when they differ.
        """
        named = _named_tensors(model, args, kwargs)
        lines = [f"{name}: {x.dtype} {list(x.shape)}" for name, x in named]
        raw = [x.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, x in named]
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8)
        for x in raw:
            digest.update(x.numpy().data)
        mine = torch.tensor(
            [int.from_bytes(digest.digest(), "little", signed=True)],
            dtype=torch.int64,
            device="cpu",
        )
        if bool((self._gather(mine) == mine).all()):  # so it is on all ranks, or on none
            return
        found = self._unlike(lines) or self._first(named, raw)
        raise RuntimeError(
            f"parallelize: expected the same inputs on all ranks of a {self.axis} group, got a "
            f"difference in argument {found}; give them the same batch: choose it by mesh.dp_rank, "
            "not by mesh.rank"
        )

    def _unlike(self, lines: Sequence[str]) -> str | None:
        """The first argument of another shape, dtype or name."""
        text = torch.frombuffer(bytearray("\n".join(lines).encode() or b" "), dtype=torch.uint8)
        size = int(
            self._gather(torch.tensor([text.numel()], dtype=torch.int64, device="cpu")).max()
        )
        padded = torch.full((size,), ord(" "), dtype=torch.uint8, device="cpu")
        padded[: text.numel()] = text
        rows = self._gather(padded)
        texts = [bytes(row.tolist()).decode().rstrip(" ") for row in rows]
        rank, mine, first = first_difference([text.split("\n") if text else [] for text in texts])
        if rank < 0:
            return None
        name = (mine if first == "nothing" else first).split(":")[0]
        return f"'{name}' on {self.axis} rank {rank}: {mine} where rank 0 has {first}"

    def _first(self, named: Sequence[tuple[str, Tensor]], raw: Sequence[Tensor]) -> str:
        """The first element that differs from that of rank 0."""
        none = len(named)
        mine = torch.tensor([none, 0], dtype=torch.int64, device="cpu")
        for i, x in enumerate(raw):
            theirs = self._gather(x)[0] if x.numel() else x
            unequal = (theirs != x).nonzero()
            if mine[0] == none and unequal.numel():
                mine = torch.tensor(
                    [i, int(unequal[0]) // named[i][1].element_size()],
                    dtype=torch.int64,
                    device="cpu",
                )
        i, rank, element = min(
            (i, rank, element) for rank, (i, element) in enumerate(self._gather(mine).tolist())
        )
        name, x = named[i]
        index = [
            int(n)
            for n in torch.unravel_index(
                torch.tensor(element, dtype=torch.int64, device="cpu"), x.shape
            )
        ]
        return f"'{name}' first at index {index} on {self.axis} rank {rank}"

    def _gather(self, x: Tensor) -> Tensor:
        """[W, *x.shape]: the tensors of all ranks, on the host."""
        return self.group.gathered(x.to(self.group.device)).cpu()


def _named_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """Also those in lists and dicts; by the names of forward's parameters."""
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
            classes[2 * (held.start < 0) + bool(held.split)].append(held)
        sums = [[checksum(held.values).to(mesh.device) for held in each] for each in classes]
    zero = torch.zeros((), dtype=torch.int64, device=mesh.device)
    said = [[len(each), _key(each)] for each in classes]
    totals = [functools.reduce(lambda a, b: a * _ODD + b, each, zero) for each in sums]
    mine = torch.cat(
        [torch.tensor(said, device=mesh.device, dtype=torch.int64), torch.stack(totals)[:, None]], 1
    )
    found: list[tuple[int, Difference]] = []
    rows = group.gathered(mine).tolist()  # [ranks, classes, 3]
    for i in range(_CLASSES):
        found += [(i, each) for each in differences([(row[i][1], row[i][2]) for row in rows])]
    if not found:
        return
    # Every rank knows it now, and asks for the same class.
    i, difference = min(found, key=lambda each: (not each[1].is_clear, each[0]))
    most = max(row[i][0] for row in rows)
    parts = group.gathered(torch.stack([*sums[i], *[zero] * (most - len(sums[i]))]))
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
    """A hash of what a rank says it holds, a signed word; slices are told apart."""
    lines = [f"{each.what} {each.start} {each.values.numel()} {each.split}" for each in held]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


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
