"""What makes mistakes of a training step loud: replicas and inputs compared, freed memory poisoned,
and collectives that start late.

[Note: late collectives] A buffer that is written before its collective has read it, or read before
the collective has written it, mostly goes unseen: the collective is under way at once and wins the
race. DelayedCollectives lets it lose: each operation starts after a random delay, in a thread (on a
GPU a stream) of its own, in the order of the calls. The same seed gives the same delays.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import FutureHandle, Handle, StreamHandle, TaskThread, run_task
from fastpar.parallel.units import Hook

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
    Raises:
        ValueError: delay_ms below 0.
    """

    check_replicas: bool = False
    poison: bool = False
    delay_ms: float = 0.0
    seed: int = 0
    check_inputs: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms < float("inf"):
            raise ValueError(
                f"Debug: expected 0 <= delay_ms, got delay_ms={self.delay_ms}; use a few ms"
            )

    def delayed(self, collectives: Collectives) -> Collectives:
        """The collectives, late if delay_ms asks for it. Ranks: each for itself."""
        if not self.delay_ms:
            return collectives
        return DelayedCollectives(collectives, self.delay_ms, self.seed)


class DelayedCollectives(Collectives):
    """Other collectives whose operations start late; see the note.

    Args:
        inner: carries the operations, and is used by nobody else.
        delay_ms: the longest delay; each is drawn from seed and rank.
    """

    def __init__(self, inner: Collectives, delay_ms: float, seed: int = 0) -> None:
        self.inner, self.delay_ms = inner, delay_ms
        self.rank, self.world_size, self.device = inner.rank, inner.world_size, inner.device
        self.transport, self.in_caller = inner.transport, inner.in_caller
        self.why = f"{inner.why}; delayed by up to {delay_ms} ms"
        self._random = random.Random(f"{seed} {inner.rank}")
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._thread = None if on_gpu or self.in_caller else TaskThread()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.empty(numel, dtype)

    def barrier(self, *, tag: int = 0) -> None:
        self._submit("barrier", lambda: self.inner.barrier(tag=tag)).wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self.inner.close()

    def _submit(self, op: str, call: Callable[[], Any], *of: Tensor) -> Handle:
        delay_ms = self._random.uniform(0.0, self.delay_ms)
        if self._stream is not None:

            def on_stream() -> None:
                torch.cuda._sleep(int(delay_ms * _CYCLES_PER_MS))
                call()

            return StreamHandle(self._stream, on_stream, of)

        inference = torch.is_inference_mode_enabled()  # a thread has a mode of its own

        def late() -> None:
            time.sleep(delay_ms / 1e3)
            with torch.inference_mode(inference):
                call()

        future: Future = Future()
        task = (future, late, (), of)
        self._thread.put(task) if self._thread is not None else run_task(task)
        return FutureHandle(op, future, self)

    def _all_reduce(self, x: Tensor, mean: bool, tag: int) -> Handle:
        return self._submit("all_reduce", lambda: self.inner.all_reduce(x, mean=mean, tag=tag), x)

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int) -> Handle:
        def call() -> None:
            self.inner.reduce_scatter(out, x, mean=mean, tag=tag)

        return self._submit("reduce_scatter", call, out, x)

    def _all_gather(self, out: Tensor, x: Tensor, tag: int) -> Handle:
        return self._submit("all_gather", lambda: self.inner.all_gather(out, x, tag=tag), out, x)

    def _broadcast(self, x: Tensor, src: int, tag: int) -> Handle:
        return self._submit("broadcast", lambda: self.inner.broadcast(x, src, tag=tag), x)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], tag: int
    ) -> Handle:
        def call() -> None:
            self.inner.all_to_all(out, x, out_sizes, x_sizes, tag=tag)

        return self._submit("all_to_all", call, out, x)

    def _send(self, x: Tensor, dst: int, tag: int) -> Handle:
        return self._submit("send", lambda: self.inner.send(x, dst, tag=tag), x)

    def _recv(self, out: Tensor, src: int, tag: int) -> Handle:
        return self._submit("recv", lambda: self.inner.recv(out, src, tag=tag), out)


class InputCheck:
    """Compares what the ranks of a tp group give to their parts of one model.

    Args:
        group: of these ranks.
    """

    def __init__(self, group: Collectives) -> None:
        self.group = group

    def attach(self, model: nn.Module) -> None:
        """From now on before each forward, as long as somebody keeps this object."""
        hook = Hook(weakref.ref(self), "compare")
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
        mine = torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)])
        if bool((self._gather(mine) == mine).all()):  # so it is on all ranks, or on none
            return
        found = self._unlike(lines) or self._first(named, raw)
        raise RuntimeError(
            "parallelize: expected the same inputs on all ranks of a tp group, got a difference in "
            f"argument {found}; give them the same batch: choose it by mesh.dp_rank, not by "
            "mesh.rank"
        )

    def _unlike(self, lines: Sequence[str]) -> str | None:
        """The first argument of another shape, dtype or name."""
        text = torch.frombuffer(bytearray("\n".join(lines).encode() or b" "), dtype=torch.uint8)
        size = int(self._gather(torch.tensor([text.numel()])).max())
        padded = torch.full((size,), ord(" "), dtype=torch.uint8)
        padded[: text.numel()] = text
        rows = self._gather(padded).view(-1, size)
        everyone = [bytes(row.tolist()).decode().rstrip(" ").split("\n") for row in rows]
        for rank, theirs in enumerate(everyone):
            for i in range(max(len(theirs), len(everyone[0]))):
                a, b = (x[i] if i < len(x) else "" for x in (theirs, everyone[0]))
                if a != b:
                    name = (b or a).split(":")[0]
                    return (
                        f"'{name}' on tp rank {rank}: {a or 'nothing'} where rank 0 has "
                        f"{b or 'nothing'}"
                    )
        return None

    def _first(self, named: Sequence[tuple[str, Tensor]], raw: Sequence[Tensor]) -> str:
        """The first element that differs from that of rank 0."""
        none = len(named)
        mine = torch.tensor([none, 0])
        for i, x in enumerate(raw):
            theirs = self._gather(x).view(self.group.world_size, -1)[0] if x.numel() else x
            unequal = (theirs != x).nonzero()
            if mine[0] == none and unequal.numel():
                mine = torch.tensor([i, int(unequal[0]) // named[i][1].element_size()])
        i, rank, element = min(
            (i, rank, element)
            for rank, (i, element) in enumerate(self._gather(mine).view(-1, 2).tolist())
        )
        name, x = named[i]
        index = [int(n) for n in torch.unravel_index(torch.tensor(element), x.shape)]
        return f"'{name}' first at index {index} on tp rank {rank}"

    def _gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, [W * S], on the host."""
        x = x.to(self.group.device)
        out = x.new_empty(self.group.world_size * x.numel())
        self.group.all_gather(out, x)
        return out.cpu()


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
